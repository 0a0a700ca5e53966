# SPDX-License-Identifier: Apache-2.0
"""Hardware: the machine of a plan. It is this machine, or one that the user describes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from sglang_freekv.config import GIB
from sglang_freekv.launch.cards import card_of
from sglang_freekv.launch.finding import size
from sglang_freekv.launch.machine import Machine
from sglang_freekv.launch.question import Question

CHUNKS = (2048, 20), (4096, 60), (8192, 160), (16384, inf)  # SGLang's default tokens of a prefill, on devices with less than so many GiB


@dataclass(frozen=True)
class Hardware:
    """GPUs, memory and link of a machine.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        gpu: name of its GPUs.
        capability: their compute capability; None if unknown, or without GPUs.
        gpus: number of GPUs.
        gpu_bytes: free bytes of one GPU; None if unknown.
        host_bytes: free bytes of host memory; None if unknown.
        link: bytes per second from the host to a GPU; None if unknown.
        origin: source of ``link``, in words.
    """

    device: str
    gpu: str
    capability: tuple[int, int] | None
    gpus: int
    gpu_bytes: int | None
    host_bytes: int | None
    link: float | None
    origin: str

    @classmethod
    def described(cls, question: Question) -> Hardware:
        """The machine that the question describes. This machine is not examined."""
        name, memory, link = question.gpu or ("GPU of unknown size", None, None)
        link, origin = (question.link, "given") if question.link else (link and link * 1e9, f"an estimate for {name}")
        device = question.server.device or "cuda"
        card = card_of(name)
        capability = card.capability if card else None
        return cls(device, name, capability, question.gpus or question.ranks, memory, question.host_bytes, link, origin)

    @classmethod
    def here(cls, question: Question, machine: Machine, link: float | None) -> Hardware:
        """This machine. Its link was measured at ``link`` bytes per second, or not at all."""
        gpu = machine.gpu
        on_gpu = gpu.present and question.server.device != "cpu"
        device, name = ("cuda", gpu.name) if on_gpu else ("cpu", "no GPU")
        capability, count, memory = (gpu.capability, gpu.count, gpu.memory_bytes[0]) if on_gpu else (None, 0, None)
        found = cls(device, name, capability, count, memory, machine.available_bytes, link, "measured")
        return found if question.link is None else replace(found, link=question.link, origin="given")

    @property
    def chunk(self) -> int:
        """SGLang's default tokens of a prefill. On a CPU host memory serves as the device; unknown memory counts as an H100's."""
        found = self.gpu_bytes if self.device == "cuda" else self.host_bytes
        memory = 80 * GIB if found is None else found
        return next(tokens for tokens, gib in CHUNKS if memory < gib * GIB)

    def __str__(self) -> str:
        host = "host memory that was not given" if self.host_bytes is None else f"{size(self.host_bytes)} of host memory"
        if self.device == "cpu":
            return f"a CPU with {host}"
        memory = "" if self.gpu_bytes is None else f" ({self.gpu_bytes / GIB:.1f} GiB)"
        return f"{self.gpus} x {self.gpu}{memory} with {host}"
