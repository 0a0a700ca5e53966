"""Published benchmarks as they are to be run: the evaluator of each, and the settings of the server and of sampling.

Budget, sink, window, tau, sampling, lengths and models are those of the FreeKV paper (section 5); RULER is not in it, and has the
settings that the paper uses for long input.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

GENERAL = ("meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-14B-Instruct")
REASONING = tuple(f"deepseek-ai/DeepSeek-R1-Distill-{base}" for base in ("Llama-8B", "Qwen-7B", "Qwen-14B"))
PAPER_PAGE, PAPER_DIGEST, PAPER_POOLING = 32, "min-max", "softmax-mean"


@dataclass(frozen=True)
class Dataset:
    """A data set of the Hugging Face hub."""

    path: str
    split: str
    name: str | None = None

    def __str__(self) -> str:
        return "/".join(filter(None, (self.path, self.name, self.split)))


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn; ``samples`` of them for each question."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    samples: int = 1


@dataclass(frozen=True)
class Preset:
    """One benchmark.

    Args:
        about: what the FreeKV paper reports of it.
        evaluator: key of ``evaluators.EVALUATORS``.
        offline: the one that takes ``--data``; None, the same.
        models: of the paper, the first one being the default.
        sink, window, tau: of the server, in tokens and as a cosine.
        sampling: None where the tasks set it.
        columns: the scores to show, in percent.
        dataset: where questions come from without ``--data``; None, from the evaluator or nowhere.
        max_input: tokens that a prompt is cut to, in its middle.
        lengths: context lengths, one run of the evaluator for each.
        limit: questions that are asked, from the first; None, all.
        budget: of the server, in tokens.
    """

    name: str
    about: str
    evaluator: str
    models: tuple[str, ...]
    sink: int
    window: int
    tau: float
    sampling: Sampling | None
    columns: tuple[str, ...]
    offline: str | None = None
    dataset: Dataset | None = None
    max_input: int | None = None
    lengths: tuple[int, ...] = ()
    limit: int | None = None
    budget: int = 2048

    @property
    def parts(self) -> tuple[int | None, ...]:
        """The context length of each run of the evaluator; None, the questions' own."""
        return self.lengths or (None,)

    def server_flags(self) -> dict[str, object]:
        return {
            "--kv-retrieval": "freekv",
            "--freekv-preset": "paper",
            "--freekv-budget": self.budget,
            "--freekv-sink": self.sink,
            "--freekv-window": self.window,
            "--freekv-tau": self.tau,
            "--freekv-digest": PAPER_DIGEST,
        }

    def server_command(self, model: str, dense: bool = False) -> str:
        """What to type for a server to be measured; ``dense``, for stock SGLang to compare with."""
        flags = {"--model-path": model} | ({} if dense else self.server_flags())
        return shlex.join(["python", "-m", "sglang.launch_server", *(str(word) for pair in flags.items() for word in pair)])

    def differences(self, built: dict) -> list[str]:
        """What of a server's ``freekv`` block is not as in the preset, one line each."""
        expected = {"budget_tokens": self.budget, "sink_tokens": self.sink, "window_tokens": self.window, "tau": self.tau}
        expected |= {"page_size": PAPER_PAGE, "digest": PAPER_DIGEST, "pooling": PAPER_POOLING, "dense_layers": [0]}
        actual = {name: built.get(name) for name in expected}
        return [f"{name}: expected {value}, the server has {actual[name]}" for name, value in expected.items() if actual[name] != value]


def _reasoning(name: str, questions: str, dataset: Dataset, limit: int | None) -> Preset:
    about = f"pass@8 and avg@8 of {questions}, 16K tokens, T .6, top-p .95"
    sampling = Sampling(max_tokens=16384, temperature=0.6, top_p=0.95, samples=8)
    columns = ("pass@8", "avg@8", "boxed")
    return Preset(name, about, "lm_eval_boxed", REASONING, 512, 512, 0.9, sampling, columns, dataset=dataset, limit=limit)


PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            "ruler",
            "not in the paper",
            "lm_eval_ruler",
            GENERAL,
            sink=128,
            window=128,
            tau=0.8,
            sampling=None,
            columns=("mean",),
            offline="ruler_files",
            lengths=(4096, 8192, 16384, 32768, 65536),
        ),
        Preset(
            "longbench_v2",
            "accuracy overall and by length, prompts cut to 64K tokens, greedy",
            "sglang_longbench_v2",
            GENERAL,
            sink=128,
            window=128,
            tau=0.8,
            sampling=Sampling(max_tokens=128),
            columns=("overall", "short", "medium", "long"),
            dataset=Dataset("THUDM/LongBench-v2", "train"),
            max_input=65536,
        ),
        Preset(
            "longgenbench",
            "CR, Acc and CR x Acc, 16K tokens generated, T .95, top-p .95, judged by Qwen3-32B",
            "longgenbench",
            GENERAL,
            sink=512,
            window=512,
            tau=0.9,
            sampling=Sampling(max_tokens=16000, temperature=0.95, top_p=0.95),
            columns=("completion_rate", "accuracy", "overall"),
        ),
        _reasoning("math500", "50 problems", Dataset("HuggingFaceH4/MATH-500", "test"), 50),
        _reasoning("aime24", "all 30 problems", Dataset("Maxwell-Jia/AIME_2024", "train"), None),
        _reasoning("gpqa_diamond", "50 problems of GPQA", Dataset("Idavidrein/gpqa", "train", "gpqa_diamond"), 50),
    )
}
