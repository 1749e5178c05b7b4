"""The scheduler under random traffic: what must hold in every step, and that everyone finishes"""
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minigpt.paging import BlockPool, blocks_needed
from minigpt.scheduler import Limits, QueueFull, Request, RequestState, Scheduler, block_tables, check_fits, explain

NO_TIME_LIMIT = settings(max_examples=300, deadline=None, derandomize=True)

limits = st.builds(dict, block_size=st.integers(1, 5), max_num_seqs=st.integers(1, 4), max_num_batched_tokens=st.integers(1, 12), max_waiting_requests=st.integers(1, 6))
guests = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=8)  # step of arrival, prompt, answer


def audit(s):
    "Every block is free or held, counts equal holders, and nobody is in two places"
    held = [i for r in s.running for i in r.block_table]
    assert [held.count(i) for i in range(s.pool.num_blocks)] == s.pool.ref_counts
    assert sorted(held + list(s.pool.free_ids)) == list(range(s.pool.num_blocks))
    assert all(r.state is RequestState.RUNNING for r in s.running) and all(r.state is RequestState.WAITING and not r.block_table for r in s.waiting)
    for queue in (s.running, s.waiting): assert [r.arrival for r in queue] == sorted(r.arrival for r in queue)
    assert len(s.running) <= s.limits.max_num_seqs


def drive(scheduler, arrivals, aborts=(), max_steps=2000):
    "Step until all is done. Returns the records, who was refused, and all requests by id"
    s, records, refused, known = scheduler, [], {}, {}
    arrivals = sorted(((step, str(n), prompt, answer) for n, (step, prompt, answer) in enumerate(arrivals)))
    while arrivals or s.waiting or s.running:
        assert s.num_steps < max_steps, 'livelock'
        while arrivals and arrivals[0][0] <= s.num_steps:
            _, name, prompt, answer = arrivals.pop(0)
            before = s.num_arrived, len(s.waiting), list(s.record.arrived)
            request = Request(name, [7] * prompt, answer)
            try: s.add(request)
            except (ValueError, QueueFull) as e:
                refused[name] = e
                assert before == (s.num_arrived, len(s.waiting), s.record.arrived)
            else: known[name] = request
        for step, name in aborts:
            if step == s.num_steps and name in known: s.finish(known[name], 'abort')
        audit(s)
        could_run = bool(s.running or s.waiting)
        seats_before = len(s.running)
        plan = s.schedule()
        audit(s)
        assert plan.num_tokens <= s.limits.max_num_batched_tokens
        assert plan.scheduled or not could_run, 'an empty step although something could run'
        assert len({p.request.id for p in plan.scheduled}) == len(plan.scheduled)
        if s.record.preempted: assert not s.record.admitted and len(s.running) < seats_before
        for p in plan.scheduled:
            assert 1 <= p.num_tokens <= p.request.num_uncomputed_tokens and p.start == p.request.num_computed_tokens
            assert len(p.request.block_table) >= blocks_needed(p.start + p.num_tokens, s.limits.block_size)
        s.update(plan, {p.request.id: 7 for p in plan.scheduled if p.catches_up})
        for p in plan.scheduled:
            if p.request.num_tokens - p.request.num_prompt_tokens == p.request.max_tokens or p.request.num_tokens == s.limits.max_seq_len: s.finish(p.request, 'length')
        records.append(s.close_step(plan).to_dict())
        assert all(isinstance(line, str) for line in explain(records[-1]))
    audit(s)
    assert s.pool.num_free == s.pool.num_blocks
    return records, refused, known


@NO_TIME_LIMIT
@given(limits, guests, st.integers(1, 14), st.lists(st.tuples(st.integers(0, 30), st.sampled_from('01234567')), max_size=4))
def test_everyone_finishes_and_every_step_is_sound(limits, guests, num_blocks, aborts):
    limits = Limits(max_seq_len=24, **limits)
    records, refused, known = drive(Scheduler(BlockPool(num_blocks), limits), guests, aborts)
    for name, (_, prompt, answer) in enumerate(guests):
        fits = True
        try: check_fits(prompt, answer, limits, num_blocks)
        except ValueError: fits = False
        assert fits == (not isinstance(refused.get(str(name)), ValueError))
    aborted = {f['id'] for r in records for f in r['finished'] if f['reason'] == 'abort'}
    for name, request in known.items():
        _, prompt, answer = guests[int(name)]
        assert request.state is RequestState.FINISHED
        if name not in aborted: assert request.num_tokens == min(prompt + answer, 24)
    ended = [f['id'] for r in records for f in r['finished']]
    assert sorted(ended) == sorted(known)  # all, and none twice


