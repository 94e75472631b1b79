"""The bundled trainers in Python, on Python Accelerate: the same models from the same seed, on the same samples.

    torchrun --nproc-per-node N python_trainer.py jobs.json results.json

jobs.json is a list of {"trainer": name, "flags": [...]} with the trainers' own flags; results.json gets one summary for each.
Modules are made in the order in which the C++ constructors make them, so that equal seeds give equal weights.
"""

import argparse
import json
import math
import os
import pathlib
import struct
import sys
import time

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, gather_object, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CONTEXT = 128
HEAD_SIZE = 16


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.hidden = nn.Linear(32 * 4 * 4, 64)
        self.classes = nn.Linear(64, 10)

    def forward(self, images):
        images = torch.relu(self.conv2(torch.relu(self.conv1(images))))
        return self.classes(torch.relu(self.hidden(images.flatten(1))))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.feed_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(batch, length, 3, width // HEAD_SIZE, HEAD_SIZE).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.feed_norm(x))))


class Decoder(nn.Module):
    def __init__(self, vocabulary, layers, width):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def digits(path, dtype):
    """Images, digits and ids of the training rows and of every fifth, which is held out."""
    rows = torch.tensor([[float(number) for number in line.split(",")] for line in pathlib.Path(path).read_text().splitlines()])
    held_out = torch.arange(len(rows)) % 5 == 4
    for part in (~held_out, held_out):
        yield TensorDataset(rows[part, :64].view(-1, 1, 8, 8).div(8).sub(1).to(dtype), rows[part, 64].long(), part.nonzero().flatten())


def pieces(path):
    """Characters, next characters and ids of the training pieces and of every tenth, which is held out; and the vocabulary's size."""
    raw = pathlib.Path(path).read_bytes()
    rank = {code: index for index, code in enumerate(sorted(set(raw)))}
    characters = torch.tensor([rank[code] for code in raw])
    count = (len(raw) - 1) // CONTEXT
    tokens, after = (characters[start : start + count * CONTEXT].view(count, CONTEXT) for start in (0, 1))
    held_out = torch.arange(count) % 10 == 9
    return [TensorDataset(tokens[part], after[part], part.nonzero().flatten()) for part in (~held_out, held_out)], len(rank)


def checksum(ids):
    """FNV-1a over the ids as little-endian 64-bit integers."""
    value = 14695981039346656037
    for byte in struct.pack(f"<{len(ids)}q", *ids):
        value = ((value ^ byte) * 1099511628211) % 2**64
    return f"{value:016x}"


def parse(flags):
    parser = argparse.ArgumentParser()
    for name, default in (("mixed-precision", "no"), ("dtype", "float32"), ("optimizer", "adamw"), ("data", None)):
        parser.add_argument(f"--{name}", default=default)
    for name, default in (("batch-size", 0), ("gradient-accumulation-steps", 1), ("epochs", 1), ("max-steps", 0), ("width", 64),
                          ("layers", 2), ("seed", 42)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("lr", 1e-3), ("clip-norm", 0.0)):
        parser.add_argument(f"--{name}", type=float, default=default)
    return parser.parse_args(flags)


def train(trainer, flags):
    args = parse(flags)
    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=False)
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed),
    )
    dtype = getattr(torch, args.dtype)
    set_seed(args.seed)
    if trainer == "image_classifier":
        model = Net()
        training, held_out = digits(args.data, dtype)
        warmup = 1 / 2
    else:
        (training, held_out), vocabulary = pieces(args.data)
        model = Decoder(vocabulary, args.layers, args.width)
        warmup = 1 / 20
    model.to(dtype)

    if args.optimizer == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    micro = args.gradient_accumulation_steps
    per_epoch = len(training) // (args.batch_size * accelerator.num_processes * micro)
    warmup_steps, planned = int(per_epoch * warmup), args.epochs * per_epoch

    def factor(step):
        if step < warmup_steps:
            return step / max(1, warmup_steps)
        return max(0.0, 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / max(1, planned - warmup_steps))))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)  # stepped by hand, once an optimizer step
    model, optimizer, loader, held_out_loader = accelerator.prepare(
        model,
        optimizer,
        DataLoader(training, args.batch_size, shuffle=True, drop_last=True),
        DataLoader(held_out, args.batch_size),
    )

    losses, norms, ids, ends = [], [], [], []
    while len(norms) < args.max_steps:
        for data, target, numbers in loader:
            with accelerator.accumulate(model):
                scores = model(data)
                loss = F.cross_entropy(scores.transpose(1, 2) if scores.dim() == 3 else scores, target)
                accelerator.backward(loss)
                losses.append(loss.detach().double())
                ids.append(numbers.tolist())
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), args.clip_norm or math.inf).item())
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                    ends.append(time.perf_counter())
            if len(norms) == args.max_steps:
                break

    losses = accelerator.reduce(torch.stack(losses).view(-1, micro).mean(1), reduction="mean").tolist()
    by_rank = gather_object([ids])
    in_order = [number for batches in zip(*by_rank, strict=True) for batch in batches for number in batch]

    model.eval()
    held_out_loss, right, samples = 0.0, 0, 0
    with torch.no_grad():
        for data, target, _ in held_out_loader:
            scores = model(data)
            if trainer == "image_classifier":
                scores, target = accelerator.gather_for_metrics((scores, target))
                rows = F.cross_entropy(scores, target, reduction="none")
                right += (scores.argmax(1) == target).sum().item()
            else:
                rows = F.cross_entropy(scores.transpose(1, 2), target, reduction="none").mean(1)
                rows = accelerator.gather_for_metrics(rows)
            held_out_loss += rows.double().sum().item()
            samples += len(rows)
    evaluation = {"loss": held_out_loss / samples, "samples": samples}
    if trainer == "image_classifier":
        evaluation["accuracy"] = right / samples
    weights = [parameter.detach().double() for parameter in accelerator.unwrap_model(model).parameters()]
    return {
        "losses": losses,
        "grad_norms": norms,
        "steps_per_second": (len(ends) - 1) / (ends[-1] - ends[0]) if len(ends) > 1 else 0.0,
        "eval": evaluation,
        "sample_ids_checksum": checksum(in_order),
        "parameter_count": sum(weight.numel() for weight in weights),
        "parameter_norm": math.sqrt(sum(weight.square().sum().item() for weight in weights)),
    }


def main(jobs, results):
    done = [train(job["trainer"], job["flags"]) for job in json.loads(pathlib.Path(jobs).read_text())]
    if Accelerator(cpu=True).is_main_process:
        pathlib.Path(results).write_text(json.dumps(done))
    torch.distributed.barrier()
    # Everything is written. In Python's own way out, LibTorch's threads now and then abort the process.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
