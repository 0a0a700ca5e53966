# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels. Each has the name and the signature of its reference; more options have a default and a keyword."""

from sglang_freekv.kernels.append import append_tokens
from sglang_freekv.kernels.attend import allocate_shares, attend_pages, attend_present, attend_rest
from sglang_freekv.kernels.checksum import checksum_pages, verify_units
from sglang_freekv.kernels.correction import needs_correction
from sglang_freekv.kernels.decode import decode_tokens, unrotated_keys
from sglang_freekv.kernels.digest import digest_pages
from sglang_freekv.kernels.fill import fill_frames, fill_pages
from sglang_freekv.kernels.frames import begin_pages, take_in_hand
from sglang_freekv.kernels.hold import forget_pages, hold_pages
from sglang_freekv.kernels.learned_sinks import add_learned_sinks
from sglang_freekv.kernels.merge import merge_shares
from sglang_freekv.kernels.offload import offload_pages
from sglang_freekv.kernels.page_table import snapshot_pages
from sglang_freekv.kernels.plan import plan_pages, plan_rest
from sglang_freekv.kernels.recall import recall_pages
from sglang_freekv.kernels.rotation import rotate
from sglang_freekv.kernels.running_rows import lend_slots, mark_pages, note_rows
from sglang_freekv.kernels.score import score_pages
from sglang_freekv.kernels.seed import seed_slots
from sglang_freekv.kernels.stage import stage_layers, stage_pages
from sglang_freekv.kernels.stamps import settle_stamps, write_stamp
from sglang_freekv.kernels.two_bit_digest import digest_two_bit
from sglang_freekv.kernels.two_bit_score import score_two_bit
from sglang_freekv.kernels.write import write_tokens

__all__ = [
    "add_learned_sinks",
    "allocate_shares",
    "append_tokens",
    "attend_pages",
    "attend_present",
    "attend_rest",
    "begin_pages",
    "checksum_pages",
    "decode_tokens",
    "digest_pages",
    "digest_two_bit",
    "fill_frames",
    "fill_pages",
    "forget_pages",
    "hold_pages",
    "lend_slots",
    "mark_pages",
    "merge_shares",
    "needs_correction",
    "note_rows",
    "offload_pages",
    "plan_pages",
    "plan_rest",
    "recall_pages",
    "rotate",
    "score_pages",
    "score_two_bit",
    "seed_slots",
    "settle_stamps",
    "snapshot_pages",
    "stage_layers",
    "stage_pages",
    "take_in_hand",
    "unrotated_keys",
    "verify_units",
    "write_stamp",
    "write_tokens",
]
