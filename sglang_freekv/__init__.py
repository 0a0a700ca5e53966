# SPDX-License-Identifier: Apache-2.0
"""KV-cache retrieval for ordinary GQA models inside stock SGLang."""

from pathlib import Path

__version__ = "0.1.0"

if not Path(__path__[0], "kernels").is_dir():  # a checkout, where the subpackages lie beside this directory
    __path__.append(str(Path(__file__).resolve().parents[1]))
