"""The stepper's frames against the records, computed in other ways; bounds; what it says when it can't"""
import json
import os
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from conftest import findable_blocks
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minigpt.paging import BlockPool
from minigpt.scheduler import Limits, Request, Scheduler, block_tables, explain
from minigpt.stepper import MAX_ROWS, MAX_SENTENCES, MAX_SQUARES, Frames, Moments, StaticStepper, frame, stepper
from minigpt.viz import Pages, json_in_html, pages_widget, timeline_cells

LETTERS = dict(free='f', held='h', shared='s', cached='c', prefill='p', decode='d', waiting='w', preempted='x')


def step(scheduler, fails=()):
    "A step with a model that always writes `!`; the record as it comes from a file. Requests in `fails` end in it"
    plan = scheduler.schedule()
    scheduler.update(plan)
    for s in [s for s in plan.scheduled if s.catches_up]:
        for r in scheduler.fork(s.request):
            r.token_ids.append(ord('!'))
            if r.id in fails: scheduler.finish(r, 'error')
            elif r.num_tokens - r.num_prompt_tokens == r.max_tokens: scheduler.finish(r, 'length')
    return json.loads(json.dumps(scheduler.close_step(plan).to_dict()))


def schedule(arrivals, num_blocks, fails=(), **limits):
    "Records of a schedule from beginning to end; `arrivals` maps a step to the requests that come before it"
    scheduler, records = Scheduler(BlockPool(num_blocks), Limits(4, 64, **limits)), []
    while arrivals or scheduler.waiting or scheduler.running:
        for request in arrivals.pop(scheduler.num_steps, []): scheduler.add(request)
        records.append(step(scheduler, fails))
    return records


def guests(num_blocks=4):
    "The schedule of room 13: A, B and C in a pool of 4"
    return schedule({0: [Request('A', list(b'the cu'), 6), Request('B', list(b'the c'), 4)], 2: [Request('C', list(b'why'), 1)]}, num_blocks)


def forks(): return schedule({0: [Request('F', list(b'the cu'), 7, num_choices=3)], 3: [Request('G', list(b'the cu'), 2)]}, 9)


def crowd(num_steps, num_blocks=128):
    "A server's schedule: 12 seats, prompts of 8 to 48 tokens, now and then several choices"
    def request(i): return Request(f'req-{i:05}', [i % 17] * (8 + i*7 % 40), 10 + i % 6, num_choices=1 + (i % 11 == 0))
    arrivals = {i: [request(i)] for i in range(0, num_steps, 2)}
    return schedule(arrivals, num_blocks, max_num_seqs=12, max_num_batched_tokens=64)


def expected(records, k):
    "What a frame must show of step `k` of a small trace, from the records alone and by other ways than the stepper's"
    record, table, findable = records[k], block_tables(records)[k], findable_blocks(records)[k]
    holders = [sum(b in t for t in table.values()) for b in range(record['num_blocks'])]
    moved = [b for name in ('found', 'allocated', 'copied', 'released') for blocks in record[name].values() for b in blocks]
    moved += record['evicted'] + record['entered'] + record['forgotten']
    def square(b, known):
        kind = 'shared' if holders[b] > 1 else 'held' if holders[b] else 'cached' if b in findable else 'free'
        return [str(b), ' '.join([LETTERS[kind]] + ['n'] * (b in moved) + ['k'] * (known and holders[b] > 0 and b in findable))]
    past = timeline_cells(records[:k + 1])
    order = list(dict.fromkeys(i for r in records[:k + 1] for i in (*r['arrived'], *r['forked'])))
    pool = [square(b, True) for b in range(record['num_blocks'])]
    return dict(
        pool=pool, counts=[sum(marks[0] == letter for _, marks in pool) for letter in 'fhsc'],
        tables=[[i, [square(b, False) for b in table.get(i, [])]] for i in order],
        past=[[i, [[text, LETTERS.get(kind, '')] for text, kind in past.get(i, [('', '')] * (k + 1))]] for i in order],
        steps=[str(r['step']) for r in records[:k + 1]], said=explain(record), name=f"step {record['step']} of {records[-1]['step']}")


