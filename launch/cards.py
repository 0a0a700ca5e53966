# SPDX-License-Identifier: Apache-2.0
"""Cards: the GPUs that the doctor knows by name, with their memory, their link to the host and what they compute."""

from __future__ import annotations

import re
from typing import NamedTuple

from sglang_freekv.config import GIB, Refusal

GEN4, GEN5, C2C = 24.0, 54.0, 300.0  # estimated GB/s of pinned copies over PCIe x16 of generation 4 or 5, or over NVLink-C2C


class Card(NamedTuple):
    """A GPU.

    Args:
        name: as users write it.
        gib: GiB that CUDA reports, a little less than the nominal size.
        link_gb_per_s: estimated GB/s of its link to host memory.
        capability: compute capability, as CUDA counts it.
    """

    name: str
    gib: float
    link_gb_per_s: float
    capability: tuple[int, int]

    @property
    def memory_bytes(self) -> int:
        return int(self.gib * GIB)


CARDS = (
    Card("A10", 22.0, GEN4, (8, 6)),
    Card("A10G", 22.0, GEN4, (8, 6)),
    Card("A30", 23.5, GEN4, (8, 0)),
    Card("A40", 44.4, GEN4, (8, 6)),
    Card("A6000", 47.4, GEN4, (8, 6)),
    Card("A100", 79.2, GEN4, (8, 0)),
    Card("A100-80", 79.2, GEN4, (8, 0)),
    Card("A100-40", 39.4, GEN4, (8, 0)),
    Card("L4", 22.0, GEN4, (8, 9)),
    Card("L40", 44.4, GEN4, (8, 9)),
    Card("L40S", 44.4, GEN4, (8, 9)),
    Card("H20", 95.0, GEN5, (9, 0)),
    Card("H100", 79.1, GEN5, (9, 0)),
    Card("H100-94", 93.1, GEN5, (9, 0)),
    Card("H200", 139.7, GEN5, (9, 0)),
    Card("GH200", 94.5, C2C, (9, 0)),
    Card("B200", 178.3, GEN5, (10, 0)),
    Card("B300", 267.0, GEN5, (10, 3)),
    Card("RTX-3090", 23.6, GEN4, (8, 6)),
    Card("RTX-4090", 23.5, GEN4, (8, 9)),
    Card("RTX-5090", 31.3, GEN5, (12, 0)),
    Card("RTX-6000-Ada", 47.4, GEN4, (8, 9)),
    Card("RTX-PRO-6000", 94.9, GEN5, (12, 0)),
)


def card_of(text: str) -> Card | None:
    """The card of the name ``text``, regardless of case and punctuation; None if it is unknown."""
    return next((card for card in CARDS if _plain(card.name) == _plain(text)), None)


def _plain(name: str) -> str:
    plain = re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("nvidia").removeprefix("geforce").removesuffix("gb")
    return plain.removeprefix("rtx")


def memory_and_link(text: str) -> tuple[str, int, float | None]:
    """Name, bytes of memory, and GB/s of the link of the GPU that ``--gpu`` names. The link is None if only GiB are given.

    Raises:
        Refusal: ``text`` is neither a card of ``CARDS`` nor a number of GiB.
    """
    if card := card_of(text):
        return card.name, card.memory_bytes, card.link_gb_per_s
    try:
        gib = float(re.sub(r"\s*gi?b?$", "", text.strip(), flags=re.IGNORECASE))
    except ValueError:
        gib = 0.0
    if not 0 < gib <= 1 << 20:
        names = ", ".join(card.name for card in CARDS)
        raise Refusal(f"--gpu {text[:40]}: expected a card ({names}) or its memory in GiB; use for example --gpu 80")
    return f"GPU of {gib:g} GiB", int(gib * GIB), None
