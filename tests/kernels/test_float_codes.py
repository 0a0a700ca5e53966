"""KV in floats of 8 bits: how numbers are rounded, and the kernels that write, decode, digest and move them against their references."""

from __future__ import annotations

import pytest
import torch

from appended import some_step
from covering import covering
from sglang_freekv.kernels import KV, reference
from sglang_freekv.kernels.append import append_tokens
from sglang_freekv.kernels.checksum import checksum_pages
from sglang_freekv.kernels.decode import decode_tokens
from sglang_freekv.kernels.digest import digest_pages
from sglang_freekv.kernels.fill import fill_frames
from sglang_freekv.kernels.kv import FLOAT_CODES
from sglang_freekv.kernels.misses import Misses
from sglang_freekv.kernels.offload import offload_pages
from sglang_freekv.kernels.recall import recall_pages
from sglang_freekv.kernels.reference_codes import code_floats
from sglang_freekv.kernels.stage import stage_layers, stage_pages
from sglang_freekv.kernels.staged_layers import StagedLayers
from sglang_freekv.kernels.two_bit_digest import digest_two_bit
from sglang_freekv.kernels.write import write_tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOATS = {str(dtype).removeprefix("torch.float8_"): dtype for dtype in FLOAT_CODES}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
ROUNDED = {
    name: dtype for name, dtype in DTYPES.items() if DEVICE == "cuda" or name != "bfloat16"
}  # Triton's interpreter cuts bfloat16 off
NOTHING = 0x55  # a byte that no test writes by chance everywhere


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def every(dtype: torch.dtype) -> torch.Tensor:
    """Every number of 16 bits, infinities and NaN of every kind included. Of float32 those around each place where rounding changes."""
    if dtype != torch.float32:
        return torch.arange(1 << 16, dtype=torch.int32, device=DEVICE).to(torch.int16).view(dtype)
    upper = torch.arange(0, 1 << 16, 4, dtype=torch.int32, device=DEVICE) << 16  # floats of 8 bits, their middles, and more between
    return (upper[:, None] + torch.tensor([0, 1, -1, 0x7FFF], device=DEVICE)).to(torch.int32).flatten().view(torch.float32)


