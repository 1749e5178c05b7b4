"""The same bits under any schedule: every row of logits, token and logprob, along each axis that a schedule can vary

    python -m pytest tests/test_determinism.py              a small grid
    python -m pytest -m slow tests/test_determinism.py      the whole one
"""
import copy
import random
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from conftest import GPT2, LLAMA, toy_model
from same_bits import alone, force_out, num_events, together, workload

from minigpt import kernels
from minigpt.engine import Engine, EngineConfig
from minigpt.kernels import OneSequence, PackedLinear, PagedKVCache, TiledLinear, linear_kinds, prepare_for_inference
from minigpt.kv_cache import generate
from minigpt.model import swiglu
from minigpt.sampling import SamplingParams

CONTEXT = 96
WIDE = dict(n_embd=768, n_head=12, n_layer=1)  # where `F.linear` gives one row other bits than four, and a row of the MLP is longer than 1024
DIALS = {'llama': LLAMA, 'gpt2': GPT2, 'wide llama': LLAMA | WIDE | dict(n_kv_head=4, n_layer=2), 'wide gpt2': GPT2 | WIDE | dict(n_layer=2)}
SMALL = dict(sizes=(1, 3, 8), seats=(0, 2, 7), chunks=(1, 7, None), edges=(0, 2, 5), every=(1, 3), cuts=(1, 9), block_sizes=(4, 16))
FULL = dict(sizes=range(1, 9), seats=range(8), chunks=(1, 2, 7, 16, 64, None), edges=range(7), every=(1, 2, 3, 5, 8), cuts=range(1, 16), block_sizes=(4, 8, 16, 32))
GRIDS = {'small': SMALL, 'full': FULL}


def plain_model(name): return toy_model(**DIALS[name] | dict(max_seq_len=CONTEXT))


@pytest.fixture(scope='module')
def ready():
    "Prepared models by family and choice of kernels, made when first asked for"
    made = {}
    def get(name, wish):
        if (name, wish) not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv('MINIGPT_KERNELS', wish)
                made[name, wish] = prepare_for_inference(copy.deepcopy(plain_model(name)))
        return made[name, wish]
    return get


@pytest.fixture(autouse=True)
def one_thread():
    kernels.set_threads(1)
    yield
    kernels.set_threads(1)


# ---- the axes: each yields (case, what was found, what was wanted)
def request(rng, num_tokens, seed, **params):
    return [rng.randrange(256) for _ in range(num_tokens)], SamplingParams(**dict(max_tokens=6, logprobs=2, seed=seed, ignore_eos=True) | params)


def needles(seed=0):
    "Greedy, drawn, and three choices of one prompt; 45, 38 and 21 tokens"
    rng = random.Random(seed)
    return [request(rng, 45, 1, temperature=0, prompt_logprobs=0), request(rng, 38, 2, temperature=1.0, max_tokens=9), request(rng, 21, 3, temperature=0.8, n=3)]


def company(n, seed=1):
    rng = random.Random(seed)
    return [request(rng, rng.choice((1, 2, 9, 17, 30)), 100 + i, temperature=rng.choice((0, 1)), max_tokens=rng.choice((2, 5, 8))) for i in range(n)]


def batch(model, grid):
    "One to eight together, the needle in each seat"
    wanted, others = {}, company(7)
    for needle in needles()[:2]:
        wanted = alone(model, [needle, *others])
        rows_of = {p.seed: s for (_, p), s in zip([needle, *others], wanted[0])}
        for size in grid['sizes']:
            for seat in (s for s in grid['seats'] if s < size):
                requests = others[:size - 1]
                requests.insert(seat, needle)
                said, rows, engine = together(model, requests, EngineConfig(max_num_seqs=8))
                first = next(r for r in engine.records if r['scheduled'])
                assert first['scheduled'][seat] == dict(id=str(seat), start=0, num_tokens=len(needle[0]), phase='prefill') and len(first['scheduled']) == size
                yield (size, seat), (said, rows), ([rows_of[p.seed] for _, p in requests], {k: v for k, v in wanted[1].items() if k in rows})


def chunks(model, grid):
    "The prompt in pieces, by the budget and by the cap on pieces in company"
    requests = needles() + company(3)
    wanted = alone(model, requests)
    for size in grid['chunks']:
        for config in (dict(max_num_batched_tokens=size or CONTEXT), dict(max_num_batched_tokens=max(size or 0, 8), max_chunk_tokens=size)):
            said, rows, engine = together(model, requests, EngineConfig(max_num_seqs=8, **config))
            assert max(s['num_tokens'] for r in engine.records for s in r['scheduled']) <= max(size or CONTEXT, 8)
            yield (size, *config), (said, rows), wanted
    yield 'never cut', together(model, requests, EngineConfig(enable_chunked_prefill=False))[:2], wanted


