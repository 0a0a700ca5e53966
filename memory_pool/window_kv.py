# SPDX-License-Identifier: Apache-2.0
"""WindowKV: how many tokens the pool of window layers needs, which is SGLang's and on the device."""

from __future__ import annotations

from dataclasses import dataclass

MOST_ENDS = 4  # ends of prefixes that the radix tree remembers beside each running request
MOST_END_TOKENS = 4096  # of them together; one alone may have more
SLIDE = 128  # tokens by which SGLang lets a window grow before it frees them at once: its SGLANG_SWA_EVICTION_INTERVAL
MAPPING_BYTES = 8  # of SGLang's table from a token of full layers to its token of window layers


@dataclass(frozen=True)
class WindowKV:
    """The KV of sliding-window layers.

    Args:
        window: tokens that a query sees before its own, at most.
        layers: window layers.
        chunk: tokens of a prefill at most. SGLang frees those that leave the window a chunk later, and launches the next before.
        page_size: of all pools.
        token_bytes: of one token in one layer.
    """

    window: int
    layers: int
    chunk: int
    page_size: int
    token_bytes: int

    @property
    def row_tokens(self) -> int:
        """Tokens of a running request, and of the ends of prefixes that the tree keeps for each: a window, and the page it begins in.

        A running request has two things more: tokens that left its window and are not freed yet, and a page that it begins.
        """
        end = self._whole(self.window) + self.page_size
        ends = max(1, min(MOST_ENDS, MOST_END_TOKENS // end))
        return (1 + ends) * end + self._whole(SLIDE) + self.page_size

    @property
    def shared_tokens(self) -> int:
        """Tokens that prefills take for a while: two chunks and a page."""
        return 2 * self._whole(self.chunk) + self.page_size

    def tokens(self, rows: int) -> int:
        """Tokens of the pool, for ``rows`` running requests."""
        return rows * self.row_tokens + self.shared_tokens

    def bytes_of(self, tokens: int) -> int:
        return tokens * self.layers * self.token_bytes

    def _whole(self, tokens: int) -> int:
        return -(-tokens // self.page_size) * self.page_size
