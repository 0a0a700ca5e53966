"""The rotation of keys that are coded: it changes no logit, is its own inverse, and the kernels' is the reference's."""

from __future__ import annotations

import pytest
import torch

from covering import covering
from sglang_freekv.kernels import KV, Scales, reference, rotation
from sglang_freekv.kernels.decode import unrotated_keys
from sglang_freekv.kernels.kv import LARGEST_CODE
from sglang_freekv.kernels.reference_codes import code_vectors, decode_vectors
from sglang_freekv.kernels.reference_rotation import rotated_together, signs_of_rotation
from sglang_freekv.kernels.rotation import rotate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MULTIPLIED = {name: dtype for name, dtype in DTYPES.items() if DEVICE == "cuda" or name != "bfloat16"}  # by Triton's interpreter, rightly
DIMS = {8: 8, 16: 16, 24: 8, 64: 64, 80: 16, 96: 32, 112: 16, 128: 128, 192: 64, 256: 256}  # and how many are rotated together
DIMS_BY_NAME = {str(dim): dim for dim in DIMS}
HALF_ULP = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}  # of a number that is rounded once


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def rounding(x: torch.Tensor, terms: int) -> torch.Tensor:
    """A bound of what a rotation in float32 of ``x [..., D]`` differs from the exact one by, before it is rounded to a dtype: ``[..., D]``.

    A sum of n products that are exact is rounded n - 1 times, then multiplied by a number that is rounded, and rounded again.
    """
    blocks = x.double().abs().unflatten(-1, (-1, terms))
    return ((terms + 2) * 2.0**-24 * terms**-0.5 * blocks.sum(-1, keepdim=True)).expand_as(blocks).flatten(-2)


def exact(x: torch.Tensor) -> torch.Tensor:
    dim = x.shape[-1]
    return x.double() @ signs_of_rotation(dim, x.device).double() * rotated_together(dim) ** -0.5


@pytest.mark.parametrize("dim, together", DIMS.items())
def test_the_matrix_is_symmetric_and_its_own_inverse(dim, together):
    signs = signs_of_rotation(dim, torch.device("cpu"))
    assert rotated_together(dim) == together
    assert torch.equal(signs, signs.T) and torch.equal(signs @ signs, together * torch.eye(dim))
    place = torch.arange(dim) // together
    assert torch.equal(signs.abs(), (place[:, None] == place).float())
    assert torch.equal(signs[0, :together], torch.ones(together)) and (signs[:together, :together].sum(0)[1:] == 0).all()


