"""Twenty thousand requests through a tiny model: all answered, none twice, the pool whole, memory flat.

    python tests/soak.py [NUM_REQUESTS] [SEED]      default 20000 0; takes some minutes

Random arrivals, prompts that share beginnings, choices, salts, priorities, keys, deadlines, aborts in every state, and a pool
that is too small. Prints what happened; any broken promise ends it with an error.
"""
import random
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from conftest import LLAMA, toy_model

from minigpt.engine import Engine, EngineConfig
from minigpt.kernels import prepare_for_inference, set_threads
from minigpt.sampling import SamplingParams
from minigpt.scheduler import QueueFull
from minigpt.tokenizer import ByteTokenizer


def anonymous_mb():
    "Memory of this process that no file backs, in MB; NaN where the system does not tell"
    try: lines = Path('/proc/self/smaps_rollup').read_text().splitlines()
    except OSError: return float('nan')
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith('Anonymous'))


def random_request(rng, stems):
    "A prompt that often begins like others, and parameters; short answers, or a soak would take a day"
    prompt = rng.choice(stems)[:rng.randint(0, 40)] + [rng.randrange(256) for _ in range(rng.randint(1, 8))]
    params = SamplingParams(n=rng.choice((1, 1, 1, 1, 2, 3)), max_tokens=rng.choice((1, 2, 4, 8, 16)), temperature=rng.choice((0, 1)), seed=rng.randrange(2**32))
    options = dict(priority=rng.choice((0, 0, 0, 1)), key=rng.choice('abc'), cache_salt=rng.choice((None, None, 'x')), deadline_s=rng.choice((None, None, None, rng.uniform(0, 60))))
    return prompt, params, options


def main(num_requests=20_000, seed=0):
    set_threads(1)
    rng, clock = random.Random(seed), [0.0]
    visited = [0]
    class Counted(Engine):
        def forward(self, plan):
            visited[0] += len(self.scheduler.running) + len(self.scheduler.waiting)
            return super().forward(plan)
    model = prepare_for_inference(toy_model(**LLAMA))
    engine = Counted(model, ByteTokenizer(), EngineConfig(block_size=4, num_blocks=48, max_num_seqs=8, max_num_batched_tokens=64, max_waiting_requests=40), clock=lambda: clock[0])
    stems = [[rng.randrange(256) for _ in range(40)] for _ in range(10)]
    sent, open_choices, endings, events, memory, per_step = 0, {}, Counter(), Counter(), [], []
    while sent < num_requests or engine.has_work:
        clock[0] += 1
        for _ in range(rng.choice((0, 1, 2, 4)) if sent < num_requests else 0):
            if sent == num_requests: break
            prompt, params, options = random_request(rng, stems)
            sent += 1
            try: engine.add(str(sent), prompt, params, **options)
            except QueueFull: endings['refused'] += 1
            else: open_choices |= {(str(sent), i): params.max_tokens for i in range(params.n)}
        if open_choices and rng.random() < 0.2:
            victim = rng.choice(list(open_choices))[0]
            assert engine.abort(victim)
            for choice in [c for c in open_choices if c[0] == victim]:
                del open_choices[choice]
                endings['abort'] += 1
        before = visited[0]
        for o in engine.step():
            if o.finish_reason:
                longest = open_choices.pop((o.request_id, o.index))  # a KeyError here is an answer given twice
                assert o.num_output_tokens <= longest and o.finish_reason in ('length', 'deadline', 'stop')
                endings[o.finish_reason] += 1
        per_step.append(visited[0] - before)
        engine.scheduler.audit()
        record = engine.records[-1]
        for name in ('preempted', 'found', 'copied', 'evicted'): events[name] += len(record[name])
        if sent % (num_requests // 20) == 0 and (not memory or memory[-1][0] != sent): memory.append((sent, anonymous_mb()))
    assert not open_choices and engine.answers == {} and engine.num_free_blocks == engine.num_blocks and engine.scheduler.served == {}
    tenth = max(1, len(per_step) // 10)
    first, last = (sum(p) / len(p) for p in (per_step[tenth:2 * tenth], per_step[-2 * tenth:-tenth]))
    print(f'{sent} requests in {len(per_step)} steps; endings of choices {dict(endings)}; events {dict(events)}')
    print(f'anonymous memory {memory[1][1]:.1f} MB after a tenth, {memory[-1][1]:.1f} MB at the end; requests visited per step {first:.1f} in the second tenth, {last:.1f} in the last but one')
    assert memory[-1][1] - memory[1][1] < 16, 'memory grows'
    assert last < 2 * first, 'a step costs more when more have finished'


if __name__ == '__main__':
    with torch.inference_mode(): main(*map(int, sys.argv[1:]))
