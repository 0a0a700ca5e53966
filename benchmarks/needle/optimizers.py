"""The optimizers of the needle model: AdamW, or Muon for the matrices of its layers."""

from collections import defaultdict

import torch

from benchmarks.needle.network import Network

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration that torch.optim.Muon uses
ITERATIONS = 5
PRECISION = torch.bfloat16


def orthogonalized(matrices: torch.Tensor) -> torch.Tensor:
    """``[count, rows, columns]`` with all singular values moved close to one; rows <= columns."""
    first, second, third = COEFFICIENTS
    result = matrices.to(PRECISION)
    result = result / result.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = result @ result.mT
        result = first * result + (second * gram + third * gram @ gram) @ result
    return result


class Muon(torch.optim.Optimizer):
    """``torch.optim.Muon`` with ``adjust_lr_fn="match_rms_adamw"``, all matrices of one shape at a time."""

    def __init__(self, parameters, lr: float, momentum: float = 0.95, weight_decay: float = 0.05):
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            shapes = defaultdict(list)
            for parameter in group["params"]:
                shapes[parameter.shape].append(parameter)
            for (rows, columns), parameters in shapes.items():
                gradients = [parameter.grad for parameter in parameters]
                averages = [self._average(parameter) for parameter in parameters]
                torch._foreach_lerp_(averages, gradients, 1 - group["momentum"])
                updates = torch.stack(torch._foreach_lerp(gradients, averages, group["momentum"]))
                wide = rows <= columns
                updates = orthogonalized(updates if wide else updates.mT)
                updates = (updates if wide else updates.mT).float()
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                scale = 0.2 * max(rows, columns) ** 0.5
                torch._foreach_add_(parameters, list(updates.unbind()), alpha=-group["lr"] * scale)

    def _average(self, parameter: torch.Tensor) -> torch.Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        return state["momentum"]


def make_optimizers(network: Network, name: str, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Those that together update the network; their learning rates are ``learning_rate``."""
    matrices = [parameter for parameter in network.layers.parameters() if parameter.dim() == 2]
    vectors = [parameter for parameter in network.parameters() if parameter.dim() == 1]
    embedding = network.embed_tokens.weight
    groups = [{"params": [embedding], "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    if name == "adamw":
        groups.append({"params": matrices, "weight_decay": 0.05})
    adamw = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.98), fused=embedding.is_cuda)
    return [adamw, Muon(matrices, learning_rate)] if name == "muon" else [adamw]
