# SPDX-License-Identifier: Apache-2.0
"""The flags of KV retrieval, and the FreeKVConfig that is made from them."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from sglang_freekv.config import (
    CANARIES,
    DIGESTS,
    HOST_LAYOUTS,
    KV_DTYPES,
    POOLINGS,
    RECALLS,
    SELECTIONS,
    SGLANG_FP8,
    FreeKVConfig,
    Refusal,
)
from sglang_freekv.flag import COSINE, GIBIBYTES, LAYERS, NATS, STEPS, TAUS, TOKENS, Flag, one_of
from sglang_freekv.memory_pool import host_memory
from sglang_freekv.methods import METHODS
from sglang_freekv.presets import DEFAULT_PRESET, PRESETS

DEFAULTS = FreeKVConfig(**PRESETS[DEFAULT_PRESET].settings)
OTHERS = FreeKVConfig()  # sizes of the other methods, and of the other presets

ABOUT = (
    "Keep the KV cache of every request in host memory, and a budget of it on the device. Each decode step attends to the sink, the "
    f"selected pages and the window. Token counts are multiples of --page-size, which is {DEFAULTS.page_size} by default, and {OTHERS.page_size} with another "
    "preset or another method. A context "
    "that fits the budget is attended to in full. In float32 on a CPU its tokens are then stock SGLang's. In bfloat16 on an H200, with SGLang "
    "0.5.17 and FlashInfer, 99.4% of them were, and stock SGLang's own repeat gave 99.8%."
)

FLAGS = {
    "kv_retrieval": Flag(
        "method",
        one_of("none", *METHODS),
        "Method of KV retrieval. Default: none, which leaves SGLang as it is. freekv selects pages a step ahead and recalls them "
        "beside the computation. The others are there to be compared with. arkvale and quest select with the query of each step, which "
        "then waits for its pages. louiskv is LouisKV's trigger over our pages: a layer selects when its queries change, in the mean of "
        "all heads, and keeps those pages until then. All --freekv-* flags need one of these methods.",
    ),
    "freekv_preset": Flag(
        "preset",
        one_of(*PRESETS),
        f"A named set of defaults. Default: {DEFAULT_PRESET}, whose values the other flags name. A flag that is given wins, --page-size "
        f"too. {'; '.join(f'{name}, {preset.told}' for name, preset in PRESETS.items())}. The other methods than freekv refuse it.",
    ),
    "freekv_budget": Flag(
        "budget_tokens",
        TOKENS,
        f"Tokens of KV that one decode step attends to, per request and kv head. Default: {DEFAULTS.budget_tokens}. "
        "Raise it for accuracy. Lower it for more requests at once and fewer bytes recalled.",
    ),
    "freekv_sink": Flag(
        "sink_tokens",
        TOKENS,
        f"First tokens of the context, always attended to. Default: {DEFAULTS.sink_tokens} ({OTHERS.sink_tokens} with the presets fast and "
        "paper, and with the other methods), or a quarter of the budget if that is less, in whole pages, at least one. Raise it if instructions at the start of long prompts get lost.",
    ),
    "freekv_window": Flag(
        "window_tokens",
        TOKENS,
        f"Last tokens of the context, always attended to. Default: {DEFAULTS.window_tokens} ({OTHERS.window_tokens} with the presets fast and "
        "paper, and with the other methods), or a quarter of the budget if that is less, in whole pages, at least two. Raise it for long generation.",
    ),
    "freekv_tau": Flag(
        "tau",
        COSINE,
        "A kv head is corrected if the cosine of its query with the last one is below this: it selects and recalls before it "
        f"attends. Default: {DEFAULTS.tau:g} ({PRESETS['fast'].tau:g} with the presets fast and paper). The FreeKV paper has 0.9 for long generation and "
        "0.8 for long input. Above 1 every kv head is corrected in every step, "
        f"below -1 none is. With louiskv all kv heads of a layer are corrected together, and the default is {METHODS['louiskv'].tau:g}. "
        "arkvale and quest always correct, and refuse this flag.",
    ),
    "freekv_tau_by_layer": Flag(
        "tau_by_layer",
        TAUS,
        "File with a threshold for each retrieval layer, in the place of --freekv-tau. Default: none, so all layers have one. It is JSON: "
        "the model's architecture as in its config.json, and a number for each layer, or null for a dense one, as in "
        '{"model": "LlamaForCausalLM", "tau": [null, 0.8, 0.9]}. A file of another model is refused.',
    ),
    "freekv_digest": Flag(
        "digest",
        one_of(*DIGESTS),
        f"What a page is scored by. Default: {DEFAULTS.digest} ({PRESETS['fast'].digest} with the preset fast, with arkvale and with louiskv; min-max with "
        "the preset paper and with quest). min-max is the smallest box "
        "that holds the page's keys, as in the FreeKV and Quest papers. cuboid-mean is a narrower box, as wide as the keys' mean distance "
        "from its centre, and finds more. two-bit adds two bits for each dimension of each key, and finds single tokens, best with "
        "--page-size 8, and takes pages of a multiple of 8 tokens. It takes more device memory, and each step takes longer.",
    ),
    "freekv_pooling": Flag(
        "pooling",
        one_of(*POOLINGS),
        f"How a kv head ranks pages by the scores of its query heads. Default: {DEFAULTS.pooling} with freekv and louiskv, "
        "max with quest, mean with arkvale. softmax-mean takes each query head's softmax over the pages, and the mean of these. mean and max take the "
        "scores as they are. max lets a single query head that looks for a single token have it.",
    ),
    "freekv_hysteresis": Flag(
        "hysteresis",
        NATS,
        f"How many nats the pages of a kv head's last selection weigh more in the next one. Default: {DEFAULTS.hysteresis:g} ({OTHERS.hysteresis:g} with the "
        "presets fast and paper, and with the other methods). A page that is not much better then replaces none of them, so fewer pages "
        "are recalled. 1 makes a page of the last selection weigh 2.7 times as much.",
    ),
    "freekv_selection": Flag(
        "selection",
        one_of(*SELECTIONS),
        f"When a kv head selects. Default: {DEFAULTS.selection}, as in the FreeKV paper. on-turn keeps what it selected until its query is "
        "less like that of its last selection than --freekv-tau, or the next token begins a page. Only then are its pages scored, which "
        "saves most where scores take long, as with two-bit digests and --page-size 8. What it does to answers has not been measured on "
        "tasks. The other methods than freekv have their own rules, and refuse on-turn.",
    ),
    "freekv_device_cache": Flag(
        "device_cache_tokens",
        TOKENS,
        "Tokens of KV per request and kv head that stay on the device when room is short, at least the budget. Default: the budget. A "
        "step still attends to the budget; the other pages need no recall when they are selected again. Raise it if /metrics shows many "
        "recalled units. Every long request then takes more device memory.",
    ),
    "freekv_dense_below": Flag(
        "dense_below_tokens",
        TOKENS,
        "A context of at most so many tokens is attended to in full, as one within the budget is. "
        f"Default: {DEFAULTS.dense_below_tokens}. Raise it for short contexts whose answers must be those of full attention. All of their "
        "pages are then on the device: as resident pages, or in a device cache of that size. Where neither has room, the step attends to "
        "the budget.",
    ),
    "freekv_dense_layers": Flag(
        "dense_layers",
        LAYERS,
        "Comma-separated numbers, from 0, of layers whose KV stays on the device in full. Default: 0, which is none in a model whose "
        "layer 0 has linear attention or a sliding window. 'none' leaves no layer dense. Add layers if accuracy suffers and device memory "
        "allows.",
    ),
    "freekv_host_memory": Flag(
        "host_memory_gib",
        GIBIBYTES,
        "Host memory for the KV of one rank in GiB. It bounds the tokens that can be cached. Default: "
        f"{host_memory.SHARE['cuda']:.0%}% of what this machine, its cgroup and `ulimit -v` leave, divided by the ranks on this machine; "
        f"{host_memory.SHARE['cpu']:.0%}% with --device cpu, where weights share that memory. Each of its tokens takes device memory for "
        "its digests and dense layers, so a larger pool leaves fewer rows and fewer resident pages. Name it for each of several servers on "
        "one machine, because they start from the same free memory.",
    ),
    "freekv_resident_memory": Flag(
        "resident_memory_gib",
        GIBIBYTES,
        "Device memory of one rank for resident pages in GiB, beside the device cache of every request. A page is resident from the "
        "moment it is written until another page needs the room. It needs no recall, and a prefix hit reads it where it is. A request "
        "whose pages are all resident takes nothing else. When room runs short, the longest requests keep the device cache, and recall "
        "the rest. Default: what weights, digests and dense layers leave of --mem-fraction-static, and on a CPU of a share of the "
        "available memory; up to twice as many requests then run at once. 0 makes no page resident.",
    ),
    "freekv_recall": Flag(
        "recall",
        one_of(*RECALLS),
        f"How missing pages come from the host. Default: {DEFAULTS.recall}: a kernel in the decode graph reads host memory. "
        "copy-engine is the paper's way, one copy for each page and kv head, without a decode graph; it is there to be compared with.",
    ),
    "freekv_host_layout": Flag(
        "host_layout",
        one_of(*HOST_LAYOUTS),
        f"Order of a page's axes in host memory. Default: {DEFAULTS.host_layout}: the keys and values of a kv head in one piece. "
        "nhd is the order on the device, so recall reads single rows; it is there to be compared with.",
    ),
    "freekv_kv_dtype": Flag(
        "kv_dtype",
        one_of(*KV_DTYPES),
        f"How the KV of retrieval layers is stored, in host memory and in frames. Default: {DEFAULTS.kv_dtype}, the model's type. int8 stores "
        "each key and value of a kv head as 8-bit codes with one 16-bit scale, and keys are rotated before, so that no dimension is much "
        "larger than the others. It takes about half of the host memory, of the bytes recalled and of the frames. Attention computes in "
        "the model's type. Every chunk of a prefill decodes its context, layer by layer, and new KV has to be coded. Use it where host "
        "memory or the link to the host is short. Dense layers, window layers and digests keep the model's type. It takes a head_dim of "
        "a multiple of 8. --freekv-recall copy-engine and --freekv-host-layout nhd refuse it. SGLang's --kv-cache-dtype fp8_e4m3 or fp8_e5m2, "
        "which stores all layers in 8-bit floats, is another way, and goes with auto alone.",
    ),
    "freekv_canary": Flag(
        "canary",
        one_of(*CANARIES),
        f"Compare KV that comes back from host memory with a checksum made when it left the device. Default: {DEFAULTS.canary}. "
        "sample compares one unit of sixteen. full compares every unit, and all pages in turn while the server is idle. A request whose "
        "KV changed ends with an error that names the page, and the prefix cache forgets that page. All other requests go on.",
    ),
    "freekv_recall_timing": Flag(
        "recall_timing",
        STEPS,
        "Time recall in one decode step of so many, with the GPU's clock. Default: 0, no step, at no cost. /metrics then shows the "
        "seconds that recall took, and the seconds that the computation waited for it. 100 suits a server in use. A CPU does not time "
        "recall.",
    ),
}


class Options(SimpleNamespace):
    """The user's options, as given, by the names of ``FLAGS``; None for an option that was not given."""

    def __init__(self, **given: Any) -> None:
        if unknown := given.keys() - FLAGS.keys():
            raise TypeError(f"Options: expected names of FLAGS, found {min(unknown)}")
        super().__init__(**dict.fromkeys(FLAGS) | given)

    def but(self, **given: Any) -> Options:
        """The same, with ``given`` in the place of what was given for them."""
        return Options(**vars(self) | given)


