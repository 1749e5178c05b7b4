"""A language-model stack that is read like a book and runs like an engine, on an ordinary CPU"""
from importlib import import_module
from importlib.metadata import version

__version__ = version('minigpt-stack')
_HOMES = {'GPT': 'model', 'GPTConfig': 'model', 'LLM': 'engine', 'SamplingParams': 'sampling'}
__all__ = [*_HOMES, '__version__']


def __getattr__(name):
    "Load a public name when it is first asked for (PEP 562), so that `import minigpt` costs no torch"
    if name not in _HOMES: raise AttributeError(f"module 'minigpt' has no attribute {name!r}")
    return getattr(import_module(f'.{_HOMES[name]}', __name__), name)


def __dir__(): return sorted(__all__)
