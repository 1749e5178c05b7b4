"GGUF files as llama.cpp's converter writes them, made from a folder in Hugging Face's format by the format's own package"
import json
import re

import gguf
import numpy as np
from safetensors.torch import load_file

NAMES = {  # Theirs, from Hugging Face's; written down apart from ours
    r'transformer\.wte': 'token_embd', r'transformer\.wpe': 'position_embd', r'transformer\.ln_f': 'output_norm', r'transformer\.h\.(\d+)\.ln_1': r'blk.\1.attn_norm',
    r'transformer\.h\.(\d+)\.ln_2': r'blk.\1.ffn_norm', r'transformer\.h\.(\d+)\.attn\.c_attn': r'blk.\1.attn_qkv', r'transformer\.h\.(\d+)\.attn\.c_proj': r'blk.\1.attn_output',
    r'transformer\.h\.(\d+)\.mlp\.c_fc': r'blk.\1.ffn_up', r'transformer\.h\.(\d+)\.mlp\.c_proj': r'blk.\1.ffn_down', r'model\.embed_tokens': 'token_embd',
    r'model\.norm': 'output_norm', r'lm_head': 'output', r'model\.layers\.(\d+)\.input_layernorm': r'blk.\1.attn_norm',
    r'model\.layers\.(\d+)\.post_attention_layernorm': r'blk.\1.ffn_norm', r'model\.layers\.(\d+)\.self_attn\.([qkv])_proj': r'blk.\1.attn_\2',
    r'model\.layers\.(\d+)\.self_attn\.([qk])_norm': r'blk.\1.attn_\2_norm', r'model\.layers\.(\d+)\.self_attn\.o_proj': r'blk.\1.attn_output',
    r'model\.layers\.(\d+)\.mlp\.(gate|up|down)_proj': r'blk.\1.ffn_\2'}


def their_name(name):
    stem, kind = name.rsplit('.', 1)
    return next(re.sub(pattern, new, stem) for pattern, new in NAMES.items() if re.fullmatch(pattern, stem)) + '.' + kind


def random_blocks(rng, rows, columns, kind):
    "Rows of blocks whose scales are small: what the package can't quantise itself"
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (rows * columns // values, size), dtype=np.uint8)
    for at in dict(Q4_K=(0, 2), Q6_K=(208,))[kind]: blocks[:, at:at + 2] = rng.uniform(1e-4, 4e-4, (len(blocks), 1)).astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def as_stored(rng, t, kind):
    "A matrix as blocks, and what they say"
    quant = gguf.GGMLQuantizationType[kind]
    data = random_blocks(rng, *t.shape, kind) if kind in ('Q4_K', 'Q6_K') else gguf.quants.quantize(t, quant)
    return data, gguf.quants.dequantize(data, quant)


def permuted(t, num_heads):
    "Rows of a head as llama.cpp wants them: the two that turn together side by side"
    return t.reshape(num_heads, 2, -1, *t.shape[1:]).swapaxes(1, 2).reshape(t.shape)


def write_gguf(path, folder, kind='F32', tokenizer=None, rope_freqs=None, changes=None, **extra):
    "Write a folder's model; returns its tensors by Hugging Face's names, with the values that the file now has"
    content, tensors, rng = json.loads((folder/'config.json').read_text()), load_file(folder/'model.safetensors'), np.random.default_rng(0)
    arch, c, said = content['model_type'], content, {}
    w = gguf.GGUFWriter(path, arch)
    gpt2 = arch == 'gpt2'
    w.add_block_count(c['n_layer'] if gpt2 else c['num_hidden_layers'])
    w.add_context_length(c['n_positions'] if gpt2 else c['max_position_embeddings'])
    w.add_embedding_length(c['n_embd'] if gpt2 else c['hidden_size'])
    w.add_feed_forward_length(c['n_inner'] if gpt2 else c['intermediate_size'])
    heads = c['n_head'] if gpt2 else c['num_attention_heads']
    w.add_head_count(heads)
    w.add_file_type(0)
    if gpt2: w.add_layer_norm_eps(c['layer_norm_epsilon'])
    else:
        w.add_head_count_kv(c['num_key_value_heads'])
        w.add_layer_norm_rms_eps(c['rms_norm_eps'])
        w.add_rope_freq_base(c['rope_theta'])
        w.add_key_length(c['head_dim'])
        w.add_value_length(c['head_dim'])
        w.add_rope_dimension_count(c['head_dim'])
        w.add_vocab_size(c['vocab_size'])
    for key, value in (tokenizer or bytes_tokenizer(c['vocab_size'])).items(): getattr(w, f'add_{key}')(value)
    for key, (add, value) in (changes or {}).items(): getattr(w, f'add_{add}')(key, value)
    if rope_freqs is not None: w.add_tensor('rope_freqs.weight', rope_freqs)
    for name, t in tensors.items():
        t = t.float().numpy()
        turned = gpt2 and re.search(r'(c_attn|c_proj|c_fc)\.weight', name)
        t, data, quant = t.T.copy() if turned else t, None, None
        if t.ndim == 2 and kind != 'F32': data, t = as_stored(rng, t, kind)
        said[name] = t.T.copy() if turned else t
        data = t if data is None else data
        if arch == 'llama' and (m := re.search(r'([qk])_proj', name)): data = permuted(data, heads if m[1] == 'q' else c['num_key_value_heads'])
        quant = gguf.GGMLQuantizationType[kind] if data.dtype == np.uint8 else None
        w.add_tensor(their_name(name), np.ascontiguousarray(data), raw_dtype=quant)
    for name, t in extra.items(): w.add_tensor(name, t)
    for step in (w.write_header_to_file, w.write_kv_data_to_file, w.write_tensors_to_file, w.close): step()
    return said


def bytes_tokenizer(vocab_size, pre='gpt-2'):
    "A token for each byte, an end, and padding: no merges"
    from minigpt.tokenizer import byte_alphabet
    tokens = [*byte_alphabet()][:vocab_size - 1] + ['<|endoftext|>']
    return dict(tokenizer_model='gpt2', tokenizer_pre=pre, token_list=tokens, token_types=[1] * (len(tokens) - 1) + [3], token_merges=[], eos_token_id=len(tokens) - 1)