NAMES = tuple(FLAGS)
SIZES = ("freekv_preset", "freekv_budget", "freekv_sink", "freekv_window", "freekv_device_cache", "freekv_dense_below", "freekv_digest")
ADVISED_PAGE_SIZES = range(2, 1025)
BOXES = f", or --freekv-digest {DIGESTS[0]} beside it"


def config_from(options: Options, page_size: int | None) -> FreeKVConfig:
    """FreeKVConfig of the user's options. What was not given is the preset's; a sink or window shrinks with a small budget.

    Args:
        options: as given.
        page_size: SGLang's ``--page-size``; None if it was not given.

    Raises:
        Refusal: as FreeKVConfig. It names ``--page-size`` if that was changed and another page size suits the other options.
    """
    _refuse_page_size(options, page_size)
    return _config(options, page_size)


def with_kv_cache_dtype(config: FreeKVConfig, kv_cache_dtype: str | None) -> FreeKVConfig:
    """``config`` with KV in the floats of 8 bits that SGLang's ``--kv-cache-dtype`` asks for; as it is if that asks for none.

    Raises:
        Refusal: codes of FreeKV's own are asked for, too.
    """
    if kv_cache_dtype not in SGLANG_FP8:
        return config
    if config.is_coded:
        raise Refusal(
            f"--freekv-kv-dtype {config.kv_dtype}: expected auto with --kv-cache-dtype {kv_cache_dtype}, because each of them says how KV is "
            "stored in 8 bits; leave one of them out"
        )
    return replace(config, kv_dtype=kv_cache_dtype)


