"""Methods that keep the whole context and choose what a step reads, each against its definition: one request, in lists and float64."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import oracle
from benchmarks.accuracy.gains import Gains
from benchmarks.accuracy.method import Budget, Prompt, Step
from benchmarks.accuracy.methods import METHODS, clusters, pages
from benchmarks.accuracy.methods.arkvale import ArkVale
from benchmarks.accuracy.methods.clusterkv import ClusterKV
from benchmarks.accuracy.methods.freekv import SELECTIONS, FreeKV
from benchmarks.accuracy.methods.infinigen import InfiniGen
from benchmarks.accuracy.methods.louiskv import LouisKV
from benchmarks.accuracy.methods.quest import Quest
from benchmarks.accuracy.methods.shadowkv import ShadowKV

BATCH, HEADS, GROUP, DIM, STEPS = 2, 2, 3, 16, 40
SCALE = DIM**-0.5
BUDGET = Budget(total=128, sink=16, window=16, page=16)
WIDE = Budget(total=128, sink=16, window=32, page=16)
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

FREEKV = {
    "freekv": FreeKV(),
    "freekv-accurate": FreeKV(0.8, digest="two-bit", page=8, sink=16, window=32, hysteresis=1.0),
    "freekv-no-correction": FreeKV(correction=False),
    "freekv-min-max": FreeKV(digest="min-max"),
    "freekv-page-16": FreeKV(page=16),
    "freekv-page-8": FreeKV(page=8),
    "freekv-narrow": FreeKV(sink=32, window=64),
    "freekv-narrow-page-16": FreeKV(page=16, sink=16, window=32),
    "freekv-narrow-page-8": FreeKV(page=8, sink=16, window=32),
    "freekv-two-bit": FreeKV(digest="two-bit"),
    "freekv-two-bit-page-8": FreeKV(digest="two-bit", page=8),
    "freekv-two-bit-narrow-page-8": FreeKV(digest="two-bit", page=8, sink=16, window=32),
    "freekv-max-narrow-page-8": FreeKV(pooling="max", page=8, sink=16, window=32),
    "freekv-max-pool": FreeKV(pooling="softmax-max"),
    "freekv-hysteresis": FreeKV(hysteresis=1.4),
    "freekv-two-bit-page-8-hysteresis": FreeKV(digest="two-bit", page=8, hysteresis=1.4),
    "freekv-two-bit-narrow-page-8-hysteresis": FreeKV(digest="two-bit", page=8, sink=16, window=32, hysteresis=1.4),
    "freekv-two-bit-narrow-page-8-hysteresis-0.70": FreeKV(digest="two-bit", page=8, sink=16, window=32, hysteresis=0.7),
    "freekv-two-bit-narrow-page-8-on-turn": FreeKV(digest="two-bit", page=8, sink=16, window=32, selection="on-turn"),
    "freekv-two-bit-narrow-page-8-on-turn-tau-0.85": FreeKV(0.85, digest="two-bit", page=8, sink=16, window=32, selection="on-turn"),
    "freekv-two-bit-narrow-page-8-on-turn-tau-0.80": FreeKV(0.8, digest="two-bit", page=8, sink=16, window=32, selection="on-turn"),
    "freekv-two-bit-narrow-page-8-on-turn-tau-0.80-hysteresis-0.70": FreeKV(
        0.8, digest="two-bit", page=8, sink=16, window=32, hysteresis=0.7, selection="on-turn"
    ),
    "freekv-two-bit-narrow-page-8-on-turn-tau-0.80-hysteresis": FreeKV(
        0.8, digest="two-bit", page=8, sink=16, window=32, hysteresis=1.4, selection="on-turn"
    ),
    "freekv-early-query": FreeKV(early=True),
    "freekv-unscaled": FreeKV(scaled=False),
    "freekv-tau-0.70": FreeKV(tau=0.70),
    "freekv-tau-0.80": FreeKV(tau=0.80),
    "freekv-tau-0.85": FreeKV(tau=0.85),
    "freekv-tau-0.95": FreeKV(tau=0.95),
    "freekv-tau-1.00": FreeKV(tau=1.00),
}
NUMBERS = {"top-p": "top_p", "tail": "tail", "hysteresis": "hysteresis", "sink": "sink", "window": "window"}


def named(name):
    """The entry of a name that says numbers."""
    said = {NUMBERS[words]: float(number) for words, number in re.findall(rf"({'|'.join(NUMBERS)})-([.0-9]+)", name)}
    whole = {setting: number if setting in ("top_p", "hysteresis") else int(number) for setting, number in said.items()}
    beyond = "in-hand" if "-in-hand" in name else "nothing"
    return FreeKV(digest="two-bit", page=8, beyond=beyond, **({"sink": 16, "window": 32} | whole))


FREEKV |= {name: named(name) for name in METHODS if re.search("-(top-p|tail|sink)-", name)}
ENTRIES = FREEKV | {
    "quest": Quest(),
    "quest-page-8": Quest(page=8),
    "arkvale": ArkVale(),
    "arkvale-narrow-page-8": ArkVale(page=8, sink=16, window=32),
    "shadowkv": ShadowKV(),
    "infinigen": InfiniGen(),
    "infinigen-0.30": InfiniGen(columns=0.3),
    "clusterkv": ClusterKV(),
    "louiskv": LouisKV(),
}
COVERING = {name: method for name, method in ENTRIES.items() if "-top-p-" not in name or "-in-hand" in name} | {
    "shadowkv": ShadowKV(rank=10**6, rank_share=1.0),
    "infinigen": InfiniGen(alpha=math.inf),
    "infinigen-0.30": InfiniGen(columns=0.3, alpha=math.inf),
}


def rotate(keys, positions):
    angles = positions[..., None] / 100.0 ** (torch.arange(DIM // 2, device=keys.device) / (DIM // 2))
    low, high = keys.chunk(2, dim=-1)
    cos, sin = angles.cos().to(keys.dtype), angles.sin().to(keys.dtype)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


@dataclass(frozen=True)
class Text:
    """Random prompts of T tokens and the steps behind them; queries turn sharply in some steps, in all heads or in one."""

    tokens: int
    queries: torch.Tensor  # [B, Hq, n, D]
    early: torch.Tensor
    keys: torch.Tensor  # [B, H, n, D]
    values: torch.Tensor
    plain_keys: torch.Tensor

    @classmethod
    def random(cls, tokens, dtype=torch.float32, device="cpu", seed=0):
        random, count = torch.Generator().manual_seed(seed), tokens + STEPS

        def draw(*shape):
            return torch.randn(shape, generator=random)

        def keep(*shape):
            turns = torch.rand(shape, generator=random) < 0.35
            return torch.where(turns, 0.3, 0.97)

        alike = torch.minimum(keep(BATCH, 1, count), keep(BATCH, HEADS, count)).repeat_interleave(GROUP, dim=1)[..., None]
        fresh = 2 * draw(BATCH, HEADS * GROUP, count, DIM)
        walk = [fresh[:, :, 0]]
        for at in range(1, count):
            walk.append(alike[:, :, at] * walk[-1] + (1 - alike[:, :, at] ** 2).sqrt() * fresh[:, :, at])
        queries, plain = torch.stack(walk, dim=2), 1.2 * draw(BATCH, HEADS, count, DIM)
        early = queries + 0.7 * draw(*queries.shape)
        keys = rotate(plain.double(), torch.arange(count))
        return cls(tokens, *(each.to(device, dtype) for each in (queries, early, keys, draw(*plain.shape), plain)))

    def to(self, dtype):
        return replace(self, **{field.name: getattr(self, field.name).to(dtype) for field in fields(self)[1:]})

    @property
    def prompt(self):
        queries, keys, values, plain = (each[:, :, : self.tokens] for each in (self.queries, self.keys, self.values, self.plain_keys))
        return Prompt(queries, keys, values, plain, rotate, SCALE, 1, 3)

    @property
    def steps(self):
        for at in range(self.tokens, self.tokens + STEPS):
            yield Step(*(each[:, :, at] for each in (self.queries, self.early, self.keys, self.values)), at)

    def requests(self):
        """Each request by itself, in float64: queries [n, H, G, D], the rest [H, n, D]."""
        whole = self.to(torch.float64)
        for row in range(BATCH):
            queries, early = (each[row].cpu().unflatten(0, (HEADS, GROUP)).movedim(2, 0) for each in (whole.queries, whole.early))
            keys, values, plain = (each[row].cpu() for each in (whole.keys, whole.values, whole.plain_keys))
            steps = range(self.tokens, self.tokens + STEPS)
            yield SimpleNamespace(tokens=self.tokens, steps=steps, queries=queries, early=early, keys=keys, values=values, plain_keys=plain)


@pytest.fixture
def reads(monkeypatch):
    """Sets of tokens that were read: [step][request][kv head]."""
    seen, record = [], pages.Reader._record

    def spy(self, tokens, valid):
        lists = [[head.tolist() for head in row] for row in tokens]
        if valid is not None:
            lists = [[[t for t, v in zip(*pair) if v] for pair in zip(*pairs)] for pairs in zip(lists, valid.tolist())]
        assert all(len(set(head)) == len(head) for row in lists for head in row), "a token was read twice"
        seen.append([[set(head) for head in row] for row in lists])
        return record(self, tokens, valid)

    monkeypatch.setattr(pages.Reader, "_record", spy)
    return seen


def run(method, text, budget):
    """Outputs [step] and traces [step]."""
    cache = method.begin(text.prompt, budget)
    outputs, traces = [], []
    for step in text.steps:
        outputs.append(cache.attend(step))
        traces.append(cache.trace)
    return outputs, traces


def attention(query, keys, values, tokens, pseudo=()):
    """[G, D] of queries [G, D] over the tokens of one kv head, and over lists of tokens that are as many times their mean."""
    weight = torch.exp(query @ keys[sorted(tokens)].T * SCALE)
    outcome, total = weight @ values[sorted(tokens)], weight.sum(-1, keepdim=True)
    for each in pseudo:
        weight = len(each) * torch.exp(query @ keys[each].mean(0) * SCALE)[:, None]
        outcome, total = outcome + weight * values[each].mean(0), total + weight
    return outcome / total


def pseudo_tokens(tokens, n, budget, method):
    """The candidates among n tokens that are not attended to, block by block."""
    if getattr(method, "tail", None) is None:
        return []
    budget = own_budget(budget, method)
    left = page_tokens(layout(n, budget)[1], budget.page, n) - tokens
    blocks = [[token for token in sorted(left) if token // method.tail == number] for number in range(math.ceil(n / method.tail))]
    return [block for block in blocks if block]


def cosine(one, other):
    return (one @ other / (one.norm() * other.norm())).item()


def mean(numbers):
    return sum(numbers) / len(numbers)


def bounds(keys, digest):
    """Largest and smallest value of each dimension in pages of keys [P, S, D], as the digest has it."""
    upper, lower = keys.amax(1), keys.amin(1)
    if digest == "min-max":
        return upper, lower
    middle = (upper + lower) / 2
    radius = (keys - middle[:, None]).abs().mean(1)
    return middle + radius, middle - radius


def page_masses(query, keys):
    """[page][query head] of pages of keys [P, S, D], each dimension of each key moved to the nearest of four values."""
    least, step = keys.amin(1), (keys.amax(1) - keys.amin(1)) / 3
    levels = torch.stack([least, least + step, least + 2 * step, least + 3 * step], dim=1)  # [P, 4, D]
    nearest = (levels[:, :, None] - keys[:, None]).abs().argmin(1)
    return DIM**0.5 * (query @ levels.gather(1, nearest).mT / DIM**0.5).logsumexp(-1)


def page_scores(query, keys, candidates, page, digest="min-max"):
    """[page][query head] of queries [G, D]; all candidates are full pages."""
    paged = torch.stack([keys[number * page : (number + 1) * page] for number in candidates])
    if digest == "two-bit":
        return page_masses(query.double(), paged.double()).tolist()
    upper, lower = bounds(paged, digest)
    return torch.maximum(query * upper[:, None], query * lower[:, None]).sum(-1).tolist()


def best(scores, count):
    """Places of the highest scores; of equal ones the first."""
    return sorted(range(len(scores)), key=lambda place: (-scores[place], place))[:count]


def page_tokens(numbers, page, n):
    return {token for number in numbers for token in range(number * page, min((number + 1) * page, n))}


def naive_quest(request, budget, method):
    for at in request.steps:
        last, chosen = at // 16, []
        for head in range(HEADS):
            scores = page_scores(request.queries[at, head], request.keys[head], range(last), 16)
            numbers = best([max(each) for each in scores], budget.total // 16 - 1)
            chosen.append(page_tokens([*numbers, last], 16, at + 1))
        yield chosen, None, None


def layout(n, budget):
    """Sink, candidate and window pages of n tokens."""
    count = math.ceil(n / budget.page)
    first, end = budget.sink // budget.page, count - budget.window // budget.page
    return list(range(first)), list(range(first, end)), list(range(max(end, first), count))


def naive_arkvale(request, budget, method):
    room = (budget.total - budget.sink - budget.window) // budget.page
    for at in request.steps:
        sink, candidates, window = layout(at + 1, budget)
        chosen = []
        for head in range(HEADS):
            scores = page_scores(request.queries[at, head], request.keys[head], candidates, budget.page, "cuboid-mean")
            numbers = [candidates[place] for place in best([mean(each) for each in scores], room)]
            chosen.append(page_tokens([*sink, *numbers, *window], budget.page, at + 1))
        yield chosen, None, None


def mass_of_pinned(query, keys, n, budget):
    """[query head] of sink and window of n tokens, as far as they have keys."""
    sink, _, window = layout(n, budget)
    pinned = [token for token in page_tokens([*sink, *window], budget.page, n) if token < len(keys)]
    return [sum(math.exp(one @ keys[token] * SCALE) for token in pinned) for one in query]


def freekv_select(query, keys, n, budget, method, last=(), in_hand=None):
    """Pages of one kv head for a context of n tokens. Those that the last selection attended to weigh more.

    ``in_hand`` are those that a correction finds there; None is a selection ahead.
    """
    _, candidates, _ = layout(n, budget)
    scores = torch.tensor(page_scores(query, keys, candidates, budget.page, method.digest), dtype=torch.float64)
    raw = scores / DIM**0.5
    if method.scaled:
        scores = raw
    odds = [(scores[:, one] if method.pooling == "max" else torch.softmax(scores[:, one], dim=0)).tolist() for one in range(GROUP)]
    pool = {"softmax-mean": mean, "softmax-max": max, "max": max}[method.pooling]
    ranking = [pool(each) for each in zip(*odds)]
    if method.hysteresis:
        weights = ranking if method.pooling == "max" else [math.log(each) for each in ranking]
        ranking = [weight + method.hysteresis * (page in last) for weight, page in zip(weights, candidates)]
    room = (budget.total - budget.sink - budget.window) // budget.page
    if method.top_p is None or (method.beyond == "in-hand" and in_hand is None):
        return [candidates[place] for place in best(ranking, room)]
    pinned = mass_of_pinned(query, keys[: n - (in_hand is None)], n, budget)
    wholes = [pinned[one] + raw[:, one].exp().sum().item() for one in range(GROUP)]
    held, needed = mean([pinned[one] / wholes[one] for one in range(GROUP)]), []
    for place in best(ranking, room):
        if held >= method.top_p:
            break
        needed.append(candidates[place])
        held += mean([raw[place, one].exp().item() / wholes[one] for one in range(GROUP)])
    if method.beyond == "nothing":
        return needed
    rest = [candidates[place] for place in best(ranking, len(candidates)) if candidates[place] not in needed]
    return (needed + [page for page in rest if page in in_hand] + [page for page in rest if page not in in_hand])[:room]


def own_budget(budget, method):
    own = {name: tokens for name in ("page", "sink", "window") if (tokens := getattr(method, name)) is not None}
    return replace(budget, **own)


def naive_freekv(request, budget, method):
    budget = own_budget(budget, method)
    asked = list(request.queries[request.tokens - 1])
    ahead = [freekv_select(asked[head], request.keys[head], request.tokens + 1, budget, method) for head in range(HEADS)]
    sink, _, window = layout(request.tokens + 1, budget)
    last = [{*sink, *numbers, *window} for numbers in ahead]
    for at in request.steps:
        sink, _, window = layout(at + 1, budget)
        chosen, corrected, similarity = [], [], []
        for head in range(HEADS):
            query, keys = request.queries[at, head], request.keys[head]
            if method.early:
                asked[head] = request.early[at, head]
                ahead[head] = freekv_select(asked[head], keys, at + 1, budget, method, last[head])
                last[head] = {*sink, *ahead[head], *window}
            similarity.append(mean([cosine(one, other) for one, other in zip(query, asked[head])]))
            corrected.append(method.correction and similarity[head] < method.tau)
            numbers = ahead[head]
            if corrected[head]:
                numbers = freekv_select(query, keys, at + 1, budget, method, last[head], ahead[head])
            last[head] = {*sink, *numbers, *window}
            chosen.append(page_tokens([*sink, *numbers, *window], budget.page, at + 1))
            if method.selection == "on-turn" and (at + 1) % budget.page:
                asked[head], ahead[head] = query if corrected[head] else asked[head], numbers
                continue
            asked[head], ahead[head] = query, freekv_select(query, keys, at + 2, budget, method, last[head])
            _, _, next_window = layout(at + 2, budget)
            last[head] = {*sink, *numbers, *window} if method.early else {*sink, *ahead[head], *next_window}
        yield chosen, corrected, similarity


def naive_shadowkv(request, budget, method):
    size, tokens = method.chunk, request.tokens
    count = tokens // size - method.local
    kept, landmarks = [], []
    for head in range(HEADS):
        chunks = [request.keys[head, number * size : (number + 1) * size] for number in range(count)]
        landmarks.append([chunk.mean(dim=0) for chunk in chunks])
        worst = [min(cosine(key, landmark) for key in chunk) for chunk, landmark in zip(chunks, landmarks[head])]
        kept.append(best([-each for each in worst], round(method.outliers * budget.total / 2048)))
    joint = torch.cat([request.plain_keys[head, :tokens] for head in range(HEADS)], dim=1)
    left, singular, right = torch.linalg.svd(joint, full_matrices=False)
    rank = min(method.rank, math.ceil(method.rank_share * HEADS * DIM))
    rebuilt = (left[:, :rank] * singular[:rank]) @ right[:rank]
    for head in range(HEADS):
        exact = page_tokens(kept[head], size, tokens) | set(range(count * size, tokens))
        for token in set(range(tokens)) - exact:
            request.keys[head, token] = rotate(rebuilt[token, head * DIM : (head + 1) * DIM], torch.tensor(token))
    room = (budget.total - tokens % size) // size - len(kept[0]) - method.local
    for at in request.steps:
        chosen = []
        for head in range(HEADS):
            rest = [number for number in range(count) if number not in kept[head]]
            index = torch.stack([landmarks[head][number] for number in rest])
            odds = torch.stack([torch.softmax(one @ index.T * SCALE, dim=0) for one in request.queries[at, head]])
            numbers = [rest[place] for place in best(odds.max(dim=0).values.tolist(), room)] + kept[head]
            chosen.append(page_tokens(numbers, size, tokens) | set(range(count * size, at + 1)))
        yield chosen, None, None


def naive_infinigen(request, budget, method):
    skews, columns = [], []
    for head in range(HEADS):
        for one in range(GROUP):
            queries = request.queries[: request.tokens, head, one]
            skews.append(torch.linalg.svd(queries, full_matrices=False)[2].T)
            columns.append(best((queries @ skews[-1]).abs().sum(dim=0).tolist(), int(DIM * method.columns)))
    for at in request.steps:
        short = []
        for head in range(HEADS):
            each = []
            for one in range(GROUP):
                skew, kept = skews[head * GROUP + one], columns[head * GROUP + one]
                query, keys = (request.early[at, head, one] @ skew)[kept], (request.keys[head, :at] @ skew)[:, kept]
                logits = keys @ query * SCALE
                each.append(logits.max() - logits)
            short.append(torch.stack(each).min(dim=0).values.tolist())
        count = int(mean([sum(each < method.alpha for each in head) for head in short]))
        yield [{at, *best([-each for each in head], min(count, budget.total - 1))} for head in short], None, None


def naive_k_means(keys, count, iterations, cosines):
    """Cluster of each key [N, D], and centroids."""
    centroids = [keys[(2 * number + 1) * len(keys) // (2 * count)] for number in range(count)]
    for _ in range(iterations):
        there = torch.stack(centroids)
        near = (lambda key: F.cosine_similarity(key[None], there)) if cosines else (lambda key: -(key - there).norm(dim=1))
        unit = [near(key).argmax().item() for key in keys]
        for number in range(count):
            members = [key for key, own in zip(keys, unit) if own == number]
            if members:
                centroids[number] = torch.stack(members).mean(dim=0)
    return unit, centroids


def fill(scores, units, room):
    """Tokens of the best units, the last one cut off."""
    tokens = [token for number in best(scores, len(scores)) for token in units[number]]
    return set(tokens[:room])


def naive_clusterkv(request, budget, method):
    units, centroids = [[] for _ in range(HEADS)], [[] for _ in range(HEADS)]
    clustered = method.sink

    def cluster(until):
        for head in range(HEADS):
            keys = request.keys[head, clustered:until]
            own, means = naive_k_means(keys, max(1, len(keys) // method.cluster), method.iterations, True)
            units[head] += [[clustered + place for place, each in enumerate(own) if each == number] for number in range(len(means))]
            centroids[head] += means
        return until

    clustered = cluster(request.tokens)
    for at in request.steps:
        chosen = []
        for head in range(HEADS):
            scores = [mean([(one @ centroid).item() for one in request.queries[at, head]]) for centroid in centroids[head]]
            others = {*range(method.sink), *range(clustered, at + 1)}
            chosen.append(others | fill(scores, units[head], budget.total - method.sink))
        yield chosen, None, None
        if at + 1 - clustered == method.period:
            clustered = cluster(at + 1)


def naive_louiskv(request, budget, method):
    units, index = [], []
    for head in range(HEADS):
        keys = request.keys[head, budget.sink : request.tokens]
        own, means = naive_k_means(keys, len(keys) // method.cluster, method.iterations, False)
        units.append([[budget.sink + place for place, each in enumerate(own) if each == number] for number in range(len(means))])
        index.append(list(means))
    segment, retrieved, previous = [], None, request.queries[request.tokens - 1]
    for at in request.steps:
        query = request.queries[at]
        similarity = [mean([cosine(one, other) for one, other in zip(query[head], previous[head])]) for head in range(HEADS)]
        corrected = retrieved is None or mean(similarity) < method.tau
        if corrected and segment:
            for head in range(HEADS):
                units[head].append(segment)
                index[head].append(request.keys[head, segment].mean(dim=0))
            segment = []
        if corrected:
            end, retrieved = at + 1 - budget.window, []
            for head in range(HEADS):
                reach = [[token for token in unit if token < end] for unit in units[head]]
                there = [number for number, unit in enumerate(reach) if unit]
                stacked = torch.stack([index[head][number] for number in there])
                odds = torch.stack([torch.softmax(one @ stacked.T * SCALE, dim=0) for one in query[head]]).mean(dim=0)
                retrieved.append(fill(odds.tolist(), [reach[number] for number in there], budget.total - budget.sink - budget.window))
        segment.append(at)
        previous = query
        pinned = {*range(budget.sink), *range(at + 1 - budget.window, at + 1)}
        yield [pinned | each for each in retrieved], [corrected] * HEADS, similarity


CASES = {
    "quest": (naive_quest, Quest()),
    "arkvale": (naive_arkvale, ArkVale()),
    "shadowkv": (naive_shadowkv, ShadowKV()),
    "infinigen": (naive_infinigen, InfiniGen()),
    "infinigen-near": (naive_infinigen, InfiniGen(columns=0.5, alpha=1.5)),
    "clusterkv": (naive_clusterkv, ClusterKV(cluster=8, iterations=6, period=16)),
    "louiskv": (naive_louiskv, LouisKV(iterations=6)),
    "louiskv-rare": (naive_louiskv, LouisKV(tau=0.5, iterations=3)),
    "need": (naive_freekv, named("top-p-0.5")),  # random keys are so alike that more would fill the budget
    "need-hysteresis-tail": (naive_freekv, named("top-p-0.5-hysteresis-0.7-tail-32")),
    "need-in-hand": (naive_freekv, named("top-p-0.5-in-hand")),
    "need-in-hand-hysteresis": (naive_freekv, named("top-p-0.4-in-hand-hysteresis-0.7")),
    "need-in-hand-on-turn": (naive_freekv, replace(named("top-p-0.5-in-hand"), selection="on-turn")),
} | {name: (naive_freekv, method) for name, method in FREEKV.items() if method.tau in (0.9, 0.8) and method.top_p is None}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_method_follows_its_definition(name, device, reads):
    naive, method = CASES[name]
    text = Text.random(300, device=device, seed=len(name))
    kept = text.prompt.keys.clone()
    outputs, traces = run(method, text, BUDGET)
    assert torch.equal(text.prompt.keys, kept), "the prompt was written to"
    for row, request in enumerate(text.requests()):
        before = None
        for index, (at, (chosen, corrected, similarity)) in enumerate(zip(request.steps, naive(request, BUDGET, method), strict=True)):
            assert reads[index][row] == chosen
            trace = traces[index]
            assert trace.attended[row].tolist() == [len(tokens) for tokens in chosen]
            if before is not None:
                assert trace.fetched[row].tolist() == [len(now - last - {at}) for now, last in zip(chosen, before)]
            if corrected is None:
                assert trace.corrected is None and trace.similarity is None
            else:
                assert trace.corrected[row].tolist() == corrected
                assert trace.similarity[row].tolist() == pytest.approx(similarity, abs=1e-5)
            for head in range(HEADS):
                pseudo = pseudo_tokens(chosen[head], at + 1, BUDGET, method)
                expected = attention(request.queries[at, head], request.keys[head], request.values[head], chosen[head], pseudo)
                found = outputs[index][row, head * GROUP : (head + 1) * GROUP]
                torch.testing.assert_close(found.cpu().double(), expected, atol=2e-5, rtol=1e-4)
            before = chosen


def test_cases_turn_and_keep_their_choice():
    """The random queries exercise both: a method that always or never selects anew would pass otherwise."""
    for name in ("freekv", "louiskv", "louiskv-rare"):
        _, traces = run(CASES[name][1], Text.random(300, seed=len(name)), BUDGET)
        assert 0.1 < torch.stack([trace.corrected.float().mean() for trace in traces]).mean() < 0.9, name


RECIPE = METHODS["freekv-two-bit-narrow-page-8"]
WIDER = Budget(total=192, sink=16, window=32, page=16)


def test_a_kv_head_attends_to_what_it_needs():
    """A share that is higher takes more, kv heads differ, and no page is needed if sink and window hold the share."""
    text = Text.random(300)
    counts = [torch.stack([trace.attended for trace in run(RECIPE(top_p=p), text, WIDER)[1]]) for p in (1e-6, 0.5, 0.9, 0.999999)]
    fixed = torch.stack([trace.attended for trace in run(RECIPE(), text, WIDER)[1]])
    assert all((less <= more).all() and (less < more).any() for less, more in zip(counts, counts[1:]))
    assert (counts[0] <= 16 + 32).all() and counts[2].unique().numel() > 8 and torch.equal(counts[3], fixed)


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.6}, {"top_p": 0.6, "beyond": "in-hand"}], ids=str)
def test_a_correction_waits_for_what_was_not_selected_ahead(settings, reads):
    text, total = Text.random(300), 0
    cache = RECIPE(**settings).begin(text.prompt, WIDER)
    for step in text.steps:
        ahead, n = cache.ahead.clone(), step.position + 1
        cache.attend(step)
        for row, head in ((row, head) for row in range(BATCH) for head in range(HEADS)):
            in_hand = page_tokens([*range(2), *ahead[row, head].tolist(), *range(math.ceil(n / 8) - 4, n)], 8, n)
            assert cache.trace.waited[row, head] == len(reads[-1][row][head] - in_hand)
            assert cache.trace.corrected[row, head] or not cache.trace.waited[row, head]
        total += cache.trace.waited.sum()
    assert total > 0


def test_what_is_in_hand_saves_waiting_and_fills_the_budget():
    text = Text.random(300)
    (_, plain), (_, thrifty) = (run(RECIPE(**settings), text, WIDER) for settings in ({}, {"top_p": 0.6, "beyond": "in-hand"}))
    waited = [sum(trace.waited.sum() for trace in traces) for traces in (plain, thrifty)]
    assert 0 < waited[1] < 0.8 * waited[0]
    assert all(torch.equal(one.attended, other.attended) for one, other in zip(plain, thrifty))


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize(("tau", "hysteresis"), [(0.8, 0.0), (0.9, 0.0), (0.9, 1.4), (1.0, 0.0), (1.0, 0.6)])
@pytest.mark.parametrize("tokens", [72, 250, 320], ids="tokens={}".format)
def test_freekv_is_the_oracle(tokens, tau, hysteresis, selection, reads):
    """72 tokens have fewer candidates than the budget has places; 320 end with a page."""
    text = Text.random(tokens, seed=tokens)
    settings = oracle.OracleSettings(
        WIDE.total, WIDE.sink, WIDE.window, tau, WIDE.page, hysteresis=hysteresis, on_turn=selection == "on-turn"
    )
    outputs, traces = run(FreeKV(tau=tau, hysteresis=hysteresis, selection=selection), text, WIDE)
    for row in range(BATCH):
        queries = text.queries[row].unflatten(0, (HEADS, GROUP))
        keys, values, previous = text.keys[row], text.values[row], queries[:, :, tokens - 1]
        ahead = oracle.select(previous, keys[:, :tokens], tokens + 1, settings)
        for index, n in enumerate(range(tokens + 1, tokens + STEPS + 1)):
            query = queries[:, :, n - 1]
            expected = oracle.decode_step(query, keys[:, :n], previous, ahead, settings)
            assert reads[index][row] == [page_tokens(numbers, WIDE.page, n) for numbers in expected.attended]
            assert traces[index].corrected[row].tolist() == expected.corrected
            attended = oracle.attend_to_pages(expected.attended, query, keys[:, :n], values[:, :n], WIDE.page, SCALE)
            torch.testing.assert_close(outputs[index][row], attended[:, 0], atol=1e-5, rtol=1e-4)
            previous, ahead = oracle.carry(query, keys[:, :n], previous, ahead, expected, settings)


def test_a_gain_is_the_attention_that_the_new_selection_holds_more():
    tokens, text = 250, Text.random(250, seed=3)
    gains = Gains(FreeKV())
    outputs, traces = run(gains, text, WIDE)
    theirs, _ = run(FreeKV(tau=1.0), text, WIDE)
    assert all(torch.equal(*pair) for pair in zip(outputs, theirs, strict=True))
    settings = oracle.OracleSettings(WIDE.total, WIDE.sink, WIDE.window, 1.0, WIDE.page)
    (samples,) = gains.samples.values()
    assert list(gains.samples) == [text.prompt.layer] and len(samples) == len(outputs)
    for at, n in enumerate(range(tokens + 1, tokens + len(outputs) + 1)):
        expected = []
        for row in range(BATCH):
            queries, keys = text.queries[row].unflatten(0, (HEADS, GROUP)), text.keys[row]
            now, before = queries[:, :, n - 1], queries[:, :, n - 2]
            new, old = (oracle.select(each, keys[:, :m], n, settings) for each, m in ((now, n), (before, n - 1)))
            for head, cosine in enumerate(oracle.similarity(now, before)):
                paid = (now[head] @ keys[head, :n].T * SCALE).softmax(-1).mean(0)
                held = [sum(paid[page * WIDE.page : (page + 1) * WIDE.page].sum() for page in each[head].pages) for each in (new, old)]
                expected.append([cosine, float(held[0] - held[1])])
        torch.testing.assert_close(samples[at], torch.tensor(expected), atol=1e-5, rtol=1e-4)
    assert torch.cat(samples)[:, 1].max() > 0.01


def test_a_layer_has_the_threshold_of_its_number():
    text = Text.random(250)
    taus = [0.8] * (text.prompt.layer + 1) + [-1.0]
    taus[text.prompt.layer] = 0.9
    (ours, traces), (theirs, _) = run(FreeKV(tau=tuple(taus)), text, WIDE), run(FreeKV(tau=0.9), text, WIDE)
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True)) and any(trace.corrected.any() for trace in traces)
    with pytest.raises(ValueError, match="tau 1.5: expected -1 to 1"):
        FreeKV(tau=(0.9, 1.5))


def test_tau_of_one_blocks(reads):
    """Each step reads what its own query selects."""
    text = Text.random(250)
    settings = oracle.OracleSettings(BUDGET.total, BUDGET.sink, BUDGET.window, 1.0, BUDGET.page)
    run(METHODS["freekv-tau-1.00"](), text, BUDGET)
    for row in range(BATCH):
        for read, n in zip(reads, range(251, 251 + STEPS), strict=True):
            query = text.queries[row, :, n - 1].unflatten(0, (HEADS, GROUP))
            chosen = oracle.select(query, text.keys[row, :, :n], n, settings)
            numbers = [oracle.pinned(n, settings) + selection.pages for selection in chosen]
            assert read[row] == [page_tokens(each, BUDGET.page, n) for each in numbers]


def beside_budget(method, generated):
    """Tokens that a method attends to beside its budget, after so many steps."""
    if isinstance(method, ShadowKV):
        return generated
    return (generated - 1) % method.period + 1 if isinstance(method, ClusterKV) else 0


@pytest.mark.parametrize("budget", [BUDGET, Budget(total=256, sink=32, window=64)], ids="total={0.total}".format)
@pytest.mark.parametrize("name", [*ENTRIES, "clusterkv-often"])
def test_no_step_reads_more_than_the_budget(name, budget):
    method = ClusterKV(period=7) if name == "clusterkv-often" else METHODS[name]()
    _, traces = run(method, Text.random(397), budget)
    for generated, trace in enumerate(traces, start=1):
        assert trace.attended.max() <= budget.total + beside_budget(method, generated)
    if "-top-p-" in name and "-in-hand" not in name:
        return
    full = {"infinigen": 10}.get(name, budget.total - (0 if name.startswith(("clusterkv", "louiskv")) else budget.page))
    assert traces[-1].attended.min() >= full


@pytest.mark.parametrize("tokens", [9, 200, 344], ids="tokens={}".format)
@pytest.mark.parametrize("name", COVERING)
def test_budget_that_covers_the_context_is_full_attention(name, tokens):
    """384 tokens cover 344 and 40 steps exactly; 9 are fewer than the sink."""
    text = Text.random(tokens)
    outputs, traces = run(COVERING[name], text, Budget(total=384, sink=32, window=64))
    for index, (output, trace) in enumerate(zip(outputs, traces, strict=True)):
        n = tokens + index + 1
        expected = F.scaled_dot_product_attention(
            text.queries[:, :, n - 1 : n], text.keys[:, :, :n], text.values[:, :, :n], scale=SCALE, enable_gqa=True
        )
        torch.testing.assert_close(output, expected[:, :, 0], atol=2e-5, rtol=1e-4)
        assert (trace.attended == n).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["freekv", "freekv-early-query", "quest", "arkvale", "shadowkv", "infinigen", "clusterkv", "louiskv"])
def test_bfloat16_chooses_as_float32_does(name, device, reads):
    """Scores are float32 whatever the dtype: equal inputs give equal choices."""
    low = Text.random(300, torch.bfloat16, device)
    outputs, _ = run(METHODS[name](), low, BUDGET)
    chosen = list(reads)
    reads.clear()
    expected, _ = run(METHODS[name](), low.to(torch.float32), BUDGET)
    assert reads == chosen
    assert all(output.dtype == torch.bfloat16 for output in outputs)
    torch.testing.assert_close(torch.stack(outputs).float(), torch.stack(expected), atol=0.03, rtol=0.03)


@pytest.mark.parametrize("cosines", [True, False], ids=["cosine", "distance"])
def test_k_means_in_parts_is_k_means(cosines, monkeypatch):
    """Few keys at a time; of five clusters that begin in the same key, those that no key goes to keep their centroid."""
    keys = torch.randn(BATCH, HEADS, 90, DIM, generator=torch.Generator().manual_seed(3))
    keys[..., 0] = -2.0
    keys[:, :, :40] = 30 * torch.eye(DIM)[0]
    monkeypatch.setattr(clusters, "SCORES", 300)
    unit, centroids = clusters.k_means(keys, 12, 5, cosines)
    assert unit[:, :, :40].max() < 5 and unit[:, :, :40].unique().numel() < 5
    torch.testing.assert_close(centroids[:, :, :5], keys[:, :, :5])
    for row in range(BATCH):
        for head in range(HEADS):
            own, means = naive_k_means(keys[row, head].double(), 12, 5, cosines)
            assert unit[row, head, 40:].tolist() == own[40:]
            torch.testing.assert_close(centroids[row, head, 5:].double(), torch.stack(means[5:]), atol=1e-5, rtol=1e-5)


def test_entries_are_the_settings_that_their_names_say():
    assert {name: METHODS[name]() for name in ENTRIES} == ENTRIES


@pytest.mark.parametrize(
    ("begin", "message"),
    [
        (lambda: FreeKV(tau=1.5), "expected -1 to 1"),
        (lambda: FreeKV(hysteresis=-0.1), "expected 0 to 10"),
        (lambda: FreeKV(pooling="sum"), "expected one of softmax-mean"),
        (lambda: FreeKV(digest="mean"), "expected one of min-max, cuboid-mean, two-bit"),
        (lambda: FreeKV(selection="never"), "expected one of every-step, on-turn"),
        (lambda: FreeKV(selection="on-turn", early=True), "selection on-turn with early: expected every-step"),
        (lambda: FreeKV(digest="two-bit", top_p=1.0), "^top_p 1.0: expected above 0 and below 1, or None$"),
        (lambda: FreeKV(top_p=0.9), "^top_p with digest cuboid-mean: expected two-bit, because [^\n]*$"),
        (lambda: FreeKV(digest="two-bit", top_p=0.9, beyond="all"), "^beyond all: expected one of nothing, in-hand$"),
        (lambda: FreeKV(digest="two-bit", beyond="in-hand"), "^beyond in-hand without top_p: expected top_p, because [^\n]*$"),
        (lambda: FreeKV(tail=0).begin(Text.random(300).prompt, BUDGET), "^tail 0: expected a multiple of 16, the page$"),
        (lambda: FreeKV(tail=24).begin(Text.random(300).prompt, BUDGET), "^tail 24: expected a multiple of 16, the page$"),
        (lambda: InfiniGen(columns=0), "expected columns above 0"),
        (lambda: LouisKV(tau=2), "expected -1 to 1"),
        (lambda: FreeKV().begin(Text.random(300).prompt, Budget(129, 16, 32, 16)), "multiples of page"),
        (lambda: Quest().begin(Text.random(300).prompt, Budget(20, 4, 8, 8)), "at least one page"),
        (lambda: ShadowKV().begin(Text.random(300).prompt, Budget(40, 4, 8, 8)), "expected total of 7 chunks"),
        (lambda: ClusterKV(sink=64).begin(Text.random(300).prompt, Budget(64, 4, 8, 8)), "above the sink of 64"),
    ],
)
def test_settings_that_do_not_fit_are_told(begin, message):
    with pytest.raises(ValueError, match=message):
        begin()
