"What the data room doesn't show: every kind of source, bounded memory, torn and damaged folders, streams under stress"
import hashlib, http.server, io, itertools, json, os, subprocess, sys, threading, tracemalloc
import hypothesis, numpy as np, pytest, torch
from hypothesis import strategies as st
import minigpt.data as data_module
from minigpt.data import (BatchSampler, CHUNK_BYTES, DataError, Meter, RNGStreams, TokenFile, between_words, fingerprint, load_data,
                          machine_identity, prepare, read_text)
from minigpt.tokenizer import BPETokenizer

KINDS = ['char', 'byte', 'bpe']
STORY = 'The cat waits at the café.\n\nAt night the lamp turns, and the cat turns 🐈.\n    It\'s morning!  \n' * 4


def given(**strategies):
    "The same 150 examples in every run"
    return lambda f: hypothesis.settings(derandomize=True, deadline=None, max_examples=150)(hypothesis.given(**strategies)(f))

def written(path, text=STORY):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path

def refused(message, *args, **kwargs):
    with pytest.raises(DataError) as caught: prepare(*args, **kwargs)
    assert str(caught.value) == message

def names(folder): return sorted(p.name for p in folder.iterdir())

OURS = ['data.json', 'tokenizer.json', 'train.bin', 'val.bin']


# Reading

@given(content=st.binary(max_size=60), size=st.integers(1, 20))
def test_reading_in_pieces_is_reading(content, size):
    meter = Meter()
    def read(): return ''.join(read_text(io.BytesIO(content), 'x', meter, size))
    try: expected = content.decode()
    except UnicodeDecodeError as e:
        with pytest.raises(DataError, match=f'^x is not UTF-8: byte {content[e.start]:#04x} at offset {e.start}$'): read()
    else:
        assert read() == expected
        assert (meter.num_bytes, meter.hexdigest()) == (len(content), hashlib.sha256(content).hexdigest())


BPE = BPETokenizer.train([STORY + '\n\n\n   \n  end \t\r\n\r\n.  ' + 'a\n\nb  c\n\n\n' * 9], 400)
TEXT = st.lists(st.sampled_from(['cat', ' ', '  ', '\n', '\n\n', '\t', '\r\n', "'s", "'", '.', '12', 'é', '🐈', '\u00a0', '\u2028', '\u3000', '\x1c', '\x85', '!'])).map(''.join)

@given(text=st.one_of(TEXT, st.text(st.characters(exclude_categories=['Cs']))), size=st.integers(1, 12), border=st.integers(0, 12))
def test_pieces_between_words_have_the_tokens_of_the_whole(text, size, border):
    pieces = list(between_words((text[i:i+size] for i in range(0, len(text), size)), border))
    assert ''.join(p for _, p in pieces) == text and all(p for _, p in pieces)
    assert [at for at, _ in pieces] == [0, *itertools.accumulate(len(p) for _, p in pieces)][:len(pieces)]
    if 0 < border < len(text): assert border in [at for at, _ in pieces]
    for part, chosen in ((text[:border], [p for at, p in pieces if at < border]), (text[border:], [p for at, p in pieces if at >= border])):
        assert BPE.encode(part) == [i for p in chosen for i in BPE.encode(p)]


