"""Python Accelerate on checkpoints that are ours, and ours on its.

    checkpoint_reference.py load FOLDER     loads what save_state wrote there, trains on, prints what came out
    checkpoint_reference.py save FOLDER     trains, saves with Accelerate's save_state, trains on, prints what came out
"""

import json
import sys

import torch
from accelerate import Accelerator


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = torch.nn.Linear(6, 5)
        self.norm = torch.nn.BatchNorm1d(5)
        self.out = torch.nn.Linear(5, 3)

    def forward(self, x):
        return self.out(torch.tanh(self.norm(self.hidden(x))))


def batch(step):
    return (torch.arange(24, dtype=torch.float32).reshape(4, 6) * (step + 1)).sin()


def train(model, optimizer, steps):
    losses = []
    for step in steps:
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(action, folder):
    torch.manual_seed(3)
    accelerator = Accelerator(cpu=True)
    net = Net()
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.05, weight_decay=0.1))
    result = {}
    if action == "load":
        accelerator.load_state(folder)
        result["lr"] = optimizer.param_groups[0]["lr"]
        result["step"] = float(optimizer.state[net.hidden.weight]["step"])
    else:
        train(model, optimizer, range(2))
        accelerator.save_state(folder)
    result["losses"] = train(model, optimizer, range(2, 6))
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
