# SPDX-License-Identifier: Apache-2.0
"""The size of a ``stop_regex``.

The scheduler searches with the library ``regex``, because it has a timeout. That library writes repeats of a group out when it compiles:
``((a{1000}){1000}){1000}`` takes more memory than a machine has.
"""

from __future__ import annotations

import re
from typing import Any

import regex
from sglang.srt.sampling.sampling_params import sre_parse

LITERAL_BRACE = re.compile(r"(\\N\{[^}]*\}|\\.)|\{(?!\d+(?:,\d*)?\}|,\d*\})", re.DOTALL)
MOST_CHARACTERS = 10_000  # with repeats written out


def check(pattern: str) -> None:
    """Raise ValueError for a pattern that is no regular expression, or is too long to be compiled."""
    if len(pattern) > MOST_CHARACTERS:
        raise ValueError(f"stop_regex: found one of {len(pattern)} characters, expected at most {MOST_CHARACTERS}; shorten it")
    try:
        if (size := _written_out(sre_parse.parse(pattern))) > MOST_CHARACTERS:
            found = f"{pattern[:80]!r} has {size} characters with its repeats written out"
            raise ValueError(f"stop_regex: {found}, expected at most {MOST_CHARACTERS}; repeat less")
        regex.compile(as_re_reads_it(pattern))
    except (sre_parse.error, regex.error, RecursionError, OverflowError) as error:
        raise ValueError(f"stop_regex: {pattern[:80]!r} is no regular expression: {error}; mend it") from None


def as_re_reads_it(pattern: str) -> str:
    """The pattern for the library ``regex``, in which ``a{e}`` matches with errors; to ``re``, SGLang's library, those braces are text."""
    return LITERAL_BRACE.sub(lambda found: found[1] or r"\{", pattern)


def _written_out(part: Any) -> int:
    """Characters of a parsed regular expression with its counted repeats written out."""
    if isinstance(part, sre_parse.SubPattern):
        return sum(_times(operator, value) * _written_out(value) for operator, value in part)
    if isinstance(part, list | tuple):
        return sum(_written_out(inner) for inner in part if isinstance(inner, list | sre_parse.SubPattern)) or 1
    return 1


def _times(operator: Any, value: Any) -> int:
    if not str(operator).endswith("_REPEAT"):
        return 1
    least, most, _ = value
    return max(1, least if most == sre_parse.MAXREPEAT else most)
