"""The doctor's plans: figures against sums by hand and the server's own sizing, remedies that hold, refusals by the server's rules."""

from __future__ import annotations

import argparse
import json
import re
import shlex

import pytest
import torch
from sglang.srt.server_args import ServerArgs
from transformers import AutoConfig

from made_up import CONFIG, LLAMA, FakeGpu, NoGpu, model_file
from sglang_freekv.config import GIB, FreeKVConfig
from sglang_freekv.launch import doctor
from sglang_freekv.launch.cards import CARDS, card_of
from sglang_freekv.launch.footprint import Footprint
from sglang_freekv.layers import LayerTable
from sglang_freekv.memory_pool.kv_format import KVFormat
from sglang_freekv.memory_pool.sizing import KVShape, Sizing
from sglang_freekv.scheduler_patch import arguments

TOKEN = 2 * 8 * 128 * 2  # keys and values of one layer of Llama-3.1-8B: 4096 bytes
LLAMA_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
QUESTION = ("--tp", 4, "--requests", 8, "--context-length", "128Ki", "--gpu", "H100", "--host-memory", "1.8TiB")
FAST = ("--model-path", LLAMA, "--freekv-preset", "fast")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}

REFUSED = {  # a config that differs from Llama's, and a word of the reason
    "latent attention": ({"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}, "MLA"),
    "mamba": ({"architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1"}, "Mamba"),
    "natively sparse": ({"architectures": ["MiniMaxM3SparseForCausalLM"]}, "natively sparse"),
    "encoder-decoder": ({"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper"}, "cross attention"),
    "local attention": ({"attention_chunk_size": 8192}, "chunks of 8192"),
    "sliding window": ({"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 4096}, "window of 4096"),
    "window and full": (
        {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "sliding_window": 128, "rope_scaling": None}, "window",
    ),
    "soft-capping": ({"attn_logit_softcapping": 50.0}, "caps attention logits"),
    "asymmetric": ({"v_head_dim": 64}, "differ in width (128 and 64)"),
    "encoder": ({"architectures": ["BertModel"], "model_type": "bert", "rope_scaling": None}, "does not generate"),
}  # fmt: skip


# ---- what requests cost


def test_llama_by_hand(make_machine, ask):
    answer = ask(make_machine(FakeGpu()), "--model-path", LLAMA, "--context-length", 32768, "--requests", 3, "--freekv-preset", "fast")
    tiers, weights = answer.tiers, answer.found["weights"].figures
    assert (weights["parameters"], weights["bytes"]) == (8_030_261_248, 2 * 8_030_261_248)  # as published
    assert (tiers["host pool"]["per_token"], tiers["host pool"]["per_request"]) == (31 * TOKEN, 32768 * 31 * TOKEN)
    assert tiers["host pool"]["all_requests"] == 3 * 4160749568
    assert tiers["digests"]["per_request"] == 1024 * 31 * TOKEN  # a digest is as large as keys and values of one token
    assert tiers["dense layers"]["per_request"] == 32768 * TOKEN
    assert tiers["staging of prefixes"]["all_requests"] == 2 * 32768 * TOKEN
    frame = 31 * 32 * TOKEN + 24
    row = 66 * frame + 31 * (4 * 8 * (64 + 64) + 12 * 8 * 64 + 32 * 128 * 2) + 4 * 1024 * 32 + 8 * 8 * (1024 + 64) + 4 * 32768
    assert (tiers["device cache"]["per_request"], tiers["device cache"]["all_requests"]) == (row, 4 * row - 2 * frame)
    device = 2 * 8_030_261_248 + 3 * (1024 * 31 + 32768) * TOKEN + 4 * row - 2 * frame + 2 * 32768 * TOKEN
    assert tiers["device, all of these"]["all_requests"] == device and tiers["device, all of these"]["has"] == 80 * GIB * 0.85
    assert answer.found["recall"].figures["bytes_per_token"] == pytest.approx(31 * 8 * 32 * 16384 * 0.21)  # kv heads, pages of 16 KiB each
    assert answer.found["decode rate"].figures["tokens_per_s"] == pytest.approx(50e9 / (31 * 1024 * TOKEN * 0.21))


def test_the_default_by_hand(make_machine, ask):
    answer = ask(make_machine(FakeGpu()), "--model-path", LLAMA, "--context-length", 32768, "--requests", 3)
    assert answer.found["preset"].figures["preset"] == "accurate" and "--page-size" not in answer.report["command"]
    assert answer.tiers["digests"]["per_token"] == 31 * TOKEN * (1 / 8 + 1 / 16)  # a box for 8 tokens, and two bits in the place of 32
    assert answer.tiers["digests"]["per_token"] + answer.tiers["dense layers"]["per_token"] == 27.25 * 1024
    recalled = answer.found["recall"].figures
    assert recalled == {"bytes_per_token": pytest.approx(31 * (2048 - 16 - 32) * TOKEN * 0.1), "awaited": 0.48, "missed": 0.1}
    others = (("--page-size", 16), ("--freekv-hysteresis", 0), ("--freekv-tau", 0.9), ("--freekv-digest", "cuboid-mean"))
    for other in others:  # were not measured together with the rest
        figures = ask(None, "--model-path", LLAMA, "--gpu", "H100", "--host-memory", 512, *other).found["recall"].figures
        assert (figures["awaited"], figures["missed"]) == (0.13, 0.21)


def test_codes_by_hand(make_machine, ask):
    """A key or value of a kv head has 128 codes and a scale of two bytes. Dense layers and digests stay as they are."""
    flags = ("--model-path", LLAMA, "--context-length", 32768, "--requests", 3, "--freekv-preset", "fast")
    plain, coded = (ask(make_machine(FakeGpu()), *flags, *more) for more in ((), ("--freekv-kv-dtype", "int8")))
    token, tiers = 2 * 8 * (128 + 2), coded.tiers
    assert token / TOKEN == 0.5078125
    assert (tiers["host pool"]["per_token"], tiers["host pool"]["per_request"]) == (31 * token, 32768 * 31 * token)
    assert tiers["frames"]["per_token"] == 31 * token and tiers["frames"]["has"] % (31 * 32 * token + 24) == 0
    for name in ("digests", "dense layers", "weights"):
        assert tiers[name] == plain.tiers[name]
    assert tiers["staging of prefixes"]["all_requests"] == 2 * 32768 * token + 32768 * TOKEN  # two buffers of codes, a scratch of numbers
    saved = 66 * 31 * 32 * (TOKEN - token)  # in the frames that a request is promised
    assert plain.tiers["device cache"]["per_request"] - tiers["device cache"]["per_request"] == saved
    assert coded.found["recall"].figures["bytes_per_token"] == pytest.approx(31 * 1024 * token * 0.21)
    rates = plain.found["decode rate"].figures, coded.found["decode rate"].figures
    assert rates[0]["coded_tokens_per_s"] == rates[1]["tokens_per_s"] == pytest.approx(rates[0]["tokens_per_s"] * TOKEN / token)
    assert "coded_tokens_per_s" not in rates[1] and "--freekv-kv-dtype" not in coded.found["decode rate"].value
    assert coded.flag("--freekv-kv-dtype") == "int8" and "bfloat16 with retrieved KV in int8, " in coded.found["model"].value


@pytest.mark.parametrize("gpu, served", [("A100", False), ("RTX 3090", False), ("L4", True), ("H200", True), ("80", True)])
def test_e4m3_asks_for_the_gpu_of_the_plan(ask, monkeypatch, gpu, served):
    """Not for this machine's, which is another here."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: (8, 9) if not served else (8, 0))
    question = (None, "--model-path", LLAMA, "--gpu", gpu, "--host-memory", 512, "--kv-cache-dtype")
    said = ask(*question, "fp8_e4m3")
    assert ("--kv-cache-dtype fp8_e4m3: expected a GPU of compute capability 8.9" in said.err) == (not served) == (said.code == 2)
    assert ask(*question, "fp8_e5m2").code != 2


@pytest.mark.parametrize("gpu, served", [("L4", False), ("H100", True)])
def test_pages_divide_the_chunk_that_the_gpu_gets(ask, gpu, served):
    """SGLang's default chunk is 4,096 tokens on the first, and 8,192 on the second."""
    pages = ("--page-size", 8192, "--freekv-budget", 40960, "--freekv-sink", 8192, "--freekv-window", 16384, "--freekv-preset", "fast")
    said = ask(None, "--model-path", LLAMA, "--gpu", gpu, "--host-memory", 512, *pages)
    assert ("--chunked-prefill-size 4096: expected a multiple of --page-size 8192" in said.err) == (not served) == (said.code == 2)


def test_floats_of_8_bits_by_hand(make_machine, ask):
    """By SGLang's own flag. They have no scales, and dense layers have them, too."""
    flags = ("--model-path", LLAMA, "--context-length", 32768, "--requests", 3, "--freekv-preset", "fast")
    plain, floats = (ask(make_machine(FakeGpu()), *flags, *more) for more in ((), ("--kv-cache-dtype", "fp8_e4m3")))
    token, tiers = 2 * 8 * 128, floats.tiers
    assert tiers["host pool"]["per_token"] == 31 * token and tiers["frames"]["has"] % (31 * 32 * token + 24) == 0
    assert tiers["dense layers"]["per_token"] == token == plain.tiers["dense layers"]["per_token"] / 2
    assert tiers["digests"] == plain.tiers["digests"]
    assert tiers["staging of prefixes"]["all_requests"] == 2 * 32768 * token + 32768 * TOKEN
    assert floats.found["recall"].figures["bytes_per_token"] == pytest.approx(31 * 1024 * token * 0.21)
    assert floats.flag("--kv-cache-dtype") == "fp8_e4m3" and "bfloat16 with KV in fp8_e4m3, " in floats.found["model"].value
    assert "--freekv-kv-dtype" not in floats.found["decode rate"].value
    assert not any("fp8" in line for each in (plain, floats) for line in each.report["unchecked"])


def test_the_question_of_the_readme_is_one_command(make_machine, ask, tmp_path, monkeypatch):
    answer = ask(None, "--model-path", model_file(tmp_path, LLAMA_70B), *QUESTION)
    assert answer.code == 0 and answer.report["verdict"].startswith(
        "fits: 8 requests of 131072 tokens on 4 x H100 (79.1 GiB) with 1.80 TiB"
    )
    assert answer.tiers["host pools, 4 ranks"]["all_requests"] == 8 * 131072 * 79 * TOKEN
    assert answer.tiers["host pool a rank"]["all_requests"] == 8 * 131072 * 79 * TOKEN / 4
    parameters = 70_553_706_496  # as published
    assert answer.found["weights"].figures == {"bytes": 2 * parameters, "parameters": parameters}
    repeated = 2 * (161 * 8192) * 3  # norms, on each rank
    assert answer.tiers["devices, 4 ranks"]["all_requests"] - 4 * answer.tiers["weights a rank"]["all_requests"] > 0
    assert answer.tiers["weights a rank"]["all_requests"] == pytest.approx((2 * parameters + repeated) / 4, abs=1)
    assert (answer.flag("--tp-size"), answer.flag("--max-running-requests"), answer.flag("--context-length")) == ("4", "8", "131072")
    assert float(answer.flag("--freekv-host-memory")) * 4 < 1843
    parser = argparse.ArgumentParser()
    monkeypatch.setattr(arguments, "_typed", [])  # what a command line asks for is noted until ServerArgs is made of it
    ServerArgs.add_cli_args(parser)
    arguments.add_cli_args(None, parser)
    assert parser.parse_args(answer.report["command"][3:]).tp_size == 4


def test_kv_heads_are_repeated_where_there_are_more_ranks(ask, tmp_path):
    path = model_file(tmp_path, LLAMA_70B)
    eight, sixteen = (
        ask(None, "--model-path", path, "--tp-size", ranks, "--gpu", 80, "--requests", 1, "--context-length", 32768).tiers
        for ranks in (8, 16)
    )
    assert eight["host pool a rank"]["per_token"] == sixteen["host pool a rank"]["per_token"] == 79 * TOKEN / 8
    saved = eight["weights a rank"]["all_requests"] - sixteen["weights a rank"]["all_requests"]
    projections = 80 * 2 * 8192 * 128 * 2  # keys and values, of one head
    assert saved == pytest.approx((2 * 70_553_706_496 - 2 * 161 * 8192) / 16 - projections / 2, abs=2)


@pytest.mark.parametrize(
    "context, budget, page, ranks", [(163840, 2048, 32, 1), (4000, 512, 16, 2), (8192, 1024, 64, 8), (32768, 512, 32, 16)]
)
def test_figures_are_those_of_sizing(ask, context, budget, page, ranks):
    flags = ("--freekv-preset", "fast", "--context-length", context, "--freekv-budget", budget, "--page-size", page)
    flags += ("--tp-size", ranks, "--gpu", 80)
    answer = ask(None, "--model-path", LLAMA, *flags, "--host-memory", 200 * ranks)
    edge = min(512, budget // 4)
    config = FreeKVConfig(budget_tokens=budget, sink_tokens=edge, window_tokens=edge, page_size=page)
    shape = KVShape(LayerTable.uniform(31, dense=1), max(1, 8 // ranks), 32 // ranks, 128, (2, 128), KVFormat.plain(torch.bfloat16))
    sizing, tokens = Sizing(config, shape, context), -(-context // page) * page
    tiers = {name.removesuffix(" a rank"): tier for name, tier in answer.tiers.items()}
    assert tiers["host pool"]["per_request"] == tokens * sizing.host_bytes_per_token
    device = tiers["digests"]["per_request"] + tiers["dense layers"]["per_request"]
    assert device == pytest.approx(tokens * sizing.device_bytes_per_token, abs=2)
    assert tiers["device cache"]["per_request"] == sizing.row_bytes
    assert tiers["staging of prefixes"]["all_requests"] == sizing.staging_bytes
    count, host_bytes = int(answer.flag("--max-running-requests")), int(float(answer.flag("--freekv-host-memory")) * GIB)
    device_bytes = int(80 * GIB * 0.85) - tiers["weights"]["all_requests"]
    fits = []
    for requests in (count, count + 1):  # the most that a server with these flags has tokens and rows for
        pool = sizing.tokens(host_bytes, device_bytes, requests)
        pool = min(pool, requests * tokens) if sizing.longest_requests(device_bytes, pool, requests) < requests else pool
        fits.append(pool >= requests * tokens and sizing.longest_requests(device_bytes, pool, requests) >= requests)
    assert fits == [True, False]


def test_the_servers_flags_change_the_sizes(ask):
    base = ("--model-path", LLAMA, "--gpu", "H100", "--host-memory", 512, "--context-length", 32768, "--requests", 2)
    base += ("--freekv-preset", "fast")
    plain = ask(None, *base).tiers
    flags = ("--page-size", 8, "--freekv-digest", "two-bit", "--freekv-sink", 16, "--freekv-window", 32, "--freekv-dense-layers", "0,5")
    fine = ask(None, *base, *flags, "--freekv-canary", "full")
    assert fine.tiers["digests"]["per_request"] == 32768 // 8 * 30 * 8 * (2 * 128 * 2 + 128 * 8 * 2 // 8 + 4)
    assert fine.tiers["dense layers"]["per_request"] == 2 * plain["dense layers"]["per_request"]
    assert shlex.join(fine.report["command"]).endswith(
        "--page-size 8 --freekv-preset fast --freekv-sink 16 --freekv-window 32 --freekv-digest two-bit --freekv-dense-layers 0,5 --freekv-canary full "
        "--mem-fraction-static 0.85"
    )
    larger = ask(None, *base, "--freekv-device-cache", 4096).tiers
    cached = 31 * 2048 * TOKEN + 31 * 4 * 8 * 64 + 64 * 24
    assert larger["device cache"]["per_request"] == plain["device cache"]["per_request"] + cached
    wide = ask(None, *base, "--dtype", "float32")
    assert wide.tiers["host pool"]["per_request"] == 2 * plain["host pool"]["per_request"]
    assert ask(None, *base, "--mem-fraction-static", 0.5).tiers["device, all of these"]["has"] == pytest.approx(79.1 * GIB * 0.5)
    assert ask(None, *base, "--max-total-tokens", 65536).flag("--max-total-tokens") == "65536"


def test_yarn_makes_the_context_longer(ask, tmp_path):
    config = CONFIG | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "max_position_embeddings": 32768, "rope_scaling": None}
    flags = ("--model-path", model_file(tmp_path, config), "--gpu", 80, "--context-length", 131072)
    assert "expected at most the model's 32768" in ask(None, *flags).err
    longer = json.dumps({"rope_scaling": YARN, "max_position_embeddings": 131072})
    answer = ask(None, *flags, "--json-model-override-args", longer)
    assert answer.code == 0 and answer.flag("--context-length") == "131072" and answer.flag("--json-model-override-args") == longer
    assert answer.found["weights"].figures["parameters"] == 8_030_261_248 + 32 * 2 * 128  # Qwen3 has norms of queries and keys
    fewer = ask(None, *flags, "--json-model-override-args", json.dumps(json.loads(longer) | {"num_hidden_layers": 16}))
    assert fewer.found["weights"].figures["parameters"] < 0.6 * answer.found["weights"].figures["parameters"]
    assert fewer.tiers["host pool"]["per_token"] == 15 * TOKEN


def test_capacity_by_hand(make_machine, ask):
    answer = ask(make_machine(FakeGpu(), available=100), *FAST, "--context-length", 131072)
    assert answer.code == 0 and answer.report["requests"] == 4  # 15.5 GiB each, of 70
    assert shlex.join(answer.report["command"]) == (
        f"python -m sglang.launch_server --model-path {LLAMA} --kv-retrieval freekv --freekv-budget 2048 --freekv-host-memory 70 "
        "--context-length 131072 --max-running-requests 4 --freekv-preset fast --mem-fraction-static 0.85"
    )
    left = int(80 * GIB * 0.85) - 2 * 8_030_261_248
    sizing = Sizing(FreeKVConfig(), KVShape(LayerTable.uniform(31, dense=1), 8, 32, 128, (2, 128), KVFormat.plain(torch.bfloat16)), 131072)
    request, staging, padding = 131072 * 4096 + 4096 * 31 * 4096, 2 * 131072 * 4096, sizing.padding_bytes
    tokens, page = 70 * GIB // (31 * 4096), 31 * 32 * 4096 + 24
    frames, told = answer.tiers["frames"]["has"], answer.found["frames"].figures
    assert (
        frames == pytest.approx(left - staging - tokens * (4096 + 31 * 128) - 5 * sizing.table_bytes, abs=2 * page) and frames % page == 0
    )
    assert told == {"frames": frames // page, "promised": 66, "longest_requests": 4, "rows": 4}
    fewer = ask(make_machine(FakeGpu(), available=100), *FAST, "--context-length", 131072, "--freekv-resident-memory", 3)
    assert fewer.found["frames"].figures["frames"] == 3 * GIB // page + 5 * 64
    roomy = ask(None, *FAST, "--context-length", 131072, "--gpu", 80, "--host-memory", "4TiB")
    assert roomy.report["requests"] == (left - staging - padding) // (request + sizing.row_bytes) == 41
    assert answer.found["frames"].value == (
        f"{frames // page}, for {frames // page * 32} tokens that need no recall; under pressure a request keeps 2112 of its tokens there, "
        "so 4 of 131072 tokens run at once, and up to 4 shorter ones"
    )


def test_on_a_cpu_the_suggestion_leaves_room_for_the_weights(make_machine, ask):
    answer = ask(make_machine(NoGpu(), available=20), "--model-path", LLAMA, "--context-length", 8192)
    host, device = float(answer.flag("--freekv-host-memory")) * GIB, answer.tiers["device, all of these"]["all_requests"]
    assert answer.code == 0 and host + device <= 20 * GIB and answer.flag("--device") == "cpu"


@pytest.mark.parametrize("chunk, is_named", [(-1, True), (0, True), (4096, False)])
def test_on_a_cpu_prefills_without_chunks_need_a_share_that_is_named(make_machine, ask, chunk, is_named):
    """SGLang would set aside 1.5 MB for each of 16,384 tokens, and leave nothing of 20 GiB."""
    answer = ask(make_machine(NoGpu(), available=20), "--model-path", LLAMA, "--context-length", 8192, "--chunked-prefill-size", chunk)
    assert answer.code == 0 and ("--mem-fraction-static" in answer.report["command"]) == is_named


def test_a_given_link_and_estimates(ask):
    flags = (*FAST, "--context-length", 16384, "--host-memory", 64)
    given = ask(None, *flags, "--gpu", "H200", "--link-gb-per-s", 54).found["decode rate"].value
    assert given == "the link (54.0 GB/s, given) sustains 1978 tokens/s over all requests, and 3894 with --freekv-kv-dtype int8"
    assert "an estimate for A100" in ask(None, *flags, "--gpu", "a100").found["decode rate"].value
    unknown = ask(None, *flags, "--gpu", 48)
    assert "decode rate" not in unknown.found and any("--link-gb-per-s" in line for line in unknown.report["unchecked"])


def test_cards_are_found_however_they_are_written():
    assert all(card_of(card.name) == card for card in CARDS)
    names = {"h100": "H100", "NVIDIA H100 80GB": None, "A100-80GB": "A100-80", "NVIDIA GeForce RTX 4090": "RTX-4090", "rtx5090": "RTX-5090"}
    assert {name: (card_of(name) or card_of("none") or None) and card_of(name).name for name in names} == names


# ---- what does not fit

SHORT = {  # flags, and what is named as too small
    "host memory": (("--requests", 32, "--gpu", "H100", "--host-memory", 100), {"host memory"}),
    "host memory of one request": (("--gpu", "H100", "--host-memory", 12), {"host memory"}),
    "a host pool by hand": (("--requests", 8, "--gpu", "H100", "--host-memory", 512, "--freekv-host-memory", 50), {"host memory"}),
    "a host pool that is more than there is": (("--gpu", "H100", "--host-memory", 100, "--freekv-host-memory", 101), {"host memory"}),
    "weights": (("--gpu", 16, "--host-memory", 512), {"room for weights"}),
    "device memory": (("--requests", 64, "--gpu", "L40S", "--host-memory", "4TiB"), {"device memory"}),
    "device memory of one request": (("--gpu", 19, "--host-memory", 512), {"device memory"}),
    "GPUs": (("--tp", 4, "--gpus", 2, "--gpu", "H100", "--host-memory", 512), {"GPUs"}),
    "tokens": (("--requests", 2, "--gpu", "H100", "--host-memory", 512, "--max-total-tokens", 131072), {"--max-total-tokens"}),
    "rows": (("--requests", 9, "--gpu", "H100", "--host-memory", 512, "--max-running-requests", 8), {"--max-running-requests"}),
    "digests": (("--requests", 20, "--gpu", "H100", "--host-memory", "1TiB"), {"device memory"}),
    "both": (("--requests", 256, "--gpu", "H100", "--host-memory", 256), {"host memory", "device memory"}),
}


@pytest.mark.parametrize("case", SHORT)
def test_what_does_not_fit_has_remedies_that_hold(ask, case):
    flags, short = SHORT[case]
    flags = ("--model-path", LLAMA, "--context-length", 131072, *flags)
    answer = ask(None, *flags)
    stops = {name: finding for name, finding in answer.found.items() if finding.stops}
    assert answer.code == 1 and answer.report["command"] is None and set(stops) >= short
    for remedy in {finding.remedy for finding in stops.values()}:
        remedies = [words.split() for words in re.findall(r"`(--[^`]+)`", remedy)]
        remedies += [["--host-memory", "".join(words)] for words in re.findall(r"([\d.]+) (TiB|GiB) of host memory(?! a)", remedy)]
        remedies += [["--gpu", gib] for gib in re.findall(r"([\d.]+) GiB of GPU memory", remedy)]
        assert remedies, remedy
        for words in remedies:
            gpus = ("--gpus", words[1]) if words[0] == "--tp-size" else ()
            again = ask(None, *_without(flags, words[0]), *words, *gpus) if " and " not in remedy else None
            assert again is None or again.code == 0, (words, again.report["verdict"])


def test_a_preset_with_smaller_digests_is_named_where_it_fits(ask):
    flags = ("--model-path", LLAMA, "--context-length", 131072, *SHORT["digests"][0])
    cure = "`--freekv-preset fast`"
    assert cure in ask(None, *flags).found["device memory"].remedy and ask(None, *flags, "--freekv-preset", "fast").code == 0
    assert cure not in ask(None, *flags, "--freekv-digest", "two-bit", "--page-size", 8).found["device memory"].remedy
    assert cure not in ask(None, *flags, "--freekv-sink", 1600).found["device memory"].remedy  # fast's window finds no room beside it
    assert cure not in ask(None, *flags, "--kv-retrieval", "quest", "--requests", 90).found["device memory"].remedy


@pytest.mark.parametrize(
    "case, curable", [("host memory", True), ("a host pool by hand", False), ("device memory", False), ("host memory of one request", True)]
)
def test_codes_are_named_where_they_fit(ask, case, curable):
    flags = ("--model-path", LLAMA, "--context-length", 131072, *SHORT[case][0])
    if case == "host memory":
        flags += ("--freekv-preset", "fast", "--requests", 8)
    cure, coded = "`--freekv-kv-dtype int8`", ask(None, *flags, "--freekv-kv-dtype", "int8")
    assert coded.code == (not curable) and "--freekv-kv-dtype" not in str([finding.remedy for finding in coded.found.values()])
    assert any(cure in (finding.remedy or "") for finding in ask(None, *flags).found.values()) == curable
    slow = ask(None, *flags, "--freekv-recall", "copy-engine")
    assert "--freekv-kv-dtype" not in json.dumps(slow.report)  # which refuses it


@pytest.mark.parametrize(
    "flags, change, reason",
    [
        (("--freekv-recall", "copy-engine"), {}, "expected --freekv-recall zero-copy, "),
        (("--freekv-host-layout", "nhd"), {}, "expected --freekv-host-layout hnd, "),
        ((), {"head_dim": 100}, "expected a head_dim of a multiple of 8, .* but the model's is 100; leave it out"),
    ],
    ids=["copy engine", "layout", "head_dim"],
)
def test_the_doctor_says_where_codes_are_refused(ask, tmp_path, flags, change, reason):
    asked = ("--model-path", model_file(tmp_path, change), "--gpu", "H200", "--host-memory", 512, *flags)
    assert ask(None, *asked).code == 0
    refused = ask(None, *asked, "--freekv-kv-dtype", "int8")
    assert refused.code == 2 and re.match(f"error: --freekv-kv-dtype int8: {reason}", refused.err)


def _without(flags: tuple, name: str) -> list:
    """``flags`` without ``name`` and its value; a host memory that is named has the pool take its share again."""
    names = {name, "--tp"} if name == "--tp-size" else {name}
    return [word for pair in zip(flags[::2], flags[1::2]) if pair[0] not in names for word in pair]


def test_weights_that_do_not_fit_are_cured_by_ranks_or_smaller_ones(ask, tmp_path):
    path = model_file(tmp_path, LLAMA_70B)
    plan = ("--model-path", path, "--gpu", "H100", "--host-memory", 512, "--context-length", 32768)
    answer = ask(None, *plan, "--freekv-preset", "fast")
    assert answer.found["room for weights"].remedy == "`--tp-size 2` on 2 GPUs; or a checkpoint in 4 bits"
    assert ask(None, *plan).found["room for weights"].remedy == "`--tp-size 4` on 4 GPUs; or a checkpoint in 4 bits"


def test_what_nobody_said_is_not_called_checked(ask):
    answer = ask(None, "--model-path", LLAMA, "--gpu", "H100", "--requests", 4)
    assert answer.report["verdict"].startswith("fits as far as it is known, without host memory")
    assert "host memory: give --host-memory" in answer.report["unchecked"]
    answer = ask(None, "--model-path", LLAMA, "--host-memory", 512, "--requests", 4)
    assert answer.report["verdict"].startswith("fits as far as it is known, without device memory")


def test_an_architecture_that_has_not_run_is_not_called_tested(ask, tmp_path):
    path = model_file(tmp_path, {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "rope_scaling": None})
    answer = ask(None, "--model-path", path, "--gpu", "H100", "--host-memory", 512)
    assert answer.code == 0 and answer.found["model"].value.endswith("; not tested with FreeKV")
    assert any(line.startswith("Glm4ForCausalLM: ") for line in answer.report["unchecked"])


# ---- what the server refuses


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_is_not_served(ask, tmp_path, case):
    change, reason = REFUSED[case]
    answer = ask(None, "--model-path", model_file(tmp_path, change | {"num_hidden_layers": 2}), "--gpu", 80)
    name = change.get("architectures", CONFIG["architectures"])[0]
    assert answer.code == 1, answer.err
    assert f"does not serve {name}: " in answer.found["model"].remedy and reason in answer.found["model"].remedy
    assert answer.report["command"] is None


def test_a_window_longer_than_the_context_that_is_asked_for_is_served(ask, tmp_path):
    path = model_file(tmp_path, {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 4096})
    assert ask(None, "--model-path", path, "--gpu", 80, "--context-length", 4096).code == 0
    assert ask(None, "--model-path", path, "--gpu", 80, "--context-length", 8192).code == 1


def test_lines_and_json_tell_the_same(ask, capsys):
    flags = ["--model-path", str(LLAMA), "--gpu", "H100", "--host-memory", "256", "--requests", "4"]
    report = ask(None, *flags).report
    assert doctor.main(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"verdict: {report['verdict']}" and lines[1] == f"command: {shlex.join(report['command'])}"
    rows = lines[3 : lines.index("", 3)]
    assert [re.split(r"  +", row)[0] for row in rows] == ["tier", *(tier["name"] for tier in report["table"])]
    for finding in report["findings"]:
        assert f"  {finding['name']}: {finding['value']}" in lines
    assert all(f"  {line}" in lines for line in report["unchecked"])


FOUR = {"full_attention_interval": 4, "max_position_embeddings": 262144}
HYBRIDS = {  # model: its type, config.json, and its full layers, linear ones, and value heads of these
    "Qwen3-Next-80B-A3B": ("qwen3_next", FOUR | {"architectures": ["Qwen3NextForCausalLM"]}, 12, 36, 32),
    "Qwen3.5-35B-A3B": ("qwen3_5_moe", {"text_config": FOUR, "architectures": ["Qwen3_5MoeForConditionalGeneration"]}, 10, 30, 32),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", HYBRIDS)
def test_states_of_linear_attention_are_counted(ask, tmp_path, name, ranks):
    """A linear layer has a matrix of 128 x 128 for each value head, and three columns of a convolution."""
    kind, change, full, linear, value_heads = HYBRIDS[name]
    config = AutoConfig.for_model(kind).to_dict()
    change = change | {part: config[part] | change[part] for part in change if isinstance(change[part], dict)}
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    machine = "--gpu", 141, "--gpus", ranks, "--host-memory", 512, "--weights-gib", 80, "--tp-size", ranks
    answer = ask(None, "--model-path", tmp_path, *machine, "--requests", 4, "--context-length", 131072)
    slot = linear * (value_heads * 128 * 128 * 4 + 3 * (2 * 16 + value_heads) * 128 * 2) // ranks
    each = " a rank" * (ranks > 1)
    names = f"states of linear attention{each}", f"host pool{each}", f"device{each}, all of these"
    states, host, device = (answer.tiers[name] for name in names)
    assert (states["per_request"], states["all_requests"]) == (
        10 * slot,
        41 * slot,
    )  # five of each request, as many for prefixes, one of padding
    assert host["per_token"] == full * 2 * 2 * 256 * 2 // ranks
    assert device["per_request"] > 10 * slot
    assert answer.code == 0 and answer.found["frames"].figures["rows"] == 4
    assert "not tested" not in answer.found["model"].value


def test_gpt_oss_with_experts_in_four_bits(ask):
    """Every second of 24 layers sees all. Of 20.9 billion parameters, 19.1 are of experts, and are kept in 4 bits with a byte for 32 of them."""
    machine = "--gpu", "H200", "--host-memory", 128, "--requests", 8, "--context-length", 131072
    answer = ask(None, "--model-path", LLAMA.with_name("gpt-oss-20b.json"), *machine)
    assert answer.code == 0, answer.err
    experts, parameters = 24 * 32 * 3 * 2880 * 2880, 20_914_757_184  # as published
    figures = answer.found["weights"].figures
    assert (figures["parameters"], figures["bytes"]) == (parameters, 2 * (parameters - experts) + experts * 17 // 32)
    assert answer.tiers["host pool"]["per_token"] == 12 * 2 * 8 * 64 * 2
    assert answer.found["model"].value.endswith("bfloat16, context 131072")  # and not: not tested


def test_states_take_the_rows_of_a_small_gpu():
    """SGLang gives them 47% of what weights leave, and FreeKV has the rest."""
    sizing = Sizing(FreeKVConfig(), KVShape(LayerTable.uniform(12), 2, 16, 256, (2, 256), KVFormat.plain(torch.bfloat16)), 32768)
    slot, device = 75 << 20, 8 * GIB
    rooms = {bytes_: Footprint(sizing, bytes_).room(16, 100 * GIB, device, 16 * 32768) for bytes_ in (0, slot)}
    assert rooms[0].rows == 16 and rooms[slot].rows == (int(device * 0.9 / 1.9 / slot) - 1) // 5
    assert rooms[slot].frames < rooms[0].frames
    assert not Footprint(sizing, slot).fit(1, 100 * GIB, GIB // 2, 32768, None)
