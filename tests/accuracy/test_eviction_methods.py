"""Methods that keep a part of the context, each against its definition: one kv head, one token after the other, in lists."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from benchmarks.accuracy.method import Budget, Prompt, Step
from benchmarks.accuracy.methods import gather
from benchmarks.accuracy.methods.full import Full
from benchmarks.accuracy.methods.h2o import H2O, heaviness
from benchmarks.accuracy.methods.raas import RaaS
from benchmarks.accuracy.methods.razor import RazorAttention, repetition_scores, retrieval_heads
from benchmarks.accuracy.methods.snapkv import SnapKV
from benchmarks.accuracy.methods.streaming_llm import StreamingLLM

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, HEADS, GROUP, DIM, STEPS, LAYERS = 2, 2, 3, 16, 40, 3
BUDGET = Budget(total=96, sink=8, window=24, page=8)
MIXED = ((False, False), (True, False), (True, True))  # layer 1 is the prompt's


def rotate(keys, positions):
    angles = positions.double().unsqueeze(-1) / 100.0 ** (torch.arange(DIM // 2, device=keys.device) / (DIM // 2))
    first, second = keys.chunk(2, dim=-1)
    cos, sin = angles.cos().to(keys.dtype), angles.sin().to(keys.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def text(tokens, dtype=torch.float32, seed=0, layer=1):
    """A prompt of random tensors and the steps after it."""
    random = torch.Generator().manual_seed(seed)
    count = tokens + STEPS

    def draw(heads, size):
        return (size * torch.randn(BATCH, heads, count, DIM, generator=random)).to(DEVICE, dtype)

    plain_keys, values, plain_queries = draw(HEADS, 1.5), draw(HEADS, 1.0), draw(HEADS * GROUP, 1.5)
    keys, queries = (rotate(plain.double(), torch.arange(count, device=DEVICE)).to(dtype) for plain in (plain_keys, plain_queries))
    whole = Prompt(queries, keys, values, plain_keys, rotate, DIM**-0.5, layer, LAYERS)
    prompt = Prompt(*(each[:, :, :tokens].clone() for each in (queries, keys, values, plain_keys)), rotate, DIM**-0.5, layer, LAYERS)
    steps = [Step(queries[:, :, at], queries[:, :, at], keys[:, :, at], values[:, :, at], at) for at in range(tokens, count)]
    return prompt, steps, whole


@dataclass
class Head:
    """One kv head of one text, in float64: all tokens ``[n, D]``, queries ``[n, G, D]``, of which the first ``prompt`` are the prompt."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    plain_keys: torch.Tensor
    prompt: int
    number: int
    scale: float = DIM**-0.5

    def steps(self):
        return range(self.prompt, len(self.keys))

    def attend(self, at, kept):
        return mix(self.queries[at], self.keys[kept], self.values[kept])


def head_of(whole, prompt, batch, number):
    queries = whole.queries[batch, number * GROUP : (number + 1) * GROUP].cpu().double().transpose(0, 1)
    each = (tensor[batch, number].cpu().double() for tensor in (whole.keys, whole.values, whole.plain_keys))
    return Head(queries, *each, prompt.keys.shape[2], number)


def mix(queries, keys, values, multiplicity=None):
    odds = torch.exp(queries @ keys.T * DIM**-0.5)
    if multiplicity is not None:
        odds = odds * multiplicity
    return (odds / odds.sum(-1, keepdim=True)) @ values


def naive_full(head, budget):
    for at in head.steps():
        yield head.attend(at, list(range(at + 1))), at + 1


def naive_streaming(head, budget, reindexed):
    plain = [head.plain_keys[at] if at < head.prompt else rotate(key, torch.tensor(-at)) for at, key in enumerate(head.keys)]
    for at in head.steps():
        kept = [token for token in range(at + 1) if token < budget.sink or token > at - (budget.total - budget.sink)]
        if reindexed:
            keys = rotate(torch.stack([plain[token] for token in kept]), torch.arange(len(kept)))
            query = rotate(rotate(head.queries[at], torch.tensor(-at)), torch.tensor(len(kept) - 1))
            yield mix(query, keys, head.values[kept]), len(kept)
        else:
            yield head.attend(at, kept), len(kept)


def paid(head, at, kept):
    """Group mean of the attention of a query to each of the kept tokens."""
    return torch.softmax(head.queries[at] @ head.keys[kept].T * head.scale, dim=-1).mean(0).tolist()


