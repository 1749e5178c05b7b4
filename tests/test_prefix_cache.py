"""The prefix cache: the fixture of 10 blocks of 16 tokens with its numbers, and random traffic against a slow, obvious model"""
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minigpt import prefix_cache, scheduler
from minigpt.paging import BlockPool
from minigpt.prefix_cache import PrefixCache, block_hash, extend_keys, root_key
from minigpt.scheduler import Limits, Request, Scheduler

COMMON = list(range(100, 148))  # 48 tokens, 3 blocks


class House:
    "A scheduler with 10 blocks of 16 tokens that computes whatever is planned"
    def __init__(self, num_blocks=10, **limits):
        self.s, self.names = Scheduler(BlockPool(num_blocks), Limits(16, 4096, **dict(max_num_batched_tokens=4096) | limits)), iter(range(1000))

    def enter(self, tokens, steps=1, **fields):
        "A request, after so many steps"
        r = Request(str(next(self.names)), list(tokens), 1000, **fields)
        r.max_tokens = min(1000, len(self.s.pool.ref_counts) * 16 - len(tokens))
        self.s.add(r)
        for _ in range(steps): self.step()
        return r

    def step(self):
        s = self.s
        s.update(plan := s.schedule())
        for p in [p for p in plan.scheduled if p.catches_up]:
            for r in s.fork(p.request): r.token_ids.append(5)
        s.audit()
        return s.close_step(plan)

    def leave(self, *requests):
        for r in requests: self.s.finish(r, 'stop')
        self.s.audit()

    @property
    def prefix(self): return self.s.ledger.prefix
    @property
    def free(self): return list(self.s.pool.free_ids)


def test_1_to_4_two_prompts_that_share_48_tokens():
    "The ids of the fixture count from 1, ours from 0"
    h = House()
    one = h.enter(COMMON + [1] * 7)
    assert (one.block_table, len(one.entries), 3 in h.prefix) == ([0, 1, 2, 3], 3, False)
    two = h.enter(COMMON + [2] * 5)
    assert (two.block_table, two.num_cached_tokens, h.s.pool.ref_counts[:5], h.s.pool.num_free) == ([0, 1, 2, 4], 48, [2, 2, 2, 1, 1], 5)
    h.leave(one, two)
    assert h.free == [4, 3, 5, 6, 7, 8, 9, 2, 1, 0]
    three = h.enter(COMMON + [3] * 9)
    assert (three.block_table, three.num_cached_tokens) == ([0, 1, 2, 4], 48)


def test_6_a_growing_answer_takes_a_block_when_it_needs_one():
    h = House()
    r = h.enter(COMMON + [1] * 7)
    for _ in range(4): h.step()
    assert (r.num_computed_tokens, len(r.block_table), 3 in h.prefix) == (59, 4, False)
    for _ in range(19): h.step()
    assert (r.num_computed_tokens, len(r.block_table), 3 in h.prefix) == (78, 5, True)


def test_7_a_prompt_of_whole_blocks_computes_its_last_one_again():
    h = House()
    h.leave(h.enter(COMMON))
    r = h.enter(COMMON)
    assert (r.num_cached_tokens, r.block_table[:2]) == (32, [0, 1]) and r.block_table[2] not in (0, 1, 2)


def test_8_9_handing_out_drops_one_hash_and_a_hit_is_not_evicted():
    h = House()
    h.leave(h.enter(COMMON + [1] * 7))
    assert sorted(h.prefix.by_block) == [0, 1, 2]
    other = h.enter([9] * 100)  # 7 blocks, of which none is findable
    assert sorted(i for i in h.prefix.by_block if i < 3) == [0, 1, 2] and not set(other.block_table) & {0, 1, 2}
    r = h.enter(COMMON[:32] + [7], steps=1)  # needs one more block: the tail of the chain goes
    assert (r.num_cached_tokens, r.block_table) == (32, [0, 1, 2])
    assert 2 not in h.prefix and h.s.num_steps == 3


def test_10_a_no_changes_nothing():
    h = House(num_blocks=8)
    h.enter([9] * 100)
    before = list(h.s.pool.ref_counts), h.free, dict(h.prefix.by_key)
    waiting = h.enter(COMMON, steps=0)
    plan_before = h.s.ledger.find(waiting)
    h.s.schedule()
    assert plan_before == [] and waiting.block_table == [] and before[0][:7] == h.s.pool.ref_counts[:7] and before[1] == h.free and before[2] == h.prefix.by_key


