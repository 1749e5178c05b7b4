"""What people click: the pages of the site, a trace as a file, and the widget in JupyterLab, in a real browser without a network"""
import functools
import http.server
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from test_stepper import expected, forks, guests, schedule

from minigpt.scheduler import Request, explain
from minigpt.stepper import StaticStepper, visible
from minigpt.viz import PAGES_SCRIPT, Pages

ROOT = Path(__file__).parent.parent
CHROMIUM = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None)
QUIET = ['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking', '--disable-component-update', '--disable-sync']


def lacking(what):
    "Skip, or fail where everything must be there: in CI, on Linux"
    (pytest.fail if os.environ.get('CI') and sys.platform == 'linux' else pytest.skip)(f'{what} is not installed')


@pytest.fixture(scope='module')
def browser():
    if CHROMIUM is None: lacking('chromium')
    try: from playwright.sync_api import sync_playwright
    except ImportError: lacking('playwright')
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    "A page that reaches this machine only, and whose errors and dialogs are the test's"
    page, wrong = browser.new_page(viewport=dict(width=900, height=900)), []
    page.set_default_timeout(10_000)
    page.route('**/*', lambda route: route.continue_() if route.request.url.startswith(('file:', 'data:', 'http://127.0.0.1:')) else route.abort())
    page.on('pageerror', lambda error: wrong.append(str(error)))
    page.on('dialog', lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
    yield page
    page.close()
    assert wrong == []


READ = '''root => {
  const all = (e, s) => [...e.querySelectorAll(s)], cells = e => all(e, 'i').map(i => [i.textContent, i.className])
  const rows = s => all(root, s).map(r => [r.querySelector('b').textContent, cells(r)])
  const past = rows('.minigpt-past:not(.minigpt-steps)').map(([name, row]) => [name, row.reverse()])
  return {pool: cells(root.querySelector('.minigpt-pool')), tables: rows('.minigpt-table'), past,
    steps: all(root, '.minigpt-steps i').map(i => i.textContent).reverse(), said: all(root, 'li').map(l => l.textContent),
    counts: all(root, '.minigpt-title')[0].querySelectorAll('span').values().map(s => parseInt(s.textContent)).toArray()}}'''


def shown(root): return root.evaluate(READ) | dict(name=root.locator('output').inner_text())


def press(root, word): root.get_by_role('button', name=word, exact=True).click(force=True)  # the last page's Next can be clicked, and does nothing


@pytest.fixture(scope='module')
def site():
    "The address of the built docs, made anew where a notebook has changed since"
    docs, notebooks = ROOT/'_docs'/'stepper.html', [*(ROOT/'nbs').glob('*.ipynb'), ROOT/'_quarto.yml']
    if CHROMIUM is None: lacking('chromium')
    if not docs.exists() or docs.stat().st_mtime < max(n.stat().st_mtime for n in notebooks):
        subprocess.run([sys.executable, '.ci/builddocs.py', 'site', '--engine', 'smalldocs', '--strict'], cwd=ROOT, check=True, timeout=180,
                       env=os.environ | dict(PATH=f'{Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}'), stdout=subprocess.DEVNULL)
    class Silent(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args): pass
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), functools.partial(Silent, directory=docs.parent))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f'http://127.0.0.1:{server.server_port}'
    server.shutdown()
    thread.join(10)
    server.server_close()


def walk(root, records):
    "Every way to turn a page leads to the step that it should, and each page shows what its record says"
    last = len(records) - 1
    for k in range(last + 1):
        assert shown(root) == expected(records, k), f'step {k}, forwards'
        press(root, 'Next')
    assert shown(root) == expected(records, last)  # Next at the end stays there
    for k in reversed(range(last)):
        press(root, 'Back')
        assert shown(root) == expected(records, k), f'step {k}, backwards'
    press(root, 'Back')
    assert shown(root) == expected(records, 0)
    slider = root.locator('input')
    for k in (last, 1, last - 1):
        slider.fill(str(k))
        assert shown(root) == expected(records, k)
    press(root, 'First')
    assert (shown(root), slider.input_value()) == (expected(records, 0), '0')
    root.focus()
    for key, k in (('ArrowRight', 1), ('ArrowRight', 2), ('ArrowLeft', 1), ('End', last), ('ArrowRight', last), ('Home', 0), ('ArrowLeft', 0), ('a', 0)):
        root.press(key)
        assert (shown(root), slider.input_value()) == (expected(records, k), str(k)), key
    root.press('Control+End')
    assert shown(root) == expected(records, 0)  # the browser's own keys stay the browser's
    slider.focus()
    for key, k in (('ArrowRight', 1), ('ArrowLeft', 0)):
        slider.press(key)
        assert shown(root) == expected(records, k)


