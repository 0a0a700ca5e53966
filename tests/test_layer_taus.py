"""Thresholds by layer: read from a file, refused if they are not this model's, and those of the right layer in the engine."""

from __future__ import annotations

import json
import os
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from made_up import LLAMA
from sglang_freekv import kernels
from sglang_freekv.config import FreeKVConfig, Refusal
from sglang_freekv.kv_pool import FreeKVPool
from sglang_freekv.layer_taus import LayerTaus
from sglang_freekv.layers import LayerTable
from sglang_freekv.memory_pool.kv_format import KVFormat
from sglang_freekv.memory_pool.sizing import KVShape
from sglang_freekv.methods import METHODS
from sglang_freekv.options import Options, config_from
from sglang_freekv.policy import POLICIES
from sglang_freekv.scheduler_patch import pools

MODEL = "LlamaForCausalLM"
TAUS = (None, 0.5, 0.8, 0.9)


@pytest.fixture
def file(tmp_path):
    """Writes a file of thresholds."""

    def write(held) -> str:
        path = tmp_path / "tau.json"
        path.write_text(held if isinstance(held, str) else json.dumps(held))
        return str(path)

    return write


def refused(make) -> str:
    with pytest.raises(Refusal, match=r"^--freekv-tau-by-layer .*: expected .*; (use|leave|copy) ") as caught:
        make()
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def made(file: str, method: str = "freekv", **given) -> FreeKVConfig:
    return config_from(Options(kv_retrieval=method, freekv_tau_by_layer=file, **given), None)


def test_a_file_is_read(file):
    path = file({"model": MODEL, "tau": [None, 0.5, 0.8, 1], "made": "by hand"})
    config = made(path)
    assert config.tau_by_layer == LayerTaus(path, MODEL, (None, 0.5, 0.8, 1.0)) and "tau" not in config.preset_set


@pytest.mark.parametrize(
    "held, found",
    [
        ("", "none that can be read"), ("{", "none that can be read"), ("[" * 100_000, "none that can be read"), ("[]", "found []"),
        ({"tau": []}, "found {'tau': []}"), ({"model": MODEL}, "found {'model'"), ({"model": 1, "tau": []}, "found model 1 and tau []"),
        ({"model": MODEL, "tau": {"1": 0.5}}, "and tau {'1': 0.5}"), ({"model": MODEL, "tau": [0.5, True]}, "for layer 1, found True"),
        ({"model": MODEL, "tau": [0.5, "0.8"]}, "for layer 1, found 0.8"), ('{"model": "x", "tau": [NaN]}', "for layer 0, found nan"),
        ('{"model": "x", "tau": [1e999]}', "for layer 0, found inf"), (f'{{"model": "x", "tau": [1{"0" * 400}]}}', "for layer 0, found 1000"),
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_other_files_are_refused(file, held, found):
    assert found in refused(lambda: made(file(held)))


@pytest.mark.parametrize("value", ["nowhere.json", "a\0b", ".", 3, ["tau.json"], b"tau.json"], ids=repr)
def test_what_is_no_file_is_refused(value):
    refused(lambda: made(value))


@pytest.mark.parametrize(
    "value", ["a\nb.json", "\udcff.json", "x" * 5000, [[]] * 5000, 10**5000], ids=["lines", "bytes", "long", "list", "digits"]
)
def test_names_that_no_line_can_tell_are_refused_in_one(value):
    assert len(refused(lambda: made(value))) < 700


class NamedInBytes:
    def __fspath__(self) -> bytes:
        return b"tau.json"


def test_a_path_in_bytes_is_refused():
    assert "expected the name of a file" in refused(lambda: made(NamedInBytes()))


def test_a_device_or_a_pipe_is_refused_before_it_is_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # to open it would wait for a writer, and /dev/zero has no end
    for name in (str(tmp_path / "pipe"), "/dev/zero", "/dev/null"):
        assert "none that can be read (neither a pipe nor a device is read)" in refused(lambda: made(name))


def test_a_file_without_end_is_refused(tmp_path):
    path = tmp_path / "huge.json"
    path.write_text(json.dumps({"model": MODEL, "tau": [0.5]}))
    os.truncate(path, 1 << 40)  # sparse; to read it whole would take a tebibyte
    assert "(at most 1048576 bytes are read)" in refused(lambda: made(str(path)))


def test_a_file_by_a_relative_name_is_that_of_the_working_directory(file, monkeypatch, tmp_path):
    file({"model": MODEL, "tau": [0.5]})
    assert "No such file or directory" in refused(lambda: made("tau.json"))
    monkeypatch.chdir(tmp_path)
    config = made("tau.json")
    (tmp_path / "tau.json").unlink()  # the config has its thresholds
    assert config.tau_by_layer.taus == (0.5,)


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=4),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(("model", "tau", "x")), inner)))  # fmt: skip
def test_any_json_is_taken_or_refused(held):
    try:
        taus = LayerTaus.of("tau.json", held)
    except Refusal as refusal:
        assert re.match(r"--freekv-tau-by-layer tau.json: expected .*; use ", str(refusal)) and len(str(refusal).splitlines()) == 1
    else:
        assert taus.model == held["model"] and all(tau is None or -1e999 < tau < 1e999 for tau in taus.taus)


