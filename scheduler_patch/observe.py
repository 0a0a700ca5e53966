"""What the engine shows: /server_info, /metrics, and the integrity check of an idle server."""

from __future__ import annotations

import time

from sglang_freekv.kv_pool import FreeKVPool
from sglang_freekv.metrics import Exporter

EXPORT_INTERVAL_S = 1.0
CHECK_INTERVAL_S = 5.0  # a request that comes meanwhile waits for the check


class Observer:
    """Watches the pool of one scheduler."""

    def __init__(self, scheduler) -> None:
        self.allocator = scheduler.token_to_kv_pool_allocator
        self.rows = scheduler.req_to_token_pool
        self.pool: FreeKVPool = self.allocator.get_kvcache()
        self.rested: dict | None = None
        self.next_export = self.next_check = 0.0
        reporter = scheduler.metrics_reporter
        self.exporter = None
        if reporter.enable_metrics:
            self.exporter = Exporter(reporter.metrics_collector.labels, self.pool.store.host.unit_bytes)

    def host_pages(self) -> tuple[int, int]:
        """Host pages held by requests and the radix tree, and all."""
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
            "totals": self.pool.totals.as_dict(),
        }

    def export(self) -> None:
        """Bring /metrics up to date, at most once per interval."""
        if self.exporter is not None and time.monotonic() >= self.next_export:
            self.next_export = time.monotonic() + EXPORT_INTERVAL_S
            self.exporter.export(self.pool.totals, *self.host_pages())

    def rest(self) -> None:
        """After a spell of work: check the pools, unless that was just done, and leave /metrics up to date."""
        state = self.state()
        if state != self.rested:
            self.rested = state
            if time.monotonic() >= self.next_check:
                self.pool.check_integrity(self.allocator)
                self.next_check = time.monotonic() + CHECK_INTERVAL_S
            self.next_export = 0.0
            self.export()


def _observer(scheduler) -> Observer:
    if not hasattr(scheduler, "_freekv_observer"):
        scheduler._freekv_observer = Observer(scheduler)
    return scheduler._freekv_observer


def describe(info: dict, scheduler) -> None:
    """AFTER the scheduler says that it is ready: what was built, for the top level of /server_info."""
    info["freekv"] = _observer(scheduler).pool.describe()


def internal_state(output, scheduler, recv_req) -> None:
    """AFTER the scheduler reports its state: what retrieval has done so far."""
    output.internal_state["freekv"] = _observer(scheduler).state()


def export_metrics(_, scheduler, *args, **kwargs) -> None:
    """AFTER a step's results are processed."""
    _observer(scheduler).export()


def rest_when_idle(scheduler) -> None:
    """BEFORE the scheduler's idle housekeeping, which may put it to sleep."""
    if scheduler.is_fully_idle():
        _observer(scheduler).rest()
