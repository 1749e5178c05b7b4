"Weights against the transformers library, and every way in which a folder can be wrong"
import copy
import json
import os
import pickle
import struct
import subprocess
import sys
from dataclasses import asdict, fields, replace

os.environ['HF_HUB_OFFLINE'] = '1'

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from minigpt.checkpoint import model_tensors, save_checkpoint
from minigpt.kv_cache import KVCache
from minigpt.model import GPT, PRESETS, GPTConfig, init_weights
from minigpt.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer
from minigpt.weights import (FAMILIES, GPT2, LLAMA, MINIGPT, QWEN2, QWEN3, WeightsError, config_from_hf, config_to_hf, empty_model, layout,
                             load_hf, load_model, open_folder, open_model, save_hf, write_shards)

settings.register_profile('fixed', derandomize=True, deadline=None, max_examples=100)
settings.load_profile('fixed')

GPT2_TINY = GPTConfig(256, max_seq_len=24, n_layer=2, n_head=4, n_embd=32, activation='gelu_tanh')
LLAMA_TINY = GPTConfig(256, max_seq_len=24, n_layer=2, n_head=4, n_embd=32, n_kv_head=2, ffn_dim=56, position='rope', norm='rms', activation='swiglu',
                       bias=False, norm_eps=1e-6)
QWEN2_TINY, QWEN3_TINY = replace(LLAMA_TINY, qkv_bias=True), replace(LLAMA_TINY, qk_norm=True, head_dim=16)
LLAMA3_TINY = replace(LLAMA_TINY, rope_theta=5e5, rope_factor=8.0, rope_low_freq_factor=1.0, rope_high_freq_factor=4.0, rope_original_max_seq_len=16)

@pytest.fixture(scope='module')
def hf():
    transformers = pytest.importorskip('transformers')
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers

def make(config, seed=0):
    "A model none of whose weights is 0, 1 or equal to another"
    model = init_weights(GPT(config), torch.Generator().manual_seed(seed)).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed + 1)
    for p in model.parameters(): p.add_(torch.randn(p.shape, generator=generator) * 0.1)
    return model

def randomise(model):
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.parameters(): p.add_(torch.randn(p.shape, generator=generator) * 0.1)
    return model.eval()

IDS = torch.tensor([[3, 250, 17, 17, 0, 255, 99, 4, 128, 64, 31, 7, 200], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11, 12, 13]])

def write(folder, content, tensors, **files):
    folder.mkdir(parents=True, exist_ok=True)
    (folder/'config.json').write_text(content if isinstance(content, str) else json.dumps(content))
    if tensors is not None: save_file(tensors, folder/'model.safetensors')
    for name, text in files.items(): (folder/name).write_text(text)
    return folder

def stored(folder, config, seed=0):
    "The content and tensors that `save_hf` writes"
    save_hf(make(config, seed), ByteTokenizer(), folder)
    return json.loads((folder/'config.json').read_text()), load_file(folder/'model.safetensors')

@pytest.fixture
def llama(tmp_path): return stored(tmp_path/'llama', LLAMA_TINY)

@pytest.fixture
def gpt2(tmp_path): return stored(tmp_path/'gpt2', GPT2_TINY)


# ---- the same logits as the originals
def gpt2_theirs(hf, **config):
    sizes = dict(vocab_size=256, n_positions=24, n_embd=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None)
    return randomise(hf.GPT2LMHeadModel(hf.GPT2Config(**sizes | config)))

def llama_theirs(hf, **config):
    sizes = dict(vocab_size=256, max_position_embeddings=24, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=56,
                 bos_token_id=None, eos_token_id=None)
    return randomise(hf.LlamaForCausalLM(hf.LlamaConfig(**sizes | config)))

def qwen2_theirs(hf, **config):
    sizes = dict(vocab_size=256, max_position_embeddings=24, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                 intermediate_size=56, bos_token_id=None, eos_token_id=None)
    return randomise(hf.Qwen2ForCausalLM(hf.Qwen2Config(**sizes | config)))

def qwen3_theirs(hf, **config):
    sizes = dict(vocab_size=256, max_position_embeddings=24, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                 intermediate_size=56, head_dim=16, bos_token_id=None, eos_token_id=None)
    return randomise(hf.Qwen3ForCausalLM(hf.Qwen3Config(**sizes | config)))

def llama3_rope(**changes):
    return dict(rope_parameters=dict(rope_type='llama3', rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                     original_max_position_embeddings=16) | changes)

F64_TOLERANCE = 2e-6  # their norms, softmax and angles stay in fp32

def in_float64(model):
    "The same weights in float64, where a formula that is nearly right stands out"
    return copy.deepcopy(model).double()

THEIRS = {
    'gpt2': (gpt2_theirs, {}),
    'gpt2 exact gelu': (gpt2_theirs, dict(activation_function='gelu')),
    'gpt2 pytorch gelu': (gpt2_theirs, dict(activation_function='gelu_pytorch_tanh')),
    'gpt2 untied': (gpt2_theirs, dict(tie_word_embeddings=False)),
    'gpt2 odd sizes': (gpt2_theirs, dict(n_inner=50, layer_norm_epsilon=1e-3, n_head=1, n_embd=31)),
    'llama': (llama_theirs, {}),
    'llama tied': (llama_theirs, dict(tie_word_embeddings=True)),
    'llama grouped': (llama_theirs, dict(num_key_value_heads=2)),
    'llama one kv head': (llama_theirs, dict(num_key_value_heads=1)),
    'llama wide heads': (llama_theirs, dict(head_dim=16, num_key_value_heads=2)),
    'llama narrow heads': (llama_theirs, dict(head_dim=4, num_key_value_heads=2)),
    'llama theta 5e5': (llama_theirs, dict(rope_parameters=dict(rope_theta=5e5, rope_type='default'))),
    'llama theta 100': (llama_theirs, dict(rope_parameters=dict(rope_theta=100, rope_type='default'))),
    'llama biases': (llama_theirs, dict(attention_bias=True, mlp_bias=True, num_key_value_heads=2)),
    'llama eps': (llama_theirs, dict(rms_norm_eps=1e-2)),
    'llama 3': (llama_theirs, dict(num_key_value_heads=2, **llama3_rope())),
    'llama 3, other bounds': (llama_theirs, dict(head_dim=32, **llama3_rope(factor=3, low_freq_factor=0.5, high_freq_factor=9.0,
                                                                          original_max_position_embeddings=20, rope_theta=50.0))),
    'qwen2': (qwen2_theirs, {}),
    'qwen2 tied, all heads': (qwen2_theirs, dict(tie_word_embeddings=True, num_key_value_heads=4)),
    'qwen2 narrow heads': (qwen2_theirs, dict(head_dim=4)),
    'qwen3': (qwen3_theirs, {}),
    'qwen3 tied, usual heads': (qwen3_theirs, dict(tie_word_embeddings=True, head_dim=8, rms_norm_eps=1e-2)),
    'qwen3, stretched': (qwen3_theirs, llama3_rope()),
}

