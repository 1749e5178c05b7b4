"The HTTP server: over a fake engine for faults, and over a real one in a process of its own for streams and disconnects. Every wait is bounded."
import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from hypothesis import given, settings, strategies as st

from minigpt.runner import EngineRunner
from minigpt.server import RequestError, create_app, listening_socket, read_body, read_completion, read_object, running_server, token_text
from minigpt.tokenizer import ByteTokenizer, CharTokenizer
from test_runner import FakeEngine

WAIT_S = 20


def until(condition, timeout_s=WAIT_S):
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline: raise TimeoutError(f'not so after {timeout_s} s')
        time.sleep(.005)


# ---- over a fake engine, in this process

class Served:
    def __init__(self, engine, **kwargs):
        self.engine, self.runner = engine, EngineRunner(engine, **kwargs)
        self.app = create_app(self.runner, ByteTokenizer(), 'toy', 64)

    def __enter__(self):
        self.server = running_server(self.app, drain_timeout_s=.5)
        self.url = self.server.__enter__()
        self.http = httpx.Client(base_url=self.url, timeout=WAIT_S)
        return self

    def __exit__(self, *exc):
        self.engine.gate.set()
        self.http.close()
        self.server.__exit__(*exc)
        assert self.runner.stop(WAIT_S)

    def post(self, **fields): return self.http.post('/v1/completions', json=dict(model='toy', prompt='abc') | fields)
    def permit(self, n): self.runner._queue.put(lambda: setattr(self.engine, 'permits', n))
    def requests(self): return self.runner.inspect(lambda engine: list(engine.left)).result(WAIT_S)
    def client(self): return openai.OpenAI(base_url=self.url + '/v1', api_key='none', max_retries=0, timeout=WAIT_S)


@pytest.fixture
def served(caplog):
    caplog.set_level(logging.CRITICAL)
    with contextlib.ExitStack() as stack:
        yield lambda engine=None, **kwargs: stack.enter_context(Served(engine or FakeEngine(), **kwargs))


def error_of(response, status, code=None):
    "The error object, checked for its shape"
    assert response.status_code == status, (response.status_code, response.text)
    assert response.headers['content-type'] == 'application/json'
    error = response.json()['error']
    assert set(error) == {'message', 'type', 'param', 'code'} and isinstance(error['message'], str) and len(error['message']) <= 501
    assert 'Traceback' not in error['message'] and 'File "' not in error['message']
    assert error['type'] == ('rate_limit_error' if status == 429 else 'invalid_request_error' if status < 500 else 'server_error')
    if code: assert error['code'] == code
    return error


def events_of(text):
    assert text.endswith('\n\n')
    return [dict(line.split(': ', 1) for line in block.split('\n')) for block in text[:-2].split('\n\n')]


def test_a_stream_says_what_the_whole_says(served):
    s = served()
    whole = s.post(prompt='hello').json()
    assert whole['choices'] == [dict(index=0, text='hello', logprobs=None, finish_reason='length', stop_reason=None, seed=1)]
    assert whole['usage'] == dict(prompt_tokens=5, completion_tokens=5, total_tokens=10)
    assert (whole['object'], whole['model']) == ('text_completion', 'toy') and re.fullmatch('cmpl-[0-9a-f]{32}', whole['id'])
    response = s.post(prompt='hello', stream=True)
    assert response.headers['content-type'].startswith('text/event-stream') and 'content-length' not in response.headers
    events = events_of(response.text)
    assert events[-1] == dict(data='[DONE]')
    chunks = [json.loads(e['data']) for e in events[:-1]]
    assert [c['choices'][0]['text'] for c in chunks] == list('hello')
    assert [c['choices'][0]['finish_reason'] for c in chunks] == [None] * 4 + ['length']
    assert len({c['id'] for c in chunks}) == 1 and not any('usage' in c for c in chunks)


def test_usage_chunk_only_if_asked_after_finish_before_done(served):
    events = events_of(served().post(prompt='hi', stream=True, stream_options=dict(include_usage=True)).text)
    chunks = [json.loads(e['data']) for e in events[:-1]]
    assert [(len(c['choices']), c['usage']) for c in chunks] == [(1, None), (1, None), (0, dict(prompt_tokens=2, completion_tokens=2, total_tokens=4))]
    assert chunks[1]['choices'][0]['finish_reason'] == 'length' and events[-1] == dict(data='[DONE]')


