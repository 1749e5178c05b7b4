"The bench room's edges: what it refuses, what it keeps when a run fails, and the statistics on random data. No test reads a clock."
import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minigpt import bench, kernels
from minigpt.bench import (Policy, PolicyChanged, RecordExists, ReplicateFailed, Workload, benches, bootstrap_ratio, compare, doctor, doctor_text,
                           interleave, last_object, linear_weights, load_workload, metric_of, predict, preset_config, record, run_once, source_commit,
                           summarise, tail_share, verdict)

POLICY = Policy('toy', 'Is A faster than B?', replicates=5, warmups=0)
positive = st.floats(1e-3, 1e3)


def python(code, *words): return [sys.executable, '-ISc', code, *words]

def say(**result): return python(f'print({json.dumps(result)!r})')

def lines_of(path): return [json.loads(line) for line in path.read_text(encoding='utf-8').splitlines()]


# ---- statistics
@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.lists(positive, min_size=2, max_size=12), st.integers(0, 3), st.sampled_from([0.5, 2.0, 4.0]))
def test_a_scaled_series_gives_exactly_its_scale(xs, seed, scale):
    assert bootstrap_ratio([scale * x for x in xs], xs, seed, resamples=200) == (scale, scale, scale)

@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.lists(st.tuples(positive, positive), min_size=2, max_size=12))
def test_interval_holds_the_median_and_lies_within_the_ratios(pairs):
    a, b = zip(*pairs, strict=True)
    ratio, low, high = bootstrap_ratio(a, b, resamples=500)
    ratios = sorted(x / y for x, y in pairs)
    assert ratios[0] <= low <= high <= ratios[-1]
    assert ratio == pytest.approx(np.median(ratios), rel=1e-12)
    assert low <= ratio * (1 + 1e-12) and ratio <= high * (1 + 1e-12)
    assert bootstrap_ratio(a, b, resamples=500) == (ratio, low, high)

def test_exchanging_the_sides_inverts_the_interval():
    a, b = [1.0, 1.3, 0.9, 1.1, 1.2], [2.0, 2.1, 2.2, 1.9, 2.4]  # an odd count: each median is one of the ratios
    ratio, low, high = bootstrap_ratio(a, b)
    assert [1 / x for x in (ratio, high, low)] == pytest.approx(bootstrap_ratio(b, a), rel=1e-12)

def test_both_ends_are_cut_alike():
    ratios = np.random.default_rng(2).lognormal(sigma=0.2, size=25)
    draws = np.random.default_rng(7).integers(25, size=(3000, 25))
    medians = sorted(np.median(ratios[draw]) for draw in draws)
    cut = tail_share(25, 0.9)
    assert bootstrap_ratio(ratios, np.ones(25), 7, 3000, 0.9) == pytest.approx((np.median(ratios), *np.quantile(medians, [cut, 1 - cut])), rel=1e-12)

def test_summary_uses_the_policy_s_seed_and_confidence():
    values = np.random.default_rng(3).lognormal(sigma=0.2, size=14)
    raw = [dict(side=side, value=v if side == 'a' else 1.0, source='printed', result={}) for v in values.tolist() for side in 'ab']
    for policy in (POLICY, replace(POLICY, seed=1), replace(POLICY, confidence=0.8), replace(POLICY, resamples=999)):
        result = summarise(policy, raw)
        assert (result.ratio, result.low, result.high) == bootstrap_ratio(values, np.ones(14), policy.seed, policy.resamples, policy.confidence)
    assert summarise(POLICY, raw) != summarise(replace(POLICY, seed=1), raw)

def test_pairs_stay_pairs():
    rng = np.random.default_rng(0)
    drift = np.exp(np.linspace(0, 3, 20))  # the machine becomes 20 times slower
    a, b = 0.9 * drift * rng.lognormal(sigma=0.01, size=20), drift * rng.lognormal(sigma=0.01, size=20)
    ratio, low, high = bootstrap_ratio(a, b)
    assert 0.88 < low < ratio < high < 0.92

@pytest.mark.parametrize('pairs', [5, 6, 7, 8, 12, 13, 30])
def test_coverage_on_synthetic_data(pairs):
    rng = np.random.default_rng(pairs)
    noise = rng.lognormal(sigma=0.2, size=(400, 2, pairs))
    held = sum(low <= 1.25 <= high for _, low, high in (bootstrap_ratio(1.25 * a, b, resamples=1000) for a, b in noise))
    assert 0.91 * 400 <= held  # five pairs can hold it 94 times in 100; 400 trials are good to about 1 %

