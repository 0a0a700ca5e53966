"""Every needle task: what the document's text says, read independently, is the answer."""

import re
from collections import Counter

import numpy as np
import pytest

from benchmarks.needle import corpus, facts, tasks

NUMBER = re.compile(r" The special magic number for ([a-z]+ [a-z]+) is (\d{6})\.")
LENGTHS = (301, 1024, 4099, 16384)


def read_magic_numbers(document, question):
    (key,) = re.findall(r"number for (.*)\?", question)
    (value,) = [value for name, value in NUMBER.findall(document) if name == key]
    return f" {value}"


def read_code_word(document, question):
    (key,) = re.findall(r"code word of (.*)\?", question)
    (value,) = re.findall(rf" The code word of {key} is( [a-z]+)\.", document)
    return value


def read_multi_value(document, question):
    (key,) = re.findall(r"numbers for (.*)\?", question)
    return ",".join(f" {value}" for name, value in NUMBER.findall(document) if name == key)


def read_multi_query(document, question):
    numbers = dict(NUMBER.findall(document))
    (keys,) = re.findall(r"numbers for (.*)\?", question)
    return ",".join(f" {key} is {numbers[key]}" for key in keys.split(", "))


def read_variable(document, question):
    stated = dict(re.findall(r" VAR ([a-z]+) = ([^.]*)\.", document))
    (name,) = re.findall(r"value of VAR (.*)\?", question)
    chain = [f"VAR {name}"]
    while chain[-1].startswith("VAR "):
        chain.append(stated[chain[-1].removeprefix("VAR ")])
    return " " + " = ".join(chain)


def read_votes(document, question):
    ranking = Counter(re.findall(r" Vote: ([a-z]+)\.", document)).most_common(4)
    counts = [count for _, count in ranking]
    assert all(more > less for more, less in zip(counts, counts[1:])), "the order of the words asked for is in doubt"
    return ",".join(f" {word}" for word, _ in ranking[:3])


def read_list(document, question):
    (words,) = re.findall(r" Here is the list:([a-z ]+\.)", document)
    return words


def read_moves(document, question):
    (start,) = re.findall(r"Start at (\d) on a ring of 10", question)
    state, parts = int(start), [f" {start}"]
    for number, direction, amount in re.findall(r" Move (\d+): (up|down) (\d)\.", document):
        assert int(number) == len(parts)
        state = (state + (int(amount) if direction == "up" else 10 - int(amount))) % 10
        parts.append(f" {number}: {direction} {amount} = {state}")
    return ",".join(parts) + "."


READERS = {
    "magic-number": read_magic_numbers,
    "code-word": read_code_word,
    "multi-value": read_multi_value,
    "multi-key": read_magic_numbers,
    "multi-query": read_multi_query,
    "aggregation": read_votes,
    "long-copy": read_list,
    "running-state": read_moves,
} | dict.fromkeys(tasks.VARIABLE_TASKS, read_variable)


def make(task, length_tokens, seed=0):
    return tasks.make_prompt(np.random.default_rng(seed), task, length_tokens, needle_count=8)


@pytest.mark.parametrize("length_tokens", LENGTHS, ids="length={}".format)
@pytest.mark.parametrize("task", tasks.TASKS)
def test_the_answer_follows_from_the_text(task, length_tokens):
    for seed in range(4):
        prompt = make(task, length_tokens, seed)
        assert len(prompt.token_ids) == length_tokens
        assert READERS[task](prompt.messages[0]["content"], prompt.messages[-1]["content"]) == prompt.answer_text


@pytest.mark.parametrize("task", tasks.TASKS)
def test_same_seed_gives_the_same_prompt(task):
    assert make(task, 700) == make(task, 700) != make(task, 700, seed=1)


@pytest.mark.parametrize("task", tasks.TASKS)
def test_answer_positions_are_where_the_answer_is_taken_from(task):
    prompt = make(task, 1500)
    decode = corpus.default_corpus().decode
    stated = [decode(prompt.token_ids[position : position + 5]) for position in prompt.answer_positions]
    if task == "aggregation":
        words = [decode(prompt.token_ids[position : position + 1]) for position in prompt.answer_positions]
        assert Counter(words).keys() == set(prompt.answer_text.split(","))
        assert len(words) == sum(prompt.text.count(f" Vote:{word}.") for word in set(words))
    elif task == "long-copy":
        assert tuple(prompt.token_ids[position] for position in prompt.answer_positions) == prompt.answer_token_ids[:-1]
    else:
        pattern = {"running-state": r"(?:up|down) \d", **dict.fromkeys(tasks.VARIABLE_TASKS, r"= ((?:VAR [a-z]+)|\d+)")}
        due = re.findall(pattern.get(task, r"\d{6}| [a-z]+$"), prompt.answer_text)
        assert len(stated) == len(due)
        assert all(text.strip().startswith(value.strip()) for text, value in zip(stated, due))


def test_keys_of_multi_key_share_each_word_with_others():
    for seed in range(8):
        prompt = make("multi-key", 1024, seed)
        keys = [name.split() for name, _ in NUMBER.findall(prompt.text)]
        (asked,) = re.findall(r"number for ([a-z]+) ([a-z]+)\?", prompt.text)
        others = [key for key in keys if key != list(asked)]
        assert len(keys) >= 28
        assert asked[0] in [first for first, _ in others] and asked[1] in [second for _, second in others]


def test_the_asked_needle_of_a_crowd_is_anywhere():
    depths = [make("multi-key", 2048, seed).answer_positions[0] / 2048 for seed in range(40)]
    assert min(depths) < 0.2 and max(depths) > 0.8


def test_statements_of_a_chain_come_in_any_order():
    orders = {tuple(np.argsort(make("variable-3", 1024, seed).answer_positions)) for seed in range(60)}
    assert len(orders) == 6


@pytest.mark.parametrize("task", tasks.LONG_TASKS)
def test_long_answers_are_long(task):
    assert len(make(task, 4096).answer_token_ids) >= 400
    assert len(make(task, 301).answer_token_ids) < 301


def test_score_of_a_long_answer_is_the_share_before_the_first_error():
    prompt = make("long-copy", 1024)
    answer = list(prompt.answer_token_ids)
    half = len(answer) // 2
    assert prompt.score(answer) == prompt.score([*answer, corpus.EOS, 5]) == 1
    assert prompt.score([*answer, 5]) == len(answer) / (len(answer) + 1)
    assert prompt.score([*answer[:half], -1, *answer[half + 1 :]]) == half / (len(answer) + 1)
    assert prompt.score(answer[:half]) == half / (len(answer) + 1)
    assert prompt.score([]) == 0
    assert not prompt.is_answered_by(answer[:-1]) and prompt.is_answered_by(answer)


def test_score_of_a_short_answer_is_all_or_nothing():
    prompt = make("multi-value", 1024)
    assert prompt.score(prompt.answer_token_ids) == 1
    assert prompt.score(prompt.answer_token_ids[:-1]) == prompt.score([]) == 0


def test_every_task_is_in_one_group():
    assert len(set(tasks.TASKS)) == len(tasks.TASKS) == len(tasks.SHORT_TASKS) + len(tasks.LONG_TASKS)
    assert set(tasks.VARIABLE_TASKS) | set(facts.MIXTURE) <= set(tasks.SHORT_TASKS)
    assert set(tasks.TASKS) == READERS.keys()
