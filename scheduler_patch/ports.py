# SPDX-License-Identifier: Apache-2.0
"""Tries the ports of a server before anything loads. SGLang binds them only when the model is ready."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

from sglang_freekv.config import Refusal, typed
from sglang_freekv.scheduler_patch.arguments import config_of, end_with, resolved

HIGHEST = 65535


def try_ports(server_args, argv) -> None:
    """AFTER the command line of a server is read: end the process with one line if a port cannot be used. `Engine` has no such port."""
    if config_of(server_args) is None:
        return
    settings = resolved(server_args)
    try:
        for name, host in _ports(settings):
            _try_port(name, host, getattr(settings, name))
    except Refusal as refusal:
        end_with(refusal)


def _ports(settings) -> Iterator[tuple[str, str]]:
    """Names of the options that give a port, each with the host to bind it on."""
    yield "port", settings.host
    if settings.grpc_port is not None:
        yield "grpc_port", settings.host
    if settings.nccl_port is not None and settings.dist_init_addr is None:
        yield "nccl_port", "127.0.0.1"


def _try_port(name: str, host: str, port: int) -> None:
    """Listen for a moment as uvicorn does, on every address of the host.

    Raises:
        Refusal: the port is out of range, is taken, or the host has no such address.
    """
    if not 1 <= port <= HIGHEST:
        raise Refusal(f"{typed(name)} {port}: expected a port from 1 to {HIGHEST}; use one that is free")
    try:
        asyncio.run(_listen(host, port))
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno > 0 else error.strerror  # errno of an unknown host name is below 0
        raise Refusal(f"{typed(name)} {port}: cannot listen on {host} ({reason}); use a free {typed(name)}, or another --host") from None


async def _listen(host: str, port: int) -> None:
    server = await asyncio.get_running_loop().create_server(asyncio.Protocol, host, port)
    server.close()
