"""The oracle against hand-computed cases, plain transformers generation, and its own identities."""

import functools
import math
import random

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import oracle
from benchmarks.needle import weights
from likeness import assert_same_but_for_ties
from oracle import Oracle, OracleResult, OracleSettings, candidates, decode_step, digest, mass, pinned, score, select, two_bit

ALWAYS, SOMETIMES, NEVER = 1.5, 0.6, -1.5  # tau
FLAGS_SEEN = {ALWAYS: {True}, SOMETIMES: {True, False}, NEVER: {False}}

PROMPT = random.Random(0).choices(range(128), k=61)
FAMILIES = {  # model type, query heads, kv heads, head_dim, more
    "llama": ("llama", 4, 2, 16, {}),
    "llama-mha": ("llama", 4, 4, 16, {}),
    "mistral-mqa": ("mistral", 4, 1, 16, {"sliding_window": None}),
    "qwen2": ("qwen2", 8, 2, 8, {}),
    "qwen3": ("qwen3", 6, 3, 16, {}),
    "qwen3-moe": ("qwen3_moe", 6, 2, 16, {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():  # tensors this small gain nothing from more, and lose much when other processes want the cores
    before = torch.get_num_threads()
    yield torch.set_num_threads(1)
    torch.set_num_threads(before)


def tiny_model(family):
    kind, query_heads, kv_heads, head_dim, more = FAMILIES[family]
    heads = {"num_attention_heads": query_heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    shape = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **heads, **shape, **more), dtype=torch.float32)
    with torch.no_grad():  # biases and norms start as constants, and small weights make every token alike
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.ndim > 1 else 0.3))
    return model.eval()


def transformers_greedy(model, prompt, new_tokens):
    """Dense greedy generation by transformers itself."""
    model.set_attn_implementation("sdpa")
    model.generation_config.update(eos_token_id=None, output_logits=True, return_dict_in_generate=True)
    output = model.generate(torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False)
    return output.sequences[0, len(prompt) :].tolist(), torch.cat(output.logits)


def assert_equals_transformers(result, tokens, logits):
    assert result.tokens == tokens
    torch.testing.assert_close(result.logits, logits, rtol=0, atol=1e-4)


def test_digest_covers_full_pages_and_score_bounds_them():
    keys = torch.tensor([[[3, -4, 5, 0], [1, -1, 2, -2], [0, 1, 0, 4], [-1, 0, 1, 2], [9, 9, 9, 9]]])
    maxima, minima = digest(keys, 2, "min-max")
    assert maxima.tolist() == [[[3, -1, 5, 0], [0, 1, 1, 4]]]
    assert minima.tolist() == [[[1, -4, 2, -2], [-1, 0, 0, 2]]]
    query = torch.tensor([[[1, -2, 0, 1], [-1, 0, 0, 0]]])
    # first query head, first page: 1 * 3, -2 * -4, 0, 1 * 0; second page: 1 * 0, -2 * 0, 0, 1 * 4
    assert score(query, maxima, minima).tolist() == [[[11, 4], [-1, 1]]]
    upper, lower = digest(keys, 4, "cuboid-mean")  # centre 1, -1.5, 2.5, 1; distance 1.25, 1.75, 1.75, 2
    assert upper.tolist() == [[[2.25, 0.25, 4.25, 3]]] and lower.tolist() == [[[-0.25, -3.25, 0.75, -1]]]
    assert two_bit(keys[:, :2], 2).tolist() == [[[[3, -4, 5, 0], [1, -1, 2, -2]]]]  # of two keys each is at a corner
    levels = two_bit(keys[:, :4], 4)[0, 0]
    torch.testing.assert_close(levels[:, 0], torch.tensor([3, 1 / 3, 1 / 3, -1]))  # 3, 1, 0, -1 on levels 4 / 3 apart: 1 is in the middle
    torch.testing.assert_close(levels[:, 3], torch.tensor([0.0, -2, 4, 2]))  # 0, -2, 4, 2 on -2, 0, 2, 4
    assert two_bit(torch.ones(1, 4, 1), 4).tolist() == [[[[1]] * 4]]
    expected = torch.tensor([[[11.0, 1.0]]]).logsumexp(-1, keepdim=True)
    torch.testing.assert_close(mass(query[:, :1], two_bit(keys[:, :2], 2)), expected)