@NO_TIME_LIMIT
@given(limits, guests, st.integers(1, 14))
def test_records_tell_the_block_tables(limits, guests, num_blocks):
    "The tables rebuilt from the records are those that were there"
    seen = []
    class Watched(Scheduler):
        def close_step(self, plan):
            seen.append({r.id: list(r.block_table) for r in self.running})
            return super().close_step(plan)
    records, _, _ = drive(Watched(BlockPool(num_blocks), Limits(max_seq_len=24, **limits)), guests)
    assert block_tables(records) == seen
    for r, tables in zip(records, seen): assert r['num_free_blocks'] == num_blocks - sum(map(len, tables.values()))


@NO_TIME_LIMIT
@given(limits, guests, st.integers(1, 14))
def test_who_came_first_is_never_preempted(limits, guests, num_blocks):
    records, _, known = drive(Scheduler(BlockPool(num_blocks), Limits(max_seq_len=24, **limits)), guests)
    live = []
    for r in records:
        live = sorted({*live, *r['arrived']}, key=lambda i: known[i].arrival)
        for p in r['preempted']: assert p['id'] != live[0]
        live = [i for i in live if i not in {f['id'] for f in r['finished']}]


@NO_TIME_LIMIT
@given(guests, st.integers(6, 14), st.integers(1, 4))
def test_without_chunks_a_prompt_is_never_cut(guests, num_blocks, seats):
    limits = Limits(4, 24, max_num_seqs=seats, max_num_batched_tokens=24, enable_chunked_prefill=False)
    records, _, _ = drive(Scheduler(BlockPool(num_blocks), limits), guests)
    for r in records:
        for s in r['scheduled']: assert s['start'] == 0 or s['num_tokens'] == 1


def test_a_lone_request_takes_as_many_steps_as_chunks_and_tokens():
    for prompt, answer, budget, chunks in ((10, 5, 4, 3), (12, 5, 4, 3), (13, 1, 4, 4), (1, 9, 1, 1)):
        records, _, _ = drive(Scheduler(BlockPool(6), Limits(4, 24, max_num_batched_tokens=budget)), [(0, prompt, answer)])
        assert len(records) == chunks + answer - 1


def test_two_long_requests_in_a_pool_for_one():
    "Two prompts of 80 tokens, 10 blocks of 16: when the first needs a block the second goes, and is first in the queue"
    s = Scheduler(BlockPool(10), Limits(16, 256))
    a, b = Request('A', [7] * 80, 10), Request('B', [7] * 80, 10)
    for r in (a, b): s.add(r)
    s.update(plan := s.schedule(), {'A': 7, 'B': 7})
    assert [(p.request.id, p.num_tokens) for p in plan.scheduled] == [('A', 80), ('B', 80)]
    s.close_step(plan)
    s.add(Request('C', [7] * 3, 2))
    plan = s.schedule()
    record = s.close_step(plan)
    assert [p.request.id for p in plan.scheduled] == ['A'] and not record.admitted
    assert record.preempted == [dict(id='B', num_computed_tokens=80, reason='A needs 1 more block, 0 of 10 are free')]
    assert (b.num_computed_tokens, b.state, [r.id for r in s.waiting], b.num_tokens) == (0, RequestState.WAITING, ['B', 'C'], 81)


def test_a_request_that_never_fits_does_not_hold_up_the_next():
    s = Scheduler(BlockPool(49), Limits(16, 4096))
    with pytest.raises(ValueError, match='may need 63 blocks of 16 tokens, the whole pool has 49'): s.add(Request('big', [7] * 1000, 8))
    with pytest.raises(ValueError, match='may need 50 blocks'): s.add(Request('long answer', [7] * 10, 780))
    records, refused, known = drive(s, [(0, 10, 4)])
    assert not refused and known['0'].num_tokens == 14


def test_abort_in_every_state_gives_everything_back():
    for when in range(9):
        s = Scheduler(BlockPool(4), Limits(4, 16, max_num_batched_tokens=4))
        requests = [Request(n, [7] * k, 5) for n, k in (('A', 6), ('B', 5), ('C', 3))]
        for r in requests: s.add(r)
        for _ in range(when):
            s.update(plan := s.schedule(), {p.request.id: 7 for p in plan.scheduled if p.catches_up})
            s.close_step(plan)
        for r in requests:
            for _ in range(2): s.finish(r, 'abort')  # the second is quiet
        assert (s.waiting, s.running, s.pool.num_free) == ([], [], 4)
        assert [f['id'] for f in s.record.finished] == ['A', 'B', 'C']
