"""Loading the file of benchmarks/big_model.cpp with Python Accelerate.

    python big_model.py [GIGABYTES] [FOLDER]
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


def best(body, times=3):
    least = 1e9
    for _ in range(times):
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

        def read():
            with open(path, "rb", buffering=0) as file:
                buffer = bytearray(64 << 20)
                while file.readinto(buffer):
                    pass

        print(json.dumps({"reading_gb_per_s": size / best(read), "loading_gb_per_s": size / best(load)}))


if __name__ == "__main__":
    main()
