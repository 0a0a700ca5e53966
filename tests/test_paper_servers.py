"""The drivers that measure whole servers: what they make of times, sizes and bytes, and what they leave alone; no server is started."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest

from benchmarks.clock import LONGEST_START_S, Clock, OutOfTime
from benchmarks.paper import capacity, cells, comparison, crossover, goodput, passes
from benchmarks.paper.cells import Asked, Cell
from benchmarks.paper.goodput import Questions
from benchmarks.paper.ladder import Ladder, Limits, Point, offered_of, point_of, saturated
from benchmarks.profiles import LOADS, USUAL
from benchmarks.report import Report
from benchmarks.servers import BenchServer, Stream
from benchmarks.setups import Setup, hicache_flags
from benchmarks.timing import Ceilings
from sglang_freekv.config import FreeKVConfig, typed
from sglang_freekv.kernels.frame_tables import FrameTables
from sglang_freekv.memory_pool.device_cache import DeviceCache, Slots
from sglang_freekv.memory_pool.sizing import Sizing
from sglang_freekv.options import NAMES, Options, config_from
from sglang_freekv.presets import DEFAULT_PRESET, PRESETS

LLAMA = Setup("llama-3.1-8b", max_running=64)
USERS = replace(LLAMA, preset=DEFAULT_PRESET, resident=True)
LIMIT = 16 << 30
LAYER_TOKEN = 2 * 8 * 128 * 2  # bytes of a token's keys and values in one of its layers
QUESTIONS = Questions(groups=4, document=32768, question=512, answer=256, seconds=24, most=96)


def stream(first: float, gap: float, tokens: int = 100, cached: int = 0, sent: float = 0.0) -> Stream:
    """The first token at ``first``, then one each ``gap`` seconds."""
    arrivals = [(first + index * gap, index + 1) for index in range(tokens)]
    return Stream(sent, arrivals, {"cached_tokens": cached, "prompt_tokens": 512})


def test_max_running_is_of_servers_and_graphs(tmp_path):
    for system in ("stock", "freekv"):
        flags = replace(LLAMA, max_running=40).flags(system, tmp_path)
        assert flags["--max-running-requests"] == flags["--cuda-graph-max-bs-decode"] == 40
    assert Setup().flags("stock", tmp_path)["--max-running-requests"] == 16


def served_config(flags: dict) -> FreeKVConfig:
    """What a server makes of its command line."""
    names = {typed(name): name for name in NAMES}
    return config_from(Options(**{names[flag]: value for flag, value in flags.items() if flag in names}), flags.get("--page-size"))


def test_freekv_has_the_settings_that_committed_results_have(tmp_path):
    """Whatever the server's default preset is."""
    config, names = served_config(LLAMA.flags("freekv", tmp_path)), {typed(name) for name in NAMES}
    assert config == replace(FreeKVConfig(), resident_memory_gib=0, host_memory_gib=75) and config.page_size == 32
    assert not any(flag in names for flag in LLAMA.flags("stock", tmp_path))


def test_the_default_preset_is_had_by_who_types_none_of_its_flags(tmp_path):
    flags = USERS.flags("freekv", tmp_path)
    assert not {"--freekv-preset", "--freekv-budget", "--page-size"} & flags.keys()
    assert served_config(flags) == replace(USERS.freekv_config, host_memory_gib=75) and USERS.page_size == 8
    assert served_config(flags).preset == DEFAULT_PRESET
    assert USERS.flags("stock", tmp_path) == replace(LLAMA, resident=True).flags("stock", tmp_path)
    assert (USERS.page_of("stock"), LLAMA.page_of("stock"), USERS.page_of("freekv")) == (32, 32, 8)
    small = replace(crossover.DRY_RUN, preset=DEFAULT_PRESET)  # another budget is typed
    assert served_config(small.flags("freekv", tmp_path)).budget_tokens == small.freekv_config.budget_tokens == 512
    for preset in PRESETS:
        setup = replace(LLAMA, preset=preset)
        assert served_config(setup.flags("freekv", tmp_path)) == replace(setup.freekv_config, host_memory_gib=75)


