"""Made-up traffic for `residency.py`: who asks when, with which host pages, for how long an answer."""

from typing import NamedTuple

import numpy as np


class Request(NamedTuple):
    """arrival: tick; prompt: host pages in order of depth; answer: host pages that decoding fills, one a tick."""

    arrival: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


class Pages:
    """Hands out numbers of host pages that no request has had before."""

    def __init__(self):
        self.count = 0

    def take(self, n: int) -> tuple[int, ...]:
        self.count += n
        return tuple(range(self.count - n, self.count))


def uniform(rng, context: int, requests: int) -> list[Request]:
    pages = Pages()
    arrivals = np.cumsum(rng.poisson(4, requests))
    return [Request(int(at), pages.take(context), pages.take(8)) for at in arrivals]


def agentic(rng, context: int, requests: int) -> list[Request]:
    """Conversations of eight turns that grow to `context`, with tool outputs and exponential think time."""
    pages, made = Pages(), []
    for start in np.cumsum(rng.poisson(24, max(1, requests // 8))):
        at, history = int(start), pages.take(context // 4)
        for _ in range(8):
            answer = pages.take(4)
            made.append(Request(at, history, answer))
            history = history + answer + pages.take(int(rng.integers(1, context // 8 + 1)))
            at += len(answer) + 1 + int(rng.exponential(40))
    return sorted(made)


def shared_documents(rng, context: int, requests: int) -> list[Request]:
    """Questions of one page about sixteen documents, whose popularity falls with their rank."""
    pages = Pages()
    documents = [pages.take(context) for _ in range(16)]
    share = 1 / np.arange(1, 17)
    chosen = rng.choice(16, requests, p=share / share.sum())
    arrivals = np.cumsum(rng.poisson(3, requests))
    return [Request(int(at), documents[d] + pages.take(1), pages.take(6)) for at, d in zip(arrivals, chosen)]


def long_generation(rng, context: int, requests: int) -> list[Request]:
    pages = Pages()
    arrivals = np.cumsum(rng.poisson(context // 4, requests))
    return [Request(int(at), pages.take(max(1, context // 16)), pages.take(context)) for at in arrivals]


TRACES = {"uniform": uniform, "agentic": agentic, "shared documents": shared_documents, "long generation": long_generation}
