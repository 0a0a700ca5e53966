"""The page's texts that no result makes: what was measured, the words, and what is to be known of the rows."""

from __future__ import annotations

from benchmarks.paper.crossover import DEFAULT_LOAD
from benchmarks.profiles import BY_LAYER, EMULATED, MISSED, NEAREST, PROFILES
from benchmarks.report import markdown

HEAD = """# Speed

How fast FreeKV decodes, answers and serves, beside stock SGLang and beside other methods. `benchmarks/paper/figures.py` makes this page
from the files in `benchmarks/results`, and a test holds it to them. [How each figure is measured](../benchmarks/paper/README.md), and [the papers' own figures](papers.md)."""

MEASURED = """## What was measured

NVIDIA H200s with PCIe 5.0, in bfloat16, with dummy weights in the shapes of public models. If nothing else is said, FreeKV has
the preset `fast`: a budget of 2,048 tokens with a sink and a window of 512 each, and pages of 32 tokens. Stock SGLang 0.5.17 runs with CUDA
graphs. Titles of sections name the card, and the attention backend of stock SGLang: FlashAttention 3 or FlashInfer. Where KV is in 8 bits,
the title says so, and where HiCache is on. No figure is of two kinds of card. Cards of one kind differ by some percent, and the two
sides of a cell were not always measured on the same one. The last section names commands and commits.

Random weights select at random, so the benchmarks replay the load of a real model. These words describe it, and the figures:

| word | meaning |
|---|---|
| corrected | a kv head that selects again, because its queries differ from the last ones, and waits for what it lacks |
| c | the share of kv heads that are corrected in a step |
| x | the share of selected units that are missing from the device cache |
| TPOT, TTFT | the time from one output token to the next in the mean, and the time to the first token |
| hit, part, cold | the prompt is in the prefix tree but for a page; in part; not at all, so that it is computed |
| a window alone | attention to the budget's tokens with no selection and no recall: beyond the budget no method that selects is faster in this engine, but for noise |
| least time | the longer of two times: that of the step's bytes over the link, and that of its bytes in device memory, at the rates of copies in the same run |
| compute, select | the step of a window alone, and what comes on top without copies |
| recall exposed, recall hidden | the time that copies add to a step, and that of copies beside the computation |"""

LIMITS = """The load has limits that the figures inherit:

- Loads are named after tau. tau-0.8 and tau-0.9 have the shares of {model} on one task. Those of {nearest} and {default} are of {small}, layer by layer.
  They stand for every shape. Their source and limits are in `benchmarks/profiles.json`.
- The sections of recalled pages and of 16 GiB, and the ablation, replay x {mean:g}, the mean over contexts. The source has {long:g} from
  16K on. There recall is understated in long contexts and overstated at 8K. The methods replay the source.
- These sections replay the c of tau 0.8, and the preset's tau is 0.9. [The data path](data-path.md) has both.
- Every layer gets the mean of all layers, except under loads whose names end in by-layer. In the one real model that could be measured, layers differ widely:"""

NOTES = """## How to read the methods' rows

All methods run in one engine, so that methods are compared and not implementations. Every layer is compressed there, where the server
keeps layer 0 dense. Some rows are not as their papers run them:

| row | what differs |
|---|---|
| RaaS | keeps every prompt in the accuracy tables, and reads the budget here; the FreeKV paper compares it at the budget |
| RazorAttention | 15% of the kv heads read everything, as in its paper and on the accuracy page |
| InfiniGen | selects by 30% of the dimensions here, as in its paper; in the accuracy tables by 20% |
| Quest, ArkVale | have pages of 32 tokens here, as FreeKV; Quest recalls nothing, because all its KV is on the device |
| ArkVale, InfiniGen, host copies | recall as their authors' programs do: the host copies and launches, so that the time is not the method's alone |
| LouisKV's trigger | the rate of selection that its paper reports, on FreeKV's pages and engine |

[Accuracy](accuracy.md) says how right these methods are, and has rows at equal budget and equal pages as far as they have been measured.

- Figures of answers are milliseconds of a decode step in the mean over the answer. In brackets stands how many times FreeKV's time the
  answer takes: its decoding / with prefill. Above 1 FreeKV is faster. Prefill is dense and the same for all methods.
- Beside a window alone, figures are FreeKV's decoding over that of the window, and in brackets the least possible. The least is a window's
  step followed by the recall of corrected kv heads, or what the bytes allow if that is longer.
- A bar that is cut has its figure behind a mark (»). The host copies are left out of the pictures.
- Servers ran on the host's other GPU meanwhile, and host copies are late by that. With Llama-3.1-8B those of long input take up to 2.7 times
  those of the same context in long input and long generation. A dash is a cell that was not reached."""

AIMS = """## Aims

The aims are the project's own. Those over ArkVale, InfiniGen and ShadowKV are near the factors that the FreeKV paper reports. *Possible*
estimates a figure if FreeKV's steps took their least time and all else were as measured. Where *possible* misses the aim, faster code
alone does not reach it on this machine and load. Both sides of a row do the same work: one engine, one kernel for recall, one CUDA graph.
The paper's factors over ArkVale and ShadowKV are not reached there. Those over InfiniGen are, on long generation at batch 16.
Host copies reach them. They have no aim, because they compare a host
that copies and launches with a graph, and not the methods alone. The aim beside a window alone ends at batch 8, and the sections above
show batch 16, too."""

REPRODUCE = """## Reproduce

Each row made some results of the file that it names. A file may have results of several commits, because a run measures what is missing.
Software: {software}."""


def measured() -> str:
    profile, small = PROFILES[EMULATED], PROFILES[BY_LAYER]
    words = {"model": profile["model"], "nearest": NEAREST, "default": DEFAULT_LOAD, "small": small["model"]}
    told = LIMITS.format(**words, mean=MISSED, long=profile["missed_pages_by_context"]["16384"])
    rows = [
        (f"tau {tau}", profile["corrected_kv_heads"][tau], small["corrected_kv_heads"][tau], _ends(small["corrected_by_layer"][tau]))
        for tau in ("0.8", "0.9")
    ]
    head = ("c", profile["model"], f"{small['model']}, all layers", "its lowest and highest layer")
    return "\n\n".join((MEASURED, told, markdown(head, rows)))


def _ends(shares: list[float]) -> str:
    return f"{min(shares):.2f}, {max(shares):.2f}"
