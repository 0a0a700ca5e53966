"""An SGLang server whose host memory goes bad, or whose GPU slows down, when a file says so: ``python -m sglang.launch_server`` with one
more option.

    python tests/faulty_server.py --damage damage.json --model-path MODEL --kv-retrieval freekv

The file holds ``{"layers": [retrieval layer, ...], "head": kv head, "pages": [host page, ...], "rank": rank}``; that rank turns one bit of
each of those units, of all kv heads where ``head`` is null, and the file goes. An idle server looks for it only with ``"swept": true``:
otherwise who asks would race with it. With ``"graph_delay": cycles`` each decode graph from then on begins so many cycles of the GPU late.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import threading
import time
from pathlib import Path


def run_scheduler(path: Path, *args, **kwargs):
    """In the scheduler process."""
    import torch
    from sglang.srt.managers.scheduler import run_scheduler_process

    from sglang_freekv.extend_plan import ExtendPlanner
    from sglang_freekv.memory_pool import store
    from sglang_freekv.scheduler_patch.quarantine import Quarantine

    build, note_graph, sweep = store.Store.build, ExtendPlanner.note_graph, Quarantine.sweep
    delay, swept = [0], [False]

    def note_and_delay(planner: ExtendPlanner, fills_page: bool) -> None:
        note_graph(planner, fills_page)
        if delay[0]:
            torch.cuda._sleep(delay[0])

    def sweep_if_wanted(quarantine: Quarantine, host_pages: torch.Tensor) -> torch.Tensor:
        return sweep(quarantine, host_pages) if swept[0] else host_pages

    def watch(built: store.Store) -> None:
        while True:
            time.sleep(0.05)
            if path.exists():
                damage = json.loads(path.read_text())
                if damage["rank"] != torch.distributed.get_rank():
                    continue
                swept[0] = damage.get("swept", swept[0])
                if damage["pages"]:  # all at once: while one after the other is damaged, their request may end, and the rest be another's
                    heads = slice(None) if damage["head"] is None else damage["head"]
                    for layer in damage["layers"]:
                        words = built.host.layers[layer].view(torch.int32).numpy()
                        words[damage["pages"], heads, 1, 3, 2] ^= 1 << 30  # of an exponent
                delay[0] = damage.get("graph_delay", delay[0])
                path.unlink()

    def build_and_watch(*args, **kwargs) -> store.Store:
        built = build(*args, **kwargs)
        threading.Thread(target=watch, args=(built,), daemon=True).start()
        return built

    store.Store.build, ExtendPlanner.note_graph, Quarantine.sweep = build_and_watch, note_and_delay, sweep_if_wanted
    return run_scheduler_process(*args, **kwargs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--damage", type=Path, required=True, help="the file")
    options, others = parser.parse_known_args()

    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    import faulty_server  # by this name, and not as __main__, the spawned process finds the function

    try:
        run = functools.partial(faulty_server.run_scheduler, options.damage.resolve())
        launch_server(prepare_server_args(others), run_scheduler_process_func=run)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    sys.exit(main())
