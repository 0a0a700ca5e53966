# SPDX-License-Identifier: Apache-2.0
"""Models that read images: what SGLang lacks for some of them, and images that none would read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def clear_cache(original: Callable[[Any], None], processor: Any) -> None:
    """AROUND the clearing of images that a processor keeps: one that wraps another has none of its own, and clears the other's."""
    original(getattr(processor, "inner", processor))


def refuse_unread(images: Any, read: Any) -> None:
    """Refuse a request with images for which its prompt has no place. SGLang answers it as if they had not been sent.

    Args:
        images: those of one request: a list, one image, or None.
        read: SGLang's MultimodalProcessorOutput, which has an item or a place for each image; None if nothing reads images.

    Raises:
        ValueError: the message names the field; SGLang answers with status 400 and the message.
    """
    sent = sum(image is not None for image in (images if isinstance(images, list) else [images]))
    if not sent:
        return
    if read is None:
        raise ValueError(f"image_data: expected none, because this server reads text alone, found {sent}; leave it out")
    places = sum(max(1, len(item.offsets or ())) for item in read.mm_items)
    if sent > places:
        raise ValueError(
            f"image_data: expected an image for each of the {places} that the prompt has a place for, found {sent}; put what stands for an "
            "image into the prompt once for each, or leave images out"
        )
