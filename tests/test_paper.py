"""The drivers of the papers' figures on a CPU: every method takes a step, and what is made of the times is right."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from benchmarks.paper import ablation, latency
from benchmarks.paper.decoder import TINY, Decoder, Shape
from benchmarks.paper.method import Work
from benchmarks.paper.methods import METHODS
from benchmarks.paper.methods.full import Full
from benchmarks.paper.methods.published import recall_slices
from benchmarks.paper.methods.rebuild import rebuild_keys, reference_rebuild
from benchmarks.paper.parts import parts_of
from benchmarks.paper.pools import Pools
from benchmarks.paper.scenarios import Scenario, line
from benchmarks.paper.step import Step, measured
from benchmarks.report import Report
from sglang_freekv import kernels
from sglang_freekv.config import FreeKVConfig

ROOT = Path(__file__).resolve().parent.parent
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

CONFIG = FreeKVConfig(budget_tokens=64, sink_tokens=16, window_tokens=16, page_size=8)
UNIT = 2 * TINY.head_dim * 4  # bytes of a token's keys and values of one kv head


@pytest.fixture(scope="module")
def pools():
    return Pools(TINY, CONFIG, 2, 2048, torch.float32, "cpu")


def work_of(pools, context=512, corrected=0.5, missed=0.25, batch=2) -> Work:
    return Work.of(pools, batch, context, corrected, missed)


def test_shapes_are_read_from_configs():
    llama, qwen = Shape.of("llama-3.1-8b"), Shape.of("qwen2.5-7b")
    assert (llama.layers, llama.kv_heads, llama.group, llama.head_dim) == (32, 8, 4, 128)
    assert (qwen.kv_heads, qwen.group, qwen.head_dim) == (4, 7, 128)
    left_out = 128256 * 4096 + 65 * 4096  # the embeddings, of which a step reads a row, and norms
    assert llama.weight_bytes(2) == 2 * (8_030_261_248 - left_out)  # as published


@pytest.mark.parametrize("name", METHODS)
def test_a_step_of_every_method(name, pools):
    work = work_of(pools)
    method = METHODS[name](work)
    step = Step(Decoder(TINY, torch.float32, "cpu"), work, method)
    with mock.patch.object(step.decoder, "step", side_effect=step.decoder.step) as decode:
        for _ in range(20):  # over page boundaries
            step.run()
    assert decode.call_count == 20 and work.requests.seq_lens.tolist() == [532, 532]
    logits = step.decoder.step(step.hidden, method.attend)
    assert logits.shape == (2, 128) and logits.isfinite().all()


@pytest.mark.parametrize(
    "name, link, device",
    [
        ("window", 0, 64),
        ("full", 0, 512),
        ("raas", 0, 64 + 8),  # a digest, of two keys, for each of the resident pages
        ("razor", 0, 0.15 * 512 + 0.85 * 32),
        ("infinigen", 64 / 2, 64 + 64 / 2 + 512 * 8 / 32 / 2),  # all that it attends to; the first of two layers selects nothing
        ("infinigen-copies", 64 / 2, 64 + 64 / 2 + 512 * 8 / 32 / 2),
        # values of 2 chunks; landmarks, keys, and what makes them
        ("shadowkv", 16 / 2, 64 + 8 + 512 / 8 / 2 + 16 / 2 + 160 * (16 + 16) / 32),
    ],
)
def test_traffic_by_hand(name, link, device, pools):
    heads = 2 * 2 * 2  # requests, layers, kv heads
    traffic = METHODS[name](work_of(pools)).traffic(1)
    assert traffic == pytest.approx((heads * link * UNIT, heads * device * UNIT))


@pytest.mark.parametrize("name", ["freekv", "arkvale", "arkvale-copies", "louiskv", "quest"])
@pytest.mark.parametrize("context", [1024, 32])
def test_recall_is_counted(name, context, pools):
    """By what the list of misses held, and not by what the load asked for."""
    work = work_of(pools, context=context, corrected=0.5, missed=0.25)
    step = Step(Decoder(TINY, torch.float32, "cpu"), work, METHODS[name](work))
    by, moved = step.method.retrieval.recall, []

    def recall(host, misses, *others):
        moved.append(int(misses.length[0]))
        by(host, misses, *others)

    step.method.retrieval.recall = recall
    for _ in range(3):
        step.run()
    moved.clear()
    step.method.begin()
    for _ in range(20):
        step.run()
    link = step.method.traffic(20).link
    assert link == (0 if name == "quest" else pytest.approx(sum(moved) * 8 * UNIT / 20))
    assert (link > 0) == (context == 1024 and name != "quest")


def test_the_first_step_misses_as_often_as_those_that_follow(pools):
    for name in ("freekv", "arkvale"):
        work = work_of(pools, context=1024, corrected=0.0, missed=0.25)
        step = Step(Decoder(TINY, torch.float32, "cpu"), work, METHODS[name](work))
        step.run()
        hits, recalled, _ = step.method.retrieval.row_counts(work.requests.rows).sum(0).tolist()
        assert recalled < 0.5 * (hits + recalled), name


def test_raas_scores_every_resident_page(pools):
    from benchmarks.paper.methods.raas import EVERY

    method = METHODS["raas"](work_of(pools))
    tokens = int(method.resident[0])
    assert (EVERY.sink, -(-(tokens + 1) // 8) - EVERY.window) == (0, method.slots) and method.slots >= 8


def test_a_load_is_recalled_and_no_more_than_it(pools):
    work = work_of(pools, context=1024, corrected=0.0, missed=0.25)
    method = METHODS["freekv"](work)
    step = Step(Decoder(TINY, torch.float32, "cpu"), work, method)
    method.retrieval.counts.zero_()
    for _ in range(40):
        step.run()
    hits, recalled, corrected = method.retrieval.row_counts(work.requests.rows).sum(0).tolist()
    assert corrected == 0 and 0.15 < recalled / (hits + recalled) < 0.35


@pytest.mark.parametrize("corrected, changes", [(0.0, False), (1.0, True)])
def test_a_trigger_alone_changes_the_selection(pools, corrected, changes):
    work = work_of(pools, context=1024, corrected=corrected, missed=0.5)
    method = METHODS["louiskv"](work)
    step = Step(Decoder(TINY, torch.float32, "cpu"), work, method)
    step.run()
    method.retrieval.counts.zero_()
    for _ in range(6):  # within a page
        step.run()
    recalled = method.retrieval.row_counts(work.requests.rows)[:, 1].sum()
    assert bool(recalled) == changes


def test_the_host_copies_the_units_that_are_missing(pools):
    host = torch.randn(5, 2, 2, 8, 16)
    apart = host.view(5, 2, 8, 2, 16)  # page, keys or values, token, head
    keys, values = torch.zeros(2, 6, 8, 2, 16)
    misses = kernels.Misses.allocate(4, "cpu")
    misses.extend(torch.tensor([3, 1]), torch.tensor([1, 0]), torch.tensor([5, 2]))
    recall_slices(host, misses, keys, values)
    assert torch.equal(keys[5, :, 1], apart[3, 0, :, 1]) and torch.equal(values[2, :, 0], apart[1, 1, :, 0])
    assert keys.count_nonzero() == values.count_nonzero() == 2 * 8 * 16 and misses.length[0] == 0


@pytest.mark.parametrize("name", ["infinigen", "infinigen-copies"])
@pytest.mark.parametrize("copies", [True, False])
def test_the_tokens_chosen_come_and_no_others(name, copies, pools):
    for layer in pools.store.host.layers:
        layer.normal_()
    method = METHODS[name](Work.of(pools, 2, 512, 0.0, 0.0, copies))
    chosen = torch.randint(512, (2, 2, 64))  # request, kv head, token
    caches = [rows.zero_() for rows in pools.store.cache.layers[1].token_rows.tensors]
    method.bring(1, chosen.flatten())
    units = pools.host_units(1, 1)
    for kind, cache in enumerate(caches):
        tokens = cache.view(-1, pools.store.cache.layers[1].slot_pages.shape[2] * 8, 2, 16)
        for request in range(2):
            for head in range(2):
                expected = units[chosen[request, head], head, kind, 0] if copies else torch.zeros(64, 16)
                assert torch.equal(tokens[request + 1, :64, head], expected)
        assert not tokens[1:, 64:].any() and not tokens[0].any()


@pytest.mark.parametrize("rank, dim", [(160, 32), (40, 16)])
def test_keys_are_rebuilt_by_one_kernel_as_by_pytorch(rank, dim):
    batch, heads, tokens, chunk, selected = 2, 3, 96, 8, 5
    sizes = (batch, tokens, rank), (batch, heads, rank, dim), (2, tokens, dim)
    low_rank, basis, angles = (torch.randn(size, device=DEVICE) for size in sizes)
    chosen = torch.stack([torch.randperm(tokens // chunk, device=DEVICE)[:selected] for _ in range(batch * heads)])
    found, expected = torch.full((2, 4, 48, heads, dim), 7.0, device=DEVICE)
    for rebuild, keys in ((rebuild_keys, found), (reference_rebuild, expected)):
        rebuild(low_rank, basis, angles, chosen.view(batch, heads, selected), torch.tensor([3, 1], device=DEVICE), keys, chunk)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (found == 7).sum() == found.numel() - batch * selected * chunk * heads * dim


@pytest.mark.parametrize("context", [33, 64])
def test_full_attention_is_to_all_tokens(context):
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    pools = SimpleNamespace(shape=replace(TINY, head_dim=64), config=CONFIG, dtype=dtype, device=DEVICE)
    work = Work(pools, SimpleNamespace(rows=torch.arange(1, 3)), context, context, 0.0, 0.0)
    full = Full(work)
    q, k, v = (torch.randn(2, heads, 64, dtype=dtype, device=DEVICE) for heads in (TINY.query_heads, TINY.kv_heads, TINY.kv_heads))
    found = full.attend(1, q, k, v)
    keys, values = (each.view(2, -1, TINY.kv_heads, 64)[:, :context].float().repeat_interleave(TINY.group, 2) for each in full.layers[1])
    assert torch.equal(keys[:, -1, :: TINY.group].to(dtype), k) and torch.equal(values[:, -1, :: TINY.group].to(dtype), v)
    weights = torch.einsum("bhd,bthd->bht", q.float(), keys).mul(64**-0.5).softmax(-1)
    torch.testing.assert_close(found.float(), torch.einsum("bht,bthd->bhd", weights, values), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["freekv", "arkvale", "arkvale-copies", "louiskv", "shadowkv"])
def test_without_copies_nothing_comes(name, pools):
    for layer in pools.store.host.layers:
        layer.fill_(777)
    for copies in (False, True):
        work = Work.of(pools, 2, 1024, 1.0, 0.5, copies)
        step = Step(Decoder(TINY, torch.float32, "cpu"), work, METHODS[name](work))
        for cache in pools.store.cache.layers:
            cache.values.zero_()
        for _ in range(4):
            step.run()
        assert any((cache.values == 777).any() for cache in pools.store.cache.layers) == copies


def test_a_prefill_is_causal_attention_over_the_prompt():
    decoder, tokens = Decoder(TINY, torch.float32, "cpu"), torch.randn(9, TINY.hidden)
    caches = [[torch.empty(0, 2, 16)] * 2 for _ in range(TINY.layers)]

    def attention(layer, q, k, v):
        caches[layer] = [torch.cat((old, new)) for old, new in zip(caches[layer], (k, v))]
        keys, values = (each.repeat_interleave(TINY.group, 1) for each in caches[layer])
        return torch.einsum("bht,thd->bhd", torch.einsum("bhd,thd->bht", q, keys).mul(16**-0.5).softmax(-1), values)

    for token in tokens:
        logits = decoder.step(token[None], attention)
    torch.testing.assert_close(decoder.prefill(tokens), logits)


def test_what_is_no_attention_is_not_timed(pools):
    class Broken(METHODS["window"]):
        def attend(self, layer, q, k, v):
            return super().attend(layer, q, k, v) / 0

    with pytest.raises(RuntimeError, match="not all finite"):
        measured(Decoder(TINY, torch.float32, "cpu"), work_of(pools), Broken, 1)


def test_steps_are_joined_by_straight_lines():
    scenario = Scenario(prompt=100, answer=5, tau=0.8, at=(100, 102))
    assert scenario.decoding_seconds({100: 1.0, 102: 3.0}) == 2 + 3 + 3 + 3  # contexts 101 to 104
    assert [line(((0, 0.0), (10, 1.0)), x) for x in (-1, 0, 5, 10, 11)] == [0, 0, 0.5, 1, 1]


def test_answers_leave_out_what_is_not_complete(monkeypatch):
    monkeypatch.setattr(latency, "SCENARIOS", {"s": Scenario(10, 3, 0.8, (10, 12))})
    results = {
        f"s/b4/{method}/{context}": {"seconds": {"median": seconds}}
        for method, context, seconds in (("freekv", 10, 1.0), ("freekv", 12, 1.0), ("full", 10, 4.0), ("full", 12, 4.0), ("raas", 10, 1.0))
    }
    results["prefill/10"] = {"seconds": {"median": 0.5}}
    whole = (2 + 8) / (2 + 2)  # four prompts of half a second each, then two steps
    assert latency.answers(results) == [("s", 4, "full", 4, 2, 8, 1, None, 4, whole), ("s", 4, "freekv", 1, 2, 2, 0.25, None, 1, 1)]
    del results["prefill/10"]
    assert [answer.freekv_whole for answer in latency.answers(results)] == [None, None]


def test_a_step_is_split_by_what_was_measured_of_it():
    ceilings = {"to_device": 10.0, "device": 100.0}
    moved = {"link": 50.0, "device": 100.0, "weights": 200.0}
    result = {"seconds": {"median": 9.0}, "without_copies": {"median": 7.0}, "bytes": moved}
    assert parts_of("freekv", result, 4.0, ceilings) == (4, 3, 2, 3, 5)  # the link takes five seconds, two of them are seen
    assert parts_of("razor", result, 4.0, ceilings) == (7, 0, 2, 3, 5)
    assert parts_of("quest", {"seconds": {"median": 6.0}, "bytes": moved | {"link": 0.0}}, 4.0, ceilings) == (4, 2, 0, 0, 3)


def test_cells_wait_for_the_window():
    step = {"seconds": {"median": 2.0}, "bytes": {"link": 1.0, "device": 1.0, "weights": 1.0}, "corrected": 0.25, "run": 1}
    runs = [{}, {"ceilings": {"to_device": 1.0, "device": 1.0}}]
    results = {"long-input/b1/freekv/32768": step, "long-input/b1/window/32768": step, "long-input/b4/freekv/32768": step}
    found = [(cell.method, cell.batch, cell.window, cell.link, cell.serial, cell.parts.bound) for cell in latency.cells(results, runs)]
    assert found == [("window", 1, 2, 1, 2.25, 2), ("freekv", 1, 2, 1, 2.25, 2)]


@pytest.mark.parametrize(
    "script, only, expected",
    [
        ("latency", ["long-input/*/window/*", "long-input/*/quest/*"], ["long-input/b1/quest/32768", "long-input/b1/window/32768"]),
        ("ablation", ["*/base", "*/+slack"], ["512/b1/+slack", "512/b1/base"]),
    ],
)
def test_a_driver_resumes(script, only, expected, tmp_path):
    sizes = {"latency": ["--scale", "64"], "ablation": ["--contexts", "512"]}[script]
    common = ["--device", "cpu", "--batches", "1", "--budget", "64", "--page-size", "8", "--host-tokens", "2048", "--repeats", "1"]
    command = [sys.executable, "-m", f"benchmarks.paper.{script}", "--shape", "tiny", *sizes, *common, "--out", tmp_path, "--only", *only]
    first = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr[-2000:]
    results = json.loads((tmp_path / f"paper-{script}-tiny.json").read_text())["results"]
    assert sorted(results) == expected
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 0 and " ms\n" not in again.stdout and only[-1].split("/")[-1].strip("*") in again.stdout


def test_what_the_host_moves_is_measured_last():
    options = SimpleNamespace(batches=[1, 8], force=False)
    measured = {key: {"settings": {}} for key in ("prefill/600", "long-input/b1/full/32768")}
    prompts, steps = latency.left_of(options, lambda key: True, measured)
    assert list(prompts) == ["prefill/32768"] and "long-input/b1/full/32768" not in steps
    by_host = [step[2] in latency.BY_HOST for step in steps.values()]
    assert by_host == sorted(by_host) and sum(by_host) == 2 * 2 * 9 and len(by_host) == 12 * 2 * 9 - 1
    assert steps["long-both/b8/freekv/40960"] == ("long-both", 8, "freekv", 40960)


def test_a_result_under_another_load_is_measured_again():
    options = SimpleNamespace(batches=[8], force=False)
    there = {"settings": {}, "corrected": 0.13, "missed": 0.21}
    recalls = there | {"bytes": {"link": 1.0}}
    keys = ["long-input/b8/window/32768", "long-input/b8/freekv/32768", "long-input/b8/arkvale/32768"]
    now = dict(zip(("corrected", "missed"), latency.SCENARIOS["long-input"].load(32768)))
    results = dict(zip(keys, (there | {"bytes": {"link": 0.0}}, recalls, recalls | now)))
    _, steps = latency.left_of(options, lambda key: key in keys, results)
    assert list(steps) == keys[1:2]


def test_the_ablation_takes_pools_once_for_all_that_share_them(tmp_path):
    options = SimpleNamespace(budget=64, page_size=8, host_tokens=2048, repeats=1, batches=[1], contexts=[512], corrected=0.13, missed=0.21)
    vars(options).update(device="cpu", minutes=5, force=False, scale=1)
    report = Report("ablation", tmp_path)
    with mock.patch.object(ablation, "Pools", side_effect=Pools) as taken:
        ablation.measure(TINY, options, lambda key: True, report)
    assert not report.failures and len(report.results) == len(ablation.SYSTEMS) and taken.call_count == 4


def test_the_ablation_stacks_one_part_on_the_other():
    parts = [sum(vars(system).values()) for name, system in ablation.SYSTEMS.items() if name == "base" or name.startswith("+")]
    assert parts == list(range(8)) and all(sum(vars(ablation.SYSTEMS[f"-{name}"]).values()) == 5 for name in ablation.LEFT_OUT)
    assert not ablation.SYSTEMS["base"].asks and ablation.SYSTEMS["+speculation"].asks and not ablation.SYSTEMS["+device_side"].asks
    assert all(sum(vars(ablation.SYSTEMS[f"only-{name}"]).values()) == 1 for name in ablation.ALONE)
    assert all(system.device_side or not system.graph for system in ablation.SYSTEMS.values()), "a captured step asks the host"
