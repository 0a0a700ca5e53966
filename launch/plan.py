# SPDX-License-Identifier: Apache-2.0
"""Plan: a server of one model on this machine, as far as it can be told before it starts."""

from __future__ import annotations

import shlex
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import floor

from sglang_freekv.config import DEFAULT_PAGE_SIZE, GIB, FreeKVConfig
from sglang_freekv.launch.finding import Finding, size
from sglang_freekv.launch.footprint import CORRECTED, MISSED, Footprint
from sglang_freekv.launch.machine import NO_GPU, Machine
from sglang_freekv.launch.model import Model
from sglang_freekv.memory_pool.sizing import Sizing

STATIC_SHARE = {"cuda": 0.85, "cpu": 0.88}  # of device memory, for weights and KV: suggested on a GPU, SGLang's default on a CPU


@dataclass(frozen=True)
class Plan:
    """A server with KV retrieval.

    Args:
        model, machine: what it serves, and where.
        config: settings of KV retrieval.
        context_len: tokens of the longest request.
        typed: further flags for the suggested command.
    """

    model: Model
    machine: Machine
    config: FreeKVConfig
    context_len: int
    typed: Mapping[str, object] = field(default_factory=dict)

    @property
    def host_gib(self) -> float:
        """The host pool, as ``--freekv-host-memory`` of the suggested command: the server's default share, or on a CPU half of what the
        weights leave, if that is less."""
        gib = self.machine.host_pool_bytes / GIB
        if not self.machine.gpu.present:
            gib = max(0, min(gib, (self.machine.available_bytes - self.model.weight_bytes) / 2 / GIB))
        steps = 10 if gib >= 1 else 1000
        return floor(gib * steps + 1e-6) / steps  # the share itself is cut to whole bytes

    @property
    def host_bytes(self) -> int:
        return int(self.host_gib * GIB)

    @property
    def device_bytes(self) -> int:
        """What weights leave of the device, or on a CPU of the memory that stands in for it."""
        machine, weights = self.machine, self.model.weight_bytes
        if machine.gpu.present:
            return max(0, int(machine.gpu.memory_bytes[0] * STATIC_SHARE["cuda"]) - weights)
        available = machine.available_bytes
        left = min(int(available * STATIC_SHARE["cpu"]), available - self.host_bytes) - weights
        return max(0, min(left, machine.host_pool_bytes))

    def footprint(self, context_len: int) -> Footprint:
        return Footprint(Sizing(self.config, self.model.kv_shape(self.config), context_len))

    def requests(self, context_len: int) -> int:
        return self.footprint(context_len).requests(self.host_bytes, self.device_bytes)

    def longest_context(self) -> int:
        """The longest context, in whole pages, of which one request fits; 0 if none of the budget's length does."""
        pages = range(self.config.budget_tokens // self.config.page_size, self.context_len // self.config.page_size + 1)
        fitting = bisect_right(pages, 0, key=lambda count: self.requests(count * self.config.page_size) == 0)
        return pages[fitting - 1] * self.config.page_size if fitting else 0

    def findings(self, link: float | None, origin: str) -> Iterator[Finding]:
        """What it costs and how to start it.

        Args:
            link: bytes per second to the device; None if nobody knows.
            origin: where that is from.
        """
        yield self._model()
        yield Finding("context", f"{self.context_len} tokens; the model's longest is {self.model.max_context}")
        yield self._weights()
        yield from self._request()
        yield from self._capacity()
        yield from self._recall(link, origin)
        yield self._command()

    def _model(self) -> Finding:
        shape, dtype = self.model.kv_shape(self.config), str(self.model.dtype).removeprefix("torch.")
        value = (
            f"{self.model.name}, {self.model.num_layers} layers ({shape.retrieval_layers} retrieved, {shape.dense_layers} dense), "
            f"{shape.query_heads} query heads, {shape.kv_heads} kv heads of {shape.head_dim}, {dtype}"
        )
        return Finding("model", value, figures=vars(shape) | {"budget_tokens": self.config.budget_tokens})

    def _weights(self) -> Finding:
        parameters, num_bytes = self.model.parameters, self.model.weight_bytes
        count = f"{parameters / 1e9:.2f} billion" if parameters >= 1e9 else f"{parameters / 1e6:.1f} million"
        value = f"{size(num_bytes)} for {count} parameters, estimated from the config"
        return Finding("weights", value, figures={"bytes": num_bytes, "parameters": parameters})

    def _request(self) -> Iterator[Finding]:
        cost = self.footprint(self.context_len)
        of = f"for one request of {self.context_len} tokens"
        for name, num_bytes, what in (
            ("host pool", cost.host_bytes, f"of host memory {of}"),
            ("digests", cost.digest_bytes, f"of device memory {of}"),
            ("dense layers", cost.dense_bytes, f"of device memory {of}"),
            ("device cache", cost.sizing.row_bytes, f"of device memory for one request, budget {self.config.budget_tokens} tokens"),
            ("staging", cost.sizing.staging_bytes, "of device memory, once for all requests"),
        ):
            yield Finding(name, f"{size(num_bytes)} {what}", figures={"bytes": num_bytes})

    def _capacity(self) -> Iterator[Finding]:
        cost, gpu = self.footprint(self.context_len), self.machine.gpu
        host, device = cost.host_requests(self.host_bytes), cost.device_requests(self.device_bytes)
        both = self.requests(self.context_len)
        longest = self.context_len if both else self.longest_context()
        shorter = f"`--context-length {longest}`" if longest else f"a smaller model, a budget below {self.config.budget_tokens}"
        remedy = f"{shorter}, or a machine with more memory"
        default = gpu.present or self.machine.host_pool_bytes - self.host_bytes < GIB / 10
        share = "the server's default share" if default else "half of what weights leave"
        value = f"{host} of {self.context_len} tokens in {size(self.host_bytes)}, {share}"
        yield Finding("requests in host memory", value, None if host else remedy, not host, {"requests": host, "bytes": self.host_bytes})
        place = "estimated" if gpu.present else "estimated; without a GPU it is host memory"
        value = f"{device} of {self.context_len} tokens in the {size(self.device_bytes)} that weights leave ({place})"
        figures = {"requests": device, "bytes": self.device_bytes}
        yield Finding("requests in device memory", value, None if device else remedy, not device, figures)
        if host and device and not both:
            yield Finding("requests in both", f"none of {self.context_len} tokens", remedy, True, {"requests": 0})

    def _recall(self, link: float | None, origin: str) -> Iterator[Finding]:
        recalled = self.footprint(self.context_len).recalled_bytes
        value = (
            f"{recalled / 1e6:.1f} MB per decoded token where {MISSED:.0%} of the selected pages are missing, {CORRECTED:.0%} of it "
            "ahead of attention (shares measured on one reasoning model with budget 2048)"
        )
        yield Finding("recall", value, figures={"bytes_per_token": recalled, "corrected": CORRECTED, "missed": MISSED})
        if link is None:
            why = "not measured: see the link" if self.machine.gpu.present else NO_GPU
            yield Finding("decode rate", why, "give the rate of its link with --link-gb-per-s")
            return
        rate = link / recalled
        value = f"the link ({link / 1e9:.1f} GB/s, {origin}) sustains {rate:.0f} tokens/s over all requests"
        yield Finding("decode rate", value, figures={"tokens_per_s": rate, "link_bytes_per_s": link})

    def _command(self) -> Finding:
        context = self.context_len if self.requests(self.context_len) else self.longest_context()
        if not context:
            return Finding("command", "none: not one request fits", "see above", stops=True)
        path = self.model.path.parent if self.model.path.name == "config.json" else self.model.path
        flags = {
            "--model-path": path,
            "--kv-retrieval": self.config.method,
            "--freekv-budget": self.config.budget_tokens,
            "--freekv-host-memory": f"{self.host_gib:g}",
            "--context-length": context,
            "--max-running-requests": self.requests(context),
        }
        flags |= {"--page-size": self.config.page_size} if self.config.page_size != DEFAULT_PAGE_SIZE else {}
        flags |= self.typed
        flags |= {"--mem-fraction-static": STATIC_SHARE["cuda"]} if self.machine.gpu.present else {"--device": "cpu"}
        words = [str(word) for flag in flags.items() for word in flag]
        return Finding("command", shlex.join(["python", "-m", "sglang.launch_server", *words]), figures={"flags": words})