def _refuse_page_size(options: Options, page_size: int | None) -> None:
    """Raise a Refusal if the other sizes exclude ``page_size`` but allow another one; it advises the nearest of these."""
    if page_size is None or page_size < 1 or page_size == _defaults(options).get("page_size", FreeKVConfig.page_size):
        return
    sizes = Options(**{name: getattr(options, name) for name in ("kv_retrieval", *SIZES)})
    reason = _reason_against(sizes, page_size)
    if reason is None:
        return
    budget = _read(options, "freekv_budget")
    if budget is None:
        budget = _defaults(sizes).get("budget_tokens", FreeKVConfig.budget_tokens)
    for size in sorted(_divisors(budget), key=lambda size: abs(size - page_size)):
        if _reason_against(sizes, size) is None:
            instead = BOXES if _boxes_suit(sizes, page_size) else ""
            raise Refusal(f"--page-size {page_size}: expected one that suits the other sizes ({reason}); use --page-size {size}{instead}")


def _boxes_suit(sizes: Options, page_size: int) -> bool:
    """Whether a digest is all that excludes ``page_size``, and is the preset's."""
    boxes = sizes.but(freekv_digest=DIGESTS[0])
    return sizes.freekv_digest is None and page_size in ADVISED_PAGE_SIZES and _reason_against(boxes, page_size) is None