def test_memory_does_not_grow_with_the_text(tmp_path):
    peaks = {}
    for kind, chunks in itertools.product(KINDS, (3, 8)):
        path = written(tmp_path/f'{chunks}.txt', STORY * (chunks * CHUNK_BYTES // len(STORY)))
        tracemalloc.start()
        prepare(path, tmp_path/'out', kind, vocab_size=300 if kind == 'bpe' else None)
        peaks[kind, chunks] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    for kind in KINDS: assert peaks[kind, 8] < peaks[kind, 3] + 3 * CHUNK_BYTES, peaks  # five more pieces, held nowhere


# Sources

@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('val_fraction', [0.1, 0.25, 0.5, 0.9])
def test_split_is_by_characters(tmp_path, kind, val_fraction):
    manifest = prepare(written(tmp_path/'a.txt'), tmp_path/'out', kind, val_fraction=val_fraction)
    data = load_data(tmp_path/'out', verify=True)
    num_train = int(len(STORY) * (1 - val_fraction))
    assert data.train[:].tolist() == data.tokenizer.encode(STORY[:num_train])
    assert data.val[:].tolist() == data.tokenizer.encode(STORY[num_train:])
    assert names(tmp_path/'out') == OURS
    assert manifest == json.loads((tmp_path/'out'/'data.json').read_text()) == data.manifest


def test_char_split_is_nanogpts(tmp_path):
    for n in (10, 99, 1115, 111539):
        prepare(written(tmp_path/'a.txt', 'ab' * n), tmp_path/'out')
        assert len(load_data(tmp_path/'out').train) == int(2 * n * 0.9)


def test_manifest(tmp_path):
    manifest = prepare(written(tmp_path/'a.txt', 'ab' * 50), tmp_path/'out', val_fraction=0.2)
    def sha(content): return hashlib.sha256(content).hexdigest()
    def entry(split, n): return {'file': f'{split}.bin', 'num_tokens': n, 'dtype': 'uint16', 'sha256': sha(b'\0\0\1\0' * (n // 2))}
    assert manifest == {
        'minigpt_data': 1, 'source': str(tmp_path/'a.txt'), 'sha256': sha(b'ab' * 50), 'num_characters': 100,
        'tokenizer': {'kind': 'char', 'vocab_size': 2, 'sha256': sha(b'{"minigpt": 1, "kind": "char", "chars": "ab"}')},
        'splits': {'train': entry('train', 80), 'val': entry('val', 20)}}


@pytest.mark.parametrize('kind', KINDS)
def test_folder(tmp_path, kind):
    texts = {'b.txt': 'the cat', 'a/c.md': 'café', 'a.txt': 'lamp\n', 'empty.txt': ''}
    for name, text in texts.items(): written(tmp_path/'in'/name, text)
    for hidden in ('.git/x', 'a/.x'): written(tmp_path/'in'/hidden, b'\xff')
    manifest = prepare(tmp_path/'in', tmp_path/'in'/'out', kind, val_fraction=0.2)
    assert prepare(tmp_path/'in', tmp_path/'in'/'out', kind, val_fraction=0.2) == manifest  # what is in `out` is no text
    data = load_data(tmp_path/'in'/'out')
    ordered = ['lamp\n', 'café', 'the cat', '']
    joined, tokens = '\n'.join(ordered), data.train[:].tolist() + data.val[:].tolist()
    assert manifest['sha256'] == hashlib.sha256(joined.encode()).hexdigest()
    if kind == 'bpe':
        assert manifest['num_characters'] == sum(map(len, ordered))
        assert tokens.count(data.tokenizer.eos_token_id) == 3
        assert data.tokenizer.decode(tokens, skip_special_tokens=False) == '<|endoftext|>'.join(ordered)
        assert data.tokenizer.decode(data.train[:].tolist()) == ''.join(ordered)[:int(16 * 0.8)]
    else:
        assert manifest['num_characters'] == len(joined)
        assert data.tokenizer.decode(tokens) == joined
        assert data.tokenizer.decode(data.train[:].tolist()) == joined[:int(len(joined) * 0.8)]


def test_folder_with_a_file_that_is_no_text(tmp_path):
    written(tmp_path/'in'/'a.txt')
    bad = written(tmp_path/'in'/'b.png', b'ab\x89PNG')
    refused(f'{bad} is not UTF-8: byte 0x89 at offset 2', tmp_path/'in', tmp_path/'out')
    assert not (tmp_path/'out').exists()


def test_invalid_byte_far_into_a_file(tmp_path):
    bad = written(tmp_path/'a.txt', b'a' * (CHUNK_BYTES - 1) + '🐈'.encode() + b'b' * CHUNK_BYTES + b'\xfe')
    for kind in KINDS: refused(f'{bad} is not UTF-8: byte 0xfe at offset {2 * CHUNK_BYTES + 3}', bad, tmp_path/'out', kind)


def test_pydoc(tmp_path):
    from pydoc_data.topics import topics
    text = '\n'.join(topics[k] for k in sorted(topics))
    manifest = prepare('pydoc', tmp_path/'out', 'byte')
    data = load_data(tmp_path/'out')
    assert (manifest['source'], manifest['num_characters']) == ('pydoc', len(text))
    assert data.tokenizer.decode(data.train[:].tolist() + data.val[:].tolist()) == text


def test_stdlib(tmp_path, monkeypatch):
    files = data_module.stdlib_files()
    assert len(files) > 300 and {'argparse.py', 'json/decoder.py'} <= {'/'.join(p.parts[-2:]) if p.parent.name == 'json' else p.name for p in files}
    assert not {'site-packages', 'test', '__pycache__'} & {part for p in files for part in p.parts[-3:]}
    assert files == sorted(files) and sum(p.stat().st_size for p in files) > 5_000_000
    some = files[:40]
    monkeypatch.setattr(data_module, 'stdlib_files', lambda: some)
    prepare('stdlib', tmp_path/'out')
    data = load_data(tmp_path/'out')
    text = '\n'.join(p.read_bytes().decode() for p in some)
    assert data.tokenizer.decode(data.train[:].tolist() + data.val[:].tolist()) == text


@pytest.mark.slow
def test_all_of_stdlib(tmp_path):
    manifest = prepare('stdlib', tmp_path/'out')
    data = load_data(tmp_path/'out', verify=True)
    assert manifest['num_characters'] == len(data.train) + len(data.val) > 5_000_000


@pytest.fixture
def site(tmp_path):
    "A server on this machine: /story, /short (ends too soon), anything else is 404; and what it was asked for"
    asked = []
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            found = self.path in ('/story', '/short')
            self.send_response(200 if found else 404)
            if found: self.send_header('Content-Length', str(len(STORY.encode()) + (self.path == '/short')))
            self.end_headers()
            if found: self.wfile.write(STORY.encode())
        def log_message(self, *args): pass
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f'http://127.0.0.1:{server.server_port}'
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize('kind', KINDS)
def test_url(tmp_path, site, kind):
    right = hashlib.sha256(STORY.encode()).hexdigest()
    manifest = prepare(f'{site}/story', tmp_path/'url', kind, sha256=right.upper())
    assert manifest['sha256'] == right and names(tmp_path/'url') == OURS
    from_file = prepare(written(tmp_path/'a.txt'), tmp_path/'file', kind, sha256=right)
    assert {**manifest, 'source': ''} == {**from_file, 'source': ''}


def test_url_that_is_not_what_was_asked_for(tmp_path, site, monkeypatch):
    right, wrong = hashlib.sha256(STORY.encode()).hexdigest(), '0' * 64
    refused(f'{site}/missing: HTTP Error 404: Not Found', f'{site}/missing', tmp_path/'out')
    size = len(STORY.encode())
    refused(f'{site}/short ended after {size} of {size + 1} bytes', f'{site}/short', tmp_path/'out')
    with monkeypatch.context() as m:
        m.setattr(data_module, 'survey', lambda *args: pytest.fail('used before it was checked'))
        refused(f'{site}/story has SHA-256 {right}, expected {wrong}', f'{site}/story', tmp_path/'out', sha256=wrong)
    with pytest.raises(DataError, match='^http://127.0.0.1:1/x: .*refused'): prepare('http://127.0.0.1:1/x', tmp_path/'out')
    refused(f'{tmp_path}/a.txt has SHA-256 {right}, expected {wrong}', written(tmp_path/'a.txt'), tmp_path/'out', sha256=wrong)
    assert not (tmp_path/'out').exists()


def test_progress(tmp_path, site):
    seen = []
    prepare(f'{site}/story', tmp_path/'out', progress=lambda *args: seen.append(args))
    size = len(STORY.encode())
    assert list(dict.fromkeys(seen)) == [(stage, size, size) for stage in ('download', 'read', 'encode')]


# What is refused, and what is left then

def test_choices_that_are_refused(tmp_path):
    path, out = written(tmp_path/'a.txt'), tmp_path/'new'/'out'
    refused("tokenizer 'words' is not char, byte or bpe", path, out, 'words')
    refused('vocab_size=300 is for bpe; char finds its own', path, out, vocab_size=300)
    refused('vocab_size=256 must be at least 257', path, out, 'bpe', vocab_size=256)
    for f in (0, 1, -0.1, float('nan')): refused(f'val_fraction={f} must be in (0, 1)', path, out, val_fraction=f)
    refused(f"source '{tmp_path}/none' is not pydoc, stdlib, http(s)://…, or a file or folder that exists", tmp_path/'none', out)
    for kind in KINDS: refused(f'{tmp_path}/b.txt: 0 characters in 1 document; a corpus needs at least 2', written(tmp_path/'b.txt', ''), out, kind)
    (tmp_path/'nothing').mkdir()
    refused(f'{tmp_path}/nothing: 0 characters in 0 documents; a corpus needs at least 2', tmp_path/'nothing', out)
    refused('train gets 0 of 1 characters with val_fraction=0.1', written(tmp_path/'b.txt', 'x'), out)
    refused('val gets 0 of 376 characters with val_fraction=1e-17', path, out, val_fraction=1e-17)
    refused(f'{path} is a file; data needs a folder', path, path)
    assert not out.exists()


def test_a_folder_that_is_not_ours_is_left_alone(tmp_path):
    path = written(tmp_path/'a.txt')
    def left(name, content, message):
        out = written(tmp_path/name/(file := content[0]), content[1]).parent
        before = (out/file).read_bytes()
        refused(message.format(out=out), path, out)
        assert names(out) == [file] and (out/file).read_bytes() == before
    left('a', ('notes.md', 'mine'), "{out} holds 'notes.md', which was not prepared by us; choose an empty folder")
    left('b', ('train.bin', 'mine'), "{out} holds 'train.bin', which was not prepared by us; choose an empty folder")
    left('c', ('data.json', '{"mine": 1}'), '{out}/data.json is not a data manifest of format 1')
    left('d', ('data.json', '[]'), '{out}/data.json is not a data manifest of format 1')


def test_preparing_again_replaces(tmp_path):
    out, path = tmp_path/'out', written(tmp_path/'a.txt')
    first = prepare(path, out)
    held = load_data(out)
    before = held.train[:].tolist()
    assert prepare(path, out) == first
    second = prepare(written(tmp_path/'b.txt', STORY[::-1]), out, 'byte')
    assert second == load_data(out, verify=True).manifest and second['sha256'] != first['sha256']
    if os.name == 'posix': assert held.train[:].tolist() == before  # who had it open goes on with what he opened
    kept = {p.name: p.read_bytes() for p in out.iterdir()}
    for bad in (written(tmp_path/'c.txt', b'abc\xff'), tmp_path/'none'):
        with pytest.raises(DataError): prepare(bad, out)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == kept


KILLED = '''
import os, sys
import minigpt.data as data
count, replace = int(sys.argv[3]), os.replace
def replace_or_die(*args):
    global count
    count -= 1
    if count < 0: os._exit(9)
    replace(*args)
data.os.replace = replace_or_die
data.prepare(sys.argv[1], sys.argv[2], 'byte')
'''

@pytest.mark.parametrize('count', [1, 3])
def test_killed_while_replacing(tmp_path, count):
    out = tmp_path/'out'
    prepare(written(tmp_path/'a.txt'), out)
    other = written(tmp_path/'b.txt', STORY[::-1])
    assert subprocess.run([sys.executable, '-c', KILLED, other, out, str(count)]).returncode == 9
    with pytest.raises(DataError, match='data.json is missing'): load_data(out)
    assert prepare(other, out, 'byte') == load_data(out, verify=True).manifest
    assert names(out) == OURS


def test_failure_while_replacing_leaves_nothing_that_stands_in_the_way(tmp_path, monkeypatch):
    path, out = written(tmp_path/'a.txt'), tmp_path/'out'
    replace, calls = os.replace, itertools.count()
    def fails(*args):
        if next(calls) == 2: raise OSError('disk full')
        replace(*args)
    with monkeypatch.context() as m:
        m.setattr(os, 'replace', fails)
        with pytest.raises(OSError, match='disk full'): prepare(path, out)
    assert not out.exists()
    prepare(path, out)


def test_text_that_changes_between_the_passes(tmp_path, monkeypatch):
    path = written(tmp_path/'a.txt')
    survey = data_module.survey
    def changed(*args):
        found = survey(*args)
        written(path, STORY[::-1])
        return found
    monkeypatch.setattr(data_module, 'survey', changed)
    refused(f'{path} changed while it was read', path, tmp_path/'out')
    assert not (tmp_path/'out').exists()


@pytest.mark.parametrize('name', OURS)
def test_damage_is_found(tmp_path, name):
    prepare(written(tmp_path/'a.txt'), tmp_path/'out')
    file = tmp_path/'out'/name
    whole = file.read_bytes()
    file.write_bytes(whole[:-2])
    with pytest.raises(DataError, match=name): load_data(tmp_path/'out')
    file.write_bytes(whole[:-2] + b'\x07' + whole[-1:])
    with pytest.raises(DataError, match=name): load_data(tmp_path/'out', verify=True)
    file.unlink()
    with pytest.raises(DataError, match=f'{name} is missing'): load_data(tmp_path/'out')
    with pytest.raises(DataError, match='data.json is missing'): load_data(tmp_path/'nowhere')


def test_fingerprint(tmp_path):
    content = os.urandom(3_000_000)
    assert fingerprint(written(tmp_path/'x', content)) == hashlib.sha256(content).hexdigest()


# Token files and batches

def token_file(tmp_path, n, dtype='uint16'):
    np.arange(n).astype(f'<{dtype[0]}{dtype[-2:] == "16" and 2 or 4}').tofile(tmp_path/'x.bin')
    return TokenFile(tmp_path/'x.bin', dtype)


def test_token_files(tmp_path):
    for dtype, n in (('uint16', 65536), ('uint32', 70000)):
        tokens = token_file(tmp_path, n, dtype)
        assert (len(tokens), tokens[-1], tokens[0]) == (n, n - 1, 0)
        assert tokens[n-3:].tolist() == [n-3, n-2, n-1] and tokens[::n-1].dtype == torch.int64
        assert torch.equal(tokens[:], torch.arange(n))
    with pytest.raises(IndexError): tokens[n]
    (tmp_path/'x.bin').write_bytes(b'abc')
    with pytest.raises(DataError, match='3 bytes are not 1 or more tokens of 2 bytes'): TokenFile(tmp_path/'x.bin')
    (tmp_path/'x.bin').write_bytes(b'')
    with pytest.raises(DataError, match='0 bytes'): TokenFile(tmp_path/'x.bin')


def test_many_ids_take_four_bytes(tmp_path):
    splits = data_module.write_splits(tmp_path, [('train', [65536, 1]), ('val', [2])], 65537)
    assert splits['train']['dtype'] == 'uint32' and TokenFile(tmp_path/'train.bin', 'uint32')[:].tolist() == [65536, 1]
    assert data_module.write_splits(tmp_path, [('train', [65535]), ('val', [2])], 65536)['train']['dtype'] == 'uint16'
    assert TokenFile(tmp_path/'train.bin', 'uint16')[:].tolist() == [65535]


@pytest.mark.parametrize('seq_len, batch_size', [(1, 1), (3, 4), (7, 2), (10, 4), (98, 3), (99, 1)])
def test_windows_ask_for_each_token_once(tmp_path, seq_len, batch_size):
    tokens = token_file(tmp_path, 100)
    walked = list(tokens.windows(seq_len, batch_size))
    targets = torch.cat([y.flatten() for _, y in walked])
    assert targets.tolist() == list(range(1, 100))
    assert torch.equal(torch.cat([x.flatten() for x, _ in walked]), targets - 1)
    assert all(x.shape == y.shape and len(x) <= batch_size for x, y in walked)
    assert [x.shape[1] for x, _ in walked if x.shape[1] != seq_len] == [99 % seq_len] * bool(99 % seq_len)


def test_windows_of_a_part_are_spread_and_fixed(tmp_path):
    tokens = token_file(tmp_path, 1001)
    assert [x[0, 0].item() for x, _ in tokens.windows(10, max_windows=4)] == [0, 250, 500, 750]
    assert sum(len(x) for x, _ in tokens.windows(10, 8, max_windows=1000)) == 100


def test_batches_reach_every_place_and_no_other(tmp_path):
    tokens = token_file(tmp_path, 12)
    seen = torch.cat([BatchSampler(tokens, 300, 4, torch.Generator().manual_seed(s)).next()[1] for s in range(3)])
    starts = (seen[:, 0] - 1).bincount()
    assert len(starts) == 8 and starts.min() > 70  # 900 draws over 8 places
    inputs, targets = BatchSampler(tokens, 5, 11, torch.Generator()).next()
    assert inputs.tolist() == [list(range(11))] * 5 and targets.tolist() == [list(range(1, 12))] * 5


def test_resumed_batches_are_the_same_bits(tmp_path):
    tokens = token_file(tmp_path, 5000)
    def fresh(seed):
        streams = RNGStreams(seed)
        return streams, BatchSampler(tokens, 8, 16, streams.generator('batches'))
    _, straight = fresh(1337)
    expected = [straight.next() for _ in range(20)]
    streams, sampler = fresh(1337)
    for k in range(20):
        inputs, targets = sampler.next()
        assert torch.equal(inputs, expected[k][0]) and torch.equal(targets, expected[k][1])
        state = json.loads(json.dumps({'streams': streams.state_dict(), 'sampler': sampler.state_dict()}))
        streams, sampler = fresh(k)
        if k % 2: streams.load_state_dict(state['streams'])
        else: sampler.load_state_dict(state['sampler'])
        torch.rand(3)  # the global generator is somebody else's


def test_a_corpus_shorter_than_one_window(tmp_path):
    tokens = token_file(tmp_path, 16)
    BatchSampler(tokens, 2, 15, torch.Generator()).next()
    for use in (lambda: BatchSampler(tokens, 2, 16, torch.Generator()), lambda: next(tokens.windows(16))):
        with pytest.raises(DataError, match='x.bin: 16 tokens, one window needs max_seq_len \\+ 1 = 17$'): use()


def test_batches_leave_the_global_generator_alone(tmp_path):
    sampler = BatchSampler(token_file(tmp_path, 100), 4, 8, torch.Generator())
    before = torch.get_rng_state()
    sampler.next()
    assert torch.equal(torch.get_rng_state(), before)


# Streams

def test_streams_differ_by_name_and_seed_and_are_fixed():
    def first(seed, name): return torch.randint(1 << 30, (), generator=RNGStreams(seed).generator(name)).item()
    drawn = [first(seed, name) for seed in (0, 1, -1, 2**70) for name in RNGStreams.names]
    assert len(set(drawn)) == 16
    assert [first(0, name) for name in RNGStreams.names] == drawn[:4]
    expected = int.from_bytes(hashlib.sha256(b'7:init').digest()[:8], 'little')
    assert RNGStreams(7).generator('init').initial_seed() == expected


@given(draws=st.lists(st.tuples(st.sampled_from(RNGStreams.names), st.booleans(), st.integers(1, 700)), max_size=12))
def test_no_stream_moves_another(draws):
    together, outside = RNGStreams(3), torch.get_rng_state()
    seen = {name: [] for name in RNGStreams.names}
    for name, in_block, n in draws:
        if in_block:
            with together.use(name): seen[name] += torch.rand(n).tolist()
        else: seen[name] += torch.rand(n, generator=together.generator(name)).tolist()
    assert torch.equal(torch.get_rng_state(), outside)
    for name in RNGStreams.names:
        alone = RNGStreams(3).generator(name)
        assert seen[name] == [x for other, _, n in draws if other == name for x in torch.rand(n, generator=alone).tolist()]


def test_use_comes_back_after_an_error():
    streams, outside = RNGStreams(0), torch.get_rng_state()
    with pytest.raises(KeyError), streams.use('dropout'):
        torch.rand(5)
        raise KeyError
    assert torch.equal(torch.get_rng_state(), outside)
    expected = RNGStreams(0).generator('dropout')
    torch.rand(5, generator=expected)
    with streams.use('dropout'): assert torch.equal(torch.rand(3), torch.rand(3, generator=expected))
    with pytest.raises(RuntimeError, match="^stream 'dropout' is in use already$"), streams.use('dropout'), streams.use('dropout'): pass
    streams.state_dict()


def test_use_nests_and_serves_dropout_and_init():
    streams = RNGStreams(0)
    with streams.use('init'):
        weights = torch.nn.Linear(3, 3).weight
        with streams.use('dropout'): dropped = torch.nn.functional.dropout(torch.ones(20))
        more = torch.rand(3)
    again = RNGStreams(0)
    with again.use('init'):
        assert torch.equal(torch.nn.Linear(3, 3).weight, weights)
        assert torch.equal(torch.rand(3), more)
    with again.use('dropout'): assert torch.equal(torch.nn.functional.dropout(torch.ones(20)), dropped)


def test_states_that_are_refused_change_nothing():
    streams = RNGStreams(0)
    before = streams.state_dict()
    for state in ({}, before | {'more': ''}, before | {'sampling': ''}, before | {'sampling': 'xyz'}, before | {'sampling': None},
                  {**RNGStreams(1).state_dict(), 'sampling': before['init'][:-2]}):
        with pytest.raises(DataError): streams.load_state_dict(state)
        assert streams.state_dict() == before


# The machine

def test_identity_where_the_system_says_little(monkeypatch):
    def missing(*args, **kwargs): raise OSError
    monkeypatch.setattr(data_module.Path, 'read_text', missing)
    monkeypatch.delattr(os, 'sysconf', raising=False)
    monkeypatch.setattr(data_module, 'version', lambda name: (_ for _ in ()).throw(data_module.PackageNotFoundError(name)))
    found = machine_identity()
    assert found['memory_gb'] is None and set(found['versions'].values()) == {None}
    assert list(found) == ['platform', 'python', 'cpu', 'num_cpus', 'memory_gb', 'torch_threads', 'versions']
    json.dumps(found, allow_nan=False)
