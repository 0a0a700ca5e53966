# SPDX-License-Identifier: Apache-2.0
"""Plan: a server of one model on one machine, with the memory that each rank needs and has, and the command that starts it."""

from __future__ import annotations

import shlex
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, floor
from typing import Any

from sglang_freekv.config import GIB, FreeKVConfig, Refusal, typed
from sglang_freekv.launch.footprint import MOST_REQUESTS, Footprint, Room
from sglang_freekv.launch.hardware import Hardware
from sglang_freekv.launch.model import Model
from sglang_freekv.launch.question import Question
from sglang_freekv.memory_pool import host_memory
from sglang_freekv.memory_pool.sizing import Sizing

STATIC_SHARE = {"cuda": 0.85, "cpu": 0.88}  # share of device memory for weights and KV: our advice on a GPU, SGLang's default on a CPU
CODED = "int8"  # the --freekv-kv-dtype that takes the least memory
MOST_HOST_SHARE = 0.9  # share of the machine's memory that host pools may take if the user sizes them


@dataclass(frozen=True)
class Plan:
    """A server with KV retrieval.

    Args:
        question: the user's question, with the flags of the server.
        model: the model that it serves.
        hardware: the machine that it runs on.
        ranks: ranks of tensor parallelism.
        context_len: tokens of each request.
        asked: requests at once; None is as many as fit.
        weight_share: share of the checkpoint's bytes that is counted. It is below 1 in the trial of a smaller checkpoint.
    """

    question: Question
    model: Model
    hardware: Hardware
    ranks: int
    context_len: int
    asked: int | None
    weight_share: float = 1.0

    @classmethod
    def of(cls, question: Question, model: Model, hardware: Hardware) -> Plan:
        return cls(question, model, hardware, question.ranks, model.context_len, question.requests or question.server.max_running_requests)

    @property
    def config(self) -> FreeKVConfig:
        return self.question.config

    @property
    def chunk(self) -> int | None:
        """Tokens of a prefill as asked for. Below 1 there is no limit, and None is SGLang's default."""
        return self.question.server.chunked_prefill_size

    @cached_property
    def footprint(self) -> Footprint:
        chunk = self.hardware.chunk if self.chunk is None else self.chunk
        sizing = Sizing(self.config, self.model.kv_shape(self.config, self.ranks), self.context_len, chunk)
        return Footprint(sizing, self.model.slot_bytes(self.ranks))

    # ---- memory that a rank has

    @cached_property
    def all_weight_bytes(self) -> int | None:
        """Bytes of the checkpoint's weights; None if unknown."""
        return self.question.weight_bytes if self.question.weight_bytes is not None else self.model.weight_bytes

    @property
    def weight_bytes(self) -> int | None:
        """Bytes of weights on one rank; None if unknown."""
        if self.all_weight_bytes is None:
            return None
        repeated = self.model.repeated_kv_bytes(self.ranks)
        if self.question.weight_bytes is not None:
            whole = self.question.weight_bytes / self.ranks + repeated
        else:
            whole = self.model.weights.rank_bytes(self.ranks, repeated)
        return int(whole * self.weight_share)

    @property
    def static_share(self) -> float:
        return self.question.server.mem_fraction_static or STATIC_SHARE[self.hardware.device]

    @property
    def device_bytes(self) -> int | None:
        """Bytes of one rank's device that weights leave for its pools; None if unknown. On a CPU, host memory serves as the device."""
        if self.weight_bytes is None:
            return None
        if self.hardware.device == "cuda":
            return None if self.hardware.gpu_bytes is None else int(self.hardware.gpu_bytes * self.static_share) - self.weight_bytes
        available = self.hardware.host_bytes
        if available is None:
            return None
        left = min(int(available * self.static_share), available - self._cut(self.host_gib)) - self.weight_bytes
        return min(left, host_memory.default_host_pool_bytes(available, 1, "cpu"))

    @cached_property
    def host_gib(self) -> float | None:
        """GiB of the host pool of one rank, for ``--freekv-host-memory``; None if the host's memory is unknown.

        It is the user's value, else the server's default share, or more if the requests need more. On a CPU it is at most half of the
        memory that weights leave.
        """
        available = self.hardware.host_bytes
        if self.config.host_memory_gib is not None:
            return self.config.host_memory_gib
        if available is None:
            return None
        gib = host_memory.default_host_pool_bytes(available, self.ranks, self.hardware.device) / GIB
        if self.hardware.device == "cpu":
            gib = max(0, min(gib, (available - (self.weight_bytes or 0)) / 2 / GIB))
        elif gib * GIB < self.needed_host_bytes <= available * MOST_HOST_SHARE / self.ranks:
            return ceil(self.needed_host_bytes / GIB * 10) / 10
        steps = 10 if gib >= 1 else 1000
        return floor(gib * steps + 1e-6) / steps  # 1e-6 makes up for the share's rounding to whole bytes

    @property
    def host_bytes(self) -> int | None:
        return None if self.host_gib is None else self._cut(self.host_gib)

    @property
    def is_known(self) -> bool:
        """Whether host and device memory are known."""
        return None not in (self.host_bytes, self.device_bytes)

    @property
    def most_tokens(self) -> int | None:
        return self.question.server.max_total_tokens

    # ---- memory that requests need, and the requests that fit

    @property
    def needed_host_bytes(self) -> int:
        """Bytes in the host pool of one rank for the requests that were asked for, or for one request."""
        return (self.asked or 1) * self.footprint.host_bytes

    @property
    def needed_device_bytes(self) -> int:
        return ceil(self.footprint.device_bytes(self.asked or 1))

    @cached_property
    def requests(self) -> int:
        """Requests at once: as many as were asked for, else as fit. It is 0 if these do not fit.

        Unknown memory counts as enough, and without a number of requests one is assumed.
        """
        if self.asked is not None or not self.is_known:
            return (self.asked or 1) if self.can_serve(self.asked or 1) else 0
        return most_that(MOST_REQUESTS, self.can_serve)

    @property
    def fits(self) -> bool:
        return self.requests > 0

    @property
    def total_tokens(self) -> int | None:
        """``--max-total-tokens`` of the command: the user's value, or one that is needed so that digests leave room for the rows."""
        if self.most_tokens is not None or self.requests == 0 or not self.is_known:
            return self.most_tokens
        needed = self.requests * self.footprint.tokens
        running = self.question.server.max_running_requests
        return None if self.footprint.fit(self.requests, self.host_bytes, self.device_bytes, None, running) else needed

    @property
    def room(self) -> Room | None:
        """What the command builds on one rank; None if memory is unknown or the plan does not fit."""
        if not (self.fits and self.is_known):
            return None
        rows = self.question.server.max_running_requests or self.requests
        return self.footprint.room(rows, self.host_bytes, self.device_bytes, self.total_tokens)

    def can_serve(self, count: int) -> bool:
        """Whether ``count`` requests fit at once. Unknown memory counts as enough."""
        needed = count * self.footprint.tokens
        most = self.most_tokens
        running = self.question.server.max_running_requests
        if (most is not None and needed > most) or (running is not None and count > running):
            return False
        if not self.pools_fit_the_host or self.hardware.gpus < self.ranks * self.on_gpu:
            return False
        host, device = (known if known is not None else 1 << 62 for known in (self.host_bytes, self.device_bytes))
        return device > 0 and any(self.footprint.fit(count, host, device, limit, running) for limit in {most, most or needed})

    def with_codes(self) -> Plan | None:
        """The plan with KV in int8; None if its KV has 8 bits already, or if the server would refuse it."""
        if self.config.is_coded:
            return None
        try:
            other = replace(self, question=replace(self.question, config=replace(self.config, kv_dtype=CODED)))
            self.model.refuse_settings(other.config, self.hardware)
        except Refusal:
            return None
        return other

    @property
    def on_gpu(self) -> bool:
        return self.hardware.device == "cuda"

    @property
    def pools_fit_the_host(self) -> bool:
        """Whether the host pools of all ranks fit the machine's memory, or this is unknown."""
        return None in (self.host_bytes, self.hardware.host_bytes) or self.host_bytes * self.ranks <= self.hardware.host_bytes

    # ---- the command that starts the server

    def command(self) -> list[str] | None:
        """Words of the command line that starts the server; None if the plan does not fit."""
        if not self.fits:
            return None
        flags = {
            "model_path": self.model.checkpoint.name,
            "kv_retrieval": self.config.method,
            "freekv_budget": self.config.budget_tokens,
            "freekv_host_memory": None if self.host_gib is None else f"{self.host_gib:g}",
            "tp_size": self.ranks if self.ranks > 1 else None,
            "context_length": self.context_len,
            "max_running_requests": self.question.server.max_running_requests or (self.requests if self.asked or self.is_known else None),
            "max_total_tokens": self.total_tokens,
            "page_size": self.question.server.page_size,
        }
        typed_words = {name: value for name, value in self.question.typed.items() if name not in flags}
        last: dict[str, Any] = {} if self.on_gpu else {"device": "cpu"}
        if self.on_gpu or (self.chunk is not None and self.chunk < 1):  # without chunks SGLang sets aside more than a small host has
            last["mem_fraction_static"] = self.static_share
        words = ["python", "-m", "sglang.launch_server"]
        for name, value in (flags | typed_words | last).items():
            if value is not None:
                words += [typed(name), *(map(str, value) if isinstance(value, list) else (str(value),))]
        return words

    def command_line(self) -> str | None:
        words = self.command()
        return shlex.join(words) if words else None

    @staticmethod
    def _cut(gib: float | None) -> int:
        return int((gib or 0) * GIB)


def most_that(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number from 1 to ``most`` that fits; 0 if none does. Every number below one that fits must fit too."""
    return bisect_right(range(1, max(0, most) + 1), False, key=lambda count: not fits(count))
