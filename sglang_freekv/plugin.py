# SPDX-License-Identifier: Apache-2.0
"""Entry point of SGLang's plugin group ``sglang.srt.plugins``."""


def register() -> None:
    """Hand over the hooks that carry our arguments; the rest follows when an engine with ``--kv-retrieval`` starts.

    SGLang swallows exceptions of a plugin. If its functions are not what the hooks were written for, only those hooks are handed over that
    fit and that take the options, to refuse them.
    """
    from sglang_freekv import scheduler_patch
    from sglang_freekv.scheduler_patch import registry

    try:
        registry.register(scheduler_patch.FRONT)
    except registry.Drift as drift:
        from sglang_freekv.scheduler_patch import arguments

        arguments.refuse_all(drift)
        for patch in scheduler_patch.OPTIONS:
            if registry.fits(patch):
                registry.register([patch])