@pytest.mark.parametrize('prompt, texts', [([[97, 98], [99]], ['ab', 'c']), (['ab', 'c', 'ab'], ['ab', 'c', 'ab']), ([97], ['a'])])
def test_several_prompts_give_choices_in_order(served, prompt, texts):
    s = served()
    answer = s.post(prompt=prompt).json()
    assert [(c['index'], c['text']) for c in answer['choices']] == list(enumerate(texts))
    n = sum(map(len, texts))
    assert answer['usage'] == dict(prompt_tokens=n, completion_tokens=n, total_tokens=2 * n)
    got = dict.fromkeys(range(len(texts)), '')
    finishes = []
    for e in events_of(s.post(prompt=prompt, stream=True).text)[:-1]:
        for choice in json.loads(e['data'])['choices']:
            got[choice['index']] += choice['text']
            if choice['finish_reason']: finishes.append(choice['index'])
    assert list(got.values()) == texts and sorted(finishes) == list(range(len(texts)))


BAD_BODIES = ['', '{', '{not json', '[]', 'null', '1', '"x"', 'true', '[' * 100_000, '{"a":' * 5000 + '1' + '}' * 5000, '{"model": "toy", "prompt": "x", "max_tokens": ' + '9' * 5000 + '}', b'\xff\xfe\xfd', b'a=b&c=d']
BAD_FIELDS = [
    (dict(prompt=prompt), 'prompt') for prompt in
    ('', [], [[]], [''], ['a', ''], [[1], []], 5, 1.5, True, {}, [True], [1, 'a'], ['a', [1]], [[1], 'a'], [1.5], [[1.5]], [None], [[[1]]], ['a'] * 129, [{}])
] + [
    (dict(max_tokens=n), 'max_tokens') for n in ('5', 1.5, True, 0, -1, [5], {}, 'NaN')
] + [
    (dict(temperature=t), 'temperature') for t in (-1, '1', True, [1])] + [
    (dict(top_p=p), 'top_p') for p in (0, 1.1, -1, '1')] + [
    (dict(seed=s), 'seed') for s in (-1, 2**64, 1.5, '1', True)] + [
    (dict(stop=s), 'stop') for s in (5, [5], [''], '', ['x'] * 17, 'x' * 1001, ['x' * 1001], {}, True)] + [
    (dict(logprobs=n), 'logprobs') for n in (-1, 21, True, 1.0, '1')] + [
    (dict(n=n), 'n') for n in (2, 0, True, '1')] + [
    (dict(echo=e), 'echo') for e in (True, 0, 'false')] + [
    (dict(stream=s), 'stream') for s in (1, 'true', [])] + [
    (dict(stream=True, stream_options=o), None) for o in (5, [], dict(other=1), dict(include_usage=1), dict(include_usage='true'))] + [
    (dict(stream_options=dict(include_usage=True)), 'stream_options'), (dict(stream=False, stream_options=dict()), 'stream_options'),
    (dict(top_k=-2), 'top_k'), (dict(top_k=1.5), 'top_k'), (dict(min_p=2), 'min_p'), (dict(min_tokens=17), 'min_tokens'), (dict(min_tokens=-1), 'min_tokens'),
    (dict(stop_token_ids=[-1]), 'stop_token_ids'), (dict(stop_token_ids=5), 'stop_token_ids'), (dict(stop_token_ids=list(range(129))), 'stop_token_ids'),
    (dict(ignore_eos=1), 'ignore_eos'), (dict(best_of=2), 'best_of'), (dict(frequency_penalty=2.5), 'frequency_penalty'), (dict(presence_penalty=-3), 'presence_penalty'), (dict(prompt_logprobs=1), 'prompt_logprobs'),
    (dict(logit_bias={'5': 101}), 'logit_bias'), (dict(suffix='x'), 'suffix'), (dict(max_token=5), 'max_token'), ({'x' * 100_000: 1}, None), ({'\ud800': 1}, None),
    (dict(model=5), 'model'), (dict(model=None), 'model'), (dict(prompt=None), 'prompt'), (dict(stop='y' * 2_000_000), 'stop'), (dict(max_tokens='5' * 2_000_000), 'max_tokens'),
]


