"""What retrieval did: counts of a request and of the engine."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields


@dataclass
class RetrievalCounts:
    """Counts over all retrieval layers and the kv heads of one rank.

    Args:
        hits: (page, kv head) units selected that were resident in the device cache.
        pages_recalled: units selected that were not, and were copied from the host: the misses.
        heads_corrected: kv heads whose query turned, so that they selected and recalled before attention.
        decode_steps: tokens decoded.
    """

    hits: int = 0
    pages_recalled: int = 0
    heads_corrected: int = 0
    decode_steps: int = 0

    def add(self, other: RetrievalCounts) -> None:
        for field in fields(RetrievalCounts):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


class RequestCounts:
    """One request's counts, in the place where SGLang keeps a list with one item per output token.

    SGLang slices that list for every message it streams; a slice of this is the running total.

    Args:
        page_size, budget_pages: to tell how many pages the request has and attends to.
    """

    def __init__(self, page_size: int, budget_pages: int) -> None:
        self.page_size, self.budget_pages = page_size, budget_pages
        self.counts = RetrievalCounts()
        self.context_pages = 0
        self._seen = (0, 0, 0)

    def update(self, row_counts: tuple[int, int, int], seq_len: int, decoded: bool) -> RetrievalCounts:
        """Account for one forward pass.

        Args:
            row_counts: hits, recalled, corrected of the request's row since its last extend.
            seq_len: tokens of context.
            decoded: the pass was a decode step; an extend starts the row's counts afresh.

        Returns:
            What this pass added.
        """
        seen = self._seen if decoded else (0, 0, 0)
        added = RetrievalCounts(*(now - before for now, before in zip(row_counts, seen)), decode_steps=int(decoded))
        self._seen, self.context_pages = row_counts, -(-seq_len // self.page_size)
        self.counts.add(added)
        return added

    def __getitem__(self, tokens: slice) -> list[dict[str, int]]:
        if not isinstance(tokens, slice):
            raise TypeError(f"expected a slice of tokens, found {tokens!r}")
        attended = min(self.context_pages, self.budget_pages)
        return [{"context_pages": self.context_pages, "attended_pages": attended, **self.counts.as_dict()}]


class Exporter:
    """Prometheus form of the totals, in SGLang's own ``/metrics``.

    Args:
        labels: SGLang's labels of the scheduler.
        unit_bytes: bytes of one recalled (page, kv head).
    """

    def __init__(self, labels: dict[str, str], unit_bytes: int) -> None:
        from prometheus_client import Counter, Gauge  # after SGLang has set PROMETHEUS_MULTIPROC_DIR

        def counter(name: str, text: str):
            return Counter(f"sglang:freekv_{name}", text, labelnames=labels.keys()).labels(**labels)

        def gauge(name: str, text: str):
            return Gauge(f"sglang:freekv_{name}", text, labelnames=labels.keys(), multiprocess_mode="mostrecent").labels(**labels)

        self.unit_bytes = unit_bytes
        self.exported = RetrievalCounts()
        self.hits = counter("device_cache_hits", "Selected (page, kv head) units that were resident on the device.")
        self.misses = counter("device_cache_misses", "Selected (page, kv head) units that were not.")
        self.recalled = counter("pages_recalled", "(Page, kv head) units copied from host to device.")
        self.bytes = counter("recall_bytes", "Bytes copied from host to device by recall.")
        self.corrected = counter("corrected_heads", "KV heads that selected and recalled before attention.")
        self.steps = counter("decode_steps", "Tokens decoded.")
        self.faults = counter("canary_faults", "(Page, kv head) units that changed in host memory.")
        self.faults_exported = 0
        self.pages_used = gauge("host_pages_used", "Host pages held by requests and by the radix tree.")
        self.pages_total = gauge("host_pages_total", "Host pages.")

    def export(self, totals: RetrievalCounts, pages_used: int, pages_total: int, faults: int) -> None:
        done = self.exported
        recalled = totals.pages_recalled - done.pages_recalled
        self.hits.inc(totals.hits - done.hits)
        self.misses.inc(recalled)
        self.recalled.inc(recalled)
        self.bytes.inc(recalled * self.unit_bytes)
        self.corrected.inc(totals.heads_corrected - done.heads_corrected)
        self.steps.inc(totals.decode_steps - done.decode_steps)
        self.faults.inc(faults - self.faults_exported)
        self.faults_exported = faults
        self.pages_used.set(pages_used)
        self.pages_total.set(pages_total)
        self.exported = RetrievalCounts(**totals.as_dict())
