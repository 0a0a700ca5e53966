# SPDX-License-Identifier: Apache-2.0
"""Obstacles: the reasons for which a plan does not fit, each with a remedy. Remedies for the whole plan have been computed to fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil, floor

from sglang_freekv.config import GIB, Refusal
from sglang_freekv.launch.finding import Finding, size
from sglang_freekv.launch.plan import CODED, MOST_HOST_SHARE, Plan, most_that
from sglang_freekv.options import NAMES, Options, config_from, with_kv_cache_dtype

SMALLEST = "fast"  # the preset whose digests take the least device memory


def obstacles_of(plan: Plan) -> list[Finding]:
    """Findings that stop the plan; empty if it fits as far as is known.

    Each has the same remedy: the single changes that make the plan fit. If there are none, it is the list of all changes that are needed.
    """
    if plan.fits:
        return []
    found = list(_obstacles(plan))
    cures = list(_cures(plan))
    remedies = [finding.remedy for finding in found if finding.remedy]
    remedy = "; or ".join(cures) if cures else " and ".join(remedies)
    return [Finding(finding.name, finding.value, remedy or None, True, finding.figures) for finding in found]


def _obstacles(plan: Plan) -> Iterator[Finding]:
    """All obstacles, each with a remedy for itself alone."""
    hardware, server, ranks = plan.hardware, plan.question.server, plan.ranks
    count = plan.asked or 1
    work = f"{count} request{'s' * (count > 1)} of {plan.context_len} tokens"
    if hardware.device == "cuda" and hardware.gpus < ranks:
        yield Finding("GPUs", f"--tp-size {ranks} takes {ranks}, and there are {hardware.gpus}", f"`--gpus {ranks}`")
    tokens = count * plan.footprint.tokens
    if plan.most_tokens is not None and plan.most_tokens < tokens:
        yield Finding("--max-total-tokens", f"{plan.most_tokens}, and {work} are {tokens}", f"`--max-total-tokens {tokens}`")
    if server.max_running_requests is not None and server.max_running_requests < count:
        value = f"{server.max_running_requests}, and {count} requests are asked for"
        yield Finding("--max-running-requests", value, f"`--max-running-requests {count}`")
    needed, weights, room = plan.needed_device_bytes, plan.weight_bytes, plan.device_bytes
    if room is not None and room < needed:
        yield _device_obstacle(plan, work, needed, weights, room)
    if plan.host_bytes is not None and plan.host_bytes < plan.needed_host_bytes:
        yield _host_obstacle(plan, work)
    elif not plan.pools_fit_the_host:
        taken, there = size(plan.host_bytes * ranks), size(hardware.host_bytes)
        value = f"{_ranks(ranks)} with --freekv-host-memory {plan.host_gib:g} take {taken}, and {there} are there"
        yield Finding("host memory", value, f"`--freekv-host-memory {floor(hardware.host_bytes / ranks / GIB * 10) / 10:g}`")


def _device_obstacle(plan: Plan, work: str, needed: int, weights: int, room: int) -> Finding:
    memory = plan.hardware.gpu_bytes if plan.hardware.device == "cuda" else plan.hardware.host_bytes
    larger = f"{size((needed + weights) / plan.static_share)} of {'GPU' if plan.hardware.device == 'cuda' else 'host'} memory a rank"
    share = f"the {plan.static_share:g} of {size(memory)} that --mem-fraction-static gives"
    figures = {"needed_bytes": needed, "weight_bytes": weights, "left_bytes": max(0, room)}
    if room <= 0:
        return Finding(
            "room for weights",
            f"they take {size(weights)} a rank, and {share} is {size(memory * plan.static_share)}",
            larger,
            figures=figures,
        )
    value = f"{work} take {size(needed)} a rank, and weights leave {size(room)} of {share}"
    return Finding("device memory", value, larger, figures=figures)


def _host_obstacle(plan: Plan, work: str) -> Finding:
    all_needed = plan.needed_host_bytes * plan.ranks
    figures = {"needed_bytes": all_needed, "host_pool_bytes": plan.host_bytes * plan.ranks}
    value = (
        f"{work} take {size(all_needed)} of host memory, and the host pool of {_ranks(plan.ranks)} has {size(plan.host_bytes * plan.ranks)}"
    )
    if plan.config.host_memory_gib is not None:
        return Finding("host memory", value, f"`--freekv-host-memory {ceil(plan.needed_host_bytes / GIB * 10) / 10:g}`", figures=figures)
    return Finding("host memory", value, f"{size(all_needed / MOST_HOST_SHARE)} of host memory", figures=figures)


def _cures(plan: Plan) -> Iterator[str]:
    """Single changes with which the whole plan fits, as flags or in words."""
    if (plan.asked or 1) > 1 and (fewer := _with_fewer_requests(plan)):
        yield f"`--requests {fewer.requests}`"
    if shorter := _with_shorter_context(plan):
        yield f"`--context-length {shorter.context_len}`"
    if more := _with_more_ranks(plan):
        yield f"`--tp-size {more.ranks}` on {more.ranks} GPUs"
    if pool := _with_another_pool(plan):
        yield f"`--freekv-host-memory {pool.host_gib:g}`"
    elif host := _with_more_host_memory(plan):
        yield f"{size(host.hardware.host_bytes)} of host memory"
    if _with_smallest_preset(plan):
        yield f"`--freekv-preset {SMALLEST}`"
    if (codes := plan.with_codes()) and codes.fits:
        yield f"`--freekv-kv-dtype {CODED}`"
    if smaller := _with_smaller_weights(plan):
        bits = "8" if smaller.weight_share == 0.5 else "4"
        yield f"a checkpoint in {bits} bits"


def _with_fewer_requests(plan: Plan) -> Plan | None:
    """The plan with as many requests as fit; None if not one fits."""
    fitting = most_that((plan.asked or 1) - 1, plan.can_serve)
    return replace(plan, asked=fitting) if fitting else None


def _with_shorter_context(plan: Plan) -> Plan | None:
    """The plan with the longest context that fits, in whole pages; None if none does."""
    page = plan.config.page_size
    least = plan.config.budget_tokens // page - 1  # a context shorter than the budget needs no retrieval
    most = (plan.context_len - 1) // page - least
    fitting = most_that(most, lambda count: replace(plan, context_len=(least + count) * page).fits) if most > 0 else 0
    return replace(plan, context_len=(least + fitting) * page) if fitting else None


def _with_more_ranks(plan: Plan) -> Plan | None:
    """The plan on more GPUs of the same kind, as few as fit, with the same host memory; None if up to 16 times as many do not."""
    for ranks in (plan.ranks << shift for shift in range(1, 5)):
        if plan.model.fits_ranks(ranks) and plan.on_gpu:
            other = replace(plan, ranks=ranks, hardware=replace(plan.hardware, gpus=max(ranks, plan.hardware.gpus)))
            if other.fits:
                return other
    return None


def _with_another_pool(plan: Plan) -> Plan | None:
    """The plan with a host pool of the needed size; None if the user gave no size, or if it does not fit then."""
    if plan.config.host_memory_gib is None:
        return None
    gib = ceil(plan.needed_host_bytes / GIB * 10) / 10
    other = _with_pool(plan, gib)
    return other if other.fits else None


def _with_pool(plan: Plan, gib: float | None) -> Plan:
    return replace(plan, question=replace(plan.question, config=replace(plan.config, host_memory_gib=gib)))


def _with_more_host_memory(plan: Plan) -> Plan | None:
    """The plan on a machine with enough host memory for its requests; None if it does not fit then."""
    if plan.hardware.host_bytes is None:
        return None
    needed = ceil(plan.needed_host_bytes * plan.ranks / MOST_HOST_SHARE / GIB + 1) * GIB
    other = replace(_with_pool(plan, None), hardware=replace(plan.hardware, host_bytes=max(needed, plan.hardware.host_bytes)))
    return other if other.fits else None


def _with_smallest_preset(plan: Plan) -> Plan | None:
    """The plan with the smallest preset and the flags that were given; None if these exclude it, or if it does not fit then."""
    given = {flag: value for flag, value in plan.question.typed.items() if flag in NAMES}
    try:
        asked = Options(**given | {"kv_retrieval": plan.config.method, "freekv_preset": SMALLEST})
        config = with_kv_cache_dtype(config_from(asked, plan.question.server.page_size), plan.question.server.kv_cache_dtype)
    except Refusal:
        return None
    other = replace(plan, question=replace(plan.question, config=config))
    return other if other.fits else None


def _with_smaller_weights(plan: Plan) -> Plan | None:
    """The plan with a checkpoint in 8 bits, else in about 4.5. None if neither fits, or if this checkpoint is quantised already."""
    if plan.model.config.quantization is None and plan.on_gpu:
        for share in (8 / 16, 4.5 / 16):
            if (other := replace(plan, weight_share=share)).fits:
                return other
    return None


def _ranks(ranks: int) -> str:
    return f"{ranks} ranks" if ranks > 1 else "one rank"
