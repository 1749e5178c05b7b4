"""The simulator against the engine: the same settings give the same records, other settings lose nothing"""
import json
import math
import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minigpt.cli import main
from minigpt.engine import Engine, EngineConfig, header_line
from minigpt.sampling import SamplingParams
from minigpt.scheduler import QueueFull, Scheduler, StepPlan
from minigpt.simulate import bench_simulate, Cost, Recorded, compare_runs, fit_cost, run_totals, simulate
from minigpt.stepper import Trace, read_trace, to_perfetto
from minigpt.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
POISON = 13
COST = Cost(0.004, 0.0005, 0.000002)


class Poisoned:
    "NaN for whoever's last token is 13"
    def __init__(self, model): self.model, self.config = model, model.config
    def hidden(self, token_ids, positions, cache):
        return torch.where((token_ids == POISON)[:, None], torch.nan, self.model.hidden(token_ids, positions, cache))
    def logits(self, hidden): return self.model.logits(hidden)


def recording(model, settings, **options):
    "An engine, and a function for what it has written so far, by way of a file's lines"
    lines = []
    engine = Engine(model, TOKENIZER, EngineConfig(**settings), on_record=lambda line: lines.append(json.dumps(line)), **options)
    return engine, lambda: read_trace([json.dumps(header_line(engine, 'toy')), *lines])


def uncounted(trace):
    "As if nobody had counted who had left when a request came"
    return Trace(trace.header, [{k: v for k, v in q.items() if k != 'num_finished'} for q in trace.requests], trace.records)


class Clock:
    "Seconds that pass only when told"
    def __init__(self): self.now = 0.0
    def __call__(self): return self.now


def settings_of(rng):
    "Small pools, small budgets, few seats: everything that makes a scheduler decide"
    block_size = rng.choice((2, 4, 8))
    whole = rng.random() < 0.15
    return dict(block_size=block_size, num_blocks=64 // block_size + rng.choice((0, 0, 0, 40)), max_num_seqs=rng.choice((3, 4, 8)),
                max_num_batched_tokens=64 if whole else rng.choice((1, 5, 16, 64)), enable_chunked_prefill=not whole, enable_prefix_caching=rng.random() < 0.8,
                full_reservation=rng.random() < 0.2, watermark_blocks=rng.choice((0, 0, 2)), max_chunk_tokens=None if whole else rng.choice((None, None, 6)),
                max_num_kv_reads=None if whole else rng.choice((None, None, 200)), max_waiting_requests=rng.choice((6, 256)), speculate=rng.choice((None, 1, 3, 7)))


def recorded_run(model, seed, num_requests=14):
    "A trace of random traffic: prompts that begin alike, choices, priorities, keys, salts, deadlines, aborts, failures, resets, ids used again"
    rng, clock = random.Random(seed), Clock()
    engine, trace = recording(Poisoned(model), settings_of(rng), clock=clock)
    common, left, refused = [rng.randrange(14, 200) for _ in range(24)], num_requests, 0
    while left or engine.has_work:
        events = [rng.random() for _ in range(rng.choice((0, 0, 1, 2, 5)))]
        for what in events if seed % 2 == 0 else sorted(events):  # nobody gives up after an arrival, if nobody counts who has left
            live = list(engine.answers.values())
            if what < 0.07 and live:
                victim = rng.choice(live)
                engine.abort(victim.request_id, victim.choice.index if rng.random() < 0.5 else None)
            elif what < 0.1: engine.reset_prefix_cache()
            elif left:
                left -= 1
                prompt = common[:rng.choice((0, 0, 9, 16, 24))] + [rng.randrange(POISON + 1, 256) for _ in range(rng.randint(1, 20))]
                if rng.random() < 0.15: prompt[rng.choice((-1, rng.randrange(len(prompt))))] = POISON
                params = SamplingParams(max_tokens=rng.choice((1, 3, 20, 40)), n=rng.choice((1, 1, 1, 2, 3)), seed=rng.randrange(2**40), temperature=rng.choice((0, 1.0)),
                                        prompt_logprobs=rng.choice((None, None, None, 1)), stop_token_ids=list(range(20, 256, 40)),
                                        allowed_token_ids=rng.choice((None, [97, 98], [97, 98, 99, POISON])))
                try: engine.add(rng.choice((f'r{left}', f'r{left % 3}')), prompt, params, priority=rng.choice((0, 0, 1)), key=rng.choice('xxy'),
                                cache_salt=rng.choice((None, None, 'salt')), deadline_s=rng.choice((None,) * 8 + (3, 12)))
                except (ValueError, QueueFull): refused += 1
        engine.step()
        clock.now += rng.choice((0.5, 1, 1, 2))
    return trace() if seed % 2 == 0 else uncounted(trace())


