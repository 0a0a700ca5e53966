"""The doctor: its figures against sums by hand and the server's own sizing, its remedies against made-up machines, its refusals."""

import ast
import importlib
import importlib.machinery
import importlib.util
import json
import resource
import sys
from enum import IntEnum, auto
from pathlib import Path
from types import ModuleType
from typing import Optional
from unittest.mock import MagicMock

import pytest

import sglang_freekv
from sglang_freekv.config import GIB, FreeKVConfig
from sglang_freekv.launch import doctor
from sglang_freekv.launch import machine as machine_module
from sglang_freekv.launch.finding import Finding
from sglang_freekv.launch.machine import NO_GPU, Machine
from sglang_freekv.memory_pool.pinned import PinError
from sglang_freekv.memory_pool.sizing import KVShape, Sizing

ROOT = Path(__file__).resolve().parents[1]
LLAMA = ROOT / "benchmarks/shapes/llama-3.1-8b.json"
CONFIG = json.loads(LLAMA.read_text())
SHAPE = KVShape(retrieval_layers=31, dense_layers=1, kv_heads=8, query_heads=32, head_dim=128, digest_elements=256, element_bytes=2)
MEMLOCK = "`docker run --ulimit memlock=-1` in a container, `ulimit -l unlimited` before the server elsewhere"

REFUSED = {  # changes to Llama's config, and what the server says
    "latent attention": ({"kv_lora_rank": 512, "v_head_dim": 128}, "its latent attention (MLA) has no kv heads"),
    "mamba": ({"model_type": "falcon_h1"}, "it has Mamba or linear attention layers"),
    "linear attention": ({"layer_types": ["linear_attention", "full_attention"]}, "it has Mamba or linear attention layers"),
    "natively sparse": ({"architectures": ["MiniMaxM3SparseForCausalLM"]}, "it is natively sparse"),
    "encoder-decoder": ({"architectures": ["WhisperForConditionalGeneration"]}, "it has cross attention"),
    "local attention": ({"attention_chunk_size": 8192}, "it attends to chunks of 8192 tokens"),
    "sliding window": ({"model_type": "mistral", "sliding_window": 4096}, "it attends to a sliding window of 4096 tokens"),
    "sliding window by default": ({"model_type": "mistral"}, "it attends to a sliding window of 4096 tokens"),
    "sliding window, Qwen2": (
        {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True},
        "it attends to a sliding window of 4096 tokens",
    ),
    "hybrid": ({"architectures": ["GptOssForCausalLM"], "sliding_window": 128}, "it attends to a sliding window of 128 tokens"),
    "sinks": ({"add_full_attention_sink_bias": True}, "it has learned attention sinks"),
    "soft-capping": ({"attn_logit_softcapping": 50.0}, "it caps attention logits"),
    "dual chunk": ({"dual_chunk_attention_config": {"chunk_size": 1024}}, "its dual chunk attention"),
    "asymmetric": ({"v_head_dim": 64}, "its keys and values differ in width (128 and 64)"),
    "encoder": ({"architectures": ["BertModel"]}, "it does not generate text"),
}
SERVED = {
    "as it is": {},
    "window off": {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False},
    "window above the context": {"model_type": "mistral", "sliding_window": 163840},
    "no window": {"model_type": "mistral", "sliding_window": None},
    "values as wide as keys": {"v_head_dim": 128},
    "nested": {"text_config": CONFIG},
}
BAD_CONFIGS = {  # what the file holds, and what is said of it
    "{": "broken JSON",
    "[]": "expected architectures, a list of names, found none",
    "{}": "expected architectures, a list of names, found none",
    json.dumps(CONFIG | {"num_hidden_layers": None}): "expected num_hidden_layers, a whole number above 0, found none",
    json.dumps(CONFIG | {"num_hidden_layers": 0}): "expected num_hidden_layers, a whole number above 0, found 0",
    json.dumps(CONFIG | {"num_attention_heads": "many"}): 'expected num_attention_heads to be a whole number, found "many"',
    json.dumps(CONFIG | {"rope_scaling": {"factor": "8"}}): "expected rope_scaling with a number as factor",
    json.dumps(CONFIG | {"rope_scaling": 8}): "expected rope_scaling to be an object, found 8",
    json.dumps({"architectures": ["LlamaForCausalLM"]}): "expected num_hidden_layers, a whole number above 0, found none",
    json.dumps({key: CONFIG[key] for key in CONFIG if key != "vocab_size"}): "expected vocab_size, a whole number above 0, found none",
}
BAD_OPTIONS = {
    ("--model-path", "nowhere"): "--model-path nowhere: expected a directory with config.json, or a config.json, found No such file",
    ("--context-length", "4096"): "--context-length 4096: expected --model-path beside it, found none",
    ("--model-path", LLAMA, "--context-length", "many"): "argument --context-length: invalid int value: 'many'; see --help",
    ("--model-path", LLAMA, "--context-length", "0"): "--context-length 0: expected a number above 0",
    ("--model-path", LLAMA, "--context-length", "2047"): "--context-length 2047: expected at least --freekv-budget 2048",
    ("--model-path", LLAMA, "--context-length", "163841"): "--context-length 163841: expected at most the model's 163840",
    ("--model-path", LLAMA, "--freekv-budget", "2000"): "--freekv-budget 2000: expected a non-negative multiple of --page-size 32",
    ("--model-path", LLAMA, "--page-size", "1"): "--page-size 1: a page of one token has nothing to summarise",
    ("--model-path", LLAMA, "--dtype", "int4"): "--dtype int4: expected auto or one of bfloat16, float16",
    ("--model-path", LLAMA, "--link-gb-per-s", "inf"): "--link-gb-per-s inf: expected a number above 0",
    ("--model-path", LLAMA, "--link-gb-per-s", "nan"): "--link-gb-per-s nan: expected a number above 0",
}


