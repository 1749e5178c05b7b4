"The runner under threads, event loops, slow readers and a failing engine. Every wait is bounded."
import asyncio
import logging
import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings, strategies as st

from minigpt.engine import StepOutput
from minigpt.runner import CommandQueue, EngineDead, EngineRunner, Stream, ring
from minigpt.sampling import SamplingParams
from minigpt.scheduler import QueueFull

PARAMS = SamplingParams()
WAIT_S = 10


class FakeEngine:
    "Each step gives every request the next token of its own prompt; can be held in a step, fail in it, or refuse"
    def __init__(self, permits=float('inf'), max_requests=10**6, fail_at=None, step_s=0.0):
        self.left, self.permits, self.max_requests, self.fail_at, self.step_s = {}, permits, max_requests, fail_at, step_s
        self.num_steps, self.threads, self.aborted, self.seen = 0, set(), [], []
        self.in_step, self.gate = threading.Event(), threading.Event()
        self.gate.set()

    @property
    def has_work(self): return bool(self.left) and self.permits > 0

    def add(self, request_id, prompt_token_ids, params):
        self.threads.add(threading.current_thread().name)
        self.seen.append(request_id)
        if request_id in self.left: raise ValueError(f'{request_id} is in use')
        if not prompt_token_ids: raise ValueError('the prompt has 0 tokens')
        if prompt_token_ids == [13]: raise ZeroDivisionError('a fault of ours')
        if len(self.left) >= self.max_requests: raise QueueFull(f'{len(self.left)} requests wait')
        self.left[request_id] = list(prompt_token_ids)
        return len(self.seen)

    def abort(self, request_id):
        self.threads.add(threading.current_thread().name)
        self.aborted.append(request_id)
        return self.left.pop(request_id, None) is not None

    def step(self):
        self.threads.add(threading.current_thread().name)
        self.in_step.set()
        assert self.gate.wait(WAIT_S)
        if self.step_s: time.sleep(self.step_s)
        self.num_steps, self.permits = self.num_steps + 1, self.permits - 1
        if self.num_steps == self.fail_at: raise IndexError('a block that is not there')
        outputs = []
        for name, tokens in list(self.left.items()):
            token = tokens.pop(0)
            if not tokens: del self.left[name]
            failed = token == 7
            if failed: self.left.pop(name, None)
            outputs.append(StepOutput(request_id=name, text=chr(token), token_ids=[token], logprobs=None, stop_reason=None,
                                      finish_reason='error' if failed else None if tokens else 'length', error='a NaN' if failed else None,
                                      num_prompt_tokens=0, num_output_tokens=0))
        return outputs


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL, logger='minigpt')


@pytest.fixture
def start():
    runners = []
    def start(engine, **kwargs):
        runners.append(EngineRunner(engine, **kwargs))
        return runners[-1]
    yield start
    for runner in runners:
        runner._engine.gate.set()
        assert runner.stop(WAIT_S)


def ids(text): return [ord(c) for c in text]
def texts(outputs):
    if isinstance(outputs, Stream): outputs.block(lambda: outputs.is_finished, WAIT_S)
    return ''.join(o.text for o in outputs)
def settled(runner): return runner.inspect(lambda engine: (dict(engine.left), dict(runner._streams), len(runner._bells))).result(WAIT_S)


def test_hundreds_of_requests_from_threads_and_loops_all_end(start):
    engine = FakeEngine()
    runner = start(engine)
    results, lock = {}, threading.Lock()

    def from_thread(n):
        for i in range(10):
            name = f't{n}-{i}'
            text = texts(runner.add(name, ids(name), PARAMS))
            with lock: results[name] = text

    async def reader(name):
        stream = runner.add(name, ids(name), PARAMS)
        await stream.accepted()
        text = texts([o async for o in stream])
        with lock: results[name] = text

    def from_loop(n):
        async def main(): await asyncio.wait_for(asyncio.gather(*[reader(f'l{n}-{i}') for i in range(40)]), WAIT_S)
        asyncio.run(main())

    threads = [threading.Thread(target=f, args=[n]) for n in range(4) for f in (from_thread, from_loop)]
    for t in threads: t.start()
    for t in threads: t.join(2 * WAIT_S)
    assert len(results) == 200 and all(name == text for name, text in results.items())
    assert engine.threads == {'minigpt-engine'}
    assert settled(runner) == ({}, {}, 0)


