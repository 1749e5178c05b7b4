"Sampling against slow, obvious specifications"
import math
from dataclasses import FrozenInstanceError, replace
from fractions import Fraction

import numpy as np
import pytest
from conftest import Watched
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from minigpt.sampling import (BadLogits, SamplingParams, StopChecker, TokenCounts, TokenLogprobs, apply_bias, apply_temperature, bad_sequences,
                              ban, banned_until_min_tokens, best_ids, check_token_ids, completing, draw, finish_reason, fresh_seed, keep_min_p,
                              keep_only, keep_top_p, logit_stages, logprobs_of, penalize_repetition, sample, uniform)

settings.register_profile('fixed', derandomize=True, deadline=None, max_examples=150)
settings.load_profile('fixed')

INF = math.inf
LAST_U = 1 - 2**-53
logit = st.one_of(st.sampled_from([-INF, 0., 1., -1., 2.5]), st.floats(-30, 30, width=32))
rows = st.lists(logit, min_size=1, max_size=24).filter(lambda row: max(row) > -INF).map(lambda row: np.array(row, dtype=np.float32))
us = st.one_of(st.sampled_from([0., .25, .5, LAST_U]), st.floats(0, 1, exclude_max=True))


# ---- the random number of a token
def test_uniform_is_a_pure_function_in_the_unit_interval():
    assert uniform(5, 0, 7) == uniform(5, 0, 7)
    for inputs in ((0, 0, 0), (2**64 - 1, 2**64 - 1, 2**64 - 1), (2**64 - 1, 0, 0)): assert 0 <= uniform(*inputs) < 1
    assert (uniform(1, 0, 0) * 2**53).is_integer()

def test_uniform_values_are_fixed():
    assert [round(uniform(5, 0, p), 4) for p in range(6)] == [.8764, .3542, .04, .3028, .3021, .2665]

@pytest.mark.parametrize('inputs, message', [
    ((-1, 0, 0), 'seed=-1 '), ((0, -1, 0), 'choice=-1 '), ((0, 0, 2**64), 'position=18446744073709551616 ')])
def test_uniform_names_what_does_not_fit(inputs, message):
    with pytest.raises(ValueError, match=message): uniform(*inputs)

def test_choices_and_seeds_do_not_overlap():
    "Choice 1 of seed 5 is not choice 0 of seed 6, and three choices differ"
    streams = [[uniform(seed, choice, p) for p in range(50)] for seed in (5, 6) for choice in range(3)]
    assert len({u for stream in streams for u in stream}) == 300

def test_fresh_seeds_differ_and_survive_json():
    seeds = {fresh_seed() for _ in range(200)}
    assert len(seeds) == 200
    assert all(int(float(seed)) == seed and SamplingParams(seed=seed).seed == seed for seed in seeds)


# ---- parameters
def test_defaults():
    p = SamplingParams()
    assert (p.temperature, p.top_k, p.top_p, p.min_p, p.seed, p.max_tokens, p.min_tokens, p.stop, p.stop_token_ids,
            p.include_stop_str_in_output, p.ignore_eos, p.logprobs) == (1., 0, 1., 0., None, 16, 0, (), (), False, False, None)
    assert (p.n, p.presence_penalty, p.frequency_penalty, p.repetition_penalty, p.logit_bias, p.allowed_token_ids, p.bad_words,
            p.prompt_logprobs) == (1, 0., 0., 1., (), None, (), None)

