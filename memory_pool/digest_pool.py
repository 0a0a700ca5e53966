# SPDX-License-Identifier: Apache-2.0
"""DigestPool: the digest of every full page, on the device."""

from __future__ import annotations

from typing import Any

import torch

from sglang_freekv import kernels
from sglang_freekv.kernels.kv import KV
from sglang_freekv.memory_pool.host_pool import HostPool

INTEGERS = {2: torch.int16, 4: torch.int32}


def keys_to_digest(
    kv: KV, starts: torch.Tensor, host_pages: torch.Tensor, page_size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of full pages as attention sees them: of coded KV decoded, and rotated back.

    Args:
        kv: token rows ``[T, H, D]``.
        starts: ``[N, H]`` row of each page's first token, per kv head.
        host_pages: ``[N]`` host pages, -1 for a page to leave out.
        page_size: S.
        dtype: of decoded keys.

    Returns:
        ``(keys, starts)``: token rows of keys ``[T, H, D]``, and ``[N, H]`` where the pages begin there.
    """
    if kv.scales is None:
        return kv.keys, starts
    keys = kernels.unrotated_keys(kv, starts, host_pages, page_size, dtype)
    return keys, (torch.arange(len(host_pages), device=starts.device) * page_size)[:, None].expand_as(starts)


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

    def check_layer(self, index: int, host: HostPool, host_pages: torch.Tensor, policy: Any) -> None:
        """Compare digests of a layer, bit for bit, with new ones of the keys in the host pool.

        Args:
            host: pool of the keys.
            host_pages: ``[N]`` full pages to examine.
            policy: policy whose ``digests`` writes the new ones.

        Raises:
            RuntimeError: a digest differs.
        """
        num_pages, (num_heads, _, page_size, head_dim) = len(host_pages), host.layers[0].shape[1:]
        digests = self.layers[index]
        order = torch.arange(num_pages, device=digests.device)
        starts = (order * page_size)[:, None].expand(-1, num_heads)
        kv = host.token_rows(index, host_pages, digests.device)
        expected = torch.empty_like(digests[:num_pages])
        policy.digests.write(*keys_to_digest(kv, starts, order, page_size, digests.dtype), order, expected)
        found, expected = (each.flatten(2) for each in (digests[host_pages], expected))
        bits = INTEGERS[found.element_size()]
        corner = torch.arange(found.shape[2], device=found.device) < 2 * head_dim  # codes follow the corners
        wrong = ((found.view(bits) != expected.view(bits)) & ~(corner & found.isnan() & expected.isnan())).flatten(1).any(1)
        if wrong.any():
            bad = host_pages[wrong].tolist()
            raise RuntimeError(
                f"digest pool, retrieval layer {index}: {len(bad)} of {num_pages} pages examined do not match the host pool, expected none, "
                f"first {bad[:8]}; restart the server"
            )
