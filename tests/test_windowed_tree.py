"""Full and sliding-window layers in turns, in SGLang's own prefix cache over our pool: hits end where a window is, and nothing is lost."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_freekv import releases
from sglang_freekv.config import FreeKVConfig
from sglang_freekv.kv_pool import FreeKVPool, full_allocator
from sglang_freekv.layers import LayerKind, LayerTable
from sglang_freekv.memory_pool.kv_format import KVFormat
from sglang_freekv.memory_pool.sizing import KVShape
from sglang_freekv.scheduler_patch import prefill, retraction
from sglang_freekv.windowed_pool import WindowedPool

pytestmark = pytest.mark.skipif(not releases.has("tree paths"), reason="older trees are made otherwise, and a server runs on them")

PAGE, TOKENS, IN_WINDOWS, WINDOW, ROWS = 8, 256, 128, 20, 2
CONFIG = FreeKVConfig(budget_tokens=64, sink_tokens=16, window_tokens=16, page_size=PAGE)
W, R = LayerKind.WINDOW, LayerKind.RETRIEVAL
SHAPE = KVShape(LayerTable((W, R)), 2, 4, 16, (2, 16), KVFormat.plain(torch.float32), window=WINDOW)


class World:
    """SGLang's pools and its tree, and requests that run on them as its scheduler has them run."""

    def __init__(self, kind: str, forgets: bool) -> None:
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        from sglang_freekv.scheduler_patch.unified_tree import ForgetfulTree

        self.pool = FreeKVPool(CONFIG, SHAPE, TOKENS, ROWS, 256, "cpu")
        windowed = WindowedPool(self.pool, IN_WINDOWS)
        self.allocator = SWATokenToKVPoolAllocator(TOKENS, IN_WINDOWS, PAGE, torch.float32, "cpu", windowed, need_sort=False)
        self.rows = ReqToTokenPool(ROWS, 256, "cpu", False)
        params = CacheInitParams(False, self.rows, self.allocator, PAGE, sliding_window_size=WINDOW, tree_core_backend=kind)
        params.tree_components = ComponentType.FULL, ComponentType.SWA
        self.tree = (ForgetfulTree if forgets else UnifiedRadixCache)(params)

    def admit(self, tokens: range, chunk: int = TOKENS) -> Req:
        request = Req("a", "", array("q", tokens), SamplingParams(max_new_tokens=100))
        self.resume(request, chunk)
        return request

    def resume(self, request: Req, chunk: int = TOKENS) -> None:
        """Prefill what the tree does not have, in chunks."""
        from sglang.srt.mem_cache.common import checkpoint_kv_cache

        request.init_next_round_input(self.tree)
        request.hit, length = request.prefix_len, len(request.full_untruncated_fill_ids)
        found = self.tree.path_device_indices(request.last_node)
        request.lock = self.tree.lock(request.last_node)
        [row] = self.rows.alloc([request])
        self.rows.write((row, slice(0, len(found))), found.int())
        while request.prefix_len < length:
            before, request.extend_end = request.prefix_len, min(request.prefix_len + chunk, length)
            self._extend(request, before, request.extend_end)
            checkpoint_kv_cache(request, self.tree)

    def decode(self, request: Req, steps: int) -> None:
        for _ in range(steps):
            request.output_ids.append(1000 + len(request.output_ids))
            length = len(request.origin_input_ids) + len(request.output_ids)
            self._extend(request, length - 1, length)
            self.tree.evict_sliding_windows(request, length - 1)

    def _extend(self, request: Req, before: int, after: int) -> None:
        row = request.kv.req_pool_idx
        last = self.rows.req_to_token[row, before - 1 : before].long() if before else torch.tensor([-1])
        self.allocator.evict_to_free_tokens(self.tree, -(-(after - before) // PAGE) * PAGE)
        lengths = torch.tensor([before]), torch.tensor([before]), torch.tensor([after]), torch.tensor([after])
        slots = self.allocator.alloc_extend(*lengths, last, after - before)
        self.rows.write((row, slice(before, after)), slots.int())
        request.kv.kv_allocated_len = request.kv.kv_committed_len = after

    def retract(self, request: Req) -> None:
        batch = SimpleNamespace(reqs=[request], tree_cache=self.tree)
        assert retraction.keep_pages(batch, 0, 0)

    def finish(self, request: Req) -> None:
        from sglang.srt.mem_cache.common import release_kv_cache

        request.finished_reason = FINISH_LENGTH(1)
        release_kv_cache(request, self.tree, checkpoint=True)

    def assert_only_the_tree_holds(self) -> None:
        assert self.allocator.full_available_size() + self.tree.full_evictable_size() == TOKENS
        assert self.allocator.swa_available_size() + self.tree.swa_evictable_size() == IN_WINDOWS
        assert prefill._held_pages(self.allocator, self.tree) == 0 and self.rows.available_size() == ROWS
        self.tree.evict(EvictParams(num_tokens=TOKENS, swa_num_tokens=IN_WINDOWS))
        assert self.allocator.full_available_size() == TOKENS and self.allocator.swa_available_size() == IN_WINDOWS
        assert len(self.pool.held_pages(full_allocator(self.allocator))) == 0


@pytest.fixture
def settings(monkeypatch) -> None:
    bags = {"serving": {"strip_thinking_cache": False}, "spec": {"speculative_algorithm": None}}
    monkeypatch.setattr(runtime_context._CONTEXT, "_config_bags", {name: SimpleNamespace(**bag) for name, bag in bags.items()})


@pytest.fixture(params=["rust", "python"])
def world(request, settings) -> World:
    return World(request.param, forgets=False)


@pytest.fixture(params=["rust", "python"])
def forgetful(request, settings) -> World:
    return World(request.param, forgets=True)


def test_a_hit_ends_where_the_tree_has_a_window(world):
    request = world.admit(range(100), chunk=48)
    assert request.hit == 0
    world.finish(request)
    hits = [(range(100), 96), (range(97), 96), ((*range(72), *range(500, 520)), 48), ((*range(32), *range(500, 520)), 0)]
    for tokens, expected in hits:  # the host has 72 and 32 tokens of the last two
        request = world.admit(tokens)
        assert request.hit == expected
        world.finish(request)
    world.assert_only_the_tree_holds()


def test_a_prefix_without_its_window_is_held_and_computed_anew(world):
    world.finish(world.admit(range(100), chunk=80))
    world.tree.evict(EvictParams(num_tokens=0, swa_num_tokens=IN_WINDOWS))
    held = TOKENS - world.allocator.full_available_size()
    assert held > 0 and world.allocator.swa_available_size() == IN_WINDOWS
    assert len(world.pool.held_pages(full_allocator(world.allocator))) == held // PAGE
    for expected in (0, 96):
        request = world.admit(range(100))
        assert request.hit == expected
        world.finish(request)
    world.assert_only_the_tree_holds()


@pytest.mark.parametrize("steps", [1, 7, 29, 60])
def test_a_retracted_request_resumes_behind_its_last_whole_page(world, steps):
    request = world.admit(range(50))
    world.decode(request, steps)
    table = world.rows.req_to_token[request.kv.req_pool_idx].clone()
    world.retract(request)
    world.resume(request)
    assert request.hit == (50 + steps - 1) // PAGE * PAGE
    assert torch.equal(world.rows.req_to_token[request.kv.req_pool_idx, : request.hit], table[: request.hit])
    world.decode(request, 9)
    world.finish(request)
    world.assert_only_the_tree_holds()


@pytest.mark.parametrize(("page", "hit"), [(0, 0), (3, 0), (7, 48), (11, 88)])
def test_a_forgotten_page_goes_with_its_window(forgetful, page, hit):
    """A hit ends before the page where a window is left: behind the first chunk, and in the second one's last pages."""
    world = forgetful
    request = world.admit(range(100), chunk=48)
    forgotten = int(world.rows.req_to_token[request.kv.req_pool_idx, page * PAGE]) // PAGE
    world.finish(request)
    world.tree.forget({forgotten})
    world.tree.evict_forgotten()
    assert forgotten not in world.pool.held_pages(full_allocator(world.allocator)).tolist()
    for expected in (hit, 96):
        request = world.admit(range(100))
        assert request.hit == expected
        world.finish(request)
    world.assert_only_the_tree_holds()


@pytest.mark.parametrize("ending", ["finish", "retract"])
@pytest.mark.parametrize("steps", [2, 60])
def test_a_page_that_a_running_request_has_is_forgotten_when_it_ends(forgetful, steps, ending):
    world = forgetful
    request = world.admit(range(100))
    world.decode(request, steps)
    world.tree.forget({int(world.rows.req_to_token[request.kv.req_pool_idx, 5 * PAGE]) // PAGE})
    world.decode(request, 3)
    getattr(world, ending)(request)  # what it has computed is not inserted
    world.tree.evict_forgotten()
    assert not world.tree.forgotten
    again = world.admit(range(100))
    assert again.hit == 0
    world.finish(again)
    world.assert_only_the_tree_holds()
