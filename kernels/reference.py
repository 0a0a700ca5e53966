# SPDX-License-Identifier: Apache-2.0
"""PyTorch specification of every kernel. On a CPU these functions are the kernels.

Letters of a batch: B requests, T tokens, P pages of the longest context, H kv heads, G query heads of a kv head (Hq = H * G), D head_dim.
Letters of the pools: S tokens of a page, F frames, R rows, C slots of a row, A pages attended to in one step. N and M are lengths of lists.
Integer tensors may have any width, and -1 in them means none.

Layouts (paper section 4.2): the device cache is NHD, ``[F, S, H, D]`` for keys and for values; the host pool is HND,
``[n_page, H, 2, S, D]``. A unit, which is one (page, kv head), is therefore contiguous: its keys, then its values.

Row 0 is padding, and a request of that row is a padding request. Kernels skip it, and its attention output is zero.
"""

from sglang_freekv.kernels.candidates import Pooling
from sglang_freekv.kernels.reference_attention import (
    add_learned_sinks,
    allocate_shares,
    attend_pages,
    attend_present,
    attend_rest,
    extend_attention,
    merge_shares,
)
from sglang_freekv.kernels.reference_checksums import SPREAD, checksum_pages, verify_units
from sglang_freekv.kernels.reference_codes import decode_tokens
from sglang_freekv.kernels.reference_digests import Box, digest_pages, digest_two_bit, score_pages, score_two_bit
from sglang_freekv.kernels.reference_frames import (
    begin_pages,
    forget_pages,
    hold_pages,
    lend_slots,
    mark_pages,
    note_rows,
    take_in_hand,
)
from sglang_freekv.kernels.reference_movers import (
    fill_frames,
    fill_pages,
    offload_pages,
    recall_pages,
    snapshot_pages,
    stage_layers,
    stage_pages,
)
from sglang_freekv.kernels.reference_plan import (
    CORRECTED,
    HITS,
    RECALLED,
    needs_correction,
    plan_pages,
    plan_rest,
    seed_slots,
    select_pages,
)
from sglang_freekv.kernels.reference_rotation import rotate, unrotated_keys
from sglang_freekv.kernels.reference_stamps import settle_stamps, write_stamp
from sglang_freekv.kernels.reference_tokens import append_tokens, write_tokens

__all__ = [
    "add_learned_sinks",
    "allocate_shares",
    "append_tokens",
    "attend_pages",
    "attend_present",
    "attend_rest",
    "begin_pages",
    "Box",
    "checksum_pages",
    "CORRECTED",
    "decode_tokens",
    "digest_pages",
    "digest_two_bit",
    "extend_attention",
    "fill_frames",
    "fill_pages",
    "forget_pages",
    "HITS",
    "hold_pages",
    "lend_slots",
    "mark_pages",
    "merge_shares",
    "needs_correction",
    "note_rows",
    "offload_pages",
    "plan_pages",
    "plan_rest",
    "Pooling",
    "recall_pages",
    "RECALLED",
    "rotate",
    "score_pages",
    "score_two_bit",
    "seed_slots",
    "select_pages",
    "settle_stamps",
    "snapshot_pages",
    "SPREAD",
    "stage_layers",
    "stage_pages",
    "take_in_hand",
    "unrotated_keys",
    "verify_units",
    "write_stamp",
    "write_tokens",
]
