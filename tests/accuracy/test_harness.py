"""The offline engine against transformers: tokens, what methods are given, and what is attended to."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from benchmarks.accuracy.method import Budget, Prompt, Step, Trace
from benchmarks.accuracy.model import OfflineModel
from benchmarks.accuracy.tally import Tally
from benchmarks.needle import tasks, weights

BUDGET, LAYERS, PROMPT, NEW = Budget(24, sink=4, window=16, page=4), 3, 61, 12
FAMILIES = {  # model type, query heads, kv heads, head_dim, more
    "llama": ("llama", 4, 2, 16, {}),
    "llama-mha-rope-scaled": (
        "llama", 4, 4, 16,
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                             "original_max_position_embeddings": 32}},
    ),
    "qwen2": ("qwen2", 8, 2, 8, {}),
    "qwen3": ("qwen3", 6, 3, 16, {}),
}  # fmt: skip


@dataclass(frozen=True)
class Full:
    prompt_queries = None

    def begin(self, prompt: Prompt, budget: Budget):
        return ToyCache(prompt, lambda n: torch.arange(n))


@dataclass(frozen=True)
class Window:
    """Sink and window of the budget."""

    prompt_queries = None

    def begin(self, prompt: Prompt, budget: Budget):
        return ToyCache(prompt, lambda n: torch.tensor([token for token in range(n) if token < budget.sink or token >= n - budget.window]))


@dataclass
class ToyCache:
    prompt: Prompt
    visible: object
    steps: list[Step] = field(default_factory=list)
    trace: Trace | None = None

    def attend(self, step: Step) -> torch.Tensor:
        self.steps.append(step)
        keys, values = (
            torch.cat((of_prompt, torch.stack([getattr(each, name) for each in self.steps], dim=2)), dim=2)
            for of_prompt, name in ((self.prompt.keys, "key"), (self.prompt.values, "value"))
        )
        tokens = self.visible(keys.shape[2])
        grouped = step.query.unflatten(1, (keys.shape[1], -1))
        weights = (grouped @ keys[:, :, tokens].mT * self.prompt.scale).softmax(-1)
        self.trace = Trace(torch.full(step.key.shape[:2], len(tokens)))
        return (weights @ values[:, :, tokens]).flatten(1, 2)


@dataclass(frozen=True)
class Recorded:
    """Keeps every cache it begins."""

    method: object
    caches: list = field(default_factory=list)

    def begin(self, prompt, budget):
        self.caches.append(self.method.begin(prompt, budget))
        return self.caches[-1]


def tiny(family: str) -> OfflineModel:
    kind, query_heads, kv_heads, head_dim, more = FAMILIES[family]
    heads = {"num_attention_heads": query_heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    shape = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS, "max_position_embeddings": 256}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **heads, **shape, **more), dtype=torch.float32)
    with torch.no_grad():  # biases and norms start as constants, and small weights make every token alike
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.ndim > 1 else 0.3))
    model.generation_config.eos_token_id = None
    return OfflineModel(model)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request) -> OfflineModel:
    return tiny(request.param)


@pytest.fixture(scope="module")
def needle() -> OfflineModel:
    return OfflineModel(weights.MODEL)


@pytest.fixture(scope="module")
def token_ids() -> torch.Tensor:
    return torch.randint(128, (3, PROMPT), generator=torch.Generator().manual_seed(0))


def generated(model: OfflineModel, token_ids: torch.Tensor, new: int, **settings) -> list[list[int]]:
    output = model.model.generate(token_ids, attention_mask=torch.ones_like(token_ids), max_new_tokens=new, do_sample=False, **settings)
    return output[:, token_ids.shape[1] :].tolist()


def test_the_full_method_gives_the_tokens_of_generate(model, token_ids):
    assert model.decode(model.prefill(token_ids), [Full()] * LAYERS, BUDGET, NEW) == generated(model, token_ids, NEW)


def test_questions_are_answered_as_generate_answers_them_each_to_its_own_end(needle):
    names = ("magic-number", "code-word", "multi-value")
    prompts = [tasks.make_prompt(np.random.default_rng(seed), names[seed % 3], 500) for seed in range(6)]
    token_ids = torch.tensor([list(prompt.token_ids) for prompt in prompts])
    (stop,) = needle.stop_tokens
    expected = [answer[: (answer + [stop]).index(stop) + 1] for answer in generated(needle, token_ids, 12, pad_token_id=stop)]
    answers = needle.decode(needle.prefill(token_ids), [Full()] * needle.layers, BUDGET, 12, needle.stop_tokens)
    assert answers == expected and len(set(map(len, answers))) > 1
    assert sum(prompt.is_answered_by(answer) for prompt, answer in zip(prompts, answers)) >= 4


def test_a_batch_is_its_prompts_one_by_one(model, token_ids):
    methods = [Full()] + [Window()] * (LAYERS - 1)
    together = model.decode(model.prefill(token_ids), methods, BUDGET, NEW)
    assert together == [model.decode(model.prefill(each[None]), methods, BUDGET, NEW)[0] for each in token_ids]
    assert together != model.decode(model.prefill(token_ids), [Full()] * LAYERS, BUDGET, NEW)


def test_methods_are_given_what_the_layers_compute(model, token_ids):
    cache, heads = DynamicCache(), model.config.num_key_value_heads
    model.model(token_ids, past_key_values=cache)
    prompts = model.prefill(token_ids).prompts
    positions = torch.arange(PROMPT).expand(3, heads, PROMPT)
    for number, prompt in enumerate(prompts):
        torch.testing.assert_close(prompt.keys, cache.layers[number].keys)
        torch.testing.assert_close(prompt.values, cache.layers[number].values)
        torch.testing.assert_close(prompt.rotate(prompt.plain_keys, positions), prompt.keys, rtol=0, atol=0)
        torch.testing.assert_close(prompt.rotate(prompt.keys, -positions), prompt.plain_keys)
        assert (prompt.layer, prompt.layers, prompt.group) == (number, LAYERS, prompt.queries.shape[1] // heads)
    last = model.prefill(token_ids, queries=5).prompts
    assert all(torch.equal(few.queries, prompt.queries[:, :, -5:]) for few, prompt in zip(last, prompts))


def test_queries_are_those_of_this_layers_input_and_of_the_one_before(model, token_ids):
    recorded = Recorded(Full())
    answers = model.decode(model.prefill(token_ids), [recorded] * LAYERS, BUDGET, 4)
    whole = torch.cat((token_ids, torch.tensor(answers)[:, :-1]), dim=1)
    inputs = model.model(whole, output_hidden_states=True).hidden_states  # of each layer, [B, n, hidden]
    cos, sin = model.decoder.rotary_emb(inputs[0], torch.arange(whole.shape[1])[None])

    def query(layer: int, hidden: torch.Tensor) -> torch.Tensor:
        attention = model.decoder.layers[layer].self_attn
        plain = attention.q_proj(model.decoder.layers[layer].input_layernorm(hidden)).unflatten(-1, (-1, model.head_dim))
        plain = getattr(attention, "q_norm", torch.nn.Identity())(plain).transpose(1, 2)
        return apply_rotary_pos_emb(plain, plain, cos, sin)[0]

    for layer, cache in enumerate(recorded.caches):
        expected = {"query": query(layer, inputs[layer]), "early_query": query(layer, inputs[max(0, layer - 1)])}
        for step in cache.steps:
            for name, of_all in expected.items():
                torch.testing.assert_close(getattr(step, name), of_all[:, :, step.position], rtol=1e-4, atol=1e-4)
    assert [step.position for step in cache.steps] == [PROMPT, PROMPT + 1, PROMPT + 2]


def test_a_window_attends_to_what_it_says(model, token_ids):
    """The same tokens as transformers with a mask, and none that lie outside."""
    prefilled, tally = model.prefill(token_ids), Tally(LAYERS)
    tokens = model.decode(prefilled, [Window()] * LAYERS, BUDGET, NEW, tally=tally)
    assert tally.summary()["by_layer"]["attended"] == [BUDGET.sink + BUDGET.window] * LAYERS

    cache = DynamicCache()
    fed = model.model(token_ids, past_key_values=cache).logits[:, -1:].argmax(-1)
    expected = [fed]
    for n in range(PROMPT + 1, PROMPT + NEW):
        seen = torch.tensor([token < BUDGET.sink or token >= n - BUDGET.window for token in range(n)])
        mask = torch.zeros(3, 1, 1, n).masked_fill(~seen, torch.finfo(torch.float32).min)
        fed = model.model(fed, past_key_values=cache, attention_mask=mask).logits.argmax(-1)
        expected.append(fed)
    assert tokens == torch.cat(expected, dim=1).tolist()

    outside = slice(BUDGET.sink, PROMPT + 1 - BUDGET.window)
    for prompt in prefilled.prompts:
        prompt.values[:, :, outside] = prompt.keys[:, :, outside] = torch.nan
    assert model.decode(prefilled, [Window()] * LAYERS, BUDGET, NEW) == tokens


def test_a_tally_counts_sequences_that_go_on_and_layers_where_the_method_acts():
    prompts = [SimpleNamespace(queries=torch.ones(2, 4, 1, 8), keys=torch.ones(2, 2, 1, 8))] * 2
    tally, reversed_head = Tally(2, dense_layers=1, watch_queries=True), torch.ones(2, 4, 8)
    reversed_head[:, :2] = -1  # those of kv head 0
    for _ in range(2):  # further prompts add to the same steps
        tally.begin(prompts)
        for alive, query in ((torch.tensor([True, True]), reversed_head), (torch.tensor([False, True]), reversed_head)):
            tally.add(0, query, Trace(torch.full((2, 2), 100)), alive)
            trace = Trace(torch.tensor([[1, 3], [5, 7]]), corrected=torch.tensor([[True, True], [False, True]]))
            tally.add(1, query, replace(trace, similarity=torch.tensor([[torch.nan, 0.5], [torch.nan, 0.5]])), alive)
    assert tally.summary() == {
        "mean": {"attended": round(28 / 6, 5), "corrected": round(4 / 6, 5), "similarity": 0.5},
        "by_layer": {"attended": [100, round(28 / 6, 5)], "corrected": [None, round(4 / 6, 5)], "similarity": [None, 0.5]},
        "query_similarity": {"by_step": [[0, 1], [0, 1]], "by_head": [[round(-1 / 3, 5), 1]] * 2},
    }


@pytest.mark.parametrize(
    "more, match", [({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "sliding_window"),
                    ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type dynamic")],
)  # fmt: skip
def test_attention_that_is_not_plain_is_refused(more, match):
    shape = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "max_position_embeddings": 64}
    config = AutoConfig.for_model("qwen2", num_attention_heads=4, num_key_value_heads=2, **shape, **more)
    with pytest.raises(ValueError, match=match):
        OfflineModel(AutoModelForCausalLM.from_config(config))