def test_on_start_runs_first_in_the_engines_thread_and_may_fail(start):
    where = []
    runner = start(FakeEngine(), on_start=lambda: where.append(threading.current_thread().name))
    assert texts(runner.add('A', ids('ab'), PARAMS)) == 'ab' and where == ['minigpt-engine']

    def fails(): raise OSError('no threads')
    runner = start(FakeEngine(), on_start=fails)
    runner._thread.join(WAIT_S)
    assert not runner.alive
    with pytest.raises(EngineDead, match='OSError: no threads'): runner.add('A', ids('ab'), PARAMS)


def test_full_command_queue_refuses_at_once_and_what_was_let_in_ends(start):
    engine = FakeEngine()
    engine.gate.clear()
    runner = start(engine, max_commands=3)
    first = runner.add('first', ids('abc'), PARAMS)
    assert engine.in_step.wait(WAIT_S)
    streams = [runner.add(str(n), ids('xy'), PARAMS) for n in range(3)]
    with pytest.raises(QueueFull, match='3 commands wait for the engine, at most 3 may'): runner.add('4', ids('xy'), PARAMS)
    with pytest.raises(QueueFull): runner.inspect(lambda engine: None)
    streams[1].abort()  # let in all the same
    engine.gate.set()
    assert texts(first) == 'abc'
    assert [texts(streams[0]), texts(streams[2])] == ['xy', 'xy']
    with pytest.raises(RuntimeError, match='aborted before the engine saw it'): list(streams[1])
    assert '1' not in engine.seen


def test_refusals_reach_their_caller_and_nobody_else(start):
    engine = FakeEngine(permits=0, max_requests=2)
    runner = start(engine)
    a = runner.add('A', ids('ab'), PARAMS)
    again, empty, bug = runner.add('A', ids('x'), PARAMS), runner.add('B', [], PARAMS), runner.add('C', [13], PARAMS)
    d, e = runner.add('D', ids('cd'), PARAMS), runner.add('E', ids('ef'), PARAMS)
    assert (a.wait_accepted(WAIT_S), d.wait_accepted(WAIT_S)) == (1, 5)
    for stream, error in ((again, ValueError), (empty, ValueError), (bug, ZeroDivisionError), (e, QueueFull)):
        with pytest.raises(error): stream.wait_accepted(WAIT_S)
        stream.abort()  # nothing to abort: must not touch the A that runs
    runner.inspect(lambda engine: setattr(engine, 'permits', 99)).result(WAIT_S)
    assert [texts(a), texts(d), engine.aborted] == ['ab', 'cd', []]


def test_acceptance_comes_before_the_step_is_over(start):
    engine = FakeEngine()
    engine.gate.clear()
    runner = start(engine)

    async def main():
        stream = runner.add('A', ids('ab'), PARAMS)
        seed = await asyncio.wait_for(stream.accepted(), WAIT_S)
        assert engine.num_steps == 0 and not stream.outputs
        engine.gate.set()
        return seed, texts([o async for o in stream])
    assert asyncio.run(main()) == (1, 'ab')


def test_abort_of_each_state_is_quiet_and_taken_at_the_next_boundary(start):
    engine = FakeEngine()
    runner = start(engine)
    engine.gate.clear()
    running = runner.add('running', ids('abcdef'), PARAMS)
    assert engine.in_step.wait(WAIT_S)
    for _ in range(3): running.abort()
    runner.abort('running')
    runner.abort('unknown')
    assert engine.aborted == [] and not running.is_finished  # a step is running
    engine.gate.set()
    assert [(o.text, o.finish_reason) for o in running] == [('a', None), ('', 'abort')]
    assert engine.aborted == ['running'] and engine.num_steps == 1
    finished = runner.add('finished', ids('z'), PARAMS)
    assert texts(finished) == 'z'
    finished.abort()
    runner.abort('finished')
    assert settled(runner) == ({}, {}, 0) and engine.aborted == ['running']


def test_an_old_stream_cannot_abort_a_new_request_of_the_same_name(start):
    engine = FakeEngine(permits=0)
    runner = start(engine)
    old = runner.add('A', ids('a'), PARAMS)
    old.wait_accepted(WAIT_S)
    runner.inspect(lambda engine: setattr(engine, 'permits', 1)).result(WAIT_S)
    old.block(lambda: old.is_finished, WAIT_S)
    new = runner.add('A', ids('new'), PARAMS)
    new.wait_accepted(WAIT_S)
    old.is_finished = False  # as if its reader had looked a moment before
    old.abort()
    assert list(settled(runner)[1]) == ['A']
    runner.inspect(lambda engine: setattr(engine, 'permits', 9)).result(WAIT_S)
    assert texts(new) == 'new'