def test_bad_requests_are_refused_and_the_next_is_answered(served):
    s = served()
    for body in BAD_BODIES:
        error_of(s.http.post('/v1/completions', content=body), 400)
        assert s.post().status_code == 200
    for fields, param in BAD_FIELDS:
        body = json.dumps(dict(model='toy', prompt='abc') | fields)
        error = error_of(s.http.post('/v1/completions', content=body), 400)
        if param: assert error['param'] == param, (fields, error)
        assert s.post().status_code == 200
    for content in ('temperature": NaN', 'temperature": Infinity', 'max_tokens": 1e999', 'top_p": NaN', 'prompt": ["\\ud800"]', 'prompt": "\\udfff"'):
        error_of(s.http.post('/v1/completions', content='{"model": "toy", "prompt": "x", "' + content + '}'), 400)
    assert s.requests() == []


def test_unknown_field_is_named(served):
    error = error_of(served().post(max_token=5), 400, 'unknown_field')
    assert 'max_token' in error['message'] and error['param'] == 'max_token'


def test_no_error_echoes_a_huge_prompt(served):
    s = served()
    app = create_app(s.runner, CharTokenizer('abc'), 'toy', 64)
    with running_server(app) as url, httpx.Client(base_url=url, timeout=WAIT_S) as http:
        huge = 'ab' * 500_000
        for prompt in (huge + 'Z', [huge, ''], {huge: 1}, [[1], huge]):
            response = http.post('/v1/completions', json=dict(model='toy', prompt=prompt))
            error_of(response, 400)
            assert len(response.content) < 1000
        error = error_of(http.post('/v1/completions', json=dict(model='toy', prompt='abZ')), 400)
        assert "'Z'" in error['message'] and 'position 2' in error['message'] and error['param'] == 'prompt'
        assert len(error_of(http.post('/v1/completions', json=dict(model=huge, prompt='a')), 404, 'model_not_found')['message']) < 300


@pytest.mark.parametrize('fields', [
    dict(n=1, best_of=1, echo=False, suffix='', frequency_penalty=0.0, presence_penalty=0, logit_bias={}, user='me'),
    dict(n=None, stop=None, seed=None, logprobs=None, temperature=None, max_tokens=None, stream=None, stream_options=None, suffix=None, logit_bias=None, user=None),
    dict(temperature=0, top_p=1, seed=2**64 - 1, stop=['x', 'y'], logprobs=0, top_k=-1, min_p=0, min_tokens=3, stop_token_ids=[5], ignore_eos=True, max_tokens=5),
    dict(stream=True, stream_options=dict(include_usage=None))])
def test_fields_that_are_fine(served, fields):
    assert served().post(**fields).status_code == 200


def test_what_is_read_from_a_request():
    asked = read_completion(read_object(b'{"model": "toy", "prompt": "x", "max_tokens": null, "seed": 5, "stop": "a", "logprobs": 0, "stream": true, "stream_options": {"include_usage": true}}'), 'toy')
    assert (asked.prompts, asked.params.max_tokens, asked.params.seed, asked.params.stop, asked.params.logprobs) == (['x'], 16, 5, ('a',), 0)
    assert (asked.stream, asked.include_usage) == (True, True)


JSON = st.recursive(st.none() | st.booleans() | st.integers(-2**70, 2**70) | st.floats(allow_nan=True) | st.text(max_size=5), lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3), max_leaves=6)
NAMES = ['prompt', 'max_tokens', 'temperature', 'top_p', 'seed', 'stop', 'stream', 'stream_options', 'logprobs', 'n', 'echo', 'top_k', 'min_p', 'min_tokens', 'stop_token_ids', 'ignore_eos', 'suffix', 'logit_bias', 'best_of']


@settings(derandomize=True, deadline=None, max_examples=400)
@given(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=4))
def test_any_json_is_read_or_refused_clearly(fields):
    try: read_completion(read_object(json.dumps(dict(model='toy', prompt='x') | fields).encode()), 'toy')
    except RequestError as error:
        assert error.status == 400 and len(error.message) <= 501
        json.dumps(error.to_dict(), ensure_ascii=False).encode()