def naive_h2o(head, budget, recent_share=0.5):
    recent = round(budget.total * recent_share)
    heavy = {token: 0.0 for token in range(head.prompt)}
    for at in range(head.prompt):
        for token, weight in enumerate(paid(head, at, list(range(at + 1)))):
            heavy[token] += weight

    def evict(now):
        while len(heavy) > budget.total:
            del heavy[min((token for token in heavy if token <= now - recent), key=heavy.get)]

    evict(head.prompt - 1)
    for at in head.steps():
        heavy[at] = 0.0
        evict(at)
        kept = sorted(heavy)
        yield head.attend(at, kept), len(kept)
        for token, weight in zip(kept, paid(head, at, kept)):
            heavy[token] += weight


def naive_snapkv(head, budget, observed, kernel, pooling):
    kept, first = list(range(head.prompt)), head.prompt - observed
    if head.prompt > budget.total:
        scores = [0.0] * first
        for query_head in range(GROUP):
            sums = [0.0] * first
            for at in range(first, head.prompt):
                weights = torch.softmax(head.queries[at, query_head] @ head.keys[: at + 1].T * head.scale, dim=-1)
                sums = [total + weights[token].item() for token, total in enumerate(sums)]
            for token in range(first):
                near = sums[max(0, token - kernel // 2) : token + kernel // 2 + 1]
                scores[token] += max(near) if pooling == "max" else sum(near) / kernel
        best = sorted(range(first), key=lambda token: -scores[token])[: budget.total - observed]
        kept = sorted(best) + list(range(first, head.prompt))
    for at in head.steps():
        kept.append(at)
        yield head.attend(at, kept), len(kept)


def naive_razor(head, budget, compensate=True):
    for at in head.steps():
        if MIXED[1][head.number]:
            yield head.attend(at, list(range(at + 1))), at + 1
            continue
        kept = [token for token in range(at + 1) if token < budget.sink or token > at - budget.window]
        gone = [token for token in range(at + 1) if token not in kept]
        keys, values, times = [*head.keys[kept]], [*head.values[kept]], [1.0] * len(kept)
        if compensate and gone:
            keys.append(head.keys[gone].mean(0)), values.append(head.values[gone].mean(0)), times.append(float(len(gone)))
        yield mix(head.queries[at], torch.stack(keys), torch.stack(values), torch.tensor(times)), len(keys)


def bounds(queries, keys):
    """The largest dot product ``[G]`` that a key within the bounds of these could have, dimension by dimension."""
    return torch.maximum(queries * keys.amax(0), queries * keys.amin(0)).sum(-1)


def naive_raas(head, budget, alpha=1e-4, top_share=None, keep_prompt=True):
    size, tokens = budget.page, list(range(head.prompt))
    if keep_prompt:
        fixed, pages, recent, held = tokens, [], [], size
        room = max(1, max(budget.total - head.prompt, budget.window) // size - 1)
    else:
        fixed, rest, held = tokens[: budget.sink], tokens[budget.sink :], budget.window
        room = (budget.total - budget.sink - budget.window) // size
        if len(rest) > room * size + held:
            dots = {token: (head.queries[head.prompt - 1] @ head.keys[token]).mean().item() for token in rest[:-held]}
            rest = sorted(sorted(dots, key=dots.get)[-room * size :]) + rest[-held:]
        pages, recent = [], rest
        while len(recent) > held:
            pages.append((head.prompt - 1, recent[:size]))
            recent = recent[size:]
    for at in head.steps():
        if len(recent) == held:
            if len(pages) == room:
                del pages[min(range(room), key=lambda number: (pages[number][0], number))]
            pages.append((at, recent[:size]))
            recent = recent[size:]
        recent = recent + [at]
        kept = [*fixed, *(token for _, page in pages for token in page), *recent]
        yield head.attend(at, kept), len(kept)
        before, after = ([part[i : i + size] for i in range(0, len(part), size)] for part in (fixed, recent))
        everything = before + [page for _, page in pages] + after
        logits = torch.stack([bounds(head.queries[at], head.keys[page]) for page in everything], dim=-1) * head.scale
        estimates = torch.softmax(logits, dim=-1).amax(0).tolist()
        if top_share is not None:
            alpha = sorted(estimates + [-1.0])[int(len(everything) * (1 - top_share))]
        estimates = estimates[len(before) :]
        pages = [(at if estimate > alpha else stamp, page) for (stamp, page), estimate in zip(pages, estimates)]


ROOMY = Budget(total=254, sink=8, window=24, page=8)  # 24 tokens above the prompt of 230
AVERAGE = {"observed": 16, "kernel": 5, "pooling": "avg"}
MAXIMUM = {"observed": 20, "kernel": 7, "pooling": "max"}
CASES = {
    "full": (Full(), naive_full, BUDGET, None),
    "streaming, reindexed": (StreamingLLM(), lambda *a: naive_streaming(*a, True), BUDGET, 96),
    "streaming, plain": (StreamingLLM(reindexed=False), lambda *a: naive_streaming(*a, False), BUDGET, 96),
    "h2o": (H2O(), naive_h2o, BUDGET, 96),
    "h2o, mostly heavy": (H2O(0.2), lambda *a: naive_h2o(*a, 0.2), BUDGET, 96),
    "snapkv, maximum": (SnapKV(**MAXIMUM), lambda *a: naive_snapkv(*a, **MAXIMUM), BUDGET, 96 + STEPS),
    "snapkv, average": (SnapKV(**AVERAGE), lambda *a: naive_snapkv(*a, **AVERAGE), BUDGET, 96 + STEPS),
    "razor": (RazorAttention(MIXED), naive_razor, BUDGET, None),
    "razor, no compensation": (RazorAttention(MIXED, False), lambda *a: naive_razor(*a, False), BUDGET, None),
    "raas, prompt longer than budget": (RaaS(0.01), lambda *a: naive_raas(*a, 0.01), BUDGET, None),
    "raas, prompt in budget": (RaaS(0.01), lambda *a: naive_raas(*a, 0.01), ROOMY, 254),
    "raas, half": (RaaS(top_share=0.5), lambda *a: naive_raas(*a, top_share=0.5), ROOMY, 254),
    "raas, pages": (RaaS(0.05, keep_prompt=False), lambda *a: naive_raas(*a, 0.05, keep_prompt=False), BUDGET, 96),
    "raas, pages, default": (RaaS(keep_prompt=False), lambda *a: naive_raas(*a, keep_prompt=False), BUDGET, 96),
    "raas, pages, half": (RaaS(top_share=0.5, keep_prompt=False), lambda *a: naive_raas(*a, 1, 0.5, False), BUDGET, 96),
}


def run(method, prompt, steps, budget):
    cache = method.begin(prompt, budget)
    for step in steps:
        yield cache.attend(step), cache.trace


def check(method, naive, budget, limit, tokens, dtype=torch.float32):
    prompt, steps, whole = text(tokens, dtype)
    before = [each.clone() for each in (prompt.queries, prompt.keys, prompt.values, prompt.plain_keys)]
    outputs, traces = zip(*run(method, prompt, steps, budget))
    assert all(torch.equal(*pair) for pair in zip(before, (prompt.queries, prompt.keys, prompt.values, prompt.plain_keys)))
    assert all(out.dtype == dtype and out.shape == steps[0].query.shape for out in outputs)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-8  # of rounding the output, nothing else is rounded
    for batch in range(BATCH):
        for number in range(HEADS):
            expected = naive(head_of(whole, prompt, batch, number), budget)
            for at, (out, trace, (right, count)) in enumerate(zip(outputs, traces, expected)):
                where = f"text {batch}, kv head {number}, step {at}"
                assert trace.attended[batch, number] == count, where
                assert limit is None or count <= limit, where
                mine = out.unflatten(1, (HEADS, GROUP))[batch, number].cpu().double()
                torch.testing.assert_close(mine, right, rtol=tolerance, atol=tolerance, msg=lambda text: f"{where}: {text}")


@pytest.mark.parametrize("tokens", [76, 230], ids="prompt={}".format)
@pytest.mark.parametrize("case", CASES)
def test_follows_its_definition(case, tokens):
    check(*CASES[case], tokens)


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_follows_its_definition(case):
    check(*CASES[case], 230, torch.bfloat16)


@pytest.mark.parametrize("case", CASES)
def test_a_budget_above_the_context_is_full_attention(case):
    budget = Budget(total=512, sink=8, window=400, page=8)
    prompt, steps, _ = text(230)
    for (full, _), (out, trace), step in zip(*(run(each, prompt, steps, budget) for each in (Full(), CASES[case][0])), steps):
        assert (trace.attended == step.position + 1).all()
        torch.testing.assert_close(out, full, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [4, 12, 30, 97], ids="prompt={}".format)
@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][2] is BUDGET])
def test_short_prompts_follow_the_definition(case, tokens):
    check(*CASES[case], tokens)


