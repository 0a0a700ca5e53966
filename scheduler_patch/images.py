# SPDX-License-Identifier: Apache-2.0
"""Models that read images: what SGLang lacks for some of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def clear_cache(original: Callable[[Any], None], processor: Any) -> None:
    """AROUND the clearing of images that a processor keeps: one that wraps another has none of its own, and clears the other's."""
    original(getattr(processor, "inner", processor))
