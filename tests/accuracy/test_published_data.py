"""Published data sets as small files that are made here: read as their formats say, cut, scored, and refused where they are wrong."""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.accuracy.published import longbench_v2, longgenbench, records, ruler_files
from benchmarks.accuracy.published.presets import PRESETS
from benchmarks.accuracy.published.records import RecordError
from benchmarks.accuracy.published.tasks import boxed_answer

LONGBENCH = {
    "_id": "66f", "domain": "Single-Document QA", "sub_domain": "Legal", "difficulty": "hard", "length": "short",
    "question": " Who? ", "choice_A": "a", "choice_B": "b", "choice_C": "c", "choice_D": "d", "answer": "C", "context": "one two three",
}  # fmt: skip
MATH = {"problem": "What is 1+1?", "solution": "...", "answer": "2", "subject": "Algebra", "level": 1, "unique_id": "test/algebra/1.json"}
AIME = {"ID": "2024-I-1", "Problem": "Find m+n.", "Solution": "...", "Answer": 33}
GPQA = {"Question": "Which, if any?", "Correct Answer": "right,\nindeed", "Incorrect Answer 1": "w1", "Incorrect Answer 2": "w2"}
GPQA |= {"Incorrect Answer 3": "w3", "Subdomain": "Physics (general)"}
DIARY = {
    "prompt": "Write 4 weeks.", "prefix": "#*# Week 1 (January 1st - January 7th):", "type": "Week", "number": 4,
    "checks_once": {"2": "birthday"}, "checks_range": {"2": "trip", "3": "trip"}, "checks_periodic": {"1": "club", "4": "club"},
}  # fmt: skip
RULER = {"index": 0, "input": "Which numbers?", "answer_prefix": " They are", "outputs": ["11", "22"], "length": 4000}


