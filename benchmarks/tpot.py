"""Time per output token: stock SGLang and FreeKV under a replayed load, and FreeKV with recall's copies switched off."""

from __future__ import annotations

import statistics
from typing import NamedTuple

import torch

from benchmarks.profiles import CORRECTED, MISSED
from benchmarks.report import Report, say, table
from benchmarks.servers import BenchServer, Stream, random_prompt
from benchmarks.setups import Setup
from sglang_freekv.memory_pool.kv_format import KVFormat

PROMPT_SEED = 1000  # prompts are the same for all systems and loads
SETTLE_TOKENS = 8  # of every request, before the window begins
SPREAD = 1.05  # the requests of a batch decode in step: where their means are further apart, the client was late


class Case(NamedTuple):
    """One measurement: a batch of distinct prompts, and the load that the replay emulates."""

    name: str
    context: int
    batch: int
    corrected: float
    missed: float
    target: float | None = None

    @property
    def baseline(self) -> str:
        """The key of the same batch without a load."""
        return f"{self.context // 1024}k-b{self.batch}"


CASES = (
    Case("32k-b1", 32768, 1, CORRECTED[0.8], MISSED, 1.05),
    Case("32k-b8", 32768, 8, CORRECTED[0.8], MISSED, 0.55),
    Case("32k-b16", 32768, 16, CORRECTED[0.8], MISSED, 0.55),
    Case("32k-b8-c59", 32768, 8, CORRECTED[0.9], MISSED, 0.70),
    Case("128k-b4", 131072, 4, CORRECTED[0.8], MISSED, 0.40),
)
COPIES_OFF = ("32k-b8", 1.15)  # the case that is repeated without copies, and the target of the ratio


def cases_of(system: str, context: int) -> list[Case]:
    """What to measure on a system: the load changes nothing in stock SGLang."""
    cases = [case for case in CASES if case.context == context]
    if system == "stock":
        return list({case.baseline: case._replace(name=case.baseline) for case in cases}.values())
    return [case for case in cases if case.name == COPIES_OFF[0]] if system == "copies-off" else cases


def prompts_of(setup: Setup, context: int, count: int) -> list[list[int]]:
    return [random_prompt(setup, context // setup.scale, PROMPT_SEED + context + index) for index in range(count)]


def time_per_token(streams: list[Stream]) -> dict:
    """Of the window in which all requests decode: per request the mean time between tokens, and of these the median.

    Raises:
        ValueError: there is no such window.
    """
    begin = max(next(time for time, count in stream.arrivals if count > SETTLE_TOKENS) for stream in streams)
    end = min(stream.arrivals[-1][0] for stream in streams)
    means, counts = [], []
    for stream in streams:
        window = [(time, count) for time, count in stream.arrivals if begin <= time <= end]
        if len(window) < 2:
            raise ValueError(f"no window in which all {len(streams)} requests decode; ask for more tokens")
        (t0, n0), (t1, n1) = window[0], window[-1]
        means.append((t1 - t0) / (n1 - n0))
        counts.append(n1 - n0)
    return {"tpot_s": statistics.median(means), "fastest_s": min(means), "slowest_s": max(means), "window_tokens": min(counts)}


def missed_of(totals: dict[str, int] | None) -> float:
    """The share of the selected units that was recalled, of what the server counted; 0 for stock SGLang."""
    if not totals:
        return 0.0
    if "hits" in totals:  # results of servers that counted under other names
        return totals["pages_recalled"] / max(1, totals["hits"] + totals["pages_recalled"])
    return totals["recalled_units"] / max(1, totals["selected_units"])


def achieved(setup: Setup, streams: list[Stream]) -> dict:
    """Shares that the server counted, over the requests; None of stock SGLang."""
    counts = [stream.meta["freekv"] for stream in streams if stream.meta.get("freekv")]
    if not counts:
        return {}
    total = {name: sum(each[name] for each in counts) for name in counts[0]}
    config = setup.config
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    kv = KVFormat.of(setup.kv_dtype, torch.float32 if setup.device == "cpu" else torch.bfloat16)
    unit_bytes = 2 * setup.page_size * (head_dim * kv.storage.itemsize + kv.vector_bytes)
    steps = max(1, total["decode_steps"])
    return {
        "corrected": total["corrections"] / max(1, total["correction_decisions"]),
        "missed": missed_of(total),
        "recalled_bytes_per_step": total["recalled_units"] * unit_bytes * len(streams) / steps,
        "meta_info": counts,
    }


def measure(
    server: BenchServer, case: Case, report: Report, deadline_s: float, tokens: int = 160, repeats: int = 2, interval: int = 8
) -> None:
    """Measure one case on a running server; the first pass, which computes prompts that are not in the tree, is not counted, nor is one
    in which the client was late, up to as many as count.

    Raises:
        ValueError: it was late too often.
    """
    setup, key = server.setup, f"{server.system}/{case.name}"
    prompts = prompts_of(setup, case.context, case.batch)
    server.set_load(setup.load(case.corrected, case.missed, case.context // setup.scale))
    server.stream_all(prompts, SETTLE_TOKENS, deadline_s)
    passes, left_out = [], []
    while len(passes) < repeats:
        streams = server.stream_all(prompts, tokens, deadline_s, interval)
        found = time_per_token(streams) | achieved(setup, streams)
        if setup.device == "cuda" and not is_steady(found):
            left_out.append(found)
            say(f"{key}: left out, requests took {found['fastest_s'] * 1e3:.2f} to {found['slowest_s'] * 1e3:.2f} ms per token")
            if len(left_out) > repeats:
                raise ValueError(f"{len(left_out)} passes in which requests of one batch took more than {SPREAD} times as long as others")
            continue
        passes.append(found)
        best = statistics.median(each["tpot_s"] for each in passes)
        shares = f", c {found['corrected']:.3f}, x {found['missed']:.3f}" if "corrected" in found else ""
        report.add(key, {"case": case._asdict(), "scale": setup.scale, "tpot_s": best, "passes": passes, "left_out": left_out})
        say(f"{key}: {found['tpot_s'] * 1e3:.2f} ms per token in {found['window_tokens']} tokens{shares}")


def is_steady(found: dict) -> bool:
    """Whether a pass may be counted."""
    return found["slowest_s"] <= SPREAD * found["fastest_s"]


def ratios(results: dict) -> str:
    """The table, against the targets."""

    def tpot(system: str, name: str) -> float | None:
        return results.get(f"{system}/{name}", {}).get("tpot_s")

    def row(name: str, ours: float | None, theirs: float | None, target: float, counts: dict) -> list:
        ratio = ours / theirs if ours and theirs else None
        verdict = None if ratio is None else "yes" if ratio <= target else "NO"
        shown = [None if value is None else value * 1e3 for value in (ours, theirs)]
        return [name, *shown, ratio, target, verdict, counts.get("corrected"), counts.get("missed")]

    rows = []
    for case in CASES:
        counts = (results.get(f"freekv/{case.name}", {}).get("passes") or [{}])[-1]
        rows.append(row(f"{case.name} / stock", tpot("freekv", case.name), tpot("stock", case.baseline), case.target, counts))
    name, target = COPIES_OFF
    rows.append(row(f"{name} / copies off", tpot("freekv", name), tpot("copies-off", name), target, {}))
    return table(("TPOT", "ms", "baseline ms", "ratio", "target", "reached", "c", "x"), rows)
