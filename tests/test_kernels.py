"""Kernels against their specifications: products and small weights bit by bit, attention in any blocks, whole models under every dial"""
import copy
import hashlib
import math
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import GPT2, LLAMA, toy_model
from gguf_files import bytes_tokenizer, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st

from minigpt import kernels
from minigpt.attention import rope
from minigpt.kernels import (ADD, GELU, GELU_TANH, PLAIN, SWIGLU, OneSequence, PackedLinear, PagedKVCache, QuantLinear, SmallWeights, TiledLinear, load_for_inference,
                             make_small, multiply, paged_attend_torch, prepare_for_inference, product_by_hand, small_from_blocks)
from minigpt.kv_cache import KVCache, generate
from minigpt.model import gelu, gelu_tanh, swiglu
from minigpt.sampling import SamplingParams
from minigpt.tokenizer import ByteTokenizer
from minigpt.weights import StoredTensor, load_model, open_model, save_hf

needs_numba = pytest.mark.skipif(kernels.njit is None, reason='without numba there are no kernels')
few = settings(max_examples=30, deadline=None)
QWEN = LLAMA | dict(qk_norm=True, qkv_bias=True, head_dim=12, rope_factor=4.0, rope_original_max_seq_len=16)


@pytest.fixture(autouse=True)
def threads():
    kernels.set_threads(1)
    yield
    kernels.set_threads(1)