class Reader(HTMLParser):
    "What is in a frame, as `expected` has it"
    def __init__(self, html, name):
        super().__init__()
        self.shown = dict(pool=[], counts=[], tables=[], past=[], steps=[], said=[], name=name)
        self.where, self.into = None, None
        self.feed(html)
        for _, cells in self.shown['past']: cells.reverse()
        self.shown['steps'] = [text for text, _ in reversed(self.shown['steps'])]
        self.shown['counts'] = [int(s.split()[0]) for s in self.shown['counts'][:4]]

    def handle_starttag(self, tag, attrs):
        attrs, shown = dict(attrs), self.shown
        names = (attrs.get('class') or '').split()
        if 'minigpt-title' in names: self.where = 'title'
        elif 'minigpt-pool' in names: self.where = shown['pool']
        elif 'minigpt-steps' in names: self.where = shown['steps']
        elif 'minigpt-table' in names or 'minigpt-past' in names:
            shown['tables' if 'minigpt-table' in names else 'past'].append(['', []])
            self.where = shown['tables' if 'minigpt-table' in names else 'past'][-1][1]
        elif tag == 'b' and self.where is not shown['steps']:
            self.into = lambda text: (shown['tables'] if self.where is shown['tables'][-1][1] else shown['past'])[-1].__setitem__(0, text)
        elif tag == 'i' and self.where != 'title':
            self.where.append(['', attrs['class']])
            self.into = lambda text: self.where[-1].__setitem__(0, text)
        elif tag == 'span' and self.where == 'title': self.into = lambda text: shown['counts'].append(text)
        elif tag == 'li': self.into = shown['said'].append

    def handle_data(self, text):
        if self.into and text: self.into(text)

    def handle_endtag(self, tag):
        if tag in ('i', 'b') and self.where != 'title' or tag in ('span', 'li', 'div'): self.into = None


@pytest.mark.parametrize('records', [guests(), guests(8), forks()], ids=['preempted', 'roomy', 'forks'])
def test_each_frame_is_what_its_record_says(records):
    frames = Frames(records)
    for k, html in enumerate(frames):
        assert Reader(html, frames.names[k]).shown == expected(records, k)
        assert frames[k] == html
    assert list(Pages(frames, frames.names)) == list(frames)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.data())
def test_frames_of_random_schedules(data):
    def request(i):
        tokens = data.draw(st.integers(0, 1)), data.draw(st.integers(1, 9))
        return Request(f'r{i}', [tokens[0]] * tokens[1], data.draw(st.integers(1, 5)), num_choices=data.draw(st.integers(1, 2)),
                       priority=data.draw(st.integers(0, 1)))
    scheduler, records = Scheduler(BlockPool(6), Limits(4, 24, max_num_seqs=3, max_num_batched_tokens=6)), []
    for i in range(data.draw(st.integers(1, 12))):
        for j in range(data.draw(st.integers(0, 2 if i < 4 else 0))): scheduler.add(request(f'{i}.{j}'))
        if data.draw(st.integers(0, 5)) == 0: scheduler.ledger.reset()
        alive = [*scheduler.waiting, *scheduler.running]
        if alive and data.draw(st.integers(0, 3)) == 0: scheduler.finish(data.draw(st.sampled_from(alive)), data.draw(st.sampled_from(['abort', 'error'])))
        records.append(step(scheduler, fails=[r.id for r in alive[:1]] if data.draw(st.integers(0, 4)) == 0 else ()))
    frames = Frames(records)
    for k, html in enumerate(frames):
        wanted, shown = expected(records, k), Reader(html, frames.names[k]).shown
        for part in ('tables', 'past'):  # of many requests those in sight are shown
            if len(wanted[part]) > MAX_ROWS: wanted[part] = [r for r in wanted[part] if r in shown[part]]
        assert shown == wanted and frames[k] == html


