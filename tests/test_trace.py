"Traces: what a recorded run says of itself, and that it can be run again"
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time

import openai
import pytest
from conftest import GPT2, findable_blocks, toy_model
from same_bits import repeating, workload
from test_scheduler import drive

from minigpt.cli import main
from minigpt.engine import Engine, EngineConfig, header_line, replay
from minigpt.kernels import prepare_for_inference
from minigpt.kv_cache import Choice
from minigpt.sampling import SamplingParams
from minigpt.paging import BlockPool
from minigpt.scheduler import Limits, Request, Scheduler, StepRecord, block_tables, explain
from minigpt.stepper import StaticStepper, Trace, outputs_of, read_trace, to_perfetto
from minigpt.tokenizer import ByteTokenizer
from minigpt.viz import timeline_text

TOKENIZER = ByteTokenizer()
ASKED = dict(A=('the cup fell', dict(max_tokens=12)), B=('the cup is', dict(max_tokens=9, n=2)), C=('why', dict(max_tokens=6)),
             D=('the cup', dict(max_tokens=9)), E=('where is it now', dict(max_tokens=4)))

STORY = [
    ['A arrived',
     'B arrived',
     "A entered and computed 10 tokens from position 0; 2 more to compute: 10 of the step's 10 tokens were left",
     "B needs 10 tokens, 0 of the step's 10 tokens were left; 1 more waits"],
    ['A computed 2 tokens from position 10',
     'B entered, found 8 tokens computed in blocks 0, 1 and computed 2 tokens from position 8',
     'B#1 was forked from B'],
    ['C arrived',
     'D arrived',
     'A decoded 1 token from position 12',
     'B decoded 1 token from position 10',
     'B#1 decoded 1 token from position 10',
     'C entered and computed 3 tokens from position 0',
     'B copied block 3 to 5, because others hold it',
     'D needs 1 seat, 4 of 4 are taken'],
    ['A decoded 1 token from position 13',
     'B decoded 1 token from position 11',
     'B#1 decoded 1 token from position 11',
     'C decoded 1 token from position 3',
     'D needs 1 seat, 4 of 4 are taken'],
    ['C was preempted and lost 4 tokens: C needs 1 more block, 0 of 9 are free, and nobody came after it',
     'A decoded 1 token from position 14',
     'B decoded 1 token from position 12',
     'B#1 decoded 1 token from position 12',
     'C waits: C had to go in this step; 1 more waits'],
    ['E arrived',
     'A decoded 1 token from position 15',
     'B decoded 1 token from position 13',
     'B#1 decoded 1 token from position 13',
     'C needs 2 blocks, 1 of 9 are free; 2 more wait'],
    ['A decoded 1 token from position 16',
     'B decoded 1 token from position 14',
     'B#1 decoded 1 token from position 14',
     'A took block 6, whose contents could be found until now',
     'C needs 2 blocks, 0 of 9 are free; 2 more wait'],
    ['A decoded 1 token from position 17',
     'B decoded 1 token from position 15',
     'B#1 decoded 1 token from position 15',
     'C needs 2 blocks, 0 of 9 are free; 2 more wait'],
    ['A decoded 1 token from position 18',
     'B decoded 1 token from position 16',
     'B took block 8, whose contents could be found until now',
     'C needs 2 blocks, 1 of 9 are free; 1 more waits',
     'B#1 finished: abort',
     'D finished: deadline (0 s too late)'],
    ['A decoded 1 token from position 19',
     'B decoded 1 token from position 17',
     'C needs 2 blocks, 1 of 9 are free; 1 more waits',
     'B finished: length'],
    ['A decoded 1 token from position 20',
     'C entered and computed 5 tokens from position 0',
     'C took blocks 3, 7, whose contents could be found until now',
     'E needs 4 blocks, 1 of 9 are free'],
    ['A decoded 1 token from position 21',
     'C decoded 1 token from position 5',
     'E needs 4 blocks, 1 of 9 are free'],
    ['A decoded 1 token from position 22',
     'C decoded 1 token from position 6',
     'E needs 4 blocks, 1 of 9 are free',
     'A finished: length'],
    ['C decoded 1 token from position 7',
     "E entered and computed 9 tokens from position 0; 6 more to compute: 9 of the step's 10 tokens were left",
     'E took blocks 5, 6, 4, whose contents could be found until now',
     'C finished: length'],
    ['E computed 6 tokens from position 9'],
    ['E decoded 1 token from position 15'],
    ['E decoded 1 token from position 16',
     'E took block 2, whose contents could be found until now'],
    ['E decoded 1 token from position 17',
     'E finished: length'],
]


