"""Any setting of the options is a sound config, or refused in one line that says what to use."""

from __future__ import annotations

import contextlib
import io
import re
from argparse import ArgumentParser
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_freekv.config import (
    CANARIES,
    DEFAULT_PAGE_SIZE,
    DIGESTS,
    HOST_LAYOUTS,
    KV_DTYPES,
    MOST_SLOTS,
    POOLINGS,
    RECALLS,
    SELECTIONS,
    SGLANG_FP8,
    STORED_DTYPES,
    FreeKVConfig,
    Refusal,
    typed,
)
from sglang_freekv.methods import METHODS
from sglang_freekv.options import FLAGS, NAMES, Options, config_from, with_kv_cache_dtype
from sglang_freekv.presets import DEFAULT_PRESET, PRESETS
from sglang_freekv.scheduler_patch.arguments import add_cli_args

whole = st.integers(-64, 9000) | st.integers(-4, 300).map(lambda pages: pages * DEFAULT_PAGE_SIZE) | st.integers()
words = st.text(st.characters(exclude_categories=("C", "Zl", "Zp")), max_size=6)
numbers = st.floats() | st.sampled_from((-1.0, 0.9, 8.0))
anything = whole | numbers | words | st.booleans() | st.lists(whole | words, max_size=3)
page_sizes = st.sampled_from((None, 1, 4, 8, 32, 64)) | whole
methods = st.sampled_from(list(METHODS))
typed_options = st.fixed_dictionaries({}, optional={
    "freekv_budget": whole, "freekv_sink": whole, "freekv_window": whole, "freekv_tau": numbers | whole, "freekv_device_cache": whole,
    "freekv_dense_below": whole, "freekv_resident_memory": numbers | whole,
    "freekv_dense_layers": st.lists(st.integers(-1, 90), max_size=3) | words, "freekv_host_memory": numbers | whole,
    "freekv_recall": st.sampled_from(RECALLS), "freekv_host_layout": st.sampled_from(HOST_LAYOUTS),
    "freekv_canary": st.sampled_from(list(CANARIES)), "freekv_digest": st.sampled_from(DIGESTS),
    "freekv_pooling": st.sampled_from(POOLINGS), "freekv_recall_timing": whole, "freekv_preset": st.sampled_from(list(PRESETS)),
    "freekv_hysteresis": numbers | whole, "freekv_selection": st.sampled_from(SELECTIONS),
    "freekv_tau_by_layer": words, "freekv_kv_dtype": st.sampled_from(KV_DTYPES),
})  # fmt: skip
OPTIONS = NAMES[1:]


