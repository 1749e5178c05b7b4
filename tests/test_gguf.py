"GGUF files: the same model as the folder they were made from, the same tokenizer, and every way in which a file can lie"
import json
import re
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import fuzz_files
import gguf
import numpy as np
import pytest
import torch
from gguf_files import bytes_tokenizer, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from test_weights import GPT2_TINY, IDS, LLAMA_TINY, QWEN2_TINY, QWEN3_TINY, hf, make  # noqa: F401
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from minigpt.attention import rope_frequencies, stretch_frequencies
from minigpt.checkpoint import model_tensors
from minigpt.cli import main
from minigpt.kv_cache import KVCache
from minigpt.tokenizer import CharTokenizer, load_tokenizer
from minigpt.weights import KINDS, WeightsError, load_hf, load_model, open_gguf, open_model, save_hf

settings.register_profile('fixed', derandomize=True, deadline=None, max_examples=100)
settings.load_profile('fixed')

WIDE = dict(n_embd=256, ffn_dim=512, n_layer=2)
ARCHITECTURES = {'gpt2': GPT2_TINY, 'llama': LLAMA_TINY, 'llama untied': replace(LLAMA_TINY, tie_head=False, head_dim=16, rope_theta=5e5),
                 'llama biases': replace(LLAMA_TINY, bias=True), 'qwen2': QWEN2_TINY, 'qwen3': QWEN3_TINY, 'qwen3 untied': replace(QWEN3_TINY, tie_head=False)}


def folder_of(config, folder):
    "A folder in Hugging Face's format with weights of our own"
    return save_hf(make(config), CharTokenizer('ab'), folder)


def same_weights(a, b):
    assert a.config == b.config
    for name, t in model_tensors(a).items(): assert torch.equal(t, model_tensors(b)[name]), name


# ---- the same model
@pytest.mark.parametrize('kind', ['F32', 'F16', 'BF16', 'Q8_0', 'Q4_0', 'Q4_1', 'Q5_0'])
@pytest.mark.parametrize('name', ARCHITECTURES)
def test_a_file_is_the_folder_it_was_made_from(tmp_path, name, kind):
    config = ARCHITECTURES[name] if kind in ('F32', 'F16', 'BF16') else replace(ARCHITECTURES[name], ffn_dim=64)
    folder = folder_of(config, tmp_path/'hf')
    said = write_gguf(tmp_path/'x.gguf', folder, kind)
    save_file({n: torch.from_numpy(t) for n, t in said.items()}, folder/'model.safetensors')
    wanted, loaded = load_hf(folder), load_model(tmp_path/'x.gguf')
    same_weights(loaded.model, wanted)
    assert torch.equal(loaded.model(IDS), wanted(IDS)) and wanted(IDS).std() > 0.1
    assert (loaded.name, loaded.stored, loaded.model.training) == ('x', None, False) and not any(p.requires_grad for p in loaded.model.parameters())


@pytest.mark.parametrize('kind', ['Q4_K', 'Q6_K'])
@pytest.mark.parametrize('name', ['gpt2', 'llama', 'qwen2', 'qwen3'])
def test_k_blocks_are_what_they_say(tmp_path, name, kind):
    folder = folder_of(replace(ARCHITECTURES[name], head_dim=64, **WIDE), tmp_path/'hf')
    said = write_gguf(tmp_path/'x.gguf', folder, kind)
    save_file({n: torch.from_numpy(t) for n, t in said.items()}, folder/'model.safetensors')
    loaded = load_model(tmp_path/'x.gguf')
    same_weights(loaded.model, load_hf(folder))
    assert loaded.model(IDS).isfinite().all()


