"""The engine against the simple loop: the same bits under any schedule"""
import copy
import random

import pytest
import torch

from conftest import GPT2, LLAMA, toy_model
from minigpt import kernels
from minigpt.engine import LLM, Engine, EngineConfig
from minigpt.kernels import OneSequence, TiledLinear, prepare_for_inference
from minigpt.kv_cache import generate
from minigpt.sampling import SamplingParams
from minigpt.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()


def workload(n, seed=0, max_seq_len=64):
    "Random prompts, greedy and seeded, some of which begin alike, some with stops, some that fill the context"
    rng, requests = random.Random(seed), []
    common = [rng.randrange(256) for _ in range(20)]
    for i in range(n):
        prompt = common[:rng.choice((0, 0, 8, 20))] + [rng.randrange(256) for _ in range(rng.randint(1, 30))]
        params = dict(max_tokens=rng.choice((1, 2, 5, 12, 25, 64)), logprobs=rng.choice((0, 2)), seed=rng.randrange(2**40))
        params |= dict(temperature=0) if i % 2 else dict(temperature=rng.choice((0.5, 1.0, 1.5)), top_p=rng.choice((1.0, 0.9)), top_k=rng.choice((0, 20)), min_p=rng.choice((0.0, 0.01)))
        if i % 5 == 0: params['stop'] = rng.choice(('e', 'th', '\x00'))
        if i % 7 == 0: params |= dict(stop_token_ids=list(range(0, 256, 9)), min_tokens=min(3, params['max_tokens']))
        requests.append((prompt, SamplingParams(**params)))
    return requests


def told(choice): return choice.token_ids, choice.text, [(t.token_id, t.logprob, t.rank, t.top) for t in choice.logprobs], choice.finish_reason, choice.stop_reason


def oracle(model, requests, block_size=16):
    return [told(generate(model, prompt, params, OneSequence(model.config, block_size), TOKENIZER)) for prompt, params in requests]


def answers(model, requests, config, arrive, order=None):
    "What the engine says to each request, `arrive` of them before each step"
    engine, queue = Engine(model, TOKENIZER, config), list(order or range(len(requests)))
    said = {i: ([], '', [], None, None) for i in queue}
    while queue or engine.has_work:
        for i in [queue.pop(0) for _ in range(min(arrive, len(queue)))]: engine.add(str(i), *requests[i])
        for o in engine.step():
            ids, text, logprobs, *_ = said[int(o.request_id)]
            said[int(o.request_id)] = (ids + o.token_ids, text + o.text, logprobs + [(t.token_id, t.logprob, t.rank, t.top) for t in o.logprobs], o.finish_reason, o.stop_reason)
        held = [i for r in engine.scheduler.running for i in r.block_table]
        assert len(held) + engine.num_free_blocks == engine.num_blocks
    assert (engine.num_free_blocks, engine.num_running, engine.num_waiting, engine.answers) == (engine.num_blocks, 0, 0, {})
    return [said[i] for i in range(len(requests))], sum(len(r['preempted']) for r in engine.records)


@pytest.mark.parametrize('family', ['llama', 'gpt2'])
def test_50_prompts_say_what_they_say_alone(prepared, family):
    "Random budgets, block sizes, seats and orders of arrival, and pools that are far too small"
    model, requests = prepared[family], workload(50)
    wanted, rng, num_preemptions = oracle(model, requests), random.Random(1), 0
    assert len({tuple(w[0]) for w in wanted}) > 40  # they do differ
    assert {w[3] for w in wanted} == {'length', 'stop'}
    for block_size in (4, 8, 16):
        for blocks_spare in (0, 3, 100):
            config = EngineConfig(block_size=block_size, num_blocks=64 // block_size + blocks_spare, max_num_seqs=rng.randint(2, 12),
                                  max_num_batched_tokens=rng.choice((1, 3, 7, 16, 40, 512)), max_waiting_requests=50)
            found, preempted = answers(model, requests, config, rng.randint(1, 9), rng.sample(range(50), 50))
            for i, (f, w) in enumerate(zip(found, wanted)): assert f == w, (config, i)
            num_preemptions += preempted
    assert num_preemptions > 50


def test_without_chunks_and_with_one_or_two_threads(prepared):
    model, requests = prepared['llama'], workload(20, seed=2)
    wanted, before = oracle(model, requests), torch.get_num_threads()
    try:
        for threads in (1, 2):
            kernels.set_threads(threads)
            assert oracle(model, requests) == wanted
            for config in (EngineConfig(enable_chunked_prefill=False), EngineConfig(block_size=4, num_blocks=20, max_num_batched_tokens=9)):
                assert answers(model, requests, config, 5)[0] == wanted
    finally: kernels.set_threads(before)