def test_paths_methods_and_models(served):
    s = served()
    for path in ('/', '/v1', '/v1/completion', '/v1/completions/', '/docs', '/openapi.json', '/v1/chat'): error_of(s.http.get(path), 404)
    response = s.http.get('/v1/completions')
    error_of(response, 405)
    assert response.headers['allow'] == 'POST'
    for path in ('/health', '/v1/models'): error_of(s.http.post(path), 405)
    error_of(s.post(model='other'), 404, 'model_not_found')
    error_of(s.http.get('/v1/models/other'), 404, 'model_not_found')
    assert s.http.get('/health').json() == dict(status='ok')
    models = s.http.get('/v1/models').json()
    assert models['object'] == 'list' and [m['id'] for m in models['data']] == ['toy'] and models['data'][0]['max_model_len'] == 64
    assert s.http.get('/v1/models/toy').json() == models['data'][0]
    assert s.client().models.retrieve('toy').id == 'toy'


def test_a_model_name_may_have_slashes():
    runner = EngineRunner(FakeEngine())
    app = create_app(runner, ByteTokenizer(), 'org/toy', 64)
    with running_server(app) as url: assert httpx.get(url + '/v1/models/org/toy').json()['id'] == 'org/toy'
    assert runner.stop(WAIT_S)


def test_engines_refusals_have_a_status(served):
    s = served()
    assert error_of(s.post(prompt=[13]), 500, 'internal_error')['message'] == 'an error inside the server; its log has more'
    assert s.post().status_code == 200
    s = served(FakeEngine(permits=0, max_requests=1))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(s.post)
        until(lambda: s.requests())
        for stream in (False, True):
            response = s.post(stream=stream)
            error_of(response, 429, 'queue_full')
            assert int(response.headers['retry-after']) > 0
        error_of(s.post(prompt=['a', 'b']), 429)
        s.permit(100)
        assert first.result(WAIT_S).json()['choices'][0]['text'] == 'abc'


def test_command_bound_gives_429_and_what_was_accepted_ends(served):
    engine = FakeEngine()
    engine.gate.clear()
    s = served(engine, max_commands=4)
    with ThreadPoolExecutor(32) as pool:
        first = pool.submit(s.post)
        assert engine.in_step.wait(WAIT_S)
        others = [pool.submit(s.post) for _ in range(20)]
        until(lambda: sum(f.done() for f in others) == 16)
        engine.gate.set()
        statuses = [f.result(WAIT_S).status_code for f in others]
        assert sorted(statuses) == [200] * 4 + [429] * 16 and first.result(WAIT_S).status_code == 200


def test_several_prompts_are_taken_together_or_not_at_all(served):
    engine = FakeEngine(permits=0, max_requests=2)
    s = served(engine)
    error_of(s.post(prompt=['a', 'b', 'c']), 429)
    until(lambda: s.requests() == [])
    s.permit(100)
    assert [c['text'] for c in s.post(prompt=['a', 'b']).json()['choices']] == ['a', 'b']


def test_failure_before_the_first_token_is_a_status_after_it_an_event(served):
    s = served()
    for stream in (False, True):
        assert 'a NaN' in error_of(s.http.post('/v1/completions', json=dict(model='toy', prompt=[7, 97], stream=stream)), 500, 'request_failed')['message']
    events = events_of(s.post(prompt=[97, 7, 97], stream=True).text)
    assert [e.get('event') for e in events] == [None, 'error'] and json.loads(events[1]['data'])['error']['code'] == 'request_failed'
    error_of(s.post(prompt=[97, 7, 97]), 500, 'request_failed')
    read = ''
    with pytest.raises(openai.APIError, match='a NaN'):
        for chunk in s.client().completions.create(model='toy', prompt=[97, 98, 7, 97], stream=True): read += chunk.choices[0].text
    assert read == 'ab' and s.post().status_code == 200


def test_engine_failure_ends_streams_with_an_event_and_turns_health_red(served):
    engine = FakeEngine(permits=1, fail_at=2)
    s = served(engine)
    with ThreadPoolExecutor(4) as pool:
        assert s.http.get('/health').status_code == 200
        streams = [pool.submit(s.post, stream=True)]
        until(lambda: engine.num_steps == 1)
        waiting = pool.submit(s.post)
        until(lambda: len(s.requests()) == 2)
        s.permit(5)
        events = events_of(streams[0].result(WAIT_S).text)
        assert [e.get('event') for e in events] == [None, 'error'] and json.loads(events[1]['data'])['error']['code'] == 'engine_dead'
        assert 'block' not in events[1]['data']  # what the engine died of is for the log
        error_of(waiting.result(WAIT_S), 503, 'engine_dead')
    response = s.http.get('/health')
    assert (response.status_code, response.json()) == (503, dict(status='dead'))
    for stream in (False, True): error_of(s.post(stream=stream), 503, 'engine_dead')
    assert s.http.get('/v1/models').status_code == 200