def refused(make) -> str | None:
    """What ``make`` was refused with, in the form that every refusal has; None if it gave a config, which is sound."""
    try:
        config = make()
    except Refusal as refusal:
        message = str(refusal)
        assert len(message.splitlines()) == 1 and re.match(r"--(freekv-[a-z-]+|page-size|kv-retrieval) ", message)
        assert ": expected " in message and re.search(r"; (use|leave it out)\b", message)
        return message
    pages, size = config.pages, config.page_size
    assert size >= 1 and pages.sink >= 0 and pages.selected >= 1 and pages.window >= 2
    assert config.budget_tokens == pages.total * size > config.sink_tokens + config.window_tokens
    assert (config.sink_tokens, config.window_tokens) == (pages.sink * size, pages.window * size)
    assert config.cache_tokens == config.cache_pages * size >= config.budget_tokens
    assert (config.tau is None) == (METHODS[config.method].tau is None) and config.tau == config.tau
    assert config.host_memory_gib is None or config.host_memory_gib > 0
    assert config.dense_below_tokens % size == 0 and config.attended_pages == max(pages.total, config.dense_below_tokens // size)
    assert config.attended_pages <= (config.cache_pages if config.resident_memory_gib == 0 else MOST_SLOTS)
    assert all(layer >= 0 for layer in config.dense_layers) and config.recall in RECALLS and config.host_layout in HOST_LAYOUTS
    assert 0 <= config.hysteresis <= 10 and config.selection in SELECTIONS and config.selects_on_turn <= (config.method == "freekv")
    assert config.kv_dtype == "auto" or config.is_coded
    assert not config.has_scales or (config.kv_dtype, config.recall, config.host_layout) == ("int8", "zero-copy", "hnd")
    assert 0 <= config.recall_timing < 2**31 and config.canary in CANARIES and config.digest in DIGESTS and config.pooling in POOLINGS
    return None


@given(
    values=st.fixed_dictionaries({}, optional={
        "method": methods | words, "budget_tokens": whole, "sink_tokens": whole, "window_tokens": whole, "tau": st.none() | numbers,
        "page_size": page_sizes.map(lambda size: DEFAULT_PAGE_SIZE if size is None else size), "digest": st.none() | st.sampled_from(DIGESTS) | words,
        "pooling": st.none() | st.sampled_from(POOLINGS) | words,
        "device_cache_tokens": st.none() | whole, "dense_below_tokens": whole, "dense_layers": st.lists(whole, max_size=3).map(tuple),
        "host_memory_gib": st.none() | numbers, "resident_memory_gib": st.none() | numbers, "recall": st.sampled_from(RECALLS) | words,
        "host_layout": st.sampled_from(HOST_LAYOUTS) | words, "canary": st.sampled_from(list(CANARIES)) | words,
        "recall_timing": whole, "preset": st.none() | st.sampled_from(list(PRESETS)) | words, "hysteresis": numbers,
        "selection": st.sampled_from(SELECTIONS) | words, "kv_dtype": st.sampled_from(STORED_DTYPES) | words,
    })
)  # fmt: skip
@settings(max_examples=500)
def test_a_config_is_sound_or_refused(values):
    refused(lambda: FreeKVConfig(**values))


@given(methods | anything, st.dictionaries(st.sampled_from(OPTIONS), anything), page_sizes)
@settings(max_examples=500)
def test_options_of_any_type_are_taken_or_refused(method, values, page_size):
    refused(lambda: config_from(Options(kv_retrieval=method, **values), page_size))


@given(methods, st.dictionaries(st.sampled_from(OPTIONS), anything) | typed_options)
@settings(max_examples=500)
def test_a_command_line_is_taken_or_refused(method, values):
    parser = ArgumentParser()
    add_cli_args(None, parser)
    texts = {name: ",".join(map(str, value)) if isinstance(value, list) else str(value) for name, value in values.items()}
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            parsed = parser.parse_args([f"--kv-retrieval={method}", *(f"{typed(name)}={text}" for name, text in texts.items())])
        except SystemExit as exit:
            assert exit.code == 2 and re.search(r"error: argument --freekv-[a-z-]+: invalid ", said.getvalue())
            return
    refused(lambda: config_from(Options(**vars(parsed)), DEFAULT_PAGE_SIZE))


@given(methods, typed_options, page_sizes)
@settings(max_examples=500)
def test_who_does_what_a_refusal_says_is_served(method, values, page_size):
    options = Options(kv_retrieval=method, **values)
    for _ in range(len(OPTIONS) + 1):
        message = refused(lambda: config_from(options, page_size))
        if message is None:
            return
        advice = re.search(r"; use (?:for example )?(--[a-z-]+) (\d+)", message)
        flag, value = (advice[1], int(advice[2])) if advice else (message.split()[0], None)  # left out
        if flag == "--page-size":
            page_size = value
        else:
            options = options.but(**{flag[2:].replace("-", "_"): value})
    pytest.fail(f"still refused: {message}")


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"freekv_digest": "two-bit"},
        {"freekv_preset": "fast"},
        {"freekv_preset": "fast", "freekv_digest": "two-bit"},
        {"freekv_preset": "fast", "freekv_budget": 2020},
        {"freekv_budget": 1536, "freekv_sink": 96},
        {"freekv_device_cache": 6000, "freekv_budget": 2000},
    ],
    ids=str,
)
def test_the_page_size_that_is_advised_is_the_nearest_that_works(values):
    options = Options(kv_retrieval="freekv", **values)
    usual = PRESETS[values.get("freekv_preset", DEFAULT_PRESET)].page_size
    messages = {size: refused(lambda: config_from(options, size)) for size in range(2, 2049) if size != usual}
    works = [size for size, message in messages.items() if message is None]
    works += [usual] * (refused(lambda: config_from(options, usual)) is None)
    for size, message in messages.items():
        if message is not None:
            assert message.startswith(f"--page-size {size}: expected one that suits the other sizes (")
            advised, boxes = re.fullmatch(r".*; use --page-size (\d+)(, or --freekv-digest cuboid-mean beside it)?", message).groups()
            assert int(advised) in works and abs(int(advised) - size) == min(abs(other - size) for other in works)
            with_boxes = refused(lambda: config_from(options.but(freekv_digest="cuboid-mean"), size))
            assert bool(boxes) == (with_boxes is None and "freekv_digest" not in values)


