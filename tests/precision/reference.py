"""Prints, as JSON, what Python's torch.amp does in the cases of tests/precision."""

import json
import sys

import torch


def scaler(gradients, **options):
    """Scale, growth tracker, parameter and gradient after each step; a gradient of inf or NaN is skipped."""
    grad_scaler = torch.amp.GradScaler("cpu", **options)
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    rows = []
    for gradient in gradients:
        grad_scaler.scale((weight * gradient).sum()).backward()
        grad_scaler.step(optimizer)
        grad_scaler.update()
        state = grad_scaler.state_dict()
        grad = weight.grad.item()
        rows.append([state["scale"], state["_growth_tracker"], weight.item(), grad if grad - grad == 0 else None])
        optimizer.zero_grad()
    return {"rows": rows, "state": grad_scaler.state_dict()}


def autocast():
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2))
    with torch.no_grad():
        for param in layer.parameters():
            param.copy_(torch.sin(torch.arange(param.numel(), dtype=torch.float64)).reshape(param.shape))
    inputs = torch.cos(torch.arange(32, dtype=torch.float64)).reshape(4, 8).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = layer(inputs)
    outputs.float().pow(2).sum().backward()
    return {"outputs": outputs.float().flatten().tolist(),
            "gradients": [p.grad.flatten().tolist() for p in layer.parameters()]}


inf, nan = float("inf"), float("nan")
json.dump(
    {
        "scaler": {
            "defaults": scaler([1.0, 0.3, inf, 0.7, nan, 2.0]),
            "interval_2": scaler([1.0, 0.3, 0.5, inf, 0.7, 0.1, 0.2, nan, 2.0], growth_interval=2),
            "slow": scaler([0.3] * 7 + [inf] + [0.3] * 4, init_scale=10.0, growth_factor=1.5, backoff_factor=0.25,
                           growth_interval=3),
        },
        "autocast": autocast(),
    },
    sys.stdout,
)
