"""Module trees, and what Python Accelerate makes of them.

    python reference.py RANDOM_TREES SEED    prints cases as JSON
    python reference.py --time MODULES       prints the seconds that infer_auto_device_map takes
"""

import json
import logging
import random
import sys
import time
import warnings

import torch
from accelerate.utils import modeling
from accelerate.utils import (
    calculate_maximum_sizes, compute_module_sizes, find_tied_parameters, get_balanced_memory, infer_auto_device_map,
)
from torch import nn

DTYPES = [torch.float32, torch.float32, torch.float16, torch.bfloat16, torch.float64]


original_find_tied_parameters = modeling.find_tied_parameters


def find_tied_in_order(model):
    """The original's groups come out of a set, in another order each time, and the map depends on it. Here: the model's."""
    position = {name: i for i, (name, _) in enumerate(model.named_parameters(remove_duplicate=False))}
    return sorted(original_find_tied_parameters(model), key=lambda group: min(position[name] for name in group))


modeling.find_tied_parameters = find_tied_in_order


def parameter(*shape, dtype=torch.float32):
    return nn.Parameter(torch.empty(shape, device="meta", dtype=dtype), requires_grad=dtype.is_floating_point)


class ModelForTest(nn.Module):
    """The model of the original's tests."""

    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(3, 4, device="meta")
        self.batchnorm = nn.BatchNorm1d(4, device="meta")
        self.linear2 = nn.Linear(4, 5, device="meta")


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width, device="meta")
        self.attention = nn.MultiheadAttention(width, 4, device="meta")
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width, device="meta"), nn.GELU(), nn.Linear(4 * width, width, device="meta"))


