"""Exports the TorchScript modules of the zoo into the folder named on the command line."""

import pathlib
import sys

import torch
from torch import nn


class Branching(nn.Module):
    """Control flow that only scripting keeps, a weight read in a loop, and a buffer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(12, 12) for _ in range(3)])
        self.norm = nn.BatchNorm1d(12)
        self.scale = nn.Parameter(torch.ones(12))

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            y = layer(x)
            if i == 1:
                y = torch.relu(y)
            x = x + y * self.scale
        return self.norm(x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        return self.head(self.lstm(self.encoder(x))[0])


class Forked(nn.Module):
    """Two branches on threads of their own, and one on the caller's."""

    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12))
        self.right = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12))
        self.own = nn.Linear(12, 12)

    def forward(self, x):
        left = torch.jit.fork(self.left, x)
        right = torch.jit.fork(self.right, x)
        return self.own(x) + torch.jit.wait(left) * torch.jit.wait(right)


class ForkedWithin(nn.Module):
    """The fork is in what forward calls."""

    def __init__(self):
        super().__init__()
        self.inner = Forked()

    def forward(self, x):
        return self.inner(x).tanh()


def main(folder):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    torch.jit.script(Branching().double()).save(str(folder / "script_branching.pt"))
    torch.jit.script(ForkedWithin().double()).save(str(folder / "script_forked.pt"))
    recurrent = Recurrent().double()
    torch.jit.trace(recurrent, torch.randn(2, 7, 16, dtype=torch.double), check_trace=False).save(
        str(folder / "script_traced.pt"))


if __name__ == "__main__":
    main(sys.argv[1])
