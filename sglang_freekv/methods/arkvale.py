# SPDX-License-Identifier: Apache-2.0
"""ArkVale (NeurIPS 2024): each step selects with its own query, by the cuboid around the mean of a page."""

from sglang_freekv.methods.method import Method

METHOD = Method(
    name="arkvale",
    paper="https://openreview.net/forum?id=4oAt5L4lYe",
    about="selects with the query of each step, which then waits for its pages",
    tau=None,
    digest="cuboid-mean",
    pooling="mean",
)
