"""The scheduler under random traffic: what must hold in every step, and that everyone finishes"""
import copy
import random
from dataclasses import replace

import pytest
from conftest import findable_blocks
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from minigpt.bench import Workload
from minigpt.paging import BlockPool, blocks_needed
from minigpt.scheduler import (Drafter, Limits, QueueFull, Request, RequestState, Scheduler, StepPlan, StepRecord, apply_record, block_tables, check_fits,
                               choose_victim, explain, preempt)

NO_TIME_LIMIT = settings(max_examples=300, deadline=None, derandomize=True)

limits = st.builds(dict, block_size=st.integers(1, 5), max_num_seqs=st.integers(1, 4), max_num_batched_tokens=st.integers(1, 12), max_waiting_requests=st.integers(1, 6),
                   enable_prefix_caching=st.booleans(), full_reservation=st.booleans(), watermark_blocks=st.integers(0, 3), max_chunk_tokens=st.none() | st.integers(1, 6),
                   max_num_kv_reads=st.none() | st.integers(1, 60), max_waiting_tokens=st.none() | st.integers(10, 60),
                   speculate=st.sampled_from((None, 0, 1, 2, 3, 7)))
# step of arrival, prompt, answer, choices, priority, key, where the prompt leaves the common beginning
guests = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 20), st.integers(1, 12), st.sampled_from((1, 1, 1, 2, 3)), st.sampled_from((0, 0, 1)), st.sampled_from('xxy'), st.integers(0, 12)),
                  min_size=1, max_size=8)


def audit(s):
    "Every block is free or held, counts equal holders, nobody is in two places, and found blocks hold what their entry says"
    s.audit()
    held = [i for r in s.running for i in r.block_table]
    assert [held.count(i) for i in range(s.pool.num_blocks)] == s.pool.ref_counts
    assert sorted({*held, *s.pool.free_ids}) == list(range(s.pool.num_blocks)) and not set(held) & set(s.pool.free_ids)
    assert all(r.state is RequestState.RUNNING for r in s.running) and all(r.state is RequestState.WAITING and not r.block_table for r in s.waiting)
    for queue in (s.running, s.waiting): assert [r.order for r in queue] == sorted(r.order for r in queue)
    assert len({id(r) for r in (*s.running, *s.waiting)}) == len(s.running) + len(s.waiting)
    assert sum(r.num_choices for r in s.running) <= s.limits.max_num_seqs
    assert set(s.served) == {r.key for r in (*s.running, *s.waiting)}
    prefix = s.ledger.prefix
    if prefix is None: return
    assert len(prefix.by_key) == len(prefix.by_block) and all(prefix.by_block[e.block_id] is e for e in prefix.by_key.values())


def says(r): return 1000 + r.num_tokens + 50 * len(r.id)  # what comes next in a request


class Guesser(Drafter):
    "Drafts that are right up to some place, which differs from step to step; notes what became of them"
    def __init__(self, name): self.name, self.outcomes = name, []
    def propose(self, token_ids, most):
        n, rng = len(token_ids), random.Random(len(token_ids))
        num_drafted, num_right = rng.randint(0, most), rng.choice((0, 1, 2, 9))
        return [1000 + n + i + 50 * len(self.name) + (i >= num_right) for i in range(num_drafted)]
    def learn(self, num_drafted, num_right):
        if num_drafted: self.outcomes.append((num_drafted, num_right))


def plan_step(s, now=0.0):
    "A step's plan, beside that of a scheduler in the same state that drafts nothing: drafts are added to it, and change nothing of it"
    plain = copy.deepcopy(s)
    plain.limits = replace(s.limits, speculate=None)
    plan, wanted = s.schedule(now), plain.schedule(now)
    def parts(plan): return [(p.request.id, p.start, p.num_known, p.num_left, p.why) for p in plan.scheduled]
    assert parts(plan) == parts(wanted) and plan.copies == wanted.copies and not any(p.draft for p in wanted.scheduled)
    for name in ('preempted', 'admitted', 'skipped', 'head_waits', 'finished', 'found', 'ahead'): assert getattr(s.record, name) == getattr(plain.record, name)
    before = {r.id: r.block_table for r in plain.running}
    assert {r.id: r.block_table[:len(before[r.id])] for r in s.running} == before
    drafts = {p.request.id: p for p in plan.scheduled if p.draft}
    for r in s.running:
        grown = r.block_table[len(before[r.id]):]
        if r.id not in drafts: assert not grown
        else: assert len(r.block_table) == max(len(before[r.id]), blocks_needed(r.num_tokens + len(drafts[r.id].draft), s.limits.block_size))
    if s.pool.num_free < plain.pool.num_free:  # there is still a block for each, and room for the first who waits
        left = s.pool.num_free - sum(r.num_choices for r in s.running) - s.limits.watermark_blocks
        assert left >= 0
        assert s.limits.full_reservation or ' block' not in (s.record.head_waits or ''), 'a draft took what the head of the queue waits for'
    for p in drafts.values():
        r = p.request
        assert 1 <= len(p.draft) <= s.limits.speculate and p.catches_up and r.num_choices == 1
        assert r.num_tokens + len(p.draft) < min(r.num_prompt_tokens + r.max_tokens, s.limits.max_seq_len)
    return plan


