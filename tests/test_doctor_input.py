"""Whatever the doctor is given: one line and exit status 2, soon, and never a traceback."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from made_up import CONFIG, LLAMA, FakeGpu, model_file
from sglang_freekv.launch import doctor, server_flags

SOON_S = 5
LONG = "9" * 5000
BAD_CONFIGS = {  # what the file holds, and what is said of it
    "{": "found it broken",
    "[]": "expected architectures, a list of names, found none",
    "{}": "expected architectures, a list of names, found none",
    '{"architectures": [7]}': "expected architectures, a list of names, found none",
    json.dumps(CONFIG | {"model_type": 7}): "expected model_type, a name",
    "[" * 100_000: "nested too deep",
    '{"a":' * 100_000: "nested too deep",
    '{"architectures": ["A"], "x": %s}' % LONG: "found a longer one",
    '{"architectures": ["A"], "num_hidden_layers": %s}' % LONG[:400]: "expected num_hidden_layers of at most 4096, found a longer one",
    json.dumps(CONFIG | {"num_hidden_layers": 10**9}): "expected num_hidden_layers of at most 4096, found 1000000000",
    '{"architectures": ["A"], "x": NaN}': "expected x of at most",
    json.dumps(CONFIG | {"num_hidden_layers": "many"}): 'expected num_hidden_layers, a whole number, found "many"',
    json.dumps(CONFIG | {"text_config": {"hidden_size": 0.5}}): "expected hidden_size, a whole number, found 0.5",
    json.dumps(CONFIG | {"rope_scaling": 8}): "expected rope_scaling, an object, found 8",
    json.dumps(CONFIG | {"num_key_value_heads": -2}): "expected num_key_value_heads, a whole number, found -2",
}
BAD_BY_MEANING = {  # found by transformers or SGLang
    "num_hidden_layers": (None, "many", 1.5, -1, 0, [2], {}),
    "num_attention_heads": (None, "many", 0, -4, 7),
    "num_key_value_heads": ("two", -2, [1]),
    "hidden_size": (None, "wide", 0, -1, 2**50),
    "vocab_size": (None, "all", -1),
    "head_dim": ("x", -1, 2**40),
    "rope_scaling": (8, "yarn", {"factor": "8"}),
    "max_position_embeddings": ("long", -5, [1]),
    "model_type": ("no-such-type",),
    "quantization_config": (7, "fp8", {"quant_method": "no-such-method"}, {"quant_method": 7}, []),
    "architectures": (["NoSuchModel"],),
    "torch_dtype": ("int4", 7, {}),
}
BAD_OPTIONS = {
    ("--model-path", "nowhere"): "--model-path nowhere: expected a directory with config.json",
    ("--model-path", "org/not-in-the-cache"): "found No such file or directory; `hf download org/not-in-the-cache",
    ("--model-path", "x" * 100_000): "expected a directory with config.json",
    ("--context-length", "4096"): "--context-length 4096: expected --model-path beside it, found none",
    ("--model-path", LLAMA, "--context-length", "many"): "--context-length: expected a whole number, such as 8 or 128Ki, found 'many'; see --help",
    ("--model-path", LLAMA, "--context-length", "0"): "--context-length 0: expected a number 1 or more",
    ("--model-path", LLAMA, "--context-length", LONG[:400]): "--context-length of ",
    ("--model-path", LLAMA, "--requests", LONG): "--requests: expected a whole number, such as 8 or 128Ki, found '",
    ("--model-path", LLAMA, "--requests", "-1"): "--requests -1: expected a number 1 or more",
    ("--model-path", LLAMA, "--freekv-budget", "2001"): "--freekv-budget 2001: expected a non-negative multiple of --page-size 8",
    ("--model-path", LLAMA, "--freekv-budget", LONG[:400]): "--freekv-budget 999",
    ("--model-path", LLAMA, "--freekv-digest", "two-bit", "--page-size", "4"): "--freekv-digest two-bit: expected pages of a multiple",
    ("--model-path", LLAMA, "--freekv-host-memory", "inf"): "--freekv-host-memory inf: expected a number above 0",
    ("--model-path", LLAMA, "--dtype", "int4"): "argument --dtype: invalid choice: 'int4'",
    ("--model-path", LLAMA, "--kv-cache-dtype", "int4"): "argument --kv-cache-dtype: invalid choice: 'int4'",
    ("--model-path", LLAMA, "--link-gb-per-s", "inf"): "--link-gb-per-s inf: expected a number above 0",
    ("--model-path", LLAMA, "--link-gb-per-s", "nan"): "--link-gb-per-s nan: expected a number above 0",
    ("--model-path", LLAMA, "--mem-fraction-static", "1.5"): "--mem-fraction-static 1.5: expected a number above 0 and at most 1",
    ("--model-path", LLAMA, "--gpu", "H1000000000"): "--gpu H1000000000: expected a card (A10, ",
    ("--model-path", LLAMA, "--gpu", "-5"): "--gpu -5: expected a card",
    ("--model-path", LLAMA, "--host-memory", "1.8QiB"): "--host-memory 1.8QiB: expected GiB, or a size such as 1.8TiB",
    ("--model-path", LLAMA, "--json-model-override-args", "[]"): "--json-model-override-args: expected a JSON object",
    ("--model-path", LLAMA, "--json-model-override-args", "{" * 99): "--json-model-override-args: expected JSON, found it broken",
    ("--model-path", LLAMA, "--kv-retrieval", "none"): "--kv-retrieval none: expected a method",
    ("--no-such-flag",): "--no-such-flag: expected flags that the doctor knows, found another; leave it out",
}  # fmt: skip
BAD_WITH_THE_MODEL = {
    ("--context-length", "2047"): "--context-length 2047: expected at least --freekv-budget 2048",
    ("--context-length", "163841"): "--context-length 163841: expected at most the model's 163840",
    ("--tp-size", "3"): "--tp-size 3: expected a number that divides 32 query heads and 8 kv heads; use --tp-size 2",
    ("--page-size", "1", "--freekv-digest", "min-max"): "--page-size 1: a page of one token has nothing to summarise",
    ("--kv-cache-dtype", "mxfp8"): "--kv-cache-dtype mxfp8: FreeKV stores KV in the model's type or in 8 bits; use --kv-cache-dtype auto, ",
    ("--device", "cpu"): "--gpu 80: expected none with --device cpu, where nothing is on a GPU; leave one of them out",
    ("--chunked-prefill-size", "1001"): "--chunked-prefill-size 1001: expected a multiple of --page-size 8",
    ("--max-total-tokens", "24"): "--max-total-tokens 24: expected at least 32",
    (
        "--freekv-dense-layers",
        "32",
    ): "--freekv-dense-layers 32: expected layers of this model that attend to the whole context, which are 0 to 31",
    ("--device", "xpu"): "--device xpu: FreeKV runs on cuda and cpu",
}


def one_line(answer, expected: str) -> None:
    assert (answer.code, answer.report, answer.err.count("\n")) == (2, {}, 1), answer.err
    assert answer.err.startswith("error: ") and expected in answer.err


@pytest.mark.parametrize("flags", BAD_OPTIONS, ids=lambda flags: " ".join(map(str, flags[-2:]))[:50])
def test_a_bad_option_is_one_line(ask, flags):
    one_line(ask(FakeGpu(), *flags), f"{BAD_OPTIONS[flags]}")


@pytest.mark.parametrize("flags", BAD_WITH_THE_MODEL, ids=" ".join)
def test_an_option_that_does_not_go_with_the_model_is_one_line(ask, flags):
    one_line(ask(None, "--model-path", LLAMA, "--gpu", 80, *flags), BAD_WITH_THE_MODEL[flags])


def test_an_option_that_a_cpu_has_not_is_one_line(ask):
    flags = ("--model-path", LLAMA, "--device", "cpu", "--host-memory", 64)
    one_line(ask(None, *flags, "--kv-cache-dtype", "fp8_e5m2"), "--kv-cache-dtype fp8_e5m2: SGLang does not serve it with --device cpu")
    for name, value in (("--gpus", "2"), ("--link-gb-per-s", "50.0")):
        one_line(ask(None, *flags, name, value), f"{name} {value}: expected none with --device cpu, where nothing is on a GPU")


@pytest.mark.parametrize("text", BAD_CONFIGS, ids=lambda text: text[:30])
def test_a_bad_config_is_one_line(ask, tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    one_line(ask(None, "--model-path", tmp_path), BAD_CONFIGS[text])


def test_a_config_of_the_wrong_meaning_is_an_answer(ask, tmp_path):
    for key, values in BAD_BY_MEANING.items():
        for value in values:
            answer = ask(None, "--model-path", model_file(tmp_path, CONFIG | {"num_hidden_layers": 2, key: value}), "--gpu", 80)
            assert answer.code in (0, 1, 2), (key, value)
            if answer.code == 2:
                one_line(answer, "config.json: expected")
            elif key not in ("architectures", "torch_dtype", "quantization_config", "num_key_value_heads", "rope_scaling"):
                assert answer.code == 1, (key, value, answer.report)


def test_an_id_in_the_cache_is_found(ask, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--org--a-model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0123")
    (repository / "snapshots" / "0123").mkdir(parents=True)
    model_file(repository / "snapshots" / "0123", {"num_hidden_layers": 2})
    answer = ask(None, "--model-path", "org/a-model", "--gpu", 80, "--host-memory", 64)
    assert answer.code == 0 and answer.flag("--model-path") == "org/a-model"
    one_line(ask(None, "--model-path", "org/another"), "`hf download org/another --include '*.json'`")


def test_code_of_a_checkpoint_is_not_run(ask, tmp_path):
    path = model_file(tmp_path, {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Config"}})
    (path / "theirs.py").write_text("import pathlib; pathlib.Path('ran').touch()\nfrom transformers import PretrainedConfig as Config\n")
    one_line(ask(None, "--model-path", path, "--gpu", 80), "without code of the model's own")
    assert not Path("ran").exists()


KEYS = st.sampled_from(["factor", "rope_type", "quant_method", "bits", "x"])
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8) | st.sampled_from([0, 1, 2, 64, 4096]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=4,
)  # fmt: skip


@settings(max_examples=40)
@given(
    changes=st.dictionaries(
        st.sampled_from([*sorted(CONFIG), "text_config", "quantization_config", "sliding_window", "layer_types"]), JSON_VALUES, max_size=3
    )
)
def test_any_config_is_answered(tmp_path_factory, capsys, changes):
    path = model_file(tmp_path_factory.mktemp("any"), CONFIG | {"num_hidden_layers": 2} | changes)
    with mock.patch.dict(os.environ):
        code = doctor.main(["--model-path", str(path), "--gpu", "80", "--host-memory", "100"])
    said = capsys.readouterr()
    assert code in (0, 1, 2) and (said.err.count("\n"), bool(said.out)) == ((1, False) if code == 2 else (0, True)), said.err


def test_the_flags_are_those_of_the_server():
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils.common import human_readable_int

    parser, ours = argparse.ArgumentParser(), argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    server_flags.add_to(ours.add_argument_group())
    theirs, own = ({action.dest: action for action in each._actions} for each in (parser, ours))
    for name in server_flags.NAMES:
        mine = set(own[name].option_strings) - set(server_flags.ALIASES.get(name, ()))
        assert (mine, own[name].choices) == (set(theirs[name].option_strings), theirs[name].choices), name
        kind = theirs[name].type
        assert own[name].type is (server_flags.count if kind is human_readable_int else kind or str), name
    for text in ("131072", "128Ki", "25.6k", "1M", "1.5G", "2Ti"):
        assert server_flags.count(text) == human_readable_int(text)
    for text in ("1.5Ki", "1.0001k", "k", "1kk", "1e3", ""):
        with pytest.raises(ValueError):
            server_flags.count(text)


# ---- a process of its own


def start(*flags: object, **more) -> subprocess.Popen:
    command = [sys.executable, "-m", "sglang_freekv.launch.doctor", *map(str, flags)]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more)


def test_any_file_is_refused_soon(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "endless").symlink_to("endless")
    (tmp_path / "loop").mkdir()
    (tmp_path / "loop" / "config.json").mkdir()
    (tmp_path / "secret.json").write_text("{}")
    (tmp_path / "secret.json").chmod(0)
    with (tmp_path / "large.json").open("w") as file:
        file.truncate(100 << 20)
    paths = ["/dev/zero", "/dev/stdin", "/dev/tty", "/proc/kmsg", "/proc/self/mem", "/", tmp_path, *sorted(tmp_path.iterdir())]
    for path in paths:
        began = time.monotonic()
        process = start("--model-path", path, stdin=subprocess.PIPE)
        out, err = process.communicate(timeout=300)
        assert (process.returncode, out, err.count("\n")) == (2, "", 1), (path, out, err)
        assert time.monotonic() - began < SOON_S, path


def test_nobody_listens():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "sglang_freekv.launch.doctor"], stdout=closed, stderr=subprocess.PIPE, text=True, timeout=300
        )
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_ctrl_c_is_one_line():
    process = start("--model-path", LLAMA, "--gpu", 80)
    time.sleep(random.Random(0).uniform(1, 2))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out, err) == (2, "", "error: interrupted\n")