def write(path: Path, *rows: dict) -> Path:
    """Rows in the format that the name of the file asks for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text(json.dumps(rows) if path.suffix == ".json" else "\n".join(map(json.dumps, rows)) + "\n\n")
    return path


@pytest.mark.parametrize("name", ["data.json", "data.jsonl"])
def test_longbench_v2(tmp_path, name):
    path = write(tmp_path / name, LONGBENCH, LONGBENCH | {"_id": "67a", "answer": "D", "length": "long", "retrieved_context": []})
    first, second = records.read("longbench_v2", path, None, limit=None)
    assert first == LONGBENCH and second["answer"] == "D"
    assert records.read("longbench_v2", path, None, limit=1) == [first]


def test_mathematics(tmp_path):
    assert records.read("math500", write(tmp_path / "math.jsonl", MATH), None, None) == [{"question": "What is 1+1?", "answer": "2"}]
    rows = write(tmp_path / "aime.jsonl", AIME, {"problem": "Find x.", "answer": "033"})
    assert records.read("aime24", rows, None, None) == [{"question": "Find m+n.", "answer": "33"}, {"question": "Find x.", "answer": "033"}]


def test_gpqa_is_shuffled_the_same_way_each_time(tmp_path):
    path = write(tmp_path / "gpqa_diamond.csv", *(GPQA | {"Question": f"Question {number}"} for number in range(40)))
    rows = records.read("gpqa_diamond", path, None, None)
    assert rows == records.read("gpqa_diamond", path, None, None)
    assert {row["answer"] for row in rows} == set("ABCD")
    for number, row in enumerate(rows):
        question, _, *choices = row["question"].split("\n", 5)
        assert question == f"Question {number}"
        assert f"{row['answer']}. right,\nindeed" in row["question"]
        assert all(f". {wrong}" in row["question"] for wrong in ("w1", "w2", "w3"))


def test_gpqa_that_names_its_choices_is_taken_as_it_is(tmp_path):
    path = write(tmp_path / "gpqa.jsonl", {"id": 1, "question": "Which?\n\nA. a\nB. b\n\n", "answer": "A"})
    assert records.read("gpqa_diamond", path, None, None) == [{"question": "Which?\n\nA. a\nB. b", "answer": "A"}]


def without(row: dict, name: str) -> dict:
    return {key: value for key, value in row.items() if key != name}


WRONG = {
    "no file": ("math500", "gone.jsonl", None, "expected a file to read, got No such file"),
    "ending": ("math500", "math.parquet", "x", "expected a file that ends in .jsonl, .json, .csv, got .parquet"),
    "nothing in it": ("math500", "math.jsonl", "\n\n", "expected at least one row, there is none"),
    "not JSON": ("math500", "math.jsonl", json.dumps(MATH) + "\n{oops}\n", "math.jsonl, line 2: expected JSON, got "),
    "not JSON, in a list": ("longbench_v2", "data.json", '[\n{"_id": 1},\n{"_id": }]', "data.json, line 3: expected JSON, got "),
    "not UTF-8": ("math500", "math.jsonl", b'{"problem": "\xff"}', "expected text in UTF-8, got byte 0xff at 13"),
    "not a list": ("longbench_v2", "data.json", '{"data": []}', 'data.json, line 1: expected a list of objects, got {"data": []}'),
    "not an object": ("math500", "math.jsonl", "[1]", "math.jsonl, line 1: expected an object, got [1]"),
    "a field missing": ("longbench_v2", "d.json", [LONGBENCH, without(LONGBENCH, "choice_B")], "item 2: expected a field choice_B"),
    "a field null": ("math500", "m.jsonl", [MATH | {"answer": None}], "field answer or Answer, there are problem, solution,"),
    "a wrong kind": ("math500", "math.jsonl", [MATH, MATH | {"problem": 3}], "line 2: problem: expected a text, got 3"),
    "a wrong kind of answer": ("aime24", "a.jsonl", [AIME | {"Answer": True}], "Answer: expected a text or a whole number, got true"),
    "no such choice": ("longbench_v2", "d.json", [LONGBENCH | {"answer": "E"}], 'item 1: answer: expected one of A, B, C, D, got "E"'),
    "no such length": ("longbench_v2", "d.json", [LONGBENCH | {"length": "huge"}], "length: expected one of short, medium, long"),
    "a column missing": ("gpqa_diamond", "g.csv", [without(GPQA, "Incorrect Answer 3")], "line 3: expected a field Incorrect Answer 3"),
    "a cell missing": ("gpqa_diamond", "g.csv", "Question,Correct Answer\nq,a\nonly\n", "g.csv, line 3: expected 2 cells, got 1"),
    "a cell too many": ("gpqa_diamond", "g.csv", "Question,Correct Answer\nq,a,b\n", "g.csv, line 2: expected 2 cells, got 3"),
    "no letter": ("gpqa_diamond", "g.jsonl", [{"question": "q", "answer": "1"}], 'line 1: answer: expected one of A, B, C, D, got "1"'),
    "no checks": ("longgenbench", "Dataset_short.json", [without(DIARY, "checks_range")], "item 1: expected a field checks_range"),
    "an entry that is not": ("longgenbench", "D.json", [DIARY | {"checks_once": {"5": "x"}}], 'with an event each, got {"5": "x"}'),
    "an entry without an event": ("longgenbench", "D.json", [DIARY | {"checks_once": {"1": 7}}], "entries 1 to 4 with an event each"),
    "how many entries": ("longgenbench", "D.json", [DIARY | {"number": "52"}], 'number: expected a whole number, got "52"'),
}  # fmt: skip


@pytest.mark.parametrize("benchmark, name, content, message", WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_told_in_one_line(tmp_path, benchmark, name, content, message):
    path = tmp_path / name
    if isinstance(content, list):
        write(path, *content)
    elif content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(RecordError) as told:
        records.read(benchmark, path, None, None)
    assert message in str(told.value) and str(path) in str(told.value) and "\n" not in str(told.value)


def test_no_hub_and_no_file():
    with pytest.raises(RecordError, match="--data: expected a file for longgenbench"):
        records.read("longgenbench", None, PRESETS["longgenbench"].dataset, None)


class Words:
    """A tokenizer to which a word is a token."""

    def encode(self, text: str, add_special_tokens: bool) -> list[str]:
        return text.split()

    def decode(self, words: list[str]) -> str:
        return " ".join(words) + " "


def test_prompts_are_cut_in_the_middle(tmp_path):
    words = [f"w{number}" for number in range(1000)]
    long, fits = LONGBENCH | {"context": " ".join(words)}, LONGBENCH | {"length": "long", "difficulty": "easy"}
    longbench_v2.write([long, fits], path := tmp_path / "cut.jsonl", Words(), max_input=400)
    cut, whole = map(json.loads, path.read_text().splitlines())
    before, after = 200 - longbench_v2.LEADING, 200 - longbench_v2.TRAILING - len("Who? a b c d".split())
    assert cut["context"].split() == words[:before] + words[-after:]
    assert whole == fits | {"difficulty": "easy-long"} and cut["difficulty"] == "hard-short"


def test_scores_by_length(tmp_path):
    kinds = [("easy", "short"), ("hard", "short"), ("hard", "short"), ("hard", "medium"), ("easy", "long")]
    rows = [LONGBENCH | {"difficulty": difficulty, "length": length} for difficulty, length in kinds]
    longbench_v2.write(rows, path := tmp_path / "rows.jsonl", Words(), 400)
    metrics = {"difficulty_easy-short": 1.0, "difficulty_hard-short": 0.5, "difficulty_hard-medium": 0.0, "difficulty_easy-long": 1.0}
    scores = longbench_v2.scores(metrics | {"score": 0.6, "difficulty_easy-short:std": 0.0, "chars": 9.0}, path)
    assert scores == pytest.approx({"overall": 60, "easy": 100, "hard": 100 / 3, "short": 200 / 3, "medium": 0, "long": 100})
    with pytest.raises(RuntimeError, match="rows were left out"):
        longbench_v2.scores(metrics | {"score": 0.75}, path)
    metrics.pop("difficulty_hard-medium")
    with pytest.raises(RuntimeError, match=r"none of \['hard-medium'\]"):
        longbench_v2.scores(metrics | {"score": 0.75}, path)


def test_longgenbench_counts_entries_and_asks_of_those_that_are_there(tmp_path):
    (plan,) = records.read("longgenbench", write(tmp_path / "Dataset_short.json", DIARY), None, None)
    text = " New Year.\n#*# Week 2 (...)\nA birthday.\n#*# Week 2 again\n#*# Week 4: club\n#*# Week 7\n#*# Month 3"
    entries = longgenbench.entries_of(plan, text)
    assert set(entries) == {1, 2, 4, 7} and "New Year" in entries[1] and "birthday" in entries[2]
    assert longgenbench.completion(plan, entries) == 75
    checks = longgenbench.checks_of([plan], [entries])
    assert checks == {(0, "once", 2): "birthday", (0, "range", 2): "trip", (0, "periodic", 1): "club", (0, "periodic", 4): "club"}
    verdicts = dict.fromkeys(checks, True) | {(0, "range", 2): False, (0, "periodic", 1): False}
    scores = longgenbench.scores([plan], [entries], verdicts)
    assert (scores["accuracy_once"], scores["accuracy_range"], scores["accuracy_periodic"]) == (100, 0, 50)
    assert scores["accuracy"] == 50 and scores["overall"] == 37.5 and scores["completion_rate"] == 75
    assert (scores["stic_1"], scores["stic_2"], scores["checks"]) == (50, 40, 5)
    assert longgenbench.scores([plan], [entries], None) == {"texts": 1, "completion_rate": 75}


def test_longgenbench_without_any_entry(tmp_path):
    (plan,) = records.read("longgenbench", write(tmp_path / "D.json", DIARY | {"prefix": "Diary"}), None, None)
    scores = longgenbench.scores([plan], [longgenbench.entries_of(plan, "")], {})
    assert scores["completion_rate"] == scores["accuracy"] == scores["overall"] == scores["stic_1"] == scores["stic_2"] == 0


def test_the_papers_figures_are_by_these_formulas():
    """Table 2 of the FreeKV paper: CR, Acc and CR x Acc; what is published is rounded."""
    for completed, accuracy, overall in ((80.03, 33.52, 26.82), (78.03, 35.40, 27.62), (79.56, 39.08, 31.09), (65.46, 44.90, 29.39)):
        assert completed * accuracy / 100 == pytest.approx(overall, abs=0.01)


def test_ruler_scores_all_references_or_any(tmp_path):
    write(tmp_path / "niah_multivalue" / "validation.jsonl", RULER, RULER | {"input": "Which? They are"})
    write(tmp_path / "qa_1" / "validation.jsonl", without(RULER, "answer_prefix") | {"outputs": ["Paris", "paris, France"]})
    questions = ruler_files.read_all(tmp_path, None)
    assert [question.prompt for question in questions] == ["Which numbers? They are", "Which? They are", "Which numbers?"]
    scores = ruler_files.scores(questions, [" 22.", "11 and\t22", "PARIS\x00"])
    assert scores == {"mean": 87.5, "niah_multivalue": 75, "qa_1": 100, "questions": 3, "longest": 4000}
    assert len(ruler_files.read_all(tmp_path, limit=1)) == 2
    alone = write(tmp_path / "cwe.jsonl", RULER)
    assert [question.task for question in ruler_files.read_all(alone, None)] == ["cwe"]


@pytest.mark.parametrize(
    "name, row, message",
    [
        ("mmlu/validation.jsonl", RULER, "expected a task that begins with niah, vt, cwe, fwe, qa, got mmlu"),
        ("vt/test.jsonl", RULER | {"outputs": []}, r"line 1: outputs: expected texts, got \[\]"),
        ("vt/test.jsonl", RULER | {"outputs": "11"}, "line 1: outputs: expected a list, got"),
        ("vt/test.jsonl", without(RULER, "length"), "line 1: expected a field length"),
        ("vt/other.txt", RULER, "expected TASK/validation.jsonl in it, there is none"),
    ],
)
def test_ruler_files_that_are_wrong(tmp_path, name, row, message):
    write(tmp_path / name, row)
    with pytest.raises(RecordError, match=message):
        ruler_files.read_all(tmp_path, None)


@pytest.fixture
def comparison(monkeypatch):
    """Stands in for lm-eval's where that is not installed."""
    utils = ModuleType("lm_eval.tasks.aime.utils")
    utils.last_boxed_only_string = lambda text: (re.findall(r"\\boxed\{.*?\}+", text) or [None])[-1]
    utils.is_equiv = lambda one, other: one.replace(" ", "") == other.replace(" ", "")

    def remove_boxed(text: str) -> str:
        assert text.startswith("\\boxed{")
        return text[len("\\boxed{") : -1]

    utils.remove_boxed = remove_boxed
    for name in ("lm_eval", "lm_eval.tasks", "lm_eval.tasks.aime"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "lm_eval.tasks.aime.utils", utils)