@pytest.mark.parametrize('name', THEIRS)
def test_their_weights_give_their_logits(hf, tmp_path, name):
    maker, config = THEIRS[name]
    theirs = maker(hf, **config)
    theirs.save_pretrained(tmp_path/'theirs')
    ours = load_hf(tmp_path/'theirs')
    with torch.no_grad(): wanted = theirs(IDS).logits
    assert wanted.std() > 0.1
    torch.testing.assert_close(ours(IDS), wanted, atol=1e-4, rtol=0)
    with torch.no_grad(): torch.testing.assert_close(in_float64(ours)(IDS), theirs.double()(IDS).logits, atol=F64_TOLERANCE, rtol=0)
    assert not ours.training and not any(p.requires_grad for p in ours.parameters())
    assert {p.dtype for p in ours.parameters()} == {torch.float32}

@pytest.mark.filterwarnings('ignore:.past_key_values')
@pytest.mark.parametrize('name', ['gpt2', 'llama grouped', 'llama wide heads', 'llama 3', 'qwen2', 'qwen3'])
def test_their_logits_with_a_cache(hf, tmp_path, name):
    maker, config = THEIRS[name]
    theirs = maker(hf, **config)
    theirs.save_pretrained(tmp_path/'theirs')
    ours, ids = load_hf(tmp_path/'theirs'), IDS[0]
    cache, past, rows, wanted = KVCache(ours.config), None, [], []
    for start, stop in [(0, 6), *((i, i + 1) for i in range(6, len(ids)))]:
        cache.begin(range(start, stop))
        rows.append(ours.logits(ours.hidden(ids[start:stop], torch.arange(start, stop), cache)))
        with torch.no_grad(): out = theirs(ids[None, start:stop], past_key_values=past, use_cache=True)
        past = out.past_key_values
        wanted.append(out.logits[0])
    torch.testing.assert_close(torch.cat(rows), torch.cat(wanted), atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.cat(rows), ours(ids[None])[0], atol=1e-5, rtol=0)

OURS = {
    'gpt2': GPT2_TINY,
    'gpt2 exact gelu, untied': replace(GPT2_TINY, activation='gelu', tie_head=False, ffn_dim=50, norm_eps=1e-3),
    'gpt2 without biases': replace(GPT2_TINY, bias=False),
    'nano': GPTConfig(vocab_size=65, **PRESETS['nano']),
    'llama': LLAMA_TINY,
    'llama untied, biases, wide heads': replace(LLAMA_TINY, tie_head=False, bias=True, head_dim=16, rope_theta=5e5),
    'llama one head': replace(LLAMA_TINY, n_head=1, n_kv_head=1, norm_eps=1e-3),
    'llama 3': LLAMA3_TINY,
    'qwen2': QWEN2_TINY,
    'qwen2 untied, wide heads': replace(QWEN2_TINY, tie_head=False, head_dim=16, rope_theta=5e5),
    'qwen3': QWEN3_TINY,
    'qwen3 untied, stretched': replace(LLAMA3_TINY, qk_norm=True, tie_head=False),
    'gpt2 with q, k, v biases only': replace(GPT2_TINY, bias=False, qkv_bias=True),
}

@pytest.mark.parametrize('name', OURS)
def test_they_read_what_we_write(hf, tmp_path, name):
    ours = make(OURS[name])
    tokenizer = BPETokenizer.train(['the cat'], 257) if ours.config.vocab_size > 257 else CharTokenizer('ab')
    save_hf(ours, tokenizer, tmp_path/'ours')
    theirs, loading = hf.AutoModelForCausalLM.from_pretrained(tmp_path/'ours', output_loading_info=True)
    assert not any(loading[key] for key in ('missing_keys', 'unexpected_keys', 'mismatched_keys'))
    ids = IDS % ours.config.vocab_size
    with torch.no_grad(): torch.testing.assert_close(theirs.eval()(ids).logits, ours(ids), atol=1e-4, rtol=0)
    again = load_hf(tmp_path/'ours')
    assert again.config == (ours.config if ours.config.position == 'rope' else replace(ours.config, qkv_bias=False, bias=True))
    for key, t in model_tensors(ours).items(): assert torch.equal(model_tensors(again)[key], t), key

@pytest.mark.parametrize('dtype', ['F32', 'F16', 'BF16'])
@pytest.mark.parametrize('name', ['gpt2', 'qwen2', 'qwen3', 'llama 3'])
def test_they_read_our_shards_of_each_kind(hf, tmp_path, name, dtype):
    ours, kind = make(OURS[name]), dict(F32=torch.float32, F16=torch.float16, BF16=torch.bfloat16)[dtype]
    save_hf(ours, CharTokenizer('ab'), tmp_path/'ours', dtype=dtype, shard_bytes=10_000)
    assert len(list((tmp_path/'ours').glob('model-*.safetensors'))) > 2 and not (tmp_path/'ours'/'model.safetensors').exists()
    again = load_hf(tmp_path/'ours')
    for key, t in model_tensors(ours).items(): assert torch.equal(model_tensors(again)[key], t.to(kind).float()), key
    theirs, loading = hf.AutoModelForCausalLM.from_pretrained(tmp_path/'ours', dtype='auto', output_loading_info=True)
    assert theirs.dtype == kind and not any(loading[key] for key in ('missing_keys', 'unexpected_keys', 'mismatched_keys'))
    with torch.no_grad(): torch.testing.assert_close(theirs.float().eval()(IDS).logits, again(IDS), atol=1e-4, rtol=0)