@pytest.mark.parametrize('field, value, message', [
    ('temperature', math.nan, 'temperature=nan must be finite'), ('temperature', INF, 'temperature=inf must be finite'),
    ('temperature', -1, 'temperature=-1 must be at least 0'), ('temperature', '1', "temperature='1' must be a number"),
    ('temperature', None, 'temperature=None must be a number'), ('temperature', True, 'temperature=True must be a number'),
    ('temperature', 10**400, 'must be finite'), ('top_k', -2, 'top_k=-2 must be at least -1'),
    ('top_k', 2., 'top_k=2.0 must be a whole number'), ('top_k', False, 'top_k=False must be'),
    ('top_p', 0, 'top_p=0 must be greater than 0'), ('top_p', -.5, 'top_p=-0.5 must be at least 0'),
    ('top_p', 1.01, 'top_p=1.01 must be at most 1'), ('top_p', math.nan, 'top_p=nan must be finite'),
    ('min_p', -.1, 'min_p=-0.1 must be at least 0'), ('min_p', 2, 'min_p=2 must be at most 1'),
    ('seed', -1, 'seed=-1 must be at least 0'),
    ('seed', 2**64, 'seed=18446744073709551616 must be at most 18446744073709551615'),
    ('seed', 1.5, 'seed=1.5 must be a whole number'), ('seed', True, 'seed=True must be a whole number'),
    ('max_tokens', 0, 'max_tokens=0 must be at least 1'), ('max_tokens', None, 'max_tokens=None must be a whole number'),
    ('min_tokens', -1, 'min_tokens=-1 must be at least 0'), ('min_tokens', 17, 'min_tokens=17 must be at most 16'),
    ('stop', '', r"stop\[0\]='' must have"), ('stop', ['a', ''], r"stop\[1\]='' must have"),
    ('stop', [5], r'stop\[0\]=5 must be a string'), ('stop', 5, 'stop=5 must be a list'),
    ('stop_token_ids', [1, -1], r'stop_token_ids\[1\]=-1 must be at least 0'),
    ('stop_token_ids', 7, 'stop_token_ids=7 must be a list'), ('stop_token_ids', 'ab', "stop_token_ids='ab' must be a list"),
    ('stop_token_ids', [True], r'stop_token_ids\[0\]=True must be'),
    ('include_stop_str_in_output', 1, 'include_stop_str_in_output=1 must be True'),
    ('ignore_eos', None, 'ignore_eos=None must be True'), ('logprobs', 21, 'logprobs=21 must be at most 20'),
    ('logprobs', -1, 'logprobs=-1 must be at least 0'), ('logprobs', True, 'logprobs=True must be a whole number'),
    ('n', 0, 'n=0 must be at least 1'), ('n', 65, 'n=65 must be at most 64'), ('n', 1.5, 'n=1.5 must be a whole number'),
    ('n', True, 'n=True must be'), ('n', None, 'n=None must be'),
    *((name, value, f'{name}={value} must be {bound}') for name in ('presence_penalty', 'frequency_penalty')
      for value, bound in ((-2.01, 'at least -2'), (2.5, 'at most 2'), (math.nan, 'finite'), (INF, 'finite'), (True, 'a number'), (None, 'a number'))),
    ('repetition_penalty', 0, 'repetition_penalty=0 must be greater than 0'), ('repetition_penalty', -1., 'repetition_penalty=-1.0 must be at least 0'),
    ('repetition_penalty', 10.1, 'repetition_penalty=10.1 must be at most 10'), ('repetition_penalty', INF, 'repetition_penalty=inf must be finite'),
    ('repetition_penalty', math.nan, 'repetition_penalty=nan must be finite'), ('repetition_penalty', '1', "repetition_penalty='1' must be a number"),
    ('logit_bias', [1], r'logit_bias=\[1\] must be a dict'), ('logit_bias', 5, 'logit_bias=5 must be a dict'), ('logit_bias', '{}', "logit_bias='{}' must be"),
    ('logit_bias', {-1: 1}, 'logit_bias key=-1 must be at least 0'), ('logit_bias', {'-1': 1}, "logit_bias key='-1' must be a whole number"),
    ('logit_bias', {'a': 1}, "logit_bias key='a' must be"), ('logit_bias', {'': 1}, "logit_bias key='' must be"), ('logit_bias', {'1.0': 1}, "key='1.0'"),
    ('logit_bias', {'٣': 1}, "logit_bias key='٣' must be"), ('logit_bias', {'1' * 5000: 1}, 'must be a whole number'), ('logit_bias', {1.5: 1}, 'key=1.5'),
    ('logit_bias', {True: 1}, 'logit_bias key=True must be'), ('logit_bias', {None: 1}, 'logit_bias key=None'), ('logit_bias', {' 5': 1}, "key=' 5'"),
    ('logit_bias', {5: 100.5}, r'logit_bias\[5\]=100.5 must be at most 100'), ('logit_bias', {5: -101}, r'logit_bias\[5\]=-101 must be at least -100'),
    ('logit_bias', {5: math.nan}, r'logit_bias\[5\]=nan must be finite'), ('logit_bias', {5: '1'}, r"logit_bias\[5\]='1' must be a number"),
    ('logit_bias', {5: None}, r'logit_bias\[5\]=None'), ('logit_bias', {5: True}, r'logit_bias\[5\]=True'), ('logit_bias', {5: 1, '5': 1}, 'has token id 5 twice'),
    ('logit_bias', {5: 1, '05': 1}, 'has token id 5 twice'), ('logit_bias', dict.fromkeys(range(301), 0), 'logit_bias has 301 entries, at most 300'),
    ('allowed_token_ids', [], r'allowed_token_ids=\[\] must have at least 1'), ('allowed_token_ids', (), 'must have at least 1'),
    ('allowed_token_ids', [3, -1], r'allowed_token_ids\[1\]=-1 must be at least 0'), ('allowed_token_ids', ['3'], r"allowed_token_ids\[0\]='3' must be"),
    ('allowed_token_ids', 3, 'allowed_token_ids=3 must be a list'), ('allowed_token_ids', {3: 1}, 'must be a list'),
    ('bad_words', 'abc', "bad_words='abc' must be a list"), ('bad_words', ['a', ''], r"bad_words\[1\]='' must have"), ('bad_words', [5], r'bad_words\[0\]=5 must be a string'),
    ('bad_words', ['a'] * 301, 'bad_words has 301 entries, at most 300'), ('prompt_logprobs', 21, 'prompt_logprobs=21 must be at most 20'),
    ('prompt_logprobs', -1, 'prompt_logprobs=-1 must be at least 0'), ('prompt_logprobs', True, 'prompt_logprobs=True must be a whole number')])
def test_refused(field, value, message):
    with pytest.raises(ValueError, match=message): SamplingParams(**{field: value})

def test_edges_are_taken_and_stored_in_one_form():
    p = SamplingParams(temperature=np.float32(.5), top_k=np.int64(-1), top_p=1, min_p=1, seed=2**64 - 1, max_tokens=3, min_tokens=3,
                       stop=['a', 'b'], stop_token_ids=(0,), logprobs=20)
    assert (p.temperature, p.top_k, p.top_p, p.min_p, p.min_tokens, p.stop, p.stop_token_ids) == (.5, 0, 1., 1., 3, ('a', 'b'), (0,))
    assert [type(x) for x in (p.temperature, p.top_k, p.top_p, p.seed)] == [float, int, float, int]
    assert SamplingParams(stop='ab').stop == ('ab',)
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()
    assert SamplingParams(top_k=0) == SamplingParams(top_k=-1)
    p = SamplingParams(n=64, presence_penalty=-2, frequency_penalty=2, repetition_penalty=10, logit_bias={'12': -100, 3: 100, np.int64(5): 0},
                       allowed_token_ids=(5, 3, 5), bad_words=['a'] * 300, prompt_logprobs=0)
    assert (p.n, p.presence_penalty, p.frequency_penalty, p.repetition_penalty, p.logit_bias, p.allowed_token_ids, len(p.bad_words), p.prompt_logprobs) == (
        64, -2., 2., 10., ((3, 100.), (5, 0.), (12, -100.)), (3, 5), 300, 0)
    assert {type(x) for pair in p.logit_bias for x in pair} == {int, float} and type(p.presence_penalty) is float
    assert len(SamplingParams(logit_bias=dict.fromkeys(range(300), 1)).logit_bias) == 300
    assert SamplingParams(repetition_penalty=1e-9, prompt_logprobs=20).prompt_logprobs == 20
    assert SamplingParams(logit_bias={}, bad_words=[]) == SamplingParams(logit_bias=None, bad_words=None, allowed_token_ids=None) == SamplingParams()

