"""Which resident pages should give way? Replays made-up traffic against a model of frames, rows and the radix tree.

A tick is the time in which every running row fills one page. Rows keep their pages while they run. Requests start in order
of arrival, so residency never moves a start, and the optimum (Belady) knows the next use of each page.
"""

import itertools
import sys

import numpy as np

from benchmarks.report import Report, arguments
from benchmarks.residency_traces import TRACES, Request

POLICIES = ("last use", "last use, deeper first", "last selection", "decayed use", "belady")
NEVER = 1 << 40


def schedule(requests: list[Request], rows: int) -> list[int]:
    """The tick in which each request starts: first in, first out, `rows` at once."""
    free, starts = [0] * rows, []
    for request in requests:
        row = free.index(min(free))
        starts.append(max(request.arrival, free[row]))
        free[row] = starts[-1] + len(request.answer) + 1
    return starts


class Simulation:
    def __init__(self, requests, rows: int, frames: int, policy: str, batch: int = 0, thrash: int = 4, seed: int = 0):
        self.requests, self.starts = requests, schedule(requests, rows)
        self.frames, self.policy, self.batch, self.thrash = frames, policy, batch, thrash
        self.rng = np.random.default_rng(seed)
        n = 1 + max(max(r.prompt + r.answer) for r in requests)
        self.resident, self.seen = np.zeros(n, bool), np.zeros(n, bool)
        self.used, self.selected, self.given_up = np.full(n, -1), np.full(n, -1), np.full(n, -NEVER)
        self.count, self.depth = np.zeros(n), np.zeros(n, int)
        self.uses = [[] for _ in range(n)]
        for request, start in zip(requests, self.starts):
            for depth, page in enumerate(request.prompt + request.answer):
                self.depth[page] = depth
            for page in request.prompt:
                self.uses[page].append(start)
        self.out = dict.fromkeys(
            (
                "hit pages",
                "hits resident",
                "prompt pages",
                "streamed",
                "selected",
                "selected resident",
                "given up",
                "thrash",
                "no frame",
                "ticks",
            ),
            0,
        )

    def next_use(self, page: int, now: int) -> int:
        return next((t for t in self.uses[page] if t > now), NEVER)

    def victims(self, pages, now: int):
        """`pages` in the order in which they give way."""
        if self.policy == "belady":
            return pages[np.argsort([-self.next_use(p, now) for p in pages], kind="stable")]
        key = {"last selection": self.selected, "decayed use": self.count}.get(self.policy, self.used)[pages]
        tie = -self.depth[pages] if self.policy == "last use, deeper first" else pages
        return pages[np.lexsort((tie, key))]

    def reclaim(self, need: int, running, now: int) -> None:
        short = need - (self.frames - int(self.resident.sum()))
        if short <= 0:
            return
        idle = self.resident.copy()
        idle[running] = False
        gone = self.victims(np.flatnonzero(idle), now)[: short + self.batch]
        self.resident[gone] = False
        self.given_up[gone] = now
        self.out["given up"] += len(gone)

    def hold(self, pages, running, now: int) -> None:
        pages = pages[~self.resident[pages]]
        self.reclaim(len(pages), running, now)
        held = pages[: max(0, self.frames - int(self.resident.sum()))]
        self.out["thrash"] += int((now - self.given_up[held] <= self.thrash).sum())
        self.out["no frame"] += len(pages) - len(held)
        self.resident[held] = True

    def select(self, context, now: int) -> None:
        """A made-up selection: the newest eighth of a context, and as many draws that are Zipf-like over depth."""
        k = max(1, len(context) // 8)
        zipf = np.minimum(self.rng.zipf(1.5, k) - 1, len(context) - 1)
        chosen = np.union1d(context[-k:], context[zipf])
        self.selected[chosen] = now
        self.out["selected"] += len(chosen)
        self.out["selected resident"] += int(self.resident[chosen].sum())

    def run(self) -> dict:
        begun = sorted(zip(self.starts, range(len(self.starts))))
        active, now = [], 0
        while begun or active:
            active = [i for i in active if now - self.starts[i] <= len(self.requests[i].answer)]
            new = []
            while begun and begun[0][0] <= now:
                new.append(begun.pop(0)[1])
            active += new
            contexts = [np.array(r.prompt + r.answer[: now - s]) for r, s in ((self.requests[i], self.starts[i]) for i in active)]
            running = np.unique(np.concatenate(contexts)) if contexts else np.empty(0, int)
            for i in new:
                prompt = np.array(self.requests[i].prompt)
                hits = prompt[self.seen[prompt]]
                self.out["hit pages"] += len(hits)
                self.out["hits resident"] += int(self.resident[hits].sum())
                self.out["streamed"] += int((~self.resident[hits]).sum())
                self.out["prompt pages"] += len(prompt)
                self.hold(prompt, running, now)
                self.seen[prompt] = True
            fresh = running[~self.seen[running]]
            self.hold(fresh, running, now)
            self.seen[running], self.used[running] = True, now
            self.count *= 0.98
            self.count[running] += 1
            for context in contexts:
                self.select(context, now)
            now += 1
        return self.out | {"ticks": now}


def measure(context: int, rows: int, frames: int, requests: int, seed: int):
    """Yields (trace, policy, pages given up beyond the need, counts)."""
    for name, make in TRACES.items():
        few = max(rows, requests // 8) if name == "long generation" else requests
        trace = make(np.random.default_rng(seed), context, few)
        for batch in (0, frames // 64, frames // 16):
            for policy in POLICIES:
                yield name, policy, batch, Simulation(trace, rows, frames, policy, batch).run()


def main() -> int:
    parser = arguments(__doc__, "residency")
    for name, value in (("context", 64), ("rows", 8), ("requests", 200)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--frames", type=int, nargs="+", default=[640, 768, 1024])
    parser.add_argument("--seeds", type=int, nargs="+", default=[29, 30, 31])
    options = parser.parse_args()
    report = Report("residency", options.out)
    for frames, seed in itertools.product(options.frames, options.seeds):
        for trace, policy, batch, counts in measure(options.context, options.rows, frames, options.requests, seed):
            report.add(f"{trace}/{policy}/frames {frames}/batch {batch}/seed {seed}", counts)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
