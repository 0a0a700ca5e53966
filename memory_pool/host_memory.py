"""How much host memory this process can really get, and the share of it that the host pool takes by default."""

from __future__ import annotations

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


def available_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Bytes that could still be allocated here: the least of the machine and of every cgroup this process is in."""
    return min([_machine_bytes(proc), *_cgroup_bytes(proc, cgroup)])


def default_host_pool_bytes(available: int, ranks_on_node: int, device: str) -> int:
    """The host pool of one rank when ``--freekv-host-memory`` is not given.

    Args:
        available: what :func:`available_bytes` said before any rank allocated.
        ranks_on_node: processes of this server that build a host pool on this machine.
        device: ``"cuda"`` or ``"cpu"``.
    """
    return int(available * SHARE[device]) // ranks_on_node


def _machine_bytes(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{proc / 'meminfo'}: expected a MemAvailable line, which Linux has since 3.14")


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


def _stat(file: Path, name: str) -> int:
    lines = (line.split() for line in file.read_text().splitlines())
    return next((int(value) for key, value in lines if key == name), 0)
