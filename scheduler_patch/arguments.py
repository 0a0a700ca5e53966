# SPDX-License-Identifier: Apache-2.0
"""SGLang's ServerArgs: how FreeKV's options get in, how settings are read, and how the config travels. No other file knows its form.

| release | ServerArgs | FreeKV's options are taken by |
|---|---|---|
| before 0.5.20 | a dataclass that resolves its settings where it is made, in place | a hook on ``__init__`` |
| since 0.5.20 | a msgspec Struct that keeps what was typed; settings are read through a view | a hook on each way to make one |
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import MISSING
from dataclasses import fields as dataclass_fields
from types import SimpleNamespace
from typing import Any, NoReturn

from sglang.srt.server_args import ServerArgs

from sglang_freekv import releases
from sglang_freekv.architectures import TESTED_ARCHITECTURES
from sglang_freekv.config import BACKEND_NAME, FreeKVConfig, Refusal, typed
from sglang_freekv.options import ABOUT, FLAGS, NAMES, Options
from sglang_freekv.scheduler_patch import linear_attention, preparation, refusals, registry, states, windows

if APART := releases.has("settings apart"):
    from msgspec import NODEFAULT
    from msgspec.structs import fields as struct_fields
    from sglang.srt.arg_groups.overrides import model_config_of, resolved_view

logger = logging.getLogger(__name__)

MODULE = "sglang.srt.server_args"
OFF = (None, "none")
CONFIG, LAUNCHED = CARRIED = "_freekv", "_freekv_launched"  # attributes of ServerArgs that travel to the schedulers

_command_line: ContextVar[Options] = ContextVar("freekv_command_line", default=Options())
_typed: list[str] = []  # the method that a command line asks for, until it is handed on
_drift: list[registry.Drift] = []


def refuse_all(drift: registry.Drift) -> None:
    """From now on refuse whoever asks for KV retrieval, because SGLang is not what the hooks were written for."""
    _drift.append(drift)


def defaults() -> dict[str, Any]:
    """Names and defaults of SGLang's options, in the order of ServerArgs' positional arguments; None for one without a default."""
    fields, missing = (struct_fields(ServerArgs), NODEFAULT) if APART else (dataclass_fields(ServerArgs), MISSING)
    return {
        field.name: field.default_factory() if field.default_factory is not missing  # type: ignore[operator]
        else None if field.default is missing else field.default
        for field in fields
    }  # fmt: skip


def config_of(server_args) -> FreeKVConfig | None:
    """The config of an engine with KV retrieval; None without.

    Raises:
        Drift: the command line asks for KV retrieval, but SGLang made ServerArgs of it without calling our hooks.
    """
    config = getattr(server_args, CONFIG, None)
    if config is None and _typed:
        raise registry.drift(f"{MODULE}.ServerArgs.from_cli_args", f"did not hand --kv-retrieval {_typed[-1]} on")
    return config


def mark_launched(server_args) -> None:
    """Note for the schedulers that the launcher's hooks are attached."""
    vars(server_args)[LAUNCHED] = True


def was_launched(server_args) -> bool:
    return LAUNCHED in vars(server_args)


def resolved(server_args):
    """SGLang's options with all that it has filled in or changed, as attributes."""
    return resolved_view(server_args) if APART else server_args


def model_config(server_args):
    """SGLang's ModelConfig."""
    return model_config_of(server_args) if APART else server_args.get_model_config()


def add_cli_args(_, parser: argparse.ArgumentParser) -> None:
    """AFTER SGLang has added its flags: add FreeKV's, in a group of their own."""
    group = parser.add_argument_group("KV retrieval (FreeKV)", ABOUT)
    _typed.clear()
    for name, flag in FLAGS.items():
        group.add_argument(typed(name), **flag.arguments, action=_Note)


class _Note(argparse._StoreAction):  # SGLang takes no other class from a --config file
    """Stores an option, and notes that KV retrieval is asked for, so that no hook that SGLang does not call lets that be forgotten."""

    def __call__(self, parser, namespace, value, option_string=None) -> None:
        super().__call__(parser, namespace, value, option_string)
        if self.dest == "kv_retrieval" and value not in OFF:
            _typed.append(value)
        if _drift and (self.dest != "kv_retrieval" or value not in OFF):
            end_with(_drift[0])


def from_cli_args(original, cls, namespace: argparse.Namespace) -> ServerArgs:
    """AROUND the making of ServerArgs from a command line: take the flags, and print a refusal as one line."""
    options = Options(**{name: getattr(namespace, name, None) for name in NAMES})
    _typed.clear()
    token = _command_line.set(options)
    try:
        if APART:
            server_args = _make(options, vars(namespace), lambda settings: original(cls, _with(namespace, settings)))
        else:
            server_args = original(cls, namespace)
        if options.kv_retrieval not in OFF and config_of(server_args) is None:
            raise registry.drift(f"{MODULE}.ServerArgs", f"was made without taking --kv-retrieval {options.kv_retrieval}")
        return server_args
    except Refusal as refusal:
        end_with(refusal)
    finally:
        _command_line.reset(token)


