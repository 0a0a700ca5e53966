# SPDX-License-Identifier: Apache-2.0
"""Patches of SGLang: declared, attached, verified to be live, and proven to be called."""

from __future__ import annotations

import functools
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from importlib import import_module
from types import ModuleType

from sglang.srt.plugins import hook_registry
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_freekv import releases
from sglang_freekv.config import Refusal

START, STEP = "the start of an engine", "the first step"
SAMPLE, DECODE = "the sampling of the first token", "the first decode step"
REQUEST, TEXT_REQUEST, HTTP_REQUEST = "the first request", "the first request with a text", "the first request by HTTP"
COUNTED = "the first whole answer"
ATTRIBUTE = "attribute"  # SGLang's own hooks take the place of a class or a function in every module that has it


class Drift(Refusal):
    """SGLang's target of a hook is not what the hook was written for."""

    status_code = HTTPStatus.INTERNAL_SERVER_ERROR  # SGLang answers any other ValueError with status 400


@dataclass(frozen=True)
class Patch:
    """One hook into SGLang.

    Args:
        target: dotted path of the function or method of SGLang.
        parameters: names of its parameters, blank-separated. Releases that differ have one string each, the oldest first.
            None if they do not matter.
        kind: BEFORE, AFTER, AROUND or REPLACE, or ATTRIBUTE, which puts the hook in the place of an attribute of one class or module.
        hook: ``module:name`` in this package, imported when the patch is attached.
        why: the reason for the hook.
        since: the first release of SGLang that is hooked; None for every one.
        until: the first release that no longer is; None for none.
        due: what calls the hook in every engine with KV retrieval, one of the words above; None if nothing needs to.
    """

    target: str
    parameters: str | tuple[str, ...] | None
    kind: HookType | str
    hook: str
    why: str
    since: str | None = None
    until: str | None = None
    due: str | None = None

    def load(self) -> Callable:
        module, name = self.hook.split(":")
        return getattr(import_module(f"{__package__}.{module}"), name)

    def concerns(self, is_since: Callable[[str], bool] = releases.is_since) -> bool:
        """Whether a release is hooked; ``is_since`` tells whether it is a given one or a later one."""
        return (self.since is None or is_since(self.since)) and not (self.until is not None and is_since(self.until))

    def fits(self, parameters: list[str]) -> bool:
        """Whether the target may take these parameters."""
        return self.parameters is None or " ".join(parameters) in self.alternatives

    @property
    def alternatives(self) -> tuple[str, ...]:
        return (self.parameters,) if isinstance(self.parameters, str) else self.parameters or ()


_registered: set[Patch] = set()
_called: set[Patch] = set()
_proven: set[str] = set()


def check(patches: Iterable[Patch]) -> None:
    """Raise Drift if a target is gone or has other parameters."""
    for patch in patches:
        if patch.concerns() and patch not in _registered:
            _check_target(patch)


def fits(patch: Patch) -> bool:
    """Whether the target is there, and has the parameters that the hook was written for."""
    try:
        check([patch])
    except Drift:
        return False
    return True


def register(patches: Iterable[Patch]) -> None:
    """Hand hooks to SGLang, which attaches them after it has loaded all plugins. Either all are handed over, or none.

    Raises:
        Drift: a target is gone, or has other parameters.
    """
    wanted = [patch for patch in patches if patch.concerns() and patch not in _registered]
    check(wanted)
    hooks = [(patch, patch.load()) for patch in wanted]
    for patch, hook in hooks:
        _registered.add(patch)
        if patch.kind == ATTRIBUTE:
            owner, name = _place(patch)
            setattr(owner, name, staticmethod(hook) if isinstance(owner, type) else hook)
            continue
        if patch.target in HookRegistry._patched:  # another plugin has hooked it, and SGLang would skip ours: hook the result
            HookRegistry._patched.discard(patch.target)
            HookRegistry._hooks[patch.target] = []
        HookRegistry.register(patch.target, hook if patch.due is None else _noting(patch, hook), patch.kind)


def apply(patches: Iterable[Patch]) -> None:
    """Attach hooks now.

    Raises:
        Drift: a target is gone or has other parameters, or a hook could not be attached.
    """
    patches = list(patches)
    register(patches)
    with _one_walk():
        HookRegistry.apply_hooks()
    verify(patches)


@contextmanager
def _one_walk() -> Iterator[None]:
    """Replace what modules have imported of hooked functions in one walk over all modules, at the end.

    SGLang walks for each hook. A release without such a walk has nothing to be spared.
    """
    found: dict[int, tuple[object, object, object]] = {}
    if (walk := getattr(hook_registry, "_propagate_patch", None)) is None:
        yield
        return

    def note(original: object, wrapped: object, owner: object) -> int:
        found[id(original)] = original, wrapped, owner
        return 0

    hook_registry._propagate_patch = note
    try:
        yield
    finally:
        hook_registry._propagate_patch = walk
        _replace(found)


def _replace(found: dict[int, tuple[object, object, object]]) -> None:
    """Put hooked functions in the place of SGLang's in all modules.

    Args:
        found: by the id of SGLang's function: it, the hooked one, and the module that has it already.
    """
    for module in [module for module in sys.modules.values() if isinstance(module, ModuleType)]:
        for name, value in list(vars(module).items()):
            _, wrapped, owner = found.get(id(value), (None, None, module))
            if module is not owner:
                with suppress(AttributeError, TypeError):  # as SGLang does
                    setattr(module, name, wrapped)


def verify(patches: Iterable[Patch]) -> None:
    """Raise Drift unless all hooks are live. SGLang itself only logs a failed hook and goes on without it."""
    for patch in patches:
        if patch.concerns() and not (patch in _registered and _is_attached(patch)):
            raise drift(patch.target, "could not be hooked; the log above has the exception")


def _is_attached(patch: Patch) -> bool:
    if patch.kind == ATTRIBUTE:
        return getattr(*_place(patch)) is patch.load()
    return patch.target in HookRegistry._patched


def _place(patch: Patch) -> tuple[object, str]:
    owner, _, name = patch.target.rpartition(".")
    return pkgutil.resolve_name(owner), name


def prove(due: str) -> None:
    """Raise Drift unless each hook that is due by now has been called in this process. Once they were, it returns at once."""
    if due in _proven:
        return
    for patch in _registered - _called:
        if patch.due == due:
            raise drift(patch.target, f"is hooked, but {due} did not call it")
    _proven.add(due)


def is_proven(due: set[str]) -> bool:
    return due <= _proven


def drift(target: str, finding: str) -> Drift:
    remedy = f"use SGLang {' or '.join(releases.TESTED)}, which this release was tested with"
    return Drift(f"--kv-retrieval: SGLang {releases.INSTALLED}'s {target} {finding}; {remedy}")


def _noting(patch: Patch, hook: Callable) -> Callable:
    @functools.wraps(hook)
    def called(*args, **kwargs):
        _called.add(patch)
        return hook(*args, **kwargs)

    return called


def _check_target(patch: Patch) -> None:
    try:
        target = pkgutil.resolve_name(patch.target)
        parameters = [] if patch.parameters is None else list(inspect.signature(target).parameters)
    except (ImportError, AttributeError) as error:
        raise drift(patch.target, f"is not there ({error})") from error
    if not patch.fits(parameters):
        raise drift(patch.target, f"takes ({', '.join(parameters)}), expected ({', '.join(patch.alternatives[-1].split())})")
