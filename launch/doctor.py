# SPDX-License-Identifier: Apache-2.0
"""Plans a server with KV retrieval, and tells whether this machine can run one.

    freekv-doctor --model-path MODEL [--tp N] [--requests N] [--context-length N] [--gpu NAME|GIB] [--host-memory SIZE] ...
    freekv-doctor

Exit status: 0, nothing found that would stop a server; 1, something would, or keeps the requests from being served; 2, bad input.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sglang_freekv.config import Refusal
from sglang_freekv.launch.finding import Finding
from sglang_freekv.launch.question import Question

LINK = "link to the device"
SIGPIPE_STATUS = 128 + signal.SIGPIPE  # as a shell tells of a program that nobody listens to


def examine(question: Question, machine=None):
    """The report on a question.

    Args:
        machine: this one; None is looked at where it is asked about.

    Raises:
        Refusal: the options do not go together with the model, or its config is none.
    """
    from sglang_freekv.launch.report import Report

    if question.checkpoint is None:
        return Report.of_machine((machine or _here()).findings())
    if sys.stderr.isatty():
        print("importing SGLang, which takes some seconds", file=sys.stderr, flush=True)
    from sglang_freekv.launch.hardware import Hardware
    from sglang_freekv.launch.model import Model
    from sglang_freekv.launch.plan import Plan

    model = Model.load(question.checkpoint, question.server)
    refusal = model.refusal(question.config)
    if refusal is None:
        model.expect_useful(question.config, question.ranks)
    seen: list[Finding] = []
    if question.describes_a_machine:
        hardware = Hardware.described(question)
    else:
        machine = machine or _here()
        seen = list(machine.findings())
        link = next((finding.figures.get("bytes_per_s") for finding in seen if finding.name == LINK), None)
        hardware = Hardware.here(question, machine, link)
    if refusal is not None:
        return Report.of_refusal(model.name, refusal, seen)
    model.refuse_settings(question.config, hardware.device)
    return Report.of_plan(Plan.of(question, model, hardware), seen)


def main(argv: Sequence[str] | None = None, machine=None) -> int:
    os.environ |= {"HF_HUB_OFFLINE": "1", "USE_HUB_KERNELS": "NO"}  # a plan asks nobody on the network
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a file's name may be of any bytes
    try:
        with _interruptible():
            return _run(argv, machine)
    except Refusal as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still to be flushed has nowhere to go
        return SIGPIPE_STATUS


def _run(argv: Sequence[str] | None, machine) -> int:
    try:
        question = Question.parse(argv)
    except SystemExit as done:  # of --help
        sys.stdout.flush()
        return int(done.code or 0)
    report = examine(question, machine)
    text = json.dumps(report.to_json(), indent=1) if question.json else "\n".join(report.lines())
    print(text, flush=True)
    return int(report.stops)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C ends the process at once: an exception would pass through libraries that are being loaded, and some abort of it."""

    def stop(*_) -> None:
        os.write(2, b"error: interrupted\n")
        os._exit(2)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _here():
    from sglang_freekv.launch.gpu import Gpu
    from sglang_freekv.launch.machine import Machine

    return Machine(Gpu())


if __name__ == "__main__":
    sys.exit(main())