@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 100))
def test_shards_hold_each_tensor_once_and_no_more_than_they_may(tmp_path_factory, sizes, limit):
    folder = tmp_path_factory.mktemp('shards')
    tensors = {f't{i}': torch.full((n,), float(i)) for i, n in enumerate(sizes)}
    write_shards(folder, tensors, 4 * limit)
    found = open_folder(folder)
    assert found.keys() == tensors.keys() and all(torch.equal(found[n].floats(), t) for n, t in tensors.items())
    files = [[t.nbytes for _, t in sorted(load_file(f).items(), key=lambda x: int(x[0][1:]))] for f in sorted(folder.glob('*.safetensors'))]
    assert all(sum(f) <= 4 * limit or len(f) == 1 for f in files)
    assert all(sum(a) + b[0] > 4 * limit for a, b in zip(files, files[1:])) or len(files) == 1
    if len(files) > 1: assert json.loads((folder/'model.safetensors.index.json').read_text())['metadata']['total_size'] == 4 * sum(sizes)

def test_numbers_too_large_for_half_precision(tmp_path):
    model = make(LLAMA_TINY)
    model.layers[0].up.weight[60, 3] = 7e4
    with pytest.raises(WeightsError, match='model.layers.0.mlp.up_proj.weight has 70000, more than F16 can hold'):
        save_hf(model, ByteTokenizer(), tmp_path/'x', dtype='F16')
    assert not (tmp_path/'x').exists()
    with pytest.raises(WeightsError, match="dtype='F8' is not supported: written are 'F32', 'F16', 'BF16'"): save_hf(model, ByteTokenizer(), tmp_path/'x', dtype='F8')
    model.layers[0].up.weight[60, 3] = float('nan')
    assert load_hf(save_hf(model, ByteTokenizer(), tmp_path/'x', dtype='F16')).layers[0].up.weight.isnan().sum() == 1

def test_chat_templates(tmp_path):
    template = "{% for m in messages %}<|{{ m.role }}|>\r\n{{ m.content }}{% endfor %}é"
    save_hf(make(LLAMA_TINY), ByteTokenizer(), tmp_path/'x', chat_template=template)
    assert load_model(tmp_path/'x').chat_template == template
    (tmp_path/'x'/'tokenizer_config.json').write_text(json.dumps(dict(chat_template='another')))
    assert load_model(tmp_path/'x').chat_template == template
    (tmp_path/'x'/'chat_template.jinja').unlink()
    assert load_model(tmp_path/'x').chat_template == 'another'
    for found, wanted in {'[{"name": "tools", "template": "a"}, {"name": "default", "template": "b"}]': 'b', '[]': None, 'null': None}.items():
        (tmp_path/'x'/'tokenizer_config.json').write_text(f'{{"chat_template": {found}}}')
        assert load_model(tmp_path/'x').chat_template == wanted
    (tmp_path/'x'/'tokenizer_config.json').write_text('{"chat_template": 7}')
    with pytest.raises(WeightsError, match='chat_template is a int, not text'): load_model(tmp_path/'x')

def test_they_read_our_tokenizer(hf, tmp_path):
    tokenizer = BPETokenizer.train(['the cat and the hat'], 270)
    save_hf(make(replace(GPT2_TINY, vocab_size=300)), tokenizer, tmp_path/'ours')
    theirs = hf.PreTrainedTokenizerFast.from_pretrained(tmp_path/'ours')
    assert theirs.encode('the cat') == tokenizer.encode('the cat')
    assert json.loads((tmp_path/'ours'/'config.json').read_text())['eos_token_id'] == tokenizer.eos_token_id == 0
    assert load_model(tmp_path/'ours').tokenizer.eos_token_id == 0

@pytest.mark.parametrize('name', ['gpt2', 'gpt2 untied', 'llama tied', 'llama biases', 'qwen2', 'qwen3'])
def test_their_shards(hf, tmp_path, name):
    maker, config = THEIRS[name]
    theirs = maker(hf, **config)
    theirs.save_pretrained(tmp_path/'theirs', max_shard_size='20KB')
    assert len(list((tmp_path/'theirs').glob('model-*.safetensors'))) > 2
    with torch.no_grad(): torch.testing.assert_close(load_hf(tmp_path/'theirs')(IDS), theirs(IDS).logits, atol=1e-4, rtol=0)

@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_precision_is_widened(hf, tmp_path, dtype):
    theirs = llama_theirs(hf, num_key_value_heads=2).to(dtype)
    theirs.save_pretrained(tmp_path/'theirs')
    ours, theirs = load_hf(tmp_path/'theirs'), hf.LlamaForCausalLM.from_pretrained(tmp_path/'theirs', torch_dtype=torch.float32)
    with torch.no_grad(): torch.testing.assert_close(ours(IDS), theirs(IDS).logits, atol=1e-4, rtol=0)
    assert {p.dtype for p in ours.parameters()} == {torch.float32}

def test_layers_without_a_head(hf, tmp_path):
    "GPT2Model and LlamaModel are saved without a prefix; a tied head is there all the same"
    for name, maker, config in (('gpt2', gpt2_theirs, {}), ('llama', llama_theirs, dict(tie_word_embeddings=True))):
        theirs = maker(hf, **config)
        theirs.base_model.save_pretrained(tmp_path/name)
        assert not any(n.startswith(('transformer.', 'model.')) for n in load_file(tmp_path/name/'model.safetensors'))
        with torch.no_grad(): torch.testing.assert_close(load_hf(tmp_path/name)(IDS), theirs(IDS).logits, atol=1e-4, rtol=0)


# ---- the table
@given(st.integers(1, 3), st.sampled_from([(1, 1), (2, 1), (4, 2), (4, 4), (6, 3)]), st.sampled_from([2, 6]), st.booleans(), st.booleans(),
       st.sampled_from(['gpt2', 'llama', 'qwen2', 'qwen3', 'minigpt']))