def test_one_wakeup_for_each_step_and_loop(start):
    engine = FakeEngine(permits=0)
    runner = start(engine)
    calls = []

    async def main():
        loop = asyncio.get_running_loop()
        streams = [runner.add(str(n), ids('abcdefgh'), PARAMS) for n in range(16)]
        await asyncio.gather(*[s.accepted() for s in streams])
        plain = loop.call_soon_threadsafe
        def counted(function, *args):
            calls.append(len(args[0]) if args and isinstance(args[0], list) else 0)
            return plain(function, *args)
        for _ in range(8):
            readers = [asyncio.ensure_future(anext(s)) for s in streams]
            while any(s._bell is None for s in streams): await asyncio.sleep(0)
            loop.call_soon_threadsafe = counted
            runner._queue.put(lambda: setattr(engine, 'permits', 1))
            await asyncio.wait_for(asyncio.gather(*readers), WAIT_S)
            del loop.call_soon_threadsafe
    asyncio.run(main())
    assert calls == [16] * 8


def test_a_reader_that_was_cancelled_does_not_keep_others_asleep():
    async def main():
        bells = [asyncio.get_running_loop().create_future() for _ in range(3)]
        bells[0].cancel()
        ring(bells)
        await asyncio.wait_for(asyncio.gather(*bells[1:]), WAIT_S)
    asyncio.run(main())


def test_stalled_reader_is_aborted_and_others_go_on(start):
    engine = FakeEngine(permits=0)
    runner = start(engine, max_stream_outputs=4)

    async def main():
        slow, fast = (runner.add(name, ids('x' * 50), PARAMS) for name in ('slow', 'fast'))
        read = []
        for _ in range(50):
            runner._queue.put(lambda: setattr(engine, 'permits', 1))
            read.append(await asyncio.wait_for(anext(fast), WAIT_S))
        assert len(read) == 50 and read[-1].finish_reason == 'length'
        return [o async for o in slow]
    outputs = asyncio.run(main())
    assert [o.finish_reason for o in outputs] == [None] * 4 + ['abort'] and '4 outputs were left unread' in outputs[-1].error
    assert (outputs[-1].num_output_tokens, engine.aborted) == (4, ['slow'])


def test_a_last_output_is_never_the_one_too_many(start):
    runner = start(FakeEngine(), max_stream_outputs=4)
    stream = runner.add('A', ids('abcde'), PARAMS)
    stream.block(lambda: stream.is_finished, WAIT_S)
    assert [(o.text, o.finish_reason) for o in stream][-1] == ('e', 'length')


def test_closed_loop_is_tolerated_and_its_requests_are_aborted(start):
    engine = FakeEngine(permits=0)
    runner = start(engine)
    streams = []

    async def leave():
        streams.append(runner.add('waits', ids('abc'), PARAMS))
        streams.append(runner.add('busy', ids('abc'), PARAMS))
        await streams[0].accepted()
        asyncio.ensure_future(anext(streams[0]))
        await asyncio.sleep(.01)
    asyncio.run(leave())
    other = runner.add('other', ids('abc'), PARAMS)
    other.wait_accepted(WAIT_S)
    runner.inspect(lambda engine: setattr(engine, 'permits', 99)).result(WAIT_S)
    assert texts(other) == 'abc' and runner.alive
    assert sorted(engine.aborted) == ['busy', 'waits'] and settled(runner) == ({}, {}, 0)
    assert all(list(s)[-1].finish_reason == 'abort' for s in streams)


def test_cancelled_reader_leaves_nothing_behind(start):
    engine = FakeEngine(permits=0)
    runner = start(engine)

    async def main():
        stream = runner.add('A', ids('abc'), PARAMS)
        await stream.accepted()
        with pytest.raises(asyncio.TimeoutError): await asyncio.wait_for(anext(stream), .02)
        runner.inspect(lambda engine: setattr(engine, 'permits', 99)).result(WAIT_S)
        return texts([o async for o in stream])
    assert asyncio.run(main()) == 'abc'


def test_two_readers_of_one_stream_are_refused(start):
    runner = start(FakeEngine(permits=0))

    async def main():
        stream = runner.add('A', ids('abc'), PARAMS)
        await stream.accepted()
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match='has a reader already'): await anext(stream)
        first.cancel()
    asyncio.run(main())