def test_frozen_hashable_and_replaceable():
    p = SamplingParams(stop=['a'])
    with pytest.raises(FrozenInstanceError): p.seed = 3
    assert hash(p) == hash(SamplingParams(stop='a')) and replace(p, seed=3).seed == 3
    p = SamplingParams(logit_bias={'5': 1.5, 2: -3}, allowed_token_ids=[2, 5], bad_words=['x'])
    assert hash(p) == hash(SamplingParams(logit_bias={2: -3., 5: 1.5}, allowed_token_ids=[5, 2], bad_words=('x',)))
    assert replace(p, n=2) == SamplingParams(logit_bias={2: -3, 5: 1.5}, allowed_token_ids=[2, 5], bad_words=['x'], n=2)
    with pytest.raises(ValueError, match='max_tokens=0'): replace(p, max_tokens=0)
    with pytest.raises(TypeError, match='temprature'): SamplingParams(temprature=1.)

@pytest.mark.parametrize('fields, message', [
    (dict(stop_token_ids=[3, 10]), 'stop_token_ids has token id 10, it must be at most 9'), (dict(logit_bias={'999999': 1}), 'logit_bias has token id 999999,'),
    (dict(allowed_token_ids=[10**12, 3]), 'allowed_token_ids has token id 1000000000000,'), (dict(logit_bias={0: 1, 10: -100}), 'logit_bias has token id 10,')])
def test_token_ids_outside_the_vocabulary(fields, message):
    with pytest.raises(ValueError, match=message): check_token_ids(SamplingParams(**fields), 10)
    check_token_ids(SamplingParams(**fields), 10**12 + 1)

def test_token_ids_inside_the_vocabulary():
    check_token_ids(SamplingParams(), 1)
    check_token_ids(SamplingParams(stop_token_ids=[9], logit_bias={9: 1}, allowed_token_ids=[9, 0]), 10)


# ---- the dials, against plain Python over sorted lists and exact fractions
def best_spec(row, n): return sorted(range(len(row)), key=lambda i: (-row[i], i))[:n]
def masses(row): return [Fraction(math.exp(x - max(row))) if x > -INF else Fraction(0) for x in row]
def kept(row): return {i for i, x in enumerate(row.tolist()) if x > -INF}

def nucleus_spec(row, top_p):
    "The smallest set of best tokens that reaches `top_p`; None if rounding could decide"
    mass, reached, ids = masses(row), Fraction(0), set()
    target = Fraction(top_p) * sum(mass)
    for i in best_spec(row, len(row)):
        ids.add(i)
        reached += mass[i]
        if abs(reached - target) < Fraction(1, 10**12): return None
        if reached > target: return ids
    return None

@given(rows, st.integers(1, 30))
def test_best_ids(row, n): assert best_ids(row, n).tolist() == best_spec(row.tolist(), n)

@given(rows, st.integers(1, 30))
def test_keep_only(row, k):
    out = keep_only(row, best_ids(row, k))
    assert kept(out) == set(best_spec(row.tolist(), k)) & kept(row)
    assert all(out[i] == row[i] for i in kept(out))

@given(rows, st.one_of(st.sampled_from([.1, .5, .9, .999]), st.floats(1e-9, 1, exclude_max=True)))
def test_top_p(row, top_p):
    expected = nucleus_spec(row.astype(np.float64).tolist(), top_p)
    assume(expected is not None)
    out = keep_top_p(row, top_p)
    assert kept(out) == expected & kept(row)
    assert all(out[i] == row[i] for i in kept(out))

@pytest.mark.parametrize('top_p', [5e-324, 1e-300, 1e-9, .25, .5, .75, LAST_U])
def test_top_p_on_equals_keeps_the_lowest_ids(top_p):
    for size in (4, 64, 4096):
        assert kept(keep_top_p(np.zeros(size), top_p)) == set(range(max(1, math.ceil(Fraction(top_p) * size))))

@given(rows, st.floats(.01, 1))
def test_min_p(row, min_p):
    ratios = [math.exp(x - max(row.tolist())) if x > -INF else 0. for x in row.tolist()]
    assume(all(abs(r - min_p) > 1e-6 for r in ratios))
    assert kept(keep_min_p(row, min_p)) == {i for i, r in enumerate(ratios) if r > min_p}

@given(rows)
def test_open_dials_change_nothing(row):
    for out in (keep_min_p(row, 0.), keep_top_p(row, 1.)): assert out is row
    for u in (0., .3, .6, LAST_U):
        assert len({sample(row, SamplingParams(top_k=k), u) for k in (0, -1, row.size, row.size + 1, 10**9)}) == 1
    assert kept(keep_min_p(row, 1.)) == {i for i in range(row.size) if row[i] == row.max()}
    assert kept(keep_top_p(row, 1e-9)) == {int(row.argmax())}

@given(rows, us)
def test_draw(row, u):
    mass = masses(row.astype(np.float64).tolist())
    target, behind = Fraction(u) * sum(mass), Fraction(0)
    for i, m in enumerate(mass):
        assume(u == 0 or abs(behind + m - target) > Fraction(1, 10**12) or i == len(mass) - 1)
        behind += m
        if behind > target: break
    assert draw(row, u) == i

@pytest.mark.parametrize('u', [-.1, 1., math.nan])
def test_draw_refuses_what_is_not_in_the_interval(u):
    with pytest.raises(ValueError, match='must be at least 0 and less than 1'): draw(np.zeros(3), u)