def test_a_narrower_confidence_gives_a_narrower_interval():
    a = np.random.default_rng(1).lognormal(sigma=0.2, size=40)
    _, low, high = bootstrap_ratio(a, np.ones(40), confidence=0.95)
    _, low50, high50 = bootstrap_ratio(a, np.ones(40), confidence=0.5)
    assert low < low50 < high50 < high

@pytest.mark.parametrize('a, b, message', [([], [], 'at least 2'), ([1.0], [1.0], 'at least 2'), ([1.0], [1.0, 2.0], '1 measurements of A and 2 of B'),
                                           ([1.0, math.nan], [1.0, 1.0], 'got nan'), ([1.0, 1.0], [1.0, -2.0], 'got -2'),
                                           ([1.0, 1.0], [math.inf, 1.0], 'got inf')])
def test_bootstrap_refuses(a, b, message):
    with pytest.raises(ValueError, match=message): bootstrap_ratio(a, b)

@settings(derandomize=True, deadline=None)
@given(st.tuples(positive, positive).map(sorted), st.booleans(), st.sampled_from([0.0, 0.05, 0.5]))
def test_verdicts_of_exchanged_sides_are_opposite(ends, lower_is_better, min_effect):
    low, high = ends
    opposite = {'gain': 'loss', 'loss': 'gain', 'no gain': 'no gain'}
    assert verdict(low, high, not lower_is_better, min_effect) == opposite[verdict(low, high, lower_is_better, min_effect)]

def test_turns():
    assert interleave(0) == []
    assert interleave(2) == [(0, 'a'), (0, 'b'), (1, 'b'), (1, 'a')]
    for pairs in (6, 10):
        first = [side for turn, (_, side) in enumerate(interleave(pairs)) if turn % 2 == 0]
        assert first.count('a') == first.count('b') == pairs // 2


# ---- commands
def test_last_object_is_only_the_last_line():
    assert last_object('noise\n{"seconds": 1.5}\n\n') == {'seconds': 1.5}
    for stdout in ('', '\n', 'plain', '{"seconds": 1}\nbye', '[1, 2]', '3', '{"seconds": '): assert last_object(stdout) == {}

@pytest.mark.parametrize('value', [0, -1.0, math.nan, math.inf, '2.0', True, None, [1]])
def test_metric_must_be_a_positive_number(value):
    with pytest.raises(ReplicateFailed, match='must be a positive finite number'):
        metric_of('seconds', dict(wall_s=1.0, result=dict(seconds=value)))

def test_only_seconds_fall_back_to_the_process():
    assert metric_of('seconds', dict(wall_s=1.5, result=dict(tokens=3))) == (1.5, 'process')
    with pytest.raises(ReplicateFailed, match="a, pair 0: no 'tokens_per_s'"):
        metric_of('tokens_per_s', dict(wall_s=1.5, result={}), 'a, pair 0')

def test_environment_of_a_run(monkeypatch):
    monkeypatch.setenv('OMP_NUM_THREADS', '7')
    names = ['OMP_NUM_THREADS', 'MKL_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'NUMBA_NUM_THREADS', 'PYTHONHASHSEED']
    show = python(f'import os, json; print(json.dumps({{n: os.environ.get(n) for n in {names}}}))')
    assert run_once(show, threads=2, seed=5)['result'] == dict(zip(names, ['2', '2', '2', '2', '5'], strict=True))
    assert run_once(show)['result']['OMP_NUM_THREADS'] == '7'
    assert os.environ['OMP_NUM_THREADS'] == '7'

def test_a_run_that_hangs_or_writes_bytes():
    with pytest.raises(ReplicateFailed, match='still running after timeout_s=0.2'):
        run_once(python('import time; time.sleep(60)'), timeout_s=0.2)
    with pytest.raises(ReplicateFailed, match='exit code 1; stderr ends: .*�'):
        run_once(python('import sys; sys.stderr.buffer.write(b"x" * 9999 + bytes([255])); sys.exit(1)'))

def test_a_run_has_no_stdin(): assert run_once(python('print(open(0).read())'))['result'] == {}


# ---- compare
def test_order_of_processes_and_warmups(tmp_path):
    log, seen = tmp_path / 'log', []
    def note(side): return python('import sys; open(sys.argv[1], "a").write(sys.argv[2]); print(\'{"seconds": 1}\')', str(log), side)
    result = compare(replace(POLICY, warmups=2), note('a'), note('b'), tmp_path / 'out', on_replicate=seen.append)
    assert log.read_text() == 'abab' + 'abbaabbaab'
    raw = lines_of(tmp_path / 'out/raw.jsonl')
    assert raw == seen and [r['side'] for r in raw] == list('abbaabbaab')
    assert [r['pair'] for r in raw] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4] and [r['turn'] for r in raw] == list(range(10))
    assert (result.ratio, result.pairs, result.verdict, result.work) == (1.0, 5, 'no gain', {})

