# SPDX-License-Identifier: Apache-2.0
"""Entry point of SGLang's plugin group ``sglang.srt.plugins``."""


def register() -> None:
    """Hand over the hooks that carry our arguments; the rest follows when an engine with ``--kv-retrieval`` starts."""
    from sglang_freekv import scheduler_patch
    from sglang_freekv.scheduler_patch import registry

    registry.register(scheduler_patch.FRONT)
