"""The peers room's edges: requests that never change, counts that are exact, and peers that are missing, crash, hang or print rubbish"""
import builtins
import dis
import hashlib
import json
import sys
import types
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minigpt import peers as room
from minigpt.bench import RecordExists, ReplicateFailed
from minigpt.cli import main
from minigpt.paging import blocks_needed
from minigpt.peers import (Peer, ask_all_schedules, ask_minigpt, ask_peer, bench_bits, bits_table, changed, count_changes, fingerprinted, hard_schedules,
                           island_requests, peer_places, peers, schedules)
from minigpt.tokenizer import ByteTokenizer

COMMON = list(schedules(24))


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    "A run over bytes with 32 tokens of context"
    folder = tmp_path_factory.mktemp('peers')
    (folder/'text.txt').write_text('the cat saw the cup\n' * 200, encoding='utf-8')
    assert main(['data', str(folder/'text.txt'), '--out', str(folder/'data'), '--tokenizer', 'byte']) == 0
    assert main(['train', '--data', str(folder/'data'), '--out', str(folder/'run'), *'--updates 2 --warmup-updates 1 --threads 1 --n-layer 1 --n-head 2 --n-embd 16 --max-seq-len 32'.split()]) == 0
    return str(folder/'run')


# Fakes: each is run by its text, like any adapter. What a fake changes under which schedule it is told by its settings
def ask_fake(job):
    def said(i, nth):
        change = job['changes'].get(str(len(job['batches'][-1])), {}) if nth else {}
        return [i, [i + 1 + change.get('tokens', {}).get(str(i), 0)], [-0.5 - change.get('bits', {}).get(str(i), 0)]]
    seen, answers = set(), []
    for i in (i for batch in job['batches'] for i in batch):
        answers.append(said(i, i in seen or len(job['batches'][-1]) > 1))
        seen.add(i)
    return dict(version='1.2', precision='made up', asked='nothing', answers=answers)

def ask_crash(job): raise RuntimeError('no such instruction')

def ask_crash_in_company(job):
    if len(job['batches'][0]) == 8: raise RuntimeError('too many guests')
    return dict(version='1', precision='', asked='', answers=[[i, [1], [0.5]] for b in job['batches'] for i in b])

def ask_hang(job):
    import time
    time.sleep(60)

def ask_rubbish(job):
    import os
    print('Loading… 100%', flush=True)
    os._exit(0)

def ask_other_order(job): return dict(version='1', precision='', asked='', answers=[[i, [1], [0.5]] for b in job['batches'] for i in reversed(b)])

def ask_no_numbers(job): return dict(version='1', precision='', asked='', answers=[[i, [1], []] for b in job['batches'] for i in b])

def ask_and_exit_3(job):
    import os
    print(json.dumps({}), flush=True)  # noqa: F821 - the text is run without this file's imports
    os._exit(3)


# ---- what is asked
def test_the_requests_never_change():
    "A record made elsewhere can only be compared if these are the same"
    requests = island_requests(ByteTokenizer().encode)
    assert hashlib.sha256(json.dumps(requests, sort_keys=True).encode()).hexdigest() == 'a3498aec739e40ebbbf08a85859dd0a35ae5f29764fc884f16454dab2e23bf64'
    assert len(requests) == 24 and [r['seed'] for r in requests] == list(range(24))
    assert all(8 <= len(r['prompt_token_ids']) <= 200 and 32 <= r['max_tokens'] <= 48 for r in requests)
    assert island_requests(ByteTokenizer().encode, seed=1) != requests

def test_every_schedule_asks_everyone():
    plans = schedules(24)
    assert list(plans) == ['again', 'pairs', 'eights', 'together', 'shuffled', 'chunked']
    for name, plan in plans.items():
        assert sorted(chain(*plan['batches'])) == sorted(list(range(24)) * (2 if name == 'again' else 1))
        assert plan['budget'] == (64 if name == 'chunked' else None) and plan['options'] == {}
    assert [{len(b) for b in p['batches']} for p in plans.values()] == [{1}, {2}, {8}, {24}, {24}, {24}]
    assert plans['shuffled']['batches'][0] == [13, 20, 9, 19, 8, 0, 16, 3, 23, 11, 14, 5, 4, 21, 6, 15, 12, 2, 7, 10, 1, 18, 22, 17]

