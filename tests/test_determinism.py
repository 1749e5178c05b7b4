"""The same bits under any schedule: every row of logits, token and logprob, along each axis that a schedule can vary

    python -m pytest tests/test_determinism.py              a small grid
    python -m pytest -m slow tests/test_determinism.py      the whole one
"""
import copy
import random
import sys
from collections import Counter

import fuzz_schedules
import pytest
import torch
import torch.nn.functional as F
from conftest import GPT2, LLAMA, toy_model
from fuzz_schedules import MUST_HAPPEN, fuzz
from same_bits import TOKENIZER, alone, force_out, num_drafted, num_events, repeating, together, workload

from minigpt import engine as engine_room
from minigpt import kernels
from minigpt.engine import Engine, EngineConfig
from minigpt.kernels import OneSequence, PagedKVCache, linear_kinds, prepare_for_inference
from minigpt.kv_cache import generate
from minigpt.sampling import SamplingParams

CONTEXT = 96
ODD = dict(n_embd=30, n_head=3)  # rows that begin in the middle of a cache line, and rows of the MLP that end in the middle of a vector
WIDE = dict(n_embd=768, n_head=12, n_layer=1)  # as wide as GPT-2; the rows of its MLP are longer than 1024 numbers
QWEN = LLAMA | dict(qk_norm=True, qkv_bias=True, head_dim=12, rope_factor=4.0, rope_original_max_seq_len=16)  # each newer dial at once
TOYS = {'llama': LLAMA, 'gpt2': GPT2, 'qwen': QWEN, 'odd llama': LLAMA | ODD | dict(n_kv_head=1), 'odd gpt2': GPT2 | ODD}
BIG = {'wide llama': LLAMA | WIDE | dict(n_kv_head=4), 'wide gpt2': GPT2 | WIDE}
DIALS = TOYS | BIG
TINY = dict(sizes=(4,), seats=(3,), chunks=(7,), edges=(2,), every=(3,), cuts=(9,), block_sizes=(16,), drafts=(3,))
SMALL = dict(sizes=(1, 3, 8), seats=(0, 2, 7), chunks=(1, 7, None), edges=(0, 2, 5), every=(1, 3), cuts=(1, 9), block_sizes=(4, 16), drafts=(0, 1, 3, 7))
FULL = dict(sizes=range(1, 9), seats=range(8), chunks=(1, 2, 7, 16, 64, None), edges=range(12), every=(1, 2, 3, 5, 8), cuts=range(1, 16), block_sizes=(4, 8, 16, 32), drafts=range(9))


def plain_model(name): return toy_model(**DIALS[name] | dict(max_seq_len=CONTEXT))


@pytest.fixture(scope='module')
def ready():
    "Prepared models by family, choice of kernels and kinds of numbers, made when first asked for"
    made = {}
    def get(name, wish, dtype='fp32', kv_dtype='fp32'):
        key = name, wish, dtype, kv_dtype
        if key not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv('MINIGPT_KERNELS', wish)
                made[key] = prepare_for_inference(copy.deepcopy(plain_model(name)), dtype)
            made[key].kv_dtype = kv_dtype  # what `alone` and `together` take
        return made[key]
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
    for block_size in grid['block_sizes']:
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
            assert events['preempted'] > 0 and (events['found'] > 0) == enable
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


def speculate(model, grid):
    "Tokens drafted and verified, some of them right and some wrong"
    requests = repeating(12, seed=3)
    wanted, seen = alone(model, requests), Counter()
    for longest in grid['drafts']:
        for config in (dict(), dict(block_size=4, num_blocks=30, max_num_batched_tokens=24)):
            said, rows, engine = together(model, requests, EngineConfig(speculate=longest, **config), arrive=3)
            drafted, right = num_drafted(engine.records)
            seen.update(right=right, wrong=drafted - right)
            assert (drafted > 0) == (longest > 0)
            yield (longest, *config), (said, rows), wanted
    assert min(seen['right'], seen['wrong']) > 10, seen


def threads(model, grid):
    "One thread and two"
    requests = needles() + company(4)
    wanted = alone(model, requests)
    for num_threads in (2, 1):
        kernels.set_threads(num_threads)
        yield (num_threads, 'alone'), alone(model, requests), wanted
        yield (num_threads, 'together'), together(model, requests, EngineConfig(block_size=8, max_num_batched_tokens=40), arrive=2)[:2], wanted


AXES = {f.__name__: f for f in (batch, chunks, prefix, preemption, decoded, block_sizes, speculate, threads)}