@pytest.mark.parametrize('stream', [False, True])
@pytest.mark.parametrize('when', ['waiting', 'running'])
def test_a_closed_connection_aborts(served, stream, when):
    engine = FakeEngine(permits=0)
    s = served(engine)
    body = json.dumps(dict(model='toy', prompt='abcdef', stream=stream)).encode()
    host, port = s.url[7:].split(':')
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as sock:
        sock.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n' % len(body) + body)
        until(lambda: s.requests())
        if when == 'running':
            s.permit(2)
            if stream: assert sock.recv(100).startswith(b'HTTP/1.1 200')
            until(lambda: engine.num_steps == 2)
    until(lambda: s.requests() == [], 2)
    assert len(engine.aborted) == 1
    s.permit(100)
    assert s.post().status_code == 200


def test_a_connection_closed_within_the_body_is_tolerated(served):
    s = served()
    host, port = s.url[7:].split(':')
    for sent in (b'', b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{"model"', b'\x16\x03\x01 not http\r\n\r\n'):
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as sock: sock.sendall(sent)
        assert s.post().status_code == 200


def test_a_reader_that_stalls_is_aborted_and_others_go_on(served):
    engine = FakeEngine()
    s = served(engine, max_stream_outputs=64)
    body = json.dumps(dict(model='toy', prompt=[97] * 500_000, stream=True)).encode()
    host, port = s.url[7:].split(':')
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((host, int(port)))
        sock.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n' % len(body) + body)
        until(lambda: len(engine.aborted) == 1)
        assert s.post().json()['choices'][0]['text'] == 'abc' and s.requests() == []


def test_events_are_ascii_and_the_socket_is_known_to_be_tcp(served):
    assert served().post(prompt=[0x2028 % 256, 233], stream=True).text.isascii()
    with listening_socket('127.0.0.1', 0) as listener: assert listener.proto == socket.IPPROTO_TCP


def test_tokens_that_are_parts_of_characters():
    assert [token_text(i, ByteTokenizer()) for i in (97, 0xe2, 0x0a)] == ['a', 'bytes:\\xe2', '\n']


def test_running_server_reports_a_taken_port_and_a_failed_start():
    runner = EngineRunner(FakeEngine())
    app = create_app(runner, ByteTokenizer(), 'toy', 64)
    with running_server(app) as url:
        with pytest.raises(OSError):
            with running_server(app, port=int(url.rsplit(':', 1)[1])): pass
    async def broken(scope, receive, send): raise ValueError('no')
    with running_server(broken) as url: assert httpx.get(url).status_code == 500
    assert runner.stop(WAIT_S)
    assert not [t for t in threading.enumerate() if t.name in ('minigpt-http', 'minigpt-engine')]


# ---- over a real engine, in a process of its own

TOY = '''
import json, sys
import torch
from minigpt.engine import Engine, EngineConfig
from minigpt.kernels import prepare_for_inference
from minigpt.model import GPT, GPTConfig
from minigpt.runner import EngineRunner
from minigpt.server import create_app, serve_forever
from minigpt.tokenizer import ByteTokenizer

trace, drain_timeout_s = open(sys.argv[1], 'w'), float(sys.argv[2])
def on_record(line):
    if line['kind'] == 'step': print(json.dumps(line), file=trace, flush=True)
torch.manual_seed(0)
model = GPT(GPTConfig(vocab_size=256, max_seq_len=2048, n_layer=2, n_head=2, n_embd=16, position='rope', tie_head=False))
engine = Engine(prepare_for_inference(model), ByteTokenizer(), EngineConfig(block_size=4, num_blocks=16 * 512, threads=1, max_waiting_requests=256), on_record)
runner = EngineRunner(engine, on_start=engine.set_threads)
app = create_app(runner, ByteTokenizer(), 'toy', 2048)

@app.get('/state')
async def state():
    import asyncio
    ask = runner.inspect(lambda e: dict(free=e.num_free_blocks, total=e.num_blocks, running=e.num_running, waiting=e.num_waiting))
    return await asyncio.wrap_future(ask)

serve_forever(app, port=0, on_ready=lambda url: print(url, flush=True), drain_timeout_s=drain_timeout_s)
print('stopped' if runner.stop(10) else 'stuck', flush=True)
'''


class Process:
    "The toy model behind HTTP, in a process of its own"
    def __init__(self, folder, drain_timeout_s=5):
        self.trace, self.errors = Path(folder) / 'trace.jsonl', Path(folder) / 'errors.txt'
        self.process = subprocess.Popen([sys.executable, '-c', TOY, str(self.trace), str(drain_timeout_s)], stdout=subprocess.PIPE,
                                        stderr=self.errors.open('w'), text=True, env=os.environ | dict(OMP_NUM_THREADS='1'))
        self.url = self.line(60)
        assert self.url.startswith('http://127.0.0.1:'), self.errors.read_text()
        self.http = httpx.Client(base_url=self.url, timeout=WAIT_S, limits=httpx.Limits(max_connections=64))
        self.openai = openai.OpenAI(base_url=self.url + '/v1', api_key='none', max_retries=0, timeout=60, http_client=httpx.Client(limits=httpx.Limits(max_connections=64)))

    def line(self, timeout_s):
        "One line of its output, or what it wrote until then"
        with ThreadPoolExecutor(1) as pool:
            line = pool.submit(self.process.stdout.readline)
            try: return line.result(timeout_s).strip()
            except TimeoutError:
                self.process.kill()
                raise

    def complete(self, **fields): return self.openai.completions.create(**dict(model='toy', prompt='The cat sat') | fields)
    def post(self, **fields): return self.http.post('/v1/completions', json=dict(model='toy', prompt='The cat sat') | fields)
    def state(self): return self.http.get('/state').json()
    def is_idle(self): return (s := self.state())['free'] == s['total'] and s['running'] == s['waiting'] == 0
    def records(self): return [json.loads(line) for line in self.trace.read_text().splitlines()]

    def close(self):
        if self.process.poll() is None: self.process.kill()
        self.process.wait(WAIT_S)
        self.process.stdout.close()
        self.http.close()
        self.openai.close()


@pytest.fixture(scope='module')
def toy(tmp_path_factory):
    process = Process(tmp_path_factory.mktemp('toy'))
    yield process
    process.close()
    assert 'Traceback' not in process.errors.read_text()


def read_stream(stream):
    chunks = [chunk for chunk in stream]
    return ''.join(c.choices[0].text for c in chunks if c.choices), [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason], chunks


@pytest.mark.parametrize('fields', [
    dict(temperature=0, seed=4), dict(seed=5), dict(seed=6, stop=['e', 'zz'], max_tokens=200), dict(seed=7, max_tokens=1), dict(seed=8, logprobs=3, stop=['q'], max_tokens=60),
    dict(seed=9, prompt=[0xe2, 0x82], max_tokens=50), dict(seed=10, prompt='héé €', extra_body=dict(top_k=20, min_p=.01, min_tokens=10, stop_token_ids=[101], ignore_eos=True))])
def test_streamed_equals_whole(toy, fields):
    fields = dict(max_tokens=40) | fields
    whole = toy.complete(**fields)
    text, finishes, chunks = read_stream(toy.complete(**fields, stream=True, stream_options=dict(include_usage=True)))
    choice = whole.choices[0]
    assert (text, finishes) == (choice.text, [choice.finish_reason])
    assert chunks[-1].usage == whole.usage and not chunks[-1].choices and not any(c.usage for c in chunks[:-1])
    assert chunks[-2].choices[0].seed == choice.seed and chunks[-2].choices[0].stop_reason == choice.stop_reason
    if choice.finish_reason == 'length': assert whole.usage.completion_tokens == fields['max_tokens']
    if 'logprobs' in fields:
        joined = {name: [entry for c in chunks if c.choices and c.choices[0].logprobs for entry in getattr(c.choices[0].logprobs, name)]
                  for name in ('tokens', 'token_logprobs', 'top_logprobs', 'text_offset')}
        assert joined == choice.logprobs.model_dump(include=set(joined))


@pytest.mark.parametrize('n', [0, 1, 5, 20])
def test_logprobs_have_the_shape_of_the_completions_api(toy, n):
    logprobs = toy.complete(logprobs=n, max_tokens=12, seed=3).choices[0].logprobs
    assert [len(getattr(logprobs, name)) for name in ('tokens', 'token_logprobs', 'top_logprobs', 'text_offset')] == [12] * 4
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs):
        assert top[token] == logprob < 0 and max(n, 1) <= len(top) <= n + 1
    assert logprobs.text_offset[0] == 0 and logprobs.text_offset == sorted(logprobs.text_offset)


def test_text_offsets_say_where_each_token_begins(toy):
    choice = toy.complete(logprobs=0, max_tokens=300, seed=11).choices[0]
    for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset):
        if not token.startswith('bytes:'): assert choice.text[offset:].lstrip('\ufffd').startswith(token)


