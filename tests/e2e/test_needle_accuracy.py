"""Needle accuracy of a real server: the same 72 questions at 2K and 4K, budget 512 beside dense.

Dense is a budget that covers the context, which test_dense_identity.py shows to be stock SGLang's tokens.
"""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from benchmarks.needle import tasks
from serving import TestServer

LENGTHS, DOCUMENTS, QUESTIONS = (2048, 4096), 3, 12
TASKS = ("magic-number", "code-word", "multi-value", "variable-3")
SOLVED = 0.95  # what "a task that dense solves" means


@pytest.fixture(scope="module")
def questions() -> list[tuple[int, tasks.Prompt]]:
    rng = np.random.default_rng(1)
    asked = []
    for length in LENGTHS:
        for _ in range(DOCUMENTS):
            document = tasks.make_document(rng, length, needle_count=QUESTIONS + 4, tasks=TASKS * (QUESTIONS // len(TASKS)))
            asked += [(length, document.ask(fact)) for fact in document.facts[:QUESTIONS]]
    return asked


def right_answers(server: TestServer, questions) -> dict[tuple[str, int], list[bool]]:
    answers = server.generate_all([prompt.token_ids for _, prompt in questions], 24, ignore_eos=False)
    right = defaultdict(list)
    for (length, prompt), answer in zip(questions, answers):
        right[prompt.task, length].append(prompt.is_answered_by(answer["output_ids"]))
    return right


def test_as_accurate_as_dense(fleet, questions, capsys):
    with ThreadPoolExecutor(2) as pool:
        dense, sparse = pool.map(lambda server: right_answers(server, questions), (fleet.covering, fleet.small))
    with capsys.disabled():
        print(f"\n{'task':>14} {'length':>6} {'dense':>6} {'FreeKV':>6}  questions")
        for (task, length), right in sorted(dense.items()):
            print(f"{task:>14} {length:>6} {np.mean(right):6.3f} {np.mean(sparse[task, length]):6.3f}  {len(right)}")
    assert {task for task in TASKS if np.mean(dense[task, LENGTHS[0]] + dense[task, LENGTHS[1]]) >= SOLVED} >= {"magic-number", "code-word"}
    for task in TASKS:
        of_dense = np.concatenate([dense[task, length] for length in LENGTHS])
        of_sparse = np.concatenate([sparse[task, length] for length in LENGTHS])
        if of_dense.mean() >= SOLVED:
            assert of_sparse.sum() >= of_dense.sum() - 1, f"{task}: {of_sparse.sum()} of {len(of_sparse)} right, dense {of_dense.sum()}"