def timeless(records): return [r | dict(started_s=None, duration_s=None) for r in records]


def visits(trace):
    "What each visit said, in the order of arrival: id, and the tokens and the end of each choice"
    return [(e.visit.request['id'], {i: ([t for t, _ in c.drawn], c.reason) for i, c in e.visit.choices.items()}) for e in Recorded(trace).events if e.kind == 'arrival']


def check(trace, simulation):
    "Nothing is lost: all end or were refused, nobody says anything but what was recorded, limits are kept, and all blocks come back"
    records, settings = simulation.trace.records, simulation.trace.header['settings']
    assert sum(len(r['arrived']) for r in records) + len(simulation.refused) == len(trace.requests) == len(simulation.trace.requests) + len(simulation.refused)
    known = {}
    for i, choices in visits(trace): known.setdefault(i, []).append(choices)
    for i, choices in visits(simulation.trace):
        for c, (tokens, reason) in choices.items():
            like = [k[c] for k in known[i] if c in k and k[c][0][:len(tokens)] == tokens]
            assert like and reason is not None
            if reason in ('stop', 'length', 'error'): assert (tokens, reason) in like
    for r in records:
        assert sum(s['num_tokens'] for s in r['scheduled']) <= settings['max_num_batched_tokens'] and len(r['scheduled']) <= settings['max_num_seqs']
        assert 0 <= r['num_free_blocks'] <= settings['num_blocks'] == r['num_blocks']
    assert records[-1]['num_free_blocks'] == settings['num_blocks']
    assert all(a['started_s'] + a['duration_s'] <= b['started_s'] for a, b in zip(records, records[1:]))


@pytest.fixture(scope='module')
def traces(prepared): return [recorded_run(prepared['llama'], seed) for seed in range(40)]


def test_the_same_settings_give_the_same_records(traces):
    "Field by field, with everything that can happen to a request happening"
    seen = Counter()
    for trace in traces:
        simulated = simulate(trace, cost=COST)
        again, recorded = timeless(simulated.trace.records), timeless(trace.records)
        assert simulated.refused == []
        assert not any(r['arrived'] or r['scheduled'] or r['finished'] for r in recorded[len(again):])  # an engine that is stepped without work
        for found, wanted in zip(again, recorded): assert found == wanted
        check(trace, simulated)
        for r in trace.records:
            seen.update(f['reason'] for f in r['finished'])
            seen['unwanted'] += sum(f['id'] in {*r['forked'], *r['forked'].values()} for f in r['finished'] if f['reason'] == 'abort')
            seen.update({name: len(r[name]) for name in ('preempted', 'found', 'forked', 'copied', 'evicted')} | {'reset': r['reset']})
            seen.update({name: sum(s.get(name, 0) for s in r['scheduled']) for name in ('num_drafted', 'num_right')})
    for name in ('stop', 'length', 'abort', 'deadline', 'error', 'preempted', 'found', 'forked', 'copied', 'evicted', 'reset', 'unwanted', 'num_right'):
        assert seen[name] >= 5, seen
    assert seen['num_drafted'] > seen['num_right'] + 5