def check(axis, model, grid):
    num_cases = 0
    for case, found, wanted in AXES[axis](model, grid):
        assert found == wanted, (axis, case)
        num_cases += 1
    assert num_cases


# ---- the matrix
@pytest.mark.parametrize('wish', ['auto', 'torch'])
@pytest.mark.parametrize('name', TOYS)
@pytest.mark.parametrize('axis', AXES)
def test_the_matrix(ready, monkeypatch, axis, name, wish):
    monkeypatch.setenv('MINIGPT_KERNELS', wish)
    check(axis, ready(name, wish), SMALL)


MODES = [('int8', 'fp32'), ('int4', 'bf16'), ('fp32', 'bf16')]  # kinds of weights, and of keys and values


@pytest.mark.parametrize('dtype, kv_dtype', MODES)
@pytest.mark.parametrize('name', ['llama', 'gpt2'])
@pytest.mark.parametrize('axis', AXES)
def test_the_matrix_in_small_numbers(ready, axis, name, dtype, kv_dtype):
    check(axis, ready(name, 'auto', dtype, kv_dtype), SMALL)


@pytest.mark.parametrize('name', ['llama', 'gpt2'])
def test_small_numbers_are_other_numbers(ready, name):
    "If a mode gave fp32's rows, it would not be tested"
    rows = {mode: alone(ready(name, 'auto', *mode), needles())[1] for mode in [('fp32', 'fp32'), *MODES]}
    assert len({frozenset(r.items()) for r in rows.values()}) == 4


@pytest.mark.slow
@pytest.mark.parametrize('wish', ['auto', 'torch'])
@pytest.mark.parametrize('dtype, kv_dtype', MODES)
@pytest.mark.parametrize('name', ['llama', 'gpt2', 'wide llama'])
@pytest.mark.parametrize('axis', AXES)
def test_the_whole_matrix_in_small_numbers(ready, monkeypatch, axis, name, dtype, kv_dtype, wish):
    monkeypatch.setenv('MINIGPT_KERNELS', wish)
    check(axis, ready(name, wish, dtype, kv_dtype), FULL)


@pytest.mark.parametrize('wish', ['auto', 'torch'])
@pytest.mark.parametrize('name', BIG)
@pytest.mark.parametrize('axis', ['batch', 'chunks', 'decoded', 'speculate'])
def test_a_corner_of_the_matrix_at_real_width(ready, monkeypatch, axis, name, wish):
    monkeypatch.setenv('MINIGPT_KERNELS', wish)
    check(axis, ready(name, wish), TINY)


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


@pytest.mark.parametrize('name', ['llama', 'gpt2'])
def test_plain_linears_break_every_axis(name):
    "One row is multiplied in another order than four are, even in a toy"
    assert broken_axes(plain_model(name)) == set(AXES)


@pytest.mark.parametrize('name', BIG)
def test_plain_linears_of_real_width_break_the_promise(name):
    assert any(found != wanted for _, found, wanted in chunks(plain_model(name), TINY))


def test_plain_activations_break_the_promise(monkeypatch):
    monkeypatch.setenv('MINIGPT_KERNELS', 'torch')
    monkeypatch.setattr(kernels, 'STEADY', {plain: plain for plain in kernels.STEADY})
    assert broken_axes(prepare_for_inference(plain_model('odd gpt2'))) == set(AXES)


