"""What the methods share: the tokens that each kv head keeps, and attention over them.

Letters as in ``method``; N tokens of a kv head, the same number for all.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.accuracy.method import Prompt, Trace

LOGITS = 1 << 25  # in memory at a time


def counted(key: torch.Tensor, tokens: int, read: torch.Tensor) -> Trace:
    """Of a step with this key ``[B, H, D]``, in which every kv head read so many tokens, and these."""
    return Trace(torch.full(key.shape[:2], tokens, device=key.device), read=read)


def marked(tokens: torch.Tensor, n: int) -> torch.Tensor:
    """``[B, H, n] bool`` of token numbers ``[B, H, N]``; the number n stands for none."""
    return torch.zeros(*tokens.shape[:2], n + 1, dtype=torch.bool, device=tokens.device).scatter_(-1, tokens, True)[..., :n]


def pick(tokens: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Tokens ``[B, H, T, D]`` of each kv head's numbers ``[B, H, N]`` or ``[N]``: ``[B, H, N, D]``."""
    return torch.take_along_dim(tokens, chosen.expand(*tokens.shape[:2], -1).unsqueeze(-1), dim=2)


def weights(query: torch.Tensor, keys: torch.Tensor, scale: float, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Attention weights ``[B, H, G, N]`` in float32 of one query.

    Args:
        query: ``[B, Hq, D]``.
        keys: ``[B, H, N, D]``.
        bias: broadcast to ``[B, H, N]``, added to the logits: -inf hides a token, log(m) makes it count as m tokens.
    """
    return logits(query, keys, scale, bias).softmax(-1)


def logits(query: torch.Tensor, keys: torch.Tensor, scale: float, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``[B, H, G, N]`` float32, of which ``weights`` are the softmax."""
    grouped = query.unflatten(1, (keys.shape[1], -1)).float()
    found = grouped @ keys.float().mT * scale
    return found if bias is None else found + bias.unsqueeze(-2)


def output(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Weighted sum ``[B, Hq, D]``, in the dtype of the values ``[B, H, N, D]``."""
    return (weights @ values.float()).flatten(1, 2).to(values.dtype)


def prompt_weights(prompt: Prompt, start: int = 0) -> Iterator[tuple[int, torch.Tensor]]:
    """Causal attention weights of a prompt's queries from ``start`` on, so few at a time that memory does not grow with their number.

    Yields:
        Number of the first of c queries, and their weights ``[B, H, G, c, first + c]`` in float32.

    Raises:
        ValueError: the prompt came without some of these queries.
    """
    absent = prompt.keys.shape[2] - prompt.queries.shape[2]
    if start < absent:
        raise ValueError(f"queries of the prompt: expected those from {start} on, got those from {absent} on")
    keys, positions = prompt.keys.float(), torch.arange(prompt.keys.shape[2], device=prompt.keys.device)
    for now in positions[start:].split(max(1, LOGITS // (len(positions) * prompt.queries.shape[:2].numel()))):
        seen = positions[: start + len(now)]
        queries = prompt.queries[:, :, start - absent : len(seen) - absent].unflatten(1, (keys.shape[1], -1)).float()
        logits = (queries.flatten(2, 3) @ keys[:, :, : len(seen)].mT * prompt.scale).unflatten(2, (prompt.group, -1))
        yield start, logits.masked_fill_(seen > now[:, None], -torch.inf).softmax(-1)
        start = len(seen)


class Growing:
    """A tensor to which slices are appended along dimension 2; ``data`` is what is there."""

    def __init__(self, data: torch.Tensor) -> None:
        self._buffer, self.count = data, data.shape[2]

    @property
    def data(self) -> torch.Tensor:
        return self._buffer[:, :, : self.count]

    def append(self, tail: torch.Tensor) -> None:
        """One or more slices ``[B, H, N, ...]``."""
        end = self.count + tail.shape[2]
        if end > self._buffer.shape[2]:
            larger = self._buffer.new_zeros(*tail.shape[:2], end + max(64, self.count // 4), *tail.shape[3:])
            larger[:, :, : self.count] = self.data
            self._buffer = larger
        self._buffer[:, :, self.count : end] = tail
        self.count = end


class Kept:
    """Keys and values that a cache keeps, of equally many tokens in every kv head.

    Args:
        keys, values: ``[B, H, N, D]`` to begin with; ``append`` leaves them alone, ``replace`` may write to them.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._keys, self._values = Growing(keys), Growing(values)

    @property
    def count(self) -> int:
        return self._keys.count

    @property
    def keys(self) -> torch.Tensor:
        return self._keys.data

    @property
    def values(self) -> torch.Tensor:
        return self._values.data

    def append(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keep one more token ``[B, H, D]`` in every kv head."""
        self._keys.append(key.unsqueeze(2))
        self._values.append(value.unsqueeze(2))

    def replace(self, slot: int | torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put a token ``[B, H, D]`` in the place of another: one for all, or of each kv head ``[B, H]``."""
        for tensor, new in ((self.keys, key), (self.values, value)):
            if isinstance(slot, int):
                tensor[:, :, slot] = new
            else:
                tensor.scatter_(2, slot[..., None, None].expand(-1, -1, 1, new.shape[-1]), new.unsqueeze(2))


class Sliding(Kept):
    """The first tokens, and the most recent ones, of which the oldest makes room for the next.

    Args:
        keys, values: ``[B, H, T, D]`` of the prompt.
        sink, recent: how many of each.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, sink: int, recent: int) -> None:
        self.sink, self.recent, tokens = sink, recent, keys.shape[2]
        later = max(sink, tokens - recent)
        super().__init__(*(torch.cat((each[:, :, :sink], each[:, :, later:]), dim=2) for each in (keys, values)))
        self.oldest = 0  # of the recent ones, counted from the sink

    def slide(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keep one more token ``[B, H, D]``; the key and the value that made room, if any."""
        if self.count < self.sink + self.recent:
            return self.append(key, value)
        slot = self.sink + self.oldest
        left = self.keys[:, :, slot].clone(), self.values[:, :, slot].clone()
        self.replace(slot, key, value)
        self.oldest = (self.oldest + 1) % self.recent
        return left

    def ranks(self) -> torch.Tensor:
        """``[N]`` how many of the kept tokens came before each."""
        slots = torch.arange(self.count, device=self.keys.device)
        return torch.where(slots < self.sink, slots, self.sink + (slots - self.sink - self.oldest) % self.recent)