@pytest.mark.parametrize('num', [1, 7, 25])
def test_schedules_of_any_number(num):
    for name, plan in schedules(num).items(): assert sorted(chain(*plan['batches'])) == sorted(list(range(num)) * (2 if name == 'again' else 1))

def test_the_hard_schedules_are_hard():
    requests = island_requests(ByteTokenizer().encode)
    hard, longest = hard_schedules(requests), max(len(r['prompt_token_ids']) + r['max_tokens'] for r in requests)
    assert blocks_needed(longest, 4) <= hard['crowded']['options']['num_blocks'] < sum(blocks_needed(len(r['prompt_token_ids']), 4) for r in requests) / 4
    assert hard['dripping']['budget'] == 7 and hard['dripping']['options']['max_num_seqs'] == 3

@pytest.mark.parametrize('name', peers())
def test_an_adapter_needs_nothing_of_ours(name):
    "Its text is all that the other Python gets, so each name that it reads is its own or Python's"
    def globals_read(code):
        for instruction in dis.get_instructions(code):
            if instruction.opname in ('LOAD_GLOBAL', 'LOAD_NAME'): yield instruction.argval
        for const in code.co_consts:
            if isinstance(const, types.CodeType): yield from globals_read(const)
    assert [n for n in globals_read(peers()[name].ask.__code__) if not hasattr(builtins, n)] == []


# ---- counting
@settings(derandomize=True, deadline=None)
@given(st.sets(st.integers(0, 23)), st.sets(st.integers(0, 23)))
def test_as_many_are_counted_as_were_changed(tokens, bits):
    reference = [[i, [i, i + 1], [-1.0, -0.25 * i]] for i in range(24)]
    other = [[i, [i, i + 1 + (i in tokens)], [-1.0, -0.25 * i - 2.0**-40 * (i in bits)]] for i in reversed(range(24))]
    assert changed(fingerprinted(reference), fingerprinted(other)) == (sorted(tokens), sorted(tokens | bits))

def test_the_first_answer_is_the_reference_and_the_last_one_counts():
    answers = fingerprinted([[0, [1], [0.5]], [1, [2], [0.5]], [0, [3], [0.5]], [1, [2], [0.25]]])
    assert changed(answers, answers) == ([0], [0, 1])
    assert changed(answers, answers[:2]) == ([], [])
    assert changed(answers[2:], answers) == ([], [])

def test_counts_of_an_engine():
    rows = [dict(schedule='again', version='1', precision='p', asked='q', answers=fingerprinted([[0, [1], [0.5]], [1, [2], [0.5]]] * 2)),
            dict(schedule='pairs', answers=fingerprinted([[0, [1], [0.25]], [1, [3], [0.5]]])),
            dict(schedule='eights', failed='it fell over'),
            dict(schedule='crowded', answers=fingerprinted([[0, [9], [0.5]], [1, [9], [0.5]]]))]
    counts = count_changes(rows, ['again', 'pairs', 'eights'])
    assert counts == dict(status='measured', version='1', precision='p', asked='q', answers_changed=dict(again=0, pairs=1, crowded=2),
                          bits_changed=dict(again=0, pairs=2, crowded=2), num_answers_changed=1, num_bits_changed=2, num_asked=4, failed=dict(eights='it fell over'))

def fake(monkeypatch, **named): monkeypatch.setattr(room, 'peers', lambda: named)