def test_other_settings_lose_nothing(traces):
    "By steps and by the clock; and a simulated run can be simulated again"
    refused = Counter()
    for seed, trace in enumerate(traces):
        for arrive in ('steps', 'seconds'):
            policy = settings_of(random.Random(1000 + seed))
            if arrive == 'seconds': policy |= dict(num_blocks=64 // policy['block_size'] - 3, max_waiting_requests=2)
            simulated = simulate(trace, arrive, COST, **policy)
            check(trace, simulated)
            refused.update(r['reason'].rstrip('0123456789')[-12:] for r in simulated.refused)
            again = simulate(simulated.trace, cost=COST)
            if seed % 2 == 0: assert read_trace([json.dumps(line) for line in (simulated.trace.header, *simulated.trace.requests, *simulated.trace.records)]) == simulated.trace
            found, wanted = timeless(again.trace.records), timeless(simulated.trace.records)
            assert found == wanted[:len(found)] and not any(r['arrived'] or r['scheduled'] or r['finished'] for r in wanted[len(found):])
    assert len(refused) >= 3


def test_another_policy_is_what_the_engine_does_under_it(prepared):
    "The same requests at the same steps, really run under other settings: the records that were foretold"
    def run(seed, settings):
        rng, queue = random.Random(seed), []
        common = [rng.randrange(256) for _ in range(24)]
        for i in range(12):
            prompt = common[:rng.choice((0, 9, 16, 24))] + [rng.randrange(256) for _ in range(rng.randint(1, 16))]
            params = SamplingParams(max_tokens=rng.choice((1, 5, 14)), n=rng.choice((1, 1, 2)), temperature=1.0, seed=i, stop_token_ids=[*range(0, 256, 19)],
                                    allowed_token_ids=rng.choice((None, [97, 98])))
            queue.append((rng.randrange(12), str(i), prompt, params, rng.choice((0, 1)), rng.choice('xy')))
        (engine, trace), queue = recording(prepared['gpt2'], settings), sorted(queue, key=lambda q: q[0])
        while queue or engine.has_work:
            while queue and queue[0][0] <= engine.scheduler.num_steps: engine.add(*queue.pop(0)[1:])
            engine.step()
        return trace()
    differ, drafted = 0, Counter()
    for seed in range(8):
        first, second = (settings_of(random.Random(s)) | dict(num_blocks=40, max_waiting_requests=50) for s in (seed, seed + 100))
        second |= dict(num_blocks=64 // second['block_size'])
        trace, really = run(seed, first), run(seed, second)
        simulated = simulate(trace, **second)
        assert timeless(simulated.trace.records) == timeless(really.records)
        differ += timeless(trace.records) != timeless(really.records)
        drafted.update(first=run_totals(trace)['drafted_right'], second=run_totals(really)['drafted_right'])
    assert differ >= 6 and min(drafted.values()) > 5, drafted


def test_whether_somebody_left_before_or_after_an_arrival_is_kept(prepared):
    "It decides what the new one's key has been served; and who comes and goes between two steps is seen to do so in any case"
    def run(abort_first, at_once=False):
        engine, trace = recording(prepared['llama'], dict(block_size=4, num_blocks=16, max_num_seqs=2))
        engine.add('A', [1] * 20, SamplingParams(max_tokens=9), key='x')
        engine.step()
        engine.add('B', [2] * 5, SamplingParams(max_tokens=9), key='y')
        engine.step()
        def leave(): engine.abort('B')
        def come(): engine.add('C', [3] * 5, SamplingParams(max_tokens=2), key='y')
        for act in (leave, come) if abort_first else (come, leave): act()
        engine.add('D', [4] * 5, SamplingParams(max_tokens=2), key='z')
        if at_once: engine.abort('D')
        while engine.has_work: engine.step()
        return trace()
    traces = [run(abort_first) for abort_first in (True, False)]
    assert [[i for r in t.records for i in r['admitted']] for t in traces] == [['A', 'B', 'C', 'D'], ['A', 'B', 'D', 'C']]
    for trace in (*traces, uncounted(traces[0]), uncounted(run(True, at_once=True)), run(False, at_once=True)):
        assert timeless(simulate(trace).trace.records) == timeless(trace.records)
    assert [e.kind for e in Recorded(traces[0]).events] == ['arrival', 'arrival', 'abort', 'arrival', 'arrival']
    assert [e.kind for e in Recorded(traces[1]).events] == ['arrival', 'arrival', 'arrival', 'abort', 'arrival']


def burst(num_blocks=100, n=8, cost=COST, **policy):
    "As many requests at once, of 10 tokens and with answers of 6, from a trace written by hand"
    requests = [dict(kind='request', id=f'r{i}', step=0, arrived_s=0.0, prompt_token_ids=[i] * 10, params=dict(max_tokens=6, n=1, prompt_logprobs=None), priority=0,
                     key='', cache_salt=None, deadline_s=None) for i in range(n)]
    empty = dict(step=0, arrived=[], finished=[], forked={}, drawn={}, scheduled=[], reset=False, started_s=0.0, duration_s=0.1)
    records = [empty | dict(step=k, arrived=[q['id'] for q in requests] if k == 0 else [], drawn={q['id']: [[k, 0.0]] for q in requests},
                            finished=[dict(id=q['id'], reason='length') for q in requests] if k == 5 else []) for k in range(6)]
    header = dict(settings=dict(block_size=4, num_blocks=100, max_num_seqs=16, max_num_batched_tokens=512), max_seq_len=32)
    return simulate(Trace(header, requests, records), cost=cost, num_blocks=num_blocks, **policy)


def test_what_less_of_everything_costs():
    "Totals that can be worked out by hand"
    totals = run_totals(burst().trace)
    assert totals == dict(requests=8, steps=6, tokens_computed=8 * 15, tokens_drawn=48, tokens_drafted=0, drafted_right=0, preemptions=0, seconds=pytest.approx(6 * 0.004 + 120 * 0.0005 + 8 * 120 * 2e-6),
                          first_token_mean_s=pytest.approx(0.004 + 0.04 + 8 * 55 * 2e-6), first_token_p95_s=pytest.approx(0.004 + 0.04 + 8 * 55 * 2e-6))
    alone = run_totals(burst(max_num_seqs=1).trace)
    assert (alone['steps'], alone['tokens_computed'], alone['preemptions']) == (48, 120, 0)
    assert alone['first_token_p95_s'] == pytest.approx(7 * (6 * 0.004 + 15 * 0.0005 + 120 * 2e-6) + 0.004 + 0.005 + 55 * 2e-6)  # the last of eight
    by_blocks = [run_totals(burst(blocks, enable_prefix_caching=False).trace) for blocks in (32, 24, 12, 8, 4)]
    assert [t['steps'] for t in by_blocks] == sorted(t['steps'] for t in by_blocks) and by_blocks[0]['preemptions'] == 0 and by_blocks[-1]['steps'] == 48
    assert all(t['tokens_drawn'] == 48 and (t['tokens_computed'] > 120) == (t['preemptions'] > 0) for t in by_blocks) and any(t['preemptions'] for t in by_blocks)
    assert run_totals(burst(12, full_reservation=True).trace)['preemptions'] == 0
    budgets = [run_totals(burst(max_num_batched_tokens=n).trace)['steps'] for n in (512, 40, 10, 4, 1)]
    assert budgets == sorted(budgets) and budgets[-1] == 120


def test_who_is_refused_is_reported():
    assert burst(3).refused == [dict(id=f'r{i}', step=0, reason='prompt and answer may need 4 blocks of 4 tokens, the whole pool has 3') for i in range(8)]
    assert [r['id'] for r in burst(max_waiting_requests=5).refused] == ['r5', 'r6', 'r7']
    assert burst(3).trace.records == []
    assert burst(block_size=8).trace.header['settings']['num_blocks'] == 100
    with pytest.raises(ValueError, match="unknown setting 'max_seq_len'"): burst(max_seq_len=9)
    with pytest.raises(ValueError, match='max_num_seqs=0 must be at least 1'): burst(max_num_seqs=0)
    with pytest.raises(ValueError, match='num_blocks=0 must be at least 1'): burst(0)


def test_a_simulation_that_stands_still_is_an_error(monkeypatch):
    monkeypatch.setattr(Scheduler, 'schedule', lambda self, now: StepPlan(self.num_steps))
    with pytest.raises(RuntimeError, match='no token in 177 steps, 8 requests are stuck'): burst()


def test_who_left_early_says_no_more_than_was_recorded(traces):
    "With room for all at once, who gave up after k tokens has k, and leaves before another step"
    for trace in traces:
        wide = simulate(trace, cost=COST, num_blocks=2000, max_num_seqs=64, max_num_batched_tokens=4096, max_chunk_tokens=None, max_num_kv_reads=None)
        check(trace, wide)
        said = {}
        for i, choices in visits(trace): said.setdefault(i, []).append(choices)
        for r in wide.refused: assert r['reason'].endswith('is in use') or 'seats' in r['reason'] or 'wait' in r['reason']


@pytest.mark.parametrize('spoil, message', [
    (lambda t: t.requests.pop(), 'the trace has no request line'),
    (lambda t: t.records.pop(0), 'record 0 of the trace is of step 1'),
    (lambda t: t.requests[0].update(step=7), 'arrives at step 0, its line says 7'),
    (lambda t: t.records[1]['drawn'].update(nobody=[[1, 0.0]]), "step 1 of the trace names 'nobody', which is not there"),
    (lambda t: t.records[1]['finished'].append(dict(id='nobody', reason='abort')), "step 1 of the trace names 'nobody'"),
    (lambda t: t.records[1]['forked'].update({'x#1': 'x'}), "step 1 of the trace names 'x'")])
def test_a_trace_that_is_not_whole_is_refused(spoil, message):
    trace = json.loads(json.dumps(vars(burst().trace)))
    trace = Trace(**trace)
    simulate(trace)
    spoil(trace)
    with pytest.raises(ValueError, match=message): simulate(trace)


@pytest.mark.parametrize('time', [None, math.nan, math.inf])
def test_the_clock_needs_times(time):
    trace = burst().trace
    trace.requests[3]['arrived_s'] = time
    with pytest.raises(ValueError, match='not everything in the trace has a time'): simulate(trace, 'seconds', COST)
    assert len(simulate(trace).trace.records) == 6


def test_a_client_of_last_night_comes_at_the_same_second():
    "An idle engine sleeps until somebody comes; who comes during a step enters after it"
    trace = burst(n=3).trace
    for q, t in zip(trace.requests, (5.0, 5.001, 9.0)): q['arrived_s'] = t
    records = simulate(trace, 'seconds', Cost(0.01, 0, 0)).trace.records
    arrived = [(r['step'], round(r['started_s'], 6), r['arrived']) for r in records if r['arrived']]
    assert arrived == [(0, 5.0, ['r0']), (1, 5.01, ['r1']), (7, 9.0, ['r2'])] and len(records) == 13
    assert run_totals(simulate(trace, 'seconds', Cost(0.01, 0, 0)).trace)['first_token_mean_s'] == pytest.approx((0.01 + 0.019 + 0.01) / 3)


def test_the_clock_ends_who_is_late():
    trace = burst(n=2).trace
    for q, t in zip(trace.requests, (5.0, 6.0)): q |= dict(arrived_s=t, deadline_s=0.025)
    trace.requests[1]['deadline_s'] = None
    records = simulate(trace, 'seconds', Cost(0.01, 0, 0)).trace.records
    assert [(r['step'], f) for r in records for f in r['finished']] == [(3, dict(id='r0', reason='deadline', detail='0.005 s too late')), (9, dict(id='r1', reason='length'))]


def test_an_id_used_again_while_it_is_still_in_use():
    "The second is refused, as an engine would; and its abort does not end the first"
    trace = burst(n=1).trace
    again = trace.requests[0] | dict(step=6, arrived_s=0.5)
    empty = trace.records[5] | dict(finished=[], drawn={}, scheduled=[])
    later = [empty | dict(step=6, arrived=['r0'], drawn={'r0': [[7, 0.0]]}), empty | dict(step=7), empty | dict(step=8, finished=[dict(id='r0', reason='abort')])]
    trace = Trace(trace.header, [*trace.requests, again], [*trace.records, *later])
    slow = simulate(trace, max_num_batched_tokens=1)
    assert slow.refused == [dict(id='r0', step=6, reason="request id 'r0' is in use")]
    assert [(f['id'], f['reason']) for r in slow.trace.records for f in r['finished']] == [('r0', 'length')] and len(slow.trace.records) == 15


# the cost

def steps_of(cost, steps, noise=lambda i: 1):
    "Timed records of steps, each a list of `(start, num_tokens)`"
    records = [dict(scheduled=[dict(id='r', start=start, num_tokens=n) for start, n in parts]) for parts in steps]
    return [r | dict(duration_s=cost.seconds(r) * noise(i)) for i, r in enumerate(records)]


def test_a_fit_finds_the_cost_beneath_the_noise():
    rng, cost = random.Random(0), Cost(0.006, 0.0003, 4e-7, 0.0008)
    steps = [[(rng.randrange(2000), rng.choice((1,) * 20 + (2, 4, 40, 200))) for _ in range(rng.randint(1, 12))] for _ in range(300)]
    found = vars(fit_cost(steps_of(cost, steps)))
    assert found == pytest.approx(vars(cost), rel=1e-6)
    noisy = steps_of(cost, steps, lambda i: rng.choice((0.98, 1, 1.02, 1, 1, 3, 20)) if i else 1000)  # a warm-up, and a busy neighbour
    assert vars(fit_cost(noisy)) == pytest.approx(vars(cost), rel=0.02)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 600), st.floats(1e-6, 1e3)), min_size=1, max_size=30))
