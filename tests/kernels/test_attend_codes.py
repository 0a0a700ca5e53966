"""Attention to KV that is stored as codes: the reference's results, nothing seen of other requests, and conversions that are exact."""

from __future__ import annotations

import re

import pytest
import torch
import triton
import triton.language as tl

from attention_cases import DEVICE, INTERPRETED_BFLOAT16, SPLITS, attention_case, poison, softmax_with_sinks, wide  # noqa: F401, a fixture
from covering import covering
from interpreted import interpreted
from sglang_freekv.kernels import attend, attended_codes, reference
from sglang_freekv.kernels.kv import FLOAT_CODES, LARGEST_CODE, Scales
from sglang_freekv.kernels.reads import Reads

SHAPES = [
    (2, 1, 24),
    (1, 2, 64),
    (2, 3, 80),
    (1, 4, 128),
    (1, 5, 96),
    (1, 6, 256),
    (2, 7, 128),
    (1, 8, 64),
    (2, 8, 80),
    (2, 4, 96),
    (1, 1, 256),
]
SHAPES = {"{}x{}x{}".format(*shape): shape for shape in SHAPES}
SIZES = {"2": 2, "8": 8, "32": 32}
PROGRAMS = {"one split": 1, "some splits": 9, "most splits": 464}
TYPES = {"float32": torch.float32, "float16": torch.float16} | ({"bfloat16": torch.bfloat16} if DEVICE == "cuda" else {})