def _reason_against(options: Options, page_size: int) -> str | None:
    """The reason for which ``page_size`` is refused, without its remedy; None if it is accepted."""
    try:
        _config(options, page_size)
    except Refusal as refusal:
        return str(refusal).split("; use")[0]
    return None


@lru_cache
def _divisors(tokens: int) -> tuple[int, ...]:
    """Those of ``ADVISED_PAGE_SIZES`` that divide ``tokens``."""
    return tuple(size for size in ADVISED_PAGE_SIZES if tokens % size == 0)


def _read(options: Options, name: str) -> Any:
    """The setting of one option; None if it was not given."""
    value = getattr(options, name)
    return None if value is None else FLAGS[name].kind.read(name, value)


def _preset(options: Options) -> str | None:
    """The preset that was given, or the default one of method freekv."""
    if options.freekv_preset is None:
        return DEFAULT_PRESET if _read(options, "kv_retrieval") == "freekv" else None
    return _read(options, "freekv_preset")


def _defaults(options: Options) -> dict[str, Any]:
    """Settings of the preset. FreeKVConfig refuses a preset that there is not."""
    name = _preset(options)
    return PRESETS[name].settings if name is not None and name in PRESETS else {}


def _config(options: Options, page_size: int | None) -> FreeKVConfig:
    settings = {flag.setting: value for name, flag in FLAGS.items() if (value := _read(options, name)) is not None}
    if page_size is not None:
        settings["page_size"] = page_size
    if (stored := settings.get("kv_dtype")) in SGLANG_FP8:
        raise Refusal(
            f"--freekv-kv-dtype {stored}: expected one of {', '.join(KV_DTYPES)}; use --kv-cache-dtype {stored}, which is SGLang's"
        )
    if settings.keys() >= {"tau", "tau_by_layer"}:
        raise Refusal(
            f"--freekv-tau {settings['tau']:g}: expected none beside --freekv-tau-by-layer, which has one for each layer; leave it out"
        )
    left = {name: value for name, value in _defaults(options).items() if name not in settings}
    if "tau_by_layer" in settings:
        left.pop("tau", None)
    usual = {name: getattr(FreeKVConfig, name) for name in ("page_size", "budget_tokens", "sink_tokens", "window_tokens")} | left
    chosen = usual | settings
    budget, page = chosen["budget_tokens"], max(1, chosen["page_size"])
    for setting, least in (("sink_tokens", 1), ("window_tokens", 2)):
        if setting not in settings:
            chosen[setting] = max(least, min(usual[setting], budget // 4) // page) * page
    return FreeKVConfig(**chosen | {"preset": _preset(options), "preset_set": tuple(left)})
