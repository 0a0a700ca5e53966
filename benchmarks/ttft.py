"""Time to the first token: prompts of 32K and 128K tokens cold, and a 32K prefix hit with 256 new tokens."""

from __future__ import annotations

from benchmarks.report import Report, say, summary, table
from benchmarks.servers import BenchServer, random_prompt
from benchmarks.tpot import prompts_of

NEW_TOKENS = 256  # behind the prefix
SUFFIX_SEED, WARM_UP_SEED = 7000, 9000
REPEATS = {32768: 3, 131072: 2}  # distinct prompts; they are those of tpot, so that nothing is computed twice
TARGETS = (("32k-cold", "stock", 1.15), ("32k-hit", "32k-cold", 0.20), ("128k-cold", "stock", None))


def name_of(context: int) -> str:
    return f"{context // 1024}k"


def warm_up(server: BenchServer, deadline_s: float) -> None:
    """A prompt of several chunks, a hit on it, and a few steps of two requests: everything compiles. Then the tree is emptied."""
    setup = server.setup
    prompt = random_prompt(setup, 32768 // setup.scale, WARM_UP_SEED)
    server.stream(prompt, 4, deadline_s)
    suffix = random_prompt(setup, NEW_TOKENS // setup.scale, WARM_UP_SEED + 1)
    server.stream_all([prompt + suffix, prompt[: len(prompt) // 2] + suffix], 4, deadline_s)
    server.flush()


def measure(server: BenchServer, context: int, report: Report, deadline_s: float) -> None:
    """Cold prompts of ``context`` tokens, one after the other, then hits on them; needs an empty tree."""
    setup, name = server.setup, name_of(context)
    server.set_load(None)
    prompts = prompts_of(setup, context, REPEATS[context])
    cold, hit = [], []
    for prompt in prompts:
        stream = server.stream(prompt, 2, deadline_s)
        _expect_cached(stream.meta, 0, setup.page_of(server.system))
        cold.append(stream.ttft)
        report.add(f"{server.system}/{name}-cold", {"tokens": len(prompt), "scale": setup.scale, "ttft_s": summary(cold)})
        say(f"{server.system}/{name}-cold: {cold[-1]:.3f} s")
    for index, prompt in enumerate(prompts):
        suffix = random_prompt(setup, NEW_TOKENS // setup.scale, SUFFIX_SEED + index)
        stream = server.stream(prompt + suffix, 2, deadline_s)
        _expect_cached(stream.meta, len(prompt), setup.page_of(server.system))
        hit.append(stream.ttft)
        facts = {"prefix": len(prompt), "new": len(suffix), "scale": setup.scale, "ttft_s": summary(hit)}
        report.add(f"{server.system}/{name}-hit", facts)
        say(f"{server.system}/{name}-hit: {hit[-1]:.3f} s")


def _expect_cached(meta: dict, tokens: int, page_size: int) -> None:
    """A figure of a hit that was none, or of a cold prompt that was a hit, is not recorded."""
    found = meta.get("cached_tokens", tokens)
    if not tokens - page_size <= found <= tokens + page_size:
        raise RuntimeError(f"{found} tokens were found in the tree, expected {tokens}")


def ratios(results: dict) -> str:
    """The table, against the targets."""

    def ttft(key: str) -> float | None:
        return results.get(key, {}).get("ttft_s", {}).get("median")

    rows = []
    for name, against, target in TARGETS:
        ours, theirs = ttft(f"freekv/{name}"), ttft(f"stock/{name}" if against == "stock" else f"freekv/{against}")
        ratio = ours / theirs if ours and theirs else None
        verdict = None if ratio is None or target is None else "yes" if ratio <= target else "NO"
        rows.append([f"{name} / {against}", ours, theirs, ratio, target, verdict])
    rows += [[f"{name} / cold, stock", ttft(f"stock/{name}"), ttft("stock/32k-cold"), None, None, None] for name in ("32k-hit",)]
    return table(("TTFT", "s", "baseline s", "ratio", "target", "reached"), rows)
