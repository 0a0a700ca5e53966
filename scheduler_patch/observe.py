# SPDX-License-Identifier: Apache-2.0
"""The state of the engine in /server_info and /metrics, and the integrity check of an idle server."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import torch

from sglang_freekv.kv_pool import full_allocator, pool_of
from sglang_freekv.metrics import POOLS, Exporter
from sglang_freekv.scheduler_patch import registry
from sglang_freekv.scheduler_patch.arguments import CARRIED
from sglang_freekv.scheduler_patch.quarantine import Quarantine

EXPORT_INTERVAL_S = SWEEP_INTERVAL_S = 1.0
CHECK_INTERVAL_S = 5.0
CHECKED_PAGES = 64


class Observer:
    """Reports on and checks the KV pool of one scheduler.

    Raises:
        Refusal: a canary is on, and the prefix cache cannot forget a page.
    """

    def __init__(self, scheduler) -> None:
        self.whole_allocator = scheduler.token_to_kv_pool_allocator  # of full and of window layers, if there are both
        self.allocator = full_allocator(self.whole_allocator)
        self.rows = scheduler.req_to_token_pool
        self.pool = pool_of(self.whole_allocator.get_kvcache())
        self.quarantine = Quarantine(scheduler) if self.pool.store.canary is not None else None
        self.rested: dict | None = None
        self.is_unchecked = False  # whether there was work since the last check
        self.checks: deque[Callable[[], None]] = deque()  # what is left of a check that has begun
        self.drawing = torch.Generator()  # on a CPU, SGLang samples tokens with the default one
        self.next_export = self.next_check = self.next_sweep = 0.0
        reporter = scheduler.metrics_reporter
        self.exporter = None
        if reporter.enable_metrics:
            self.exporter = Exporter(reporter.metrics_collector.labels)

    def host_pages(self) -> tuple[int, int]:
        """Host pages that requests and the radix tree hold, and all host pages."""
        size = self.allocator.page_size
        total = self.allocator.size // size
        return total - self.allocator.available_size() // size, total

    def state(self) -> dict:
        used, total = self.host_pages()
        return {
            "host_pages_used": used,
            "host_pages_total": total,
            "rows_used": self.rows.size - self.rows.available_size(),
            "rows_total": self.rows.size,
            **self.pool.residency.state(),
            "totals": self.pool.totals.as_dict(),
        }

    def states(self) -> dict[str, int]:
        """Slots for states of linear attention, which SGLang hands out, and their bytes; nothing for a model without."""
        if not hasattr(self.rows, "mamba_allocator"):
            return {}
        slots = self.rows.mamba_allocator
        return {"used": slots.size - slots.available_size(), "total": slots.size, "bytes": int(self.rows.mamba_pool.get_kv_size_bytes())}

    def windows(self) -> dict[str, int]:
        """Tokens that SGLang's pool of window layers has in use and in all, and its bytes; nothing for a model without."""
        whole = self.whole_allocator
        if whole is self.allocator:
            return {}
        num_bytes = sum(whole.get_kvcache().swa_kv_pool.get_kv_size_bytes())
        return {"used": whole.size_swa - whole.swa_available_size(), "total": whole.size_swa, "bytes": int(num_bytes)}

    def metrics(self) -> dict[str, float | dict[str, int]]:
        """The value of each of ``METRICS``; ``pool_bytes`` is a dict by pool."""
        state, built = self.state(), self.pool.describe()
        totals = state.pop("totals")
        totals |= self.pool.recall_times.as_dict() | {
            "recalled_bytes": totals["recalled_units"] * self.pool.store.host.unit_bytes,
            "canary_faults": self.quarantine.faults if self.quarantine else 0,
        }
        bytes_of = {"host": "host_bytes", "digests": "digest_bytes", "dense_layers": "dense_bytes"}
        pool_bytes = {pool: built[bytes_of.get(pool, f"{pool}_bytes")] for pool in POOLS}
        return {f"{name}_total": value for name, value in totals.items()} | state | {"pool_bytes": pool_bytes}

    def export(self) -> None:
        """Bring /metrics up to date, at most once per interval."""
        if self.exporter is not None and time.monotonic() >= self.next_export:
            self.next_export = time.monotonic() + EXPORT_INTERVAL_S
            self.exporter.export(self.metrics())

    def rest(self, somebody_waits: Callable[[], bool]) -> None:
        """While no request runs: update /metrics if there was work since the last call, and go on with a check of the pools.

        Between the parts of a check a request that has arrived is served, unless a canary is on. It waits for no more than a part.
        With a full canary, also examine the next pages in host memory, at most once per ``SWEEP_INTERVAL_S``.

        Args:
            somebody_waits: whether to return, as the scheduler looks for requests before it calls again.
        """
        if self.quarantine is not None:
            self.quarantine.evict()
        self.pool.residency.note_rest()
        self.pool.owners.clear()
        state = self.state()
        if state != self.rested:
            self.rested, self.is_unchecked = state, True
            self.next_export = 0.0
            self.export()
        if self.is_unchecked and not self.checks and time.monotonic() >= self.next_check:
            self.next_check, self.is_unchecked = time.monotonic() + CHECK_INTERVAL_S, False
            self.checks.append(self.begin_check)
        self.check_on(somebody_waits)
        if self.pool.config.canary == "full" and time.monotonic() >= self.next_sweep:
            self.pool.retrieval.complete_all_transfers()
            self.quarantine.sweep_on(self.pool.held_pages(self.allocator), CHECKED_PAGES)
            self.next_sweep = time.monotonic() + SWEEP_INTERVAL_S

    def begin_check(self) -> None:
        """Draw pages for a check. Those that the canary finds changed are quarantined, and not checked."""
        held = self.pool.held_pages(self.allocator)
        pages = held[torch.randperm(len(held), generator=self.drawing)[:CHECKED_PAGES]].to(self.pool.device)
        checks = self.pool.store.checks(self.quarantine.sweep(pages) if self.quarantine else pages, self.pool.retrieval.policy)
        self.checks.extend(checks)

    def check_on(self, somebody_waits: Callable[[], bool]) -> None:
        """Raise RuntimeError on the first broken invariant of a pool, in the parts of the check that are next until somebody waits.

        With a canary a check is not interrupted: a page that changes after it was examined would be taken for a broken pool.
        """
        while self.checks:
            self.pool.retrieval.complete_all_transfers()
            self.checks.popleft()()
            if self.quarantine is None and somebody_waits():
                return


