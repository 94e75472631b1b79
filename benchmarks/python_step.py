"""The loop of step_overhead's `with data loader`, on Python Accelerate: prints microseconds a step as JSON."""

import json
import statistics
import time

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(32 * 200, 64), torch.randint(10, (32 * 200,))), batch_size=32, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
times = []
for _ in range(8):
    start = time.perf_counter()
    for images, digits in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(images), digits)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    times.append((time.perf_counter() - start) / len(loader) * 1e6)
print(json.dumps({"python_us": statistics.median(times[1:])}))