class FakeGpu:
    """A device that copies at 50 and 40 GB/s, or fails as it is told to."""

    present, device, complaint, name = True, "cuda", None, "NVIDIA Made-up"
    memory_bytes, pci_address = (80 * GIB, 81 * GIB), "0000:ab:00.0"

    def __init__(self, pin: Exception | None = None, copy: Exception | None = None) -> None:
        self.failures, self.asked = {"pin": pin, "copy": copy}, []

    def pin(self, num_bytes: int) -> None:
        self._do("pin", num_bytes)

    def copy_rates(self, num_bytes: int) -> tuple[float, float]:
        self._do("copy", num_bytes)
        return 50e9, 40e9

    def _do(self, what: str, num_bytes: int) -> None:
        self.asked.append((what, num_bytes))
        if self.failures[what]:
            raise self.failures[what]


class NoGpu:
    """Everything but ``present`` is missing: asking for it fails."""

    present, device, complaint = False, "cpu", None


@pytest.fixture
def make_machine(tmp_path, monkeypatch):
    """Builds machines out of files: ``available`` GiB of host memory under a cgroup of ``limit`` GiB and, with 2 GiB
    mapped, ``address_space`` GiB of it, and a memlock limit."""

    def make(
        gpu, available=256, limit=None, address_space=None, memlock=resource.RLIM_INFINITY, huge_pages="always [madvise] never", nodes=1,
        gpu_node=None,
    ):  # fmt: skip
        proc, sysfs = tmp_path / "proc", tmp_path / "sys"
        files = {
            proc / "meminfo": f"MemAvailable: {available << 20} kB\n",
            proc / "self/cgroup": "0::/\n",
            proc / "driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Release Build\n",
            sysfs / "kernel/mm/transparent_hugepage/enabled": huge_pages + "\n",
        }
        if limit is not None:
            group = sysfs / "fs/cgroup"
            files |= {group / "memory.max": f"{limit * GIB:.0f}", group / "memory.current": "0", group / "memory.stat": "inactive_file 0\n"}
        if address_space is not None:
            files |= {proc / "self/limits": f"Max address space {address_space * GIB} unlimited bytes\n"}
            files |= {proc / "self/status": f"VmSize: {2 << 20} kB\n"}
        for node in range(nodes):
            files[sysfs / f"devices/system/node/node{node}/cpulist"] = ""
        if gpu_node is not None:
            files[sysfs / "bus/pci/devices/0000:ab:00.0/numa_node"] = f"{gpu_node}\n"
        for file, text in files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        monkeypatch.setattr(machine_module.resource, "getrlimit", lambda which: (memlock, memlock))
        return Machine(gpu, proc, sysfs)

    return make


