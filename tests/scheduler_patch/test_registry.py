"""Hooks are live or the server does not start; without retrieval nothing but the argument hooks is attached."""

from __future__ import annotations

import inspect
import pkgutil
import sys
from collections.abc import Callable
from contextlib import suppress
from types import MethodType, ModuleType, SimpleNamespace

import pytest
from sglang.srt.plugins import hook_registry
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_freekv import scheduler_patch
from sglang_freekv.scheduler_patch import activation, registry
from sglang_freekv.scheduler_patch.registry import Drift, Patch, apply


@pytest.fixture
def sglang_module(monkeypatch):
    """A module to hook, and a registry that forgets afterwards."""
    module = ModuleType("some_sglang_module")
    module.step = lambda batch, size: (batch, size)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(HookRegistry, "_hooks", HookRegistry._hooks.copy())
    monkeypatch.setattr(HookRegistry, "_patched", set(HookRegistry._patched))
    for name in ("_registered", "_called", "_proven"):
        monkeypatch.setattr(registry, name, set())
    return module


def patch(target: str, parameters: str | tuple[str, ...] = "batch size", **more) -> Patch:
    return Patch(f"some_sglang_module.{target}", parameters, HookType.AFTER, "counts:copy_to_cpu", "a test", **more)


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


def test_modules_that_have_imported_a_target_get_the_hook(sglang_module, monkeypatch):
    others = [ModuleType("one_importer"), ModuleType("another_importer")]
    sglang_module.turn = lambda batch, size: size
    for other, name in zip(others, ("step", "its_own_name")):
        monkeypatch.setitem(sys.modules, other.__name__, other)
        setattr(other, name, sglang_module.step)
        other.turn = sglang_module.turn
    monkeypatch.setattr(Patch, "load", lambda self: lambda result, *args, **kwargs: "hooked")
    walk = hook_registry._propagate_patch
    apply([patch("step"), patch("turn")])
    assert others[0].step is others[1].its_own_name is sglang_module.step and others[0].turn is others[1].turn is sglang_module.turn
    assert others[0].step(1, 2) == others[0].turn(1, 2) == "hooked"
    assert hook_registry._propagate_patch is walk


def test_every_hook_is_in_the_tables_that_are_examined():
    attached = {*scheduler_patch.FRONT, *scheduler_patch.launcher("cpu"), *scheduler_patch.scheduler("cpu")}
    assert attached == {patch for table in scheduler_patch.TABLES for patch in table}


NEVER_GIVEN = {("linear_attention:gated_norm", "self x g residual prenorm residual_in_fp32")}  # no model gives it more than x and a gate


def _takes(hook: Callable, patch: Patch, names: list[str]) -> bool:
    """Whether the hook can be called as its target is, with all arguments by position, or all but the first by name."""
    more = 1 if patch.kind in (HookType.AROUND, HookType.AFTER) else 0  # the original, or its result
    is_bound = isinstance(pkgutil.resolve_name(patch.target), MethodType)  # a class method, whose class is not among its parameters
    first = [object()] * (more + is_bound + min(len(names), 1))
    for positional, named in ((names[1:], ()), ((), names[1:])):
        with suppress(TypeError):
            inspect.signature(hook).bind(*first, *positional, **dict.fromkeys(named))
            return True
    return False


def test_every_hook_takes_what_its_target_takes_in_every_release():
    hooked = [patch for table in scheduler_patch.TABLES for patch in table if patch.kind != registry.ATTRIBUTE and patch.concerns()]
    lacking = {
        (patch.hook, names) for patch in hooked for names in patch.alternatives
        if not any(name.startswith("*") for name in names.split()) and not _takes(patch.load(), patch, names.split())
    }  # fmt: skip
    assert lacking == NEVER_GIVEN


def test_no_two_targets_are_one_function():
    """A walk over all modules for all hooks would give it the last one's."""
    tables = (*scheduler_patch.FRONT, *scheduler_patch.launcher("cpu"), *scheduler_patch.scheduler("cpu"))
    paths = {patch.target for patch in tables if patch.concerns() and patch.kind != registry.ATTRIBUTE}
    targets = [pkgutil.resolve_name(path) for path in paths]  # kept, because what is made anew for each asking may have its number again
    assert len(targets) > 50 and len(set(map(id, targets))) == len(targets)