def test_the_stepper_of_the_docs_shows_each_step_as_its_record_says(page, site):
    page.goto(f'{site}/stepper.html')
    root = page.locator('.minigpt-pages').first
    assert root.locator('.minigpt-controls').is_visible()
    walk(root, guests())


def test_nothing_moves_when_a_page_is_turned(page, site):
    for width in (390, 1280):
        page.set_viewport_size(dict(width=width, height=900))
        for room in ('paging', 'prefix_cache', 'scheduler', 'stepper'):
            page.goto(f'{site}/{room}.html')
            assert page.evaluate('document.documentElement.scrollWidth') == width, (room, 'has to be scrolled sideways')
            root = page.locator('.minigpt-pages').first
            heights, last = [], int(root.locator('input').get_attribute('max'))
            for k in range(last + 1):
                root.locator('input').fill(str(k))
                heights.append(root.bounding_box()['height'])
                box, inside = root.bounding_box(), root.locator('.minigpt-view > *').evaluate_all('es => es.map(e => e.getBoundingClientRect().right)')
                assert all(right <= box['x'] + box['width'] for right in inside), (room, k)
            assert heights == sorted(heights), (room, width)
            for k in range(last + 1):
                root.locator('input').fill(str(k))
                assert root.bounding_box()['height'] == heights[-1], (room, width, k)


@pytest.mark.parametrize('room', ['viz', 'paging', 'prefix_cache', 'scheduler', 'stepper'])
def test_all_pages_of_the_docs_turn(page, site, room):
    page.goto(f'{site}/{room}.html')
    roots = page.locator('.minigpt-pages')
    assert roots.count() >= 1
    for root in roots.all():
        first = root.locator('.minigpt-view').inner_html()
        press(root, 'Next')
        assert root.locator('.minigpt-view').inner_html() != first
        press(root, 'Back')
        assert root.locator('.minigpt-view').inner_html() == first


def test_without_scripts_the_first_page_is_there(browser, tmp_path):
    file = tmp_path/'page.html'
    file.write_text(StaticStepper(guests()).html_page('A, B and C'), encoding='ascii')
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(file.as_uri())
    assert page.locator('li').all_inner_texts() == explain(guests()[0])
    assert page.locator('.minigpt-pool i').all_inner_texts() == ['0', '1', '2', '3']
    assert page.locator('output').text_content() == 'step 0 of 5' and not page.locator('button').first.is_visible()
    context.close()


def test_steppers_on_one_page_are_independent(page, tmp_path):
    traces, file = [guests(), forks(), guests(8), guests()], tmp_path/'several.html'
    file.write_text('<!doctype html><meta charset="utf-8">' + ''.join(StaticStepper(t)._repr_html_() for t in traces), encoding='ascii')
    page.goto(file.as_uri())
    roots = page.locator('.minigpt-pages').all()
    at = [0, 0, 0, 0]
    for which, word in ((0, 'Next'), (1, 'Next'), (1, 'Next'), (3, 'Next'), (0, 'Next'), (1, 'Back'), (2, 'Next'), (0, 'First'), (3, 'Next')):
        press(roots[which], word)
        at[which] = dict(Next=at[which] + 1, Back=at[which] - 1, First=0)[word]
        assert [shown(root) for root in roots] == [expected(t, k) for t, k in zip(traces, at)], (which, word)
    press(roots[1], 'First')
    walk(roots[1], forks())
    at[1] = 0
    assert [shown(root) for root in roots] == [expected(t, k) for t, k in zip(traces, at)]