@pytest.mark.parametrize('name', ARCHITECTURES)
def test_transformers_reads_the_same_file_and_says_the_same(hf, tmp_path, name):  # noqa: F811
    if name == 'llama biases': pytest.skip('transformers drops the biases of a llama GGUF')
    usual = dict(gpt2=dict(max_seq_len=1024), qwen3=dict(head_dim=128)).get(name.split()[0], {})  # transformers takes these for granted
    write_gguf(tmp_path/'x.gguf', folder_of(replace(ARCHITECTURES[name], **usual), tmp_path/'hf'))
    pytest.importorskip('accelerate', reason='transformers reads GGUF files with it')
    theirs = hf.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file='x.gguf', dtype=torch.float32).eval()
    with torch.no_grad(): torch.testing.assert_close(load_model(tmp_path/'x.gguf').model(IDS), theirs(IDS).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize('name', ['gpt2', 'llama', 'qwen2', 'qwen3'])
def test_a_file_becomes_a_folder(tmp_path, name):
    write_gguf(tmp_path/'x.gguf', folder_of(ARCHITECTURES[name], tmp_path/'hf'))
    loaded = load_model(tmp_path/'x.gguf')
    again = load_model(save_hf(loaded.model, loaded.tokenizer, tmp_path/'again', chat_template='{{ x }}'))
    same_weights(again.model, loaded.model)
    assert again.tokenizer.encode('é 12<|endoftext|>') == loaded.tokenizer.encode('é 12<|endoftext|>')
    assert (again.tokenizer.eos_token_id, again.chat_template) == (255, '{{ x }}')


@pytest.mark.parametrize('factor', [8.0, 32.0])
def test_stretched_angles(tmp_path, factor):
    config = replace(LLAMA_TINY, head_dim=32, rope_theta=5e5, rope_factor=factor)
    frequencies = rope_frequencies(32, 5e5)
    divisors = (frequencies / stretch_frequencies(frequencies, factor)).float().numpy()
    assert 1 in divisors and factor in divisors and len(set(divisors)) > 2
    folder = folder_of(config, tmp_path/'hf')
    write_gguf(tmp_path/'x.gguf', folder, rope_freqs=divisors)
    same_weights(load_model(tmp_path/'x.gguf').model, load_hf(folder))
    divisors[9] *= 1.01
    write_gguf(tmp_path/'y.gguf', folder, rope_freqs=divisors)
    with pytest.raises(WeightsError, match="rope_freqs.weight is not what Llama 3's rule gives for a factor of"): load_model(tmp_path/'y.gguf')
    write_gguf(tmp_path/'z.gguf', folder, rope_freqs=divisors[:5])
    with pytest.raises(WeightsError, match=r'rope_freqs.weight is F32 \(5,\), 16 numbers in F32 are needed'): load_model(tmp_path/'z.gguf')
    for odd in (float('inf'), float('nan'), 0, 0.5, -1):
        divisors = (frequencies / stretch_frequencies(frequencies, odd)).float().numpy() if odd == float('inf') else np.full(16, odd, np.float32)
        write_gguf(tmp_path/'odd.gguf', folder, rope_freqs=divisors)
        with pytest.raises(WeightsError, match=f'gives for a factor of {odd}'): load_model(tmp_path/'odd.gguf')


def test_blocks_are_reached_without_opening_them(tmp_path):
    "Rows in our order, bytes as stored: what a kernel computes with"
    folder = folder_of(replace(LLAMA_TINY, ffn_dim=64), tmp_path/'hf')
    for kind in ('Q8_0', 'Q4_0', 'Q4_1', 'Q5_0'):
        said = write_gguf(tmp_path/f'{kind}.gguf', folder, kind)
        opened = open_model(tmp_path/f'{kind}.gguf')
        for i in range(2):
            parts, where = opened.stored.parts(f'layers.{i}.qkv.weight'), f'model.layers.{i}.self_attn.'
            assert [(p.kind, p.shape) for p in parts] == [(kind, (32, 32)), (kind, (16, 32)), (kind, (16, 32))]
            for part, x in zip(parts, 'qkv'):
                blocks = part.blocks()
                assert blocks.dtype == np.uint8 and blocks.shape == (part.shape[0], KINDS[kind].num_bytes)
                values = gguf.quants.dequantize(np.ascontiguousarray(blocks), gguf.GGMLQuantizationType[kind])
                assert np.array_equal(values, said[f'{where}{x}_proj.weight'])
                assert np.array_equal(part.floats(3, 7).numpy(), said[f'{where}{x}_proj.weight'][3:7])
                assert np.array_equal(part.blocks(3, 7), blocks[3:7])


@given(st.sampled_from(sorted(KINDS)), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_all_kinds_of_blocks_bit_for_bit(kind, num_blocks, seed):
    blocks = np.random.default_rng(seed).integers(0, 256, (num_blocks, KINDS[kind].num_bytes), dtype=np.uint8)
    with np.errstate(all='ignore'):
        ours, theirs = KINDS[kind].floats(blocks), gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    assert ours.dtype == np.float32 and ours.shape == (num_blocks, KINDS[kind].values)
    assert np.array_equal(np.isnan(ours), np.isnan(theirs)) and np.array_equal(ours[~np.isnan(ours)], theirs[~np.isnan(theirs)])
    assert np.array_equal(np.signbit(ours), np.signbit(theirs)) or np.isnan(ours).any()
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]] == (KINDS[kind].values, KINDS[kind].num_bytes)


