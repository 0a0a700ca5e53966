"""Accuracy of KV compression methods on the same prompts: tasks x lengths x budgets x methods, without a server.

    python -m benchmarks.accuracy.run --lengths 1024 4096 --budgets 256 512 --methods full 'freekv*' quest

Each batch of prompts is prefilled once, densely, for all methods and budgets that store KV alike. A result that is there is not computed again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch

import torch

from benchmarks.accuracy import summarise
from benchmarks.accuracy.coded import kv_dtype_of, kv_dtypes_of
from benchmarks.accuracy.fitting import Fitting
from benchmarks.accuracy.grid import DENSE, Cell, add_arguments, budget_of, is_done, open_report, score
from benchmarks.accuracy.method import AS_COMPUTED, Budget, Method
from benchmarks.accuracy.methods import METHODS
from benchmarks.accuracy.model import OfflineModel
from benchmarks.accuracy.tally import Tally
from benchmarks.report import Report, arguments, chosen, say

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Work:
    """One method with one budget on one cell, under way.

    Args:
        identity: what the result depends on; two results that agree in it are the same.
        seconds: of decoding, so far.
    """

    method: Method
    budget: Budget
    identity: dict
    tally: Tally
    scores: dict[int, float] = field(default_factory=dict)
    generated: dict[int, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def result(self) -> dict:
        by_prompt = {name: [value for _, value in sorted(getattr(self, name).items())] for name in ("scores", "generated")}
        return self.identity | by_prompt | {"decode_s": round(self.seconds, 3), "trace": self.tally.summary()}


class Progress:
    """What is done of all work, and when the rest will be.

    Args:
        total: of any unit.
    """

    def __init__(self, total: float) -> None:
        self.total, self.done, self.started = total, 0.0, time.monotonic()

    def add(self, amount: float, text: str) -> None:
        self.done += amount
        left = (time.monotonic() - self.started) * (self.total / self.done - 1)
        say(f"{self.done / self.total:4.0%}, {left / 60:.1f} min left: {text}")


def queries_read(methods: list[Method]) -> int | None:
    """Queries of a prompt's last positions that the methods read; None is all."""
    asked = [method.prompt_queries for method in methods]
    return None if None in asked else max(asked)


def by_kv_dtypes(works: dict, model: OfflineModel, dense_layers: int) -> dict[tuple[str, ...], dict]:
    """The works that a prefill serves, by how each layer stores KV, those as computed first."""
    groups: dict[tuple[str, ...], dict] = {}
    for key, work in sorted(works.items(), key=lambda each: kv_dtype_of(each[1].method) != AS_COMPUTED):
        groups.setdefault(kv_dtypes_of(work.method, dense_layers, model.layers), {})[key] = work
    return groups


def run_cell(model: OfflineModel, cell: Cell, works: dict[str, Work], full: Method, dense_layers: int, batch: int, report: Report) -> None:
    """Answer a cell's prompts by every method; one that fails is left out from then on."""
    for numbers in cell.batches(batch):
        token_ids = torch.tensor([list(map(int, cell.prompts[number].token_ids)) for number in numbers])
        for kv_dtypes, alike in by_kv_dtypes(works, model, dense_layers).items():
            prefilled = model.prefill(token_ids, queries_read([work.method for work in alike.values()]), kv_dtypes)
            for key, work in alike.items():
                with report.part(key, quiet=True):
                    started, methods = time.monotonic(), [full] * dense_layers + [work.method] * (model.layers - dense_layers)
                    answers = model.decode(prefilled, methods, work.budget, cell.new_tokens, model.stop_tokens, work.tally)
                    work.seconds += time.monotonic() - started
                    for number, answer in zip(numbers, answers, strict=True):
                        work.scores[number], work.generated[number] = score(cell.prompts[number], answer), len(answer)
                    continue
                del works[key]
            del prefilled  # before the next one takes as much
    for key, work in works.items():
        report.add(key, work.result)


def works_of(cell: Cell, entries: dict, fitting: Fitting, options, common: dict, wanted, results: dict) -> dict[str, Work]:
    """What is asked for and not there yet."""
    works = {}
    for name, entry in entries.items():
        for total in [max(options.budgets)] if name == DENSE else options.budgets:
            key, budget = cell.key(total, name), budget_of(total, options.page)
            if not wanted(key):
                continue
            method = fitting.fit(entry)
            identity = common | {"task": cell.task, "length": cell.length, "method": name, "digest": cell.digest, "settings": repr(method)}
            identity |= {"budget": None if name == DENSE else asdict(budget)}
            if options.force or not is_done(results, key, identity):
                tally = Tally(fitting.model.layers, 0 if name == DENSE else options.dense_layers, watch_queries=name == DENSE)
                works[key] = Work(method, budget, identity, tally)
    return works


def main(methods: dict[str, Method | Callable[[], Method]] = METHODS) -> int:
    """Exit status: 1 if something failed or a method is better than is possible."""
    parser = arguments(__doc__, "NAME-offline", ("TASK/LENGTH/BUDGET/METHOD",))
    add_arguments(parser)
    parser.add_argument("--methods", nargs="+", default=["*"], metavar="METHOD", help=f"wildcards allowed: {', '.join(methods)}")
    parser.add_argument("--batch", type=int, default=8, help="prompts that are computed together; fewer need less memory")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="of weights and KV; float32 on a CPU, else bfloat16")
    options = parser.parse_args()
    dtype = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
    report, common = open_report("offline", dtype, options)
    asked = {name: methods[name] for name in sorted(methods, key=lambda name: name != DENSE)}
    asked = {name: method for name, method in asked.items() if any(fnmatch(name, pattern) for pattern in options.methods)}
    model = OfflineModel(options.model, options.device, DTYPES[dtype])
    fitting = Fitting(model, options.dense_layers)
    full = fitting.fit(methods[DENSE])
    wanted = chosen(options)
    cells = [Cell.ask(task, length, options.prompts, options.seed) for length in options.lengths for task in options.tasks]
    planned = [(cell, works_of(cell, asked, fitting, options, common, wanted, report.results)) for cell in cells]
    todo = [(cell, works) for cell, works in planned if works]
    progress = Progress(sum(cell.length * len(works) for cell, works in todo))
    say(f"{sum(len(works) for _, works in todo)} results are to be computed, {sum(not works for _, works in planned)} cells are complete")
    for cell, works in todo:
        amount, name = cell.length * len(works), f"{cell.task}/{cell.length}"
        with report.part(name, quiet=True):
            run_cell(model, cell, works, full, options.dense_layers, options.batch, report)
        progress.add(amount, f"{name}, {len(works)} results")
    return summarise.conclude(report, options.out, options.name)


if __name__ == "__main__":
    sys.exit(main())