def test_boxes_are_no_remedy_for_pages_of_one_token():
    """A server refuses these with any digest."""
    assert (refused(lambda: config_from(Options(kv_retrieval="freekv"), 1)) or "").endswith("; use --page-size 8")


def test_a_remedy_that_changes_pages_comes_before_sizes_in_pages():
    """Else a user makes all sizes whole pages twice."""
    assert (refused(lambda: FreeKVConfig(page_size=12, budget_tokens=851, digest="two-bit")) or "").startswith("--freekv-digest two-bit: ")


def test_the_remedy_for_a_length_fits_the_slots_that_it_needs():
    message = refused(lambda: FreeKVConfig(dense_below_tokens=1500, budget_tokens=512, page_size=32, resident_memory_gib=0)) or ""
    assert message.startswith("--freekv-dense-below 1500: expected a non-negative multiple") and message.endswith(
        "use --freekv-dense-below 512"
    )


@pytest.mark.parametrize("method", [name for name, defaults in METHODS.items() if defaults.tau is None])
@pytest.mark.parametrize("tau", [0.8, 2, float("nan")])
def test_a_threshold_for_a_method_that_has_none_is_refused(method, tau):
    message = refused(lambda: config_from(Options(kv_retrieval=method, freekv_tau=tau), DEFAULT_PAGE_SIZE))
    assert message.startswith(f"--freekv-tau {tau:g}: expected none with --kv-retrieval {method}, ")
    assert message.endswith("; leave it out, or use --kv-retrieval freekv")


@pytest.mark.parametrize("option", ["freekv_budget", "freekv_device_cache", "freekv_tau", "freekv_host_memory"])
@pytest.mark.parametrize("number", [10**400 + 1, DEFAULT_PAGE_SIZE * 10**400], ids=["odd", "whole pages"])
def test_numbers_that_no_float_holds_are_refused(option, number):
    message = refused(lambda: config_from(Options(kv_retrieval="freekv", **{option: number}), DEFAULT_PAGE_SIZE))
    assert message or option == "freekv_tau"


@pytest.mark.parametrize("option", ["freekv_budget", "freekv_device_cache", "freekv_dense_below"])
@pytest.mark.parametrize("preset", PRESETS)
def test_more_slots_than_the_plan_counts_are_refused(option, preset):
    page = PRESETS[preset].page_size
    most, asked = MOST_SLOTS * page, Options(kv_retrieval="freekv", freekv_preset=preset)
    assert refused(lambda: config_from(asked.but(**{option: most}), None)) is None
    message = refused(lambda: config_from(asked.but(**{option: most + page}), None))
    assert message.startswith(f"{typed(option)} {most + page}: expected at most 32767 pages") and f"use {typed(option)} {most}" in message


