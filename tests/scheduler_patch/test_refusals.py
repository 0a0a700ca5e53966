"""What is refused: one line that names the option or the model's property, why, and what to use instead."""

import inspect
import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.server_args import ServerArgs
from transformers import AutoConfig

from build_server_args import run
from serving import LAYERS, NEEDLE_CONFIG, NEEDLE_MODEL
from sglang_freekv import releases
from sglang_freekv.config import GIB, FreeKVConfig, Refusal
from sglang_freekv.scheduler_patch import refusals, refused_flags

OPTIONS = set(inspect.signature(ServerArgs).parameters)
LOOKED_AT = {
    name
    for line in Path(__file__).with_name("options_looked_at.md").read_text().splitlines()
    if not line.startswith("#")
    for name in line.split()
}
ALL_LAYERS = ",".join(map(str, range(LAYERS)))

FLAGS = {  # option of ServerArgs: how a user types it
    "device": ("--device", "xpu"),
    "attention_backend": ("--attention-backend", "flashinfer"),
    "prefill_attention_backend": ("--prefill-attention-backend", "triton"),
    "decode_attention_backend": ("--decode-attention-backend", "fa3"),
    "kv_cache_dtype": ("--kv-cache-dtype", "mxfp8"),
    "speculative_algorithm": ("--speculative-algorithm", "EAGLE"),
    "disaggregation_mode": ("--disaggregation-mode", "decode"),
    "pp_size": ("--pp-size", "2"),
    "attn_cp_size": ("--attn-cp-size", "2"),
    "dcp_size": ("--dcp-size", "2"),
    "dwdp_size": ("--dwdp-size", "2"),
    "cuda_graph_backend_decode": ("--cuda-graph-backend-decode", "breakable"),
    "cuda_graph_backend_prefill": ("--cuda-graph-backend-prefill", "full"),
    "cuda_graph_prefill_max_context": ("--cuda-graph-prefill-max-context", "4096"),
    "cuda_graph_config": ("--cuda-graph-config", '{"decode": {"backend": "full"}}'),
    "kv_canary": ("--kv-canary", "log"),
    "dllm_algorithm": ("--dllm-algorithm", "LowConfidence"),
    "radix_cache_backend": ("--radix-cache-backend", "flexkv"),
    "rl_on_policy_target": ("--rl-on-policy-target", "fsdp"),
    "attn_dp_size": ("--attn-dp-size", "2"),
    "disaggregation_decode_host_receive_threshold": ("--disaggregation-decode-host-receive-threshold", "0.5"),
    "debug_tensor_dump_output_folder": ("--debug-tensor-dump-output-folder", "dumps"),
    "msprobe_dump_config": ("--msprobe-dump-config", "msprobe.json"),
    "startup_weight_load_mode": ("--startup-weight-load-mode", "overlap"),
}
SWITCHES = (
    "enable_hierarchical_cache", "enable_lmcache", "enable_flexkv", "enable_hisparse", "enable_mixed_chunk",
    "enable_dp_attention", "enable_prefill_cp", "enable_prefill_context_parallel", "enable_dsa_prefill_context_parallel",
    "enable_two_batch_overlap", "enable_pdmux", "enable_torch_compile", "debug_cuda_graph", "enable_unified_memory",
    "enable_page_major_kv_layout", "disable_hybrid_swa_memory", "enable_memory_saver", "enable_streaming_session", "is_embedding", "encoder_only", "enable_mis",
    "prefill_only_disable_kv_cache", "enable_deterministic_inference", "use_ray",
    "smg_grpc_mode", "grpc_mode", "enable_pd_role_switch", "enable_unified_cache_external_linker", "enable_kv_cache_sharding",
    "enable_layernorm_sp", "enable_lean_attention", "enable_nvidia_megakernel", "enable_amd_monokernel", "enable_paged_experts",
    "language_model_only", "language_only", "skip_server_warmup", "enable_linear_replayssm", "enable_linear_replayssm_spec",
    "enable_int8_mamba_checkpoint", "enable_mamba_cache_stochastic_rounding",
)  # fmt: skip
FLAGS |= {name: ("--" + name.replace("_", "-"),) for name in SWITCHES}
if not releases.has("worker app"):
    FLAGS["tokenizer_worker_num"] = ("--tokenizer-worker-num", "2")
