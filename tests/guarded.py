"""Kernels over arrays that end where memory does: whoever reads or writes beyond is killed

    python tests/guarded.py      prints `fine`
"""
import ctypes
import math
import mmap

import numpy as np
import torch

from minigpt import kernels
from minigpt.kernels import GELU, PLAIN, SWIGLU, PackedLinear, PagedKVCache, QuantLinear, make_small, multiply, set_threads
from minigpt.model import GPTConfig


def guarded(shape, dtype, spare=0):
    "Zeros that end, but for the bytes to spare, at a page that nobody may touch"
    size, page = math.prod(shape) * np.dtype(dtype).itemsize + spare, mmap.PAGESIZE
    whole = -(-size // page) * page
    memory = mmap.mmap(-1, whole + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(start + whole), page, 0): raise OSError(ctypes.get_errno(), 'mprotect')
    return np.frombuffer(memory, np.uint8, size - spare, whole - size).view(dtype).reshape(shape)


def copied(a):
    to = guarded(a.shape, a.dtype)
    to[:] = a
    return to


def linears(rng):
    for inputs, outputs in ((32, 1), (64, 47), (96, 48), (32, 100)):
        w = rng.standard_normal((outputs, inputs), dtype=np.float32)
        for linear in (PackedLinear(w), QuantLinear(make_small(w, 8)), QuantLinear(make_small(w, 4))):
            arrays = [copied(a) for a in linear.arrays]
            for rows in (1, 2, 5, 8, 17, 40):
                x = copied(rng.standard_normal((rows, inputs), dtype=np.float32))
                for finish in (PLAIN, GELU): multiply(x, *arrays, finish, guarded((x.size,), np.float32), guarded((rows, outputs), np.float32))
    gates = [copied(a) for a in PackedLinear(rng.standard_normal((100, 32), dtype=np.float32), parts=2).arrays]
    for rows in (1, 9): multiply(copied(rng.standard_normal((rows, 32), dtype=np.float32)), *gates, SWIGLU, guarded((rows * 32,), np.float32), guarded((rows, 50), np.float32))


def attention(rng):
    kernels.aligned = lambda shape, dtype: guarded(shape, dtype, 256)  # what `aligned` gives to spare
    for head_dim in (2, 8, 30, 64, 80):
        for block_size in (1, 4, 16, 17, 40):
            for dtype in ('fp32', 'bf16'):
                config = GPTConfig(vocab_size=16, max_seq_len=64, n_layer=1, n_head=6, n_kv_head=2, n_embd=6 * head_dim, head_dim=head_dim)
                num_blocks = -(-50 // block_size)
                cache = PagedKVCache(config, num_blocks, block_size, dtype)
                for span in (range(0, 41), range(41, 42), range(42, 50)):
                    cache.begin([list(range(num_blocks))], [span])  # the last block of all is the last of the sequence
                    q, k, v = (torch.from_numpy(rng.standard_normal((len(span), heads, head_dim), dtype=np.float32)) for heads in (6, 2, 2))
                    assert cache.attend(0, q, k, v).isfinite().all()


if __name__ == '__main__':
    set_threads(1)
    linears(np.random.default_rng(0))
    attention(np.random.default_rng(0))
    print('fine')
