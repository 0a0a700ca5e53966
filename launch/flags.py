# SPDX-License-Identifier: Apache-2.0
"""Writes docs/flags.md from the table of flags that the server parses:

python -m sglang_freekv.launch.flags > docs/flags.md
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from sglang_freekv.config import typed
from sglang_freekv.options import ABOUT, DEFAULTS, FLAGS

HEAD = """# Flags

Made by `python -m sglang_freekv.launch.flags > docs/flags.md` from the table in
[`sglang_freekv/options.py`](../sglang_freekv/options.py); a test holds that it is up to date.
Which values suit which work is told in [tuning](tuning.md).

{about}
"""
TAIL = """
## SGLang's own flags that matter here
| flag | meaning here |
|---|---|
| `--page-size TOKENS` | The unit of selection and recall. Default: {page_size}, or that of `--freekv-preset`. Smaller pages find what is scattered, in longer steps. |
| `--max-total-tokens TOKENS` | Tokens of KV in host memory, at most. |
| `--max-running-requests N` | Rows: requests that decode at once, at most. Each has tables on the device, and is promised frames for the device cache. |
| `--mem-fraction-static SHARE` | Device memory for weights and KV pools. |
| `--context-length TOKENS` | Longest request. Two staging buffers of that length are on the device, and with KV in 8 bits room for one layer of it decoded. A prefill batch that finds no room in frames, prefix hits included, fits one of them, and with 8 bits every batch does; the others wait. |
| `--kv-cache-dtype TYPE` | `fp8_e4m3` or `fp8_e5m2` stores KV as 8-bit floats, in host memory, frames, dense and window layers ([when](tuning.md#sglangs-fp8)). `auto` and `bf16` store the model's type. Others are refused. |

## Other ways to set them
- A `--config` file takes the same names.
- `sglang.Engine` takes them as keyword arguments: `Engine(model_path=..., kv_retrieval="freekv", freekv_budget=1024)`.
- `sglang serve` takes the flags, but its `--help` does not list them: SGLang prints that before it loads plugins.
"""


def page() -> str:
    """The page, in Markdown."""
    rows = "\n".join(_rows())
    return f"{HEAD.format(about=ABOUT)}\n| flag | meaning |\n|---|---|\n{rows}\n{TAIL.format(page_size=DEFAULTS.page_size)}"


def _rows() -> Iterator[str]:
    for name, flag in FLAGS.items():
        values = flag.arguments.get("metavar") or f"{{{','.join(flag.arguments['choices'])}}}"
        yield f"| `{typed(name)} {values}` | {flag.help.replace('%%', '%')} |"


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m sglang_freekv.launch.flags", description=__doc__.splitlines()[0]).parse_args()
    print(page(), end="")