REFUSED, FLAGS = set(FLAGS), {name: flags for name, flags in FLAGS.items() if name in OPTIONS}

VALUES = {  # typed flags: how the refusal begins
    ("--page-size", "1", "--freekv-digest", "cuboid-mean"): "--page-size 1: a page of one token",
    ("--chunked-prefill-size", "1003"): "--chunked-prefill-size 1003: expected a multiple of --page-size 8; "
    "use --chunked-prefill-size 1000",
    ("--kv-cache-dtype", "bf16", "--dtype", "float16"): "--kv-cache-dtype bf16: the model runs in another type",
    (
        "--kv-cache-dtype",
        "fp8_e5m2",
    ): "--kv-cache-dtype fp8_e5m2: SGLang does not serve it with --device cpu; use --kv-cache-dtype fp8_e4m3",
    ("--kv-cache-dtype", "fp8_e4m3", "--freekv-kv-dtype", "int8"): "--freekv-kv-dtype int8: expected auto with --kv-cache-dtype fp8_e4m3, ",
    (
        "--kv-cache-dtype",
        "fp8_e4m3",
        "--quantization-param-path",
        "s.json",
    ): "--quantization-param-path: expected none, because SGLang divides",
    ("--max-total-tokens", "31"): "--max-total-tokens 31: expected at least 32, 4 pages of --page-size 8",
    ("--grammar-backend", "xgrammar"): "--grammar-backend xgrammar: only llguidance has been tested with --device cpu",
    ("--moe-dense-tp-size", "1", "--tp-size", "2"): "--moe-dense-tp-size 1: with it SGLang pads a prefill to a multiple of --tp-size",
    ("--moe-a2a-backend", "deepep", "--tp-size", "2"): "--moe-a2a-backend deepep: with it SGLang pads a prefill to a multiple of --tp-size",
    ("--freekv-dense-layers", ","): "--freekv-dense-layers ,: expected comma-separated layer numbers",
    ("--freekv-budget", "-32"): "--freekv-budget -32: expected a non-negative multiple of --page-size 8; use --freekv-budget 32",
    ("--freekv-dense-layers", f"{LAYERS}"): f"--freekv-dense-layers {LAYERS}: expected layers of this model that attend to the "
    f"whole context, which are 0 to {LAYERS - 1}",
    ("--freekv-dense-layers", ALL_LAYERS): f"--freekv-dense-layers {ALL_LAYERS}: expected at least one layer left",
    ("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "all"): "--enable-lora: SGLang pins memory for adapters",
    ("--cuda-graph-backend-prefill", "breakable"): "--cuda-graph-backend-prefill breakable: there is no prefill graph with --device cpu",
    ("--lora-paths", "/nowhere"): "--lora-paths: SGLang pins memory for adapters",
    ("--tp-size", "2"): "--tp-size 2: with --device cpu SGLang starts a rank for each NUMA node",
    ("--dp-size", "2"): "--dp-size 2: with --device cpu SGLang starts a rank for each NUMA node",
    ("--max-running-requests", "0"): "--max-running-requests 0: expected at least 1",
    ("--max-running-requests", "-3"): "--max-running-requests -3: expected at least 1",
    ("--mem-fraction-static", "-0.1"): "--mem-fraction-static -0.1: expected more than 0, ",
    ("--nnodes", "0"): "--nnodes 0: expected at least 1",
    ("--context-length", "-5"): "--context-length -5: expected at least 1",
    (
        "--freekv-budget",
        "99999999999999999999",
    ): "--freekv-budget 99999999999999999999: expected a non-negative multiple of --page-size 8; use --freekv-budget 262136",
    ("--freekv-kv-dtype", "int8", "--freekv-recall", "copy-engine"): "--freekv-kv-dtype int8: expected --freekv-recall zero-copy, ",
    ("--freekv-kv-dtype", "int8", "--freekv-host-layout", "nhd"): "--freekv-kv-dtype int8: expected --freekv-host-layout hnd, ",
    ("--freekv-host-memory", "100000"): "--freekv-host-memory 100000: 1 rank(s) on this machine take 100000 GiB",
    ("--freekv-host-memory", "0.0001"): "--freekv-host-memory 0.0001: expected at least 0.0002 GiB, 4 pages of --page-size 8 of this "
    "model's KV; use 0.0002 or more",
    ("--freekv-host-memory", "50000", "--tp-size", "2"): "--freekv-host-memory 50000: 2 rank(s) on this machine take 100000 GiB",
}
FINE = (  # what must stay possible
    ("--tp-size", "2", "--device", "cuda"),
    ("--dp-size", "2", "--device", "cuda"),
    ("--disable-radix-cache",),
    ("--disable-cuda-graph",),
    ("--cuda-graph-backend-decode", "disabled"),
    ("--cuda-graph-backend-prefill", "disabled"),
    ("--cuda-graph-backend-prefill", "breakable", "--device", "cuda"),
    ("--chunked-prefill-size", "-1"),
    ("--kv-cache-dtype", "bf16"),
    ("--kv-cache-dtype", "fp8_e4m3", "--freekv-recall", "copy-engine", "--freekv-host-layout", "nhd"),
    ("--page-size", "64"),
    ("--context-length", "1024"),
    ("--freekv-dense-layers", ALL_LAYERS[2:]),
    ("--freekv-dense-layers", "none"),
    ("--freekv-host-memory", "0.25"),
    ("--freekv-host-memory", "0.0005"),
    ("--freekv-device-cache", "4096"),
    ("--freekv-kv-dtype", "int8"),
    ("--freekv-kv-dtype", "int8", "--kv-retrieval", "quest", "--freekv-canary", "full"),
    ("--freekv-kv-dtype", "int8", "--page-size", "512", "--freekv-budget", "4096"),
    ("--freekv-recall", "copy-engine", "--freekv-host-layout", "nhd"),
)

GEMMA = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "query_pre_attn_scalar": 64}
QWEN = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 4096, "max_window_layers": 2}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": {"type": "float", "num_bits": 8}}
MODELS = {  # name: (changes to the Llama config, what the refusal says)
    "latent attention": (
        {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "kv_lora_rank": 64,
            "q_lora_rank": None,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
        },
        "latent attention (MLA)",
    ),
    "mamba": ({"architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1"}, "mixes full attention with Mamba"),
    "encoder-decoder": (
        {"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "d_model": 384},
        "cross attention",
    ),
    "sliding window": (MISTRAL | {"sliding_window": 4096}, "sliding window of 4096 tokens"),
    "sliding window in some layers": (
        QWEN | {"use_sliding_window": True},
        "mixes 2 full attention layers with 6 that attend to a sliding window of 4096 tokens",
    ),
    "sliding window that SGLang asserts on": (
        {"architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", "sliding_window": 4096, "sliding_window_pattern": 4},
        "sliding window of 4096 tokens",
    ),
    "a backend that SGLang asserts on": (
        {"architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", "sliding_window": 32768, "sliding_window_pattern": 4},
        "SGLang does not serve this model so (One of the attention backends in",
    ),
    "local attention": (
        {"architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text", "attention_chunk_size": 8192},
        "chunks of 8192 tokens",
    ),
    "two pools": (
        {"architectures": ["MellumForCausalLM"], "model_type": "mellum", "layer_types": ["full_attention"] * LAYERS},
        "SGLang keeps its KV in two pools",
    ),
    "soft-capping": (GEMMA | {"sliding_window": 65536, "attn_logit_softcapping": 50.0}, ": it caps attention logits"),
    "dual chunk": (
        {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "dual_chunk_attention_config": {"chunk_size": 1024}},
        "dual chunk attention",
    ),
    "asymmetric": ({"v_head_dim": 32}, "keys and values differ in width (64 and 32)"),
    "encoder": ({"architectures": ["BertModel"], "model_type": "bert"}, "does not generate text"),
    "fp8 checkpoint": ({"quantization_config": MODELOPT}, "--kv-cache-dtype auto: this checkpoint asks for fp8"),
}
WINDOWED = "it mixes {} full attention layers with {} that attend to a sliding window of 128 tokens, and this mix is not served so far"
FAMILIES = {  # model type of transformers: (architecture, what its config says otherwise, what the refusal says)
    "gemma2": ("Gemma2ForCausalLM", {"sliding_window": 128}, WINDOWED.format(4, 4) + "; it caps attention logits"),
    # SGLang 0.5.23 itself reads this family only if all its layers have one width
    "gemma4_text": ("Gemma4ForCausalLM", {"sliding_window": 128, "global_head_dim": 256}, WINDOWED.format(2, 6)),
    "gemma4": ("Gemma4ForConditionalGeneration", {"text_config": {"num_hidden_layers": 8, "sliding_window": 128}}, WINDOWED.format(2, 6)),
    "llama4": (
        "Llama4ForConditionalGeneration",
        {"text_config": {"num_hidden_layers": 8, "attention_chunk_size": 512}},
        "it mixes 2 full attention layers with 6 that attend to chunks of 512 tokens, and this mix is not served so far; ",
    ),
    "lfm2": ("Lfm2ForCausalLM", {}, "it mixes full attention with Mamba, convolution or linear attention layers, and "),
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        {},
        "it reads images or sound, and of such models only Gemma3, Mistral3, ",
    ),
    "deepseek_v32": ("DeepseekV32ForCausalLM", {}, "its latent attention (MLA)"),
}
SERVED = {
    "a window that is switched off": QWEN | {"use_sliding_window": False},
    "a window longer than the context": MISTRAL | {"sliding_window": 40960},
    "Qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
}


