"""One decode step without SGLang: a model's GEMMs and the retrieval engine in a CUDA graph; where its time goes, parts taken away."""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.paper.decoder import Decoder, Shape
from benchmarks.profiles import BY_PRESET, CORRECTED, LOADS, MISSED, Shares
from benchmarks.replay import Controls, drain, replayed, without_hysteresis
from benchmarks.replay_load import Load
from benchmarks.report import Report, arguments, chosen, say, summary, table
from sglang_freekv import kernels
from sglang_freekv.batch import DecodeBatch
from sglang_freekv.config import DIGESTS, KV_DTYPES, SELECTIONS, FreeKVConfig
from sglang_freekv.decode_step import CORRECTING_PROGRAMS
from sglang_freekv.digests import digests_of
from sglang_freekv.kernels import Candidates, Reads
from sglang_freekv.kernels.extend import ReferenceExtend
from sglang_freekv.layers import LayerTable
from sglang_freekv.memory_pool.canary import Canary
from sglang_freekv.memory_pool.kv_format import KVFormat
from sglang_freekv.memory_pool.sizing import KVShape
from sglang_freekv.memory_pool.store import Store
from sglang_freekv.memory_pool.transfer import CudaStream, Streams
from sglang_freekv.presets import PRESETS
from sglang_freekv.retrieval import Retrieval

SHAPE = Shape.of("llama-3.1-8b")
LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM = SHAPE.layers, SHAPE.query_heads, SHAPE.kv_heads, SHAPE.head_dim
HOST_TOKENS = 1 << 17
FRAMES = 2048  # for resident pages: 8 GiB with the usual page size, which no cache holds
GROWTH = 128  # tokens at most, by which a context grows while its steps are timed
DTYPE, DEVICE = torch.bfloat16, "cuda"
USUAL = "fast"  # the preset of the results that name none