def recorded(model):
    "Lines of a run with a preemption, a prefix hit, a fork and its copy, evictions, a deadline, an abort and a chunk"
    lines, now = [], [0.0]
    engine = Engine(model, TOKENIZER, EngineConfig(block_size=4, num_blocks=9, max_num_seqs=4, max_num_batched_tokens=10), lines.append, clock=lambda: now[0])
    lines.append(header_line(engine, 'toy'))
    def add(name, **options):
        prompt, params = ASKED[name]
        engine.add(name, list(prompt.encode()), SamplingParams(temperature=0.8, seed=ord(name), **params), **options)
    events = {0: lambda: (add('A'), add('B')), 2: lambda: (add('C'), add('D', deadline_s=6.0)), 5: lambda: add('E'), 8: lambda: engine.abort('B', 1)}
    while events or engine.has_work:
        events.pop(now[0], lambda: None)()
        engine.step()
        now[0] += 1
    return lines


def written(lines): return [json.dumps(line) + '\n' for line in lines]


def test_each_step_is_explained(prepared):
    "Each of these sentences was read beside the block tables and found true"
    trace = read_trace(written(recorded(prepared['llama'])))
    assert [explain(r) for r in trace.records] == STORY
    happened = {name for r in trace.records for name in ('preempted', 'found', 'evicted', 'forked', 'copied', 'admitted') if r[name]}
    assert happened == {'preempted', 'found', 'evicted', 'forked', 'copied', 'admitted'}
    assert {f['reason'] for r in trace.records for f in r['finished']} == {'length', 'abort', 'deadline'}
    assert block_tables(trace.records)[7] == {'A': [0, 1, 2, 4, 6], 'B': [0, 1, 5, 7], 'B#1': [0, 1, 3, 8]}
    assert findable_blocks(trace.records)[6] == {0, 1, 2, 3, 4, 5}
    said = outputs_of(trace.records)
    assert {i: len(tokens) for i, tokens in said.items()} == dict(A=12, B=9, C=6, E=4) | {'B#1': 7}


def test_a_trace_is_read_back_or_the_damaged_line_named():
    s = Scheduler(BlockPool(8), Limits(2, 24))
    s.add(Request('0', [1] * 4, 3))
    records = drive(s, [])[0]
    header = dict(kind='header', version=3, settings={}, max_seq_len=24)
    asked = dict(kind='request', version=3, id='0', step=0, arrived_s=0.5, num_finished=0, prompt_token_ids=[1], params={})
    assert read_trace([*(json.dumps(r) for r in (header, records[0], asked, *records[1:])), '']) == Trace(header, [asked], records)
    whole = ''.join(json.dumps(r) + '\n' for r in records)
    for cut in range(len(json.dumps(records[-1])) + 1):  # a process killed while it wrote its last line
        assert read_trace(io.StringIO(whole[:len(whole) - cut])).records == records[:len(records) - (cut > 1)]
    bad = dict(kind='step', version=3)
    for wrong, said in (('[]', 'is no header'), ('{', 'is no JSON'), (json.dumps(records[0] | dict(version=2)), 'has version 2, this one reads 3'), (json.dumps({'step': 1}), 'is no header'),
                        (json.dumps(records[0] | dict(kind='other')), 'is no header'), (json.dumps(bad), 'has step=None, not int'), (json.dumps(asked | dict(arrived_s=1)), 'has arrived_s=1, not float'),
                        *((json.dumps({k: v for k, v in records[0].items() if k != name}), f'has {name}=None') for name in vars(StepRecord(0, 1, 1)) if records[1][name] is not None and name != 'version'),
                        (json.dumps(records[0] | dict(step='1')), "has step='1', not int"), (json.dumps(records[0] | dict(finished={})), 'has finished={}, not list'),
                        (json.dumps(records[0] | dict(scheduled=[dict(id='0')])), 'has scheduled without start'), (json.dumps(records[0] | dict(finished=['0'])), 'has finished without id'),
                        (json.dumps(records[0] | dict(found=[])), 'has found=\\[\\], not dict')):
        with pytest.raises(ValueError, match=f'line 2 of the trace {said}'): read_trace([json.dumps(records[0]), wrong, '{}'])


