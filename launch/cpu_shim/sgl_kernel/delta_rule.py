# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule of linear attention, token by token in fp32.

Letters: T tokens of all requests, B requests, H query or key heads, V value heads, K and D the width of a key and of a value.
"""

import torch
import torch.nn.functional as F

CHUNK = 64  # tokens from one state to the next of those that are returned, as SGLang indexes them


def gates(A_log, a, b, dt_bias, beta=1.0, threshold=20.0):
    """Logarithm of the decay of the state, fp32, and how much of a token is written to it, both ``[T, V]``."""
    return -A_log.float().exp() * F.softplus(a.float() + dt_bias.float(), beta, threshold), b.float().sigmoid()


def attend(tokens, gates, states, slots, starts, normalize):
    """Linear attention of each request's tokens behind its state, which is brought up to date in place.

    Args:
        tokens: ``[T, H, K]`` queries and keys, and ``[T, V, D]`` values.
        gates: decay and write of each token, as of the function ``gates``.
        states: ``[slots, V, D, K]``.
        slots: ``[B]`` state of each request, below 0 for one without, whose output is zeros.
        starts: ``[B + 1]`` first token of each request, and T.
        normalize: whether queries and keys are brought to length 1.

    Returns:
        ``[T, V, D]`` output in the dtype of the values, and ``[N, V, D, K]`` fp32 states before every ``CHUNK`` tokens of each request.
    """
    (q, k, v), (decay, write) = tokens, gates
    q, k = (_spread(x, v.shape[1], normalize) for x in (q, k))
    q, values, output, between = q * q.shape[-1] ** -0.5, v.float(), torch.zeros_like(v), []
    starts = starts.tolist()
    for slot, first, end in zip(slots.tolist(), starts, starts[1:]):
        state = states[slot].to(torch.float32, copy=True) if slot >= 0 else torch.zeros(states.shape[1:])
        for token in range(first, end):
            if (token - first) % CHUNK == 0:
                between.append(state)
            state = state * decay[token, :, None, None].exp()
            told = (state @ k[token, :, :, None]).squeeze(-1)
            change = write[token, :, None] * (values[token] - told)
            state = state + change[:, :, None] * k[token, :, None, :]
            output[token] = (state @ q[token, :, :, None]).squeeze(-1) if slot >= 0 else 0
        if slot >= 0:
            states[slot] = state.to(states.dtype)
    return output, torch.stack(between) if between else torch.zeros(0, *states.shape[1:])


def _spread(x, heads, normalize):
    """``[T, H, K]`` -> ``[T, heads, K]`` fp32: each head for the value heads of its group."""
    x = x.float()
    if normalize:
        x = x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    return x.repeat_interleave(heads // x.shape[1], dim=1)
