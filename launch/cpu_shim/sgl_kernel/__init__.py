# SPDX-License-Identifier: Apache-2.0
"""Stands in for `sgl_kernel` where the real one cannot serve `--device cpu`.

SGLang imports functions named `*_cpu` from it when it loads on a CPU, and calls them only for speculative
decoding and MLA. The CUDA build of `sgl_kernel` has none of them and does not load without libcuda.so.1.
The stand-in has those names, and no other, so that every other optional import fails as it does without it.
What models with linear attention call is there, as references: `mamba.py` and `operations.py`.
"""

from sgl_kernel import operations  # noqa: F401, it defines operations of torch


def __getattr__(name):
    if not name.endswith("_cpu"):
        raise AttributeError(f"the CPU stand-in for sgl_kernel has no {name!r}")

    def missing(*args, **kwargs):
        raise RuntimeError(
            f"sgl_kernel.{name} was called, but this is sglang_freekv's stand-in for a machine without the NVIDIA driver; "
            "install SGLang's CPU build of sgl_kernel, or leave out the option that needs this function"
        )

    missing.__name__ = name
    return missing
