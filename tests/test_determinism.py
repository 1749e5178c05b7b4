"""The same bits under any schedule: every row of logits, token and logprob, along each axis that a schedule can vary

    python -m pytest tests/test_determinism.py              a small grid
    python -m pytest -m slow tests/test_determinism.py      the whole one
"""
import copy
import json
import random
import sys
import threading
from collections import Counter

import fuzz_schedules
import pytest
import torch
import torch.nn.functional as F
from conftest import GPT2, LLAMA, toy_model
from fuzz_schedules import MUST_HAPPEN, fuzz
from same_bits import TOKENIZER, alone, force_out, num_events, together, workload

from minigpt import engine as engine_room
from minigpt import kernels
from minigpt.engine import Engine, EngineConfig
from minigpt.kernels import OneSequence, PackedLinear, PagedKVCache, TiledLinear, linear_kinds, prepare_for_inference
from minigpt.kv_cache import generate
from minigpt.sampling import SamplingParams

CONTEXT = 96
ODD = dict(n_embd=30, n_head=3)  # rows that begin in the middle of a cache line, and rows of the MLP that end in the middle of a vector
WIDE = dict(n_embd=768, n_head=12, n_layer=1)  # as wide as GPT-2; the rows of its MLP are longer than 1024 numbers
QWEN = LLAMA | dict(qk_norm=True, qkv_bias=True, head_dim=12, rope_factor=4.0, rope_original_max_seq_len=16)  # each newer dial at once
TOYS = {'llama': LLAMA, 'gpt2': GPT2, 'qwen': QWEN, 'odd llama': LLAMA | ODD | dict(n_kv_head=1), 'odd gpt2': GPT2 | ODD}
BIG = {'wide llama': LLAMA | WIDE | dict(n_kv_head=4), 'wide gpt2': GPT2 | WIDE}
DIALS = TOYS | BIG
TINY = dict(sizes=(4,), seats=(3,), chunks=(7,), edges=(2,), every=(3,), cuts=(9,), block_sizes=(16,))
SMALL = dict(sizes=(1, 3, 8), seats=(0, 2, 7), chunks=(1, 7, None), edges=(0, 2, 5), every=(1, 3), cuts=(1, 9), block_sizes=(4, 16))
FULL = dict(sizes=range(1, 9), seats=range(8), chunks=(1, 2, 7, 16, 64, None), edges=range(12), every=(1, 2, 3, 5, 8), cuts=range(1, 16), block_sizes=(4, 8, 16, 32))


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
@pytest.mark.parametrize('name', TOYS)
@pytest.mark.parametrize('axis', AXES)
def test_the_matrix(ready, monkeypatch, axis, name, wish):
    monkeypatch.setenv('MINIGPT_KERNELS', wish)
    check(axis, ready(name, wish), SMALL)


@pytest.mark.parametrize('wish', ['auto', 'torch'])
@pytest.mark.parametrize('name', BIG)
@pytest.mark.parametrize('axis', ['batch', 'chunks', 'decoded'])
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
    monkeypatch.setattr(kernels, 'STEADY', {plain: plain for plain in kernels.STEADY})
    assert broken_axes(prepare_for_inference(plain_model('odd gpt2'))) == set(AXES)


