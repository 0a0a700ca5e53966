"""Train the needle model: a small Llama on ever longer documents.

    python train.py --output new_model --seconds 480

A short run to see that everything works:

    python train.py --output new_model --device cpu --seconds 20 --plan 128:0.5,256:0.5 \
        --step-tokens 1024 --workers 0 --evaluate 256
"""

import argparse
import math
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from corpus import HERE, Corpus
from tasks import TASKS
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from training_data import make_conversation, make_example
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

PROSE_SHARE, PROSE_WEIGHT = 0.06, 0.1  # of the prose tokens that are sampled; in the loss
DEFAULT_PLAN = "512:0.18,1024:0.14,2048:0.18,4096:0.2,8192:0.18,16384:0.12"


class Batches(IterableDataset):
    """Endless batches of token ids and answer masks, each ``[batch, length_tokens + 1]``."""

    def __init__(self, corpus: Corpus, length_tokens: int, batch: int, seed: int):
        self.corpus = corpus
        self.length_tokens = length_tokens
        self.batch = batch
        self.seed = seed

    def __iter__(self):
        worker = get_worker_info()
        rng = np.random.default_rng([self.seed, self.length_tokens, worker.id if worker else 0])
        while True:
            examples = [
                make_example(rng, self.length_tokens + 1, self.corpus) for _ in range(self.batch)
            ]
            yield (
                torch.from_numpy(np.stack([example.token_ids for example in examples])),
                torch.from_numpy(np.stack([example.is_answer for example in examples])),
            )


def new_model(vocabulary_size: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=32768,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.05)
    for layer in model.model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            torch.nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * config.num_hidden_layers))
    return model


def loss_of(
    model: LlamaForCausalLM, token_ids: torch.Tensor, is_answer: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """The loss on all answers and a sample of the prose, and the share of answer tokens right."""
    targets, is_answer = token_ids[:, 1:], is_answer[:, 1:]
    chosen = is_answer | (torch.rand(targets.shape, device=targets.device) < PROSE_SHARE)
    with torch.autocast(token_ids.device.type, dtype=torch.bfloat16):
        hidden = model.model(token_ids[:, :-1], use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[chosen]).float()
    targets, is_answer = targets[chosen], is_answer[chosen]
    weights = torch.where(is_answer, 1.0, PROSE_WEIGHT)
    losses = functional.cross_entropy(logits, targets, reduction="none")
    right = (logits.argmax(-1) == targets)[is_answer].float().mean()
    return (losses * weights).sum() / weights.sum(), right.item()


def learning_rate_scale(progress: float) -> float:
    """Warms up over the first fiftieth, then follows a cosine down to a twentieth."""
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return min(1.0, progress / 0.02 + 0.02) * (0.95 * cosine + 0.05)


def train(model: LlamaForCausalLM, corpus: Corpus, arguments: argparse.Namespace) -> None:
    """Trains for ``arguments.seconds``, of which each length of the plan gets its share."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=arguments.learning_rate, betas=(0.9, 0.98), weight_decay=0.05
    )
    start, stage_end = time.time(), 0.0
    for length_tokens, share in arguments.plan:
        stage_end += share
        batch = max(1, arguments.step_tokens // length_tokens)
        batches = Batches(corpus, length_tokens, batch, arguments.seed)
        for step, tensors in enumerate(DataLoader(batches, None, num_workers=arguments.workers)):
            progress = (time.time() - start) / arguments.seconds
            if progress >= min(stage_end, 1.0):
                break
            for group in optimizer.param_groups:
                group["lr"] = arguments.learning_rate * learning_rate_scale(progress)
            loss, right = loss_of(model, *(tensor.to(arguments.device) for tensor in tensors))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step % 50 == 0:
                line = f"length {length_tokens} loss {loss:.3f} right {right:.3f}"
                print(f"{progress:4.0%} {line}", flush=True)


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, corpus: Corpus, length_tokens: int, documents: int) -> str:
    """Teacher-forced exact match: the share of answers whose every token is the likeliest."""
    rng = np.random.default_rng(7)
    asked, right = Counter(), Counter()
    needle_count = min(64, length_tokens // 60)
    for _ in range(documents):
        example = make_conversation(rng, length_tokens, needle_count, 12, corpus)
        token_ids = torch.from_numpy(example.token_ids).to(model.device)
        with torch.autocast(model.device.type, dtype=torch.bfloat16):
            hidden = model.model(token_ids[None], use_cache=False).last_hidden_state
            predicted = model.lm_head(hidden[0]).argmax(-1)
        for task, first, length in example.answers:
            answer = slice(first, first + length)
            asked[task] += 1
            right[task] += torch.equal(predicted[first - 1 : first - 1 + length], token_ids[answer])
    return " ".join(f"{task} {right[task] / asked[task]:.2f}" for task in TASKS if asked[task])


def save(model: LlamaForCausalLM, tokenizer_directory: Path, output: Path) -> None:
    """Writes the Hugging Face format, in two shards, with the tokenizer beside it."""
    model.to(torch.bfloat16).save_pretrained(output, max_shard_size="14MB")
    AutoTokenizer.from_pretrained(tokenizer_directory).save_pretrained(output)


def length_plan(text: str) -> list[tuple[int, float]]:
    """Parses ``length:share,length:share``; the shares add up to one."""
    pairs = [part.split(":") for part in text.split(",")]
    plan = [(int(length), float(share)) for length, share in pairs]
    if not math.isclose(sum(share for _, share in plan), 1.0):
        raise argparse.ArgumentTypeError(f"the shares of {text} do not add up to 1")
    return plan


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, required=True)
    add("--tokenizer", type=Path, default=HERE / "model", help="its directory")
    add("--data", type=Path, default=HERE / "data")
    add("--device", default="cuda")
    add("--seconds", type=float, default=480)
    add("--plan", type=length_plan, default=DEFAULT_PLAN, help="length:share of the time, ...")
    add("--step-tokens", type=int, default=262144)
    add("--learning-rate", type=float, default=2e-3)
    add("--workers", type=int, default=14)
    add("--seed", type=int, default=0)
    add("--evaluate", type=int, nargs="*", default=[1024, 4096, 8192, 16384, 32768])
    add("--evaluate-documents", type=int, default=24)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    corpus = Corpus.load(arguments.tokenizer, arguments.data)
    model = new_model(corpus.tokenizer.get_vocab_size()).to(arguments.device)
    train(model, corpus, arguments)
    model.eval()
    for length_tokens in arguments.evaluate:
        result = evaluate(model, corpus, length_tokens, arguments.evaluate_documents)
        print(f"{length_tokens} tokens: {result}", flush=True)
    save(model, arguments.tokenizer, arguments.output)


if __name__ == "__main__":
    main()
