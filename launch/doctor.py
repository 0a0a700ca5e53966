# SPDX-License-Identifier: Apache-2.0
"""Plans a server with KV retrieval, and tells whether this machine can run one.

    freekv-doctor --model-path MODEL [--tp N] [--requests N] [--context-length N] [--gpu NAME|GIB] [--host-memory SIZE] ...
    freekv-doctor

Exit status: 0, nothing was found that would stop a server; 1, a server would not start, or could not serve the requests; 2, bad input.
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
SIGPIPE_STATUS = 128 + signal.SIGPIPE  # the status by which a shell reports a broken pipe


def examine(question: Question, machine=None):
    """The Report on a question.

    Args:
        question: the server to plan, or this machine alone.
        machine: this Machine; with None it is examined when the question needs it.

    Raises:
        Refusal: SGLang does not accept the model's config, or an option does not suit the model.
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
    model.refuse_settings(question.config, hardware)
    return Report.of_plan(Plan.of(question, model, hardware), seen)


def main(argv: Sequence[str] | None = None, machine=None) -> int:
    os.environ |= {"HF_HUB_OFFLINE": "1", "USE_HUB_KERNELS": "NO"}  # a plan does not use the network
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # the name of a file may hold any bytes
    try:
        with _interruptible():
            return _run(argv, machine)
    except Refusal as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit would fail again
        return SIGPIPE_STATUS


def _run(argv: Sequence[str] | None, machine) -> int:
    try:
        question = Question.parse(argv)
    except SystemExit as done:  # argparse exits so after --help
        sys.stdout.flush()
        return int(done.code or 0)
    report = examine(question, machine)
    text = json.dumps(report.to_json(), indent=1) if question.json else "\n".join(report.lines())
    print(text, flush=True)
    return int(report.stops)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Make Ctrl-C end the process at once, with status 2. Some libraries abort if an exception is raised while they load."""

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
