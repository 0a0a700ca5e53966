"""A Hugging Face checkpoint taken apart: dense prefill once for B prompts, then decoding with a method in every layer.

    model = OfflineModel("benchmarks/needle/model")
    prefilled = model.prefill(token_ids)
    tokens = model.decode(prefilled, [full] + [method] * (model.layers - 1), budget, max_new_tokens=16)

The decoder layers' own modules do all but attention. The first token of an answer comes of the dense prefill. Letters as in method.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from benchmarks.accuracy.coded import stored
from benchmarks.accuracy.method import AS_COMPUTED, Budget, Method, Prompt, Step
from benchmarks.accuracy.tally import Tally

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPE = ("default", "linear", "llama3")  # rotations proper, whose angles do not depend on how long the context is


@dataclass(frozen=True)
class Prefilled:
    """B prompts after dense prefill.

    Args:
        prompts: each layer's view; ``queries`` may hold the last positions only.
        first: ``[B] int64`` greedy first tokens.
    """

    prompts: list[Prompt]
    first: torch.Tensor

    @property
    def tokens(self) -> int:
        """T"""
        return self.prompts[0].keys.shape[2]


class Rotation:
    """RoPE of a model, by its own cosines and sines: ``[..., N, D]`` by positions ``[..., N]``, negative to turn back.

    A slice or one number stands for the positions of all.
    """

    def __init__(self, rotary: torch.nn.Module, positions: int, device: torch.device | str, dtype: torch.dtype) -> None:
        cos, sin = rotary(torch.empty(0, dtype=dtype, device=device), torch.arange(positions, device=device)[None])
        self.cos, self.sin = cos[0], sin[0]

    def __call__(self, plain: torch.Tensor, positions: torch.Tensor | slice | int) -> torch.Tensor:
        low, high = plain.chunk(2, dim=-1)
        if isinstance(positions, torch.Tensor):
            positions = positions.to(self.cos.device)
            direction, positions = positions.sign()[..., None], positions.abs()
        else:
            direction = 1
        return plain * self.cos[positions] + torch.cat((-high, low), dim=-1) * (self.sin[positions] * direction)


class OfflineModel:
    """A decoder of one of ``FAMILIES`` whose attention is the caller's.

    Args:
        model: a checkpoint's path, or a loaded model.
        device: where to compute.
        dtype: in what, unless the model is loaded.

    Raises:
        ValueError: the model's attention is not plain, full and causal.
    """

    def __init__(self, model: str | Path | PreTrainedModel, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        if not isinstance(model, PreTrainedModel):
            model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        self.model, self.config, self.device = model.eval().to(device), model.config, device
        self.decoder = self.model.model
        if self.config.model_type not in FAMILIES:
            raise ValueError(f"model_type {self.config.model_type}: expected one of {', '.join(FAMILIES)}")
        if (rope := self.config.rope_parameters["rope_type"]) not in ROPE:
            raise ValueError(f"rope_type {rope}: expected one of {', '.join(ROPE)}")
        if any(getattr(layer.self_attn, "sliding_window", None) for layer in self.decoder.layers):
            raise ValueError("sliding_window: expected none; methods decide what is attended to")
        attention = self.decoder.layers[0].self_attn
        self.layers, self.head_dim, self.scale = len(self.decoder.layers), attention.head_dim, attention.scaling
        self.rotate = Rotation(self.decoder.rotary_emb, self.config.max_position_embeddings, device, self.model.dtype)

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Tokens that end an answer, by the checkpoint."""
        tokens = self.model.generation_config.eos_token_id
        return frozenset() if tokens is None else frozenset([tokens] if isinstance(tokens, int) else tokens)

    @torch.no_grad()
    def prefill(self, token_ids: torch.Tensor, queries: int | None = None, kv_dtypes: Sequence[str] = ()) -> Prefilled:
        """Dense causal attention over ``[B, T]`` token ids.

        Args:
            queries: how many of the last positions' queries to keep; None is all.
            kv_dtypes: of each layer, which attends to its KV as it is stored; without them all is as computed.
        """
        hidden = self.decoder.embed_tokens(token_ids.to(self.device))
        here, prompts = slice(0, token_ids.shape[1]), []
        for number, (layer, kv_dtype) in enumerate(zip(self.decoder.layers, kv_dtypes or [AS_COMPUTED] * self.layers, strict=True)):
            query, plain_keys, values = self._project(layer, hidden)
            query = self.rotate(query, here)
            keys, values = stored(self.rotate(plain_keys, here), values, kv_dtype)
            attended = F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=self.scale, enable_gqa=True)
            hidden = self._behind_attention(layer, hidden, attended)
            kept = query if queries is None or queries >= query.shape[2] else query[:, :, -max(1, queries) :].clone()
            prompts.append(Prompt(kept, keys, values, plain_keys, self.rotate, self.scale, number, self.layers, kv_dtype))
        return Prefilled(prompts, self._logits(hidden[:, -1]).argmax(dim=-1))

    @torch.no_grad()
    def decode(
        self,
        prefilled: Prefilled,
        methods: Sequence[Method],
        budget: Budget,
        max_new_tokens: int,
        stop_tokens: Collection[int] = (),
        tally: Tally | None = None,
    ) -> list[list[int]]:
        """Continue B prompts greedily, in lock step.

        Args:
            methods: one for each layer.
            stop_tokens: each ends its sequence and is part of it.
            tally: takes what the layers did for sequences that had not ended.

        Returns:
            New tokens of each sequence.
        """
        caches = [method.begin(prompt, budget) for method, prompt in zip(methods, prefilled.prompts, strict=True)]
        tokens, fed = [[token] for token in prefilled.first.tolist()], prefilled.first
        if tally is not None:
            tally.begin(prefilled.prompts)
        for position in range(prefilled.tokens, prefilled.tokens + max_new_tokens - 1):
            alive = [sequence[-1] not in stop_tokens for sequence in tokens]
            if not any(alive):
                break
            counted = torch.tensor(alive, device=self.device)
            fed = self._step(fed, position, prefilled.prompts, caches, counted, tally).argmax(dim=-1)
            for sequence, token, goes_on in zip(tokens, fed.tolist(), alive):
                sequence += [token] * goes_on
        return tokens

    @torch.no_grad()
    def follow(
        self, prefilled: Prefilled, methods: Sequence[Method], budget: Budget, token_ids: torch.Tensor, tally: Tally | None = None
    ) -> Iterator[torch.Tensor]:
        """Continue B prompts by given tokens ``[B, N]``, whatever the model would have said (teacher forcing).

        Args:
            methods: one for each layer.
            tally: takes what the layers did from the second step on; the first one reads what no step read before it.

        Yields:
            ``[B, V] float32`` logits behind each token.
        """
        caches = [method.begin(prompt, budget) for method, prompt in zip(methods, prefilled.prompts, strict=True)]
        token_ids = token_ids.to(self.device)
        if tally is not None:
            tally.begin(prefilled.prompts)
        for number, fed in enumerate(token_ids.unbind(1)):
            counted = torch.full_like(fed, number > 0, dtype=torch.bool)
            yield self._step(fed, prefilled.tokens + number, prefilled.prompts, caches, counted, tally)

    @torch.no_grad()
    def dense_logits(self, prefilled: Prefilled, token_ids: torch.Tensor) -> torch.Tensor:
        """``[B, N, V] float32`` behind each of ``[B, N]`` tokens that follow B prompts, by the model as transformers runs it."""
        cache = DynamicCache()
        for layer, prompt in enumerate(prefilled.prompts):
            cache.update(prompt.keys, prompt.values, layer)
        return self.model(token_ids.to(self.device), past_key_values=cache).logits.float()

    def _step(
        self, fed: torch.Tensor, position: int, prompts: list[Prompt], caches: list, alive: torch.Tensor, tally: Tally | None
    ) -> torch.Tensor:
        """One token further: ``[B]`` tokens, to the logits ``[B, V]`` of the next ones."""
        before = hidden = self.decoder.embed_tokens(fed)[:, None]  # what entered the layer before, and this one
        for number, (layer, prompt, cache) in enumerate(zip(self.decoder.layers, prompts, caches)):
            query, plain_key, value = self._project(layer, hidden)
            query = self.rotate(query, position)
            early = query if number == 0 else self.rotate(self._queries(layer, layer.input_layernorm(before)), position)
            key, value = stored(self.rotate(plain_key, position), value, prompt.kv_dtype)
            step = Step(query[:, :, 0], early[:, :, 0], key[:, :, 0], value[:, :, 0], position)
            output = cache.attend(step)
            if output.shape != step.query.shape:
                raise ValueError(f"layer {number}: {type(cache).__name__} gave {list(output.shape)}, expected {list(step.query.shape)}")
            before, hidden = hidden, self._behind_attention(layer, hidden, output[:, :, None].to(hidden.dtype))
            if tally is not None:
                tally.add(number, step.query, cache.trace, alive)
        return self._logits(hidden[:, 0])

    def _heads(self, projected: torch.Tensor, norm: torch.nn.Module | None) -> torch.Tensor:
        """``[B, N, heads * D]`` to ``[B, heads, N, D]``."""
        heads = projected.unflatten(-1, (-1, self.head_dim))
        return (heads if norm is None else norm(heads)).transpose(1, 2)

    def _queries(self, layer: torch.nn.Module, normed: torch.Tensor) -> torch.Tensor:
        return self._heads(layer.self_attn.q_proj(normed), getattr(layer.self_attn, "q_norm", None))

    def _project(self, layer: torch.nn.Module, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values of a layer's input ``[B, N, hidden]``, before RoPE."""
        normed, attention = layer.input_layernorm(hidden), layer.self_attn
        keys = self._heads(attention.k_proj(normed), getattr(attention, "k_norm", None))
        return self._queries(layer, normed), keys, self._heads(attention.v_proj(normed), None)

    def _behind_attention(self, layer: torch.nn.Module, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The rest of a layer, given its input ``[B, N, hidden]`` and its heads' outputs ``[B, Hq, N, D]``."""
        hidden = hidden + layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[B, V] float32`` of the last layer's output ``[B, hidden]``."""
        return self.model.lm_head(self.decoder.norm(hidden)).float()
