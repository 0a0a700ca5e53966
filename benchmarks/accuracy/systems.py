"""The rows of the tables of ``docs/accuracy.md`` and of ``docs/history/selection.md``: which systems they compare, on which tasks."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.accuracy.rows import DENSE

COPYING, STATE, WORDS = "long-copy", "running-state", "aggregation"
NINE = ("magic-number", "code-word", "multi-value", "multi-key", "multi-query", "variable-1", "variable-2", "variable-3", "variable-4")
TEN, TWELVE = (*NINE, WORDS), (*NINE, WORDS, COPYING, STATE)
TASKS = {"mean of 12": TWELVE, "copying": (COPYING,), "running state": (STATE,), "most frequent words": (WORDS,), "other nine": NINE}


class System(NamedTuple):
    """A row.

    Args:
        sizes: budget, sink and window, and pages, in tokens, as shown.
        method: as results call it.
        budget: tokens, None of dense attention.
    """

    label: str
    sizes: tuple[str, str, str]
    method: str
    budget: int | None


NONE, WIDE = ("all", "-", "-"), ("2,048", "512, 512", "32")
NARROW, OWN = ("512", "16, 32", "8"), ("512", "128, 128", "32")
STOCK = System("stock SGLang", NONE, DENSE, None)
TWO_BIT, FAST, ACCURATE = "FreeKV, two-bit digests", "FreeKV, preset fast", "**FreeKV, preset accurate**"
RECIPE = ("2,048", "16, 32", "8")
LOUIS = System("LouisKV", ("512", "128, 128", "clusters"), "louiskv", 512)
CLUSTER = System("ClusterKV", ("512", "16, -", "clusters"), "clusterkv", 512)
SHADOW = System("ShadowKV", ("512", "-", "8"), "shadowkv", 512)
SNAP = System("SnapKV", ("512", "-", "-"), "snapkv", 512)
H2O = System("H2O", ("512", "-", "-"), "h2o", 512)
STREAMING = System("StreamingLLM", ("512", "128, 384", "-"), "streaming_llm", 512)
RAZOR = System("RazorAttention, 15% of the kv heads", ("512", "128, 128", "-"), "razor", 512)
INFINIGEN = System("InfiniGen, 20% of the dimensions", ("512", "-", "1"), "infinigen", 512)
RAAS = System("RaaS, within the budget", OWN, "raas-at-budget", 512)
QUEST = System("Quest, its own sizes", ("512", "0, 16", "16"), "quest", 512)
QUEST_NARROW = System("Quest", ("512", "0, 8", "8"), "quest-page-8", 512)
ARKVALE = System("ArkVale", OWN, "arkvale", 512)
ARKVALE_NARROW = System("ArkVale", NARROW, "arkvale-narrow-page-8", 512)
DEFAULTS = (
    STOCK,
    System(FAST, WIDE, "freekv", 2048),
    System(ACCURATE, RECIPE, "freekv-accurate", 2048),
    System(TWO_BIT, WIDE, "freekv-two-bit", 2048),
    System(TWO_BIT, RECIPE, "freekv-two-bit-narrow-page-8", 2048),
    System(FAST, OWN, "freekv", 512),
)
SMALL = (
    STOCK,
    System(FAST, OWN, "freekv", 512),
    System(ACCURATE, NARROW, "freekv-accurate", 512),
    System("FreeKV, never corrected", OWN, "freekv-no-correction", 512),
    System(TWO_BIT, NARROW, "freekv-two-bit-narrow-page-8", 512),
    System("FreeKV, max pooling", NARROW, "freekv-max-narrow-page-8", 512),
    System("Quest", OWN, "quest", 512),
    ARKVALE,
)
OFFLINE = (
    System("full attention", NONE, DENSE, None),
    System("FreeKV, two-bit digests", NARROW, "freekv-two-bit-narrow-page-8", 512),
    LOUIS,
    QUEST,
    CLUSTER,
    ARKVALE,
    RAZOR,
    SHADOW,
    SNAP,
    INFINIGEN,
    STREAMING,
    H2O,
    System("RaaS, every prompt kept", ("all", "-", "32"), "raas", 512),
)
FAIR = (
    System("full attention", NONE, DENSE, None),
    System("FreeKV, two-bit digests", NARROW, "freekv-two-bit-narrow-page-8", 512),
    System("FreeKV", NARROW, "freekv-narrow-page-8", 512),
    ARKVALE_NARROW,
    QUEST_NARROW,
    QUEST,
    System("InfiniGen, 30% of the dimensions", ("512", "-", "1"), "infinigen-0.30", 512),
    INFINIGEN,
    RAAS,
    System("RaaS, every prompt kept", ("all", "-", "32"), "raas", 512),
)
CHOICES = (
    System("full attention", NONE, DENSE, None),
    System("FreeKV", OWN, "freekv", 512),
    System("FreeKV, min-max digests", OWN, "freekv-min-max", 512),
    System("FreeKV", ("512", "128, 128", "16"), "freekv-page-16", 512),
    System("FreeKV", ("512", "128, 128", "8"), "freekv-page-8", 512),
    System("FreeKV", NARROW, "freekv-narrow-page-8", 512),
    System(TWO_BIT, OWN, "freekv-two-bit", 512),
    System(TWO_BIT, ("512", "128, 128", "8"), "freekv-two-bit-page-8", 512),
    System(TWO_BIT, NARROW, "freekv-two-bit-narrow-page-8", 512),
    QUEST,
    ARKVALE,
    CLUSTER,
    LOUIS,
)
REAL = (
    System(FAST, OWN, "freekv", 512),
    System("FreeKV, preset paper", OWN, "freekv-min-max", 512),
    System(ACCURATE, NARROW, "freekv-accurate", 512),
    System("FreeKV, two-bit digests, tau 0.9", NARROW, "freekv-two-bit-narrow-page-8", 512),
    ARKVALE,
    ARKVALE_NARROW,
    QUEST,
    QUEST_NARROW,
    LOUIS,
    CLUSTER,
    SHADOW,
    SNAP,
    H2O,
    RAZOR,
    STREAMING,
    RAAS,
    INFINIGEN,
    System(FAST, WIDE, "freekv", 2048),
    System(ACCURATE, RECIPE, "freekv-accurate", 2048),
)
BESIDE = "freekv-two-bit-narrow-page-8"  # the recipe of docs/history/selection.md
TRIED = {  # tables of it: what each row is, and the method
    "distance": {
        "preset `fast`: pages of 32, boxes, sink and window 128": "freekv",
        "recipe": BESIDE,
        "recipe, hysteresis 0.7": f"{BESIDE}-hysteresis-0.70",
        "recipe, hysteresis 1.0": f"{BESIDE}-hysteresis-1.00",
        "recipe, hysteresis 1.4": f"{BESIDE}-hysteresis",
        "recipe, tau 0.8": f"{BESIDE}-tau-0.80",
        "preset `accurate`: tau 0.8, hysteresis 1.0": "freekv-accurate",
        "on turn, tau 0.9": f"{BESIDE}-on-turn",
        "on turn, tau 0.9, hysteresis 1.0": f"{BESIDE}-on-turn-hysteresis-1.00",
    },
    "sizes": {
        "sink 0, window 16": "freekv-two-bit-page-8-sink-0-window-16",
        "sink 8, window 16": "freekv-two-bit-page-8-sink-8-window-16",
        "sink 16, window 16": "freekv-two-bit-page-8-sink-16-window-16",
        "recipe: sink 16, window 32": BESIDE,
        "sink 16, window 64": "freekv-two-bit-page-8-sink-16-window-64",
        "recipe, pages of 16": "freekv-two-bit-narrow-page-16",
        "preset `accurate`, pages of 16": "freekv-two-bit-narrow-page-16-tau-0.80-hysteresis-1.00",
    },
    "need": {
        "recipe": BESIDE,
        "top-p 0.95": f"{BESIDE}-top-p-0.95",
        "top-p 0.98": f"{BESIDE}-top-p-0.98",
        "top-p 0.95, the rest in hand": f"{BESIDE}-top-p-0.95-in-hand",
        "top-p 0.95, the rest in hand, hysteresis 0.7": f"{BESIDE}-top-p-0.95-in-hand-hysteresis-0.70",
    },
    "tail": {
        "recipe": BESIDE,
        "a pseudo-token for each block of 32": f"{BESIDE}-tail-32",
        "a pseudo-token for each block of 128": f"{BESIDE}-tail-128",
        "one pseudo-token for the whole text": f"{BESIDE}-tail-8192",
    },
}
LENGTH_OF = {512: 4096, 2048: 8192}  # of the real texts, by budget
LENGTHS = (2048, 4096, 8192)  # of the real texts at a budget of 512
IN_8_BITS = "freekv-accurate"  # with KV as computed; its name goes on with how 8 bits are stored
FOUR = {"variable, 3 hops": ("variable-3",), "many keys": ("multi-key",), "most frequent words": (WORDS,), "copying": (COPYING,)}
TAUS = {"never": "freekv-no-correction", "0.7": "freekv-tau-0.70", "0.8": "freekv-tau-0.80", "0.85": "freekv-tau-0.85", "0.9": "freekv"}
TAUS |= {"0.95": "freekv-tau-0.95", "1": "freekv-tau-1.00"}