def test_a_hook_that_is_not_attached_is_noticed(sglang_module, monkeypatch):
    monkeypatch.setattr(Patch, "load", lambda self: lambda result, *args, **kwargs: None)
    registry.register([patch("step")])
    with pytest.raises(Drift, match="could not be hooked"):
        registry.verify([patch("step")])


@pytest.mark.parametrize(
    "target, parameters, finding",
    [("gone", "batch", "is not there"), ("step", "batch", r"takes \(batch, size\), expected \(batch\)"), ("no.step", "x", "is not there")],
)
def test_drift_is_an_error_that_names_the_remedy(sglang_module, target, parameters, finding):
    with pytest.raises(Drift, match=f"{finding}.*use SGLang 0.5.17"):
        apply([patch(target, parameters)])


def test_if_one_target_has_drifted_none_is_hooked(sglang_module):
    with pytest.raises(Drift, match="some_sglang_module.gone"):
        apply([patch("step"), patch("gone")])
    assert "some_sglang_module.step" not in HookRegistry._hooks
    assert not registry._registered


def test_releases_may_differ_in_parameters(sglang_module):
    apply([patch("step", ("batch", "batch size"))])
    with pytest.raises(Drift, match=r"expected \(batch, rows\)"):
        apply([patch("step", ("batch", "batch rows"))])


@pytest.mark.parametrize("since, until, hooked", [("0.5.17", None, True), ("99", None, False), (None, "99", True), (None, "0.5.17", False)])
def test_a_release_has_its_own_hooks(sglang_module, since, until, hooked):
    target = "step" if hooked else "gone"
    apply([patch(target, since=since, until=until)])
    assert (f"some_sglang_module.{target}" in HookRegistry._patched) == hooked


def test_a_hook_that_sglang_could_not_attach_is_an_error(sglang_module, monkeypatch):
    monkeypatch.setattr(registry.HookRegistry, "_apply_target", classmethod(lambda cls, *args: 1 / 0))
    with pytest.raises(Drift, match="could not be hooked"):
        apply([patch("step")])


def test_without_retrieval_nothing_is_attached(monkeypatch):
    monkeypatch.setattr(activation, "apply", lambda patches: pytest.fail("attached"))
    stock = SimpleNamespace(device="cpu", attention_backend=None)
    assert activation.in_launcher(lambda cls, server_args: "started", None, stock) == "started"
    activation.in_scheduler(stock, 0)


def test_a_hook_that_was_not_called_in_time_is_told(sglang_module, monkeypatch):
    monkeypatch.setattr(Patch, "load", lambda self: lambda result, *args, **kwargs: None)
    registry.apply([patch("step", due=registry.START)])
    sglang_module.step(1, 2)
    registry.prove(registry.START)
    sglang_module.other = lambda batch: batch
    registry.apply([patch("other", "batch", due=registry.STEP)])
    with pytest.raises(Drift, match="some_sglang_module.other is hooked, but the first step did not call it"):
        registry.prove(registry.STEP)


def test_an_attribute_is_replaced_where_it_is_and_nowhere_else(sglang_module, monkeypatch):
    sglang_module.Holder = type("Holder", (), {"made_of": dict})
    monkeypatch.setattr(Patch, "load", lambda self: sorted)
    whole = Patch("some_sglang_module.Holder.made_of", None, registry.ATTRIBUTE, "counts:collect", "a test")
    registry.apply([whole])
    assert sglang_module.Holder().made_of is sorted and dict is type({})
    sglang_module.Holder.made_of = dict
    with pytest.raises(Drift, match="could not be hooked"):
        registry.verify([whole])
    step = sglang_module.step  # as another module has imported it
    of_module = Patch("some_sglang_module.step", "batch size", registry.ATTRIBUTE, "counts:collect", "a test")
    registry.apply([of_module])
    assert sglang_module.step is sorted is not step


def test_every_patch_says_why_and_is_listed_once():
    patches = [patch for table in scheduler_patch.TABLES for patch in table if patch.concerns()]
    hooked = [(patch.target, patch.kind) for patch in patches]  # SGLang warns of two of a kind on one target
    assert len(set(hooked)) == len(hooked)
    assert all(patch.why and patch.load() for patch in patches)