def test_a_drawn_seed_is_reported_and_repeats_the_answer(toy):
    first, second = (toy.complete(max_tokens=40).choices[0] for _ in range(2))
    assert first.seed != second.seed and first.text != second.text
    assert toy.complete(max_tokens=40, seed=first.seed).choices[0].text == first.text


def test_bad_ids_and_lengths_are_refused_by_the_real_engine(toy):
    for prompt in ([-1], [256], [10**12], [1, 10**30], [1] * 2048, [1] * 3000, 'x' * 2048, 'x' * 1_000_000, int('9' * 4000) and [int('9' * 4000)]):
        error = error_of(toy.post(prompt=prompt), 400)
        assert error['param'] == 'prompt' and toy.post(max_tokens=1).status_code == 200
    assert toy.is_idle()


def test_sixteen_streams_at_once_say_what_each_says_alone(toy):
    def ask(i): return read_stream(toy.complete(prompt=f'{i}: The cat', seed=i, max_tokens=25, stream=True))[:2]
    alone = [ask(i) for i in range(16)]
    with ThreadPoolExecutor(16) as pool: together = list(pool.map(ask, range(16)))
    assert together == alone and all(finishes == ['length'] for _, finishes in together)
    until(toy.is_idle)


def test_eight_of_sixteen_are_killed_and_give_their_blocks_back(toy):
    num_before = len(toy.records())
    ready, close, ids, finished = threading.Barrier(17), threading.Event(), {}, []

    def ask(i):
        with toy.http.stream('POST', '/v1/completions', json=dict(model='toy', prompt=f'{i}: The cat', max_tokens=1900 if i < 8 else 300, stream=True)) as response:
            lines = response.iter_lines()
            ids[i] = json.loads(next(lines)[6:])['id'] + '-0'
            ready.wait(WAIT_S)
            assert close.wait(WAIT_S)
            if i >= 8: finished.append([line for line in lines if line][-1])

    with ThreadPoolExecutor(16) as pool:
        asked = [pool.submit(ask, i) for i in range(16)]
        ready.wait(WAIT_S)
        close.set()
        for f in asked[:8]: f.result(WAIT_S)
        until(lambda: toy.state()['running'] <= 8, 2)
        for f in asked[8:]: f.result(60)
    assert finished == ['data: [DONE]'] * 8
    until(toy.is_idle, 2)
    records = toy.records()[num_before:]
    for i in range(16):
        ends = [(n, f['reason']) for n, r in enumerate(records) for f in r['finished'] if f['id'] == ids[i]]
        assert [reason for _, reason in ends] == ['abort' if i < 8 else 'length']
        n = ends[0][0]
        assert len(records[n]['released'][ids[i]]) > 0  # its blocks are free in the same step
        lent = sum(len(r[field].get(ids[i], [])) for r in records for field in ('found', 'allocated')) - sum(len(r['released'].get(ids[i], [])) for r in records)
        last_run = max(k for k, r in enumerate(records) if any(s['id'] == ids[i] for s in r['scheduled']))
        assert lent == 0 and (last_run < n if i < 8 else last_run == n)


