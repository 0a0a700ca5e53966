# SPDX-License-Identifier: Apache-2.0
"""Question: the doctor's command line, checked as far as is possible without SGLang, which takes seconds to import."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import inf
from typing import Any

from sglang_freekv import options as freekv
from sglang_freekv import releases
from sglang_freekv.config import GIB, FreeKVConfig, Refusal, typed
from sglang_freekv.launch import cards, server_flags
from sglang_freekv.launch.checkpoint import Checkpoint
from sglang_freekv.launch.files import parse_json

MOST = 1 << 31  # limit of all counts, which SGLang keeps in 32 bits
LEAST_CHUNK = -1  # SGLang's value for no chunks
UNITS = {"": GIB, "g": GIB, "gb": 10**9, "gib": GIB, "t": 1 << 40, "tb": 10**12, "tib": 1 << 40}
WORDS = 300  # characters of argparse's error that are shown

ABOUT = """Plans a server with KV retrieval: what it takes of host and device memory, whether that fits, and how to start it. Without a
GPU and without weights, config.json alone is enough. Without --model-path it tells whether this machine can serve."""
EXAMPLE = """\
example, on any machine:
  freekv-doctor --model-path Llama-3.1-70B --tp 4 --requests 8 --context-length 128Ki --gpu H100 --host-memory 1.8TiB