def test_policy_is_written_before_the_first_run(tmp_path):
    look = python('import sys, json; print(json.dumps(dict(seconds=1, policy=json.load(open(sys.argv[1])))))', str(tmp_path / 'out/policy.json'))
    compare(POLICY, look, look, tmp_path / 'out')
    assert [r['result']['policy'] for r in lines_of(tmp_path / 'out/raw.jsonl')] == [asdict(POLICY)] * 10

def test_every_run_is_on_disk_before_the_next_one(tmp_path):
    count = python('import sys, json; print(json.dumps(dict(seconds=1, work=dict(runs=len(open(sys.argv[1]).readlines())))))', str(tmp_path / 'raw.jsonl'))
    result = compare(POLICY, count, count, tmp_path)
    assert [r['result']['work']['runs'] for r in lines_of(tmp_path / 'raw.jsonl')] == list(range(10))
    assert result.work == {'runs': dict(a=4, b=5, ratio=0.8, varies=True)}  # A ran at turns 0 3 4 7 8, B at 1 2 5 6 9

def test_the_policy_s_threads_and_seed_reach_the_commands(tmp_path):
    show = python('import os, json; print(json.dumps(dict(seconds=1, env=[os.environ["OMP_NUM_THREADS"], os.environ["PYTHONHASHSEED"]])))')
    compare(replace(POLICY, threads=3, seed=8), show, show, tmp_path)
    assert [r['result']['env'] for r in lines_of(tmp_path / 'raw.jsonl')] == [['3', '8']] * 10
    with pytest.raises(ReplicateFailed, match='a, pair 0: still running after timeout_s=0.2'):
        compare(replace(POLICY, timeout_s=0.2), python('import time; time.sleep(60)'), show, tmp_path / 'slow')

def test_a_failure_in_the_first_run_leaves_the_folder_usable(tmp_path):
    with pytest.raises(ReplicateFailed, match='a, pair 0'): compare(POLICY, python('1/0'), say(seconds=1), tmp_path)
    assert compare(POLICY, say(seconds=1), say(seconds=1), tmp_path).verdict == 'no gain'

def test_seconds_without_an_object_are_the_process_s(tmp_path):
    result = compare(POLICY, python(''), python('print("hello")'), tmp_path)
    raw = lines_of(tmp_path / 'raw.jsonl')
    assert result.source == 'process' and all(r['value'] == r['wall_s'] > 0 and r['source'] == 'process' for r in raw)
    assert result == summarise(POLICY, raw)

def test_two_clocks_are_not_compared(tmp_path):
    with pytest.raises(ReplicateFailed, match='b, pair 0: seconds is process, but printed before'):
        compare(POLICY, say(seconds=1), python(''), tmp_path)

def test_a_failure_keeps_what_was_measured(tmp_path):
    fails_third = python('import sys; f = open(sys.argv[1], "a+"); f.write("x"); f.seek(0); n = len(f.read())\n'
                         'if n == 3: sys.exit("third time")\nprint(\'{"seconds": %d}\' % n)', str(tmp_path / 'count'))
    with pytest.raises(ReplicateFailed, match='a, pair 2: exit code 1; stderr ends: third time'):
        compare(POLICY, fails_third, say(seconds=4), tmp_path / 'out')
    assert [(r['side'], r['value']) for r in lines_of(tmp_path / 'out/raw.jsonl')] == [('a', 1), ('b', 4), ('b', 4), ('a', 2)]
    assert not (tmp_path / 'out/summary.json').exists()
    with pytest.raises(RecordExists, match='holds 4 runs'): compare(POLICY, fails_third, say(seconds=4), tmp_path / 'out')

