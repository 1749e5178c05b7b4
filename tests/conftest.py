"""The toy model that the tests share, and the environment that they all run in"""
import os
import tempfile

os.environ.setdefault('HF_HUB_OFFLINE', '1')
CACHE = tempfile.TemporaryDirectory(prefix='minigpt-tests-')  # the user's own is not for tests; lives as long as this module
os.environ['MINIGPT_CACHE'] = CACHE.name

import copy

import pytest
import torch

from minigpt.kernels import prepare_for_inference, set_threads
from minigpt.model import GPT, GPTConfig, init_weights

set_threads(1)  # toy models are too small to share; tests that are about threads set them

LLAMA = dict(position='rope', norm='rms', activation='swiglu', bias=False, n_kv_head=2)
GPT2 = dict(activation='gelu_tanh')


def toy_model(**dials):
    "Two layers, bytes, 64 tokens of context, weights far enough from zero that choices differ"
    config = GPTConfig(**dict(vocab_size=256, max_seq_len=64, n_layer=2, n_head=4, n_embd=32) | dials)
    model = init_weights(GPT(config), torch.Generator().manual_seed(0)).eval().requires_grad_(False)
    for p in model.parameters(): p.mul_(4)
    return model


@pytest.fixture(scope='session')
def prepared():
    "Prepared models of both families, by name"
    return {name: prepare_for_inference(copy.deepcopy(toy_model(**dials))) for name, dials in (('llama', LLAMA), ('gpt2', GPT2))}


class Watched(list):
    "A list that notes in `read` how many entries each look takes, and may not be read as a whole"
    def __init__(self, *args):
        super().__init__(*args)
        self.read = []

    def __getitem__(self, key):
        found = super().__getitem__(key)
        self.read.append(len(found) if isinstance(key, slice) else 1)
        return found

    def __iter__(self): raise AssertionError('read as a whole')


def findable_blocks(records):
    "What the prefix cache could find at the end of each step, rebuilt from the records"
    findable, history = set(), []
    for r in records:
        findable = ((set() if r['reset'] else findable - set(r['evicted'])) | set(r['entered'])) - set(r['forgotten'])
        if r['keyframe'] is not None: findable = set(r['keyframe']['findable'])
        history.append(findable)
    return history