@pytest.mark.parametrize(
    "n, sink, window, pages",
    [
        (1, 4, 4, ([0], [])),
        (8, 4, 4, ([0, 1], [])),
        (9, 4, 4, ([0, 2], [1])),
        (12, 4, 4, ([0, 2], [1])),
        (13, 4, 4, ([0, 3], [1, 2])),
        (12, 4, 8, ([0, 1, 2], [])),
        (13, 4, 8, ([0, 2, 3], [1])),
        (5, 12, 4, ([0, 1], [])),
    ],
)
def test_pinned_and_candidate_pages_of_four_tokens(n, sink, window, pages):
    settings = OracleSettings(budget=20, sink=sink, window=window, tau=NEVER, page=4)
    assert (pinned(n, settings), candidates(n, settings)) == pages


QUERY = torch.tensor([[[2.0, 0, 0, 0], [0, 2, 0, 0]]])


def keys_scoring(*scores):  # each key alone in its page, by the two heads of QUERY
    return torch.tensor([[[*pair, 0, 0] for pair in scores]])


@pytest.mark.parametrize("kept, expected, gap", [(1, [1], 0.25), (2, [1, 2], 0), (3, [1, 2, 3], math.inf)])
def test_select_averages_probabilities_and_breaks_ties_towards_lower_pages(kept, expected, gap):
    # probabilities of pages 1, 2, 3: .8 .1 .1 and 0 .5 .5, so .4 .3 .3; averaged scores would rank page 1 last
    keys = keys_scoring((50, 50), (math.log(8), -40), (0, 0), (0, 0), (50, 50))
    (selection,) = select(QUERY, keys, 5, OracleSettings(budget=2 + kept, sink=1, window=1, tau=NEVER, page=1))
    assert selection.pages == expected
    assert selection.gap == pytest.approx(gap, abs=1e-6)


def test_page_leaving_the_window_is_selectable_for_the_next_step_only():
    settings = OracleSettings(budget=4, sink=0, window=2, tau=NEVER, page=2)
    keys = keys_scoring((1, 1), (2, 2), (0, 0), (1, 1), (3, 3), (0, 0))
    assert select(QUERY, keys, 6, settings)[0].pages == [0]
    assert select(QUERY, keys, 7, settings)[0].pages == [2]


@pytest.mark.parametrize("dense_below", [4, 6, 8])
def test_all_pages_are_selected_up_to_a_length(dense_below):
    """The next step's length decides for the next step: its page leaves the window with the limit."""
    settings = OracleSettings(budget=4, sink=0, window=2, tau=NEVER, page=2, dense_below=dense_below)
    keys = keys_scoring((1, 1), (2, 2), (0, 0), (1, 1), (3, 3), (0, 0), (0, 0))
    assert select(QUERY, keys, 6, settings)[0].pages == ([0, 1] if dense_below >= 6 else [0])
    assert select(QUERY, keys, 7, settings)[0].pages == ([0, 1, 2] if dense_below >= 8 else [2])


@pytest.mark.parametrize("tau, corrected, attended", [(0.5, False, [0, 2, 4]), (0.51, True, [0, 3, 4])])
def test_only_similarity_below_tau_is_corrected(tau, corrected, attended):
    settings = OracleSettings(budget=3, sink=1, window=1, tau=tau, page=1)
    previous = torch.tensor([[[4.0, 0, 0, 0], [7, 0, 0, 0]]])  # cosines 1 and 0
    speculative = select(QUERY, keys_scoring((0, 0), (0, 0), (1, 1), (0, 0), (0, 0)), 5, settings)
    step = decode_step(QUERY, keys_scoring((0, 0), (0, 0), (0, 0), (1, 1), (0, 0)), previous, speculative, settings)
    assert step.similarity == [0.5]
    assert (step.corrected, step.attended) == ([corrected], [attended])


