"""One trial for each kernel: its inputs, the check against its reference, and the launches to be timed."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks import code_trials as codes
from benchmarks import compute_trials as compute
from benchmarks import mover_trials as movers
from benchmarks.kernel_inputs import Inputs
from benchmarks.trial import Trial

KERNELS: dict[str, Callable[[Inputs], Trial]] = {
    "append_tokens": movers.append_tokens,
    "needs_correction": compute.needs_correction,
    "score_pages": compute.score_pages,
    "score_two_bit": compute.score_two_bit,
    "plan_pages": compute.plan_pages,
    "plan_pages-late": lambda inputs: compute.plan_pages(inputs, ahead_first=False),
    "plan_rest": compute.plan_rest,
    "plan_rest-late": lambda inputs: compute.plan_rest(inputs, ahead_first=False),
    "attend_pages": lambda inputs: compute.attend_pages(inputs, in_two=False),
    "attend_pages-in-two": lambda inputs: compute.attend_pages(inputs, in_two=True),
    "add_learned_sinks-chunk": compute.add_learned_sinks,
    "recall_pages": movers.recall_pages,
    "digest_pages-decode": lambda inputs: movers.digest_pages(inputs, chunk=False),
    "digest_pages-chunk": lambda inputs: movers.digest_pages(inputs, chunk=True),
    "digest_two_bit-chunk": movers.digest_two_bit,
    "offload_pages-decode": lambda inputs: movers.offload_pages(inputs, chunk=False),
    "offload_pages-chunk": lambda inputs: movers.offload_pages(inputs, chunk=True),
    "stage_pages": movers.stage_pages,
    "fill_pages": movers.fill_pages,
    "seed_slots": compute.seed_slots,
    "snapshot_pages": movers.snapshot_pages,
    "rotate-decode": lambda inputs: codes.rotate(inputs, chunk=False),
    "rotate-chunk": lambda inputs: codes.rotate(inputs, chunk=True),
    "append_tokens-int8": codes.append_tokens,
    "decode_tokens": codes.decode_tokens,
    "unrotated_keys-decode": lambda inputs: codes.unrotated_keys(inputs, chunk=False),
    "unrotated_keys-chunk": lambda inputs: codes.unrotated_keys(inputs, chunk=True),
}
