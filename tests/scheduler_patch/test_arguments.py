"""The options: in --help, on the command line, in YAML and as keyword arguments of Engine; and that none changes nothing."""

import json
import socket
from pathlib import Path

import pytest

from build_server_args import run
from serving import NEEDLE_MODEL
from sglang_freekv.presets import DEFAULT_PRESET, PRESETS

MODEL = {"model_path": str(NEEDLE_MODEL), "device": "cpu", "random_seed": 1}
OPTIONS = (
    "kv-retrieval", "freekv-preset", "freekv-budget", "freekv-sink", "freekv-window", "freekv-tau", "freekv-tau-by-layer", "freekv-device-cache", "freekv-dense-layers",
    "freekv-dense-below", "freekv-host-memory", "freekv-digest", "freekv-pooling", "freekv-recall", "freekv-host-layout",
    "freekv-hysteresis", "freekv-selection",
)  # fmt: skip
CHOICES = {
    "freekv-preset": "fast",
    "freekv-digest": "min-max",
    "freekv-pooling": "max",
    "freekv-selection": "on-turn",
    "freekv-recall": "copy-engine",
    "freekv-host-layout": "nhd",
}
YAML = """
model-path: {model}
device: cpu
kv-retrieval: freekv
freekv-budget: 1024
freekv-tau: 0.7
freekv-dense-layers: [0, 2]
freekv-host-memory: 0.5
"""


def cli(*flags) -> dict:
    return {"argv": ["--model-path", str(NEEDLE_MODEL), "--device", "cpu", *map(str, flags)]}


def freekv(*flags) -> dict:
    return cli("--kv-retrieval", "freekv", *flags)


def _file(path: Path, layers: int, last: float = 0.5) -> str:
    """A file of thresholds for ``layers`` layers, of which the first is dense."""
    path.write_text(json.dumps({"model": "LlamaForCausalLM", "tau": [None] + [0.5] * (layers - 2) + [last]}))
    return str(path)


def engine(**options) -> dict:
    return {"kwargs": MODEL | options}


