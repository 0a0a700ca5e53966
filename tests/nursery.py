"""Server processes that need not import torch, transformers and flashinfer: they are forked off a process that has.

Imports take nine tenths of what a small server's start costs, in each of its three processes. The nursery imports what SGLang imports, but
nothing of SGLang's or ours. Whatever these do at import, with the environment and the hooks of a server, each of its processes still does.

    python -P nursery.py SOCKET MODULE...     # a file descriptor, by which ``Nursery`` asks; and what is imported

A server first forks a helper, which stays as it is. Where ``multiprocessing`` would spawn, the helper forks a process that does what a
spawned one does. It is then the server's child, as a spawned one would be. Servers end with the process that asked for them.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import gc
import importlib
import json
import multiprocessing.util
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

MODULES = (  # the most expensive that SGLang 0.5.17 and 0.5.23 import, by python -X importtime
    "torch", "torch._inductor.compile_fx", "torch._dynamo.repro.after_dynamo", "torch.utils.cpp_extension", "torchvision.io", "triton",
    "transformers", "transformers.activations", "transformers.modeling_layers", "transformers.generation.candidate_generator",
    "transformers.models.llama", "transformers.modeling_gguf_pytorch_utils", "transformers.image_processing_utils", "gguf", "numpy",
    "flashinfer", "flashinfer.comm", "flashinfer.norm", "xgrammar", "compressed_tensors.config", "openai.types.responses",
    "openai.types.realtime", "fastapi", "aiohttp.web", "uvicorn", "uvloop", "requests", "IPython.display", "pydantic.v1", "psutil", "zmq",
    "fsspec", "PIL.Image", "tabulate",
)  # fmt: skip
NEVER = ("sglang", "sglang_freekv", "sgl_kernel")
MOST_BYTES, MOST_FILES, FIRST_FREE_FILE = 1 << 17, 16, 500
PR_SET_CHILD_SUBREAPER = 36
SPAWNED = "--multiprocessing-fork"


class Forked:
    """A process of the nursery, as ``subprocess.Popen`` would give it to the server that reads and writes this much of it."""

    def __init__(self, pid: int, end: int) -> None:
        self.pid, self.returncode, self._end = pid, None, end

    def poll(self) -> int | None:
        return self._wait(0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._wait(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid} of the nursery", timeout)
        return status

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def _wait(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._end], [], [], timeout)[0]:
            said = os.read(self._end, 16)
            self.returncode = int(said) if said else -signal.SIGKILL  # nobody is left to tell
            os.close(self._end)
        return self.returncode


class Nursery:
    """Starts the nursery's process. It ends with this one.

    Args:
        env: its environment. Libraries read some of it at import.
        modules: what it imports.
    """

    def __init__(self, env: dict[str, str], modules: Sequence[str] = MODULES) -> None:
        self._ask, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-P", __file__, str(theirs.fileno()), *modules]
            self.process = subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True)

    def start(self, arguments: Sequence[str], env: dict[str, str], cwd: Path, out: int) -> Forked:
        """What ``python ARGUMENTS`` would start, in a session of its own, with its output in a file.

        Args:
            arguments: ``-m``, a module and its arguments; or a script and its arguments.
            env: the environment, all of it.
            cwd: the directory it runs in.
            out: file descriptor of its output.

        Raises:
            RuntimeError: the nursery has ended.
        """
        end, theirs = os.pipe()
        try:
            tell(self._ask, {"arguments": list(arguments), "env": env, "cwd": str(cwd)}, [out, theirs])
            answer = self._ask.recv(MOST_BYTES)
        finally:
            os.close(theirs)
        if not answer:
            raise RuntimeError(
                f"the nursery, process {self.process.pid}: expected the pid of a server, found its end; its output tells why"
            )
        return Forked(int(answer), end)

    def close(self) -> None:
        self._ask.close()
        self.process.wait()


def tell(to: socket.socket, what: dict, files: list[int]) -> None:
    socket.send_fds(to, [json.dumps(what).encode()], files)


def hear(by: socket.socket) -> tuple[dict, list[int]] | None:
    """What was told, with its files; None if nobody is left who could tell."""
    said, files, _, _ = socket.recv_fds(by, MOST_BYTES, MOST_FILES)
    return (json.loads(said), files) if said else None


def take_place(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Give open files these numbers, whatever had them."""
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, FIRST_FREE_FILE) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(moved, numbers):
        os.dup2(file, number)
        os.close(file)


