"""What the results of each figure say, by the figure's name in ``paper-FIGURE-SHAPE.json``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .ablation import of_ablation
from .agents import of_agents
from .crossover import of_crossover
from .goodput import of_goodput
from .latency import of_latency
from .section import Section

SECTIONS: dict[str, Callable[[Path, Path], Section]] = {
    "crossover": of_crossover,
    "goodput": of_goodput,
    "agents": of_agents,
    "latency": of_latency,
    "ablation": of_ablation,
}