def test_a_fit_is_never_negative_and_never_nonsense(steps):
    records = [dict(scheduled=[dict(id='r', start=start, num_tokens=n)], duration_s=t) for start, n, t in steps]
    try: cost = fit_cost(records)
    except ValueError: assert len(steps) < 8 or len({n for _, n in steps}) < 2
    else: assert len(steps) >= 8 and all(0 <= x < math.inf for x in vars(cost).values()) and any(vars(cost).values())


def test_a_step_that_runs_nothing_costs_nothing(): assert COST.seconds(dict(scheduled=[])) == 0.0


# other tools

def events_by_track(out):
    "The events of each track, after a check of what the Trace Event Format demands of every one"
    names, tracks = {}, {}
    for e in json.loads(json.dumps(out, allow_nan=False, ensure_ascii=False).encode())['traceEvents']:
        assert type(e['pid']) is type(e['tid']) is int and type(e['name']) is str
        if e['ph'] == 'M':
            if e['name'] == 'thread_name': names[e['pid'], e['tid']] = e['args']['name']
            continue
        assert type(e['ts']) is int and e['ts'] >= 0 and e['ph'] in 'XiC'
        if e['ph'] == 'X': assert type(e['dur']) is int and e['dur'] >= 0
        if e['ph'] == 'i': assert e['s'] == 't'
        if e['ph'] == 'C': assert e['args'] and all(type(v) is int for v in e['args'].values())
        tracks.setdefault((e['pid'], e['tid']), []).append(e)
    assert set(tracks) <= set(names)
    for events in tracks.values():
        slices = sorted((e['ts'], e['ts'] + e['dur']) for e in events if e['ph'] == 'X')
        assert all(a[1] <= b[0] for a, b in zip(slices, slices[1:]))  # one after the other, never across
    return names, tracks


