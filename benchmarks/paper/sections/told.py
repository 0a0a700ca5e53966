"""What the crossover's section says of each comparison."""

from __future__ import annotations

from benchmarks.paper import crossover
from benchmarks.paper.cells import HIT_PASSES
from benchmarks.paper.comparison import Compared
from benchmarks.profiles import BY_PRESET, LOADS, NEAREST, Shares
from benchmarks.setups import STOCK_PAGE
from sglang_freekv.presets import DEFAULT_PRESET, PRESETS

from .names import BACKENDS
from .section import Section

PRODUCTION, SAME, DEFAULT = "production", "same KV bytes on the device", "default preset"
KEPT = f"{SAME}, HiCache", f"{SAME}, HiCache, {DEFAULT}"  # titles of what is only shown beside stock SGLang's cache on the host
NAMED = {system: BACKENDS[backend] for system, backend in zip(crossover.FASTER, crossover.BACKENDS)}
RESIDENT = (*crossover.UNDER, DEFAULT)  # titles of what has stock SGLang's faster backend beside it
DRAWN = {  # and what the takeaways tell of
    PRODUCTION: "production",
    SAME: "same",
    f"resident, {NEAREST}": "resident",
    DEFAULT: "default",
}


def _told_of(shares: Shares) -> str:
    corrected = shares.corrected
    named = f"{corrected:g}" if isinstance(corrected, float) else f"{min(corrected):.2f} to {max(corrected):.2f} by layer"
    return f"c {named}, x {shares.missed:g}"


USERS = f"FreeKV has its default preset `{DEFAULT_PRESET}`, with pages of {PRESETS[DEFAULT_PRESET].page_size} tokens. It replays "
USERS += f"{_told_of(BY_PRESET[crossover.DEFAULT_LOAD])}."
HELD = (
    "All pools of KV on the device take {ours:.2f} GiB for FreeKV and {theirs:.2f} GiB for stock SGLang.{stay} "
    "Where one server runs fewer requests at once, its TPOT is shorter for that reason: compare *decoding*."
)
ON_HOST = (
    "Stock SGLang keeps on the host what its pool has no room for, with `--enable-hierarchical-cache` and at most the host memory that "
    "FreeKV has. " + HELD
)
SENT = (
    "{slower} Prompts that hit were sent {sent} times. A TTFT has no ratio where its two "
    "sides are of two machines, or where one is a hit and the other is cold."
)
TOLD = {
    PRODUCTION: "Both servers take the memory that they want. Nothing is resident in FreeKV's, so every page comes from the host.",
    SAME: HELD,
    KEPT[0]: ON_HOST,
    KEPT[1]: f"{USERS} {ON_HOST}",
    DEFAULT: f"{USERS} Pages stay on the device while there is room.{{recalled}}{SENT}",
} | {
    title: f"FreeKV has the preset `fast`, and pages stay on the device while there is room. It replays {_told_of(LOADS[load])}.{{recalled}}{SENT}"
    for title, load in crossover.UNDER.items()
}


def above(section: Section, title: str, pair: tuple[str, ...], rows: list[Compared], held: dict[str, float]) -> str:
    """What stands above a comparison's table.

    Args:
        title, pair: of ``crossover.PAIRS``.
        held: GiB of all pools of KV on the device, of ours and of theirs.
    """
    words = {"stay": _stay(section, pair[0], rows), "slower": _slower(section, rows), "sent": _sent(rows), "recalled": _recalled(rows)}
    return TOLD[title].format(**words, **held) + _stored(rows) + _passes(rows) + _no_room(section, pair[1], rows)


def _stay(section: Section, system: str, rows: list[Compared]) -> str:
    """In which cells pages could stay on FreeKV's device: those whose server had frames beside the slots of all rows."""

    def had_room(result: dict) -> bool:
        told = section.written["runs"][result["run"]].get(f"server {system}", {}).get("freekv", {})
        return told.get("frame_tokens", 0) > (told.get("device_rows", 0) + 1) * told.get("device_cache_tokens", 0)

    without = [row.name for row in rows if row.ours and not had_room(row.ours)]
    if not without:
        return " FreeKV's pages stay there while there is room."
    which = "" if len(without) == sum(bool(row.ours) for row in rows) else f" in {', '.join(without)}"
    return f" Nothing is resident in FreeKV's{which}."


