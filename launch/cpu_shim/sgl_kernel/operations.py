# SPDX-License-Identifier: Apache-2.0
"""Operations of ``torch.ops.sgl_kernel`` that SGLang's models with linear attention look up when they load, as references in PyTorch."""

import torch

from sgl_kernel import delta_rule

LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")


def fused_gdn_gating_cpu(A_log, a, b, dt_bias):
    decay, write = delta_rule.gates(A_log, a, b, dt_bias)
    return decay[None], write[None].to(b.dtype)


def fused_sigmoid_gating_delta_rule_update_cpu(
    *, A_log, dt_bias, q, k, v, a, b, initial_state_source, initial_state_indices, cu_seqlens, use_qk_l2norm_in_kernel,
    softplus_beta=1.0, softplus_threshold=20.0,
):  # fmt: skip
    gates = delta_rule.gates(A_log, a, b, dt_bias, softplus_beta, softplus_threshold)
    where = initial_state_source, initial_state_indices, cu_seqlens
    return delta_rule.attend((q[0], k[0], v[0]), gates, *where, use_qk_l2norm_in_kernel)[0][None]


def fused_sigmoid_mul_cpu(x, gate):
    x.mul_(gate.reshape(x.shape).sigmoid())


def fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim):
    return _normed(q, q_weight, eps, head_dim).reshape(q.shape), _normed(k, k_weight, eps, head_dim).reshape(k.shape)


def fused_qk_gemma_rmsnorm_with_gate_cpu(q_gate, k, q_weight, k_weight, eps, head_dim, num_head):
    q, gate = q_gate.reshape(-1, 2, head_dim).unbind(1)
    return _normed(q, q_weight, eps, head_dim), _normed(k, k_weight, eps, head_dim), gate.contiguous()


def fused_qkvzba_split_reshape_cat_contiguous_cpu(mixed_qkvz, mixed_ba, num_heads_qk, num_heads_v, head_qk, head_v):
    tokens, values = len(mixed_qkvz), num_heads_v * head_v
    qkv, z = mixed_qkvz.split([2 * num_heads_qk * head_qk + values, values], dim=-1)
    b, a = mixed_ba.split(num_heads_v, dim=-1)
    return qkv.contiguous(), z.reshape(tokens, num_heads_v, head_v), b.contiguous(), a.contiguous()


def _normed(x, weight, eps, head_dim):
    """Gemma's RMS norm of each head: ``[T, H * D]`` -> ``[T * H, D]``."""
    heads = x.reshape(-1, head_dim).float()
    return (heads * (heads.square().mean(-1, keepdim=True) + eps).rsqrt() * (1 + weight.float())).to(x.dtype)


for schema, function in {
    "(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)": fused_gdn_gating_cpu,
    "(*, Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor(a!) initial_state_source, "
    "Tensor initial_state_indices, Tensor cu_seqlens, bool use_qk_l2norm_in_kernel, float softplus_beta=1.0, "
    "float softplus_threshold=20.0) -> Tensor": fused_sigmoid_gating_delta_rule_update_cpu,
    "(Tensor(a!) x, Tensor gate) -> ()": fused_sigmoid_mul_cpu,
    "(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps, int head_dim) -> (Tensor, Tensor)": fused_qk_gemma_rmsnorm_cpu,
    "(Tensor q_gate, Tensor k, Tensor q_weight, Tensor k_weight, float eps, int head_dim, int num_head) -> (Tensor, Tensor, Tensor)":
        fused_qk_gemma_rmsnorm_with_gate_cpu,
    "(Tensor mixed_qkvz, Tensor mixed_ba, int num_heads_qk, int num_heads_v, int head_qk, int head_v) -> (Tensor, Tensor, Tensor, Tensor)":
        fused_qkvzba_split_reshape_cat_contiguous_cpu,
}.items():  # fmt: skip
    LIBRARY.define(function.__name__ + schema)
    LIBRARY.impl(function.__name__, function, "CPU")
