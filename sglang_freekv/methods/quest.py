# SPDX-License-Identifier: Apache-2.0
"""Quest (ICML 2024): each step selects with its own query, by the min-max box of a page.

Its paper selects for each query head. Here the heads of a group share one selection, by the maximum of their scores.
"""

from sglang_freekv.methods.method import Method

METHOD = Method(
    name="quest",
    paper="https://arxiv.org/abs/2406.10774",
    about="selects with the query of each step, which then waits for its pages",
    tau=None,
    digest="min-max",
    pooling="max",
)
