"""Slow, readable specification of FreeKV decoding: a Hugging Face model plus the paper's semantics, in plain PyTorch.

It shares no code with the product. A server running in float32 is compared with it token by token.

One decode step of one layer, with n tokens in the context including the one being decoded:
    1. a kv head whose query is unlike that of the previous step is corrected: it selects its pages now;
    2. every other kv head uses the pages that the previous step selected for it;
    3. each kv head attends to sink + selected + window pages;
    4. every kv head selects its pages for the next step, among the candidates of n + 1 tokens.
On turn a kv head keeps its query of step 1, and its pages, until it is corrected or the next token begins a page. Below a length at which
contexts are attended to in full, it selects for every step.
With hysteresis h, a selection takes the pages of the kv head's last one (sink and window included) for e^h times as good.

Letters: H kv heads, G group (query heads of a kv head), D head_dim, P pages, S page size.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
    PreTrainedModel,
)


@dataclass(frozen=True)
class OracleSettings:
    """Retrieval settings, in tokens; ``digest`` is "cuboid-mean", "min-max" or "two-bit".

    ``tau`` is one of all layers, or one for each. A selection among at most ``dense_below`` tokens takes all candidates. With ``int8`` all
    that attends, and all digests, see keys and values as ``coded`` leaves them. With ``fp8`` they see them as ``floats`` does, and so do dense
    and window layers. ``kv_scales`` are a checkpoint's, of keys and of values, which dense and window layers on a CPU leave out.
    """

    budget: int
    sink: int
    window: int
    tau: float | tuple[float, ...]
    page: int
    dense_layers: tuple[int, ...] = (0,)
    digest: str = "cuboid-mean"
    dense_below: int = 0
    hysteresis: float = 0.0
    on_turn: bool = False
    int8: bool = False
    fp8: bool = False
    kv_scales: tuple[float, float] = (1.0, 1.0)

    def __post_init__(self) -> None:
        whole = not any(tokens % self.page for tokens in (self.budget, self.sink, self.window, self.dense_below))
        if not whole or self.window < self.page or self.budget <= self.sink + self.window:
            raise ValueError(f"{self}: expected multiples of page, window >= page and budget > sink + window")

    def of_layer(self, layer: int) -> OracleSettings:
        """The same, with the threshold of one layer."""
        return replace(self, tau=self.tau[layer]) if isinstance(self.tau, tuple) else self

    def stands(self, n: int) -> bool:
        """Whether kv heads that are not corrected keep their pages behind a step with n tokens."""
        return self.on_turn and n % self.page != 0 and not (self.budget < self.dense_below and n <= self.dense_below)

    def selected_pages(self, n: int) -> int:
        """Candidates of a context of n tokens that are selected, at most."""
        return page_count(n, self.page) if n <= self.dense_below else (self.budget - self.sink - self.window) // self.page


@dataclass(frozen=True)
class Selection:
    """Pages that one kv head selected, ascending, and how clear the choice was.

    ``gap`` is the score of the worst selected page minus that of the best one left out, relative to the former:
    0 is a tie, inf means that no candidate was left out. A small gap explains a different choice elsewhere.
    """

    pages: list[int]
    gap: float


@dataclass(frozen=True)
class LayerStep:
    """What one layer did in one decode step; every list is indexed by kv head."""

    corrected: list[bool]
    attended: list[list[int]]  # page numbers, ascending
    similarity: list[float]  # mean cosine with the previous step's query; nan in a dense layer
    gap: list[float]  # Selection.gap of the pages used; inf in a dense layer

    @classmethod
    def dense(cls, heads: int, pages: int) -> LayerStep:
        return cls([False] * heads, [list(range(pages))] * heads, [float("nan")] * heads, [float("inf")] * heads)


@dataclass(frozen=True)
class OracleResult:
    """Greedy tokens and how they came about.

    Prefill produces ``tokens[0]``; decode step i consumes ``tokens[i]`` and produces ``tokens[i + 1]``. So ``steps``,
    ``corrected`` and ``attended`` have one entry less than ``tokens``, ``logits`` and ``margin``.
    """

    tokens: list[int]
    logits: torch.Tensor  # [len(tokens), vocabulary] fp32
    steps: list[list[LayerStep]]  # [decode step][layer with attention]

    @property
    def margin(self) -> list[float]:
        """Top-1 minus top-2 logit of each token."""
        best, second = self.logits.topk(2).values.unbind(-1)
        return (best - second).tolist()

    @property
    def corrected(self) -> list[list[list[bool]]]:
        """[decode step][layer][kv head]"""
        return [[layer.corrected for layer in step] for step in self.steps]

    @property
    def attended(self) -> list[list[list[list[int]]]]:
        """[decode step][layer][kv head] -> page numbers"""
        return [[layer.attended for layer in step] for step in self.steps]


def page_count(n: int, page: int) -> int:
    """Pages that n tokens occupy, a partial last page included."""
    return (n + page - 1) // page


def pinned(n: int, settings: OracleSettings) -> list[int]:
    """Sink and window pages of a context of n tokens, which are attended to whatever their score."""
    pages = page_count(n, settings.page)
    sink = range(min(settings.sink // settings.page, pages))
    window = range(max(0, pages - settings.window // settings.page), pages)
    return sorted({*sink, *window})


def candidates(n: int, settings: OracleSettings) -> list[int]:
    """Pages of a context of n tokens that compete for selection; all of them are full."""
    return list(range(settings.sink // settings.page, page_count(n, settings.page) - settings.window // settings.page))


def hadamard(dim: int) -> torch.Tensor:
    """An orthonormal matrix of ones and minus ones: Sylvester's, of the largest power of two in ``dim``, along the diagonal."""
    block, size = torch.ones(1, 1), dim & -dim
    while len(block) < size:
        block = torch.cat((torch.cat((block, block), 1), torch.cat((block, -block), 1)))
    return torch.block_diag(*[block / size**0.5] * (dim // size))


def coded(numbers: torch.Tensor) -> torch.Tensor:
    """[..., D] in 8 bits and back: whole multiples, from -127 to 127, of a 127th of the largest number, which is kept in 16 bits."""
    scale = (numbers.abs().amax(dim=-1, keepdim=True) / 127).half().float()
    return (numbers / scale).nan_to_num(0.0).round().clamp(-127, 127) * scale


def floats(numbers: torch.Tensor, scale: float) -> torch.Tensor:
    """Numbers over ``scale`` as the nearest floats of 8 bits with four of exponent and three of mantissa, at most 448, and back."""
    return (numbers / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def digest(keys: torch.Tensor, page: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A box's upper and lower corner for each full page: [H, n, D] -> two of [H, n // page, D] fp32.

    "min-max" is the elementwise max and min of its keys. "cuboid-mean" has the same centre, and the mean distance of the keys from it.
    """
    heads, n, dim = keys.shape
    paged = keys[:, : n // page * page].double().reshape(heads, n // page, page, dim)
    upper, lower = paged.amax(dim=2), paged.amin(dim=2)
    if kind == "cuboid-mean":
        centre = (upper + lower) / 2
        distance = (paged - centre[:, :, None]).abs().mean(dim=2)
        upper, lower = centre + distance, centre - distance
    return upper.float(), lower.float()


def two_bit(keys: torch.Tensor, page: int) -> torch.Tensor:
    """Keys of full pages moved, in each dimension, to the nearest of four levels between the page's smallest and its largest, the lower
    of equally near ones: [H, n, D] -> [H, P, page, D]."""
    heads, n, dim = keys.shape
    paged = keys[:, : n // page * page].double().reshape(heads, n // page, page, dim)
    upper, lower = paged.amax(dim=2, keepdim=True), paged.amin(dim=2, keepdim=True)
    level = ((paged - lower) / (upper - lower) * 3 - 0.5).ceil().nan_to_num(0.0)
    return (lower + (upper - lower) * level / 3).float()


def mass(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Logarithm of the sum of the exponentials of q . k in each page: [H, G, D] and [H, P, S, D] -> [H, G, P]."""
    return torch.einsum("hgd,hpsd->hgps", query.float(), keys).logsumexp(dim=-1)


def score(query: torch.Tensor, maxima: torch.Tensor, minima: torch.Tensor) -> torch.Tensor:
    """Largest q . k of a key in each page's box: [H, G, D] and [H, P, D] -> [H, G, P]."""
    query, maxima, minima = query.float()[:, :, None, :], maxima[:, None, :, :], minima[:, None, :, :]
    return torch.maximum(query * maxima, query * minima).sum(dim=-1)


def select(
    query: torch.Tensor,
    keys: torch.Tensor,
    n: int,
    settings: OracleSettings,
    scaling: float | None = None,
    last: Sequence[Collection[int]] | None = None,
) -> list[Selection]:
    """Best candidates of a context of n tokens for each kv head; of equal scores the lower page number wins.

    Query [H, G, D] and keys [H, n, D] are post-RoPE. The last key may be missing: it lies in the window, unscored. The scaling is that of
    the layer's attention, 1 / sqrt(D) unless given. The pages of ``last`` are those of each kv head's last selection, if there was one.
    """
    query, competing = query.float() * (query.shape[-1] ** -0.5 if scaling is None else scaling), candidates(n, settings)
    if settings.digest == "two-bit":
        scores = mass(query, two_bit(keys, settings.page)[:, competing])
    else:
        maxima, minima = digest(keys, settings.page, settings.digest)
        scores = score(query, maxima[:, competing], minima[:, competing])
    pooled = scores.softmax(dim=-1).mean(dim=1)
    if last is not None:
        again = torch.tensor([[page in pages for page in competing] for pages in last], dtype=torch.bool).view_as(pooled)
        pooled = pooled.where(~again, pooled * math.exp(settings.hysteresis))
    ranked, order = pooled.sort(dim=-1, descending=True, stable=True)
    kept = settings.selected_pages(n)
    chosen = [sorted(competing[i] for i in best) for best in order[:, :kept].tolist()]
    if len(competing) <= kept:
        return [Selection(pages, float("inf")) for pages in chosen]
    worst, left_out = ranked[:, kept - 1], ranked[:, kept]
    gaps = ((worst - left_out) / worst).nan_to_num(0.0).tolist()  # 0 / 0 is a tie
    return [Selection(pages, gap) for pages, gap in zip(chosen, gaps, strict=True)]


def similarity(query: torch.Tensor, previous: torch.Tensor) -> list[float]:
    """Cosine between the queries of two steps, averaged over each kv head's group: two of [H, G, D] -> H numbers."""
    return F.cosine_similarity(query.float(), previous.float(), dim=-1).mean(dim=-1).tolist()


def attend_to_pages(
    attended: list[list[int]], query, keys, values, page: int, scaling: float, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention of each kv head's group over its pages: query [H, G, D], keys and values [H, n, D], sinks [H * G] -> [H * G, 1, D]."""
    n, outputs = keys.shape[1], []
    for head, pages in enumerate(attended):
        tokens = [token for j in pages for token in range(j * page, min((j + 1) * page, n))]
        logits = query[head].float() @ keys[head, tokens].float().T * scaling
        weights = softmax_with(None if sinks is None else sinks.view(len(keys), -1)[head, :, None], logits)
        outputs.append(weights @ values[head, tokens].float())
    return torch.cat(outputs)[:, None].to(query.dtype)


def softmax_with(sinks: torch.Tensor | None, logits: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension of [..., n], in which sinks [..., 1] take part, too: they have weight, and no value."""
    if sinks is None:
        return logits.softmax(dim=-1)
    return torch.cat((logits, sinks.float()), dim=-1).softmax(dim=-1)[..., :-1]


def attend_causally(query, keys, values, scaling: float, window: int | None, sinks: torch.Tensor | None) -> torch.Tensor:
    """Attention of the last T of n tokens to the ``window`` tokens that end with their own, None is all before: as ``Generation.attend``."""
    group, places = len(query) // len(keys), torch.arange(keys.shape[1])
    own = places[keys.shape[1] - query.shape[1] :, None]
    hidden = (places > own) | (places <= own - (window or len(places)))
    keys, values = (x.repeat_interleave(group, dim=0).float() for x in (keys, values))
    logits = (query.float() @ keys.transpose(1, 2) * scaling).masked_fill(hidden, float("-inf"))
    weights = softmax_with(None if sinks is None else sinks[:, None, None].expand(-1, query.shape[1], 1), logits)
    return (weights @ values).to(query.dtype)


def decode_step(query, keys, previous, speculative: list[Selection], settings: OracleSettings, scaling: float | None = None) -> LayerStep:
    """Decide what a retrieval layer attends to: queries [H, G, D] of this step and the previous one, keys [H, n, D]."""
    n = keys.shape[1]
    cosines = similarity(query, previous)
    corrected = [cosine < settings.tau for cosine in cosines]
    last = [sorted({*pinned(n, settings), *selection.pages}) for selection in speculative]
    now = select(query, keys, n, settings, scaling, last)
    chosen = [now[head] if corrected[head] else speculative[head] for head in range(len(keys))]
    attended = [sorted({*pinned(n, settings), *selection.pages}) for selection in chosen]
    return LayerStep(corrected, attended, cosines, [selection.gap for selection in chosen])


def carry(
    query, keys, previous, speculative: list[Selection], step: LayerStep, settings: OracleSettings, scaling: float | None = None
) -> tuple[torch.Tensor, list[Selection]]:
    """Query and pages of each kv head for the next step, behind one that was decided as ``step``; arguments as of ``decode_step``."""
    n = keys.shape[1]
    ahead = select(query, keys, n + 1, settings, scaling, step.attended)
    if not settings.stands(n):
        return query, ahead
    chosen = [now if corrected else before for now, before, corrected in zip(ahead, speculative, step.corrected, strict=True)]
    return query.where(torch.tensor(step.corrected, device=query.device)[:, None, None], previous), chosen


@dataclass
class Generation:
    """One sequence being generated: what each retrieval layer carries between steps, and the record of this step."""

    settings: OracleSettings | None
    layers: Sequence[int]  # those with attention, in their order
    previous: dict[int, torch.Tensor] = field(default_factory=dict)  # layer -> [H, G, D] query
    speculative: dict[int, list[Selection]] = field(default_factory=dict)  # layer -> per kv head
    step: list[LayerStep] = field(default_factory=list)

    def attend(self, layer: int, query, keys, values, scaling: float, prefill: bool, window=None, sinks=None) -> torch.Tensor:
        """Attention of the last T of n tokens: query [Hq, T, D], keys and values [H, n, D], learned sinks [Hq] -> [Hq, T, D].

        A layer with a ``window`` attends to as many tokens, and is no retrieval layer.
        """
        settings, (heads, n, dim) = self.settings, keys.shape
        retrieval = settings is not None and window is None and layer not in settings.dense_layers
        last_query = query[:, -1].reshape(heads, -1, dim)
        if retrieval and settings.int8:
            turn = hadamard(dim)
            keys, values = coded(keys @ turn) @ turn, coded(values)
        if settings is not None and settings.fp8:
            scales = settings.kv_scales if retrieval else (1.0, 1.0)
            keys, values = (floats(each, scale) for each, scale in zip((keys, values), scales))
        if retrieval and not prefill:
            held = self.previous[layer], self.speculative[layer]
            step = decode_step(last_query, keys, *held, settings.of_layer(layer), scaling)
            self.previous[layer], self.speculative[layer] = carry(last_query, keys, *held, step, settings, scaling)
            output = attend_to_pages(step.attended, last_query, keys, values, settings.page, scaling, sinks)
        else:
            step = LayerStep.dense(heads, page_count(n, settings.page) if settings else 0)
            if window is None and sinks is None:
                batch = query[None], keys[None], values[None]
                output = F.scaled_dot_product_attention(*batch, is_causal=prefill, scale=scaling, enable_gqa=True)[0]
            else:
                output = attend_causally(query, keys, values, scaling, window, sinks)
        if retrieval and prefill:
            self.previous[layer], self.speculative[layer] = last_query, select(last_query, keys, n + 1, settings, scaling)
        expected = self.layers[len(self.step)]
        assert layer == expected, f"layer {layer} attended after {len(self.step)} layers: expected {expected}, in the model's order"
        self.step.append(step)
        return output


def oracle_attention(module, query, key, value, attention_mask, scaling, generation: Generation, prefill, **kwargs):
    """Attention function of the transformers registry: query [1, Hq, T, D], key and value [1, H, n, D]."""
    if kwargs.get("softcap") is not None:
        raise ValueError(f"softcap = {kwargs['softcap']}: expected None; the oracle caps no logits")
    window, sinks = kwargs.get("sliding_window"), kwargs.get("s_aux")
    output = generation.attend(module.layer_idx, query[0], key[0], value[0], scaling, prefill, window, sinks)
    return output.transpose(0, 1)[None], None


AttentionInterface.register("freekv_oracle", oracle_attention)


class Oracle:
    """Greedy generation with FreeKV semantics, or dense; one model serves any number of settings.

    Args:
        model: a checkpoint's path, loaded as ``dtype``, or a loaded model, whose attention the oracle takes over.
    """

    def __init__(self, model: str | Path | PreTrainedModel, dtype: torch.dtype = torch.float32) -> None:
        if not isinstance(model, PreTrainedModel):
            config = AutoConfig.from_pretrained(model)
            if config.model_type == "cohere2":
                config.sliding_window += 1  # SGLang lets this model see a token more than transformers does
            kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
            model = kind.from_pretrained(model, config=config, dtype=dtype)
        text = model.config.get_text_config()
        model.set_attn_implementation("freekv_oracle" if text is model.config else {"text_config": "freekv_oracle"})
        self.model = model.eval()
        self.first = int(model.config.model_type == "gemma3")  # SGLang counts its positions from one, and boxes of keys turn with them
        kinds = getattr(text, "layer_types", None) or [None] * text.num_hidden_layers
        self.layers = [layer for layer, kind in enumerate(kinds) if kind != "linear_attention"]

    @torch.no_grad()
    def generate(
        self,
        input_ids: Sequence[int],
        max_new_tokens: int,
        settings: OracleSettings | None = None,
        stop_token_ids: Collection[int] = (),
        seen: Mapping[str, torch.Tensor] | None = None,
    ) -> OracleResult:
        """Continue ``input_ids`` greedily; settings None is dense. A stop token ends the result and is part of it.

        What is ``seen`` are the model's arguments for the images of the prompt.
        """
        generation, cache = Generation(settings, self.layers), DynamicCache(config=self.model.config.get_text_config())
        tokens, logits, steps = [], [], []
        if hasattr(self.model.model, "rope_deltas"):
            self.model.model.rope_deltas = None  # of the images of the prompt before
        while len(tokens) < max_new_tokens and not (tokens and tokens[-1] in stop_token_ids):
            fed = torch.tensor([tokens[-1:] or list(input_ids)], device=self.model.device)
            generation.step = []
            more = dict(seen or {}) if not tokens else {}
            if self.first:
                place = self.first + (len(input_ids) + len(tokens) - 1 if tokens else 0)
                more["position_ids"] = torch.arange(place, place + fed.shape[1], device=self.model.device)[None]
            output = self.model(fed, past_key_values=cache, logits_to_keep=1, generation=generation, prefill=not tokens, **more)
            steps.append(generation.step)
            logits.append(output.logits[0, -1].float().cpu())
            tokens.append(int(logits[-1].argmax()))
        return OracleResult(tokens, torch.stack(logits), steps[1:])