class FusedAttention(PagedKVCache):
    "PyTorch's fused attention, for all of a sequence's rows at once"
    def attend(self, layer, q, k, v):
        keys, values, owners = self.keys[layer], self.values[layer], self.row_tables.tolist()
        keys[self.slots], values[self.slots] = k, v
        out, seen = torch.empty_like(q), self.slots_seen()
        for owner in sorted(set(owners)):
            rows = [i for i, o in enumerate(owners) if o == owner]
            past = seen[rows[-1]]
            past_keys, past_values = (x[past].transpose(0, 1).repeat_interleave(q.shape[1] // keys.shape[1], 0)[None] for x in (keys, values))
            mask = torch.tensor(self.positions[rows])[:, None] >= torch.arange(len(past))
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
    monkeypatch.setattr(fuzz_schedules, 'prepare_for_inference', lambda model: model)
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


# ---- the switch, the probe, and what it leaves on disk
@pytest.mark.parametrize('wish', ['numba', 'TORCH', '', 'auto '])
def test_an_unknown_wish_is_refused_before_anything_changes(monkeypatch, wish):
    monkeypatch.setenv('MINIGPT_KERNELS', wish)
    model = toy_model(**LLAMA)
    with pytest.raises(ValueError, match=f"MINIGPT_KERNELS='{wish}' must be auto or torch"): prepare_for_inference(model)
    assert type(model.head) is torch.nn.Linear
    with pytest.raises(ValueError, match='must be auto or torch'): PagedKVCache(model.config, 4, 4)


def test_the_switch_calls_neither_onednn_nor_numba(monkeypatch):
    "And a model and a cache keep what was chosen when they were made"
    monkeypatch.setenv('MINIGPT_KERNELS', 'torch')
    model, requests = prepare_for_inference(plain_model('llama')), needles()
    assert set(linear_kinds(model).values()) == {'TiledLinear'} and Engine(model, TOKENIZER).cache.kernels.reason == 'MINIGPT_KERNELS=torch asks for it'
    monkeypatch.setattr(kernels, 'attend_rows', None)
    monkeypatch.setitem(sys.modules, 'numba', None)  # importing it is an error now
    kernels.set_threads(1)
    monkeypatch.setattr(PackedLinear, 'multiply', None)
    cache = OneSequence(model.config)
    monkeypatch.setenv('MINIGPT_KERNELS', 'auto')
    assert len(generate(model, *requests[0], cache, TOKENIZER).token_ids) == 6


@pytest.mark.parametrize('missing, chosen, reason', [
    (('oneDNN',), ('torch', 'numba'), 'without oneDNN'), (('numba',), ('onednn', 'torch'), 'without numba'),
    (('oneDNN', 'numba'), ('torch', 'torch'), 'without oneDNN and numba'), ((), ('onednn', 'numba'), 'both are here')])
def test_what_is_missing_is_made_up_for(monkeypatch, missing, chosen, reason):
    monkeypatch.delenv('MINIGPT_KERNELS', raising=False)
    monkeypatch.setattr(torch.backends.mkldnn, 'is_available', lambda: 'oneDNN' not in missing)
    monkeypatch.setattr(kernels, 'njit', None if 'numba' in missing else kernels.njit or len)
    assert kernels.kernel_choice() == kernels.KernelChoice(*chosen, reason)


@pytest.fixture
def probes(tmp_path, monkeypatch):
    "A cache folder of its own, and the shapes that were probed since"
    monkeypatch.setenv('MINIGPT_CACHE', str(tmp_path / 'cache'))
    monkeypatch.setenv('MINIGPT_KERNELS', 'auto')
    if kernels.kernel_choice().linears == 'torch': pytest.skip('without oneDNN there is nothing to probe')
    probed, probe = [], kernels.agreeing_buckets
    def counted(linear, buckets):
        probed.append((linear.in_features, linear.out_features))
        return probe(linear, buckets)
    monkeypatch.setattr(kernels, 'agreeing_buckets', counted)
    return probed


SHAPES = [(32, 64), (32, 32), (32, 256), (128, 32)]


def test_a_second_load_probes_nothing(probes, monkeypatch):
    first = linear_kinds(prepare_for_inference(plain_model('llama')))
    assert probes == SHAPES
    again = prepare_for_inference(plain_model('llama'))
    assert linear_kinds(again) == first and probes == SHAPES
    prepare_for_inference(plain_model('gpt2'))
    assert probes == SHAPES + [(32, 96), (32, 32), (32, 128), (128, 32)]  # with a bias it is another linear, but for the head
    monkeypatch.setenv('ONEDNN_MAX_CPU_ISA', 'AVX2')
    prepare_for_inference(plain_model('llama'))
    assert probes[8:] == SHAPES  # as if on another machine
    kernels.set_threads(2)
    prepare_for_inference(plain_model('llama'))
    assert probes[12:] == SHAPES and len(kernels.read_probes()) == 3
    assert [p.name for p in kernels.probe_file().parent.iterdir()] == ['probe.json']


@pytest.mark.parametrize('damage', [b'', b'{', b'null', b'[1, 2]', b'\xff\xfe\x00', b'[' * 100_000, b'{"a": [1], "b": 2}', 'lies', 'other buckets', 'machine', 'folder'])
def test_a_damaged_file_is_not_believed(probes, damage):
    path = kernels.probe_file()
    path.parent.mkdir()
    tried = list(kernels.ROW_BUCKETS)
    entries = {'lies': dict(tried=tried, agree=[3, 5]), 'other buckets': dict(tried=[1, 2, 4], agree=[1, 2, 4])}
    if damage == 'folder': path.mkdir()
    elif damage == 'machine': path.write_text(json.dumps({kernels.machine_key(): [1, 2]}), encoding='utf-8')
    elif damage in entries: kernels.keep_verdicts(kernels.machine_key(), {f'{i} → {o}': entries[damage] for i, o in SHAPES})
    else: path.write_bytes(damage)
    prepare_for_inference(plain_model('llama'))
    assert probes == SHAPES
    prepare_for_inference(plain_model('llama'))
    assert probes == SHAPES * (2 if damage == 'folder' else 1)
    assert [p.name for p in path.parent.iterdir()] == ['probe.json']  # and nothing lies about


@pytest.mark.parametrize('error', [PermissionError, FileNotFoundError, NotADirectoryError])
def test_a_folder_that_can_not_be_written_is_no_error(probes, monkeypatch, error):
    def refuse(*args, **kwargs): raise error('no')
    monkeypatch.setattr(kernels.os, 'replace', refuse)
    for times in (1, 2):
        prepare_for_inference(plain_model('llama'))
        assert probes == SHAPES * times
    assert list(kernels.probe_file().parent.iterdir()) == []
    monkeypatch.setattr(kernels.Path, 'mkdir', refuse)
    prepare_for_inference(plain_model('llama'))
    assert probes == SHAPES * 3


def test_without_a_home_nothing_is_kept(probes, monkeypatch):
    monkeypatch.delenv('MINIGPT_CACHE')
    monkeypatch.delenv('XDG_CACHE_HOME', raising=False)
    def homeless(): raise RuntimeError('could not determine home directory')
    monkeypatch.setattr(kernels.Path, 'home', homeless)
    prepare_for_inference(plain_model('llama'))
    assert probes == SHAPES


def test_where_the_file_is(monkeypatch, tmp_path):
    for name in ('MINIGPT_CACHE', 'XDG_CACHE_HOME', 'LOCALAPPDATA'): monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(kernels.Path, 'home', lambda: tmp_path)
    assert kernels.probe_file() == tmp_path / '.cache/minigpt/probe.json'
    monkeypatch.setenv('XDG_CACHE_HOME', '/var/caches')
    monkeypatch.setenv('LOCALAPPDATA', '/local')
    assert kernels.probe_file().as_posix() == '/var/caches/minigpt/probe.json'
    monkeypatch.setattr(kernels.sys, 'platform', 'win32')
    assert kernels.probe_file().as_posix() == '/local/minigpt/probe.json'
    monkeypatch.setenv('MINIGPT_CACHE', '/mine')
    assert kernels.probe_file().as_posix() == '/mine/probe.json'


def test_many_writers_leave_a_whole_file(tmp_path, monkeypatch):
    "Some verdicts may get lost, and are probed again some day; what is read is always somebody's whole file"
    monkeypatch.setenv('MINIGPT_CACHE', str(tmp_path))
    unreadable = []
    def write(who):
        for i in range(30):
            kernels.keep_verdicts('machine', {f'{who} → {i}': dict(tried=[1], agree=[1])})
            try: json.loads(kernels.probe_file().read_text(encoding='utf-8'))
            except ValueError as e: unreadable.append(e)
    writers = [threading.Thread(target=write, args=(w,)) for w in range(3)]
    for w in writers: w.start()
    for w in writers: w.join(60)
    kept = kernels.read_probes()['machine']
    assert unreadable == [] and len(kept) >= 30 and all(kernels.is_verdict(v, (1,)) for v in kept.values())
    assert [p.name for p in tmp_path.iterdir()] == ['probe.json']


class Clumsy(TiledLinear):
    "Goes astray by one part in a million when it is given the chance that `fault` names"
    def __init__(self, fault):
        super().__init__(torch.nn.Linear(40, 50))
        self.fault = fault
    def multiply(self, rows):
        done = super().multiply(rows)
        marks = torch.tensor([self.fault(len(rows), i) for i in range(len(rows))], dtype=torch.float32)
        return done * (1 + 1e-6 * marks[:, None])


def test_the_probe_compares_one_thread_with_as_many_as_run():
    linear = Clumsy(lambda size, i: size < 8 and torch.get_num_threads() == 1)
    assert kernels.agreeing_buckets(linear) == (8, *kernels.ROW_BUCKETS[4:])  # one thread: less than 8 are a smaller group
    kernels.set_threads(2)
    assert kernels.agreeing_buckets(linear) == (8, *kernels.ROW_BUCKETS[4:]) and torch.get_num_threads() == 2
    assert kernels.agreeing_buckets(Clumsy(lambda size, i: torch.get_num_threads() == 1)) == ()
    assert kernels.agreeing_buckets(Clumsy(lambda size, i: i == size - 1)) == (1,)
    assert kernels.agreeing_buckets(Clumsy(lambda size, i: i % 16 == 15), (1, 2, 8, 16)) == (1, 2, 8)


def test_a_probe_that_fails_leaves_the_threads_as_they_were():
    kernels.set_threads(2)
    def fail(*args): raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError): kernels.with_threads(1, fail)
    assert torch.get_num_threads() == 2
