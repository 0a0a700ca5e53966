"""An SGLang server with LoRA on a CPU, where SGLang cannot pin the memory that it wants pinned: ``python -m sglang.launch_server``."""

from __future__ import annotations

import functools
import sys


def run_scheduler(*args, **kwargs):
    """In the scheduler process, whose memory is all pageable."""
    import torch
    from sglang.srt.managers.scheduler import run_scheduler_process

    torch.Tensor.pin_memory = lambda tensor, *args: tensor
    for name in ("tensor", "empty", "zeros"):
        setattr(torch, name, pageable(getattr(torch, name)))
    run_scheduler_process(*args, **kwargs)


def pageable(make):
    @functools.wraps(make)
    def make_pageable(*args, pin_memory: bool = False, **kwargs):
        return make(*args, **kwargs)

    return make_pageable


def main() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args

    import lora_server  # by this name, and not as __main__, the spawned process finds the function
    from sglang_freekv.scheduler_patch import refusals

    refusals.RESOLVED_RULES = tuple(rule for rule in refusals.RESOLVED_RULES if "--enable-lora" not in rule.message)
    launch_server(prepare_server_args(sys.argv[1:]), run_scheduler_process_func=lora_server.run_scheduler)


if __name__ == "__main__":
    main()
