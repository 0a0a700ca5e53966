"""What an idle server checks, and how long a request waits for it."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from sglang_freekv.scheduler_patch import observe
from sglang_freekv.scheduler_patch.observe import CHECK_INTERVAL_S, CHECKED_PAGES, Observer, rest_when_idle

PARTS = ["host", "layer 0", "layer 1"]


class Idle:
    """A scheduler without requests, whose clock is ours. ``seen`` has the parts that were checked, and waits for what is in flight.

    Args:
        waiting: whether requests have arrived, if the scheduler sleeps when it is idle; None if it does not sleep.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, waiting: bool | None = None) -> None:
        self.seen: list[str] = []
        self.drawn: list[torch.Tensor] = []
        self.fault: str | None = None
        self.now, self.waiting = 100.0, waiting
        monkeypatch.setattr(observe, "time", SimpleNamespace(monotonic=lambda: self.now))
        pool = SimpleNamespace(
            store=SimpleNamespace(canary=None, checks=self.checks),
            device="cpu",
            config=SimpleNamespace(canary="off"),
            retrieval=SimpleNamespace(complete_all_transfers=lambda: self.seen.append("wait"), policy=None),
            held_pages=lambda allocator: torch.arange(1000, 2000),
            owners={},
            residency=SimpleNamespace(note_rest=lambda: None, state=dict),
            totals=SimpleNamespace(as_dict=lambda: {"tokens": self.tokens}),
        )
        self.tokens = 0
        allocator = SimpleNamespace(get_kvcache=lambda: SimpleNamespace(full_kv_pool=pool), page_size=8, size=80, available_size=lambda: 40)
        sleeper = None if waiting is None else SimpleNamespace(poller=SimpleNamespace(poll=lambda timeout: ["a socket"] * self.waiting))
        self.scheduler = SimpleNamespace(
            token_to_kv_pool_allocator=allocator,
            req_to_token_pool=SimpleNamespace(size=4, available_size=lambda: 4),
            metrics_reporter=SimpleNamespace(enable_metrics=False),
            is_fully_idle=lambda: True,
            idle_sleeper=sleeper,
            server_args=SimpleNamespace(sleep_on_idle=waiting is not None),
        )

    def checks(self, pages: torch.Tensor, policy) -> list:
        self.drawn.append(pages)
        return [partial(self.check, part) for part in PARTS]

    def check(self, part: str) -> None:
        self.seen.append(part)
        if part == self.fault:
            raise RuntimeError(f"{part} is broken")

    def rest(self) -> list[str]:
        """The parts of one call while the server is idle. Nothing is in flight in any of them."""
        self.seen.clear()
        rest_when_idle(self.scheduler)
        assert all(before == "wait" for before, part in zip(self.seen, self.seen[1:]) if part != "wait") and self.seen[:1] in ([], ["wait"])
        return [part for part in self.seen if part != "wait"]


def test_a_request_waits_for_a_part_of_a_check(monkeypatch):
    """A scheduler that does not sleep looks for requests between calls."""
    idle = Idle(monkeypatch)
    assert [idle.rest() for _ in range(6)] == [[], *([part] for part in PARTS), [], []]
    assert len(idle.drawn) == 1


def test_a_scheduler_that_sleeps_checks_all_before(monkeypatch):
    idle = Idle(monkeypatch, waiting=False)
    assert [idle.rest(), idle.rest()] == [PARTS, []]


def test_a_scheduler_that_sleeps_serves_who_has_arrived(monkeypatch):
    idle = Idle(monkeypatch, waiting=True)
    assert [idle.rest(), idle.rest()] == [[], PARTS[:1]]
    idle.waiting = False
    assert idle.rest() == PARTS[1:]


@pytest.mark.parametrize("sleeper", [SimpleNamespace(), None], ids=["SGLang's server in Rust", "a rank that is not the first"])
def test_a_scheduler_whose_sleep_tells_nothing_checks_all_before(monkeypatch, sleeper):
    """There is no socket to ask."""
    idle = Idle(monkeypatch, waiting=False)
    idle.scheduler.idle_sleeper = sleeper
    assert idle.rest() == PARTS


def test_a_check_with_a_canary_is_not_interrupted(monkeypatch):
    monkeypatch.setattr(observe, "Quarantine", lambda scheduler: SimpleNamespace(evict=lambda: None, sweep=lambda pages: pages[3:]))
    idle = Idle(monkeypatch)
    idle.scheduler.token_to_kv_pool_allocator.get_kvcache().full_kv_pool.store.canary = "on"
    assert idle.rest() == PARTS and len(idle.drawn[0]) == CHECKED_PAGES - 3


@pytest.mark.parametrize("broken", PARTS)
def test_a_broken_part_ends_the_server(monkeypatch, broken):
    idle = Idle(monkeypatch)
    idle.fault = broken
    with pytest.raises(RuntimeError, match=f"{broken} is broken"):
        for _ in range(1 + len(PARTS)):
            idle.rest()


def test_work_is_checked_once_at_most_every_interval_and_without_more_work(monkeypatch):
    idle = Idle(monkeypatch, waiting=False)
    assert idle.rest() == PARTS
    idle.tokens += 1
    assert idle.rest() == []
    idle.now += CHECK_INTERVAL_S
    assert [idle.rest(), idle.rest()] == [PARTS, []]
    idle.now += CHECK_INTERVAL_S
    assert idle.rest() == []


def test_a_check_is_ended_before_the_next_begins(monkeypatch):
    """Else what comes last would never be checked under load that leaves it a moment now and then."""
    idle, seen = Idle(monkeypatch), []
    for _ in range(2 * (1 + len(PARTS))):
        seen += idle.rest()
        idle.tokens += 1
        idle.now += CHECK_INTERVAL_S
    assert seen == 2 * PARTS


def test_a_check_draws_pages_and_leaves_the_random_numbers_of_sampling_alone(monkeypatch):
    idle, before = Idle(monkeypatch), torch.get_rng_state()
    observer = Observer(idle.scheduler)
    for _ in range(2):
        observer.begin_check()
    assert torch.equal(torch.get_rng_state(), before)
    first, second = idle.drawn
    assert len(first.unique()) == len(first) == CHECKED_PAGES and first.min() >= 1000 and not torch.equal(first, second)