def test_no_mass_is_lost_at_the_ends_of_the_bar():
    rng = np.random.default_rng(0)
    for size in (1, 2, 7, 1000):
        row = rng.normal(size=size).astype(np.float32) * 20
        out = np.concatenate([[-INF], row, [-INF]]).astype(np.float32)
        assert draw(out, 0.) == 1
        ids = {draw(out, u) for u in np.linspace(0, LAST_U, 200)}
        assert min(ids) >= 1 and max(ids) <= size


# ---- the sampler
def sample_spec(row, params, u):
    "Temperature, then each dial on what is left, then a walk along the bar; None if rounding could decide"
    best = best_spec(row, params.top_k or len(row))  # of the logits as they came: rounding may make ties later
    row = [(x - max(row)) / params.temperature for x in row]
    if params.min_p: row = [x if math.exp(x) >= params.min_p else -INF for x in row]
    row = [x if i in best else -INF for i, x in enumerate(row)]
    if params.top_p < 1:
        ids = nucleus_spec(row, params.top_p)
        if ids is None: return None
        row = [x if i in ids else -INF for i, x in enumerate(row)]
    mass, behind = masses(row), Fraction(0)
    for i, m in enumerate(mass):
        behind += m
        if abs(behind - Fraction(u) * sum(mass)) < Fraction(1, 10**12) and u > 0: return None
        if behind > Fraction(u) * sum(mass): return i

@given(rows, us, st.sampled_from([.3, .7, 1., 2.]), st.sampled_from([0, 1, 3, 50]), st.sampled_from([.2, .8, .95, 1.]),
       st.sampled_from([0., .013, .317]))
@settings(max_examples=400)
def test_sample(row, u, temperature, top_k, top_p, min_p):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = sample_spec(row.astype(np.float64).tolist(), params, u)
    assume(expected is not None)
    before = row.copy()
    assert sample(row, params, u) == expected
    assert np.array_equal(row, before)

def test_order_of_the_dials():
    row = np.log(np.array([.4, .3, .2, .1])).astype(np.float32)
    ids = lambda **fields: {sample(row, SamplingParams(**fields), i / 100) for i in range(100)}
    assert ids(top_k=2, top_p=.5) == {0}             # .4 of .7 is more than half; of the whole it would not be
    assert ids(min_p=.7, top_p=.5) == {0}            # min_p before top_p, for the same reason
    assert ids(temperature=4., min_p=.7) == {0, 1, 2, 3}  # temperature before min_p
    assert ids(min_p=.7) == {0, 1}

@given(rows, us)
def test_greedy_three_ways(row, u):
    lowest = row.tolist().index(max(row.tolist()))
    for fields in (dict(temperature=0), dict(temperature=1e-6), dict(temperature=0, top_k=3, top_p=.1), dict(top_k=1), dict(top_p=1e-9)):
        assert sample(row, SamplingParams(**fields), u) == lowest

@pytest.mark.parametrize('temperature', [1e-5, 1e-4, 1e-2, 1e300])
def test_extreme_temperatures(temperature):
    row = np.array([-3e38, 3e38, 1., -INF], dtype=np.float32)
    with np.errstate(all='raise', under='ignore'):
        ids = {sample(row, SamplingParams(temperature=temperature), u) for u in (0., .5, LAST_U)}
    assert ids == ({0, 1, 2} if temperature > 1 else {1})

def test_all_out_but_one():
    row = np.full(100, -INF, dtype=np.float32)
    row[63] = -5
    for fields in ({}, dict(top_k=5), dict(top_p=.5), dict(min_p=.5), dict(temperature=0), dict(top_k=200, top_p=.999, min_p=.001)):
        assert {sample(row, SamplingParams(**fields), u) for u in (0., .5, LAST_U)} == {63}

@pytest.mark.parametrize('value, message', [
    (math.nan, '1 of 4 logits are NaN, the first at token id 2'), (INF, r'token id 2 of 4 is \+inf')])
@pytest.mark.parametrize('temperature', [0., 1.])
def test_broken_rows(value, message, temperature):
    row = np.array([0, 1, value, -INF], dtype=np.float32)
    with pytest.raises(BadLogits, match=message): sample(row, SamplingParams(temperature=temperature), .5)
    with pytest.raises(BadLogits, match=message): sample(row, SamplingParams(temperature=temperature), .5, dict(banned=lambda row: ban(row, [2])))
    with pytest.raises(BadLogits, match=message): logprobs_of(row, 0)

@pytest.mark.parametrize('temperature', [0., 1.])
def test_nothing_left(temperature):
    params = SamplingParams(temperature=temperature)
    with pytest.raises(BadLogits, match='all 3 logits are -inf$'): sample(np.full(3, -INF, dtype=np.float32), params, .5)
    for fields, message in ((dict(logit_bias=dict.fromkeys(range(3), -100)), 'logit_bias'), (dict(allowed_token_ids=[1], bad_words=['b']), 'allowed_token_ids, bad_words'),
                            (dict(logit_bias={0: 100}, min_tokens=1), 'logit_bias, min_tokens')):
        stages = logit_stages(SamplingParams(**fields), [0], [], 0, [([], 1)] if 'bad_words' in fields else [])
        with pytest.raises(BadLogits, match=f'all 3 logits are -inf after {message}$'): sample(np.zeros(3, dtype=np.float32), params, .5, stages)

@pytest.mark.parametrize('shape', [(0,), (1, 3), ()])
def test_not_a_row(shape):
    with pytest.raises(ValueError, match='must be one row'): sample(np.zeros(shape, dtype=np.float32), SamplingParams(), .5)