class Step:
    """A captured decode step of ``batch`` requests of ``context`` tokens.

    Args:
        config: its page size and digest.
        longest: context that page tables have room for.
        host: pinned host pool of every layer, shared by all steps.
        variant: what to take away or to change; a value of ``VARIANTS``. ``staggered`` rows do not all begin a page in the same step.
    """

    def __init__(
        self, config: FreeKVConfig, model: Decoder, store: Store, controls: Controls, batch: int, context: int, longest: int, variant: dict
    ) -> None:
        pages, host_pages = longest // config.page_size + 1, len(store.host.layers[0])
        selection = CudaStream(DEVICE)
        appends, transfers = (selection if variant.get("one_stream") else CudaStream(DEVICE) for _ in range(2))
        recall = drain if variant.get("copies_off") else kernels.recall_pages
        if programs := variant.get("programs"):

            def recall(host, misses, keys, values, usual, *others, **scales) -> None:
                kernels.recall_pages(host, misses, keys, values, usual if usual == CORRECTING_PROGRAMS else programs, *others, **scales)

        config = replace(config, recall_timing=variant.get("recall_timing", 0))
        policy = replayed(config, controls)
        self.retrieval = Retrieval(config, policy, store, Streams(selection, appends, transfers), recall, ReferenceExtend())
        if every := variant.get("canary"):
            self.retrieval.canary = Canary(LAYERS, host_pages, KV_HEADS, config.page_size, every, DEVICE)
            for checksums in self.retrieval.canary.checksums:
                checksums.zero_()  # of zeros, which most of the host pool is
        rows = torch.arange(1, batch + 1, device=DEVICE)
        self.seq_lens = torch.full((batch,), context, device=DEVICE)
        if variant.get("staggered"):
            self.seq_lens += torch.arange(batch, device=DEVICE) % config.page_size
        table = torch.randint(1, host_pages, (batch, pages), dtype=torch.int32, device=DEVICE)
        frames = torch.full_like(table, -1)  # nothing is resident
        if variant.get("resident"):  # pages share the few frames that there are
            slots = store.cache.row_frames.numel()
            frames = slots + torch.randperm(table.numel(), device=DEVICE).view(table.shape).to(torch.int32) % FRAMES
        for cache in store.cache.layers:
            logits = torch.randn(batch, QUERY_HEADS, pages, device=DEVICE)
            candidates = Candidates(logits, rows, self.seq_lens, table, frames, config.pages, config.page_size)
            kernels.seed_slots(candidates, cache.tables)
        reads = [Reads.of(rows, cache.tables, frames) for cache in store.cache.layers]
        self.batch = DecodeBatch(rows, self.seq_lens, table, frames)
        self.hidden = torch.randn(batch, SHAPE.hidden, dtype=DTYPE, device=DEVICE)
        scale = HEAD_DIM**-0.5

        def attend(layer: int, q, k, v) -> torch.Tensor:
            cache = store.cache.layers[layer]
            if config.is_coded:
                q, _ = kernels.rotate(q, k)
            return kernels.attend_pages(q, cache.keys, cache.values, self.seq_lens, reads[layer], scale, scales=cache.kv.scales)

        def retrieve(layer: int, q, k, v) -> torch.Tensor:
            return self.retrieval.decode(layer, q, k, v, self.batch, scale)

        attention = attend if variant.get("attention_only") else retrieve

        def run() -> None:
            self.seq_lens += 1
            model.step(self.hidden, attention)
            self.retrieval.end_step(rows)

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            run()
            run()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            run()

    def time(self, repeats: int = 40) -> list[float]:
        """Seconds of single replays."""
        for _ in range(10):
            self.graph.replay()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        for event in events:
            event.record()
            self.graph.replay()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in zip(events, events[1:])]

    def profile(self, path: Path) -> None:
        """Kernels of one replay: name, stream, begin and length in microseconds, programs."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(3):
                self.graph.replay()
            torch.cuda.synchronize()
        trace = path.with_suffix(".trace.json")
        profiler.export_chrome_trace(str(trace))
        on_device = ("kernel", "gpu_memcpy", "gpu_memset")
        events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("cat") in on_device]
        trace.unlink()
        events.sort(key=lambda event: event["ts"])
        events = events[len(events) // 3 : 2 * len(events) // 3]
        start = events[0]["ts"]
        rows = [
            [e["name"][:60], e["args"].get("stream"), round(e["ts"] - start, 2), round(e["dur"], 2), math.prod(e["args"].get("grid", ()))]
            for e in events
        ]
        path.write_text(json.dumps({"columns": ["kernel", "stream", "begin_us", "length_us", "programs"], "kernels": rows}))


VARIANTS = {
    "attention-only": {"attention_only": True},
    "freekv": {},
    "one-stream": {"one_stream": True},
    "programs-4": {"programs": 4},
    "programs-8": {"programs": 8},
    "programs-16": {"programs": 16},
    "programs-32": {"programs": 32},
    "copies-off": {"copies_off": True},
    "uncorrected": {"corrected": 0.0},
    "resident": {"resident": True},
    "canary-sample": {"canary": 16},
    "canary-full": {"canary": 1},
    "recall-sampled": {"recall_timing": 100},
    "recall-timed": {"recall_timing": 1},
}
CASES = {
    "8k-b1": (8192, 1), "8k-b16": (8192, 16), "32k-b1": (32768, 1), "32k-b4": (32768, 4), "32k-b8": (32768, 8), "32k-b16": (32768, 16), "128k-b1": (131072, 1), "128k-b4": (131072, 4), "128k-b8": (131072, 8),
    "1m-b1": (1 << 20, 1),
}  # fmt: skip


def main() -> int:
    parser = arguments(__doc__, "bench_step", [f"{case}/{variant}" for case in CASES for variant in VARIANTS])
    parser.add_argument("--corrected", type=float, default=CORRECTED[0.8])
    parser.add_argument("--missed", type=float, default=MISSED)
    parser.add_argument("--load", choices=(LOADS | BY_PRESET), help="in the place of --corrected and --missed")
    parser.add_argument("--profile", nargs="*", default=[], metavar="PART", help="parts of which to keep the kernels of a step")
    parser.add_argument("--preset", choices=PRESETS, default=USUAL)
    parser.add_argument("--page-size", type=int, help="in the place of the preset's")
    parser.add_argument("--longest", type=int, default=140_000, help="tokens that page tables have room for; longer cases are left out")
    parser.add_argument("--host-tokens", type=int, default=HOST_TOKENS, help="of each layer's host pool, from which page tables draw")
    parser.add_argument("--digest", choices=DIGESTS, help="in the place of the preset's")
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default=FreeKVConfig().kv_dtype, help="how KV is stored")
    parser.add_argument("--selection", choices=SELECTIONS, default=FreeKVConfig().selection)
    parser.add_argument("--staggered", action="store_true", help="rows begin pages in different steps, as always with --selection on-turn")
    options = parser.parse_args()
    wanted, report = chosen(options), Report("bench_step", options.out)
    given = {name: value for name in ("page_size", "digest") if (value := getattr(options, name)) is not None}
    settings = PRESETS[options.preset].settings | given
    config = without_hysteresis(FreeKVConfig(**settings, selection=options.selection, kv_dtype=options.kv_dtype))
    model, staggered = Decoder(SHAPE, DTYPE, DEVICE), options.staggered or config.selects_on_turn
    suffix = "" if options.preset == USUAL else f"-{options.preset}"
    suffix += f"-page-{config.page_size}-{config.digest}" if given else ""
    suffix += f"-{config.selection}" if config.selects_on_turn else "-staggered" * staggered
    suffix += f"-{config.kv_dtype}" if config.is_coded else ""
    suffix += "" if options.host_tokens == HOST_TOKENS else f"-host-{options.host_tokens}"
    suffix += "" if options.load is None else f"-{options.load}"
    shares = Shares(options.corrected, options.missed) if options.load is None else (LOADS | BY_PRESET)[options.load].on(LAYERS)
    digest = digests_of(config).shape(HEAD_DIM, DTYPE.itemsize)
    shape = KVShape(LayerTable.uniform(LAYERS), KV_HEADS, QUERY_HEADS, HEAD_DIM, digest, KVFormat.of(config.kv_dtype, DTYPE))
    streams = CudaStream(DEVICE)
    sizes = options.host_tokens - config.page_size, 16, config.page_size
    store = Store.build(config, shape, *sizes, DEVICE, streams, num_frames=(sizes[1] + 1) * config.cache_pages + FRAMES)
    store.frames.lend_all()
    for digests in store.digests.layers:
        digests.normal_()
    say("pools are up")
    rows = []
    for case, (context, batch) in CASES.items():
        for name, variant in VARIANTS.items():
            if not wanted(f"{case}/{name}") or context + GROWTH > options.longest:
                continue
            key = f"{case}/{name}{suffix}"
            with report.part(key, quiet=True):
                controls = Controls(DEVICE)
                candidates = context // config.page_size - config.pages.sink - config.pages.window
                controls.set(Load(variant.get("corrected", shares.corrected), shares.missed, candidates, config.pages.selected))
                step = Step(config, model, store, controls, batch, context, options.longest, variant | {"staggered": staggered})
                seconds = summary(step.time())
                counts = step.retrieval.row_counts(step.batch.rows).sum(0).tolist()
                report.add(key, {"seconds": seconds, "hits_recalled_corrected": counts})
                rows.append((key, seconds["median"] * 1e3, *counts))
                if f"{case}/{name}" in options.profile:
                    step.profile(options.out / f"step-{key.replace('/', '-')}.json")
                    _tell(options.out / f"step-{key.replace('/', '-')}.json")
                say(f"{key}: {seconds['median'] * 1e3:.2f} ms")
    return report.finish(table(("step", "ms", "hits", "recalled", "corrected"), rows))


def _tell(path: Path) -> None:
    """Where the time of a profiled step went, kernel by kernel."""
    total, count, streams = defaultdict(float), defaultdict(int), defaultdict(set)
    for name, stream, _, length, _ in json.loads(path.read_text())["kernels"]:
        total[name] += length
        count[name] += 1
        streams[name].add(stream)
    order = sorted(total, key=total.get, reverse=True)[:24]
    rows = [(name, total[name], count[name], len(streams[name])) for name in order]
    print(table(("kernel", "us", "count", "streams"), rows), flush=True)


if __name__ == "__main__":
    sys.exit(main())