# ---- the same tokenizer
TEXT = """It's 3.14159 and IT'S 27182818284, we'LL see: naïve café, Ångström 12, 日本語のテキスト 🐈‍⬛\r\n\r\n\tdef f(x):\n        return  x  +1   \n<|mark|>x<tool>y</tool> <|mark|>
    e\u0301 ٣٤٥ ½ x²  …--->>\u00a0 Ünï\u200bcödé 1\n2\n\n\n3   <|mark|"""

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def their_tokenizer(family):
    "As each family's own `tokenizer.json` has it, trained here on a little text"
    t, byte_level = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel
    def split(pattern): return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), 'isolated'), byte_level(add_prefix_space=False, use_regex=False)])
    t.pre_tokenizer = {'gpt-2': byte_level(add_prefix_space=False), 'llama-bpe': split(LLAMA3), 'qwen2': split(QWEN2),
                       'smollm': pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level(add_prefix_space=False)])}[family]
    t.decoder = decoders.ByteLevel()
    if family == 'qwen2': t.normalizer = normalizers.NFC()
    t.train_from_iterator([TEXT.replace('<|mark|>', '')] * 2, trainers.BpeTrainer(vocab_size=420, special_tokens=['<|mark|>', '<|end|>'], show_progress=False,
                                                         initial_alphabet=byte_level.alphabet()))
    content = json.loads(t.to_str())
    content['added_tokens'].append(dict(content['added_tokens'][0], content='<tool>', id=len(content['model']['vocab']), special=False))
    content['model']['ignore_merges'] = family == 'llama-bpe'
    t = Tokenizer.from_str(json.dumps(content))
    if family == 'llama-bpe': t.post_processor = processors.TemplateProcessing(single=['<|mark|>', '$A'], special_tokens=[('<|mark|>', 0)])
    return t


def parts_of(tokenizer, family, **more):
    "What the converter writes"
    content, vocab = json.loads(tokenizer.to_str()), tokenizer.get_vocab(with_added_tokens=True)
    types = {t['id']: 3 if t['special'] else 4 for t in content['added_tokens']}
    return dict(tokenizer_model='gpt2', tokenizer_pre=family, token_list=sorted(vocab, key=vocab.get), token_types=[types.get(i, 1) for i in range(len(vocab))],
                token_merges=[' '.join(m) for m in content['model']['merges']], bos_token_id=0, eos_token_id=1) | more


@pytest.mark.parametrize('family', ['gpt-2', 'llama-bpe', 'qwen2', 'smollm'])
def test_the_tokenizer_inside_is_the_one_beside(tmp_path, family):
    theirs = their_tokenizer(family)
    theirs.save(str(tmp_path/'tokenizer.json'))
    (tmp_path/'tokenizer_config.json').write_text('{"eos_token": "<|end|>"}')
    config = replace(LLAMA_TINY, vocab_size=500)
    write_gguf(tmp_path/'x.gguf', folder_of(config, tmp_path/'hf'), tokenizer=parts_of(theirs, family, chat_template='{{ messages }}'))
    loaded, beside = load_model(tmp_path/'x.gguf'), load_tokenizer(tmp_path)
    inside = loaded.tokenizer
    for text in (TEXT, TEXT * 3, *TEXT.split(' '), '', ' ', '<|end|><|mark|>', 'ab<tool>12'):
        for special in (True, False): assert inside.encode(text, add_special_tokens=special) == beside.encode(text, add_special_tokens=special), text
    assert inside.decode(inside.encode(TEXT, False), skip_special_tokens=False) == (TEXT if family != 'qwen2' else TEXT.replace('e\u0301', 'é'))
    assert (inside.vocab_size, inside.special_ids, inside.eos_token_id) == (beside.vocab_size, beside.special_ids, beside.eos_token_id)
    assert [inside.token_bytes(i) for i in range(inside.vocab_size)] == [beside.token_bytes(i) for i in range(inside.vocab_size)]
    assert loaded.chat_template == '{{ messages }}'
    assert (inside.encode('x')[0] == 0) == (family == 'llama-bpe')