@pytest.mark.parametrize('temperature', [1e-5, 1., 1e300])
def test_rounding_makes_no_ties(temperature):
    "Logits that differ by less than the temperature's rounding keep their order"
    row = np.array([-1e-30, 1e-30, 0.], dtype=np.float32)
    for fields in (dict(top_k=1, temperature=temperature), dict(temperature=0)):
        assert {sample(row, SamplingParams(**fields), u) for u in (0., LAST_U)} == {1}
    row = np.array([1., -1e-27, 0., -5.], dtype=np.float32)
    assert {sample(row, SamplingParams(top_k=2, temperature=temperature), u) for u in (0., .999, LAST_U)} <= {0, 2}
    assert [logprobs_of(row, i).rank for i in range(4)] == [1, 3, 2, 4]

@given(rows, us, st.sets(st.integers(-3, 40), max_size=6), st.sampled_from([0., 1.]))
def test_banned(row, u, banned, temperature):
    out = row.copy()
    out[[i for i in banned if 0 <= i < row.size]] = -INF
    assume(out.max() > -INF)
    before = row.copy()
    params = SamplingParams(temperature=temperature)
    assert sample(row, params, u, dict(banned=lambda row: ban(row, iter(banned)))) == sample(out, params, u)
    assert np.array_equal(row, before)
    assert np.array_equal(ban(row, banned), out) and (ban(row, {-1, row.size}) is row)

@pytest.mark.parametrize('fields', [dict(temperature=.7), dict(top_k=40), dict(top_p=.9), dict(min_p=.05),
                                    dict(temperature=1.3, top_k=300, top_p=.95, min_p=.01)])
def test_where_a_row_lies_in_memory_does_not_matter(fields):
    "A row alone, at odd offsets, as a strided column, read only, and in the middle of a batch"
    size, rng = 1003, np.random.default_rng(1)
    row = rng.normal(size=size).astype(np.float32) * 3
    params, points = SamplingParams(**fields), [uniform(0, 0, p) for p in range(40)]
    expected = [sample(row, params, u) for u in points], logprobs_of(row, 17, top=20), apply_temperature(row, .7).tobytes()
    places = []
    for offset in (0, 1, 2, 3, 5, 7, 9, 15):
        flat = rng.normal(size=size + 64).astype(np.float32)
        flat[offset:offset + size] = row
        places.append(flat[offset:offset + size])
    batch = rng.normal(size=(5, size)).astype(np.float32)
    batch[3] = row
    columns = rng.normal(size=(size, 3)).astype(np.float32)
    columns[:, 1] = row
    locked = row.copy()
    locked.flags.writeable = False
    for place in [*places, batch[3], columns[:, 1], locked]:
        got = [sample(place, params, u) for u in points], logprobs_of(place, 17, top=20), apply_temperature(place, .7).tobytes()
        assert got == expected

@pytest.mark.parametrize('fields, shares', [
    ({}, [.05, .40, .10, .25, .05, .15]), (dict(top_k=3), [0, .5, 0, .3125, 0, .1875]), (dict(top_p=.6), [0, .4/.65, 0, .25/.65, 0, 0]),
    (dict(min_p=.3), [0, .5, 0, .3125, 0, .1875]), (dict(temperature=.5), [w / .26 for w in (.0025, .16, .01, .0625, .0025, .0225)])])
def test_distribution(fields, shares):
    "20,000 hashed numbers reproduce the probabilities: χ² stays below its 0.999 quantile, 20.5 for 5 degrees of freedom"
    row = np.log([.05, .40, .10, .25, .05, .15]).astype(np.float32)
    params = SamplingParams(**fields)
    counts = np.bincount([sample(row, params, uniform(7, 1, p)) for p in range(20_000)], minlength=6)
    expected = 20_000 * np.array(shares)
    live = expected > 0
    assert counts[~live].sum() == 0
    assert ((counts - expected)[live]**2 / expected[live]).sum() < 20.5

def test_unseeded_requests_differ():
    row, params = np.zeros(1000, dtype=np.float32), SamplingParams()
    first, second = (([sample(row, params, uniform(seed, 0, p)) for p in range(8)]) for seed in (fresh_seed(), fresh_seed()))
    assert first != second

def test_a_real_vocabulary():
    rng = np.random.default_rng(2)
    row = rng.normal(size=49_152).astype(np.float32) * 3
    shares = np.exp(row.astype(np.float64))
    order = np.argsort(-row, kind='stable')
    reached = np.cumsum(shares[order]) / shares.sum()
    nucleus = set(order[:int((reached < .9).sum()) + 1].tolist())
    assert kept(keep_top_p(row, .9)) == nucleus and 50 < len(nucleus) < 10_000
    assert set(best_ids(row, 50).tolist()) == set(best_spec(row.tolist(), 50))


# ---- logprobs
@given(rows, st.integers(0, 23), st.integers(0, 20))
def test_logprobs(row, token_id, top):
    assume(token_id < row.size)
    values = row.astype(np.float64).tolist()
    total = math.log(math.fsum(math.exp(x - max(values)) for x in values))
    expected = [max(x - max(values) - total, -9999.) for x in values]
    got = logprobs_of(row, token_id, top)
    order = best_spec(values, len(values))
    assert got.token_id == token_id and got.rank == order.index(token_id) + 1
    assert [i for i, _ in got.top] == order[:top]
    assert got.logprob == pytest.approx(expected[token_id], abs=1e-12)
    assert [p for _, p in got.top] == pytest.approx([expected[i] for i in order[:top]], abs=1e-12)
    assert all(math.isfinite(p) for p in (got.logprob, *(p for _, p in got.top)))
    assert token_id not in dict(got.top) or dict(got.top)[token_id] == got.logprob

def test_logprobs_name_no_row_without_a_token():
    row = np.array([0, 1, 5, 6], dtype=np.float32)
    got, whole = logprobs_of(row, 0, 3, num_named=2), logprobs_of(row, 0, 4)
    assert (got.logprob, got.rank) == (whole.logprob, 4) and got.top == whole.top[2:]
    assert logprobs_of(row, 3, 1, num_named=2).logprob == whole.top[0][1]

