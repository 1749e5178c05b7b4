"""The command as a process: exit codes, one line for each error, and where things are printed"""
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from minigpt.cli import main, trace_to
from minigpt.scheduler import explain
from minigpt.viz import timeline_text

MINIGPT = [sys.executable, '-c', 'from minigpt.cli import main; raise SystemExit(main())']


def typed(*argv, **options):
    "A command in a process of its own; what it says of kernels on stderr depends on the machine, and is left out"
    done = subprocess.run([*MINIGPT, *map(str, argv)], capture_output=True, text=True, encoding='utf-8', timeout=300, **options)
    done.stderr = re.sub('.*kernels.*\n', '', done.stderr)
    return done


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    "A run that is long enough to be loaded"
    folder = tmp_path_factory.mktemp('cli')
    (folder/'text.txt').write_text('the cat saw the cup\n' * 200, encoding='utf-8')
    assert main(['data', str(folder/'text.txt'), '--out', str(folder/'data')]) == 0
    assert main(['train', '--data', str(folder/'data'), '--out', str(folder/'run'), '--updates', '3', '--warmup-updates', '1', '--threads', '1', *'--n-layer 1 --n-head 2 --n-embd 16 --max-seq-len 32'.split()]) == 0
    return folder/'run'


def test_the_installed_command_is_there():
    exe = shutil.which('minigpt', path=str(Path(sys.executable).parent))
    assert exe and subprocess.run([exe, '--version'], capture_output=True, text=True, timeout=60, check=True).stdout.startswith('minigpt ')


def test_help_and_version_need_no_torch():
    code = "import sys\nfrom minigpt.cli import main\ntry: main(['--help'])\nexcept SystemExit as e: print(e.code, 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=60, check=True).stdout.endswith('0 False\n')
    for command, flag in (('train', '--learning-rate'), ('generate', '--top-p'), ('serve', '--max-num-batched-tokens'), ('serve', '--no-chunked-prefill'), ('train', '--no-bias')):
        done = typed(command, '--help')
        assert done.returncode == 0 and flag in done.stdout


def test_bad_usage_is_one_line_and_exit_code_2(tmp_path, run):
    (tmp_path/'empty.txt').write_text('')
    (tmp_path/'short.txt').write_text('abcde' * 9)
    assert main(['data', str(tmp_path/'short.txt'), '--out', str(tmp_path/'short')]) == 0
    for argv, said in (
            ([], 'required: COMMAND'), (['train', '--wings'], 'required: --data, --out'), (['generate', run, 'a', '--max-token', '3'], 'unrecognized arguments: --max-token 3'),
            (['data', tmp_path/'empty.txt', '--out', tmp_path/'x'], 'empty.txt'), (['data', tmp_path/'none.txt', '--out', tmp_path/'x'], 'none.txt'),
            (['train', '--data', tmp_path/'short', '--out', tmp_path/'y'], 'one window needs max_seq_len + 1 = 65'), (['train', '--data', tmp_path, '--out', tmp_path/'y'], 'data.json'),
            (['generate', run, 'Zebra'], "character 'Z' at position 0"), (['generate', run, 'the ' * 8], 'a prompt of 32 tokens leaves no room'), (['generate', tmp_path/'none', 'a'], 'none'),
            (['serve', run, '--block-size', '0'], 'block_size=0 must be a whole number of at least 1'), (['serve', run, '--port', 'x'], "invalid int value: 'x'"),
            (['serve', run, '--max-num-batched-tokens', '8', '--no-chunked-prefill'], 'max_num_batched_tokens=8 must be at least the context of 32'),
            (['trace', tmp_path/'none.jsonl'], 'none.jsonl: No such file'), (['generate', run, 'the', '--threads', '0'], 'threads=0')):
        done = typed(*argv)
        assert (done.returncode, done.stdout, done.stderr.count('\n')) == (2, '', 1), (argv, done)
        assert said in done.stderr, (argv, done.stderr)
    assert not (tmp_path/'x').exists() and not (tmp_path/'y').exists()


def test_generate_prints_the_answer_and_nothing_else(run):
    plain = typed('generate', run, 'the cat', '--max-tokens', '9', '--seed', '4')
    as_json = typed('generate', run, 'the cat', '--max-tokens', '9', '--seed', '4', '--json')
    answer = json.loads(as_json.stdout)
    assert (plain.returncode, plain.stderr, plain.stdout) == (0, '', answer['text'] + '\n')
    assert (len(answer['token_ids']), answer['finish_reason'], answer['seed'], answer['prompt']) == (9, 'length', 4, 'the cat')


def test_trace_as_text_and_as_json(tmp_path, run, capsys):
    from minigpt.engine import Engine, EngineConfig
    from minigpt.kernels import prepare_for_inference
    from minigpt.sampling import SamplingParams
    from minigpt.weights import load_model
    loaded, lines = load_model(run), []
    engine = Engine(prepare_for_inference(loaded.model), loaded.tokenizer, EngineConfig(block_size=4, num_blocks=5, max_num_batched_tokens=16), lines.append)
    for name, prompt in (('A', 'the cat'), ('B', 'the cup'), ('C', 'cat')): engine.add(name, loaded.tokenizer.encode(prompt), SamplingParams(max_tokens=8, temperature=0))
    while engine.has_work: engine.step()
    requests, steps = ([line for line in lines if line['kind'] == kind] for kind in ('request', 'step'))
    (tmp_path/'trace.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines), encoding='utf-8')
    assert main(['trace', str(tmp_path/'trace.jsonl')]) == 0
    text = capsys.readouterr().out
    assert text == timeline_text(steps) + '\n\nA number: tokens computed in that step; 1+3: and 3 drafted ones that were right. w: waits. P: preempted.\n\n' + ''.join(
        f"step {n}: {'; '.join(explain(r))}\n" for n, r in enumerate(steps))
    assert 'B was preempted and lost ' in text and ': A needs 1 more block, 0 of 5 are free' in text
    assert main(['trace', str(tmp_path/'trace.jsonl'), '--json']) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(dict(header=None, requests=requests, records=steps)))
    assert main(['trace', str(tmp_path/'trace.jsonl'), '--columns', '3']) == 0
    assert capsys.readouterr().out.startswith(timeline_text(steps, 3) + '\n')


def test_a_trace_is_a_new_file_and_ends_with_its_disk(tmp_path, capsys, monkeypatch):
    (tmp_path/'old.jsonl').write_text('kept')
    with pytest.raises(FileExistsError), trace_to(str(tmp_path/'old.jsonl')): pass
    assert (tmp_path/'old.jsonl').read_text() == 'kept'
    with trace_to(None) as write: assert write is None
    with trace_to(str(tmp_path/'new.jsonl')) as write: write({'step': 0})
    assert (tmp_path/'new.jsonl').read_text() == '{"step": 0}\n'
    class Full:
        def write(self, text): raise OSError(28, 'No space left on device')
        def close(self): raise OSError(28, 'No space left on device')
    monkeypatch.setattr('builtins.open', lambda *args, **options: Full())
    with trace_to('full.jsonl') as write:
        for step in range(3): write({'step': step})
    monkeypatch.undo()
    assert capsys.readouterr().err == 'the trace ends here: full.jsonl: No space left on device\n'