def functions_of(file: Path, names: set[str]) -> dict:
    """Top-level definitions of a module that takes seconds to import, without importing it."""
    nodes = ast.parse(file.read_text()).body
    defined = {getattr(node, "name", None) or getattr(getattr(node, "targets", [None])[0], "id", None): node for node in nodes}
    space = {"IntEnum": IntEnum, "auto": auto, "Optional": Optional, "List": list, "PretrainedConfig": object}
    exec(compile(ast.Module([defined[name] for name in defined if name in names], []), str(file), "exec"), space)
    return {name: space[name] for name in names}


@pytest.fixture(scope="module", autouse=True)
def sglang_in_no_time():
    """SGLang takes ten seconds to import. Unless that has been done, its own functions that the rules ask are cut out of its sources."""
    if "sglang.srt.configs.model_config" in sys.modules:
        yield
        return
    [source] = map(Path, importlib.util.find_spec("sglang").submodule_search_locations)
    model_config = {
        "AttentionArch", "MIMO_V2_MODEL_ARCHS", "is_minimax_sparse", "is_encoder_decoder_model", "is_generation_model",
        "is_hybrid_swa_model",
    }  # fmt: skip
    context = {"CONTEXT_LENGTH_KEYS", "get_context_length"}
    real = {
        "sglang.srt.configs.model_config": functions_of(source / "srt/configs/model_config.py", model_config)
        | functions_of(source / "srt/utils/hf_transformers/common.py", context),
        "sglang.srt.configs.hybrid_arch": {"mambaish_config": lambda model: (model.linear_attn_registry_result or [None, None])[1]},
    }

    class Loader(importlib.machinery.SourceFileLoader):
        def __init__(self):
            pass

        def create_module(self, spec):
            module = ModuleType(spec.name)
            module.__path__ = []
            vars(module).update(real.get(spec.name, {}))
            module.__getattr__ = lambda name: MagicMock()
            return module

        def exec_module(self, module):
            pass

    class Finder:
        def find_spec(self, name, path=None, target=None):
            return importlib.machinery.ModuleSpec(name, Loader(), is_package=True) if name.split(".")[0] == "sglang" else None

    def ours() -> list[str]:
        return [name for name in sys.modules if name.startswith(("sglang_freekv.scheduler_patch", "sglang.")) or name == "sglang"]

    before, parent = {name: sys.modules.pop(name) for name in ours()}, vars(sglang_freekv)
    package = parent.pop("scheduler_patch", None)
    finder = Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in ours():
            del sys.modules[name]
        sys.modules.update(before)
        parent.pop("scheduler_patch", None)
        parent.update({"scheduler_patch": package} if package else {})


@pytest.fixture
def run(capsys):
    """``run(machine, *flags)``: exit status, findings by name, standard error."""

    def examine(machine, *flags):
        code = doctor.main([*map(str, flags), "--json"], machine)
        said = capsys.readouterr()
        found = json.loads(said.out)["findings"] if said.out else []
        return code, {finding["name"]: Finding(**finding) for finding in found}, said.err

    return examine


def model_file(directory: Path, change: dict) -> Path:
    (directory / "config.json").write_text(json.dumps(CONFIG | change))
    return directory


# ---- what a request costs


