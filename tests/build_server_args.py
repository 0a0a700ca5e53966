"""Builds ServerArgs as the launcher and `Engine` do, many times in one process, because importing SGLang takes seconds.

python build_server_args.py CASES FACTS    # files with JSON
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import json
import os
import pickle
import sys
import tempfile
from argparse import ArgumentParser
from pathlib import Path

DEADLINE_S = 300


def run(cases: dict[str, dict], path: Path | None = None) -> dict:
    """What SGLang with the plugin says to each case, on a machine that has no GPU or hides it.

    Args:
        cases: ``{"argv": [...]}`` for the command line, or ``{"args": [...], "kwargs": {...}}`` for ``Engine``;
            with ``"stock"`` ServerArgs is SGLang's own. A command line without a port has a free one.
        path: a folder with another package sglang than the one that is installed.
    """
    from serving import the_nursery  # here, because the forked process has no need of it
    from sglang_freekv.launch.server import free_port

    port = ["--port", str(free_port())]  # somebody may listen on SGLang's default
    cases = {
        name: case | {"argv": [*case["argv"], *port]} if "--port" not in case.get("argv", port) else case for name, case in cases.items()
    }
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "80"} | ({"PYTHONPATH": str(path)} if path else {})
    with tempfile.TemporaryDirectory() as folder:
        asked, told, log = (Path(folder, name) for name in ("cases.json", "facts.json", "log.txt"))
        asked.write_text(json.dumps(cases))
        with log.open("w") as out:
            status = the_nursery().start([__file__, str(asked), str(told)], environment, Path(folder), out.fileno()).wait(DEADLINE_S)
        assert status == 0, log.read_text()[-3000:]
        return json.loads(told.read_text())


def build(case: dict) -> dict:
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import ServerArgs, prepare_server_args

    from sglang_freekv.scheduler_patch import arguments

    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        try:
            if "argv" in case:
                server_args = prepare_server_args(case["argv"])
            elif arguments.APART:
                positional = dict(zip(arguments.defaults(), case.get("args", ())))
                make = ServerArgs if case.get("stock") else Engine.server_args_class
                server_args = make(**positional, **case["kwargs"])
            else:
                server_args = ServerArgs.__new__(ServerArgs)
                init = ServerArgs.__init__.__wrapped__ if case.get("stock") else ServerArgs.__init__
                init(server_args, *case.get("args", ()), **case["kwargs"])
            if arguments.APART:
                server_args.resolve_once()  # what an engine does first
        except SystemExit as exit:
            return {"exit": exit.code, "stderr": stderr.getvalue()}
        except Exception as error:
            return {"raised": [cls.__name__ for cls in type(error).__mro__], "message": str(error)}
    return describe(server_args) | ({"said": stderr.getvalue()} if "argv" in case else {})


def describe(server_args) -> dict:
    from sglang_freekv.scheduler_patch.arguments import config_of, defaults, resolved

    config, settings = config_of(server_args), resolved(server_args)
    copies = (copy.deepcopy(server_args), pickle.loads(pickle.dumps(server_args)))
    graphs = settings.cuda_graph_config
    return {
        "config": config and dataclasses.asdict(config),
        "config_of_copies": [config_of(other) == config for other in copies],
        "settings": {name: getattr(settings, name) for name in ("page_size", "attention_backend", "device")},
        "graphs": [graphs.decode.backend, graphs.prefill.backend],
        "fields": {name: repr(getattr(settings, name)) for name in defaults()},
        "environment": {name: os.environ.get(name) for name in ("SGLANG_USE_CPU_ENGINE", "PYTHONPATH")},
    }


def main() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import ServerArgs

    asked, told = map(Path, sys.argv[1:])
    cases = json.loads(asked.read_text())
    parser = ArgumentParser()
    ServerArgs.add_cli_args(parser)
    facts = {
        "help": parser.format_help(),
        "flags": [flag for action in parser._actions for flag in action.option_strings],
        "outcomes": {name: build(case) for name, case in cases.items()},
    }
    told.write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