def corners_by_loops(numbers, kind):
    """Of a box in one dimension."""
    if kind == "min-max":
        return max(numbers), min(numbers)
    centre = (max(numbers) + min(numbers)) / 2
    distance = sum(abs(number - centre) for number in numbers) / len(numbers)
    return centre + distance, centre - distance


SCALING = 0.3  # of attention; some models have another than 1 / sqrt(D)


def mass_by_loops(q, columns):
    """Sum of the exponentials of the logits of a page, whose keys are given by dimension."""
    levels = [[min(column) + level * (max(column) - min(column)) / 3 for level in range(4)] for column in columns]
    moved = [[min(at, key=lambda level: abs(level - x)) for x in column] for column, at in zip(columns, levels)]
    return sum(math.exp(sum(x * y for x, y in zip(q, key)) * SCALING) for key in zip(*moved))


def attended_by_loops(query, keys, settings):
    """Pages attended to when the query selects in a context of these keys: numbers and loops, one kv head at a time."""
    pages = [list(range(keys.shape[1]))[i : i + settings.page] for i in range(0, keys.shape[1], settings.page)]
    middle = list(range(len(pages)))[settings.sink // settings.page : -(settings.window // settings.page)]
    attended = []
    for group, head_keys in zip(query.tolist(), keys.tolist(), strict=True):
        pooled = dict.fromkeys(middle, 0.0)
        for q in group:
            columns = {j: [[head_keys[t][d] for t in pages[j]] for d in range(len(q))] for j in middle}
            if settings.digest == "two-bit":
                weights = {j: mass_by_loops(q, columns[j]) for j in middle}
            else:
                box = {j: [corners_by_loops(column, settings.digest) for column in columns[j]] for j in middle}
                scores = {j: sum(max(x * corner for corner in box[j][d]) for d, x in enumerate(q)) for j in middle}
                weights = {j: math.exp(scores[j] * SCALING) for j in middle}
            pooled = {j: pooled[j] + weights[j] / sum(weights.values()) for j in middle}
        best = sorted(middle, key=lambda j: (-pooled[j], j))[: settings.selected_pages(keys.shape[1])]
        attended.append(sorted({*range(len(pages))} - {*middle} | {*best}))
    return attended


@pytest.mark.parametrize("tau", [ALWAYS, SOMETIMES, NEVER])
@pytest.mark.parametrize("sink, window, kind", [(4, 4, "cuboid-mean"), (0, 8, "min-max"), (4, 8, "two-bit")])
def test_decoding_equals_loops_over_tokens(tau, sink, window, kind):
    heads, group, dim, prompt, total = 3, 2, 4, 13, 49
    settings = OracleSettings(sink + window + 12, sink, window, tau, page=4, dense_layers=(), digest=kind)
    torch.manual_seed(0)
    all_keys, all_values = torch.randn(2, heads, total, dim)
    queries = torch.randn(heads, group, total, dim)
    for t in range(1, total):  # neighbouring queries resemble each other, more or less
        queries[:, :, t] += queries[:, :, t - 1] * 0.5 * (1 + t % 3)
    generation, seen = oracle.Generation(settings, [0]), set()
    prefill = queries[:, :, :prompt].flatten(0, 1), all_keys[:, :prompt], all_values[:, :prompt]
    generation.attend(0, *prefill, scaling=SCALING, prefill=True)
    for n in range(prompt + 1, total + 1):
        generation.step = []
        previous, query, keys, values = *queries[:, :, n - 2 : n].unbind(2), all_keys[:, :n], all_values[:, :n]
        output = generation.attend(0, query.reshape(-1, 1, dim), keys, values, scaling=SCALING, prefill=False)
        corrected = [bool(x < tau) for x in torch.cosine_similarity(query, previous, dim=-1).mean(-1)]
        now, speculated = attended_by_loops(query, keys, settings), attended_by_loops(previous, keys, settings)
        expected = [now[head] if corrected[head] else speculated[head] for head in range(heads)]
        assert (generation.step[0].corrected, generation.step[0].attended) == (corrected, expected)
        mask = torch.stack([torch.isin(torch.arange(n) // 4, torch.tensor(pages)) for pages in expected])[:, None]
        masked = F.scaled_dot_product_attention(query, keys, values, mask, scale=SCALING)
        torch.testing.assert_close(output.view_as(query), masked)
        seen |= {*corrected}
    assert seen == FLAGS_SEEN[tau]


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_and_budget_of_whole_context_equal_transformers(family):
    model = tiny_model(family)
    tokens, logits = transformers_greedy(model, PROMPT, 12)
    assert len(set(tokens)) > 5
    assert_equals_transformers(Oracle(model).generate(PROMPT, 12), tokens, logits)
    settings = OracleSettings(budget=72, sink=16, window=16, tau=SOMETIMES, page=8)  # the last step decodes token 72
    result = Oracle(model).generate(PROMPT, 12, settings)
    assert_equals_transformers(result, tokens, logits)
    assert result.attended[-1][1] == [[*range(9)]] * FAMILIES[family][2]


def test_a_layer_has_its_own_threshold():
    reference, sizes = Oracle(tiny_model("llama")), dict(budget=40, sink=8, window=8, page=8, dense_layers=())
    result = reference.generate(PROMPT, 20, OracleSettings(**sizes, tau=(NEVER, ALWAYS, NEVER)))
    assert {tuple(map(tuple, map(set, step))) for step in result.corrected} == {((False,), (True,), (False,))}
    one = reference.generate(PROMPT, 20, OracleSettings(**sizes, tau=SOMETIMES))
    alike = reference.generate(PROMPT, 20, OracleSettings(**sizes, tau=(SOMETIMES,) * 3))
    assert (alike.steps, alike.tokens) == (one.steps, one.tokens)


@pytest.mark.parametrize("family, tau", [("llama", ALWAYS), ("qwen3-moe", SOMETIMES), ("qwen2", NEVER)])
def test_small_budget_changes_what_is_attended_and_is_never_exceeded(family, tau):
    reference = Oracle(tiny_model(family))
    settings = OracleSettings(budget=40, sink=8, window=8, tau=tau, page=8, dense_layers=(1,))
    result = reference.generate(PROMPT, 20, settings)
    assert not torch.allclose(result.logits, reference.generate(PROMPT, 20).logits, atol=0.1)
    assert len(result.steps) == len(result.tokens) - 1 == 19
    assert {flag for step in result.corrected for layer in (0, 2) for flag in step[layer]} == FLAGS_SEEN[tau]
    for n, step in enumerate(result.steps, start=62):
        assert not any(step[1].corrected) and step[1].attended == [[*range(-(-n // 8))]] * len(step[1].attended)
        for pages in step[0].attended + step[2].attended:
            assert pages == sorted({*pages, 0, (n - 1) // 8})
            assert len(pages) == 5 and sum(min(8, n - 8 * j) for j in pages) <= settings.budget


def test_stop_token_ends_the_result_and_settings_do_not_leak():
    reference = Oracle(tiny_model("llama"))
    result = reference.generate(PROMPT, 8)
    best, second = sorted(result.logits[0].tolist(), reverse=True)[:2]
    assert result.margin[0] == pytest.approx(best - second)
    reference.generate(PROMPT, 4, OracleSettings(budget=24, sink=8, window=8, tau=NEVER, page=8))
    stopped = reference.generate(PROMPT, 8, stop_token_ids=[result.tokens[2]])
    assert stopped.tokens == result.tokens[: result.tokens.index(result.tokens[2]) + 1]


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:5]], ids=["beyond the window", "within it"])
@pytest.mark.parametrize("kind", ["granite_swa", "gpt_oss"])
def test_windows_and_learned_sinks_are_those_of_transformers(kind, prompt):
    pytest.importorskip(f"transformers.models.{kind}")
    turns = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16, "num_hidden_layers": 4, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "intermediate_size": 96}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **turns, **heads), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (2.0 if name.endswith("sinks") else 0.2))
    model.set_attn_implementation("eager")
    model.generation_config.update(eos_token_id=None, output_logits=True, return_dict_in_generate=True)
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
    assert_equals_transformers(
        Oracle(model.eval()).generate(prompt, 8), expected.sequences[0, len(prompt) :].tolist(), torch.cat(expected.logits)
    )


FILLERS = (
    " The library keeps a copy of every file that was changed since the last release.",
    " If the value is not given, the program reads it from the configuration file.",
    " The names in this list are sorted by the date of their first use.",
)
FACTS = {"silver garden": "430041", "winter market": "807256", "paper engine": "119638"}


@pytest.fixture(scope="module")
def needle():
    model = AutoModelForCausalLM.from_pretrained(weights.MODEL, dtype=torch.float32)
    return model, functools.partial(AutoTokenizer.from_pretrained(weights.MODEL).encode, add_special_tokens=False)


def needle_prompt(length, subject):
    """About ``length`` tokens of prose with the facts spread over it, and a question about one of them."""
    prose = random.Random(0).choices(FILLERS, k=length // 17)  # tokens of a filler
    for i, (key, value) in enumerate(FACTS.items()):
        prose.insert((2 * i + 1) * len(prose) // 6, f" The special magic number for {key} is {value}.")
    return f"<s><|user|>{''.join(prose)}<|user|>What is the special magic number for {subject}?<|assistant|>"


def test_needle_model_with_budget_of_whole_context_equals_transformers(needle):
    model, encode = needle
    prompt = encode(needle_prompt(400, "paper engine"))
    tokens, logits = transformers_greedy(model, prompt, 5)
    settings = OracleSettings(budget=512, sink=64, window=64, tau=SOMETIMES, page=32)
    assert_equals_transformers(Oracle(model).generate(prompt, 5, settings), tokens, logits)


@pytest.mark.parametrize("subject, tau", [*zip(FACTS, [ALWAYS, SOMETIMES, NEVER], strict=True)])
def test_needle_is_found_within_a_quarter_of_the_context(needle, subject, tau):
    model, encode = needle
    prompt, answer = encode(needle_prompt(2048, subject)), encode(f" {FACTS[subject]}")
    assert len(prompt) > 4 * 512
    settings = OracleSettings(budget=512, sink=64, window=64, tau=tau, page=32)
    assert Oracle(model).generate(prompt, len(answer), settings).tokens == answer


def test_only_a_tie_may_be_decided_otherwise():
    result = OracleResult([3, 1, 2], torch.tensor([[0.0, 1, 2, 9], [0, 5, 4.999, 1], [0, 1, 7, 2]]), [])
    for tokens in ([3, 1, 2], [3, 2, 0]):
        assert_same_but_for_ties([tokens], [result], 0.01, 0.3)
    for tokens, tie, least in (
        ([3, 3, 2], 0.01, 0.3),
        ([3, 2, 2], 0.0005, 0.3),
        ([3, 1, 1], 0.01, 0.3),
        ([3, 2, 2], 0.01, 0.5),
        ([3, 1], 0.01, 0),
    ):
        with pytest.raises(AssertionError):
            assert_same_but_for_ties([tokens], [result], tie, least)