def end_step(s, plan, say):
    "Draw for all who have caught up; `say(request)` says a token, and may end it. What was drafted wrongly is undone"
    s.update(plan)
    for p in [p for p in plan.scheduled if p.catches_up]:
        r, before, served = p.request, p.request.num_computed_tokens, s.served.get(p.request.key, 0)
        assert before == p.start + p.num_known == r.num_tokens
        for child in s.fork(r): s.verify(child, p, lambda _, child=child: say(child))
        if not p.draft: continue
        wanted = [1000 + before + i + 50 * len(r.id) for i in range(len(p.draft) + 1)]
        num_right = next((i for i, (a, b) in enumerate(zip(p.draft, wanted)) if a != b), len(p.draft))
        assert (r.token_ids[before:], p.num_right) == (wanted[:num_right + 1], num_right)
        assert r.drafter.outcomes[-1] == (len(p.draft), num_right)
        if r.state is RequestState.FINISHED: continue
        assert r.num_computed_tokens == before + num_right and s.served[r.key] == served + num_right
        assert len(r.block_table) == blocks_needed(r.num_computed_tokens, s.limits.block_size)
        assert s.ledger.prefix is None or len(r.entries) == r.num_computed_tokens // s.limits.block_size


class Contents:
    "What the cache would hold: for each block the tokens written into its slots, and everything before them"
    def __init__(self, scheduler): self.s, self.slots = scheduler, {}

    def run(self, plan):
        "Copy, write, and check that every position that a request can see holds its own past"
        size = self.s.limits.block_size
        before = dict(self.slots)
        for source, target in plan.copies.values():
            for i in range(size): self.slots[target, i] = before.get((source, i))
        for p in plan.scheduled:
            known = p.request.token_ids + p.draft
            for pos in range(p.start, p.start + p.num_tokens): self.slots[p.request.block_table[pos // size], pos % size] = tuple(known[:pos + 1])
        for p in plan.scheduled:
            known = p.request.token_ids + p.draft
            for pos in range(p.start + p.num_tokens):
                assert self.slots.get((p.request.block_table[pos // size], pos % size)) == tuple(known[:pos + 1]), (p.request.id, pos)


def account(s, record):
    "Everyone who is here ran, was skipped or waits, once, and where there is less than all there is a reason"
    ran, skipped = [x['id'] for x in record['scheduled']], [x['id'] for x in record['skipped']]
    here = {r.id for r in s.running} - record['forked'].keys() | {f['id'] for f in record['finished'] if f['reason'] == 'length'} - record['forked'].keys()
    assert len(set(ran) | set(skipped)) == len(ran) + len(skipped) and here <= set(ran) | set(skipped)
    assert set(record['admitted']) <= set(ran) and record['ahead'].keys() <= set(record['admitted'])
    assert (record['head_waits'] is not None) == bool(s.waiting)
    for x in record['scheduled']: assert ('num_left' in x) == ('why' in x) and x.get('num_left', 1) >= 1 and isinstance(x.get('why', ''), str)
    for x in record['skipped']: assert isinstance(x['reason'], str)
    left = {x['id']: x['num_left'] for x in record['scheduled'] if 'num_left' in x}
    assert left == {r.id: r.num_uncomputed_tokens for r in s.running if r.id in ran and r.id in left}  # nothing was drawn for these


def make_request(name, prompt, answer, num_choices=1, priority=0, key='', apart=0):
    tokens = [7] * min(apart, prompt) + [100 + int(name)] * (prompt - min(apart, prompt))
    return guessing(Request(name, tokens, answer, num_choices, priority, key))


def guessing(r):
    r.drafter = Guesser(r.id)
    return r


def drive(scheduler, arrivals, aborts=(), max_steps=3000):
    "Step until all is done. Returns the records, who was refused, and all requests by id"
    s, records, refused, known, contents = scheduler, [], {}, {}, Contents(scheduler)
    arrivals = sorted((step, str(n), *rest) for n, (step, *rest) in enumerate(arrivals))
    while arrivals or s.waiting or s.running:
        assert s.num_steps < max_steps, 'livelock'
        while arrivals and arrivals[0][0] <= s.num_steps:
            _, name, *rest = arrivals.pop(0)
            before = s.num_arrived, list(s.waiting), list(s.record.arrived), dict(s.served)
            request = make_request(name, *rest)
            try: s.add(request)
            except (ValueError, QueueFull) as e:
                refused[name] = e
                assert before == (s.num_arrived, s.waiting, s.record.arrived, s.served)
            else: known[name] = request
        for step, name in aborts:
            if step == s.num_steps and name in known: s.finish(known[name], 'abort')
        audit(s)
        could_run = bool(s.running or s.waiting)
        running_before = len(s.running)
        plan = plan_step(s) if s.limits.speculate else s.schedule()
        audit(s)
        assert plan.num_tokens == sum(p.num_tokens for p in plan.scheduled) <= s.limits.max_num_batched_tokens
        assert plan.num_kv_reads == sum(pos + 1 for p in plan.scheduled for pos in range(p.start, p.start + p.num_tokens))
        if s.limits.max_num_kv_reads: assert plan.num_kv_reads <= s.limits.max_num_kv_reads or [p.num_tokens for p in plan.scheduled] == [1]
        assert plan.scheduled or not could_run, 'an empty step although something could run'
        assert len({p.request.id for p in plan.scheduled}) == len(plan.scheduled)
        if s.record.preempted: assert not s.record.admitted and len(s.running) < running_before and not s.limits.full_reservation
        for p in plan.scheduled:
            assert 1 <= p.num_known <= p.request.num_uncomputed_tokens and p.start == p.request.num_computed_tokens
            assert len(p.request.block_table) >= blocks_needed(p.start + p.num_tokens, s.limits.block_size)
            for pos in range(p.start, p.start + p.num_tokens): assert s.pool.ref_counts[p.request.block_table[pos // s.limits.block_size]] == 1, 'a write into a shared block'
        contents.run(plan)
        def say(r):
            if r.id not in known: known[r.id] = guessing(r)
            r.token_ids.append(says(r))
            if r.num_tokens - r.num_prompt_tokens == r.max_tokens or r.num_tokens == s.limits.max_seq_len: s.finish(r, 'length')
            return r.token_ids[-1]
        end_step(s, plan, say)
        records.append(s.close_step(plan).to_dict())
        account(s, records[-1])
        assert all(isinstance(line, str) for line in explain(records[-1]))
    audit(s)
    assert s.pool.num_free == s.pool.num_blocks and s.served == {}
    return records, refused, known


@NO_TIME_LIMIT
@given(limits, guests, st.integers(1, 14), st.lists(st.tuples(st.integers(0, 30), st.sampled_from(['0', '1', '2', '3', '1#1', '2#2'])), max_size=4))
def test_everyone_finishes_and_every_step_is_sound(limits, guests, num_blocks, aborts):
    limits = Limits(max_seq_len=24, **limits)
    records, refused, known = drive(Scheduler(BlockPool(num_blocks), limits), guests, aborts)
    for name, (_, prompt, answer, num_choices, *_) in enumerate(guests):
        fits = True
        try: check_fits(prompt, answer, limits, num_blocks, num_choices)
        except ValueError: fits = False
        assert fits == (not isinstance(refused.get(str(name)), ValueError))
    aborted = {f['id'] for r in records for f in r['finished'] if f['reason'] == 'abort'}
    for name, request in known.items():
        _, prompt, answer, *_ = guests[int(name.split('#')[0])]
        assert request.state is RequestState.FINISHED
        if name not in aborted: assert request.num_tokens == min(prompt + answer, 24)
        assert request.token_ids[prompt:] == [1000 + pos + 50 * len(name) for pos in range(prompt, request.num_tokens)]
    ended = [f['id'] for r in records for f in r['finished']]
    assert sorted(ended) == sorted(known)  # all, and none twice
    for name, (_, _, _, num_choices, *_) in enumerate(guests):
        if str(name) in known and str(name) not in aborted: assert sum(i.split('#')[0] == str(name) for i in known) == num_choices


@NO_TIME_LIMIT
@given(limits, guests, st.integers(1, 14))
def test_records_tell_the_block_tables(limits, guests, num_blocks):
    "The tables rebuilt from the records are those that were there"
    seen, findable = [], []
    class Watched(Scheduler):
        def close_step(self, plan):
            seen.append({r.id: list(r.block_table) for r in self.running})
            findable.append(set(self.ledger.prefix.by_block) if self.ledger.prefix else set())
            return super().close_step(plan)
    records, _, _ = drive(Watched(BlockPool(num_blocks), Limits(max_seq_len=24, **limits)), guests)
    assert block_tables(records) == seen and findable_blocks(records) == findable
    without_keyframes = [r | dict(keyframe=None) if i else r for i, r in enumerate(records)]
    assert block_tables(without_keyframes) == seen and findable_blocks(without_keyframes) == findable
    for r, tables in zip(records, seen): assert r['num_free_blocks'] == num_blocks - len({i for t in tables.values() for i in t})


@NO_TIME_LIMIT
@given(limits, guests, st.integers(1, 14))
def test_who_comes_first_is_never_preempted(limits, guests, num_blocks):
    "Of those that run, the first in order of priority and arrival never has to go"
    scheduler = Scheduler(BlockPool(num_blocks), Limits(max_seq_len=24, **limits))
    class Watched(list):
        def remove(self, request):
            if any(p['id'] == request.id for p in scheduler.record.preempted): assert request is not self[0] or len(self) == 1
            super().remove(request)
    scheduler.running = Watched()
    records, _, _ = drive(scheduler, guests)
    for r in records:
        for p in r['preempted']: assert p['reason']


@NO_TIME_LIMIT
@given(guests, st.integers(6, 14), st.integers(3, 4), st.booleans())
def test_without_chunks_a_prompt_is_never_cut(guests, num_blocks, seats, caching):
    limits = Limits(4, 24, max_num_seqs=seats, max_num_batched_tokens=24, enable_chunked_prefill=False, enable_prefix_caching=caching)
    records, _, known = drive(Scheduler(BlockPool(num_blocks), limits), guests)
    for r in records:
        for s in r['scheduled']: assert s['id'] in r['admitted'] or s['num_tokens'] == 1


@NO_TIME_LIMIT
@given(guests, st.integers(6, 14))
def test_caching_computes_less_and_never_more_than_once_without_preemption(guests, num_blocks):
    sums = {}
    for caching in (True, False):
        records, _, known = drive(Scheduler(BlockPool(60), Limits(4, 24, enable_prefix_caching=caching, max_waiting_requests=50)), guests)
        sums[caching] = sum(s['num_tokens'] for r in records for s in r['scheduled'])
        assert not any(r['preempted'] for r in records)
    assert sums[True] <= sums[False]


def test_a_lone_request_takes_as_many_steps_as_chunks_and_tokens():
    for prompt, answer, budget, chunks in ((10, 5, 4, 3), (12, 5, 4, 3), (13, 1, 4, 4), (1, 9, 1, 1)):
        records, _, _ = drive(Scheduler(BlockPool(6), Limits(4, 24, max_num_batched_tokens=budget)), [(0, prompt, answer)])
        assert len(records) == chunks + answer - 1


def test_two_long_requests_in_a_pool_for_one():
    "Two prompts of 80 tokens, 10 blocks of 16: when the first needs a block the second goes, and is first in the queue"
    s = Scheduler(BlockPool(10), Limits(16, 256))
    a, b = Request('A', [7] * 80, 10), Request('B', [8] * 80, 10)
    for r in (a, b): s.add(r)
    s.update(plan := s.schedule())
    for r in (a, b): r.token_ids.append(7)
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
            s.update(plan := s.schedule())
            for p in plan.scheduled:
                if p.catches_up: p.request.token_ids.append(9)
            s.close_step(plan)
        for r in requests:
            for _ in range(2): s.finish(r, 'abort')  # the second is quiet
        assert (s.waiting, s.running, s.pool.num_free) == ([], [], 4)
        assert [f['id'] for f in s.record.finished] == ['A', 'B', 'C']


class SchedulerMachine(RuleBasedStateMachine):
    "Requests come, leave and are paused in any order; a plain model knows what every slot holds and what everyone must get"
    @initialize(limits=limits, num_blocks=st.integers(1, 14))
    def begin(self, limits, num_blocks):
        self.s = Scheduler(BlockPool(num_blocks), Limits(max_seq_len=24, **limits))
        self.contents, self.requests, self.gone, self.num_added, self.tables = Contents(self.s), {}, set(), 0, {}

    @rule(prompt=st.integers(1, 20), answer=st.integers(1, 12), num_choices=st.sampled_from((1, 1, 2, 3)), priority=st.sampled_from((0, 0, 1)),
          key=st.sampled_from('xy'), apart=st.integers(0, 12), deadline=st.none() | st.integers(0, 40))
    def add(self, prompt, answer, num_choices, priority, key, apart, deadline):
        self.num_added += 1
        r = make_request(str(self.num_added), prompt, answer, num_choices, priority, key, apart)
        r.deadline = None if deadline is None else self.s.num_steps + deadline
        try: self.s.add(r)
        except (ValueError, QueueFull): return
        self.requests[r.id] = r

    @rule(data=st.data())
    def abort(self, data):
        live = [i for i in self.requests if i not in self.gone]
        if not live: return
        r = self.requests[data.draw(st.sampled_from(live))]
        self.s.finish(r, 'abort')
        self.gone.add(r.id)

    @rule(paused=st.sampled_from((None, None, 'new', 'all')))
    def pause(self, paused): self.s.paused = paused

    @rule(n=st.integers(1, 4))
    def step(self, n):
        s = self.s
        for _ in range(n):
            late = {r.id for r in (*s.waiting, *s.running) if r.deadline is not None and r.deadline <= s.num_steps}
            running = [r.id for r in s.running if r.id not in late]
            plan = plan_step(s, float(s.num_steps))
            assert {f['id'] for f in s.record.finished if f['reason'] == 'deadline'} == late
            self.gone |= late
            if s.paused == 'all': assert plan.scheduled == []
            if s.paused: assert s.record.admitted == []
            elif s.running or s.waiting: assert plan.scheduled
            assert {p.request.id for p in plan.scheduled} <= {*running, *s.record.admitted}
            self.contents.run(plan)
            end_step(s, plan, self.say)
            record = s.close_step(plan).to_dict()
            apply_record(self.tables, record)
            assert self.tables == {r.id: r.block_table for r in s.running}

    def say(self, r):
        if r.id not in self.requests: self.requests[r.id] = guessing(r)
        r.token_ids.append(says(r))
        if r.num_tokens == min(r.num_prompt_tokens + r.max_tokens, 24):
            self.s.finish(r, 'length')
            self.gone.add(r.id)
        return r.token_ids[-1]

    @invariant()
    def everything_is_in_its_place(self):
        if not hasattr(self, 's'): return
        audit(self.s)
        assert {r.id for r in (*self.s.waiting, *self.s.running)} == self.requests.keys() - self.gone

    def teardown(self):
        if not hasattr(self, 's'): return
        self.s.paused = None
        for _ in range(3000):
            if not self.s.waiting and not self.s.running: break
            self.step(1)
        assert self.requests.keys() == self.gone and self.s.pool.num_free == self.s.pool.num_blocks


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=200, stateful_step_count=25, deadline=None, derandomize=True)


@pytest.mark.slow
class TestSchedulerLong(SchedulerMachine.TestCase):
    settings = settings(max_examples=2000, stateful_step_count=50, deadline=None, derandomize=True)


def test_random_priorities_finish_in_order_when_there_is_one_seat():
    rng = random.Random(3)
    for _ in range(20):
        s, priorities = Scheduler(BlockPool(20), Limits(4, 24, max_num_seqs=1)), [rng.randrange(4) for _ in range(15)]
        for i, p in enumerate(priorities): s.add(Request(str(i), [i] * rng.randint(1, 12), rng.randint(1, 6), priority=p))
        records, _, _ = drive(s, [])
        assert [int(f['id']) for r in records for f in r['finished']] == sorted(range(15), key=lambda i: (priorities[i], i))


def test_a_pause_changes_when_but_not_what():
    plain = drive(Scheduler(BlockPool(9), Limits(4, 24)), [(0, 9, 5), (0, 7, 6), (0, 3, 2)])[2]
    s = Scheduler(BlockPool(9), Limits(4, 24))
    close = s.close_step
    def closing(plan):
        s.paused = None if s.num_steps % 5 else 'new'
        return close(plan)
    s.close_step = closing
    paused = drive(s, [(0, 9, 5), (0, 7, 6), (0, 3, 2)])[2]
    assert {i: r.token_ids for i, r in plain.items()} == {i: r.token_ids for i, r in paused.items()}


def test_on_a_pool_of_half_the_need_hope_beats_reservation():
    "A seeded workload: little is computed twice, and there are no more steps than with full reservation"
    for seed in range(3):
        workload = Workload(num_requests=64, prompt_tokens=(20, 120), output_tokens=(16, 96), shared_prefix_tokens=0, seed=seed, vocab_size=256).requests()
        sizes = sorted((blocks_needed(len(r['prompt_token_ids']) + r['max_tokens'], 16) for r in workload), reverse=True)
        steps, computed = {}, {}
        for full in (False, True):
            s = Scheduler(BlockPool(sum(sizes[:16]) // 2), Limits(16, 256, full_reservation=full))
            for i, r in enumerate(workload): s.add(Request(str(i), list(r['prompt_token_ids']), r['max_tokens']))
            records, _, _ = drive(s, [], max_steps=5000)
            steps[full], computed[full] = len(records), sum(x['num_tokens'] for r in records for x in r['scheduled'])
        assert computed[True] == sum(len(r['prompt_token_ids']) + r['max_tokens'] - 1 for r in workload)
        assert computed[False] <= 1.25 * computed[True] and steps[False] <= steps[True]


def parts(record): return {s['id']: s['num_tokens'] for s in record['scheduled']}


def test_each_bound_is_reached_and_not_passed():
    limits = Limits(4, 24)
    check_fits(23, 1, limits, 6)
    with pytest.raises(ValueError, match='a prompt of 24 tokens leaves no room'): check_fits(24, 1, limits, 6)
    s = Scheduler(BlockPool(9), Limits(4, 24, max_waiting_requests=3, max_waiting_tokens=10))
    s.add(Request('A', [1] * 6, 1, num_choices=2))
    with pytest.raises(QueueFull, match='6 tokens wait and 5 would come, at most 10'): s.add(Request('B', [1] * 5, 1))
    with pytest.raises(QueueFull, match='2 requests wait and 2 would come, at most 3'): s.add(Request('B', [1] * 5, 1, num_choices=2))
    s.add(Request('B', [1] * 4, 1))
    assert [r.id for r in s.waiting] == ['A', 'B']


def test_shares_of_a_step():
    "A request that is alone is not held back, the reads of a step may equal their budget, and who writes goes before who reads"
    def first(n, requests, **limits): return drive_all(Scheduler(BlockPool(60), Limits(4, 64, **limits)), requests)[:n]
    def drive_all(s, requests):
        for r in requests: s.add(r)
        return drive(s, [])[0]
    assert parts(first(1, [Request('0', [1] * 20, 2)], max_chunk_tokens=4, max_num_batched_tokens=32)[0]) == {'0': 20}
    both = [Request('0', [1] * 20, 2), Request('1', [2] * 20, 2)]
    assert parts(first(1, both, max_chunk_tokens=4, max_num_batched_tokens=16)[0]) == {'0': 8, '1': 8}
    assert [parts(r) for r in first(2, [Request('0', [1] * 20, 2)], max_num_kv_reads=55)] == [{'0': 10}, {'0': 4}]  # 1 + … + 10, 11 + … + 14
    s = Scheduler(BlockPool(20), Limits(4, 64, max_num_batched_tokens=4, enable_prefix_caching=False))
    s.add(Request('A', [1] * 3, 12)), s.add(Request('B', [2] * 3, 8))
    late, records = Request('C', [3] * 8, 9), []
    for n in range(12):
        if n == 2: s.add(late)
        if n == 6: preempt(s, s.running[1], 'by hand', StepPlan(0))
        s.update(plan := s.schedule())
        for p in [p for p in plan.scheduled if p.catches_up]: p.request.token_ids.append(9)
        records.append(s.close_step(plan).to_dict())
    back = next(r for r in records if 'B' in r['admitted'] and r['step'] > 6)
    assert [x['id'] for x in back['scheduled']][:2] == ['A', 'C'] and all(x['phase'] == 'decode' for x in back['scheduled'][:2])
    after = records[back['step'] + 1]
    assert [(x['id'], x['num_tokens']) for x in after['scheduled']][:2] == [('A', 1), ('C', 1)]


def test_who_needs_a_block_does_not_go_while_someone_comes_after():
    needy, later = Request('A', [1] * 9, 1, arrival=0, num_computed_tokens=3), Request('B', [1] * 30, 1, arrival=1, num_computed_tokens=20)
    assert choose_victim(needy, [needy, later]) is later and choose_victim(later, [needy, later]) is later


def test_phases_records_and_words():
    s = Scheduler(BlockPool(8), Limits(2, 24, max_num_batched_tokens=3))
    for r in (Request('0', [1] * 4, 3), Request('1', [1] * 3, 2), Request('2', [5] * 2, 1)): s.add(r)
    records = drive(s, [])[0]
    assert [(x['id'], x['start'], x['num_tokens'], x['phase']) for r in records[:3] for x in r['scheduled']] == [
        ('0', 0, 3, 'prefill'), ('0', 3, 1, 'prefill'), ('1', 2, 1, 'prefill'), ('2', 0, 1, 'prefill'), ('0', 4, 1, 'decode'), ('1', 3, 1, 'decode'), ('2', 1, 1, 'prefill')]
    assert explain(records[0]) == ['0 arrived', '1 arrived', '2 arrived', "0 entered and computed 3 tokens from position 0; 1 more to compute: 3 of the step's 3 tokens were left",
        "1 needs 3 tokens, 0 of the step's 3 tokens were left; 1 more waits"]
    assert explain(records[1]) == ['0 computed 1 token from position 3', '1 entered, found 2 tokens computed in block 0 and computed 1 token from position 2',
        "2 entered and computed 1 token from position 0; 1 more to compute: 1 of the step's 3 tokens were left"]
    assert explain(records[2])[:2] == ['0 decoded 1 token from position 4', '1 decoded 1 token from position 3']
    assert 'more wait' not in ' '.join(explain(records[1])) and all([] not in r['allocated'].values() for r in records)
    waits = records[0] | dict(num_waiting=3)
    assert explain(waits)[-1].endswith('; 2 more wait') and explain(records[0] | dict(num_waiting=1))[-1].endswith('were left')


def test_keys_are_served_in_turns():
    "Four requests of x, then two of y, and one seat: y does not wait for all of x; a newcomer has no credit for the past"
    s = Scheduler(BlockPool(8), Limits(4, 24, max_num_seqs=1))
    for i, key in enumerate('xxxxyy'): s.add(Request(str(i), [i] * 4, 2, key=key))
    records = drive(s, [])[0]
    assert [f['id'] for r in records for f in r['finished']] == ['0', '4', '1', '5', '2', '3']
    s = Scheduler(BlockPool(8), Limits(4, 24, max_num_seqs=1))
    for i in range(3): s.add(Request(str(i), [i] * 4, 2, key='x'))
    s.served['x'] = 1000
    s.add(Request('3', [3] * 4, 2, key='y'))
    assert s.served == {'x': 1000, 'y': 1000}


def test_budget_of_1024_and_a_cap_of_400():
    "Prompts of 800, 800, 10, 10 and three seats; then without chunks. A cap counts only in company, and never below an even share (so 400 each of 800)"
    def steps(n, lengths, **limits):
        s = Scheduler(BlockPool(200), Limits(16, 1024, **limits))
        for i, length in enumerate(lengths): s.add(Request(str(i), [i] * length, 3))
        return [parts(r) for r in drive(s, [])[0][:n]]
    assert steps(3, (800, 800, 10, 10), max_num_batched_tokens=1024, max_num_seqs=3) == [{'0': 800, '1': 224}, {'0': 1, '1': 576, '2': 10}, {'0': 1, '1': 1, '2': 1}]
    assert steps(2, (800, 800, 10, 10), max_num_batched_tokens=1024, max_num_seqs=3, enable_chunked_prefill=False) == [{'0': 800}, {'0': 1, '1': 800, '2': 10}]
    assert steps(1, (800,), max_num_batched_tokens=800, max_chunk_tokens=400) == [{'0': 800}]
    assert steps(2, (800, 800), max_num_batched_tokens=800, max_chunk_tokens=400) == [{'0': 400, '1': 400}] * 2
    assert steps(1, (800,) * 4, max_num_batched_tokens=1024, max_chunk_tokens=400) == [{'0': 400, '1': 400, '2': 224}]  # a share is 256


def test_ten_may_wait():
    for waiting, n, fits in ((10, 1, False), (8, 3, False), (7, 3, True)):
        s = Scheduler(BlockPool(8), Limits(4, 24, max_waiting_requests=10, max_waiting_tokens=40))
        for i in range(waiting): s.add(Request(str(i), [1] * 2, 1))
        try: s.add(Request('n', [1] * 2, 1, num_choices=n))
        except QueueFull as e: assert not fits and 'requests wait' in str(e) and len(s.waiting) == waiting
        else: assert fits and len(s.waiting) == waiting + 1
    with pytest.raises(QueueFull, match='10 requests wait'):  # requests are counted before tokens
        s.add(Request('t', [1] * 23, 1))


def test_a_reset_a_failure_and_a_stale_child_are_told():
    "What can be found is rebuilt from the records through each way of losing it"
    s = Scheduler(BlockPool(6), Limits(2, 24))
    records, real = [], []
    def step(end=None, reason='abort'):
        plan = s.schedule()
        s.update(plan)
        if end: s.finish(end, reason)
        real.append(set(s.ledger.prefix.by_block))
        records.append(s.close_step(plan).to_dict())
    a, b = Request('a', [1] * 6, 4), Request('b', [2] * 5, 4)
    s.add(a), step(a)
    assert s.ledger.reset() and (records[-1]['entered'], s.record.reset) == ([0, 1, 2], True)
    s.add(b), step(b, 'error')
    assert (records[-1]['reset'], records[-1]['entered'], records[-1]['forgotten'], real[-1]) == (True, records[-1]['allocated']['b'][:2], records[-1]['allocated']['b'][:2], set())
    assert explain(records[-1])[:2] == ['all computed prefixes were forgotten, as asked', 'b arrived'] or explain(records[-1])[:2] == ['b arrived', 'all computed prefixes were forgotten, as asked']
    s.add(Request('c', [1] * 6, 4)), step(s.waiting[0])                  # three blocks can be found
    first = records[-1]['allocated']['c'][0]
    s.ledger.record.forgotten += s.ledger.prefix.forget([first])         # the first of them is lost: its children can't be reached
    s.add(Request('d', [1] * 6, 4)), step(s.waiting[0])                  # computes all three again, in the place of the old ones
    assert len(records[-1]['entered']) == 3 and len(records[-1]['forgotten']) == 3
    assert findable_blocks(records) == real
    s.add(Request('e', [3], 4, deadline=1.0))
    s.schedule(1.25)
    assert s.record.finished == [dict(id='e', reason='deadline', detail='0.25 s too late')]


def test_who_was_skipped_and_then_had_to_go_is_told_once():
    s = Scheduler(BlockPool(8), Limits(4, 24))
    for name in '01': s.add(make_request(name, 3, 5))
    plan = s.schedule()
    s.record.skipped += [dict(id='0', reason='x'), dict(id='1', reason='x')]
    preempt(s, s.running[1], 'y', plan)
    assert s.close_step(plan).skipped == [dict(id='0', reason='x')]


def test_a_block_lent_twice_in_a_step_was_lost_to_the_first():
    record = StepRecord(0, 9, 4, allocated=dict(a=[3], b=[3, 4]), copied=dict(c=[1, 5]), evicted=[3, 5]).to_dict()
    assert explain(record) == ['c copied block 1 to 5, because others hold it', 'a took block 3, whose contents could be found until now', 'c took block 5, whose contents could be found until now']


# ---- drafts
def slow_match(token_ids, enough, max_places):
    "As `longest_match`, from the definition: of the latest places that end with the same two tokens the one where most agree"
    last = len(token_ids) - 1
    def agree(end): return next((n for n in range(end + 1) if token_ids[end - n] != token_ids[last - n]), end + 1)
    places = [end for end in range(last - 1, 0, -1) if agree(end) >= 2][:max_places]
    return max([(min(agree(end), enough), end) for end in places], key=lambda m: (m[0], m[1]), default=(0, 0))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.lists(st.integers(1, 9), max_size=40), st.integers(1, 9), st.lists(st.integers(0, 9), min_size=1, max_size=10))
def test_a_drafter_guesses_as_the_slow_one_does(token_ids, growth, most, rights):
    "However a sequence grows: what is drafted, how long, and what trust becomes"
    drafter, trust, silent, n = Drafter(), 0, None, 0
    for grow, right in zip((1, *growth), rights * 41):
        n += grow
        if n > len(token_ids): break
        known = token_ids[:n]
        if silent and n > silent[0]: trust, silent = int(known[silent[0]] == silent[1]), None
        length, end = slow_match(known, max(3, min(most, trust)), 8)
        wanted, follows = [], list(known)
        for i in range(min(length, most, trust)):
            wanted.append(follows[end + 1 + i])
            follows.append(wanted[-1])
        if trust == 0 and length >= 3: silent = n, known[end + 1]
        assert drafter.propose(known, most) == wanted
        right = min(right, len(wanted))
        drafter.learn(len(wanted), right)
        trust = min(16, trust + right) // (2 if right < len(wanted) else 1)
        assert (drafter.trust, drafter.silent) == (trust, silent)


def test_a_right_guess_pays_for_two_wrong_ones():
    "Whatever the text: what is drafted wrongly is at most twice what was guessed rightly, silently or not"
    for seed in range(60):
        rng, drafter, ids, right, wrong = random.Random(seed), Drafter(), [0], 0, 0
        for _ in range(400):
            silent = drafter.silent
            drafter.read(ids)
            right += bool(silent and drafter.trust)
            draft = drafter.propose(ids, rng.choice((1, 3, 7)))
            num_right = rng.randint(0, len(draft)) if rng.random() < seed / 60 else 0
            drafter.learn(len(draft), num_right)
            right, wrong = right + num_right, wrong + len(draft) - num_right
            ids += draft[:num_right] + [rng.randrange(2 + seed % 3)]
            assert wrong <= 2 * right
        assert len(drafter.before) <= len(ids) and len(drafter.latest) <= len(ids)


def test_a_drafter_reads_each_token_once():
    from conftest import Watched
    drafter, ids = Drafter(), Watched([random.Random(1).randrange(3) for _ in range(3000)])
    drafter.propose(ids, 5)
    for n in range(200):
        ids.append(n % 3)
        ids.read.clear()
        drafter.propose(ids, 5)
        assert len(ids.read) <= 2 + 8 * 2 * 5 + 5


def drafted(records): return [(s['id'], s['num_drafted'], s['num_right']) for r in records for s in r['scheduled'] if 'num_drafted' in s]


def test_drafts_happen_and_save_steps():
    arrivals = [(0, 6, 12), (0, 9, 12, 2), (2, 3, 12)]
    plain, _, wanted = drive(Scheduler(BlockPool(40), Limits(4, 24)), arrivals)
    records, _, known = drive(Scheduler(BlockPool(40), Limits(4, 24, speculate=5)), arrivals)
    assert {i: r.token_ids for i, r in known.items()} == {i: r.token_ids for i, r in wanted.items()} and len(records) < len(plain)
    assert {i for i, *_ in drafted(records)} == {'0', '1', '1#1', '2'}
    assert {n == right for _, n, right in drafted(records)} == {True, False} and any(0 < right < n for _, n, right in drafted(records))


class Sure(Drafter):
    "Always drafts as many as it may, all of them right"
    def propose(self, token_ids, most): return [1000 + len(token_ids) + i + 50 for i in range(most)]
    def learn(self, *outcome): self.__dict__.setdefault('outcomes', []).append(outcome)


def test_a_draft_never_takes_what_others_need():
    "A could draft into the one block that is free, and B needs it in the next step; with drafts as many are preempted as without: nobody"
    def run(speculate, num_blocks, answers=(5, 5)):
        s = Scheduler(BlockPool(num_blocks), Limits(4, 24, speculate=speculate, enable_prefix_caching=False))
        for name, prompt, answer in (('A', 7, answers[0]), ('B', 8, answers[1])):
            s.add(Request(name, [7] * prompt, answer))
            s.waiting[-1].drafter = Sure()
        records = []
        while s.running or s.waiting:
            plan = plan_step(s) if speculate else s.schedule()
            def say(r):
                r.token_ids.append(1050 + r.num_tokens)
                if r.num_tokens == r.num_prompt_tokens + r.max_tokens: s.finish(r, 'length')
                return r.token_ids[-1]
            s.update(plan)
            for p in plan.scheduled: s.verify(p.request, p, lambda _, p=p: say(p.request))
            records.append(s.close_step(plan).to_dict())
            audit(s)
        return records
    for num_blocks in (6, 7, 8):
        plain, fast = run(None, num_blocks), run(4, num_blocks)
        assert [len(r['preempted']) for r in plain] == [0] * len(plain) and not any(r['preempted'] for r in fast)
        assert len(fast) < len(plain)
    first = {n: {s['id']: s.get('num_drafted', 0) for s in run(4, n)[0]['scheduled']} for n in (5, 6, 7, 8)}
    assert first == {5: dict(A=1, B=0), 6: dict(A=1, B=0), 7: dict(A=4, B=0), 8: dict(A=4, B=4)}


def test_what_a_wrong_draft_took_is_free_again():
    "The tables and the count after a step in which all drafts were wrong are those of a step without drafts; nothing wrong can be found"
    class Wrong(Sure):
        def propose(self, token_ids, most): return [5] * most
    s, plain = (Scheduler(BlockPool(30), Limits(4, 40, speculate=n)) for n in (7, None))
    for scheduler in (s, plain):
        for i in range(3):
            scheduler.add(Request(str(i), [i] * (5 + i), 20))
            scheduler.waiting[-1].drafter = Wrong()
        while scheduler.running or scheduler.waiting:
            plan = scheduler.schedule()
            scheduler.update(plan)
            for p in plan.scheduled:
                def draw(k, r=p.request, scheduler=scheduler):
                    r.token_ids.append(says(r))
                    if r.num_tokens == r.num_prompt_tokens + r.max_tokens: scheduler.finish(r, 'length')
                    return r.token_ids[-1]
                scheduler.verify(p.request, p, draw)
            assert all(len(r.block_table) == blocks_needed(r.num_computed_tokens, 4) and r.num_computed_tokens == r.num_tokens - 1 for r in scheduler.running)
            scheduler.record.tables = {r.id: len(r.block_table) for r in scheduler.running}, scheduler.pool.num_free, {e.token_ids for e in scheduler.ledger.prefix.by_block.values()}
            scheduler.__dict__.setdefault('seen', []).append(scheduler.record.tables)
            del scheduler.record.tables
            scheduler.close_step(plan)
            audit(scheduler)
    assert s.seen == plain.seen and len(s.seen) == 20