def test_llama_by_hand(make_machine, run):
    _, found, _ = run(make_machine(FakeGpu()), "--model-path", LLAMA, "--context-length", 32768)
    token = 2 * 8 * 128 * 2  # keys and values of one layer: 4096 bytes
    assert found["host pool"].figures["bytes"] == 32768 * 31 * token == 4160749568
    assert found["digests"].figures["bytes"] == 1024 * 31 * token  # a digest is as large as keys and values of one token
    assert found["dense layers"].figures["bytes"] == 32768 * token
    assert found["staging"].figures["bytes"] == 2 * 32768 * token
    row = 31 * (2048 * token + 4 * 8 * (64 + 64) + 12 * 8 * 64 + 32 * 128 * 2) + 4 * 1024 * (32 + 8) + 4 * 32768
    assert found["device cache"].figures["bytes"] == row
    assert found["weights"].figures["parameters"] == 8_030_261_248  # as published
    assert found["weights"].figures["bytes"] == 2 * 8_030_261_248
    assert found["recall"].figures["bytes_per_token"] == pytest.approx(31 * 8 * 32 * 16384 * 0.21)  # kv heads, pages of 16 KiB each
    assert found["decode rate"].figures["tokens_per_s"] == pytest.approx(50e9 / (31 * 1024 * token * 0.21))
    shown = {"host pool": "3.88 GiB", "weights": "14.96 GiB for 8.03 billion", "recall": "27.3 MB", "decode rate": "1831 tokens/s"}
    assert [name for name in shown if shown[name] not in found[name].value] == []


def test_digests_are_sized_as_they_are_asked_for(make_machine, run):
    flags = ("--page-size", 8, "--freekv-digest", "two-bit", "--freekv-sink", 16, "--freekv-window", 32, "--dtype", "bfloat16")
    _, found, _ = run(make_machine(FakeGpu()), "--model-path", LLAMA, "--context-length", 32768, *flags)
    assert found["digests"].figures["bytes"] == 32768 // 8 * 31 * 8 * (2 * 128 * 2 + 128 * 8 * 2 // 8)
    assert "--page-size 8 --freekv-sink 16 --freekv-window 32 --freekv-digest two-bit --dtype bfloat16" in found["command"].value
    code, _, told = run(make_machine(FakeGpu()), "--model-path", LLAMA, "--freekv-digest", "two-bit", "--page-size", 4)
    assert code == 2 and "--freekv-digest two-bit: expected pages of a multiple of 8 tokens" in told


