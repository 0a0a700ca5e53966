"""Hooks are live or the server does not start; without retrieval nothing but the argument hooks is attached."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_freekv import scheduler_patch
from sglang_freekv.scheduler_patch import activation, registry
from sglang_freekv.scheduler_patch.registry import Patch, apply


@pytest.fixture
def sglang_module(monkeypatch):
    """A module to hook, and a registry that forgets afterwards."""
    module = ModuleType("some_sglang_module")
    module.step = lambda batch, size: (batch, size)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(HookRegistry, "_hooks", HookRegistry._hooks.copy())
    monkeypatch.setattr(HookRegistry, "_patched", set(HookRegistry._patched))
    monkeypatch.setattr(registry, "_registered", set())
    return module


def patch(target: str, parameters: str = "batch size") -> Patch:
    return Patch(f"some_sglang_module.{target}", parameters, HookType.AFTER, "counts:copy_to_cpu", "a test")


def test_a_patch_is_applied_once(sglang_module, monkeypatch):
    calls = []
    monkeypatch.setattr(Patch, "load", lambda self: lambda result, *args, **kwargs: calls.append(args))
    for _ in range(2):
        apply([patch("step")])
    assert sglang_module.step(1, size=2) == (1, 2)
    assert calls == [(1,)]


def test_a_target_that_another_plugin_has_hooked_is_hooked_again(sglang_module, monkeypatch):
    calls = []
    HookRegistry.register("some_sglang_module.step", lambda result, *args, **kwargs: calls.append("theirs"), HookType.AFTER)
    HookRegistry.apply_hooks()
    monkeypatch.setattr(Patch, "load", lambda self: lambda result, *args, **kwargs: calls.append("ours"))
    apply([patch("step")])
    sglang_module.step(1, 2)
    assert calls == ["theirs", "ours"]


def test_a_hook_that_is_not_attached_is_noticed(sglang_module, monkeypatch):
    monkeypatch.setattr(Patch, "load", lambda self: lambda result, *args, **kwargs: None)
    registry.register([patch("step")])
    with pytest.raises(RuntimeError, match="could not be hooked"):
        registry.verify([patch("step")])


@pytest.mark.parametrize(
    "target, parameters, finding",
    [("gone", "batch", "is not there"), ("step", "batch", r"takes \(batch, size\), expected \(batch\)"), ("no.step", "x", "is not there")],
)
def test_drift_is_an_error_that_names_the_remedy(sglang_module, target, parameters, finding):
    with pytest.raises(RuntimeError, match=f"{finding}.*use SGLang 0.5.17"):
        apply([patch(target, parameters)])


def test_a_hook_that_sglang_could_not_attach_is_an_error(sglang_module, monkeypatch):
    monkeypatch.setattr(registry.HookRegistry, "_apply_target", classmethod(lambda cls, *args: 1 / 0))
    with pytest.raises(RuntimeError, match="could not be hooked"):
        apply([patch("step")])


def test_without_retrieval_nothing_is_attached(monkeypatch):
    monkeypatch.setattr(activation, "apply", lambda patches: pytest.fail("attached"))
    activation.in_launcher(None, SimpleNamespace(device="cpu"))
    activation.in_scheduler(SimpleNamespace(device="cpu"), 0)


def test_every_patch_says_why_and_is_listed_once():
    names = ("FRONT", "LAUNCHER", "LAUNCHER_ON_CPU", "SCHEDULER", "SCHEDULER_ON_CPU")
    tables = [getattr(scheduler_patch, name) for name in names]
    hooked = [(patch.target, patch.kind) for table in tables for patch in table]  # SGLang warns of two of a kind on one target
    assert len(set(hooked)) == len(hooked)
    assert all(patch.why and patch.load() for table in tables for patch in table)
