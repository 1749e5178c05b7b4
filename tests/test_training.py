"""Stopped and resumed in real processes, and what a run refuses"""
import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from minigpt import checkpoint
from minigpt.checkpoint import Checkpointer, CheckpointError, is_whole, latest, load_checkpoint, read_state, resume, save_checkpoint
from minigpt.cli import main, only_one, stop_on_interrupt
from minigpt.data import RNGStreams, load_data, prepare
from minigpt.model import GPT, GPTConfig, init_weights
from minigpt.training import MetricsLog, TrainConfig, Trainer, read_metrics

SHAPE = '--n-layer 2 --n-head 2 --n-embd 32 --max-seq-len 32 --batch-size 6 --eval-every 7 --eval-windows 8 --warmup-updates 5 --dropout 0.1'.split()


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp('text')
    words = [f'{who} {did} {what}' for who in ('the cat', 'a dog', 'my aunt') for did in ('saw', 'dropped', 'washed') for what in ('the cup', 'a plate', 'the pot')]
    (folder/'text.txt').write_text('\n'.join(words[(7 * i) % 27] for i in range(200)), encoding='utf-8')
    prepare(folder/'text.txt', folder/'data', val_fraction=0.2)
    return folder/'data'


def command(data, out, *flags):
    return [sys.executable, '-c', 'from minigpt.cli import main; raise SystemExit(main())', 'train', '--data', str(data), '--out', str(out), '--threads', '1', *map(str, flags)]


def train(data, out, *flags):
    return subprocess.run(command(data, out, *flags), capture_output=True, text=True, timeout=300, check=True)


def without_clock(path): return [{k: v for k, v in m.items() if not k.endswith('_s')} for m in read_metrics(path)]


def assert_equal_runs(a, b):
    "The same last checkpoint, to the last bit, and the same metrics but for the clock"
    last_a, last_b = (latest(run/'checkpoints') for run in (a, b))
    assert last_a.name == last_b.name
    for file in ('model.safetensors', 'optimizer.safetensors'):
        x, y = load_file(last_a/file), load_file(last_b/file)
        assert sorted(x) == sorted(y) and all(torch.equal(x[name], y[name]) for name in x)
    state_a, state_b = read_state(last_a), read_state(last_b)
    for field in ('rng', 'update', 'val_loss', 'identity', 'model_config', 'train_config'): assert state_a[field] == state_b[field]
    assert without_clock(a/'metrics.jsonl') == without_clock(b/'metrics.jsonl')


def test_a_run_in_three_processes_is_a_run_in_one(data, tmp_path):
    flags = [*SHAPE, '--updates', 40, '--checkpoint-every', 10]
    train(data, tmp_path/'through', *flags)
    train(data, tmp_path/'cut', *flags, '--stop-at', 13)
    train(data, tmp_path/'cut', '--resume', '--stop-at', 30, '--checkpoint-every', 10)
    train(data, tmp_path/'cut', '--resume', '--checkpoint-every', 10)
    assert_equal_runs(tmp_path/'through', tmp_path/'cut')
    assert [m['update'] for m in read_metrics(tmp_path/'cut'/'metrics.jsonl')] == list(range(1, 41))


