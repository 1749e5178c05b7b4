"""The engine beside the simple loop. That it gives the same bits under any schedule is in `test_determinism.py`"""
import copy
import random

import pytest
import torch
from conftest import GPT2, LLAMA, toy_model
from same_bits import TOKENIZER, alone, workload

from minigpt.engine import LLM, Engine, EngineConfig
from minigpt.kernels import OneSequence
from minigpt.kv_cache import generate
from minigpt.sampling import SamplingParams


def oracle(model, requests): return alone(model, requests)[0]


def test_the_loop_over_blocks_says_what_the_loop_over_a_strip_says(prepared):
    for family, dials in (('llama', LLAMA), ('gpt2', GPT2)):
        plain = toy_model(**dials)
        for prompt, params in workload(12, seed=5):
            a, b = (generate(m, prompt, params, c, TOKENIZER) for m, c in ((plain, None), (prepared[family], OneSequence(plain.config, 8))))
            assert a.token_ids == b.token_ids  # equal within 1e-3 would do; they are never that close to a tie here
            assert [t.logprob for t in a.logprobs] == pytest.approx([t.logprob for t in b.logprobs], abs=1e-3)


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
            said[int(o.request_id)] += o.token_ids * (o.index == 0)
            if o.finish_reason and o.index == 0: endings[int(o.request_id)] = o.finish_reason, o.error
    assert endings[3] == ('error', '256 of 256 logits are NaN, the first at token id 0') and said[3] == []
    for i in set(range(16)) - {3}:
        if 13 not in requests[i][0] + [t for c in wanted[i] for t in c[0]]: assert (said[i], endings[i][0]) == (wanted[i][0][0], wanted[i][0][3])
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


def test_three_choices_fail_together_when_their_prompt_does(prepared):
    class Poisoned:
        def __init__(self, model): self.model, self.config = model, model.config
        def hidden(self, *args): return self.model.hidden(*args)
        def logits(self, hidden): return self.model.logits(hidden) * torch.nan
    engine = Engine(Poisoned(prepared['llama']), TOKENIZER)
    engine.add('A', [1, 2, 3], SamplingParams(n=3))
    assert [(o.index, o.finish_reason) for o in engine.step()] == [(0, 'error'), (1, 'error'), (2, 'error')]
    assert engine.num_free_blocks == engine.num_blocks and engine.answers == {}


def test_one_choice_leaves_and_the_others_go_on(prepared):
    model, params = prepared['llama'], SamplingParams(n=3, max_tokens=9, seed=1)
    engine, said = Engine(model, TOKENIZER, EngineConfig(block_size=4, num_blocks=16)), {i: [] for i in range(3)}
    engine.add('A', list(b'the cu'), params)
    for step in range(20):
        for o in engine.step(): said[o.index] += o.token_ids
        if step == 2: assert engine.abort('A', index=1) and not engine.abort('A', index=1)
    assert [len(said[i]) for i in range(3)] == [9, 3, 9] and engine.num_free_blocks == 16
    for i in (0, 2): assert said[i] == generate(model, list(b'the cu'), params, OneSequence(model.config), TOKENIZER, index=i).token_ids


def test_a_choice_may_be_given_up_before_there_are_any(prepared):
    model, params = prepared['llama'], SamplingParams(n=3, max_tokens=5, seed=4)
    for gone in ((1,), (0, 2), (0,)):
        engine, said = Engine(model, TOKENIZER, EngineConfig(block_size=4, num_blocks=16, max_num_batched_tokens=4)), {}
        engine.add('A', list(b'the cu'), params)
        engine.step()  # half of the prompt
        assert [engine.abort('A', i) for i in gone] == [True] * len(gone) and not engine.abort('A', gone[0]) and not engine.abort('A', 3)
        while engine.has_work:
            for o in engine.step(): said.setdefault(o.index, []).extend(o.token_ids)
        assert said == {i: generate(model, list(b'the cu'), params, OneSequence(model.config), TOKENIZER, index=i).token_ids for i in range(3) if i not in gone}
        assert engine.num_free_blocks == 16 and sum(f['reason'] == 'abort' for r in engine.records for f in r['finished']) == len(gone)
    engine.add('A', list(b'the cu'), params)
    assert all(engine.abort('A', i) for i in range(3)) and not engine.answers and not engine.abort('A')
    now = [0.0]
    engine = Engine(model, TOKENIZER, clock=lambda: now[0])
    engine.add('A', list(b'the cu'), params, deadline_s=1)
    engine.abort('A', 0)
    now[0] = 2
    assert [(o.index, o.finish_reason) for o in engine.step()] == [(1, 'deadline'), (2, 'deadline')]


def test_salts_keep_prefixes_apart_and_a_reset_forgets_them(prepared):
    engine, prompt = Engine(prepared['llama'], TOKENIZER, EngineConfig(block_size=4)), list(b'the cup fell')
    def num_cached(**options):
        engine.add('A', prompt, SamplingParams(max_tokens=1), **options)
        [output] = engine.step()
        return output.num_cached_tokens
    assert [num_cached(cache_salt=s) for s in (None, None, 'x', 'x', None)] == [0, 8, 0, 8, 8]
    engine.add('B', prompt, SamplingParams(max_tokens=3))
    engine.step()
    assert engine.reset_prefix_cache() is False
    engine.abort('B')
    assert engine.reset_prefix_cache() is True and num_cached() == 0


