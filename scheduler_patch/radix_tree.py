# SPDX-License-Identifier: Apache-2.0
"""Makes SGLang's RadixCache forget pages."""

from __future__ import annotations

import copy

from sglang.srt.mem_cache.radix_cache import RadixCache


class CutNodes:
    """Nodes that were cut off a RadixCache. They go as soon as no request locks them.

    Until then such a node stays in its place, under a key that no prompt has.
    """

    def __init__(self, tree: RadixCache) -> None:
        self.tree = tree
        self.forgotten: list = []  # in the order of the cuts
        self.cuts = 0

    def forget(self, pages: set[int]) -> None:
        """Cut nodes with one of ``pages``, and all nodes below them, off the tree."""
        tree = self.tree
        size, nodes = tree.page_size, list(tree.root_node.children.values())
        while nodes:
            node = nodes.pop()
            if node in self.forgotten:
                continue
            changed = [index for index, page in enumerate((node.value[::size] // size).tolist()) if page in pages]
            if not changed:
                nodes += node.children.values()
                continue
            if changed[0]:
                tree._split_node(node.key, node, changed[0] * size)
            del node.parent.children[node.key.child_key(size)]
            self.cuts += 1
            node.key = copy.copy(node.key)
            node.key.extra_key = f"sglang_freekv quarantine {self.cuts}"
            node.parent.children[node.key.child_key(size)] = node
            self.forgotten.append(node)

    def evict_forgotten(self) -> None:
        """Free the nodes that no request locks any more."""
        locked = []
        for node in self.forgotten:
            if not self._is_in_tree(node):  # evicted or flushed by SGLang
                continue
            if node.lock_ref:
                locked.append(node)
            else:
                self._evict(node)
        self.forgotten = locked

    def _is_in_tree(self, node) -> bool:
        """Whether ``node`` is below the tree's present root. SGLang makes a new root when it flushes."""
        while node.parent is not None and node.parent.children.get(node.key.child_key(self.tree.page_size)) is node:
            node = node.parent
        return node is self.tree.root_node

    def _evict(self, node) -> None:
        """Evict all nodes below ``node``, then ``node``, each as SGLang evicts a leaf."""
        for child in list(node.children.values()):
            self._evict(child)
        self.tree.token_to_kv_pool_allocator.free_segment(node.value, start_pos=0)
        self.tree._delete_leaf(node)
        self.tree._record_remove_event(node)
