"""What benchmarks/big_model.cpp measures, by Python Accelerate, on a file of the same tensors.

    python big_model.py [GIGABYTES] [FOLDER]
"""

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

        print(f"Loading {size:.3g} GB: reading {size / best(read):.3g} GB/s, loading {size / best(load):.3g} GB/s")
        with init_empty_weights():
            net = make(layers)
        offload = os.path.join(folder, "offload")
        net = load_checkpoint_and_dispatch(
            net, path, device_map={str(i): "cpu" if i == 0 else "disk" for i in range(layers)}, offload_folder=offload)
        for rows in (1, 16, 64, 128, 512):
            x = torch.randn(rows, 4096)
            with torch.no_grad():
                net(x)
                print(f"  {rows} rows: a forward with all but one layer on disk {best(lambda: net(x)):.3g} s")


if __name__ == "__main__":
    main()
