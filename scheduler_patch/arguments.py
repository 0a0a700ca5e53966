# SPDX-License-Identifier: Apache-2.0
"""The options of KV retrieval in ServerArgs: parsed, checked, completed, and handed to the schedulers."""

from __future__ import annotations

import argparse
import logging
import sys
from contextvars import ContextVar
from dataclasses import MISSING, fields, replace
from types import SimpleNamespace
from typing import Any, NoReturn

from sglang.srt.server_args import ServerArgs

from sglang_freekv.architectures import TESTED_ARCHITECTURES
from sglang_freekv.config import BACKEND_NAME, DEFAULT_PAGE_SIZE, GIB, FreeKVConfig, Refusal, typed
from sglang_freekv.flag import TOKENS
from sglang_freekv.memory_pool import host_memory
from sglang_freekv.options import ABOUT, FLAGS, NAMES, Options, config_from
from sglang_freekv.scheduler_patch import cpu, refusals

logger = logging.getLogger(__name__)

_command_line: ContextVar[Options] = ContextVar("freekv_command_line", default=Options())


def add_cli_args(_, parser: argparse.ArgumentParser) -> None:
    """AFTER SGLang has added its flags: add FreeKV's, in a group of their own."""
    group = parser.add_argument_group("KV retrieval (FreeKV)", ABOUT)
    for name, flag in FLAGS.items():
        group.add_argument(typed(name), **flag.arguments)


def from_cli_args(original, cls, namespace: argparse.Namespace) -> ServerArgs:
    """AROUND the making of ServerArgs from a command line: hand the flags to :func:`init`, and print a refusal as one line."""
    token = _command_line.set(Options(**{name: getattr(namespace, name, None) for name in NAMES}))
    try:
        return original(cls, namespace)
    except Refusal as refusal:
        end_with(refusal)
    finally:
        _command_line.reset(token)


def end_with(refusal: Refusal) -> NoReturn:
    """End a program that reads a command line. The refusal is the last line that it prints; its exit status is 2."""
    logging.disable(logging.INFO)  # `sglang serve` would log its end behind the refusal
    print(f"error: {refusal}", file=sys.stderr, flush=True)
    raise SystemExit(2) from None


def init(original, self: ServerArgs, *args, **kwargs) -> None:
    """AROUND the making of ServerArgs: take FreeKV's keyword arguments too, and keep their FreeKVConfig as ``_freekv``.

    Raises:
        Refusal: FreeKV does not serve an option, a combination of options, or the model.
    """
    options = _take_options(kwargs)
    if options.kv_retrieval in (None, "none"):
        _refuse_idle_options(options, kwargs)
        original(self, *args, **kwargs)
        return
    kwargs.update(zip((field.name for field in fields(ServerArgs)), args))
    config = _prepare(options, kwargs)
    try:
        original(self, **kwargs)
    except Exception as error:  # for some models SGLang insists on an attention backend
        if "model_config" in vars(self):
            refusals.refuse_model(self.model_config, config.method)
        if BACKEND_NAME in str(error):  # the error lists the backends that this model needs
            reason = f"SGLang does not serve this model so ({error})"
            raise Refusal(f"--kv-retrieval {config.method}: {reason}; use --kv-retrieval none") from None
        raise
    if self.model_path.lower() not in ("none", "dummy"):  # SGLang resolves nothing for these
        refusals.refuse_model(self.get_model_config(), config.method)
        refusals.refuse_resolved(self, config)
        refusals.refuse_small_pool(self, config)
        _warn_of_untested(self.get_model_config().hf_config.architectures[0])
    object.__setattr__(self, "_freekv", config)


def _warn_of_untested(architecture: str) -> None:
    if architecture not in TESTED_ARCHITECTURES:
        logger.warning("%s has not been tested with KV retrieval; compare its answers with those of --kv-retrieval none", architecture)


def _take_options(kwargs: dict) -> Options:
    """FreeKV's options, from the command line and from ``kwargs``. They are removed from ``kwargs``."""
    return replace(_command_line.get(), **{name: kwargs.pop(name) for name in NAMES if name in kwargs})


def _refuse_idle_options(options: Options, kwargs: dict) -> None:
    for name in NAMES[1:]:
        if getattr(options, name) is not None:
            raise Refusal(f"{typed(name)}: it has no effect without --kv-retrieval freekv; add that, or leave it out")
    if kwargs.get("attention_backend") == BACKEND_NAME:
        raise Refusal(
            "--attention-backend freekv: it is part of --kv-retrieval, which is not given; use that flag "
            "(a copy of ServerArgs made field by field loses it)"
        )


def _prepare(options: Options, kwargs: dict) -> FreeKVConfig:
    """Check the options without the model, set the options of SGLang that FreeKV needs, and prepare this process.

    Args:
        options: FreeKV's options.
        kwargs: ServerArgs' options, which are updated in place.

    Raises:
        Refusal: FreeKV does not serve an option or a combination of options.
    """
    asked = SimpleNamespace(**{field.name: _default(field) for field in fields(ServerArgs)} | kwargs)
    asked.device = cpu.usable_device(asked.device)
    page_size = DEFAULT_PAGE_SIZE if asked.page_size is None else TOKENS.read("page_size", asked.page_size)
    config = config_from(options, page_size)
    refusals.refuse_flags(asked)
    if config.tau is not None and abs(config.tau) > 1:
        above, below = "above every cosine: every kv head is corrected in every step", "below every cosine: no kv head is corrected"
        logger.warning("--freekv-tau %g is %s; 0.9 suits long generation", config.tau, above if config.tau > 1 else below)
    config = _with_host_memory(config, asked)
    if asked.device == "cpu":
        if config.recall_timing:
            raise Refusal(
                f"--freekv-recall-timing {config.recall_timing}: expected 0 with --device cpu, which recalls and computes in turn; "
                "leave it out"
            )
        cpu.prepare_process()
        if asked.grammar_backend is None:
            kwargs["grammar_backend"] = "llguidance"  # SGLang's default, xgrammar, masks logits on GPUs only
    kwargs.update(device=asked.device, page_size=page_size, attention_backend=BACKEND_NAME, disable_prefill_cuda_graph=True)
    if asked.device == "cpu" or config.recall == "copy-engine":  # the host reads the list of missing units, then issues the copies
        if asked.cuda_graph_backend_decode == "full":
            raise Refusal(
                "--cuda-graph-backend-decode full: there is no decode graph with --device cpu or --freekv-recall copy-engine; leave it "
                "out, or use --device cuda and --freekv-recall zero-copy"
            )
        kwargs.update(disable_decode_cuda_graph=True)
    return config


def _default(field) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


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
