"""The weights of the bundled needle model are kept packed. Whatever reads them calls :func:`ready` first.

python -m benchmarks.needle.weights            # before a command that names benchmarks/needle/model
"""

from __future__ import annotations

import argparse
import hashlib
import lzma
import os
import sys
from pathlib import Path

MODEL = Path(__file__).resolve().parent / "model"


def ready(model: Path = MODEL) -> Path:
    """The directory ``model``, after each file that its ``SHA256SUMS`` names was unpacked; a model without that list is left alone.

    A file with another digest is made anew. Several processes may do so at once.

    Raises:
        ValueError: a packed file holds something else than the list says.
    """
    sums = model / "SHA256SUMS"
    for line in sums.read_text().splitlines() if sums.exists() else ():
        digest, name = line.split()
        file, packed = model / name, model / f"{name}.xz"
        if file.exists() and hashlib.sha256(file.read_bytes()).hexdigest() == digest:
            continue
        try:
            content = lzma.decompress(packed.read_bytes())
        except lzma.LZMAError as error:
            raise ValueError(f"{packed}: expected a file packed by xz, found {error}; restore it by git checkout") from None
        if (found := hashlib.sha256(content).hexdigest()) != digest:
            raise ValueError(f"{packed}: expected content of {sums.name}'s {digest}, found {found}; restore it by git checkout")
        part = file.with_name(f"{name}.{os.getpid()}.part")
        part.write_bytes(content)
        os.replace(part, file)
    return model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL, help="directory with SHA256SUMS and packed files")
    print(ready(parser.parse_args().model))
    return 0


if __name__ == "__main__":
    sys.exit(main())
