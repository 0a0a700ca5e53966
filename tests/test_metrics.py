"""The metrics of /metrics: their names, and how counters and gauges follow what has happened."""

from __future__ import annotations

import prometheus_client
import pytest

from sglang_freekv.metrics import METRICS, POOLS, PREFIX, Exporter

NAMES = """
    decode_steps_total correction_decisions_total corrections_total selected_units_total recalled_units_total recalled_bytes_total
    recall_seconds_total recall_wait_seconds_total sampled_steps_total canary_faults_total brought_pages_total given_up_pages_total
    host_pages_used host_pages_total rows_used rows_total partial_rows frames_used frames_total resident_pages absent_pages pool_bytes
"""


@pytest.fixture
def registry(monkeypatch) -> prometheus_client.CollectorRegistry:
    """A registry of its own, in the place of the one that is common to all of a process."""
    registry = prometheus_client.CollectorRegistry()
    for name in ("Counter", "Gauge"):
        kind = getattr(prometheus_client, name)
        monkeypatch.setattr(prometheus_client, name, lambda *args, kind=kind, **kwargs: kind(*args, **kwargs, registry=registry))
    return registry


def values(count: float) -> dict:
    return {metric.name.removeprefix(PREFIX): count for metric in METRICS} | {"pool_bytes": dict.fromkeys(POOLS, count)}


def test_the_table_has_the_names_that_dashboards_use():
    assert [metric.name for metric in METRICS] == [f"sglang:freekv_{name}" for name in NAMES.split()]
    assert [metric.name for metric in METRICS if metric.kind == "counter"] == [f"sglang:freekv_{name}" for name in NAMES.split()[:12]]


def test_counters_come_to_the_total_and_gauges_to_the_last_value(registry):
    exporter = Exporter({"tp_rank": "1"})
    for count in (5, 7, 7.5):
        exporter.export(values(count))
    samples = [sample for family in registry.collect() for sample in family.samples if not sample.name.endswith("_created")]
    shown = {(sample.name, sample.labels.get("pool")): sample.value for sample in samples}
    own = {(metric.name, pool): 7.5 for metric in METRICS for pool in (POOLS if metric.labels else (None,))}
    assert shown == own and all(sample.labels["tp_rank"] == "1" for sample in samples)


def test_a_counter_that_fell_waits_for_its_last_value(registry):
    """Times of the GPU's clocks are differences, and a counter that falls raises in Prometheus's client."""
    exporter = Exporter({"tp_rank": "0"})
    for count in (5.0, 4.9, 5.5):
        exporter.export(values(count))
    assert registry.get_sample_value(f"{PREFIX}recall_seconds_total", {"tp_rank": "0"}) == 5.5


def test_a_metric_without_a_value_is_an_error(registry):
    exporter, some = Exporter({"tp_rank": "0"}), values(1)
    del some["rows_used"]
    with pytest.raises(KeyError, match="rows_used"):
        exporter.export(some)