FAST = ("--freekv-preset", "fast")
EDGES = {  # typed flags: budget, sink, window
    (): (2048, 16, 32),
    ("--freekv-budget", 64): (64, 16, 16),
    ("--freekv-budget", 32): (32, 8, 16),
    ("--page-size", 32): (2048, 32, 64),
    ("--page-size", 4, "--freekv-digest", "min-max"): (2048, 16, 32),
    (*FAST,): (2048, 512, 512),
    (*FAST, "--freekv-budget", 512): (512, 128, 128),
    (*FAST, "--freekv-budget", 8192): (8192, 512, 512),
    (*FAST, "--freekv-budget", 128): (128, 32, 64),
    (*FAST, "--freekv-budget", 96, "--freekv-sink", 0): (96, 0, 64),
    (*FAST, "--freekv-budget", 1024, "--freekv-sink", 32): (1024, 32, 256),
    (*FAST, "--freekv-sink", 0): (2048, 0, 512),
    (*FAST, "--freekv-window", 1024): (2048, 512, 1024),
    (*FAST, "--freekv-budget", 1600, "--page-size", 64): (1600, 384, 384),
}
LAYERS = {"0,3": [0, 3], "3, 0,3": [0, 3], "none": [], "": [], "1": [1]}
WRONG = {
    ("--freekv-dense-layers", "first"): "--freekv-dense-layers first: expected comma-separated layer numbers",
    ("--freekv-dense-layers", -1): "--freekv-dense-layers -1: expected layer numbers from 0",
    ("--freekv-budget", 100): "--freekv-budget 100: expected a non-negative multiple of --page-size 8; use --freekv-budget 104",
    ("--freekv-budget", 16): "--freekv-budget 16: expected more than --freekv-sink 8 + --freekv-window 16, or nothing is left to select; "
    "use --freekv-budget 48, or lower ones of these",
    ("--freekv-window", 8): "--freekv-window 8: expected at least two pages of 8 tokens, because the page being written may hold one "
    "token; use --freekv-window 16 or more",
    (*FAST, "--freekv-budget", 100): "--freekv-budget 100: expected a non-negative multiple of --page-size 32",
    (*FAST, "--freekv-budget", 64): "--freekv-budget 64: expected more than --freekv-sink 32 + --freekv-window 64",
    (*FAST, "--freekv-window", 32): "--freekv-window 32: expected at least two pages of 32 tokens",
    ("--page-size", 0): "--page-size 0: expected at least 1; use --page-size 32, or leave it out",
    (
        "--page-size",
        1,
    ): "--page-size 1: expected one that suits the other sizes (--freekv-digest two-bit: expected pages of a multiple of 8 "
    "tokens, but --page-size is 1); use --page-size 8",
    ("--page-size", 1, "--freekv-digest", "min-max"): "--page-size 1: a page of one token has nothing to summarise; use --page-size 8, or "
    "leave it out",
    (
        "--page-size",
        4,
    ): "--page-size 4: expected one that suits the other sizes (--freekv-digest two-bit: expected pages of a multiple of 8 "
    "tokens, but --page-size is 4); use --page-size 8, or --freekv-digest cuboid-mean beside it",
    (
        "--page-size",
        20,
    ): "--page-size 20: expected one that suits the other sizes (--freekv-digest two-bit: expected pages of a multiple of "
    "8 tokens, but --page-size is 20); use --page-size 16",
    (
        *FAST,
        "--page-size",
        8,
        "--freekv-budget",
        100,
    ): "--page-size 8: expected one that suits the other sizes (--freekv-budget 100: expected "
    "a non-negative multiple of --page-size 8); use --page-size 10",
    ("--enable-lora",): "--enable-lora: SGLang pins memory for adapters, which takes a GPU; leave --enable-lora and "
    "--lora-paths out, or use --device cuda",
    ("--enable-hierarchical-cache",): "--enable-hierarchical-cache: ",
    ("--page-size", 48): "--page-size 48: expected one that suits the other sizes (--freekv-budget 2048: expected a non-negative multiple "
    "of --page-size 48); use --page-size 32",
    ("--port", "{taken}"): "--port {taken}: cannot listen on 127.0.0.1 (Address already in use); use a free --port, or another --host",
    ("--port", "{taken}", "--host", "0.0.0.0"): "--port {taken}: cannot listen on 0.0.0.0 (Address already in use)",
    ("--nccl-port", "{taken}"): "--nccl-port {taken}: cannot listen on 127.0.0.1 (Address already in use); use a free --nccl-port",
    ("--port", "{taken}", "--host", "192.0.2.1"): "--port {taken}: cannot listen on 192.0.2.1 (Cannot assign requested address)",
    ("--port", 65536): "--port 65536: expected a port from 1 to 65535",
    ("--port", 0): "--port 0: expected a port from 1 to 65535",
    (
        "--freekv-preset",
        "fast",
        "--kv-retrieval",
        "quest",
    ): "--freekv-preset fast: expected none with --kv-retrieval quest, because presets",
    ("--freekv-hysteresis", "nan"): "--freekv-hysteresis nan: expected 0 to 10 nats; use 1 for fewer recalls, or 0 for none of it",
    ("--freekv-hysteresis", 14): "--freekv-hysteresis 14: expected 0 to 10 nats; use 1 for fewer recalls",
    ("--freekv-tau-by-layer", "/dev/null"): "--freekv-tau-by-layer /dev/null: expected a file of JSON, found none that can be read (",
    ("--freekv-tau", "nan"): "--freekv-tau nan: expected a finite number",
    ("--freekv-tau", "inf"): "--freekv-tau inf: expected a finite number",
    ("--freekv-resident-memory", "inf"): "--freekv-resident-memory inf: expected GiB, 0 or more",
    ("--kv-retrieval", "louiskv", "--freekv-selection", "on-turn"): "--freekv-selection on-turn: expected every-step with --kv-retrieval "
    "louiskv, which has its own rule of when to select; leave it out, or use --kv-retrieval freekv",
    ("--kv-retrieval", "quest", "--freekv-tau", 0.8): "--freekv-tau 0.8: expected none with --kv-retrieval quest, ",
    ("--freekv-digest", "two-bit", "--page-size", 4): "--page-size 4: expected one that suits the other sizes (--freekv-digest two-bit: "
    "expected pages of a multiple of 8 tokens, but --page-size is 4); use --page-size 8",
    ("--freekv-device-cache", 1024): "--freekv-device-cache 1024: expected a multiple of --page-size 8, and at least --freekv-budget "
    "2048; use --freekv-device-cache 2048",
    ("--freekv-device-cache", 4010, "--freekv-budget", 1024): "--freekv-device-cache 4010: expected a multiple of --page-size 8",
    ("--freekv-dense-below", 4096, "--freekv-resident-memory", 0): "--freekv-dense-below 4096: expected at most --freekv-device-cache 2048 "
    "with --freekv-resident-memory 0",
    ("--freekv-recall", "copy-engine", "--cuda-graph-backend-decode", "full"): "--cuda-graph-backend-decode full: there is no decode",
    ("--freekv-host-memory", 0): "--freekv-host-memory 0: expected GiB above 0",
    ("--freekv-recall-timing", 100): "--freekv-recall-timing 100: expected 0 with --device cpu, which recalls and computes in turn",
    ("--freekv-recall-timing", 1, "--freekv-recall", "copy-engine"): "--freekv-recall-timing 1: expected 0 with --freekv-recall ",
}


