"""Recall of random (page, kv head) units from pinned memory, against the copy engine's peak in the same run."""

from __future__ import annotations

import sys

import torch

from benchmarks.report import Report, arguments, chosen, say, summary, table
from benchmarks.timing import Ceilings, synchronize, time_calls, time_graph
from sglang_freekv import kernels
from sglang_freekv.config import GIB
from sglang_freekv.kernels import Misses
from sglang_freekv.memory_pool import pinned
from sglang_freekv.memory_pool.copy_engine import CopyEngineRecall

HEADS, HEAD_DIM, DTYPE = 8, 128, torch.bfloat16
PROGRAMS = (4, 8, 16, 32)
TARGET, TARGET_PROGRAMS = 0.90, 16
CASES = {  # name -> tokens of a page, host layout
    "16KiB": (32, "hnd"),
    "8KiB": (16, "hnd"),
    "32KiB": (64, "hnd"),
    "16KiB-nhd": (32, "nhd"),
}
ORDERS = {"hnd": (0, 1, 2, 3, 4), "nhd": (0, 2, 3, 1, 4)}  # axes of [n_page, H, 2, S, D], outermost in memory first


class Pools:
    """A host pool and device slots over the same memory for every unit size, and lists of random misses.

    Args:
        host, device_memory: bfloat16 memory of the host pool, and of the keys and values together.
        num_units: entries of a list of misses.
    """

    def __init__(
        self, page_size: int, layout: str, host: torch.Tensor, device_memory: torch.Tensor, num_units: int, heads: int = HEADS
    ) -> None:
        order, device, unit = ORDERS[layout], device_memory.device, 2 * page_size * HEAD_DIM
        pages, slots = (memory.numel() // (unit * heads) for memory in (host, device_memory))
        shape = (pages, heads, 2, page_size, HEAD_DIM)
        memory = host[: pages * unit * heads].view([shape[axis] for axis in order])
        self.host = memory.permute([order.index(axis) for axis in range(5)])
        self.keys, self.values = device_memory[: slots * unit * heads].view(2, slots, page_size, heads, HEAD_DIM)
        self.unit_bytes = unit * DTYPE.itemsize
        generator = torch.Generator().manual_seed(0)
        places = torch.randperm(slots * heads, generator=generator)[:num_units]
        self.num_units = len(places)
        pages = torch.randint(pages, (self.num_units,), generator=generator)
        self.columns = [column.to(torch.int32).to(device) for column in (pages, places % heads, places // heads)]

    def misses(self, length: torch.Tensor) -> Misses:
        return Misses(length, *self.columns)

    def full(self, count: int) -> torch.Tensor:
        """``[count, 4]`` lengths of lists that hold all units."""
        return torch.tensor([[self.num_units, 0, 0, 0]] * count, dtype=torch.int32, device=self.keys.device)

    def check(self, recall) -> None:
        """Raise AssertionError unless every unit arrives, nothing else is written, and the list is empty."""
        for target in (self.keys, self.values):
            target.view(torch.int16).fill_(0x7FC1)  # a NaN that no random number is
        length = self.full(1)[0]
        recall(self.host, self.misses(length), self.keys, self.values)
        synchronize(self.keys.device.type)
        assert length.tolist()[:2] == [0, 0], f"the list holds {length.tolist()} after recall, expected nothing"
        pages, heads, slots = (column.long() for column in self.columns)
        units = self.host[pages.cpu(), heads.cpu()].to(self.keys.device).view(torch.int16)
        for index, target in enumerate((self.keys, self.values)):
            words = target.view(torch.int16)
            assert torch.equal(words[slots, :, heads], units[:, index]), "units differ from the host pool's"
            words[slots, :, heads] = 0x7FC1
            assert bool((words == 0x7FC1).all()), "something else was written"


def host_memory(num_bytes: int, kind: str | None) -> torch.Tensor:
    """Host memory in which no two units are alike: "registered" as the host pool's is, "cuda" allocated by CUDA, or not pinned."""
    if kind == "registered":
        memory = pinned.allocate(num_bytes, huge=True)
        pinned.pin(memory)
        host = torch.frombuffer(memory, dtype=DTYPE)
    else:
        host = torch.empty(num_bytes // DTYPE.itemsize, dtype=DTYPE, pin_memory=kind == "cuda")
    noise = torch.randint(2**30, (2**18,), dtype=torch.int32)
    for index, piece in enumerate(host.view(torch.int32).split(2**18)):
        torch.add(noise, index * 4099, out=piece)
    return host


def zero_copy(pools: Pools, programs: int, device: str, lists: int) -> dict:
    def recall(*args) -> None:
        kernels.recall_pages(*args, **({"programs": programs} if device == "cuda" else {}))

    pools.check(recall)
    lengths, full = pools.full(lists), pools.full(lists)
    launches = [lambda index=index: recall(pools.host, pools.misses(lengths[index]), pools.keys, pools.values) for index in range(lists)]
    return time_graph([lambda: lengths.copy_(full), *launches], device, least=lists + 1) | {"launches": lists, "counted": lists + 1}


def copy_engine(pools: Pools, device: str) -> dict:
    recall = CopyEngineRecall((2, pools.host.shape[3], HEAD_DIM), DTYPE, device)
    pools.check(recall)
    length, full = pools.full(1)[0], pools.full(1)[0]

    def refill_and_recall() -> None:
        length.copy_(full)
        recall(pools.host, pools.misses(length), pools.keys, pools.values)

    return summary(time_calls(refill_and_recall, device, 5))


def main() -> int:
    ways = (*(f"zero-copy-{count}" for count in PROGRAMS), "copy-engine")
    parser = arguments(__doc__, "bench_recall", [f"{name}/{way}" for name in CASES for way in ways])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--host-gib", type=float, default=4, help="host pool; beyond what a TLB covers")
    parser.add_argument("--memory", choices=("registered", "cuda"), default="registered", help="pinned as the pool's, or by CUDA")
    parser.add_argument("--units", type=int, default=8192, help="units of one recall, of 16 KiB; as many bytes in other sizes")
    options = parser.parse_args()
    device, wanted, report = options.device, chosen(options), Report("bench_recall", options.out)
    on_gpu = device == "cuda"

    with report.part("ceilings"):
        ceilings = Ceilings.measure(device, GIB if on_gpu else GIB // 64)
        report.add("ceilings", vars(ceilings))
        say(f"copy engine: {ceilings.to_device / 1e9:.1f} GB/s to the device, {ceilings.to_host / 1e9:.1f} GB/s to the host")
    host_bytes, moved = int(options.host_gib * GIB) // 2**20 * 2**20, options.units * 16384
    host = host_memory(host_bytes, options.memory if on_gpu else None)
    memory = torch.empty(moved, dtype=DTYPE, device=device)  # twice what is moved: slots that no unit goes to

    rows = []
    for name, (page_size, layout) in CASES.items():
        unit_bytes = 2 * page_size * HEAD_DIM * DTYPE.itemsize
        for key, time_it, units in [
            *((f"{name}/zero-copy-{n}", lambda p, n=n: zero_copy(p, n, device, 8 if on_gpu else 1), moved // unit_bytes) for n in PROGRAMS),
            (f"{name}/copy-engine", lambda p: copy_engine(p, device), moved // unit_bytes // (8 if layout == "hnd" else 64)),
        ]:
            if not wanted(key):
                continue
            with report.part(key, quiet=True):
                pools = Pools(page_size, layout, host, memory, units)
                seconds = time_it(pools)
                rate = _rate(pools, seconds)
                result = {"unit_bytes": unit_bytes, "layout": layout, "units": pools.num_units, "seconds": seconds}
                report.add(key, result | {"bytes_per_s": rate, "of_peak": rate / ceilings.to_device})
                rows.append((key, pools.num_units, rate / 1e9, rate / ceilings.to_device))
    good = [row for row in rows if row[0] in {f"16KiB/zero-copy-{n}" for n in PROGRAMS if n <= TARGET_PROGRAMS}]
    best = max(good, key=lambda row: row[3], default=None)
    verdict = f"16 KiB units, at most {TARGET_PROGRAMS} programs: best {best[3]:.3f} of the peak, target {TARGET}" if best else ""
    return report.finish(table(("recall", "units", "GB/s", "of peak"), rows), verdict)


def _rate(pools: Pools, seconds: dict) -> float:
    """Bytes per second of recall; in a graph the refill of the lists is one launch among the others, and is counted as recall."""
    per_recall = seconds["median"] * seconds.get("counted", 1) / seconds.get("launches", 1)
    return pools.num_units * pools.unit_bytes / per_recall


if __name__ == "__main__":
    sys.exit(main())