def test_a_file_says_whether_a_text_begins_with_a_mark(tmp_path):
    folder = folder_of(replace(LLAMA_TINY, vocab_size=500), tmp_path/'hf')
    for family, begins in (('gpt-2', True), ('llama-bpe', False)):
        write_gguf(tmp_path/'x.gguf', folder, tokenizer=parts_of(their_tokenizer(family), family, add_bos_token=begins))
        assert (load_model(tmp_path/'x.gguf').tokenizer.encode('x')[0] == 0) == begins


@pytest.mark.parametrize('changes, message', [
    (dict(tokenizer_model='llama'), "tokenizer.ggml.model='llama' is not supported: this version reads 'gpt2'"),
    (dict(tokenizer_pre='tekken'), "tokenizer.ggml.pre='tekken' is not supported: this version reads 'gpt-2', 'smollm'"),
    (dict(tokenizer_pre='default'), "tokenizer.ggml.pre='default' is not supported"),
    (dict(eos_token_id=256), 'tokenizer.ggml.eos_token_id=256 is not in [0, 256)'),
    (dict(add_bos_token=True), 'add_bos_token=True needs a bos_token_id'),
    (dict(add_eos_token=True), 'tokenizer.ggml.add_eos_token=True is not supported'),
    (dict(token_types=[1] * 255), 'token_type has 255 entries for 256 tokens'),
    (dict(token_merges=['a']), "merge 'a' is not two tokens that make a third"),
    (dict(token_merges=['a b']), "merge 'a b' is not two tokens that make a third"),
    (dict(token_merges=['a b c']), "merge 'a b c' is not two tokens that make a third"),
    (dict(token_list=['a'] * 256), '256 tokens, but only 1 different ones'),
    (dict(token_list=[f't{i}' for i in range(257)], token_types=[1] * 257), 'the tokenizer has 257 tokens, the model only vocab_size=256'),
])
def test_tokenizers_that_are_refused(tmp_path, changes, message):
    write_gguf(tmp_path/'x.gguf', folder_of(LLAMA_TINY, tmp_path/'hf'), tokenizer=bytes_tokenizer(256) | changes)
    with pytest.raises(WeightsError) as e: load_model(tmp_path/'x.gguf')
    assert message in str(e.value) and str(tmp_path/'x.gguf') in str(e.value)


# ---- what is refused
@pytest.mark.parametrize('key, add, value, message', [
    ('llama.rope.scaling.type', 'string', 'yarn', "rope.scaling.type='yarn' is not supported: this version reads 'none'"),
    ('llama.rope.scaling.factor', 'float32', 2.0, 'llama.rope.scaling.factor=2.0 is not supported'),
    ('llama.attention.sliding_window', 'uint32', 64, 'llama.attention.sliding_window=64 is not supported'),
    ('llama.expert_count', 'uint32', 8, 'expert_count=8 is not supported: this version reads 0'),
    ('llama.logit_scale', 'float32', 0.5, 'llama.logit_scale=0.5 is not supported'),
    ('llama.attention.causal', 'bool', False, 'attention.causal=False is not supported'),
    ('llama.rope.dimension_count', 'uint32', 4, 'llama.rope.dimension_count=4 is not supported: this version reads 8'),
    ('llama.attention.value_length', 'uint32', 16, 'llama.attention.value_length=16 is not supported: this version reads 8'),
    ('split.count', 'uint16', 3, 'split.count=3 is not supported'),
    ('general.alignment', 'uint32', 24, 'general.alignment=24 is not supported'),
])
def test_keys_that_are_refused(tmp_path, key, add, value, message):
    folder = folder_of(LLAMA_TINY, tmp_path/'hf')
    write_gguf(tmp_path/'x.gguf', folder, changes={key: (add, value)} if key != 'general.alignment' else None)
    if key == 'general.alignment': tampered(tmp_path/'x.gguf', b'general.file_type', b'general.alignment', struct.pack('<II', 4, value))
    with pytest.raises(WeightsError) as e: load_model(tmp_path/'x.gguf')
    assert message in str(e.value)