def test_an_engine_that_changes_exactly_k_answers(monkeypatch, model, tmp_path):
    "Through processes and files: 1 of them again, 3 in pairs, 5 in eights of which 2 in their bits only, all 24 together"
    together = dict(tokens={str(i): 1 for i in range(24)})
    changes = {'1': dict(tokens={'4': 1}), '2': dict(tokens={'0': 7, '5': 1, '23': 2}), '8': dict(tokens={'1': 1, '2': 1, '3': 1}, bits={'6': 2.0**-50, '7': 1e-9}), '24': together}
    fake(monkeypatch, steady=Peer('sys', ask_fake, settings=dict(changes={})), moody=Peer('sys', ask_fake, settings=dict(changes=changes)))
    seen = []
    summary = bench_bits(model, out_root=tmp_path, on_replicate=seen.append, threads=1)
    steady, moody = (summary['engines'][who] for who in ('steady', 'moody'))
    assert steady['answers_changed'] == steady['bits_changed'] == dict.fromkeys(COMMON, 0) and steady['num_answers_changed'] == 0
    assert moody['answers_changed'] == dict(again=1, pairs=3, eights=3, together=24, shuffled=24, chunked=24)
    assert moody['bits_changed'] == dict(again=1, pairs=3, eights=5, together=24, shuffled=24, chunked=24)  # 2**-50 below 0.5 is another number, 1e-9 too
    assert (moody['num_answers_changed'], moody['num_bits_changed'], moody['num_asked']) == (79, 81, 144)
    assert [(r['engine'], r['schedule']) for r in seen] == [(who, name) for who in ('steady', 'moody') for name in COMMON]
    raw = [json.loads(line) for line in (tmp_path/'bits'/'raw.jsonl').read_text(encoding='utf-8').splitlines()]
    assert raw[1:] == json.loads(json.dumps(seen)) and raw[0]['schedules'] == schedules(24) and len(raw[0]['requests']) == 24
    assert json.loads((tmp_path/'bits'/'summary.json').read_text(encoding='utf-8')) == summary
    policy = json.loads((tmp_path/'bits'/'policy.json').read_text(encoding='utf-8'))
    assert (policy['metric'], policy['replicates'], policy['threads'], policy['timeout_s']) == ('answers_changed', 6, 1, 900.0)
    with pytest.raises(RecordExists): bench_bits(model, out_root=tmp_path, threads=1)


# ---- peers that fail
def test_what_fails_is_reported_and_stops_nobody(monkeypatch, model, tmp_path):
    fake(monkeypatch, crash=Peer('sys', ask_crash), hang=Peer('sys', ask_hang), rubbish=Peer('sys', ask_rubbish), order=Peer('sys', ask_other_order),
         numbers=Peer('sys', ask_no_numbers), code=Peer('sys', ask_and_exit_3), missing=Peer('a_package_that_is_not_there', ask_fake),
         reader=Peer('sys', ask_fake, reads='gguf'), late=Peer('sys', ask_crash_in_company), steady=Peer('sys', ask_fake, settings=dict(changes={})))
    engines = bench_bits(model, out_root=tmp_path, threads=1, timeout_s=5.0)['engines']
    assert {who: e['status'] for who, e in engines.items()} == dict.fromkeys(('crash', 'hang', 'rubbish', 'numbers', 'code'), 'failed') | dict(
        missing='not installed', reader='reads a GGUF file, and none was given') | dict.fromkeys(('order', 'late', 'steady'), 'measured')
    assert {len(engines[who]['failed']) for who in ('crash', 'hang', 'rubbish', 'numbers', 'code')} == {1}
    assert engines['crash']['failed']['again'].startswith('crash, again: exit code 1; stderr ends: ') and engines['crash']['failed']['again'].endswith('RuntimeError: no such instruction')
    assert engines['hang']['failed']['again'] == 'hang, again: still running after timeout_s=5.0'
    assert engines['rubbish']['failed']['again'] == 'rubbish, again: no answer to each request in the object it printed last, which has []'
    assert 'numbers, again: no answer to each request' in engines['numbers']['failed']['again']
    assert engines['code']['failed']['again'].startswith('code, again: exit code')
    assert list(engines['order']['failed']) == ['pairs', 'eights', 'together', 'shuffled', 'chunked'] and engines['order']['num_asked'] == 24
    assert list(engines['late']['failed']) == ['eights'] and engines['late']['failed']['eights'].endswith('too many guests')
    assert (engines['late']['num_asked'], engines['late']['num_answers_changed']) == (120, 0)
    assert engines['steady']['num_asked'] == 144 and engines['steady']['failed'] == {}