def test_what_was_said_is_in_the_records():
    assert outputs_of([dict(drawn={'a': [[3, 0.5], [7, 0.0]], 'a#1': [[4, 0.5]]}), dict(drawn={}), dict(drawn={'a': [[5, 1.0]]})]) == {'a': [3, 7, 5], 'a#1': [4]}


def test_drawn_tokens_have_the_logits_that_they_won_with(prepared, monkeypatch):
    rows, accept = {}, Choice.accept
    def watched(choice, row):
        token_id = accept(choice, row)
        rows.setdefault((tuple(choice.prompt_token_ids), choice.index), []).append([token_id, row[token_id].item()])
        return token_id
    monkeypatch.setattr(Choice, 'accept', watched)
    trace, drawn = read_trace(written(recorded(prepared['llama']))), {}
    for r in trace.records:
        for i, pairs in r['drawn'].items(): drawn.setdefault(i, []).extend(pairs)
    assert sorted(drawn.values()) == sorted(rows.values())


@pytest.mark.parametrize('family', ['llama', 'gpt2'])
def test_replay_finds_the_same_bits_and_the_same_decisions(prepared, family):
    trace = read_trace(written(recorded(prepared[family])))
    same = replay(trace, prepared[family], TOKENIZER)
    assert (same.differences, same.first_step, same.num_steps, same.num_requests, same.num_tokens) == ([], None, 18, 5, 38)
    for changes in (dict(block_size=8, num_blocks=20), dict(max_num_batched_tokens=1), dict(enable_prefix_caching=False, num_blocks=99), dict(max_num_seqs=2), dict(full_reservation=True)):
        other = replay(trace, prepared[family], TOKENIZER, **changes)
        assert other.differences == [] and other.num_tokens >= 38 - 7, changes  # B#1 may be sent away a step earlier or later


def test_replay_names_each_answer_that_differs(prepared):
    trace = read_trace(written(recorded(prepared['llama'])))
    r = trace.records[3]
    [[was, logit]] = r['drawn']['B']
    r['drawn']['B'] = [[was, logit + 2**-20]]  # the last bits of one logit
    trace.records[12]['drawn']['C'][0][0] ^= 1
    [[token_c, logit_c]] = trace.records[12]['drawn']['C']
    result = replay(trace, prepared['llama'], TOKENIZER)
    assert result.differences == [f"B: token 2 is {was} with logit {logit!r}, and was {was} with {logit + 2**-20!r}",
                                  f"C: token 4 is {token_c ^ 1} with logit {logit_c!r}, and was {token_c} with {logit_c!r}"]
    assert result.first_step is None
    trace.records[5]['num_free_blocks'] += 1
    assert replay(trace, prepared['llama'], TOKENIZER).first_step == 5
    short = read_trace(written(recorded(prepared['llama'])))
    for r in short.records: r['drawn'].pop('E', None)
    assert replay(short, prepared['llama'], TOKENIZER).differences == ['E: 4 tokens, and had 0']


def test_replay_refuses_what_it_cannot_run(prepared):
    lines = recorded(prepared['llama'])
    trace = read_trace(written(lines))
    for broken, said in ((Trace(None, trace.requests, trace.records), 'the trace has no header'), (Trace(trace.header, trace.requests, trace.records[2:]), 'the trace has step 2 where step 0 should be'),
                         (Trace(trace.header, trace.requests[2:], trace.records), 'does not hold what was asked by A, B')):
        with pytest.raises(ValueError, match=said): replay(broken, prepared['llama'], TOKENIZER)
    with pytest.raises(ValueError, match="unknown option 'seats'"): replay(trace, prepared['llama'], TOKENIZER, seats=2)
    with pytest.raises(ValueError, match='the whole pool has 3'): replay(trace, prepared['llama'], TOKENIZER, num_blocks=3)
    cut = Trace(trace.header, trace.requests, trace.records[:7])  # a process that was killed
    result = replay(cut, prepared['llama'], TOKENIZER)
    assert (result.differences, result.first_step, result.num_steps) == ([], None, 7)


def leave(engine, alive, rng):
    "Now and then somebody gives up, or gives one of several answers up"
    if alive and rng.random() < 0.15: engine.abort(rng.choice(alive), rng.choice((None, 0, 1)))