def test_pieces_cover_each_row_once(n_layer, heads, head_dim, bias, tie_head, family):
    n_head, n_kv_head = heads if family != 'gpt2' else (heads[0], heads[0])
    dials = dict(position='rope', norm='rms', activation='swiglu') if family not in ('gpt2', 'minigpt') else {}
    dials |= dict(qwen2=dict(qkv_bias=not bias), qwen3=dict(qk_norm=True), minigpt=dict(qk_norm=bias)).get(family, {})
    config = GPTConfig(11, max_seq_len=5, n_layer=n_layer, n_head=n_head, n_kv_head=n_kv_head, n_embd=n_head * head_dim, ffn_dim=7, bias=bias,
                       tie_head=tie_head, **dials)
    model = empty_model(config)
    pieces = layout(model, dict(FAMILIES, minigpt=MINIGPT)[family], 'x.')
    names = [p.name for parts in pieces.values() for p in parts]
    assert len(names) == len(set(names))
    wanted = {n: t for n, t in model.state_dict().items() if not (tie_head and n == 'head.weight')}
    assert pieces.keys() == wanted.keys()
    for name, parts in pieces.items():
        assert [i for p in parts for i in range(p.rows.start, p.rows.stop)] == list(range(len(wanted[name])))
        for p in parts:
            shape = (p.rows.stop - p.rows.start, *wanted[name].shape[1:])
            assert p.shape == (shape[::-1] if p.transposed else shape)
            assert p.name.startswith('x.') != p.name.startswith(('lm_head', 'head'))

def test_families_name_every_module_once():
    for family in FAMILIES.values():
        theirs = [m for parts in family.modules.values() for m in parts]
        assert len(theirs) == len(set(theirs))
    assert set(GPT2.modules) - set(LLAMA.modules) == {'pos_embed'} and set(LLAMA.modules) < set(GPT2.modules)
    assert QWEN2.modules == LLAMA.modules and set(QWEN3.modules) - set(LLAMA.modules) == {'layers.N.q_norm', 'layers.N.k_norm'}

def test_layers_beyond_nine(tmp_path):
    config = replace(LLAMA_TINY, n_layer=12, n_embd=8, head_dim=2, ffn_dim=5)
    model = make(config)
    again = load_hf(save_hf(model, ByteTokenizer(), tmp_path/'x'))
    assert torch.equal(again(IDS), model(IDS))

def test_an_empty_model_loads_no_compiler():
    "Drawing on the meta device would: two seconds and 64 MB"
    code = """
import sys
from minigpt.model import GPTConfig
from minigpt.weights import empty_model
model = empty_model(GPTConfig(100, n_layer=1, n_head=2, n_embd=8, position='rope', rope_factor=8.0, norm='rms', qk_norm=True))
print(all(p.is_meta for p in model.parameters()), 'torch._dynamo' in sys.modules)"""
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=120, check=True).stdout.split() == ['True', 'False']

def test_empty_models_are_empty():
    before = torch.get_rng_state()
    model = empty_model(replace(LLAMA_TINY, tie_head=False, bias=True))
    assert torch.equal(torch.get_rng_state(), before)
    reference = GPT(model.config)
    assert {n: t.shape for n, t in model.state_dict().items()} == {n: t.shape for n, t in reference.state_dict().items()}
    assert all(p.is_meta for p in model.parameters())
    for name, buffer in reference.named_buffers(): assert torch.equal(buffer, model.get_buffer(name))

@pytest.mark.parametrize('name', OURS)
def test_filled_layer_by_layer(tmp_path, name):
    "Modules that somebody has replaced are passed over; the others get the same bits as all at once"
    ours = make(OURS[name])
    save_hf(ours, ByteTokenizer() if ours.config.vocab_size > 99 else CharTokenizer('ab'), tmp_path/'x')
    whole, opened = load_hf(tmp_path/'x'), open_model(tmp_path/'x')
    assert all(p.is_meta for p in opened.model.parameters())
    for i, layer in enumerate(opened.model.layers):
        parts = opened.stored.parts(f'layers.{i}.up.weight')
        assert torch.equal(torch.cat([p.floats() for p in parts]), ours.layers[i].up.weight) and {p.kind for p in parts} == {'F32'}
        layer.up = torch.nn.Identity()
        opened.stored.fill(layer, f'layers.{i}.')
        assert not any(p.is_meta for p in layer.parameters())
    assert opened.model.norm.weight.is_meta
    opened.stored.fill(opened.model)
    for key, t in model_tensors(opened.model).items(): assert torch.equal(t, whole.state_dict()[key]), key
    assert len(model_tensors(whole)) - len(model_tensors(opened.model)) == len(opened.model.layers) * (2 if whole.config.bias else 1)
    assert (opened.model.head.weight is opened.model.embed.weight) == whole.config.tie_head
    assert not any(p.requires_grad for p in opened.model.parameters())


# ---- config.json
LLAMA3 = dict(rope_type='llama3', factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)

