"""Files that lie, by the thousand: python tests/fuzz_files.py [--cases 20000] [--seed 0] [--only gguf config safetensors index tokenizer]

Each case damages one file of a whole toy model and loads it. It must load, or be refused with a `WeightsError`: no other exception, no more
than a few seconds, and no more memory than the process had, and some. What fails is left in /tmp for a closer look.
"""
import argparse
import copy
import json
import random
import re
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
from gguf_files import write_gguf

from minigpt.model import GPT, GPTConfig, init_weights
from minigpt.tokenizer import BPETokenizer
from minigpt.weights import WeightsError, load_model, save_hf

try: import resource
except ImportError: resource = None  # Windows

SPARE_BYTES, LIMIT_S = 2**29, 5
LLAMA = GPTConfig(300, max_seq_len=24, n_layer=2, n_head=4, n_embd=32, n_kv_head=2, ffn_dim=64, position='rope', norm='rms', activation='swiglu', bias=False,
                  rope_factor=8.0, rope_theta=5e5)
MODELS = {'llama': LLAMA, 'gpt2': GPTConfig(300, max_seq_len=24, n_layer=2, n_head=4, n_embd=32, ffn_dim=64, activation='gelu_tanh'),
          'qwen2': replace(LLAMA, rope_factor=1.0, qkv_bias=True), 'qwen3': replace(LLAMA, rope_factor=1.0, qk_norm=True, tie_head=False)}
