# SPDX-License-Identifier: Apache-2.0
"""Patches of SGLang: declared, attached, and verified to be live."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_freekv import releases


@dataclass(frozen=True)
class Patch:
    """One hook into SGLang.

    Args:
        target: dotted path of the function or method of SGLang.
        parameters: names of its parameters, blank-separated. Releases that differ have one string each, the oldest first.
            None if they do not matter.
        kind: BEFORE, AFTER, AROUND or REPLACE.
        hook: ``module:function`` in this package, imported when the patch is attached.
        why: the reason for the hook.
        since: the first release of SGLang that is hooked; None for every one.
        until: the first release that no longer is; None for none.
    """

    target: str
    parameters: str | tuple[str, ...] | None
    kind: HookType
    hook: str
    why: str
    since: str | None = None
    until: str | None = None

    def concerns(self, is_since: Callable[[str], bool] = releases.is_since) -> bool:
        """Whether a release is hooked; ``is_since`` tells whether it is a given one or a later one."""
        return (self.since is None or is_since(self.since)) and not (self.until is not None and is_since(self.until))

    def fits(self, parameters: list[str]) -> bool:
        """Whether the target may take these parameters."""
        return self.parameters is None or " ".join(parameters) in self.alternatives

    @property
    def alternatives(self) -> tuple[str, ...]:
        return (self.parameters,) if isinstance(self.parameters, str) else self.parameters or ()

    def load(self) -> Callable:
        module, name = self.hook.split(":")
        return getattr(import_module(f"{__package__}.{module}"), name)


_registered: set[Patch] = set()


class Drift(RuntimeError):
    """SGLang's target of a hook is not what the hook was written for."""


def register(patches: Iterable[Patch]) -> None:
    """Hand hooks to SGLang, which attaches them after it has loaded all plugins. Either all are handed over, or none.

    Raises:
        Drift: a target is gone, or has other parameters.
    """
    wanted = [patch for patch in patches if patch.concerns() and patch not in _registered]
    for patch in wanted:
        _check_target(patch)
    hooks = [(patch, patch.load()) for patch in wanted]
    for patch, hook in hooks:
        if patch.target in HookRegistry._patched:  # another plugin has hooked it, and SGLang would skip ours: hook the result
            HookRegistry._patched.discard(patch.target)
            HookRegistry._hooks[patch.target] = []
        HookRegistry.register(patch.target, hook, patch.kind)
        _registered.add(patch)


def apply(patches: Iterable[Patch]) -> None:
    """Attach hooks now.

    Raises:
        Drift: a target is gone or has other parameters, or a hook could not be attached.
    """
    patches = list(patches)
    register(patches)
    HookRegistry.apply_hooks()
    verify(patches)


def verify(patches: Iterable[Patch]) -> None:
    """Raise Drift unless all hooks are live. SGLang itself only logs a failed hook and goes on without it."""
    for patch in patches:
        if patch.concerns() and (patch not in _registered or patch.target not in HookRegistry._patched):
            raise _drift(patch.target, "could not be hooked; the log above has the exception")


def _check_target(patch: Patch) -> None:
    try:
        parameters = list(inspect.signature(pkgutil.resolve_name(patch.target)).parameters)
    except (ImportError, AttributeError) as error:
        raise _drift(patch.target, f"is not there ({error})") from error
    if not patch.fits(parameters):
        raise _drift(patch.target, f"takes ({', '.join(parameters)}), expected ({', '.join(patch.alternatives[-1].split())})")


def _drift(target: str, finding: str) -> Drift:
    remedy = f"use SGLang {' or '.join(releases.TESTED)}, which this release was tested with"
    return Drift(f"--kv-retrieval: SGLang {releases.INSTALLED}'s {target} {finding}; {remedy}")
