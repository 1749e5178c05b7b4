#!/usr/bin/env python
"""Build README.md and the docs site of an nbdev 3 project, with Quarto or without.

    builddocs.py readme [--check]            nbs/index.ipynb -> README.md (no Quarto needed)
    builddocs.py site [--engine auto|quarto|smalldocs] [--strict]

`quarto` is nbdev's own `nbdev-docs`. `smalldocs` (pip install smalldocs) reads the same top-level
_quarto.yml and needs no other program, so it is what checks the docs where Quarto is not to be had.
Both render the notebooks as stored: run the notebooks first (`nbtool.py run`) for fresh outputs.
"""
import argparse, base64, re, shutil, subprocess, sys
from pathlib import Path

NUM = re.compile(r'\b\d+[a-zA-Z0-9]*_(?=[\w-]+\.ipynb)')   # nbdev publishes 00_core.ipynb as core.html


def as_text(x): return x if isinstance(x, str) else ''.join(x)

def processed(path):
    "The notebook at `path` as nbdev publishes it: hidden cells dropped, symbols linked, show_doc run"
    from nbdev.process import NBProcessor
    from nbdev.processors import FilterDefaults
    f = FilterDefaults()
    procs = [p for p in f.procs() if p.__name__ not in ('insert_warning', 'add_links')]
    nb = NBProcessor(path, procs=procs, rm_directives='quarto')
    nb.process()
    return nb.nb

def readme_text(nb, figs, rel):
    out, n = [], 0
    for c in nb.cells:
        src = as_text(c.source).strip('\n')
        if c.cell_type == 'raw': # front matter made from the first heading
            t, d = (re.search(rf'^{k}: (.*(?:\n  .*)*)', src, re.M) for k in ('title', 'description'))
            out.append('# ' + t[1] + (f"\n\n> {' '.join(d[1].split())}" if d else ''))
        elif c.cell_type == 'markdown' and src: out.append(src)
        elif c.cell_type == 'code':
            opts = dict(re.findall(r'^#\| *([\w-]+): *(\S+)', src, re.M))
            code = '\n'.join(l for l in src.split('\n') if not l.startswith('#|')).strip('\n')
            if opts.get('echo') != 'false' and code: out.append(f'```python\n{code}\n```')
            for o in c.get('outputs', []):
                d = o.get('data', {})
                if 'image/png' in d:
                    figs.mkdir(parents=True, exist_ok=True)
                    n += 1
                    (figs/f'{n}.png').write_bytes(base64.b64decode(as_text(d['image/png'])))
                    out.append(f'![]({rel}/{n}.png)')
                elif 'image/svg+xml' in d:
                    figs.mkdir(parents=True, exist_ok=True)
                    n += 1
                    (figs/f'{n}.svg').write_text(as_text(d['image/svg+xml']) + '\n', encoding='utf-8')
                    out.append(f'![]({rel}/{n}.svg)')
                elif 'text/markdown' in d: out.append(as_text(d['text/markdown']).strip('\n'))
                elif 'text/plain' in d or 'text' in o:
                    t = as_text(d.get('text/plain', o.get('text', ''))).rstrip('\n')
                    out.append('\n'.join('    ' + l for l in t.split('\n')))
    text = re.sub(r'\]\((?=\d\d_\w+\.ipynb\))', '](nbs/', '\n\n'.join(out))  # rooms lie beside the notebook, but below the README
    return f'<!-- Made from nbs/index.ipynb. Edit that. -->\n\n{text}\n'

def readme(cfg, check):
    rel = f'{cfg.nbs_path.name}/_readme'
    txt = readme_text(processed(cfg.nbs_path/cfg.readme_nb), cfg.config_path/rel, rel)  # figures are tracked, so that CI sees them change
    dst = cfg.config_path/'README.md'
    old = dst.read_text(encoding='utf-8') if dst.exists() else ''
    if check and old != txt: sys.exit('README.md is not what nbs/index.ipynb gives')
    if old != txt: dst.write_text(txt, encoding='utf-8')
    print(f"README.md {'unchanged' if old == txt else 'written'}")

def smalldocs(cfg, strict):
    from nbdev.serve import proc_nbs
    proc = proc_nbs(n_workers=2, force=True)
    for p in list(proc.glob('*.ipynb')):
        new = p.with_name(NUM.sub('', p.name))
        s = p.read_text(encoding='utf-8')
        s = re.sub(r'\]\(\d\d_(?=\w+\.ipynb\))', '](', s)
        s = re.sub(r'^ +"output-file: .*\n', '', s, flags=re.M)
        s = re.sub(r'\[source\]\(/?blob/[^)]*\)(\{[^}]*\})?|<a href=\\"/?blob/[^>]*>source</a>', '', s) # no public repo to link to
        p.unlink()
        new.write_text(s, encoding='utf-8')
    q = proc/'_quarto.yml'
    q.write_text(NUM.sub('', q.read_text(encoding='utf-8')), encoding='utf-8')
    exe = Path(sys.executable).parent/'smalldocs'
    rc = subprocess.run([exe, 'render', '--quiet', *(['--strict'] if strict else []), proc]).returncode
    if rc: sys.exit(rc)
    shutil.rmtree(cfg.doc_path, ignore_errors=True)
    shutil.move(proc/cfg.doc_path.name, cfg.doc_path)

def main():
    from nbdev.config import get_config
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = ap.add_subparsers(dest='cmd', required=True)
    p = sub.add_parser('readme'); p.add_argument('--check', action='store_true')
    p = sub.add_parser('site'); p.add_argument('--engine', default='auto', choices=['auto', 'quarto', 'smalldocs'])
    p.add_argument('--strict', action='store_true', help='warnings of smalldocs, as broken links, fail')
    a, cfg = ap.parse_args(), get_config()
    if a.cmd == 'readme': return readme(cfg, a.check)
    shutil.copy(cfg.config_path/'_quarto.yml', cfg.nbs_path/'_quarto.yml')  # nbdev looks for it there; git ignores the copy
    engine = ('quarto' if shutil.which('quarto') else 'smalldocs') if a.engine == 'auto' else a.engine
    if engine == 'quarto': subprocess.run(['nbdev-docs'], check=True)
    else: smalldocs(cfg, a.strict)
    print(f'{engine}: {len(list(cfg.doc_path.rglob("*.html")))} pages in {cfg.doc_path.name}')

if __name__ == '__main__': main()
