"""Reads an offload folder with Python Accelerate, prints its weights as JSON, and writes them to another folder.

    python offload_folder.py FOLDER NEW_FOLDER
"""

import json
import sys

import torch
from accelerate.utils import OffloadedWeightsLoader, offload_state_dict


def main(folder, new_folder):
    weights = OffloadedWeightsLoader(save_folder=folder)
    state = {name: weights[name] for name in weights}
    offload_state_dict(new_folder, state)
    print(json.dumps({name: tensor.to(torch.float64).flatten().tolist() for name, tensor in state.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
