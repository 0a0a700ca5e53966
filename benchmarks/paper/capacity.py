"""What servers may take of the device for KV, what they take, and what a decode step of theirs moves."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from benchmarks.setups import STOCK_PAGE, Setup
from sglang_freekv.config import GIB
from sglang_freekv.launch.checkpoint import Checkpoint
from sglang_freekv.launch.model import Model
from sglang_freekv.launch.quantization import quantization_of
from sglang_freekv.memory_pool.sizing import Sizing
from sglang_freekv.options import with_kv_cache_dtype

DEVICE_POOLS = ("device_cache_bytes", "digest_bytes", "dense_bytes", "staging_bytes", "canary_bytes")  # as server_info names them


@dataclass(frozen=True)
class System:
    """A server to measure.

    Args:
        base: ``stock`` or ``freekv``.
        more: flags beyond the setup's.
        limit: bytes that its pools of KV on the device may take; None is no limit.
    """

    name: str
    base: str
    setup: Setup
    more: dict = field(default_factory=dict)
    limit: int | None = None


def model_of(setup: Setup) -> Model:
    return _load(setup.config_path, "bfloat16" if setup.device == "cuda" else "float32")


@cache
def _load(config: Path, dtype: str) -> Model:
    return Model.load(Checkpoint.find(str(config)), Namespace(dtype=dtype))


def sizing_of(setup: Setup, system: str = "freekv") -> Sizing:
    """The product's own, of a setup's flags and of how ``system`` stores KV. Stock SGLang has only a token's bytes of it."""
    config = setup.freekv_config
    if system == "stock":
        config = with_kv_cache_dtype(replace(config, kv_dtype="auto"), setup.kv_dtype_of("stock"))
    return Sizing(config, model_of(setup).kv_shape(config), setup.context_length // setup.scale)


def token_bytes(sizing: Sizing) -> int:
    """Keys and values of one token in all layers that keep them of the whole context, in stock SGLang."""
    return (sizing.shape.retrieval_layers + sizing.shape.dense_layers) * sizing.shape.dense_token_bytes


def stock_tokens(setup: Setup, limit: int) -> int:
    """Tokens whose KV is ``limit`` bytes, in whole pages."""
    return limit // token_bytes(sizing_of(setup, "stock")) // STOCK_PAGE * STOCK_PAGE


def freekv_sizes(setup: Setup, limit: int) -> tuple[int, int, float]:
    """Tokens on the host, requests at once, and GiB beside their slots for resident pages, on a device with ``limit`` bytes for all pools.

    Requests are as many as fit with the longest context, because the slots of all of them are taken from the limit first.

    Raises:
        Refusal: not even one request fits.
    """
    sizing = sizing_of(setup)
    tokens = sizing.tokens(int(setup.host_memory * GIB), limit, setup.max_running)
    rows = sizing.longest_requests(limit, tokens, min(setup.max_running, sizing.rows(limit, tokens)))
    resident = sizing.frames(limit, tokens, rows) - (rows + 1) * sizing.config.cache_pages
    return tokens, rows, (resident + 0.5) * sizing.frame_bytes / GIB  # the server rounds down


def device_kv_bytes(setup: Setup, facts: dict) -> int:
    """What a server's pools of KV take of the device, by what it tells."""
    if (pools := facts["freekv"]) is not None:
        return sum(pools[name] for name in DEVICE_POOLS)
    return facts["max_total_num_tokens"] * token_bytes(sizing_of(setup, "stock"))


def expect_within(system: System, held: int) -> None:
    """Raises RuntimeError if a server took more than it may."""
    if system.limit is not None and held > system.limit:
        raise RuntimeError(
            f"{system.name}: its pools of KV take {held / GIB:.3f} GiB of the device, expected at most {system.limit / GIB:.3f}; "
            "leave out flags that enlarge them, or raise --device-kv"
        )


def bytes_of(setup: Setup, system: str, context: int, batch: int, missed: float = 0.0) -> dict[str, float]:
    """What one decode step moves at least, from device memory and over the link. FreeKV's dense layers are read in full.

    Args:
        context: tokens, as served.
        missed: the share of the selected pages that was recalled, as the server counted.
    """
    moved = kv_bytes(setup, system, context, missed)
    return {"hbm_bytes": weight_bytes(setup, batch) + batch * moved["hbm_bytes"], "link_bytes": batch * moved["link_bytes"]}


def weight_bytes(setup: Setup, batch: int) -> float:
    """Weights that one decode step reads: all but the table of embeddings, and of experts those that a token in the batch is routed to.

    Every expert is as likely as any other, as random weights make it.
    """
    model = model_of(setup)
    text, size = model.text, model.dtype.itemsize
    looked_up = 0 if text.tie_word_embeddings else text.vocab_size * text.hidden_size * size
    given = setup.config  # not model.text, whose class may have a number for models without experts
    experts = given.get("num_experts") or given.get("num_local_experts", 0)
    if not experts:
        return model.weight_bytes - looked_up
    of_experts = text.num_hidden_layers * experts * expert_bytes(setup)
    return model.weight_bytes - looked_up - of_experts * (1 - text.num_experts_per_tok / experts) ** batch


def expert_bytes(setup: Setup) -> int:
    """The matrices of one expert in one layer, as the checkpoint stores them."""
    model, given = model_of(setup), setup.config
    hidden, width = given["hidden_size"], given.get("moe_intermediate_size", given["intermediate_size"])
    quantization = quantization_of(model.config.quantization, given.get("quantization_config"))
    scheme = quantization and quantization.scheme_of("experts")
    if scheme is None:
        return 3 * hidden * width * model.dtype.itemsize
    return scheme.num_bytes(2 * width, hidden) + scheme.num_bytes(hidden, width)


def kv_bytes(setup: Setup, system: str, context: int, missed: float = 0.0) -> dict[str, float]:
    """What a decode step moves of the KV of one request."""
    sizing = sizing_of(setup, "stock" if system.startswith("stock") else "freekv")
    near = min(sizing.shape.window, context) * sizing.shape.layers.near * sizing.shape.dense_token_bytes
    if system.startswith("stock"):
        return {"hbm_bytes": context * token_bytes(sizing) + near, "link_bytes": 0}
    attended = min(setup.budget, context) * sizing.host_bytes_per_token
    recalled = missed * sizing.config.pages.selected * setup.page_size * sizing.host_bytes_per_token
    read = sizing.dense_bytes_per_token + sizing.digest_bytes_per_token
    return {"hbm_bytes": context * read + attended + recalled + near, "link_bytes": recalled}


def request_bytes(setup: Setup, system: str, prompt: int, answer: int, missed: float = 0.0) -> dict[str, float]:
    """What a request whose prompt is in the tree moves at least, however many share the weights."""
    moved = kv_bytes(setup, system, prompt, missed)
    prefix = 0 if system.startswith("stock") else prompt * sizing_of(setup).host_bytes_per_token
    return {"hbm_bytes": answer * moved["hbm_bytes"], "link_bytes": answer * moved["link_bytes"] + prefix}
