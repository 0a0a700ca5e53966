# SPDX-License-Identifier: Apache-2.0
"""FreeKVConfig: the user's settings in tokens, validated once. The engine counts pages."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_freekv.layer_taus import LayerTaus
from sglang_freekv.methods import METHODS
from sglang_freekv.presets import PRESETS
from sglang_freekv.refusal import Refusal

DEFAULT_PAGE_SIZE = 32
BACKEND_NAME = "freekv"  # name of the attention backend in SGLang
GIB = 1 << 30
DIGESTS = ("cuboid-mean", "min-max", "two-bit")
WORD_TOKENS = 8  # tokens whose codes share a word of a two-bit digest
PART_PAGES = 4096  # candidates of a context that one program of a GPU holds at a time
MOST_SLOTS = (1 << 15) - 1  # slots of a row: two counts of slots share a word in the plan
MOST_PAGES = (1 << 20) - 1  # of a context: three counts of pages share a word in the selection
POOLINGS = ("softmax-mean", "mean", "max")
SELECTIONS = ("every-step", "on-turn")
MOST_NATS = 10.0  # of hysteresis; e^10 is 22,026 times the weight
RECALLS = ("zero-copy", "copy-engine")
HOST_LAYOUTS = ("hnd", "nhd")
KV_DTYPES = ("auto", "int8")
SGLANG_FP8 = ("fp8_e4m3", "fp8_e5m2")  # values of SGLang's --kv-cache-dtype
STORED_DTYPES = KV_DTYPES + SGLANG_FP8
WORD_CODES = 4  # codes of 8 bits in a word, in which attention and movers read them
ROTATED_TOGETHER = 8  # a head_dim is divided by this, so that keys are rotated in blocks of so many dimensions or more
MOST_STEPS = (1 << 31) - 1  # from one timed step to the next
CANARIES = {"off": 0, "sample": 16, "full": 1}  # one unit in so many is examined; 0 examines none


def typed(name: str) -> str:
    """An option as it is typed on the command line."""
    return "--" + name.replace("_", "-")


class PageBudget(NamedTuple):
    """Pages that one decode step attends to, per request and kv head, by kind."""

    sink: int
    selected: int
    window: int

    @property
    def total(self) -> int:
        return sum(self)


@dataclass(frozen=True)
class FreeKVConfig:
    """Settings of KV retrieval for one engine.

    Args:
        method: retrieval method, a key of ``methods.METHODS``.
        budget_tokens: tokens of KV per request and kv head that attention reads in one decode step.
        sink_tokens: first tokens of the context, always attended to.
        window_tokens: last tokens of the context (the partial last page included), always attended to; at least two pages.
        tau: a kv head is corrected if its query's similarity to the last one is below ``tau`` (paper section 3.3). Above 1 every kv head
            is corrected in every step, below -1 none is. None becomes the method's default, and stays None if the method has none.
        tau_by_layer: thresholds of single layers, in the place of ``tau``.
        digest: one of ``DIGESTS``: the summary by which pages are scored. None becomes the method's default.
        pooling: one of ``POOLINGS``: how the scores of a group become the weight by which its kv head selects. None becomes the method's
            default.
        hysteresis: nats by which the pages of a kv head's last selection weigh more in the next one, 0 to ``MOST_NATS``.
        selection: one of ``SELECTIONS``: a kv head selects for every step, or keeps its pages until its query is unlike that of its last
            selection, or the next token begins a page.
        device_cache_tokens: tokens of KV per request and kv head that stay in slots on the device, at least the budget. A page beyond the
            budget needs no recall if it is selected again. None becomes the budget.
        dense_below_tokens: a context of at most so many tokens is attended to in full, if its absent pages fit the device cache.
        dense_layers: layers that keep all their KV on the device and use stock attention.
        host_memory_gib: GiB of host memory for the host pool of one rank. None becomes a share of the available memory.
        resident_memory_gib: GiB of device memory of one rank for resident pages beside the slots of all rows. None becomes what is left.
        page_size: tokens per page, SGLang's ``--page-size``.
        recall: one of ``RECALLS``: how missing units are copied from the host pool.
        host_layout: one of ``HOST_LAYOUTS``: order of a page's axes in host memory.
        kv_dtype: one of ``STORED_DTYPES``: how the KV of retrieval layers is stored. auto is the model's dtype. Those of ``SGLANG_FP8`` come
            from SGLang's own flag, and are the type of dense and window layers, too.
        canary: a key of ``CANARIES``: how many of the units that come back from the host pool are compared with their checksums.
        recall_timing: recall is timed in one decode step of so many; 0 times none.
        preset: a key of ``PRESETS``, from which settings were taken that the user did not give; None if none was. Told, and not used.
        preset_set: names of these settings.

    Raises:
        Refusal: a value is outside its range, or is not a whole number of pages.
    """

    method: str = "freekv"
    budget_tokens: int = 2048
    sink_tokens: int = 512
    window_tokens: int = 512
    tau: float | None = None
    tau_by_layer: LayerTaus | None = None
    digest: str | None = None
    pooling: str | None = None
    hysteresis: float = 0.0
    selection: str = "every-step"
    device_cache_tokens: int | None = None
    dense_below_tokens: int = 0
    dense_layers: tuple[int, ...] = (0,)
    host_memory_gib: float | None = None
    resident_memory_gib: float | None = None
    page_size: int = DEFAULT_PAGE_SIZE
    recall: str = "zero-copy"
    host_layout: str = "hnd"
    kv_dtype: str = "auto"
    canary: str = "off"
    recall_timing: int = 0
    preset: str | None = field(default=None, compare=False)
    preset_set: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if self.method not in tuple(METHODS):
            raise Refusal(f"--kv-retrieval {self.method}: expected one of none, {', '.join(METHODS)}; use freekv")
        self._check_preset()
        self._take_defaults_of_method()
        self._check_choices()  # before sizes: its remedy for a digest may be another page size
        self._check_whole_pages()
        self._check_parts_of_budget()
        self._check_dense_below()
        self._check_tau()
        self._check_hysteresis()
        self._check_recall_timing()
        if any(layer < 0 for layer in self.dense_layers):
            raise Refusal(
                f"--freekv-dense-layers {','.join(map(str, self.dense_layers))}: expected layer numbers from 0; "
                "use for example --freekv-dense-layers 0"
            )
        if self.host_memory_gib is not None and not self.host_memory_gib > 0:
            raise Refusal(f"--freekv-host-memory {self.host_memory_gib:g}: expected GiB above 0; leave it out to take the default share")
        if self.resident_memory_gib is not None and not 0 <= self.resident_memory_gib < math.inf:
            raise Refusal(
                f"--freekv-resident-memory {self.resident_memory_gib:g}: expected GiB, 0 or more; leave it out to take what is left"
            )

    def _check_preset(self) -> None:
        if self.preset is None:
            return
        if self.preset not in tuple(PRESETS):
            raise Refusal(f"--freekv-preset {self.preset}: expected one of {', '.join(PRESETS)}; use {next(iter(PRESETS))}")
        if self.method != "freekv":
            raise Refusal(
                f"--freekv-preset {self.preset}: expected none with --kv-retrieval {self.method}, because presets are FreeKV's; leave it "
                "out and give the flags themselves, or use --kv-retrieval freekv"
            )

    def _take_defaults_of_method(self) -> None:
        default = METHODS[self.method]
        if default.tau is None and self.tau is not None:
            raise Refusal(
                f"--freekv-tau {self.tau:g}: expected none with --kv-retrieval {self.method}, which corrects every kv head in every step; "
                "leave it out, or use --kv-retrieval freekv"
            )
        if default.tau is None and self.tau_by_layer is not None:
            raise Refusal(
                f"--freekv-tau-by-layer {self.tau_by_layer.file}: expected none with --kv-retrieval {self.method}, which corrects every kv head "
                "in every step; leave it out, or use --kv-retrieval freekv"
            )
        for name in ("tau", "digest", "pooling"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(default, name))

    def _check_whole_pages(self) -> None:
        if self.page_size < 1:
            raise Refusal(f"--page-size {self.page_size}: expected at least 1; use --page-size {DEFAULT_PAGE_SIZE}, or leave it out")
        edge = MOST_SLOTS // 4  # twice the sum of sink and window then fits MOST_SLOTS
        dense = MOST_SLOTS if self.is_resident else max(0, self.cache_tokens // self.page_size)  # as _check_dense_below has it
        for name, least, most in (("budget", 4, MOST_SLOTS), ("sink", 0, edge), ("window", 2, edge), ("dense-below", 0, dense)):
            tokens = getattr(self, f"{name.replace('-', '_')}_tokens")
            if tokens < 0 or tokens % self.page_size:
                nearest = min(most, max(least, _nearest(tokens, self.page_size))) * self.page_size
                raise Refusal(
                    f"--freekv-{name} {tokens}: expected a non-negative multiple of --page-size {self.page_size}; "
                    f"use --freekv-{name} {nearest}"
                )
        for name, tokens, most in (
            ("sink", self.sink_tokens, edge),
            ("window", self.window_tokens, edge),
            ("budget", self.budget_tokens, MOST_SLOTS),
            ("device-cache", self.cache_tokens, MOST_SLOTS),
            ("dense-below", self.dense_below_tokens, MOST_SLOTS),
        ):
            if tokens > most * self.page_size:
                raise Refusal(
                    f"--freekv-{name} {tokens}: expected at most {most} pages of {self.page_size} tokens; "
                    f"use --freekv-{name} {most * self.page_size}, or a larger --page-size"
                )

    def _check_parts_of_budget(self) -> None:
        if self.window_tokens < 2 * self.page_size:
            raise Refusal(
                f"--freekv-window {self.window_tokens}: expected at least two pages of {self.page_size} tokens, because the page being "
                f"written may hold one token; use --freekv-window {2 * self.page_size} or more"
            )
        if self.budget_tokens <= self.sink_tokens + self.window_tokens:
            enough = 2 * (self.sink_tokens + self.window_tokens)  # half of it to select, as by default, and within MOST_SLOTS
            raise Refusal(
                f"--freekv-budget {self.budget_tokens}: expected more than --freekv-sink {self.sink_tokens} + "
                f"--freekv-window {self.window_tokens}, or nothing is left to select; use --freekv-budget {enough}, or lower ones of these"
            )
        if self.cache_tokens < self.budget_tokens or self.cache_tokens % self.page_size:
            nearest = max(self.budget_tokens, _nearest(self.cache_tokens, self.page_size) * self.page_size)
            raise Refusal(
                f"--freekv-device-cache {self.device_cache_tokens}: expected a multiple of --page-size {self.page_size}, and at least "
                f"--freekv-budget {self.budget_tokens}; use --freekv-device-cache {nearest}"
            )

    def _check_dense_below(self) -> None:
        if self.resident_memory_gib == 0 and self.dense_below_tokens > self.cache_tokens:
            raise Refusal(
                f"--freekv-dense-below {self.dense_below_tokens}: expected at most --freekv-device-cache {self.cache_tokens} with "
                f"--freekv-resident-memory 0, because every page needs a slot; use --freekv-dense-below {self.cache_tokens}, "
                f"--freekv-device-cache {self.dense_below_tokens}, or leave --freekv-resident-memory out"
            )

    def _check_choices(self) -> None:
        choices = {"digest": DIGESTS, "pooling": POOLINGS, "selection": SELECTIONS, "recall": RECALLS, "host-layout": HOST_LAYOUTS}
        choices |= {"kv-dtype": KV_DTYPES if self.kv_dtype not in SGLANG_FP8 else SGLANG_FP8, "canary": tuple(CANARIES)}
        for name, allowed in choices.items():
            if (value := getattr(self, name.replace("-", "_"))) not in allowed:
                raise Refusal(f"--freekv-{name} {value}: expected one of {', '.join(allowed)}; use {allowed[0]}")
        if self.selects_on_turn and self.method != "freekv":
            raise Refusal(
                f"--freekv-selection on-turn: expected every-step with --kv-retrieval {self.method}, which has its own rule of when to select; "
                "leave it out, or use --kv-retrieval freekv"
            )
        if self.digest == "two-bit" and self.page_size % WORD_TOKENS:
            raise Refusal(
                f"--freekv-digest two-bit: expected pages of a multiple of {WORD_TOKENS} tokens, but --page-size is {self.page_size}; "
                f"use --page-size {WORD_TOKENS}, or --freekv-digest cuboid-mean"
            )
        if self.has_scales:
            self._check_movers_of_codes()

    def _check_movers_of_codes(self) -> None:
        """Raise a Refusal if what moves KV knows no scales."""
        for name, served in (("recall", "zero-copy"), ("host-layout", "hnd")):
            if (value := getattr(self, name.replace("-", "_"))) != served:
                raise Refusal(
                    f"--freekv-kv-dtype {self.kv_dtype}: expected --freekv-{name} {served}, because a unit in host memory has scales beside it, "
                    f"but it is {value}; use --freekv-{name} {served}, or leave --freekv-kv-dtype out"
                )

    def _check_tau(self) -> None:
        if self.tau is not None and not math.isfinite(self.tau):  # /server_info tells it, and JSON has no infinity
            raise Refusal(f"--freekv-tau {self.tau:g}: expected a finite number; use 0.9 for long generation, 0.8 for long input")

    def _check_hysteresis(self) -> None:
        if not 0 <= self.hysteresis <= MOST_NATS:
            raise Refusal(
                f"--freekv-hysteresis {self.hysteresis:g}: expected 0 to {MOST_NATS:g} nats; use 1 for fewer recalls, or 0 for none of it"
            )

    def _check_recall_timing(self) -> None:
        if not 0 <= self.recall_timing <= MOST_STEPS:
            raise Refusal(
                f"--freekv-recall-timing {self.recall_timing}: expected 0 to {MOST_STEPS} decode steps; use --freekv-recall-timing 100"
            )
        if self.recall_timing and self.recall == "copy-engine":
            raise Refusal(
                f"--freekv-recall-timing {self.recall_timing}: expected 0 with --freekv-recall copy-engine, which waits on the host; "
                "leave it out"
            )

    @property
    def selects_on_turn(self) -> bool:
        return self.selection == "on-turn"

    @property
    def is_coded(self) -> bool:
        """Whether the KV of retrieval layers is stored in 8 bits."""
        return self.kv_dtype != "auto"

    @property
    def has_scales(self) -> bool:
        """Whether it is stored as codes with scales."""
        return self.kv_dtype == "int8"

    @property
    def is_rotated(self) -> bool:
        """Whether its keys are rotated, and the queries that meet them. Keys with scales are, so that no dimension takes all of a scale."""
        return self.has_scales

    @property
    def pages(self) -> PageBudget:
        """The budget in pages."""
        sink, window, total = (tokens // self.page_size for tokens in (self.sink_tokens, self.window_tokens, self.budget_tokens))
        return PageBudget(sink, total - sink - window, window)

    @property
    def told_preset(self) -> str:
        """The settings that the preset has set, with their values."""
        values = {name.removesuffix("_tokens").replace("_", " "): getattr(self, name) for name in self.preset_set}
        return (
            ", ".join(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items()) or "nothing"
        )

    @property
    def cache_tokens(self) -> int:
        return self.budget_tokens if self.device_cache_tokens is None else self.device_cache_tokens

    @property
    def cache_pages(self) -> int:
        """C, the slots of a row."""
        return self.cache_tokens // self.page_size

    @property
    def attended_pages(self) -> int:
        """A, the pages that one step attends to at most: the budget, or a context that is attended to in full."""
        return max(self.pages.total, self.dense_below_tokens // self.page_size)

    @property
    def whole_pages(self) -> int:
        """K: a context of at most so many pages never needs slots, if pages may be resident. With slots it would need no fewer frames."""
        return max(self.cache_pages + 1, self.dense_below_tokens // self.page_size)

    @property
    def is_resident(self) -> bool:
        """Whether pages may be resident. If not, every request has slots from the start."""
        return self.resident_memory_gib != 0


def _nearest(tokens: int, page_size: int) -> int:
    """The whole number of pages nearest to ``tokens``, in exact integers."""
    return (2 * tokens + page_size) // (2 * page_size)