@pytest.fixture(scope="module")
def taken():
    """A port that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture(scope="module")
def facts(tmp_path_factory, taken):
    yaml = tmp_path_factory.mktemp("config") / "freekv.yaml"
    taus = yaml.parent
    yaml.write_text(YAML.format(model=NEEDLE_MODEL))
    cases = {
        "stock": {"kwargs": MODEL | {"attention_backend": "torch_native"}, "stock": True},
        "none": engine(attention_backend="torch_native"),
        "none, said": engine(attention_backend="torch_native", kv_retrieval="none"),
        "none, cli": cli("--attention-backend", "torch_native"),
        "yaml": {"argv": ["--config", str(yaml)]},
        "yaml, overridden": {"argv": ["--config", str(yaml), "--freekv-tau", "0.6"]},
        "engine": engine(kv_retrieval="freekv", freekv_budget=1024, freekv_dense_layers=[2, 0], freekv_tau=1),
        "engine, positional": {"args": [str(NEEDLE_MODEL)], "kwargs": {"device": "cpu", "kv_retrieval": "freekv"}},
        "engine, refused": engine(kv_retrieval="freekv", speculative_algorithm="EAGLE"),
        "engine, workers": engine(kv_retrieval="freekv", tokenizer_worker_num=2),
        "engine, fraction": engine(kv_retrieval="freekv", freekv_budget=1024.5),
        "engine, unknown method": engine(kv_retrieval="snapkv"),
        "engine, a page that is none": engine(kv_retrieval="freekv", page_size=32.5),
        "engine, unknown method's type": engine(kv_retrieval=["quest"]),
        "engine, another method": engine(kv_retrieval="arkvale", freekv_budget=1024, page_size=16),
        "engine, a threshold that is not used": engine(kv_retrieval="arkvale", freekv_tau=0.8),
        "quest": cli("--kv-retrieval", "quest", "--page-size", 16),
        "yaml, another method": {"argv": ["--config", str(yaml), "--kv-retrieval", "quest"]},
        "engine, unknown option": engine(kv_retrieval="freekv", freekv_bugdet=1024),
        "engine, after a refusal": engine(attention_backend="torch_native"),
        "fields of a copy": engine(attention_backend="freekv"),
        "taus": freekv("--freekv-tau-by-layer", _file(taus / "right.json", 8)),
        "taus, wrong": freekv("--freekv-tau-by-layer", _file(taus / "wrong.json", 9)),
        "taus, above": freekv("--freekv-tau-by-layer", _file(taus / "above.json", 8, 90)),
        "taus, engine": engine(kv_retrieval="freekv", freekv_tau_by_layer=str(taus / "right.json")),
        "preset": freekv("--freekv-preset", "accurate"),
        "preset, with pages": freekv("--freekv-preset", "accurate", "--page-size", 32, "--freekv-sink", 64),
        "preset, in YAML": {"argv": ["--config", str(yaml), "--freekv-preset", "paper"]},
        "preset, engine": engine(kv_retrieval="freekv", freekv_preset="accurate"),
        "cuda": freekv("--device", "cuda"),
        "prefill graph": freekv("--device", "cuda", "--cuda-graph-backend-prefill", "breakable"),
        "tp": freekv("--tp-size", 2, "--device", "cuda"),
        "dp": freekv("--dp-size", 2, "--device", "cuda"),
        "no device": {"argv": ["--model-path", str(NEEDLE_MODEL), "--kv-retrieval", "freekv"]},
    }
    cases |= {f"edges {flags}": freekv(*flags) for flags in EDGES}
    cases |= {f"layers {text!r}": freekv("--freekv-dense-layers", text) for text in LAYERS}
    cases |= {f"wrong {flags}": freekv(*(str(flag).format(taken=taken) for flag in flags)) for flags in WRONG}
    cases |= {f"tau {tau}": freekv("--freekv-tau", tau) for tau in (-1.5, 1, 90)}
    cases["port, offline"] = engine(kv_retrieval="freekv", port=taken)
    cases["port, none"] = cli("--port", taken)
    cases |= {f"idle {name}": cli(f"--{name}", CHOICES.get(name, 1)) for name in OPTIONS[1:]}
    return run(cases)


@pytest.fixture(scope="module")
def outcomes(facts):
    return facts["outcomes"]


@pytest.mark.parametrize("option", OPTIONS)
def test_help_shows_every_option_with_its_default(facts, option):
    group = facts["help"].split("KV retrieval (FreeKV):")[1]
    described = group.split(f"  --{option} ")[1].split("  --")[0]
    assert "Default: " in described


def test_none_leaves_server_args_and_the_environment_as_they_are(outcomes):
    stock = outcomes["stock"]
    assert outcomes["none"] == outcomes["none, said"] == stock and stock["config"] is None
    assert outcomes["none, cli"]["config"] is None and outcomes["none, cli"]["environment"] == stock["environment"]
    assert outcomes["engine, after a refusal"]["config"] is None


def test_defaults(outcomes):
    outcome = outcomes[f"edges {()}"]
    memory = outcome["config"]["host_memory_gib"]
    assert outcome["config"] == {
        "method": "freekv", "budget_tokens": 2048, "sink_tokens": 16, "window_tokens": 32, "tau": 0.8, "tau_by_layer": None,
        "digest": "two-bit", "pooling": "softmax-mean", "hysteresis": 1.0, "selection": "every-step",
        "dense_layers": [0], "page_size": 8, "host_memory_gib": memory, "resident_memory_gib": None, "device_cache_tokens": None, "dense_below_tokens": 0,
        "recall": "zero-copy", "host_layout": "hnd", "kv_dtype": "auto", "canary": "off", "recall_timing": 0,
        "preset": DEFAULT_PRESET, "preset_set": list(PRESETS[DEFAULT_PRESET].settings),
    }  # fmt: skip
    assert outcome["settings"] == {"page_size": 8, "attention_backend": "freekv", "device": "cpu"}
    assert outcome["graphs"] == ["disabled", "disabled"]
    assert outcomes["cuda"]["fields"]["disable_prefill_cuda_graph"] == "False"
    assert outcomes["prefill graph"]["graphs"][1] == "breakable"
    assert memory > 0


@pytest.mark.parametrize("ranks", ["tp", "dp"])
def test_ranks_share_the_host_memory(outcomes, ranks):
    alone = outcomes["cuda"]["config"]["host_memory_gib"]
    assert outcomes[ranks]["config"]["host_memory_gib"] == pytest.approx(alone / 2, rel=0.4)


def test_yaml(outcomes):
    config = outcomes["yaml"]["config"]
    assert (config["budget_tokens"], config["sink_tokens"], config["tau"]) == (1024, 16, 0.7)
    assert (config["dense_layers"], config["host_memory_gib"]) == ([0, 2], 0.5)
    assert outcomes["yaml, overridden"]["config"] == config | {"tau": 0.6}


def test_engine(outcomes):
    config = outcomes["engine"]["config"]
    assert (config["budget_tokens"], config["dense_layers"], config["tau"]) == (1024, [0, 2], 1.0)
    assert outcomes["engine, positional"]["config"]["budget_tokens"] == 2048


def test_engine_raises_value_errors(outcomes):
    refused = outcomes["engine, refused"]
    assert refused["raised"][:2] == ["Refusal", "ValueError"] and refused["message"].startswith("--speculative-algorithm EAGLE: ")
    workers = outcomes["engine, workers"]
    assert workers["raised"][0] == "Refusal" and "loads no plugins" in workers["message"] and " 2: " in workers["message"]
    assert outcomes["engine, fraction"]["message"].startswith("--freekv-budget 1024.5: expected a whole number of tokens")
    assert outcomes["engine, a page that is none"]["message"].endswith("; use for example --page-size 32")
    assert outcomes["engine, unknown method"]["message"].startswith(
        "--kv-retrieval snapkv: expected one of none, freekv, arkvale, louiskv, quest;"
    )
    assert outcomes["engine, unknown method's type"]["message"].startswith("--kv-retrieval ['quest']: expected one of none, freekv")
    message = outcomes["engine, a threshold that is not used"]["message"]
    assert message.startswith("--freekv-tau 0.8: expected none with --kv-retrieval arkvale, ")
    assert "freekv_bugdet" in outcomes["engine, unknown option"]["message"]


def test_the_preset_fast_is_one_flag(outcomes):
    config = outcomes[f"edges {FAST}"]["config"]
    assert {name: config[name] for name in PRESETS["fast"].settings} == PRESETS["fast"].settings and config["preset"] == "fast"
    assert outcomes[f"edges {FAST}"]["settings"]["page_size"] == 32


def test_other_methods_are_untouched_by_the_default_preset(outcomes):
    """They have the sizes of the preset fast, digests and pooling of their own, and no threshold."""
    freekv = outcomes[f"edges {FAST}"]["config"]
    for case, changes in (
        ("quest", {"method": "quest", "page_size": 16, "digest": "min-max", "pooling": "max"}),
        (
            "engine, another method",
            {"method": "arkvale", "page_size": 16, "budget_tokens": 1024, "sink_tokens": 256, "window_tokens": 256, "pooling": "mean"},
        ),
    ):
        memory = outcomes[case]["config"]["host_memory_gib"]
        assert outcomes[case]["config"] == freekv | {"tau": None, "host_memory_gib": memory, "preset": None, "preset_set": []} | changes
        assert outcomes[case]["settings"] == {"page_size": 16, "attention_backend": "freekv", "device": "cpu"}
    refused = outcomes["yaml, another method"]
    assert refused["exit"] == 2 and "error: --freekv-tau 0.7: expected none with --kv-retrieval quest" in refused["stderr"]


def test_thresholds_by_layer_are_those_of_the_model(outcomes):
    for case in ("taus", "taus, engine"):
        assert outcomes[case]["config"]["tau_by_layer"]["taus"] == [None] + [0.5] * 7
    wrong = outcomes["taus, wrong"]
    assert (
        wrong["exit"] == 2
        and "expected thresholds for LlamaForCausalLM with 8 layers, found those for LlamaForCausalLM with 9" in wrong["stderr"]
    )


def test_a_preset_is_taken_where_nothing_is_given(outcomes):
    accurate = PRESETS["accurate"].settings
    for case in ("preset", "preset, engine"):
        config = outcomes[case]["config"]
        assert config["preset"] == "accurate" and {name: config[name] for name in accurate} == accurate
        assert outcomes[case]["settings"]["page_size"] == accurate["page_size"]
    paged = outcomes["preset, with pages"]
    assert paged["settings"]["page_size"] == 32 and paged["config"]["sink_tokens"] == 64
    assert paged["config"]["preset_set"] == [name for name in accurate if name not in ("page_size", "sink_tokens")]
    mixed = outcomes["preset, in YAML"]["config"]
    assert (mixed["budget_tokens"], mixed["tau"], mixed["digest"], mixed["preset"]) == (1024, 0.7, "min-max", "paper")


@pytest.mark.parametrize("flags", EDGES, ids=str)
def test_sink_and_window_shrink_with_the_budget(outcomes, flags):
    config = outcomes[f"edges {flags}"]["config"]
    assert (config["budget_tokens"], config["sink_tokens"], config["window_tokens"]) == EDGES[flags]


@pytest.mark.parametrize("text", LAYERS, ids=repr)
def test_dense_layers(outcomes, text):
    assert outcomes[f"layers {text!r}"]["config"]["dense_layers"] == LAYERS[text]


@pytest.mark.parametrize("flags", WRONG, ids=str)
def test_wrong_values_are_one_line(outcomes, taken, flags):
    outcome = outcomes[f"wrong {flags}"]
    assert outcome["exit"] == 2 and outcome["stderr"].splitlines()[-1].startswith("error: " + WRONG[flags].format(taken=taken))


def test_a_port_is_tried_for_a_server_with_retrieval_alone(outcomes):
    assert outcomes["port, offline"]["config"] and "exit" not in outcomes["port, none"]


def test_a_threshold_that_no_cosine_reaches_is_told(outcomes):
    above, below = outcomes["tau 90"]["said"], outcomes["tau -1.5"]["said"]
    assert "--freekv-tau 90 is above every cosine: every kv head is corrected in every step" in above
    assert "--freekv-tau -1.5 is below every cosine: no kv head is corrected" in below and "--freekv-tau" not in outcomes["tau 1"]["said"]
    by_layer = outcomes["taus, above"]["said"]
    assert "above.json: layer 7, whose threshold 90 is above every cosine" in by_layer and "layer 6" not in by_layer
    assert "--freekv-tau" not in outcomes["taus"]["said"]


@pytest.mark.parametrize("option", OPTIONS[1:])
def test_an_option_without_retrieval_is_not_ignored(outcomes, option):
    outcome = outcomes[f"idle {option}"]
    assert outcome["exit"] == 2 and f"error: --{option}: it has no effect without --kv-retrieval freekv" in outcome["stderr"]


def test_copies_of_server_args_keep_the_config(outcomes):
    assert outcomes[f"edges {()}"]["config_of_copies"] == [True, True]
    assert outcomes["fields of a copy"]["message"].startswith("--attention-backend freekv: it is part of --kv-retrieval, which")


def test_a_machine_without_a_gpu_serves_on_its_cpu(outcomes):
    outcome = outcomes["no device"]
    assert outcome["settings"]["device"] == "cpu" and outcome["fields"]["grammar_backend"] == "'llguidance'"
    assert outcome["environment"]["SGLANG_USE_CPU_ENGINE"] == "1" and "cpu_shim" in outcome["environment"]["PYTHONPATH"]
