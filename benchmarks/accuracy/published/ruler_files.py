"""RULER against a server, on files that NVIDIA's scripts have written, for machines where lm-eval cannot fetch what it needs.

    python -m benchmarks.accuracy.published.ruler_files --url http://127.0.0.1:30000 --model MODEL --data DIR --out DIR

``--data`` is a file, or a directory of ``TASK/validation.jsonl``. Prompts hold the model's template already, and go to /v1/completions.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.accuracy.published import program
from benchmarks.accuracy.published.endpoint import Endpoint, text_of
from benchmarks.accuracy.published.records import RecordError, Row, from_file

TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}  # generated, by the family of a task
ANY = ("qa",)  # of these one reference is enough
SUBSETS = ("validation", "test")
CONTROL = re.compile(r"[\x00-\x1f]")


@dataclass(frozen=True)
class Question:
    """A prompt, and the texts that an answer has to contain."""

    task: str
    prompt: str
    references: list[str]
    length: int

    @property
    def family(self) -> str:
        return self.task.split("_")[0]

    def score(self, answer: str) -> float:
        """The share of references that the answer contains, or whether it contains any; upper and lower case are the same."""
        text = CONTROL.sub("\n", answer.strip()).strip().lower()
        found = [reference.lower() in text for reference in self.references]
        return float(any(found)) if self.family in ANY else sum(found) / len(found)


def read_task(path: Path) -> list[Question]:
    task = path.parent.name if path.stem in SUBSETS else path.stem
    if task.split("_")[0] not in TOKENS:
        raise RecordError(f"{path}: expected a task that begins with {', '.join(TOKENS)}, got {task}")
    return [_question(task, row) for row in from_file(path)]


def _question(task: str, row: Row) -> Question:
    references = row.get("outputs", kind=list)
    if not references or not all(isinstance(each, str) for each in references):
        raise RecordError(f"{row.where}: outputs: expected texts, got {references}")
    prompt, prefix = row.get("input"), row.values.get("answer_prefix") or ""
    return Question(task, prompt if prompt.endswith(prefix) else prompt + prefix, references, row.get("length", kind=int))


def read_all(data: Path, limit: int | None) -> list[Question]:
    """The first ``limit`` questions of every task."""
    paths = sorted(path for subset in SUBSETS for path in data.glob(f"*/{subset}.jsonl")) if data.is_dir() else [data]
    if not paths:
        raise RecordError(f"{data}: expected TASK/validation.jsonl in it, there is none")
    return [question for path in paths for question in read_task(path)[:limit]]


def scores(questions: list[Question], answers: list[str]) -> dict[str, float | int]:
    """Percent by task, and the mean of the tasks."""
    by_task: dict[str, list[float]] = {}
    for question, answer in zip(questions, answers, strict=True):
        by_task.setdefault(question.task, []).append(question.score(answer))
    means = {task: 100 * sum(each) / len(each) for task, each in by_task.items()}
    longest = max(question.length for question in questions)
    return {"mean": sum(means.values()) / len(means)} | means | {"questions": len(questions), "longest": longest}


def run(options: argparse.Namespace) -> dict:
    questions, answers = read_all(options.data, options.limit), {}
    bodies = [{"model": options.model, "prompt": each.prompt, "max_tokens": TOKENS[each.family], "temperature": 0} for each in questions]
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "answers.jsonl").open("w", encoding="utf-8") as file:

        def keep(position: int, reply: dict) -> None:
            answers[position] = text_of(reply)
            question = questions[position]
            line = {"task": question.task, "answer": answers[position], "references": question.references}
            file.write(json.dumps(line | {"score": question.score(answers[position])}, ensure_ascii=False) + "\n")

        print(f"{len(bodies)} questions", flush=True)
        Endpoint(options.url).send_all("/v1/completions", bodies, options.concurrency, keep)
    return scores(questions, [answers[position] for position in range(len(questions))])


def main(arguments: list[str] | None = None) -> int:
    parser = program.parser(__doc__, "a file, or a directory of TASK/validation.jsonl", "directory of result.json and answers.jsonl")
    return program.finish(run, parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
