"""Loading the file of benchmarks/big_model.cpp with Python Accelerate, with a warm and a cold cache.

    python big_model.py [GIGABYTES] [FOLDER]

It maps the file and reads nothing until weights are used. So there is a second figure, until one element of each page has been
looked at; the library's own has every page there when loading ends.
"""

import json
import os
import sys
import tempfile
import time

import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from safetensors.torch import save_file
from torch import nn


def make(layers):
    return nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(layers)])


def best(body, before, times=3):
    least = 1e9
    for _ in range(times):
        before()
        begin = time.perf_counter()
        body()
        least = min(least, time.perf_counter() - begin)
    return least


def main():
    gigabytes = float(sys.argv[1]) if len(sys.argv) > 1 else 2
    layers = max(1, int(gigabytes * 1e9 / (4096 * 4096 * 4)))
    with tempfile.TemporaryDirectory(dir=sys.argv[2] if len(sys.argv) > 2 else None) as folder:
        path = os.path.join(folder, "model.safetensors")
        with torch.device("meta"):
            shapes = make(layers).state_dict()
        save_file({name: torch.rand(tensor.shape) for name, tensor in shapes.items()}, path, metadata={"format": "pt"})
        size = os.path.getsize(path) / 1e9

        def load():
            with init_empty_weights():
                net = make(layers)
            return load_checkpoint_and_dispatch(net, path, device_map={"": "cpu"})

        def load_and_look():
            for weight in load().parameters():
                weight.detach().view(-1)[::1024].sum()

        def forget():
            file = os.open(path, os.O_RDONLY)
            os.fdatasync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)

        for cache, before in (("warm", lambda: None), ("cold", forget)):
            print(json.dumps({"cache": cache, "loading_gb_per_s": size / best(load, before),
                              "until_every_page_is_there_gb_per_s": size / best(load_and_look, before)}))


if __name__ == "__main__":
    main()