def test_a_python_without_the_package_fails_with_the_reason():
    rows = ask_all_schedules('x', peers()['llama.cpp'], sys.executable, dict(model='m', requests=[dict()], threads=1), schedules(1), 60, lambda row: None)
    assert len(rows) == 1 and rows[0]['failed'].startswith('x, again: exit code 1') and 'xllamacpp' in rows[0]['failed']
    with pytest.raises(ReplicateFailed, match="x: cannot start '/no/such/python'"):
        ask_peer(Peer('sys', ask_fake), '/no/such/python', dict(requests=[], batches=[[0]], threads=1), 5, 'x')

def test_places(monkeypatch):
    fake(monkeypatch, here=Peer('sys', ask_fake), away=Peer('a_package_that_is_not_there', ask_fake), reader=Peer('sys', ask_fake, reads='gguf'))
    me = sys.executable
    assert peer_places([], 'm', 'g') == dict(here=(me, 'm'), away='not installed', reader=(me, 'g'))
    assert peer_places(['away=/p', 'reader=/q,h'], 'm', None) == dict(here=(me, 'm'), away=('/p', 'm'), reader=('/q', 'h'))
    for wrong in ('away', 'away=', 'other=/p', '=/p'):
        with pytest.raises(ValueError, match='must be NAME=PYTHON with a name of here, away, reader'): peer_places([wrong], 'm', None)

def test_nothing_is_run_for_a_wrong_name_or_an_older_record(monkeypatch, model, tmp_path):
    fake(monkeypatch, steady=Peer('sys', ask_crash))
    monkeypatch.setattr(room, 'ask_peer', lambda *a: pytest.fail('ran'))
    with pytest.raises(ValueError, match='must be NAME=PYTHON'): bench_bits(model, out_root=tmp_path, peer=['nobody=x'])
    (tmp_path/'bits').mkdir()
    with pytest.raises(RecordExists): bench_bits(model, out_root=tmp_path)


# ---- the command
def test_the_command_with_ours_alone(monkeypatch, model, tmp_path, capsys):
    fake(monkeypatch, minigpt=Peer('minigpt', ask_minigpt), absent=Peer('a_package_that_is_not_there', ask_fake))
    argv = ['bench', 'bits', '--model', model, '--threads', '1', '--out', str(tmp_path), '--record', 'toy']
    assert main(argv) == 0
    summary = json.loads(capsys.readouterr().out)
    ours = summary['engines']['minigpt']
    everything = dict.fromkeys([*COMMON, 'crowded', 'dripping'], 0)
    assert ours['answers_changed'] == ours['bits_changed'] == everything and ours['failed'] == {} and ours['num_asked'] == 144
    assert summary['engines']['absent'] == dict(status='not installed')
    assert sorted(p.name for p in (tmp_path/'toy').iterdir()) == ['machine.json', 'policy.json', 'raw.jsonl', 'summary.json']
    assert bits_table(summary).splitlines()[2].startswith('| minigpt ') and '| 0 | 0 | 0 | 0 | 0 | 0 | **0** of 144 | **0** of 144 |' in bits_table(summary)
    assert bits_table(summary).endswith('Not in the table: absent: not installed.')
    assert main(argv) == 2 and 'holds a record' in capsys.readouterr().err
    assert main([*argv, '--peer', 'who=python', '--replace']) == 2 and "peer 'who=python' must be NAME=PYTHON" in capsys.readouterr().err
    assert main(['bench', 'bits']) == 2 and 'bench bits needs --model' in capsys.readouterr().err
