# SPDX-License-Identifier: Apache-2.0
"""What becomes of the pages of a retracted request."""

from __future__ import annotations

from sglang.srt.environ import envs
from sglang.srt.mem_cache.common import evict_from_tree_cache, release_kv_cache


def keep_pages(batch, idx: int, remaing_req_count: int, server_args) -> None:
    """REPLACE the release of a retracted request: as those of a finished one, its full pages go to the radix tree.

    There they are free to whoever is short of host pages, least recently used first; those left when the request resumes are a prefix
    hit. SGLang frees them at once, and computes prompt and output anew.
    """
    req = batch.reqs[idx]
    release_kv_cache(req, batch.tree_cache)
    evict_from_tree_cache(batch.tree_cache, remaing_req_count * envs.SGLANG_RETRACT_DECODE_STEPS.get())
    req.reset_for_retract()
