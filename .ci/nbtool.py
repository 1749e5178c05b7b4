#!/usr/bin/env python
"""Edit Jupyter notebooks from a terminal, as plain text. Standard library only (`run` needs nbdev).

    nbtool.py dump  NB [-o FILE]       notebook -> text, with cell ids, no outputs
    nbtool.py load  FILE NB [--check]  text -> notebook; keeps ids, and outputs of unchanged cells
    nbtool.py show  NB [CELL ...]      read it in a terminal, with the text of outputs
    nbtool.py check NB...              exit 1 unless canonical JSON and dump/load loses nothing
    nbtool.py run   NB... [--slow]     run top to bottom, store the outputs, clean, canonicalise

The text form is the "percent" format, one header line a cell:

    # %% [markdown] id=1f2e3d4c
    # # A title
    #
    # Prose, each line behind a '# '.

    # %% id=5b6a7988
    #| export
    def f(x): return x

Leave `id=` out of a new cell: `load` takes the id of an old cell with the same source,
or else makes one from the notebook's name and the source, so the same text gives the same file.
The notebook is what is committed; the text is a view to edit and throw away.
"""
import argparse, difflib, hashlib, json, re, sys
from pathlib import Path

HEAD = re.compile(r'^# %%(?: \[(markdown|raw)\])?((?: +[a-z_]+=\S+)*)\s*$')
KERNEL = {"kernelspec": {"display_name": "python3", "language": "python", "name": "python3"}}


def text_of(src): return src if isinstance(src, str) else ''.join(src)

def lines_of(s): return s.splitlines(True)

def canon(nb):
    "The bytes that `nbdev-clean` writes: sorted keys, indent 1, text kept as lists of lines"
    for c in nb['cells']: c['source'] = lines_of(text_of(c['source']))
    return json.dumps(nb, sort_keys=True, indent=1, ensure_ascii=False) + '\n'

def read_nb(path): return json.loads(Path(path).read_text(encoding='utf-8'))


# ---- notebook -> text
def dump_cell(c):
    kind, src = c['cell_type'], text_of(c['source']).rstrip('\n')
    head = '# %%' + ('' if kind == 'code' else f' [{kind}]') + f" id={c['id']}"
    if kind != 'code': body = '\n'.join(('# ' + l).rstrip() if l.strip() else '#' for l in src.split('\n'))
    else:
        bad = [l for l in src.split('\n') if l.startswith('# %%')]
        if bad: raise SystemExit(f"cell {c['id']} holds a line that reads as a cell header: {bad[0]!r}")
        body = src
    return f'{head}\n{body}\n'

def dump(nb): return '\n'.join(dump_cell(c) for c in nb['cells'])


# ---- text -> notebook
def parse(txt):
    "[(kind, id or None, source)]"
    cells, cur = [], None
    for n, line in enumerate(txt.split('\n'), 1):
        m = HEAD.match(line)
        if m:
            opts = dict(o.split('=', 1) for o in m[2].split())
            if set(opts) - {'id'}: raise SystemExit(f'line {n}: unknown option in {line!r}')
            cur = (m[1] or 'code', opts.get('id'), [])
            cells.append(cur)
        elif line.startswith('# %%'): raise SystemExit(f'line {n}: malformed cell header {line!r}')
        elif cur: cur[2].append((n, line))
        elif line.strip(): raise SystemExit(f'line {n}: text before the first "# %%" header')
    return [(k, i, body(k, ls)) for k, i, ls in cells]

def body(kind, numbered):
    out = []
    for n, l in numbered:
        if kind == 'code' or not l.strip(): out.append(l)
        elif l.startswith('# ') or l.rstrip() == '#': out.append(l[2:])
        else: raise SystemExit(f'line {n}: a {kind} line must start with "# ": {l!r}')
    s = '\n'.join(out)
    return s.strip('\n')

def new_id(stem, kind, src, used):
    n = 0
    while True:
        i = hashlib.sha1(f'{stem}\0{kind}\0{src}\0{n}'.encode()).hexdigest()[:8]
        if i not in used: return i
        n += 1

def load(txt, stem, old=None):
    "Notebook dict from `txt`, taking ids, metadata and outputs over from the notebook `old`"
    olds = old['cells'] if old else []
    by_id = {c['id']: c for c in olds if 'id' in c}
    want = parse(txt)
    given = [i for _, i, _ in want if i]
    dup = {i for i in given if given.count(i) > 1}
    if dup: raise SystemExit(f'cell ids used twice: {sorted(dup)}')
    spare = {}
    for c in olds:
        if c.get('id') and c['id'] not in given:
            spare.setdefault((c['cell_type'], text_of(c['source']).rstrip('\n')), []).append(c)
    used, cells = set(given) | set(by_id), []
    for kind, i, src in want:
        if i: prev = by_id.get(i)
        else:
            prev = (spare.get((kind, src)) or [None]).pop(0)
            i = prev['id'] if prev else new_id(stem, kind, src, used)
        used.add(i)
        same = prev and prev['cell_type'] == kind
        c = dict(cell_type=kind, id=i, metadata=dict(prev['metadata']) if same else {}, source=src)
        if same and 'attachments' in prev: c['attachments'] = prev['attachments']
        if kind == 'code':
            kept = same and text_of(prev['source']).rstrip('\n') == src
            c.update(execution_count=None, outputs=prev['outputs'] if kept else [])
        cells.append(c)
    meta = old['metadata'] if old else KERNEL
    return dict(cells=cells, metadata=meta, nbformat=4, nbformat_minor=5)

