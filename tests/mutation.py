"""Change each comparison and each ±1 of the core modules, one at a time, and see whether the tests notice.

    python tests/mutation.py [MODULE ...]     default: paging prefix_cache scheduler; takes about ten minutes

Prints the mutants that nobody noticed; the exit code is 1 if fewer than 90 % were caught. Five are known to change nothing:
entries numbered downwards are as unique; a root's flag turned over still tells no salt from an empty one; the arrival that a
request has before it arrives is overwritten; and a cap on chunks never cuts a single token (`n > 1`), nor a request that is alone
(`live > 1`), since its floor is then the whole budget.
"""
import ast
import copy
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = ['tests/test_paging.py', 'tests/test_prefix_cache.py', 'tests/test_scheduler.py']
SWAPS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
         ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is}


def is_one(node): return isinstance(node, ast.Constant) and type(node.value) is int and node.value == 1


def sites(tree):
    "Every place that can be changed, as (index of the node in a walk, which of its operators)"
    for n, node in enumerate(ast.walk(tree)):
        if isinstance(node, ast.Compare): yield from ((n, i) for i in range(len(node.ops)))
        elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)) and (is_one(node.left) or is_one(node.right)): yield n, 0
        elif isinstance(node, ast.AugAssign) and is_one(node.value): yield n, 0
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and is_one(node.operand): yield n, 0
        elif isinstance(node, ast.Call) and getattr(node.func, 'id', '') == 'range' and is_one(node.args[0]) and len(node.args) > 1: yield n, 0


def mutant(tree, site):
    "A changed copy, and the line that changed before and after"
    tree = copy.deepcopy(tree)
    node = list(ast.walk(tree))[site[0]]
    before = ast.unparse(node)
    if isinstance(node, ast.Compare): node.ops[site[1]] = SWAPS[type(node.ops[site[1]])]()
    elif isinstance(node, (ast.BinOp, ast.AugAssign)): node.op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
    elif isinstance(node, ast.UnaryOp): node.operand = ast.Constant(2)
    else: node.args[0] = ast.Constant(2)
    return ast.unparse(tree), f'line {node.lineno}: {before}  →  {ast.unparse(node)}'


def survives(module, source):
    "Whether the tests pass with `source` in the place of the module"
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT/'minigpt', Path(folder)/'minigpt', ignore=shutil.ignore_patterns('__pycache__'))
        (Path(folder)/'minigpt'/f'{module}.py').write_text(source, encoding='utf-8')
        env = os.environ | dict(PYTHONPATH=folder, PYTHONDONTWRITEBYTECODE='1', OMP_NUM_THREADS='1')
        command = [sys.executable, '-P', '-m', 'pytest', '-q', '-x', '--noconftest', '-p', 'no:cacheprovider', *TESTS]
        try: return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, timeout=120).returncode == 0
        except subprocess.TimeoutExpired: return False  # a livelock was noticed


def main(modules):
    jobs = []
    for module in modules:
        tree = ast.parse((ROOT/'minigpt'/f'{module}.py').read_text(encoding='utf-8'))
        jobs += [(module, *mutant(tree, site)) for site in sites(tree)]
    with ThreadPoolExecutor(os.cpu_count()) as pool: alive = list(pool.map(lambda job: survives(*job[:2]), jobs))
    for (module, _, what), survived in zip(jobs, alive):
        if survived: print(f'survived  {module} {what}', flush=True)
    caught = len(jobs) - sum(alive)
    print(f'{caught} of {len(jobs)} mutants caught, {caught / len(jobs):.1%}')
    return int(caught < 0.9 * len(jobs))


if __name__ == '__main__': sys.exit(main(sys.argv[1:] or ['paging', 'prefix_cache', 'scheduler']))