@pytest.mark.parametrize('changes, message', [
    ({'model_type': 'mistral'}, "model_type='mistral' is not supported: this version reads 'gpt2', 'llama', 'qwen2', 'qwen3'"),
    ({'model_type': None}, 'model_type=None is not supported'),
    ({'hidden_act': 'gelu'}, "hidden_act='gelu' is not supported: this version reads 'silu'"),
    ({'rope_scaling': {'rope_type': 'llama3', 'factor': 8.0}}, "rope_scaling.low_freq_factor is missing"),
    ({'rope_scaling': LLAMA3 | {'factor': 0.5}}, "rope_factor=0.5 must be at least 1"),
    ({'rope_scaling': LLAMA3 | {'factor': 'eight'}}, "rope_factor='eight' must be positive and finite"),
    ({'rope_scaling': LLAMA3 | {'low_freq_factor': 5.0}}, "rope_low_freq_factor=5.0 must be below rope_high_freq_factor=4.0"),
    ({'rope_scaling': LLAMA3 | {'original_max_position_embeddings': 0.5}}, "rope_original_max_seq_len=0.5 must be an integer"),
    ({'rope_scaling': LLAMA3 | {'attention_factor': 1.1}}, "rope_scaling: the key='attention_factor' is not supported"),
    ({'rope_scaling': LLAMA3, 'rope_parameters': {'rope_theta': 1e4}}, "is not rope_parameters="),
    ({'rope_parameters': {'full_attention': {'rope_theta': 1e4}}}, "rope_parameters: the key='full_attention'"),
    ({'rope_scaling': {'type': 'linear', 'factor': 2.0}}, "rope_scaling.rope_type='linear' is not supported: this version reads 'default', 'llama3'"),
    ({'rope_interleaved': True}, 'rope_interleaved=True is not supported'),
    ({'tie_word_embeddings': 'yes'}, "tie_word_embeddings='yes' is not supported"),
    ({'attention_bias': 'no'}, "attention_bias='no' is not supported"),
    ({'max_position_embeddings': 10**9}, 'max_seq_len=1000000000: 64000000000 bytes of angles, at most 67108864'),
    ({'rope_parameters': {'rope_type': 'yarn', 'rope_theta': 1e4}}, "rope_parameters.rope_type='yarn'"),
    ({'rope_parameters': {'partial_rotary_factor': 0.5}}, 'rope_parameters.partial_rotary_factor=0.5'),
    ({'rope_parameters': 7}, 'rope_parameters=7 must be an object'),
    ({'partial_rotary_factor': 0.5}, 'partial_rotary_factor=0.5'),
    ({'attention_bias': True}, 'attention_bias=True with mlp_bias=False is not supported: both or neither'),
    ({'mlp_bias': True}, 'attention_bias=False with mlp_bias=True'),
    ({'quantization_config': {'bits': 4}}, "quantization_config={'bits': 4} is not supported"),
    ({'hidden_size': None}, 'hidden_size is missing'),
    ({'num_key_value_heads': 3}, 'n_head=4 must be a multiple of n_kv_head=3'),
    ({'num_hidden_layers': '2'}, "n_layer='2' must be an integer"),
    ({'rms_norm_eps': 'small'}, "norm_eps='small' must be positive and finite"),
    ({'rms_norm_eps': True}, "norm_eps=True must be positive and finite"),
    ({'rope_theta': 10**400}, "rope_theta=inf must be positive and finite"),
    ({'num_attention_heads': '4'}, "n_head='4' must be an integer of at least 1"),
    ({'num_attention_heads': 0}, "n_head=0 must be an integer of at least 1"),
    ({'rope_theta': -1}, 'rope_theta=-1.0 must be positive'),
    ({'num_hidden_layers': 10**9}, '1000000000 layers, only 20 tensors'),
    ({'vocab_size': 10**13}, 'model.embed_tokens.weight is (256, 32), the config needs (10000000000000, 32)'),
    ({'vocab_size': 10**30}, 'no machine has room for this model'),
    ({'intermediate_size': 57}, 'model.layers.0.mlp.gate_proj.weight is (56, 32), the config needs (57, 32)'),
    ({'num_key_value_heads': 4}, 'model.layers.0.self_attn.k_proj.weight is (16, 32), the config needs (32, 32)'),
    ({'num_hidden_layers': 1}, 'unexpected tensor model.layers.1.input_layernorm.weight and 8 more'),
    ({'num_hidden_layers': 3}, '9 of 29 tensors missing, first model.layers.2.'),
    ({'tie_word_embeddings': False}, '1 of 21 tensors missing, first lm_head.weight'),
])
def test_llama_configs_that_are_refused(tmp_path, llama, changes, message):
    content, tensors = llama
    with pytest.raises(WeightsError) as e: load_hf(write(tmp_path/'x', content | changes, tensors))
    assert message in str(e.value)
    assert str(tmp_path/'x') in str(e.value) or 'room' in message or 'angles' in message

@pytest.mark.parametrize('config, changes, message', [
    (QWEN2_TINY, {'use_sliding_window': True}, 'use_sliding_window=True is not supported: this version reads False'),
    (QWEN2_TINY, {'layer_types': ['full_attention', 'sliding_attention']}, "layer_types='sliding_attention' is not supported: this version reads 'full_attention'"),
    (QWEN2_TINY, {'layer_types': 7}, "layer_types=7 is not supported: this version reads 'full_attention'"),
    (QWEN2_TINY, {'attention_bias': False}, 'attention_bias=False is not supported: this version reads True'),
    (QWEN2_TINY, {'num_key_value_heads': None}, 'num_key_value_heads is missing'),
    (QWEN2_TINY, {'model_type': 'llama', 'attention_bias': None}, 'unexpected tensor model.layers.0.self_attn.k_proj.bias and 5 more'),
    (QWEN2_TINY, {'model_type': 'qwen3', 'attention_bias': False, 'head_dim': 8}, '4 of 24 tensors missing, first model.layers.0.self_attn.q_norm.weight'),
    (QWEN3_TINY, {'attention_bias': True}, 'attention_bias=True is not supported: this version reads False'),
    (QWEN3_TINY, {'head_dim': None}, 'q_proj.weight is (64, 32), the config needs (512, 32)'),
    (QWEN3_TINY, {'rope_parameters': {'rope_type': 'yarn', 'factor': 4.0}, 'rope_scaling': None}, "rope_parameters.rope_type='yarn'"),
    (QWEN3_TINY, {'hidden_act': 'gelu'}, "hidden_act='gelu'"),
])
def test_qwen_configs_that_are_refused(tmp_path, config, changes, message):
    content, tensors = stored(tmp_path/'y', config)
    with pytest.raises(WeightsError) as e: load_hf(write(tmp_path/'x', content | changes, tensors))
    assert message in str(e.value)

@pytest.mark.parametrize('changes, message', [
    ({'activation_function': 'relu'}, "activation_function='relu' is not supported: this version reads 'gelu_pytorch_tanh', 'gelu_new', 'gelu'"),
    ({'scale_attn_weights': False}, 'scale_attn_weights=False is not supported: this version reads True'),
    ({'scale_attn_by_inverse_layer_idx': True}, 'scale_attn_by_inverse_layer_idx=True'),
    ({'add_cross_attention': True}, 'add_cross_attention=True'),
    ({'n_embd': 30}, 'n_embd=30 must be a multiple of n_head=4'),
    ({'n_positions': 25}, 'transformer.wpe.weight is (24, 32), the config needs (25, 32)'),
    ({'n_positions': None}, 'n_positions is missing'),
])
def test_gpt2_configs_that_are_refused(tmp_path, gpt2, changes, message):
    content, tensors = gpt2
    with pytest.raises(WeightsError) as e: load_hf(write(tmp_path/'x', content | changes, tensors))
    assert message in str(e.value)

def test_what_absent_keys_mean():
    "As older files leave them out"
    old = dict(model_type='gpt2', vocab_size=50257, n_positions=1024, n_ctx=1024, n_embd=768, n_layer=12, n_head=12)
    assert config_from_hf(old) == GPTConfig(**PRESETS['gpt2'])
    old = dict(model_type='llama', vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
               num_key_value_heads=3, max_position_embeddings=8192, rope_theta=100000, rms_norm_eps=1e-5, tie_word_embeddings=True, hidden_act='silu',
               rope_scaling=None, attention_bias=False, rope_interleaved=False, torch_dtype='bfloat16', pretraining_tp=1)
    assert config_from_hf(old) == GPTConfig(**PRESETS['smollm2-135m'])
    bare = {k: old[k] for k in ('model_type', 'vocab_size', 'hidden_size', 'intermediate_size', 'num_hidden_layers', 'num_attention_heads', 'max_position_embeddings')}
    config = config_from_hf(bare)
    assert (config.n_kv_head, config.head_dim, config.rope_theta, config.norm_eps, config.tie_head, config.bias) == (9, 64, 10000, 1e-6, False, False)