def tampered(path, old_key, new_key, value):
    "Another key of the same length, and its value"
    whole = bytearray(path.read_bytes())
    at = whole.index(old_key)
    assert len(old_key) == len(new_key)
    whole[at:at + len(new_key) + len(value)] = new_key + value
    path.write_bytes(whole)


def test_settings_that_are_one_for_each_layer(tmp_path):
    "An array is as good as a number, if all are alike"
    folder = folder_of(LLAMA_TINY, tmp_path/'hf')
    for counts, message in (([2, 2], None), ([2, 1], r'llama.attention.head_count_kv=\[2 1\] is not supported')):
        class Writer(gguf.GGUFWriter):
            def add_head_count_kv(self, count, counts=counts): self.add_array('llama.attention.head_count_kv', counts)
        plain, gguf.GGUFWriter = gguf.GGUFWriter, Writer
        try: write_gguf(tmp_path/'x.gguf', folder)
        finally: gguf.GGUFWriter = plain
        if message is None: same_weights(load_model(tmp_path/'x.gguf').model, load_hf(folder))
        else:
            with pytest.raises(WeightsError, match=message): load_model(tmp_path/'x.gguf')


def test_tensors_that_no_such_model_has(tmp_path):
    folder = folder_of(LLAMA_TINY, tmp_path/'hf')
    write_gguf(tmp_path/'x.gguf', folder, **{'blk.0.attn_q_norm.weight': np.ones(8, np.float32)})
    with pytest.raises(WeightsError, match='unexpected tensor blk.0.attn_q_norm.weight'): load_model(tmp_path/'x.gguf')
    write_gguf(tmp_path/'y.gguf', folder_of(QWEN2_TINY, tmp_path/'hf2'), rope_freqs=np.ones(4, np.float32))
    with pytest.raises(WeightsError, match='unexpected tensor rope_freqs.weight'): load_model(tmp_path/'y.gguf')
    write_gguf(tmp_path/'z.gguf', folder, **{'blk.1.attn_q.bias': np.ones(32, np.float32)})
    with pytest.raises(WeightsError, match='unexpected tensor blk.1.attn_q.bias'): load_model(tmp_path/'z.gguf')


# ---- files that lie
@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp('whole')
    write_gguf(folder/'x.gguf', folder_of(replace(LLAMA_TINY, n_layer=1), folder/'hf'))
    return (folder/'x.gguf').read_bytes()


def text(s): return struct.pack('<Q', len(s)) + s
def header(num_tensors, num_keys, rest=b'', version=3, magic=b'GGUF'): return magic + struct.pack('<IQQ', version, num_tensors, num_keys) + rest
def tensor(name=b't', dims=(4,), kind=0, offset=0): return text(name) + struct.pack(f'<I{len(dims)}QIQ', len(dims), *dims, kind, offset)