HYBRIDS = {"qwen3_next": "Qwen3NextForCausalLM", "qwen3_5_text": "Qwen3_5ForCausalLM", "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"}
HYBRID_VALUES = {  # flags, with a model of which layers 3 and 7 have full attention: how the refusal begins
    ("--mamba-radix-cache-strategy", "no_buffer"): "--mamba-radix-cache-strategy no_buffer: expected extra_buffer",
    ("--mamba-radix-cache-strategy", "extra_buffer_lazy"): "--mamba-radix-cache-strategy extra_buffer_lazy: expected extra_buffer",
    ("--linear-attn-backend", "flashinfer"): "--linear-attn-backend flashinfer: expected triton",
    ("--linear-attn-prefill-backend", "cutedsl"): "--linear-attn-prefill-backend cutedsl: expected triton",
    ("--linear-attn-decode-backend", "cutedsl"): "--linear-attn-decode-backend cutedsl: expected triton",
    (
        "--page-size",
        "48",
        "--freekv-budget",
        "960",
        "--freekv-sink",
        "48",
        "--freekv-window",
        "96",
    ): "--page-size 48: expected a divisor of --mamba-track-interval 256, and one of 64 or a multiple of it",
    ("--mamba-track-interval", "300"): "--page-size 8: expected a divisor of --mamba-track-interval 300",
    ("--mamba-track-interval", "0"): "--mamba-track-interval 0: expected at least 8, a page; leave it out",
    ("--mamba-full-memory-ratio", "0"): "--mamba-full-memory-ratio 0: expected a number above 0, ",
    ("--mamba-full-memory-ratio", "nan"): "--mamba-full-memory-ratio nan: expected a number above 0, ",
    ("--max-mamba-cache-size", "4"): "--max-mamba-cache-size 4: expected at least 5, which one request takes for its states",
    ("--max-mamba-cache-size", "0", "--disable-radix-cache"): "--max-mamba-cache-size 0: expected at least 1, ",
    ("--max-mamba-cache-size", "3", "--disable-overlap-schedule"): "--max-mamba-cache-size 3: expected at least 4, ",
    (
        "--freekv-dense-layers",
        "1",
    ): "--freekv-dense-layers 1: expected layers of this model that attend to the whole context, which are 3, 7; ",
    ("--freekv-dense-layers", "3,7"): "--freekv-dense-layers 3,7: expected at least one layer left",
}
HYBRID_FINE = (
    (),
    ("--freekv-canary", "full"),
    ("--page-size", "16"),
    ("--page-size", "128"),
    ("--disable-radix-cache",),
    ("--max-mamba-cache-size", "5"),
    ("--max-mamba-cache-size", "1", "--disable-radix-cache"),
    ("--max-mamba-cache-size", "4", "--disable-overlap-schedule"),
    ("--freekv-dense-layers", "3"),
)
HYBRIDS_FINE = tuple(HYBRIDS)
SEEING = {
    "mistral3": "Mistral3ForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
}
SLIDING = {
    "cohere2": "Cohere2ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
}
if not releases.has("tree paths"):
    untested = "--kv-retrieval freekv does not serve Qwen3NextForCausalLM: its gated delta nets have been tested with SGLang 0.5.23 alone; "
    HYBRIDS, HYBRID_VALUES, HYBRID_FINE, HYBRIDS_FINE = {"qwen3_next": HYBRIDS["qwen3_next"]}, {(): untested}, (), ()


