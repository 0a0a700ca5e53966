# SPDX-License-Identifier: Apache-2.0
"""Patches of SGLang: declared, attached, and verified to be live."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module

from sglang.srt.plugins.hook_registry import HookRegistry, HookType


@dataclass(frozen=True)
class Patch:
    """One hook into SGLang.

    Args:
        target: dotted path of the function or method of SGLang.
        parameters: names of its parameters in SGLang 0.5.17, blank-separated; None if they do not matter.
        kind: BEFORE, AFTER, AROUND or REPLACE.
        hook: ``module:function`` in this package, imported when the patch is attached.
        why: the reason for the hook.
    """

    target: str
    parameters: str | None
    kind: HookType
    hook: str
    why: str

    def load(self) -> Callable:
        module, name = self.hook.split(":")
        return getattr(import_module(f"{__package__}.{module}"), name)


_registered: set[Patch] = set()


def register(patches: Iterable[Patch]) -> None:
    """Hand hooks to SGLang, which attaches them after it has loaded all plugins.

    Raises:
        RuntimeError: a target is gone, or has other parameters.
    """
    for patch in patches:
        if patch in _registered:
            continue
        _check_target(patch)
        if patch.target in HookRegistry._patched:  # another plugin has hooked it, and SGLang would skip ours: hook the result
            HookRegistry._patched.discard(patch.target)
            HookRegistry._hooks[patch.target] = []
        HookRegistry.register(patch.target, patch.load(), patch.kind)
        _registered.add(patch)


def apply(patches: Iterable[Patch]) -> None:
    """Attach hooks now.

    Raises:
        RuntimeError: a target is gone or has other parameters, or a hook could not be attached.
    """
    patches = list(patches)
    register(patches)
    HookRegistry.apply_hooks()
    verify(patches)


def verify(patches: Iterable[Patch]) -> None:
    """Raise RuntimeError unless all hooks are live. SGLang itself only logs a failed hook and goes on without it."""
    for patch in patches:
        if patch not in _registered or patch.target not in HookRegistry._patched:
            raise _drift(patch.target, "could not be hooked; the log above has the exception")


def _check_target(patch: Patch) -> None:
    try:
        parameters = list(inspect.signature(pkgutil.resolve_name(patch.target)).parameters)
    except (ImportError, AttributeError) as error:
        raise _drift(patch.target, f"is not there ({error})") from error
    expected = parameters if patch.parameters is None else patch.parameters.split()
    if parameters != expected:
        raise _drift(patch.target, f"takes ({', '.join(parameters)}), expected ({', '.join(expected)})")


def _drift(target: str, finding: str) -> RuntimeError:
    return RuntimeError(f"--kv-retrieval: SGLang's {target} {finding}; use SGLang 0.5.17, which this release was built for")
