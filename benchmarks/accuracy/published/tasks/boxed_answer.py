"""What boxed_answer.yaml asks of lm-eval: its records, all samples of a question, and their scores by lm-eval's own comparison."""

from __future__ import annotations

import json
import re
from pathlib import Path

LETTER = re.compile(r"(?:\\(?:text|textbf|mathrm|mathbf)\{)?\W*([A-D])(?![A-Za-z])")


def load(records: str | None = None, **_) -> dict:
    """The records that ``--metadata '{"records": FILE}'`` names: a question and an answer in each line."""
    import datasets

    if records is None:
        raise ValueError("--metadata: expected records, a file that run.py writes; got none; use run.py")
    rows = [json.loads(line) for line in Path(records).read_text(encoding="utf-8").splitlines()]
    return {"test": datasets.Dataset.from_list(rows)}


def keep(samples, _documents):
    return samples


def boxed(text: str) -> str | None:
    """What the last box holds."""
    from lm_eval.tasks.aime.utils import last_boxed_only_string, remove_boxed

    try:
        return remove_boxed(last_boxed_only_string(text) or "")
    except (AssertionError, IndexError):
        return None


def is_right(held: str | None, answer: str) -> bool:
    from lm_eval.tasks.aime.utils import is_equiv

    if held is None:
        return False
    if re.fullmatch("[A-D]", answer):
        letter = LETTER.match(held)
        return letter is not None and letter[1] == answer
    if answer.isdecimal() and held.strip().isdecimal():  # AIME's answers may be written as 033
        return int(answer) == int(held)
    return is_equiv(held, answer)


def score(document: dict, results: list[list[str]]) -> dict[str, float]:
    """Whether any sample is right, the share that are, and the share that hold a box at all."""
    held = [boxed(sample) for sample in results[0]]
    right = [is_right(each, document["answer"]) for each in held]
    return {"pass": float(any(right)), "avg": sum(right) / len(right), "boxed": sum(each is not None for each in held) / len(held)}
