# SPDX-License-Identifier: Apache-2.0
"""Keeps the pages of a retracted request in the radix tree."""

from __future__ import annotations

from sglang.srt.environ import envs
from sglang.srt.mem_cache.common import evict_from_tree_cache, release_kv_cache

from sglang_freekv import releases

INTO_TREE = {"checkpoint": True} if releases.has("checkpoint") else {}


def keep_pages(batch, idx: int, remaing_req_count: int, *args, **kwargs) -> bool:
    """REPLACE the release of a retracted request: its full pages go to the radix tree, like those of a finished request.

    The tree evicts them when host pages are short, least recently used first. Pages that remain are a prefix hit when the request resumes.
    SGLang would free them at once, and compute prompt and output anew.

    Returns:
        True: the request can be resumed.
    """
    req, tree = batch.reqs[idx], batch.tree_cache
    if tree.supports_mamba():
        _keep_up_to_state(req, tree)
    else:
        release_kv_cache(req, tree, **INTO_TREE)
    evict_from_tree_cache(tree, remaing_req_count * envs.SGLANG_RETRACT_DECODE_STEPS.get())
    req.reset_for_retract()
    return True


def insert_again(_, req) -> None:
    """AFTER a request is reset for its retraction: let the tree have what it computes anew, also if the quarantine has ended it.

    It resumes to say that it has ended. SGLang 0.5.17 does not get past a chunk that is not inserted, and keeps requests out of the tree
    for disaggregation alone, which is refused.
    """
    req.skip_radix_cache_insert = False


def _keep_up_to_state(req, tree) -> None:
    """Release a request with linear attention: the tree keeps its pages up to the last state that a step has left for it.

    SGLang hands a finished request's state over, and asserts that it is finished. A running one's is forked.
    """
    if not req.skip_radix_cache_insert:
        req.refresh_fill_ids()  # they lag behind the output
        tree.checkpoint(req, up_to=req.owned_kv_len())
    release_kv_cache(req, tree, checkpoint=False)
