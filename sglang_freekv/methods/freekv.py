# SPDX-License-Identifier: Apache-2.0
"""FreeKV (ICLR 2026): selects a step ahead, and corrects the kv heads whose queries are unlike their last ones (section 3.3).

Its paper has min-max digests. Here the default preset says two-bit (``presets.py``). What stands below is for configs that name no preset.
"""

from sglang_freekv.methods.method import Method

METHOD = Method(
    name="freekv",
    paper="https://arxiv.org/abs/2505.13109",
    about="selects pages a step ahead and recalls them beside the computation",
    tau=0.9,
    digest="cuboid-mean",
    pooling="softmax-mean",
)