def command(*flags, model=NEEDLE_MODEL) -> list[str]:
    device = () if "--device" in flags else ("--device", "cpu")
    return ["--model-path", str(model), *device, "--kv-retrieval", "freekv", *flags]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    changes = {name: change for name, (change, _) in MODELS.items()} | SERVED
    for name, change in changes.items():
        (directory / name).mkdir()
        (directory / name / "config.json").write_text(json.dumps(NEEDLE_CONFIG | change))
    for kind, (architecture, change, _) in (FAMILIES | {kind: (name, {}, None) for kind, name in (SEEING | SLIDING).items()}).items():
        config = AutoConfig.for_model(kind, **{"num_hidden_layers": LAYERS} | change)
        config.architectures = [architecture]
        config.save_pretrained(directory / kind)
    for kind, architecture in HYBRIDS.items():
        config = AutoConfig.for_model(kind, num_hidden_layers=LAYERS)
        file = directory / kind / "config.json"
        file.parent.mkdir()
        file.write_text(json.dumps(config.to_dict() | {"architectures": [architecture], "full_attention_interval": 4}))
    return {name: directory / name for name in (*changes, *FAMILIES, *SEEING, *SLIDING, *HYBRIDS)}


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    """`sglang serve` on its way to a refusal, beside the other cases."""
    script = "from sglang.cli.main import main; main()"  # what the `sglang` on PATH does
    command_line = [sys.executable, "-P", "-c", script, "serve", *command("--enable-mixed-chunk")]
    with subprocess.Popen(
        command_line, cwd=tmp_path_factory.mktemp("cwd"), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        yield process
        process.kill()


@pytest.fixture(scope="module")
def facts(models, launcher):
    cases = {f"flag {name}": {"argv": command(*flags)} for name, flags in FLAGS.items()}
    cases |= {f"value {flags}": {"argv": command(*flags)} for flags in VALUES}
    cases |= {f"fine {flags}": {"argv": command(*flags)} for flags in FINE}
    cases |= {f"model {name}": {"argv": command(model=model)} for name, model in models.items()}
    cases |= {f"hybrid {flags}": {"argv": command(*flags, model=models["qwen3_next"])} for flags in (*HYBRID_VALUES, *HYBRID_FINE)}
    cases |= {f"arkvale {name}": {"argv": command("--kv-retrieval", "arkvale", model=models[name])} for name in ("mamba", "asymmetric")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0")  # cores of one rank
        return run(cases)


@pytest.fixture(scope="module")
def refusal(facts):
    """The one line that a case is refused with."""

    def line(case: str) -> str:
        outcome = facts["outcomes"][case]
        assert outcome.get("exit") == 2, outcome
        text = outcome["stderr"].splitlines()[-1].removeprefix("error: ")
        assert len(text) < 500 and any(word in text for word in ("; use ", "; leave ", "; choose ", "; name ")), text
        return text

    return line


def test_every_option_was_looked_at():
    """A new release fails here: read what its new options do, refuse them or not, and write them down."""
    assert OPTIONS - LOOKED_AT == set()
    assert {flag.name for flag in refused_flags.FLAGS} <= LOOKED_AT


def test_every_refused_option_is_tested_and_is_a_flag(facts):
    assert {flag.name for flag in refused_flags.FLAGS} == REFUSED
    assert {flags[0] for flags in FLAGS.values()} <= set(facts["flags"])


@pytest.mark.parametrize("name", FLAGS)
def test_flag(refusal, name):
    assert refusal(f"flag {name}").startswith(f"{FLAGS[name][0]}") and ": " in refusal(f"flag {name}")


@pytest.mark.parametrize("flags", VALUES, ids=str)
def test_value(refusal, flags):
    assert refusal(f"value {flags}").startswith(VALUES[flags])


@pytest.mark.parametrize("flags", FINE, ids=str)
def test_fine(facts, flags):
    assert facts["outcomes"][f"fine {flags}"].get("config"), facts["outcomes"][f"fine {flags}"]


@pytest.mark.parametrize("name", MODELS)
def test_model(refusal, name):
    assert MODELS[name][1] in refusal(f"model {name}")


@pytest.mark.parametrize("kind", FAMILIES)
def test_family(refusal, kind):
    assert f"ForCausalLM: {FAMILIES[kind][2]}" in refusal(f"model {kind}").replace("ConditionalGeneration", "CausalLM")


@pytest.mark.parametrize("kind", SLIDING)
def test_window_layers_are_served_where_servers_ran_with_them(facts, refusal, kind):
    if releases.has("tree paths") or kind == "gpt_oss":
        assert facts["outcomes"][f"model {kind}"].get("config"), facts["outcomes"][f"model {kind}"]
    else:
        assert "its sliding-window layers have been tested with SGLang 0.5.23 alone; " in refusal(f"model {kind}")


@pytest.mark.parametrize("kind", SEEING)
def test_models_that_read_images_are_served_where_servers_ran_with_them(facts, refusal, kind):
    if releases.has("tree paths"):
        assert facts["outcomes"][f"model {kind}"].get("config"), facts["outcomes"][f"model {kind}"]
    else:
        assert "it reads images, and has been tested with SGLang 0.5.23 alone; " in refusal(f"model {kind}")


def test_gpt_oss_gets_our_attention_and_on_a_cpu_other_experts(facts):
    """SGLang asserts that its attention is on a list, and chooses kernels for it that no CPU runs."""
    outcome = facts["outcomes"]["model gpt_oss"]
    assert outcome["settings"]["attention_backend"] == "freekv" and outcome["fields"]["moe_runner_backend"] == "'triton'"


def test_states_are_served_where_servers_ran_with_them(monkeypatch):
    from sglang_freekv.scheduler_patch import states

    for module in (refusals, states):
        monkeypatch.setattr(module, "gated_delta_nets", lambda model: "a config")
    monkeypatch.setattr(refusals, "mambaish_config", lambda model: "a config")
    rules = [rule for rule in refusals.MODEL_RULES if "gated delta nets" in rule.message]
    for unified in (True, False):
        monkeypatch.setattr(refusals.releases, "has", lambda name, has=unified: has)
        assert [bool(rule.applies(None, None)) for rule in rules] == [not unified]
    for blackwell in (True, False):
        monkeypatch.setattr(states, "is_blackwell", lambda found=blackwell: found)
        with pytest.raises(Refusal, match="on a Blackwell GPU; use --kv-retrieval none") if blackwell else nullcontext():
            states.refuse_states(SimpleNamespace(device="cuda"), None, FreeKVConfig())
    states.refuse_states(SimpleNamespace(device="cpu"), None, FreeKVConfig())


@pytest.mark.parametrize("flags", HYBRID_VALUES, ids=str)
def test_value_beside_linear_attention(refusal, flags):
    assert refusal(f"hybrid {flags}").startswith(HYBRID_VALUES[flags])


@pytest.mark.parametrize("case", [*(f"hybrid {flags}" for flags in HYBRID_FINE), *(f"model {kind}" for kind in HYBRIDS_FINE)])
def test_fine_beside_linear_attention(facts, case):
    assert facts["outcomes"][case].get("config"), facts["outcomes"][case]


@pytest.mark.parametrize("name", ["mamba", "asymmetric"])
def test_a_model_is_refused_for_the_method_that_was_typed(refusal, name):
    assert refusal(f"arkvale {name}").startswith("--kv-retrieval arkvale does not serve ")


@pytest.mark.parametrize("name", SERVED)
def test_served_model(facts, name):
    assert facts["outcomes"][f"model {name}"].get("config"), facts["outcomes"][f"model {name}"]


def test_what_sglang_insists_on(monkeypatch):
    """Some models make SGLang choose an attention backend, a page size or a prefill graph over the user's."""

    def graphs(prefill: str) -> SimpleNamespace:
        return SimpleNamespace(prefill=SimpleNamespace(backend=prefill))

    resolved = {"kv_cache_dtype": "auto", "page_size": 32, "chunked_prefill_size": 4096}
    resolved |= {"max_total_tokens": None, "device": "cuda", "grammar_backend": "xgrammar"}
    resolved["cuda_graph_config"] = graphs("breakable")
    resolved |= {"tp_size": 2, "moe_a2a_backend": "none", "moe_dense_tp_size": None, "enable_lora": None, "lora_paths": None}
    resolved |= {"dp_size": 1, "mem_fraction_static": 0.88}
    monkeypatch.setattr(refusals, "_full_layers", lambda model: list(range(6)))
    model = SimpleNamespace(quantization=None, is_hybrid_swa=False, context_len=(1 << 25) - 32)
    backends = ("freekv", "freekv")

    def refuse(backends=backends, canary="off", kv_dtype="auto", **changes):
        names = dict(zip(("prefill_attention_backend", "decode_attention_backend"), backends), attention_backend="freekv")
        refusals.refuse_resolved(
            SimpleNamespace(**names | resolved | changes), model, FreeKVConfig("quest", canary=canary, kv_dtype=kv_dtype)
        )

    refuse()
    insists = "--kv-retrieval quest: SGLang insists on the attention backends triton and freekv here; use --kv-retrieval none"
    with pytest.raises(Refusal, match=insists):
        refuse(backends=("triton", "freekv"))
    with pytest.raises(Refusal, match="--page-size 32: SGLang insists on 128 here; use --page-size 128"):
        refuse(page_size=128)
    model.context_len += 1
    with pytest.raises(
        Refusal, match="--page-size 32: expected at most 1048575 pages in the longest context, and 33554401 tokens are more; "
    ):
        refuse()
    model.context_len -= 1
    refuse(cuda_graph_config=graphs("disabled"))
    with pytest.raises(
        Refusal, match="SGLang chooses --cuda-graph-backend-prefill full here, .*; use --cuda-graph-backend-prefill disabled"
    ):
        refuse(cuda_graph_config=graphs("full"))
    for model.head_dim in (80, 128, 36):
        refuse()
        refuse(kv_dtype="fp8_e4m3")
        if model.head_dim % 8 == 0:
            refuse(kv_dtype="int8")
    with pytest.raises(Refusal, match="--freekv-kv-dtype int8: expected a head_dim of a multiple of 8, .* the model's is 36; leave it out"):
        refuse(kv_dtype="int8")
    model.head_dim = 38
    with pytest.raises(
        Refusal, match="--kv-cache-dtype fp8_e5m2: expected a head_dim of a multiple of 4, .* the model's is 38; use --kv-c"
    ):
        refuse(kv_dtype="fp8_e5m2")
    model.head_dim = 128
    for capability, dtype, expected in (
        ((9, 0), "fp8_e4m3", nullcontext()), ((8, 0), "fp8_e5m2", nullcontext()), ((8, 0), "int8", nullcontext()),
        ((8, 6), "fp8_e4m3", pytest.raises(Refusal, match="--kv-cache-dtype fp8_e4m3: expected a GPU of compute capability 8.9 or more")),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        with expected:
            refuse(kv_dtype=dtype)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model.is_hybrid_swa = True
    refuse()
    for is_new, expected in ((True, nullcontext()), (False, pytest.raises(Refusal, match="--freekv-canary full: with window layers it"))):
        monkeypatch.setattr(refusals.releases, "has", lambda name: is_new)
        with expected:
            refuse(canary="full")
    with envs.SGLANG_SWA_EVICTION_INTERVAL.override(256):
        with pytest.raises(Refusal, match="SGLANG_SWA_EVICTION_INTERVAL: expected at most 128"):
            refuse(device="cpu", grammar_backend="llguidance", tp_size=1)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", ["SGLANG_ENABLE_METADATA_GLUE_GRAPH", "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"])
def test_a_variable_that_would_change_steps_or_pools_behind_us_is_refused(name, known, monkeypatch):
    fields = {name: SimpleNamespace(get=lambda: True)} if known else {}
    monkeypatch.setattr(refusals, "envs", SimpleNamespace(**fields))
    assert refusals._is_on(name) == known
    rule = next(rule for rule in refusals.RESOLVED_RULES if rule.message.startswith(name))
    assert rule.applies(None, None, None) == known


@pytest.mark.parametrize(
    ("available", "ranks", "advice"),
    [
        (3.456, 1, "the 3.46 GiB that `ulimit -v` has left; use 3.45 or less, or `ulimit -v unlimited`"),
        (3.456, 2, "the 3.46 GiB that `ulimit -v` has left; use 1.72 or less, or `ulimit -v unlimited`"),
        (0.078, 1, "the 0.08 GiB that `ulimit -v` has left; use 0.07 or less, or `ulimit -v unlimited`"),
        (0.078, 2, "the 0.08 GiB that `ulimit -v` has left, too little for a host pool; use --kv-retrieval none, or `ulimit -v unlimited`"),
        (0, 1, "the 0.00 GiB that `ulimit -v` has left, too little for a host pool; use --kv-retrieval none, or `ulimit -v unlimited`"),
    ],
)
def test_host_memory_that_is_not_there(available, ranks, advice):
    from sglang_freekv.memory_pool import host_memory
    from sglang_freekv.scheduler_patch import refusals

    bytes_left = int(available * GIB)
    room = host_memory.Room(bytes_left, "`ulimit -v`", "`ulimit -v unlimited`")
    refusals.refuse_host_memory(available / ranks, ranks, replace(room, num_bytes=bytes_left + 1))
    with pytest.raises(Refusal) as caught:
        refusals.refuse_host_memory(4, ranks, room)
    expected = f"--freekv-host-memory 4: {ranks} rank(s) on this machine take {4 * ranks} GiB, expected at most {advice}"
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"has_attention_sinks": True}, "learned attention sinks"),
        ({"compress_ratios": [4, 128]}, "compressed over tokens"),
        ({"hf_config": {"architectures": ["MiniMaxM3SparseForCausalLM"]}}, "natively sparse"),
    ],
)
def test_rarer_models(changes, reason, monkeypatch):
    """Properties of SGLang's ModelConfig that no small checkpoint has alone."""
    from sglang.srt.configs.model_config import AttentionArch

    from sglang_freekv.scheduler_patch import refusals

    plain = {
        "attention_arch": AttentionArch.MHA, "is_encoder_decoder": False, "attention_chunk_size": None, "is_hybrid_swa": False,
        "sliding_window_size": None, "context_len": 4096, "has_attention_sinks": False, "has_asymmetric_kv": False,
        "is_generation": True, "is_multimodal": False, "linear_attn_registry_result": None,
        "hf_text_config": SimpleNamespace(num_hidden_layers=8),
    }  # fmt: skip

    def refuse(**changes):
        hf_config = SimpleNamespace(**{"architectures": ["LlamaForCausalLM"]} | changes.pop("hf_config", {}))
        hf_config.get_text_config = lambda: hf_config
        refusals.refuse_model(SimpleNamespace(hf_config=hf_config, **(plain | changes)))

    refuse()
    with pytest.raises(Refusal, match=reason):
        refuse(**changes)
    windows = {"is_hybrid_swa": True, "swa_attention_layer_ids": [0, 2], "full_attention_layer_ids": [1, 3], "sliding_window_size": 128}
    granite, gpt_oss, other = (
        windows | {"has_attention_sinks": True, "hf_config": {"architectures": [f"{name}ForCausalLM"]}}
        for name in ("GraniteSWA", "GptOss", "Step3p5")
    )
    monkeypatch.setattr(refusals.releases, "has", lambda name: True)
    refuse(**granite)
    refuse(**gpt_oss)
    monkeypatch.setattr(refusals.releases, "has", lambda name: False)
    refuse(**gpt_oss)
    with pytest.raises(Refusal, match="its sliding-window layers have been tested with SGLang 0.5.23 alone"):
        refuse(**granite)
    with pytest.raises(Refusal, match="mixes 2 full attention layers with 6 that attend to a sliding window.* learned attention sinks"):
        refuse(**other)


def test_the_launcher_ends_with_the_refusal(launcher):
    stdout, stderr = launcher.communicate(timeout=200)
    assert launcher.returncode == 2
    assert stderr.splitlines()[-1].startswith("error: --enable-mixed-chunk: ")
    assert "Traceback" not in stderr and "Load weight" not in stdout + stderr