@pytest.mark.parametrize('content, message', [
    (b'', 'no GGUF file: '), (b'GG', 'the first word needs 4 bytes, 2 are left'), (b'GGUF', 'the version needs 4 bytes, 0 are left'),
    (b'PK\3\4' + bytes(40), "begins with b'PK"), (header(0, 0, version=1), 'version=1 is not supported: this version reads 2, 3'),
    (header(0, 0, version=3 << 24), 'version=50331648 is not supported'), (header(2**60, 0, bytes(99)), '1152921504606846976 tensors need'),
    (header(0, 2**63, bytes(99)), '9223372036854775808 keys need'), (header(5, 0, bytes(99)), '5 tensors need 125 bytes, 107 are left'),
    (header(0, 1, text(b'a') + struct.pack('<IIQ', 9, 8, 9) + bytes(64)), '9 a need 72 bytes, 64 are left'),
    (header(0, 1, struct.pack('<Q', 2**64 - 1) + bytes(20)), 'a key needs 18446744073709551615 bytes, 20 are left'),
    (header(0, 1, text(b'\xff\xfe') + bytes(20)), 'a key: invalid start byte at byte 0'),
    (header(0, 1, text(b'a') + struct.pack('<I', 13) + bytes(20)), 'a: type=13 is not supported'),
    (header(0, 1, text(b'k' * 5000) + struct.pack('<I', 13) + bytes(20)), 'k' * 499),
    (header(0, 1, text(b'a') + struct.pack('<IIQ', 9, 0, 2**40) + bytes(64)), '1099511627776 a need 1099511627776 bytes, 64 are left'),
    (header(0, 1, text(b'a') + struct.pack('<IIQ', 9, 8, 2**61) + bytes(64)), '2305843009213693952 a need'),
    (header(0, 1, text(b'a') + struct.pack('<IIQ', 9, 9, 1) * 50), 'a: type of an array=9 is not supported'),
    (header(0, 2, (text(b'a') + struct.pack('<II', 4, 1)) * 2), 'the key a is there twice'),
    (header(1, 0, tensor(dims=())+ bytes(99)), 't: number of dimensions=0 is not supported'),
    (header(1, 0, text(b't') + struct.pack('<I', 2**31) + bytes(99)), 't: number of dimensions=2147483648 is not supported'),
    (header(1, 0, tensor(kind=99) + bytes(99)), 't is of kind 99, supported are 0 (F32), 1 (F16)'),
    (header(1, 0, tensor(dims=(0, 4)) + bytes(99)), 't is (4, 0), without a single number'),
    (header(1, 0, tensor(dims=(2**63, 2**63, 2**63, 4)) + bytes(99)), 't ends at byte'),
    (header(1, 0, tensor(dims=(31,), kind=8) + bytes(99)), 't has rows of 31 numbers, not a multiple of the 32 in a Q8_0 block'),
    (header(1, 0, tensor(offset=2**63) + bytes(99)), 't ends at byte'), (header(1, 0, tensor(offset=4) + bytes(99)), 't begins at 4, not a multiple of 32'),
    (header(2, 0, tensor() * 2 + bytes(99)), 't is there twice'), (header(2, 0, tensor() + tensor(b'u') + bytes(99)), 'u begins at 0, within the tensor before it'),
    (header(0, 0), "general.architecture='None' is not supported: this version reads 'gpt2', 'llama', 'qwen2', 'qwen3'"),
    (header(0, 1, text(b'general.architecture') + struct.pack('<I', 8) + text(b'llama')), 'token_embd.weight is missing'),
])
def test_headers_that_lie(tmp_path, content, message):
    (tmp_path/'x.gguf').write_bytes(content)
    with pytest.raises(WeightsError) as e: load_model(tmp_path/'x.gguf')
    assert message in str(e.value) and str(e.value).startswith(str(tmp_path/'x.gguf')) and len(str(e.value)) < 1000


def test_each_cut_is_noticed(tmp_path, whole):
    for length in [*range(0, 2000, 7), *range(2000, len(whole) - 32, 997), len(whole) - 32]:
        (tmp_path/'x.gguf').write_bytes(whole[:length])
        with pytest.raises(WeightsError): open_gguf(tmp_path/'x.gguf')


@given(st.data())
def test_no_damage_goes_further_than_weights_error(tmp_path_factory, whole, data):
    path, changed = tmp_path_factory.mktemp('fuzz')/'x.gguf', bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))): changed[data.draw(st.integers(0, 7000))] = data.draw(st.sampled_from([0, 1, 8, 9, 127, 255]))
    path.write_bytes(changed)
    try: load_model(path)
    except WeightsError as e: assert len(str(e)) < 2000


# ---- a model as large as real ones
def spent(path):
    "The weights of a model, and the anonymous memory that loading it takes at most, in a process of its own"
    done = subprocess.run([sys.executable, Path(__file__).parent/'peak_memory.py', path], capture_output=True, text=True, timeout=300, check=True)
    return json.loads(done.stdout)