def become(env: dict[str, str], arguments: Sequence[str], directory: str) -> None:
    """What is a process's own from its beginning on.

    Args:
        directory: where it looks for modules first, as ``python`` would.
    """
    mine = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(env)
    sys.argv[:] = arguments
    sys.modules["__main__"] = types.ModuleType("__main__")
    theirs = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    own = [path for path in sys.path if path not in (*theirs, *mine)]
    library = next((place for place, path in enumerate(own) if path.endswith(".zip")), 0)  # what .pth files put first stays first
    sys.path[:] = [directory, *own[:library], *theirs, *own[library:]]
    sys.modules["numpy"].random.seed()  # Python's own generator does so by itself


def serve(asked: socket.socket, begin: Callable[[dict, list[int], socket.socket], None]) -> None:
    """Fork a process for everyone who asks, until nobody can. It has no parent here, and goes on with ``begin``."""
    while (heard := hear(asked)) is not None:
        between = os.fork()
        if between == 0:
            if os.fork():
                os._exit(0)
            return begin(*heard, asked)
        for file in heard[1]:
            os.close(file)
        os.waitpid(between, 0)
    os._exit(0)


def begin_server(what: dict, files: list[int], asked: socket.socket) -> None:
    """Fork the server, wait for its end, and tell it."""
    out, end = files
    pid = os.fork()
    if pid:
        asked.send(str(pid).encode())
        asked.close()
        status = status_of(pid, end)
        with suppress(BrokenPipeError):
            os.write(end, str(status).encode())
        os._exit(0)
    asked.close()
    os.close(end)
    os.setsid()
    os.chdir(what["cwd"])
    take_place([out, os.dup(out)], [1, 2])
    spawn_by(helper())
    program, *arguments = what["arguments"]
    if program == "-m":
        become(what["env"], arguments, what["cwd"])
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        become(what["env"], [program, *arguments], str(Path(program).parent))
        runpy.run_path(program, run_name="__main__")


def status_of(pid: int, end: int) -> int:
    """Wait for a server's end. It is killed, with all of its session, if nobody is left whom ``end`` could tell."""
    ended, watch = os.pidfd_open(pid), select.poll()
    watch.register(ended, select.POLLIN)
    watch.register(end, 0)  # an error, once the other end is closed
    if ended not in dict(watch.poll()):
        for kill in (os.killpg, os.kill):
            with suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def helper() -> socket.socket:
    """Fork the process that stays as it is. Returns the socket to ask it by."""
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):  # this process is to be the parent of those that the helper leaves
        raise OSError("prctl: expected that a server may be the parent of its helper's orphans, found an error; start it with forked=False")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        return ours
    ours.close()
    serve(theirs, functools.partial(begin_spawned, os.getppid()))


def begin_spawned(server: int, what: dict, files: list[int], asked: socket.socket) -> None:
    while os.getppid() != server:
        time.sleep(0.001)
    asked.send(str(os.getpid()).encode())
    asked.close()
    os.chdir(what["cwd"])
    take_place(files, what["numbers"])
    become(what["env"], what["arguments"], what["cwd"])
    sys.exit(exec(what["code"], {}))


def spawn_by(ask: socket.socket) -> None:
    """Let the helper fork a process where ``multiprocessing`` would start an interpreter for it."""
    execute = multiprocessing.util.spawnv_passfds

    def fork(path: bytes, command: Sequence[str], files: Sequence[int]) -> int:
        if SPAWNED not in command:
            return execute(path, command, files)
        _, code = command[command.index("-c") :][:2]
        told = {"code": code, "numbers": list(files), "arguments": ["-c", SPAWNED], "env": dict(os.environ), "cwd": os.getcwd()}
        try:
            tell(ask, told, list(files))
        except BrokenPipeError:  # an engine that shuts down ends all its children, and the helper with them
            return execute(path, command, files)
        return int(ask.recv(MOST_BYTES))

    multiprocessing.util.spawnv_passfds = fork


def main() -> None:
    asked, modules = socket.socket(fileno=int(sys.argv[1])), sys.argv[2:]
    for name in modules:
        importlib.import_module(name)
    early = [name for name in sys.modules if name.split(".")[0] in NEVER]
    assert not early, f"nursery: expected nothing of {', '.join(NEVER)}, found {early[0]}; leave out the module that imports it"
    gc.collect()
    gc.freeze()
    serve(asked, begin_server)


if __name__ == "__main__":
    main()
