"""A stock SGLang server of a model with linear attention on a CPU: ``python -m sglang.launch_server``, with the hooks that replace Triton.

Its prefix cache keeps states of linear attention as on a GPU, by the strategy that SGLang calls extra_buffer and refuses on a CPU.
"""

from __future__ import annotations

import sys


def run_scheduler(*args, **kwargs):
    """In the scheduler process, whose memory is all pageable."""
    import torch
    from sglang.srt.managers.scheduler import run_scheduler_process

    from sglang_freekv.scheduler_patch import SCHEDULER_ON_CPU
    from sglang_freekv.scheduler_patch.registry import apply

    torch.Tensor.pin_memory = lambda tensor, *args: tensor
    apply(patch for patch in SCHEDULER_ON_CPU if not patch.hook.startswith("grammars:"))
    run_scheduler_process(*args, **kwargs)


def allow_states_in_prefix_cache() -> None:
    from sglang.srt.server_args import ServerArgs

    if hasattr(ServerArgs, "_validate_mamba_extra_buffer"):
        ServerArgs._validate_mamba_extra_buffer = lambda *args: None
    else:
        from sglang.srt.arg_groups import mamba_hook

        mamba_hook._platform_supports_mamba_cache_extra_buffer = lambda: True


def main() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args

    import linear_server  # by this name, and not as __main__, the spawned process finds the function

    allow_states_in_prefix_cache()
    launch_server(prepare_server_args(sys.argv[1:]), run_scheduler_process_func=linear_server.run_scheduler)


if __name__ == "__main__":
    main()