@pytest.mark.parametrize("dim", DIMS)
def test_what_is_rotated_twice_is_as_it_was(dim):
    together, x, y = rotated_together(dim), torch.randn(50, 3, dim), torch.randn(50, 2, dim)
    once = reference.rotate(x, y)
    twice = reference.rotate(*once)
    for before, between, after in zip((x, y), once, twice):
        carried = exact(rounding(before, together)).abs().amax(-1, keepdim=True) + rounding(before, together) * together**0.5
        assert ((after.double() - before.double()).abs() <= rounding(between, together) + carried + 2**-23 * before.abs()).all()
        torch.testing.assert_close(between.double().norm(dim=-1), before.double().norm(dim=-1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dim", [24, 80, 128])
def test_logits_are_the_same(dim):
    queries, keys = torch.randn(1, 6, dim), torch.randn(1, 40, dim) + 30 * (torch.arange(dim) == 3)  # a key bias
    rotated_queries, rotated_keys = reference.rotate(queries, keys)
    before, after = (q.double() @ k.double().transpose(1, 2) for q, k in ((queries, keys), (rotated_queries, rotated_keys)))
    torch.testing.assert_close(after, before, rtol=0, atol=float(queries.norm(dim=-1).max() * keys.norm(dim=-1).max()) * (dim + 4) * 2**-23)
    assert rotated_keys.abs().max() < 0.6 * keys.abs().max(), "a number that stands out is spread"


def test_other_dims_are_refused():
    for dim in (4, 12, 90, 100):
        with pytest.raises(ValueError, match=f"expected a head_dim that 8 divides, got {dim}"):
            reference.rotate(torch.zeros(1, 2, dim), torch.zeros(1, 1, dim))
        with pytest.raises(ValueError, match=f"got {dim}"):
            rotate(torch.zeros(1, 2, dim), torch.zeros(1, 1, dim))


def assert_near(found: torch.Tensor, expected: torch.Tensor, x: torch.Tensor) -> None:
    """Each may be rounded to the other side of a number half way, and each sum by what its order makes of it."""
    assert found.dtype == expected.dtype == x.dtype and found.shape == x.shape and found.is_contiguous()
    assert torch.equal(found.isfinite(), expected.isfinite())
    found, expected, finite = found.double(), expected.double(), x.isfinite().all(-1)
    bound = 2 * rounding(x, rotated_together(x.shape[-1])) + 2 * HALF_ULP[x.dtype] * expected.abs() + 2**-24
    assert ((found - expected).abs() <= bound)[finite].all()


@pytest.mark.parametrize("D, T, heads, dtype, programs", covering(
    DIMS_BY_NAME, {f"{count} tokens": count for count in (1, 13, 70)}, {"2 of 2": (2, 2), "6 of 2": (6, 2), "7 of 1": (7, 1)}, MULTIPLIED,
    {"2 programs": 2, "a program for each part": 512},
))  # fmt: skip
@pytest.mark.filterwarnings("ignore:invalid value")  # of numbers that are not finite, in the interpreter
def test_rotate(D, T, heads, dtype, programs, monkeypatch):
    """Queries and keys of a wider row, into tensors of their own. One has a number that is not finite, which spoils its own vector only."""
    query_heads, num_heads = heads
    monkeypatch.setattr(rotation, "PROGRAMS", programs)
    fused = (torch.randn(T, query_heads + 2 * num_heads, D) * 10.0 ** torch.randint(-3, 3, (T, 1, 1))).to(dtype).to(DEVICE)
    fused[T // 2, 1, D // 2], fused[T - 1, query_heads + num_heads - 1, 0] = torch.nan, torch.inf
    queries, keys, _ = fused.split([query_heads, num_heads, num_heads], 1)
    before, poison = fused.clone(), torch.empty
    monkeypatch.setattr(torch, "empty", lambda shape, **options: torch.full(shape, -7.0, **options))
    found = rotate(queries, keys)
    monkeypatch.setattr(torch, "empty", poison)
    for ours, theirs, x in zip(found, reference.rotate(queries, keys), (queries, keys)):
        assert_near(ours, theirs, x)
    assert torch.equal(fused.view(torch.uint8), before.view(torch.uint8))


def test_more_or_fewer_axes():
    for shape in ((), (3, 4)):
        queries, keys = torch.randn(*shape, 4, 32, device=DEVICE), torch.randn(*shape, 2, 32, device=DEVICE)
        for ours, theirs, x in zip(rotate(queries, keys), reference.rotate(queries, keys), (queries, keys)):
            assert_near(ours, theirs, x)


def coded(tokens: int, H: int, D: int) -> KV:
    """Token rows of codes, of which some tokens have a scale of NaN or 0; a token row is wider than they are."""
    codes = [torch.randint(-LARGEST_CODE, LARGEST_CODE + 1, (tokens, H + 1, D), dtype=torch.int8, device=DEVICE)[:, 1:] for _ in range(2)]
    scales = Scales(*(torch.rand(tokens, H + 1, device=DEVICE).half()[:, 1:] for _ in range(2)))
    scales.keys[tokens - 1], scales.keys[1] = torch.nan, 0
    return KV(*codes, scales)


@pytest.mark.parametrize("D, S, H, dtype, integer", covering(
    DIMS_BY_NAME, {f"pages of {size}": size for size in (1, 4, 24, 160)}, {"1 head": 1, "3 heads": 3}, DTYPES,
    {"int32": torch.int32, "int64": torch.int64},
))  # fmt: skip
def test_unrotated_keys(D, S, H, dtype, integer):
    """Bit for bit, from a start of each kv head's own; a skipped page is not read, whatever its start."""
    kv, tokens = coded(5 * S + 3, H, D), 5 * S + 3
    host_pages = torch.tensor([4, -1, 0, 7, -1], device=DEVICE).to(integer)
    starts = torch.randint(tokens - S + 1, (5, H), device=DEVICE).to(integer)
    starts[0], starts[1] = tokens - S, 10**6
    before = [each.clone() for each in (kv.keys, kv.scales.keys)]
    found, expected = (keys(kv, starts, host_pages, S, dtype) for keys in (unrotated_keys, reference.unrotated_keys))
    assert found.dtype == expected.dtype == dtype and found.shape == expected.shape == (5 * S, H, D)
    found, expected = (keys.unflatten(0, (5, S))[host_pages >= 0] for keys in (found, expected))
    assert found[0, S - 1].isnan().all() and torch.equal(found.isnan(), expected.isnan())
    found, expected = found.nan_to_num(77), expected.nan_to_num(77)
    if dtype == torch.bfloat16 and DEVICE == "cpu":  # Triton's interpreter cuts off where a device rounds
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=0)
    else:
        assert torch.equal(found, expected)
    assert torch.equal(kv.keys, before[0]) and torch.equal(kv.scales.keys.nan_to_num(77), before[1].nan_to_num(77))


def test_starts_of_whole_pages_and_no_page_at_all():
    kv, starts = coded(40, 3, 32), torch.tensor([3, 30], device=DEVICE)
    host_pages = torch.tensor([5, 2], device=DEVICE)
    found, expected = (
        keys(kv, starts[:, None].expand(-1, 3), host_pages, 8, torch.float32) for keys in (unrotated_keys, reference.unrotated_keys)
    )
    assert torch.equal(found, expected)
    assert reference.unrotated_keys(kv, starts[:0, None].expand(-1, 3), host_pages[:0], 8, torch.float32).shape == (0, 3, 32)


@pytest.mark.parametrize("dim", [24, 80, 128])
def test_unrotated_keys_are_the_keys_but_for_their_codes(dim):
    """An error of half a scale in each dimension has a length of at most the root of their number, which no rotation changes."""
    S, H, together = 8, 2, rotated_together(dim)
    keys = torch.randn(4 * S, H, dim)
    codes, scales = code_vectors(reference.rotate(keys, keys)[1])
    kv = KV(codes, codes, Scales(scales, scales))
    starts = torch.arange(4)[:, None].expand(-1, H) * S
    found = reference.unrotated_keys(kv, starts, torch.arange(4), S, torch.float32)
    bound = scales.double()[..., None] * (0.5 + 2**-4) * together**0.5  # float16 rounds by 127 * 2^-11 of a scale
    assert ((found.double() - keys.double()).abs() <= bound + rounding(keys, together) * together**0.5).all()
    assert not torch.allclose(found, decode_vectors(codes, scales), atol=0.1), "they were rotated"
    right = exact(decode_vectors(codes, scales))
    assert ((found.double() - right).abs() <= 2**-22 * right.abs()).all(), "sums of codes are exact"


def test_numbers_are_not_rotated_back():
    kv = KV(torch.zeros(8, 1, 8), torch.zeros(8, 1, 8))
    with pytest.raises(ValueError, match="expected codes with scales"):
        reference.unrotated_keys(kv, torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), 8, torch.float32)