def test_a_killed_run_loses_only_what_came_after_its_checkpoint(data, tmp_path):
    flags = [*SHAPE, '--updates', 400, '--checkpoint-every', 50]
    train(data, tmp_path/'through', *flags)
    process = subprocess.Popen(command(data, tmp_path/'killed', *flags), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    metrics = tmp_path/'killed'/'metrics.jsonl'
    while not (metrics.exists() and len(metrics.read_bytes().splitlines()) > 70) and process.poll() is None and time.monotonic() < deadline: time.sleep(0.01)
    process.kill()
    process.wait(timeout=30)
    assert len(metrics.read_bytes().splitlines()) < 400, 'it ended before it was killed'
    train(data, tmp_path/'killed', '--resume', '--checkpoint-every', 50)
    assert_equal_runs(tmp_path/'through', tmp_path/'killed')


@pytest.mark.skipif(os.name == 'nt', reason='Windows has no SIGINT for another process')
def test_ctrl_c_saves_and_says_how_to_go_on(data, tmp_path):
    flags = [*SHAPE, '--updates', 3000, '--checkpoint-every', 1000]
    process = subprocess.Popen(command(data, tmp_path/'run', *flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (tmp_path/'run'/'metrics.jsonl').exists() and time.monotonic() < deadline: time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and 'Traceback' not in err and 'go on with: minigpt train' in err
    assert read_state(latest(tmp_path/'run'/'checkpoints'))['update'] == json.loads(out)['update']
    assert len(read_metrics(tmp_path/'run'/'metrics.jsonl')) == json.loads(out)['update']


def test_resume_takes_the_newest_whole_checkpoint_and_names_the_torn_one(data, tmp_path, capsys):
    out = tmp_path/'run'
    train(data, out, *SHAPE, '--updates', 30, '--checkpoint-every', 10, '--stop-at', 20)
    newest = latest(out/'checkpoints')
    (newest/'optimizer.safetensors').write_bytes((newest/'optimizer.safetensors').read_bytes()[:-1])
    assert main(['train', '--data', str(data), '--out', str(out), '--resume', '--threads', '1', '--checkpoint-every', '10']) == 0
    assert 'step_00000020/optimizer.safetensors is not as it was written' in capsys.readouterr().err.replace('\\', '/')
    assert [m['update'] for m in read_metrics(out/'metrics.jsonl')] == list(range(1, 31))


def test_each_file_altered_cut_or_gone_is_refused_by_name(tmp_path):
    where = save_checkpoint(tmp_path/'step_00000001', {'w': torch.arange(6.)}, {'m.w': torch.zeros(6)}, dict(update=1))
    for name in ('model.safetensors', 'optimizer.safetensors', 'state.json'):
        whole = (where/name).read_bytes()
        damaged = [whole[:i] + bytes([whole[i] ^ 1]) + whole[i+1:] for i in range(0, len(whole), 7)] + [whole[:n] for n in (0, 1, len(whole) - 1)]
        for content in (*damaged, None):
            (where/name).unlink()
            if content is not None: (where/name).write_bytes(content)
            with pytest.raises(CheckpointError, match=name): load_checkpoint(where)
            (where/name).write_bytes(whole)
    load_checkpoint(where)


def test_the_best_and_the_newest_are_kept(data, tmp_path):
    out = tmp_path/'run'
    train(data, out, *SHAPE, '--updates', 60, '--checkpoint-every', 7, '--learning-rate', '0.02', '--min-lr', '0.02')
    kept = {p.name: read_state(p) for p in (out/'checkpoints').iterdir()}
    losses = {m['update']: m['val_loss'] for m in read_metrics(out/'metrics.jsonl') if 'val_loss' in m}
    best = min((u for u in losses if u % 7 == 0 or u == 60), key=losses.get)
    assert set(kept) == {f'step_{u:08d}' for u in (best, 56, 60)}


def toy_trainer(data, config, **dials):
    prepared, streams = load_data(data), RNGStreams(config.seed)
    model = GPT(GPTConfig(**dict(vocab_size=prepared.tokenizer.vocab_size, max_seq_len=32, n_layer=2, n_head=2, n_embd=32) | dials))
    return Trainer(init_weights(model, streams.generator('init')), prepared.train, prepared.val, config, streams)


def weights(trainer): return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


@pytest.mark.parametrize('dials', [dict(qk_norm=True), dict(bias=False, qkv_bias=True), dict(head_dim=24), dict(position='rope', rope_factor=8.0, rope_original_max_seq_len=16),
                                   dict(position='rope', norm='rms', activation='swiglu', bias=False, qk_norm=True, head_dim=24, n_kv_head=1, tie_head=False)])
def test_each_dial_learns(data, dials):
    "All weights move, and the loss falls below that of single characters"
    trainer, losses = toy_trainer(data, TrainConfig(updates=60, warmup_updates=5, eval_every=60, batch_size=8, learning_rate=3e-3), **dials), []
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.after_update.append(lambda t, m: losses.append(m['loss']))
    trainer.run()
    for name, p in trainer.model.named_parameters(): assert not torch.equal(p, before[name]), name
    assert losses[0] > math.log(trainer.model.config.vocab_size) - 0.5 and losses[-1] < losses[0] - 1


@pytest.mark.parametrize('dials', [dict(dropout=0.2), dict(position='rope', norm='rms', activation='swiglu', bias=False, n_kv_head=1),
                                   dict(position='rope', norm='rms', activation='swiglu', bias=False, qkv_bias=True, qk_norm=True, head_dim=12, rope_factor=4.0,
                                        rope_original_max_seq_len=16)])
def test_looking_and_sampling_never_change_learning(data, dials):
    from minigpt.cli import sample_text
    results, tokenizer = [], load_data(data).tokenizer
    for eval_every, samples in ((1, False), (50, True), (50, False)):
        trainer = toy_trainer(data, TrainConfig(updates=12, warmup_updates=2, eval_every=eval_every, batch_size=4), **dials)
        if samples: trainer.after_update.append(lambda t, m: sample_text(t.model, tokenizer, 'the ', 10))
        trainer.run()
        results.append(weights(trainer))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_a_gradient_that_is_no_number_changes_no_weight(data):
    trainer = toy_trainer(data, TrainConfig(updates=5, warmup_updates=2))
    with torch.no_grad(): trainer.model.norm.weight[0] = torch.inf
    before = weights(trainer).clone()
    with pytest.raises(FloatingPointError, match='update 0: gradient norm is nan'): trainer.run()
    assert torch.equal(weights(trainer).nan_to_num(), before.nan_to_num()) and trainer.num_updates == 0


@pytest.fixture
def saved(data, tmp_path):
    "A run of 40 updates with checkpoints after each 10, of which 20 (the best or not), 30 and 40 may be there; and how to go on with it"
    manifest, config = load_data(data).manifest, TrainConfig(updates=60, warmup_updates=2, batch_size=4, eval_every=10, eval_windows=4)
    log = MetricsLog(tmp_path/'metrics.jsonl')
    def begin():
        trainer = toy_trainer(data, config)
        saver = Checkpointer(tmp_path/'checkpoints', 10, manifest, log)
        trainer.after_update += [log, saver]
        return trainer, saver, lambda folder: resume(trainer, folder, manifest, log)
    begin()[0].run(until=40)
    return tmp_path/'checkpoints', log, begin


def append(path, text='x'):
    with open(path, 'a') as f: f.write(text)


def test_a_torn_checkpoint_is_written_again(saved):
    root, log, begin = saved
    append(root/'step_00000040'/'model.safetensors')
    assert latest(root).name == 'step_00000030'
    trainer, saver, go_on = begin()
    go_on(latest(root))
    trainer.run(until=40)
    assert latest(root).name == 'step_00000040' and load_checkpoint(root/'step_00000040')[2]['update'] == 40


def test_a_checkpoint_that_cannot_be_read_takes_nobodys_place_and_stops_nobody(saved):
    root, log, begin = saved
    append(root/'step_00000030'/'state.json')
    trainer, saver, go_on = begin()
    go_on(latest(root))
    trainer.run(until=50)
    assert {'step_00000030', 'step_00000040', 'step_00000050'} <= {p.name for p in root.iterdir()}
    assert [is_whole(root/f'step_000000{n}') for n in (30, 40, 50)] == [False, True, True]


def test_a_metrics_file_that_lost_lines_is_noticed_before_anything_changes(saved):
    root, log, begin = saved
    log.cut(log.offset - 5)
    trainer, saver, go_on = begin()
    before = weights(trainer).clone()
    with pytest.raises(CheckpointError, match=f'metrics.jsonl has {log.offset} bytes, fewer than the {log.offset + 5} that step_00000040 saw'): go_on(latest(root))
    assert torch.equal(weights(trainer), before) and trainer.num_updates == 0 and trainer.optimizer.state == {}


@pytest.mark.parametrize('error', [OSError(28, 'No space left on device'), SafetensorError('I/O error')])
def test_a_save_that_fails_leaves_the_last_one_and_nothing_beside_it(saved, monkeypatch, error):
    root, log, begin = saved
    trainer, saver, go_on = begin()
    go_on(latest(root))
    before = sorted(p.name for p in root.iterdir())
    def full(tensors, path):
        path.write_bytes(b'half')
        raise error
    monkeypatch.setattr(checkpoint, 'save_file', full)
    with pytest.raises(CheckpointError, match='step_00000050 could not be written'): trainer.run(until=50)
    assert sorted(p.name for p in root.iterdir()) == before and latest(root).name == 'step_00000040'


def test_a_folder_that_holds_anything_of_a_run_is_not_begun_anew(data, tmp_path, capsys):
    for n, held in enumerate(('metrics.jsonl', 'checkpoints/step_00000010/state.json')):
        out = tmp_path/str(n)
        (out/held).parent.mkdir(parents=True)
        append(out/held, 'torn')
        assert main(['train', '--data', str(data), '--out', str(out), *SHAPE]) == 2
        assert 'holds a run; go on with --resume' in capsys.readouterr().err and (out/held).read_text() == 'torn'


def test_two_trainings_never_share_a_folder(data, tmp_path, capsys):
    process = subprocess.Popen(command(data, tmp_path/'run', *SHAPE, '--updates', 5000), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path/'run'/'metrics.jsonl').exists() and time.monotonic() < deadline: time.sleep(0.01)
        assert main(['train', '--data', str(data), '--out', str(tmp_path/'run'), '--resume']) == 2
        assert 'another process is training in this folder' in capsys.readouterr().err
    finally:
        process.kill()
        process.wait(timeout=30)
    with only_one(tmp_path/'run'): pass  # a kill lets go of it
    assert not (tmp_path/'run'/'training.lock').exists()


@pytest.mark.skipif(os.name == 'nt', reason='signals')
def test_the_first_signal_is_noted_and_the_second_is_the_systems():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with stop_on_interrupt() as stop:
        assert not stop
        signal.raise_signal(signal.SIGTERM)
        assert stop == [signal.SIGTERM] and signal.getsignal(signal.SIGINT) is signal.SIG_DFL is signal.getsignal(signal.SIGTERM)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
