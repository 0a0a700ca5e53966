"""Tiny random-weight models of other families: as stock SGLang and as the oracle, within the budget (which is dense) and beyond it."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import engines
from families import FAMILIES, HYBRIDS, SINKS, VOCABULARY, WINDOWED, make_model
from likeness import assert_same_but_for_ties
from oracle import Oracle, OracleSettings
from room import wait_for_room
from sglang_freekv import releases
from sglang_freekv.architectures import TESTED_ARCHITECTURES, TESTED_WITH_IMAGES, TESTED_WITH_WINDOWS

pytestmark = [pytest.mark.both_releases, pytest.mark.two_servers]

NEW_TOKENS = 16
LENGTHS = 16, 77, 200, 230, 500, 901
WITHIN = 4  # so many of them fit the budget with their answers
SETTINGS = OracleSettings(budget=256, sink=64, window=64, tau=0.8, page=32)
ENGINE = dict(device="cpu", dtype="float32", skip_tokenizer_init=True, max_total_tokens=8192, max_running_requests=8, random_seed=0)
IS_NEW = releases.has("tree paths")
OLD = {name: (FAMILIES | SINKS)[name] for name in ("qwen2", "qwen3-moe", "gpt-oss")}  # dense, with experts, and with windows and sinks
SERVED = FAMILIES | HYBRIDS | WINDOWED if IS_NEW else OLD
CODED = [name for name in ("phi-4-mini", "qwen3.5", "granite-swa") if name in SERVED]  # are served with KV in 8 bits, too
FLOATS = [name for name in ("qwen2", "qwen3.5", "granite-swa") if name in SERVED]  # and in floats of 8 bits, over a checkpoint's scales
TIE, LEAST_COMPARED = 0.002, 0.8  # between the logits of two tokens, which deviate by 3; and the least share of tokens that is compared
KV_SCALES = 0.3, 0.7  # of keys and of values; learned sinks and softmaxes would tell a wrong factor
STOCK = dict(attention_backend="torch_native")
STOCK_WITH_SINKS = dict(moe_runner_backend="triton")  # the same attention by default; SGLang refuses gpt-oss if it is named
OURS = dict(
    kv_retrieval="freekv", freekv_preset="fast", freekv_budget=SETTINGS.budget, freekv_sink=SETTINGS.sink, freekv_window=SETTINGS.window,
    freekv_tau=SETTINGS.tau, freekv_resident_memory=0,
)  # fmt: skip


@pytest.mark.skipif(not IS_NEW, reason="transformers of older releases does not know all of these models")
def test_the_architectures_that_are_called_tested_are_these():
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | {"olmo3": "Olmo2ForCausalLM"}  # SGLang has one class for OLMo 2 and 3
    every, windowed = ({names[family.kind] for family in families.values()} for families in (FAMILIES | HYBRIDS | WINDOWED, WINDOWED))
    assert every == TESTED_ARCHITECTURES - TESTED_WITH_IMAGES and windowed == TESTED_WITH_WINDOWS - TESTED_WITH_IMAGES


def prompts_of(name: str) -> list[list[int]]:
    draw = random.Random(name)
    return [draw.choices(range(VOCABULARY), k=length) for length in LENGTHS]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("families")
    for name, family in SERVED.items():
        make_model(family, directory / name)
    return directory


@pytest.fixture(scope="module")
def answers(models) -> dict[str, list[dict]]:
    """``stock-NAME``, ``ours-NAME``, ``coded-NAME`` and ``floats-NAME`` -> the answers to all prompts.

    Stock SGLang is asked on the newest release alone, where its tokens are the oracle's: those of an older one are compared with these.
    """
    jobs = {}
    for name in SERVED:
        job = {"prompts": prompts_of(name), "new_tokens": NEW_TOKENS, "has_states": name in HYBRIDS, "has_sinks": name in SINKS}
        stock = STOCK_WITH_SINKS if name in SINKS else STOCK
        few = {"max_mamba_cache_size": 40} if name in HYBRIDS else {}  # else stock SGLang takes half of the memory for states
        coded = [("coded", OURS | {"freekv_kv_dtype": "int8"})] if name in CODED else []
        for whose, settings in (*([("stock", stock | few)] if IS_NEW else []), ("ours", OURS), *coded):
            jobs[f"{whose}-{name}"] = job | {"engine": ENGINE | settings | {"model_path": str(models / name)}}
        if name in FLOATS:
            engine = ENGINE | OURS | {"kv_cache_dtype": "fp8_e4m3", "model_path": str(models / name)}
            jobs[f"floats-{name}"] = job | {"engine": engine, "kv_scales": KV_SCALES}
    wait_for_room(1)
    return engines.run_all(jobs, models)


@pytest.mark.parametrize("name", SERVED)
def test_same_tokens_as_stock_and_as_the_oracle(models, answers, name):
    oracle, prompts = Oracle(models / name), prompts_of(name)
    dense, retrieved = ([oracle.generate(prompt, NEW_TOKENS, settings) for prompt in prompts] for settings in (None, SETTINGS))
    ours, stock = ([answer["output_ids"] for answer in answers[f"ours-{name}"]], [result.tokens for result in dense])
    if IS_NEW:
        assert [answer["output_ids"] for answer in answers[f"stock-{name}"]] == stock
    assert ours == [result.tokens for result in retrieved]
    assert ours[:WITHIN] == stock[:WITHIN]
    assert ours[WITHIN:] != stock[WITHIN:]  # else selecting other pages would pass, too
    counts = [answer["meta_info"]["freekv"] for answer in answers[f"ours-{name}"]]
    corrected = [sum(flag for step in result.corrected for layer in step for flag in layer) for result in retrieved]
    assert [each["corrections"] for each in counts] == corrected
    recalled = [each["recalled_units"] for each in counts]
    assert not any(recalled[:WITHIN]) and all(recalled[WITHIN:])


@pytest.mark.parametrize("name", CODED)
def test_tokens_of_coded_kv_are_the_oracle_s(models, answers, name):
    """Beside states and windows, too. A mixture of experts may turn a code that is rounded otherwise into other tokens; these are none."""
    oracle, prompts, settings = Oracle(models / name), prompts_of(name), replace(SETTINGS, int8=True)
    coded, plain = ([answer["output_ids"] for answer in answers[f"{whose}-{name}"]] for whose in ("coded", "ours"))
    assert_same_but_for_ties(coded, [oracle.generate(prompt, NEW_TOKENS, settings) for prompt in prompts], TIE, LEAST_COMPARED)
    assert coded != plain  # else KV as it is would pass, too


@pytest.mark.parametrize("name", FLOATS)
def test_tokens_of_kv_in_floats_of_8_bits_are_the_oracle_s(models, answers, name):
    """Beside states, windows and learned sinks, too. Window layers leave scales out, as SGLang does on a CPU."""
    oracle, prompts, settings = Oracle(models / name), prompts_of(name), replace(SETTINGS, fp8=True, kv_scales=KV_SCALES)
    floats, plain = ([answer["output_ids"] for answer in answers[f"{whose}-{name}"]] for whose in ("floats", "ours"))
    assert_same_but_for_ties(floats, [oracle.generate(prompt, NEW_TOKENS, settings) for prompt in prompts], TIE, LEAST_COMPARED)
    assert floats != plain  # else KV as it is would pass, too


def test_two_ranks_have_windows_and_sinks_of_their_own(models, tmp_path):
    name, cores = "gpt-oss", sorted(os.sched_getaffinity(0))
    engine = ENGINE | OURS | {"model_path": str(models / name), "tp_size": 2}
    threads = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cores[rank % len(cores)]) for rank in range(2))}
    wait_for_room(2)
    job = {"prompts": prompts_of(name), "new_tokens": NEW_TOKENS, "engine": engine}
    answers = engines.run_all({"two-ranks": job}, tmp_path, threads)["two-ranks"]
    oracle = Oracle(models / name)
    assert [each["output_ids"] for each in answers] == [oracle.generate(each, NEW_TOKENS, SETTINGS).tokens for each in prompts_of(name)]
