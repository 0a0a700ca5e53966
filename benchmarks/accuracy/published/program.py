"""What our own evaluators have in common as programs: their options, how they end, and where the result goes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.accuracy.published.endpoint import EndpointFailed
from benchmarks.accuracy.published.records import RecordError


def parser(description: str, data: str, out: str) -> argparse.ArgumentParser:
    """A parser with what all of them take; ``data`` and ``out`` say what is there."""
    options = argparse.ArgumentParser(description=description.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    options.add_argument("--url", required=True, help="of the server")
    options.add_argument("--model", required=True, help="its name for the server")
    options.add_argument("--data", type=Path, required=True, help=data)
    options.add_argument("--out", type=Path, required=True, help=out)
    options.add_argument("--limit", type=int, help="questions of each task, from the first")
    options.add_argument("--concurrency", type=int, default=16)
    return options


def finish(run: Callable[[argparse.Namespace], dict], options: argparse.Namespace) -> int:
    """Run, write ``result.json`` to ``options.out`` and print it; the exit status. What went wrong is one line."""
    try:
        result = run(options)
    except (RecordError, EndpointFailed, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    (options.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0
