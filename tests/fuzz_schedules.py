"""Random requests under random schedules: whoever survives says, bit for bit, what it says alone.

    python tests/fuzz_schedules.py [--workloads 500] [--seed 0]      some minutes

Workload `i` is made from the seed plus `i` and nothing else. Random parameters, choices, priorities, keys, salts and deadlines;
random engines, with pools that barely do, with drafts and without; random arrivals; others are aborted, preempted and their
prefixes forgotten. Both families, both sets of kernels, weights of 32, 8 and 4 bits, keys and values of 32 and 16, one thread and
two. Prints what happened, and fails if something never did; a failure prints the command that repeats it.
"""
import argparse
import copy
import os
import random
import sys
import time
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent))

from conftest import GPT2, LLAMA, toy_model
from same_bits import TOKENIZER, alone, force_out, hear, num_drafted, num_events, repeating, rows_kept, silent, workload

from minigpt.engine import Engine, EngineConfig, scheduler_limits
from minigpt.kernels import prepare_for_inference, set_threads
from minigpt.scheduler import check_fits

ODD = dict(n_embd=30, n_head=3)  # rows that begin in the middle of a cache line
FAMILIES = {'llama': LLAMA, 'gpt2': GPT2, 'odd llama': LLAMA | ODD | dict(n_kv_head=1), 'odd gpt2': GPT2 | ODD}


@lru_cache(None)
def ready(name, wish, dtype):
    "A prepared toy model; the environment must hold the same wish"
    return prepare_for_inference(copy.deepcopy(toy_model(**FAMILIES[name])), dtype)


def random_settings(rng, requests, max_seq_len):
    "An `EngineConfig` in which all requests can run, some of them only just"
    cut = rng.random() < 0.85
    settings = dict(
        block_size=rng.choice((1, 2, 4, 4, 8, 16, 32)), max_num_seqs=rng.randint(3, 12), enable_chunked_prefill=cut,
        max_num_batched_tokens=rng.choice((1, 2, 3, 7, 16, 40, 512)) if cut else rng.choice((64, 100)), max_num_kv_reads=rng.choice((None, None, 20, 150)) if cut else None,
        max_chunk_tokens=rng.choice((None, None, 1, 5, 16)) if cut else None, enable_prefix_caching=rng.random() < 0.8, full_reservation=rng.random() < 0.15,
        watermark_blocks=rng.choice((0, 0, 0, 1, 3)))
    limits = scheduler_limits(EngineConfig(**settings), max_seq_len)
    num_blocks = 1
    for prompt, params in requests:
        while True:
            try: check_fits(len(prompt), params.max_tokens, limits, num_blocks, params.n)
            except ValueError: num_blocks += 1
            else: break
    return EngineConfig(**settings, num_blocks=num_blocks + rng.choice((0, 1, 2, 3, 5, 20)), speculate=rng.choice((None, 1, 3, 7)))


def disturb(rng, engine, gone, counts, rates):
    "What may happen between two steps to those who run: abort, preempt, forget"
    live = list(engine.answers.values())
    if live and rng.random() < rates['abort']:
        victim = rng.choice(live).request_id
        for a in live:  # one answer stands for all choices until they fork
            if a.request_id == victim: gone |= {(int(victim), a.choice.index + i) for i in range(a.request.num_choices)}
        assert engine.abort(victim) and not engine.abort(victim)
        counts['aborts'] += 1
    several = [a for a in engine.answers.values() if a.choice.params.n > 1]
    if several and rng.random() < 4 * rates['abort']:
        victim = rng.choice(several)
        index = victim.choice.index if victim.request.num_choices == 1 else rng.randrange(victim.request.num_choices)  # forked, or not yet
        gone.add((int(victim.request_id), index))
        assert engine.abort(victim.request_id, index) or index in victim.unwanted
        counts['aborts of one choice'] += 1
    running = engine.scheduler.running
    if running and counts['forced'] < 12 and rng.random() < rates['force']:
        everyone = rng.random() < 0.3
        for request in list(running) if everyone else [rng.choice(running)]:
            force_out(engine, request)
            counts['forced'] += 1
    if rng.random() < rates['reset']: counts['resets' if engine.reset_prefix_cache() else 'resets refused'] += 1


def compare(seed, requests, said, rows, wanted, wanted_rows, gone):
    "Raise `AssertionError` unless survivors say all that they say alone, and the others a beginning of it"
    for i, (_, params) in enumerate(requests):
        own = {k: v for k, v in rows.items() if k[0] == params.seed}
        for key, bits in own.items(): assert bits == wanted_rows[key], f'workload {seed}, request {i}: other logits at {key[1:]}'
        for index, (s, w) in enumerate(zip(said[i], wanted[i])):
            where = f'workload {seed}, request {i}, choice {index}'
            if (i, index) in gone: assert (s[0], s[1], s[2]) == (w[0][:len(s[0])], w[1][:len(s[1])], (w[2] or [])[:len(s[2])]), where
            else:
                assert s[:5] == w[:5], f'{where}: {s} instead of {w}'
                if (i, 0) not in gone: assert s[5] == w[5], f'{where}: other prompt logprobs'
                assert [k for k in sorted(k for k in wanted_rows if k[:2] == (params.seed, index)) if k not in own] == [], f'{where}: rows are missing'