def coded(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales. Where numbers are none, codes are somebody's, and their scale is NaN or largest."""
    scales = (numbers.abs().amax(-1) / LARGEST_CODE).clamp(max=65504).half()
    codes = (numbers / scales[..., None].float().clamp(min=1e-7)).nan_to_num(0).round().clamp(-LARGEST_CODE, LARGEST_CODE).to(torch.int8)
    nobodys = numbers.isnan().any(-1)
    codes[nobodys] = torch.randint_like(codes[nobodys], -LARGEST_CODE, LARGEST_CODE + 1)
    scales[nobodys] = torch.where(torch.rand(int(nobodys.sum()), device=numbers.device) < 0.5, torch.nan, 65504).half()
    return codes, scales


def coded_case(H, G, D, S, dtype=torch.float32, size=1.0, **more):
    """As ``attention_case``, with scales behind the arguments, and rows. Some scales are 0, and some are large."""
    (queries, keys, values, lens, reads, scale), rows = attention_case(H, G, D, S, **more)
    spread = torch.rand(2, *keys.shape[:3], 1, device=DEVICE) * 2
    spread[torch.rand(spread.shape, device=DEVICE) < 0.1] = 0
    (keys, key_scales), (values, value_scales) = (coded(x * factor) for x, factor in zip((keys, values * size), spread))
    assert key_scales.isnan().any()
    return (queries.to(dtype), keys, values, lens, reads, scale), Scales(key_scales, value_scales), rows


def as_numbers(case, scales: Scales):
    """The case with its KV decoded, in float32."""
    queries, keys, values, *others = case
    keys, values = (codes.float() * each[..., None].float() for codes, each in zip((keys, values), scales))
    return queries.float(), keys, values, *others


def assert_close(output: torch.Tensor, case, scales: Scales) -> None:
    """Of what is computed with codes: weights of a type of 16 bits and the output are rounded once, and nothing else is."""
    queries, keys, values, *others = as_numbers(case, scales)
    exact, size = (reference.attend_pages(queries, keys, v, *others) for v in (values, values.abs()))
    eps = torch.finfo(case[0].dtype).eps if case[0].dtype != torch.float32 else 0
    bound = eps / 2 * (size + exact.abs()) + 1e-5 * size.clamp(min=1e-3)
    assert exact.isfinite().all() and output.dtype == case[0].dtype
    assert ((output.float() - exact).abs() <= bound).all(), ((output.float() - exact).abs() / bound).max()


@pytest.mark.parametrize("shape, S, programs, dtype", covering(SHAPES, SIZES, PROGRAMS, TYPES))
def test_attention_to_codes_is_attention_to_what_they_stand_for(shape, S, programs, dtype, monkeypatch):
    monkeypatch.setattr(attend, "PROGRAMS", programs)
    seq_lens, width = (1, S, 9 * S + 1, 12 * S, 3 * S - 1), 9
    case, scales, rows = coded_case(*shape, S, dtype, seq_lens=seq_lens, width=width, capacity=11, budget=6)
    for module in (attend, reference):
        output = module.attend_pages(wide(case[0]), *case[1:], scales=scales)
        assert not output[rows == 0].any() and (output[rows > 0] != 0).any()
        assert_close(output, case, scales)


@pytest.mark.parametrize("rest", [1, 30])
@SPLITS
def test_codes_that_are_there_and_then_the_rest_are_all(programs, rest, monkeypatch):
    monkeypatch.setattr(attend, "PROGRAMS", programs)
    monkeypatch.setattr(attend, "PROGRAMS_OF_THE_REST", rest)
    (queries, keys, values, lens, reads, scale), scales, rows = coded_case(3, 2, 32, S=4, budget=20)
    width, listed = reads.frames.shape[2], (reads.frames >= 0).sum(-1)
    whole = reference.attend_pages(queries, keys, values, lens, reads, scale, scales=scales)
    share = torch.tensor([0.0, 0.5, 1.0], device=DEVICE)[torch.randint(3, listed.shape, device=DEVICE)]
    present = torch.where(torch.rand(listed.shape, device=DEVICE) < 0.3, width, (share * listed).int()).int()
    waits = (present < listed) & (rows > 0)[:, None]
    coming = torch.zeros(len(keys), 3, dtype=torch.bool, device=DEVICE)
    for b, h in waits.nonzero().tolist():
        coming[reads.frames[b, h, present[b, h] : listed[b, h]].long(), h] = True
    assert waits.any() and not waits[rows > 0].all()
    not_yet = Scales(*(each.masked_fill(coming[:, None], torch.nan) for each in scales))
    reads = reads._replace(present=present)

    def in_parts(module, then: Scales) -> torch.Tensor:
        shares = module.allocate_shares(queries, keys, reads)
        for tensor in shares:
            tensor.fill_(torch.nan)
        module.attend_rest(queries, keys, values, lens, reads, scale, shares, scales=then)
        module.attend_present(queries, keys, values, lens, reads, scale, shares, scales=not_yet)
        return module.merge_shares(*shares, queries.dtype)

    for module in (attend, reference):
        torch.testing.assert_close(in_parts(module, scales), whole, rtol=1e-5, atol=1e-5)
        lost = in_parts(module, not_yet).unflatten(1, (3, -1)).isnan().any(-1).any(-1)
        assert lost.any() and not (lost & ~waits).any(), "what never came is not hidden, nor anybody else's"


@pytest.mark.parametrize("whose", ["keys", "values"])
@SPLITS
def test_a_scale_that_is_no_number_shows_in_those_who_see_it(whose, programs, monkeypatch):
    monkeypatch.setattr(attend, "PROGRAMS", programs)
    case, scales, rows = coded_case(2, 3, 32, S=8)
    b, frames = int((rows > 0).nonzero()[0]), case[4].frames
    getattr(scales, whose)[frames[b, 1, 0].long(), 0, 1] = torch.nan
    for module in (attend, reference):
        output = module.attend_pages(*case, scales=scales)
        assert output[b, 3:].isnan().all()
        output[b, 3:] = 0
        assert output.isfinite().all()


def test_attention_to_codes_of_one_request_and_one_slot():
    case, scales, _ = coded_case(1, 2, 16, 4, seq_lens=(3,), width=1, capacity=2)
    output = attend.attend_pages(*case, scales=scales)
    torch.testing.assert_close(output, reference.attend_pages(*case, scales=scales), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [1e-3, 5e3])
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=INTERPRETED_BFLOAT16)])
def test_values_of_any_size_keep_their_digits(size, dtype):
    """Weights are multiplied by scales before they are rounded, and float16 has few small numbers."""
    case, scales, _ = coded_case(2, 4, 32, 8, dtype, size)
    output = attend.attend_pages(*case, scales=scales)
    queries, keys, values, *others = as_numbers(case, scales)
    exact, most = (reference.attend_pages(queries, keys, v, *others) for v in (values, values.abs()))
    assert ((output.float() - exact).abs() <= torch.finfo(dtype).eps * (most + exact.abs())).all()


