# SPDX-License-Identifier: Apache-2.0
"""Specification of the kernels by which frames change hands between passes; letters as in ``reference``.

T is the longest context, and ``req_to_token [R, T]`` is SGLang's token slot of each position of each row. A token slot // S is a host page.
Frames are pushed and popped in the order of the batch and then of the pages, so that all ranks give a page the same frame.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sglang_freekv.kernels.frame_tables import DEEPEST, DEPTH_BITS, FREE, IN_HAND, IN_USE, LEFT, UNSERVED, FrameTables


def note_rows(ended: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, tables: FrameTables) -> None:
    """Begin a pass: the rows that ended give back the frame in their hand, and the rows of the batch run. Counts begin at 0.

    Args:
        ended: ``[M]`` distinct rows whose request ended since the last pass. A row of the batch may be among them: it has a new request.
        rows: ``[B]`` row of each request.
        seq_lens: ``[B]`` tokens of context.
        tables: written in place.
    """
    tables.counts.zero_()
    hands = tables.in_hand[ended]
    _push(hands[hands >= 0], tables)
    tables.in_hand[ended] = -1
    tables.row_lens[ended] = 0
    real = rows > 0
    tables.row_lens[rows[real]] = seq_lens[real].to(torch.int32)


def mark_pages(req_to_token: torch.Tensor, tables: FrameTables, page_size: int, now: int) -> None:
    """Note in ``last_use`` that this pass uses every page of every running row. Counts those that are resident, each once.

    Args:
        req_to_token: ``[R, T]``.
        tables: ``last_use`` and ``counts`` are written in place.
        page_size: S.
        now: number of the pass, above that of every pass before.
    """
    running = (tables.row_lens > 0).nonzero()
    depth = torch.arange(-(-req_to_token.shape[1] // page_size), device=running.device)
    begun = depth * page_size < tables.row_lens[running]
    pages = (req_to_token[running, depth * page_size] // page_size).where(begun, 0).long()
    marks = now << DEPTH_BITS | (DEEPEST - depth).expand_as(pages)
    distinct = pages.unique()
    fresh = distinct[(distinct > 0) & (tables.last_use[distinct] >> DEPTH_BITS < now)]
    tables.counts[IN_USE] += (tables.frame_of[fresh] >= 0).sum()
    tables.last_use.scatter_reduce_(0, pages[pages > 0], marks[pages > 0], "amax")


def begin_pages(req_to_token: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, tables: FrameTables, page_size: int) -> None:
    """Give the pages that the new tokens of a decode step begin their frames, and take those that the next tokens will want in hand.

    A page that begins takes the frame in its row's hand. If the page still has the frame of an earlier owner, it keeps that one. If it has
    one and nothing is in hand, the frame is freed: the plan of the step before has given the page slots. If it has neither, the page stays
    absent. Then a row whose page is full takes a free frame in hand, if it has none and there is one.

    Args:
        req_to_token: ``[R, T]``.
        rows: ``[B]`` row of each request.
        seq_lens: ``[B]`` tokens of context, the new one included.
        tables: written in place.
        page_size: S.
    """
    begins = (rows > 0) & (seq_lens % page_size == 1 % page_size)
    row = rows[begins]
    pages = (req_to_token[row, seq_lens[begins] - 1] // page_size).long()
    hands, frames = tables.in_hand[row], tables.frame_of[pages]
    taken, stale = (pages > 0) & (frames < 0) & (hands >= 0), (frames >= 0) & (hands < 0)
    tables.in_hand[row[taken]] = -1
    _hold(pages[taken], hands[taken], tables)
    _forget(pages[stale], tables)
    _take_in_hand(rows, seq_lens, tables, page_size)


def hold_pages(
    req_to_token: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, tables: FrameTables, page_size: int, given: torch.Tensor
) -> None:
    """Begin an extend in place: give every absent page of its contexts a free frame, while there are any. Then take in hand as a decode step.

    A page of two requests gets one frame.

    Args:
        req_to_token: ``[R, T]``.
        rows: ``[B]`` row of each request.
        seq_lens: ``[B]`` tokens of context, the new ones included.
        tables: written in place.
        page_size: S.
        given: ``[B, P]`` int32 receives the frame of each logical page that was given one, where a request of the batch is the first to
            have the page. Its KV is not in the frame yet. All else is left as it is.
    """
    for b, pages in _contexts(req_to_token, rows, seq_lens, page_size):
        absent = ((pages > 0) & (tables.frame_of[pages] < 0)).nonzero().squeeze(1)
        frames = _pop(len(absent), tables)
        served = absent[: len(frames)]
        _hold(pages[served], frames, tables)
        given[b, served] = frames
        tables.counts[UNSERVED] += len(absent) - len(frames)
    _take_in_hand(rows, seq_lens, tables, page_size)


def forget_pages(
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    tables: FrameTables,
    page_size: int,
) -> None:
    """Begin an extend by staging: free the frames that its new pages have from earlier owners. Then take in hand as a decode step.

    Args:
        req_to_token: ``[R, T]``.
        rows: ``[B]`` row of each request.
        seq_lens: ``[B]`` tokens of context, the new ones included.
        prefix_lens: ``[B]`` tokens before the new ones, a multiple of S.
        tables: written in place.
        page_size: S.
    """
    for b, pages in _contexts(req_to_token, rows, seq_lens, page_size):
        new = pages[int(prefix_lens[b]) // page_size :]
        _forget(new[tables.frame_of[new] >= 0], tables)
    _take_in_hand(rows, seq_lens, tables, page_size)


def _contexts(req_to_token: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, page_size: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Each request of the batch that is not padding, and the host pages of its context."""
    for b in (rows > 0).nonzero().squeeze(1).tolist():
        yield b, (req_to_token[rows[b], : seq_lens[b] : page_size] // page_size).long()


def _take_in_hand(rows: torch.Tensor, seq_lens: torch.Tensor, tables: FrameTables, page_size: int) -> None:
    """Rows whose next token begins a page take a free frame in hand, unless they have one. Counts what is left, and who found none."""
    row = rows[(rows > 0) & (seq_lens % page_size == 0)]
    row = row[tables.in_hand[row] < 0]
    frames = _pop(len(row), tables)
    tables.in_hand[row[: len(frames)]] = frames
    tables.page_of[frames] = IN_HAND
    tables.counts[UNSERVED] += len(row) - len(frames)
    tables.counts[LEFT] = tables.free_count[0]


def _hold(pages: torch.Tensor, frames: torch.Tensor, tables: FrameTables) -> None:
    tables.frame_of[pages] = frames
    tables.page_of[frames] = pages.to(torch.int32)


def _forget(pages: torch.Tensor, tables: FrameTables) -> None:
    _push(tables.frame_of[pages], tables)
    tables.frame_of[pages] = -1


def _push(frames: torch.Tensor, tables: FrameTables) -> None:
    count = int(tables.free_count)
    tables.free[count : count + len(frames)] = frames
    tables.page_of[frames] = FREE
    tables.free_count.add_(len(frames))


def _pop(most: int, tables: FrameTables) -> torch.Tensor:
    """The last ``most`` frames of the stack, the last one first; fewer if there are fewer."""
    count = int(tables.free_count)
    frames = tables.free[max(count - most, 0) : count].flip(0)
    tables.free_count.sub_(len(frames))
    return frames
