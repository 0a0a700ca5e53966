"""Fixtures: servers of a test module, and the three that all end-to-end tests share."""

from __future__ import annotations

import os
import pkgutil
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, settings

from sglang_freekv import kernels

if not torch.cuda.is_available():  # what is declared now runs under Triton's interpreter; servers started later know nothing of it
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
        for module in pkgutil.iter_modules(kernels.__path__):
            import_module(f"{kernels.__name__}.{module.name}")
        import_module("triton.experimental.gluon.language")  # the interpreter does so at its first launch

from serving import STOCK, TestServer, freekv, start_all, stop_all  # noqa: E402, it imports Triton too

settings.register_profile("the same in every run", derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile("the same in every run")

torch.set_num_threads(1)  # tiny tensors: threads cost more than they bring
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of servers: side by side, threads that wait for each other for a core cost tenfold


@pytest.fixture(scope="session")
def serve(tmp_path_factory):
    """``with serve(flags, flags, ..., env=...) as servers``: side by side; their logs must be clean in the end.

    ``env`` is for all of them, or a list with one for each.
    """

    @contextmanager
    def start(*all_flags: dict, env: dict[str, str] | list[dict[str, str]] | None = None):
        envs = env if isinstance(env, list) else [env] * len(all_flags)
        servers = [TestServer(flags, tmp_path_factory.mktemp("server") / "log.txt", own) for flags, own in zip(all_flags, envs)]
        start_all(servers)
        try:
            yield servers
        except BaseException:
            for server in servers:
                server.stop()
            raise
        stop_all(servers)

    return start


@pytest.fixture(scope="session")
def fleet(serve):
    """Stock SGLang, FreeKV with a budget above every context, and FreeKV with a budget of 512 tokens."""
    observed = {"--enable-metrics": True, "--enable-cache-report": True}
    flags = (STOCK, freekv(6400, sink=512, window=512), freekv(512) | observed)
    with serve(*(each | {"--max-total-tokens": 131072} for each in flags)) as (stock, covering, small):
        yield SimpleNamespace(stock=stock, covering=covering, small=small)