@pytest.mark.parametrize(
    "text, answer, right",
    [
        ("so \\boxed{033}.", "33", True),
        ("first \\boxed{1}, then \\boxed{33}", "33", True),
        ("33", "33", False),
        ("\\boxed{p - q}", "p-q", True),
        ("\\boxed{B}", "B", True),
        ("\\boxed{\\text{(B)}}", "B", True),
        ("\\boxed{B. the second}", "B", True),
        ("\\boxed{Both}", "B", False),
        ("\\boxed{A}", "B", False),
        ("\\boxed{unfinished", "B", False),
        ("", "2", False),
    ],
)
def test_boxed_answers(comparison, text, answer, right):
    assert boxed_answer.is_right(boxed_answer.boxed(text), answer) is right


def test_samples_of_a_question(comparison):
    samples = ["\\boxed{2}", "\\boxed{3}", "no box", "\\boxed{2}"]
    assert boxed_answer.score({"answer": "2"}, [samples]) == {"pass": 1.0, "avg": 0.5, "boxed": 0.75}
    assert boxed_answer.score({"answer": "5"}, [samples])["pass"] == 0
    assert boxed_answer.keep([samples], None) == [samples]


def test_the_records_of_a_task(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text('{"question": "q", "answer": "a"}\n')
    assert list(boxed_answer.load(records=str(path), model="any", base_url="any")["test"]) == [{"question": "q", "answer": "a"}]
    with pytest.raises(ValueError, match="expected records, a file that run.py writes"):
        boxed_answer.load(model="any")
