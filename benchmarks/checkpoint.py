"""How long Python's safetensors takes to fill tensors that are there with the state of benchmarks/checkpoint.cpp: warm cache and cold.

    python checkpoint.py FOLDER [GIGABYTES]

Prints a line of JSON: medians of three rounds.
"""

import json
import os
import statistics
import sys
import tempfile
import time

import torch
from safetensors.torch import load_file, save_file

WIDTH = 2048


def main():
    gigabytes = float(sys.argv[2]) if len(sys.argv) > 2 else 2
    layers = max(1, int(gigabytes * 1e9 / (3 * 4 * WIDTH * WIDTH)))
    into = {}
    for i in range(layers):
        for kind in ("model", "exp_avg", "exp_avg_sq"):
            into[f"{kind}/layer{i}.weight"] = torch.ones(WIDTH, WIDTH)
            into[f"{kind}/layer{i}.bias"] = torch.ones(WIDTH)
    with tempfile.TemporaryDirectory(dir=sys.argv[1]) as folder:
        path = os.path.join(folder, "state.safetensors")
        save_file(into, path)
        size = os.path.getsize(path) / 1e9

        def fill():
            start = time.perf_counter()
            for name, tensor in load_file(path).items():
                into[name].copy_(tensor)
            return time.perf_counter() - start

        def cold_fill():
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return fill()

        warm = statistics.median(fill() for _ in range(3))
        cold = statistics.median(cold_fill() for _ in range(3))
        print(json.dumps({"warm_gb_per_s": size / warm, "cold_gb_per_s": size / cold}))


if __name__ == "__main__":
    main()
