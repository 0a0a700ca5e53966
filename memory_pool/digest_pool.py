# SPDX-License-Identifier: Apache-2.0
"""DigestPool: the digest of every full page, on the device."""

from __future__ import annotations

from typing import Any

import torch

from sglang_freekv.memory_pool.host_pool import HostPool

INTEGERS = {2: torch.int16, 4: torch.int32}


class DigestPool:
    """Digests of all retrieval layers. They are indexed by host page, so a prefix hit finds them in place.

    Args:
        num_layers: number of retrieval layers.
        shape: ``(n_page, H, *digest)``, where ``digest`` is the shape of one unit's digest.
        dtype, device: of the digests.
    """

    def __init__(self, num_layers: int, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
        self.layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    @property
    def num_bytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def check_integrity(self, host: HostPool, host_pages: torch.Tensor, policy: Any) -> None:
        """Compare digests, bit for bit, with new ones of the keys in the host pool.

        Args:
            host: pool of the keys.
            host_pages: ``[N]`` full pages to examine.
            policy: policy whose ``digests`` writes the new ones.

        Raises:
            RuntimeError: a digest differs.
        """
        for index, (digests, pages) in enumerate(zip(self.layers, host.layers)):
            keys = pages[host_pages.cpu(), :, 0].to(digests.device).transpose(1, 2)  # [N, S, H, D]
            num_pages, page_size, num_heads, head_dim = keys.shape
            order = torch.arange(num_pages, device=digests.device)
            expected = torch.empty_like(digests[:num_pages])
            policy.digests.write(keys.flatten(0, 1), (order * page_size)[:, None].expand(-1, num_heads), order, expected)
            found, expected = (each.flatten(2) for each in (digests[host_pages], expected))
            bits = INTEGERS[found.element_size()]
            corner = torch.arange(found.shape[2], device=found.device) < 2 * head_dim  # codes follow the corners
            wrong = ((found.view(bits) != expected.view(bits)) & ~(corner & found.isnan() & expected.isnan())).flatten(1).any(1)
            if wrong.any():
                bad = host_pages[wrong].tolist()
                raise RuntimeError(
                    f"digest pool, retrieval layer {index}: {len(bad)} of {num_pages} pages examined do not match the host pool, expected "
                    f"none, first {bad[:8]}; restart the server"
                )
