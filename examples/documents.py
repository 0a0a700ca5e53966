# SPDX-License-Identifier: Apache-2.0
"""Long documents, questions about them with known answers, and the lines that the other examples print about an answer."""

import numpy as np

from benchmarks.needle.tasks import Document, Fact, make_document

KINDS = ("magic-number", "code-word")


def write_document(seed: int, tokens: int, questions: int) -> tuple[Document, tuple[Fact, ...]]:
    """A document with facts hidden in its prose, and the facts to ask about.

    Args:
        seed: of the document's text and facts.
        tokens: length of the document by the bundled model's tokenizer.
        questions: number of facts that are returned. Each has a ``question`` and an ``answer``.
    """
    document = make_document(np.random.default_rng(seed), tokens, tasks=[KINDS[index % 2] for index in range(questions)])
    return document, document.facts[:questions]


def question_about(text: str, question: str) -> dict[str, str]:
    """One chat message: the text, then the question."""
    return {"role": "user", "content": f"{text}\n{question}"}


def judge(reply: str, fact: Fact) -> str:
    """The reply, and whether it is right."""
    expected = fact.answer.strip()
    return f"{reply.strip()} ({'right' if expected in reply else f'WRONG, expected {expected}'})"


def describe(counts: dict[str, int]) -> str:
    """Two lines about the counts of one answer, ``meta_info["freekv"]``. A unit is one (page, kv head) of one layer."""
    return (
        f"attended to {counts['attended_pages']} of {counts['context_pages']} pages in each of {counts['decode_steps']} decode steps\n"
        f"  recalled {counts['recalled_units']} of {counts['selected_units']} selected units from host memory, "
        f"corrected {counts['corrections']} of {counts['correction_decisions']} kv heads"
    )
