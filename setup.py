"""Builds `minigpt` from settings.ini, the one place where its version, requirements and commands are kept."""
from configparser import ConfigParser
from pathlib import Path
from setuptools import setup

cfg = ConfigParser(delimiters=['='])
cfg.read(Path(__file__).parent/'settings.ini', encoding='utf-8')
cfg = cfg['DEFAULT']

status = dict(zip('123', ['1 - Planning', '2 - Pre-Alpha', '3 - Alpha']))
lib = cfg['lib_path']
extras = {k: cfg[f'{k}_requirements'].split() for k in ('notebook', 'dev', 'bench')}
extras['dev'] += extras['notebook']

setup(
    version=cfg['version'],
    classifiers=[f"Development Status :: {status[cfg['status']]}", f"Intended Audience :: {cfg['audience']}",
                 f"Natural Language :: {cfg['language']}", 'Programming Language :: Python :: 3'],
    packages=[lib],
    install_requires=cfg['requirements'].split(),
    extras_require=extras,
    entry_points={'console_scripts': cfg['console_scripts'].split(), 'nbdev': [f'{lib}={lib}._modidx:d']},
)
