# SPDX-License-Identifier: Apache-2.0
"""What SGLang does with Triton kernels and CUDA's current device in models with linear attention, for a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.nn.functional as F

_device: ContextVar[str | None] = ContextVar("freekv_device", default=None)  # of the server whose settings SGLang resolves


@contextmanager
def resolving(device: str) -> Iterator[None]:
    """While SGLang resolves the settings of a server with KV retrieval on ``device``."""
    token = _device.set(device)
    try:
        yield
    finally:
        _device.reset(token)


def keeps_states(original) -> bool:
    """AROUND the question whether the prefix cache may keep states beside whole pages: a FreeKV server on a CPU does."""
    return _device.get() == "cpu" or original()


def pageable(original, tensor: torch.Tensor, *args) -> torch.Tensor:
    """AROUND the pinning of memory: without a GPU there is none to pin it for."""
    return tensor


def device_module(original, device=None):
    """AROUND the module of a device: without one, that of the CPU, where PyTorch would say CUDA because it was built for it."""
    return torch.cpu if device is None else original(device)


def gated_norm(norm, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
    """REPLACE the RMS norm of what linear attention gives: ``x [..., D]``, normed, times the activation of ``gate``, shaped alike.

    Raises:
        RuntimeError: the norm is one of groups, or comes behind the gate.
    """
    if getattr(norm, "group_size", None) is not None or not getattr(norm, "norm_before_gate", True):
        raise RuntimeError(
            f"{type(norm).__name__} with group_size {norm.group_size} and norm_before_gate {norm.norm_before_gate}: expected None and True "
            "with --device cpu; use --device cuda"
        )
    normed = x.float() * (x.float().square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight.float()
    if gate is not None:
        normed = normed * (gate.float().sigmoid() if norm.activation == "sigmoid" else F.silu(gate.float()))
    return normed.to(x.dtype)


def gated_expert(hidden_states: torch.Tensor, gate_weight: torch.Tensor, shared_output: torch.Tensor, final_hidden_states: torch.Tensor):
    """REPLACE the sum of experts: add ``shared_output [T, D]``, times a sigmoid of each token, to ``final_hidden_states``, in place."""
    gate = (hidden_states.float() @ gate_weight.float()).sigmoid()
    final_hidden_states += (gate[:, None] * shared_output.float()).to(final_hidden_states.dtype)


def track_states(
    conv_states_pool, ssm_states_pool, cache_indices, mamba_track_mask, mamba_track_indices, batch_size, check_freed_slots=False
):
    """REPLACE the copy of states that a decode step leaves to the prefix cache, of all layers: ``[L, slots, ...]``, by ``[B]`` slots."""
    tracked = mamba_track_mask[:batch_size]
    source, target = cache_indices[:batch_size][tracked].long(), mamba_track_indices[:batch_size][tracked].long()
    for pool in (conv_states_pool, ssm_states_pool):
        pool[:, target] = pool[:, source]