def test_the_ways_without_onednn_and_without_numba_keep_the_promise(monkeypatch):
    monkeypatch.setattr(kernels, 'njit', None)
    monkeypatch.setattr(torch.backends.mkldnn, 'is_available', lambda: False)
    model = prepare_for_inference(copy.deepcopy(toy_model(**LLAMA)))
    assert all(isinstance(getattr(layer, name), TiledLinear) for layer in model.layers for name in ('qkv', 'out', 'up', 'down'))
    requests = workload(10, seed=3)
    for block_size in (4, 16):
        assert answers(model, requests, EngineConfig(block_size=block_size, num_blocks=64 // block_size + 3, max_num_batched_tokens=11), 4)[0] == oracle(model, requests)


def test_plain_pytorch_layers_break_the_promise():
    "The negative control: if this ever holds, the tests above prove nothing. `F.linear` at GPT-2's width gives one row other bits than four"
    model = toy_model(**GPT2 | dict(n_embd=768, n_head=12, n_layer=1))
    requests = workload(12, seed=4)
    wanted = oracle(model, requests)
    found, _ = answers(model, requests, EngineConfig(max_num_batched_tokens=64), 12)
    assert [f[2] for f in found] != [w[2] for w in wanted]


def test_the_loop_over_blocks_says_what_the_loop_over_a_strip_says(prepared):
    for family, dials in (('llama', LLAMA), ('gpt2', GPT2)):
        plain = toy_model(**dials)
        for prompt, params in workload(12, seed=5):
            a, b = (generate(m, prompt, params, c, TOKENIZER) for m, c in ((plain, None), (prepared[family], OneSequence(plain.config, 8))))
            assert a.token_ids == b.token_ids  # equal within 1e-3 would do; they are never that close to a tie here
            assert [t.logprob for t in a.logprobs] == pytest.approx([t.logprob for t in b.logprobs], abs=1e-3)


def test_aborts_of_others_change_nothing(prepared):
    model, requests, rng = prepared['llama'], workload(24, seed=6), random.Random(7)
    wanted = oracle(model, requests)
    victims = set(rng.sample(range(24), 10))
    engine = Engine(model, TOKENIZER, EngineConfig(block_size=4, num_blocks=24, max_num_seqs=6, max_num_batched_tokens=20))
    said, aborted = {i: [] for i in range(24)}, set()
    for i in range(24): engine.add(str(i), *requests[i])
    while engine.has_work:
        for o in engine.step(): said[int(o.request_id)] += o.token_ids
        if victims and rng.random() < 0.3: aborted |= {i for i in (victims.pop(),) if engine.abort(str(i))}
        if rng.random() < 0.1: assert engine.abort('nobody') is False
    assert aborted
    for i in range(24): assert said[i] == wanted[i][0] if i not in aborted else wanted[i][0][:len(said[i])] == said[i]
    assert {f['id'] for r in engine.records for f in r['finished'] if f['reason'] == 'abort'} == {str(i) for i in aborted}
    assert engine.num_free_blocks == 24


def test_a_failing_row_fails_its_own_request(prepared):
    class Poisoned:
        "NaN for whoever's last token is 13"
        def __init__(self, model): self.model, self.config = model, model.config
        def hidden(self, token_ids, positions, cache):
            hidden = self.model.hidden(token_ids, positions, cache)
            return torch.where((token_ids == 13)[:, None], torch.nan, hidden)
        def logits(self, hidden): return self.model.logits(hidden)
    model, requests = prepared['llama'], workload(16, seed=8)
    wanted = oracle(model, requests)
    engine = Engine(Poisoned(model), TOKENIZER, EngineConfig(block_size=4, num_blocks=30))
    said, endings = {i: [] for i in range(16)}, {}
    for i, (prompt, params) in enumerate(requests): engine.add(str(i), [p if p != 13 else 12 for p in prompt[:-1]] + [13 if i == 3 else prompt[-1]], params)
    while engine.has_work:
        for o in engine.step():
            said[int(o.request_id)] += o.token_ids
            if o.finish_reason: endings[int(o.request_id)] = o.finish_reason, o.error
    assert endings[3] == ('error', '256 of 256 logits are NaN, the first at token id 0') and said[3] == []
    for i in set(range(16)) - {3}:
        if 13 not in requests[i][0] + wanted[i][0]: assert (said[i], endings[i][0]) == (wanted[i][0], wanted[i][3])
    assert engine.num_free_blocks == 30


def test_llm_takes_more_prompts_than_may_wait():
    llm = LLM((copy.deepcopy(toy_model(**LLAMA)), TOKENIZER), max_num_seqs=3, max_waiting_requests=2, block_size=4)
    outputs = llm.generate([f'prompt {i}' for i in range(20)], SamplingParams(max_tokens=4, temperature=0))
    assert [o.prompt for o in outputs] == [f'prompt {i}' for i in range(20)]
    assert all(len(o.outputs[0].token_ids) == 4 and o.outputs[0].finish_reason == 'length' for o in outputs)
    assert [o.outputs[0].text for o in outputs] == [TOKENIZER.decode(o.outputs[0].token_ids) for o in outputs]
    with pytest.raises(ValueError, match='leaves no room'): llm.generate(['fine', 'x' * 64])
    assert not llm.engine.has_work


def test_unseeded_requests_differ_and_can_be_repeated():
    llm = LLM((toy_model(**LLAMA), TOKENIZER))
    a, b = llm.generate(['why', 'why'], SamplingParams(temperature=1, max_tokens=30))
    assert a.seed != b.seed and a.outputs[0].token_ids != b.outputs[0].token_ids
    again = llm.generate('why', SamplingParams(temperature=1, max_tokens=30, seed=a.seed))[0]
    assert again.outputs[0].token_ids == a.outputs[0].token_ids