@pytest.mark.parametrize('timed', [True, False])
def test_a_run_as_others_draw_it(traces, timed):
    "A slice for each part of each step, an instant for each arrival, preemption, fork and end; on tracks that exist"
    for trace in traces:
        records = trace.records if timed else timeless(trace.records)
        names, tracks = events_by_track(to_perfetto(records))
        slices = [(names[k], e['name'].split()[0], e['args'].get('start')) for k, events in tracks.items() for e in events if e['ph'] == 'X']
        assert Counter(s for s in slices if s[1] in ('prefill', 'decode')) == Counter((s['id'], s['phase'], s['start']) for r in records for s in r['scheduled'])
        assert sum(s[:2] == ('steps', 'step') for s in slices) == len(records)
        instants = Counter((names[k], e['name']) for k, events in tracks.items() for e in events if e['ph'] == 'i')
        wanted = Counter((i, 'arrived') for r in records for i in r['arrived']) + Counter((f['id'], f['reason']) for r in records for f in r['finished'])
        wanted += Counter((p['id'], 'preempted') for r in records for p in r['preempted']) + Counter((i, 'forked') for r in records for i in r['forked'])
        assert instants == wanted + Counter(('steps', 'evicted') for r in records if r['evicted'])
        for (pid, _), events in tracks.items():  # nobody waits or runs after the end
            ends = [e['ts'] for e in events if e['ph'] == 'i' and e['name'] in ('stop', 'length', 'abort', 'deadline', 'error')]
            assert pid == 1 or max(ends) >= max((e['ts'] + e['dur'] for e in events if e['ph'] == 'X'), default=0)
        if not timed: assert [e['ts'] for e in tracks[1, 1] if e['ph'] == 'X'] == [1000 * i for i in range(len(records))]


