# SPDX-License-Identifier: Apache-2.0
"""Hardware: the machine that a plan is for, measured here or described by whoever asks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang_freekv.config import GIB
from sglang_freekv.launch.finding import size
from sglang_freekv.launch.machine import Machine
from sglang_freekv.launch.question import Question


@dataclass(frozen=True)
class Hardware:
    """What a server has.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        gpu: what to call a GPU.
        gpus: how many there are.
        gpu_bytes: memory of one that is free; None if nobody said.
        host_bytes: memory of the host that is free; None if nobody said.
        link: bytes per second to a GPU; None if nobody knows.
        origin: where ``link`` is from.
    """

    device: str
    gpu: str
    gpus: int
    gpu_bytes: int | None
    host_bytes: int | None
    link: float | None
    origin: str

    @classmethod
    def described(cls, question: Question) -> Hardware:
        """By the question alone; this machine is not asked."""
        name, memory, link = question.gpu or ("GPU of unknown size", None, None)
        link, origin = (question.link, "given") if question.link else (link and link * 1e9, f"an estimate for {name}")
        device = question.server.device or "cuda"
        return cls(device, name, question.gpus or question.ranks, memory, question.host_bytes, link, origin)

    @classmethod
    def here(cls, question: Question, machine: Machine, link: float | None) -> Hardware:
        """This machine, whose link was measured at ``link`` bytes per second."""
        gpu = machine.gpu
        on_gpu = gpu.present and question.server.device != "cpu"
        device, name = ("cuda", gpu.name) if on_gpu else ("cpu", "no GPU")
        found = cls(
            device, name, gpu.count if on_gpu else 0, gpu.memory_bytes[0] if on_gpu else None, machine.available_bytes, link, "measured"
        )
        return found if question.link is None else replace(found, link=question.link, origin="given")

    def __str__(self) -> str:
        host = "host memory that was not given" if self.host_bytes is None else f"{size(self.host_bytes)} of host memory"
        if self.device == "cpu":
            return f"a CPU with {host}"
        memory = "" if self.gpu_bytes is None else f" ({self.gpu_bytes / GIB:.1f} GiB)"
        return f"{self.gpus} x {self.gpu}{memory} with {host}"
