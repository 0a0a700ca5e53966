"""Dispatch: one name for a kernel and its reference, which have one signature; the device of one argument chooses between them."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from sglang_freekv import kernels
from sglang_freekv.kernels import dispatch, on_gpu, reference


@pytest.mark.parametrize("name", on_gpu.__all__)
def test_a_kernel_is_called_like_its_reference(name):
    ours, theirs = (list(inspect.signature(getattr(module, name)).parameters.values()) for module in (on_gpu, reference))
    assert [x for x in ours if x.kind is not x.KEYWORD_ONLY] == [x for x in theirs if x.kind is not x.KEYWORD_ONLY]
    more = {x.name: x for x in ours if x.kind is x.KEYWORD_ONLY}
    assert all(more.pop(x.name) == x for x in theirs if x.kind is x.KEYWORD_ONLY)
    assert all(x.default is not x.empty for x in more.values())
    assert inspect.signature(getattr(kernels, name)) == inspect.signature(getattr(reference, name))
    assert getattr(kernels, name).__doc__ == getattr(reference, name).__doc__


def test_every_kernel_is_public():
    callables = {name for name in kernels.__all__ if inspect.isfunction(getattr(kernels, name))}
    assert callables == set(on_gpu.__all__)


@pytest.mark.parametrize("as_keyword", [False, True])
def test_the_device_of_the_named_argument_decides(as_keyword):
    def on_cpu(host, keys, *, option=1) -> tuple:
        return "reference", host, keys, option

    def compiled(host, keys, *, option=1) -> tuple:
        return "kernel", host, keys, option

    call = dispatch.by_device(on_cpu, of="keys")
    host, here, there = torch.empty(0), torch.empty(0), SimpleNamespace(is_cuda=True)
    with mock.patch.object(on_gpu, "on_cpu", compiled, create=True):
        for keys, expected in ((here, "reference"), (there, "kernel"), (here, "reference")):
            given = {"keys": keys} if as_keyword else {}
            assert call(host, *([] if as_keyword else [keys]), option=3, **given) == (expected, host, keys, 3)


def test_an_argument_that_does_not_exist_cannot_decide():
    with pytest.raises(ValueError, match="'queries' is not in list"):
        dispatch.by_device(reference.offload_pages, of="queries")