def test_any_id_and_any_time_make_valid_json():
    for name in ('</script>', '"\\\n\0', '\ud800', '', 'steps', '💥', 'A needs 1 block'):
        trace = burst(n=1).trace
        record = json.loads(json.dumps(trace.records[0]).replace('r0', 'PLACE'))
        record |= dict(arrived=[name], admitted=[name], scheduled=[record['scheduled'][0] | dict(id=name)], found={}, allocated={name: [0]}, drawn={name: [[1, math.nan]]})
        for started in (0.0, math.nan, -1.0, None, math.inf): events_by_track(to_perfetto([record | dict(started_s=started)]))
    assert events_by_track(to_perfetto([])) == ({(1, 1): 'steps'}, {})
    assert run_totals(Trace(None, [], []))['seconds'] is None and '-' in compare_runs({'nothing': Trace(None, [], [])})


def test_the_measurement_of_the_simulator_is_recorded(tmp_path, monkeypatch, capsys):
    "Fresh processes on a small model; what is equal is counted, and what the times are is written down, not judged"
    summary = bench_simulate(tmp_path, threads=1, replicates=5, preset='nano', num_requests=8)
    assert json.loads((tmp_path/'simulate'/'summary.json').read_text()) == json.loads(json.dumps(summary))
    assert list(summary) == ['itself', 'others', 'budget of 64', '4 seats', 'small pool', '4 seats, by the clock']
    for name, case in summary.items():
        assert case['num_runs'] == 5 and case['num_decisions_equal'] == (None if 'clock' in name else 5) and ('clock' in name or case['num_steps_equal'] == 5)
        assert all(0 < low <= mid <= high for low, mid, high in (case['seconds'], case['first_token']))
    monkeypatch.chdir(tmp_path)
    assert main('bench simulate --preset nano --out .'.split()) == 2
    assert 'holds a record' in capsys.readouterr().err
