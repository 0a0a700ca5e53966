"""Cases of a parametrised test whose axes are independent: a few of the product, in which every two values meet."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, product

import pytest
import torch


def pairs_of(case: tuple[str, ...]) -> set[tuple]:
    """Which values of any two axes meet in a case."""
    return set(combinations(enumerate(case), 2))


def chosen(axes: tuple[dict, ...]) -> list[tuple[str, ...]]:
    """Names of values, a tuple for each case, such that each value of an axis meets each value of every other axis in some case.

    Of the cases in which as many values meet for the first time, the next one has those that have met least: a long axis varies the others.
    """
    pairs, cases, met = {case: pairs_of(case) for case in product(*axes)}, [], Counter()
    missing = set().union(*pairs.values())
    while missing:
        cases.append(max(pairs, key=lambda case: (len(pairs[case] & missing), -sum(met[pair] for pair in pairs[case]))))
        missing -= pairs[cases[-1]]
        met.update(pairs[cases[-1]])
    return cases


def covering(first: dict, second: dict, *more: dict) -> list:
    """Parameters of a test with an argument for each axis ``{name: value}``. A GPU is fast, so it takes the whole product."""
    axes = (first, second, *more)
    cases = list(product(*axes)) if torch.cuda.is_available() else chosen(axes)
    return [pytest.param(*(axis[name] for axis, name in zip(axes, case)), id="-".join(case)) for case in cases]
