"""The facts that documents hide: the sentences that state them, a question and its answer."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MIXTURE = {  # share of each task among the facts of a document
    "magic-number": 0.45,
    "multi-value": 0.15,
    "code-word": 0.20,
    "variable-1": 0.20 / 3,
    "variable-2": 0.20 / 3,
    "variable-3": 0.20 / 3,
}
TASKS = tuple(MIXTURE)


@dataclass(frozen=True)
class Fact:
    """Something a document states and a question asks for.

    Args:
        task: one of ``TASKS``.
        sentences: in reading order; other text may stand between them.
        question: what to ask.
        values: the i-th value ends the i-th sentence; the answer is all of them.
    """

    task: str
    sentences: tuple[str, ...]
    question: str
    values: tuple[str, ...]

    @property
    def answer(self) -> str:
        return ",".join(self.values)


class FactWriter:
    """Writes facts about names that are distinct within one document."""

    def __init__(self, rng: np.random.Generator, words: tuple[str, ...]):
        self.rng = rng
        self.words = words
        self.names: set[str] = set()

    def write(self, task: str) -> Fact:
        if task == "magic-number":
            return self._magic_numbers(task, 1, "What is the special magic number for")
        if task == "multi-value":
            count = int(self.rng.integers(2, 5))
            return self._magic_numbers(task, count, "What are all the special magic numbers for")
        if task == "code-word":
            name, value = self._name(2), self._word()
            sentence = f" The code word of{name} is{value}."
            return Fact(task, (sentence,), f"What is the code word of{name}?", (value,))
        if task in TASKS:
            return self._variable(task, hops=int(task.removeprefix("variable-")))
        raise ValueError(f"task is {task!r}; expected one of {', '.join(TASKS)}")

    def _magic_numbers(self, task: str, count: int, question: str) -> Fact:
        name = self._name(2)
        values = tuple(self._number() for _ in range(count))
        sentences = tuple(f" The special magic number for{name} is{value}." for value in values)
        return Fact(task, sentences, f"{question}{name}?", values)

    def _variable(self, task: str, hops: int) -> Fact:
        name, value = self._name(1), self._number()
        sentences = [f" VAR{name} ={value}."]
        for _ in range(hops - 1):
            source, name = name, self._name(1)
            sentences.append(f" VAR{name} = VAR{source}.")
        return Fact(task, tuple(sentences), f"What is the value of VAR{name}?", (value,))

    def _word(self) -> str:
        return self.words[self.rng.integers(len(self.words))]

    def _number(self) -> str:
        return f" {self.rng.integers(1_000_000):06d}"

    def _name(self, word_count: int) -> str:
        while (name := "".join(self._word() for _ in range(word_count))) in self.names:
            pass
        self.names.add(name)
        return name


def make_facts(
    rng: np.random.Generator, needle_count: int, words: tuple[str, ...], tasks: Sequence[str] = ()
) -> tuple[Fact, ...]:
    """One fact for each of ``tasks``, then random ones up to ``needle_count`` sentences in all."""
    writer = FactWriter(rng, words)
    facts = [writer.write(task) for task in tasks]
    while sum(len(fact.sentences) for fact in facts) < needle_count:
        facts.append(writer.write(TASKS[rng.choice(len(TASKS), p=list(MIXTURE.values()))]))
    return tuple(facts)