def test_an_interrupted_llm_can_be_used_again(monkeypatch):
    llm = LLM((toy_model(**LLAMA), TOKENIZER), block_size=4)
    step, calls = llm.engine.step, []
    def interrupted():
        calls.append(1)
        if len(calls) == 3: raise KeyboardInterrupt
        return step()
    monkeypatch.setattr(llm.engine, 'step', interrupted)
    with pytest.raises(KeyboardInterrupt): llm.generate(['one', 'two'], SamplingParams(max_tokens=9))
    assert llm.engine.num_running == 0 and llm.engine.num_free_blocks == llm.engine.num_blocks
    assert [len(o.outputs[0].token_ids) for o in llm.generate(['one', 'two'], SamplingParams(max_tokens=9))] == [9, 9]


def test_llm_gives_n_answers_and_the_prompt_scored():
    llm = LLM((toy_model(**LLAMA), TOKENIZER), block_size=4)
    [out] = llm.generate('the cup fell', SamplingParams(n=3, max_tokens=4, seed=5, prompt_logprobs=0))
    assert [o.index for o in out.outputs] == [0, 1, 2] and len({tuple(o.token_ids) for o in out.outputs}) == 3
    assert len(out.prompt_logprobs) == 12 and out.prompt_logprobs[0] is None and out.num_cached_tokens == 0
    whole = toy_model(**LLAMA)(torch.tensor([list(b'the cup fell')]))[0].log_softmax(-1)
    assert [t.logprob for t in out.prompt_logprobs[1:]] == pytest.approx([whole[i, t].item() for i, t in enumerate(b'he cup fell')], abs=1e-3)


def test_a_model_with_more_rows_than_its_tokenizer_has_tokens():
    from minigpt.tokenizer import CharTokenizer
    llm = LLM((toy_model(**LLAMA | dict(vocab_size=16)), CharTokenizer('abcdefgh')))
    [out] = llm.generate('abc', SamplingParams(max_tokens=20, logprobs=16, temperature=2))
    assert all(t < 8 for t in out.outputs[0].token_ids) and all(i < 8 for t in out.outputs[0].logprobs for i, _ in t.top)
    with pytest.raises(ValueError, match='token id 12 at position 0'): llm.generate([[12, 1]])


def test_ids_outside_the_vocabulary_are_refused_and_the_engine_goes_on(prepared):
    engine = Engine(prepared['llama'], TOKENIZER)
    for params in (dict(logit_bias={'999999': 1}), dict(allowed_token_ids=[256]), dict(stop_token_ids=[256])):
        with pytest.raises(ValueError, match='256|999999'): engine.add('A', [1, 2], SamplingParams(**params))
        assert not engine.has_work and engine.answers == {}
    engine.add('A', [1, 2], SamplingParams(max_tokens=2, logit_bias={'7': 100}))
    while engine.has_work: outputs = engine.step()
    assert outputs[-1].finish_reason == 'length'


def test_a_prompt_scores_the_same_cached_cut_up_or_in_company(prepared):
    "And as a plain forward pass says. (An echo is this and the prompt's own text: the engine scores, the server writes it out, and refuses `echo` until it does)"
    model, prompt = prepared['llama'], list(b'the cup fell on the floor')
    plain = toy_model(**LLAMA)(torch.tensor([prompt]))[0].log_softmax(-1)
    wanted = sum(plain[i, t].item() for i, t in enumerate(prompt[1:]))
    scores = []
    for budget, company in ((512, 0), (1, 0), (7, 0), (64, 5)):
        engine = Engine(model, TOKENIZER, EngineConfig(block_size=4, max_num_batched_tokens=budget))
        for _ in range(2):  # the second time its blocks are there, and must not be read
            for i in range(company): engine.add(f'x{i}', list(b'some other words')[i:], SamplingParams(max_tokens=5, seed=i))
            engine.add('A', prompt, SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0))
            while engine.has_work:
                for o in engine.step():
                    if o.prompt_logprobs: scores.append([t and t.logprob for t in o.prompt_logprobs])
    assert len(scores) == 8 and all(s == scores[0] for s in scores)
    assert scores[0][0] is None and len(scores[0]) == len(prompt) and sum(scores[0][1:]) == pytest.approx(wanted, abs=1e-3)


def test_a_hundred_mixed_requests_leave_nothing_behind(prepared):
    "Half of them are aborted, in whatever state they are"
    engine, rng = Engine(prepared['llama'], TOKENIZER, EngineConfig(block_size=4, num_blocks=30, max_num_seqs=5, max_num_batched_tokens=9, max_waiting_requests=300)), random.Random(5)
    for i, (prompt, params) in enumerate(workload(100, seed=9)): engine.add(str(i), prompt, params)
    to_abort = rng.sample(range(100), 50)
    while engine.has_work:
        engine.step()
        if to_abort and rng.random() < 0.5: engine.abort(str(to_abort.pop()))
    s = engine.scheduler
    assert (engine.answers, s.waiting, s.running, s.served, engine.num_free_blocks) == ({}, [], [], {}, 30)
    assert len(s.ledger.prefix.by_key) == len(s.ledger.prefix.by_block) <= 30