def nearest(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """By a search among all finite floats of 8 bits, in float64: the nearest, of two equally near the one with an even code."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    finite = codes[codes.view(dtype).float().isfinite() & (codes < 128)]
    order = finite.view(dtype).double()
    wanted = numbers.cpu().double().abs().nan_to_num(0).clamp(max=float(order[-1]))
    above = torch.searchsorted(order, wanted).clamp(max=len(order) - 1)
    below = (above - 1).clamp(min=0)
    up, down = (order[above] - wanted).abs(), (wanted - order[below]).abs()
    chosen = torch.where((up < down) | ((up == down) & (finite[above] % 2 == 0)), above, below)
    code = finite[chosen].int() | (numbers.cpu().signbit().int() << 7)
    return code.where(~numbers.cpu().isnan(), 0x7F).to(torch.uint8)


def room(*shape: int, dtype: torch.dtype) -> KV:
    """Keys and values of which nothing was written."""
    return KV(*(torch.full(shape, NOTHING, dtype=torch.uint8, device=DEVICE).view(dtype) for _ in range(2)))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Codes. A NaN has no sign here: a GPU drops that of a 16-bit number when it makes 32 bits of it."""
    tensor = tensor.cpu().contiguous()
    codes = tensor.view(torch.uint8)
    return codes.where(~tensor.float().isnan(), 0x7F)


def without_strangers(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``codes`` as floats. Triton's interpreter, unlike a device, reads NaN and infinities as numbers, so on a CPU there are none."""
    floats = codes.view(dtype)
    return floats if DEVICE == "cuda" else codes.where(floats.float().isfinite(), 0x80).view(dtype)


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
@pytest.mark.parametrize("of", DTYPES.values(), ids=DTYPES)
def test_numbers_become_the_nearest_float_and_at_most_the_largest(dtype, of):
    assert torch.equal(bits(code_floats(every(of), dtype)), nearest(every(of), dtype))


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
def test_what_is_beyond_saturates_and_what_is_no_number_stays_so(dtype):
    largest = torch.finfo(dtype).max
    beyond = torch.tensor([largest * 1.01, -largest * 9, 3e38, torch.inf, -torch.inf, torch.nan])
    found = code_floats(beyond, dtype).float()
    assert found[:5].tolist() == [largest, -largest, largest, largest, -largest] and found[5].isnan()


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
@pytest.mark.parametrize("of", DTYPES.values(), ids=DTYPES)
def test_extends_write_every_number_as_the_reference(dtype, of):
    """All 65,536 numbers of 16 bits."""
    keys = every(of).view(-1, 1, 128)
    values, tokens = keys.flip(0), len(keys)
    places, none = torch.randperm(tokens + 3, device=DEVICE)[:tokens], torch.zeros(1, dtype=torch.int64, device=DEVICE)
    written = []
    for kernel in (write_tokens, reference.write_tokens):
        kv = room(tokens + 3, 1, 128, dtype=dtype)
        kernel(keys, values, keys, places, none, none, keys=kv.keys, values=kv.values, previous_queries=keys[:1].clone())
        written.append(kv)
    found, expected = written
    assert torch.equal(bits(found.keys), bits(expected.keys)) and torch.equal(bits(found.values), bits(expected.values))
    assert torch.equal(bits(found.keys[places]).flatten(), nearest(keys.flatten(), dtype))
    untouched = torch.ones(tokens + 3, dtype=torch.bool).index_fill(0, places.cpu(), False)
    assert (bits(found.values)[untouched] == NOTHING).all()


@pytest.mark.parametrize("D, H, C, of, dtype", covering(
    {str(dim): dim for dim in (8, 80, 128)}, {"1 head": 1, "3 heads": 3}, {"6 slots": 6, "8 slots": 8}, DTYPES, FLOATS,
))  # fmt: skip
def test_decode_steps_append_floats(D, H, C, of, dtype):
    B, R, S, P = 12, 13, 4, 5
    numbers = every(of)
    keys, values = numbers[torch.randint(len(numbers), (2, B, H, D), device=DEVICE)]
    step = some_step(B, H, C, S, P, DEVICE)
    written = []
    for kernel in (append_tokens, reference.append_tokens):
        kv = room(R * C + 1, S, H, D, dtype=dtype)
        starts, filled = kernel(keys, values, *step, keys=kv.keys, values=kv.values)
        written.append([bits(kv.keys), bits(kv.values), starts.cpu().int(), filled.cpu().int()])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*written, strict=True))
    token = (written[0][2].long() // S)[1:], ((step.seq_lens.cpu() - 1) % S)[1:, None], torch.arange(H)
    assert torch.equal(written[0][1].view(R * C + 1, S, H, D)[token], nearest(values[1:], dtype).view(B - 1, H, D))
    untouched = torch.ones(R * C + 1, S, H, dtype=torch.bool)
    untouched[token] = False
    assert (written[0][0].view(R * C + 1, S, H, D)[untouched] == NOTHING).all()


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
@pytest.mark.parametrize("into", DTYPES.values(), ids=DTYPES)
def test_every_float_is_decoded_as_it_is(dtype, into):
    codes = without_strangers(torch.arange(256, dtype=torch.int32, device=DEVICE).to(torch.uint8), dtype).view(8, 2, 16)
    kv, rows = KV(codes, codes.flip(0)), torch.tensor([7, 0, 3, 3, 5, 1, 2, 6, 4], device=DEVICE)
    found, expected = (KV(*(torch.full((11, 2, 16), -7.0, dtype=into, device=DEVICE) for _ in range(2))) for _ in range(2))
    decode_tokens(kv, rows, found)
    reference.decode_tokens(kv, rows, expected)
    for ours, theirs, numbers in zip(found[:2], expected[:2], kv[:2]):
        assert torch.equal(theirs[:9].double().nan_to_num(77), numbers[rows].double().nan_to_num(77))  # a float of 8 bits is exact in all
        assert torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(ours.nan_to_num(77), theirs.nan_to_num(77))


@pytest.mark.parametrize("S, D, box, dtype, into", covering(
    {"8": 8, "16": 16}, {"16": 16, "80": 80}, {"min-max": "min-max", "cuboid-mean": "cuboid-mean", "two-bit": "two-bit"}, FLOATS, ROUNDED,
))  # fmt: skip
def test_digests_are_those_of_the_numbers_that_floats_are(S, D, box, dtype, into):
    """Read where they lie, from a page of each kv head."""
    H, N = 3, 5
    keys = without_strangers(torch.randint(256, (20 * S, H, D), dtype=torch.uint8, device=DEVICE), dtype)
    starts = torch.randint(19 * S, (N, H), device=DEVICE).int()
    host_pages = torch.tensor([3, 1, -1, 6, 2], device=DEVICE).int()
    width = (2 * D + D * S // 4 // into.itemsize,) if box == "two-bit" else (2, D)
    made = []
    for source, kernels in ((keys, (digest_pages, digest_two_bit)), (keys, (reference.digest_pages, reference.digest_two_bit)),
                            (keys.float(), (reference.digest_pages, reference.digest_two_bit))):  # fmt: skip
        digests = torch.full((8, H, *width), -7.0, dtype=into, device=DEVICE)
        if box == "two-bit":
            kernels[1](source, starts, host_pages, digests, S)
        else:
            kernels[0](source, starts, host_pages, digests, S, box)
        made.append(digests)
    integers = {2: torch.int16, 4: torch.int32}[into.itemsize]
    for digests in made[:2]:
        both_nan = digests.isnan() & made[2].isnan()
        assert ((digests.view(integers) == made[2].view(integers)) | both_nan).all()
    assert (made[0][[0, 4, 5, 7]] == -7).all() and (made[0][6] != -7).any()


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (0, 2, 3, 1, 4)], ids=["hnd", "nhd"])
@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
def test_floats_arrive_as_they_left_by_each_way(dtype, order):
    """NaN and infinities too, without scales, and under the checksums of their bytes."""
    N, S, H, D = 5, 4, 2, 16
    source = torch.randint(256, (2, N * S, H, D), dtype=torch.uint8, device=DEVICE).view(dtype)
    host = torch.zeros([(7, H, 2, S, D)[axis] for axis in order], dtype=torch.uint8).view(dtype)
    host = (host.pin_memory() if DEVICE == "cuda" else host).permute([order.index(axis) for axis in range(5)])
    host_pages, starts = torch.tensor([3, 6, 1, 2, 5], device=DEVICE).int(), torch.arange(N, device=DEVICE).int() * S
    each_head = starts[:, None].expand(-1, H)
    offload_pages(*source, each_head, host_pages, host)
    sums, expected_sums = torch.zeros(2, 7, H, dtype=torch.int32, device=DEVICE)
    checksum_pages(*source, each_head, host_pages, sums, S)
    reference.checksum_pages(*source, each_head, host_pages, expected_sums, S)
    assert torch.equal(sums, expected_sums) and sums[3].all()
    staged, layered, filled, recalled = (room(N * S, H, D, dtype=dtype) for _ in range(4))
    frames = [KV(*(kind.view(N, S, H, D) for kind in kv[:2])) for kv in (filled, recalled)]
    stage_pages(host, host_pages, starts, *staged[:2])
    stage_layers(StagedLayers.of([host], [layered.keys], [layered.values]), host_pages, starts, first=0, last=1)
    fill_frames(*source, starts[:1], torch.arange(N, device=DEVICE).int()[None], keys=frames[0].keys, values=frames[0].values)
    misses = Misses.allocate(N * H, DEVICE)
    misses.extend(
        host_pages.repeat(H), torch.arange(H, device=DEVICE).int().repeat_interleave(N), torch.arange(N, device=DEVICE).int().repeat(H)
    )
    recall_pages(host, misses, *frames[1][:2])
    for kv in (staged, layered, filled, recalled):
        assert all(torch.equal(bits(found), bits(kind)) for found, kind in zip(kv[:2], source))
