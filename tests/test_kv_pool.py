"""The KV pool as SGLang has it: itself, or within a pool for layers of several kinds."""

from __future__ import annotations

from types import SimpleNamespace

from sglang_freekv.kv_pool import FreeKVPool, pool_of


def test_a_pool_is_found_within_the_one_that_wraps_it():
    pool = object.__new__(FreeKVPool)
    assert pool_of(pool) is pool and pool_of(SimpleNamespace(full_kv_pool=pool)) is pool
