# SPDX-License-Identifier: Apache-2.0
"""How the radix tree of the installed SGLang forgets pages."""

from __future__ import annotations

from typing import Protocol

from sglang_freekv import releases

UNIFIED = releases.has("tree paths")
EXPECTED = "SGLang's UnifiedRadixCache" if UNIFIED else "SGLang's RadixCache"


class Forgetting(Protocol):
    """Makes a radix tree forget pages."""

    def forget(self, pages: set[int]) -> None:
        """From now on no prompt matches ``pages``, nor what stands on them."""

    def evict_forgotten(self) -> None:
        """Free what was forgotten and no request locks any more."""


class NothingKept:
    """For a server without a radix tree."""

    def forget(self, pages: set[int]) -> None:
        pass

    def evict_forgotten(self) -> None:
        pass


def forgetting(tree) -> Forgetting | None:
    """What makes ``tree``, SGLang's prefix cache, forget pages; None if nothing can."""
    if tree.disable:
        return NothingKept()
    if UNIFIED:
        from sglang_freekv.scheduler_patch.unified_tree import ForgetfulTree

        return tree if type(tree) is ForgetfulTree else None
    from sglang_freekv.scheduler_patch.radix_tree import CutNodes, RadixCache

    return CutNodes(tree) if type(tree) is RadixCache else None