def test_11_12_salts_and_namespaces():
    h = House(num_blocks=40)
    def cached(salt):
        r = h.enter(COMMON + [1], salt=salt)
        h.leave(r)
        return r.num_cached_tokens
    assert [cached(s) for s in ('x', 'x', 'y', None, 'y', None, '')] == [0, 48, 0, 0, 48, 48, 0]
    roots = [root_key(n, s) for n in ('', 'a', 'b', 'ab') for s in (None, '', 'a', 'b', 'ab')]
    assert len(set(roots)) == 20 and root_key('a', 'b') != root_key('b', 'a')
    keys = {salt: [] for salt in ('x', 'y')}
    for salt in keys: extend_keys(keys[salt], root_key('', salt), COMMON, 16)
    assert not set(keys['x']) & set(keys['y'])  # the salt is in the first key, and all later ones differ


def test_13_the_parent_is_part_of_a_key():
    a, b, c = ([i] * 16 for i in range(3))
    assert block_hash(block_hash(b'', a), b) != block_hash(block_hash(b'', c), b)


def test_14_even_if_all_hashes_collide_nothing_wrong_is_found(monkeypatch):
    monkeypatch.setattr(prefix_cache, 'block_hash', lambda parent, token_ids: b'same')
    monkeypatch.setattr(scheduler, 'root_key', lambda namespace, salt: b'root' + (salt or '').encode())
    h, rng = House(num_blocks=60), random.Random(0)
    for _ in range(60):
        shared = rng.choice((0, 16, 32))
        tokens = COMMON[:shared] + [rng.randrange(3)] * rng.randint(1, 40)
        r = h.enter(tokens, salt=rng.choice((None, 'x')))
        for e in r.entries: assert list(e.token_ids) == r.token_ids[16 * r.entries.index(e):16 * r.entries.index(e) + 16]
        h.leave(r)


def test_15_a_request_that_wants_prompt_logprobs_reads_nothing_but_leaves_its_blocks():
    h = House(num_blocks=20)
    h.leave(h.enter(COMMON + [1]))
    r = h.enter(COMMON + [1], reads_cache=False)
    assert (r.num_cached_tokens, len(set(r.block_table) & {0, 1, 2})) == (0, 0)
    assert (h.prefix.stats.queried, h.prefix.stats.hit) == (49, 0)
    fresh = House()
    fresh.leave(fresh.enter(COMMON + [1], reads_cache=False))
    assert fresh.enter(COMMON + [1]).num_cached_tokens == 48


def test_16_off_means_off():
    h = House(enable_prefix_caching=False)
    h.leave(h.enter(COMMON + [1]))
    assert (h.enter(COMMON + [1]).num_cached_tokens, h.prefix) == (0, None)


def test_17_a_reset_waits_until_nothing_is_held():
    h = House()
    r = h.enter(COMMON + [1])
    assert not h.prefix.reset(h.s.pool) and len(h.prefix.by_key) == 3
    h.leave(r)
    assert h.prefix.reset(h.s.pool) and h.enter(COMMON + [1]).num_cached_tokens == 0


def test_18_a_request_counts_once_however_often_it_was_tried():
    h = House()
    big = h.enter([9] * 150)  # all 10 blocks
    small = h.enter(COMMON + [1], steps=0)
    for _ in range(3): h.step()
    assert small.num_cached_tokens is None and h.prefix.stats.queried == 150
    h.leave(big)
    h.step()
    assert (h.prefix.stats.queried, h.prefix.stats.hit, h.prefix.stats.queried_again) == (150 + 49, 0, 0)


def test_19_coming_back_computes_at_most_what_was_not_in_a_full_block():
    h = House()
    one = h.enter([1] * 78)  # 5 blocks
    two = h.enter([2] * 78)  # 5 blocks; one needs a sixth at its 81st token
    records = [h.step() for _ in range(2)]
    assert [p['id'] for r in records for p in r.preempted] == [two.id] and (two.num_computed_tokens, two.num_tokens) == (0, 80)
    h.leave(one)
    record = h.step()
    assert [(s['id'], s['start'], s['num_tokens']) for s in record.scheduled] == [(two.id, 64, 16)]
    assert (h.prefix.stats.queried_again, h.prefix.stats.hit_again) == (80, 64)


