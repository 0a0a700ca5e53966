"""Control requests that are refused before the scheduler hears of them, and exceptions that endpoints let through."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from sglang.srt.managers.io_struct import ConfigureLoggingReq, SetInternalStateReq

from sglang_freekv.scheduler_patch import controls, mistakes


@pytest.mark.parametrize("level", [-1, 4, 2**70])
def test_a_level_that_would_fail_every_request_is_refused(level):
    with pytest.raises(ValueError, match="expected 0 to 3"):
        controls.refuse_log_level(None, ConfigureLoggingReq(log_requests_level=level))


def test_levels_that_there_are_pass():
    for level in (None, 0, 3):
        controls.refuse_log_level(None, ConfigureLoggingReq(log_requests_level=level))


@pytest.mark.parametrize("size", [float("nan"), float("inf"), 2.0, "4", None, True, [4]])
def test_a_batch_size_that_is_no_whole_number_is_refused(size):
    with pytest.raises(ValueError, match="expected a whole number of requests"):
        controls.refuse_micro_batch(None, SetInternalStateReq(server_args={"pp_max_micro_batch_size": size}))


def test_a_batch_size_that_is_one_passes():
    for state in ({"pp_max_micro_batch_size": 4}, {}):
        controls.refuse_micro_batch(None, SetInternalStateReq(server_args=state))


def test_an_exception_that_an_endpoint_lets_through_is_logged(caplog):
    try:
        raise OverflowError("too wide")
    except OverflowError as error:
        answer = asyncio.run(mistakes._answer(SimpleNamespace(url=SimpleNamespace(path="/start_profile")), error))
    assert answer.status_code == 400 and b"too wide" in answer.body
    assert "/start_profile" in caplog.text and "Traceback" in caplog.text


def test_only_an_admin_makes_the_scheduler_wait_for_peers():
    """Without peers it stands still until SGLang's watchdog ends it."""
    manager, client = SimpleNamespace(server_args=SimpleNamespace(admin_api_key=None)), object()
    with pytest.raises(ValueError, match="--admin-api-key"):
        controls.refuse_meeting(manager, None, client)
    controls.refuse_meeting(manager, None)  # an Engine's caller
    manager.server_args.admin_api_key = "secret"
    controls.refuse_meeting(manager, None, client)