@pytest.mark.parametrize("context, budget, page", [(163840, 2048, 32), (4000, 512, 16), (8192, 1024, 64)])
def test_figures_are_those_of_sizing(make_machine, run, context, budget, page):
    flags = ("--context-length", context, "--freekv-budget", budget, "--page-size", page)
    _, found, _ = run(make_machine(FakeGpu()), "--model-path", LLAMA, *flags)
    edge = min(512, budget // 4)
    config = FreeKVConfig(budget_tokens=budget, sink_tokens=edge, window_tokens=edge, page_size=page)
    sizing, tokens = Sizing(config, SHAPE, context), -(-context // page) * page
    figures = {name: finding.figures.get("bytes") for name, finding in found.items()}
    assert figures["host pool"] == tokens * sizing.host_bytes_per_token
    assert figures["digests"] + figures["dense layers"] == pytest.approx(tokens * sizing.device_bytes_per_token, abs=2)
    assert (figures["device cache"], figures["staging"]) == (sizing.row_bytes, sizing.staging_bytes)
    words = found["command"].figures["flags"]
    count, gib = (int(words[words.index("--max-running-requests") + 1]), float(words[words.index("--freekv-host-memory") + 1]))
    host_bytes, device_bytes = int(gib * GIB), figures["requests in device memory"]
    pool = sizing.tokens(host_bytes, device_bytes, count)
    assert pool >= count * context and sizing.rows(device_bytes, pool) >= count
    pool = sizing.tokens(host_bytes, device_bytes, count + 1)
    assert pool < (count + 1) * context or sizing.rows(device_bytes, pool) < count + 1


def test_capacity_by_hand(make_machine, run):
    code, found, _ = run(make_machine(FakeGpu(), available=100), "--model-path", LLAMA, "--context-length", 131072)
    assert found["requests in host memory"].figures == {"requests": 4, "bytes": 70 * GIB}  # 15.5 GiB each
    left = int(80 * GIB * 0.85) - 2 * 8_030_261_248
    request, staging = 131072 * 4096 + 4096 * 31 * 4096, 2 * 131072 * 4096
    row = Sizing(FreeKVConfig(), SHAPE, 131072).row_bytes
    assert found["requests in device memory"].figures["bytes"] == left
    fitting = (left - staging - row) // (request + row)
    assert found["requests in device memory"].figures["requests"] == fitting == 42
    assert found["command"].value == (
        f"python -m sglang.launch_server --model-path {LLAMA} --kv-retrieval freekv --freekv-budget 2048 --freekv-host-memory 70 "
        "--context-length 131072 --max-running-requests 4 --mem-fraction-static 0.85"
    )
    assert code == 0


def test_a_context_that_does_not_fit_gets_the_longest_that_does(make_machine, run):
    code, found, _ = run(make_machine(FakeGpu(), available=16), "--model-path", LLAMA)
    longest = int(11.2 * GIB) // (31 * 4096) // 32 * 32
    assert code == 1 and found["requests in host memory"].stops
    assert found["requests in host memory"].remedy.startswith(f"`--context-length {longest}`")
    assert f"--context-length {longest} --max-running-requests 1 " in found["command"].value
    assert found["verdict"].stops and "requests in host memory" in found["verdict"].value


def test_weights_that_do_not_fit_leave_no_command(make_machine, run):
    code, found, _ = run(make_machine(NoGpu(), available=12), "--model-path", LLAMA)
    assert code == 1
    assert found["command"].value == "none: not one request fits"
    assert found["requests in device memory"].remedy.startswith("a smaller model, a budget below 2048, or a machine")


def test_on_a_cpu_the_suggestion_leaves_room_for_the_weights(make_machine, run):
    code, found, _ = run(make_machine(NoGpu(), available=20), "--model-path", LLAMA, "--context-length", 8192)
    host, device, weights = (found[name].figures["bytes"] for name in ("requests in host memory", "requests in device memory", "weights"))
    assert host + device + weights <= 20 * GIB and code == 0
    assert found["command"].value.endswith(" --device cpu")


def test_a_given_link_and_quantised_weights(make_machine, run, tmp_path):
    path = model_file(tmp_path, {"quantization_config": {"quant_method": "awq", "bits": 4}})
    _, found, _ = run(make_machine(NoGpu()), "--model-path", path, "--link-gb-per-s", 54)
    assert found["decode rate"].value == "the link (54.0 GB/s, given) sustains 1978 tokens/s over all requests"
    assert found["weights"].figures["bytes"] == 8_030_261_248 // 2


# ---- what the machine has


def test_without_a_gpu_nothing_is_made_up(make_machine, run):
    code, found, _ = run(make_machine(NoGpu()), "--model-path", LLAMA)
    assert code == 0
    for name in ("pinned memory", "link to the device", "link to the host", "decode rate"):
        assert (found[name].value, found[name].figures) == (NO_GPU, {})
    assert found["gpu"].value.startswith("none that torch can use")
    assert found["driver"].remedy.startswith("torch sees no GPU all the same: `docker run --gpus all`")


def test_links_are_measured(make_machine, run):
    gpu = FakeGpu()
    code, found, _ = run(make_machine(gpu))
    assert code == 0 and gpu.asked == [("pin", 64 << 20), ("copy", 256 << 20)]
    assert found["driver"].value == "NVIDIA 580.159.04"
    assert found["link to the device"].value == "50.0 GB/s in pinned copies of 256.00 MiB"
    assert found["link to the host"].figures == {"bytes_per_s": 40e9}


@pytest.mark.parametrize("memlock, remedy", [(8 << 20, MEMLOCK), (resource.RLIM_INFINITY, "free host memory")])
def test_memory_that_cannot_be_pinned_stops_a_server(make_machine, run, memlock, remedy):
    gpu = FakeGpu(pin=PinError("cudaHostRegister of 0.1 GiB: out of memory"))
    code, found, _ = run(make_machine(gpu, memlock=memlock))
    assert code == 1 and found["pinned memory"].stops and found["pinned memory"].remedy.startswith(remedy)
    assert "(cudaHostRegister of 0.1 GiB: out of memory)" in found["pinned memory"].value
    assert found["link to the device"].value == "not measured: no pinned memory" and gpu.asked == [("pin", 64 << 20)]


def test_a_link_that_cannot_be_measured_says_why(make_machine, run):
    code, found, _ = run(make_machine(FakeGpu(copy=RuntimeError("CUDA out of memory\nmore"))), "--model-path", LLAMA)
    assert code == 0 and found["link to the device"].value == "not measured: CUDA out of memory"
    assert found["decode rate"].figures == {}


@pytest.mark.parametrize(
    "gpu, memlock, remedy",
    [
        (FakeGpu, resource.RLIM_INFINITY, None),
        (FakeGpu, 8 << 20, None),  # 64 MiB were pinned, so CUDA is not held to it
        (FakeGpu, 1 * GIB, MEMLOCK),  # what was pinned lies below it, and the host pool does not
        (FakeGpu, 200 * GIB, None),
        (NoGpu, 8 << 20, MEMLOCK),
    ],
)
def test_memlock(make_machine, run, gpu, memlock, remedy):
    code, found, _ = run(make_machine(gpu(), memlock=memlock))
    assert (code, found["memlock"].remedy) == (0, remedy)


@pytest.mark.parametrize("limits, share, bound, remedy", [
    ({}, 44.8, None, None),
    ({"limit": 10}, 7, "a cgroup", "`docker run --memory=64g`, or a higher memory limit of the pod or slice"),
    ({"limit": 10, "address_space": 40}, 7, "a cgroup", "`docker run --memory=64g`, or a higher memory limit of the pod or slice"),
    ({"limit": 10, "address_space": 7}, 3.5, "`ulimit -v`", "`ulimit -v unlimited` before the server, in a new shell if this one refuses"),
])  # fmt: skip
def test_host_memory_is_what_the_tightest_limit_leaves(make_machine, run, limits, share, bound, remedy):
    code, found, _ = run(make_machine(FakeGpu(), available=64, **limits))
    memory = found["host memory"]
    assert code == 0 and memory.figures["host_pool_bytes"] == pytest.approx(share * GIB, abs=1) and memory.remedy == remedy
    assert memory.value.endswith(f"; {bound} bounds it, the machine has 64.00 GiB available" if bound else "host pool by default")


def test_too_little_host_memory_stops_a_server(make_machine, run):
    code, found, _ = run(make_machine(FakeGpu(), limit=1 / 16))
    assert code == 1 and found["host memory"].remedy.startswith("expected a host pool of 64.00 MiB at least: `docker run --memory=256g`")


@pytest.mark.parametrize("chosen, helped", [("[always] madvise never", False), ("always madvise [never]", True)])
def test_huge_pages(make_machine, run, chosen, helped):
    machine = make_machine(FakeGpu(), huge_pages=chosen)
    _, found, _ = run(machine)
    file = machine.sys / "kernel/mm/transparent_hugepage/enabled"
    assert found["huge pages"].remedy == (f"as root on the host, `echo madvise > {file}`" if helped else None)


@pytest.mark.parametrize("nodes, near, remedy", [(1, 0, None), (2, -1, None), (2, 1, "`numactl --cpunodebind=1 --preferred=1`")])
def test_numa(make_machine, run, nodes, near, remedy):
    _, found, _ = run(make_machine(FakeGpu(), nodes=nodes, gpu_node=near))
    assert found["numa"].figures == {"nodes": list(range(nodes)), "gpu_node": None if near < 0 else near}
    assert found["numa"].remedy is None if remedy is None else remedy in found["numa"].remedy


def test_what_is_not_installed_stops_a_server(make_machine, run, monkeypatch):
    versions = {"torch": "2.11.0+cu130", "triton": "3.6.0", "sglang": "0.5.16"}

    def version(package):
        if package not in versions:
            raise machine_module.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(machine_module, "version", version)
    monkeypatch.setattr(machine_module, "entry_points", lambda **_: [])
    code, found, _ = run(make_machine(FakeGpu()))
    assert code == 1 and not found["torch"].stops
    assert found["sglang"].remedy == "expected 0.5.17: `pip install sglang==0.5.17`"
    assert found["flashinfer"].remedy == "`pip install flashinfer-python`"
    assert found["plugin"].remedy == machine_module.INSTALL
    assert found["verdict"].value.endswith("sglang, flashinfer, plugin")


# ---- what is refused, and how it is said


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_is_not_served(make_machine, run, tmp_path, case):
    change, reason = REFUSED[case]
    code, found, _ = run(make_machine(FakeGpu()), "--model-path", model_file(tmp_path, change))
    name = change.get("architectures", CONFIG["architectures"])[0]
    assert code == 1 and found["model"].stops
    assert found["model"].remedy.startswith(f"--kv-retrieval freekv does not serve {name}: {reason}")
    assert "command" not in found and "\n" not in str(found["model"])


def test_every_rule_about_models_has_a_case():
    from sglang_freekv.scheduler_patch import refusals

    reasons = [reason for _, reason in REFUSED.values()]
    for rule in refusals.MODEL_RULES:
        assert any(reason.startswith(rule.message.partition("{")[0][:20]) for reason in reasons), rule.message


@pytest.mark.parametrize("case", SERVED)
def test_a_model_that_is_served(make_machine, run, tmp_path, case):
    code, found, _ = run(make_machine(FakeGpu()), "--model-path", model_file(tmp_path, SERVED[case]))
    assert code == 0 and "LlamaForCausalLM, 32 layers (31 retrieved, 1 dense)" in found["model"].value


def test_a_window_longer_than_the_context_that_is_asked_for_is_served(make_machine, run, tmp_path):
    path = model_file(tmp_path, {"model_type": "mistral", "sliding_window": 4096})
    assert run(make_machine(FakeGpu()), "--model-path", path, "--context-length", 4096)[0] == 0
    assert run(make_machine(FakeGpu()), "--model-path", path, "--context-length", 8192)[0] == 1


@pytest.mark.parametrize("text", BAD_CONFIGS, ids=lambda text: BAD_CONFIGS[text][:40])
def test_a_bad_config_is_one_line(make_machine, run, tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    code, found, error = run(make_machine(FakeGpu()), "--model-path", tmp_path)
    assert (code, found, error.count("\n")) == (2, {}, 1)
    assert error.startswith("error: ") and BAD_CONFIGS[text] in error and "; give " in error


@pytest.mark.parametrize("flags", BAD_OPTIONS, ids=lambda flags: " ".join(map(str, flags[-2:])))
def test_a_bad_option_is_one_line(make_machine, run, flags):
    code, found, error = run(make_machine(FakeGpu()), *flags)
    assert (code, found, error.count("\n")) == (2, {}, 1)
    assert error.startswith(f"error: {BAD_OPTIONS[flags]}")


def test_lines_and_json_tell_the_same(make_machine, run, capsys):
    machine = make_machine(FakeGpu(), memlock=GIB)
    _, found, _ = run(machine, "--model-path", LLAMA)
    assert doctor.main(["--model-path", str(LLAMA)], machine) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{finding.name}: {finding.value} - {finding.remedy or 'ok'}" for finding in found.values()]
    assert lines[-1] == "verdict: nothing found that would stop a server - ok"


def test_without_sglang_the_machine_is_still_examined(make_machine, run, monkeypatch):
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    code, found, _ = run(make_machine(FakeGpu()), "--model-path", LLAMA)
    assert code == 1 and found["model"].remedy == "install sglang" and found["link to the device"].figures
