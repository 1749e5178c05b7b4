"""The block pool against a slow, obvious model"""
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minigpt.paging import AuditError, BlockPool, OutOfBlocks, audit, blocks_needed, slot_mapping


class PoolMachine(RuleBasedStateMachine):
    "Guests borrow, share and give back; a plain list of holders knows what must be true"
    @initialize(num_blocks=st.integers(1, 12))
    def begin(self, num_blocks):
        self.pool, self.guests, self.queue = BlockPool(num_blocks), [], list(range(num_blocks))

    def check_lent(self, n, ids): assert ids == self.queue[:n]

    @rule(n=st.integers(0, 14))
    def allocate(self, n):
        before = list(self.pool.ref_counts), list(self.pool.free_ids)
        if n > len(self.queue):
            with pytest.raises(OutOfBlocks, match=f'need {n} blocks, {len(self.queue)} of {self.pool.num_blocks} are free'): self.pool.allocate(n)
            assert before == (self.pool.ref_counts, list(self.pool.free_ids))
            return
        ids = self.pool.allocate(n)
        self.check_lent(n, ids)
        self.queue = self.queue[n:]
        if ids: self.guests.append(ids)

    @precondition(lambda self: self.guests)
    @rule(data=st.data())
    def share(self, data):
        ids = data.draw(st.sampled_from(self.guests))
        shared = ids[:data.draw(st.integers(1, len(ids)))]
        assert self.pool.share(list(shared)) == shared
        self.guests.append(shared)

    @precondition(lambda self: self.queue)
    @rule(data=st.data())
    def revive(self, data):
        block = data.draw(st.sampled_from(self.queue))
        self.pool.share([block])
        self.queue.remove(block)
        self.guests.append([block])

    @precondition(lambda self: self.guests)
    @rule(data=st.data())
    def free(self, data):
        ids = self.guests.pop(data.draw(st.integers(0, len(self.guests) - 1)))
        keep = data.draw(st.sets(st.sampled_from(ids)))
        self.pool.free(ids, keep)
        freed = [i for i in ids if not any(i in g for g in self.guests)]
        self.queue = [i for i in reversed(freed) if i not in keep] + self.queue + [i for i in reversed(freed) if i in keep]

    @precondition(lambda self: self.queue)
    @rule(data=st.data())
    def free_twice(self, data):
        block = data.draw(st.sampled_from(self.queue))
        held = [g[0] for g in self.guests[:1]]
        before = list(self.pool.ref_counts), list(self.pool.free_ids)
        with pytest.raises(ValueError, match=f'block {block} freed twice'): self.pool.free([*held, block])
        assert before == (self.pool.ref_counts, list(self.pool.free_ids))

    @invariant()
    def audit(self):
        if not hasattr(self, 'pool'): return
        assert self.pool.ref_counts == [sum(i in g for g in self.guests) for i in range(self.pool.num_blocks)]
        assert list(self.pool.free_ids) == self.queue
        assert self.pool.num_free == len(self.queue)
        audit(self.pool, self.guests)
        if self.guests:
            with pytest.raises(AuditError): audit(self.pool, self.guests[1:])


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=200, stateful_step_count=30, deadline=None, derandomize=True)


@pytest.mark.slow
class TestPoolLong(PoolMachine.TestCase):
    settings = settings(max_examples=2000, stateful_step_count=50, deadline=None, derandomize=True)


def test_slots_are_a_bijection_on_the_blocks_of_a_table():
    for block_size in (1, 3, 4, 16):
        for n in range(0, 50):
            table = [7 * i + 3 for i in range(blocks_needed(n, block_size))]
            slots = slot_mapping(table, range(n), block_size)
            assert len(set(slots)) == n
            assert [s // block_size for s in slots] == [table[p // block_size] for p in range(n)]
            assert [s % block_size for s in slots] == [p % block_size for p in range(n)]
            assert (len(table) - 1) * block_size < n <= len(table) * block_size or n == 0


def test_the_audit_sees_a_block_that_is_lost_and_one_that_is_free_and_held():
    pool = BlockPool(3)
    table = pool.allocate(1)
    del pool.free_ids[2]
    with pytest.raises(AuditError, match='^block 2 has 0 holders and is not free$'): audit(pool, [table])
    pool.free_ids[2] = pool.free_ids[0] = None
    with pytest.raises(AuditError, match='^block 0 has 1 holders and is free$'): audit(pool, [table])
