"""What the crossover's section says of each comparison."""

from __future__ import annotations

from benchmarks.paper import crossover
from benchmarks.profiles import BY_PRESET, LOADS, NEAREST, Shares
from sglang_freekv.presets import DEFAULT_PRESET, PRESETS

PRODUCTION, SAME, DEFAULT = "production", "same KV bytes on the device", "default preset"
KEPT = f"{SAME}, HiCache", f"{SAME}, HiCache, {DEFAULT}"  # titles of what is only shown beside stock SGLang's cache on the host
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
