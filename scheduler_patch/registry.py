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
    """One SGLang symbol that we hook.

    Args:
        target: dotted path of the function or method.
        parameters: its parameter names in the SGLang this was written for, blank-separated; None when they do not matter.
        kind: how the hook is attached.
        hook: ``module:function`` in this package, imported when the patch is attached; a few lines that delegate to an object of ours.
        why: the reason.
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
    """Hand hooks to SGLang, which attaches them when all plugins are loaded.

    Raises:
        RuntimeError: a target is gone or takes other parameters.
    """
    for patch in patches:
        if patch in _registered:
            continue
        _check_target(patch)
        if patch.target in HookRegistry._patched:  # by another plugin, earlier: SGLang would pass over ours; wrap what is there
            HookRegistry._patched.discard(patch.target)
            HookRegistry._hooks[patch.target] = []
        HookRegistry.register(patch.target, patch.load(), patch.kind)
        _registered.add(patch)


def apply(patches: Iterable[Patch]) -> None:
    """Attach hooks now.

    Raises:
        RuntimeError: as ``register`` and ``verify``.
    """
    patches = list(patches)
    register(patches)
    HookRegistry.apply_hooks()
    verify(patches)


def verify(patches: Iterable[Patch]) -> None:
    """Raise RuntimeError unless all hooks are live; SGLang itself logs a failed hook and goes on without it."""
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