def test_a_part_of_a_trace_begins_at_a_keyframe():
    records = crowd(200)
    assert [k for k, r in enumerate(records) if r['keyframe'] is not None][:3] == [0, 64, 128]
    whole, part = Moments(records), Moments(records[64:])
    for k in (64, 65, 100, 127, 128, 150):
        a, b = whole[k], part[k - 64]
        assert (a.tables, a.findable, a.record) == (b.tables, b.findable, b.record)
    assert whole[-1].record is records[-1] and part[-1].steps == whole[-1].steps
    for make in (Frames, StaticStepper, stepper):
        with pytest.raises(ValueError, match='step 65 holds no keyframe; begin at one'): make(records[65:])
        with pytest.raises(ValueError, match='at least one step record, got none'): make([])


def test_a_long_traces_page_stays_small_and_is_refused_beyond_its_bound():
    records = crowd(300)
    static = StaticStepper(records)
    frames = list(Frames(records))
    assert [static.pages[k] for k in range(len(static.pages))] == frames == [Frames(records)[k] for k in range(len(records))]
    assert len(StaticStepper(records, max_steps=len(records)).pages) == len(records)
    assert len(static._repr_html_()) < 4500 * len(records) < sum(map(len, frames)) / 3
    with pytest.raises(ValueError, match='10001 steps are too many for a page of at most 10000; take a part that begins at a keyframe'):
        StaticStepper([records[0]] * 10_001)
    box = stepper([{**records[0], 'step': i} for i in range(30_000)])  # no bound: a frame is made when it is looked at
    (_, _, _, forward, slider, where), view = box.children[0].children, box.children[1]
    slider.value = 29_998
    forward.click()
    assert where.value == 'step 29999 of 29999' and '<div class="minigpt-title">step 29999</div>' in view.value


def test_the_window_holds_the_last_twenty_steps_and_who_was_in_them():
    records = crowd(200, num_blocks=32)
    assert sum(r['num_waiting'] > 0 for r in records) > 100
    for k, moment in enumerate(Moments(records)):
        begin = max(0, k - 19)
        past = {i: cells[begin:] for i, cells in timeline_cells(records[:k + 1]).items()}
        born = set().union(*(r['forked'] for r in records[begin:k + 1]))
        assert moment.rows == {i: [('', '')] * (k + 1 - begin) for i in born} | {i: c for i, c in past.items() if any(text for text, _ in c) or i in born}
        assert moment.steps == list(range(begin, k + 1))
        if k % 7 == 0: assert Moments(records)[k].rows == moment.rows


def test_ids_are_written_out_and_escaped():
    html = ''.join(Frames(schedule({0: [Request('<b>&\n', [1], 2)]}, 1)))
    assert '<b>&' not in html and html.count('&lt;b&gt;&amp;\\n entered') == 1 and html.count('title="&lt;b&gt;&amp;\\n"') == 4


def test_the_widgets_buttons():
    box = pages_widget('abcd', ['one', 'two', 'three', 'four'])
    (first, back, player, forward, slider, where), view = box.children[0].children, box.children[1]
    def at(): return view.value, where.value, slider.value, player.value, first.disabled, back.disabled, forward.disabled
    assert at() == ('a', 'one', 0, 0, True, True, False)
    forward.click()
    assert at() == ('b', 'two', 1, 1, False, False, False)
    player.value = 3
    assert at() == ('d', 'four', 3, 3, False, False, True)
    forward.click()
    assert at() == ('d', 'four', 3, 3, False, False, True)
    back.click()
    assert at() == ('c', 'three', 2, 2, False, False, False)
    first.click(), back.click()
    assert at() == ('a', 'one', 0, 0, True, True, False)


def test_a_frame_is_bounded_whatever_the_pool_and_the_crowd():
    requests = [Request(f'r{i}', [i]*40, 8) for i in range(200)]
    records = schedule({0: requests}, 5000, max_num_seqs=200, max_num_batched_tokens=8000)
    for html in Frames(records):
        shown = Reader(html, '').shown
        assert len(shown['pool']) <= MAX_SQUARES and len(shown['tables']) == len(shown['past']) == MAX_ROWS
        assert len(shown['said']) == MAX_SENTENCES + 1 and len(html) < 30_000 and 'and 188 more' in html
    first = Reader(frame(Moments(records)[0]), '').shown
    assert first['counts'] == [3000, 2000, 0, 0] and first['said'][-1] == 'and 380 more'
    assert len(StaticStepper(records)._repr_html_()) < 30_000 * len(records)
    small = Reader(frame(Moments(schedule({0: [Request('a', [1], 1)]}, 256))[0]), '').shown
    large = Reader(frame(Moments(schedule({0: [Request('a', [1], 1)]}, 257))[0]), '').shown
    assert (len(small['pool']), len(large['pool'])) == (256, 1)


