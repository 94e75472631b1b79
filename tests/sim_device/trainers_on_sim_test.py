"""The bundled trainers on the simulated device, against the same on the CPU.

    trainers_on_sim_test.py

Every strategy runs on one, two and three processes. image_classifier has to give the CPU's bits: losses, norms of gradients, parameters.
language_model's attention is another kernel on a GPU, so in float64 it may deviate by 1e-9. Then mixed precision, which the CPU has no
fp16 of, NCCL's absence, batches prepared by threads, and resuming. With ACCELERATE_TEST_FULL=1 both trainers meet every strategy on
every number of processes, with and without NCCL.
"""

import itertools
import json
import os
import pathlib
import sys
import tempfile
import time

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "parity"))

import support

FULL = os.environ.get("ACCELERATE_TEST_FULL", "0") not in ("", "0")
STRATEGIES = ("ddp", "fsdp", "zero1", "zero2", "zero3")
STEPS = 8
BATCH = {"image_classifier": 24, "language_model": 12}
FLAGS = {"image_classifier": ["--optimizer", "adamw", "--lr", 3e-3, "--clip-norm", 1.5],
         "language_model": ["--optimizer", "adamw", "--lr", 3e-3, "--clip-norm", 0.6, "--layers", 1, "--width", 32]}
BOUND = 1e-9


class Trainers:
    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.data = {"image_classifier": support.digits(folder, 24 * STEPS), "language_model": support.text(folder, 12 * STEPS)}
        self.runs = self.failures = 0

    def run(self, trainer, world, extra, on_sim, **variables):
        summary = self.folder / "summary.json"
        summary.unlink(missing_ok=True)
        flags = [*FLAGS[trainer], "--batch-size", BATCH[trainer] // world, "--epochs", 3, "--max-steps", STEPS,
                 "--data", self.data[trainer], "--summary", summary, *extra]
        pairs = dict(zip(flags[::2], flags[1::2], strict=True))  # of a flag given twice, the last counts
        command = support.trainer(trainer, *(text for pair in pairs.items() for text in pair))
        if on_sim:
            command = [command[0] + "_on_sim", *(word for word in command[1:] if word != "--cpu")]
        done = support.run(support.on_ranks(command, world, "gloo"), **variables)
        if done.returncode != 0:
            raise AssertionError(f"{' '.join(command)} on {world} processes ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return json.loads(summary.read_text())

    def check(self, what, act):
        """Runs a comparison, which returns what is wrong."""
        start = time.monotonic()
        try:
            wrong = act()
        except AssertionError as error:
            wrong = str(error)
        self.runs += 1
        self.failures += bool(wrong)
        print(f"{what:60} {time.monotonic() - start:5.1f} s  {'VIOLATION' if wrong else 'as it should be'}", flush=True)
        if wrong:
            print(f"    {wrong}", flush=True)


def difference(found, expected, exact):
    """What differs between two summaries, or nothing."""
    if exact:
        names = ("losses", "grad_norms", "parameter_checksum")
        return ", ".join(f"{name}: {found[name]} and not {expected[name]}" for name in names if found[name] != expected[name])
    pairs = [*zip(found["losses"], expected["losses"], strict=True), *zip(found["grad_norms"], expected["grad_norms"], strict=True),
             (found["parameter_norm"], expected["parameter_norm"])]
    worst = max(abs(a - b) if a == a else float("inf") for a, b in pairs)
    return "" if worst <= BOUND else f"losses, norms or parameters deviate by {worst:.1e}"


def as_on_the_cpu(trainers, trainer, strategy, world, extra=(), **variables):
    exact = trainer == "image_classifier"
    extra = ["--strategy", strategy, "--dtype", "float32" if exact else "float64", *extra]
    what = f"{trainer} {' '.join(map(str, extra))}, {world} processes {' '.join(f'{k}={v}' for k, v in variables.items())}"

    def act():
        expected = trainers.run(trainer, world, extra, on_sim=False)
        return difference(trainers.run(trainer, world, extra, on_sim=True, **variables), expected, exact)

    trainers.check(what, act)


def learns(trainers, trainer, strategy, world, precision):
    def act():
        losses = trainers.run(trainer, world, ["--strategy", strategy, "--mixed-precision", precision], on_sim=True)["losses"]
        return "" if losses[-1] < 0.95 * losses[0] else f"losses go from {losses[0]} to {losses[-1]}"

    trainers.check(f"{trainer} --strategy {strategy} --mixed-precision {precision}, {world} processes", act)


def resumes(trainers, trainer, strategy, world):
    def act():
        flags = ["--strategy", strategy, "--dtype", "float32"]
        whole = trainers.run(trainer, world, flags, on_sim=True)
        saving = [*flags, "--checkpoint-dir", trainers.folder / f"checkpoints {strategy}", "--checkpoint-every", STEPS // 2]
        trainers.run(trainer, world, saving, on_sim=True)
        # From the checkpoint in the middle, as if the run had ended there.
        middle = trainers.folder / f"checkpoints {strategy}" / "checkpoints" / "checkpoint_0"
        resumed = trainers.run(trainer, world, [*saving, "--resume", middle], on_sim=True)
        return "" if resumed["parameter_checksum"] == whole["parameter_checksum"] else "the resumed run ends with other parameters"

    trainers.check(f"{trainer} --strategy {strategy}, {world} processes, resumed", act)


def main():
    with tempfile.TemporaryDirectory() as folder:
        trainers = Trainers(folder)
        if FULL:
            for trainer, strategy, world, nccl in itertools.product(support.TRAINERS, STRATEGIES, (1, 2, 3), (1, 0)):
                as_on_the_cpu(trainers, trainer, strategy, world, SIM_NCCL=nccl)
            for trainer, strategy, world, precision in itertools.product(support.TRAINERS, STRATEGIES, (1, 2, 3), ("fp16", "bf16")):
                learns(trainers, trainer, strategy, world, precision)
            for strategy, world in itertools.product(STRATEGIES, (1, 2, 3)):
                resumes(trainers, "image_classifier", strategy, world)
        else:
            for index, strategy in enumerate(STRATEGIES):
                for world in (1, 2, 3):
                    as_on_the_cpu(trainers, support.TRAINERS[(index + world) % 2], strategy, world)
            as_on_the_cpu(trainers, "image_classifier", "fsdp", 2, SIM_NCCL=0)
            as_on_the_cpu(trainers, "image_classifier", "ddp", 2, ["--workers", 2, "--gradient-accumulation-steps", 2])
            learns(trainers, "image_classifier", "fsdp", 2, "fp16")
            learns(trainers, "language_model", "ddp", 2, "fp16")
            resumes(trainers, "image_classifier", "fsdp", 2)
        print(f"{trainers.runs} comparisons, {trainers.failures} violations")
        return 1 if trainers.failures else 0


if __name__ == "__main__":
    sys.exit(main())
