"""Training examples: documents followed by questions and answers, and lists to repeat."""

from dataclasses import dataclass

import numpy as np
from corpus import ASSISTANT, BOS, EOS, USER, Corpus
from facts import make_facts
from tasks import answer_turn, hide_facts, question_turn

LIST_SHARE = 0.08


@dataclass(frozen=True)
class Example:
    """One sequence to train on.

    Args:
        token_ids: ``[length] int64``.
        is_answer: ``[length] bool`` the tokens to predict, each final ``EOS`` included.
        answers: task, start and length (without ``EOS``) of every answer.
    """

    token_ids: np.ndarray
    is_answer: np.ndarray
    answers: tuple[tuple[str, int, int], ...] = ()


def make_conversation(
    rng: np.random.Generator,
    length_tokens: int,
    needle_count: int,
    question_limit: int,
    corpus: Corpus,
) -> Example:
    """A document and as many of its questions, in random order, as fit and are allowed."""
    facts = make_facts(rng, needle_count, corpus.words)
    document_tokens = 2 + sum(
        len(corpus.encode(sentence)) for fact in facts for sentence in fact.sentences
    )
    turns, tasks = [], []
    for index in rng.permutation(len(facts))[:question_limit]:
        question, answer = question_turn(facts[index], corpus), answer_turn(facts[index], corpus)
        document_tokens += len(question) + len(answer)
        if document_tokens > length_tokens:
            break
        turns.append((question, answer))
        tasks.append(facts[index].task)

    tail_length = sum(len(question) + len(answer) for question, answer in turns)
    token_ids = list(hide_facts(rng, facts, length_tokens - tail_length, corpus).token_ids)
    is_answer, answers = [False] * len(token_ids), []
    for task, (question, answer) in zip(tasks, turns):
        token_ids += question + answer
        answers.append((task, len(token_ids) - len(answer), len(answer) - 1))
        is_answer += [False] * len(question) + [True] * len(answer)
    return Example(np.array(token_ids), np.array(is_answer), tuple(answers))


def make_list(rng: np.random.Generator, length_tokens: int, corpus: Corpus) -> Example:
    """A list of words to repeat, then unrelated prose."""
    count = min(length_tokens // 5, 400)
    words = "".join(corpus.words[index] for index in rng.integers(len(corpus.words), size=count))
    request = [BOS, USER, *corpus.encode("Repeat the list:" + words), ASSISTANT]
    answer = [*corpus.encode(words + " Done."), EOS]
    token_ids = request + answer
    for sentence in corpus.prose(rng, max(0, length_tokens - len(token_ids))):
        token_ids += sentence
    is_answer = np.zeros(len(token_ids), bool)
    is_answer[len(request) : len(request) + len(answer)] = True
    return Example(np.array(token_ids)[:length_tokens], is_answer[:length_tokens])


def make_example(rng: np.random.Generator, length_tokens: int, corpus: Corpus) -> Example:
    """An example of exactly ``length_tokens`` from the training mixture."""
    if rng.random() < LIST_SHARE:
        return make_list(rng, length_tokens, corpus)
    needle_count = int(rng.integers(4, max(5, min(64, length_tokens // 60))))
    return make_conversation(rng, length_tokens, needle_count, needle_count, corpus)
