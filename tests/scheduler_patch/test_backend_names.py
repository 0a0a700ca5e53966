"""SGLang asserts for some models that their attention backend is on a list; FreeKV's passes for a stock one there, and nowhere else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_freekv import releases
from sglang_freekv.scheduler_patch import backend_names


def asked(prefill: str | None, decode: str | None, both: str) -> tuple[str, str]:
    settings = SimpleNamespace(prefill_attention_backend=prefill, decode_attention_backend=decode, attention_backend=both)
    if releases.has("settings apart"):
        return backend_names.of_settings(settings)
    return backend_names.of_server_args(lambda args: (prefill or both, decode or both), settings)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((None, None, "freekv"), ("triton", "triton")),
        ((None, None, "fa3"), ("fa3", "fa3")),
        (("fa3", None, "freekv"), ("fa3", "freekv")),
        (("fa3", "flashinfer", "freekv"), ("fa3", "flashinfer")),
    ],
)
def test_only_our_own_backend_passes_for_another(given, told):
    assert asked(*given) == told
