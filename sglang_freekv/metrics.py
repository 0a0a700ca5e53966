# SPDX-License-Identifier: Apache-2.0
"""The metrics of FreeKV in SGLang's own ``/metrics``.

Every rank exports its own metrics, with SGLang's label ``tp_rank``. Units, kv heads and bytes are divided among ranks, so they may be
summed over ranks. Steps, pages and rows are the same on every rank, so they may not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

PREFIX = "sglang:freekv_"
POOLS = ("host", "digests", "device_cache", "dense_layers", "staging")


class Metric(NamedTuple):
    """One metric as Prometheus shows it.

    Args:
        name: in full.
        kind: ``counter`` or ``gauge``.
        unit: unit of the number, in the plural.
        text: its HELP line.
        labels: besides SGLang's own.
    """

    name: str
    kind: str
    unit: str
    text: str
    labels: tuple[str, ...] = ()


METRICS = (
    Metric("sglang:freekv_decode_steps_total", "counter", "steps", "Decode steps, counted for each request: the tokens that were decoded."),
    Metric(
        "sglang:freekv_correction_decisions_total", "counter", "kv heads",
        "KV heads of a layer whose query a decode step compared with an earlier one.",
    ),
    Metric(
        "sglang:freekv_corrections_total", "counter", "kv heads",
        "KV heads of a layer that were corrected: they selected and recalled before attention.",
    ),
    Metric("sglang:freekv_selected_units_total", "counter", "units", "Units selected. A unit is one (page, kv head) of one layer."),
    Metric(
        "sglang:freekv_recalled_units_total", "counter", "units",
        "Units selected that were not on the device, and were copied from host memory.",
    ),
    Metric("sglang:freekv_recalled_bytes_total", "counter", "bytes", "Bytes that recall copied from host memory to the device."),
    Metric(
        "sglang:freekv_recall_seconds_total", "counter", "seconds",
        "Seconds that recall took in the sampled steps, summed over layers. 0 without --freekv-recall-timing.",
    ),
    Metric(
        "sglang:freekv_recall_wait_seconds_total", "counter", "seconds",
        "Seconds of those that the computation waited. The rest ran beside it.",
    ),
    Metric("sglang:freekv_sampled_steps_total", "counter", "steps", "Decode steps of a batch in which recall was timed."),
    Metric("sglang:freekv_canary_faults_total", "counter", "units", "Units that changed in host memory. 0 without --freekv-canary."),
    Metric("sglang:freekv_brought_pages_total", "counter", "pages", "Absent pages that came back to the device, and are resident again."),
    Metric("sglang:freekv_given_up_pages_total", "counter", "pages", "Resident pages whose frames others needed."),
    Metric("sglang:freekv_host_pages_used", "gauge", "pages", "Host pages held by requests and by the prefix cache."),
    Metric("sglang:freekv_host_pages_total", "gauge", "pages", "Host pages in all."),
    Metric("sglang:freekv_rows_used", "gauge", "rows", "Rows taken. A row is a running request's place on the device."),
    Metric("sglang:freekv_rows_total", "gauge", "rows", "Rows in all."),
    Metric("sglang:freekv_partial_rows", "gauge", "rows", "Rows that have slots. Their requests keep some pages on the device, and recall others."),
    Metric("sglang:freekv_frames_used", "gauge", "frames", "Frames taken. A frame is device memory for a page: a slot, or the place of a resident page."),
    Metric("sglang:freekv_frames_total", "gauge", "frames", "Frames in all."),
    Metric("sglang:freekv_resident_pages", "gauge", "pages", "Pages of running requests that were resident, in the last pass that was counted."),
    Metric("sglang:freekv_absent_pages", "gauge", "pages", "Pages of the batch that were not resident, in that pass. They may need recall."),
    Metric("sglang:freekv_pool_bytes", "gauge", "bytes", f"Bytes of each pool of this rank: {', '.join(POOLS)}.", ("pool",)),
)  # fmt: skip


class Exporter:
    """Sets the metrics of one scheduler.

    Args:
        labels: SGLang's labels of the scheduler.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        from prometheus_client import Counter, Gauge  # after SGLang has set PROMETHEUS_MULTIPROC_DIR

        def show(metric: Metric) -> Any:
            names = (*labels, *metric.labels)
            if metric.kind == "counter":
                return Counter(metric.name, metric.text, names)
            return Gauge(metric.name, metric.text, names, multiprocess_mode="mostrecent")

        self.labels = labels
        self.shown = {metric.name: show(metric) for metric in METRICS}
        self.exported: dict[str, float] = {}

    def export(self, values: Mapping[str, float | Mapping[str, float]]) -> None:
        """Set all metrics to their present values.

        Args:
            values: the present value of each metric, by its name without ``PREFIX``; of ``pool_bytes`` a mapping by pool.

        Raises:
            KeyError: a value is missing.
        """
        for metric in METRICS:
            value, shown = values[metric.name.removeprefix(PREFIX)], self.shown[metric.name]
            if isinstance(value, Mapping):
                for pool, num_bytes in value.items():
                    shown.labels(**self.labels, pool=pool).set(num_bytes)
            elif metric.kind == "counter":
                value = max(value, before := self.exported.get(metric.name, 0))  # a counter that fell would raise, and end the scheduler
                shown.labels(**self.labels).inc(value - before)
                self.exported[metric.name] = value
            else:
                shown.labels(**self.labels).set(value)