def test_random_runs_replay(prepared):
    "With everything that the engine offers, and aborts at random"
    for seed in range(6):
        rng, lines = random.Random(seed), []
        engine = Engine(prepared['llama'], TOKENIZER, EngineConfig(block_size=rng.choice((4, 8)), num_blocks=rng.choice((17, 24, 60)), max_num_seqs=rng.choice((3, 8)), max_num_batched_tokens=rng.choice((5, 16, 64)),
                                                                   max_waiting_requests=9, max_records=0, speculate=rng.choice((None, 4))), lines.append)
        lines.append(header_line(engine, 'toy'))
        queue, alive = list(enumerate((repeating if seed % 2 else workload)(14, seed=seed))), []
        while queue or engine.has_work:
            leave(engine, alive, rng)
            while queue and rng.random() < 0.4:
                leave(engine, alive, rng)
                i, (prompt, params) = queue.pop()
                try: engine.add(str(i), prompt, params, priority=rng.choice((0, 0, 1)), key=rng.choice('xy'), cache_salt=rng.choice((None, None, 's')), deadline_s=rng.choice((None, None, None, 1e-9)))
                except RuntimeError: continue
                alive.append(str(i))
            leave(engine, alive, rng)
            if rng.random() < 0.1: engine.reset_prefix_cache()
            engine.step()
        trace = read_trace(written(lines))
        result = replay(trace, prepared['llama'], TOKENIZER)
        assert (result.differences, result.first_step) == ([], None), seed
        assert {'abort', 'deadline', 'length'} <= {f['reason'] for r in trace.records for f in r['finished']}
        for speculate in (0, 3): assert replay(trace, prepared['llama'], TOKENIZER, block_size=16, num_blocks=200, max_num_batched_tokens=7, speculate=speculate).differences == [], seed


# ---- over the command line, in real processes

@pytest.fixture(scope='module')
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp('trace')
    (folder/'text.txt').write_text('the cat saw the cup. why? the cup fell!\n' * 150, encoding='utf-8')
    assert main(['data', str(folder/'text.txt'), '--out', str(folder/'data')]) == 0
    shape = '--n-layer 2 --n-head 2 --n-embd 32 --max-seq-len 128 --batch-size 8 --eval-every 20 --eval-windows 4'.split()
    assert main(['train', '--data', str(folder/'data'), '--out', str(folder/'run'), '--updates', '20', '--warmup-updates', '2', '--threads', '1', *shape]) == 0
    return folder/'run'


def test_a_servers_trace_reproduces_every_token(run, tmp_path, capsys):
    "Ten clients at once: a stream, several prompts in one body, seeds of the server's own, stops, somebody who hangs up"
    path = tmp_path/'trace.jsonl'
    command = [sys.executable, '-c', 'from minigpt.cli import main; raise SystemExit(main())', 'serve', str(run), '--port', '0', '--trace', str(path),
               '--block-size', '4', '--num-blocks', '34', '--max-num-seqs', '8', '--max-num-batched-tokens', '16', '--threads', '1']
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=os.environ | dict(OMP_NUM_THREADS='1'))
    try:
        url = next(line for line in server.stderr if '/v1' in line).split()[1]
        client, heard = openai.OpenAI(base_url=url, api_key='none', max_retries=0, timeout=60), {}
        def ask(i, prompt, **fields):
            answer = client.completions.create(model='run', prompt=prompt, **fields)
            heard[i] = {c.index: c.text for c in answer.choices}
        def hang_up():
            stream = client.completions.create(model='run', prompt='the', max_tokens=100, stream=True)
            for _, _chunk in zip(range(3), stream): pass
            stream.close()
        threads = [threading.Thread(target=ask, args=(i, ['the cat saw'[:3 + i], 'why'][:1 + i % 2]), kwargs=dict(max_tokens=20 + 5 * i, stop=['!'] if i % 2 else None, logprobs=1 if i == 4 else None,
                                    logit_bias={'3': 1.5} if i == 5 else None, temperature=i / 5)) for i in range(9)] + [threading.Thread(target=hang_up)]
        for t in threads: t.start()
        for t in threads: t.join(90)
        assert len(heard) == 9
        deadline = time.monotonic() + 30
        while '"abort"' not in path.read_text() and time.monotonic() < deadline: time.sleep(0.05)
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
    finally:
        server.kill()
        server.wait(10)
        server.stderr.close()
    trace = read_trace(path.open(encoding='utf-8'))
    assert {'abort', 'length'} <= {f['reason'] for r in trace.records for f in r['finished']} and any(r['preempted'] for r in trace.records)
    tokens = outputs_of(trace.records)
    from minigpt.weights import load_model
    tokenizer = load_model(run).tokenizer
    said = sorted(tokenizer.decode(t) for t in tokens.values())
    for texts in heard.values():
        for text in texts.values(): assert any(s.startswith(text) for s in said)
    capsys.readouterr()
    for flags, where in (([], ['the scheduler decided as recorded']), (['--block-size', '16', '--num-blocks', '60', '--no-prefix-caching', '--max-num-seqs', '9'], [])):
        assert main(['replay', str(path), *flags]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].endswith('steps: each token and each logit as recorded') and lines[1:] == where
    assert lines[0].split(' requests')[0] == str(len(trace.requests)) and len(trace.requests) == 9 + 4 + 1
    assert main(['trace', str(path)]) == 0
    assert capsys.readouterr().out.startswith(timeline_text(trace.records))


