"""Fixtures: servers that several tests share."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from serving import Server

torch.set_num_threads(1)  # tiny tensors: threads cost more than they bring


@pytest.fixture(scope="module")
def serve(tmp_path_factory):
    """``with serve(flags, env) as server``: a server of the test module; its log must be clean when it stops."""

    @contextmanager
    def start(flags: dict, env: dict[str, str] | None = None):
        server = Server(flags, tmp_path_factory.mktemp("server") / "log.txt", env)
        try:
            yield server.wait_until_ready()
        except BaseException:
            server.kill()
            raise
        server.stop()

    return start