@pytest.mark.parametrize('stream', [False, True])
def test_two_hundred_impatient_clients_leave_nothing_behind(toy, stream):
    def ask(i):
        deadline = time.monotonic() + .5
        try:
            with toy.http.stream('POST', '/v1/completions', json=dict(model='toy', prompt=f'{i}', max_tokens=1900, stream=stream), timeout=.5) as response:
                for _ in response.iter_lines():
                    if time.monotonic() > deadline: return 'gone'
        except httpx.TimeoutException: return 'gone'
        return 'answered'
    with ThreadPoolExecutor(50) as pool: outcomes = list(pool.map(ask, range(200)))
    assert outcomes.count('gone') > 100
    started = time.monotonic()
    assert toy.post(max_tokens=5).status_code == 200 and time.monotonic() - started < 5
    until(toy.is_idle, 2)


def test_equal_prompts_get_equal_answers(toy):
    a, b = toy.complete(prompt=['same', 'same'], temperature=0, max_tokens=30).choices
    assert (a.index, b.index) == (0, 1) and a.text == b.text


def test_idle_server_uses_no_cpu(toy):
    until(toy.is_idle)
    toy.http.close()
    toy.http = httpx.Client(base_url=toy.url, timeout=WAIT_S, limits=httpx.Limits(max_connections=64))
    def cpu_s():
        fields = Path(f'/proc/{toy.process.pid}/stat').read_text().rsplit(')', 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf('SC_CLK_TCK')
    if not Path('/proc/self/stat').exists(): pytest.skip('needs /proc')
    time.sleep(.1)
    before = cpu_s()
    time.sleep(1)
    assert cpu_s() - before <= .05


def test_sigterm_lets_what_runs_finish(tmp_path):
    process = Process(tmp_path)
    try:
        with ThreadPoolExecutor(1) as pool:
            stream = process.complete(max_tokens=200, stream=True)
            next(iter(stream))
            rest = pool.submit(read_stream, stream)
            process.process.send_signal(signal.SIGTERM)
            _, finishes, _ = rest.result(WAIT_S)
        assert finishes == ['length'] and process.line(WAIT_S) == 'stopped' and process.process.wait(WAIT_S) == 0
        with pytest.raises(httpx.ConnectError): httpx.get(process.url + '/health')
        assert process.errors.read_text() == ''
    finally: process.close()


@pytest.mark.slow  # each starts a process of its own
@pytest.mark.parametrize('signals, drain_timeout_s', [(2, 60), (1, .2)])
def test_a_second_interrupt_or_the_end_of_patience_aborts(tmp_path, signals, drain_timeout_s):
    process = Process(tmp_path, drain_timeout_s)
    try:
        stream = process.complete(max_tokens=1900, stream=True, extra_body=dict(ignore_eos=True), prompt=['x'] * 8)
        next(iter(stream))
        for _ in range(signals):
            process.process.send_signal(signal.SIGINT)
            time.sleep(.2)
        assert process.line(WAIT_S) == 'stopped' and process.process.wait(WAIT_S) == 0
        last = process.records()[-1]
        assert {f['reason'] for f in last['finished']} == {'abort'} and last['num_free_blocks'] == last['num_blocks']
        stream.close()
    finally: process.close()


class Body:
    "A request whose body comes in parts, each after `pause_s`"
    def __init__(self, parts, pause_s=0.0): self.parts, self.pause_s, self.sent = parts, pause_s, 0
    async def stream(self):
        for part in self.parts:
            await asyncio.sleep(self.pause_s)
            self.sent += 1
            yield part


def test_a_body_has_a_bound_and_a_time():
    assert asyncio.run(read_body(Body([b'ab', b'', b'cd']), max_bytes=4)) == b'abcd'
    long = Body([b'ab'] * 100)
    with pytest.raises(RequestError) as caught: asyncio.run(read_body(long, max_bytes=5))
    assert (caught.value.status, caught.value.message, long.sent) == (413, 'the body has more than 5 bytes', 3)  # the rest is not waited for
    with pytest.raises(RequestError) as caught: asyncio.run(read_body(Body([b'ab'], pause_s=30), timeout_s=0.01))
    assert (caught.value.status, caught.value.message) == (408, 'the body did not come within 0.01 s')


def test_a_body_above_the_bound_over_a_real_socket(toy):
    response = httpx.post(f'{toy.url}/v1/completions', content=b'{"prompt": "' + b'a' * (5 * 2**20) + b'"}', timeout=30)
    assert response.status_code == 413 and response.json()['error']['code'] == 'body_too_large'
    assert toy.complete(max_tokens=2).choices[0].text


def test_a_port_that_is_taken_or_none_is_named():
    with listening_socket('127.0.0.1', 0) as held:
        port = held.getsockname()[1]
        with pytest.raises(OSError, match=f'^127.0.0.1:{port}: '): listening_socket('127.0.0.1', port)
    for port in (-1, 65536):
        with pytest.raises(ValueError, match=f'port={port} must be from 0 to 65535'): listening_socket('127.0.0.1', port)
