"""The needle model as it is trained: a Llama of grouped-query attention, and its Hugging Face files."""

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

EPSILON, THETA, POSITIONS = 1e-5, 1_000_000.0, 32768
SHARD_BYTES = 14_000_000
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; ``heads`` share ``kv_heads`` keys and values of ``head_dim``."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    feed_forward: int
    head_dim: int = 64


SHAPES = {
    "needle": Shape(layers=8, hidden=384, heads=6, kv_heads=2, feed_forward=1024),
    "gqa-4": Shape(layers=7, hidden=256, heads=16, kv_heads=4, feed_forward=768),
    "tiny": Shape(layers=2, hidden=64, heads=4, kv_heads=2, feed_forward=128, head_dim=16),
}


def normalized(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = hidden.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)
    return wide.to(hidden.dtype) * weight.to(hidden.dtype)


def linear(hidden: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    return functional.linear(hidden, layer.weight.to(hidden.dtype))


def rotated(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    left, right = heads.float().chunk(2, -1)
    cosine, sine = cosine[:, None], sine[:, None]
    return torch.cat([left * cosine - right * sine, right * cosine + left * sine], -1).to(heads.dtype)


class Layer(nn.Module):
    """One layer on flattened tokens; what surrounds its attention has one shape at every length."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.input_layernorm = nn.Parameter(torch.ones(shape.hidden))
        self.post_attention_layernorm = nn.Parameter(torch.ones(shape.hidden))
        self.q_proj = nn.Linear(shape.hidden, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden, bias=False)
        self.gate_proj = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.down_proj = nn.Linear(shape.feed_forward, shape.hidden, bias=False)

    def before(self, hidden: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``[tokens, hidden]`` to queries, keys and values ``[tokens, heads, head_dim]``."""
        normal = normalized(hidden, self.input_layernorm)
        query, key, value = (
            linear(normal, layer).unflatten(-1, (-1, self.shape.head_dim)) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        group = self.shape.heads // self.shape.kv_heads
        key = rotated(key, cosine, sine).repeat_interleave(group, 1)
        return rotated(query, cosine, sine), key, value.repeat_interleave(group, 1)

    def after(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        hidden = hidden + linear(attended.flatten(1), self.o_proj)
        normal = normalized(hidden, self.post_attention_layernorm)
        return hidden + linear(functional.silu(linear(normal, self.gate_proj)) * linear(normal, self.up_proj), self.down_proj)

    def forward(self, hidden: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, batch: int) -> torch.Tensor:
        heads = (part.unflatten(0, (batch, -1)).transpose(1, 2) for part in self.before(hidden, cosine, sine))
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.after(hidden, attended.transpose(1, 2).flatten(0, 1))


class Network(nn.Module):
    """Token ids to hidden states and logits; computes in ``dtype`` from float32 weights."""

    def __init__(self, shape: Shape, vocabulary: int, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.shape, self.dtype = shape, dtype
        self.embed_tokens = nn.Embedding(vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.hidden))
        nn.init.normal_(self.embed_tokens.weight, std=0.05)
        for layer in self.layers:
            for name, child in layer.named_children():
                deep = name in ("o_proj", "down_proj")
                nn.init.normal_(child.weight, std=0.02 / (math.sqrt(2 * shape.layers) if deep else 1))

    def compile(self) -> None:
        """Compiles what surrounds attention, once for all layers and lengths."""
        before, after = (torch.compile(part, dynamic=False) for part in (Layer.before, Layer.after))
        for layer in self.layers:
            layer.before, layer.after = before.__get__(layer), after.__get__(layer)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """``[batch, length]`` to final hidden states ``[batch * length, hidden]``."""
        batch, length = token_ids.shape
        cosine, sine = (part.repeat(batch, 1) for part in rotations(length, self.shape.head_dim, token_ids.device))
        hidden = self.embed_tokens(token_ids.flatten()).to(self.dtype)
        for layer in self.layers:
            hidden = layer(hidden, cosine, sine, batch)
        return normalized(hidden, self.norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.linear(hidden, self.embed_tokens.weight.to(hidden.dtype)).float()


def rotations(length: int, head_dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine, ``[length, head_dim / 2] float32``."""
    frequencies = THETA ** (-torch.arange(0, head_dim, 2, device=device).float() / head_dim)
    angles = torch.outer(torch.arange(length, device=device).float(), frequencies)
    return angles.cos(), angles.sin()


def exported_name(name: str) -> str:
    """A parameter's name in the Hugging Face format."""
    if name.endswith("norm"):
        name += ".weight"
    for part, owner in (("q_proj", "self_attn"), ("k_proj", "self_attn"), ("v_proj", "self_attn"), ("o_proj", "self_attn")):
        name = name.replace(f".{part}.", f".{owner}.{part}.")
    for part in ("gate_proj", "up_proj", "down_proj"):
        name = name.replace(f".{part}.", f".mlp.{part}.")
    return f"model.{name}"


def export(network: Network, tokenizer_directory: Path, output: Path) -> None:
    """Writes bfloat16 weights in shards, ``config.json`` and the tokenizer."""
    output.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, parameter in network.named_parameters():
        tensor = parameter.detach().to("cpu", torch.bfloat16).contiguous()
        if sum(other.nbytes for other in shards[-1].values()) + tensor.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][exported_name(name)] = tensor
    for old in output.glob("model-*.safetensors"):
        old.unlink()
    index = {"metadata": {"total_size": sum(tensor.nbytes for shard in shards for tensor in shard.values())}, "weight_map": {}}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, output / file, metadata={"format": "pt"})
        index["weight_map"] |= dict.fromkeys(shard, file)
    (output / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    (output / "config.json").write_text(json.dumps(config_of(network), indent=1) + "\n")
    for file in TOKENIZER_FILES:
        if tokenizer_directory.resolve() != output.resolve() and (tokenizer_directory / file).exists():
            shutil.copyfile(tokenizer_directory / file, output / file)


def load_weights(network: Network, directory: Path) -> None:
    """Reads what ``export`` wrote into a network of the same shape."""
    written = {name: tensor for file in directory.glob("model-*.safetensors") for name, tensor in load_file(file).items()}
    network.load_state_dict({name: written.pop(exported_name(name)) for name in network.state_dict()})
    if written:
        raise ValueError(f"{directory} has weights that the shape has no place for: {', '.join(sorted(written))}")


def config_of(network: Network) -> dict:
    shape = network.shape
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": network.embed_tokens.num_embeddings,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.feed_forward,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": EPSILON,
        "rope_theta": THETA,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "attention_bias": False,
        "mlp_bias": False,
    }
