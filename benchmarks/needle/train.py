"""Train the needle model: a small Llama on ever longer documents.

    python -m benchmarks.needle.train --output new_model --seconds 540 --total-seconds 1080

Each such call continues where the last one stopped, until the total is reached. The model is exported
and evaluated after every call. A short run to see that everything works:

    python -m benchmarks.needle.train --output new_model --device cpu --shape tiny --seconds 20 --plan 256:0.5,512:0.5 \
        --step-tokens 2048 --workers 0 --evaluate 512 --evaluate-prompts 4
"""

import argparse
import json
import math
import os
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader

from benchmarks.needle.corpus import HERE, Corpus
from benchmarks.needle.evaluation import evaluate
from benchmarks.needle.facts import TASKS
from benchmarks.needle.network import SHAPES, Network, export, load_weights
from benchmarks.needle.optimizers import make_optimizers
from benchmarks.needle.training_data import PROSE, Batch, Batches

DEFAULT_PLAN = "512:0.14,1024:0.1,2048:0.14,4096:0.16,8192:0.16,4096+8192+16384:0.3"
ATTENTION = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
LOG_SECONDS, CHECKPOINT_SECONDS = 10, 60
WARM_UP_STEPS = 200
DECAY_START, LAST_SCALE = 0.4, 0.02  # of the schedule; of the learning rate at its end


