"""Python on a checkpoint whose tensors lie in parts.

    boxes_reference.py FOLDER     puts each tensor together, by the names in the safetensors files alone, and prints its elements

A whole tensor has its own name there; a part has it with the slices that it is of the tensor: "in.weight[0:3, 0:5]".
"""

import json
import re
import sys
from pathlib import Path

import numpy
import safetensors

PART = re.compile(r"^(.*)\[((?:\d+:\d+(?:, )?)+)\]$")


def main(folder):
    manifest = json.loads((Path(folder) / "manifest.json").read_text())
    parts, whole = {}, {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        group = path.name.split(".")[0]
        with safetensors.safe_open(path, "np") as file:
            for name in file.keys():
                if found := PART.match(name):
                    slices = tuple(slice(*map(int, one.split(":"))) for one in found.group(2).split(", "))
                    parts.setdefault(f"{group}/{found.group(1)}", []).append((slices, file.get_tensor(name)))
                else:
                    whole[f"{group}/{name}"] = file.get_tensor(name)
    for name, pieces in parts.items():
        assert name not in whole, name
        group, own = name.split("/", 1)
        tensor = numpy.full(manifest["groups"][group][own]["shape"], numpy.nan)
        for slices, piece in pieces:
            assert numpy.isnan(tensor[slices]).all(), name
            tensor[slices] = piece
        assert not numpy.isnan(tensor).any(), name
        whole[name] = tensor
    print(json.dumps({name: tensor.astype(float).flatten().tolist() for name, tensor in whole.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
