"""How far each method is from dense attention on real weights and real texts, teacher-forced, without a network.

    python -m benchmarks.accuracy.smollm2                                                    # once: the weights
    python -m benchmarks.accuracy.real --methods full 'freekv*' quest --lengths 2048 4096 --budgets 512

A text is prefilled densely but for its last tokens. Each method then reads these one by one. A result that is there is not computed again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from benchmarks.accuracy import smollm2, texts
from benchmarks.accuracy.fitting import PERIOD, REPEATS, Fitting
from benchmarks.accuracy.forced import Distance, Texts
from benchmarks.accuracy.grid import budget_of, is_done, model_digest
from benchmarks.accuracy.mass import Watched
from benchmarks.accuracy.method import AS_COMPUTED, Budget, Method
from benchmarks.accuracy.methods import METHODS
from benchmarks.accuracy.methods.freekv import FreeKV
from benchmarks.accuracy.model import OfflineModel
from benchmarks.accuracy.real_tables import document
from benchmarks.accuracy.rows import DENSE
from benchmarks.accuracy.run import DTYPES, Progress, by_kv_dtypes, queries_read
from benchmarks.accuracy.tally import Tally
from benchmarks.accuracy.thresholds import ALWAYS, NEVER
from benchmarks.report import Report, arguments, chosen, say
from sglang_freekv.layer_taus import LayerTaus

BY_LAYER = "freekv-tau-by-layer"  # the method of --tau-by-layer
LENGTHS, BUDGETS = (2048, 4096, 8192), (512, 1024, 2048)


@dataclass
class Work:
    """One method with one budget on texts of one length, under way.

    Args:
        identity: what the result depends on; two results that agree in it are the same.
    """

    method: Method
    budget: Budget
    identity: dict
    tally: Tally
    distance: Distance = field(default_factory=Distance)

    @property
    def result(self) -> dict:
        return self.identity | self.distance.result | {"trace": self.tally.summary()}


class Grid:
    """What is asked for.

    Args:
        entries: of ``METHODS``, by name.
        common: of every result's identity.
    """

    def __init__(self, model: OfflineModel, entries: dict, common: dict, options: argparse.Namespace) -> None:
        period = min(PERIOD, (model.config.max_position_embeddings - 1) // REPEATS)
        self.fitting, self.entries, self.common, self.options = Fitting(model, options.dense_layers, period), entries, common, options

    def works(self, length: int, results: dict) -> dict[str, Work]:
        """What is not there yet, at one length."""
        options, wanted, works = self.options, chosen(self.options), {}
        for name, entry in self.entries.items():
            for total in [max(options.budgets)] if name == DENSE else options.budgets:
                key, budget = f"{length}/{'all' if name == DENSE else total}/{name}", budget_of(total, options.page)
                if not wanted(key):
                    continue
                method = self.fitting.fit(entry)
                identity = self.common | {"length": length, "method": name, "settings": repr(method)}
                identity |= {"budget": None if name == DENSE else asdict(budget)}
                if options.force or not is_done(results, key, identity):
                    works[key] = Work(Watched(method), budget, identity, Tally(self.fitting.model.layers, options.dense_layers))
        return works

    def methods(self, work: Work) -> list[Method]:
        """One for each layer."""
        dense, layers = self.options.dense_layers, self.fitting.model.layers
        full = self.fitting.fit(METHODS[DENSE])
        return [full] * dense + [work.method] * (layers - dense)


def run_length(grid: Grid, works: dict[str, Work], token_ids: torch.Tensor, report: Report, progress: Progress) -> None:
    """Follow texts ``[documents, length + 1]`` with every method; one that fails is left out from then on."""
    model, options, length = grid.fitting.model, grid.options, token_ids.shape[1] - 1
    for batch in token_ids.split(options.batch):
        queries = queries_read([work.method for work in works.values()])
        forced = Texts.of(model, batch, options.steps, queries)
        for kv_dtypes, alike in by_kv_dtypes(works, model, options.dense_layers).items():
            if set(kv_dtypes) != {AS_COMPUTED}:
                forced = forced.stored(model, queries, kv_dtypes)
            for key, work in alike.items():
                with report.part(key, quiet=True):
                    work.distance.add(model, forced, grid.methods(work), work.budget, work.tally)
                    if (done := len(work.distance.kl)) == len(token_ids):
                        report.add(key, work.result)
                    progress.add(length * len(batch), f"{key}, {done} of {len(token_ids)} texts")
                    continue
                del works[key]
        del forced  # before the next one takes as much


def load(options: argparse.Namespace) -> tuple[OfflineModel, PreTrainedTokenizerBase, str]:
    """The model, its tokenizer, and a digest of its weights."""
    path = options.model or smollm2.checkpoint()
    digest = model_digest(path) if options.model else smollm2.SHA256[:12]
    return OfflineModel(path, options.device, DTYPES[options.dtype]), AutoTokenizer.from_pretrained(path), digest


def ensure_alike(report: Report, common: dict) -> None:
    """Raise ValueError if the file has results of another model or of other texts, which would end up in one table with these."""
    for name in ("model", "texts"):
        if others := {str(result[name]) for result in report.results.values()} - {common[name]}:
            raise ValueError(
                f"{report.path} is of {name} {', '.join(sorted(others))}, and this is {common[name]}: use another --name or --out"
            )


def by_layer(path: Path, model: OfflineModel, dense_layers: int) -> FreeKV:
    """FreeKV with thresholds by layer.

    Raises:
        Refusal: the file is not one of this model's thresholds, or a layer behind the ``dense_layers`` first has none.
    """
    held = LayerTaus.read("", path)
    held.expect_model(model.config.architectures[0], model.layers, range(dense_layers, model.layers))
    return FreeKV(tau=tuple(NEVER if tau is None else min(ALWAYS, max(NEVER, tau)) for tau in held.taus))


def measure(methods: dict[str, Method | Callable[[], Method]], options: argparse.Namespace) -> int:
    """All that is asked for and not there yet; the exit status.

    Raises:
        FileNotFoundError: the weights are nowhere.
        ValueError: the options, the weights or earlier results do not fit together.
    """
    model, tokenizer, digest = load(options)
    least, most, window = min(options.lengths), max(options.lengths), model.config.max_position_embeddings
    if most > window:
        raise ValueError(f"--lengths {most}: expected at most {window}, the context of the model")
    if not 1 < options.steps < least:
        raise ValueError(f"--steps {options.steps}: expected 2 to {least - 1}, fewer than the shortest of --lengths")
    if options.tau_by_layer is not None:
        methods = methods | {BY_LAYER: by_layer(options.tau_by_layer, model, options.dense_layers)}
    asked = {name: methods[name] for name in sorted(methods, key=lambda name: name != DENSE)}
    asked = {name: method for name, method in asked.items() if any(fnmatch(name, pattern) for pattern in options.methods)}
    if options.tau_by_layer is not None and BY_LAYER not in asked:
        raise ValueError(
            f"--methods {' '.join(options.methods)}: expected {BY_LAYER} among them beside --tau-by-layer, found it in none; add it, or leave "
            "--tau-by-layer out"
        )
    documents, report = texts.documents(options.documents), Report(options.name, options.out)
    common = {"model": digest, "dtype": options.dtype, "dense_layers": options.dense_layers, "steps": options.steps}
    common |= {"texts": texts.digest(documents), "documents": len(documents)}
    ensure_alike(report, common)
    token_ids = torch.tensor([each.token_ids(tokenizer, most + 1) for each in documents])
    grid = Grid(model, asked, common, options)
    planned = {length: works for length in options.lengths if (works := grid.works(length, report.results))}
    progress = Progress(sum(length * len(documents) * len(works) for length, works in planned.items()))
    say(f"{sum(map(len, planned.values()))} results are to be computed, on {len(documents)} texts")
    if planned:
        report.note(documents=[each.name for each in documents])
    for length, works in planned.items():
        with report.part(f"{length}", quiet=True):
            run_length(grid, works, token_ids[:, : length + 1], report, progress)
    return report.finish(document(list(report.results.values())))


def parser_of(methods: dict) -> argparse.ArgumentParser:
    parser = arguments(__doc__, "NAME", ("LENGTH/BUDGET/METHOD",))
    parser.add_argument("--model", type=Path, help=f"a checkpoint with its tokenizer, in place of {smollm2.PACKAGE}'s")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32", help="of weights and KV")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=list(LENGTHS), metavar="TOKENS", help="of a text, the last steps included"
    )
    parser.add_argument("--budgets", type=int, nargs="+", default=list(BUDGETS), metavar="TOKENS", help="sink and window included")
    parser.add_argument("--methods", nargs="+", default=["*"], metavar="METHOD", help=f"wildcards allowed: {', '.join(methods)}")
    parser.add_argument("--documents", type=int, default=16, help="texts")
    parser.add_argument("--steps", type=int, default=128, help="tokens of each text that are read one by one")
    parser.add_argument(
        "--batch", type=int, default=4, help="texts that are followed together; with all of them, results are written one by one"
    )
    parser.add_argument("--page", type=int, default=32, help="tokens of a page")
    parser.add_argument("--dense-layers", type=int, default=1, help="first layers that attend to everything")
    parser.add_argument("--tau-by-layer", type=Path, metavar="FILE", help="adds freekv-tau-by-layer, with these thresholds")
    parser.add_argument("--name", default="real", help="results are NAME.json")
    parser.add_argument("--force", action="store_true", help="measure again what is there; the earlier result is kept as superseded")
    parser.add_argument("--tables", action="store_true", help="print the tables of the results that are there, and measure nothing")
    return parser


def main(methods: dict[str, Method | Callable[[], Method]] = METHODS) -> int:
    """Exit status: 1 if something failed."""
    options = parser_of(methods).parse_args()
    if options.tables:
        print(document(list(json.loads((options.out / f"{options.name}.json").read_text())["results"].values())))
        return 0
    try:
        return measure(methods, options)
    except (FileNotFoundError, ValueError) as error:
        raise SystemExit(f"{error}") from None


if __name__ == "__main__":
    sys.exit(main())