@pytest.mark.parametrize(
    "architecture, layers, retrieval, said",
    [
        (MODEL, 4, (1, 2, 3), None),
        (MODEL, 4, (2, 3), None),
        (MODEL, 5, (1, 2, 3, 4), f"expected thresholds for {MODEL} with 5 layers, found those for {MODEL} with 4; use the file of"),
        ("Qwen3ForCausalLM", 4, (1, 2, 3), f"expected thresholds for Qwen3ForCausalLM with 4 layers, found those for {MODEL} with 4"),
        (MODEL, 4, (0, 1, 2, 3), "expected a threshold for layer 0, found null; use a file that has one, or add the layer to"),
    ],
)
def test_a_file_of_another_model_is_refused(architecture, layers, retrieval, said):
    taus = LayerTaus("tau.json", MODEL, TAUS)
    if said is None:
        taus.expect_model(architecture, layers, retrieval)
    else:
        assert said in refused(lambda: taus.expect_model(architecture, layers, retrieval))


def test_only_layers_that_attend_to_the_whole_context_have_thresholds():
    """Else a retrieval layer would get the one of a layer with linear attention, for thresholds are counted off."""
    LayerTaus("tau.json", MODEL, (None, None, None, 0.5)).expect_model(MODEL, 4, [3], [3])
    said = refused(lambda: LayerTaus("tau.json", MODEL, (None, 0.8, None, 0.5)).expect_model(MODEL, 4, [3], [3]))
    assert said.startswith(
        "--freekv-tau-by-layer tau.json: expected null for layer 1, which does not attend to the whole context, found 0.8"
    )


def test_one_threshold_and_one_by_layer_are_refused_together(file):
    path = file({"model": MODEL, "tau": [0.5]})
    with pytest.raises(Refusal, match=r"^--freekv-tau 0.8: expected none beside --freekv-tau-by-layer, which .*; leave it out$"):
        made(path, freekv_tau=0.8)
    for method in (name for name, each in METHODS.items() if each.tau is None):
        assert f"expected none with --kv-retrieval {method}" in refused(lambda: made(path, method))


@pytest.mark.parametrize("method", [name for name, each in METHODS.items() if each.tau is not None])
@pytest.mark.parametrize("dense, expected", [((0,), (0.5, 0.8, 0.9)), ((0, 2), (0.5, 0.9))])
def test_each_layer_is_compared_with_its_own(method, dense, expected):
    config = FreeKVConfig(method, tau_by_layer=LayerTaus("tau.json", MODEL, TAUS), dense_layers=dense)
    policy = POLICIES[method](config)
    assert policy.tau == expected
    turned = torch.tensor([[0.6, 0.8, 0.0]])  # a cosine of 0.6 with the last query
    rows, last = torch.tensor([1]), torch.tensor([[1.0, 0.0, 0.0]])
    for layer, tau in enumerate(expected):
        previous, counts = torch.stack([last, last]), torch.zeros(2, 3, dtype=torch.int64)
        assert policy.corrected(layer, turned[None], rows, previous, counts, 1).tolist() == [[tau > 0.6]]
        assert counts[1, kernels.CORRECTED] == (tau > 0.6)


def test_the_pool_tells_thresholds_by_layer():
    config = FreeKVConfig(tau_by_layer=LayerTaus("tau.json", MODEL, TAUS), budget_tokens=64, sink_tokens=16, window_tokens=16, page_size=8)
    pool = FreeKVPool(config, KVShape(LayerTable.uniform(3, dense=1), 2, 4, 16, (2, 16), KVFormat.plain(torch.float32)), 256, 2, 128, "cpu")
    assert (pool.describe()["tau"], pool.describe()["tau_by_layer"]) == ([0.5, 0.8, 0.9], "tau.json")
    assert ", tau 0.5 to 0.9 by layer (tau.json), " in pool.activation_line()


def test_the_doctor_checks_the_file_and_carries_it(ask, file):
    base = ("--model-path", LLAMA, "--gpu", "H100", "--host-memory", 512, "--context-length", 32768, "--requests", 2)
    path = file({"model": MODEL, "tau": [None] + [0.8] * 31})
    assert ask(None, *base, "--freekv-tau-by-layer", path).flag("--freekv-tau-by-layer") == path
    answer = ask(None, *base, "--freekv-tau-by-layer", file({"model": MODEL, "tau": [None] + [0.8] * 30}))
    assert answer.code == 2 and f"expected thresholds for {MODEL} with 32 layers, found those for {MODEL} with 31" in answer.err


@pytest.mark.parametrize("others", [None, (0.5, 0.8)], ids=["without a file", "with another file"])
def test_ranks_with_other_thresholds_all_refuse(monkeypatch, others):
    """Each rank sees the same two checksums, so no rank goes on alone."""
    configs = [FreeKVConfig(tau_by_layer=LayerTaus("tau.json", MODEL, (None, 0.5)))]
    configs.append(FreeKVConfig(tau_by_layer=others and LayerTaus("tau.json", MODEL, others)))
    asked: list[list[int]] = []
    monkeypatch.setattr(pools, "_agree", lambda value: asked[-1].append(value) or value)
    for config in (*configs, configs[0]):
        asked.append([])
        pools.expect_one_file(config)
    least = [min(one, other) for one, other in zip(*asked[:2])]
    for config in configs:
        answers = iter(least)
        monkeypatch.setattr(pools, "_agree", lambda value: next(answers))
        assert "expected the same thresholds on all ranks, found those with checksums " in refused(lambda: pools.expect_one_file(config))
    assert asked[0] == asked[2]