def test_a_long_block_table_shows_both_ends():
    records = schedule({0: [Request('a', [1] * 60, 3)]}, 16)
    longer = [{**records[0], 'num_blocks': 99, 'allocated': {'a': list(range(40))}, 'keyframe': dict(tables={'a': list(range(40))}, findable=[])}]
    [[_, cells]] = Reader(next(iter(Frames(longer))), '').shown['tables']
    assert [text for text, _ in cells] == [*map(str, range(8)), '…', *map(str, range(25, 40))]
    assert len(Reader(next(iter(Frames(records))), '').shown['tables'][0][1]) == 15


def test_those_that_something_happened_to_come_first():
    "Of more requests than there are rows, whoever ran, arrived or left in the step is among those shown"
    requests = [Request(f'r{i:02}', [i] * 4, 9) for i in range(30)]
    for record, html in zip(records := schedule({0: requests}, 40, max_num_seqs=4), Frames(records)):
        names = [name for name, _ in Reader(html, '').shown['past']]
        acting = {s['id'] for n in ('scheduled', 'preempted', 'finished') for s in record[n]}
        assert acting <= set(names) and names == sorted(names) and len(names) <= MAX_ROWS


def test_the_same_bytes_in_every_process():
    code = ("import sys; sys.path.insert(0, 'tests'); from test_stepper import *; import hashlib; "
            "print(hashlib.sha256((StaticStepper(forks()).html_page('x') + StaticStepper(crowd(60)).html_page('x')).encode()).hexdigest())")
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    runs = [subprocess.run([sys.executable, '-c', code], cwd=root, env=os.environ | dict(PYTHONHASHSEED=seed), capture_output=True, text=True,
                           timeout=120, check=True).stdout for seed in ('1', '2')]
    assert runs[0] == runs[1] and len(runs[0]) == 65


def test_without_ipywidgets_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, 'ipywidgets', None)
    for call in (lambda: stepper(guests()), lambda: pages_widget(['a'], ['a'])):
        with pytest.raises(ImportError, match=r'needs ipywidgets: pip install "minigpt-stack\[notebook\]"'): call()
    assert 'minigpt-pages' in StaticStepper(guests())._repr_html_()  # which needs none


def test_one_page_and_many():
    html = StaticStepper(schedule({0: [Request('a', [1], 1)]}, 1))._repr_html_()
    assert 'max="0"' in html and 'step 0 of 0' in html
    with pytest.raises(ValueError, match='2 pages and 1 names; need as many, at least 1'): Pages(['a', 'b'], ['a'])
    with pytest.raises(ValueError, match='2 pages and 1 names; need as many, at least 1'): pages_widget(['a', 'b'], ['a'])


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.lists(st.text(st.sampled_from('<>/!-&"\'scriptSCRIPT \n\\\ud800\u2028'), max_size=20), min_size=1, max_size=4))
@example(['<!--<script>', '</script', '<!'])
def test_no_text_ends_the_script_it_is_in(texts):
    data = json_in_html(texts)
    assert json.loads(data) == texts and '</' not in data and '<!' not in data and data.isascii()
    pages = Pages([f'<p>{t.replace("&", "&amp;").replace("<", "&lt;")}</p>' for t in texts], texts)
    html = pages._repr_html_()
    assert [pages[i] for i in range(len(texts))] == [f'<p>{t.replace("&", "&amp;").replace("<", "&lt;")}</p>' for t in texts]
    assert html.isascii() and '\n\n' not in html and html.lower().count('</script') == 2 and '<!' not in html
