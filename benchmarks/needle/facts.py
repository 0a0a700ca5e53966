"""The facts that documents hide: the sentences that state them, a question and its answer."""

from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from benchmarks.needle.corpus import Corpus, Tokens

VARIABLE_TASKS = ("variable-1", "variable-2", "variable-3", "variable-4")
LONG_TASKS = ("long-copy", "running-state")
SHORT_TASKS = ("magic-number", "code-word", "multi-value", "multi-key", "multi-query", *VARIABLE_TASKS, "aggregation")
TASKS = SHORT_TASKS + LONG_TASKS

MIXTURE = {  # share of each task among the facts that fill a document up
    "magic-number": 0.45,
    "multi-value": 0.15,
    "code-word": 0.20,
    "variable-1": 0.20 / 3,
    "variable-2": 0.20 / 3,
    "variable-3": 0.20 / 3,
}
BULKY = ("multi-key", "aggregation", *LONG_TASKS)  # as many sentences or words as the length has room for
VOTE_SHARES = (0.4, 0.25, 0.15)
RING = 10


@dataclass(frozen=True)
class Fact:
    """Something a document states and a question asks for.

    Args:
        task: one of ``TASKS``.
        sentences: token ids of each, in reading order; other text may stand between them.
        question_tokens: what to ask.
        answer_tokens: what to answer, with a leading space.
        sources: sentence and offset of each value that the answer is made of.
        corpus: what it was made of.
    """

    task: str
    sentences: tuple[Tokens, ...]
    question_tokens: Tokens
    answer_tokens: Tokens
    sources: tuple[tuple[int, int], ...]
    corpus: Corpus = field(repr=False)

    @property
    def question(self) -> str:
        return self.corpus.decode(self.question_tokens)

    @property
    def answer(self) -> str:
        return self.corpus.decode(self.answer_tokens)


