"""How right the needle model is: prompts of every task, teacher-forced."""

import numpy as np
import torch

from benchmarks.needle.corpus import Corpus
from benchmarks.needle.facts import LONG_TASKS, TASKS
from benchmarks.needle.network import Network
from benchmarks.needle.tasks import DEFAULT_NEEDLES, answer_turn, hide_sentences, make_facts, question_turn

STEP_TOKENS = 131072


def make_questions(
    rng: np.random.Generator, task: str, length_tokens: int, count: int, corpus: Corpus
) -> list[tuple[list[int], list[int]]]:
    """Prompts as ``make_prompt`` makes them, and their answers with the final ``EOS``."""
    questions = []
    for _ in range(count):
        facts = make_facts(rng, DEFAULT_NEEDLES, corpus, length_tokens, [task])
        question = question_turn(facts[0])
        token_ids, _ = hide_sentences(rng, facts, length_tokens - len(question), corpus)
        questions.append((token_ids + question, answer_turn(facts[0])))
    return questions


@torch.no_grad()
def right_tokens(network: Network, questions: list[tuple[list[int], list[int]]]) -> list[int]:
    """How many tokens of each answer greedy generation gets right before its first error.

    All prompts have one length. What follows an error does not count, so the right answer may be fed.
    """
    prompt_length = len(questions[0][0])
    longest = max(len(answer) for _, answer in questions)
    device = network.norm.device
    rows = [prompt + answer + answer[-1:] * (longest - len(answer)) for prompt, answer in questions]
    token_ids = torch.tensor(rows, device=device)
    hidden = network(token_ids[:, :-1]).unflatten(0, (len(rows), -1))[:, prompt_length - 1 :]
    lengths = torch.tensor([len(answer) for _, answer in questions], device=device)
    wrong = network.logits(hidden).argmax(-1) != token_ids[:, prompt_length:]
    wrong |= torch.arange(longest, device=device) >= lengths[:, None]
    return torch.where(wrong.any(1), wrong.int().argmax(1), longest).tolist()


def evaluate(network: Network, corpus: Corpus, length_tokens: int, prompts: int) -> dict[str, dict[str, float]]:
    """For every task the share of exact answers, and for long ones the mean share before the first error."""
    report = {}
    batch = max(1, STEP_TOKENS // length_tokens)
    for index, task in enumerate(TASKS):
        rng = np.random.default_rng([7, length_tokens, index])
        questions = make_questions(rng, task, length_tokens, prompts, corpus)
        right = [count for first in range(0, prompts, batch) for count in right_tokens(network, questions[first : first + batch])]
        shares = np.array([count / len(answer) for count, (_, answer) in zip(right, questions)])
        report[task] = {"exact": float(np.mean(shares == 1))}
        if task in LONG_TASKS:
            report[task]["score"] = float(np.mean(shares))
    return report
