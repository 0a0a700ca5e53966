"""Published data sets as rows: read from files or the Hugging Face hub, checked, with a message that names the place of what is wrong."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.accuracy.published.presets import Dataset

KINDS = {str: "a text", int: "a whole number", list: "a list", dict: "an object"}
LETTERS, LENGTHS, DIFFICULTIES = "ABCD", ("short", "medium", "long"), ("easy", "hard")
CHOICES = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
CHECKS = ("once", "range", "periodic")
SHUFFLE_SEED = 0


class RecordError(ValueError):
    """A data set that is not what its format says; the message is one line: where, what was expected, what is there."""


@dataclass(frozen=True)
class Row:
    """One question as published, and where it stands."""

    where: str
    values: dict[str, Any]

    def get(self, *names: str, kind: type | tuple[type, ...] = str) -> Any:
        """The value under the first of ``names`` that is there."""
        kinds = kind if isinstance(kind, tuple) else (kind,)
        name = next((name for name in names if self.values.get(name) is not None), None)
        if name is None:
            there = ", ".join(name for name, value in self.values.items() if value is not None) or "none"
            raise RecordError(f"{self.where}: expected a field {' or '.join(names)}, there are {there}")
        value = self.values[name]
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise RecordError(f"{self.where}: {name}: expected {' or '.join(KINDS[each] for each in kinds)}, got {_shown(value)}")
        return value

    def one_of(self, name: str, allowed: Iterable[str]) -> str:
        if (value := self.get(name)) not in allowed:
            raise RecordError(f"{self.where}: {name}: expected one of {', '.join(allowed)}, got {_shown(value)}")
        return value


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def from_file(path: Path) -> list[Row]:
    """Rows of a ``.jsonl``, ``.json`` or ``.csv`` file; at least one."""
    readers = {".jsonl": _json_lines, ".json": _json_list, ".csv": _csv}
    if path.suffix.lower() not in readers:
        raise RecordError(f"{path}: expected a file that ends in {', '.join(readers)}, got {path.suffix or 'no ending'}")
    try:
        rows = list(readers[path.suffix.lower()](path))
    except OSError as error:
        raise RecordError(f"{path}: expected a file to read, got {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RecordError(f"{path}: expected text in UTF-8, got byte {error.object[error.start]:#x} at {error.start}") from None
    if not rows:
        raise RecordError(f"{path}: expected at least one row, there is none")
    return rows


def _json_lines(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _row(f"{path}, line {number}", _parsed(line, path, number))


def _json_list(path: Path) -> Iterator[Row]:
    items = _parsed(path.read_text(encoding="utf-8"), path, 1)
    if not isinstance(items, list):
        raise RecordError(f"{path}, line 1: expected a list of objects, got {_shown(items)}")
    yield from (_row(f"{path}, item {number}", item) for number, item in enumerate(items, 1))


def _parsed(text: str, path: Path, first_line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RecordError(f"{path}, line {first_line + error.lineno - 1}: expected JSON, got {error.msg} at column {error.colno}") from None


def _row(where: str, value: Any) -> Row:
    if not isinstance(value, dict):
        raise RecordError(f"{where}: expected an object, got {_shown(value)}")
    return Row(where, value)


def _csv(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        for values in reader:
            if None in values or None in values.values():
                cells = len(reader.fieldnames) + len(values.get(None, ())) - sum(value is None for value in values.values())
                raise RecordError(f"{path}, line {reader.line_num}: expected {len(reader.fieldnames)} cells, got {cells}")
            yield Row(f"{path}, line {reader.line_num}", values)


def from_hub(dataset: Dataset) -> list[Row]:
    from datasets import load_dataset

    try:
        rows = load_dataset(dataset.path, dataset.name, split=dataset.split)
    except Exception as error:  # of many kinds: no network, no token for a gated data set, no such name
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"[:250]
        raise RecordError(f"{dataset}: expected it on the hub or in its cache, got {reason}; use --data with a file of it") from None
    return [Row(f"{dataset}, row {number}", dict(row)) for number, row in enumerate(rows, 1)]


def longbench_v2(rows: list[Row]) -> list[dict[str, str]]:
    """Questions with four choices about a context."""
    texts = ("context", "question", *(f"choice_{letter}" for letter in LETTERS))
    checked = {"answer": LETTERS, "length": LENGTHS, "difficulty": DIFFICULTIES}
    return [
        {name: row.get(name) for name in ("_id", "domain", "sub_domain", *texts)}
        | {name: row.one_of(name, allowed) for name, allowed in checked.items()}
        for row in rows
    ]


def mathematics(rows: list[Row]) -> list[dict[str, str]]:
    """Problems of MATH500 and AIME, whose field names vary in case."""
    questions = [row.get("problem", "Problem").strip() for row in rows]
    answers = [str(row.get("answer", "Answer", kind=(str, int))).strip() for row in rows]
    return [{"question": question, "answer": answer} for question, answer in zip(questions, answers)]


def gpqa(rows: list[Row]) -> list[dict[str, str]]:
    """Questions with their choices, shuffled the same way each time, and the letter of the right one.

    Rows that have ``question`` and ``answer`` name the choices themselves, and are taken as they are.
    """
    order = random.Random(SHUFFLE_SEED)
    return [_as_it_is(row) if "question" in row.values else _with_choices(row, order.sample(CHOICES, len(CHOICES))) for row in rows]


def _as_it_is(row: Row) -> dict[str, str]:
    return {"question": row.get("question").strip(), "answer": row.one_of("answer", LETTERS)}


def _with_choices(row: Row, order: list[str]) -> dict[str, str]:
    choices = [f"{letter}. {row.get(name).strip()}" for letter, name in zip(LETTERS, order)]
    return {"question": "\n".join([row.get("Question").strip(), "", *choices, ""]), "answer": LETTERS[order.index(CHOICES[0])]}


@dataclass(frozen=True)
class Plan:
    """A task of LongGenBench: a text of ``number`` entries, named ``kind`` and a number each, some of which must mention an event.

    Args:
        prefix: beginning of the text, which ends the prompt.
        checks: ``{"once" | "range" | "periodic": {entry: event}}``.
    """

    prompt: str
    prefix: str
    kind: str
    number: int
    checks: dict[str, dict[int, str]]


def longgenbench(rows: list[Row]) -> list[Plan]:
    """Tasks of ``Dataset_short.json`` or ``Dataset_long.json``."""
    plans = []
    for row in rows:
        number = row.get("number", kind=int)
        checks = {name: _entries(row, f"checks_{name}", number) for name in CHECKS}
        plans.append(Plan(row.get("prompt"), row.get("prefix"), row.get("type"), number, checks))
    return plans


def _entries(row: Row, name: str, number: int) -> dict[int, str]:
    entries = {}
    for entry, event in row.get(name, kind=dict).items():
        if not (entry.isdecimal() and 1 <= int(entry) <= number and isinstance(event, str)):
            raise RecordError(f"{row.where}: {name}: expected entries 1 to {number} with an event each, got {_shown({entry: event})}")
        entries[int(entry)] = event
    return entries


READERS = {"longbench_v2": longbench_v2, "math500": mathematics, "aime24": mathematics, "gpqa_diamond": gpqa, "longgenbench": longgenbench}


def read(benchmark: str, data: Path | None, dataset: Dataset | None, limit: int | None) -> list:
    """The first ``limit`` questions of a benchmark, from a file, or else from the hub."""
    if data is None and dataset is None:
        raise RecordError(f"--data: expected a file for {benchmark}, which is on no hub in a known form; its README says where to get it")
    rows = from_hub(dataset) if data is None else from_file(data)
    return READERS[benchmark](rows[:limit])