class FusedAttention(PagedKVCache):
    "PyTorch's fused attention, for all of a sequence's rows at once"
    def __init__(self, *args):
        super().__init__(*args)
        self.arrays = None  # or it would not be asked

    def attend(self, layer, q, k, v):
        keys, values, owners = self.keys[layer], self.values[layer], self.row_tables.tolist()
        blocks, places = torch.tensor(self.tables[owners, self.positions // self.block_size]), torch.tensor(self.positions % self.block_size)
        keys[blocks, :, :, places], values[blocks, :, places] = k, v
        out = torch.empty(q.shape)
        for owner in sorted(set(owners)):
            rows, table = [i for i, o in enumerate(owners) if o == owner], self.tables[owner]
            past = self.positions[rows[-1]] + 1
            past_keys = keys[table].permute(1, 0, 3, 2).flatten(1, 2)[:, :past].repeat_interleave(q.shape[1] // keys.shape[1], 0)[None]
            past_values = values[table].transpose(0, 1).flatten(1, 2)[:, :past].repeat_interleave(q.shape[1] // keys.shape[1], 0)[None]
            mask = torch.tensor(self.positions[rows])[:, None] >= torch.arange(past)
            out[rows] = F.scaled_dot_product_attention(q[rows].transpose(0, 1)[None], past_keys, past_values, attn_mask=mask)[0].transpose(0, 1)
        return out


def test_fused_attention_breaks_all_axes_but_the_batch(monkeypatch):
    "One query alone gets other bits than the same in the company of its sequence; other sequences don't matter"
    for room in (kernels, engine_room): monkeypatch.setattr(room, 'PagedKVCache', FusedAttention)
    assert broken_axes(prepare_for_inference(plain_model('llama'))) == set(AXES) - {'batch'}


# ---- random schedules
def test_random_schedules():
    "A few of what `python tests/fuzz_schedules.py` does by the hundred"
    happened = fuzz(12, seed=0)
    assert [name for name in MUST_HAPPEN if not happened[name]] == []


def test_the_fuzzer_finds_a_broken_promise(monkeypatch):
    monkeypatch.setattr(fuzz_schedules, 'prepare_for_inference', lambda model, dtype: model)
    fuzz_schedules.ready.cache_clear()
    said = []
    with pytest.raises(AssertionError, match='workload 0, request .*: other logits'): fuzz(1, seed=0, tell=said.append)
    fuzz_schedules.ready.cache_clear()
    assert said == ['failed; again with: python tests/fuzz_schedules.py --workloads 1 --seed 0']


@pytest.mark.parametrize('name', ['llama', 'gpt2'])
def test_50_prompts_say_what_they_say_alone(prepared, name):
    "Random budgets, block sizes, seats and orders of arrival, and pools that are far too small"
    model, requests = prepared[name], workload(50)
    wanted, rng, events = alone(model, requests), random.Random(1), Counter()
    assert len({tuple(c[0]) for choices in wanted[0] for c in choices}) >= 50  # they do differ
    assert {c[3] for choices in wanted[0] for c in choices} == {'length', 'stop'}
    for block_size, blocks_spare, budget in ((4, 0, 16), (8, 4, 512), (16, 100, 40)):
        config = EngineConfig(block_size=block_size, num_blocks=64 // block_size + 2 + blocks_spare, max_num_seqs=12, max_num_batched_tokens=budget, max_waiting_requests=100)
        said, rows, engine = together(model, requests, config, rng.randint(1, 9), rng.sample(range(50), 50))
        assert said == wanted[0] and rows == wanted[1], config
        events += num_events(engine)
    assert min(events[name] for name in ('preempted', 'found', 'copied', 'evicted')) > 20, events


# ---- the switch
@pytest.mark.parametrize('wish', ['numba', 'TORCH', '', 'auto '])
def test_an_unknown_wish_is_refused_before_anything_changes(monkeypatch, wish):
    monkeypatch.setenv('MINIGPT_KERNELS', wish)
    model = toy_model(**LLAMA)
    with pytest.raises(ValueError, match=f"MINIGPT_KERNELS='{wish}' must be auto or torch"): prepare_for_inference(model)
    assert type(model.head) is torch.nn.Linear
    with pytest.raises(ValueError, match='must be auto or torch'): PagedKVCache(model.config, 4, 4)


def test_the_switch_calls_no_numba(monkeypatch):
    "And a model and a cache keep what was chosen when they were made"
    monkeypatch.setenv('MINIGPT_KERNELS', 'torch')
    model, requests = prepare_for_inference(plain_model('llama')), needles()
    assert set(linear_kinds(model).values()) == {'TiledLinear'} and Engine(model, TOKENIZER).cache.kernels.reason == 'MINIGPT_KERNELS=torch asks for it'
    for name in ('attend_rows', 'multiply', 'run_layers'): monkeypatch.setattr(kernels, name, None)
    monkeypatch.setitem(sys.modules, 'numba', None)  # importing it is an error now
    kernels.set_threads(1)
    cache = OneSequence(model.config)
    monkeypatch.setenv('MINIGPT_KERNELS', 'auto')
    assert len(generate(model, *requests[0], cache, TOKENIZER).token_ids) == 6


@pytest.mark.parametrize('missing, chosen', [(True, ('torch', 'without numba')), (False, ('numba', 'numba is here'))])
def test_what_is_missing_is_made_up_for(monkeypatch, missing, chosen):
    monkeypatch.delenv('MINIGPT_KERNELS', raising=False)
    monkeypatch.setattr(kernels, 'njit', None if missing else kernels.njit or len)
    assert kernels.kernel_choice() == kernels.KernelChoice(*chosen)