def test_full_raas_reads_the_prompt_and_at_most_a_window():
    prompt, steps, _ = text(230)
    attended = torch.stack([trace.attended for _, trace in run(RaaS(), prompt, steps, BUDGET)])
    assert attended.max() == 230 + BUDGET.window


def test_cumulative_attention_does_not_depend_on_the_chunk(monkeypatch):
    prompt, *_ = text(230)
    whole = heaviness(prompt)
    monkeypatch.setattr(gather, "LOGITS", 7 * BATCH * HEADS * GROUP * 230)
    assert {paid.shape[3] for _, paid in gather.prompt_weights(prompt)} == {7, 230 % 7}
    torch.testing.assert_close(heaviness(prompt), whole)
    torch.testing.assert_close(whole.sum(-1), torch.full((BATCH, HEADS), 230.0, device=DEVICE))


def test_queries_that_a_method_does_not_look_at_may_be_absent():
    prompt, steps, _ = text(230)
    late = replace(prompt, queries=prompt.queries[:, :, -20:])
    for method in (SnapKV(**MAXIMUM), StreamingLLM(), RazorAttention(MIXED), RaaS(keep_prompt=False)):
        for (out, _), (same, _) in zip(run(method, late, steps, BUDGET), run(method, prompt, steps, BUDGET)):
            assert torch.equal(out, same)
    for method in (SnapKV(observed=21), H2O()):
        with pytest.raises(ValueError, match="expected those from"):
            method.begin(late, BUDGET)