def test_play_turns_a_page_a_second_and_stops(page, tmp_path):
    file = tmp_path/'page.html'
    file.write_text(StaticStepper(guests()).html_page('A, B and C'), encoding='ascii')
    page.clock.install()
    page.goto(file.as_uri())
    root = page.locator('.minigpt-pages')
    def name(): return root.locator('output').inner_text()
    press(root, 'Play')
    page.clock.run_for(2500)
    assert name() == 'step 2 of 5'
    press(root, 'Pause')
    page.clock.run_for(5000)
    assert name() == 'step 2 of 5'
    press(root, 'Play')
    page.clock.run_for(1500)
    press(root, 'Back')  # whoever takes over is left alone
    page.clock.run_for(5000)
    assert (name(), root.locator('button').nth(2).inner_text()) == ('step 2 of 5', 'Play')
    press(root, 'Play')
    page.clock.run_for(20_000)
    assert (name(), root.locator('button').nth(2).inner_text()) == ('step 5 of 5', 'Play')
    press(root, 'Play')  # from the end it begins again
    page.clock.run_for(1500)
    assert name() == 'step 1 of 5'


HOSTILE = ['<script>window.ran = 1; alert(1)</script>', '"><img src=x onerror="window.ran = 2; alert(2)">', "'><svg onload='window.ran = 3'>",
           '</script><script>window.ran = 4</script>', '<!--<script>', 'two\n\n<b>lines</b>', 'x' * 500, '\u202eturned', '\ud800 lone', '&lt;&amp;', '\x00', '']


def test_hostile_ids_are_only_text(page, tmp_path):
    records = schedule({0: [Request(name, [i + 1]*6, 3) for i, name in enumerate(HOSTILE)]}, 40)
    file = tmp_path/'page.html'
    file.write_text(StaticStepper(records).html_page('</title><script>window.ran = 5</script>'), encoding='ascii')
    assert check_hostile(page, file, records) == '</title><script>window.ran = 5</script>'


def test_escaping_alone_would_be_enough(page, tmp_path):
    "The same without the policy that lets no other script run"
    records = schedule({0: [Request(name, [i + 1]*6, 3) for i, name in enumerate(HOSTILE)]}, 40)
    file = tmp_path/'page.html'
    file.write_text('<!doctype html><meta charset="utf-8"><title>none</title>' + StaticStepper(records)._repr_html_(), encoding='ascii')
    assert check_hostile(page, file, records) == 'none'


def check_hostile(page, file, records):
    page.goto(file.as_uri())
    root = page.locator('.minigpt-pages')
    for record in records:
        assert root.locator('li').evaluate_all('ls => ls.map(l => l.textContent)') == [text_of(visible(s)) for s in explain(record)][:20] + (
            [f'and {len(explain(record)) - 20} more'] if len(explain(record)) > 20 else [])
        titles = root.locator('.minigpt-table b').evaluate_all('bs => bs.map(b => b.title)')
        assert titles == [text_of(visible(i)) if len(i) <= 200 else 'x'*100 + '…' + 'x'*100 for i in HOSTILE]
        assert page.locator('script').count() == 2 and page.locator('img, svg, .minigpt-view b b, [onerror], [onload]').count() == 0
        press(root, 'Next')
    page.wait_for_timeout(100)
    assert page.evaluate('window.ran') is None
    return page.title()


def text_of(html): return html.replace('&lt;', '<').replace('&gt;', '>').replace('&quot;', '"').replace('&#x27;', "'").replace('&amp;', '&')


def test_a_files_policy_lets_no_other_script_run(page, tmp_path):
    "A page whose text was not escaped: what comes of it is shown, and does not run"
    file = tmp_path/'page.html'
    file.write_text(Pages(['<p>one<script>window.ran = 1</script><img src="x" onerror="window.ran = 2"></p>', '<p>two</p>'], ['a', 'b']).html_page('x'))
    page.goto(file.as_uri())
    page.wait_for_timeout(100)
    assert page.evaluate('window.ran') is None
    press(page.locator('.minigpt-pages'), 'Next')  # its own script does
    assert page.locator('.minigpt-view').inner_text() == 'two'
    assert PAGES_SCRIPT in file.read_text()


