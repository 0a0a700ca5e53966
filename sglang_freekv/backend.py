# SPDX-License-Identifier: Apache-2.0
"""FreeKVAttnBackend: SGLang's attention interface to the retrieval engine, and to stock attention for dense layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from inspect import signature

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.context import is_in_breakable_cuda_graph
from sglang.srt.utils.common import is_hopper_with_cuda_12_3

from sglang_freekv.batch import DecodeBatch
from sglang_freekv.closing import captured
from sglang_freekv.config import SGLANG_FP8, Refusal
from sglang_freekv.cpu_attention import WindowedAttention
from sglang_freekv.kv_pool import FreeKVPool, pool_of
from sglang_freekv.layers import LayerKind
from sglang_freekv.memory_pool.sizing import KVShape
from sglang_freekv.rehearsal import compile_all
from sglang_freekv.residency import Residency
from sglang_freekv.windowed_pool import WindowedPool


class FreeKVAttnBackend(AttentionBackend):
    """Hands retrieval layers to the pool's ``Retrieval`` engine, and dense layers to the stock backend of the device.

    Raises:
        RuntimeError: the KV pool is not a FreeKVPool.
        Refusal: the model has an attention layer that the engine cannot serve.
    """

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__()
        pool = self.token_to_kv_pool = pool_of(model_runner.token_to_kv_pool)
        if not isinstance(pool, FreeKVPool):
            raise RuntimeError(
                f"the KV pool is {type(pool).__name__}, expected FreeKVPool; another plugin replaced it: remove that plugin, or use "
                "--kv-retrieval none"
            )
        self.req_to_token_pool, self.context_len = model_runner.req_to_token_pool, model_runner.model_config.context_len
        self.retrieval, self.planner = pool.retrieval, pool.planner
        self.residency = Residency(pool.store.frames, self.req_to_token_pool.req_to_token, pool.config.whole_pages)
        pool.residency = self.residency
        layers = sorted(_attention_layers(model_runner.model), key=lambda layer: layer.layer_id)
        _check_layers(layers, pool)
        self.scales = [layer.scaling * self._factors(layer)[0] for layer in layers if layer.layer_id in pool.retrieval_index]
        self.dense = _stock_backend(model_runner)
        self.batch: DecodeBatch | None = None
        self.page_table: torch.Tensor | None = None
        self.frames: torch.Tensor | None = None
        model_runner.capture_tail_hooks.append(self._join)
        if model_runner.device != "cpu":
            learned_sinks = None
            if model_runner.model_config.has_attention_sinks:
                learned_sinks = torch.zeros(pool.shape.query_heads, dtype=torch.bfloat16, device=model_runner.device)  # as models have them
            compile_all(self.retrieval, self.residency, pool.num_rows, self._most_pages, learned_sinks=learned_sinks)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Prepare a forward pass without a graph, or with a graph for what lies between the attention layers of an extend.

        The engine comes first, because a plan of FlashInfer waits for the device.
        """
        if is_in_breakable_cuda_graph() and self.residency.batch is None:
            self.batch = None  # of nobody: SGLang captures an extend, and calls attention between the parts
        elif not forward_batch.forward_mode.is_idle():
            self._prepare(forward_batch)
        self.dense.init_forward_metadata(forward_batch)

    def _prepare(self, forward_batch: ForwardBatch) -> None:
        """Snapshot the scheduler's tables, which it may rewrite during the pass. Begin an extend if the pass is one."""
        self.retrieval.complete_all_transfers()  # its plans read which frames are slots
        # SGLang passes views of buffers. Its next pass overwrites them, when the selection stream may still read.
        rows, seq_lens = forward_batch.req_pool_indices.clone(), forward_batch.seq_lens.clone()
        width = self._most_pages if rows.is_cuda else self._pages(int(forward_batch.seq_lens_cpu.max()))
        page_table, frames = torch.empty((2, len(rows), width), dtype=torch.int32, device=rows.device)
        where = rows, seq_lens, page_table, frames
        if forward_batch.forward_mode.is_decode():
            self.batch = DecodeBatch(*where)
            self._begin_decode(self.batch, self._full_pages(forward_batch.seq_lens_cpu))
            self.planner.note_step()
        else:
            lengths = list(forward_batch.extend_prefix_lens_cpu), list(forward_batch.extend_seq_lens_cpu)
            key_lens, in_place = [sum(both) for both in zip(*lengths)], self.residency.in_place
            given = self.residency.begin_extend(*where, forward_batch.extend_prefix_lens, key_lens, in_place=in_place)
            tables = self.req_to_token_pool.req_to_token
            plan = self.planner.plan(rows, page_table, frames, *lengths, tables, given=given, in_place=in_place)
            self.batch = plan.batch
            self.retrieval.prepare_extend(plan)

    def _begin_decode(self, batch: DecodeBatch, begins: int) -> None:
        """Begin a decode step, of which ``begins`` requests may begin a page next. Pages that come back for it are filled."""
        given = self.residency.begin_decode(batch.rows, batch.seq_lens, batch.page_table, batch.frames, begins)
        if given is not None:
            self.retrieval.refill(batch.page_table, given)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.dense.init_cuda_graph_state(max_bs, max_num_tokens)
        device = self.req_to_token_pool.req_to_token.device
        self.page_table = torch.zeros((max_bs, self._most_pages), dtype=torch.int32, device=device)
        self.frames = torch.full_like(self.page_table, -1)
        if check_cuda_graph_backend(Phase.PREFILL, Backend.BREAKABLE):
            self.retrieval.close_together(self.scales, self.token_to_kv_pool.num_rows, self._most_pages, captured)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return self.dense.get_cuda_graph_seq_len_fill_value()

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """Before a decode graph is captured or replayed: write the snapshot to the page table that the graph reads."""
        self.dense.init_forward_metadata_out_graph(forward_batch, in_capture)
        size = forward_batch.batch_size
        self.retrieval.complete_all_transfers()  # of passes without a graph; a graph leaves nothing in flight
        fills = 0
        if in_capture:
            self.planner.note_step()
        else:
            fills = size if forward_batch.seq_lens_cpu is None else self._full_pages(forward_batch.seq_lens_cpu[:size])
            self.planner.note_graph(fills > 0)
        batch = DecodeBatch(
            forward_batch.req_pool_indices[:size], forward_batch.seq_lens[:size], self.page_table[:size], self.frames[:size]
        )
        self._begin_decode(batch, fills)
        if in_capture:
            self.batch = batch

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        self.dense.init_forward_metadata_in_graph(forward_batch)

    def on_after_cuda_graph_warmup(self) -> None:
        self.dense.on_after_cuda_graph_warmup()

    def _join(self, runner, output, forward_batch: ForwardBatch, num_tokens: int) -> None:
        """In the graph, behind the logits: join the side streams."""
        self.retrieval.end_step(self.batch.rows)

    def _pages(self, tokens: int) -> int:
        """Pages of a context of ``tokens``, including one that the next token may begin."""
        return tokens // self.token_to_kv_pool.page_size + 1

    @property
    def _most_pages(self) -> int:
        """Width of the page table on a GPU, fixed because graphs are captured for it.

        SGLang ends a request before it has ``context_len`` tokens. Kernels are compiled apart for widths that 16 divides, so all are such.
        """
        return -(-self._pages(self.context_len - 1) // 16) * 16

    def _full_pages(self, seq_lens: torch.Tensor) -> int:
        """How many contexts of ``seq_lens [B]``, on the host, are whole pages: the new token fills its page."""
        return int((seq_lens % self.token_to_kv_pool.page_size == 0).sum())

    def forward_decode(self, q, k, v, layer: RadixAttention, forward_batch: ForwardBatch, save_kv_cache: bool = True, **kwargs):
        """``[B, Hq * D]`` attention of one new token per request."""
        return self._forward(self.retrieval.decode, self.dense.forward_decode, (q, k, v), layer, forward_batch, save_kv_cache, kwargs)

    def forward_extend(self, q, k, v, layer: RadixAttention, forward_batch: ForwardBatch, save_kv_cache: bool = True, **kwargs):
        """``[T, Hq * D]`` attention of the new tokens behind a prefix."""
        return self._forward(self.retrieval.extend, self.dense.forward_extend, (q, k, v), layer, forward_batch, save_kv_cache, kwargs)

    def _forward(self, retrieve, dense, qkv, layer, forward_batch, save_kv_cache, kwargs):
        q, k, v = qkv
        index = self.token_to_kv_pool.retrieval_index.get(layer.layer_id)
        options = {name: value for name, value in kwargs.items() if value is not None}
        if index is None:
            _expect_heeded(layer, options, _options_of(dense) if options else ())
            if layer.k_scale_float is not None:  # SGLang's FlashInfer and Triton multiply by scales even what was not divided by them
                layer.k_scale_float, layer.v_scale_float = self._factors(layer)
            return dense(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **options)
        _expect_heeded(layer, options, ("sinks",))
        if not save_kv_cache or k is None or v is None:
            raise RuntimeError(
                f"layer {layer.layer_id} attends without keys and values of its own, expected every retrieval layer to store them; the "
                "model shares or fuses KV in a way that is not supported, use --kv-retrieval none"
            )
        if self.batch is None:
            return torch.zeros_like(q).reshape(q.shape[0], -1)
        queries = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        keys, values = (x.view(-1, layer.tp_k_head_num, layer.head_dim) for x in (k, v))
        of_keys, of_values = self._factors(layer)
        if (of_keys, of_values) != (1, 1):
            keys, values = keys / layer.k_scale, values / layer.v_scale
        output = retrieve(index, queries, keys, values, self.batch, layer.scaling * of_keys, learned_sinks=options.get("sinks"))
        return (output if of_values == 1 else output * of_values).reshape(q.shape[0], -1)

    def _factors(self, layer: RadixAttention) -> tuple[float, float]:
        """A checkpoint's scales of a layer: what stored keys and values in floats of 8 bits are multiplied by. They are 1 without.

        Logits are multiplied by that of keys, so scores, learned sinks and attention see those of the model. SGLang divides by its tensors.
        """
        if self.token_to_kv_pool.config.kv_dtype not in SGLANG_FP8 or layer.k_scale_float is None:
            return 1.0, 1.0
        return layer.k_scale_float, layer.v_scale_float

    def support_triton(self) -> bool:
        return self.dense.support_triton()


def _stock_backend(model_runner: ModelRunner) -> AttentionBackend:
    """What computes dense and window layers.

    On Hopper it is FlashAttention 3, as in stock SGLang. SGLang's FlashInfer lists each token of each context before a step, with one program
    for each request. It knows no learned sinks, and lets the window layers of prompts without a prefix attend to everything before
    (``extend_no_prefix``). With floats of 8 bits FlashAttention 3 rounds queries, and does not read e5m2. In decode graphs SGLang expects
    powers of two as its page sizes.
    """
    pool, kept = model_runner.token_to_kv_pool, model_runner.kv_cache_dtype
    windows = isinstance(pool, WindowedPool)
    if model_runner.device == "cpu":
        return WindowedAttention(model_runner) if windows else ATTENTION_BACKENDS["torch_native"](model_runner)
    needs_windows = windows or model_runner.model_config.has_attention_sinks
    others = "triton" if needs_windows else "flashinfer"
    reads = kept != torch.float8_e5m2 and (needs_windows or kept != torch.float8_e4m3fn) and model_runner.page_size.bit_count() == 1
    return ATTENTION_BACKENDS["fa3" if is_hopper_with_cuda_12_3() and reads else others](model_runner)


def _attention_layers(model: torch.nn.Module) -> Iterator[RadixAttention]:
    """Attention layers among the model's modules, and those that SGLang's Transformers backend keeps in ``attention_instances``."""
    beside = getattr(model, "attention_instances", None) or {}
    yield from (module for module in (*model.modules(), *beside.values()) if isinstance(module, RadixAttention))


def _options_of(attention: Callable[..., torch.Tensor]) -> list[str]:
    return [name for name, parameter in signature(attention).parameters.items() if parameter.default is not parameter.empty]


def _expect_heeded(layer: RadixAttention, options: Collection[str], heeded: Collection[str]) -> None:
    """Raise RuntimeError if a call of attention has an option that is not ``heeded``: without it the result is another."""
    if unheeded := [name for name in options if name not in heeded]:
        raise RuntimeError(
            f"layer {layer.layer_id} calls its attention with {', '.join(unheeded)}, expected options among {', '.join(heeded)}; the model "
            "computes attention in a way that is not supported, use --kv-retrieval none"
        )


def _check_layers(layers: list[RadixAttention], pool: FreeKVPool) -> None:
    """Refuse a model unless each layer that has KV has exactly one attention, of the pool's shape. An extend stages the next one's prefix in
    each.

    Raises:
        Refusal: a layer has no attention or several, or one that ``_check_layer`` refuses.
    """
    numbers = sorted(layer.layer_id for layer in layers)
    expected = [layer for layer, kind in enumerate(pool.shape.layers.kinds) if kind is not LayerKind.STATELESS]
    if numbers != expected:
        wrong = sorted(set(numbers) ^ set(expected)) or sorted({number for number in numbers if numbers.count(number) > 1})
        raise Refusal(
            f"--kv-retrieval: expected one attention in each of the {len(expected)} layers with KV, but layer "
            f"{wrong[0]} has {numbers.count(wrong[0])}; use --kv-retrieval none"
        )
    for layer in layers:
        _check_layer(layer, pool.shape)


def _check_layer(layer: RadixAttention, shape: KVShape) -> None:
    """Raise Refusal for an attention layer whose semantics the retrieval engine does not have."""
    found, expected = (layer.tp_q_head_num, layer.tp_k_head_num, layer.head_dim), (shape.query_heads, shape.kv_heads, shape.head_dim)
    has_window = layer.sliding_window_size is not None and layer.sliding_window_size > -1
    unlike = {
        f"{found[0]} query heads, {found[1]} kv heads and a head_dim of {found[2]} where others have {expected}": found != expected,
        "cross-attention": layer.is_cross_attention,
        "encoder attention": layer.attn_type == AttentionType.ENCODER_ONLY,
        f"{'' if has_window else 'no '}sliding-window attention": has_window != (shape.layers.kinds[layer.layer_id] is LayerKind.WINDOW),
        "logit soft-capping": layer.logit_cap > 0,
        "keys and values of different width": layer.qk_head_dim != layer.v_head_dim,
    }
    if used := [name for name, present in unlike.items() if present]:
        raise Refusal(f"--kv-retrieval: layer {layer.layer_id} uses {used[0]}, which is not supported; use --kv-retrieval none")
