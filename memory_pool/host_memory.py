# SPDX-License-Identifier: Apache-2.0
"""How much host memory this process can get, what limits it, and the share that the host pool takes by default."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from mmap import PAGESIZE
from pathlib import Path

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")

# SGLang's processes, weights in flight and the page cache need the rest. On `--device cpu` the
# weights, the device cache and the activations need host memory too.
SHARE = {"cuda": 0.7, "cpu": 0.35}
LEAST_BYTES = 64 << 20  # smallest host pool if the user gives no size

# file of the limit, file of the usage, and the line of memory.stat that counts reclaimable file cache, children included
CGROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
CGROUP_V2 = ("memory.max", "memory.current", "inactive_file")

# limits of a process: their line in /proc/self/limits, the line of /proc/self/status that counts against it, the option of ulimit
OWN_LIMITS = (("Max address space", "VmSize", "-v"), ("Max data size", "VmData", "-d"))


@dataclass(frozen=True, order=True)
class Room:
    """Host memory that is still available.

    Args:
        num_bytes: available bytes.
        bound: name of the limit that leaves no more, for an error message.
        remedy: how to get more, for an error message.
    """

    num_bytes: int
    bound: str
    remedy: str


def room(proc: Path = PROC, cgroup: Path = CGROUP) -> Room:
    """Memory that this process can still map and write: the least that the machine, its cgroups and its own limits leave."""
    return min([room_to_write(proc, cgroup), *_own_rooms(proc)])


def room_to_write(proc: Path = PROC, cgroup: Path = CGROUP) -> Room:
    """Mapped memory that can still be written. The kernel kills a process that writes more, without a message."""
    machine = machine_bytes(proc)
    raise_limit = f"`docker run --memory={machine >> 30}g`, or a higher memory limit of the pod or slice"
    cgroups = [Room(left, "a cgroup", raise_limit) for left in _cgroup_bytes(proc, cgroup)]
    return min([Room(machine, "this machine", "end what takes the memory"), *cgroups])


def available_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """The bytes of :func:`room`."""
    return room(proc, cgroup).num_bytes


def machine_bytes(proc: Path = PROC) -> int:
    """Available bytes of the machine, before any limit of this process."""
    return _kernel_bytes(proc / "meminfo", "MemAvailable")


def resident_bytes(proc: Path = PROC) -> int:
    """Bytes of anonymous memory that this process holds. File pages are left out, because they count as available."""
    _, resident, shared, *_ = (proc / "self" / "statm").read_text().split()
    return (int(resident) - int(shared)) * PAGESIZE


def default_host_pool_bytes(available: int, ranks_on_node: int, device: str) -> int:
    """The host pool of one rank when ``--freekv-host-memory`` is not given.

    Args:
        available: :func:`available_bytes` before any rank allocated.
        ranks_on_node: processes of this server that build a host pool on this machine.
        device: ``"cuda"`` or ``"cpu"``.
    """
    return int(available * SHARE[device]) // ranks_on_node


def _own_rooms(proc: Path) -> Iterator[Room]:
    """Room under each finite limit of this process. All mapped memory counts against it, written or not."""
    listing = proc / "self" / "limits"
    for line in listing.read_text().splitlines() if listing.exists() else []:
        for name, counted, option in OWN_LIMITS:
            if line.startswith(name) and (soft := line.removeprefix(name).split()[0]) != "unlimited":
                left = max(0, int(soft) - _kernel_bytes(proc / "self" / "status", counted))
                remedy = f"`ulimit {option} unlimited` before the server, in a new shell if this one refuses"
                yield Room(left, f"`ulimit {option}`", remedy)


def _cgroup_bytes(proc: Path, root: Path) -> list[int]:
    """Bytes left under the limit of each memory cgroup of this process."""
    room = []
    for directory, files in _memory_cgroups(proc, root):
        limit = _read_limit(directory / files[0])
        if limit is not None:
            used = int((directory / files[1]).read_text())
            room.append(max(0, limit - used + _stat(directory / "memory.stat", files[2])))
    return room


def _memory_cgroups(proc: Path, root: Path) -> list[tuple[Path, tuple[str, str, str]]]:
    """Directories and file names of this process's memory cgroup and of those above it.

    In a container the path may name a directory of the machine that is not mounted. Its parents up to the
    mount point are still mounted, and the mount point is then the container's own cgroup.
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
    """Bytes in the line ``name:  12 kB`` of a file of /proc."""
    for line in file.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{file}: expected a line {name}, which Linux has since 3.14, found none; run a newer kernel")


def _stat(file: Path, name: str) -> int:
    lines = (line.split() for line in file.read_text().splitlines())
    return next((int(value) for key, value in lines if key == name), 0)