def test_one_failed_request_does_not_end_the_others(start):
    runner = start(FakeEngine())
    bad, good = runner.add('bad', [120, 7, 120], PARAMS), runner.add('good', ids('fine'), PARAMS)
    outputs = list(bad)
    assert (outputs[-1].finish_reason, outputs[-1].error, len(outputs)) == ('error', 'a NaN', 2)
    assert texts(good) == 'fine' and runner.alive


def test_failed_engine_ends_every_stream_and_refuses_what_waits(start):
    engine = FakeEngine(fail_at=2)
    runner = start(engine)
    engine.gate.clear()
    a = runner.add('A', ids('abcd'), PARAMS)
    assert engine.in_step.wait(WAIT_S)

    async def main():
        b = runner.add('B', ids('abcd'), PARAMS)
        question = runner.inspect(lambda engine: 5)
        loop = asyncio.get_running_loop()
        loop.call_later(.02, engine.gate.set)
        await asyncio.wait_for(b.accepted(), WAIT_S)
        return [o async for o in b], await asyncio.wait_for(asyncio.wrap_future(question), WAIT_S)
    outputs, answer = asyncio.run(main())
    why = 'the engine failed: IndexError: a block that is not there'
    assert [(o.finish_reason, o.error) for o in outputs] == [('error', why)] and answer == 5
    assert [(o.text, o.finish_reason) for o in a] == [('a', None), ('', 'error')]
    runner._thread.join(WAIT_S)
    assert not runner.alive and isinstance(runner.error, IndexError)
    for attempt in (lambda: runner.add('C', ids('x'), PARAMS), lambda: runner.inspect(len)):
        with pytest.raises(EngineDead, match='a block that is not there'): attempt()
    a.abort()
    runner.abort('A')
    assert runner.stop(WAIT_S)


def test_commands_that_wait_when_the_engine_fails_are_answered(start):
    engine = FakeEngine(fail_at=1)
    engine.gate.clear()
    runner = start(engine)
    runner.add('A', ids('abcd'), PARAMS)
    assert engine.in_step.wait(WAIT_S)
    late, question = runner.add('late', ids('abcd'), PARAMS), runner.inspect(lambda engine: 5)
    late.abort()
    engine.gate.set()
    with pytest.raises(EngineDead): late.wait_accepted(WAIT_S)
    with pytest.raises(EngineDead): question.result(WAIT_S)


def test_failure_is_logged_with_its_trace(start, caplog):
    caplog.set_level(logging.ERROR, logger='minigpt')
    runner = start(FakeEngine(fail_at=1))
    list(runner.add('A', ids('ab'), PARAMS))
    runner._thread.join(WAIT_S)
    assert [r.exc_info[1] for r in caplog.records] == [runner.error]


def test_stop_aborts_what_runs_and_drain_lets_it_finish(start):
    runner = start(FakeEngine(step_s=.005))
    stream = runner.add('A', ids('a' * 10_000), PARAMS)
    next(stream)
    assert runner.stop(WAIT_S) and list(stream)[-1].finish_reason == 'abort' and not runner.alive

    engine = FakeEngine(permits=0)
    runner = start(engine)
    stream = runner.add('A', ids('abc'), PARAMS)
    stream.wait_accepted(WAIT_S)
    runner._queue.put(lambda: (setattr(engine, 'permits', 99), runner._stop('drain')))  # both before the next step
    assert runner.stop(WAIT_S, drain=True) and texts(stream) == 'abc' and engine.aborted == []


def test_new_requests_are_refused_while_draining_and_a_second_stop_ends_it(start):
    engine = FakeEngine(step_s=.002)
    runner = start(engine)
    stream = runner.add('A', ids('a' * 100_000), PARAMS)
    stream.wait_accepted(WAIT_S)
    drain = threading.Thread(target=runner.stop, args=[60], kwargs=dict(drain=True))
    drain.start()
    deadline = time.monotonic() + WAIT_S
    while runner._stopping is None and time.monotonic() < deadline: time.sleep(.001)
    with pytest.raises(EngineDead, match='is being stopped'): runner.add('B', ids('abc'), PARAMS).wait_accepted(WAIT_S)
    assert runner.alive and not stream.is_finished
    assert runner.stop(WAIT_S)
    drain.join(WAIT_S)
    assert not drain.is_alive() and list(stream)[-1].finish_reason == 'abort'