@pytest.mark.parametrize("option", ["freekv_budget", "freekv_tau", "freekv_recall", "freekv_dense_layers"])
def test_a_value_of_several_lines_is_refused_in_one(option):
    assert refused(lambda: config_from(Options(kv_retrieval="freekv", **{option: "1\nx"}), DEFAULT_PAGE_SIZE))


@pytest.mark.parametrize("name, flag", FLAGS.items())
def test_a_scalar_of_numpy_is_the_number_that_it_is(name, flag):
    number = {"dense_layers": np.int64(1), "tau": np.float32(0.5), "hysteresis": np.float16(0.5)}.get(flag.setting)
    for scalar in (np.int32(64), np.int64(4096)) if number is None else (number,):
        given = Options(**{"kv_retrieval": "freekv", name: scalar})
        plain = Options(**{"kv_retrieval": "freekv", name: scalar.item()})
        outcomes = []
        for options in (given, plain):
            try:
                outcomes.append(repr(config_from(options, DEFAULT_PAGE_SIZE)))
            except Refusal as refusal:
                outcomes.append(re.sub(r"found type \w+", "", str(refusal)))
        assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("name, value", [("freekv_recall", "copy-engine"), ("freekv_host_layout", "nhd")])
def test_codes_are_refused_where_their_scales_would_be_lost(name, value):
    asked = Options(kv_retrieval="freekv", freekv_kv_dtype="int8")
    assert config_from(asked, None).is_coded
    message = refused(lambda: config_from(asked.but(**{name: value}), None)) or ""
    served = {"freekv_recall": "zero-copy", "freekv_host_layout": "hnd"}[name]
    assert message.startswith(f"--freekv-kv-dtype int8: expected {typed(name)} {served}, ") and f"but it is {value}; " in message
    assert message.endswith(f"; use {typed(name)} {served}, or leave --freekv-kv-dtype out")
    assert refused(lambda: config_from(asked.but(**{name: value, "freekv_kv_dtype": "auto"}), None)) is None


@pytest.mark.parametrize("dtype", SGLANG_FP8)
def test_floats_of_8_bits_come_from_the_flag_of_sglang_and_go_with_every_mover(dtype):
    asked = Options(kv_retrieval="freekv", freekv_recall="copy-engine", freekv_host_layout="nhd")
    config = config_from(asked, None)
    assert with_kv_cache_dtype(config, dtype) == replace(config, kv_dtype=dtype) and not replace(config, kv_dtype=dtype).has_scales
    assert all(with_kv_cache_dtype(config, other) is config for other in ("auto", "bf16", None))
    assert refused(lambda: config_from(asked.but(freekv_kv_dtype=dtype), None)) == (
        f"--freekv-kv-dtype {dtype}: expected one of auto, int8; use --kv-cache-dtype {dtype}, which is SGLang's"
    )
    codes = config_from(Options(kv_retrieval="freekv", freekv_kv_dtype="int8"), None)
    assert with_kv_cache_dtype(codes, "auto") is codes
    with pytest.raises(Refusal, match=f"^--freekv-kv-dtype int8: expected auto with --kv-cache-dtype {dtype}, .*; leave one of them out$"):
        with_kv_cache_dtype(codes, dtype)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "value",
    [np.array([1, 2]), np.array(["fast", "paper"]), np.bool_(True), 10**5000, "x" * 5000, [10**5000]],
    ids=lambda v: type(v).__name__,
)
def test_values_that_cannot_be_compared_or_printed_are_refused_in_a_short_line(name, value):
    message = refused(lambda: config_from(Options(**{"kv_retrieval": "freekv", name: value}), DEFAULT_PAGE_SIZE))
    assert message is not None and message.startswith(f"{typed(name)} ") and len(message) < 700


@pytest.mark.parametrize("name", ["freekv_tau", "freekv_resident_memory", "freekv_hysteresis"])
@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
def test_numbers_that_are_not_finite_are_refused(name, number):
    assert refused(lambda: config_from(Options(kv_retrieval="freekv", **{name: number}), DEFAULT_PAGE_SIZE))
