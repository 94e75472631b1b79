"""Exports a PyTorch module that examples/torchscript_module.cpp trains: python examples/export_module.py net.pt"""

import sys

import torch
from torch import nn


class RowReader(nn.Module):
    """Reads the eight rows of an 8x8 image as a sequence."""

    def __init__(self, width: int = 64, layers: int = 2):
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.position = nn.Parameter(0.02 * torch.randn(8, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True) for _ in range(layers))
        self.classes = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rows = self.embed(images.view(-1, 8, 8)) + self.position
        for layer in self.layers:
            rows = layer(rows)
        return self.classes(rows.mean(1))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    torch.manual_seed(0)
    torch.jit.script(RowReader()).save(sys.argv[1])
