# SPDX-License-Identifier: Apache-2.0
"""What the options mean for SGLang: refused, completed to a FreeKVConfig, and the settings of SGLang that go with it."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from sglang.srt.environ import envs

from sglang_freekv import releases, scheduler_patch
from sglang_freekv.config import BACKEND_NAME, GIB, FreeKVConfig, Refusal, typed
from sglang_freekv.flag import PAGE
from sglang_freekv.memory_pool import host_memory
from sglang_freekv.options import NAMES, Options, config_from, with_kv_cache_dtype
from sglang_freekv.scheduler_patch import cpu, refusals, refused_flags, registry, trees

logger = logging.getLogger(__name__)


def refuse_idle(options: Options) -> None:
    """Raise a Refusal if an option has been given that means nothing without KV retrieval."""
    for name in NAMES[1:]:
        if getattr(options, name) is not None:
            raise Refusal(f"{typed(name)}: it has no effect without --kv-retrieval freekv; add that, or leave it out")


def refuse_untested(method: str) -> None:
    """Raise a Refusal of a release of SGLang that was not tested, though all hooks may fit it."""
    if not releases.is_tested():
        tested = " or ".join(releases.TESTED)
        raise Refusal(f"--kv-retrieval {method}: expected SGLang {tested}, which were tested, found {releases.INSTALLED}; use one of them")


def refuse_other_server(method: str) -> None:
    """Raise a Refusal of SGLang's server in Rust, which takes requests past the checks of ``fields.py`` and ``controls.py``."""
    if envs.SGLANG_RUST_SERVER.get():
        raise Refusal(
            f"SGLANG_RUST_SERVER: expected it unset with --kv-retrieval {method}, because that server takes requests past the checks that "
            "keep the engine alive; unset it, or use --kv-retrieval none"
        )


def prepare(options: Options, asked: SimpleNamespace) -> tuple[FreeKVConfig, dict[str, Any]]:
    """Check the options without the model, and prepare this process.

    Args:
        options: FreeKV's options.
        asked: all options of ServerArgs: the user's, else SGLang's defaults.

    Returns:
        The config, and the options of SGLang that it needs.

    Raises:
        Refusal: FreeKV does not serve an option or a combination of options, or SGLang is not what the hooks were written for.
    """
    refuse_untested(method=options.kv_retrieval)
    refuse_other_server(method=options.kv_retrieval)
    asked.device = cpu.usable_device(asked.device)
    page_size = None if asked.page_size is None else PAGE.read("page_size", asked.page_size)
    config = config_from(options, page_size)
    refused_flags.refuse_flags(asked)
    config = with_kv_cache_dtype(config, asked.kv_cache_dtype)
    _warn_of_tau(config)
    config = _with_host_memory(config, asked)
    settings = {"device": asked.device, "page_size": config.page_size, "attention_backend": BACKEND_NAME}
    if asked.device == "cpu":
        settings |= _prepare_cpu(config, asked)
    if asked.device == "cpu" or config.recall == "copy-engine":  # the host reads the list of missing units, then issues the copies
        if asked.cuda_graph_backend_decode == "full":
            raise Refusal(
                "--cuda-graph-backend-decode full: there is no decode graph with --device cpu or --freekv-recall copy-engine; leave it "
                "out, or use --device cuda and --freekv-recall zero-copy"
            )
        settings["disable_decode_cuda_graph"] = True
    if config.canary != "off" and trees.UNIFIED and not asked.disable_radix_cache:
        settings["radix_cache_backend"] = BACKEND_NAME
    registry.check(scheduler_patch.launcher(asked.device) + scheduler_patch.scheduler(asked.device))
    return config, settings


def _warn_of_tau(config: FreeKVConfig) -> None:
    """Warn of thresholds that no cosine crosses."""
    above, below = "above every cosine: every kv head is corrected in every step", "below every cosine: no kv head is corrected"
    if config.tau_by_layer is None:
        taus = {"--freekv-tau": config.tau}
    else:
        by_layer = enumerate(config.tau_by_layer.taus)
        taus = {f"--freekv-tau-by-layer {config.tau_by_layer.file}: layer {layer}, whose threshold": tau for layer, tau in by_layer}
    for name, tau in taus.items():
        if tau is not None and abs(tau) > 1:
            logger.warning("%s %g is %s; 0.9 suits long generation", name, tau, above if tau > 1 else below)


def _prepare_cpu(config: FreeKVConfig, asked: SimpleNamespace) -> dict[str, Any]:
    if config.recall_timing:
        raise Refusal(
            f"--freekv-recall-timing {config.recall_timing}: expected 0 with --device cpu, which recalls and computes in turn; leave it out"
        )
    if asked.cuda_graph_backend_prefill == "breakable":
        raise Refusal(
            "--cuda-graph-backend-prefill breakable: there is no prefill graph with --device cpu; leave it out, or use --device cuda"
        )
    cpu.prepare_process()
    settings: dict[str, Any] = {"disable_prefill_cuda_graph": True}
    if asked.moe_runner_backend == "auto":
        settings["moe_runner_backend"] = "triton"  # for gpt-oss SGLang would choose kernels that no CPU runs
    if asked.grammar_backend is None:
        settings["grammar_backend"] = "llguidance"  # SGLang's default, xgrammar, masks on GPUs only
    return settings


def _with_host_memory(config: FreeKVConfig, asked: SimpleNamespace) -> FreeKVConfig:
    """``config`` with its host memory set, here and once for all ranks of this machine, before any of them allocates.

    Raises:
        Refusal: the host's memory does not suffice.
    """
    ranks = max(1, asked.tp_size * asked.dp_size // asked.nnodes)
    room = host_memory.room()
    if config.host_memory_gib is None:
        share = host_memory.default_host_pool_bytes(room.num_bytes, ranks, asked.device)
        if share < host_memory.LEAST_BYTES:
            raise Refusal(
                f"--kv-retrieval {config.method}: {room.bound} has {room.num_bytes / GIB:.2f} GiB of host memory left, too little for the "
                f"KV of {ranks} rank(s); {room.remedy}, or set --freekv-host-memory"
            )
        return replace(config, host_memory_gib=share / GIB)
    refusals.refuse_host_memory(config.host_memory_gib, ranks, room)
    return config
