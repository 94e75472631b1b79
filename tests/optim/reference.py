"""Prints, as JSON, what Python's torch and Accelerate do in the cases of tests/optim."""

import json
import math
import sys
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch.optim import lr_scheduler

torch.set_num_threads(1)


def tensors(dtype, step):
    """The parameters (step 0) or the gradients of a step: formulas that the C++ side has too."""
    shapes = [(4, 3), (5,), (2, 3, 4), ()]
    result = []
    for i, shape in enumerate(shapes):
        index = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
        value = torch.sin(index + i) if step == 0 else torch.cos(index * step + i) * 0.5
        result.append(value.to(dtype))
    return result


def train(make, dtype, steps=5):
    params = [torch.nn.Parameter(t.clone()) for t in tensors(dtype, 0)]
    optimizer = make(params)
    for step in range(1, steps + 1):
        for param, grad in zip(params, tensors(dtype, step)):
            param.grad = grad.clone()
        optimizer.step()
    return [p.detach().double().flatten().tolist() for p in params]


def optimizers():
    adamw = {
        "plain": dict(lr=0.02),
        "amsgrad": dict(lr=0.02, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1, amsgrad=True),
        "maximize": dict(lr=0.02, maximize=True),
    }
    sgd = {
        "plain": dict(lr=0.1),
        "momentum": dict(lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
        "nesterov": dict(lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    }
    adafactor = {
        "plain": dict(),
        "tuned": dict(lr=0.3, beta2_decay=-0.5, eps=(1e-4, 1e-2), d=1.5, weight_decay=0.1, maximize=True),
    }
    result = {}
    for dtype_name in ("float32", "float64", "bfloat16"):
        dtype = getattr(torch, dtype_name)
        for name, options in adamw.items():
            result[f"adamw.{name}.{dtype_name}"] = train(lambda p: torch.optim.AdamW(p, fused=True, **options), dtype)
        for name, options in sgd.items():
            result[f"sgd.{name}.{dtype_name}"] = train(lambda p: torch.optim.SGD(p, fused=True, **options), dtype)
        if dtype_name != "bfloat16":
            for name, options in adafactor.items():
                result[f"adafactor.{name}.{dtype_name}"] = train(
                    lambda p: torch.optim.Adafactor(p, **options), dtype)
    return result


def two_groups(make=torch.optim.SGD, **options):
    a, b = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    return make([{"params": [a], "lr": 0.1}, {"params": [b], "lr": 0.02}], **options)


def schedule(make, steps, momentum=False, optimizer=None):
    optimizer = optimizer or two_groups()
    scheduler = make(optimizer)
    rows = []
    for _ in range(steps):
        row = list(scheduler.get_last_lr())
        if momentum:
            group = optimizer.param_groups[0]
            row.append(group["betas"][0] if "betas" in group else group["momentum"])
        rows.append(row)
        optimizer.step()
        scheduler.step()
    return rows


# The formulas of transformers.optimization, which torch does not have.
def constant(warmup):
    return lambda step: step / max(1.0, warmup) if step < warmup else 1.0


def linear(warmup, total):
    return lambda step: step / max(1, warmup) if step < warmup else max(0.0, (total - step) / max(1, total - warmup))


def cosine(warmup, total, cycles):
    def factor(step):
        if step < warmup:
            return step / max(1, warmup)
        progress = (step - warmup) / max(1, total - warmup)
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * cycles * 2.0 * progress)))

    return factor


def restarts(warmup, total, cycles):
    def factor(step):
        if step < warmup:
            return step / max(1, warmup)
        progress = (step - warmup) / max(1, total - warmup)
        return 0.0 if progress >= 1.0 else max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((cycles * progress) % 1.0))))

    return factor


def schedules():
    lam = lambda factor: lambda optimizer: lr_scheduler.LambdaLR(optimizer, factor)
    result = {
        "lambda": schedule(lambda o: lr_scheduler.LambdaLR(o, [lambda s: 0.9**s, lambda s: 1 / (s + 1)]), 8),
        "constant": schedule(lam(constant(3)), 8),
        "linear": schedule(lam(linear(3, 10)), 13),
        "cosine": schedule(lam(cosine(2, 10, 0.5)), 13),
        "cosine.waves": schedule(lam(cosine(0, 10, 1.5)), 13),
        "restarts": schedule(lam(restarts(2, 12, 3)), 15),
    }
    cases = {
        "plain": dict(total_steps=10),
        "linear": dict(total_steps=11, pct_start=0.4, anneal_strategy="linear", div_factor=10.0, final_div_factor=100.0),
        "three_phase": dict(total_steps=20, three_phase=True, base_momentum=0.7, max_momentum=0.9),
        "short": dict(total_steps=2),
    }
    for name, options in cases.items():
        for kind, optimizer in (("sgd", two_groups(momentum=0.5)), ("adamw", two_groups(torch.optim.AdamW))):
            make = lambda o: lr_scheduler.OneCycleLR(o, max_lr=[0.1, 0.05], **options)
            result[f"one_cycle.{name}.{kind}"] = schedule(make, options["total_steps"], True, optimizer)
    return result


def prepared_schedulers():
    """Learning rates after each call of AcceleratedScheduler.step, on a made-up number of processes."""
    import accelerate.scheduler as module
    from accelerate.state import GradientState

    def run(processes, sync, skipped, split, make):
        optimizer = two_groups()
        scheduler = make(optimizer)
        state = GradientState()
        prepared = SimpleNamespace(step_was_skipped=False)
        rates = []
        with patch.object(module, "AcceleratorState", lambda: SimpleNamespace(num_processes=processes)):
            wrapped = module.AcceleratedScheduler(scheduler, prepared, True, split)
            optimizer.step()
            for is_sync, is_skipped in zip(sync, skipped):
                state._set_sync_gradients(bool(is_sync))
                prepared.step_was_skipped = bool(is_skipped)
                wrapped.step()
                rates.append(wrapped.get_last_lr()[0])
        state._set_sync_gradients(True)
        return rates

    falling = lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 - step / 20)
    one_cycle = lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20, cycle_momentum=False)
    ones, zeros = [1] * 6, [0] * 6
    return {
        "processes_2": run(2, ones, zeros, False, falling),
        "processes_4_accumulation_2": run(4, [0, 1, 0, 1, 0, 1], zeros, False, falling),
        "skipped": run(2, ones, [0, 1, 0, 1, 1, 0], False, falling),
        "split": run(2, ones, zeros, True, falling),
        "one_cycle": run(3, ones, zeros, False, one_cycle),
    }


def accumulation():
    """sync_gradients in each micro-batch of two passes over a loader."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import GradientAccumulationPlugin
    from torch.utils.data import DataLoader

    result = {}
    for batches in (1, 3, 4, 5):
        for steps in (1, 2, 3, 8):
            for with_loader in (True, False):
                AcceleratorState._reset_state(reset_partial_state=True)
                GradientState._reset_state()
                accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=GradientAccumulationPlugin(
                    num_steps=steps, sync_with_dataloader=with_loader))
                loader = accelerator.prepare(DataLoader(list(range(batches)), batch_size=1))
                syncs = []
                for _ in range(2):
                    for _ in loader:
                        with accelerator.accumulate():
                            syncs.append(int(accelerator.sync_gradients))
                result[f"{batches}.{steps}.{int(with_loader)}"] = syncs
    return result


json.dump(
    {
        "optimizers": optimizers(),
        "schedules": schedules(),
        "prepared_schedulers": prepared_schedulers(),
        "accumulation": accumulation(),
    },
    sys.stdout,
)