@pytest.mark.parametrize('config, message', [
    (replace(GPT2_TINY, norm='rms'), "norm='rms' is not supported: a gpt2 has 'layer'"),
    (replace(GPT2_TINY, activation='swiglu'), "activation_function='swiglu' is not supported: this version reads 'gelu_pytorch_tanh', 'gelu_new', 'gelu'"),
    (replace(GPT2_TINY, n_kv_head=2), "n_kv_head=2 is not supported: a gpt2 has 4"),
    (replace(GPT2_TINY, head_dim=16), "head_dim=16 is not supported: a gpt2 has 8"),
    (replace(LLAMA_TINY, norm='layer'), "norm='layer' is not supported: a llama has 'rms'"),
    (replace(LLAMA_TINY, activation='gelu'), "activation='gelu' is not supported: a llama has 'swiglu'"),
    (replace(LLAMA_TINY, n_embd=30, head_dim=8), 'n_embd=30: a llama has a multiple of n_head=4'),
    (replace(GPT2_TINY, qk_norm=True), "qk_norm=True is not supported: a gpt2 has False"),
    (replace(QWEN3_TINY, bias=True), 'bias=True is not supported: a qwen3 has False'),
    (replace(QWEN3_TINY, qkv_bias=True), 'qkv_bias=True is not supported: a qwen3 has False'),
    (replace(QWEN2_TINY, activation='gelu'), "activation='gelu' is not supported: a qwen2 has 'swiglu'"),
])
def test_configs_that_neither_family_has(tmp_path, config, message):
    with pytest.raises(WeightsError) as e: save_hf(make(config), ByteTokenizer(), tmp_path/'x')
    assert str(e.value) == message and not (tmp_path/'x').exists()

def test_every_field_is_written_or_refused():
    "Change each field of a config: it comes back, or it is refused; nothing is forgotten but what the docs say"
    other = dict(vocab_size=300, max_seq_len=30, n_layer=3, n_head=8, n_embd=64, n_kv_head=1, head_dim=10, ffn_dim=60, position=None, norm=None, activation='gelu',
                 bias=None, tie_head=None, rope_theta=77.0, norm_eps=0.5, dropout=0.1, qkv_bias=True, qk_norm=None, rope_factor=2.0,
                 rope_low_freq_factor=0.5, rope_high_freq_factor=3.0, rope_original_max_seq_len=77)
    assert other.keys() == {f.name for f in fields(GPTConfig)}
    forgotten = set()
    for base in (GPT2_TINY, replace(GPT2_TINY, bias=False), LLAMA_TINY, QWEN2_TINY, QWEN3_TINY, LLAMA3_TINY):
        for field, value in other.items():
            if value is None: value = {'position': 'rope', 'learned': 'rope', 'layer': 'rms', 'rms': 'layer', True: False, False: True}.get(getattr(base, field), 'learned')
            try:
                config = replace(base, **{field: value})
                again = config_from_hf(config_to_hf(config))
            except ValueError: continue
            lost = {f.name for f in fields(GPTConfig) if getattr(again, f.name) != getattr(config, f.name)}
            if lost: forgotten |= {(base.position, base.rope_factor != 1, f) for f in lost}
    assert forgotten == {('learned', False, f) for f in ('bias', 'qkv_bias', 'dropout')} | {('rope', stretched, 'dropout') for stretched in (False, True)}


# ---- files that are not whole, or say something else
def shard(folder, content, tensors, num=3, **weight_map):
    folder.mkdir()
    (folder/'config.json').write_text(json.dumps(content))
    names, files = sorted(tensors), {}
    for i in range(num):
        part, file = names[i::num], f'model-{i+1:05d}-of-{num:05d}.safetensors'
        save_file({n: tensors[n] for n in part}, folder/file)
        files |= dict.fromkeys(part, file)
    (folder/'model.safetensors.index.json').write_text(json.dumps({'metadata': {}, 'weight_map': files | weight_map}))
    return folder

def refused(folder, *messages):
    with pytest.raises(WeightsError) as e: load_hf(folder)
    for message in messages: assert message in str(e.value)

def test_shards(tmp_path, llama):
    folder = shard(tmp_path/'x', *llama)
    assert torch.equal(load_hf(folder)(IDS), load_hf(tmp_path/'llama')(IDS))
    one = folder/'model-00002-of-00003.safetensors'
    whole = one.read_bytes()
    one.write_bytes(whole[:-4])
    refused(folder, f'{one} is not a whole safetensors file')
    one.unlink()
    refused(folder, f'{one}: there is no such file')

def test_shard_indices_that_lie(tmp_path, llama):
    content, tensors = llama
    refused(shard(tmp_path/'a', content, tensors, **{'model.norm.weight': 'model-00001-of-00003.safetensors'}), 'has no tensor model.norm.weight')
    refused(shard(tmp_path/'b', content, tensors, **{'model.norm.weight': '../llama/model.safetensors'}), 'weight_map must give a file name in this folder')
    refused(shard(tmp_path/'c', content, tensors, **{'model.norm.weight': 3}), 'weight_map must give a file name')
    refused(shard(tmp_path/'f', content, tensors, **{'model.norm.weight': '..'}), 'no such file')
    for i, text in enumerate(('{"metadata": {}}', '[]', '{', '{"weight_map": []}', '')):
        folder = shard(tmp_path/f'd{i}', content, tensors)
        (folder/'model.safetensors.index.json').write_text(text)
        refused(folder, 'model.safetensors.index.json')

def header(content, data=b''):
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack('<Q', len(text)) + text + data

@pytest.mark.parametrize('damage', [
    b'', b'abc', b'\xff' * 8 + b'{}', struct.pack('<Q', 10**6) + b'{}', header(b'{{{{{'), header(b'\xff\xfe'), header([]), header({'a': 3}),
    header({'a': {'dtype': 'F32', 'shape': [2], 'data_offsets': [0, 800]}}), header({'a': {'dtype': 'F32', 'shape': [2], 'data_offsets': [0, 8]}}),
    header({'a': {'dtype': 'F32', 'shape': [2**40, 2**40], 'data_offsets': [0, 8]}}, b'12345678'), header({'a': {'dtype': 'F99', 'shape': [1], 'data_offsets': [0, 4]}}, b'1234'),
    pickle.dumps({'a': 1}), b'GGUF' + bytes(60)])