def test_a_failed_warmup_leaves_the_folder_usable(tmp_path):
    with pytest.raises(ReplicateFailed, match='b, warm-up: exit code 1'):
        compare(replace(POLICY, warmups=1), say(seconds=1), python('1/0'), tmp_path)
    assert compare(replace(POLICY, warmups=1), say(seconds=1), say(seconds=1), tmp_path).verdict == 'no gain'

def test_another_policy_is_refused_and_nothing_changes(tmp_path):
    compare(POLICY, say(seconds=1), say(seconds=2), tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    for change, message in ((dict(min_effect=0.1), 'says min_effect=0.05, not 0.1'), (dict(question='?'), 'says question='), (dict(seed=1), 'says seed=0, not 1')):
        with pytest.raises(PolicyChanged, match=message): compare(replace(POLICY, **change), say(seconds=1), say(seconds=2), tmp_path)
    with pytest.raises(RecordExists, match='holds 10 runs'): compare(POLICY, say(seconds=1), say(seconds=2), tmp_path)
    assert before == {p.name: p.read_bytes() for p in tmp_path.iterdir()}

def test_a_loss_and_higher_is_better(tmp_path):
    slower = compare(POLICY, say(seconds=3), say(seconds=2), tmp_path / 'slower')
    faster = compare(replace(POLICY, metric='tokens_per_s', lower_is_better=False), say(tokens_per_s=3), say(tokens_per_s=2), tmp_path / 'faster')
    assert (slower.ratio, slower.verdict, faster.ratio, faster.verdict) == (1.5, 'loss', 1.5, 'gain')

@pytest.mark.parametrize('command', ['python -V', []])
def test_a_command_is_a_list_of_words(tmp_path, command):
    with pytest.raises(ValueError, match='command b must be a list of at least one word'):
        compare(POLICY, say(seconds=1), command, tmp_path / 'out')
    assert not (tmp_path / 'out').exists()

@pytest.mark.parametrize('field, value', [('replicates', 4), ('warmups', -1), ('min_effect', -0.1), ('confidence', 1.0), ('resamples', 0), ('threads', 0),
                                          ('seed', -1), ('timeout_s', -1)])
def test_policy_bounds(field, value):
    with pytest.raises(ValueError, match=f'{field}={value} must be at least'): replace(POLICY, **{field: value})

def test_only_threads_may_be_left_open():
    assert replace(POLICY, threads=None).threads is None
    with pytest.raises((ValueError, TypeError)): replace(POLICY, replicates=None)

@pytest.mark.parametrize('name', ['', '.', '..', 'a/b', '.hidden', 'two words', 'ä'])
def test_names_are_folder_names(name, tmp_path):
    with pytest.raises(ValueError, match='cannot name a record'): replace(POLICY, name=name)
    with pytest.raises(ValueError, match='cannot name a record'): record(name, tmp_path, policy=POLICY, raw=[], summary={})
    assert list(tmp_path.iterdir()) == []


# ---- records
def test_record_layout(tmp_path):
    raw = [dict(replicate=i, seconds=x) for i, x in enumerate((0.1 + 0.2, 1 / 3, 1e-9))]
    folder = record('toy', tmp_path / 'records', policy=POLICY, raw=raw, summary=dict(seconds=0.3))
    assert folder == tmp_path / 'records/toy' and [p.name for p in (tmp_path / 'records').iterdir()] == ['toy']
    assert sorted(p.name for p in folder.iterdir()) == ['machine.json', 'policy.json', 'raw.jsonl', 'summary.json']
    assert Policy(**json.loads((folder / 'policy.json').read_text())) == POLICY
    assert lines_of(folder / 'raw.jsonl') == raw  # unrounded
    assert json.loads((folder / 'summary.json').read_text()) == dict(seconds=0.3)
    machine = json.loads((folder / 'machine.json').read_text())
    assert machine['argv'] == sys.argv and {'git_commit', 'git_modified', 'load_average', 'platform', 'python'} <= set(machine)

def test_compare_leaves_the_same_layout(tmp_path):
    a, b = say(seconds=1, work=dict(tokens=3)), say(seconds=2, work=dict(tokens=6))
    result = compare(POLICY, a, b, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ['machine.json', 'policy.json', 'raw.jsonl', 'summary.json']
    assert json.loads((tmp_path / 'summary.json').read_text()) == {**asdict(result), 'commands': dict(a=a, b=b)}

def test_record_replaces_only_when_told(tmp_path):
    record('toy', tmp_path, policy=POLICY, raw=[], summary=dict(n=1))
    with pytest.raises(RecordExists): record('toy', tmp_path, policy=POLICY, raw=[], summary=dict(n=2))
    assert json.loads((tmp_path / 'toy/summary.json').read_text()) == dict(n=1)
    record('toy', tmp_path, policy=POLICY, raw=[], summary=dict(n=2), replace=True)
    assert json.loads((tmp_path / 'toy/summary.json').read_text()) == dict(n=2)
    assert [p.name for p in tmp_path.iterdir()] == ['toy']

@pytest.mark.parametrize('bad', [dict(raw=[dict(x=math.nan)], summary={}), dict(raw=[], summary=dict(x=math.inf)), dict(raw=[], summary=dict(x=object()))])
def test_a_record_is_whole_or_not_there(tmp_path, bad):
    with pytest.raises((ValueError, TypeError)): record('toy', tmp_path / 'records', policy=POLICY, **bad)
    assert not (tmp_path / 'records').exists()

def test_commit_of_the_source(tmp_path, monkeypatch):
    package = tmp_path / 'minigpt'
    package.mkdir()
    (package / '__init__.py').write_text('')
    monkeypatch.setattr(bench, 'find_spec', lambda name: type('Spec', (), dict(origin=str(package / '__init__.py'))))
    monkeypatch.setenv('GIT_CEILING_DIRECTORIES', str(tmp_path.parent))
    assert source_commit() == dict(git_commit=None, git_modified=None)
    def git(*words): return subprocess.run(['git', '-C', str(tmp_path), *words], check=True, capture_output=True, text=True).stdout.strip()
    git('init')
    assert source_commit() == dict(git_commit=None, git_modified=None)
    git('add', '.')
    git('-c', 'user.name=t', '-c', 'user.email=t@example.org', 'commit', '-m', 'one')
    assert source_commit() == dict(git_commit=git('rev-parse', 'HEAD'), git_modified=False)
    (package / '__init__.py').write_text('x = 1')
    assert source_commit()['git_modified'] is True


# ---- workloads
@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(1, 8), st.integers(1, 9), st.integers(0, 9), st.integers(0, 5), st.integers(1, 300), st.integers(0, 99))
def test_workload_stays_in_its_ranges(num_requests, low, more, prefix, vocab_size, seed):
    workload = Workload(num_requests, (low, low + more), (low, low + more), prefix, vocab_size, seed)
    requests = workload.requests()
    assert len(requests) == num_requests and requests == workload.requests()
    for r in requests:
        assert r['num_prompt_tokens'] == len(r['prompt_token_ids']) and prefix + low <= r['num_prompt_tokens'] <= prefix + low + more
        assert low <= r['max_tokens'] <= low + more and all(0 <= t < vocab_size for t in r['prompt_token_ids'])
        assert r['prompt_token_ids'][:prefix] == requests[0]['prompt_token_ids'][:prefix]

def test_workload_reaches_both_ends_and_depends_on_its_seed():
    requests = Workload(200, (2, 4), (1, 3), vocab_size=3).requests()
    assert {r['num_prompt_tokens'] for r in requests} == {2, 3, 4} and {r['max_tokens'] for r in requests} == {1, 2, 3}
    assert {t for r in requests for t in r['prompt_token_ids']} == {0, 1, 2}
    assert requests != Workload(200, (2, 4), (1, 3), vocab_size=3, seed=1).requests()

def test_workload_files(tmp_path):
    workload = Workload(3, (2, 5), (1, 4), 4, 100, seed=9)
    workload.save(tmp_path / 'w.json')
    assert load_workload(tmp_path / 'w.json') == workload and [p.name for p in tmp_path.iterdir()] == ['w.json']
    (tmp_path / 'w.json').write_text(json.dumps(dict(num_requests=3, rate=5, burst=1)))
    with pytest.raises(ValueError, match='unknown fields: burst, rate'): load_workload(tmp_path / 'w.json')

@pytest.mark.parametrize('bad', [dict(num_requests=0), dict(vocab_size=0), dict(shared_prefix_tokens=-1), dict(prompt_tokens=(0, 3)), dict(output_tokens=(4, 3))])
def test_workload_bounds(bad):
    with pytest.raises(ValueError, match=next(iter(bad))): Workload(**bad)


# ---- roofs, doctor, benches
def test_predictions():
    assert linear_weights(preset_config('gpt2')) == (12 * 12 * 768 * 768, 50257 * 768)
    nano = preset_config('nano')
    assert nano.vocab_size == 256 and linear_weights(nano) == (4 * 12 * 128 * 128, 256 * 128)
    slow_memory, slow_sums = predict(nano, 4, bandwidth=1e-3, gflops=1e9), predict(nano, 4, bandwidth=1e9, gflops=1e-3)
    weights = 4 * 12 * 128 * 128 + 256 * 128
    assert slow_memory['prefill_tokens'] == 64  # its longest sequence is shorter than 512
    assert slow_memory['decode_tokens_per_s'] == pytest.approx(1e6 / (4 * weights)) and slow_sums['decode_tokens_per_s'] == pytest.approx(1e6 / (2 * weights))
    assert slow_memory['prefill_tokens_per_s'] == pytest.approx(64 * slow_memory['decode_tokens_per_s'])
    flops = 64 * 2 * 4 * 12 * 128 * 128 + 2 * 256 * 128 + 4 * 4 * 128 * (64 * 65 // 2)
    assert slow_sums['prefill_tokens_per_s'] == pytest.approx(64 * 1e6 / flops)

def test_doctor_is_json_and_text(monkeypatch):
    monkeypatch.setattr(bench, 'measure_roofs', lambda threads: dict(bandwidth_gb_s=25.0 * threads, gemm_gflop_s=70.0 * threads))
    report = doctor(threads=2)
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert report['roofs'] == dict(bandwidth_gb_s=50.0, gemm_gflop_s=140.0) and list(report['predicted_fp32']) == ['nano', 'gpt2', 'smollm2-135m']
    assert report['predicted_fp32']['gpt2'] == predict(preset_config('gpt2'), 4, 50.0, 140.0)
    text = doctor_text(report)
    assert 'bandwidth_gb_s  50.0' in text and 'smollm2-135m' in text and '\n\n' not in text
    assert 'roofs' not in doctor(measure=False)

def test_doctor_reports_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, 'numba', None)
    monkeypatch.setitem(sys.modules, 'minigpt.kernels', None)
    report = doctor(measure=False)
    for part in ('numba', 'kernels'):
        assert report[part]['available'] is False and 'Error' in report[part]['reason']

def test_doctor_tells_which_kernels_and_whether_rows_agree(monkeypatch):
    monkeypatch.delenv('MINIGPT_KERNELS', raising=False)
    assert doctor(threads=2, measure=False)['kernels'] == dict(kernels='numba', reason='numba is here', rows_agree=True)
    monkeypatch.setenv('MINIGPT_KERNELS', 'torch')
    assert doctor(threads=2, measure=False)['kernels'] == dict(kernels='torch', reason='MINIGPT_KERNELS=torch asks for it', rows_agree=True)
    monkeypatch.setattr(kernels.F, 'linear', lambda x, *args: x[:, :1] + torch.arange(len(x))[:, None])
    assert doctor(threads=2, measure=False)['kernels']['rows_agree'] is False
    monkeypatch.setenv('MINIGPT_KERNELS', 'fast')
    assert doctor(threads=2, measure=False)['kernels'] == dict(available=False, reason="ValueError: MINIGPT_KERNELS='fast' must be auto or torch")

def test_roofs_bench_records_fresh_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, 'python_command', lambda call: say(bandwidth_gb_s=25.0, gemm_gflop_s=140.0, call=call))
    summary = benches()['roofs'](tmp_path, threads=2, replicates=5)
    assert summary == dict(bandwidth_gb_s=dict(median=25.0, least=25.0, most=25.0), gemm_gflop_s=dict(median=140.0, least=140.0, most=140.0))
    raw = lines_of(tmp_path / 'roofs/raw.jsonl')
    assert [r['replicate'] for r in raw] == [0, 1, 2, 3, 4] and {r['result']['call'] for r in raw} == {'measure_roofs(2)'}
    with pytest.raises(RecordExists): benches()['roofs'](tmp_path, threads=2, replicates=5)

def test_python_command_runs_this_room(tmp_path):
    assert bench.run_once(bench.python_command("last_object('{\"a\": 1}')"))['result'] == dict(a=1)

def test_pair_bench_takes_command_lines(tmp_path):
    line = f"{sys.executable} -ISc 'print(\"{{\\\"seconds\\\": 1}}\")'"
    summary = benches()['pair'](line, line, tmp_path, replicates=5, warmups=0)
    assert (summary['verdict'], summary['ratio'], summary['source']) == ('no gain', 1.0, 'printed')