def _stored(rows: list[Compared]) -> str:
    """Whose KV is not of the model's type."""
    told = ""
    for who, side in (("FreeKV", "ours"), ("Stock SGLang", "theirs")):
        found = dict.fromkeys(getattr(row, side).get("kv_dtype", "auto") for row in rows)
        told += "".join(f" {who} stores KV in {dtype}." for dtype in found if dtype != "auto")
    return told


def in_8_bits(section: Section) -> str:
    return ", KV in 8 bits" if any(result.get("kv_dtype", "auto") != "auto" for result in section.results.values()) else ""


def _passes(rows: list[Compared]) -> str:
    """How cells were measured that have a spread, and of which batches a second visit is told."""
    again = [row.name for row in rows if row.name.endswith("-again")]
    told = f" The prompts of {', '.join(again)} were sent a second time." if again else ""
    counts = [len(side["passes"]) for row in rows if row.tpot_span for side in (row.ours, row.theirs)]
    if not counts:
        return told
    return (
        f"{told} Figures with brackets are medians of {_span(counts)} passes. The brackets have the least and the most that the ratio is, "
        "whichever passes of both sides are compared."
    )


def _recalled(rows: list[Compared]) -> str:
    """That pages were resident in all cells, if they were: the share of missing ones that a load has then says nothing."""
    return "" if any(row.ours.get("missed", 1) for row in rows) else " All pages stayed in these cells, so nothing was recalled."


def _sent(rows: list[Compared]) -> str:
    """How often prompts were sent that hit."""
    hits = [side for row in rows for side in (row.ours, row.theirs) if side.get("prefix") == "hit"]
    return _span([HIT_PASSES + len(side.get("passes", [side])) for side in hits] or [HIT_PASSES + 1])


def _span(counts: list[int]) -> str:
    least, most = min(counts), max(counts)
    return str(least) if least == most else f"{least} to {most}"


def backends_of(section: Section, rows: list[Compared]) -> list[str]:
    """The backends whose figures stock SGLang's are, as far as the results tell."""
    names = [(row, name) for row in rows for name in row.by.split(", ") if name]
    return list(dict.fromkeys(filter(None, (NAMED.get(name) or section.backend(row.theirs, name) for row, name in names))))


def where_of(section: Section, rows: list[Compared]) -> str:
    """The cards, and what FreeKV is held against there."""
    used = backends_of(section, rows)
    stock = f"the faster of {' and '.join(used)}" if len(used) > 1 else "".join(used) or "stock SGLang"
    return f"on {section.devices(side for row in rows for side in (row.ours, row.theirs) if side)} against {stock}"


def _slower(section: Section, rows: list[Compared]) -> str:
    """Where several backends were timed, whose figures do not stand there."""
    both = [row for row in rows if len(row.among) > 1]
    if not both:
        return ""
    used = backends_of(section, rows)
    if len(used) > 1:
        return " The last column names the backend that TPOT and TTFT are of."
    others = dict.fromkeys(NAMED[name] for row in both for name in row.among if NAMED[name] not in used)
    return f" {' and '.join(others)} was timed in {', '.join(row.name for row in both)}, too, and is slower there."


def _no_room(section: Section, system: str, rows: list[Compared]) -> str:
    """By how few tokens a prompt does not fit the pool of stock SGLang."""
    refused = [row for row in rows if row.theirs.get("prefix") == "no room" and row.batch == 1]
    pools = [section.written["runs"][row.theirs["run"]].get(f"server {system}", {}).get("max_total_num_tokens") for row in refused]
    if not refused or None in pools:
        return ""
    tokens = max(row.ours.get("new_tokens", 0) or _new_tokens(section, system) for row in refused)
    context, pool = refused[0].context, pools[0]
    needed = context + tokens + STOCK_PAGE
    return (
        f" Stock SGLang's pool holds {pool:,} tokens. One prompt of {context:,} with {tokens} new tokens and a page needs "
        f"{needed - pool} more, so its cells of that context say *no room*. A pool larger by that much would serve one such request at "
        "a time."
    )


def _new_tokens(section: Section, system: str) -> int:
    return max((result.get("new_tokens", 0) for key, result in section.results.items() if key.startswith(f"{system}/")), default=0)
