"""Pages that changed, on SGLang's own radix trees: no page is lost, none is freed twice, and no prompt finds one of them."""

from __future__ import annotations

from array import array
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from sglang_freekv import releases
from sglang_freekv.config import Refusal
from sglang_freekv.memory_pool.canary import MOST_FAULTS, Fault
from sglang_freekv.scheduler_patch import retraction, trees
from sglang_freekv.scheduler_patch.held import Held
from sglang_freekv.scheduler_patch.quarantine import Quarantine

SIZE, PAGES = 4, 24
TREES = ["rust", "python", "rust with states", "python with states"] if trees.UNIFIED else ["radix"]


class Allocator:
    """As SGLang's, for a tree: it counts, and minds if a page comes back twice."""

    device, page_size = "cpu", SIZE

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.free = set(range(1, PAGES + 1))

    def free_segment(self, slots: torch.Tensor, start_pos: int) -> None:
        pages = set((slots[::SIZE] // SIZE).tolist())
        assert not pages & self.free, f"{pages & self.free} are freed twice"
        self.free |= pages


class States(HybridReqToTokenPool):
    """As SGLang's pool of rows with states: it counts the slots of states, and minds if one comes back twice."""

    def __init__(self) -> None:
        self.mamba_allocator = self
        self.used: set[int] = set()

    def alloc(self, count: int) -> torch.Tensor:
        slots = sorted(set(range(100, 200)) - self.used)[:count]
        self.used |= set(slots)
        return torch.tensor(slots)

    def free(self, slots: torch.Tensor) -> None:
        assert self.used.issuperset(slots.tolist()), f"{slots.tolist()} are freed twice"
        self.used -= set(slots.tolist())

    def clear(self) -> None:
        self.used.clear()


def make_tree(kind: str, allocator: Allocator):
    """SGLang's tree over the allocator, as a server with a canary has it."""
    params = CacheInitParams(disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=allocator, page_size=SIZE)
    if not trees.UNIFIED:
        return RadixCache(params)
    from sglang.srt.mem_cache.rust_tree_core import adapter
    from sglang.srt.mem_cache.unified_cache.components import mamba

    from sglang_freekv.scheduler_patch.unified_tree import FULL, ComponentType, ForgetfulTree

    core, *others = kind.split(" with ")
    params.tree_components, params.tree_core_backend = (FULL, *[ComponentType.MAMBA for _ in others]), core
    params.enable_mamba_extra_buffer = bool(others)
    with pytest.MonkeyPatch.context() as settings:
        if others:
            params.req_to_token_pool = States()
            settings.setattr(mamba, "mamba_checkpoint_grid", lambda page: SIZE)
            for module in (mamba, adapter):
                settings.setattr(module, "mamba_cache_chunk_size", lambda: SIZE)
                settings.setattr(module, "get_exec", lambda: SimpleNamespace(mamba=SimpleNamespace(mamba_max_states_per_path=-1)))
        return ForgetfulTree(params)


class Request:
    """Of a running batch; ``pages`` are its own and those of the tree."""

    def __init__(self, rid: str, pages: list[int], tokens: int = 0) -> None:
        self.rid, self.pages, self.output_ids = rid, pages, [7] * tokens
        self.kv = SimpleNamespace(kv_allocated_len=len(pages) * SIZE, holds_kv=True)
        self.to_finish = self.finished_len = None
        self.skip_radix_cache_insert = False

    def take(self, row: int) -> None:
        (self.kv if releases.has("request KV") else self).req_pool_idx = row

    def finished(self) -> bool:
        return False


class World:
    """A tree, and a quarantine over it."""

    def __init__(self, ranks: int = 1, tree=None) -> None:
        self.allocator = Allocator()
        self.tree = make_tree(tree, self.allocator) if isinstance(tree, str) else tree
        self.table = torch.zeros(4, PAGES * SIZE, dtype=torch.int64)
        self.sent: list = []
        canary = SimpleNamespace(faults=torch.zeros(1 + MOST_FAULTS, 5, dtype=torch.int32))
        store = SimpleNamespace(canary=canary, staging=SimpleNamespace(tokens=PAGES * SIZE, sweep=self.sweep))
        config = SimpleNamespace(canary="full")
        pool = SimpleNamespace(store=store, retrieval_index={1: 0}, page_size=SIZE, device="cpu", config=config)
        send = SimpleNamespace(send_output=lambda message, request: self.sent.append(message))
        self.scheduler = SimpleNamespace(
            tree_cache=self.tree,
            token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: SimpleNamespace(full_kv_pool=pool)),
            tp_group=SimpleNamespace(world_size=ranks),
            req_to_token_pool=SimpleNamespace(req_to_token=self.table),
            ipc_channels=SimpleNamespace(send_to_tokenizer=send),
            running_batch=None, last_batch=None, cur_batch_for_debug=None, chunked_req=None, _pending_chunked_abort_req=None,
        )  # fmt: skip
        self.faults, self.changed, self.quarantine = canary.faults, set(), Quarantine(self.scheduler)

    def key(self, text: int, pages: int) -> RadixKey:
        """A prompt of ``pages`` pages. Those whose ``text`` is equal share pages as far as they go."""
        tokens = array("q", [text * 1000 + position // SIZE for position in range(pages * SIZE)])
        return RadixKey(tokens, "an adapter" if text == 1 else None)

    @property
    def states(self) -> States | None:
        """The slots of states that a hybrid's tree keeps."""
        return getattr(self.tree, "req_to_token_pool", None)

    def insert(self, key: RadixKey, pages: list[int]) -> bool:
        """Insert what was computed for ``key`` behind its prefix hit, with a state at its end; whether the tree took it."""
        hit = self.match(key)
        new = set(pages[len(hit) :])
        slots = torch.cat([torch.arange(page * SIZE, page * SIZE + SIZE) for page in hit + pages[len(hit) :]])
        self.allocator.free -= new
        state = {"mamba_value": self.states.alloc(1)} if self.states else {}
        result = self.tree.insert(InsertParams(key=key, value=slots, prev_prefix_len=len(hit) * SIZE, **state))
        taken = not getattr(result, "rotation_tail_declined", False)
        if state and (not taken or result.mamba_exist):
            self.states.free(state["mamba_value"])
        if not taken:
            self.allocator.free |= new  # the request frees them when it ends
        return taken

    def find(self, key: RadixKey):
        """The node that a match ends in."""
        return self.tree.match_prefix(MatchPrefixParams(key=key)).last_device_node

    def match(self, key: RadixKey) -> list[int]:
        """The pages that a prompt finds; in a hybrid's tree it can take them up to a state."""
        found = self.tree.match_prefix(MatchPrefixParams(key=key))
        if not trees.UNIFIED:
            return (found.device_indices[::SIZE] // SIZE).tolist()
        length = found.full_kv_hit_length
        return (self.tree.path_device_indices(self.tree.tree_core.match_full_device_prefix(key)[1])[:length:SIZE] // SIZE).tolist()

    def texts(self) -> tuple[list[int], list[int]]:
        """The pages that prompts of both texts find."""
        return self.match(self.key(1, 8)), self.match(self.key(2, 8))

    def lock(self, text: int):
        """Lock a text, as a request that has matched it does, and return what unlocks it."""
        node = self.find(self.key(text, 8))
        receipt = self.tree.inc_lock_ref(node).to_dec_params()
        return lambda: self.tree.dec_lock_ref(node, receipt)

    def note(self, *pages: int) -> torch.Tensor:
        """What the canary's faults are after a step that found these pages changed."""
        for page in pages:
            self.faults[1 + int(self.faults[0, 0]) % MOST_FAULTS] = torch.tensor([0, page, 1, 2, 3])
            self.faults[0, 0] += 1
        return self.faults.clone()

    def sweep(self, pages: torch.Tensor) -> None:
        self.note(*[page for page in pages.tolist() if page in self.changed])

    def run(self, *requests: Request) -> SimpleNamespace:
        for row, request in enumerate(requests):
            request.take(row)
            slots = torch.cat([torch.arange(page * SIZE, page * SIZE + SIZE) for page in request.pages])
            self.table[row, : len(slots)] = slots
        running = SimpleNamespace(
            reqs=list(requests),
            out_cache_loc=None,
            req_pool_indices=torch.arange(len(requests)),
            seq_lens_cpu=torch.tensor([len(request.pages) * SIZE - 1 for request in requests]),
        )
        self.scheduler.running_batch = running
        return running

    def point(self, row: int, *pages: int) -> None:
        """Have a row begin with these pages, as SGLang does when the tree has others of the same tokens."""
        self.table[row, : len(pages) * SIZE] = torch.cat([torch.arange(page * SIZE, page * SIZE + SIZE) for page in pages])

    def in_tree(self) -> set[int]:
        return set(range(1, PAGES + 1)) - self.allocator.free

    def assert_sound(self, free: int) -> None:
        assert len(self.allocator.free) == free
        total = self.tree.total_size()
        assert self.tree.evictable_size() + self.tree.protected_size() == (PAGES - free) * SIZE == (total[0] if trees.UNIFIED else total)
        if trees.UNIFIED:
            self.tree.tree_core.sanity_check([], [])
        if self.states:
            kept = self.tree.tree_core.all_mamba_values_flatten().tolist()
            assert sorted(kept) == sorted(self.states.used)
            assert self.tree.mamba_evictable_size() + self.tree.mamba_protected_size() == len(kept)


def make_world(kind: str) -> World:
    """Two texts: one of pages 1 to 6, and one of pages 11 to 13."""
    world = World(tree=kind)
    world.insert(world.key(1, 6), [1, 2, 3, 4, 5, 6])
    world.insert(world.key(2, 3), [11, 12, 13])
    return world


@pytest.fixture(params=TREES)
def world(request) -> World:
    return make_world(request.param)


@pytest.fixture(params=[kind for kind in TREES if kind.endswith("with states")])
def with_states(request) -> World:
    return make_world(request.param)


@pytest.mark.parametrize("page, kept", [(1, []), (4, [1, 2, 3]), (6, [1, 2, 3, 4, 5])])
def test_a_page_is_forgotten_with_what_stands_on_it(world, page, kept):
    world.quarantine.examine(world.note(page), None, None)
    assert world.texts() == (kept, [11, 12, 13])
    assert world.in_tree() == {*kept, 11, 12, 13}
    world.assert_sound(free=PAGES - len(kept) - 3)
    assert world.quarantine.as_dict() == {"faults": 1, "requests_ended": 0, "pages_swept": 0}


def test_a_hit_ends_at_the_last_state_before_the_page(with_states):
    """And copies that state, or none: a state behind the page was made of it."""
    world, request = with_states, SimpleNamespace(session=None, kv=SimpleNamespace(holds_mamba=True, mamba_cow_src_index=None))
    ask = MatchPrefixParams(key=world.key(1, 8), cow_mamba=True, req=request)
    unlock = world.lock(1)
    world.insert(world.key(1, 2), [1, 2])
    [mamba] = set(world.tree.tree_components) - {world.tree.tree_components[0]}
    second = world.tree.tree_core.get_component_device_value(world.find(world.key(1, 2)), mamba).tolist()
    for page, hit, copied in ((5, 2, second), (2, 0, None)):
        world.quarantine.examine(world.note(page), None, None)
        request.kv.mamba_cow_src_index = None
        found = world.tree.match_prefix(ask)
        assert len(world.tree.path_device_indices(found.last_device_node)) == found.device_prefix_len == hit * SIZE
        assert request.kv.mamba_cow_src_index is None if copied is None else request.kv.mamba_cow_src_index.tolist() == copied
    unlock()
    world.quarantine.evict()
    assert world.in_tree() == {1, 11, 12, 13} and len(world.states.used) == 1
    world.assert_sound(free=PAGES - 4)


def test_pages_without_a_state_are_not_shared_behind_the_page(with_states):
    """No hit would end there, but an insert takes the tree's pages for the request's own."""
    unlock = with_states.lock(1)
    with_states.quarantine.examine(with_states.note(3), None, None)
    assert not with_states.insert(with_states.key(1, 5), [1, 2, 21, 22, 23])
    assert with_states.in_tree() == {*range(1, 7), 11, 12, 13} and len(with_states.states.used) == 2
    unlock()
    with_states.quarantine.evict()
    with_states.assert_sound(free=PAGES - 5)


def test_branches_below_it_go_too(world):
    branch = world.key(1, 5)
    branch.token_ids[4 * SIZE :] = array("q", [5] * SIZE)
    world.insert(branch, [1, 2, 3, 4, 9])
    world.quarantine.examine(world.note(2), None, None)
    assert world.in_tree() == {1, 11, 12, 13}
    world.assert_sound(free=PAGES - 4)


def test_what_is_locked_is_found_by_nobody_and_goes_when_it_can(world):
    unlock, anew = world.lock(1), [1, 2, 21, 22, 23, 24]
    world.quarantine.examine(world.note(3), None, None)
    assert world.texts() == ([1, 2], [11, 12, 13]) and world.in_tree() == {*range(1, 7), 11, 12, 13}
    taken = world.insert(world.key(1, 6), anew)  # the prompt, computed anew
    assert taken != trees.UNIFIED and world.texts()[0] == (anew if taken else [1, 2])
    world.quarantine.evict()
    world.assert_sound(free=PAGES - (13 if taken else 9))
    unlock()
    world.quarantine.evict()
    assert taken or world.insert(world.key(1, 6), anew)
    assert world.texts()[0] == anew
    world.assert_sound(free=PAGES - 9)
    assert not world.quarantine.tree.forgotten


def test_a_second_page_of_the_same_node_leaves_nothing_behind(world):
    unlock = world.lock(1)
    world.quarantine.examine(world.note(3), None, None)
    world.quarantine.examine(world.note(5), None, None)
    unlock()
    world.quarantine.evict()
    assert world.in_tree() == {1, 2, 11, 12, 13}
    world.assert_sound(free=PAGES - 5)


def test_a_prompt_that_leaves_the_text_before_the_page_is_kept(world):
    unlock, other = world.lock(1), world.key(1, 4)
    other.token_ids[2 * SIZE :] = array("q", [5] * 2 * SIZE)
    world.quarantine.examine(world.note(3), None, None)
    assert world.insert(other, [1, 2, 8, 9]) and world.match(other) == [1, 2, 8, 9]
    unlock()
    world.quarantine.evict()
    assert world.in_tree() == {1, 2, 8, 9, 11, 12, 13}
    world.assert_sound(free=PAGES - 7)


@pytest.mark.parametrize("by", ["flush", "eviction"])
def test_sglang_may_be_first(world, by):
    unlock = world.lock(1)
    world.quarantine.examine(world.note(3), None, None)
    unlock()
    if by == "flush":
        world.tree.reset()
        world.allocator.clear()
        if world.states:
            world.states.clear()
    else:
        world.tree.evict(EvictParams(num_tokens=PAGES * SIZE))
    world.quarantine.evict()
    world.assert_sound(free=PAGES)
    assert world.insert(world.key(2, 1), [3]) and world.texts()[1] == [3]  # the page was handed out again


def test_a_fault_is_acted_upon_once(world):
    requests = Request("a", [1, 2, 8], 5), Request("b", [11, 12])
    batch = world.run(*requests)
    world.quarantine.examine(world.note(2), batch, None)
    world.quarantine.examine(world.note(2), batch, None)  # of the step that was in flight
    world.quarantine.examine(world.faults.clone(), batch, None)
    assert world.quarantine.as_dict() == {"faults": 1, "requests_ended": 1, "pages_swept": 0}
    ended, other = requests
    assert "host page 2, layer 1, kv head 1" in ended.to_finish.message and ended.to_finish.status_code == 500
    assert ended.finished_len == 5 and ended.skip_radix_cache_insert
    assert other.to_finish is None and other.finished_len is None


def held_by(world: World, batch: SimpleNamespace) -> Held:
    return Held.at_launch(batch, world.table, SIZE)


def began(*slots: int) -> SimpleNamespace:
    """A pass that writes these slots."""
    return SimpleNamespace(reqs=[], out_cache_loc=torch.tensor(slots))


@pytest.mark.parametrize("slots, is_another_s", [([7, 8 * SIZE], True), ([8 * SIZE + 1, 9 * SIZE], False)])
def test_a_page_that_was_handed_out_anew_meanwhile_ends_nobody(world, slots, is_another_s):
    """The request that had it was in the pass in flight when it ended; the next pass has begun before that one's faults are read."""
    request = Request("b", [8, 9])
    batch, world.scheduler.result_queue = world.run(request), deque([(began(*slots), None)])
    world.quarantine.examine(world.note(8, 5), batch, None)
    assert (request.to_finish is None) == is_another_s
    assert world.quarantine.as_dict() == {"faults": 2, "requests_ended": int(not is_another_s), "pages_swept": 0}
    assert world.texts()[0] == [1, 2, 3, 4]


def test_a_prompt_in_chunks_is_told_at_once(world):
    request = Request("a", [1, 2, 8])
    batch = world.run(request)
    world.scheduler.chunked_req = request
    world.quarantine.examine(world.note(8), batch, None)
    assert world.scheduler._pending_chunked_abort_req is request
    assert request.to_finish is not None  # if a pause retracts it first, it ends when it comes back
    assert not request.skip_radix_cache_insert  # SGLang 0.5.17 would compute the same chunk for ever
    [message] = world.sent
    assert message.rid == "a" and "host page 8" in message.finished_reason["message"] and message.finished_reason["status_code"] == 500


def test_whoever_has_the_page_beyond_its_end_is_left_alone(world):
    request = Request("a", [1, 2, 8])
    batch = world.run(request)
    request.kv.kv_allocated_len = 2 * SIZE - 1  # what follows in its row is of whoever had it before
    world.quarantine.examine(world.note(8), batch, None)
    assert request.to_finish is None


def test_a_sweep_tells_the_sound_pages_and_frees_the_others(world):
    world.changed = {12}
    assert world.quarantine.sweep(torch.tensor([2, 11, 12])).tolist() == [2, 11]
    assert world.in_tree() == {*range(1, 7), 11}
    assert world.quarantine.as_dict() == {"faults": 1, "requests_ended": 0, "pages_swept": 3}


def test_sweeps_go_through_all_pages_in_turn(world):
    seen = []
    world.quarantine.pool.store.staging.sweep = lambda pages: seen.append(pages.tolist())
    for _ in range(5):
        world.quarantine.sweep_on(torch.tensor([1, 2, 5, 7, 9]), 2)
    assert seen == [[1, 2], [5, 7], [9], [1, 2]]  # the fourth finds no page above the last


def test_ranks_act_together(monkeypatch):
    """At rest a rank keeps what it finds, however often, until the next step."""
    world = World(ranks=2, tree=TREES[0])
    world.insert(world.key(1, 3), [1, 2, 3])
    world.changed = {2}
    for _ in range(MOST_FAULTS + 5):
        assert world.quarantine.sweep(torch.tensor([1, 2, 3])).tolist() == [1, 3]
    assert world.texts()[0] == [1, 2, 3] and world.quarantine.faults == 0
    monkeypatch.setattr(Quarantine, "_agree", lambda self, faults: [*faults, Fault(0, 3, 0, 1, 2)])  # the other rank's
    world.quarantine.examine(world.faults.clone(), world.run(), None)
    assert world.texts()[0] == [1] and world.quarantine.faults == 2


@pytest.mark.parametrize("begun", [False, True])
def test_who_hits_a_page_that_was_swept_ends_unless_it_is_handed_out_anew(begun):
    world = World(ranks=2, tree=TREES[0])
    world.changed, request = {2}, Request("b", [2, 8])
    world.quarantine.sweep(torch.tensor([2]))
    world.quarantine._agree = lambda faults: faults
    batch = world.run(request)
    batch.out_cache_loc = torch.arange(2 * SIZE if begun else 8 * SIZE, 9 * SIZE)
    world.quarantine.examine(torch.zeros_like(world.faults), batch, held_by(world, batch))
    assert (request.to_finish is None) == begun and world.quarantine.faults == 1 and not world.quarantine.pending


def test_who_read_a_page_ends_though_its_row_has_another_by_now(world):
    """Behind its prefill SGLang gave it the tree's pages for those of its own that have the same tokens, and freed these."""
    reader, other = Request("b", [21, 22, 8], 3), Request("c", [21, 9])
    batch = world.run(reader)
    held = held_by(world, batch)
    world.point(0, 1, 2)
    launched = world.run(other)
    launched.out_cache_loc = torch.tensor([21 * SIZE])
    world.scheduler.result_queue = deque([(launched, None)])
    world.quarantine.examine(world.note(21), batch, held)
    assert "host page 21" in reader.to_finish.message and reader.finished_len == 3 and other.to_finish is None


def written_behind_other_pages(world: World, request: Request) -> Held:
    """The tree has pages 1 to 6 of its text, so what a pass writes to its page 21 stands on these. Its own first pages were freed."""
    batch = world.run(request)
    batch.out_cache_loc = torch.tensor([22 * SIZE - 1])
    world.insert(world.key(1, 7), request.pages)
    assert world.match(world.key(1, 7)) == [1, 2, 3, 4, 5, 6, 21]
    return held_by(world, batch)


@pytest.mark.parametrize("how", ["retracted", "finished", "runs"])
def test_what_a_request_computed_from_a_changed_page_is_forgotten(world, how):
    request, other = Request("a", [15, 16, 17, 18, 19, 20, 21]), Request("e", [1, 2, 3, 4, 5, 6, 21, 22])
    held, stranger = written_behind_other_pages(world, request), Request("f", [1, 2, 3, 4, 5, 6, 23])
    if how == "finished":
        request.finished = lambda: True
    elif how == "retracted" and releases.has("request KV"):
        request.kv.holds_kv = False
    elif how == "retracted":
        request.kv = None
    launched = world.run(stranger, other)
    launched.out_cache_loc = torch.cat([torch.arange(page * SIZE, page * SIZE + SIZE) for page in (15, 22, 23)])
    world.scheduler.result_queue = deque([(launched, None)])
    world.quarantine.examine(world.note(17), SimpleNamespace(reqs=[request], out_cache_loc=held.out_cache_loc), held)
    assert world.texts() == ([1, 2, 3, 4, 5, 6], [11, 12, 13])
    assert (request.to_finish is None) == (how != "runs") and stranger.to_finish is None
    assert "host page 17" in other.to_finish.message  # which has matched what was computed from it


def test_a_batch_that_is_prepared_before_the_faults_are_read_goes_on(world):
    """As with SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP, where it is not in the queue of launched ones."""
    request = Request("c", [8, 9])
    world.scheduler.cur_batch_for_debug = world.run(request)
    world.scheduler.cur_batch_for_debug.out_cache_loc = torch.arange(8 * SIZE, 10 * SIZE)
    world.scheduler.running_batch = None
    batch = began()
    batch.req_pool_indices, batch.seq_lens_cpu = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    world.quarantine.examine(world.note(8), batch, held_by(world, batch))
    assert request.to_finish is None


@pytest.mark.skipif(releases.has("request KV"), reason="this release gets past a chunk that is not inserted")
def test_an_ended_request_that_is_retracted_inserts_its_chunks_again():
    request = Request("a", [1, 2])
    request.skip_radix_cache_insert = True
    retraction.insert_again(None, request)
    assert not request.skip_radix_cache_insert


def test_a_request_that_ends_anyway_leaves_no_changed_page_in_the_tree(world):
    request = Request("a", [1, 2, 8])
    batch, request.to_finish = world.run(request), "its client has gone"
    world.quarantine.examine(world.note(8), batch, None)
    assert request.skip_radix_cache_insert and request.to_finish == "its client has gone" and world.quarantine.requests_ended == 0


def test_a_tree_that_it_does_not_know_is_refused():
    class OtherTree(RadixCache):
        disable = False

    with pytest.raises(Refusal, match=f"^--freekv-canary full: the prefix cache is OtherTree, expected {trees.EXPECTED}, "):
        World(tree=OtherTree.__new__(OtherTree))
    without = World(tree=SimpleNamespace(disable=True))
    without.quarantine.examine(without.note(3), None, None)
    assert without.quarantine.faults == 1
