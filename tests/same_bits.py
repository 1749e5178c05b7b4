"""What a request says alone and in company, down to the bits of its logits: the harness of the tests of determinism"""
import random
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from minigpt.engine import Engine
from minigpt.kernels import OneSequence
from minigpt.kv_cache import Choice, generate
from minigpt.sampling import SamplingParams
from minigpt.scheduler import StepPlan, preempt
from minigpt.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()


def workload(n, seed=0, max_prompt=50):
    "Random prompts, greedy and seeded, some of which begin alike, some with stops, some that fill the context. Every seed is used once"
    rng, requests = random.Random(seed), []
    common = [rng.randrange(256) for _ in range(20)]
    for i in range(n):
        prompt = (common[:rng.choice((0, 0, 8, 20))] + [rng.randrange(256) for _ in range(rng.randint(1, 30))])[:max_prompt]
        params = dict(max_tokens=rng.choice((1, 2, 5, 12, 25, 64)), logprobs=rng.choice((0, 2)), seed=rng.randrange(2**40))
        params |= dict(temperature=0) if i % 2 else dict(temperature=rng.choice((0.5, 1.0, 1.5)), top_p=rng.choice((1.0, 0.9)), top_k=rng.choice((0, 20)), min_p=rng.choice((0.0, 0.01)))
        if i % 5 == 0: params['stop'] = rng.choice(('e', 'th', '\x00'))
        if i % 3 == 0: params |= dict(presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.2, logit_bias={7: -100, 9: 2.5})
        if i % 6 in (1, 4): params |= dict(n=rng.choice((2, 3)))  # greedy ones, which say the same, and drawn ones, which don't
        if i % 8 == 2: params |= dict(prompt_logprobs=1)
        if i % 7 == 0: params |= dict(stop_token_ids=list(range(0, 256, 9)), min_tokens=min(3, params['max_tokens']))
        requests.append((prompt, SamplingParams(**params)))
    return requests


def repeating(n, seed=0):
    "Like `workload`, but all of two or three letters, so that what was said comes again: many a draft is right, and many a one is not"
    rng, requests = random.Random(seed), []
    for i, (prompt, params) in enumerate(workload(n, seed)):
        letters = rng.sample(range(97, 123), rng.choice((2, 2, 3) if i % 5 in (2, 3) else (1, 2, 2, 3)))  # where one may be banned there is another
        about = vars(params) | dict(allowed_token_ids=letters, logit_bias={}, max_tokens=rng.choice((3, 12, 25, 40)), stop=[], stop_token_ids=[], min_tokens=0)
        if i % 5 == 1: about |= dict(stop=[''.join(map(chr, rng.choices(letters, k=4)))], include_stop_str_in_output=rng.random() < 0.5)
        if i % 5 == 2: about |= dict(stop_token_ids=letters[:1], min_tokens=rng.randint(0, about['max_tokens']))
        if i % 5 == 3: about |= dict(bad_words=[''.join(map(chr, rng.choices(letters, k=3)))], logit_bias={letters[0]: 1.5})
        requests.append((prompt[:20] + rng.choices(letters, k=rng.randint(1, 12)), SamplingParams(**about)))
    return requests


def num_drafted(records):
    "How many tokens were drafted, and of these how many were right"
    parts = [s for r in records for s in r['scheduled']]
    return sum(s.get('num_drafted', 0) for s in parts), sum(s.get('num_right', 0) for s in parts)


def facts(logprobs): return logprobs and [t and (t.token_id, t.logprob, t.rank, t.top) for t in logprobs]


def told(choice): return choice.token_ids, choice.text, facts(choice.logprobs), choice.finish_reason, choice.stop_reason, facts(choice.prompt_logprobs)


@contextmanager
def rows_kept():
    "The bits of each row of logits that a choice draws from or scores its prompt by, under (seed, index, number of output tokens) or (seed, 'prompt', position)"
    rows, accept, accept_prompt_rows = {}, Choice.accept, Choice.accept_prompt_rows
    def keep(key, row):
        bits = np.ascontiguousarray(row, np.float32).tobytes()
        assert rows.setdefault(key, bits) == bits, key  # a prompt's rows may come twice, after preemption
    def keeping_accept(self, logits):
        keep((self.seed, self.index, len(self.token_ids)), logits)
        return accept(self, logits)
    def keeping_prompt_rows(self, logits, start):
        for i, row in enumerate(logits):
            if start + i < len(self.prompt_token_ids) - 1: keep((self.seed, 'prompt', start + i), row)
        return accept_prompt_rows(self, logits, start)
    Choice.accept, Choice.accept_prompt_rows = keeping_accept, keeping_prompt_rows
    try: yield rows
    finally: Choice.accept, Choice.accept_prompt_rows = accept, accept_prompt_rows


def alone(model, requests, block_size=16):
    "For each request what its choices say alone, and all rows of logits"
    with rows_kept() as rows:
        said = [[told(generate(model, prompt, params, OneSequence(model.config, block_size, getattr(model, 'kv_dtype', 'fp32')), getattr(model, 'tokenizer', TOKENIZER), index=i)) for i in range(params.n)]
                for prompt, params in requests]
    return said, rows


def hear(said, outputs, of=int):
    "Add a step's outputs to what each choice has said; `of` takes a request id to its place in `said`"
    for o in outputs:
        choices, prompt_logprobs = said[of(o.request_id)], facts(o.prompt_logprobs)
        ids, text, logprobs, *_ = choices[o.index]
        if prompt_logprobs: choices[:] = [(*c[:5], prompt_logprobs) for c in choices]
        choices[o.index] = (ids + o.token_ids, text + o.text, logprobs + (facts(o.logprobs) or []), o.finish_reason, o.stop_reason, choices[o.index][5])


def silent(requests): return [[([], '', [], None, None, None)] * params.n for _, params in requests]


def together(model, requests, config, arrive=None, order=None, before_step=None):
    "What the engine says to each request, and the rows; `arrive` of them come before each step (default: all before the first). Also the engine"
    config = replace(config, kv_dtype=getattr(model, 'kv_dtype', 'fp32'))
    engine, queue, said = Engine(model, getattr(model, 'tokenizer', TOKENIZER), config), list(order or range(len(requests))), silent(requests)
    with rows_kept() as rows:
        while queue or engine.has_work:
            for i in [queue.pop(0) for _ in range(min(arrive or len(requests), len(queue)))]: engine.add(str(i), *requests[i])
            if before_step: before_step(engine)
            hear(said, engine.step())
            engine.scheduler.audit()
    assert (engine.num_free_blocks, engine.num_running, engine.num_waiting, engine.answers) == (engine.num_blocks, 0, 0, {})
    return said, rows, engine


def num_events(engine): return {name: sum(len(r[name]) for r in engine.records) for name in ('preempted', 'found', 'copied', 'evicted', 'forked')}


def force_out(engine, request):
    "Preempt a running request between two steps, by the scheduler's own hand"
    preempt(engine.scheduler, request, 'forced', StepPlan(engine.scheduler.num_steps))
