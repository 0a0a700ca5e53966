# SPDX-License-Identifier: Apache-2.0
"""Specification of the kernels by which frames change hands between passes; letters as in ``reference``.

T is the longest context, and ``req_to_token [R, T]`` is SGLang's KV index of each position of each row. A KV index // S is a host page.
Frames are pushed and popped in the order of the batch and then of the pages, so that all ranks give a page the same frame. Whole rows are
served before partial ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sglang_freekv.kernels.frame_tables import (
    ASKED,
    BROUGHT,
    DEEPEST,
    DEPTH_BITS,
    FREE,
    IN_HAND,
    IN_USE,
    LEFT,
    LENT,
    STRANDED,
    UNSERVED,
    WHOLE,
    FrameTables,
)


def note_rows(ended: torch.Tensor, lent: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, tables: FrameTables) -> None:
    """Begin a pass: rows that ended give back the frame in their hand and their slots, and the rows of the batch run. Counts begin at 0.

    Args:
        ended: ``[M]`` distinct rows whose request ended since the last pass. A row of the batch may be among them: it has a new request.
        lent: ``[M]`` distinct rows that ``lend_slots`` will serve. From here on they are partial.
        rows: ``[B]`` row of each request.
        seq_lens: ``[B]`` tokens of context.
        tables: written in place.
    """
    tables.counts[:STRANDED] = 0
    for given_back in (tables.in_hand[ended], tables.row_frames[ended].flatten()):
        _push(given_back[given_back >= 0], tables)
    tables.in_hand[ended] = -1
    tables.row_frames[ended] = WHOLE
    tables.row_lens[ended] = 0
    tables.row_frames[lent[tables.row_frames[lent, 0] == WHOLE], 0] = ASKED
    real = rows > 0
    tables.row_lens[rows[real]] = seq_lens[real].to(torch.int32)
    tables.row_absent[rows[real]] = 0


def lend_slots(lent: torch.Tensor, tables: FrameTables) -> None:
    """Lend C free frames as slots to each row that asked for them. A row that finds fewer gets none, and asks again when it is lent again.

    Args:
        lent: as for ``note_rows``, before this.
        tables: written in place.
    """
    for row in lent[tables.row_frames[lent, 0] == ASKED].tolist():
        if int(tables.free_count) < tables.row_frames.shape[1]:
            tables.counts[STRANDED] += 1
            continue
        tables.row_frames[row] = frames = _pop(tables.row_frames.shape[1], tables)
        tables.page_of[frames] = LENT


def mark_pages(req_to_token: torch.Tensor, tables: FrameTables, page_size: int, now: int) -> None:
    """Note in ``last_use`` that this pass uses every page of every running row. Counts those that are resident, each once.

    It pins the pages of whole rows, and the page of each row's last token: that one need not be in host memory.

    Args:
        req_to_token: ``[R, T]``.
        tables: ``last_use`` and ``counts`` are written in place.
        page_size: S.
        now: number of the pass, above that of every pass before.
    """
    running = (tables.row_lens > 0).nonzero()
    depth = torch.arange(-(-req_to_token.shape[1] // page_size), device=running.device)
    lens = tables.row_lens[running]
    pages = (req_to_token[running, depth * page_size] // page_size).where(depth * page_size < lens, 0).long()
    pinned = (tables.row_frames[running, 0] == WHOLE) | (depth >= (lens - 1) // page_size)
    marks = 2 * now + pinned.long() << DEPTH_BITS | (DEEPEST - depth)
    distinct = pages.unique()
    fresh = distinct[(distinct > 0) & (tables.last_use[distinct] >> DEPTH_BITS < 2 * now)]
    tables.counts[IN_USE] += (tables.frame_of[fresh] >= 0).sum()
    tables.last_use.scatter_reduce_(0, pages[pages > 0], marks[pages > 0], "amax")


def begin_pages(
    req_to_token: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, tables: FrameTables, page_size: int, *, keep: int = 0
) -> None:
    """Give the pages that the new tokens of a decode step begin their frames, then :func:`take_in_hand`.

    A page that begins takes the frame in its row's hand. If the page still has the frame of an earlier owner, it keeps that one. If it has
    one and nothing is in hand, the frame is freed: the plan of the step before has given the page slots. If it has neither, the page stays
    absent.

    Args:
        req_to_token: ``[R, T]``.
        rows: ``[B]`` row of each request.
        seq_lens: ``[B]`` tokens of context, the new one included.
        tables: written in place.
        page_size: S.
        keep: as for ``take_in_hand``.
    """
    begins = (rows > 0) & (seq_lens % page_size == 1 % page_size)
    row = rows[begins]
    pages = (req_to_token[row, seq_lens[begins] - 1] // page_size).long()
    hands, frames = tables.in_hand[row], tables.frame_of[pages]
    taken, stale = (pages > 0) & (frames < 0) & (hands >= 0), (frames >= 0) & (hands < 0)
    tables.in_hand[row[taken]] = -1
    _hold(pages[taken], hands[taken], tables)
    _forget(pages[stale], tables)
    take_in_hand(rows, seq_lens, tables, page_size, keep=keep)


def take_in_hand(rows: torch.Tensor, seq_lens: torch.Tensor, tables: FrameTables, page_size: int, *, keep: int = 0) -> None:
    """Rows whose page is full take a free frame in hand, for the page that the next token begins, unless they have one. Counts what is left.

    Args:
        rows, seq_lens: as for ``begin_pages``.
        tables: written in place.
        page_size: S.
        keep: partial rows take frames only while more than so many are free.
    """
    full = rows[(rows > 0) & (seq_lens % page_size == 0)]
    for whole, left, missed in ((True, 0, STRANDED), (False, keep, UNSERVED)):
        row = full[(tables.in_hand[full] < 0) & ((tables.row_frames[full, 0] == WHOLE) == whole)]
        frames = _pop(len(row), tables, left)
        tables.in_hand[row[: len(frames)]] = frames
        tables.page_of[frames] = IN_HAND
        tables.counts[missed] += len(row) - len(frames)
    tables.counts[LEFT] = tables.free_count[0]


def hold_pages(
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    tables: FrameTables,
    page_size: int,
    given: torch.Tensor,
    *,
    keep: int = 0,
) -> None:
    """Give absent pages of the contexts free frames: first all of whole rows, then those of partial rows while there are any to spare.

    A page of two requests gets one frame.

    Args:
        req_to_token: ``[R, T]``.
        rows: ``[B]`` row of each request.
        seq_lens: ``[B]`` tokens of context, the new ones included.
        prefix_lens: ``[B]`` tokens before the new ones, a multiple of S. Their pages are counted as brought.
        tables: written in place.
        page_size: S.
        given: ``[B, P]`` int32 receives the frame of each logical page that was given one, where a request of the batch is the first to
            have the page. Its KV is not in the frame yet. All else is left as it is.
        keep: pages of partial rows get frames only while more than so many are free.
    """
    for whole, left in ((True, 0), (False, keep)):
        for b, pages in _contexts(req_to_token, rows, seq_lens, page_size):
            if (tables.row_frames[rows[b], 0] == WHOLE) != whole:
                continue
            absent = ((pages > 0) & (tables.frame_of[pages] < 0)).nonzero().squeeze(1)
            frames = _pop(len(absent), tables, left)
            served = absent[: len(frames)]
            _hold(pages[served], frames, tables)
            given[b, served] = frames
            tables.counts[BROUGHT] += (served < prefix_lens[b] // page_size).sum()
            tables.counts[STRANDED] += (len(absent) - len(frames)) * whole


def forget_pages(
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    tables: FrameTables,
    page_size: int,
) -> None:
    """Free the frames that the new pages of an extend have from earlier owners.

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


def _contexts(req_to_token: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, page_size: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Each request of the batch that is not padding, and the host pages of its context."""
    for b in (rows > 0).nonzero().squeeze(1).tolist():
        yield b, (req_to_token[rows[b], : seq_lens[b] : page_size] // page_size).long()


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


def _pop(most: int, tables: FrameTables, keep: int = 0) -> torch.Tensor:
    """The last ``most`` frames of the stack, the last one first; fewer if that would leave fewer than ``keep``."""
    count = int(tables.free_count)
    frames = tables.free[max(count - most, min(keep, count)) : count].flip(0)
    tables.free_count.sub_(len(frames))
    return frames
