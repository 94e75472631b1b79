"""How long Python's safetensors takes with a file: to fill tensors that are there, and only to open it. Prints a line of JSON."""

import json
import statistics
import sys
import time

import torch
from safetensors.torch import load_file

torch.set_num_threads(1)
path = sys.argv[1]
into = {name: torch.zeros_like(tensor) for name, tensor in load_file(path).items()}


def seconds(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def fill():
    for name, tensor in load_file(path).items():
        into[name].copy_(tensor)


fills = [seconds(fill) for _ in range(3)]
opens = [seconds(lambda: load_file(path)) for _ in range(3)]
print(json.dumps({"fill": statistics.median(fills), "open": statistics.median(opens)}))
