"""HostPool: the KV of every full page, in CPU memory."""

from __future__ import annotations

import logging
import time

import torch

from sglang_freekv.config import GIB

logger = logging.getLogger(__name__)

PROGRESS_S = 5.0


class HostPool:
    """Pages of all retrieval layers, HND (paper section 4.2): one (page, kv head) is one contiguous unit.

    Which pages are free, and who owns the others, is known to SGLang's allocator and radix tree alone. A page is written
    whole, once, when its last token is known; page 0 is SGLang's padding page and is never written.

    Args:
        num_layers: retrieval layers.
        num_pages: pages, the padding page included.
        unit_shape: ``(H, 2, S, D)`` of one page.
        pin: page-lock the memory for the device to read it.

    Raises:
        RuntimeError: the system does not give the memory.
    """

    def __init__(self, num_layers: int, num_pages: int, unit_shape: tuple[int, ...], dtype: torch.dtype, pin: bool) -> None:
        self.layers: list[torch.Tensor] = []
        said = time.monotonic()
        for index in range(num_layers):
            try:
                self.layers.append(_allocate((num_pages, *unit_shape), dtype, pin))
            except RuntimeError as error:
                raise RuntimeError(
                    f"--freekv-host-memory: the system gave {self.num_bytes / GIB:.1f} GiB of {'pinned ' * pin}host memory, for "
                    f"{index} of {num_layers} layers, and then no more ({str(error).splitlines()[0]}); lower --freekv-host-memory, or "
                    "raise the memory limit of the container and its memlock limit (ulimit -l)"
                ) from error
            if time.monotonic() - said > PROGRESS_S:
                said = time.monotonic()
                logger.info(f"host pool: {index + 1} of {num_layers} layers, {self.num_bytes / GIB:.1f} GiB {'pinned' * pin}")

    @property
    def num_bytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    @property
    def unit_bytes(self) -> int:
        """Bytes of one (page, kv head), the unit of recall."""
        return self.layers[0][0, 0].nbytes

    def check_integrity(self) -> None:
        """Raise RuntimeError if the padding page was written: some store went astray."""
        for index, layer in enumerate(self.layers):
            if layer[0].count_nonzero():
                raise RuntimeError(f"host pool, retrieval layer {index}: padding page 0 was written, expected all zeros")


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, pin: bool) -> torch.Tensor:
    """Zeroed host memory, page-locked in place: torch's own pinned allocator would round up to a power of two."""
    tensor = torch.zeros(shape, dtype=dtype)
    if pin:
        status = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
        if int(status) != 0:
            raise RuntimeError(f"cudaHostRegister of {tensor.nbytes / GIB:.1f} GiB: {torch.cuda.cudart().cudaGetErrorString(status)}")
    return tensor