LENGTHS = [0, 1, 2, 7, 8, 9, 13, 31, 32, 255, 256, 2**15, 2**16, 2**20, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**53, 2**60, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
VALUES = [None, True, False, 0, 1, -1, 2, 3, 1.5, -0.0, 1e308, 1e-320, float('inf'), float('nan'), 2**31, 2**53, 2**63, 10**30, 10**400, '', 'x', '\0', '../x', 'llama', 'é' * 99,
          [], [1], [[]], {}, {'a': 1}, {'rope_type': 'llama3'}, {'rope_type': 'yarn', 'factor': 2}, {'rope_type': 'default', 'rope_theta': -5}, 10**9, 10**6, 24, 64, 300]


# ---- the damage
def damaged_bytes(rng, whole, header):
    "Some changes to the first `header` bytes: bits, bytes, lengths, things left out, put in, or copied elsewhere; or the end cut off"
    data = bytearray(whole)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at, how = rng.randrange(max(1, min(header, len(data)))), rng.randrange(8)
        n = rng.choice((1, 2, 4, 8, 8, 16, 64))
        if how == 0: data[at] ^= 1 << rng.randrange(8)
        elif how == 1: data[at] = rng.randrange(256)
        elif how in (2, 3): data[at:at + 8] = struct.pack('<Q', rng.choice(LENGTHS))
        elif how == 4: data[at:at + 4] = struct.pack('<I', rng.choice(LENGTHS) % 2**32)
        elif how == 5: del data[at:at + n]
        elif how == 6: data[at:at] = data[(start := rng.randrange(max(1, header))):start + n]
        else: data = data[:rng.choice((at, rng.randrange(len(data) + 1)))] or bytearray(b'')
        if not data: break
    return bytes(data)


def spots(value, path=()):
    "Paths of all values in a JSON text"
    yield path
    for key, inner in (value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()): yield from spots(inner, (*path, key))


def damaged_json(rng, whole):
    "Some values replaced, left out, moved or written otherwise; sometimes the text itself is damaged"
    if rng.random() < 0.15: return damaged_bytes(rng, whole, len(whole))
    if rng.random() < 0.02: return rng.choice((b'[' * 10**5, b'{"a":' * 10**5, b'9' * 10**5, b'', b'\xff\xfe', b'null', b'"x"', b'\xef\xbb\xbf{}'))
    content = json.loads(whole)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        path = rng.choice([p for p in spots(content) if p] or [()])
        if not path: break
        owner = content
        for key in path[:-1]: owner = owner[key]
        how = rng.random()
        if how < 0.7: owner[path[-1]] = copy.deepcopy(rng.choice(VALUES))  # or the next round writes into it
        elif how < 0.8: del owner[path[-1]]
        elif isinstance(owner, dict): owner[rng.choice(sorted(owner))] = copy.deepcopy(owner[path[-1]])
    return json.dumps(content).encode()


# ---- what is damaged
def make_models(folder):
    "Whole toys of each family, as a folder, as a folder of shards and as a GGUF file"
    tokenizer = BPETokenizer.train(['the cat and the hat and the bat 12 345'], 280)
    for name, config in MODELS.items():
        model = init_weights(GPT(config), torch.Generator().manual_seed(0)).eval()
        save_hf(model, tokenizer, folder/name)
        save_hf(model, tokenizer, folder/f'{name}-shards', shard_bytes=30_000)
        parts = json.loads(tokenizer.tokenizer.to_str())['model']
        tokens = sorted(parts['vocab'], key=parts['vocab'].get)
        said = dict(tokenizer_model='gpt2', tokenizer_pre=dict(llama='llama-bpe', gpt2='gpt-2').get(name, 'qwen2'), token_list=tokens, token_types=[3] + [1] * (len(tokens) - 1),
                    token_merges=[' '.join(m) for m in parts['merges']], bos_token_id=0, eos_token_id=0, chat_template='{{ messages }}')
        freqs = None
        if config.rope_factor > 1:
            from minigpt.attention import rope_frequencies, stretch_frequencies
            f = rope_frequencies(config.head_dim, config.rope_theta)
            freqs = (f / stretch_frequencies(f, config.rope_factor)).float().numpy()
        write_gguf(folder/f'{name}.gguf', folder/name, 'Q8_0', said, freqs)


def targets(folder, kind):
    "Which model is loaded, which of its files is damaged, and how"
    for name in MODELS:
        if kind == 'gguf': yield folder/f'{name}.gguf', folder/f'{name}.gguf', lambda rng, whole: damaged_bytes(rng, whole, whole.index(b'attn_norm') + 3000 if rng.random() < .5 else 2000)
        if kind == 'config': yield folder/name, folder/name/'config.json', damaged_json
        if kind == 'tokenizer': yield folder/name, folder/name/'tokenizer.json', damaged_json
        if kind == 'index': yield folder/f'{name}-shards', folder/f'{name}-shards'/'model.safetensors.index.json', damaged_json
        if kind == 'safetensors':
            yield folder/name, folder/name/'model.safetensors', damaged_safetensors


def damaged_safetensors(rng, whole):
    "The header damaged as bytes, or as JSON, its length put right again"
    n = 8 + struct.unpack('<Q', whole[:8])[0]
    if rng.random() < 0.4: return damaged_bytes(rng, whole, n)
    text = damaged_json(rng, whole[8:n])
    return struct.pack('<Q', len(text)) + text + whole[n:]


def memory(): return int(re.search(r'VmSize:\s+(\d+)', Path('/proc/self/status').read_text())[1]) * 1024


class TooLong(BaseException): "Caught by nobody on its way"

def too_long(*_): raise TooLong(f'longer than {LIMIT_S} s')


def fuzz(kind, cases, seed, folder):
    "Outcomes counted; raises `AssertionError` with the file's place if something else than a refusal comes out"
    rng, outcomes, slowest, files = random.Random(f'{kind} {seed}'), Counter(), 0.0, list(targets(folder, kind))
    whole = {file: file.read_bytes() for _, file, _ in files}
    if resource and Path('/proc/self/status').exists(): resource.setrlimit(resource.RLIMIT_AS, (memory() + SPARE_BYTES, resource.RLIM_INFINITY))
    if hasattr(signal, 'SIGALRM'): signal.signal(signal.SIGALRM, too_long)
    for i in range(cases):
        model, file, damage = rng.choice(files)
        new, start = damage(rng, whole[file]), time.perf_counter()
        file.unlink()  # never written into: an earlier one may still be mapped
        file.write_bytes(new)
        try:
            if hasattr(signal, 'alarm'): signal.alarm(LIMIT_S)
            load_model(model)
            outcomes['loaded'] += 1
        except WeightsError as e:
            outcomes[re.sub(r'[^a-z ]', '', str(e).removeprefix(str(model)).split(':')[-1])[:30].strip()] += 1
            assert len(str(e)) < 20_000, (i, len(str(e)))
        except BaseException as e:
            kept = Path(tempfile.mkdtemp(prefix=f'fuzz-{kind}-{i}-'))
            (kept/file.name).write_bytes(new)
            raise AssertionError(f'{kind}, case {i}, seed {seed}: {type(e).__name__}: {str(e)[:200]}; {kept/file.name} of {model.name}') from e
        finally:
            if hasattr(signal, 'alarm'): signal.alarm(0)
        slowest = max(slowest, time.perf_counter() - start)
    for file, data in whole.items(): file.write_bytes(data)
    if resource: resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return outcomes, slowest


KINDS = ('gguf', 'config', 'safetensors', 'index', 'tokenizer')

if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--cases', type=int, default=20_000, help='of each kind')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--only', nargs='+', choices=KINDS, default=KINDS)
    args, folder = parser.parse_args(), Path(tempfile.mkdtemp(prefix='fuzz-models-'))
    torch.set_num_threads(1)
    make_models(folder)
    for kind in args.only:
        start = time.perf_counter()
        outcomes, slowest = fuzz(kind, args.cases, args.seed, folder)
        print(f"{kind}: {args.cases} cases, {outcomes['loaded']} loaded, {args.cases - outcomes['loaded']} refused for {len(outcomes) - 1} reasons, "
              f"slowest {slowest:.2f} s, {time.perf_counter() - start:.0f} s", flush=True)
    shutil.rmtree(folder)
    if resource: print(f'peak resident memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MB', file=sys.stderr)
