# SPDX-License-Identifier: Apache-2.0
"""Functions that SGLang imports for models with linear attention: the causal convolution, and the delta rule of a prefill."""

import torch
import torch.nn.functional as F

from sgl_kernel import delta_rule


def causal_conv1d_fn_cpu(x, weight, bias, *, activation, conv_states, has_initial_state, cache_indices, query_start_loc, seq_lens_cpu=None):
    """Convolve each request's tokens behind its last ones, and keep its last ones.

    Args:
        x: ``[C, T]`` channels of the tokens of all requests.
        weight: ``[C, W]``.
        conv_states: ``[slots, C, W - 1]`` last tokens of a request, written in place.
        has_initial_state: ``[B]`` bool, whether a request has tokens before these.
        cache_indices: ``[B]`` slot of each request, below 0 for one without.
        query_start_loc: ``[B + 1]`` first token of each request, and T.

    Returns:
        ``[C, T]``.
    """
    output, starts = torch.empty_like(x), query_start_loc.tolist()
    for slot, goes_on, first, end in zip(cache_indices.tolist(), has_initial_state.tolist(), starts, starts[1:]):
        before = conv_states[slot] if goes_on and slot >= 0 else torch.zeros_like(conv_states[0])
        tokens = torch.cat([before.to(x.dtype), x[:, first:end]], dim=1)
        output[:, first:end] = _convolved(tokens, weight, bias, activation)
        if slot >= 0:
            conv_states[slot] = tokens[:, tokens.shape[1] - conv_states.shape[-1] :].to(conv_states.dtype)
    return output


def causal_conv1d_update_cpu(x, conv_states, weight, bias, activation, conv_state_indices):
    """The same for one token of each request, of which each has a slot: ``[B, C]`` -> ``[B, C]``."""
    where = {"conv_states": conv_states, "cache_indices": conv_state_indices, "query_start_loc": torch.arange(len(x) + 1)}
    goes_on = torch.ones(len(x), dtype=torch.bool)
    return causal_conv1d_fn_cpu(x.T, weight, bias, activation=activation, has_initial_state=goes_on, **where).T


def chunk_gated_delta_rule_cpu(*, q, k, v, g, beta, initial_state, initial_state_indices, cu_seqlens, head_first, use_qk_l2norm_in_kernel):
    """``delta_rule.attend`` of a prefill: ``[1, T, V, D]`` output, None, and ``[1, N, V, D, K]`` states between chunks."""
    if head_first:
        raise RuntimeError("head_first True: expected False, the only order that SGLang uses on a CPU")
    where = initial_state, initial_state_indices, cu_seqlens
    output, between = delta_rule.attend((q[0], k[0], v[0]), (g[0].float(), beta[0].float()), *where, use_qk_l2norm_in_kernel)
    return output[None], None, between[None]


def _convolved(tokens, weight, bias, activation):
    """``[C, W - 1 + T]`` -> ``[C, T]``."""
    summed = F.conv1d(tokens.float()[None], weight.float()[:, None], None if bias is None else bias.float(), groups=len(weight))[0]
    return F.silu(summed) if activation in ("silu", "swish") else summed
