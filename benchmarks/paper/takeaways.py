"""What the page begins with: five sentences of the results, losses among them, each left out where its results are missing."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.paper.latency import Answer
from benchmarks.paper.sections import Section
from benchmarks.paper.sections.names import METHODS
from benchmarks.report import markdown

BESIDE = (
    "FreeKV's time over stock SGLang's, for each configuration that was measured in several cells. TPOT is the time per token, and TTFT that to "
    "the first one. *One of 2K* is one request alone. *Slowest* and *fastest* are the cells with the largest and the smallest ratio of TPOT. "
    "Cells are named by the prompts that were sent, and TPOT is of those that decoded *at once*, as the tables below tell. TTFTs are from the "
    "least to the most of all cells. A dash stands where nothing was measured, or the two sides are of two machines."
)


def takeaways(sections: list[Section]) -> str:
    """Numbered sentences, of which those on a server are of the one that most users have, and a table of all servers."""
    facts: dict = {}
    for section in reversed(sections):  # the first shape's count
        facts |= section.facts
    everyone = [answer for section in sections for answer in section.facts.get("answers", [])]
    servers = [server for section in sections for server in section.facts.get("servers", {}).values()]  # no sentence mixes two
    servers.sort(key=lambda server: (not server["resident"], server["bits"]))
    first = servers[0] if servers else None
    told = [*_memory(facts), *_alone(first), *_losses(first, facts), *_load(facts), *_methods(facts, everyone)]
    return "\n\n".join(filter(None, ["\n".join(f"{number}. {text}" for number, text in enumerate(told, 1)), _table(servers)]))


def _table(servers: list[dict]) -> str:
    """Of all servers, if there are several: one request alone, the slowest and the fastest cell, and first tokens."""
    if len(servers) < 2:
        return ""
    contexts = sorted({context for server in servers for context in server["alone"]})
    header = (
        "FreeKV",
        "pages",
        "compared",
        *(f"TPOT, one of {context // 1024}K" for context in contexts),
        "slowest",
        "fastest",
        "TTFT, hit",
        "TTFT, cold",
    )
    rows = [
        (
            " and ".join(filter(None, (server["preset"], server["bits"]))),
            ("resident" if server["resident"] else "recalled") + (", earlier code" if server["earlier"] else ""),
            server["against"],
            *(server["alone"].get(context) and f"{server['alone'][context]:.2f}" for context in contexts),
            *(row and f"{row.tpot[2]:.2f}: {row.batch} of {row.context // 1024}K" for row in (server["slowest"], server["fastest"])),
            *(ratios and f"{min(ratios):.2f} to {max(ratios):.2f}" for ratios in (server["hits"], server["cold"])),
        )
        for server in servers
    ]
    return BESIDE + "\n\n" + markdown(header, [tuple(value or "-" for value in row) for row in rows], words=3)


def _memory(facts: dict) -> Iterator[str]:
    if facts.get("decoding") and facts.get("tokens"):
        yield (
            f"**With little device memory for KV, long prompts give more tokens per second**. With {facts['held']:.0f} GiB of it "
            f"{facts['prompts']} prompts of 32K tokens decode at {facts['decoding']:.1f} times stock SGLang's tokens per second, "
            f"{facts['memory']}. With prefill and answers of {facts['answer']} tokens the factor is {facts['tokens']:.1f}. Each token takes "
            "longer, because more requests decode at once."
        )


def _alone(server: dict | None) -> Iterator[str]:
    if server is not None and server["alone"]:
        ratios = ", ".join(f"{ratio:.2f} at {context // 1024}K" for context, ratio in sorted(server["alone"].items()))
        yield (
            "**One request alone gains only where its context is long**. Its time per token over stock SGLang's "
            f"is {ratios} {server['where']}.{_longer(server['longer'])}"
        )


def _longer(ratios: dict[int, float]) -> str:
    """Of long answers to short prompts, by requests at once."""
    if not ratios:
        return ""
    told = ", ".join(f"{ratio:.2f} with {batch}" for batch, ratio in sorted(ratios.items()))
    return f" Over a long answer to a short prompt, summed from timed steps, it is {told} request{'s' * (max(ratios) > 1)} at once there."


def _losses(server: dict | None, facts: dict) -> Iterator[str]:
    if server is not None and (told := _lost(server)):
        yield f"**FreeKV loses where contexts are short or requests are few, and at most prefix hits**.{told}{_evicted(facts)}"


def _lost(server: dict) -> str:
    """Its slowest cell, and its first tokens."""
    row, hits, cold = server["slowest"], server["hits"], server["cold"]
    if row is None or row.tpot[2] <= 1:
        return ""
    late = ""
    if hits:
        told = "on a resident prefix" if server["resident"] else "that streams its prefix from host memory"
        late = f" After a hit {told} the first token takes {min(hits):.2f} to {max(hits):.2f} times as long there. A cell's requests come at once."
    if cold and max(cold) > 1:
        late += f" That of a cold prompt takes {min(cold):.2f} to {max(cold):.2f} times as long."
    return (
        f" With {row.batch} request{'s' * (row.batch > 1)} of {row.context // 1024}K a token takes {row.tpot[2]:.2f} times as long "
        f"{server['where']}.{late}"
    )


def _evicted(facts: dict) -> str:
    """How soon first tokens come where stock SGLang has part of the prefixes only."""
    soon = facts.get("evicted")
    if not soon:
        return ""
    least, most = f"{min(soon):.2f}", f"{max(soon):.2f}"
    span = least if least == most else f"{least} to {most}"
    return (
        f" Where equal KV memory holds only part of the prefixes, most of stock SGLang's requests wait. Then FreeKV's median first token "
        f"takes {span} of its time, {facts['memory']}."
    )


def _load(facts: dict) -> Iterator[str]:
    best = facts.get("goodput", {})
    if {"stock", "freekv"} <= best.keys():
        limits, every = facts["limits"], ""
        if facts["kept"].keys() == best.keys():
            best, every = facts["kept"], "all of "
        fast = f" With `fast` it answers {every}{best['freekv-fast']:.1f}." if "freekv-fast" in best else ""
        yield (
            f"**Under load on cached documents it sustains {'more' if best['freekv'] > best['stock'] else 'less'}**. Within "
            f"{limits.ttft_s:g} s to the first token and {limits.tpot_s * 1e3:g} ms for each other, FreeKV answers {every}"
            f"{best['freekv']:.1f} requests per second and stock SGLang {every}{best['stock']:.1f}.{fast} That was {facts['under load']}."
        )


def _methods(facts: dict, everyone: list[Answer]) -> Iterator[str]:
    """Of the first shape's long input, and of everyone's long generation."""
    found = {answer.method: answer for answer in facts.get("answers", []) if answer[:2] == ("long-input", 8)}
    full = found.get("full")
    if full is None or full.freekv_whole is None:
        return
    text = (
        f"**Against other methods in one engine the work decides**. On long input at batch 8{facts['methods']}, full attention takes "
        f"{full.freekv:.2f} times FreeKV's time per token. With prefill its answers take {full.freekv_whole:.2f} times as long."
    )
    generated = [each for each in everyone if each.scenario == "long-generation" and each.freekv]
    told = []
    for method in ("full", "louiskv"):
        mine = [each.freekv for each in generated if each.method == method]
        if wins := sum(ratio < 1 for ratio in mine):
            name = METHODS[method][0].upper() + METHODS[method][1:]
            told.append(f" {name} takes {min(mine):.2f} to {max(mine):.2f} of FreeKV's time and is faster in {wins} of {len(mine)} cases.")
    yield text + (
        f" On long generation, with `fast` and nothing resident, others are faster in some cases or in all.{''.join(told)}" if told else ""
    )
