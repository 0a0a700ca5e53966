# SPDX-License-Identifier: Apache-2.0
"""Tells whether this machine can serve with KV retrieval, what a request of a model costs here, and how to start the server.

    python -m sglang_freekv.launch.doctor [--model-path PATH] [--context-length N] [--json]

Exit status: 0, nothing would stop a server; 1, something would, or keeps the longest request from being served; 2, bad input.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from math import inf
from pathlib import Path

from sglang_freekv.config import DEFAULT_PAGE_SIZE, Refusal
from sglang_freekv.launch import served
from sglang_freekv.launch.finding import Finding
from sglang_freekv.launch.gpu import Gpu
from sglang_freekv.launch.machine import Machine
from sglang_freekv.launch.model import Model, quiet
from sglang_freekv.launch.plan import Plan

TYPED = ("freekv_sink", "freekv_window", "freekv_digest", "dtype")  # the suggested command has them if they were typed
NUMBERS = ("context_length", "freekv_budget", "page_size", "link_gb_per_s")
LINK = "link to the device"


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise Refusal(f"{message}; see --help")


def make_parser() -> Parser:
    parser = Parser(prog="python -m sglang_freekv.launch.doctor", description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", type=Path, metavar="PATH", help="directory with config.json, or such a file; nothing else is read")
    asked = parser.add_argument_group("what a server of that model is asked for")
    asked.add_argument("--context-length", type=int, metavar="TOKENS", help="longest request (default: the model's longest)")
    asked.add_argument("--freekv-budget", type=int, metavar="TOKENS", help="as the server's")
    asked.add_argument("--page-size", type=int, metavar="TOKENS", help="as the server's")
    asked.add_argument("--freekv-sink", type=int, metavar="TOKENS", help="as the server's")
    asked.add_argument("--freekv-window", type=int, metavar="TOKENS", help="as the server's")
    asked.add_argument("--freekv-digest", help="as the server's")
    asked.add_argument("--dtype", help="as the server's")
    asked.add_argument("--link-gb-per-s", type=float, metavar="GB", help="rate of the link to the device (default: what is measured here)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    return parser


def plan_of(options: argparse.Namespace, machine: Machine) -> Plan | Finding:
    """The server that was asked about, or the finding that FreeKV does not serve that model.

    Raises:
        Refusal: the options do not go together, or the model's config does not tell what is needed.
    """
    model = Model.load(options.model_path, options.dtype or "auto")
    if sys.stderr.isatty():
        print("importing SGLang, which takes some seconds", file=sys.stderr, flush=True)
    with quiet():
        from sglang_freekv.options import Options, config_from
    flags = {name: value for name, value in vars(options).items() if name.startswith("freekv_")}
    asked = Options(kv_retrieval="freekv", **flags)
    config = config_from(asked, options.page_size or DEFAULT_PAGE_SIZE)
    context_len = model.max_context if options.context_length is None else options.context_length
    try:
        served.refuse_model(model, context_len)
    except Refusal as refusal:
        return Finding("model", model.name, str(refusal), stops=True)
    served.refuse_settings(model, config)
    if context_len > model.max_context:
        most = model.max_context
        raise Refusal(f"--context-length {context_len}: expected at most the model's {most}; use --context-length {most}, or leave it out")
    if context_len < config.budget_tokens:
        raise Refusal(
            f"--context-length {context_len}: expected at least --freekv-budget {config.budget_tokens}, or there is nothing to retrieve; "
            f"use --context-length {config.budget_tokens} or more, or a lower --freekv-budget"
        )
    model.kv_shape(config), model.weight_bytes  # a key that they miss is told before the first line
    typed = {flag_of(name): value for name in TYPED if (value := getattr(options, name)) is not None}
    return Plan(model, machine, config, context_len, typed)


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def check(options: argparse.Namespace) -> None:
    """Raises Refusal for options that mean nothing."""
    for name in (*NUMBERS, *TYPED):
        value, flag = getattr(options, name), flag_of(name)
        if value is not None and options.model_path is None:
            raise Refusal(f"{flag} {value}: expected --model-path beside it, found none; add that, or leave it out")
        if value is not None and name in NUMBERS and not 0 < value < inf:
            raise Refusal(f"{flag} {value:g}: expected a number above 0; use one, or leave it out")


def examine(options: argparse.Namespace, machine: Machine) -> Iterator[Finding]:
    """Everything there is to report; what is wrong with the options is raised before the first finding."""
    check(options)
    lacks_sglang = options.model_path is not None and find_spec("sglang") is None
    plan = None if options.model_path is None or lacks_sglang else plan_of(options, machine)
    link, origin = None, "measured"
    for finding in machine.findings():
        link = finding.figures.get("bytes_per_s") if finding.name == LINK else link
        yield finding
    if options.link_gb_per_s is not None:
        link, origin = options.link_gb_per_s * 1e9, "given"
    if lacks_sglang:
        yield Finding("model", "not examined: SGLang's rules are needed for it", "install sglang", stops=True)
    elif isinstance(plan, Plan):
        yield from plan.findings(link, origin)
    elif plan is not None:
        yield plan


def verdict(findings: Iterable[Finding]) -> Finding:
    names = [finding.name for finding in findings if finding.stops]
    if not names:
        return Finding("verdict", "nothing found that would stop a server")
    return Finding("verdict", f"these would stop a server or its longest request: {', '.join(names)}", "see their lines", stops=True)


def main(argv: Sequence[str] | None = None, machine: Machine | None = None) -> int:
    try:
        options = make_parser().parse_args(argv)
        findings = []
        for finding in examine(options, machine or Machine(Gpu())):
            findings.append(finding)
            if not options.json:
                print(finding, flush=True)
    except Refusal as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 2
    findings.append(verdict(findings))
    if options.json:
        print(json.dumps({"stops": findings[-1].stops, "findings": [finding.to_json() for finding in findings]}, indent=1))
    else:
        print(findings[-1])
    return int(findings[-1].stops)


if __name__ == "__main__":
    sys.exit(main())