def test_a_stopped_engine_writes_down_who_was_aborted(start):
    class Recording(FakeEngine):
        "Like the real one, has a step to take when somebody left"
        records = ()
        @property
        def has_work(self): return super().has_work or len(self.records) < len(self.aborted)
        def step(self):
            self.records += tuple(self.aborted[len(self.records):])
            return super().step() if self.left else []
    engine = Recording(step_s=.002)
    runner = start(engine)
    streams = [runner.add(name, ids('a' * 100_000), PARAMS) for name in 'AB']
    for stream in streams: stream.wait_accepted(WAIT_S)
    assert runner.stop(WAIT_S) and sorted(engine.records) == ['A', 'B']


def test_tokens_are_counted_as_they_come():
    stream = Stream('A', 3, print)
    stream.tell(output=StepOutput(request_id='A', text='ab', token_ids=[97, 98], num_prompt_tokens=3, num_output_tokens=2))
    stream.tell(output=StepOutput(request_id='A', text='', token_ids=[], num_prompt_tokens=3, num_output_tokens=2, finish_reason='error'))
    assert stream.num_output_tokens == 2


def test_to_drain_is_no_way_back_from_abort(start):
    runner = start(FakeEngine(step_s=.002))
    stream = runner.add('A', ids('a' * 100_000), PARAMS)
    stream.wait_accepted(WAIT_S)
    runner._queue.put(lambda: (runner._stop('abort'), runner._stop('drain')))
    stream.block(lambda: stream.is_finished, WAIT_S)
    runner._thread.join(WAIT_S)
    assert not runner._thread.is_alive()


def test_drain_that_takes_too_long_is_aborted(start):
    runner = start(FakeEngine(step_s=.002))
    stream = runner.add('A', ids('a' * 100_000), PARAMS)
    assert runner.stop(.05, drain=True) and list(stream)[-1].finish_reason == 'abort'


def test_stop_says_so_when_a_step_hangs(start):
    engine = FakeEngine()
    engine.gate.clear()
    runner = start(engine)
    runner.add('A', ids('ab'), PARAMS)
    assert engine.in_step.wait(WAIT_S)
    assert not runner.stop(.02)
    engine.gate.set()
    assert runner.stop(WAIT_S)


def test_idle_runner_uses_no_cpu(start):
    runner = start(FakeEngine())
    texts(runner.add('A', ids('abc'), PARAMS))
    before = runner.inspect(lambda engine: time.thread_time()).result(WAIT_S)
    time.sleep(.3)
    assert runner.inspect(lambda engine: time.thread_time()).result(WAIT_S) - before < .01


def test_questions_may_fail_or_be_withdrawn(start):
    engine = FakeEngine()
    engine.gate.clear()
    runner = start(engine)
    stream = runner.add('A', ids('ab'), PARAMS)
    assert engine.in_step.wait(WAIT_S)
    asked = []
    withdrawn, failing = runner.inspect(asked.append), runner.inspect(lambda engine: engine.nothing)
    assert withdrawn.cancel()
    engine.gate.set()
    with pytest.raises(AttributeError): failing.result(WAIT_S)
    assert texts(stream) == 'ab' and asked == [] and runner.alive


def test_bounds_are_checked():
    with pytest.raises(ValueError, match='max_stream_outputs=0'): EngineRunner(FakeEngine(), max_stream_outputs=0)
    with pytest.raises(ValueError, match='max_commands=0'): CommandQueue(0)


@settings(derandomize=True, deadline=None, max_examples=25)
@given(st.lists(st.tuples(st.sampled_from(['add', 'add', 'add', 'bad', 'abort', 'read', 'question']), st.integers(0, 7)), max_size=40))
def test_any_order_of_commands_leaves_nothing_behind(operations):
    engine = FakeEngine()
    with EngineRunner(engine, max_stream_outputs=8) as runner:
        streams: list[Stream] = []
        for n, (what, which) in enumerate(operations):
            nobody = SimpleNamespace(abort=lambda: None, outputs=(), request_id='')
            stream = streams[which % len(streams)] if streams else nobody
            if what == 'add': streams.append(runner.add(str(n), ids('abcdefghij')[:which + 1], PARAMS))
            elif what == 'bad': streams.append(runner.add(str(n), [], PARAMS))
            elif what == 'abort' and which % 2: stream.abort()
            elif what == 'abort': runner.abort(stream.request_id)
            elif what == 'read' and stream.outputs: stream.take()
            else: runner.inspect(lambda engine: len(engine.left)).result(WAIT_S)
        for stream in streams:
            stream.block(lambda s=stream: s.is_finished, WAIT_S)
            if stream.refusal is None and (rest := list(stream)): assert [bool(o.finish_reason) for o in rest] == [False] * (len(rest) - 1) + [True]
        assert settled(runner) == ({}, {}, 0)
    assert not runner.alive