def prefix(model, grid):
    "Its first blocks found in the cache, up to each edge; those that were computed by another request"
    for block_size in grid['block_sizes'][:2]:
        for needle in needles()[1:]:
            wanted = alone(model, [needle])
            for edge in (e for e in grid['edges'] if e * block_size < len(needle[0])):
                before = needle[0][:edge * block_size] + [(needle[0][edge * block_size] + 1) % 256], SamplingParams(max_tokens=1, seed=9)
                said, rows, engine = together(model, [needle, before], EngineConfig(block_size=block_size), arrive=1, order=[1, 0])
                assert engine.scheduler.ledger.prefix.stats.hit == edge * block_size
                yield (block_size, edge), (said[:1], {k: v for k, v in rows.items() if k[0] != 9}), wanted


def preemption(model, grid):
    "One who runs is sent away every k steps, each in turn"
    requests = needles() + company(2)
    wanted = alone(model, requests)
    for every in grid['every']:
        for enable in (True, False):
            steps = Counter()
            def before_step(engine, every=every, steps=steps):
                steps['all'] += 1
                if steps['all'] % every == 0 and engine.scheduler.running:
                    force_out(engine, engine.scheduler.running[steps['all'] // every % engine.num_running])
            said, rows, engine = together(model, requests, EngineConfig(block_size=4, enable_prefix_caching=enable), before_step=before_step)
            events = num_events(engine)
            assert events['preempted'] > 2 and (events['found'] > 2) == enable
            yield (every, enable), (said, rows), wanted


def decoded(model, grid):
    "Keys and values made one by one, and the same ids as a prompt; and a second turn that finds the first one's answer in the cache"
    prompt, params = request(random.Random(5), 21, 4, temperature=1.0, max_tokens=16)
    [[first]], rows = alone(model, [(prompt, params)])
    for cut in grid['cuts']:
        _, again = alone(model, [(prompt + first[0][:cut], SamplingParams(seed=5, max_tokens=1))])
        yield ('as a prompt', cut), again[5, 0, 0], rows[4, 0, cut]
    for cut in grid['cuts']:
        turn = prompt + first[0] + [7] * cut, SamplingParams(seed=6, max_tokens=5, logprobs=0)
        said, rows_of_both, engine = together(model, [(prompt, params), turn], EngineConfig(block_size=4), arrive=1, before_step=one_after_another())
        assert engine.scheduler.ledger.prefix.stats.hit == 36  # 9 blocks of 4, of the prompt's 21 and the answer's 16
        wanted = alone(model, [(prompt, params), turn])
        yield ('second turn', cut), (said, rows_of_both), wanted


def one_after_another():
    "A request waits until those before it are done"
    def before_step(engine): engine.scheduler.paused = 'new' if engine.num_running else None
    return before_step


def block_sizes(model, grid):
    "Blocks of other sizes, in the engine and in the simple loop"
    requests = needles() + company(4)
    wanted = alone(model, requests)
    for block_size in grid['block_sizes']:
        yield (block_size, 'alone'), alone(model, requests, block_size), wanted
        yield (block_size, 'together'), together(model, requests, EngineConfig(block_size=block_size, max_num_batched_tokens=50), arrive=2)[:2], wanted


def threads(model, grid):
    "One thread and two"
    requests = needles() + company(4)
    wanted = alone(model, requests)
    for num_threads in (2, 1):
        kernels.set_threads(num_threads)
        yield (num_threads, 'alone'), alone(model, requests), wanted
        yield (num_threads, 'together'), together(model, requests, EngineConfig(block_size=8, max_num_batched_tokens=40), arrive=2)[:2], wanted


AXES = {f.__name__: f for f in (batch, chunks, prefix, preemption, decoded, block_sizes, threads)}


def check(axis, model, grid):
    num_cases = 0
    for case, found, wanted in AXES[axis](model, grid):
        assert found == wanted, (axis, case)
        num_cases += 1
    assert num_cases


# ---- the matrix
@pytest.mark.parametrize('wish', ['auto', 'torch'])
@pytest.mark.parametrize('name', DIALS)
@pytest.mark.parametrize('axis', AXES)
def test_the_matrix(ready, monkeypatch, axis, name, wish):
    monkeypatch.setenv('MINIGPT_KERNELS', wish)
    check(axis, ready(name, wish), SMALL)


@pytest.mark.slow
@pytest.mark.parametrize('wish', ['auto', 'torch'])
@pytest.mark.parametrize('name', DIALS)
@pytest.mark.parametrize('axis', AXES)
def test_the_whole_matrix(ready, monkeypatch, axis, name, wish):
    monkeypatch.setenv('MINIGPT_KERNELS', wish)
    check(axis, ready(name, wish), FULL)


# ---- the negative controls: if these hold, the matrix proves nothing
def broken_axes(model):
    "The axes along which some case differs"
    return {axis for axis, cases in AXES.items() if any(found != wanted for _, found, wanted in cases(model, SMALL))}
