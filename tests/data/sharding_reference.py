"""Prints, as JSON, how Python Accelerate shards: every length, batch size, number of processes and flag."""

import json

import torch
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard, SeedableRandomSampler
from torch.utils.data import BatchSampler, IterableDataset

LENGTHS = range(26)
BATCH_SIZES = range(1, 6)
WORLDS = range(1, 5)
FLAGS = (False, True)


class Stream(IterableDataset):
    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter(range(self.size))


class OwnBatches:
    """A batch sampler without a batch size: batches of 1, 2, 3, 1, 2, 3, ... indices."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        first = 0
        for index in range(self.batches):
            yield list(range(first, first + 1 + index % 3))
            first += 1 + index % 3

    def __len__(self):
        return self.batches


def batch_shards():
    for n in LENGTHS:
        for batch in BATCH_SIZES:
            for world in WORLDS:
                for split in FLAGS:
                    if split and batch % world:
                        continue
                    for even in FLAGS:
                        for drop in FLAGS:
                            ranks = [
                                list(
                                    BatchSamplerShard(
                                        BatchSampler(range(n), batch, drop), world, rank, split_batches=split, even_batches=even
                                    )
                                )
                                for rank in range(world)
                            ]
                            yield [n, batch, world, split, even, drop, ranks]


def iterable_shards():
    for n in LENGTHS:
        for batch in BATCH_SIZES:
            for world in WORLDS:
                for split in FLAGS:
                    if split and batch % world:
                        continue
                    for drop in FLAGS:
                        ranks = [
                            list(IterableDatasetShard(Stream(n), batch, drop, world, rank, split)) for rank in range(world)
                        ]
                        yield [n, batch, world, split, drop, ranks]


def own_batches():
    for batches in range(14):
        for world in WORLDS:
            for even in FLAGS:
                ranks = [list(BatchSamplerShard(OwnBatches(batches), world, rank, even_batches=even)) for rank in range(world)]
                yield [batches, world, even, ranks]


def seedable():
    for size in (1, 2, 10, 1000):
        for seed in (0, 42, 2**40):
            sampler = SeedableRandomSampler(range(size), data_seed=seed)
            yield [size, seed, [list(sampler) for _ in range(3)]]
    sampler = SeedableRandomSampler(range(10), data_seed=7)
    sampler.set_epoch(5)
    yield [10, 12, [list(sampler)]]


torch.manual_seed(0)
print(
    json.dumps(
        {
            "map": list(batch_shards()),
            "iterable": list(iterable_shards()),
            "own_batches": list(own_batches()),
            "seedable": list(seedable()),
        }
    )
)
