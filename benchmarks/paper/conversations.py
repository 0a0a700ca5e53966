"""Conversations of agents that grow turn by turn, drawn from a seed, and the threads that hold them with a server."""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Event, Lock
from typing import NamedTuple

import numpy as np

from benchmarks.servers import BenchServer, Stream, random_prompt
from benchmarks.setups import Setup

SEED = 12
TOOLS, TASK, STEP, OBSERVATION, MADE_UP, STARTS = range(6)  # what is drawn; each has draws of its own
POLL_S = 0.2
INTERVAL = 8  # tokens from one message of a stream to the next; the first token has a message of its own


@dataclass(frozen=True)
class Talk:
    """What each agent sends and is sent.

    Args:
        tools: tokens that all prompts begin with.
        task: tokens that follow, which no two conversations share.
        turns: of a conversation.
        answer: tokens of each turn.
        observation: tokens in the mean that an agent appends to an answer; from half of it to one and a half.
        think_s: seconds in the mean from an answer to the next turn.
    """

    tools: int
    task: int
    turns: int
    answer: int
    observation: int
    think_s: float

    @property
    def longest(self) -> int:
        """Tokens of a conversation at its end, at most."""
        return self.tools + self.task + self.turns * self.answer + (self.turns - 1) * (self.observation * 3 // 2)

    @property
    def usual(self) -> int:
        """Tokens of a turn's prompt, in the mean over turns."""
        return self.tools + self.task + (self.turns - 1) * (self.answer + self.observation) // 2

    def divided(self, by: int) -> Talk:
        """With lengths that are ``by`` times shorter."""
        lengths = {name: getattr(self, name) // by for name in ("tools", "task", "answer", "observation")}
        return replace(self, **lengths)


class Conversation:
    """One agent's history, as token ids.

    What is drawn depends on the agent, the conversation and the turn alone. All servers are thus sent the same, but for their answers.

    Args:
        number: of the agent's conversations.
        made_up: turns that are held here, with random tokens for their answers.
    """

    def __init__(self, setup: Setup, talk: Talk, agent: int, number: int = 0, made_up: int = 0) -> None:
        self.setup, self.talk, self.agent, self.number, self.turn = setup, talk, agent, number, 0
        self.history = random_prompt(setup, talk.tools, (SEED, TOOLS)) + self._tokens(TASK, talk.task)
        for _ in range(made_up):
            self.extend(self._tokens(MADE_UP, talk.answer))

    @property
    def is_over(self) -> bool:
        return self.turn == self.talk.turns

    def extend(self, answer: list[int]) -> float:
        """Append an answer, and what the tool that it called returned; the seconds that the tool took."""
        drawn, mean = np.random.default_rng(self._seed(STEP)), self.talk.observation
        length, think_s = int(drawn.integers(mean // 2, mean * 3 // 2, endpoint=True)), float(drawn.exponential(self.talk.think_s))
        self.history = self.history + answer + self._tokens(OBSERVATION, length)
        self.turn += 1
        return think_s

    def _seed(self, what: int) -> tuple[int, ...]:
        return SEED, what, self.agent, self.number, self.turn

    def _tokens(self, what: int, count: int) -> list[int]:
        return random_prompt(self.setup, count, self._seed(what))


class Window(NamedTuple):
    """From when to when turns count, as ``time.perf_counter`` told; ``ramp_s`` seconds passed before."""

    begin: float
    end: float
    ramp_s: float

    def holds(self, stream: Stream) -> bool:
        """Whether a turn was sent within it."""
        return self.begin <= stream.started < self.end

    def tokens(self, stream: Stream) -> int:
        """Of a turn, those that arrived within it, whenever it was sent."""
        by_end, by_begin = (max((count for at, count in stream.arrivals if at < edge), default=0) for edge in (self.end, self.begin))
        return by_end - by_begin


class Crew:
    """Agents at a server, each a thread that sends a turn, thinks, and sends the next one.

    They start one after the other, at different turns of their first conversations. The histories that they start with are computed
    cold. The window therefore begins when each agent has had an answer. A turn that was sent before its end is awaited.

    Args:
        agents: how many.
        deadline_s: most seconds for all that they do.
    """

    def __init__(self, server: BenchServer, talk: Talk, agents: int, deadline_s: float) -> None:
        self.server, self.talk, self.agents = server, talk, agents
        self.until = time.perf_counter() + deadline_s
        self.streams: list[Stream] = []
        self._answered: set[int] = set()
        self._began = math.nan
        self._lock, self._steady, self._over = Lock(), Event(), Event()

    @property
    def starts(self) -> list[int]:
        """The turn that each agent starts at: evenly spread over a conversation, in an order that is drawn."""
        order = np.random.default_rng((SEED, STARTS, self.agents)).permutation(self.agents)
        return (order * self.talk.turns // self.agents).tolist()

    def work(self, seconds: float, apart_s: float) -> Window:
        """Hold conversations until the window is over.

        Args:
            seconds: that the window lasts.
            apart_s: seconds from one agent's start to the next one's.

        Raises:
            ServerFailed: a turn failed, or the deadline passed.
        """
        started = time.perf_counter()
        with ThreadPoolExecutor(self.agents) as pool:
            agents = [pool.submit(self._live, agent, start, agent * apart_s) for agent, start in enumerate(self.starts)]
            try:
                wait(self._steady)
                wait(self._over, seconds)
            finally:
                self._over.set()
            for agent in agents:
                agent.result()
        return Window(self._began, self._began + seconds, self._began - started)

    def _live(self, agent: int, start: int, delay_s: float) -> None:
        try:
            self._over.wait(delay_s)
            conversation = Conversation(self.server.setup, self.talk, agent, made_up=start)
            while not self._over.is_set():
                self._over.wait(conversation.extend(self._ask(agent, conversation)))
                if conversation.is_over:
                    conversation = Conversation(self.server.setup, self.talk, agent, conversation.number + 1)
        except BaseException:
            self._over.set()
            self._steady.set()
            raise

    def _ask(self, agent: int, conversation: Conversation) -> list[int]:
        """The answer to all that was said so far."""
        left_s = max(1.0, self.until - time.perf_counter())
        stream = self.server.stream(conversation.history, self.talk.answer, left_s, INTERVAL)
        if len(stream.output_ids) != self.talk.answer:
            raise RuntimeError(f"an answer has {len(stream.output_ids)} token ids, expected {self.talk.answer}")
        with self._lock:
            self.streams.append(stream)
            self._answered.add(agent)
            if len(self._answered) == self.agents and not self._steady.is_set():
                self._began = time.perf_counter()
                self._steady.set()
        return stream.output_ids


def wait(event: Event, seconds: float = math.inf) -> None:
    """Until ``event`` is set or ``seconds`` are over; in short waits, because a signal that another thread is given ends none."""
    end = time.perf_counter() + seconds
    while (left := end - time.perf_counter()) > 0 and not event.wait(min(left, POLL_S)):
        pass