class FactWriter:
    """Writes facts about names that are distinct within one document.

    Args:
        rng: all choices.
        corpus: words and tokens.
        length_tokens: of the document; bulky facts take at most a third of it.
    """

    def __init__(self, rng: np.random.Generator, corpus: Corpus, length_tokens: int):
        self.rng = rng
        self.corpus = corpus
        self.length_tokens = length_tokens
        self.names: set[Tokens] = set()

    def write(self, task: str) -> Fact:
        if task == "magic-number":
            return self._magic_number(self._name(2))
        if task == "code-word":
            return self._code_word()
        if task in VARIABLE_TASKS:
            return self._variable(task, hops=int(task.removeprefix("variable-")))
        written = {
            "multi-value": self._multi_value,
            "multi-key": self._multi_key,
            "multi-query": self._multi_query,
            "aggregation": self._aggregation,
            "long-copy": self._long_copy,
            "running-state": self._running_state,
        }
        if task in written:
            return written[task]()
        raise ValueError(f"task is {task!r}; expected one of {', '.join(TASKS)}")

    def crowd(self, size: int) -> list[Fact]:
        """Magic numbers of keys that share words: each word of the first one's occurs in others."""
        side = max(3, int(np.ceil(np.sqrt(1.25 * size))))
        words = self.rng.choice(len(self.corpus.short_words), 2 * side, replace=False)
        left, right = ([self.corpus.short_words[word] for word in half] for half in (words[:side], words[side:]))
        cells = dict.fromkeys([0, 1, side, *self.rng.permutation(side * side).tolist()])
        names = [left[cell // side] + right[cell % side] for cell in list(cells)[: max(3, size)]]
        self.names.update(names)
        return [self._magic_number(name, "multi-key") for name in names]

    def _magic_number(self, name: Tokens, task: str = "magic-number") -> Fact:
        question = self._join("What is the special magic number for", name, "?")
        sentence, value = self._magic_sentence(name)
        return Fact(task, (sentence,), question, value, ((0, len(sentence) - 4),), self.corpus)

    def _magic_sentence(self, name: Tokens) -> tuple[Tokens, Tokens]:
        value = self._number()
        return self._join(" The special magic number for", name, " is", value, "."), value

    def _code_word(self) -> Fact:
        name, value = self._name(2), self._word()
        sentence = self._join(" The code word of", name, " is", value, ".")
        question = self._join("What is the code word of", name, "?")
        return Fact("code-word", (sentence,), question, value, ((0, len(sentence) - 1 - len(value)),), self.corpus)

    def _multi_value(self) -> Fact:
        count = int(self.rng.integers(2, 5))
        name = self._name(2)
        sentences, values = zip(*(self._magic_sentence(name) for _ in range(count)))
        question = self._join("What are all the special magic numbers for", name, "?")
        sources = tuple((index, len(sentence) - 4) for index, sentence in enumerate(sentences))
        return Fact("multi-value", sentences, question, self._join(*self._separated(values)), sources, self.corpus)

    def _multi_query(self) -> Fact:
        return ask_together([self._magic_number(self._name(2)) for _ in range(self.rng.integers(2, 5))])

    def _multi_key(self) -> Fact:
        asked, *others = self.crowd(min(48, self.length_tokens // 36))
        place = int(self.rng.integers(len(others) + 1))
        sentences = [fact.sentences[0] for fact in others]
        sentences.insert(place, asked.sentences[0])
        sources = ((place, asked.sources[0][1]),)
        return Fact("multi-key", tuple(sentences), asked.question_tokens, asked.answer_tokens, sources, self.corpus)

    def _variable(self, task: str, hops: int) -> Fact:
        names = [self._name(1)]
        values = [self._number()]
        for _ in range(hops - 1):
            values.append(self._join(" VAR", names[-1]))
            names.append(self._name(1))
        sentences = [self._join(" VAR", name, " =", value, ".") for name, value in zip(names, values)]
        order = self.rng.permutation(hops).tolist()
        answer = self._join(" VAR", names[-1], *(part for value in reversed(values) for part in (" =", value)))
        sources = tuple((order.index(hop), len(sentences[hop]) - 1 - len(values[hop])) for hop in reversed(range(hops)))
        question = self._join("What is the value of VAR", names[-1], "?")
        return Fact(task, tuple(sentences[hop] for hop in order), question, answer, sources, self.corpus)

    def _aggregation(self) -> Fact:
        total = self._size(most=160, tokens_each=16, least=16)
        counts = [round(share * total) for share in VOTE_SHARES]
        rest = total - sum(counts)
        others = min(8, rest)
        counts += [(rest + index) // others for index in range(others)]
        chosen = self.rng.choice(len(self.corpus.short_words), len(counts), replace=False)
        words = [self.corpus.short_words[word] for word in chosen]
        votes = self.rng.permutation(np.repeat(np.arange(len(counts)), counts)).tolist()
        sentences = [self._join(" Vote:", word, ".") for word in words]
        sources = tuple((index, len(sentences[0]) - 2) for index, vote in enumerate(votes) if vote < len(VOTE_SHARES))
        question = self._join("Which three words have the most votes?")
        answer = self._join(*self._separated(words[: len(VOTE_SHARES)]))
        return Fact("aggregation", tuple(sentences[vote] for vote in votes), question, answer, sources, self.corpus)

    def _long_copy(self) -> Fact:
        count = self._size(most=500, tokens_each=4, least=16)
        chosen = self.rng.choice(len(self.corpus.short_words), count, replace=False)
        words = self._join(*(self.corpus.short_words[word] for word in chosen), ".")
        start = self.corpus.phrase(" Here is the list:")
        sources = tuple((0, len(start) + index) for index in range(count))
        return Fact("long-copy", (start + words,), self._join("Repeat the list."), words, sources, self.corpus)

    def _running_state(self) -> Fact:
        count = self._size(most=100, tokens_each=24, least=8)
        ups, amounts = self.rng.integers(2, size=count).tolist(), self.rng.integers(1, 6, count).tolist()
        state = int(self.rng.integers(RING))
        question = self._join(f"Start at {state} on a ring of {RING} and follow the moves.")
        sentences, answer, sources = [], [self._join(f" {state}")], []
        for index, (up, amount) in enumerate(zip(ups, amounts)):
            number = self._join(f" {index + 1}")
            move = self._join(f" up {amount}" if up else f" down {amount}")
            state = (state + (amount if up else -amount)) % RING
            sentences.append(self._join(" Move", number, ":", move, "."))
            sources.append((index, len(sentences[-1]) - 1 - len(move)))
            answer.append(self._join(",", number, ":", move, f" = {state}"))
        return Fact("running-state", tuple(sentences), question, self._join(*answer, "."), tuple(sources), self.corpus)

    def _size(self, most: int, tokens_each: int, least: int) -> int:
        """How many items a bulky fact has, at most one for ``tokens_each`` tokens of the document."""
        most = max(least, min(most, self.length_tokens // tokens_each))
        return int(self.rng.integers(max(least, most * 4 // 5), most + 1))

    def _join(self, *parts: str | Tokens) -> Tokens:
        return join(self.corpus, parts)

    def _separated(self, values: Sequence[Tokens]) -> Iterator[str | Tokens]:
        for index, value in enumerate(values):
            if index:
                yield ","
            yield value

    def _word(self) -> Tokens:
        return self.corpus.word_tokens[self.rng.integers(len(self.corpus.words))]

    def _number(self) -> Tokens:
        return self.corpus.number(int(self.rng.integers(1_000_000)))

    def _name(self, word_count: int) -> Tokens:
        while (name := sum((self._word() for _ in range(word_count)), ())) in self.names:
            pass
        self.names.add(name)
        return name


def join(corpus: Corpus, parts: Sequence[str | Tokens]) -> Tokens:
    joined: list[int] = []
    for part in parts:
        joined += corpus.phrase(part) if isinstance(part, str) else part
    return tuple(joined)


def ask_together(facts: Sequence[Fact]) -> Fact:
    """One question for several magic numbers; the answer names each key in the order asked."""
    corpus = facts[0].corpus
    before, after = len(corpus.phrase("What is the special magic number for")), len(corpus.phrase("?"))
    question: list[str | Tokens] = ["What are the special magic numbers for"]
    answer: list[str | Tokens] = []
    for fact in facts:
        name = fact.question_tokens[before:-after]
        question += ([","] if answer else []) + [name]
        answer += ([","] if answer else []) + [name, " is", fact.answer_tokens]
    sentences = tuple(fact.sentences[0] for fact in facts)
    sources = tuple((index, fact.sources[0][1]) for index, fact in enumerate(facts))
    return Fact("multi-query", sentences, join(corpus, [*question, "?"]), join(corpus, answer), sources, corpus)


def make_facts(
    rng: np.random.Generator, needle_count: int, corpus: Corpus, length_tokens: int, tasks: Sequence[str] = ()
) -> tuple[Fact, ...]:
    """One fact for each of ``tasks``, then random ones up to ``needle_count`` needles in all.

    A bulky fact counts as one needle, any other as one for each of its sentences.
    """
    writer = FactWriter(rng, corpus, length_tokens)
    facts = [writer.write(task) for task in tasks]
    needles = sum(1 if fact.task in BULKY else len(fact.sentences) for fact in facts)
    thresholds = list(accumulate(MIXTURE.values()))
    while needles < needle_count:
        facts.append(writer.write(list(MIXTURE)[bisect(thresholds, rng.random(), hi=len(thresholds) - 1)]))
        needles += len(facts[-1].sentences)
    return tuple(facts)
