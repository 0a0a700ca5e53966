# SPDX-License-Identifier: Apache-2.0
"""Quarantine: when KV changed in host memory, the requests that hold it end and the radix tree forgets it. All others are served on."""

from __future__ import annotations

import logging
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import torch
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_freekv import releases
from sglang_freekv.config import Refusal
from sglang_freekv.kv_pool import pool_of
from sglang_freekv.memory_pool.canary import Fault, FaultReader
from sglang_freekv.scheduler_patch import trees
from sglang_freekv.scheduler_patch.held import Held, begun_in

logger = logging.getLogger(__name__)

NAMED = 8  # faults that are logged one by one


class Quarantine:
    """Acts on the faults that the canary of a scheduler's pool finds.

    It counts the ``faults``, the ``requests_ended`` for them, and the ``pages_swept``, which are pages examined while no request ran.

    Raises:
        Refusal: the prefix cache cannot forget a page.
    """

    def __init__(self, scheduler) -> None:
        self.scheduler = scheduler
        self.pool = pool_of(scheduler.token_to_kv_pool_allocator.get_kvcache())
        self.reader = FaultReader()
        self.pending: dict[tuple[int, int, int], Fault] = {}  # found by this rank while no request ran; all ranks act in the next step
        self.last_found: list[Fault] = []
        self.faults = self.requests_ended = self.pages_swept = 0
        self.last_swept = 0
        self.layers = {index: layer for layer, index in self.pool.retrieval_index.items()}
        self.tree = trees.forgetting(scheduler.tree_cache)
        if self.tree is None:
            raise Refusal(
                f"--freekv-canary {self.pool.config.canary}: the prefix cache is {type(scheduler.tree_cache).__name__}, expected "
                f"{trees.EXPECTED}, the only one whose pages can be quarantined; leave out the option for another, or use --freekv-canary off"
            )

    def as_dict(self) -> dict[str, int]:
        return {"faults": self.faults, "requests_ended": self.requests_ended, "pages_swept": self.pages_swept}

    def examine(self, snapshot: torch.Tensor, batch, held: Held | None) -> None:
        """Act on the faults of one forward pass, before its tokens leave.

        Args:
            snapshot: the canary's faults after the pass.
            batch: the batch of the pass.
            held: the pages that its requests held at its launch. None if they are not known: then only those who hold a page now end.
        """
        found = self._agree([*self.pending.values(), *self.reader.read(snapshot.cpu())])
        self.pending.clear()
        known, self.last_found = self.last_found, found  # the step in flight meanwhile finds the same faults again
        if faults := {fault.unit: fault for fault in found if fault not in known}:
            self._isolate(list(faults.values()), batch, held)

    def sweep(self, host_pages: torch.Tensor) -> torch.Tensor:
        """Examine full pages while no request runs, and act on their faults.

        Args:
            host_pages: ``[N]`` on the device. The first of them, as many as a staging buffer holds, are examined.

        Returns:
            ``[M]`` examined pages without a fault.
        """
        host_pages = host_pages[: self.pool.store.staging.tokens // self.pool.page_size]
        self.pool.store.staging.sweep(host_pages)
        self.pages_swept += len(host_pages)
        faults = {fault.unit: fault for fault in self.reader.read(self.pool.store.canary.faults.cpu())}
        if _ranks(self.scheduler) > 1:  # ranks sweep on their own, but act together, in the next step
            self.pending |= {unit: replace(fault, swept=True) for unit, fault in faults.items()}
        elif faults:
            self._isolate(list(faults.values()))
        changed = torch.tensor([fault.host_page for fault in faults.values()], device=host_pages.device)
        return host_pages[~torch.isin(host_pages, changed)]

    def sweep_on(self, host_pages: torch.Tensor, count: int) -> None:
        """Examine the next ``count`` full pages. Calls go through all pages in turn, and then begin again.

        Args:
            host_pages: ``[N]`` all full pages, ascending, in a tensor on the CPU.
        """
        later = host_pages[host_pages > self.last_swept][:count]
        self.last_swept = int(later[-1]) if len(later) else 0
        if len(later):
            self.sweep(later.to(self.pool.device))

    def evict(self) -> None:
        """Free what the radix tree has forgotten and no request locks any more."""
        self.tree.evict_forgotten()

    def _agree(self, faults: list[Fault]) -> list[Fault]:
        """The faults of all ranks, so that every rank ends the same requests in the same step."""
        if _ranks(self.scheduler) == 1:
            return faults
        group = self.scheduler.tp_cpu_group
        found = torch.tensor([len(faults)])
        torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX, group=group)
        if not found.item():
            return []
        everywhere: list[list[Fault]] = [[]] * _ranks(self.scheduler)
        torch.distributed.all_gather_object(everywhere, faults, group=group)
        return sum(everywhere, [])

    def _isolate(self, faults: list[Fault], batch=None, held: Held | None = None) -> None:
        """End who has changed KV, or KV that was computed from it, and forget both."""
        self.faults += len(faults)
        cause, ended = self._trace(faults, held)
        untrusted = cause.keys() - begun_in(self.pool.page_size, *self._later(held))  # those are somebody else's by now, with new KV
        for request in self._live_requests(batch):
            if pages := self._pages_of(request) & untrusted:
                ended.setdefault(request, set()).update(cause[page] for page in pages)
        for fault in faults[:NAMED]:
            named = [request.rid for request, changed in ended.items() if fault.host_page in changed]
            logger.error(f"{self._describe(fault)}; " + (f"ending requests {named}" if named else "no running request has it"))
        if len(faults) > NAMED:
            logger.error(f"canary: and {len(faults) - NAMED} more; {len({fault.host_page for fault in faults})} pages in all")
        for request, changed in ended.items():
            self._end(request, next(fault for fault in faults if fault.host_page in changed))
        self.tree.forget(untrusted)
        self.evict()

    def _trace(self, faults: list[Fault], held: Held | None) -> tuple[dict[int, int], dict[Any, set[int]]]:
        """What came of changed pages in the pass that read them.

        Returns:
            Each page that is not to be trusted, with the changed page behind it; and who read changed pages and still runs, with these.
        """
        cause = {fault.host_page: fault.host_page for fault in faults}
        ended: dict[Any, set[int]] = {}
        if held is None:
            return cause, ended
        for page in begun_in(self.pool.page_size, held) & {fault.host_page for fault in faults if fault.swept}:
            del cause[page]  # it was evicted and written anew before all ranks could act
        for request, read, written in held.readers(set(cause)):
            if _runs(request):
                ended[request] = set(read)
            for page in written:  # the tree may have it, behind other pages of the same tokens
                cause.setdefault(page, read[0])
        return cause, ended

    def _later(self, held: Held | None) -> list:
        """Passes that were launched behind that of ``held``, or that are prepared."""
        launched = [batch for batch, _ in getattr(self.scheduler, "result_queue", ())]
        prepared = self.scheduler.cur_batch_for_debug
        is_this = held is not None and prepared is not None and prepared.out_cache_loc is held.out_cache_loc
        return launched if prepared is None or is_this else [*launched, prepared]

    def _describe(self, fault: Fault) -> str:
        return (
            f"canary: host page {fault.host_page}, layer {self.layers[fault.layer]}, kv head {fault.head}: the KV changed in host memory "
            f"after it was written (checksum {fault.found & 0xFFFFFFFF:08x}, expected {fault.expected & 0xFFFFFFFF:08x})"
        )

    def _live_requests(self, batch) -> set:
        scheduler = self.scheduler
        batches = (batch, scheduler.running_batch, scheduler.last_batch, scheduler.cur_batch_for_debug)
        requests = {request for some in batches if some is not None for request in some.reqs} | {scheduler.chunked_req}
        return {request for request in requests if request is not None and _runs(request)}

    def _pages_of(self, request) -> set[int]:
        size = self.pool.page_size
        slots = self.scheduler.req_to_token_pool.req_to_token[_row_of(request), : request.kv.kv_allocated_len : size]
        return set((slots // size).tolist())

    def _end(self, request, fault: Fault) -> None:
        is_chunked = request is self.scheduler.chunked_req
        request.skip_radix_cache_insert |= not is_chunked  # between chunks SGLang needs the insert to go on
        if request.to_finish is not None:  # it is ending already
            return
        self.requests_ended += 1
        message = f"{self._describe(fault)}; send the request again, its KV will be computed anew"
        reason = FINISH_ABORT(message, HTTPStatus.INTERNAL_SERVER_ERROR, "KVChangedInHostMemory")
        request.to_finish = reason  # of a chunked prompt, in case that it is retracted first: it would come back with nobody to ask for it
        if is_chunked:  # it has no result to end in, so it ends like one that its client aborts
            self.scheduler._pending_chunked_abort_req = request
            self.scheduler.ipc_channels.send_to_tokenizer.send_output(AbortReq(rid=request.rid, finished_reason=reason.to_json()), request)
        else:
            request.finished_len = len(request.output_ids)  # without the token of this step, which SGLang adds next


def _ranks(scheduler) -> int:
    return scheduler.tp_group.world_size


def _runs(request) -> bool:
    """Whether it has neither ended nor been retracted."""
    return not request.finished() and (request.kv.holds_kv if releases.has("request KV") else request.kv is not None)


def _row_of(request) -> int:
    return request.kv.req_pool_idx if releases.has("request KV") else request.req_pool_idx