def load_file(txt_path, nb_path):
    nb_path = Path(nb_path)
    old = read_nb(nb_path) if nb_path.exists() else None
    txt = sys.stdin.read() if str(txt_path) == '-' else Path(txt_path).read_text(encoding='utf-8')
    return canon(load(txt, nb_path.stem, old))


# ---- commands
def problems(path):
    "What keeps `path` from being reviewable, as a list of sentences"
    raw = Path(path).read_text(encoding='utf-8')
    nb, res = json.loads(raw), []
    ids = [c.get('id') for c in nb['cells']]
    if None in ids: return ['a cell has no id: run nbdev-clean']
    if len(set(ids)) != len(ids): res.append('two cells share an id')
    if canon(json.loads(raw)) != raw: res.append('not in canonical JSON: run nbdev-clean')
    for c in nb['cells']:
        if text_of(c['source']).strip('\n') != text_of(c['source']): res.append(f"cell {c['id']}: source starts or ends with a newline")
        if c.get('execution_count') is not None: res.append(f"cell {c['id']}: has an execution count: run nbdev-clean")
        for o in c.get('outputs', []):
            if o['output_type'] == 'error': res.append(f"cell {c['id']}: a stored output is an error")
    if not res and canon(load(dump(nb), Path(path).stem, json.loads(raw))) != raw: res.append('dump/load does not give the same file')
    return res

def out_text(o):
    d = o.get('data', {})
    if o['output_type'] == 'stream': return text_of(o['text'])
    if o['output_type'] == 'error': return f"{o['ename']}: {o['evalue']}"
    other = [k for k in d if k != 'text/plain']
    return text_of(d.get('text/plain', '')) + (f"   <{', '.join(other)}>" if other else '')

def show(nb, only=()):
    for n, c in enumerate(nb['cells']):
        if only and not any(c['id'].startswith(o) or str(n) == o for o in only): continue
        print(f"--- {n} {c['cell_type']} {c['id']}")
        print(text_of(c['source']))
        for o in c.get('outputs', []):
            for l in out_text(o).rstrip('\n').split('\n'): print('    > ' + l[:200])

def without_views(nb):
    "Drop live-widget views: their ids are random, and they show nothing once the kernel is gone"
    for c in nb['cells']:
        for o in c.get('outputs', []): o.get('data', {}).pop('application/vnd.jupyter.widget-view+json', None)
    return nb

def run(paths, slow=False):
    from nbdev.config import get_config
    from nbdev.test import test_nb
    from nbdev.clean import nbdev_clean
    bad = []
    for p in map(lambda s: Path(s).resolve(), paths):
        cfg = get_config(p.parent)
        flags = cfg.tst_flags.split() if isinstance(cfg.tst_flags, str) else cfg.tst_flags
        flags = [f for f in flags if not (slow and f == 'slow')]
        ok, secs = test_nb(p, skip_flags=flags, basepath=cfg.config_path, cell_timeout=cfg.cell_timeout, save=True)
        if ok:
            nbdev_clean.__wrapped__(str(p))
            p.write_text(canon(without_views(read_nb(p))), encoding='utf-8')
        else: bad.append(p.name)
        print(f"{'ok  ' if ok else 'FAIL'} {secs:6.1f}s {p.name}")
    if bad: raise SystemExit(f"failed: {', '.join(bad)}")

def main(argv=None):
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = ap.add_subparsers(dest='cmd', required=True)
    p = sub.add_parser('dump');  p.add_argument('nb'); p.add_argument('-o', '--out')
    p = sub.add_parser('load');  p.add_argument('text'); p.add_argument('nb')
    p.add_argument('--check', action='store_true', help='write nothing; exit 1 if the notebook would change')
    p = sub.add_parser('show');  p.add_argument('nb'); p.add_argument('cells', nargs='*')
    p = sub.add_parser('check'); p.add_argument('nbs', nargs='+')
    p = sub.add_parser('run');   p.add_argument('nbs', nargs='+')
    p.add_argument('--slow', action='store_true', help='run the cells marked `#| slow` too, whose outputs vary with the machine')
    a = ap.parse_args(argv)
    if a.cmd == 'dump':
        t = dump(read_nb(a.nb))
        Path(a.out).write_text(t, encoding='utf-8') if a.out else sys.stdout.write(t)
    elif a.cmd == 'load':
        new, dst = load_file(a.text, a.nb), Path(a.nb)
        old = dst.read_text(encoding='utf-8') if dst.exists() else ''
        if new != old and a.check:
            sys.stdout.writelines(difflib.unified_diff(lines_of(old), lines_of(new), str(dst), 'new', n=1))
            raise SystemExit(1)
        if new != old: dst.write_text(new, encoding='utf-8')
        print(f"{dst}: {'unchanged' if new == old else 'written'}", file=sys.stderr)
    elif a.cmd == 'show': show(read_nb(a.nb), a.cells)
    elif a.cmd == 'run': run(a.nbs, a.slow)
    else:
        found = [f'{p}: {m}' for p in a.nbs for m in problems(p)]
        print('\n'.join(found) or f'{len(a.nbs)} notebooks fine')
        raise SystemExit(bool(found))

if __name__ == '__main__': main()
