# SPDX-License-Identifier: Apache-2.0
"""Tells which hooks would fail on a release of SGLang, from its source. The release need not be installed:

    python -m sglang_freekv.launch.drift [WHEEL_OR_FOLDER ...]

Without an argument it looks at the SGLang that is installed. The exit status is 1 if a hook would fail.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from packaging.utils import parse_wheel_filename
from packaging.version import InvalidVersion, Version

from sglang_freekv import releases
from sglang_freekv.scheduler_patch import TABLES
from sglang_freekv.scheduler_patch.registry import Patch
from sglang_freekv.scheduler_patch.sources import Sources


def findings(root: Path, version: Version) -> Iterator[str]:
    """One line for each hook and each row of the table of releases that does not hold of the sources under ``root``."""
    sources = Sources(root)

    def is_since(release: str) -> bool:
        return version.release >= Version(release).release

    for patch in (patch for table in TABLES for patch in table):
        if patch.target.startswith("sglang.") and patch.concerns(is_since) and (finding := _finding(sources, patch)):
            yield f"{patch.target}: {finding} ({patch.hook}: {patch.why})"
    for name, difference in releases.DIFFERENCES.items():
        found = sources.find(difference.symbol) is not None
        if found != is_since(difference.since):
            yield f"{difference.symbol}: is {'' if found else 'not '}there, against what the table of releases says ({name})"


def _finding(sources: Sources, patch: Patch) -> str | None:
    if patch.parameters is None:  # a constructor may be made by a decorator
        target = patch.target.removesuffix(".__init__")
        return None if sources.find(target) else "is not there"
    parameters = sources.parameters(patch.target)
    if parameters is None:
        return "is not there"
    if not patch.fits(parameters):
        return f"takes ({', '.join(parameters)}), expected ({', '.join(patch.alternatives[-1].split())})"
    return None


@contextmanager
def sources_of(path: Path) -> Iterator[tuple[Path, Version]]:
    """The folder that holds SGLang's folder ``sglang``, and its version, of a wheel or of such a folder."""
    if path.is_dir():
        metadata = next(path.glob("sglang-*.dist-info"), None)
        yield path, Version(metadata.name.split("-")[1].removesuffix(".dist")) if metadata else releases.INSTALLED
        return
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(path) as wheel:
        wheel.extractall(folder, [name for name in wheel.namelist() if name.startswith("sglang/") and name.endswith(".py")])
        yield Path(folder), parse_wheel_filename(path.name)[1]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m sglang_freekv.launch.drift", description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path, metavar="WHEEL_OR_FOLDER", help="a wheel of SGLang, or the folder that it is in")
    paths = parser.parse_args().paths or [Path(find_spec("sglang").origin).parents[1]]
    failed = False
    for path in paths:
        try:
            with sources_of(path) as (root, version):
                lines = list(findings(root, version))
        except (OSError, zipfile.BadZipFile, InvalidVersion, ValueError) as error:
            parser.error(f"{path}: expected a wheel of SGLang, or a folder that holds sglang, found neither ({error})")
        tested = "tested" if str(version) in releases.TESTED else "not tested"
        print(f"SGLang {version} ({tested}): {len(lines) or 'no'} hook(s) would fail")
        print(*(f"  {line}" for line in lines), sep="\n", end="\n" if lines else "")
        failed |= bool(lines)
    return failed


if __name__ == "__main__":
    sys.exit(main())
