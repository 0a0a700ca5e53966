"""What takes the place of Triton kernels and of sgl_kernel's in models with linear attention on a CPU, against transformers."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextRMSNorm,
    Qwen3NextRMSNormGated,
    torch_chunk_gated_delta_rule,
)

from sglang_freekv.scheduler_patch import cpu, linear_attention

HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, SLOTS = 2, 6, 16, 24, 5


@pytest.fixture(scope="module")
def stand_in():
    """The stand-in for sgl_kernel, which this process does not keep."""
    with mock.patch.object(sys, "path", [str(cpu._shim_directory()), *sys.path]):
        modules = SimpleNamespace(**{name: importlib.import_module(f"sgl_kernel.{name}") for name in ("mamba", "operations")})
    yield modules
    modules.operations.LIBRARY._destroy()
    for name in [name for name in sys.modules if name.split(".")[0] == "sgl_kernel"]:
        del sys.modules[name]


def tokens(count: int) -> dict[str, torch.Tensor]:
    """Queries, keys, values, decays and writes of ``count`` tokens."""
    shapes = {"q": (HEADS, KEY_DIM), "k": (HEADS, KEY_DIM), "v": (VALUE_HEADS, VALUE_DIM)}
    drawn = {name: torch.randn(1, count, *shape) for name, shape in shapes.items()}
    return drawn | {"g": -torch.rand(1, count, VALUE_HEADS), "beta": torch.rand(1, count, VALUE_HEADS)}


def by_transformers(x: dict[str, torch.Tensor], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output ``[T, V, D]``, and the state behind it, ``[V, D, K]``."""
    query, key = (x[name].repeat_interleave(VALUE_HEADS // HEADS, dim=2) for name in "qk")
    before = state.transpose(-1, -2)[None]
    output, after = torch_chunk_gated_delta_rule(
        query, key, x["v"], g=x["g"], beta=x["beta"], initial_state=before, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    return output[0], after[0].transpose(-1, -2)


@pytest.mark.parametrize("lengths", [(1,), (64,), (130, 1, 63)])
def test_prefill_of_the_delta_rule(stand_in, lengths):
    torch.manual_seed(sum(lengths))
    x, states = tokens(sum(lengths)), torch.randn(SLOTS, VALUE_HEADS, VALUE_DIM, KEY_DIM)
    slots, starts, before = torch.tensor([3, 0, 4])[: len(lengths)], torch.tensor([0, *lengths]).cumsum(0), states.clone()
    output, _, between = stand_in.mamba.chunk_gated_delta_rule_cpu(
        **x, initial_state=states, cu_seqlens=starts, head_first=False, use_qk_l2norm_in_kernel=True, initial_state_indices=slots
    )
    untouched = [slot for slot in range(SLOTS) if slot not in slots]
    assert torch.equal(states[untouched], before[untouched])
    chunks = iter(between[0])
    for slot, first, end in zip(slots.tolist(), starts.tolist(), starts.tolist()[1:]):
        mine = {name: tensor[:, first:end] for name, tensor in x.items()}
        expected, after = by_transformers(mine, before[slot])
        torch.testing.assert_close(output[0, first:end], expected)
        torch.testing.assert_close(states[slot], after)
        for chunk in range(0, end - first, 64):
            told = (
                before[slot] if not chunk else by_transformers({name: tensor[:, :chunk] for name, tensor in mine.items()}, before[slot])[1]
            )
            torch.testing.assert_close(next(chunks), told)
    assert next(chunks, None) is None


def test_a_step_of_the_delta_rule_continues_a_prefill(stand_in):
    torch.manual_seed(0)
    x, states = tokens(3), torch.randn(SLOTS, VALUE_HEADS, VALUE_DIM, KEY_DIM)
    gates = {"A_log": torch.randn(VALUE_HEADS), "dt_bias": torch.randn(VALUE_HEADS)}
    a, b = torch.randn(2, 3, VALUE_HEADS)
    g, beta = torch.ops.sgl_kernel.fused_gdn_gating_cpu(gates["A_log"], a, b, gates["dt_bias"])
    torch.testing.assert_close(g[0], -gates["A_log"].exp() * F.softplus(a + gates["dt_bias"]))
    torch.testing.assert_close(beta[0], b.sigmoid())
    slots, before = torch.tensor([2, -1, 0], dtype=torch.int32), states.clone()
    output = torch.ops.sgl_kernel.fused_sigmoid_gating_delta_rule_update_cpu(
        **gates, q=x["q"], k=x["k"], v=x["v"], a=a, b=b, initial_state_source=states, initial_state_indices=slots,
        cu_seqlens=torch.arange(4, dtype=torch.int32), use_qk_l2norm_in_kernel=True, softplus_beta=1.0, softplus_threshold=20.0,
    )  # fmt: skip
    for token, slot in ((0, 2), (2, 0)):
        mine = {name: tensor[:, token : token + 1] for name, tensor in (x | {"g": g, "beta": beta}).items()}
        expected, after = by_transformers(mine, before[slot])
        torch.testing.assert_close(output[0, token : token + 1], expected)
        torch.testing.assert_close(states[slot], after)
    assert not output[0, 1].any() and torch.equal(states[[1, 3, 4]], before[[1, 3, 4]])


def test_convolution_in_pieces_is_that_of_the_whole(stand_in):
    torch.manual_seed(0)
    channels, width, pieces = 10, 4, (2, 7, 1, 1, 5)
    x, weight, bias = torch.randn(channels, sum(pieces)), torch.randn(channels, width), torch.randn(channels)
    expected = F.silu(F.conv1d(F.pad(x, (width - 1, 0))[None], weight[:, None], bias, groups=channels)[0])
    states, begun = torch.randn(SLOTS, channels, width - 1), 0
    before, slot, found = states.clone(), torch.tensor([3]), []
    for piece in pieces:
        part = x[:, begun : begun + piece]
        if piece == 1:
            found.append(stand_in.mamba.causal_conv1d_update_cpu(part.T, states, weight, bias, "silu", slot).T)
        else:
            where = {"cache_indices": slot, "query_start_loc": torch.tensor([0, piece]), "has_initial_state": torch.tensor([begun > 0])}
            found.append(stand_in.mamba.causal_conv1d_fn_cpu(part, weight, bias, activation="silu", conv_states=states, **where))
        begun += piece
    torch.testing.assert_close(torch.cat(found, dim=1), expected)
    assert torch.equal(states[3], x[:, -width + 1 :]) and torch.equal(states[[0, 1, 2, 4]], before[[0, 1, 2, 4]])


def test_operations_around_attention(stand_in):
    operations, dim = torch.ops.sgl_kernel, 8
    torch.manual_seed(0)
    norms = [Qwen3NextRMSNorm(dim, eps=1e-6) for _ in range(2)]
    for norm in norms:
        torch.nn.init.normal_(norm.weight)
    q, gate, k = torch.randn(3, 5, 4, dim), None, torch.randn(5, 2, dim)
    q, gate = q[0], q[1]
    expected, weights = [norm(x).detach() for norm, x in zip(norms, (q, k))], [norm.weight.data for norm in norms]
    found = operations.fused_qk_gemma_rmsnorm_cpu(q.flatten(1), k.flatten(1), *weights, 1e-6, dim)
    torch.testing.assert_close(list(found), [x.flatten(1) for x in expected])
    found = operations.fused_qk_gemma_rmsnorm_with_gate_cpu(torch.cat([q, gate], dim=-1).flatten(1), k.flatten(1), *weights, 1e-6, dim, 4)
    torch.testing.assert_close(list(found), [x.flatten(0, 1) for x in (*expected, gate)])
    mixed = [torch.randn(5, 2 * dim), torch.randn(5, 2 * dim), torch.randn(5, 4 * dim), torch.randn(5, 4, dim)]
    b, a = torch.randn(2, 5, 4)
    all_of = torch.cat([x.flatten(1) for x in mixed], dim=1), torch.cat([b, a], dim=1)
    found = operations.fused_qkvzba_split_reshape_cat_contiguous_cpu(*all_of, 2, 4, dim, dim)
    assert all(torch.equal(x, y) for x, y in zip(found, (torch.cat(mixed[:3], dim=1), mixed[3], b, a), strict=True))
    output = q.flatten(1).clone()
    operations.fused_sigmoid_mul_cpu(output, gate)
    torch.testing.assert_close(output, (q * gate.sigmoid()).flatten(1))


def test_gated_norm():
    torch.manual_seed(0)
    norm, x, gate = Qwen3NextRMSNormGated(VALUE_DIM, eps=1e-6), torch.randn(7, VALUE_DIM), torch.randn(7, VALUE_DIM)
    torch.nn.init.normal_(norm.weight)
    mine = SimpleNamespace(weight=norm.weight, eps=1e-6, activation="silu")
    torch.testing.assert_close(linear_attention.gated_norm(mine, x, gate), norm(x, gate))
    mine.activation = "sigmoid"
    torch.testing.assert_close(linear_attention.gated_norm(mine, x, gate), norm(x, torch.full_like(x, 30)) / 30 * gate.sigmoid())
    mine.group_size, mine.norm_before_gate = 4, True
    with pytest.raises(RuntimeError, match="with group_size 4 and norm_before_gate True: expected None and True with --device cpu"):
        linear_attention.gated_norm(mine, x, gate)


def test_expert_that_all_tokens_share():
    hidden, weight, shared, total = torch.randn(7, 12), torch.randn(12), torch.randn(7, 9), torch.randn(7, 9)
    before = total.clone()
    linear_attention.gated_expert(hidden, weight, shared, total)
    torch.testing.assert_close(total, before + (hidden @ weight).sigmoid()[:, None] * shared)


def test_tracked_states_are_copied_in_all_layers():
    convolution, states = torch.randn(2, SLOTS, 3, 3), torch.randn(2, SLOTS, 2, 4, 4)
    before = convolution.clone(), states.clone()
    slots, mask, targets = torch.tensor([1, 2, 0, 3]), torch.tensor([True, False, True, True]), torch.tensor([4, 3, 2, 0])
    linear_attention.track_states(convolution, states, slots, mask, targets, 3)
    for pool, old in zip((convolution, states), before):
        assert torch.equal(pool[:, [4, 2]], old[:, [1, 0]]) and torch.equal(pool[:, [0, 1, 3]], old[:, [0, 1, 3]])


def test_the_device_without_a_number_is_the_cpu():
    assert linear_attention.device_module(torch.get_device_module) is torch.cpu
    assert linear_attention.device_module(torch.get_device_module, "cuda") is torch.cuda


def test_a_server_on_a_cpu_keeps_states_in_the_prefix_cache():
    """Elsewhere SGLang is asked, and nothing changes where FreeKV's settings are not being resolved."""
    asked: list[str] = []

    def original() -> bool:
        asked.append("SGLang")
        return False

    assert not linear_attention.keeps_states(original) and len(asked) == 1
    with linear_attention.resolving("cuda"):
        assert not linear_attention.keeps_states(original) and len(asked) == 2
    with linear_attention.resolving("cpu"):
        assert linear_attention.keeps_states(original) and len(asked) == 2
    assert not linear_attention.keeps_states(original)
