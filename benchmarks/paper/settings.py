"""What the figures of an engine without a server are measured with, and whether a result was."""

from __future__ import annotations

import argparse

from benchmarks.setups import SHAPES

IDENTITY = ("budget", "page_size", "host_tokens", "scale", "repeats", "corrected", "missed")  # of a result: with others it is another
MOST_REPEATS = 200  # contexts grow by a token each, and have room for these


def add_settings(parser: argparse.ArgumentParser, host_tokens: int) -> None:
    parser.add_argument("--shape", choices=(*SHAPES, "tiny"), default="llama-3.1-8b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--page-size", type=int, default=32)
    parser.add_argument("--host-tokens", type=int, default=host_tokens, help="of each layer's host pool, from which pages are drawn")
    parser.add_argument("--repeats", type=int, choices=range(1, MOST_REPEATS + 1), default=20, metavar="N", help="steps that are timed")
    parser.add_argument("--minutes", type=float, default=28, help="when to stop, with what is measured by then")
    parser.add_argument("--force", action="store_true", help="measure again what is there; the earlier result is kept as superseded")
    parser.add_argument("--tables", action="store_true", help="measure nothing; print the tables of the results in --out")


def settings_of(options: argparse.Namespace) -> dict:
    return {"settings": {name: getattr(options, name) for name in IDENTITY if hasattr(options, name)}}


def is_there(results: dict, key: str, settings: dict, force: bool, load: tuple[float, float] | None = None) -> bool:
    """Whether a result was measured with these settings, and under this load where it recalls.

    Args:
        load: c and x.
    """
    result = results.get(key, {})
    recalls = load is not None and result.get("bytes", {}).get("link", 0) > 0
    same_load = not recalls or (result["corrected"], result["missed"]) == load
    return not force and result.get("settings") == settings["settings"] and same_load
