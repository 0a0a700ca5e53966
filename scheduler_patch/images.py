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
    places = sum(map(_images_of, read.mm_items))
    if sent > places:
        raise ValueError(
            f"image_data: expected an image for each of the {places} that the prompt has a place for, found {sent}; put what stands for an "
            "image into the prompt once for each, or leave images out"
        )


def _images_of(item: Any) -> int:
    """How many images an item of SGLang's has. Of Mistral 3 it tells their sizes, and each row of an image has a place of its own."""
    sizes = (getattr(item, "model_specific_data", None) or {}).get("image_sizes")
    return max(1, len(item.offsets or ())) if sizes is None else len(sizes)


def refuse_stray(model: Any, input_ids: Any, read: Any) -> None:
    """Refuse tokens of an image where there is none, for a model (Gemma 3) whose images have so many tokens each, between two others.

    SGLang counts them for an image: its scheduler ends if they are more than the images have, or takes one image for another.

    Args:
        model: SGLang's ModelConfig.
        input_ids: tokens of the prompt, those of its images among them.
        read: as of ``refuse_unread``.

    Raises:
        ValueError: as ``refuse_unread``.
    """
    if read is None or (tokens := getattr(model.hf_config, "mm_tokens_per_image", None)) is None:
        return
    config = model.hf_config
    prompt, around = list(input_ids), [config.boi_token_index, config.eoi_token_index]
    places = [place for item in read.mm_items for place in item.offsets or ()]
    whole = sum(last - first + 1 == tokens and prompt[first - 1 : last + 2 : tokens + 1] == around for first, last in places)
    found = [len(places), *map(prompt.count, around)]
    if found != [whole] * 3:
        raise ValueError(
            f"image_data: expected tokens of images in their {whole} places alone, found {found[0]} runs of them, {found[1]} that begin an "
            f"image and {found[2]} that end one; leave them out of the prompt, but for what stands for an image"
        )
