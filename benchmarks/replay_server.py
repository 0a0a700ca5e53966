"""An SGLang server whose FreeKV is the load replay: ``python -m sglang.launch_server`` with two more options.

    python -m benchmarks.replay_server --replay-control control.json --model-path MODEL --kv-retrieval freekv

SGLang's ``launch_server`` takes the function that a scheduler process runs; ours installs the replay and then runs SGLang's.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from pathlib import Path


def run_scheduler(control: Path, copies: bool, *args, **kwargs):
    """In the scheduler process."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    from benchmarks import replay

    replay.install(control, copies)
    return run_scheduler_process(*args, **kwargs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--replay-control", type=Path, required=True, help="says which load to emulate; write it when the server is up")
    parser.add_argument("--replay-copies", choices=("on", "off"), default="on", help="off: recall empties its list and copies nothing")
    options, others = parser.parse_known_args()

    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    from benchmarks import replay_server  # by this name, and not as __main__, the spawned process finds the function

    run = functools.partial(replay_server.run_scheduler, options.replay_control.resolve(), options.replay_copies == "on")
    try:
        launch_server(prepare_server_args(others), run_scheduler_process_func=run)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    sys.exit(main())