class Gpt(nn.Module):
    def __init__(self, layers, width, vocabulary=211, tied=True):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, device="meta")
        self.positions = parameter(64, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.norm = nn.LayerNorm(width, device="meta")
        self.head = nn.Linear(width, vocabulary, bias=False, device="meta")
        if tied:
            self.head.weight = self.tokens.weight


def tied_pair():
    """Two towers that share a weight in modules which can be split."""
    model = nn.Module()
    for name in ("left", "right"):
        tower = nn.Module()
        tower.inner = nn.Linear(8, 8, device="meta")
        tower.shared = nn.Linear(8, 16, device="meta")
        model.add_module(name, tower)
    model.middle = nn.Linear(8, 8, device="meta")
    model.right.shared.weight = model.left.shared.weight
    return model


def random_tree(rng):
    """Names are unique over the tree: the original looks for tied names by substring."""
    counter = [0]

    def fresh(prefix):
        counter[0] += 1
        return f"{prefix}{counter[0]}_"

    def shape():
        return [rng.randint(1, 24) for _ in range(rng.randint(0, 3))]

    leaves = []

    def build(depth):
        module = type(f"Kind{rng.randint(0, 4)}", (nn.Module,), {})()
        is_leaf = depth == 0 or rng.random() < 0.3
        if is_leaf or rng.random() < 0.2:
            for _ in range(rng.randint(0, 3)):
                dtype = rng.choice(DTYPES)
                module.register_parameter(fresh("p"), parameter(*shape(), dtype=dtype))
        if is_leaf:
            # Buffers beside children are lost by the original: not compared here.
            for _ in range(rng.choice([0, 0, 1, 2])):
                module.register_buffer(fresh("b"), torch.empty(shape(), device="meta", dtype=rng.choice(
                    [torch.float32, torch.int64, torch.int8])))
            leaves.append(module)
        else:
            for _ in range(rng.randint(1, 5)):
                module.add_module(fresh("m"), build(depth - 1))
        return module

    root = nn.Module()
    for _ in range(rng.randint(0, 2)):
        root.register_parameter(fresh("p"), parameter(*shape()))
    for _ in range(rng.randint(1, 6)):
        root.add_module(fresh("m"), build(rng.randint(0, 3)))
    for _ in range(rng.randint(0, 1)):
        root.register_buffer(fresh("b"), torch.empty(shape(), device="meta"))
    if rng.random() < 0.4:
        owners = [leaf for leaf in leaves if list(leaf.parameters(recurse=False))]
        if len(owners) > 1:
            for _ in range(rng.randint(1, 2)):
                source, *targets = rng.sample(owners, min(len(owners), rng.randint(2, 3)))
                shared = rng.choice(list(source.parameters(recurse=False)))
                for target in targets:
                    target.register_parameter(fresh("tied"), shared)
    return root


def describe(model):
    first = {}
    entries = []
    for name, module in model.named_modules(remove_duplicate=False):
        entries.append(["module", name, type(module).__name__])
    for kind, tensors in (("parameter", model.named_parameters(remove_duplicate=False)),
                          ("buffer", model.named_buffers(remove_duplicate=False))):
        for name, tensor in tensors:
            same_as = first.setdefault(id(tensor), name)
            entries.append([kind, name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."),
                            "" if same_as == name else same_as])
    return entries


def plain(mapping):
    return [[str(key), value] for key, value in mapping.items()]


def run(model, max_memory, balanced=None, no_split=(), dtype=None, special=None, clean=True, fallback=False, offload_buffers=False):
    case = {"max_memory": plain(max_memory), "no_split": list(no_split), "dtype": dtype, "special": {k: str(v).removeprefix("torch.") for k, v in (special or {}).items()},
            "clean": clean, "fallback": fallback, "balanced": balanced, "offload_buffers": offload_buffers}
    limits = dict(max_memory)
    try:
        if balanced is not None:
            limits = get_balanced_memory(model, dict(max_memory), list(no_split), dtype, special, low_zero=balanced)
            case["limits"] = plain(limits)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            case["map"] = plain(infer_auto_device_map(
                model, dict(limits), list(no_split), dtype, special, clean_result=clean, offload_buffers=offload_buffers,
                fallback_allocation=fallback))
        case["warns"] = any("offload_buffers" in str(warning.message) for warning in said)
    except Exception as error:  # its name is compared with what we do
        case["error"] = f"{type(error).__name__}: {error}"
    return case


def tree_case(model, runs):
    sizes = compute_module_sizes(model)
    total, (largest, names) = calculate_maximum_sizes(model)
    return {
        "tree": describe(model),
        "sizes": plain(sizes),
        "half": plain(compute_module_sizes(model, dtype="float16")),
        "buffers": plain(compute_module_sizes(model, buffers_only=True)),
        "tied": sorted(find_tied_parameters(model)),
        "maximum": [total, largest, names],
        "runs": runs,
    }


def fixed_cases():
    mft = ModelForTest()
    yield tree_case(mft, [
        run(mft, {0: 200, 1: 200}), run(mft, {0: 200, 1: 172, "cpu": 200}), run(mft, {0: 200, 1: 174, "cpu": 200}),
        run(mft, {0: 1000}), run(mft, {"cpu": 1000}), run(mft, {"cpu": 100}), run(mft, {0: 256}),
        run(mft, {0: 256}, fallback=True), run(mft, {0: 0, 1: 300, "cpu": 1000}), run(mft, {0: 300, 1: 300}, balanced=False),
        run(mft, {0: 300, 1: 500}, balanced=False), run(mft, {0: 215, 1: 300}, clean=False),
        run(mft, {0: 100, 1: 100}, dtype="float16"), run(mft, {"cpu": 150, "disk": 10**9}),
        run(mft, {0: 200, 1: 200}, special={"linear1.weight": torch.float64, "linear2.bias": torch.int8}),
    ])
    nested = nn.Sequential(ModelForTest(), ModelForTest(), ModelForTest())
    yield tree_case(nested, [
        run(nested, {0: 500, 1: 500}), run(nested, {0: 500, 1: 500}, clean=False),
        run(nested, {0: 500, "cpu": 500}, no_split=["ModelForTest"]), run(nested, {0: 240, 1: 240, 2: 240}, balanced=False),
        run(nested, {0: 500, 1: 500, 2: 500}, balanced=True), run(nested, {0: 600, "cpu": 0}),
    ])
    for tied in (True, False):
        gpt = Gpt(6, 32, tied=tied)
        total = compute_module_sizes(gpt)[""]
        yield tree_case(gpt, [
            run(gpt, {0: 10**7, 1: 10**7, 2: 10**7}, balanced=low_zero, no_split=no_split, dtype=dtype)
            for low_zero in (None, False, True) for no_split in ([], ["Block"]) for dtype in (None, "bfloat16")
        ] + [
            run(gpt, {0: int(total * share), 1: int(total * share), "cpu": int(total * cpu)}, no_split=no_split,
                balanced=balanced, fallback=fallback)
            for share in (0.1, 0.2, 0.35, 0.6) for cpu in (0.05, 0.5) for no_split in ([], ["Block"])
            for balanced in (None, False, True) for fallback in (False, True)
        ])
    pair = tied_pair()
    total = compute_module_sizes(pair)[""]
    yield tree_case(pair, [run(pair, {0: int(total * share), 1: total}, clean=clean)
                           for share in (0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.3) for clean in (True, False)])


def random_case(rng):
    model = random_tree(rng)
    total = max(1, int(compute_module_sizes(model)[""]))
    kinds = sorted({type(module).__name__ for module in model.modules()} - {"Module"})
    runs = []
    for _ in range(4):
        limits = {i: int(total * rng.choice([0, 0.1, 0.3, 0.5, 0.8, 1.2]) * rng.uniform(0.7, 1.3))
                  for i in range(rng.randint(0, 3))}
        if rng.random() < 0.7:
            limits["cpu"] = int(total * rng.uniform(0, 1.2))
        if rng.random() < 0.2:
            limits["disk"] = 10 * total
        if not limits:
            limits["cpu"] = total // 2
        # The original's balanced limits fail when the disk has one.
        balanced = None if "disk" in limits else rng.choice([None, None, False, True])
        if balanced:  # and it takes the numbers of the accelerators for 0 to n - 1, without gaps
            limits = {place: max(1, limit) for place, limit in limits.items()}
        runs.append(run(model, limits, balanced=balanced,
                        no_split=rng.sample(kinds, rng.randint(0, min(2, len(kinds)))) if kinds else [],
                        dtype=rng.choice([None, None, "float16", "float32"]), clean=rng.random() < 0.6,
                        fallback=rng.random() < 0.4, offload_buffers=rng.random() < 0.1))
    return tree_case(model, runs)


def timed(modules):
    """About so many modules, as a transformer has them."""
    model = Gpt(modules // 8, 16)
    limits = {i: compute_module_sizes(model)[""] // 5 for i in range(4)} | {"cpu": 10**9}
    begin = time.perf_counter()
    infer_auto_device_map(model, limits, ["Block"])
    seconds = time.perf_counter() - begin
    return {"modules": sum(1 for _ in model.modules()), "seconds": seconds, "tree": describe(model),
            "max_memory": plain(limits)}


def main():
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    if sys.argv[1] == "--time":
        print(json.dumps(timed(int(sys.argv[2]))))
        return
    rng = random.Random(int(sys.argv[2]))
    print(json.dumps(list(fixed_cases()) + [random_case(rng) for _ in range(int(sys.argv[1]))]))


if __name__ == "__main__":
    main()