class Trainer:
    """A network and how far its training is; ``seconds`` of training and ``calls`` so far."""

    def __init__(self, network: Network, arguments: argparse.Namespace):
        self.network = network
        self.arguments = arguments
        self.optimizers = make_optimizers(network, arguments.optimizer, arguments.learning_rate)
        self.seconds, self.calls, self.steps = 0.0, 0, 0
        self.fresh_step = 0  # the step at which the optimizers knew nothing
        device = network.norm.device
        self.right, self.seen = (torch.zeros(PROSE + 1, device=device) for _ in range(2))
        self.loss = torch.zeros((), device=device)

    def resume(self) -> None:
        """From the checkpoint, else from an exported model and its ``training.json``."""
        if self.arguments.checkpoint.exists():
            state = torch.load(self.arguments.checkpoint, map_location=self.network.norm.device)
            self.network.load_state_dict(state["network"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            progress = state["progress"]
        elif self.arguments.start_from:
            load_weights(self.network, self.arguments.start_from)
            progress = json.loads((self.arguments.start_from / "training.json").read_text())
        else:
            return
        self.seconds, self.calls, self.steps = (progress[key] for key in ("seconds", "calls", "steps"))
        self.fresh_step = 0 if self.arguments.checkpoint.exists() else self.steps
        print(f"resumed at {self.seconds:.0f} seconds, step {self.steps}", flush=True)

    def save(self) -> None:
        """The checkpoint appears whole or not at all."""
        path = self.arguments.checkpoint
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        torch.save({"network": self.network.state_dict(), "optimizers": optimizers, "progress": self.progress()}, partial)
        os.replace(partial, path)

    def progress(self) -> dict[str, float]:
        return {"seconds": self.seconds, "calls": self.calls, "steps": self.steps}

    def train(self, corpus: Corpus) -> None:
        """Trains for ``arguments.seconds``, but never past the end of the schedule."""
        self.calls += 1
        start = time.monotonic() - self.seconds
        stop = min(self.seconds + self.arguments.seconds, self.arguments.total_seconds)
        logged = saved = self.seconds
        stage_end, tokens = 0.0, 0
        for lengths, share in self.arguments.plan:
            stage_end += share * self.arguments.total_seconds
            if self.seconds >= min(stage_end, stop):
                continue
            for batch in self._batches(corpus, lengths):
                self._step(batch)
                tokens += batch.token_ids.numel()
                self.seconds = time.monotonic() - start
                if self.seconds - logged >= LOG_SECONDS:
                    self._log(lengths, tokens / (self.seconds - logged))
                    logged, tokens = self.seconds, 0
                if self.seconds - saved >= CHECKPOINT_SECONDS:
                    self.save()
                    saved = self.seconds
                if self.seconds >= min(stage_end, stop):
                    break
        self.save()

    def _batches(self, corpus: Corpus, lengths: tuple[int, ...]) -> DataLoader:
        data = Batches(corpus, lengths, self.arguments.step_tokens, (self.arguments.seed, self.calls))
        on_gpu = self.network.norm.is_cuda
        return DataLoader(data, None, num_workers=self.arguments.workers, pin_memory=on_gpu)

    def _step(self, batch: Batch) -> None:
        """One update; nothing here waits for the GPU."""
        scale = learning_rate_scale(self.seconds / self.arguments.total_seconds, self.steps - self.fresh_step)
        token_ids, chosen, weights, kinds = (tensor.to(self.network.norm.device, non_blocking=True) for tensor in batch)
        targets = token_ids[:, 1:].flatten()[chosen].long()
        logits = self.network.logits(self.network(token_ids[:, :-1]).index_select(0, chosen))
        losses = functional.cross_entropy(logits, targets, reduction="none")
        loss = (losses * weights).sum() / weights.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.arguments.learning_rate * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            self.right.index_add_(0, kinds, (logits.argmax(-1) == targets).float())
            self.seen.index_add_(0, kinds, torch.ones_like(weights))
            self.loss.lerp_(loss.detach(), 0.1)
        self.steps += 1

    def _log(self, lengths: tuple[int, ...], tokens_per_second: float) -> None:
        """The loss, and of each task the share of answer tokens that were right since the last line."""
        right, seen = self.right.tolist(), self.seen.tolist()
        shares = " ".join(f"{name} {right[i] / seen[i]:.3f}" for i, name in enumerate((*TASKS, "prose")) if seen[i])
        head = f"{self.seconds:5.0f}s step {self.steps} length {'+'.join(map(str, lengths))} {tokens_per_second / 1e6:.2f}M/s"
        print(f"{head} loss {self.loss.item():.3f} | {shares}", flush=True)
        self.right.zero_()
        self.seen.zero_()


def learning_rate_scale(progress: float, steps: int) -> float:
    """Warms up over the first steps, stays, and falls linearly with ``progress`` from 0 to 1."""
    left = 1 - (progress - DECAY_START) / (1 - DECAY_START)
    return min(1.0, (steps + 1) / WARM_UP_STEPS) * min(1.0, max(LAST_SCALE, left))


def length_plan(text: str) -> list[tuple[tuple[int, ...], float]]:
    """Parses ``length:share,length+length:share``; the shares add up to one."""
    pairs = [part.split(":") for part in text.split(",")]
    plan = [(tuple(map(int, lengths.split("+"))), float(share)) for lengths, share in pairs]
    if not math.isclose(sum(share for _, share in plan), 1.0):
        raise argparse.ArgumentTypeError(f"the shares of {text} do not add up to 1")
    return plan


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--output", type=Path, required=True)
    add("--checkpoint", type=Path, help="what the next call resumes from; by default in the output directory")
    add("--start-from", type=Path, help="an exported model to continue, if there is no checkpoint")
    add("--tokenizer", type=Path, default=HERE / "model", help="its directory")
    add("--data", type=Path, default=HERE / "data")
    add("--shape", choices=SHAPES, default="needle")
    add("--device", default="cuda")
    add("--compile", action=argparse.BooleanOptionalAction, help="by default on a GPU")
    add("--attention", choices=ATTENTION, default="flash", help="the kernels on a GPU")
    add("--optimizer", choices=("muon", "adamw"), default="muon")
    add("--seconds", type=float, default=540, help="of this call")
    add("--total-seconds", type=float, help="of the whole schedule; by default those of this call")
    add("--plan", type=length_plan, default=DEFAULT_PLAN, help="lengths joined by +, and their share of the time: length+length:share, ...")
    add("--step-tokens", type=int, default=131072)
    add("--learning-rate", type=float, default=2e-3)
    add("--workers", type=int, default=14)
    add("--seed", type=int, default=0)
    add("--evaluate", type=int, nargs="*", default=[1024, 4096, 8192, 16384])
    add("--evaluate-prompts", type=int, default=64, help="of each task at each length")
    add("--evaluate-only", action="store_true", help="the model in the output directory")
    arguments = parser.parse_args(words)
    arguments.total_seconds = arguments.total_seconds or arguments.seconds
    arguments.checkpoint = arguments.checkpoint or arguments.output / "checkpoint.pt"
    return arguments


def main(words: list[str] | None = None) -> None:
    arguments = parse_arguments(words)
    torch.manual_seed(arguments.seed)
    corpus = Corpus.load(arguments.tokenizer, arguments.data)
    on_gpu = torch.device(arguments.device).type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    network = Network(SHAPES[arguments.shape], corpus.tokenizer.get_vocab_size(), dtype).to(arguments.device)
    print(f"{sum(parameter.numel() for parameter in network.parameters()) / 1e6:.1f}M parameters", flush=True)
    with sdpa_kernel(ATTENTION[arguments.attention]) if on_gpu else nullcontext():
        if not arguments.evaluate_only:
            trainer = Trainer(network, arguments)
            trainer.resume()
            if on_gpu if arguments.compile is None else arguments.compile:
                network.compile()
            trainer.train(corpus)
            export(network, arguments.tokenizer, arguments.output)
            (arguments.output / "training.json").write_text(json.dumps(trainer.progress()) + "\n")
        measured = Network(network.shape, network.embed_tokens.num_embeddings, dtype).to(arguments.device)
        load_weights(measured, arguments.output)
        report = {}
        for length_tokens in arguments.evaluate:
            report[str(length_tokens)] = result = evaluate(measured, corpus, length_tokens, arguments.evaluate_prompts)
            shares = (" ".join([task, *(f"{value:.2f}" for value in found.values())]) for task, found in result.items())
            print(f"{length_tokens} tokens: {', '.join(shares)}", flush=True)
            (arguments.output / "evaluation.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
