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
from dataclasses import dataclass, field

import numpy as np

from benchmarks.needle.corpus import ASSISTANT, BOS, EOS, USER, Corpus, Tokens, default_corpus
from benchmarks.needle.facts import LONG_TASKS, SHORT_TASKS, TASKS, VARIABLE_TASKS, Fact, make_facts

__all__ = ["LONG_TASKS", "SHORT_TASKS", "TASKS", "VARIABLE_TASKS", "Document", "Fact", "Prompt", "make_document", "make_prompt"]

DEFAULT_NEEDLES = 16


@dataclass(frozen=True)
class Prompt:
    """A prompt that ends where the answer starts.

    Args:
        task: one of ``TASKS``.
        token_ids: the whole prompt.
        answer_token_ids: what should be generated, without the final ``EOS``.
        answer_positions: where in ``token_ids`` each value that the answer is made of is stated.
        turns: token ids of each message in turn, the user's first; the answer is none of them.
        corpus: what it was made of.
    """

    task: str
    token_ids: Tokens
    answer_token_ids: Tokens
    answer_positions: Tokens
    turns: tuple[Tokens, ...] = field(repr=False)
    corpus: Corpus = field(repr=False)

    @functools.cached_property
    def text(self) -> str:
        """``token_ids`` as text, special tokens included."""
        return self.corpus.decode(self.token_ids)

    @functools.cached_property
    def messages(self) -> tuple[dict[str, str], ...]:
        """``token_ids`` as chat messages."""
        roles = ["user", *(role for _ in self.turns[2::2] for role in ("user", "assistant")), "user"]
        return tuple({"role": role, "content": self.corpus.decode(turn)} for role, turn in zip(roles, self.turns))

    @functools.cached_property
    def answer_text(self) -> str:
        """``answer_token_ids`` as text, with its leading space."""
        return self.corpus.decode(self.answer_token_ids)

    def is_answered_by(self, output_token_ids: Sequence[int]) -> bool:
        """Whether the output is the answer, alone or followed by ``EOS`` and anything."""
        return self._right_tokens(output_token_ids) == len(self.answer_token_ids) + 1

    def score(self, output_token_ids: Sequence[int]) -> float:
        """1 for the answer; for a long task otherwise the share of it before the first wrong token.

        The answer's final ``EOS`` counts as one of its tokens, and so does the end of the output.
        """
        right, length = self._right_tokens(output_token_ids), len(self.answer_token_ids) + 1
        return right / length if self.task in LONG_TASKS else float(right == length)

    def _right_tokens(self, output_token_ids: Sequence[int]) -> int:
        answer = (*self.answer_token_ids, EOS)
        wrong = (index for index, (got, due) in enumerate(zip((*output_token_ids, EOS), answer)) if got != due)
        return next(wrong, min(len(answer), len(output_token_ids) + 1))


def question_turn(fact: Fact) -> list[int]:
    return [USER, *fact.question_tokens, ASSISTANT]


def answer_turn(fact: Fact) -> list[int]:
    return [*fact.answer_tokens, EOS]


@dataclass(frozen=True, eq=False)
class Document:
    """The first turn, and what may be asked about it.

    Args:
        token_ids: ``BOS``, ``USER`` and the text.
        facts: all facts hidden in it.
        answer_positions: for each fact, where in ``token_ids`` each value of its answer is stated.
        corpus: what it was made of.
    """

    token_ids: Tokens
    facts: tuple[Fact, ...]
    answer_positions: tuple[Tokens, ...]
    corpus: Corpus

    @functools.cached_property
    def text(self) -> str:
        return self.corpus.decode(self.token_ids[2:])

    def ask(self, fact: Fact, history: Sequence[Fact] = ()) -> Prompt:
        """The prompt that asks for a fact after the turns of the facts in ``history``."""
        token_ids, turns = list(self.token_ids), [self.token_ids[2:]]
        for earlier in history:
            token_ids += question_turn(earlier) + answer_turn(earlier)
            turns += [earlier.question_tokens, earlier.answer_tokens]
        return Prompt(
            task=fact.task,
            token_ids=tuple(token_ids + question_turn(fact)),
            answer_token_ids=fact.answer_tokens,
            answer_positions=self.answer_positions[self.facts.index(fact)],
            turns=(*turns, fact.question_tokens),
            corpus=self.corpus,
        )


def hide_sentences(
    rng: np.random.Generator, facts: Sequence[Fact], length_tokens: int, corpus: Corpus
) -> tuple[list[int], list[list[int]]]:
    """Spreads the facts over prose: ``[length_tokens]`` token ids, and where each sentence of each fact starts."""
    order = rng.permutation([index for index, fact in enumerate(facts) for _ in fact.sentences]).tolist()
    prose_length = length_tokens - 2 - sum(len(sentence) for fact in facts for sentence in fact.sentences)
    if prose_length < 0:
        raise ValueError(f"length_tokens is {length_tokens}; these facts need {length_tokens - prose_length}: ask for fewer needles")
    prose, ends = corpus.prose(rng, prose_length)
    depths = np.sort(rng.random(len(order))) * prose_length
    places = ends[np.searchsorted(ends, depths)].tolist()

    token_ids, written = [BOS, USER], 0
    starts: list[list[int]] = [[] for _ in facts]
    for place, index in zip(places, order):
        token_ids += prose[written:place]
        starts[index].append(len(token_ids))
        token_ids += facts[index].sentences[len(starts[index]) - 1]
        written = place
    return token_ids + prose[written:], starts


def hide_facts(rng: np.random.Generator, facts: tuple[Fact, ...], length_tokens: int, corpus: Corpus) -> Document:
    """A document of exactly ``length_tokens`` that states the facts."""
    token_ids, starts = hide_sentences(rng, facts, length_tokens, corpus)
    positions = tuple(
        tuple(fact_starts[sentence] + offset for sentence, offset in fact.sources) for fact, fact_starts in zip(facts, starts)
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
    facts = make_facts(rng, needle_count, corpus, length_tokens, tasks)
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
    facts = make_facts(rng, needle_count, corpus, length_tokens, [task])
    document_length = length_tokens - len(question_turn(facts[0]))
    return hide_facts(rng, facts, document_length, corpus).ask(facts[0])
