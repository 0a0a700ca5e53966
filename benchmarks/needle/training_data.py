"""Training examples: documents followed by questions and answers, and batches of them."""

from bisect import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from benchmarks.needle.corpus import Corpus
from benchmarks.needle.facts import TASKS, Fact, FactWriter, ask_together
from benchmarks.needle.tasks import answer_turn, hide_sentences, question_turn

RECIPES = {  # share of the documents that are about many small facts, one crowd of keys or one bulky fact
    "mixed": 0.38,
    "multi-key": 0.16,
    "aggregation": 0.16,
    "long-copy": 0.14,
    "running-state": 0.16,
}
MIXTURE = {  # share of each task among the small facts
    "magic-number": 0.22,
    "code-word": 0.14,
    "multi-value": 0.22,
    "variable-1": 0.06,
    "variable-2": 0.10,
    "variable-3": 0.12,
    "variable-4": 0.14,
}
ANSWER_WEIGHTS = {"aggregation": 4.0, "long-copy": 0.5}  # in the loss, of a token; 1 for the other tasks
PROSE_SHARE, PROSE_WEIGHT = 0.02, 0.1  # of the prose tokens that are sampled; in the loss
PROSE = len(TASKS)


@dataclass(frozen=True)
class Example:
    """One sequence to train on.

    Args:
        token_ids: ``[length]``.
        answers: task, start and length (with its ``EOS``) of every answer.
    """

    token_ids: list[int]
    answers: tuple[tuple[str, int, int], ...]


class Batch(NamedTuple):
    """What one step needs.

    Args:
        token_ids: ``[batch, length_tokens + 1] int32``.
        chosen: ``[chosen] int64`` positions in the flattened ``[batch, length_tokens]`` inputs whose next token is in the loss.
        weights: ``[chosen] float32`` in the loss.
        kinds: ``[chosen] int64`` the task's index in ``TASKS``, or ``PROSE``.
    """

    token_ids: torch.Tensor
    chosen: torch.Tensor
    weights: torch.Tensor
    kinds: torch.Tensor


def make_conversation(rng: np.random.Generator, length_tokens: int, facts: Iterable[Fact], together: int, corpus: Corpus) -> Example:
    """A document of the facts that fit with their questions, which follow in random order.

    ``together`` more questions ask for several magic numbers at once.
    """
    hidden, asked, used = [], [], 2
    for fact in facts:
        cost = sum(map(len, fact.sentences)) + turns_length(fact)
        if used + cost <= length_tokens:
            hidden.append(fact)
            asked.append(fact)
            used += cost
    magic = [fact for fact in hidden if len(fact.sentences) == 1 and fact.task in ("magic-number", "multi-key")]
    for _ in range(together if len(magic) >= 4 else 0):
        question = ask_together([magic[index] for index in rng.choice(len(magic), rng.integers(2, 5), replace=False)])
        if used + turns_length(question) <= length_tokens:
            asked.append(question)
            used += turns_length(question)

    asked = [asked[index] for index in rng.permutation(len(asked))]
    token_ids, _ = hide_sentences(rng, hidden, length_tokens - sum(map(turns_length, asked)), corpus)
    answers = []
    for fact in asked:
        token_ids += question_turn(fact)
        answers.append((fact.task, len(token_ids), len(fact.answer_tokens) + 1))
        token_ids += answer_turn(fact)
    return Example(token_ids, tuple(answers))


def turns_length(fact: Fact) -> int:
    return len(fact.question_tokens) + len(fact.answer_tokens) + 3


def make_example(rng: np.random.Generator, length_tokens: int, corpus: Corpus) -> Example:
    """An example of exactly ``length_tokens`` from the training mixture."""
    writer = FactWriter(rng, corpus, length_tokens)
    recipe = draw(rng, RECIPES)
    if recipe == "mixed":
        most = min(320 if rng.random() < 0.6 else 24, length_tokens // 48)
        facts = small_facts(rng, writer, int(rng.integers(4, max(5, most))))
        return make_conversation(rng, length_tokens, facts, max(1, most // 8), corpus)
    fillers = small_facts(rng, writer, int(rng.integers(min(24, length_tokens // 60) + 1)))
    if recipe == "multi-key":
        size = int(rng.integers(6, max(7, min(96, length_tokens // 36))))
        return make_conversation(rng, length_tokens, [*writer.crowd(size), *fillers], size // 6, corpus)
    return make_conversation(rng, length_tokens, [writer.write(recipe), *fillers], 1, corpus)


def small_facts(rng: np.random.Generator, writer: FactWriter, count: int) -> list[Fact]:
    return [writer.write(draw(rng, MIXTURE)) for _ in range(count)]


def draw(rng: np.random.Generator, shares: dict[str, float]) -> str:
    return list(shares)[bisect(list(accumulate(shares.values())), rng.random(), hi=len(shares) - 1)]


def make_batch(rng: np.random.Generator, length_tokens: int, batch: int, corpus: Corpus) -> Batch:
    """The answers of ``batch`` examples, and a sample of their other tokens."""
    examples = [make_example(rng, length_tokens + 1, corpus) for _ in range(batch)]
    chosen, weights, kinds = [], [], []
    for row, example in enumerate(examples):
        for task, start, length in example.answers:
            first = row * length_tokens + start - 1
            chosen.append(np.arange(first, first + length))
            weights.append(np.full(length, ANSWER_WEIGHTS.get(task, 1.0), np.float32))
            kinds.append(np.full(length, TASKS.index(task)))
    answered = sum(map(len, chosen))
    unit = max(32, batch * length_tokens // 32)  # the number of chosen tokens is a multiple: the allocator sees few shapes
    prose = -(-int(answered + PROSE_SHARE * batch * length_tokens) // unit) * unit - answered
    chosen.append(rng.integers(batch * length_tokens, size=prose))
    weights.append(np.full(prose, PROSE_WEIGHT, np.float32))
    kinds.append(np.full(prose, PROSE))
    return Batch(
        torch.from_numpy(np.array([example.token_ids for example in examples], np.int32)),
        *(torch.from_numpy(np.concatenate(parts)) for parts in (chosen, weights, kinds)),
    )


class Batches(IterableDataset):
    """Endless batches of about ``step_tokens``, each of one of the lengths; every seed and every worker has its own."""

    def __init__(self, corpus: Corpus, lengths: tuple[int, ...], step_tokens: int, seed: tuple[int, ...]):
        self.corpus = corpus
        self.lengths = lengths
        self.step_tokens = step_tokens
        self.seed = seed

    def __iter__(self):
        worker = get_worker_info()
        rng = np.random.default_rng([*self.seed, self.lengths[-1], worker.id if worker else 0])
        while True:
            length_tokens = int(rng.choice(self.lengths))
            yield make_batch(rng, length_tokens, max(1, self.step_tokens // length_tokens), self.corpus)