def test_21_random_prefixes_come_and_go():
    h, rng, live = House(num_blocks=200, max_num_seqs=100), random.Random(1), []
    stems = [[rng.randrange(4) for _ in range(rng.randint(0, 70))] for _ in range(12)]
    for _ in range(400):
        live.append(h.enter(rng.choice(stems) + [rng.randrange(4) for _ in range(rng.randint(1, 40))]))
        while live and (rng.random() < 0.55 or len(live) > 20): h.leave(live.pop(rng.randrange(len(live))))
    h.leave(*live)
    assert h.s.pool.ref_counts == [0] * 200 and h.s.pool.num_free == 200
    assert h.prefix.stats.hit > 2000


def test_blocks_of_a_failed_request_are_not_found():
    h = House(num_blocks=20)
    good = h.enter(COMMON[:32] + [1])
    bad = h.enter(COMMON + [1])
    assert bad.num_cached_tokens == 32
    h.s.finish(bad, 'error')
    assert h.enter(COMMON + [1]).num_cached_tokens == 32  # what another holds is trusted still
    assert good.num_computed_tokens > 32


def test_generated_tokens_are_found_by_the_next_turn():
    h = House()
    r = h.enter(COMMON + [1])
    for _ in range(20): h.step()
    h.leave(r)
    assert h.enter(r.token_ids + [3]).num_cached_tokens == (len(r.token_ids) - 1) // 16 * 16 == 64


class PrefixMachine(RuleBasedStateMachine):
    "Requests with prompts over two letters come and go; a slow model remembers what every block holds, and what came before it"
    @initialize(num_blocks=st.integers(2, 9))
    def begin(self, num_blocks):
        self.pool, self.cache, self.root = BlockPool(num_blocks), PrefixCache(2), root_key()
        self.tables, self.holds = [], {}  # block → everything up to its end, if findable

    def slow_find(self, tokens):
        "Blocks that a prompt begins with, by comparing whole texts"
        found = []
        for end in range(2, len(tokens), 2):
            matching = [b for b, text in self.holds.items() if text == tokens[:end]]
            if not matching: break
            found += matching
        return found

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def enter(self, tokens):
        keys = []
        extend_keys(keys, self.root, tokens, 2)
        found = self.cache.find(self.root, keys, tokens)
        assert {e.block_id for e in found} <= set(self.slow_find(tokens))
        needed = -(-len(tokens) // 2) - len(found)
        if needed + sum(self.pool.ref_counts[e.block_id] == 0 for e in found) > self.pool.num_free: return
        table = self.pool.share([e.block_id for e in found])
        new = self.pool.allocate(needed)
        gone = self.cache.forget(new)
        assert sorted(gone) == sorted(b for b in new if b in self.holds)
        for b in gone: del self.holds[b]
        table, entry = table + new, found[-1] if found else None
        for i in range(len(found), len(keys)):
            entry = self.cache.enter(entry, self.root, keys[i], table[i], tokens[2*i:2*i+2])
            self.holds = {b: t for b, t in self.holds.items() if b in self.cache}
            if entry.block_id == table[i]: self.holds[table[i]] = tokens[:2*i+2]
            assert self.holds[entry.block_id] == tokens[:2*i+2]
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def leave(self, data): self.pool.free(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))), self.cache)

    @rule()
    def reset(self):
        if self.cache.reset(self.pool): self.holds = {}
        else: assert self.tables

    @invariant()
    def entries_are_what_the_blocks_hold(self):
        if not hasattr(self, 'pool'): return
        assert set(self.cache.by_block) == set(self.holds)
        for b, e in self.cache.by_block.items(): assert self.cache.by_key[e.key] is e and e.block_id == b and list(e.token_ids) == self.holds[b][-2:]


TestPrefix = PrefixMachine.TestCase
TestPrefix.settings = settings(max_examples=300, stateful_step_count=30, deadline=None, derandomize=True)


@pytest.mark.slow
class TestPrefixLong(PrefixMachine.TestCase):
    settings = settings(max_examples=2000, stateful_step_count=50, deadline=None, derandomize=True)