def test_trace_as_a_page_for_perfetto_and_under_another_policy(prepared, tmp_path, capsys):
    path, lines = tmp_path/'trace.jsonl', recorded(prepared['llama'])
    path.write_text(''.join(written(lines)), encoding='utf-8')
    records = read_trace(written(lines)).records
    assert main(['trace', str(path), '--html']) == 0
    assert capsys.readouterr().out == StaticStepper(records).html_page('The steps of trace.jsonl')
    assert main(['trace', str(path), '--perfetto']) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(to_perfetto(records)))
    assert main(['trace', str(path), '--perfetto', '--html']) == 2
    capsys.readouterr()
    assert main(['simulate', str(path), '--num-blocks', '40', '--max-num-seqs', '3']) == 0
    out = capsys.readouterr().out
    recorded_part, simulated_part = out.split('\n\nsimulated\n')
    assert recorded_part == 'recorded\n' + timeline_text(records) and re.search('preemptions +1 +0\n', simulated_part)
    assert main(['simulate', str(path), '--max-records', '3']) == 2
    assert '--max-records changes nothing that a scheduler decides' in capsys.readouterr().err


def test_replay_on_other_weights_warns_and_says_what_differs(run, tmp_path, capsys):
    path, model = tmp_path/'trace.jsonl', prepare_for_inference(toy_model(**GPT2))
    path.write_text(''.join(written(recorded(model))), encoding='utf-8')
    assert main(['replay', str(path), '--model', str(tmp_path/'none')]) == 2
    assert 'there is no such file or folder' in capsys.readouterr().err
    lines = recorded(model)
    lines = [line | (dict(fingerprint='0' * 64, model=str(run), max_seq_len=128) if line['kind'] == 'header' else
                     dict(prompt_token_ids=[t % 9 for t in line['prompt_token_ids']]) if line['kind'] == 'request' else {}) for line in lines]
    path.write_text(''.join(written(lines)), encoding='utf-8')
    assert main(['replay', str(path)]) == 1
    out, err = capsys.readouterr()
    assert f'warning: {run} has other weights than the trace was made with' in err
    assert out.splitlines()[0].startswith('A: token 0 is ') and '5 requests, ' in out and '5 answers are different' in out
    path.write_text(''.join(written(lines[1:2])), encoding='utf-8')
    assert main(['replay', str(path)]) == 2 and 'holds no step records' in capsys.readouterr().err


def test_a_line_is_never_changed_after_it_was_given():
    "A trace is written by another thread, a little later"
    lines = []
    engine = Engine(prepare_for_inference(toy_model(**GPT2)), ByteTokenizer(), EngineConfig(block_size=4, num_blocks=14, max_num_batched_tokens=16, max_num_seqs=4),
                    lambda line: lines.append((line, json.dumps(line))))
    for i in range(12): engine.add(f'r{i}', [i % 3] * (6 + i), SamplingParams(max_tokens=14, n=1 + i % 3, seed=i, temperature=1.0, logit_bias={7: 1.0}))
    while engine.has_work:
        if engine.scheduler.num_steps == 9: engine.abort('r3')
        engine.step()
    records = [line for line, _ in lines if line['kind'] == 'step']
    for name in ('preempted', 'forked', 'copied', 'found', 'evicted'): assert any(r[name] for r in records), name
    assert len(records) > 64 and [json.dumps(line) for line, _ in lines] == [text for _, text in lines]
