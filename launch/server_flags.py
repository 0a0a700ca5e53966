# SPDX-License-Identifier: Apache-2.0
"""The flags of SGLang's server that change memory sizes, as its ServerArgs declares them."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sglang_freekv import releases
from sglang_freekv.config import Refusal, typed

NAMES = (
    "context_length",
    "tp_size",
    "page_size",
    "kv_cache_dtype",
    "dtype",
    "quantization",
    "json_model_override_args",
    "mem_fraction_static",
    "max_running_requests",
    "max_total_tokens",
    "chunked_prefill_size",
    "device",
)
UNITS = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def count(text: str) -> int:
    """A whole number, as SGLang reads it. It may have a unit, as in ``128Ki`` or ``25.6k``.

    Raises:
        ValueError: ``text`` is not a whole number.
    """
    match = re.fullmatch(r"(\d+)(?:\.(\d+))?(Ki|Mi|Gi|Ti|k|M|G|T)", text.strip())
    if match is None or (match[2] and match[3].endswith("i")):
        return int(text)
    whole, part, unit = match[1], match[2] or "", UNITS[match[3]]
    number, rest = divmod(int(whole + part) * unit, 10 ** len(part))
    if rest:
        raise ValueError("a fraction of a token")
    return number


ALIASES = {"tp_size": ("--tp",)}  # SGLang's parser accepts abbreviations, and this one is common
METAVARS = {name: "TOKENS" for name in ("context_length", "page_size", "max_total_tokens", "chunked_prefill_size")}
METAVARS |= {"tp_size": "RANKS", "max_running_requests": "REQUESTS", "mem_fraction_static": "SHARE", "json_model_override_args": "JSON"}
METAVARS |= {"quantization": "METHOD", "kv_cache_dtype": "TYPE", "dtype": "TYPE", "device": "DEVICE"}
PARSERS: dict[str, Callable] = {"int": int, "float": float, "str": str, "human_readable_int": count}


def add_to(group: argparse._ArgumentGroup) -> None:
    """Add the flags to ``group``. They are read from SGLang's source, because importing it takes seconds. Without SGLang none is added.

    Raises:
        Refusal: SGLang's ServerArgs lacks a flag, so it is none of the tested releases.
    """
    package = find_spec("sglang")
    if package is None:
        return
    declared, lists = _declarations(Path(package.submodule_search_locations[0]) / "srt")
    for name in NAMES:
        if name not in declared:
            raise Refusal(f"{typed(name)}: SGLang's ServerArgs has no such option, expected that of {releases.NEWEST}; {releases.INSTALL}")
        kind, facts = declared[name]
        named = facts.get("choices")
        choices = lists.get(named.id) if isinstance(named, ast.Name) else named and ast.literal_eval(named)
        parser = facts["type_parser"].id if "type_parser" in facts else kind
        aliases = [*ALIASES.get(name, ()), *(ast.literal_eval(facts["aliases"]) if "aliases" in facts else ())]
        group.add_argument(
            typed(name), *aliases, dest=name, type=PARSERS[parser], choices=choices, metavar=METAVARS.get(name), help=_help(facts)
        )


def _declarations(srt: Path) -> tuple[dict[str, tuple[str, dict[str, Any]]], dict[str, list]]:
    """The flags in ``NAMES`` that ServerArgs has, and the lists of constants beside them.

    ServerArgs declares them itself, or collects them from the classes in ``arg_groups/fields``, whose lists are in ``choices.py``.
    A flag's name maps to its type and to the keywords of its annotation.
    """
    files = [srt / "server_args.py", *srt.glob("arg_groups/choices.py"), *srt.glob("arg_groups/fields/*.py")]
    statements: list[Any] = [node for file in files for node in ast.parse(file.read_text()).body]
    lists = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in statements
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List) and all(isinstance(e, ast.Constant) for e in node.value.elts)
    }
    declared: dict[str, tuple[str, dict[str, Any]]] = {}
    for node in (node for owner in statements if isinstance(owner, ast.ClassDef) for node in owner.body):
        if isinstance(node, ast.AnnAssign) and node.target.id in NAMES and isinstance(node.annotation, ast.Subscript):
            kind, about, *_ = node.annotation.slice.elts
            facts = {"help": about} if not isinstance(about, ast.Call) else {word.arg: word.value for word in about.keywords}
            declared[node.target.id] = re.sub(r"Optional\[(\w+)\]", r"\1", ast.unparse(kind)), facts
    return declared, lists


def _help(facts: dict[str, Any]) -> str:
    """The first sentence of SGLang's own help."""
    text = next(str(node.value) for node in ast.walk(facts["help"]) if isinstance(node, ast.Constant))
    return re.split(r"\n|\. ", text)[0].rstrip(".").replace("%", "%%") + "."
