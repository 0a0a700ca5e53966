# SPDX-License-Identifier: Apache-2.0
"""The kernels. A Triton kernel runs on a GPU; the PyTorch reference that specifies it runs on a CPU."""

if __name__ == "kernels":  # the checkout root is on sys.path, and the caller wants Hugging Face's `kernels`
    from ._shadow import hand_over

    hand_over()
else:
    from sglang_freekv.kernels.candidates import Candidates, Pooling, Tables
    from sglang_freekv.kernels.dispatch import by_device
    from sglang_freekv.kernels.misses import Misses
    from sglang_freekv.kernels.reads import Reads
    from sglang_freekv.kernels.reference import CORRECTED, HITS, RECALLED, Box

    allocate_shares = by_device("attend", "allocate_shares")
    append_tokens = by_device("append", "append_tokens")
    attend_pages = by_device("attend", "attend_pages")
    attend_present = by_device("attend", "attend_present")
    attend_rest = by_device("attend", "attend_rest")
    checksum_pages = by_device("checksum", "checksum_pages")
    digest_pages = by_device("digest", "digest_pages")
    digest_two_bit = by_device("two_bit", "digest_two_bit")
    fill_pages = by_device("fill", "fill_pages")
    merge_shares = by_device("attend", "merge_shares")
    needs_correction = by_device("correction", "needs_correction")
    offload_pages = by_device("offload", "offload_pages")
    plan_pages = by_device("plan", "plan_pages")
    plan_rest = by_device("plan", "plan_rest")
    recall_pages = by_device("recall", "recall_pages")
    score_pages = by_device("score", "score_pages")
    score_two_bit = by_device("two_bit", "score_two_bit")
    seed_slots = by_device("seed", "seed_slots")
    settle_stamps = by_device("stamps", "settle_stamps")
    snapshot_pages = by_device("page_table", "snapshot_pages")
    stage_pages = by_device("stage", "stage_pages")
    verify_units = by_device("checksum", "verify_units")
    write_stamp = by_device("stamps", "write_stamp")

    __all__ = [
        "Box",
        "CORRECTED",
        "Candidates",
        "HITS",
        "Misses",
        "Pooling",
        "RECALLED",
        "Reads",
        "Tables",
        "allocate_shares",
        "append_tokens",
        "attend_pages",
        "attend_present",
        "attend_rest",
        "checksum_pages",
        "digest_pages",
        "digest_two_bit",
        "fill_pages",
        "merge_shares",
        "needs_correction",
        "offload_pages",
        "plan_pages",
        "plan_rest",
        "recall_pages",
        "score_pages",
        "score_two_bit",
        "seed_slots",
        "settle_stamps",
        "snapshot_pages",
        "stage_pages",
        "verify_units",
        "write_stamp",
    ]
