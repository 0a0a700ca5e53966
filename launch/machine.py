# SPDX-License-Identifier: Apache-2.0
"""Machine: the GPU, packages, host memory and limits of this machine, as findings."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

from packaging.version import Version

from sglang_freekv import releases
from sglang_freekv.launch.finding import Finding, size
from sglang_freekv.launch.gpu import Gpu
from sglang_freekv.memory_pool import host_memory

NO_GPU = "not measured: no GPU"
NO_GPU_REMEDY = "run the doctor where the server is to run"
PLUGIN = ("sglang.srt.plugins", "freekv", "sglang_freekv.plugin:register")
PACKAGES = {"torch": "torch", "triton": "triton", "sglang": "sglang", "flashinfer": "flashinfer-python"}
INSTALL = "`pip install -e .` in the checkout of sglang_freekv"

PINNED_BYTES = 64 << 20
COPIED_BYTES = 256 << 20
RAISE_MEMLOCK = "`docker run --ulimit memlock=-1` in a container, `ulimit -l unlimited` before the server elsewhere"


@dataclass(frozen=True)
class Machine:
    """This machine.

    Args:
        gpu: its GPU.
        proc, sys: directories of Linux's ``/proc`` and ``/sys``.
    """

    gpu: Gpu
    proc: Path = Path("/proc")
    sys: Path = Path("/sys")

    @property
    def room(self) -> host_memory.Room:
        """Host memory that is still available within the limits of this machine, its cgroup and this process."""
        return host_memory.room(self.proc, self.sys / "fs/cgroup")

    @property
    def available_bytes(self) -> int:
        return self.room.num_bytes

    @property
    def host_pool_bytes(self) -> int:
        """Default bytes of the host pool for a server of one rank, without ``--freekv-host-memory``."""
        return host_memory.default_host_pool_bytes(self.available_bytes, 1, self.gpu.device)

    def findings(self) -> Iterator[Finding]:
        yield self._gpu()
        yield self._driver()
        for name, package in PACKAGES.items():
            yield self._package(name, package)
        yield self._plugin()
        yield self._host_memory()
        pinning = self._pinning()
        yield self._memlock(pinning)
        yield self._huge_pages()
        yield self._numa()
        yield pinning
        yield from self._links(pinning)

    def _gpu(self) -> Finding:
        if not self.gpu.present:
            seen = f" ({self.gpu.complaint})" if self.gpu.complaint else ""
            return Finding("gpu", f"none that torch can use{seen}; a server runs on the CPU alone, with --device cpu")
        free, total = self.gpu.memory_bytes
        figures = {"free_bytes": free, "total_bytes": total}
        return Finding("gpu", f"{self.gpu.name}, {size(free)} free of {size(total)}", figures=figures)

    def _driver(self) -> Finding:
        file = self.proc / "driver/nvidia/version"
        found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", file.read_text()) if file.exists() else None
        if found and not self.gpu.present:
            remedy = "torch sees no GPU all the same: `docker run --gpus all` in a container, or unset CUDA_VISIBLE_DEVICES"
            return Finding("driver", f"NVIDIA {found[0]}", remedy)
        return Finding("driver", f"NVIDIA {found[0]}" if found else "unknown" if self.gpu.present else "none")

    def _package(self, name: str, package: str) -> Finding:
        try:
            found = version(package)
        except PackageNotFoundError:
            if package == "flashinfer-python" and not self.gpu.present:
                return Finding(name, "not installed; only a server on a GPU needs it")
            return Finding(name, "not installed", releases.INSTALL if name == "sglang" else f"`pip install {package}`", stops=True)
        if name == "sglang" and Version(found).public not in releases.TESTED:
            return Finding(name, found, f"expected {' or '.join(releases.TESTED)}, which were tested: {releases.INSTALL}", stops=True)
        return Finding(name, found)

    def _plugin(self) -> Finding:
        group, name, target = PLUGIN
        found = [entry.value for entry in entry_points(group=group, name=name)]
        if target in found:
            return Finding("plugin", f"entry point {name} of {group} is {target}")
        return Finding("plugin", f"entry point {name} of {group} is {found[0] if found else 'not there'}", INSTALL, stops=True)

    def _host_memory(self) -> Finding:
        room, machine, pool = self.room, host_memory.machine_bytes(self.proc), self.host_pool_bytes
        value, remedy = f"{size(room.num_bytes)} available, {size(pool)} of them for the host pool by default", None
        if room.num_bytes < machine:
            value += f"; {room.bound} bounds it, the machine has {size(machine)} available"
            remedy = room.remedy
        if pool < host_memory.LEAST_BYTES:
            remedy = f"expected a host pool of {size(host_memory.LEAST_BYTES)} at least: {room.remedy}"
        figures = {"available_bytes": room.num_bytes, "machine_bytes": machine, "host_pool_bytes": pool}
        return Finding("host memory", value, remedy, pool < host_memory.LEAST_BYTES, figures)

    def _memlock(self, pinning: Finding) -> Finding:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        if limit == resource.RLIM_INFINITY:
            return Finding("memlock", "unlimited")
        value, figures = size(limit), {"limit_bytes": limit}
        if not self.gpu.present:
            value += "; without a GPU nothing is pinned, with one this may stop it"
            return Finding("memlock", value, RAISE_MEMLOCK, figures=figures)
        if not pinning.stops and limit < PINNED_BYTES:
            return Finding("memlock", f"{value}; {size(PINNED_BYTES)} were pinned all the same", figures=figures)
        if limit >= self.host_pool_bytes:
            return Finding("memlock", value, figures=figures)
        return Finding("memlock", f"{value}, below the host pool of {size(self.host_pool_bytes)}", RAISE_MEMLOCK, figures=figures)

    def _huge_pages(self) -> Finding:
        file = self.sys / "kernel/mm/transparent_hugepage/enabled"
        if not file.exists():
            return Finding("huge pages", "this kernel has none; pinning takes longer")
        chosen = re.search(r"\[(\w+)\]", file.read_text())
        value = chosen[1] if chosen else "unknown"
        if value in ("always", "madvise"):
            return Finding("huge pages", value)
        return Finding("huge pages", f"{value}; pinning takes longer", f"as root on the host, `echo madvise > {file}`")

    def _numa(self) -> Finding:
        nodes = sorted(int(node.name[4:]) for node in self.sys.glob("devices/system/node/node[0-9]*"))
        value = f"{len(nodes)} node{'s' * (len(nodes) != 1)}" if nodes else "unknown"
        if not self.gpu.present:
            return Finding("numa", value, figures={"nodes": nodes})
        file = self.sys / "bus/pci/devices" / self.gpu.pci_address / "numa_node"
        near = int(file.read_text()) if file.exists() else -1
        where = f"the GPU is on node {near}" if near >= 0 else f"which one {self.gpu.pci_address} is on is not told"
        remedy = None
        if near >= 0 and len(nodes) > 1:
            remedy = f"host memory is best on the GPU's node: `numactl --cpunodebind={near} --preferred={near}` before the command"
        return Finding("numa", f"{value}, {where}", remedy, figures={"nodes": nodes, "gpu_node": near if near >= 0 else None})

    def _pinning(self) -> Finding:
        if not self.gpu.present:
            return Finding("pinned memory", NO_GPU, NO_GPU_REMEDY)
        try:
            self.gpu.pin(PINNED_BYTES)
        except (RuntimeError, OSError) as error:
            limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
            bounded = limit != resource.RLIM_INFINITY and limit < PINNED_BYTES
            remedy = RAISE_MEMLOCK if bounded else "free host memory, raise the container's memory limit, or see what the driver logs"
            return Finding("pinned memory", f"{size(PINNED_BYTES)} could not be pinned ({_first_line(error)})", remedy, stops=True)
        return Finding("pinned memory", f"{size(PINNED_BYTES)} pinned", figures={"pinned_bytes": PINNED_BYTES})

    def _links(self, pinning: Finding) -> Iterator[Finding]:
        names = ("link to the device", "link to the host")
        if not self.gpu.present or pinning.stops:
            why = ("not measured: no pinned memory", "see above") if self.gpu.present else (NO_GPU, NO_GPU_REMEDY)
            yield from (Finding(name, *why) for name in names)
            return
        try:
            rates = self.gpu.copy_rates(COPIED_BYTES)
        except (RuntimeError, OSError) as error:
            remedy = "free host and device memory, then try again"
            yield from (Finding(name, f"not measured: {_first_line(error)}", remedy) for name in names)
            return
        for name, rate in zip(names, rates):
            value = f"{rate / 1e9:.1f} GB/s in pinned copies of {size(COPIED_BYTES)}"
            yield Finding(name, value, figures={"bytes_per_s": rate})


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
