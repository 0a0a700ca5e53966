"""Room in memory for servers: two lanes of tests share one machine, and the kernel kills a server when its memory is gone."""

from __future__ import annotations

import fcntl
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SERVER_BYTES = 7 << 29  # 2.6 to 3.5 GiB were measured (the sum of its three processes' PSS)
SPARE_BYTES = 1 << 30  # for clients, and what the tests themselves take
DEADLINE_S = 300
LOCK = Path(__file__).resolve().parent.parent / ".out" / "servers.lock"


def available_bytes() -> int:
    """What Linux says can be allocated without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo: expected a line MemAvailable, found none")


@contextmanager
def room_for(servers: int) -> Iterator[None]:
    """Wait until there is room for so many more servers; within, nobody else starts one. Behind ``DEADLINE_S`` they are started anyway,
    with a warning: the test run waits in vain for servers that its own part keeps.

    Leave it when they are ready, because a server takes its memory while it starts. Leave it later if more follow one another.
    """
    LOCK.parent.mkdir(exist_ok=True)
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        begun = time.monotonic()
        while available_bytes() < servers * SERVER_BYTES + SPARE_BYTES:
            if time.monotonic() - begun >= DEADLINE_S:
                told = f"no room for {servers} servers in {DEADLINE_S} s; tests that use them and `fleet` belong in two files"
                warnings.warn(told, stacklevel=3)
                break
            time.sleep(1)
        yield


def wait_for_room(servers: int) -> None:
    """Wait until there is room for servers that a program starts by itself."""
    with room_for(servers):
        pass
