"""Drafts in the engine: fewer steps, and nothing else that anybody could notice. More of it in `test_determinism.py`, and the scheduler's part in `test_scheduler.py`"""
import json
import random
from collections import Counter

import httpx
import pytest
import torch
from same_bits import TOKENIZER, alone, force_out, hear, num_drafted, num_events, repeating, silent, told, together, workload

from minigpt.engine import Engine, EngineConfig, LLM, header_line, replay
from minigpt.kernels import OneSequence
from minigpt.kv_cache import generate
from minigpt.runner import EngineRunner
from minigpt.sampling import SamplingParams
from minigpt.scheduler import explain
from minigpt.server import create_app, running_server
from minigpt.simulate import simulate
from minigpt.stepper import StaticStepper, Trace, outputs_of, read_trace, to_perfetto
from minigpt.viz import timeline_text

CIRCLES = dict(temperature=0, allowed_token_ids=list(b'xy'), max_tokens=40, ignore_eos=True)


def parts(records): return [s for r in records for s in r['scheduled'] if s.get('num_drafted')]


@pytest.mark.parametrize('family', ['llama', 'gpt2'])
def test_50_prompts_that_repeat_say_what_they_say_alone(prepared, family):
    "Stops, minimum, bad words, biases, penalties, choices, scored prompts; pools that barely do"
    model, requests = prepared[family], repeating(50, seed=1)
    wanted, rng, events = alone(model, requests), random.Random(2), Counter()
    for name, is_asked in dict(stop=lambda p: p.stop, bad_words=lambda p: p.bad_words, min_tokens=lambda p: p.min_tokens, logit_bias=lambda p: p.logit_bias, n=lambda p: p.n > 1,
                               repetition_penalty=lambda p: p.repetition_penalty != 1, prompt_logprobs=lambda p: p.prompt_logprobs is not None, temperature=lambda p: p.temperature).items():
        assert sum(bool(is_asked(p)) for _, p in requests) >= 4, name
    for block_size, spare, budget, longest in ((4, 0, 16, 3), (8, 4, 512, 7), (4, 100, 512, 1)):
        config = EngineConfig(block_size=block_size, num_blocks=64 // block_size + 2 + spare, max_num_seqs=12, max_num_batched_tokens=budget, max_waiting_requests=100, speculate=longest)
        said, rows, engine = together(model, requests, config, rng.randint(1, 9), rng.sample(range(50), 50))
        assert said == wanted[0] and rows == wanted[1], config
        drafted, right = num_drafted(engine.records)
        events.update(num_events(engine) | dict(right=right, wrong=drafted - right))
        about = {i: p for i, (_, p) in enumerate(requests)}
        for r in engine.records:
            ended = {f['id']: f for f in r['finished']}
            for s in r['scheduled']:
                if s.get('num_right') and s['id'] in ended:
                    events['ended by length'] += ended[s['id']]['reason'] == 'length'
                if s.get('num_right'):
                    p = about[int(s['id'].partition('#')[0])]
                    events.update(name for name in ('bad_words', 'logit_bias', 'min_tokens', 'prompt_logprobs') if getattr(p, name))
                    events.update(penalties=p.repetition_penalty != 1, choices='#' in s['id'], drawn=p.temperature > 0)
    for name in ('preempted', 'found', 'right', 'wrong', 'ended by length', 'bad_words', 'logit_bias', 'min_tokens', 'prompt_logprobs', 'penalties', 'choices', 'drawn'):
        assert events[name] > 10, (name, events)


def test_without_it_there_are_no_drafts_and_other_values_are_refused(prepared):
    for speculate in (None, 0):
        _, _, engine = together(prepared['llama'], repeating(6), EngineConfig(speculate=speculate))
        assert num_drafted(engine.records) == (0, 0)
    for wrong in (-1, 1.5, True, '3'):
        with pytest.raises(ValueError, match='speculate='): EngineConfig(speculate=wrong)


def test_several_tokens_of_a_step_come_in_one_output(prepared):
    "With their text and logprobs, and what LLM puts together is what it was"
    model, params = prepared['llama'], SamplingParams(**CIRCLES | dict(logprobs=1))
    wanted = generate(model, list(b'the cup'), params, OneSequence(model.config), TOKENIZER)
    engine = Engine(model, TOKENIZER, EngineConfig(block_size=4, speculate=4))
    engine.add('A', list(b'the cup'), params)
    outputs = []
    while engine.has_work: outputs += engine.step()
    assert [t for o in outputs for t in o.token_ids] == wanted.token_ids and ''.join(o.text for o in outputs) == wanted.text
    assert max(len(o.token_ids) for o in outputs) >= 3 and all(len(o.logprobs) == len(o.token_ids) for o in outputs)
    assert [o.num_output_tokens for o in outputs] == [sum(len(o.token_ids) for o in outputs[:i + 1]) for i in range(len(outputs))]
    assert [o.finish_reason for o in outputs] == [None] * (len(outputs) - 1) + ['length'] and len(outputs) == len(engine.records) < 36
    llm = LLM.__new__(LLM)
    llm.engine, llm.num_requests = engine, 0
    [whole] = llm.generate('the cup', params)
    assert told(wanted)[:4] == (whole.outputs[0].token_ids, whole.outputs[0].text, [(t.token_id, t.logprob, t.rank, t.top) for t in whole.outputs[0].logprobs], 'length')


def test_a_stop_among_drafted_tokens_ends_the_answer_there(prepared):
    "Strings and ids, kept in the text or not; what was drafted behind the stop leaves nothing"
    model, seen = prepared['llama'], Counter()
    for prompt in (b'the cup', b'why'):
        text = generate(model, list(prompt), SamplingParams(**CIRCLES), OneSequence(model.config), TOKENIZER).text
        stops = sorted({text[i:i + n] for n in (3, 5, 6) for i in range(10, 34)})
        requests = [(list(prompt), SamplingParams(**CIRCLES | dict(stop=[s], seed=i, logprobs=0, include_stop_str_in_output=i % 2 == 0, min_tokens=i % 9))) for i, s in enumerate(stops)]
        said, rows, engine = together(model, requests, EngineConfig(block_size=4, speculate=7, max_num_seqs=50))
        assert (said, rows) == alone(model, requests)
        for r in engine.records:
            reasons = {f['id']: f['reason'] for f in r['finished']}
            for s in parts([r]): seen.update({(reasons.get(s['id']), s['num_right'] < s['num_drafted']): s['num_right'] > 0})
        assert sorted({i for e in engine.scheduler.ledger.prefix.by_block.values() for i in e.token_ids} - {*prompt}) <= sorted(b'xy')
    assert seen['stop', True] >= 1 and seen['stop', False] >= 1, seen


def test_a_failing_row_fails_only_when_it_is_reached(prepared):
    "NaN wherever an 'x' was the last token. A draft whose right tokens end before that is not hurt; the tokens before it are said"
    class Poisoned:
        def __init__(self, model, bad): self.model, self.config, self.bad = model, model.config, bad
        def hidden(self, token_ids, positions, cache): return torch.where((token_ids == self.bad)[:, None] & (positions > 8)[:, None], torch.nan, self.model.hidden(token_ids, positions, cache))
        def logits(self, hidden): return self.model.logits(hidden)
    seen = Counter()
    for seed in range(30):
        params = SamplingParams(**CIRCLES | dict(temperature=0.7, seed=seed, allowed_token_ids=list(b'xyz')))
        said = {}
        for speculate in (None, 5):
            engine = Engine(Poisoned(prepared['llama'], ord('x')), TOKENIZER, EngineConfig(block_size=4, speculate=speculate))
            engine.add('A', list(b'yzyzyzyz'), params)
            outputs = []
            while engine.has_work: outputs += engine.step()
            said[speculate] = [t for o in outputs for t in o.token_ids], outputs[-1].finish_reason, outputs[-1].error
            assert engine.num_free_blocks == engine.num_blocks and engine.answers == {}
            seen.update(drafted_bad=sum(s['num_right'] < s['num_drafted'] for s in parts(engine.records)), errors=outputs[-1].finish_reason == 'error')
        assert said[None] == said[5]
    assert seen['errors'] > 20 and seen['drafted_bad'] > 10


def test_who_leaves_in_the_middle_leaves_nothing(prepared):
    "Aborted, too late, forced out; the others don't notice"
    model, requests = prepared['llama'], repeating(16, seed=6)
    wanted = alone(model, requests)[0]
    for seed in range(4):
        rng, now = random.Random(seed), [0.0]
        engine, said, gone, forced = Engine(model, TOKENIZER, EngineConfig(block_size=4, num_blocks=24, max_num_seqs=6, speculate=5), clock=lambda now=now: now[0]), silent(requests), set(), 0
        for i, r in enumerate(requests): engine.add(str(i), *r, deadline_s=9 if i % 5 == 4 else None)
        while engine.has_work:
            if engine.scheduler.running and rng.random() < 0.2:
                r = rng.choice(engine.scheduler.running)
                if rng.random() < 0.3: gone |= {(int(r.id.partition('#')[0]), i) for i in range(3)} if engine.abort(r.id.partition('#')[0]) else set()
                elif forced < 10: forced += not force_out(engine, r)
            outputs = engine.step()
            gone |= {(int(o.request_id), o.index) for o in outputs if o.finish_reason == 'deadline'}
            hear(said, outputs)
            engine.scheduler.audit()
            now[0] += 1
        assert forced and gone and num_drafted(engine.records)[1] > 5
        for i, choices in enumerate(wanted):
            for k, c in enumerate(choices):
                if (i, k) in gone: assert said[i][k][0] == c[0][:len(said[i][k][0])]
                else: assert said[i][k][:5] == c[:5]
        assert (engine.num_free_blocks, engine.answers, engine.scheduler.served) == (24, {}, {})


def test_blocks_of_accepted_tokens_are_found_and_no_others(prepared):
    "After the same answer with drafts and without, a cache finds the same blocks; a second turn finds the first one's answer"
    found = []
    for speculate in (None, 6):
        engine = Engine(prepared['llama'], TOKENIZER, EngineConfig(block_size=4, speculate=speculate))
        engine.add('A', list(b'the cup'), SamplingParams(**CIRCLES))
        while engine.has_work: engine.step()
        prefix = engine.scheduler.ledger.prefix
        said = list(b'the cup') + outputs_of(list(engine.records))['A']
        assert sorted(e.token_ids for e in prefix.by_block.values()) == sorted(tuple(said[i:i + 4]) for i in range(0, 44, 4))
        engine.add('B', said + [1], SamplingParams(max_tokens=1))
        [output] = engine.step()
        found.append((output.num_cached_tokens, sorted(e.token_ids for e in prefix.by_block.values())))
    assert found[0] == found[1] and found[0][0] == 44


def recorded(model, seed, **settings):
    lines, rng = [], random.Random(seed)
    engine = Engine(model, TOKENIZER, EngineConfig(**dict(block_size=4, num_blocks=24, max_num_seqs=6, max_num_batched_tokens=24) | settings), lambda line: lines.append(json.dumps(line)))
    lines.append(json.dumps(header_line(engine, 'toy')))
    queue = list(enumerate(repeating(12, seed=seed)))
    while queue or engine.has_work:
        for i, request in [queue.pop() for _ in range(min(len(queue), rng.choice((0, 1, 2))))]: engine.add(str(i), *request)
        if rng.random() < 0.1 and engine.answers: engine.abort(rng.choice(list(engine.answers.values())).request_id)
        engine.step()
    return read_trace(lines)


def timeless(trace): return [r | dict(started_s=None, duration_s=None) for r in trace.records]


def test_a_trace_replays_and_simulates_with_drafts_switched_on_and_off(prepared):
    for seed in range(3):
        with_drafts = recorded(prepared['gpt2'], seed, speculate=4)
        assert sum(s['num_right'] for s in parts(with_drafts.records)) > 5
        same = replay(with_drafts, prepared['gpt2'], TOKENIZER)
        assert (same.differences, same.first_step) == ([], None)
        for speculate in (None, 0, 2, 9):
            other = replay(with_drafts, prepared['gpt2'], TOKENIZER, speculate=speculate)
            assert other.differences == []
        again = simulate(with_drafts)
        assert timeless(again.trace) == timeless(with_drafts)
    lines = []
    for speculate in (None, 1, 3, 7):  # nobody leaves: what is foretold from each is what the engine does
        engine = Engine(prepared['gpt2'], TOKENIZER, EngineConfig(block_size=4, num_blocks=24, max_num_seqs=6, speculate=speculate), lines.append)
        lines.append(header_line(engine, 'toy'))
        for i, request in enumerate(repeating(12, seed=9)): engine.add(str(i), *request)
        while engine.has_work: engine.step()
    traces = []
    for line in lines:
        if line['kind'] == 'header': traces.append(Trace(line))
        else: (traces[-1].requests if line['kind'] == 'request' else traces[-1].records).append(json.loads(json.dumps(line)))
    assert len({len(t.records) for t in traces}) > 1
    for t in traces:
        for other in traces: assert timeless(simulate(t, speculate=other.header['settings']['speculate']).trace) == timeless(other)


def test_drafts_are_told_in_words_and_pictures(prepared):
    records = recorded(prepared['llama'], 1, speculate=4).records
    part = next(s for s in parts(records) if s['phase'] == 'decode' and 0 < s['num_right'] < s['num_drafted'])
    record = next(r for r in records if part in r['scheduled'])
    sentence = f"verified {part['num_drafted']} drafted tokens, {part['num_right']} {'was' if part['num_right'] == 1 else 'were'} right"
    assert any(sentence in text for text in explain(record))
    assert f"1+{part['num_right']}" in timeline_text(records)
    assert sentence in StaticStepper(records).html_page('drafts')
    names = [e['name'] for e in to_perfetto(records)['traceEvents']]
    assert f"decode ({part['num_right']} of {part['num_drafted']} drafted right)" in names
    counts = [e['args'] for e in to_perfetto(records)['traceEvents'] if e['name'] == 'drafted tokens']
    assert sum(c['right'] for c in counts) == sum(s['num_right'] for s in parts(records)) and sum(c['wrong'] for c in counts) == sum(s['num_drafted'] - s['num_right'] for s in parts(records))


def test_clients_of_a_server_notice_nothing(prepared):
    "Whole and streamed answers, with drafts and without: text, logprobs and their offsets, usage"
    heard, fields = [], dict(model='toy', prompt='the cup', max_tokens=40, temperature=0, logit_bias={'120': 100, '121': 100}, logprobs=2, seed=1)
    for speculate in (None, 5):
        engine = Engine(prepared['llama'], TOKENIZER, EngineConfig(block_size=4, speculate=speculate))
        runner = EngineRunner(engine)
        try:
            with running_server(create_app(runner, TOKENIZER, 'toy', 64), drain_timeout_s=0.5) as url, httpx.Client(base_url=url, timeout=20) as http:
                whole = http.post('/v1/completions', json=fields).json()
                lines = http.post('/v1/completions', json=fields | dict(stream=True)).text.split('\n\n')
        finally: assert runner.stop(20)
        pieces = [json.loads(line.removeprefix('data: '))['choices'][0] for line in lines if line.startswith('data: {')]
        choice = whole['choices'][0]
        assert ''.join(p['text'] for p in pieces) == choice['text']
        for name in choice['logprobs']: assert [e for p in pieces if p['logprobs'] for e in p['logprobs'][name]] == choice['logprobs'][name]
        heard.append((choice, whole['usage']))
        assert (num_drafted(engine.records)[1] > 10) == (speculate is not None) and (len(pieces) < 38) == (speculate is not None)
    assert heard[0] == heard[1] and heard[0][1]['completion_tokens'] == 40


def test_text_that_does_not_repeat_is_left_alone(prepared):
    "Of random text, at most 3 tokens in 100 are computed for nothing"
    requests = [(p, SamplingParams(**vars(q) | dict(temperature=1.5, top_k=0, top_p=1.0, max_tokens=64))) for p, q in workload(20, seed=4)]
    _, _, engine = together(prepared['llama'], requests, EngineConfig(speculate=8, max_num_seqs=30))
    drafted, right = num_drafted(engine.records)
    assert drafted - right <= 0.03 * sum(s['num_tokens'] for r in engine.records for s in r['scheduled'])