def drawn(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


# ---- products
@needs_numba
@few
@given(st.integers(1, 41), st.integers(1, 70), st.integers(1, 75), st.integers(1, 2), st.integers(0, 9))
def test_a_product_is_its_chains(num_rows, width, num_outputs, num_threads, seed):
    x, w, bias = drawn(seed, (num_rows, width), (num_outputs, width), num_outputs)
    kernels.set_threads(num_threads)
    assert np.array_equal(PackedLinear(w, bias)(torch.from_numpy(x)).numpy(), product_by_hand(x, w.T, bias))
    assert np.array_equal(PackedLinear(w)(torch.from_numpy(x)).numpy(), product_by_hand(x, w.T, np.zeros_like(bias)))


@needs_numba
@few
@given(st.integers(1, 41), st.integers(1, 4), st.integers(1, 75), st.sampled_from((8, 4)), st.integers(1, 2), st.integers(0, 9))
def test_small_weights_have_the_bits_of_the_same_in_fp32(num_rows, num_groups, num_outputs, bits, num_threads, seed):
    x, w, bias = drawn(seed, (num_rows, 32 * num_groups), (num_outputs, 32 * num_groups), num_outputs)
    small = make_small(w, bits)
    kernels.set_threads(num_threads)
    linear = QuantLinear(small, bias)
    assert np.array_equal(linear(torch.from_numpy(x)).numpy(), product_by_hand(x, small.floats().T, bias))
    some = torch.randint(num_outputs, (5,), generator=torch.Generator().manual_seed(seed))
    for packed in (linear, PackedLinear(small.floats()), TiledLinear(small)): assert np.array_equal(packed.weights_of(some).numpy(), small.floats()[some])


@needs_numba
@few
@given(st.integers(1, 20), st.integers(1, 70), st.sampled_from((PLAIN, ADD, GELU, GELU_TANH, SWIGLU)), st.sampled_from((None, 8, 4)))
def test_what_becomes_of_a_sum(num_rows, num_outputs, finish, bits):
    halves = 2 if finish == SWIGLU else 1
    x, w, bias, there = drawn(1, (num_rows, 64), (halves * num_outputs, 64), halves * num_outputs, (num_rows, num_outputs))
    w, out = make_small(w, bits) if bits else w, there.copy()
    linear = (QuantLinear if bits else PackedLinear)(w, bias, halves)
    multiply(x, *linear.arrays, finish, np.empty(x.size, np.float32), out)
    sums = torch.from_numpy(product_by_hand(x, (w.floats() if bits else w).T, bias))
    if finish in (PLAIN, ADD): assert np.array_equal(out, sums.numpy() + there if finish == ADD else sums.numpy())
    else: assert np.allclose(out, {GELU: gelu, GELU_TANH: gelu_tanh, SWIGLU: swiglu}[finish](sums), rtol=2e-6, atol=2e-6)
    for n in range(num_rows):
        alone = there[n:n + 1].copy()
        multiply(x[n:n + 1], *linear.arrays, finish, np.empty(64, np.float32), alone)
        assert np.array_equal(alone[0], out[n])


@needs_numba
def test_a_number_that_is_none_stays_in_its_row():
    x, w = drawn(0, (9, 64), (40, 64))
    x[4, 7] = np.nan
    for linear in (PackedLinear(w), QuantLinear(make_small(w, 8)), QuantLinear(make_small(w, 4))):
        bad = torch.isnan(linear(torch.from_numpy(x)))
        assert bad[4].all() and not bad[[i for i in range(9) if i != 4]].any()


# ---- small weights
@few
@given(st.integers(0, 999), st.sampled_from((8, 4)), st.sampled_from((1e-3, 1.0, 300.0)))
def test_small_weights_are_the_nearest(seed, bits, size):
    [w] = drawn(seed, (3, 64))
    w *= size
    small, steps = make_small(w, bits), np.repeat(make_small(w, bits).scale.astype(np.float64), 32, axis=1)
    assert small.numbers.shape == w.shape and small.scale.shape == (3, 2)
    rounding = np.abs(w).max() * 2**-10 + 127 * 2**-25  # of a scale or an offset to fp16, whose least step is 2**-24
    assert (np.abs(small.floats() - w) <= steps / 2 + rounding).all()


@pytest.mark.parametrize('bits', [8, 4])
def test_groups_without_a_spread(bits):
    w = np.concatenate([np.zeros((1, 32)), np.full((1, 32), 0.5), np.full((1, 32), -3.0)], 1).astype(np.float32)
    assert np.array_equal(make_small(w, bits).floats(), w) if bits == 4 else np.allclose(make_small(w, bits).floats(), w, rtol=1e-3)


@few
@given(st.sampled_from(('Q8_0', 'Q4_0', 'Q4_1')), st.integers(0, 999))
def test_blocks_of_a_file_are_taken_as_they_are(kind, seed):
    "Any blocks: all numbers, all scales that are numbers"
    rng, quant = np.random.default_rng(seed), gguf.GGMLQuantizationType[kind]
    size = gguf.GGML_QUANT_SIZES[quant][1]
    blocks = rng.integers(0, 256, (5, 3, size), dtype=np.uint8)
    for at in range(0, 4 if kind == 'Q4_1' else 2, 2): blocks[..., at:at + 2] = rng.standard_normal((5, 3, 1)).astype(np.float16).view(np.uint8)
    raw = blocks.reshape(5, -1)
    small = small_from_blocks(StoredTensor((5, 96), kind, raw.ravel(), 'here'))
    assert np.array_equal(small.floats(), gguf.quants.dequantize(raw, quant))
    assert small.numbers.dtype == (np.int8 if kind == 'Q8_0' else np.uint8)


# ---- attention
def scattered(rng, spans, block_size):
    "A table of blocks for each span, all in disorder; and how many blocks there are"
    needed = [-(-s.stop // block_size) for s in spans]
    blocks = rng.permutation(sum(needed) + 2).tolist()
    return [[blocks.pop() for _ in range(n)] for n in needed], sum(needed) + 2


@needs_numba
@few
@given(st.data())
def test_attention_in_any_blocks(data):
    "Against PyTorch, and bit by bit against the same rows one at a time, in blocks of another size"
    kv_heads, group, half = (data.draw(st.integers(1, n)) for n in (3, 5, 20))
    dtype, num_threads = data.draw(st.sampled_from(('fp32', 'bf16'))), data.draw(st.integers(1, 2))
    spans = data.draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), min_size=1, max_size=4))
    sizes = data.draw(st.lists(st.integers(1, 33), min_size=2, max_size=2))
    config = toy_model(**LLAMA | dict(n_head=kv_heads * group, n_kv_head=kv_heads, head_dim=2 * half, n_embd=2 * half * kv_heads * group, n_layer=1)).config
    rng = np.random.default_rng(0)
    whole = [range(start + length) for start, length in spans]
    q, k, v = (torch.from_numpy(a) for a in drawn(1, *[(sum(map(len, whole)), heads, 2 * half) for heads in (kv_heads * group, kv_heads, kv_heads)]))
    starts = np.cumsum([0, *map(len, whole)])
    kernels.set_threads(num_threads)
    def answers(block_size, pieces):  # each a list of spans that go together
        tables, num_blocks = scattered(rng, whole, block_size)
        cache, out = PagedKVCache(config, num_blocks, block_size, dtype), torch.full(q.shape, math.nan)
        cache.keys.fill_(math.nan), cache.values.fill_(math.nan)
        for piece in pieces:
            rows = [starts[i] + p for i, span in piece for p in span]
            cache.begin([tables[i] for i, _ in piece], [span for _, span in piece])
            out[rows] = cache.attend(0, q[rows], k[rows], v[rows])
        return out, cache, tables
    late = [(i, range(start, start + length)) for i, (start, length) in enumerate(spans)]
    early = [(i, range(start)) for i, (start, _) in enumerate(spans) if start]
    together, cache, tables = answers(sizes[0], [early, late] if early else [late])
    one_by_one, _, _ = answers(sizes[1], [[(i, range(p, p + 1))] for i, w in enumerate(whole) for p in w])
    assert torch.equal(together, one_by_one)
    row_tables = [torch.tensor(tables[i]) for i, w in enumerate(whole) for _ in w]
    wanted = paged_attend_torch(q, cache.keys[0], cache.values[0], row_tables, [p for w in whole for p in w])
    assert torch.allclose(together, wanted, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize('wish', ['auto', 'torch'])
@pytest.mark.parametrize('dtype', ['fp32', 'bf16'])
def test_what_is_stored(monkeypatch, wish, dtype):
    "Keys and values as they are, or rounded to even; with numbers that are none, and those beyond bfloat16's last"
    monkeypatch.setenv('MINIGPT_KERNELS', wish)
    config = toy_model(**LLAMA).config
    cache = PagedKVCache(config, 3, 4, dtype)
    k, v = torch.randn(2, 5, config.n_kv_head, config.head_dim, generator=torch.Generator().manual_seed(0))
    k[0, 0, :6] = torch.tensor([math.nan, math.inf, -math.inf, 3.4e38, 1e-40, -0.0])
    k[0, 0, 6] = torch.tensor(0x7fffffff, dtype=torch.int32).view(torch.float32)  # no number either, and the largest of these
    k[1, 0, :4] = torch.tensor([1.00390625, 1.01171875, -1.00390625, 1.0039063])  # half-way between two, and a little more
    cache.begin([[2, 0]], [range(5)])
    cache.attend(1, torch.zeros(5, config.n_head, config.head_dim), k, v)
    kind = dict(fp32=torch.float32, bf16=torch.bfloat16)[dtype]
    stored_keys, stored_values = cache.keys[1, [2, 0]].permute(0, 3, 1, 2).flatten(0, 1)[:5], cache.values[1, [2, 0]].transpose(1, 2).flatten(0, 1)[:5]
    for stored, given_ in ((stored_keys, k), (stored_values, v)):
        assert stored.dtype == kind and torch.equal(stored.float().nan_to_num(-7), given_.to(kind).float().nan_to_num(-7))
        assert torch.equal(torch.signbit(stored.float()), torch.signbit(given_.to(kind).float())) or given_.isnan().any()
    assert not cache.keys[0].any() and not cache.keys[1, 1].any()


def test_a_kind_of_cache_that_is_not_known():
    with pytest.raises(ValueError, match="kv_dtype='fp8' must be one of fp32, bf16"): PagedKVCache(toy_model(**LLAMA).config, 3, 4, 'fp8')


@needs_numba
def test_a_key_that_is_no_number_harms_those_who_see_it():
    config = toy_model(**LLAMA).config
    cache = PagedKVCache(config, 4, 4)
    q, k, v = (torch.randn(9, heads, config.head_dim, generator=torch.Generator().manual_seed(heads)) for heads in (config.n_head, config.n_kv_head, config.n_kv_head))
    k[5, 0, 0] = math.nan
    cache.begin([[1, 3, 0]], [range(9)])
    bad = cache.attend(0, q, k, v).isnan().flatten(1)
    group = config.n_head // config.n_kv_head * config.head_dim
    assert not bad[:5].any() and bad[5:, :group].all() and not bad[5:, group:].any()


# ---- norms and rotations
@needs_numba
@few
@given(st.integers(1, 130), st.booleans(), st.booleans())
def test_norms(width, centred, has_bias):
    x, weight, bias = drawn(0, width, width, width)
    out = np.empty_like(x)
    kernels.normalise(x, weight, bias if has_bias else bias[:0], np.float32(1e-5), centred, out)
    row = torch.from_numpy(x).double()
    wanted = F.layer_norm(row, (width,), eps=1e-5) if centred else F.rms_norm(row, (width,), eps=1e-5)
    wanted = wanted.numpy() * weight + (bias if has_bias else 0)
    assert np.allclose(out, wanted, rtol=1e-5, atol=3e-6)


@needs_numba
@few
@given(st.integers(1, 40))
def test_turns(half):
    head, cos, sin = drawn(0, 2 * half, 2 * half, 2 * half)
    wanted = rope(torch.from_numpy(head)[None, None], torch.from_numpy(cos)[None], torch.from_numpy(sin)[None])[0, 0]
    kernels.turn(head, cos, sin)
    assert np.allclose(head, wanted, rtol=1e-6, atol=1e-6)


# ---- whole models
DIALS = {'qwen3': LLAMA | dict(qk_norm=True), 'llama': LLAMA, 'gpt2': GPT2, 'erf': dict(activation='gelu'), 'qwen': QWEN, 'no bias': dict(bias=False, norm='rms'), 'untied': LLAMA | dict(tie_head=False, ffn_dim=96),
         'centred swiglu': GPT2 | dict(activation='swiglu'), 'narrow': LLAMA | dict(n_embd=20, n_head=2, n_kv_head=1, ffn_dim=44), 'mqa': GPT2 | dict(n_kv_head=1, head_dim=6)}


def logits_of(model, ids, cache=None):
    cache = cache or OneSequence(model.config)
    cache.begin(range(len(ids)))
    return model.logits(model.hidden(torch.tensor(ids), torch.arange(len(ids)), cache))


@pytest.mark.parametrize('wish', ['auto', 'torch'])
@pytest.mark.parametrize('name', DIALS)
def test_a_prepared_model_is_the_model(monkeypatch, name, wish):
    monkeypatch.setenv('MINIGPT_KERNELS', wish)
    model, ids = toy_model(**DIALS[name]), list(b'the cup fell and did not break')
    wanted = model(torch.tensor([ids]))[0]
    ready = prepare_for_inference(copy.deepcopy(model))
    assert torch.allclose(logits_of(ready, ids), wanted, rtol=1e-4, atol=1e-4)
    assert torch.allclose(logits_of(ready, ids, KVCache(model.config)), wanted, rtol=1e-4, atol=1e-4)  # a cache of another kind
    assert list(ready.parameters()) == [] or not any(p.requires_grad for p in ready.parameters())


def rounded_model(model, bits, head_bits=8):
    "The same model with the weights that its linears and its embedding have in so many bits; None leaves them as they are"
    model = copy.deepcopy(model)
    linears = {id(w): (w, bits) for layer in model.layers for w in (getattr(layer, name).weight for name in kernels.LINEARS)}
    for w, n in (linears | {id(w): (w, head_bits) for w in (model.embed.weight, model.head.weight)}).values():
        if n: w.copy_(torch.from_numpy(make_small(w.numpy(), n).floats()))
    return model


@pytest.mark.parametrize('wish', ['auto', 'torch'])
@pytest.mark.parametrize('dtype', ['int8', 'int4'])
@pytest.mark.parametrize('name', ['llama', 'gpt2', 'untied', 'centred swiglu'])
def test_small_weights_cost_nothing_more(monkeypatch, name, dtype, wish):
    "Bit by bit the model that has these weights in fp32"
    monkeypatch.setenv('MINIGPT_KERNELS', wish)
    model, ids = toy_model(**DIALS[name]), list(b'the cup fell and did not break')
    same = prepare_for_inference(rounded_model(model, kernels.BITS[dtype]))
    assert torch.equal(logits_of(prepare_for_inference(model, dtype), ids), logits_of(same, ids))


def test_widths_that_have_no_groups():
    for dtype in ('int8', 'int4'):
        model = toy_model(**DIALS['narrow'])
        with pytest.raises(ValueError, match=f"dtype='{dtype}' needs linears whose width is a multiple of 32, not 20"): prepare_for_inference(model, dtype)
        assert type(model.head) is torch.nn.Linear
    with pytest.raises(ValueError, match="dtype='fp16' must be one of fp32, int8, int4"): prepare_for_inference(model, 'fp16')


@pytest.mark.parametrize('wish', ['auto', 'torch'])
@pytest.mark.parametrize('dtype', ['fp32', 'int8', 'int4'])
@pytest.mark.parametrize('name', ['llama', 'gpt2', 'untied', 'qwen3'])
def test_layer_by_layer_from_a_folder(monkeypatch, tmp_path, name, dtype, wish):
    "What was loaded as a whole and what was read layer by layer are the same"
    monkeypatch.setenv('MINIGPT_KERNELS', wish)
    model, ids = toy_model(**DIALS[name]), list(b'the cup fell')
    save_hf(model, ByteTokenizer(), tmp_path / 'model')
    wanted = logits_of(prepare_for_inference(model, dtype), ids)
    assert torch.equal(logits_of(load_for_inference(tmp_path / 'model', dtype).model, ids), wanted)


@pytest.mark.parametrize('kind, dtype', [('Q8_0', 'int8'), ('Q4_0', 'int4'), ('Q4_1', 'int4'), ('Q4_1', 'int8'), ('Q8_0', 'int4'), ('F16', 'int8')])
@pytest.mark.parametrize('name', ['llama', 'untied'])
def test_blocks_of_a_file_are_run_without_a_loss(tmp_path, name, kind, dtype):
    "A file of 8-bit blocks run in 8 bits, or of 4-bit blocks in 4, has the bits of the file's own numbers in fp32"
    model, ids = toy_model(**DIALS[name]), list(b'the cup fell')
    save_hf(model, ByteTokenizer(), tmp_path / 'model')
    write_gguf(tmp_path / 'model.gguf', tmp_path / 'model', kind, bytes_tokenizer(256))
    opened, whole, bits = open_model(tmp_path / 'model.gguf'), load_model(tmp_path / 'model.gguf').model, kernels.BITS[dtype]
    lossless = kind in kernels.SAME_BLOCKS[bits]
    head = opened.stored.parts('embed.weight' if model.config.tie_head else 'head.weight')[0].kind
    same = rounded_model(whole, None if lossless else bits, None if head == 'Q8_0' else 8)
    found = logits_of(load_for_inference(tmp_path / 'model.gguf', dtype).model, ids)
    assert torch.equal(found, logits_of(prepare_for_inference(same), ids))
    assert torch.equal(found, logits_of(prepare_for_inference(whole), ids)) is (lossless and head == 'Q8_0')
    taken = kernels.read_weights(opened.model.layers[0].qkv, 'layers.0.qkv.weight', kernels.BITS[dtype], opened.stored)
    assert isinstance(taken, SmallWeights) and np.array_equal(taken.floats(), opened.stored.tensor('layers.0.qkv.weight')) is lossless


@needs_numba
def test_two_threads_may_ask_one_model():
    "The layers' memory is lent to one of them at a time"
    from concurrent.futures import ThreadPoolExecutor
    model, prompts = prepare_for_inference(toy_model(**LLAMA)), [list(b'the cup fell'), list(b'why')]
    def answer(i): return generate(model, prompts[i % 2], SamplingParams(max_tokens=8, seed=i % 2), OneSequence(model.config), ByteTokenizer()).token_ids
    wanted = [answer(0), answer(1)]
    with ThreadPoolExecutor(2) as pool: assert list(pool.map(answer, range(12))) == wanted * 6


@needs_numba
def test_weights_begin_on_a_cache_line():
    "Then no vector lies on two lines; a third of the speed hangs on it"
    model = prepare_for_inference(toy_model(**LLAMA | dict(n_embd=96, n_head=3, n_kv_head=3)), 'fp32')
    arrays = [model.head.w, *model.layers[0].linears.arrays[::3], *PagedKVCache(model.config, 3, 4).arrays, *PagedKVCache(model.config, 3, 4, 'bf16').arrays]
    assert [a.ctypes.data % 64 for a in arrays] == [0] * 9
    assert [a[1].ctypes.data % 64 for a in model.layers[0].linears.arrays[::3]] == [0] * 4


def digest():
    "Of what two toy models compute in all kinds of numbers, alone and in company"
    bits = hashlib.sha256()
    for name in ('llama', 'gpt2'):
        for dtype in ('fp32', 'int8', 'int4'):
            model = prepare_for_inference(toy_model(**DIALS[name]), dtype)
            for n in (1, 3, 7, 20): bits.update(logits_of(model, list(range(40, 40 + n))).numpy().tobytes())
    return bits.hexdigest()


@needs_numba
@pytest.mark.slow
@pytest.mark.skipif(not kernels.AVX512, reason='needs a processor with AVX-512')
def test_shorter_vectors_have_the_same_bits(tmp_path):
    "Other tiles, other panels, other instructions"
    from llvmlite import binding
    features = ','.join(f for f in binding.get_host_cpu_features().flatten().split(',') if '512' not in f)
    env = os.environ | dict(NUMBA_CPU_NAME='haswell', NUMBA_CPU_FEATURES=features, NUMBA_CACHE_DIR=str(tmp_path), PYTHONPATH=os.pathsep.join([str(Path(__file__).parent), *sys.path]))
    code = 'import test_kernels as t; t.kernels.set_threads(1); print(t.kernels.AVX512, t.kernels.PANEL, t.digest())'
    done = subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, text=True, timeout=600)
    assert done.stdout.split() == ['False', '32', digest()], done.stderr[-2000:]


@needs_numba
@pytest.mark.skipif(sys.platform != 'linux', reason='guards its pages with mprotect')
def test_nobody_reaches_beyond_an_array():
    done = subprocess.run([sys.executable, Path(__file__).parent/'guarded.py'], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, 'fine\n'), done.stderr[-2000:]