def test_files_that_are_no_safetensors(tmp_path, llama, damage):
    folder = write(tmp_path/'x', llama[0], None)
    (folder/'model.safetensors').write_bytes(damage)
    refused(folder, f'{folder}/model.safetensors is not a whole safetensors file')

@given(st.data())
@settings(max_examples=60)
def test_no_damage_to_the_header_goes_further_than_weights_error(tmp_path_factory, data):
    "Cut anywhere, or any byte of the header changed: refused, or (a name in the metadata, say) the same shapes"
    folder = tmp_path_factory.mktemp('fuzz')
    content, _ = stored(folder/'x', replace(LLAMA_TINY, n_layer=1))
    path = folder/'x'/'model.safetensors'
    whole = path.read_bytes()
    if data.draw(st.booleans()): path.write_bytes(whole[:data.draw(st.integers(0, len(whole) - 1))])
    else:
        at = data.draw(st.integers(0, 8 + struct.unpack('<Q', whole[:8])[0] - 1))
        path.write_bytes(whole[:at] + bytes([data.draw(st.integers(0, 255))]) + whole[at+1:])
    try: load_hf(folder/'x')
    except WeightsError: pass

def test_tensors_of_other_kinds(tmp_path, llama):
    content, tensors = llama
    for name, t in {'I32': torch.ones(32, dtype=torch.int32), 'F64': torch.ones(32, dtype=torch.float64), 'F8_E4M3': torch.ones(32).to(torch.float8_e4m3fn)}.items():
        refused(write(tmp_path/name, content, tensors | {'model.norm.weight': t}), f'model.norm.weight is {name}, supported are F32, F16, BF16')
    refused(write(tmp_path/'scalar', content, tensors | {'model.norm.weight': torch.tensor(1.0)}), 'model.norm.weight is (), the config needs (32,)')
    refused(write(tmp_path/'turned', content, tensors | {'model.embed_tokens.weight': torch.ones(32, 256)}), 'is (32, 256), the config needs (256, 32)')

def test_buffers_that_are_no_weights(tmp_path, llama, gpt2):
    content, tensors = llama
    extra = {f'model.layers.{i}.self_attn.rotary_emb.inv_freq': torch.ones(4) for i in range(2)} | {'model.rotary_emb.inv_freq': torch.ones(4)}
    load_hf(write(tmp_path/'a', content, tensors | extra))
    refused(write(tmp_path/'b', content, tensors | {'model.layers.0.self_attn.q_proj.bias': torch.ones(32)}), 'unexpected tensor model.layers.0.self_attn.q_proj.bias')
    refused(write(tmp_path/'e', content, tensors | {'norm.weight': torch.ones(32)}), 'unexpected tensor norm.weight')
    content, tensors = gpt2
    extra = {f'transformer.h.{i}.attn.{n}': torch.ones(1, 1, 24, 24).bool() for i in range(2) for n in ('bias', 'masked_bias')}
    load_hf(write(tmp_path/'c', content, tensors | extra))
    refused(write(tmp_path/'d', content, tensors | {'transformer.h.0.attn.c_attn.scale': torch.ones(1)}), 'unexpected tensor transformer.h.0.attn.c_attn.scale')

def test_a_tied_head_that_is_stored_all_the_same(tmp_path, llama):
    content, tensors = llama
    head = tensors['model.embed_tokens.weight'].clone()
    assert torch.equal(load_hf(write(tmp_path/'a', content, tensors | {'lm_head.weight': head}))(IDS), load_hf(tmp_path/'llama')(IDS))
    head[5, 5] += 1
    refused(write(tmp_path/'b', content, tensors | {'lm_head.weight': head}), 'the head is tied, but lm_head.weight is not model.embed_tokens.weight')

def test_configs_that_are_not_json(tmp_path, llama):
    for i, text in enumerate(('', '{', '[]', 'null', '"llama"')): refused(write(tmp_path/f'{i}', text, llama[1]), f'{i}/config.json')
    (tmp_path/'0'/'config.json').write_bytes(b'\xff\xfe\x00')
    refused(tmp_path/'0', '0/config.json')
    refused(tmp_path/'nowhere', 'nowhere/config.json')

class Trap:
    "Unpickling this leaves a file behind"
    def __init__(self, path): self.path = path
    def __reduce__(self): return (open, (str(self.path), 'w'))

def test_nothing_is_unpickled(tmp_path, llama):
    folder = write(tmp_path/'x', llama[0], None)
    (folder/'pytorch_model.bin').write_bytes(pickle.dumps(Trap(tmp_path/'sprung')))
    refused(folder, 'pytorch_model.bin is a pickle')
    (folder/'model.safetensors').write_bytes(pickle.dumps(Trap(tmp_path/'sprung')))
    refused(folder, 'is not a whole safetensors file')
    assert not (tmp_path/'sprung').exists()
    pickle.loads(pickle.dumps(Trap(tmp_path/'sprung'))).close()
    assert (tmp_path/'sprung').exists()

def test_saving_overwrites_nothing_and_finishes_with_the_config(tmp_path, monkeypatch):
    model = make(LLAMA_TINY)
    (tmp_path/'x').mkdir()
    save_hf(model, ByteTokenizer(), tmp_path/'x')
    before = {p.name: p.read_bytes() for p in (tmp_path/'x').iterdir()}
    with pytest.raises(WeightsError, match='is not empty'): save_hf(make(LLAMA_TINY, 7), ByteTokenizer(), tmp_path/'x')
    assert {p.name: p.read_bytes() for p in (tmp_path/'x').iterdir()} == before
    save_hf(model, ByteTokenizer(), tmp_path/'y')
    assert {p.name: p.read_bytes() for p in (tmp_path/'y').iterdir()} == before  # the same model, the same bytes
    def fail(self, folder): raise OSError('disk full')
    monkeypatch.setattr(ByteTokenizer, 'save', fail)
    with pytest.raises(OSError): save_hf(model, ByteTokenizer(), tmp_path/'z')
    with pytest.raises(WeightsError, match='no run, no checkpoint, no Hugging Face folder'): load_model(tmp_path/'z')

