"""The command that the doctor prints starts a server, and what that builds is what the doctor said."""

from __future__ import annotations

from serving import NEEDLE_MODEL

REQUESTS, CONTEXT = 3, 4096


def test_the_command_builds_what_was_planned(ask, serve):
    asked = ("--requests", REQUESTS, "--context-length", CONTEXT, "--freekv-budget", 512, "--freekv-canary", "full", "--page-size", 16)
    asked += "--max-total-tokens", REQUESTS * CONTEXT
    plan = ask(None, "--model-path", NEEDLE_MODEL, "--device", "cpu", "--dtype", "float32", "--host-memory", 3, *asked)
    assert plan.code == 0
    words = plan.report["command"][3:]
    with serve(dict(zip(words[::2], words[1::2])) | {"--freekv-resident-memory": None}) as (server,):
        info = server.get("/server_info")
    built, tokens = info["freekv"], REQUESTS * CONTEXT + 16  # and SGLang's padding page
    tiers = {name: (tier["per_token"], tier["all_requests"]) for name, tier in plan.tiers.items()}
    assert (info["max_total_num_tokens"], info["max_running_requests"], built["device_rows"]) == (REQUESTS * CONTEXT, REQUESTS, REQUESTS)
    assert built["host_bytes"] == tokens * tiers["host pool"][0]
    assert built["digest_bytes"] + built["canary_bytes"] == tokens * tiers["digests"][0]
    assert built["dense_bytes"] == tokens * tiers["dense layers"][0]
    assert built["staging_bytes"] == tiers["staging of prefixes"][1]
    frames, figures = plan.tiers["frames"], plan.found["frames"].figures
    assert (frames["per_token"], built["frame_tokens"]) == (tiers["host pool"][0], figures["frames"] * 16)
    assert figures["frames"] * 16 == (REQUESTS + 1) * 512 + REQUESTS * CONTEXT  # slots, and all pages of the host pool
    assert built["longest_requests"] == figures["longest_requests"] == REQUESTS
    tables = plan.tiers["device cache"]["per_request"] - figures["promised"] * frames["has"] / figures["frames"]
    counted = frames["has"] + (REQUESTS + 1) * tables
    assert built["device_cache_bytes"] < counted < 1.05 * built["device_cache_bytes"]  # scores and lists of misses besides
    assert tiers["host pool"][1] == REQUESTS * CONTEXT * tiers["host pool"][0]
