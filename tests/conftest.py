"""Fixtures: servers for one test module, and the three servers that all end-to-end tests share."""

from __future__ import annotations

import os
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent


def modules_with_kernels():
    """Names of all modules of the package and of the benchmarks that declare Triton kernels."""
    for directory, prefix in ((ROOT / "kernels", "sglang_freekv.kernels."), (ROOT / "benchmarks", "benchmarks.")):
        for path in sorted(directory.rglob("*.py")):
            if "@triton.jit" in path.read_text():
                yield prefix + ".".join(path.relative_to(directory).with_suffix("").parts)


if not torch.cuda.is_available():  # kernels declared now run under Triton's interpreter; servers are not affected
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
        for name in modules_with_kernels():
            import_module(name)
        import_module("triton.experimental.gluon.language")  # else the interpreter imports it at its first launch

from interpreted import patch_once_a_launch  # noqa: E402
from made_up import ask, make_machine  # noqa: E402, F401, fixtures
from room import room_for  # noqa: E402
from serving import STOCK, TestServer, freekv, start_all, stop_all  # noqa: E402, it imports Triton too

patch_once_a_launch()
settings.register_profile("the same in every run", derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile("the same in every run")

torch.set_num_threads(1)  # more threads are slower on tiny tensors
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for servers: side by side on few cores, more threads slow them tenfold


def pytest_collection_modifyitems(items):
    for item in items:
        if "fleet" in item.fixturenames:
            item.add_marker("fleet")


@pytest.fixture(scope="session")
def serve(tmp_path_factory):
    """``with serve(flags, flags, ..., env=...) as servers`` starts servers side by side, and checks their logs in the end.

    ``env`` holds environment variables for all servers, or is a list with a dict for each. ``forked`` is as of ``TestServer``.
    """

    @contextmanager
    def start(*all_flags: dict, env: dict[str, str] | list[dict[str, str]] | None = None, **forked):
        envs = env if isinstance(env, list) else [env] * len(all_flags)
        logs = [tmp_path_factory.mktemp("server") / "log.txt" for _ in all_flags]
        with room_for(len(logs)):
            servers = start_all(TestServer(flags, log, own, **forked) for flags, log, own in zip(all_flags, logs, envs))
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
    """Stock SGLang, FreeKV with a budget above every context and room for all pages, and FreeKV with a budget of 512 tokens."""
    observed = {"--enable-metrics": True, "--enable-cache-report": True, "--tool-call-parser": "llama3"}
    covering = freekv(6400, sink=512, window=512) | {"--freekv-resident-memory": None}
    flags = (STOCK, covering, freekv(512) | observed)
    with serve(*(each | {"--max-total-tokens": 131072} for each in flags)) as (stock, covering, small):
        yield SimpleNamespace(stock=stock, covering=covering, small=small)
