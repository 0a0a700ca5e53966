"""Figure 8 of the FreeKV paper: what each part of the system saves: alone, stacked one on the other, and taken away from the whole.

    python -m benchmarks.paper.ablation --shape llama-3.1-8b --batches 1 4 8

The first four are the paper's, on a copy engine, launched kernel by kernel; the others are this project's.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, product
from typing import NamedTuple

import torch

from benchmarks.clock import Clock
from benchmarks.paper.decoder import TINY, Decoder, Shape
from benchmarks.paper.method import Method, Work
from benchmarks.paper.methods.engine import Engine
from benchmarks.paper.parts import bound_of
from benchmarks.paper.pools import Pools
from benchmarks.paper.settings import add_settings, is_there, settings_of
from benchmarks.paper.step import measured
from benchmarks.profiles import CORRECTED, MISSED
from benchmarks.report import Report, arguments, chosen, say, table
from benchmarks.timing import Ceilings
from sglang_freekv import kernels
from sglang_freekv.config import FreeKVConfig
from sglang_freekv.memory_pool.copy_engine import CopyEngineRecall


@dataclass(frozen=True)
class System:
    """What is switched on.

    Args:
        hybrid_layout: units lie in one piece in host memory (HND), not token by token.
        double_buffer: one buffer of units is converted while the other is being copied.
        speculation: pages are selected and recalled a step ahead; the others are corrected. Without it every kv head waits.
        device_side: whether a kv head is to be corrected, and what is missing, is not asked by the host.
        zero_copy: a gather kernel reads host memory; no copy engine, no buffers.
        graph: a step is one CUDA graph.
        slack: pages of twice the budget stay.
    """

    hybrid_layout: bool = False
    double_buffer: bool = False
    speculation: bool = False
    device_side: bool = False
    zero_copy: bool = False
    graph: bool = False
    slack: bool = False

    @property
    def asks(self) -> bool:
        """Whether the host must know which kv heads are corrected: where none is ahead all are."""
        return self.speculation and not self.device_side

    def config(self, budget: int, page: int) -> FreeKVConfig:
        return FreeKVConfig(
            budget_tokens=budget,
            sink_tokens=budget // 4,
            window_tokens=budget // 4,
            page_size=page,
            device_cache_tokens=2 * budget if self.slack else None,
            host_layout="hnd" if self.hybrid_layout else "nhd",
        )

    def build(self, work: Work) -> Method:
        pools, recall = work.pools, kernels.recall_pages
        if not self.zero_copy:
            recall = CopyEngineRecall(pools.store.host.layers[0].shape[2:], pools.dtype, pools.device)
            if not self.double_buffer:
                recall.buffers = recall.buffers[:1] * 2
                if recall.on_gpu:
                    recall.converted = recall.converted[:1] * 2
        return Engine(work, corrected=None if self.speculation else 1.0, recall=recall, captured=self.graph, asks=self.asks)


ORDER = ("hybrid_layout", "double_buffer", "speculation", "zero_copy", "device_side", "graph", "slack")
ALONE = ("double_buffer", "speculation", "zero_copy", "slack")  # a copy engine's host asks anyway, and a graph cannot
LEFT_OUT = ("hybrid_layout", "speculation", "graph")  # a graph asks nobody, and without the copy engine there are no buffers
WHOLE = "+graph"  # the product's default; what slack saves rests on how soon pages come back, which the replay assumes
STACK = accumulate(ORDER, lambda system, name: replace(system, **{name: True}), initial=System())
SYSTEMS = dict(zip(("base", *(f"+{name}" for name in ORDER)), STACK))
SYSTEMS |= {f"only-{name}": System(**{name: True}) for name in ALONE}
SYSTEMS |= {f"-{name}": replace(SYSTEMS[WHOLE], **{name: False}) for name in LEFT_OUT}


class Row(NamedTuple):
    """A measured step.

    Args:
        seconds, without: of a step, and of one without copies.
        bound: seconds that its bytes take at least.
        whole: how often the whole system's step fits in it.
    """

    context: int
    batch: int
    system: str
    seconds: float
    without: float
    bound: float
    whole: float | None


def rows(results: dict, runs: list[dict]) -> list[Row]:
    found = {}
    for key, result in results.items():
        context, batch, name = key.split("/")
        found[int(context), int(batch[1:]), name] = result
    lines = []
    for key in sorted(found, key=lambda key: (*key[:2], list(SYSTEMS).index(key[2]))):
        result, whole = found[key], found.get((*key[:2], WHOLE))
        seconds, without = result["seconds"]["median"], result.get("without_copies", result["seconds"])["median"]
        bound = bound_of(result["bytes"], runs[result["run"]]["ceilings"])
        lines.append(Row(*key, seconds, without, bound, whole and seconds / whole["seconds"]["median"]))
    return lines


def shown(report: Report) -> str:
    found = rows(report.results, report.runs)
    lines = [(*row[:3], *(each * 1e3 for each in row[3:6]), row.seconds / row.bound, row.whole) for row in found]
    return table(("context", "batch", "system", "ms a step", "without copies", "least", "/ least", "/ whole"), lines)


def measure(shape: Shape, options, wanted, report: Report) -> None:
    """What is left, system by system; those with the same pools follow each other, because pinning takes time."""
    settings, left = settings_of(options), {}
    for (name, system), context, batch in product(SYSTEMS.items(), options.contexts, options.batches):
        key = f"{context}/b{batch}/{name}"
        if wanted(key) and not is_there(report.results, key, settings, options.force):
            left.setdefault(system.config(options.budget, options.page_size), []).append((key, system, context, batch))
    if not left:
        return
    dtype, clock = torch.bfloat16 if options.device == "cuda" else torch.float32, Clock(options.minutes)
    decoder = Decoder(shape, dtype, options.device)
    report.note(ceilings=asdict(Ceilings.measure(options.device)))
    for config, cases in left.items():
        with report.part(f"{config.host_layout} units, {config.device_cache_tokens} tokens of a row: {len(cases)} steps"):
            pools = Pools(shape, config, max(options.batches), options.host_tokens, dtype, options.device)
            for key, system, context, batch in cases:
                if clock.is_over:
                    report.failures.append(f"{key}: not reached in {options.minutes:g} minutes; the same command goes on")
                    continue
                with report.part(key, quiet=True):
                    work = Work.of(pools, batch, context, options.corrected, options.missed)
                    report.add(key, settings | measured(decoder, work, system.build, options.repeats))
                    say(f"{key}: {report.results[key]['seconds']['median'] * 1e3:.2f} ms")
            pools.close()


def main() -> int:
    names = [f"CONTEXT/bBATCH/{name}" for name in SYSTEMS]
    parser = arguments(__doc__, "paper-ablation-SHAPE", names)
    parser.add_argument("--contexts", type=int, nargs="+", default=[32768])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--corrected", type=float, default=CORRECTED[0.8], help="c: the share of corrected kv heads")
    parser.add_argument("--missed", type=float, default=MISSED, help="x: the share of the selected units that are missing")
    add_settings(parser, host_tokens=1 << 16)
    options = parser.parse_args()
    shape = TINY if options.shape == "tiny" else Shape.of(options.shape)
    report = Report(f"paper-ablation-{shape.name}", options.out)
    if not options.tables:
        measure(shape, options, chosen(options), report)
    return report.finish(shown(report))


if __name__ == "__main__":
    sys.exit(main())