def test_logprobs_are_plain_numbers_and_finite():
    got = logprobs_of(np.array([0, -INF, -3e38], dtype=np.float32), 1, top=3)
    assert got == TokenLogprobs(1, -9999., 3, ((0, 0.), (2, -9999.), (1, -9999.)))
    assert {type(x) for x in (got.token_id, got.rank, *(i for i, _ in got.top))} == {int}
    assert {type(p) for p in (got.logprob, *(p for _, p in got.top))} == {float}

@pytest.mark.parametrize('token_id', [-1, 3])
def test_logprobs_of_no_token(token_id):
    with pytest.raises(ValueError, match=f'token_id={token_id} must be from 0 to 2'): logprobs_of(np.zeros(3, dtype=np.float32), token_id)


# ---- when to stop
@pytest.mark.parametrize('ids, fields, expected', [
    ([10, 0], {}, ('stop', None)), ([10, 42], dict(stop_token_ids=[42]), ('stop', 42)), ([42, 10], dict(stop_token_ids=[42]), None),
    ([0, 10], {}, None), ([10, 11], dict(max_tokens=2), ('length', None)), ([10, 0], dict(max_tokens=2), ('stop', None)),
    ([10, 0], dict(ignore_eos=True), None), ([10, 0], dict(ignore_eos=True, stop_token_ids=[0]), ('stop', 0)),
    ([10, 0], dict(min_tokens=3), None), ([10, 11, 0], dict(min_tokens=3), ('stop', None)),
    ([10, 42], dict(min_tokens=3, stop_token_ids=[42]), None),
    ([10, 0], dict(min_tokens=2, max_tokens=2), ('stop', None)), ([10, 0], dict(ignore_eos=True, max_tokens=2), ('length', None)),
    ([10], dict(max_tokens=1), ('length', None)), ([], {}, None)])
def test_finish_reason(ids, fields, expected):
    assert finish_reason(ids, SamplingParams(**fields), 0, 5 + len(ids), 64) == expected

def test_finish_at_the_end_of_the_context():
    params = SamplingParams(min_tokens=9)
    assert finish_reason([10, 11], params, 0, 7, 8) is None
    assert finish_reason([10, 11], params, 0, 8, 8) == ('length', None)
    assert finish_reason([10, 0], SamplingParams(), 0, 8, 8) == ('stop', None)

def test_without_an_eos_token():
    assert finish_reason([10, 0], SamplingParams(), None, 4, 8) is None
    assert banned_until_min_tokens(SamplingParams(min_tokens=1), None, 0) == ()

def test_min_tokens_bans_the_end():
    "A model that always wants to end is kept going for exactly `min_tokens`"
    row = np.array([9, 8, 0, 1], dtype=np.float32)
    for fields, expected in ((dict(min_tokens=3), [1, 1, 1, 0]), (dict(min_tokens=2, stop_token_ids=[1]), [3, 3, 0]), ({}, [0])):
        params, ids = SamplingParams(temperature=0, **fields), []
        while not finish_reason(ids, params, 0, len(ids), 64):
            ids.append(sample(row, params, 0., logit_stages(params, [5], ids, 0)))
        assert ids == expected


# ---- what a request asks of its rows, from lists of tokens
words = st.lists(st.text('abc ', min_size=1, max_size=3), max_size=3)
lists = st.lists(st.integers(0, 7), max_size=12)
biases = st.dictionaries(st.integers(0, 7), st.one_of(st.sampled_from([-100, 100, 1, -99, 99.5]), st.floats(-100, 100, width=16)), max_size=4)
wide = st.lists(logit, min_size=8, max_size=8).filter(lambda row: max(row) > -INF).map(lambda row: np.array(row, dtype=np.float32))
steering = st.fixed_dictionaries({}, optional=dict(
    presence_penalty=st.sampled_from([.5, -1., 2.]), frequency_penalty=st.sampled_from([.25, -.5, 2.]), repetition_penalty=st.sampled_from([1.2, .8, 10.]),
    logit_bias=biases, allowed_token_ids=st.lists(st.integers(0, 7), min_size=1, max_size=6), bad_words=words, min_tokens=st.integers(0, 6),
    stop_token_ids=st.lists(st.integers(0, 7), max_size=2), ignore_eos=st.booleans()))

def encode(text): return ['abc '.index(c) for c in text]

def stages_spec(row, params, prompt, output, eos):
    "One token and one question after the other; nothing but the two lists"
    forms = [form for word in params.bad_words for bare in [word.lstrip() or word] for form in (encode(bare), encode(' ' + bare))]
    ends = ([] if params.ignore_eos else [eos]) + list(params.stop_token_ids)
    bias = dict(params.logit_bias)
    def adjusted(i, x):
        if params.allowed_token_ids is not None and i not in params.allowed_token_ids: return -INF
        if any(form == (output + [i])[-len(form):] for form in forms): return -INF
        if bias.get(i) == -100 or 100 in bias.values() and bias.get(i) != 100: return -INF
        if bias.get(i, 0) != 100: x += bias.get(i, 0)
        if i in prompt or i in output: x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        x -= params.frequency_penalty * output.count(i)
        x -= params.presence_penalty * (i in output)
        return -INF if len(output) < params.min_tokens and i in ends else x
    return [adjusted(i, float(x)) for i, x in enumerate(row)]

def through(row, stages):
    for stage in stages.values():
        before = row.copy()
        new = stage(row)
        assert np.array_equal(row, before)
        row = new
    return row

