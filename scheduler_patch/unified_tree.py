# SPDX-License-Identifier: Apache-2.0
"""SGLang's UnifiedRadixCache, which is its tree since 0.5.19, and can also forget pages."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator
from dataclasses import replace

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, InsertResult, MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.registry import create_unified_radix_cache, register_radix_cache_backend
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_freekv.config import BACKEND_NAME

FULL = ComponentType.FULL


class ForgetfulTree(UnifiedRadixCache):
    """The stock tree over either of its cores, with any components: pages, and states or windows beside them. Forgotten pages are matched
    by no prompt, and go as soon as no request locks their nodes, with what the other components keep there and behind.

    The cores have no operation for a locked node. So a prompt's match ends before the first forgotten page, and what was computed behind
    it is not inserted while that page is in the tree.
    """

    def reset(self) -> None:
        super().reset()
        self.forgotten: set[int] = set()

    def forget(self, pages: set[int]) -> None:
        """Forget ``pages`` and what stands on them. Call :meth:`evict_forgotten` when requests have ended."""
        self.forgotten |= pages & self._pages(self.tree_core.all_values_flatten())

    def evict_forgotten(self) -> None:
        """Free nodes with a forgotten page, and the nodes below them, that no request locks."""
        if not self.forgotten:
            return
        for key in [key for leaf in self._leaves() if (key := self._key_before_forgotten(leaf)) is not None]:
            super().match_prefix(MatchPrefixParams(key=key))  # a match splits the node that it ends in
        for leaf in self._leaves():
            if self._sound_tokens(leaf) is not None:
                self._evict_device_leaf(leaf, self._nothing_evicted())
        self.forgotten &= self._pages(self.tree_core.all_values_flatten())

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        if (sound := self._sound_length(params.key)) is None:
            return super().match_prefix(params)
        return super().match_prefix(replace(params, key=params.key[:sound]))

    def insert(self, params: InsertParams) -> InsertResult:
        if self._sound_length(params.key) is not None:
            return InsertResult(prefix_len=0, rotation_tail_declined=True)  # the request keeps its pages for itself
        return super().insert(params)

    def _leaves(self) -> Iterator[int]:
        """Leaves that no request locks. When the caller evicts one, its parent may follow."""
        self.tree_core.evict_device_start(FULL, sys.maxsize)
        try:
            while (leaf := self._evict_device_next_node(FULL, self._nothing_evicted())[0]) is not None:
                yield leaf
        finally:
            self.tree_core.evict_device_end(FULL)

    def _nothing_evicted(self) -> dict[ComponentType, int]:
        """What SGLang counts the evicted slots of each component in."""
        return dict.fromkeys(self.tree_components, 0)

    def _sound_length(self, key: RadixKey) -> int | None:
        """Tokens of ``key`` before the first forgotten page on its path; None if it has none. No component has a longer match than FULL."""
        if not self.forgotten:
            return None
        length, node, _ = self.tree_core.match_full_device_prefix(key)
        return self._sound_tokens(node, length)

    def _sound_tokens(self, node: int, length: int | None = None) -> int | None:
        """Tokens before the first forgotten page in the first ``length`` of the path to ``node``; None if they have no forgotten page."""
        pages = self.path_device_indices(node)[: length : self.page_size] // self.page_size
        changed = [index for index, page in enumerate(pages.tolist()) if page in self.forgotten]
        return changed[0] * self.page_size if changed else None

    def _key_before_forgotten(self, leaf: int) -> RadixKey | None:
        """The key of a leaf's path before its first forgotten page, if a node must be split there."""
        if (sound := self._sound_tokens(leaf)) is None:
            return None
        [path] = self.tree_core.collect_path_info([leaf])
        if any(node.path_start == sound for node in path):
            return None
        self.tree_core.backfill_missing_hash_values()  # only nodes with hashes tell their keys
        keys = [self.tree_core.snapshot_buffer_backup(node.node_id, False).key for node in path if node.path_start < sound]
        tokens = array("q")
        for key in keys:
            tokens += key.raw_token_ids()
        return RadixKey(tokens[:sound], keys[-1].extra_key, cache_salt=keys[-1].cache_salt)

    def _pages(self, slots: torch.Tensor) -> set[int]:
        return set((slots // self.page_size).tolist())


def register() -> None:
    """Offer the tree to SGLang, under the name that the arguments ask for when there is a canary."""
    register_radix_cache_backend(BACKEND_NAME, lambda context: create_unified_radix_cache(context, cache_class=ForgetfulTree))
