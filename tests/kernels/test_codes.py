"""Codes of 8 bits: what decoding gives back, and the kernels that code and decode against their references, bit for bit."""

from __future__ import annotations

import pytest
import torch

from appended import some_step
from covering import covering
from sglang_freekv.kernels import KV, Scales, reference
from sglang_freekv.kernels.append import append_tokens
from sglang_freekv.kernels.decode import decode_tokens
from sglang_freekv.kernels.kv import LARGEST_CODE
from sglang_freekv.kernels.reference_codes import LARGEST_SCALE, code_vectors, decode_vectors
from sglang_freekv.kernels.write import write_tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
INTEGERS = {"int32": torch.int32, "int64": torch.int64}
NO_CODE = -128
MULTIPLIED_ROUNDS_OTHERWISE = 127.06201934814453  # to float16, by 1/127 in float32, than divided by 127


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def awkward(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Vectors of all sizes along the last axis, many of them zeros, beyond the largest scale, below the smallest, or not finite."""
    numbers = torch.randn(shape) * 10.0 ** torch.randint(-9, 9, shape[:-1])[..., None]
    flat = numbers.view(-1, shape[-1])
    for row, number in enumerate((torch.nan, torch.inf, -torch.inf, 127 * 65504.0, 127 * 65520.0, 3e38, -1e-45, 127 * 2.0**-25, 7e-6)):
        flat[(5 * row + 1) % len(flat), row % shape[-1]] = number
    flat[3 % len(flat)] = 0
    flat[4 % len(flat)] = torch.arange(shape[-1]) % 9 - 4.5  # halves, where the scale is 1
    flat[4 % len(flat), 0] = LARGEST_CODE
    return numbers.to(dtype).to(DEVICE)


def assert_same_bits(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(*(x.cpu().contiguous().view(torch.uint8) for x in (ours, theirs)))


def coded(*shape: int, dim: int) -> KV:
    """Random codes with scales, some of which are NaN or 0."""
    codes = [torch.randint(-LARGEST_CODE, LARGEST_CODE + 1, (*shape, dim), dtype=torch.int8, device=DEVICE) for _ in range(2)]
    scales = Scales(*(torch.rand(shape, device=DEVICE).half() for _ in range(2)))
    for each in scales:
        each[1], each[2] = torch.nan, 0
    return KV(*codes, scales)


def room(*shape: int, dim: int, scale_stride: int = 1) -> KV:
    """Codes and scales of which nothing was written; scales may lie apart."""
    codes = (torch.full((*shape, dim), NO_CODE, dtype=torch.int8, device=DEVICE) for _ in range(2))
    scales = (torch.full((*shape, scale_stride), -7.0, dtype=torch.float16, device=DEVICE)[..., 0] for _ in range(2))
    return KV(*codes, Scales(*scales))


def tensors(kv: KV) -> tuple[torch.Tensor, ...]:
    return kv.keys, kv.values, *kv.scales


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_what_is_decoded_differs_by_half_a_scale_or_by_what_the_scale_was_rounded_by(dtype):
    """A quotient near 127 is rounded by at most 2^-18, and float16 by 2^-11 of a scale, or by 2^-25."""
    numbers = (torch.randn(4000, 24) * 10.0 ** torch.randint(-6, 6, (4000, 1))).to(dtype)
    numbers = numbers[numbers.abs().amax(-1) < 127 * LARGEST_SCALE]
    codes, scales = code_vectors(numbers)
    wanted = numbers.double().abs().amax(-1) / LARGEST_CODE
    beyond = LARGEST_CODE * (wanted * 2**-11).clamp(min=2**-25)
    bound = torch.maximum(scales.double() * (0.5 + 2**-18), beyond * (1 + 2**-20))
    error = (numbers.double() - decode_vectors(codes, scales).double()).abs().amax(-1)
    assert (error <= bound).all() and (error > 0.49 * scales.double())[wanted > 2**-10].any()
    whole = codes.abs().amax(-1)
    assert (whole[wanted > 2**-14] == LARGEST_CODE).all() and whole.max() == LARGEST_CODE, "the largest number has the largest code"


def test_halves_are_rounded_to_even_and_negatives_have_negative_codes():
    numbers = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -126.5])
    codes, scale = code_vectors(numbers)
    assert scale == 1 and codes.tolist() == [127, 0, 2, 2, 0, -2, 126, -126]
    numbers = torch.randn(100, 16)
    (codes, scales), (negative, same) = code_vectors(numbers), code_vectors(-numbers)
    assert torch.equal(codes, -negative) and torch.equal(scales, same)


def test_what_was_decoded_has_the_same_codes_again():
    codes, scales = code_vectors(torch.randn(500, 32))
    again = code_vectors(decode_vectors(codes, scales))
    assert torch.equal(again[0], codes) and torch.equal(again[1], scales)


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_a_vector_that_is_not_finite_is_decoded_to_nan(number):
    numbers = torch.randn(3, 4, 8)
    alone = code_vectors(numbers)
    numbers[1, 2, 5] = number
    codes, scales = code_vectors(numbers)
    assert scales[1, 2].isnan() and not codes[1, 2].any() and decode_vectors(codes, scales)[1, 2].isnan().all()
    others = torch.arange(12).view(3, 4) != 6
    assert torch.equal(codes[others], alone[0][others]) and torch.equal(scales[others], alone[1][others])


def test_vectors_beyond_the_range_of_scales():
    largest, smallest = 127 * LARGEST_SCALE, 127 * 2.0**-24
    numbers = torch.tensor(
        [
            [0.0, 0.0],
            [largest, -largest / 127],
            [1e30, largest / 2],
            [smallest, -smallest / 127],
            [smallest * 0.4, 0.0],
            [smallest * 1.4, 0.0],
        ]
    )
    codes, scales = code_vectors(numbers)
    assert codes.tolist() == [[0, 0], [127, -1], [127, 64], [127, -1], [0, 0], [127, 0]]
    assert scales.tolist() == [0, 65504, 65504, 2**-24, 0, 2**-24]


@pytest.mark.parametrize("D, T, H, dtype", covering(
    {str(dim): dim for dim in (8, 80, 128)}, {"1 token": 1, "19 tokens": 19}, {"1 head": 1, "3 heads": 3}, DTYPES,
))  # fmt: skip
def test_extends_write_codes(D, T, H, dtype):
    fused = awkward(T, 4 * H, D, dtype=dtype)
    queries, keys, values = fused[:, : 2 * H], fused[:, 2 * H : 3 * H], fused[:, 3 * H :].clone()
    places = torch.randperm(T + 5, device=DEVICE)[:T]
    where = places, torch.tensor([T - 1], device=DEVICE), torch.tensor([2], device=DEVICE)
    written = []
    for kernel in (write_tokens, reference.write_tokens):
        kv, previous = room(T + 5, H, dim=D, scale_stride=3), torch.full((3, 2 * H, D), -7.0, dtype=dtype, device=DEVICE)
        last = kernel(keys, values, queries, *where, keys=kv.keys, values=kv.values, previous_queries=previous, scales=kv.scales)
        written.append((*tensors(kv), previous, last))
    assert_same_bits(*written)
    codes, scales = code_vectors(keys)
    assert torch.equal(written[0][0][places], codes) and torch.equal(written[0][2][places].isnan(), ~keys.isfinite().all(-1))
    assert torch.equal(written[0][5], queries[-1:]) or queries[-1:].isnan().any()
    assert (written[0][0] == NO_CODE).sum() == 5 * H * D and (written[0][3] == -7).sum() == 5 * H


@pytest.mark.parametrize("D, H, C, dtype", covering(
    {str(dim): dim for dim in (8, 80, 128)}, {"1 head": 1, "3 heads": 3}, {"6 slots": 6, "8 slots": 8}, DTYPES,
))  # fmt: skip
def test_decode_steps_append_codes(D, H, C, dtype):
    B, R, S, P = 12, 13, 4, 5
    fused = awkward(B, 3 * H, D, dtype=dtype)
    keys, values = fused[:, H : 2 * H], fused[:, 2 * H :].clone()
    step = some_step(B, H, C, S, P, DEVICE)
    written = []
    for kernel in (append_tokens, reference.append_tokens):
        kv = room(R * C + 1, S, H, dim=D, scale_stride=2)
        starts, filled = kernel(keys, values, *step, keys=kv.keys, values=kv.values, scales=kv.scales)
        written.append((*tensors(kv), starts.int(), filled.int()))
    assert_same_bits(*written)
    found, starts = written[0], written[0][4].long()
    codes, scales = code_vectors(values)
    token = (starts // S)[1:], ((step.seq_lens - 1) % S)[1:, None], torch.arange(H, device=DEVICE)
    assert torch.equal(found[1][token], codes[1:]) and torch.equal(found[3][token].nan_to_num(-1), scales[1:].nan_to_num(-1))
    assert (found[0] != NO_CODE).sum() == (B - 1) * H * D and (found[2] != -7).sum() == (B - 1) * H


def assert_decoded(found: KV, expected: KV) -> None:
    for ours, theirs in zip(found[:2], expected[:2]):
        if ours.dtype == torch.bfloat16 and DEVICE == "cpu":  # Triton's interpreter cuts off where a device rounds
            torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=0, equal_nan=True)
        else:
            assert torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(ours.nan_to_num(77), theirs.nan_to_num(77))


@pytest.mark.parametrize("D, H, N, dtype, integer", covering(
    {str(dim): dim for dim in (8, 80, 128, 256)}, {"1 head": 1, "3 heads": 3}, {"1 token": 1, "97 tokens": 97}, DTYPES, INTEGERS,
))  # fmt: skip
def test_listed_tokens_are_decoded(D, H, N, dtype, integer):
    """From frames whose heads lie apart, into the first rows of a larger scratch."""
    frames = coded(30, 4, H + 1, dim=D)
    kv = KV(frames.keys[..., 1:, :], frames.values[..., 1:, :], Scales(*(each[..., 1:] for each in frames.scales))).token_rows
    rows = torch.randint(120, (N,), device=DEVICE).to(integer)
    rows[0], rows[-1] = 119, 4  # 4 to 7 have scales of NaN
    before = [each.clone() for each in tensors(kv)]
    found, expected = (KV(*(torch.full((N + 3, H, D), -7.0, dtype=dtype, device=DEVICE) for _ in range(2))) for _ in range(2))
    decode_tokens(kv, rows, found)
    reference.decode_tokens(kv, rows, expected)
    assert_decoded(found, expected)
    assert (found.keys[N:] == -7).all() and (found.values[N:] == -7).all() and found.keys[N - 1].isnan().all()
    wanted = decode_vectors(kv.values[rows[0].long()], kv.scales.values[rows[0].long()])
    if N > 1:
        torch.testing.assert_close(found.values[0].float(), wanted, rtol=2**-7, atol=0, equal_nan=True)
    assert_same_bits(tensors(kv), tuple(before))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("N", [0, 1, 33])
def test_tokens_in_their_order_are_decoded(N, dtype):
    kv = coded(40, 2, dim=24)
    found, expected = (KV(*(torch.full((N, 2, 24), -7.0, dtype=dtype, device=DEVICE) for _ in range(2))) for _ in range(2))
    decode_tokens(kv, None, found)
    reference.decode_tokens(kv, None, expected)
    assert_decoded(found, expected)
    numbers = decode_vectors(kv.keys, kv.scales.keys)[:N]
    torch.testing.assert_close(found.keys.float(), numbers, rtol=2**-7, atol=0, equal_nan=True)


@pytest.mark.parametrize("into", DTYPES.values(), ids=DTYPES)
def test_numbers_without_scales_are_taken_over(into):
    kv = KV(*(torch.randn(30, 3, 16, device=DEVICE).half() for _ in range(2)))
    rows = torch.randperm(30, device=DEVICE)[:11]
    found, expected = (KV(*(torch.full((11, 3, 16), torch.nan, dtype=into, device=DEVICE) for _ in range(2))) for _ in range(2))
    decode_tokens(kv, rows, found)
    reference.decode_tokens(kv, rows, expected)
    assert_decoded(found, expected)
    torch.testing.assert_close(found.keys.float(), kv.keys[rows].float(), rtol=2**-7, atol=0)


@pytest.mark.parametrize("largest", [127.0, 1.0, 3.14159, 1e-5, 1e-6, 8e6, 1e7, MULTIPLIED_ROUNDS_OTHERWISE])
def test_every_number_half_way_between_two_codes_has_the_code_of_the_reference(largest):
    """And its neighbours in float32, with scales whose float16 is rounded either way, or cut off."""
    scale = code_vectors(torch.tensor([largest]))[1].float()
    middle = (torch.arange(-LARGEST_CODE, LARGEST_CODE) + 0.5) * scale
    near = torch.stack([middle, middle.nextafter(torch.tensor(torch.inf)), middle.nextafter(torch.tensor(-torch.inf))]).clamp(
        -largest, largest
    )
    numbers = torch.cat([near, torch.full((3, 1), largest)], 1)[:, None].to(DEVICE)
    places, first = torch.arange(3, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    kv = room(3, 1, dim=numbers.shape[2])
    last = {"previous_queries": numbers[:1].clone(), "scales": kv.scales}
    write_tokens(numbers, -numbers, numbers, places, first, first, keys=kv.keys, values=kv.values, **last)
    (codes, scales), (negative, same) = code_vectors(numbers), code_vectors(-numbers)
    assert_same_bits(tensors(kv), (codes, negative, scales, same))
