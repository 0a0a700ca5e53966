# SPDX-License-Identifier: Apache-2.0
"""Report: the verdict and the command, the table of memory, and the findings, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_freekv.config import Refusal
from sglang_freekv.launch.finding import Finding, size
from sglang_freekv.launch.obstacles import obstacles_of
from sglang_freekv.launch.plan import CODED, Plan

HERE_ALONE = (
    "pinned memory, memlock limits and installed packages of the server's machine: run the doctor there without --gpu and --host-memory"
)


class Tier(NamedTuple):
    """A row of the table, in bytes. They are one rank's, or the machine's if the name says so. None is an empty cell."""

    name: str
    per_token: float | None
    per_request: float | None
    all_requests: float | None
    has: float | None


@dataclass(frozen=True)
class Report:
    """The doctor's answer to a question.

    Args:
        verdict: one sentence.
        command: the command line that starts the server; None if the plan does not fit, or without a plan.
        words: the words of ``command``.
        requests: requests that the fourth column of the table counts.
        tiers: the rows of the table.
        findings: all findings; those that stop a server come first.
        unchecked: things that could not be checked, in words.
    """

    verdict: str
    command: str | None = None
    words: list[str] | None = None
    requests: int = 0
    tiers: tuple[Tier, ...] = ()
    findings: tuple[Finding, ...] = ()
    unchecked: tuple[str, ...] = field(default_factory=tuple)

    @classmethod
    def of_machine(cls, findings: Iterable[Finding]) -> Report:
        found = _stops_first(findings)
        names = [finding.name for finding in found if finding.stops]
        verdict = f"these would stop a server: {', '.join(names)}" if names else "nothing found here that would stop a server"
        return cls(verdict, findings=found, unchecked=("a model: give --model-path",))

    @classmethod
    def of_refusal(cls, name: str, refusal: Refusal, machine: Iterable[Finding]) -> Report:
        """The report on a model that the server refuses.

        Args:
            name: the model's architecture.
            refusal: the server's Refusal.
            machine: findings about this machine.
        """
        found = _stops_first([Finding("model", f"{name} is refused", str(refusal), stops=True), *machine])
        return cls(f"a server would refuse this: {refusal}", findings=found)

    @classmethod
    def of_plan(cls, plan: Plan, machine: Iterable[Finding]) -> Report:
        """The report on a plan.

        Args:
            plan: the plan.
            machine: findings about this machine, if the plan is for it.
        """
        found = _stops_first([*obstacles_of(plan), *_facts(plan), *machine])
        unchecked = tuple(_unchecked(plan))
        names = [finding.name for finding in found if finding.stops]
        count = plan.requests or plan.asked or 1
        work = f"{count} request{'s' * (count > 1)} of {plan.context_len} tokens on {plan.hardware}"
        work += f", --tp-size {plan.ranks}" * (plan.ranks > 1)
        memory = [name for name, known in (("host memory", plan.host_bytes), ("device memory", plan.device_bytes)) if known is None]
        if names:
            verdict = f"does not fit, because of {', '.join(names)}: {work}"
        elif memory:
            verdict = f"fits as far as it is known, without {' and '.join(memory)}: {work}"
        else:
            verdict = f"fits: {work}"
        return cls(
            verdict,
            None if names else plan.command_line(),
            None if names else plan.command(),
            count,
            tuple(_tiers(plan, count)),
            found,
            unchecked,
        )

    @property
    def stops(self) -> bool:
        return any(finding.stops for finding in self.findings)

    def lines(self) -> Iterator[str]:
        yield f"verdict: {self.verdict}"
        if self.tiers:
            yield f"command: {self.command or 'none, see below'}"
            yield ""
            yield from self._table()
        stopping, seen = ([finding for finding in self.findings if finding.stops is stops] for stops in (True, False))
        for title, entries in (("what would stop it", stopping), ("what was looked at", seen), ("not checked", self.unchecked)):
            if entries:
                yield ""
                yield f"{title}:"
                yield from (f"  {entry}" for entry in entries)

    def to_json(self) -> dict:
        return {
            "stops": self.stops,
            "verdict": self.verdict,
            "command": self.words,
            "requests": self.requests,
            "table": [tier._asdict() for tier in self.tiers],
            "findings": [finding.to_json() for finding in self.findings],
            "unchecked": list(self.unchecked),
        }

    def _table(self) -> Iterator[str]:
        heads = ("tier", "per token", "per request", f"{self.requests} request{'s' * (self.requests > 1)}", "has")
        rows = [heads, *((tier.name, *(_cell(value) for value in tier[1:])) for tier in self.tiers)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
        for row in rows:
            yield "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]).rstrip()


def _cell(value: float | None) -> str:
    return "-" if value is None else size(value)


def _stops_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda finding: not finding.stops))


def _tiers(plan: Plan, count: int) -> Iterator[Tier]:
    cost, ranks, config = plan.footprint, plan.ranks, plan.config
    sizing, tokens = cost.sizing, cost.tokens
    weights = plan.weight_bytes
    device = cost.device_bytes(count) + (weights or 0)
    memory = plan.hardware.gpu_bytes if plan.hardware.device == "cuda" else None
    static = memory and memory * plan.static_share
    each = "" if ranks == 1 else " a rank"
    yield Tier(f"host pool{each}", sizing.host_bytes_per_token, cost.host_bytes, count * cost.host_bytes, plan.host_bytes)
    yield Tier(f"weights{each}", None, None, weights, None)
    for name, token_bytes in (("digests", cost.digest_token_bytes), ("dense layers", cost.dense_token_bytes)):
        yield Tier(f"{name}{each}", token_bytes, token_bytes * tokens, count * token_bytes * tokens, None)
    windows = sizing.row_window_bytes
    cache = sizing.row_bytes - windows, cost.row_bytes(count) - (count + 1) * windows
    yield Tier(f"device cache{each} ({config.cache_tokens} tokens)", None, *cache, None)
    if windows:
        yield Tier(f"window layers{each}", None, windows, (count + 1) * windows + sizing.shared_window_bytes, None)
    if cost.slot_bytes:
        states = cost.state_bytes(count)
        yield Tier(f"states of linear attention{each}", None, cost.state_bytes(1) - cost.state_bytes(0), states, None)
    yield Tier(f"staging of prefixes{each}", None, None, sizing.staging_bytes, None)
    yield Tier(f"device{each}, all of these", sizing.device_bytes_per_token, cost.device_bytes(1) - cost.device_bytes(0), device, static)
    yield Tier(f"frames{each}", sizing.host_bytes_per_token, None, None, plan.room and plan.room.frames * sizing.frame_bytes)
    if ranks > 1:
        host = plan.hardware.host_bytes
        yield Tier(
            f"host pools, {ranks} ranks",
            sizing.host_bytes_per_token * ranks,
            cost.host_bytes * ranks,
            count * cost.host_bytes * ranks,
            host,
        )
        yield Tier(f"devices, {ranks} ranks", None, None, device * ranks, static and static * ranks)


def _facts(plan: Plan) -> Iterator[Finding]:
    model, config = plan.model, plan.config
    shape = model.kv_shape(config)
    dtype = str(model.dtype).removeprefix("torch.")
    dtype += f" with {'retrieved ' * config.has_scales}KV in {config.kv_dtype}" if config.is_coded else ""
    windows = f", {shape.layers.near} window" if shape.layers.near else ""
    value = (
        f"{model.name}, {shape.retrieval_layers} retrieved{windows} and {shape.dense_layers} dense layers, {shape.query_heads} query heads, "
        f"{shape.kv_heads} kv heads of {shape.head_dim}, {dtype}, context {model.context_len}"
    )
    names = ("retrieval_layers", "dense_layers", "kv_heads", "query_heads", "head_dim", "digest_elements", "element_bytes")
    figures = {name: getattr(shape, name) for name in names} | {"budget_tokens": config.budget_tokens, "context_tokens": model.context_len}
    yield Finding("model", value + ("" if model.is_tested else "; not tested with FreeKV"), figures=figures)
    if config.preset is not None:
        settings = {name: getattr(config, name) for name in config.preset_set}
        yield Finding("preset", f"{config.preset}, which sets {config.told_preset}", figures={"preset": config.preset} | settings)
    yield _weights(plan)
    yield from _frames(plan)
    yield from _recall(plan)


def _weights(plan: Plan) -> Finding:
    total = plan.all_weight_bytes
    if total is None:
        return Finding("weights", "unknown: neither its files nor its config tell", "give --weights-gib, or the files")
    if plan.question.weight_bytes is not None:
        return Finding("weights", f"{size(total)}, given", figures={"bytes": total})
    weights = plan.model.weights
    count = "" if weights.parameters is None else f" for {_billions(weights.parameters)} parameters"
    method = f", {plan.model.config.quantization}" if plan.model.config.quantization else ""
    return Finding("weights", f"{size(total)}{count}{method}, {weights.origin}", figures={"bytes": total, "parameters": weights.parameters})


def _frames(plan: Plan) -> Iterator[Finding]:
    room, sizing = plan.room, plan.footprint.sizing
    if room is None:
        return
    promised, page_size = sizing.promised_frames, plan.config.page_size
    value = (
        f"{room.frames}, for {room.frames * page_size} tokens that need no recall; under pressure a request keeps {promised * page_size} "
        f"of its tokens there, so {room.longest_requests} of {plan.context_len} tokens run at once, and up to {room.rows} shorter ones"
    )
    figures = {"frames": room.frames, "promised": promised, "longest_requests": room.longest_requests, "rows": room.rows}
    yield Finding("frames", value, figures=figures)


def _recall(plan: Plan) -> Iterator[Finding]:
    recalled, link, shares = plan.footprint.recalled_bytes, plan.hardware.link, plan.footprint.recalled
    each = " a rank" if plan.ranks > 1 else ""
    value = (
        f"{recalled / 1e6:.1f} MB per decoded token{each} where {shares.missed:.0%} of the selected pages are missing, {shares.awaited:.0%} of it "
        f"ahead of attention (shares measured {shares.where})"
    )
    yield Finding("recall", value, figures={"bytes_per_token": recalled, "awaited": shares.awaited, "missed": shares.missed})
    if link is not None:
        figures = {"tokens_per_s": link / recalled, "link_bytes_per_s": link}
        value = f"the link ({link / 1e9:.1f} GB/s, {plan.hardware.origin}) sustains {link / recalled:.0f} tokens/s over all requests"
        if codes := plan.with_codes():
            figures["coded_tokens_per_s"] = link / codes.footprint.recalled_bytes
            value += f", and {figures['coded_tokens_per_s']:.0f} with --freekv-kv-dtype {CODED}"
        yield Finding("decode rate", value, figures=figures)


def _unchecked(plan: Plan) -> Iterator[str]:
    if not plan.model.is_tested:
        yield f"{plan.model.name}: the server's rules let it pass, and this project's tests have not run it"
    if plan.weight_bytes is None:
        yield "whether the weights fit: their size is not known"
    if plan.hardware.device == "cuda" and plan.hardware.gpu_bytes is None:
        yield "device memory: give --gpu"
    if plan.hardware.host_bytes is None:
        yield "host memory: give --host-memory"
    if plan.question.describes_a_machine:
        yield HERE_ALONE
    if plan.hardware.link is None:
        yield "the decode rate that the link sustains: give --link-gb-per-s"


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 1e9 else f"{count / 1e6:.1f} million"
