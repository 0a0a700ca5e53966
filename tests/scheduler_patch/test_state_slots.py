"""State slots: as many as requests need and as many again, unless the user says otherwise."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_freekv.scheduler_patch import state_slots
from sglang_freekv.scheduler_patch.state_slots import StateSlots


@pytest.fixture
def schedule(monkeypatch):
    """SGLang's settings, with a number of slots that its profile writes."""
    settings = SimpleNamespace(max_mamba_cache_size=None)
    context = SimpleNamespace(override=lambda source, **changes: vars(settings).update(changes))
    monkeypatch.setattr(state_slots, "get_schedule", lambda: settings)
    monkeypatch.setattr(state_slots, "get_context", lambda: context)
    return settings


@pytest.mark.parametrize("asked, rows, taken, kept", [
    (None, 8, 200, 80), (None, 8, 80, 80), (None, 8, 50, 50),  # never more than SGLang has taken
    (None, None, 200, 200), (200, 8, 200, 200),
])  # fmt: skip
def test_what_rows_leave_is_given_back(schedule, asked, rows, taken, kept):
    states = SimpleNamespace(mamba2_cache_params=SimpleNamespace(mamba_cache_per_req=1000))
    schedule.max_mamba_cache_size = asked
    slots = StateSlots.before(SimpleNamespace(mambaish_config=states, _calculate_mamba_ratio=lambda: 5))
    schedule.max_mamba_cache_size = taken
    assert slots.spare(rows) == (taken - kept) * 1000 and schedule.max_mamba_cache_size == kept