def test_repetition_scores_follow_their_definition(monkeypatch):
    prompt, *_ = text(97)
    period, start, scores = 24, 1, torch.zeros(2, HEADS, GROUP, device=DEVICE)
    for batch in range(BATCH):
        for query_head in range(HEADS * GROUP):
            keys = prompt.keys[batch, query_head // GROUP]
            for at in range(start + period, 97):
                weights = torch.softmax(prompt.queries[batch, query_head, at] @ keys[: at + 1].T * prompt.scale, dim=-1)
                for same in range(at - period, start - 1, -period):
                    scores[0, query_head // GROUP, query_head % GROUP] += weights[same]
                    scores[1, query_head // GROUP, query_head % GROUP] += weights[same + 1]
    expected = (scores / (BATCH * (97 - start - period))).amax(-1)
    monkeypatch.setattr(gather, "LOGITS", 7 * BATCH * HEADS * GROUP * 97)
    torch.testing.assert_close(torch.stack(repetition_scores(prompt, period, start)), expected)


def test_heads_that_repeat_are_retrieval_heads():
    """Of 4 layers of 4 kv heads, one echoes, two induce, each in one of its query heads; the rest look at random."""
    random, tokens = torch.Generator().manual_seed(3), torch.arange(40).repeat(4)
    vocabulary = torch.nn.functional.normalize(torch.randn(40, 32, generator=random), dim=-1)
    special = {(0, 2): 0, (1, 0): 1, (3, 3): 1}
    scores = []
    for layer in range(4):
        keys, queries = (torch.randn(1, heads, len(tokens), 32, generator=random) for heads in (4, 8))
        for head in range(4):
            if (layer, head) in special:
                keys[:, head] = vocabulary[tokens - special[layer, head]]
                queries[:, 2 * head + 1] = vocabulary[tokens] * 20
        scores.append(repetition_scores(Prompt(queries, keys, keys, keys, rotate, 1.0, layer, 4), period=40))
    mask = retrieval_heads(scores, induction_share=2 / 16, echo_share=1 / 16)
    assert {(layer, head) for layer in range(4) for head in range(4) if mask[layer][head]} == set(special)
    by_induction = retrieval_heads(scores, induction_share=2 / 16, echo_share=0.0)
    assert {(layer, head) for layer in range(4) for head in range(4) if by_induction[layer][head]} == {(1, 0), (3, 3)}


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: SnapKV(kernel=6),
        lambda: SnapKV(pooling="mean"),
        lambda: SnapKV(observed=96).begin(text(230)[0], BUDGET),
        lambda: H2O(0.0),
        lambda: RaaS(alpha=1.0),
        lambda: RaaS(top_share=0.0),
        lambda: RaaS(keep_prompt=False).begin(text(230)[0], Budget(total=96, sink=40, window=50, page=8)),
        lambda: RazorAttention(MIXED[:2]).begin(text(230)[0], BUDGET),
        lambda: repetition_scores(text(97)[0], period=49),
    ],
)
def test_settings_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ValueError, match="expected"):
        wrong()
