# SPDX-License-Identifier: Apache-2.0
"""How much host memory this process can really get, what bounds it, and the share of it that the host pool takes by default."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from mmap import PAGESIZE
from pathlib import Path

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")

# The rest is for SGLang's processes, weights in flight and the page cache. On `--device cpu` the
# weights, the device cache and the activations live in the same memory.
SHARE = {"cuda": 0.7, "cpu": 0.35}
LEAST_BYTES = 64 << 20  # of a host pool that nobody asked for by size

# limit, usage, and the line of memory.stat that counts reclaimable file cache, children included
CGROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
CGROUP_V2 = ("memory.max", "memory.current", "inactive_file")

# limits of a process: the line of /proc/self/limits, what counts against it in /proc/self/status, the option of ulimit
OWN_LIMITS = (("Max address space", "VmSize", "-v"), ("Max data size", "VmData", "-d"))


@dataclass(frozen=True, order=True)
class Room:
    """Host memory that can still be had.

    Args:
        num_bytes: how much.
        bound: what has no more left.
        remedy: how to get more.
    """

    num_bytes: int
    bound: str
    remedy: str


def room(proc: Path = PROC, cgroup: Path = CGROUP) -> Room:
    """What this process could still map and then write: the least of the machine, of every cgroup it is in and of its own limits."""
    return min([room_to_write(proc, cgroup), *_own_rooms(proc)])


def room_to_write(proc: Path = PROC, cgroup: Path = CGROUP) -> Room:
    """What could still be written of memory that is mapped already; beyond it the kernel kills who writes, without a word."""
    machine = machine_bytes(proc)
    raise_limit = f"`docker run --memory={machine >> 30}g`, or a higher memory limit of the pod or slice"
    cgroups = [Room(left, "a cgroup", raise_limit) for left in _cgroup_bytes(proc, cgroup)]
    return min([Room(machine, "this machine", "end what takes the memory"), *cgroups])


def available_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """The bytes of :func:`room`."""
    return room(proc, cgroup).num_bytes


def machine_bytes(proc: Path = PROC) -> int:
    """What the machine has available, to whoever may take it."""
    return _kernel_bytes(proc / "meminfo", "MemAvailable")


def resident_bytes(proc: Path = PROC) -> int:
    """Anonymous memory that this process has taken so far; what it has of files counts as available."""
    _, resident, shared, *_ = (proc / "self" / "statm").read_text().split()
    return (int(resident) - int(shared)) * PAGESIZE


def default_host_pool_bytes(available: int, ranks_on_node: int, device: str) -> int:
    """The host pool of one rank when ``--freekv-host-memory`` is not given.

    Args:
        available: what :func:`available_bytes` said before any rank allocated.
        ranks_on_node: processes of this server that build a host pool on this machine.
        device: ``"cuda"`` or ``"cpu"``.
    """
    return int(available * SHARE[device]) // ranks_on_node


def _own_rooms(proc: Path) -> Iterator[Room]:
    """What each finite limit of this process leaves; what it has mapped counts, written or not."""
    listing = proc / "self" / "limits"
    for line in listing.read_text().splitlines() if listing.exists() else []:
        for name, counted, option in OWN_LIMITS:
            if line.startswith(name) and (soft := line.removeprefix(name).split()[0]) != "unlimited":
                left = max(0, int(soft) - _kernel_bytes(proc / "self" / "status", counted))
                remedy = f"`ulimit {option} unlimited` before the server, in a new shell if this one refuses"
                yield Room(left, f"`ulimit {option}`", remedy)


def _cgroup_bytes(proc: Path, root: Path) -> list[int]:
    """Room left under the limit of each memory cgroup above this process."""
    room = []
    for directory, files in _memory_cgroups(proc, root):
        limit = _read_limit(directory / files[0])
        if limit is not None:
            used = int((directory / files[1]).read_text())
            room.append(max(0, limit - used + _stat(directory / "memory.stat", files[2])))
    return room


def _memory_cgroups(proc: Path, root: Path) -> list[tuple[Path, tuple[str, str, str]]]:
    """The memory cgroup of this process and those above it.

    In a container the path may name a directory of the machine that is not mounted; its parents down to
    the mount point, which then is the container's own cgroup, still are.
    """
    listing = proc / "self" / "cgroup"
    found = []
    for line in listing.read_text().splitlines() if listing.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, files = root, CGROUP_V2
        elif "memory" in controllers.split(","):
            mount, files = root / "memory", CGROUP_V1
        else:
            continue
        leaf = mount / path.strip("/")
        above = [leaf, *leaf.parents]
        found += [(directory, files) for directory in above[: above.index(mount) + 1]]
    return [(directory, files) for directory, files in found if (directory / files[0]).exists()]


def _read_limit(file: Path) -> int | None:
    text = file.read_text().strip()
    return None if text == "max" else int(text)


def _kernel_bytes(file: Path, name: str) -> int:
    """Of the line ``name:  12 kB``."""
    for line in file.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{file}: expected a line {name}, which Linux has since 3.14, found none")


def _stat(file: Path, name: str) -> int:
    lines = (line.split() for line in file.read_text().splitlines())
    return next((int(value) for key, value in lines if key == name), 0)