@SPLITS
def test_learned_sinks_join_shares_of_codes(programs, monkeypatch):
    monkeypatch.setattr(attend, "PROGRAMS", programs)
    (queries, keys, values, lens, reads, scale), scales, rows = coded_case(2, 3, 24, S=5)
    present = torch.randint(0, reads.frames.shape[2] + 1, (len(rows), 2), dtype=torch.int32, device=DEVICE)
    reads, sinks = reads._replace(present=present), torch.randn(6, device=DEVICE)
    _, key_numbers, value_numbers, *_ = as_numbers((queries, keys, values), scales)
    for module in (attend, reference):
        shares = module.allocate_shares(queries, keys, reads)
        module.attend_rest(queries, keys, values, lens, reads, scale, shares, scales=scales)
        module.attend_present(queries, keys, values, lens, reads, scale, shares, scales=scales)
        output = module.merge_shares(*shares, queries.dtype, sinks)
        for b in (rows > 0).nonzero().flatten().tolist():
            for h in range(2):
                listed, own = reads.frames[b, h] >= 0, slice(h * 3, h * 3 + 3)
                place = reads.pages[b, h, listed][:, None] * 5 + torch.arange(5, device=DEVICE)
                frames, visible = reads.frames[b, h, listed].long(), place < lens[b]
                k, v = (numbers[frames, :, h][visible].double() for numbers in (key_numbers, value_numbers))
                logits = queries[b, own].double() @ k.T * scale
                expected = softmax_with_sinks(logits, v.expand(3, -1, -1), sinks[own].double()).float()
                torch.testing.assert_close(output[b, own], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("D", [16, 80])
@pytest.mark.parametrize("dtype", FLOAT_CODES, ids=str)
def test_attention_to_floats_of_eight_bits_has_no_scales(D, dtype):
    (queries, keys, values, lens, reads, scale), rows = attention_case(2, 3, D, 4)
    numbers = [x.nan_to_num(448).to(dtype) for x in (keys, values)]
    expected = reference.attend_pages(queries, *(x.float() for x in numbers), lens, reads, scale)
    for module in (attend, reference):
        torch.testing.assert_close(module.attend_pages(queries, *numbers, lens, reads, scale), expected, rtol=1e-5, atol=1e-5)


def test_codes_that_attention_reads_are_not_written():
    (queries, keys, values, lens, reads, scale), scales, _ = coded_case(2, 3, 16, 4)
    tensors = queries, keys, values, lens, *reads[:2], *scales
    before = [tensor.clone() for tensor in tensors]
    attend.attend_pages(queries, keys, values, lens, reads, scale, scales=scales)
    assert all(torch.equal(old.nan_to_num(7), new.nan_to_num(7)) for old, new in zip(before, tensors))


def test_scales_that_do_not_fit_and_words_that_are_none_are_refused():
    reads = Reads.allocate(1, 2, 3, DEVICE)
    arguments = torch.ones(1, dtype=torch.int64, device=DEVICE), reads, 1.0
    for D, shape in ((16, (4, 3, 2)), (18, (4, 8, 2))):
        codes = torch.zeros(4, 8, 2, D, dtype=torch.int8, device=DEVICE)
        each = torch.zeros(shape, dtype=torch.float16, device=DEVICE)
        with pytest.raises(AssertionError):
            attend.attend_pages(torch.zeros(1, 4, D, device=DEVICE), codes, codes, *arguments, scales=Scales(each, each))


with interpreted():

    @triton.jit
    def _numbers(p_words, p_numbers, BYTE: tl.constexpr, N: tl.constexpr):
        b_number = attended_codes.numbers_of(tl.load(p_words + tl.arange(0, N)), BYTE, tl.int8, p_numbers.dtype.element_ty)
        tl.store(p_numbers + tl.arange(0, N), b_number)


ALL_CODES = torch.randperm(1024, generator=torch.Generator().manual_seed(0)) % 255 - LARGEST_CODE


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("byte", range(4))
def test_a_code_is_the_same_number(byte, dtype):
    words = ALL_CODES.to(DEVICE, torch.int8).view(torch.int32)
    found = torch.empty(256, dtype=dtype, device=DEVICE)
    _numbers[(1,)](words, found, BYTE=byte, N=256)
    assert torch.equal(found.cpu().long(), ALL_CODES.view(-1, 4)[:, byte])


def executed(ptx: str, first: int, second: int, dtype: torch.dtype) -> list[float]:
    """What the instructions of ``numbers_of`` make of two words: their meaning by NVIDIA's manual of PTX, spelled out."""
    registers = {"$1": first, "$2": second}

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 16)

    def halves(word: int) -> torch.Tensor:
        return torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.int32).to(torch.int16).view(dtype)

    for line in re.findall(r"^\s*((?:mov|prmt|lop3|fma|sub).*);", ptx, re.M):
        name, target, *sources = re.split(r",?\s+", line)
        values = [value(source) for source in sources]
        if name == "prmt.b32":
            both = values[0] | values[1] << 32
            made = sum((both >> 8 * (values[2] >> 4 * i & 7) & 0xFF) << 8 * i for i in range(4))
        elif name == "lop3.b32":
            a, b, c, table = values
            made = sum((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1) << i for i in range(32))
        elif name == "mov.b32":
            made = values[0]
        else:
            assert name in ("fma.rn.bf16x2", "sub.rn.f16x2")
            x, y, *z = (halves(each).double() for each in values)
            low, high = (x * y + z[0] if z else x - y).to(dtype).view(torch.int16).tolist()
            made = (low & 0xFFFF) | (high & 0xFFFF) << 16
        registers[target] = made
    return halves(registers["$0"]).tolist()


@pytest.mark.parametrize("dtype, ptx", [(torch.bfloat16, attended_codes.bfloat16_ptx), (torch.float16, attended_codes.float16_ptx)])
@pytest.mark.parametrize("byte", range(4))
def test_the_instructions_of_a_gpu_make_the_same_number(byte, dtype, ptx):
    words = [word & 0xFFFFFFFF for word in ALL_CODES.to(torch.int8).view(torch.int32).tolist()]
    found = [number for pair in zip(words[::2], words[1::2]) for number in executed(ptx(byte), *pair, dtype)]
    assert found == ALL_CODES.view(-1, 4)[:, byte].tolist()