@pytest.mark.skipif(not Path('/proc/self/status').exists(), reason='memory is told apart in /proc')
def test_loading_takes_little_more_than_the_weights(tmp_path):
    "90 MB in fp32; one matrix is a third of it, so that holding it twice would be seen"
    config = replace(LLAMA_TINY, vocab_size=16_000, n_embd=512, n_head=8, n_kv_head=8, head_dim=64, ffn_dim=1792, n_layer=4, max_seq_len=256)
    folder = save_hf(make(config), CharTokenizer('ab'), tmp_path/'hf')
    write_gguf(tmp_path/'x.gguf', folder, 'Q4_0')
    for path in (folder, tmp_path/'x.gguf'):
        found = spent(path)
        assert found['weights'] > 90e6 and found['peak'] < 1.3 * found['weights'], found
    gpt2 = save_hf(make(replace(GPT2_TINY, vocab_size=16_000, n_embd=512, n_head=8, ffn_dim=2048, n_kv_head=8, head_dim=64, n_layer=4)), CharTokenizer('ab'), tmp_path/'gpt2', dtype='BF16')
    found = spent(gpt2)
    assert found['weights'] > 80e6 and found['peak'] < 1.3 * found['weights'], found


# ---- the command, and many files that lie
def go_on(model, ids, num_tokens):
    "Greedy tokens by the simple loop, and the logits that each was the highest of"
    cache, said, rows = KVCache(model.config), [], []
    new = list(ids)
    for _ in range(num_tokens):
        start = len(ids) + len(said) - len(new)
        cache.begin(range(start, start + len(new)))
        hidden = model.hidden(torch.tensor(new), torch.arange(start, start + len(new)), cache)
        rows.append(model.logits(hidden[-1]))
        said.append(int(rows[-1].argmax()))
        new = said[-1:]
    return said, rows


def test_the_command_takes_a_file(tmp_path, capsys):
    write_gguf(tmp_path/'x.gguf', folder_of(replace(QWEN3_TINY, max_seq_len=64), tmp_path/'hf'))
    assert main(['generate', str(tmp_path/'x.gguf'), 'the cat', '--max-tokens', '9', '--temperature', '0', '--json']) == 0
    answer, model = json.loads(capsys.readouterr().out), load_model(tmp_path/'x.gguf').model
    ids = load_model(tmp_path/'x.gguf').tokenizer.encode('the cat')
    wanted = go_on(model, ids, 9)[0]
    assert answer['token_ids'] == wanted[:len(answer['token_ids'])] and (len(answer['token_ids']) == 9 or answer['finish_reason'] == 'stop')
    (tmp_path/'y.gguf').write_bytes((tmp_path/'x.gguf').read_bytes()[:-50])
    assert main(['generate', str(tmp_path/'y.gguf'), 'the cat']) == 2
    out, err = capsys.readouterr()
    assert out == '' and err.count('\n') == 1 and 'y.gguf: output_norm.weight ends at byte' in err


@pytest.mark.parametrize('kind', ['gguf', 'config', 'safetensors', 'index', 'tokenizer'])
def test_damaged_files_are_refused_and_nothing_worse(tmp_path, kind):
    "A few of what fuzz_files.py tries by the thousand"
    done = subprocess.run([sys.executable, Path(__file__).parent/'fuzz_files.py', '--cases', '100', '--only', kind], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    loaded, refused = map(int, re.search(r'100 cases, (\d+) loaded, (\d+) refused', done.stdout).groups())
    assert loaded + refused == 100 and refused > 50


@pytest.mark.skipif(not Path('/proc/self/status').exists(), reason='a limit on memory')
def test_the_fuzzer_notices(tmp_path, monkeypatch):
    "An exception of another kind, and a wild allocation"
    fuzz_files.make_models(tmp_path)
    def crash(path): raise KeyError('a')
    monkeypatch.setattr(fuzz_files, 'load_model', crash)
    with pytest.raises(AssertionError, match='config, case 0, seed 0: KeyError'): fuzz_files.fuzz('config', 5, 0, tmp_path)
    monkeypatch.setattr(fuzz_files, 'load_model', lambda path: bytearray(2**30))
    with pytest.raises(AssertionError, match='gguf, case 0, seed 0: MemoryError'): fuzz_files.fuzz('gguf', 5, 0, tmp_path)
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
