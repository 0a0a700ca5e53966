# SPDX-License-Identifier: Apache-2.0
"""PyTorch specification of every kernel; on CPU these are the kernels.

Letters: B requests, H kv heads, G query heads of a kv head (Hq = H * G), D head_dim, S tokens of a page, R rows, C slots of a row,
A pages attended to in one step, P pages of the longest context, K selected pages, T tokens. Integers may be of any width; -1 means none.

Layouts (paper section 4.2): the device cache is NHD, ``[R * C, S, H, D]`` for keys and for values; the host pool is HND,
``[n_page, H, 2, S, D]``, so that one (page, kv head) is one contiguous unit of keys then values.

Row 0 is padding: requests of that row are passed over, and their attention output is zero.
"""

from sglang_freekv.kernels.reference_attention import (
    allocate_shares,
    attend_pages,
    attend_present,
    attend_rest,
    extend_attention,
    merge_shares,
)
from sglang_freekv.kernels.reference_checksums import SPREAD, checksum_pages, verify_units
from sglang_freekv.kernels.reference_digests import Box, digest_pages, digest_two_bit, score_pages, score_two_bit
from sglang_freekv.kernels.reference_movers import append_tokens, fill_pages, offload_pages, recall_pages, snapshot_pages, stage_pages
from sglang_freekv.kernels.reference_plan import (
    CORRECTED,
    HITS,
    RECALLED,
    Pooling,
    needs_correction,
    plan_pages,
    plan_rest,
    seed_slots,
    select_pages,
)

__all__ = [
    "allocate_shares",
    "append_tokens",
    "attend_pages",
    "attend_present",
    "attend_rest",
    "Box",
    "checksum_pages",
    "CORRECTED",
    "digest_pages",
    "digest_two_bit",
    "extend_attention",
    "fill_pages",
    "HITS",
    "merge_shares",
    "needs_correction",
    "offload_pages",
    "plan_pages",
    "plan_rest",
    "Pooling",
    "recall_pages",
    "RECALLED",
    "score_pages",
    "score_two_bit",
    "seed_slots",
    "select_pages",
    "snapshot_pages",
    "SPREAD",
    "stage_pages",
    "verify_units",
]
