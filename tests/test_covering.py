"""The cases that stand for a product: every two values meet in one of them, and they are few."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, product

import pytest

from covering import chosen, covering

AXES = {
    "three": ({"a": 1, "b": 2, "c": 3, "d": 4}, {"x": 1, "y": 2, "z": 3}, {"0": 0, "1": 1}),
    "two": ({"a": 1, "b": 2}, {"x": 1, "y": 2, "z": 3}),
}


@pytest.mark.parametrize("axes", AXES.values(), ids=AXES)
def test_every_two_values_meet(axes):
    cases = chosen(axes)
    for one, other in combinations(range(len(axes)), 2):
        assert {(case[one], case[other]) for case in cases} == set(product(axes[one], axes[other]))


def test_no_more_cases_than_the_two_longest_axes_ask_for():
    assert len(chosen(AXES["three"])) == 4 * 3 and len(chosen(AXES["two"])) == 2 * 3


def test_short_axes_meet_as_often_in_each_way():
    met = Counter(case[1:] for case in chosen(AXES["three"]))
    assert len(met) == 3 * 2 and max(met.values()) - min(met.values()) <= 1


def test_a_case_holds_the_values_that_its_name_says(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert [(case.id, case.values) for case in covering(AXES["two"][0], {"x": None})] == [("a-x", (1, None)), ("b-x", (2, None))]