def _with(namespace: argparse.Namespace, settings: dict[str, Any]) -> argparse.Namespace:
    return argparse.Namespace(**vars(namespace) | settings)


def end_with(refusal: Refusal) -> NoReturn:
    """End a program that reads a command line. The refusal is the last line that it prints; its exit status is 2."""
    logging.disable(logging.INFO)  # `sglang serve` would log its end behind the refusal
    print(f"error: {refusal}", file=sys.stderr, flush=True)
    raise SystemExit(2) from None


def init(original, self: ServerArgs, *args, **kwargs) -> None:
    """AROUND the making of ServerArgs: take FreeKV's keyword arguments too, and leave their FreeKVConfig on it.

    Raises:
        Refusal: FreeKV does not serve an option, a combination of options, or the model.
    """
    options = _take_options(kwargs)
    kwargs = dict(zip(defaults(), args)) | kwargs
    if _is_off(options, kwargs):
        original(self, **kwargs)
        return
    config, settings = _prepare(options, kwargs)
    _resolve(self, config, settings["device"], lambda: original(self, **kwargs | settings))


def make_for_engine(**kwargs) -> ServerArgs:
    """REPLACE the class that Engine makes of its keyword arguments: ServerArgs, which has FreeKV's config on it.

    Raises:
        Refusal: FreeKV does not serve an option, a combination of options, or the model.
    """
    options = _take_options(kwargs)
    made = _make(options, kwargs, lambda settings: ServerArgs(**kwargs | settings))
    if config_of(made) is not None and (workers := resolved(made).tokenizer_worker_num) != 1:
        raise Refusal(f"tokenizer_worker_num {workers}: SGLang loads no plugins where they join an Engine; leave it out, or serve by HTTP")
    return made


def _make(options: Options, asked: dict[str, Any], make: Callable[[dict[str, Any]], ServerArgs]) -> ServerArgs:
    """ServerArgs, resolved at once if KV retrieval is on, so that a refusal comes where it is made.

    Args:
        options: FreeKV's options.
        asked: SGLang's options, among others.
        make: makes ServerArgs with some more settings of SGLang.
    """
    if _is_off(options, asked):
        return make({})
    config, settings = _prepare(options, asked)
    server_args = make(settings)
    _resolve(server_args, config, settings["device"], server_args.resolve_once)
    return server_args


def _take_options(kwargs: dict) -> Options:
    """FreeKV's options, from the command line and from ``kwargs``. They are removed from ``kwargs``."""
    return _command_line.get().but(**{name: kwargs.pop(name) for name in NAMES if name in kwargs})


def _is_off(options: Options, asked: dict[str, Any]) -> bool:
    """Whether KV retrieval is off; then FreeKV's other options are refused, which have no effect."""
    if options.kv_retrieval is not None and not (isinstance(options.kv_retrieval, str) and options.kv_retrieval in OFF):
        return False
    preparation.refuse_idle(options)
    refuse_lost_config(asked.get("attention_backend"))
    return True


def refuse_lost_config(attention_backend: str | None) -> None:
    """Raise a Refusal of FreeKV's attention backend, which only comes with a config."""
    if attention_backend == BACKEND_NAME:
        raise Refusal(
            "--attention-backend freekv: it is part of --kv-retrieval, which is not given; use that flag "
            "(a copy of ServerArgs made field by field loses it)"
        )


def _prepare(options: Options, asked: dict[str, Any]) -> tuple[FreeKVConfig, dict[str, Any]]:
    """The config, and the settings of SGLang that it needs."""
    if _drift:
        raise _drift[0]
    names = defaults()
    return preparation.prepare(options, SimpleNamespace(**names | {name: asked[name] for name in names if name in asked}))


def _resolve(server_args: ServerArgs, config: FreeKVConfig, device: str, resolve: Callable[[], None]) -> None:
    """Have SGLang resolve its settings, refuse what does not suit the model, and leave the config for the schedulers."""
    try:
        with linear_attention.resolving(device):
            resolve()
    except Exception as error:  # for some models SGLang insists on an attention backend
        model = vars(server_args).get("_model_config" if APART else "model_config")
        if model is not None:
            windows.tell_again(model)
            refusals.refuse_model(model, config.method)
            states.refuse_states(server_args, model, config)
        if BACKEND_NAME in str(error):  # the error lists the backends that this model needs
            reason = f"SGLang does not serve this model so ({error})"
            raise Refusal(f"--kv-retrieval {config.method}: {reason}; use --kv-retrieval none") from None
        raise
    if server_args.model_path.lower() not in ("none", "dummy"):  # SGLang resolves nothing for these
        settings, model = resolved(server_args), model_config(server_args)
        windows.tell_again(model)
        refusals.refuse_model(model, config.method)
        states.refuse_states(settings, model, config)
        refusals.refuse_resolved(settings, model, config)
        refusals.refuse_small_pool(settings, model, config)
        _warn_of_untested(model.hf_config.architectures[0])
    vars(server_args)[CONFIG] = config


def _warn_of_untested(architecture: str) -> None:
    if architecture not in TESTED_ARCHITECTURES:
        logger.warning("%s has not been tested with KV retrieval; compare its answers with those of --kv-retrieval none", architecture)