@given(wide, steering, lists, lists, st.sampled_from([None, 0, 7]))
@settings(max_examples=600)
def test_stages(row, fields, prompt, output, eos):
    "Behaviours 38, 48 and 51: equal to the specification, to the last bit, in the order of the list; and greedy takes its best"
    params = SamplingParams(temperature=0, **fields)
    stages = logit_stages(params, prompt, output, eos, bad_sequences(params.bad_words, encode))
    expected = stages_spec(row, params, prompt, output, eos)
    assert through(row, stages).tolist() == expected
    if max(expected) > -INF: assert sample(row, params, .5, stages) == expected.index(max(expected))
    else:
        with pytest.raises(BadLogits, match='all 8 logits are -inf after '): sample(row, params, .5, stages)

@given(steering, lists, lists, st.lists(wide, min_size=1, max_size=4), st.integers(1, 20))
@settings(max_examples=300)
def test_counts_are_only_a_shortcut(fields, prompt, output, rows, every):
    "Stages kept from the first token on, asked at odd times, equal stages made anew: before and after a preemption, behind any draft"
    params = SamplingParams(**fields)
    sequences, kept_output = bad_sequences(params.bad_words, encode), []
    kept = logit_stages(params, prompt, kept_output, 7, sequences)
    for i, token_id in enumerate(output):
        kept_output.append(token_id)
        if i % every: continue
        new = logit_stages(params, list(prompt), list(kept_output), 7, sequences)
        row = rows[i % len(rows)]
        assert through(row, kept).tolist() == through(row, new).tolist()

def test_nothing_asked_nothing_done():
    assert logit_stages(SamplingParams(), [1], [2], 0) == {}
    row = np.array([0, 1, 2], dtype=np.float32)
    for fields, sequences in ((dict(min_tokens=2), ()), (dict(bad_words=['x']), [([5], 1)])):
        assert through(row, logit_stages(SamplingParams(**fields), [1], [2, 2], 0, sequences)) is row
    assert logit_stages(SamplingParams(temperature=0, top_k=3, n=5, logprobs=1, prompt_logprobs=1, stop=['x'], seed=1), [1], [2], 0) == {}

def test_the_order_of_stages():
    every = dict(allowed_token_ids=[1], bad_words=['a'], logit_bias={1: 1}, repetition_penalty=2, frequency_penalty=1, presence_penalty=1, min_tokens=1)
    assert list(logit_stages(SamplingParams(**every), [], [], 0, [([], 0)])) == list(every)

@pytest.mark.parametrize('bias, expected', [
    ({0: -100}, [-INF, 2, -3]), ({0: 100}, [1, -INF, -INF]), ({0: 100, 2: 100}, [1, -INF, -3]), ({0: 100, 1: 50}, [1, -INF, -INF]), ({0: 100, 1: -100}, [1, -INF, -INF]),
    ({0: 99.9}, [100.9, 2, -3]), ({0: -99.9}, [-98.9, 2, -3]), ({2: 4.5}, [1, 2, 1.5]), ({0: 0}, [1, 2, -3])])
def test_bias(bias, expected):
    "Behaviour 48"
    row = np.array([1, 2, -3], dtype=np.float32)
    assert through(row, logit_stages(SamplingParams(logit_bias=bias), [], [])).tolist() == expected
    assert apply_bias(row, np.array(list(bias)), np.array([*bias.values()], float)).tolist() == expected

def test_a_forced_token_comes_whatever_the_model_says():
    "Behaviour 48: −100 never, +100 always, at any temperature and in 200 draws"
    row = np.array([40, -80, 0, 30], dtype=np.float32)
    for fields in ({}, dict(temperature=0), dict(temperature=100.), dict(top_k=1), dict(top_p=.1)):
        forced, without = (logit_stages(SamplingParams(logit_bias=bias), [], []) for bias in ({1: 100}, {0: -100}))
        assert {sample(row, SamplingParams(**fields), uniform(1, 0, p), forced) for p in range(200)} == {1}
        assert 0 not in {sample(row, SamplingParams(**fields), uniform(1, 0, p), without) for p in range(200)}

def test_a_tiny_repetition_penalty_overflows_for_its_request_alone():
    row = np.array([1, 2, -3], dtype=np.float32)
    with pytest.raises(BadLogits, match=r'the logit at token id 0 of 3 is \+inf after repetition_penalty'):
        sample(row, SamplingParams(), .5, logit_stages(SamplingParams(repetition_penalty=5e-324), [0], []))

def test_repetition_reads_signs():
    row = np.array([4, -4, 0, -INF, 4], dtype=np.float32)
    seen = np.array([True, True, True, True, False])
    assert penalize_repetition(row, seen, 2.).tolist() == [2, -8, 0, -INF, 4]
    assert penalize_repetition(row, seen, .5).tolist() == [8, -2, 0, -INF, 4]

def test_counts_pass_over_prompt_ids_that_have_no_row():
    counts = TokenCounts([2, 9, 4, 3], [1, 1]).catch_up(4)
    assert (counts.counts.tolist(), counts.seen.tolist()) == ([0, 2, 0, 0], [False, True, True, True])

def test_counts_work_for_the_new_token_only():
    "What a token costs does not depend on how many there are: of the lists only new entries are read"
    output = Watched()
    params = SamplingParams(repetition_penalty=1.5, frequency_penalty=.5, presence_penalty=.5, bad_words=['ab', 'ccb', 'b'], min_tokens=3)
    stages = logit_stages(params, [1], output, 0, bad_sequences(params.bad_words, encode))
    for n in range(60):
        output.read.clear()
        through(np.arange(8, dtype=np.float32), stages)
        assert sum(output.read) <= 12, (n, output.read)
        output.append(n % 8)

def test_bad_words_in_both_forms():
    "With and without a blank, whatever was given; none twice, none that can't be written"
    def encode(text):
        if '?' in text: raise ValueError('?')
        return [1000] if text == ' cat' else [ord(c) for c in text]
    assert bad_sequences(('cat',), encode) == bad_sequences((' cat',), encode) == bad_sequences(('cat', '  cat'), encode) == [([99, 97], 116), ([], 1000)]
    assert bad_sequences(('a?',), encode) == [] and bad_sequences((), encode) == []
    assert bad_sequences((' ',), encode) == [([], 32), ([32], 32)]
    assert bad_sequences(('x',), lambda text: []) == []

