"""Needle-in-a-haystack prompts in the format the needle model was trained on.

A document is prose in which facts are hidden; each question about it is a turn of its own:

    <s><|user|>prose fact prose fact ...<|user|>question<|assistant|>answer</s><|user|>question ...

    prompt = make_prompt(np.random.default_rng(0), "magic-number", length_tokens=1024)
    document = make_document(np.random.default_rng(0), length_tokens=4096)
    prompts = [document.ask(fact) for fact in document.facts]

Lengths and positions are in tokens. The same generator state gives the same prompt.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from corpus import ASSISTANT, BOS, EOS, USER, Corpus, default_corpus
from facts import TASKS, Fact, make_facts

__all__ = ["TASKS", "Document", "Fact", "Prompt", "make_document", "make_prompt"]

DEFAULT_NEEDLES = 16


@dataclass(frozen=True)
class Prompt:
    """A prompt that ends where the answer starts.

    Args:
        task: one of ``TASKS``.
        token_ids: the whole prompt.
        text: the same as text, special tokens included.
        messages: the same as chat messages.
        answer_token_ids: what should be generated, without the final ``EOS``.
        answer_text: the same as text, with its leading space.
        answer_positions: where in ``token_ids`` each value of the answer is stated.
    """

    task: str
    token_ids: tuple[int, ...]
    text: str
    messages: tuple[dict[str, str], ...]
    answer_token_ids: tuple[int, ...]
    answer_text: str
    answer_positions: tuple[int, ...]

    def is_answered_by(self, output_token_ids: Sequence[int]) -> bool:
        """Whether the output is the answer, alone or followed by ``EOS`` and anything."""
        answer = (*self.answer_token_ids, EOS)
        return (*output_token_ids, EOS)[: len(answer)] == answer


def question_turn(fact: Fact, corpus: Corpus) -> list[int]:
    return [USER, *corpus.encode(fact.question), ASSISTANT]


def answer_turn(fact: Fact, corpus: Corpus) -> list[int]:
    return [*corpus.encode(fact.answer), EOS]


@dataclass(frozen=True, eq=False)
class Document:
    """The first turn, and what may be asked about it.

    Args:
        token_ids: ``BOS``, ``USER`` and the text.
        facts: all facts hidden in it.
        answer_positions: for each fact, where in ``token_ids`` each of its values is stated.
        corpus: what it was made of.
    """

    token_ids: tuple[int, ...]
    facts: tuple[Fact, ...]
    answer_positions: tuple[tuple[int, ...], ...]
    corpus: Corpus

    @functools.cached_property
    def text(self) -> str:
        return self.corpus.decode(self.token_ids[2:])

    def ask(self, fact: Fact, history: Sequence[Fact] = ()) -> Prompt:
        """The prompt that asks for a fact after the turns of the facts in ``history``."""
        token_ids, messages = list(self.token_ids), [{"role": "user", "content": self.text}]
        for earlier in history:
            token_ids += question_turn(earlier, self.corpus) + answer_turn(earlier, self.corpus)
            messages.append({"role": "user", "content": earlier.question})
            messages.append({"role": "assistant", "content": earlier.answer})
        token_ids += question_turn(fact, self.corpus)
        messages.append({"role": "user", "content": fact.question})
        return Prompt(
            task=fact.task,
            token_ids=tuple(token_ids),
            text=self.corpus.decode(token_ids),
            messages=tuple(messages),
            answer_token_ids=tuple(self.corpus.encode(fact.answer)),
            answer_text=fact.answer,
            answer_positions=self.answer_positions[self.facts.index(fact)],
        )


def hide_facts(
    rng: np.random.Generator, facts: tuple[Fact, ...], length_tokens: int, corpus: Corpus
) -> Document:
    """Spreads the facts over prose; the document is exactly ``length_tokens`` long."""
    needles = [[corpus.encode(sentence) for sentence in fact.sentences] for fact in facts]
    order = rng.permutation([index for index, needle in enumerate(needles) for _ in needle])
    prose_length = length_tokens - 2 - sum(len(part) for needle in needles for part in needle)
    if prose_length < 0:
        raise ValueError(
            f"length_tokens is {length_tokens}; these facts need {length_tokens - prose_length}: "
            "ask for fewer needles"
        )
    prose = corpus.prose(rng, prose_length)
    depths = np.sort(rng.random(len(order))) * prose_length
    slots = np.searchsorted(np.cumsum([len(sentence) for sentence in prose]), depths) + 1

    token_ids, written = [BOS, USER], 0
    ends: list[list[int]] = [[] for _ in facts]
    for slot, index in zip(slots, order):
        token_ids += chain.from_iterable(prose[written:slot])
        token_ids += needles[index][len(ends[index])]
        ends[index].append(len(token_ids))
        written = slot
    token_ids += chain.from_iterable(prose[written:])
    positions = tuple(
        tuple(end - 1 - len(corpus.encode(value)) for value, end in zip(fact.values, fact_ends))
        for fact, fact_ends in zip(facts, ends)
    )
    return Document(tuple(token_ids), facts, positions, corpus)


def make_document(
    rng: np.random.Generator,
    length_tokens: int,
    needle_count: int = DEFAULT_NEEDLES,
    tasks: Sequence[str] = (),
    corpus: Corpus | None = None,
) -> Document:
    """A document of exactly ``length_tokens``; its first facts are one for each of ``tasks``."""
    corpus = corpus or default_corpus()
    facts = make_facts(rng, needle_count, corpus.words, tasks)
    return hide_facts(rng, facts, length_tokens, corpus)


def make_prompt(
    rng: np.random.Generator,
    task: str,
    length_tokens: int,
    needle_count: int = DEFAULT_NEEDLES,
    corpus: Corpus | None = None,
) -> Prompt:
    """One question about one document; the whole prompt is exactly ``length_tokens`` long."""
    corpus = corpus or default_corpus()
    facts = make_facts(rng, needle_count, corpus.words, [task])
    document_length = length_tokens - len(question_turn(facts[0], corpus))
    return hide_facts(rng, facts, document_length, corpus).ask(facts[0])