def test_the_metadata_that_transformers_4_asks_for(tmp_path):
    save_hf(make(LLAMA_TINY), ByteTokenizer(), tmp_path/'x')
    with safe_open(tmp_path/'x'/'model.safetensors', 'pt') as f: assert f.metadata() == {'format': 'pt'}

def test_saving_leaves_the_model_alone(tmp_path):
    model = make(GPT2_TINY)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    save_hf(model, ByteTokenizer(), tmp_path/'x')
    again = load_hf(tmp_path/'x')
    again.embed.weight.add_(1)
    (tmp_path/'x'/'model.safetensors').unlink()
    for n, t in model.state_dict().items(): assert torch.equal(t, before[n])


# ---- load_model
def write_run(run, config, updates=(1, 2), tokenizer=None):
    for update in updates:
        save_checkpoint(run/'checkpoints'/f'step_{update:08d}', model_tensors(make(config, update)), {}, dict(update=update, model_config=asdict(config)))
    (tokenizer or ByteTokenizer()).save(run)
    return run

@pytest.mark.parametrize('config', [GPT2_TINY, LLAMA_TINY, replace(LLAMA_TINY, norm='layer', bias=True, tie_head=False, activation='gelu'),
                                    replace(GPT2_TINY, dropout=0.3, bias=False, n_kv_head=1), QWEN2_TINY, QWEN3_TINY, LLAMA3_TINY,
                                    replace(GPT2_TINY, qk_norm=True)])
def test_runs_and_checkpoints(tmp_path, config):
    run = write_run(tmp_path/'my run', config)
    loaded = load_model(str(run))
    assert (loaded.name, loaded.tokenizer.kind, loaded.model.config) == ('my run', 'byte', replace(config, dropout=0.0))
    assert torch.equal(loaded.model(IDS), make(config, 2)(IDS))
    assert not loaded.model.training and not any(p.requires_grad for p in loaded.model.parameters())
    first = load_model(run/'checkpoints'/'step_00000001')
    assert first.name == 'my run/step_00000001' and torch.equal(first.model(IDS), make(config, 1)(IDS))

def test_a_checkpoint_taken_elsewhere(tmp_path, monkeypatch):
    "With a tokenizer of its own, and named from inside"
    run = write_run(tmp_path/'run', LLAMA_TINY)
    (run/'checkpoints'/'step_00000002').rename(tmp_path/'best')
    with pytest.raises(WeightsError, match='tokenizer.json'): load_model(tmp_path/'best')
    CharTokenizer('abc').save(tmp_path/'best')
    assert load_model(tmp_path/'best').tokenizer.kind == 'char' and load_model(tmp_path/'best').name == 'best'
    monkeypatch.chdir(run/'checkpoints'/'step_00000001')
    assert load_model('.').name == 'run/step_00000001'
    monkeypatch.chdir(run)
    assert load_model('.').name == 'run'

def test_torn_runs(tmp_path):
    run = write_run(tmp_path/'run', LLAMA_TINY)
    newest, older = (run/'checkpoints'/f'step_{i:08d}' for i in (2, 1))
    (newest/'state.json').unlink()
    assert torch.equal(load_model(run).model(IDS), make(LLAMA_TINY, 1)(IDS))
    with pytest.raises(WeightsError, match='step_00000002 is not a whole checkpoint'): load_model(newest)
    torn = bytearray((older/'model.safetensors').read_bytes())
    torn[-1] ^= 1
    (older/'model.safetensors').write_bytes(torn)
    with pytest.raises(WeightsError, match='model.safetensors is not as it was written'): load_model(older)
    with pytest.raises(WeightsError, match='checkpoints has no whole checkpoint: .*step_00000002/state.json'): load_model(run)
    (tmp_path/'new'/'checkpoints').mkdir(parents=True)
    with pytest.raises(WeightsError, match='has no whole checkpoint: it is empty'): load_model(tmp_path/'new')

@pytest.mark.parametrize('model_config, message', [
    (None, 'is not a whole checkpoint'), ({'vocab_size': 256, 'n_flavours': 6}, 'n_flavours'), ({'vocab_size': 0}, 'vocab_size=0'),
    (asdict(LLAMA_TINY) | {'n_layer': 3}, '6 of 20 tensors missing, first layers.2.norm1.weight')])
def test_checkpoints_of_another_model(tmp_path, model_config, message):
    save_checkpoint(tmp_path/'step_00000001', model_tensors(make(LLAMA_TINY)), {}, dict(update=1, model_config=model_config))
    with pytest.raises(WeightsError) as e: load_model(tmp_path/'step_00000001')
    assert message in str(e.value)

def test_paths_that_hold_no_model(tmp_path, llama):
    (tmp_path/'some.gguf').write_bytes(b'GGUF')
    (tmp_path/'notes.txt').write_text('hello')
    (tmp_path/'empty').mkdir()
    for name, message in {'nowhere': 'there is no such file or folder', 'nowhere.gguf': 'there is no such file or folder', 'some.gguf': 'the version needs 4 bytes, 0 are left',
                          'notes.txt': 'is a file, neither a .gguf nor a folder with a model', 'empty': 'has no checkpoints/, state.json or config.json'}.items():
        with pytest.raises(WeightsError) as e: load_model(tmp_path/name)
        assert str(e.value).startswith(str(tmp_path/name)) and message in str(e.value)
    with pytest.raises(WeightsError, match='tokenizer.json: there is no such file'): load_model(write(tmp_path/'x', *llama))
    with pytest.raises(WeightsError, match='not a tokenizer'): load_model(write(tmp_path/'x', *llama, **{'tokenizer.json': '{}'}))
    with pytest.raises(WeightsError, match='has neither model.safetensors nor'): load_model(write(tmp_path/'y', llama[0], None))

def test_a_tokenizer_that_is_too_large(tmp_path):
    tokenizer = BPETokenizer.train(['the cat'], 257)
    with pytest.raises(WeightsError, match='the tokenizer has 257 tokens, the model only vocab_size=256'): save_hf(make(LLAMA_TINY), tokenizer, tmp_path/'x')
    assert not (tmp_path/'x').exists()
    with pytest.raises(WeightsError, match='257 tokens'): load_model(write_run(tmp_path/'run', LLAMA_TINY, tokenizer=tokenizer))