exit status: 0, nothing found that would stop the server; 1, something would; 2, bad input, in one line"""


EXPECTED = {"count": "a whole number, such as 8 or 128Ki", "int": "a whole number", "float": "a number"}  # by argparse's names of types


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        if found := re.fullmatch(r"argument (\S+): invalid (\w+) value: (.*)", message, re.DOTALL):
            name, kind, value = found.groups()
            message = f"{name}: expected {EXPECTED.get(kind, kind)}, found {value}"
        elif found := re.fullmatch("unrecognized arguments: (.*)", message, re.DOTALL):
            message = f"{found[1]}: expected flags that the doctor knows, found another; leave it out"
        shown = message if len(message) <= WORDS else message[:WORDS] + " ..."
        raise Refusal(f"{shown}; see --help")


@dataclass(frozen=True)
class Question:
    """A server, and the machine it is to run on.

    Args:
        checkpoint: the model; None asks about the machine alone.
        config: settings of KV retrieval.
        server: stock SGLang's flags; None for a flag that was not given.
        typed: the given flags of the server and their values, for the command.
        requests: requests at once; None is as many as fit.
        gpu: name, bytes of memory and GB/s of the link of a GPU; None is this machine's.
        gpus: number of GPUs; None is one for each rank, or this machine's.
        host_bytes: bytes of host memory; None is this machine's, or unknown if ``gpu`` is given.
        link: bytes per second of a GPU's link; None is the measured rate, or the card's estimate.
        weight_bytes: bytes of all weights; None if the doctor is to find them.
        json: whether the report is printed as JSON.
    """

    checkpoint: Checkpoint | None
    config: FreeKVConfig
    server: argparse.Namespace
    typed: dict[str, Any]
    requests: int | None
    gpu: tuple[str, int, float | None] | None
    gpus: int | None
    host_bytes: int | None
    link: float | None
    weight_bytes: int | None
    json: bool

    @classmethod
    def parse(cls, argv: Sequence[str] | None) -> Question:
        """Parse a command line; None is that of the process.

        Raises:
            Refusal: an option is unknown or out of its range, no server would accept it, or the model is not found.
        """
        asked = make_parser().parse_args(argv)
        if asked.model_path is not None and find_spec("sglang") is None:
            raise Refusal(f"sglang: expected it to be installed, for its rules decide on a model, found none; {releases.INSTALL}")
        server = argparse.Namespace(**{name: getattr(asked, name, None) for name in server_flags.NAMES})
        _refuse_idle(asked)
        _refuse_gpu(asked)
        for name, least in (("requests", 1), ("gpus", 1), ("tp_size", 1), ("context_length", 1), ("max_running_requests", 1),
                            ("max_total_tokens", 1), ("page_size", 1), ("chunked_prefill_size", LEAST_CHUNK)):  # fmt: skip
            _expect_between(name, getattr(asked, name, None), least, MOST)
        for name, most in (("link_gb_per_s", 1e6), ("weights_gib", 1 << 20), ("freekv_host_memory", 1 << 30)):
            _expect_between(name, getattr(asked, name), 0, most, open_below=True)
        _expect_between("mem_fraction_static", server.mem_fraction_static, 0, 1, open_below=True)
        if asked.kv_retrieval == "none":
            raise Refusal("--kv-retrieval none: expected a method, for without one there is nothing to plan; leave it out")
        overrides = parse_json(server.json_model_override_args or "{}", "--json-model-override-args")
        if not isinstance(overrides, dict):
            raise Refusal("--json-model-override-args: expected a JSON object; use for example '{\"rope_scaling\": {...}}'")
        own = {name: getattr(asked, name) for name in freekv.NAMES}
        own["kv_retrieval"] = asked.kv_retrieval or "freekv"
        config = freekv.with_kv_cache_dtype(freekv.config_from(freekv.Options(**own), server.page_size), server.kv_cache_dtype)
        gpu = cards.memory_and_link(asked.gpu) if asked.gpu is not None else None
        return cls(
            checkpoint=None if asked.model_path is None else Checkpoint.find(asked.model_path),
            config=config,
            server=server,
            typed={name: value for name in (*freekv.NAMES[1:], *server_flags.NAMES) if (value := getattr(asked, name, None)) is not None},
            requests=asked.requests,
            gpu=gpu,
            gpus=asked.gpus,
            host_bytes=None if asked.host_memory is None else host_bytes_of(asked.host_memory),
            link=asked.link_gb_per_s and asked.link_gb_per_s * 1e9,
            weight_bytes=None if asked.weights_gib is None else int(asked.weights_gib * GIB),
            json=asked.json,
        )

    @property
    def describes_a_machine(self) -> bool:
        return self.gpu is not None or self.host_bytes is not None

    @property
    def ranks(self) -> int:
        return self.server.tp_size or 1


def make_parser() -> Parser:
    parser = Parser(
        prog="freekv-doctor",
        usage="freekv-doctor [--model-path MODEL] [options]",
        description=ABOUT,
        epilog=EXAMPLE,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=34, width=110),
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines; the same facts")
    model = parser.add_argument_group("the model")
    about = "a directory, its config.json, or a Hugging Face id that is in the local cache; nothing is downloaded"
    model.add_argument("--model-path", "--model", metavar="MODEL", help=about)
    model.add_argument("--weights-gib", type=float, metavar="GIB", help="size of all weights, where the files or the config do not tell")
    load = parser.add_argument_group("the work")
    load.add_argument(
        "--requests",
        type=server_flags.count,
        metavar="N",
        help="requests at once, each of --context-length tokens (default: as many as fit)",
    )
    place = parser.add_argument_group("the machine (default: this one)")
    place.add_argument("--gpu", metavar="NAME|GIB", help=f"a card ({', '.join(card.name for card in cards.CARDS)}), or GiB of one GPU")
    place.add_argument("--gpus", type=server_flags.count, metavar="N", help="GPUs in the machine (default: one a rank)")
    place.add_argument("--host-memory", metavar="SIZE", help="memory that is free on the machine, in GiB, or for example 1.8TiB")
    place.add_argument(
        "--link-gb-per-s",
        type=float,
        metavar="GB",
        help="rate of a GPU's link to the host (default: measured, or an estimate for the card)",
    )
    stock = parser.add_argument_group("flags of SGLang's server", "as `python -m sglang.launch_server` takes them")
    server_flags.add_to(stock)
    own = parser.add_argument_group("flags of KV retrieval", "as the server takes them; its --help says more")
    for name, flag in freekv.FLAGS.items():
        own.add_argument(typed(name), **flag.arguments | {"help": flag.help.partition(". ")[0].rstrip(".") + "."})
    return parser


def host_bytes_of(text: str) -> int:
    """Bytes of a size such as ``1.8TiB``, ``512 GiB`` or ``512``. A number without a unit is in GiB.

    Raises:
        Refusal: ``text`` is not such a size.
    """
    match = re.fullmatch(r"\s*(\d{1,12}(?:\.\d{0,12})?)\s*([a-z]*)\s*", text, flags=re.IGNORECASE)
    unit = UNITS.get(match[2].lower()) if match else None
    if unit is None or not 0 < float(match[1]) * unit < 1 << 60:
        raise Refusal(f"--host-memory {text[:40]}: expected GiB, or a size such as 1.8TiB; use for example --host-memory 512")
    return int(float(match[1]) * unit)


def _refuse_idle(asked: argparse.Namespace) -> None:
    """Raise Refusal for an option that has no effect without ``--model-path``."""
    if asked.model_path is not None:
        return
    for name, value in vars(asked).items():
        if value is not None and name not in ("json", "model_path"):
            shown = " ".join(map(str, value)) if isinstance(value, list) else str(value)
            raise Refusal(f"{typed(name)} {shown[:40]}: expected --model-path beside it, found none; add that, or leave it out")


def _refuse_gpu(asked: argparse.Namespace) -> None:
    """Raise Refusal for an option about a GPU beside ``--device cpu``."""
    if getattr(asked, "device", None) != "cpu":
        return
    for name in ("gpu", "gpus", "link_gb_per_s"):
        if (value := getattr(asked, name)) is not None:
            raise Refusal(f"{typed(name)} {value}: expected none with --device cpu, where nothing is on a GPU; leave one of them out")


def _expect_between(name: str, value: float | None, least: float, most: float, open_below: bool = False) -> None:
    if value is None or (least < value if open_below else least <= value) and value <= most and value != inf:
        return
    shown = str(value) if isinstance(value, float) or abs(value) < MOST else f"of {len(hex(value)) * 4} bits"
    words = f"above {least:g}" if open_below else f"{least:g} or more"
    raise Refusal(f"{typed(name)} {shown}: expected a number {words} and at most {most:g}; use one, or leave it out")
