"""How much anonymous memory loading a model takes at most, next to its weights; in a process of its own: python tests/peak_memory.py MODEL

Pages of a mapped file are not counted: the system drops them when it needs room. Weights and whatever is made on the way to them are.
"""
import json
import re
import sys
import threading
import time
from pathlib import Path


def anonymous_bytes():
    return 1024 * int(re.search(r'RssAnon:\s+(\d+)', Path('/proc/self/status').read_text())[1])


def watch(run):
    "What `run` returns, and by how many bytes it grew the process at most and in the end"
    before, seen, done = anonymous_bytes(), [0], threading.Event()
    def look():
        while not done.is_set():
            seen.append(anonymous_bytes())
            time.sleep(0.001)
    thread = threading.Thread(target=look)
    thread.start()
    try: result = run()
    finally:
        done.set()
        thread.join()
    end = anonymous_bytes()
    return result, max(*seen, end) - before, end - before


if __name__ == '__main__':
    import torch

    from minigpt.weights import load_model
    torch.set_num_threads(1)
    torch.ones(1000, 1000) @ torch.ones(1000, 1000)  # what torch takes for itself
    loaded, peak, end = watch(lambda: load_model(sys.argv[1]))
    print(json.dumps(dict(weights=sum(p.nbytes for p in loaded.model.parameters()), peak=peak, end=end)))
