"""Sizes of weights: by the headers of their files, or computed; quantised ones as published."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from safetensors.torch import save_file

from made_up import model_file
from sglang_freekv.config import GIB
from sglang_freekv.releases import is_since

SMALL = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000, "num_attention_heads": 4, "head_dim": 64,
         "num_key_value_heads": 2}  # fmt: skip
MATRICES = 2 * [(256, 256), (128, 256), (128, 256), (256, 256), (512, 256), (512, 256), (256, 512)]  # of SMALL: outputs, inputs
ELEMENTS = sum(outputs * inputs for outputs, inputs in MATRICES)
REST = 2 * (2 * 1000 * 256 + 5 * 256)  # embeddings, head and norms in bfloat16


def group(bits: int, kind: str = "int", strategy: str = "group", **more) -> dict:
    return {"targets": ["Linear"], "weights": {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True} | more}


def compressed(form: str, *groups: dict, ignore: tuple = ("lm_head",)) -> dict:
    named = {f"group_{index}": each for index, each in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": named, "ignore": list(ignore)}


def per_matrix(num_bytes) -> int:
    return sum(num_bytes(outputs, inputs) for outputs, inputs in MATRICES)


QUANTISED = {  # quantization_config, and the bytes of the matrices by hand
    "fp8": ({"quant_method": "fp8"}, ELEMENTS + 4 * len(MATRICES)),
    "fp8, blocks": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        ELEMENTS + 4 * per_matrix(lambda outputs, inputs: (outputs // 128) * (inputs // 128)),
    ),
    "fp8, compressed-tensors": (
        compressed("float-quantized", group(8, "float", "channel")),
        ELEMENTS + 2 * per_matrix(lambda outputs, inputs: outputs),
    ),
    "int4, compressed-tensors": (
        compressed("pack-quantized", group(4, group_size=128)),
        ELEMENTS // 2 + 2 * ELEMENTS // 128 + 16 * len(MATRICES),
    ),
    "nvfp4, compressed-tensors": (
        compressed("nvfp4-pack-quantized", group(4, "float", "tensor_group", group_size=16)),
        ELEMENTS // 2 + ELEMENTS // 16 + 8 * len(MATRICES),
    ),
    "mxfp4, compressed-tensors": (
        compressed("mxfp4-pack-quantized", group(4, "float", group_size=32)),
        ELEMENTS // 2 + ELEMENTS // 32,
    ),
    "mxfp4, of experts alone": ({"quant_method": "mxfp4"}, 2 * ELEMENTS),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
        ELEMENTS // 2 + ELEMENTS // 128 * 2 + ELEMENTS // 128 // 2,
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
        ELEMENTS // 2 + ELEMENTS // 128 * 2 + ELEMENTS // 128 // 2 + 4 * per_matrix(lambda outputs, inputs: inputs),
    ),
    "nvfp4, modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        ELEMENTS // 2 + ELEMENTS // 16 + 8 * len(MATRICES),
    ),
}


@pytest.mark.parametrize("method", QUANTISED)
def test_a_quantised_checkpoint_at_its_true_size(ask, tmp_path, method):
    description, matrices = QUANTISED[method]
    answer = ask(None, "--model-path", model_file(tmp_path, SMALL | {"quantization_config": description}), "--gpu", 8)
    assert answer.found["weights"].figures["bytes"] == matrices + REST, answer.err


def test_gptq_weights_that_sglang_serves_no_more_are_refused(ask, tmp_path):
    symmetric, _ = QUANTISED["gptq"]
    answer = ask(None, "--model-path", model_file(tmp_path, SMALL | {"quantization_config": symmetric | {"sym": False}}), "--gpu", 8)
    if is_since("0.5.23"):
        assert "GPTQ with (bits, sym) (4, False), expected one of [(4, True), (8, True)]" in answer.err
    else:
        assert answer.found["weights"].figures["bytes"]


def test_modules_that_are_left_out_keep_the_models_dtype(ask, tmp_path):
    ignored = ("lm_head", "re:.*self_attn.*", "model.layers.1.mlp.down_proj")
    description = compressed("float-quantized", group(8, "float", "tensor"), ignore=ignored)
    answer = ask(None, "--model-path", model_file(tmp_path, SMALL | {"quantization_config": description}), "--gpu", 8)
    quantised = 5 * 512 * 256
    assert answer.found["weights"].figures["bytes"] == quantised + 2 * 5 + 2 * (ELEMENTS - quantised) + REST


def test_experts_are_quantised_and_their_router_is_not(ask, tmp_path):
    experts = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
               "moe_intermediate_size": 128, "rope_scaling": None}  # fmt: skip
    plain = ask(None, "--model-path", model_file(tmp_path, SMALL | experts), "--gpu", 8).found["weights"].figures
    halved = model_file(tmp_path, SMALL | experts | {"quantization_config": {"quant_method": "fp8"}})
    fp8 = ask(None, "--model-path", halved, "--gpu", 8).found["weights"].figures
    attention, mlp = 2 * (2 * 256 * 256 + 2 * 128 * 256), 2 * 8 * 3 * 128 * 256
    scales = 4 * (2 * 4 + 2 * 8 * 2)  # a scale for each matrix; those of gate and up lie in one
    assert plain["bytes"] - fp8["bytes"] == attention + mlp - scales


@pytest.mark.parametrize("shape, description, published", [
    ({}, compressed("float-quantized", group(8, "float", "channel")), 9.08e9),
    ({}, {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}, 5.73e9),
    ({"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
     {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}, 39.8e9),
])  # fmt: skip
def test_llama_as_published(ask, tmp_path, shape, description, published):
    answer = ask(None, "--model-path", model_file(tmp_path, shape | {"quantization_config": description}), "--gpu", 80)
    assert answer.found["weights"].figures["bytes"] == pytest.approx(published, rel=0.01)


def test_the_server_can_quantise_at_start(ask, tmp_path):
    path = model_file(tmp_path, SMALL)
    online = ask(None, "--model-path", path, "--gpu", 8, "--quantization", "fp8")
    assert online.found["weights"].figures["bytes"] == ELEMENTS + 4 * len(MATRICES) + REST
    assert online.flag("--quantization") == "fp8"


def test_a_method_that_is_not_known_is_not_guessed(ask, tmp_path):
    path = model_file(tmp_path, SMALL | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}})
    answer = ask(None, "--model-path", path, "--gpu", 8, "--host-memory", 64)
    assert answer.code == 0 and answer.found["weights"].value.startswith("unknown")
    assert "without device memory" in answer.report["verdict"]
    given = ask(None, "--model-path", path, "--gpu", 8, "--host-memory", 64, "--weights-gib", 1.5)
    assert given.found["weights"].figures["bytes"] == 1.5 * GIB and given.report["verdict"].startswith("fits: ")


# ---- the files tell


def test_the_headers_of_the_files_come_first(ask, tmp_path):
    path = model_file(tmp_path, SMALL)
    save_file({"a": torch.zeros(1000, 256), "norm": torch.zeros(256, dtype=torch.bfloat16)}, path / "model-1.safetensors")
    save_file({"b": torch.zeros(512, 256, dtype=torch.bfloat16)}, path / "model-2.safetensors")
    answer = ask(None, "--model-path", path, "--gpu", 8, "--tp", 2)
    assert answer.found["weights"].figures["bytes"] == 2 * (1000 * 256 + 256 + 512 * 256)  # float32 is cast, as SGLang does
    assert answer.tiers["weights a rank"]["all_requests"] == 1000 * 256 + 2 * 256 + 512 * 256
    assert answer.found["weights"].value.endswith("by the headers of its files")
    quantised = model_file(tmp_path, SMALL | {"quantization_config": {"quant_method": "fp8"}})
    answer = ask(None, "--model-path", quantised, "--gpu", 8)
    assert answer.found["weights"].figures["bytes"] == 4 * 1000 * 256 + 2 * (256 + 512 * 256)  # as they lie there


def test_an_index_tells_where_the_files_are_elsewhere(ask, tmp_path):
    path = model_file(tmp_path, SMALL)
    index = {"metadata": {"total_size": 123_456_789}, "weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    answer = ask(None, "--model-path", path, "--gpu", 8)
    assert answer.found["weights"].figures == {"bytes": 123_456_789, "parameters": None}


@pytest.mark.parametrize("content", [
    b"", b"\x05", struct.pack("<Q", 1 << 62) + b"{}", struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 9) + b'{"a": {}}',
    struct.pack("<Q", 60) + b'{"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0]}}',
])  # fmt: skip
def test_broken_files_are_one_line(ask, tmp_path, content):
    path = model_file(tmp_path, SMALL)
    (path / "model.safetensors").write_bytes(content)
    answer = ask(None, "--model-path", path, "--gpu", 8)
    assert (answer.code, answer.err.count("\n")) == (2, 1) and "expected safetensors, found" in answer.err


def test_a_description_beside_the_config_counts(ask, tmp_path):
    path = model_file(tmp_path, SMALL)
    quantization = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ["lm_head", "model.layers.1*"]}
    (path / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": quantization}))
    answer = ask(None, "--model-path", path, "--gpu", 8)
    half = ELEMENTS // 2
    assert answer.found["weights"].figures["bytes"] == half // 2 + half // 16 + 8 * 7 + 2 * half + REST, answer.err


def test_embeddings_that_are_the_head_count_once(ask, tmp_path):
    apart, tied = (
        ask(None, "--model-path", model_file(tmp_path, SMALL | {"tie_word_embeddings": tied}), "--gpu", 8) for tied in (False, True)
    )
    assert apart.found["weights"].figures["bytes"] - tied.found["weights"].figures["bytes"] == 2 * 1000 * 256
