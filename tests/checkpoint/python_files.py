"""Python's side of the file tests.

    python python_files.py write FOLDER    writes files for C++ to read
    python python_files.py check FOLDER    reads what C++ wrote there and prints what it found

Tensors are made so that both sides can compute them: element i of a tensor filled with `seed` is (i * 7 + seed) % 11.
"""

import collections
import json
import sys
import warnings
from pathlib import Path

import safetensors
import safetensors.torch
import torch

torch.set_num_threads(1)

DTYPES = [
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64",
    "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
]


def values(seed, *shape, dtype=torch.float32):
    count = int(torch.tensor(shape).prod()) if shape else 1
    return ((torch.arange(count) * 7 + seed) % 11).to(dtype).reshape(shape)


def model():
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3, bias=False))
    with torch.no_grad():
        for seed, parameter in enumerate(net.parameters()):
            parameter.copy_(values(seed, *parameter.shape))
    return net


def trained(net, make):
    optimizer = make(net)
    for step in range(3):
        net(values(step, 5, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


OPTIMIZERS = {
    "adamw": lambda net: torch.optim.AdamW(
        [{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 0.5}], lr=1e-3, weight_decay=0.1),
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9),
}


def write(folder):
    every = {name: values(3, 2, 3, dtype=getattr(torch, name)) for name in DTYPES}
    every |= {"scalar": torch.tensor(2.5), "empty": torch.empty(3, 0)}
    safetensors.torch.save_file(every, folder / "dtypes.safetensors", metadata={"format": "pt", "note": "\u00e9"})
    torch.save(every | {"complex128": values(3, 2, 3, dtype=torch.complex128)}, folder / "dtypes.pt")

    tied = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2, bias=False), "b": torch.nn.Linear(2, 2, bias=False)})
    tied["b"].weight = tied["a"].weight
    safetensors.torch.save_model(tied, folder / "tied.safetensors")
    torch.save(tied.state_dict(), folder / "tied.pt")

    from accelerate import Accelerator
    net = model()
    Accelerator(cpu=True).save_model(net, folder / "sharded", max_shard_size=60)
    torch.save(net.state_dict(), folder / "model.pt")
    torch.save(net.state_dict(), folder / "protocol5.pt", pickle_protocol=5)
    for name, make in OPTIMIZERS.items():
        net = model()
        optimizer = trained(net, make)
        torch.save(optimizer.state_dict(), folder / f"{name}.pt")
        torch.save(optimizer.state_dict(), folder / f"{name}_protocol4.pt", pickle_protocol=4)

    base = values(0, 4, 6)
    torch.save({"base": base, "column": base[:, 2], "transposed": base.t(), "expanded": torch.ones(1).expand(5),
                "conjugated": values(1, 3, dtype=torch.complex64).conj(), "parameter": torch.nn.Parameter(values(2, 2))},
               folder / "views.pt")
    torch.save({"none": None, "true": True, "int": 2**40, "negative": -5, "byte": 200, "short": 40000, "float": 0.1,
                "bytes": b"\x00\xff", "no_bytes": b"", "text": "\u00e9\U0001f600", "list": [1, [2.5, "x"]], "tuple": (1, 2, 3, 4),
                "one": (1,), "size": torch.Size([2, 3]), "dtype": torch.bfloat16, "device": torch.device("cuda", 1),
                7: "seven", "ordered": collections.OrderedDict(a=1)}, folder / "values.pt")

    torch.save(model(), folder / "module.pt")
    torch.save({"wide": 2**70}, folder / "wide.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save({"a": torch.sparse_coo_tensor([[0]], [1.0], (2,))}, folder / "sparse.pt")
    torch.save(model().state_dict(), folder / "legacy.pt", _use_new_zipfile_serialization=False)
    torch.jit.script(model()).save(folder / "script.pt")
    itself = []
    itself.append(itself)
    torch.save(itself, folder / "itself.pt")
    laughs = ["ha"]
    for _ in range(100):
        laughs = [laughs] * 10
    torch.save(laughs, folder / "laughs.pt")


def check(folder):
    found = {}

    def note(name, equal):
        found[name] = bool(equal)

    def same(tensors):
        return all(torch.equal(tensors[name], values(3, 2, 3, dtype=getattr(torch, name))) for name in DTYPES
                   if not name.startswith("float8")) and all(
                       torch.equal(tensors[name].view(torch.uint8), values(3, 2, 3, dtype=getattr(torch, name)).view(torch.uint8))
                       for name in DTYPES)

    with safetensors.safe_open(folder / "dtypes.safetensors", "pt") as file:
        note("safetensors", same({name: file.get_tensor(name) for name in file.keys()}))
        note("metadata", file.metadata() == {"format": "pt", "note": "\u00e9"})
    note("pt", same(torch.load(folder / "dtypes.pt", weights_only=True)))

    net = model()
    expected = net.state_dict()
    state = torch.load(folder / "model.pt", weights_only=True)
    note("state_dict", isinstance(state, collections.OrderedDict) and list(state) == list(expected)
         and all(torch.equal(state[k], expected[k]) for k in expected) and state._metadata == expected._metadata)
    note("strict", net.load_state_dict(state, strict=True))

    from accelerate import load_checkpoint_in_model
    for source in ["sharded", "sharded/model.safetensors.index.json"]:
        other = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3, bias=False))
        load_checkpoint_in_model(other, folder / source, strict=True)
        note(source, all(torch.equal(other.state_dict()[k], expected[k]) for k in expected))
    index = json.loads((folder / "sharded/model.safetensors.index.json").read_text())
    theirs = json.loads((folder / "python/sharded/model.safetensors.index.json").read_text())
    note("index", index == theirs)

    tied = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2, bias=False), "b": torch.nn.Linear(2, 2, bias=False)})
    tied["b"].weight = tied["a"].weight
    note("tied", not any(safetensors.torch.load_model(tied, folder / "tied.safetensors"))
         and torch.equal(tied["b"].weight, values(5, 2, 2)))
    state = torch.load(folder / "tied.pt", weights_only=True)
    note("tied pt", state["a"].data_ptr() == state["b"].data_ptr() and torch.equal(state["b"], values(5, 2, 2)))

    for name, make in OPTIMIZERS.items():
        straight, resumed = model(), model()
        first = trained(straight, make)
        second = trained(resumed, make)
        second.load_state_dict(torch.load(folder / f"{name}.pt", weights_only=True))
        for net, optimizer in [(straight, first), (resumed, second)]:
            net(values(9, 5, 3)).square().sum().backward()
            optimizer.step()
        note(name, second.state_dict()["param_groups"] == first.state_dict()["param_groups"]
             and all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters())))

    theirs = torch.load(folder / "python/views.pt", weights_only=True)
    ours = torch.load(folder / "views.pt", weights_only=True)
    note("views", all(torch.equal(ours[k].detach(), theirs[k].detach()) for k in theirs) and ours["column"].stride() == (6,)
         and ours["column"].untyped_storage().data_ptr() == ours["base"].untyped_storage().data_ptr())
    note("part", (folder / "part.pt").stat().st_size < 4000
         and torch.equal(torch.load(folder / "part.pt", weights_only=True)["part"], values(4, 1000, 1000)[500, :10]))
    theirs = torch.load(folder / "python/values.pt", weights_only=False)
    ours = torch.load(folder / "values.pt", weights_only=True)
    theirs |= {"size": (2, 3), "dtype": "torch.bfloat16", "device": "cuda:1"}
    note("values", ours == theirs and all(type(ours[k]) is type(theirs[k]) for k in theirs))
    print(json.dumps(found))


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    if sys.argv[1] == "write":
        write(folder)
        print("{}")
    else:
        check(folder)
