# SPDX-License-Identifier: Apache-2.0
"""Slots for states of linear attention: SGLang sizes them for KV on the GPU, and FreeKV needs that memory for pages and rows."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.runtime_context import get_context, get_schedule

from sglang_freekv.memory_pool.sizing import SHARES_OF_STATES


@dataclass(frozen=True)
class StateSlots:
    """State slots of one rank, before SGLang has sized them.

    Args:
        asked: whether the user has said how many.
        of_request: slots that SGLang counts for each running request.
        num_bytes: of a slot.
    """

    asked: bool
    of_request: int
    num_bytes: int

    @classmethod
    def before(cls, configurator: KVCacheConfigurator) -> StateSlots:
        """To be called before SGLang profiles the memory, which takes the slots off."""
        states = configurator.mambaish_config.mamba2_cache_params
        return cls(get_schedule().max_mamba_cache_size is not None, configurator._calculate_mamba_ratio(), states.mamba_cache_per_req)

    def spare(self, rows: int | None) -> int:
        """Give back slots that SGLang has taken, and ``rows`` requests and as many slots again for the prefix cache leave over.

        SGLang takes 47% of the memory behind weights, however few requests may run. A number that the user gave stands.

        Returns:
            Bytes of device memory that were given back.
        """
        taken = get_schedule().max_mamba_cache_size
        if self.asked or rows is None or taken <= (most := SHARES_OF_STATES * self.of_request * rows):
            return 0
        get_context().override("freekv.state_slots", max_mamba_cache_size=most)
        return (taken - most) * self.num_bytes
