# SPDX-License-Identifier: Apache-2.0
"""The kernels. A Triton kernel runs on a GPU; the PyTorch reference that specifies it, and documents it, runs on a CPU."""

if __name__ == "kernels":  # the checkout root is on sys.path, and the caller wants Hugging Face's `kernels`
    from ._shadow import hand_over

    hand_over()
else:
    from sglang_freekv.kernels import reference
    from sglang_freekv.kernels.candidates import Candidates, Heads, Pooling, Tables, Turn
    from sglang_freekv.kernels.dispatch import by_device
    from sglang_freekv.kernels.frame_tables import FrameTables
    from sglang_freekv.kernels.kv import KV, Scales
    from sglang_freekv.kernels.misses import Misses
    from sglang_freekv.kernels.reads import Reads
    from sglang_freekv.kernels.reference import CORRECTED, HITS, RECALLED, Box
    from sglang_freekv.kernels.staged_layers import StagedLayers
    from sglang_freekv.kernels.units import Units

    add_learned_sinks = by_device(reference.add_learned_sinks, of="outputs")
    allocate_shares = by_device(reference.allocate_shares, of="queries")
    append_tokens = by_device(reference.append_tokens, of="new_keys")
    attend_pages = by_device(reference.attend_pages, of="queries")
    attend_present = by_device(reference.attend_present, of="queries")
    attend_rest = by_device(reference.attend_rest, of="queries")
    begin_pages = by_device(reference.begin_pages, of="tables")
    checksum_pages = by_device(reference.checksum_pages, of="keys")
    decode_tokens = by_device(reference.decode_tokens, of="kv")
    digest_pages = by_device(reference.digest_pages, of="keys")
    digest_two_bit = by_device(reference.digest_two_bit, of="keys")
    fill_frames = by_device(reference.fill_frames, of="source_keys")
    fill_pages = by_device(reference.fill_pages, of="source_keys")
    forget_pages = by_device(reference.forget_pages, of="tables")
    hold_pages = by_device(reference.hold_pages, of="tables")
    lend_slots = by_device(reference.lend_slots, of="tables")
    mark_pages = by_device(reference.mark_pages, of="tables")
    merge_shares = by_device(reference.merge_shares, of="outputs")
    needs_correction = by_device(reference.needs_correction, of="queries")
    note_rows = by_device(reference.note_rows, of="tables")
    offload_pages = by_device(reference.offload_pages, of="keys")
    plan_pages = by_device(reference.plan_pages, of="candidates")
    plan_rest = by_device(reference.plan_rest, of="candidates")
    recall_pages = by_device(reference.recall_pages, of="keys")
    rotate = by_device(reference.rotate, of="queries")
    score_pages = by_device(reference.score_pages, of="queries")
    score_two_bit = by_device(reference.score_two_bit, of="queries")
    seed_slots = by_device(reference.seed_slots, of="candidates")
    settle_stamps = by_device(reference.settle_stamps, of="stamps")
    snapshot_pages = by_device(reference.snapshot_pages, of="page_table")
    stage_layers = by_device(reference.stage_layers, of="host_pages")
    stage_pages = by_device(reference.stage_pages, of="keys")
    take_in_hand = by_device(reference.take_in_hand, of="tables")
    unrotated_keys = by_device(reference.unrotated_keys, of="kv")
    verify_units = by_device(reference.verify_units, of="keys")
    write_stamp = by_device(reference.write_stamp, of="stamp")
    write_tokens = by_device(reference.write_tokens, of="queries")

    __all__ = [
        "Box",
        "CORRECTED",
        "Candidates",
        "FrameTables",
        "HITS",
        "Heads",
        "KV",
        "Misses",
        "Pooling",
        "RECALLED",
        "Reads",
        "Scales",
        "StagedLayers",
        "Tables",
        "Turn",
        "Units",
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