@pytest.mark.parametrize('output, expected', [([], [5]), ([1], [5]), ([1, 2], [3, 5]), ([1, 2, 3], [5]), ([0, 1, 2], [3, 5]), ([2], [5]), ([1, 2, 2], [5]), ([2, 1, 2, 1, 2], [3, 5])])
def test_completing(output, expected): assert completing(output, [([1, 2], 3), ([], 5), ([1] * 9, 4)]) == expected

@given(words.filter(len), st.lists(st.integers(0, 3), max_size=6), st.integers(0, 10**6))
def test_no_bad_word_is_ever_written(bad_words, prompt, seed):
    "Behaviour: from any distribution the output never holds a bad word, as tokens and so as text"
    params, output = SamplingParams(bad_words=bad_words), []
    stages = logit_stages(params, prompt, output, None, bad_sequences(params.bad_words, encode))
    for position in range(30):
        try: output.append(sample(np.zeros(4, np.float32), params, uniform(seed, 0, position), stages))
        except BadLogits: break
        assert not any((word.lstrip() or word) in ''.join('abc '[i] for i in output) for word in bad_words)

def test_penalties_break_a_loop():
    "Behaviour 51: a model that always wants the same token gives way after as many times as the penalties say"
    row = np.array([3, 2, 0, -9], dtype=np.float32)
    for fields, expected in (({}, [0] * 6), (dict(presence_penalty=1.5), [0, 1, 0, 0, 0, 0]), (dict(frequency_penalty=.4), [0, 0, 0, 1, 0, 1]),
                             (dict(repetition_penalty=2.), [0, 1, 0, 0, 0, 0]), (dict(frequency_penalty=-1), [0] * 6)):
        output = []
        stages = logit_stages(SamplingParams(**fields), [], output)
        for _ in range(6): output.append(sample(row, SamplingParams(temperature=0), 0., stages))
        assert output == expected, fields
    assert sample(row, SamplingParams(temperature=0), 0., logit_stages(SamplingParams(repetition_penalty=2.), [0], [])) == 1
    assert sample(row, SamplingParams(temperature=0), 0., logit_stages(SamplingParams(frequency_penalty=2., presence_penalty=2.), [0], [])) == 0


# ---- stop strings
def stop_spec(text, stop, include_stop):
    "Read one character at a time until a stop is complete"
    for end in range(len(text) + 1):
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete: return text[:end - (0 if include_stop else len(max(complete, key=len)))], max(complete, key=len)
    return text, None

def shown(pieces, stop, include_stop=False):
    checker, texts = StopChecker(stop, include_stop), []
    for piece in pieces:
        text, matched = checker.push(piece)
        assert matched == checker.matched
        texts.append(text)
    return [*texts, checker.flush()], checker.matched

short = st.text('ab\né', min_size=1, max_size=5)

@given(st.lists(st.text('ab\né', max_size=6), max_size=10), st.lists(short, max_size=4).map(tuple), st.booleans())
@settings(max_examples=1000)
def test_any_cut_shows_the_same(pieces, stop, include_stop):
    texts, matched = shown(pieces, stop, include_stop)
    assert (''.join(texts), matched) == stop_spec(''.join(pieces), stop, include_stop)

@given(st.lists(st.text('ab', min_size=1, max_size=4), min_size=1, max_size=8),
       st.lists(st.text('ab', min_size=1, max_size=5), min_size=1, max_size=3).map(tuple))
@settings(max_examples=500)
def test_holds_no_more_than_it_must(pieces, stop):
    "What is held at any moment is the longest ending that some stop string begins with"
    checker, text, sent = StopChecker(stop), '', ''
    for piece in pieces:
        sent, text = sent + checker.push(piece)[0], text + piece
        if checker.matched: return
        must_hold = max(n for n in range(len(text) + 1) if n == 0 or any(s.startswith(text[-n:]) for s in stop))
        assert sent == text[:len(text) - must_hold]

@pytest.mark.parametrize('pieces, stop, expected, matched', [
    (['DEF', 'G', 'HI', 'J tail', 'more'], ('DEFGHIJ',), ['', '', '', '', '', ''], 'DEFGHIJ'),
    (['DEF', 'G', 'X'], ('DEFGHIJ',), ['', '', 'DEFGX', ''], None),
    (['text', 'DEF', 'G'], ('DEFGHIJ',), ['text', '', '', 'DEFG'], None),
    (['say stop now', ' or not'], ('stop',), ['say ', '', ''], 'stop'),
    (['the end'], ('end',), ['the ', ''], 'end'),
    (['aaa', 'b'], ('aab',), ['a', '', ''], 'aab'),
    (['xDEFG'], ('DEFG', 'EF'), ['xD', ''], 'EF'),
    (['xDEF'], ('EF', 'DEF'), ['x', ''], 'DEF'),
    (['a', '', 'b'], (), ['a', '', 'b', ''], None),
    (['naï', 've 🙂', '🙃.'], ('🙂🙃',), ['naï', 've ', '', ''], '🙂🙃')])
def test_stop_strings(pieces, stop, expected, matched): assert shown(pieces, stop) == (expected, matched)

def test_including_the_stop_holds_nothing():
    assert shown(['abc', 'DE', 'F', 'GH'], ('EFG',), include_stop=True) == (['abc', 'DE', 'F', 'G', ''], 'EFG')

def test_flush_twice_and_after_a_match():
    checker = StopChecker(('stop',))
    assert (checker.push('st'), checker.flush(), checker.flush()) == (('', None), 'st', '')
    checker = StopChecker(('stop',))
    assert (checker.push('a stop'), checker.flush(), checker.push('b')) == (('a ', 'stop'), '', ('', 'stop'))
