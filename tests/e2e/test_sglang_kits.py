"""SGLang's own test kits against servers with KV retrieval.

Left out are the probes that ask for facts of the world, which no model of the needle questions knows. The branching kit states what a
tree for linear-attention models does; a tree for full attention hits at the branching point one request earlier.
"""

from __future__ import annotations

import functools
import json
import random
import unittest

import pytest
import torch
from sglang.test.kits import abort_timeout_kit, radix_cache_server_kit
from sglang.test.kits.abort_timeout_kit import AbortAllMixin, RunningTimeoutTwoWaveMixin, WaitingTimeoutMixin
from sglang.test.kits.basic_api_contract_kit import BasicAPIContractMixin
from sglang.test.kits.basic_decode_correctness_kit import BasicDecodeCorrectnessMixin
from sglang.test.kits.basic_scheduler_stress_kit import BasicSchedulerStressMixin
from sglang.test.kits.cache_hit_kit import run_multiturn_cache_hit_test
from sglang.test.kits.pause_generation_kit import PauseResumeInPlaceMixin
from sglang.test.kits.prefix_cache_branching_kit import PrefixCacheBranchingMixin
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from serving import NEEDLE_MODEL, freekv


class OnTheFleet(unittest.TestCase):
    """A kit's mixin finds its server in ``base_url`` and ``process``."""

    __test__ = False

    @pytest.fixture(autouse=True)
    def _server(self, fleet):
        type(self).base_url, type(self).process = fleet.small.url, fleet.small.process


class TestApiContract(OnTheFleet, BasicAPIContractMixin):
    __test__ = True


class TestDecodeCorrectness(OnTheFleet, BasicDecodeCorrectnessMixin):
    __test__ = True
    test_capital_france = test_basic_math = test_color_completion = None


class TestSchedulerStress(OnTheFleet, BasicSchedulerStressMixin):
    __test__ = True
    test_streaming_response = test_concurrent_requests = None


class TestAbortAll(OnTheFleet, AbortAllMixin):
    __test__ = True
    abort_all_num_requests = 16


class TestBranching(OnTheFleet, PrefixCacheBranchingMixin):
    __test__ = True
    cache_chunk_size = 32
    test_prefix_cache_branching = None

    def test_the_branching_point_is_hit(self):
        tokenizer = AutoTokenizer.from_pretrained(NEEDLE_MODEL)
        prefix = "hi" * 257
        shared = len(tokenizer(prefix).input_ids) // 32 * 32
        texts = [prefix + word * 128 for word in ("this", "here", "that")]
        cached = [self.send_request_helper(text)["meta_info"]["cached_tokens"] for text in texts]
        assert cached == [0, shared, shared] and shared > 0


@pytest.fixture(scope="module")
def random_model(tmp_path_factory):
    """A Llama of random weights with the vocabulary of 32,000 that the radix kit draws from."""
    path = tmp_path_factory.mktemp("random-llama")
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=32000, max_position_embeddings=8192, **shape)).save_pretrained(path)
    AutoTokenizer.from_pretrained(NEEDLE_MODEL).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def random_servers(serve, random_model):
    """One for the tree kits, and one for each kind of timeout."""
    flags = [freekv(256) | {"--model-path": random_model, "--max-running-requests": rows} for rows in (32, 1, 16)]
    with serve(*flags, env=[{}, {"SGLANG_REQ_WAITING_TIMEOUT": "1"}, {"SGLANG_REQ_RUNNING_TIMEOUT": "2"}]) as servers:
        yield servers


@pytest.fixture
def random_server(random_servers):
    return random_servers[0]


def test_radix_attention_kit(random_server, monkeypatch):
    random.seed(0)
    tree = functools.partial(radix_cache_server_kit.gen_radix_tree, num_nodes=160, chunk_len=128)
    monkeypatch.setattr(radix_cache_server_kit, "gen_radix_tree", tree)
    radix_cache_server_kit.run_radix_attention_test(random_server.url)
    assert random_server.flush()["host_pages_used"] == 0


def test_pause_kit(random_server):
    settings = {"base_url": random_server.url, "pause_num_requests": 8, "pause_max_new_tokens": 1000, "pause_duration": 2}
    type("Case", (PauseResumeInPlaceMixin, unittest.TestCase), settings)().test_pause_resume_in_place()
    assert random_server.flush()["rows_used"] == 0


def test_multiturn_cache_hit_kit(random_server, random_model, tmp_path):
    turns = [[{"value": f"{question} " * 300}, {"value": "yes"}] for question in ("why", "how", "when", "where")] * 8
    dataset = tmp_path / "sharegpt.json"  # the format of the dataset that the kit would download
    dataset.write_text(json.dumps([{"conversations": turn} for turn in turns]))
    result = run_multiturn_cache_hit_test(random_server.url, str(random_model), num_clients=8, num_rounds=4, dataset_path=str(dataset))
    assert result["overall"]["cache_hit_rate"] > 0.5
    assert random_server.flush()["host_pages_used"] == 0


@pytest.mark.parametrize("kit", [WaitingTimeoutMixin, RunningTimeoutTwoWaveMixin])
def test_timeout_kits(random_servers, kit, monkeypatch):
    monkeypatch.setattr(abort_timeout_kit, "_REQUEST_TIMEOUT", 600)  # seconds of its clients: on a busy machine 2,048 tokens take a minute
    server = random_servers[1 if kit is WaitingTimeoutMixin else 2]
    settings = {"base_url": server.url, "process": server.process}
    if kit is WaitingTimeoutMixin:  # one request keeps the only row longer than the other may wait, on a fast machine too
        settings["waiting_timeout_max_new_tokens"] = 2048
    case = type("Case", (kit, unittest.TestCase), settings)()
    (name,) = [name for name in dir(kit) if name.startswith("test_")]
    getattr(case, name)()
    assert server.flush()["rows_used"] == 0
