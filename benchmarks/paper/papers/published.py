"""Numbers that the papers' texts tell; none is read off a picture. ``docs/papers.md`` names their sections."""

from __future__ import annotations

from typing import NamedTuple

REVIEW = "review"  # only a review of the FreeKV paper's later version has it


class Number(NamedTuple):
    """``said`` stands before the value in the text, and ``at`` behind it."""

    value: float
    said: str = ""
    at: str = ""

    def shown(self, form: str = "g") -> str:
        return f"{self.said} {self.value:{form}}, {self.at}".strip(" ,")


MACHINES = (  # what the papers timed on
    ("FreeKV, section 5.3", "NVIDIA A100, 40 GB", "PCIe 4.0"),
    ("LouisKV, section 5.1", "NVIDIA A6000, 48 GB", "PCIe 4.0 x16, 32 GB/s"),
)
UP_TO, BATCH_4 = "up to", "batch 4"
SHARES = {  # FreeKV, figure 1, right, section 1: of a step
    "arkvale": Number(0.94, "about"),
    "shadowkv": Number(0.73, "about"),
    "infinigen": Number(0.53, "about", f"recall alone, {REVIEW}"),
}
SIMILAR, MOST_SIMILAR = 0.84, 0.9  # FreeKV, figure 3(a), section 3.1: all heads' means are over the one, and most over the other
FACTORS = {  # FreeKV, figure 7, section 5.3: latency over FreeKV's
    ("llama-3.1-8b", "long-input", "arkvale"): Number(10, at=REVIEW),
    ("llama-3.1-8b", "long-input", "shadowkv"): Number(5, at=BATCH_4),
    ("llama-3.1-8b", "long-input", "infinigen"): Number(5.1, at=REVIEW),
    ("llama-3.1-8b", "long-generation", "arkvale"): Number(13.7, UP_TO),
    ("llama-3.1-8b", "long-generation", "shadowkv"): Number(8.4, at=BATCH_4),
    ("llama-3.1-8b", "long-generation", "infinigen"): Number(8.5, at=REVIEW),
    ("qwen2.5-7b", "long-input", "arkvale"): Number(5.8, at=REVIEW),
    ("qwen2.5-7b", "long-input", "shadowkv"): Number(2.9, at=BATCH_4),
    ("qwen2.5-7b", "long-input", "infinigen"): Number(3.2, at=REVIEW),
    ("qwen2.5-7b", "long-generation", "arkvale"): Number(7.9, at=REVIEW),
    ("qwen2.5-7b", "long-generation", "shadowkv"): Number(4.9, at=BATCH_4),
    ("qwen2.5-7b", "long-generation", "infinigen"): Number(5.4, at=REVIEW),
}
GAINS = {  # FreeKV, figure 8, section 5.3: of a part on top of those before it
    "+hybrid_layout": Number(10.5, UP_TO),
    "+double_buffer": Number(1.2, at=BATCH_4),
    "+speculation": Number(1.9, at=BATCH_4),
}
LOUISKV_FACTORS = {  # LouisKV, figure 7, section 5.3: ArkVale's latency over LouisKV's
    ("llama-3.1-8b", "long-input", "arkvale"): Number(1.9, UP_TO),
    ("qwen3-8b", "long-generation", "arkvale"): Number(2.9, UP_TO),
    ("qwen3-8b", "long-both", "arkvale"): Number(4.7, UP_TO),
}
LOUISKV_SHARES = {"arkvale": Number(0.65), "louiskv": Number(0.11)}  # the same, of a layer's latency
ACCURACY = {  # FreeKV: table 2 with Llama-3.1-8B-Instruct, overall and CR x Acc, and table 3 with DeepSeek-R1-Llama-8B, avg@k
    "LongBench v2": {"full": 29.22, "razor": 27.44, "raas": 28.23, "quest": 28.43, "arkvale": 28.63, "shadowkv": 25.45, "freekv": 29.22},
    "LongGenBench": {"full": 26.82, "razor": 12.20, "raas": 26.00, "quest": 27.71, "arkvale": 10.36, "shadowkv": 30.66, "freekv": 27.62},
    "AIME24": {"full": 47.08, "razor": 30.00, "raas": 36.25, "quest": 44.17, "arkvale": 46.67, "shadowkv": 36.50, "freekv": 47.50},
}


def kept(method: str) -> tuple[str, ...]:
    """Published accuracies over full attention's, by column of ``ACCURACY``."""
    return tuple(f"{scores[method] / scores['full']:.2f}" if method in scores else "-" for scores in ACCURACY.values())
