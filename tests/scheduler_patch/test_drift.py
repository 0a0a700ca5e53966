"""An SGLang in which the target of one hook has another name serves no KV retrieval, says which target it is, and serves all else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import sglang

from build_server_args import DEADLINE_S, run
from room import room_for
from serving import NEEDLE_MODEL, TestServer
from sglang_freekv import releases
from sglang_freekv.launch import drift

INSTALLED = Path(sglang.__file__).parent
DRIFTED = {  # the file, the name that another one takes the place of, and the target that is hooked
    "front": ("srt/entrypoints/engine.py", "_launch_subprocesses", "sglang.srt.entrypoints.engine.Engine._launch_subprocesses"),
    "flags": ("srt/server_args.py", "from_cli_args", "sglang.srt.server_args.ServerArgs.from_cli_args"),
    "scheduler": (
        "srt/managers/scheduler_components/output_streamer.py",
        "get_cached_tokens_details",
        "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.get_cached_tokens_details",
    ),
}


def tree_with(folder: Path, file: str, change: Callable[[str], str]) -> Path:
    """A folder with SGLang's package, whose files are those installed but for one, whose text is changed."""
    source, here = INSTALLED, folder / "sglang"
    for part in Path(file).parts:
        here.mkdir()
        for other in source.iterdir():
            if other.name not in (part, "__pycache__"):
                (here / other.name).symlink_to(other)
        source, here = source / part, here / part
    here.write_text(change(source.read_text()))
    return folder


def renamed(name: str) -> Callable[[str], str]:
    return lambda text: text.replace(name, f"{name}_of_another_release")


def beside(name: str, owner: str) -> Callable[[str], str]:
    """The method stays, but the file calls another one that does the same."""
    return lambda text: text.replace(f"self.{name}(", f"self.{name}_itself(") + f"\n\n{owner}.{name}_itself = {owner}.{name}\n"


@pytest.fixture(scope="module", params=DRIFTED)
def drifted(request, tmp_path_factory):
    """What such an SGLang says to some arguments, and the target that has drifted."""
    file, name, target = DRIFTED[request.param]
    folder = tree_with(tmp_path_factory.mktemp(request.param), file, renamed(name))
    model = {"model_path": str(NEEDLE_MODEL), "device": "cpu", "random_seed": 1}
    command = ["--model-path", str(NEEDLE_MODEL), "--device", "cpu"]
    cases = {
        "engine": {"kwargs": model | {"kv_retrieval": "freekv"}},
        "engine, none": {"kwargs": model | {"kv_retrieval": "none", "attention_backend": "torch_native"}},
    }
    if request.param != "flags":  # which SGLang itself needs on a command line
        cases["cli, none"] = {"argv": [*command, "--kv-retrieval", "none", "--attention-backend", "torch_native"]}
    cases["cli"] = {"argv": [*command, "--kv-retrieval", "freekv"]}
    return run(cases, path=folder)["outcomes"], target, folder


def test_kv_retrieval_is_refused_by_the_name_of_the_target(drifted):
    outcomes, target, _ = drifted
    expected = f"--kv-retrieval: SGLang {releases.INSTALLED}'s {target} is not there"
    last = outcomes["cli"]["stderr"].splitlines()[-1]
    assert outcomes["cli"]["exit"] == 2 and last.startswith(f"error: {expected}") and last.endswith("was tested with")
    assert outcomes["engine"]["raised"][0] == "Drift" and outcomes["engine"]["message"].startswith(expected)


def test_others_are_served(drifted):
    outcomes, _, _ = drifted
    assert all(outcomes[name]["settings"]["attention_backend"] == "torch_native" for name in outcomes if name.endswith("none"))


def test_a_server_that_does_not_call_a_hook_is_never_ready(tmp_path):
    tree = tree_with(tmp_path, "srt/managers/tokenizer_manager.py", beside("_create_tokenized_object", "TokenizerManager"))
    flags, log = {"--kv-retrieval": "freekv", "--max-total-tokens": 8192}, tmp_path / "log.txt"
    with room_for(1):
        server = TestServer(flags, log, {"PYTHONPATH": str(tree)})
        try:
            status = server.process.wait(DEADLINE_S)
        finally:
            server.stop()
    said = log.read_text()
    target = "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object"
    assert status != 0 and f"{target} is hooked, but the first request did not call it" in said and "fired up" not in said, said


@pytest.fixture
def command(monkeypatch, capsys):
    """The exit status of `sglang_freekv.launch.drift`, and the last lines that it prints."""

    def run(*paths: Path) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["drift", *map(str, paths)])
        try:
            status = drift.main()
        except SystemExit as exit:
            status = exit.code
        said = capsys.readouterr()
        return status, said.out or said.err

    return run


def test_the_command_tells_it_of_a_release_that_is_not_installed(command, tmp_path):
    file, name, target = DRIFTED["scheduler"]
    status, said = command(tree_with(tmp_path, file, renamed(name)))
    assert status == 1 and said.startswith(f"SGLang {releases.INSTALLED} (tested): 1 hook(s) would fail\n  {target}: is not ")


def test_the_command_finds_nothing_in_the_installed_release(command):
    assert command() == (0, f"SGLang {releases.INSTALLED} (tested): no hook(s) would fail\n")


def test_the_command_refuses_what_is_no_release(command, tmp_path):
    wheel = tmp_path / "sglang-0.5.23-py3-none-any.whl"
    wheel.write_text("no archive")
    status, said = command(wheel)
    assert status == 2 and "expected a wheel of SGLang, or a folder that holds sglang" in said.splitlines()[-1]