def _observer(scheduler) -> Observer:
    if not hasattr(scheduler, "_freekv_observer"):
        scheduler._freekv_observer = Observer(scheduler)
    return scheduler._freekv_observer


def describe(info: dict, scheduler) -> None:
    """AFTER the scheduler says that it is ready: add settings and sizes to the top level of /server_info."""
    registry.prove(registry.START)
    observer = _observer(scheduler)
    info["freekv"] = observer.pool.describe()
    if states := observer.states():
        info["freekv"] |= {"state_slots": states["total"], "state_bytes": states["bytes"]}
    if windows := observer.windows():
        info["freekv"] |= {"window_pool_tokens": windows["total"], "window_pool_bytes": windows["bytes"]}


def internal_state(output, scheduler, recv_req) -> None:
    """AFTER the scheduler reports its state: add FreeKV's counts, pools in use, canary and recall times."""
    observer = _observer(scheduler)
    for name in CARRIED:
        output.internal_state.pop(name, None)  # SGLang lists every attribute of ServerArgs
    state = observer.state()
    if observer.quarantine is not None:
        state["canary"] = observer.quarantine.as_dict()
    if states := observer.states():
        state["states"] = states
    if windows := observer.windows():
        state["windows"] = windows
    if observer.pool.config.recall_timing:
        state["recall_timing"] = observer.pool.recall_times.as_dict()
    output.internal_state["freekv"] = state


def process_batch_result(original, scheduler, batch, result) -> None:
    """AROUND the processing of a step's results: act on the canary's faults before the tokens leave, and update /metrics after it."""
    _prove(batch)
    observer, step = _observer(scheduler), getattr(result.logits_output, "freekv", None)
    if observer.quarantine is not None and step is not None:
        if result.copy_done is not None:
            result.copy_done.synchronize()
        observer.quarantine.examine(step.faults, batch, step.held)
    original(scheduler, batch, result)
    if observer.quarantine is not None:
        observer.quarantine.evict()
    observer.export()


def _prove(batch) -> None:
    """Raise Drift unless the hooks were called that this step has passed, and those that its requests passed before it."""
    registry.prove(registry.STEP)
    if not batch.is_prefill_only:
        registry.prove(registry.SAMPLE)
    if batch.forward_mode.is_decode() and not all(req.finished() for req in batch.reqs):  # a refused request takes short cuts, and finishes
        registry.prove(registry.DECODE)


def rest_when_idle(scheduler) -> None:
    """BEFORE the scheduler's idle housekeeping, which may put it to sleep: check the pools and update /metrics.

    A scheduler that does not sleep looks for requests right behind. One that sleeps tells by its sockets whether there are any. Ranks but
    the first have none, and wait for the first while it sleeps.
    """
    if scheduler.is_fully_idle():
        sockets = getattr(scheduler.idle_sleeper, "poller", None)
        sleeps = scheduler.server_args.sleep_on_idle
        _observer(scheduler).rest(lambda: bool(sockets.poll(0)) if sockets is not None else not sleeps)