def one_workload(seed):
    "Run workload `seed`; returns what happened"
    rng, happened = random.Random(seed), Counter()
    requests = rng.choice((workload, workload, repeating))(rng.randint(4, 14), seed=rng.randrange(2**32))
    name, wish, num_threads = rng.choice(list(FAMILIES)), rng.choice(('auto', 'auto', 'torch')), rng.choice((1, 1, 2))
    happened.update({f'{name} workloads': 1, f'{wish} workloads': 1, f'workloads with {num_threads} threads': 1, 'requests': len(requests)})
    dtype = 'fp32' if 'odd' in name else rng.choice(('fp32', 'int8', 'int4'))  # an odd width has no groups of 32
    happened[f'{dtype} workloads'] += 1
    with patch.dict(os.environ, MINIGPT_KERNELS=wish):
        set_threads(1)
        model = ready(name, wish, dtype)
        model.kv_dtype = rng.choice(('fp32', 'bf16'))  # what `alone` takes, too
        happened[f'{model.kv_dtype} caches'] += 1
        wanted, wanted_rows = alone(model, requests)
        set_threads(num_threads)
        try: run(seed, rng, model, requests, wanted, wanted_rows, happened)
        finally: set_threads(1)
    return happened


def run(seed, rng, model, requests, wanted, wanted_rows, happened):
    "The workload in one engine, step by step, on a clock that counts steps"
    clock = Counter()
    settings = replace(random_settings(rng, requests, model.config.max_seq_len), kv_dtype=model.kv_dtype)
    engine = Engine(model, TOKENIZER, settings, clock=lambda: clock['steps'])
    queue, said, gone = rng.sample(range(len(requests)), len(requests)), silent(requests), set()
    pace, rates = rng.choice((0.1, 0.5, 2, 2)), dict(abort=rng.choice((0, 0, 0.01, 0.03)), force=rng.choice((0, 0.03, 0.2)), reset=rng.choice((0, 0.1)))
    late_share = rng.choice((0, 0, 0.2))
    with rows_kept() as rows:
        while queue or engine.has_work:
            while queue and (rng.random() < pace or not engine.has_work):
                i = queue.pop()
                options = dict(priority=rng.choice((0, 0, 0, 1, -1)), key=rng.choice(('', 'a', 'b')), cache_salt=rng.choice((None, None, None, 'x')))
                if rng.random() < late_share: options['deadline_s'] = rng.randint(1, 40)
                engine.add(str(i), *requests[i], **options)
                if pace < 1: break
            disturb(rng, engine, gone, happened, rates)
            outputs = engine.step()
            late = {(int(o.request_id), o.index) for o in outputs if o.finish_reason == 'deadline'}
            gone |= late
            happened['deadlines'] += len(late)
            hear(said, outputs)
            engine.scheduler.audit()
            clock['steps'] += 1
            assert clock['steps'] < 20_000, f'workload {seed} does not end'
    assert (engine.num_free_blocks, engine.num_running, engine.num_waiting, engine.answers) == (engine.num_blocks, 0, 0, {})
    compare(seed, requests, said, rows, wanted, wanted_rows, gone)
    drafted, right = num_drafted(engine.records)
    happened.update({k: v for k, v in num_events(engine).items()} | {'steps': clock['steps'], 'rows': len(rows), 'drafted rightly': right, 'drafted wrongly': drafted - right})
    happened['survivors'] += sum(len(s) for s in said) - len(gone)
    happened['preempted by the scheduler'] += happened['preempted'] - happened['forced']
    happened.update(f'finished by {c[3]}' for i, choices in enumerate(said) for index, c in enumerate(choices) if (i, index) not in gone)
    happened['pieces of prompts'] += sum(s['phase'] == 'prefill' for r in engine.records for s in r['scheduled']) - sum(len(r['admitted']) for r in engine.records)


MUST_HAPPEN = ('survivors', 'preempted by the scheduler', 'forced', 'found', 'evicted', 'copied', 'forked', 'aborts', 'aborts of one choice', 'deadlines', 'resets',
               'resets refused', 'pieces of prompts', 'drafted rightly', 'drafted wrongly', 'finished by stop', 'finished by length', 'auto workloads', 'torch workloads', 'workloads with 1 threads',
               'workloads with 2 threads', *(f'{name} workloads' for name in FAMILIES))


def fuzz(num_workloads, seed=0, tell=lambda text: None):
    "Run workloads `seed`, `seed + 1`, …; returns what happened. Raises what the first failing one raises, after telling how to repeat it"
    total = Counter()
    for i in range(num_workloads):
        try: total += one_workload(seed + i)
        except BaseException:
            tell(f'failed; again with: python tests/fuzz_schedules.py --workloads 1 --seed {seed + i}')
            raise
        if (i + 1) % 50 == 0: tell(f"{i + 1} workloads, {total['requests']} requests, {total['rows']} rows of logits")
    return total


def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--workloads', type=int, default=500)
    parser.add_argument('--seed', type=int, default=0)
    args, started = parser.parse_args(), time.monotonic()
    total = fuzz(args.workloads, args.seed, lambda text: print(text, flush=True))
    for name, number in sorted(total.items()): print(f'{number:9} {name}')
    print(f'{args.workloads} workloads agree, {time.monotonic() - started:.0f} s')
    missing = [name for name in MUST_HAPPEN if not total[name]]
    if missing and args.workloads >= 100: sys.exit(f"never happened: {', '.join(missing)}")


if __name__ == '__main__': main()