@contextmanager
def jupyter_lab(folder):
    "JupyterLab on this machine, knowing only what is in `folder`; yields its address, and ends it by its id"
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    own = {f'JUPYTER_{name}_DIR': str(folder/name.lower()) for name in ('CONFIG', 'DATA', 'RUNTIME')}
    env = os.environ | own | dict(IPYTHONDIR=str(folder/'ipython'), PYTHONPATH=str(ROOT), JUPYTER_PREFER_ENV_PATH='1')
    command = [sys.executable, '-m', 'jupyterlab', '--no-browser', '--allow-root', '--ip=127.0.0.1', f'--port={port}', '--ServerApp.port_retries=0',
               '--IdentityProvider.token=secret', f'--ServerApp.root_dir={folder}', '--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate']
    with open(folder/'lab.log', 'w') as log:
        lab = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        for _ in range(300):
            assert lab.poll() is None, (folder/'lab.log').read_text()
            try: urllib.request.urlopen(f'http://127.0.0.1:{port}/api/status?token=secret', timeout=5).close()
            except OSError: time.sleep(0.1)
            else: break
        yield f'http://127.0.0.1:{port}/lab/tree/{{}}?token=secret'
    finally:
        lab.terminate()
        try: lab.wait(15)
        except subprocess.TimeoutExpired: os.killpg(lab.pid, signal.SIGKILL)
        lab.wait(15)


def notebook(*sources):
    cells = [dict(cell_type='code', id=f'cell-{i}', metadata={}, source=s, execution_count=None, outputs=[]) for i, s in enumerate(sources)]
    kernel = dict(display_name='python3', language='python', name='python3')
    return json.dumps(dict(cells=cells, metadata=dict(kernelspec=kernel), nbformat=4, nbformat_minor=5))


def test_the_widget_steps_in_jupyterlab(page, tmp_path):
    if not shutil.which('jupyter-lab', path=Path(sys.executable).parent): lacking('jupyterlab')
    records = forks()
    (tmp_path/'records.json').write_text(json.dumps(records))
    (tmp_path/'steps.ipynb').write_text(notebook(
        'import json\nfrom minigpt.stepper import StaticStepper, stepper\nrecords = json.load(open("records.json"))',
        'stepper(records)', 'StaticStepper(records)'))
    from playwright.sync_api import TimeoutError
    with jupyter_lab(tmp_path) as address:
        page.set_viewport_size(dict(width=1280, height=1400))
        page.goto(address.format('steps.ipynb'), timeout=30_000)
        page.wait_for_selector('.jp-Notebook .jp-Cell', timeout=30_000)
        page.wait_for_selector('.jp-Notebook-ExecutionIndicator[data-status="idle"]', timeout=30_000)
        live, static = page.locator('.widget-vbox').first, page.locator('.minigpt-pages').first
        for _ in range(5):  # a run asked for before the kernel is connected is dropped
            if page.locator('.jp-Dialog').count(): page.click('.jp-Dialog .jp-mod-accept')  # which kernel? The one there is
            try:
                page.click('.lm-MenuBar-item:has-text("Run")', timeout=3000)
                page.click('.lm-Menu-item[data-command="runmenu:run-all"]', timeout=3000)
                static.wait_for(timeout=10_000)
            except TimeoutError: continue
            break
        live.locator('.minigpt-frame').wait_for()
        def comes(k):
            "Wait for step `k`, and compare all that is shown"
            live.get_by_text(expected(records, k)['name'], exact=True).wait_for()
            live.locator(f'.minigpt-title:text-is("step {k}")').wait_for()
            assert live.evaluate(READ) | dict(name=expected(records, k)['name']) == expected(records, k)
        comes(0)
        for k in (1, 2, 3):
            live.get_by_role('button', name='Next').click()
            comes(k)
        live.get_by_role('button', name='Back').click()
        comes(2)
        handle = live.locator('.noUi-handle')
        handle.focus()
        for k in (3, 4, 5):
            handle.press('ArrowRight')
            comes(k)
        live.get_by_role('button', name='First').click()
        comes(0)
        press(static, 'Next')
        assert shown(static) == expected(records, 1)
        press(static, 'First')
        walk(static, records)
