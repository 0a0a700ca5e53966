# SPDX-License-Identifier: Apache-2.0
"""LayerTaus: a threshold for each retrieval layer of a model, from the file of ``--freekv-tau-by-layer``.

    {"model": "LlamaForCausalLM", "tau": [null, 0.71, 0.83]}

``tau`` has an entry for each layer of the model. It is null where there is nothing to correct: in dense layers.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_freekv.refusal import Refusal, shown

FLAG = "--freekv-tau-by-layer"
EXAMPLE = '{"model": "LlamaForCausalLM", "tau": [null, 0.8, 0.9]}'
MOST_BYTES = 1 << 20  # of a file: thousands of layers
MOST_SHOWN = 40  # characters of what a file holds


@dataclass(frozen=True)
class LayerTaus:
    """Thresholds by layer.

    Args:
        file: as the user named it.
        model: architecture that they were made for, as in the model's config.json.
        taus: of each layer, from 0; None for a layer without one.
    """

    file: str
    model: str
    taus: tuple[float | None, ...]

    @classmethod
    def read(cls, name: str, value: Any) -> LayerTaus:
        """The thresholds in the file ``value``.

        Raises:
            Refusal: it is no such file.
        """
        file = os.fspath(value) if isinstance(value, os.PathLike) else value
        if not isinstance(file, str):
            raise Refusal(f"{FLAG} {shown(value)}: expected the name of a file; use for example {FLAG} tau.json")
        if not file.isprintable():  # the log and /server_info tell it
            raise Refusal(f"{FLAG} {shown(ascii(file))}: expected a name of printable characters; use for example {FLAG} tau.json")
        try:
            held = json.loads(_content(Path(file)))
        except (OSError, ValueError, RecursionError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise Refusal(
                f"{FLAG} {shown(file)}: expected a file of JSON, found none that can be read ({shown(reason)}); use one that holds {EXAMPLE}"
            ) from None
        return cls.of(str(file), held)

    @classmethod
    def of(cls, file: str, held: Any) -> LayerTaus:
        """The thresholds in the JSON ``held``.

        Raises:
            Refusal: it is no object of a model and its thresholds.
        """
        if not isinstance(held, dict) or not {"model", "tau"} <= held.keys():
            raise Refusal(f"{FLAG} {file}: expected an object with model and tau, found {_short(held)}; use one such as {EXAMPLE}")
        model, taus = held["model"], held["tau"]
        if not isinstance(model, str) or not isinstance(taus, list):
            found = f"model {_short(model)} and tau {_short(taus)}"
            raise Refusal(f"{FLAG} {file}: expected the name of a model and a list, found {found}; use one such as {EXAMPLE}")
        for layer, tau in enumerate(taus):
            if tau is not None and not _is_finite(tau):
                raise Refusal(f"{FLAG} {file}: expected a number or null for layer {layer}, found {_short(tau)}; use one from -1 to 1")
        return cls(file, model, tuple(None if tau is None else float(tau) for tau in taus))

    def expect_model(self, architecture: str, layers: int, retrieval: Collection[int], full: Collection[int] | None = None) -> None:
        """Raise a Refusal if the thresholds are not those of this model, or if they are not for its retrieval layers.

        Args:
            architecture: of the model.
            layers: of the model.
            retrieval: numbers of its retrieval layers.
            full: numbers of all that attend to the whole context; None is every layer.
        """
        if (self.model, len(self.taus)) != (architecture, layers):
            raise Refusal(
                f"{FLAG} {self.file}: expected thresholds for {architecture} with {layers} layers, found those for {_short(self.model)} with "
                f"{len(self.taus)}; use the file of this model, or --freekv-tau"
            )
        for layer in retrieval:
            if self.taus[layer] is None:
                raise Refusal(
                    f"{FLAG} {self.file}: expected a threshold for layer {layer}, found null; use a file that has one, or add the layer to "
                    "--freekv-dense-layers"
                )
        for layer, tau in enumerate(self.taus):
            if tau is not None and full is not None and layer not in full:
                raise Refusal(
                    f"{FLAG} {self.file}: expected null for layer {layer}, which does not attend to the whole context, found {tau:g}; use a "
                    "file of this model"
                )

    def of_retrieval(self, dense_layers: Collection[int]) -> tuple[float, ...]:
        """Thresholds of the retrieval layers, by their place among them."""
        return tuple(tau for layer, tau in enumerate(self.taus) if tau is not None and layer not in dense_layers)


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(float(value))
    except OverflowError:
        return False


def _content(path: Path) -> bytes:
    """What a regular file holds. A pipe or a device might never end, and its content would be gone for whoever reads it next.

    Raises:
        OSError, ValueError: it is not a readable file of at most ``MOST_BYTES``.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError("neither a pipe nor a device is read")
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"at most {MOST_BYTES} bytes are read")
    return content


def _short(value: Any) -> str:
    return shown(value, MOST_SHOWN)