def test_a_load_selects_among_the_pages_of_its_preset():
    ours, fast = USERS.named_load("accurate-by-layer", 8192), LLAMA.named_load("tau-0.9-by-layer", 8192)
    assert ours[1:] == (0.098, 8192 // 8 - 6, 2048 // 8 - 6) and len(ours.corrected) == 31  # sink 16 and window 32
    assert fast[1:] == (0.175, 8192 // 32 - 32, 64 - 32)
    assert ours.corrected[0] == 0.666 and ours.corrected[-1] == 0.156  # of the profile's first and last layer


def test_a_context_beyond_the_shape_is_made_room_for(tmp_path):
    long = replace(USERS, context_length=1 << 20)
    for system in ("stock", "freekv"):
        flags = long.flags(system, tmp_path)
        assert json.loads(flags["--json-model-override-args"]) == {"max_position_embeddings": flags["--context-length"]}
        assert "--json-model-override-args" not in USERS.flags(system, tmp_path)
    assert "--json-model-override-args" not in replace(USERS, context_length=163840).flags("stock", tmp_path)  # as the shape has

    def length(*contexts, given=None):
        return crossover.context_length_of(SimpleNamespace(contexts=contexts, tokens=256, context_length=given))

    assert length(131072, 8192) == 140_000 and length(8192, given=40_000) == 40_000
    assert length(8192, 1 << 20) - (1 << 20) in range(256 + 32, 8192)


def test_default_cells():
    cells = crossover.cells_of(crossover.FULL["contexts"], crossover.FULL["batches"], 1 << 19)
    found = {k: [(cell.name, cell.prefix) for cell in cells if cell.context == k << 10] for k in (8, 32, 128)}
    assert found[8] == [("8k/b64", "cold"), ("8k/b16", "hit"), ("8k/b4", "hit"), ("8k/b1", "hit"), ("8k/b1-cold", "cold")]
    assert [name for name, _ in found[32]] == ["32k/b16", "32k/b4", "32k/b1", "32k/b1-cold"]
    assert found[128] == [("128k/b4", "cold"), ("128k/b1", "hit"), ("128k/b1-cold", "cold")]
    alone = crossover.cells_of([8192], [1, 1], 1 << 19)
    assert [cell.name for cell in alone] == ["8k/b1-cold", "8k/b1"] and not crossover.cells_of([8192], [2], 8192)
    longest = crossover.cells_of([1 << 19, 1 << 20], [64, 1], 1 << 19)
    assert [cell.name for cell in longest] == ["512k/b1-cold", "512k/b1", "1024k/b1-cold", "1024k/b1"]


def test_figures_are_of_those_who_decode_together():
    early = [stream(1.0, 0.01), stream(1.5, 0.02)]  # until 1.99 and 3.48
    queued = stream(5.0, 0.03)
    found = passes.figures_of([*early, queued])
    assert (found["at_once"], found["window_requests"]) == (2, 2)
    assert found["tpot_s"] == pytest.approx(0.015) and found["decoding_tokens_per_s"] == pytest.approx(2 / 0.015)
    assert found["ttft_s"]["median"] == 1.5 and found["ttft_s"]["max"] == 5.0
    assert found["seconds"] == pytest.approx(7.97) and found["tokens_per_s"] == pytest.approx(300 / 7.97)


def test_of_as_many_at_once_those_count_who_were_for_longest():
    short, long = [stream(0.0, 0.01), stream(0.0, 0.01)], [stream(10.0, 0.02), stream(10.0, 0.02)]
    assert passes.figures_of([*short, *long])["tpot_s"] == pytest.approx(0.02)
    assert passes.figures_of([*long, *short])["tpot_s"] == pytest.approx(0.02)


def test_a_window_too_short_to_tell_is_passed_over():
    first, second = stream(0.0, 0.01), stream(0.895, 0.01)  # decode together for 5 ms
    second.arrivals = [(time, count) for time, count in second.arrivals if count == 1 or count > 8]
    first.arrivals.append((second.arrivals[1][0] + 0.001, 101))
    found = passes.figures_of([first, second])
    assert (found["at_once"], found["window_requests"]) == (2, 1)
    with pytest.raises(ValueError, match="more tokens"):
        passes.figures_of([stream(0.0, 0.01, tokens=9)])


def test_figures_of_several_passes_are_their_medians():
    gaps = (0.03, 0.01, 0.02)
    found = passes.medians_of([[stream(first, gap), stream(first, gap)] for first, gap in zip((3.0, 1.0, 8.0), gaps)])
    assert found["tpot_s"] == pytest.approx(0.02) and found["spread"]["tpot_s"] == pytest.approx([0.01, 0.03])
    assert [each["tpot_s"] for each in found["passes"]] == pytest.approx(gaps)
    assert found["decoding_tokens_per_s"] == pytest.approx(100) and found["spread"]["decoding_tokens_per_s"] == pytest.approx(
        [200 / 3, 200]
    )
    rates = [200 / (first + 99 * gap) for first, gap in zip((3.0, 1.0, 8.0), gaps)]
    assert found["tokens_per_s"] == pytest.approx(sorted(rates)[1]) and found["spread"]["tokens_per_s"] == pytest.approx(
        [rates[2], rates[1]]
    )
    assert found["ttft_s"] == {"median": 3.0, "min": 1.0, "max": 8.0, "repeats": 6} and found["spread"]["ttft_s"] == [1.0, 8.0]
    assert found["at_once"] == 2 and isinstance(found["window_tokens"], int)
    even = passes.medians_of([[stream(0.0, 0.01)], [stream(0.0, 0.01), stream(0.0, 0.01)]])
    assert even["at_once"] == 1  # a number of requests that there was
    late = passes.medians_of([[stream(1.0, 0.01)]], [[5.0, 7.0], [9.0, 9.0]])  # two further passes, of 6 and 9 seconds
    assert late["ttft_s"] == {"median": 6.0, "min": 1.0, "max": 9.0, "repeats": 5} and late["spread"]["ttft_s"] == [1.0, 9.0]


def test_what_was_found_in_the_tree():
    hit, part, cold = (stream(0.0, 1.0, cached=cached) for cached in (480, 448, 0))
    named = [passes.prefix_of(streams, 32) for streams in ([hit], [hit, part], [hit, cold], [cold, cold])]
    assert named == ["hit", "part", "part", "cold"]


def test_tokens_of_stock_by_hand():
    assert capacity.stock_tokens(LLAMA, LIMIT) == LIMIT // (32 * LAYER_TOKEN) == 131072
    assert capacity.stock_tokens(LLAMA, LIMIT - 1) == 131072 - 32  # whole pages


def test_rows_of_freekv_are_as_many_as_fit():
    resident = replace(LLAMA, resident=True)
    sizing = capacity.sizing_of(resident)
    tokens, rows, gib = capacity.freekv_sizes(resident, LIMIT)
    assert tokens == (75 << 30) // (31 * LAYER_TOKEN) // 32 * 32  # all that the host holds
    digests = 31 * 8 * 2 * 128 * 2 // 32  # of a token: two vectors for a page and kv head
    fixed = 2 * 140_000 * LAYER_TOKEN + tokens * (LAYER_TOKEN + digests) + sizing.padding_bytes
    assert fixed + rows * sizing.row_bytes <= LIMIT < fixed + (rows + 1) * sizing.row_bytes
    assert sizing.row_bytes > 31 * 2048 * LAYER_TOKEN and rows == 39 and 0 < gib < 0.5  # the slots of 39 rows take nearly all
    assert capacity.freekv_sizes(replace(resident, max_running=8), LIMIT)[:2] == (tokens, 8)
    fewer, least, _ = capacity.freekv_sizes(resident, 4 << 30)
    assert fewer < tokens and least >= 1  # where the device is what is short, tokens leave rows a half of it


@pytest.mark.parametrize("typed", [("--freekv-kv-dtype", "int8"), ("--watchdog-timeout", "9", "--freekv-kv-dtype=int8")], ids=str)
def test_codes_among_the_further_flags_are_reckoned_with(typed):
    """Of stock SGLang nothing changes."""
    plain, coded = (replace(LLAMA, extra_freekv=flags) for flags in ((), typed))
    assert (plain.kv_dtype, coded.kv_dtype) == ("auto", "int8")
    token = 2 * 8 * (128 + 2)
    assert capacity.sizing_of(coded).host_bytes_per_token == 31 * token
    (fewer, rows, _), (more, coded_rows, _) = (capacity.freekv_sizes(setup, LIMIT) for setup in (plain, coded))
    assert more > 1.5 * fewer and coded_rows > rows  # the device bounds these tokens
    assert capacity.stock_tokens(coded, LIMIT) == capacity.stock_tokens(plain, LIMIT)
    stock, ours = ([capacity.kv_bytes(setup, system, 32768, 0.2) for setup in (plain, coded)] for system in ("stock", "freekv"))
    assert stock[0] == stock[1] and ours[1]["link_bytes"] / ours[0]["link_bytes"] == pytest.approx(token / LAYER_TOKEN)


@pytest.mark.parametrize("stored", ["fp8_e4m3", "fp8_e5m2"])
def test_stock_sglangs_own_floats_of_8_bits_are_reckoned_with(stored):
    """Of either side alone, or of both."""
    typed = ("--mem-fraction-static", "0.7", "--kv-cache-dtype", stored)
    stock, ours = replace(LLAMA, extra_stock=typed), replace(LLAMA, extra_freekv=typed)
    assert [setup.kv_dtype_of(base) for setup in (stock, ours) for base in ("stock", "freekv")] == [stored, "auto", "auto", stored]
    assert capacity.stock_tokens(stock, LIMIT) == 2 * capacity.stock_tokens(LLAMA, LIMIT) == 2 * capacity.stock_tokens(ours, LIMIT)
    facts = {"freekv": None, "max_total_num_tokens": 131072}
    assert capacity.device_kv_bytes(stock, facts) == capacity.device_kv_bytes(LLAMA, facts) // 2 == LIMIT // 2
    read = {setup: capacity.kv_bytes(setup, "stock", 32768)["hbm_bytes"] for setup in (LLAMA, stock, ours)}
    assert read[stock] * 2 == read[LLAMA] == read[ours]
    moved = {setup: capacity.kv_bytes(setup, "freekv", 32768, 0.2)["link_bytes"] for setup in (LLAMA, stock, ours)}
    assert moved[ours] * 2 == pytest.approx(moved[LLAMA]) and moved[stock] == moved[LLAMA]


def test_sizes_follow_the_preset():
    sizing = capacity.sizing_of(USERS)
    assert sizing.config.pages == (2, 250, 4) and sizing.config.page_size == 8 and sizing.config.resident_memory_gib is None
    two_bit = capacity.model_of(LLAMA).kv_shape(FreeKVConfig(digest="two-bit", page_size=8)).digest_elements
    assert sizing.digest_bytes_per_token == 31 * 8 * two_bit * 2 / 8 > capacity.sizing_of(LLAMA).digest_bytes_per_token
    moved = capacity.kv_bytes(USERS, "freekv", 32768, 0.1)
    assert moved["link_bytes"] == pytest.approx(0.1 * 250 * 8 * 31 * LAYER_TOKEN)


@pytest.mark.parametrize("limit", [LIMIT, LIMIT // 4])
@pytest.mark.parametrize("few", [64, 8], ids=["all that fit", "eight"])
@pytest.mark.parametrize("name", ["freekv-same-kv", "freekv-default-same-kv"])
def test_a_server_told_these_sizes_fills_its_limit(name, few, limit, tmp_path):
    """On a device of 48 GiB, by the classes that allocate, here without memory."""
    system = crossover.system_of(name, replace(LLAMA, max_running=few), limit)
    typed = system.setup.flags(system.base, tmp_path) | system.more
    config = replace(served_config(typed), host_memory_gib=None)
    page = config.page_size
    shape = capacity.model_of(LLAMA).kv_shape(config)
    sizing, tokens, rows = Sizing(config, shape, 140_000), typed["--max-total-tokens"], typed["--max-running-requests"]
    frames = sizing.frames(48 << 30, tokens, rows)
    cache = DeviceCache(shape, page, Slots(rows + 1, 2048 // page, 2048 // page, frames), "meta")
    tables = FrameTables.allocate(frames, tokens // page + 1, cache.row_frames)
    held = cache.num_bytes + sum(table.nbytes for table in tables) + sizing.staging_bytes
    held += (tokens + page) * sizing.dense_bytes_per_token + int((tokens + page) * sizing.digest_bytes_per_token)
    capacity.expect_within(system, held)
    assert limit - held < (rows + 1) * sizing.table_bytes + sizing.frame_bytes  # the tables of rows are not held here
    assert frames > (rows + 1) * config.cache_pages
    assert sizing.longest_requests(48 << 30, tokens, rows) == rows and tokens % page == 0
    assert system.setup.resident and not crossover.system_of("freekv", LLAMA, limit).setup.resident


def test_systems_and_their_flags(tmp_path):
    systems = {name: crossover.system_of(name, LLAMA, LIMIT) for name in crossover.SYSTEMS}
    assert {name: system.limit for name, system in systems.items()} == {
        name: LIMIT if "same-kv" in name else None for name in crossover.SYSTEMS
    }
    assert systems["stock"].more == systems["freekv"].more == systems["freekv-default"].more == {}
    assert systems["stock-same-kv"].more == {"--max-total-tokens": 131072}
    assert systems["stock-same-kv-hicache"].more == {"--max-total-tokens": 131072} | hicache_flags(LLAMA)
    assert systems["freekv-same-kv"].setup.max_running == 39 and systems["stock-same-kv"].setup.max_running == 64
    presets = {name: system.setup.preset for name, system in systems.items() if system.base == "freekv"}
    assert presets == {name: DEFAULT_PRESET if "default" in name else "fast" for name in presets} and len(presets) == 5
    assert [name for name in systems if systems[name].setup.resident] == [name for name in presets if name != "freekv"]
    assert {system for pair in crossover.PAIRS.values() for system in pair} == {
        *(set(crossover.SYSTEMS) - {crossover.RESIDENT}),
        *(f"freekv-resident-{load}" for load in LOADS),
    }
    small = crossover.system_of("stock-flashinfer", crossover.DRY_RUN, 1)  # a CPU has a backend of its own
    assert small.more == {} and small.setup.flags("stock", tmp_path)["--attention-backend"] == "torch_native"


@pytest.mark.parametrize("gib, counted", [(75, 80), (40, 42), (126.5, 135)])
def test_hicache_has_no_more_host_memory_than_freekv(gib, counted):
    """SGLang takes a whole number of 10^9 bytes."""
    flags = hicache_flags(replace(LLAMA, host_memory=gib))
    assert flags == {"--enable-hierarchical-cache": True, "--hicache-size": counted} and isinstance(flags["--hicache-size"], int)
    assert counted * 10**9 <= gib * 2**30 < (counted + 1) * 10**9


def test_pools_that_are_too_large_are_told():
    system = crossover.system_of("freekv-same-kv", LLAMA, LIMIT)
    pools = dict.fromkeys(capacity.DEVICE_POOLS, 3 << 30)
    assert capacity.device_kv_bytes(LLAMA, {"freekv": pools}) == 15 << 30
    assert capacity.device_kv_bytes(LLAMA, {"freekv": None, "max_total_num_tokens": 131072}) == LIMIT
    capacity.expect_within(system, LIMIT)
    with pytest.raises(RuntimeError, match="freekv-same-kv: .* 16.500 GiB .* at most 16.000"):
        capacity.expect_within(system, LIMIT + (1 << 29))
    capacity.expect_within(crossover.system_of("freekv", LLAMA, LIMIT), 1 << 40)


@pytest.mark.parametrize("shape, layers, idle, width", [("qwen3-30b-a3b", 48, 120, 2048 * 768), ("minimax-m2-cut", 6, 248, 3072 * 1536)])
def test_a_step_reads_the_experts_that_tokens_are_routed_to(shape, layers, idle, width):
    setup = replace(LLAMA, shape=shape)
    one, many = (capacity.weight_bytes(setup, batch) for batch in (1, 2000))
    expert = 3 * width * 2
    assert one == pytest.approx(many - layers * idle * expert) and many < capacity.model_of(setup).weight_bytes
    assert one < capacity.weight_bytes(setup, 2) < one + layers * 8 * expert


def test_bytes_of_window_layers_and_of_experts_in_four_bits_by_hand():
    setup = replace(LLAMA, shape="gpt-oss-20b")
    expert = 3 * 2880 * 2880 * 17 // 32  # half a byte, and one for 32 of them
    one, many = (capacity.weight_bytes(setup, batch) for batch in (1, 1000))
    assert one == pytest.approx(many - 24 * 28 * expert)
    attention = 2880 * 64 * (64 + 8 + 8) + 64 * (64 + 8 + 8) + 64 + 64 * 64 * 2880 + 2880  # and sinks
    router, biases, norms = 32 * 2881, 32 * 3 * 2880, 2 * 2880
    shared = 24 * (attention + router + biases + norms) + 201088 * 2880 + 2880
    assert many == pytest.approx(2 * shared + 24 * 32 * expert)
    token, near, full = 2 * 8 * 64 * 2, 12 * 128, 12 * 32768
    assert capacity.kv_bytes(setup, "stock", 32768)["hbm_bytes"] == token * (full + near)
    assert capacity.kv_bytes(setup, "freekv", 32768)["hbm_bytes"] == token * (full / 32 + 12 * 2048 + near)


def test_bytes_of_a_step_by_hand():
    weights = 2 * (8_030_261_248 - 128256 * 4096)  # as published, less the embeddings, of which a step reads a row
    assert capacity.bytes_of(LLAMA, "stock", 32768, 4) == {"hbm_bytes": weights + 4 * 32768 * 32 * LAYER_TOKEN, "link_bytes": 0}
    dense, attended, digests = 32768 * LAYER_TOKEN, 31 * 2048 * LAYER_TOKEN, 31 * (32768 // 32) * 8 * 2 * 128 * 2
    found = capacity.bytes_of(LLAMA, "freekv", 32768, 4, 0.21)
    assert found["hbm_bytes"] == weights + 4 * (dense + attended + digests) + found["link_bytes"]
    assert found["link_bytes"] == pytest.approx(4 * 0.21 * 1024 * 31 * LAYER_TOKEN)  # half of the budget is selected
    assert capacity.bytes_of(LLAMA, "freekv", 1024, 1, 0.0)["link_bytes"] == 0
    request = capacity.request_bytes(LLAMA, "freekv", 32768, 10, 0.21)
    whole = (found["link_bytes"] / 4) * 10 + 32768 * 31 * LAYER_TOKEN  # each step's recall, and the prefix, but for the dense layer
    assert request == {"hbm_bytes": pytest.approx((found["hbm_bytes"] - weights) / 4 * 10), "link_bytes": pytest.approx(whole)}
    assert capacity.request_bytes(LLAMA, "stock", 32768, 10) == {"hbm_bytes": 10 * 32768 * 32 * LAYER_TOKEN, "link_bytes": 0}
    needle = crossover.DRY_RUN  # its head is its embeddings
    layer = 4 * (2 * 384 * 64 * (6 + 2) + 3 * 384 * 1024 + 2 * 384)
    assert capacity.bytes_of(needle, "stock", 0, 1)["hbm_bytes"] == 8 * layer + 4 * (5120 * 384 + 384)


def result_of(batch: int, tpot: float | None, ttft: float | None, prefix: str = "hit", **more) -> dict:
    cell = Cell(8192, batch, prefix)._asdict()
    if tpot is None:
        return {"cell": cell, "prefix": "no room", "at_once": 0}
    return {"cell": cell, "prefix": prefix, "at_once": batch, "tpot_s": tpot, "ttft_s": {"median": ttft}, "tokens_per_s": 1.0} | more


def test_where_freekv_is_slower_comes_first():
    results = {
        **{"stock/8k/b16": result_of(16, 0.02, 1.0), "freekv/8k/b16": result_of(16, 0.01, 0.9)},
        **{"stock/8k/b4": result_of(4, 0.01, 1.0), "freekv/8k/b4": result_of(4, 0.01, 1.1)},
        **{"stock/8k/b1": result_of(1, 0.01, 1.0), "freekv/8k/b1": result_of(1, 0.02, 1.5, "part")},
        **{"stock/8k/b2": result_of(2, None, None), "freekv/8k/b2": result_of(2, 0.02, 1.0)},
        "stock-same-kv/8k/b64": result_of(64, 0.01, 1.0),
    }
    _, *rows = [line.split("  ") for line in comparison.comparison(results, "production", "freekv", "stock").splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert [row[:3] for row in cells] == [
        ["8k/b4", "TTFT", "hit"],
        ["8k/b1", "TPOT+TTFT", "part/hit"],
        ["8k/b16", "-", "hit"],
        ["8k/b2", "-", "hit/no room"],
    ]
    assert cells[1][3:9] == ["20", "10", "2", "1.5", "1", "1.5"]
    assert [row.slower for row in comparison.compared(results, "freekv-same-kv", "stock-same-kv")] == [""]


def test_stock_has_the_faster_backend_of_each_figure():
    results = {
        **{"freekv-resident-tau-0.8/8k/b16": result_of(16, 0.01, 1.2), "freekv-resident-tau-0.9/8k/b16": result_of(16, 0.03, 2.0)},
        **{"stock-fa3/8k/b16": result_of(16, 0.02, 1.0), "stock-flashinfer/8k/b16": result_of(16, 0.025, 0.5)},
        **{"freekv-resident-tau-0.8/8k/b32": result_of(32, 0.01, 1.2), "stock-fa3/8k/b32": result_of(32, 0.02, 9.0, "cold")},
        **{"stock-fa3/8k/b64": result_of(64, None, None), "stock-flashinfer/8k/b64": result_of(64, 0.1, 1.0)},
    }
    ours, pair = "freekv-resident-tau-0.8", crossover.FASTER
    rows = {row.batch: row for row in comparison.compared(results, ours, *pair)}
    both = rows[16]
    assert both.tpot == (0.01, 0.02, 0.5) and both.ttft == (1.2, 0.5, 2.4) and both.by == "stock-fa3, stock-flashinfer"
    assert rows[32].ttft == (1.2, 9.0, None) and rows[32].slower == ""  # a hit beside a cold prompt
    assert rows[64].tpot[1] == 0.1 and rows[64].by == "stock-flashinfer"
    assert [row.slower for row in comparison.compared(results, "freekv-resident-tau-0.9", *pair) if row.batch == 16] == ["TPOT+TTFT"]


def spread_of(least: float, most: float, passes: int = 3) -> dict:
    return {"passes": [{}] * passes, "spread": {"tpot_s": [least, most]}}


def test_a_ratio_lies_between_those_of_any_two_passes():
    ours = result_of(16, 0.010, 1.0, **spread_of(0.009, 0.012))
    results = {
        **{"ours/8k/b16": ours, "ours/8k/b4": ours | {"cell": Cell(8192, 4, "hit")._asdict()}, "ours/8k/b1": result_of(1, 0.01, 1.0)},
        **{
            "a/8k/b16": result_of(16, 0.020, 1.0, **spread_of(0.018, 0.030)),
            "b/8k/b16": result_of(16, 0.025, 0.1, **spread_of(0.001, 0.9)),
        },
        **{"a/8k/b4": result_of(4, 0.020, 1.0), "a/8k/b1": result_of(1, 0.020, 1.0, **spread_of(0.02, 0.02))},
    }
    rows = {row.batch: row for row in comparison.compared(results, "ours", "a", "b")}
    assert rows[16].tpot_span == pytest.approx((0.009 / 0.030, 0.012 / 0.018)) and rows[16].told_tpot == "0.50 (0.30-0.67)"
    assert rows[4].tpot_span is None and rows[1].tpot_span is None and rows[4].told_tpot == "0.50"  # one side has one pass
    one = result_of(16, 0.010, 1.0, **spread_of(0.01, 0.01, passes=1))
    (row,) = comparison.compared({"ours/8k/b16": one, "a/8k/b16": ours}, "ours", "a")
    assert row.told_tpot == "1.00"
    shown = comparison.comparison(results, "title", "ours", "a", "b")
    assert "0.50 (0.30-0.67)" in shown and "0.50 (0.30-0.67)" not in comparison.comparison(results, "title", "ours", "b")


def test_a_cell_stands_beside_those_of_its_own_run():
    """Another run may have had another card: there a backend is faster without being so."""
    mine, theirs = result_of(16, 0.01, 1.2) | {"run": 1}, result_of(16, 0.02, 1.0)
    results = {
        **{"ours/8k/b16": mine, "stock-fa3/8k/b16": theirs | {"run": 1}},
        "stock-flashinfer/8k/b16": result_of(16, 0.005, 0.5) | {"run": 0},
    }
    (row,) = comparison.compared(results, "ours", *crossover.FASTER)
    assert row.tpot == (0.01, 0.02, 0.5) and row.ttft == (1.2, 1.0, 1.2) and (row.by, row.among) == ("stock-fa3", ("stock-fa3",))
    del results["stock-fa3/8k/b16"]
    (row,) = comparison.compared(results, "ours", *crossover.FASTER)
    assert row.tpot[1] == 0.005 and row.by == "stock-flashinfer", "another run's, where its own has none"


def test_another_card_writes_a_file_of_its_own(tmp_path, monkeypatch):
    """Of the crossover what would be compared counts; of goodput everything does."""
    report = Report("paper-crossover-llama-3.1-8b", tmp_path)
    report.runs[-1]["device"] = "another"
    report.add("stock/8k/b4", result_of(4, 0.01, 1.0))
    (tmp_path / "paper-goodput-llama-3.1-8b.json").write_text(report.path.read_text())
    assert crossover.mates_of(["freekv/8k/b4"]) == {"freekv", "stock"}
    held_against = {"freekv-default", *(f"freekv-resident-{load}" for load in LOADS)}
    assert crossover.mates_of(["stock-fa3/8k/b4"]) == {*crossover.FASTER, *held_against}
    assert crossover.mates_of(["freekv-default/8k/b4"]) == {"freekv-default", *crossover.FASTER}
    monkeypatch.setattr(Ceilings, "measure_apart", lambda device: Ceilings(1.0, 1.0, 1.0))
    for module, shown in ((crossover, "comparison"), (goodput, "goodputs")):
        monkeypatch.setattr(module, "run", ran := mock.Mock())
        monkeypatch.setattr(module, shown, lambda *arguments: "")
        words = ["x", "--out", str(tmp_path), "--systems", "freekv"]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit, match="expected results of cpu alone to compare with, but some are of another; give --suffix"):
            module.main()
        assert not ran.called
        monkeypatch.setattr(sys, "argv", [*words, "--suffix", "h200"])
        assert module.main() == 0 and ran.called
    assert {path.name for path in tmp_path.glob("*-h200.json")} == {
        f"paper-{name}-llama-3.1-8b-h200.json" for name in ("crossover", "goodput")
    }
    Report("paper-crossover-llama-3.1-8b", tmp_path).ensure_one_device(lambda key: key.startswith("freekv"))


def test_kv_of_another_type_has_a_file_of_its_own(tmp_path, monkeypatch):
    """Also if all cells are there, which would else be shown as if they were of that type."""
    report = Report("paper-crossover-llama-3.1-8b", tmp_path)
    report.add("stock-fa3/8k/b1", result_of(1, 0.01, 1.0))
    report.add("stock/8k/b1", result_of(1, 0.01, 1.0) | {"kv_dtype": "fp8_e4m3"})
    monkeypatch.setattr(crossover, "run", mock.Mock())
    monkeypatch.setattr(Ceilings, "measure_apart", lambda device: Ceilings(1.0, 1.0, 1.0))
    words = ["x", "--out", str(tmp_path), "--contexts", "8192", "--batches", "1", "--systems"]
    fp8 = "--stock-flags=--kv-cache-dtype fp8_e4m3"
    for more, told in (
        (["stock-fa3", fp8], "stock-fa3/8k/b1 has KV in auto, expected fp8_e4m3"),
        (["stock"], "has KV in fp8_e4m3, expected"),
    ):
        monkeypatch.setattr(sys, "argv", [*words, *more])
        with pytest.raises(SystemExit, match=f"{told}.*give --suffix"):
            crossover.main()
    for more in (["stock-fa3"], ["stock", fp8], ["stock-fa3", fp8, "--suffix", "fp8"], ["freekv-default", fp8]):
        monkeypatch.setattr(sys, "argv", [*words, *more])
        assert crossover.main() == 0


def test_residency_has_its_defaults_and_every_load(tmp_path):
    systems = [crossover.system_of(name, LLAMA, LIMIT) for name in (crossover.RESIDENT, *crossover.FASTER)]
    flags = [system.setup.flags(system.base, tmp_path) | system.more for system in systems]
    assert [each.get("--attention-backend") for each in flags] == [None, "fa3", "flashinfer"]
    assert "--freekv-resident-memory" not in flags[0] and LLAMA.flags("freekv", tmp_path)["--freekv-resident-memory"] == 0
    cells = [Cell(8192, 16, "cold"), Cell(8192, 1, "hit"), Cell(8192, 1, "cold")]
    jobs = crossover.jobs_of(systems[0].name, cells, ["tau-0.8", "tau-0.9"])
    assert [(job.key.removeprefix("freekv-resident-"), job.cell.prefix) for job in jobs] == [
        ("tau-0.8/8k/b16", "cold"),
        ("tau-0.9/8k/b16", "hit"),
        ("tau-0.8/8k/b1", "hit"),
        ("tau-0.9/8k/b1", "hit"),
        ("tau-0.8/8k/b1-cold", "cold"),
    ]
    assert [job.key for job in crossover.jobs_of("stock-fa3", cells[:1], LOADS)] == ["stock-fa3/8k/b16"]


def test_the_default_preset_replays_its_own_load_first():
    cells = [Cell(8192, 16, "cold"), Cell(8192, 1, "hit")]
    jobs = crossover.jobs_of("freekv-default", cells, LOADS)
    assert [tuple(job) for job in jobs] == [
        ("freekv-default/8k/b16", cells[0], "accurate-by-layer"),
        ("freekv-default/8k/b1", cells[1], "accurate-by-layer"),
    ]
    assert crossover.SYSTEMS[:4] == ("freekv-default", "freekv-resident", *crossover.FASTER)
    assert crossover.PAIRS["default preset"] == ("freekv-default", *crossover.FASTER)


def test_servers_of_the_same_kv_are_sent_a_large_batch_twice():
    cells = [Cell(8192, 64, "cold"), Cell(8192, 1, "hit"), Cell(8192, 1, "cold")]
    found = {name: [job.key.split("/", 1)[1] for job in crossover.jobs_of(name, cells, LOADS)] for name in crossover.SYSTEMS}
    twice = ["8k/b64", "8k/b64-again", "8k/b1", "8k/b1-cold"]
    assert {name for name, keys in found.items() if keys == twice} == {name for name in crossover.SYSTEMS if "same-kv" in name}
    assert crossover.jobs_of("freekv-default-same-kv", cells, LOADS)[1].load == "accurate-by-layer"


def test_long_generation_joins_the_steps_along_the_way():
    lengths = {"ours": {1024: 0.01, 16384: 0.01}, "theirs-a": {1024: 0.01, 16384: 0.03}, "theirs-b": {1024: 0.02, 16384: 0.02}}
    results = {
        f"{system}/{context // 1024}k/b4": result_of(4, seconds, 1.0) | {"cell": Cell(context, 4, "hit")._asdict()}
        for system, steps in lengths.items()
        for context, seconds in steps.items()
    } | {"ours/1k/b8": result_of(8, 0.01, 1.0) | {"cell": Cell(1024, 8, "hit")._asdict()}}
    (row,) = comparison.long_generation(results, "ours", "theirs-a", "theirs-b")
    asked = comparison.LONG
    steps = [asked.prompt + token for token in range(1, asked.answer)]
    faster = [min(max(0.01 + 0.01 * (length - 1024) / 15360, 0.01), 0.02) for length in steps]  # of the two at each length
    assert row[:2] == (4, "1K, 16K") and row[2:] == pytest.approx((0.01, (mean := sum(faster) / len(steps)), 0.01 / mean))


@contextmanager
def no_server(*arguments, **options):
    raise AssertionError("a server was started")
    yield


def test_a_crossover_that_is_there_starts_no_server(tmp_path):
    report, cells = Report("crossover", tmp_path), [Cell(8192, 4, "cold"), Cell(8192, 1, "hit")]
    systems = [crossover.system_of(name, LLAMA, LIMIT) for name in ("stock", "freekv")]
    for system in systems:
        for cell in cells:
            report.add(f"{system.name}/{cell.name}", result_of(cell.batch, 0.01, 1.0))
    again = Report("crossover", tmp_path)

    def run() -> None:
        jobs = {each.name: [job for job in crossover.jobs_of(each.name, cells, LOADS) if job.key not in again.results] for each in systems}
        crossover.run(systems, jobs, again, Clock(5, 60), Asked(24, 4, 1))

    with mock.patch.object(crossover, "running", no_server):
        run()
        assert not again.failures
        del again.results["freekv/8k/b1"]
        run()
        assert [failure.split(":")[0] for failure in again.failures] == ["server freekv"]


def test_a_crossover_measures_what_is_left_and_tells_what_was_not_reached(tmp_path, monkeypatch):
    served, measured = SimpleNamespace(facts=lambda: {"freekv": None, "max_total_num_tokens": 1000}, set_load=lambda load: None), []

    @contextmanager
    def running(*arguments):
        yield served

    def measure(server, cell, load, facts, asked, left):
        assert left() <= 60
        measured.append(cell.name)
        clock.end_s = 0  # time is up
        return result_of(cell.batch, 0.01, 1.0)

    report, clock = Report("crossover", tmp_path), Clock(5, 60)
    monkeypatch.setattr(crossover, "running", running)
    monkeypatch.setattr(crossover, "measure", measure)
    monkeypatch.setattr(crossover.ttft, "warm_up", lambda *others: None)
    cells = [Cell(8192, batch, "hit") for batch in (8, 4, 2)]
    report.add("stock/8k/b8", result_of(8, 0.01, 1.0))
    jobs = {"stock": crossover.jobs_of("stock", cells, LOADS)[1:]}
    crossover.run([crossover.system_of("stock", LLAMA, LIMIT)], jobs, report, clock, Asked(24, 4, 1))
    assert measured == ["8k/b4"] and set(report.results) == {"stock/8k/b8", "stock/8k/b4"}
    assert report.finish() == 1 and report.failures[0].startswith("stock/8k/b2: OutOfTime")
    assert report.results["stock/8k/b4"]["kv_dtype"] == "auto"


def test_a_server_may_start_for_longer_than_a_part_takes():
    assert Clock(60, 5).left() == 5 and Clock(60, 5).left_to_start() == LONGEST_START_S
    assert Clock(2, 5).left_to_start() == pytest.approx(120, abs=1)
    with pytest.raises(OutOfTime):
        Clock(0.5, 5).left_to_start()


class Watched:
    """A server of which ``sent`` has the tokens asked for and ``flush``; passes come later and later, and one retracts each."""

    def __init__(self, system: str = "stock", setup: Setup = crossover.DRY_RUN) -> None:
        self.setup, self.system, self.sent, self.loads = setup, system, [], []
        self.set_load, self.retractions = self.loads.append, lambda begins: begins

    def stream_all(self, prompts, tokens, *others):
        self.sent.append(tokens)
        return [stream(0.1 * len(self.sent), 0.01 * len(self.sent), tokens, cached=0 if "flush" in self.sent else 512) for _ in prompts]

    def flush(self) -> None:
        self.sent.append("flush")

    def logged(self) -> str:
        return "." * len(self.sent)

    def measure(self, prefix: str, passes: int = 3, left=lambda: 60) -> dict:
        facts = {"freekv": None, "max_total_num_tokens": 1 << 20}
        return cells.measure(self, Cell(8192, 2, prefix), USUAL, facts, Asked(64, 8, passes), left)


def test_the_first_token_of_a_hit_is_the_median_of_several_passes():
    server = Watched()
    found = server.measure("hit")
    assert server.sent == [8, *[2] * cells.HIT_PASSES, 64, 64, 64]
    assert found["ttft_s"]["repeats"] == 2 * (cells.HIT_PASSES + 3)  # the first pass fills the tree
    assert found["ttft_s"]["median"] == pytest.approx(0.7) and found["ttft_s"]["max"] == pytest.approx(1.2)
    assert found["tpot_s"] == pytest.approx(0.11) and found["spread"]["tpot_s"] == pytest.approx([0.1, 0.12]) and found["prefix"] == "hit"
    assert len(found["passes"]) == 3 and found["retractions"] == 11  # the most of a pass


def test_each_pass_over_cold_prompts_begins_with_an_empty_tree():
    server = Watched()
    found = server.measure("cold")
    assert server.sent == ["flush", 64] * 3 and found["prefix"] == "cold"
    assert found["ttft_s"] == {"median": pytest.approx(0.4), "min": pytest.approx(0.2), "max": pytest.approx(0.6), "repeats": 6}
    again = Watched()
    assert again.measure("again", passes=2)["prefix"] == "hit" and again.sent == [8, 64, 64]
    seconds = iter((60, 60))
    with pytest.raises(StopIteration):  # time is looked at before each pass
        Watched().measure("cold", left=lambda: next(seconds))


def test_a_prompt_without_room_is_a_result():
    """A page of the system's own is wanted beside it."""
    server, facts = SimpleNamespace(setup=USERS, system="stock"), {"freekv": None, "max_total_num_tokens": 131072 + 256 + 32}
    found = cells.measure(server, Cell(131072, 4, "cold"), USUAL, facts, Asked(256, 8, 3), lambda: 60)
    assert found == {"cell": {"context": 131072, "batch": 4, "prefix": "cold"}, "prefix": "no room", "at_once": 0}
    ours = SimpleNamespace(setup=USERS, system="freekv", set_load=mock.Mock(side_effect=InterruptedError))
    with pytest.raises(InterruptedError):  # it has room, and is measured
        cells.measure(ours, Cell(131072, 4, "cold"), USUAL, facts, Asked(256, 8, 3), lambda: 60)


def test_goodput_by_hand():
    line = {"itls": [[0.04] * 10, [0.06] * 10, [], [0.01, 0.09, 0.01]], "output_lens": [11, 11, 1, 4], "ttfts": [1.9, 0.1, 2.0, 0.5]}
    tpots = goodput.tpots_of(line)
    assert tpots == pytest.approx([0.04, 0.06, 0.0, 0.11 / 3])
    result = line | {"tpots": tpots, "rate": 3.0, "duration": 4.61}  # the last came after 4 s
    assert offered_of(result) == pytest.approx(0.75), "three came behind the first, whatever rate was asked for"
    assert point_of(result, Limits(2.0, 0.05)) == (pytest.approx(0.375), 2 / 4)  # the second is slow, the third late
    assert point_of(result, Limits(2.1, 0.05)) == (pytest.approx(0.5625), 3 / 4)
    assert offered_of({"rate": 3.0}) == 3.0, "a level of agents"


@pytest.mark.parametrize(
    "points, expected",
    [
        ([], False),
        ([(0.5, 1.0)], False),
        ([(0.5, 1.0), (1.0, 1.0)], False),
        ([(0.5, 1.0), (0.5, 1.0)], False),  # as much is not less
        ([(0.5, 1.0), (0.4, 0.95)], True),
        ([(0.5, 1.0), (0.4, 1.0)], False),  # fewer came
        ([(0.4, 0.8)], False),
        ([(0.4, 0.8), (0.9, 0.95), (1.5, 0.89)], True),
        ([(0.4, 0.95), (0.9, 0.9), (1.5, 0.89)], False),
        ([(0.0, 0.0), (0.0, 0.0)], True),
    ],
)
def test_when_a_server_is_saturated(points, expected):
    assert saturated([Point(*point) for point in points]) == expected


def rate_of(rate: float, good: int, run: int = 0) -> dict:
    """Ten requests, of which so many were within limits."""
    ttfts = [1.0] * good + [3.0] * (10 - good)
    figures = dict.fromkeys(goodput.COLUMNS, 1.0)
    return {"rate": rate, "ttfts": ttfts, "tpots": [0.01] * 10, "run": run} | figures


def ladder(left=lambda key: True, since: int = 0) -> Ladder:
    return Ladder(QUESTIONS, Limits(2.0, 0.05), (0.5, 1.0, 2.0, 4.0), left, since)


def test_a_ladder_goes_on_where_it_was():
    results = {"stock/0.5": rate_of(0.5, 9), "stock/1": rate_of(1, 10)}
    assert ladder().next(results, "stock") == 2.0 and ladder().next(results, "freekv") == 0.5
    assert ladder(left=lambda key: key != "stock/2").next(results, "stock") == 4.0
    assert ladder().next(results | {"stock/2": rate_of(2, 4)}, "stock") is None  # it fell
    full = results | {f"stock/{rate:g}": rate_of(rate, 10) for rate in (2.0, 4.0)}
    assert ladder().next(full, "stock") is None
    assert ladder(since=1).next(full, "stock") == 0.5
    assert ladder(since=1).next(full | {"stock/0.5": rate_of(0.5, 9, run=1)}, "stock") == 1.0


def test_a_goodput_that_is_there_starts_no_server(tmp_path):
    report = Report("goodput", tmp_path)
    for system in goodput.SYSTEMS:
        report.add(f"{system}/0.5", rate_of(0.5, 9))
        report.add(f"{system}/1", rate_of(1, 4))
    client, systems = SimpleNamespace(setup=LLAMA, directory=tmp_path), [goodput.system_of(name, LLAMA) for name in goodput.SYSTEMS]
    with mock.patch.object(goodput, "running", no_server):
        goodput.run(client, systems, ladder(), report, Clock(5, 60))
        assert not report.failures
        del report.results["stock/1"]
        goodput.run(client, systems, ladder(), report, Clock(5, 60))
    assert [failure.split(":")[0] for failure in report.failures] == ["server stock"]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name, preset, load", [("freekv", "accurate", "accurate-by-layer"), ("freekv-fast", "fast", "tau-0.9-by-layer")])
def test_a_server_climbs_until_it_is_saturated_or_fails(name, preset, load, fails, tmp_path, monkeypatch):
    loads, started = [], []

    @contextmanager
    def running(setup, base, *arguments):
        started.append((setup.preset, base))
        yield SimpleNamespace(facts=dict, set_load=loads.append)

    def measure(client, server, questions, rate):
        if fails and rate == 1.0:
            raise RuntimeError("a request failed")
        return rate_of(rate, {0.5: 9, 1.0: 10, 2.0: 4}[rate])

    report, client = Report("goodput", tmp_path), SimpleNamespace(setup=LLAMA, directory=tmp_path, run=lambda *arguments: {})
    for what, stand_in in (("running", running), ("measure", measure), ("warm", lambda *arguments: [])):
        monkeypatch.setattr(goodput, what, stand_in)
    goodput.run(client, [system := goodput.system_of(name, LLAMA)], ladder(), report, Clock(5, 60))
    assert list(report.results) == ([f"{name}/0.5"] if fails else [f"{name}/0.5", f"{name}/1", f"{name}/2"])
    assert report.finish() == int(fails) and point_of(report.results[f"{name}/0.5"], Limits(2.0, 0.05)).goodput == 0.45
    assert started == [(preset, "freekv")] and loads == [system.setup.named_load(load, QUESTIONS.tokens)]
    assert {result["load"] for result in report.results.values()} == {load}


def test_the_longest_queue_is_read_from_the_log():
    lines = "Prefill batch, #queue-req: 9,", "Decode batch, #running-req: 7, #queue-req: 0,", "Decode batch, #queue-req: 12, #token: 5"
    server = SimpleNamespace(logged=lambda: "\n".join(lines))
    assert BenchServer.most_queued(server) == 12 and BenchServer.most_queued(server, begins=10_000) == 0
    lines = lines[:2]
    assert BenchServer.most_queued(server, begins=len(lines[0])) == 0, "what was queued before is not told"


def test_stock_sglang_replays_no_load(tmp_path, monkeypatch):
    loads = []

    @contextmanager
    def running(*arguments):
        yield SimpleNamespace(facts=dict, set_load=loads.append)

    report, client = Report("goodput", tmp_path), SimpleNamespace(setup=LLAMA, directory=tmp_path, run=lambda *arguments: {})
    for what, stand_in in (("running", running), ("measure", lambda *arguments: rate_of(1, 1)), ("warm", lambda *arguments: [])):
        monkeypatch.setattr(goodput, what, stand_in)
    goodput.run(client, [goodput.system_of("stock", LLAMA)], ladder(), report, Clock(5, 60))
    assert loads == [None] and all("load" not in result for result in report.results.values())


def test_the_table_of_goodputs():
    results = {"freekv/1": rate_of(1, 6), "freekv/0.5": rate_of(0.5, 9), "stock/0.5": rate_of(0.5, 3)}
    *_, first, second, last = (shown := goodput.goodputs(results, Limits(2.0, 0.05))).splitlines()
    assert first.split()[:5] == ["freekv", "0.5", "0.5", "0.45", "0.9"] and second.split()[:5] == ["freekv", "1", "1", "0.6", "0.6"]
    assert last == "best goodput, requests per second: stock 0.15, freekv 0.6; freekv / stock 4" and shown.count("\n") == 4
    assert goodput.goodputs({}, Limits(2.0, 0.05)).endswith("requests per second: none")


def test_a_rate_is_offered_for_seconds():
    assert [QUESTIONS.per_group(rate) for rate in (0.1, 0.5, 2, 4, 16)] == [1, 3, 12, 24, 24]


def test_questions_are_about_documents_of_one_length():
    from benchmarks.bench_load import SHARED, TextSetup, command_of

    flags = command_of(f"{SHARED}/2", TextSetup("llama-3.1-8b"), QUESTIONS.flags(12, 512, 256))
    said = dict(zip(flags, flags[1:]))
    wanted = {"--num-prompts": 48, "--gsp-num-groups": 4, "--gsp-prompts-per-group": 12, "--gsp-system-prompt-len": 32768}
    assert wanted.items() <= {name: int(said[name]) for name in wanted}.items() and said["--request-rate"] == "2"
    assert (said["--gsp-question-len"], said["--gsp-output-len"], said["--gsp-range-ratio"]) == ("512", "256", "0.999")


@pytest.mark.parametrize("module, name", [(crossover, "paper-crossover-llama-3.1-8b"), (goodput, "paper-goodput-llama-3.1-8b")])
def test_tables_come_from_the_json_alone(module, name, tmp_path, monkeypatch, capsys):
    results = {"stock/0.5": rate_of(0.5, 9)} if module is goodput else {"stock/8k/b4": result_of(4, 0.01, 1.0)}
    (tmp_path / f"{name}.json").write_text(json.dumps({"runs": [{}], "results": results}))
    monkeypatch.setattr(sys, "argv", ["x", "--tables", "--out", str(tmp_path)])
    with mock.patch.object(module, "running", no_server):
        assert module.main() == 0
    assert next(iter(results)).split("/", 1)[1] in capsys.readouterr().out
