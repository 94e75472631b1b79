"""The bundled trainers, run in different ways over the same samples, must do the same thing.

    trainers_test.py gloo     ranks started by accelerate-cpp launch, against the single process
    trainers_test.py mpi      ranks started by mpirun, against the single process
    trainers_test.py sharded  fsdp and zero1 to zero3 on one to four ranks, against the single process
    trainers_test.py python   one and two processes, against Python Accelerate

Each run takes 50 steps (sharded ones 30), past the end of an epoch. A deviation is |a - b| / min(1, |b|), the larger of the absolute and the
relative one; the largest over all steps is bounded: 1e-9 in float64, 1e-4 in float32, 2e-2 in bf16, and 1e-4 in bf16 against
one process that cuts its batches alike; norms of sharded gradients in bf16 5e-2. Losses, norms of the gradients before clipping, the held-out loss and the norm of the
final parameters are compared, and the samples of every step must be the same ones. A covering choice of cases runs unless
ACCELERATE_TEST_FULL=1 asks for all of them.
"""

import dataclasses
import itertools
import json
import os
import pathlib
import sys
import tempfile
import time

import support

FULL = os.environ.get("ACCELERATE_TEST_FULL", "0") not in ("", "0")
STEPS = 50
SKIPPED = 77  # what CTest takes for a skipped test
BOUNDS = {"float64": 1e-9, "float32": 1e-4, "bf16": 2e-2}

# Per trainer: samples of one step, flags of the model, and how many samples there are to train on. After the last full step of an
# epoch so many remain that smaller micro-batches could still be made of them: nobody may train on those.
GLOBAL_BATCH = {"image_classifier": 32, "language_model": 16}
MODEL = {"image_classifier": [], "language_model": ["--layers", 1, "--width", 32]}
SAMPLES = {"image_classifier": 1438, "language_model": 26 * 16 + 15}  # 44 and 26 steps an epoch
# Python Accelerate drops only the last incomplete batch of all ranks, not the incomplete step, so against it fewer remain.
SAMPLES_PYTHON = {"image_classifier": 12 * 32 + 6, "language_model": 26 * 16 + 2}
SHARDED = ("fsdp", "zero1", "zero2", "zero3")
EPOCHS = {"image_classifier": 5, "language_model": 2}
# The sharded suite divides its batch by up to four ranks, three too, and four micro-batches.
SHARDED_STEPS = 30
SHARDED_BATCH = {"image_classifier": 48, "language_model": 48}
SHARDED_EPOCHS = {"image_classifier": 5, "language_model": 4}

# The clipping bounds lie among the norms that these runs have, so that some steps are clipped and some are not.
RECIPES = {
    "image_classifier": {
        "adamw": ["--optimizer", "adamw", "--lr", 1e-3],  # gentle: bf16 at 3e-3 is chaotic, on any number of processes
        "adamw+clip": ["--optimizer", "adamw", "--lr", 3e-3, "--clip-norm", 1.5],
        "sgd": ["--optimizer", "sgd", "--lr", 0.05],
        "sgd+clip": ["--optimizer", "sgd", "--lr", 0.05, "--clip-norm", 1.5],
    },
    "language_model": {
        "adamw": ["--optimizer", "adamw", "--lr", 3e-3],
        "adamw+clip": ["--optimizer", "adamw", "--lr", 3e-3, "--clip-norm", 0.6],
        "sgd": ["--optimizer", "sgd", "--lr", 0.2],
        "sgd+clip": ["--optimizer", "sgd", "--lr", 0.2, "--clip-norm", 0.6],
    },
}


@dataclasses.dataclass(frozen=True)
class Case:
    trainer: str
    precision: str  # float64, float32 or bf16
    recipe: str
    world: int = 1
    accumulation: int = 1
    extra: tuple = ()
    strategy: str = "auto"

    @property
    def reference(self):
        """The same training by one process in one batch a step; in the same micro-batches where `exact_micro_batches`."""
        accumulation = self.world * self.accumulation if self.exact_micro_batches else 1
        return dataclasses.replace(self, world=1, accumulation=accumulation, extra=(), strategy="auto")

    @property
    def exact_micro_batches(self):
        # How a batch is cut changes what bf16 rounds, and steep recipes blow that up on one process as on many. Cut alike, two
        # processes do the same as two micro-batches: the one sum of two gradients is in float32, and does not depend on order.
        return self.precision == "bf16" and self.recipe != "adamw"

    @property
    def bound(self):
        return BOUNDS["float32" if self.exact_micro_batches else self.precision]

    @property
    def norm_bound(self):
        # Shards are gathered in bf16, so an embedding's gradient, a sum over every use of a row, is added up in bf16.
        return 5e-2 if self.precision == "bf16" and self.strategy != "auto" else self.bound

    def flags(self, data):
        precision = ["--mixed-precision", "bf16"] if self.precision == "bf16" else ["--dtype", self.precision]
        batch = GLOBAL_BATCH[self.trainer] // (self.world * self.accumulation)
        flags = [*MODEL[self.trainer], *precision, *RECIPES[self.trainer][self.recipe], "--batch-size", batch,
                 "--gradient-accumulation-steps", self.accumulation, "--max-steps", STEPS,
                 "--epochs", EPOCHS[self.trainer], "--data", data, *self.extra]
        if self.strategy != "auto":  # which Python's trainer, that has no such flag, is asked for
            flags += ["--strategy", self.strategy]
        pairs = dict(zip(flags[::2], flags[1::2], strict=True))  # of a flag given twice, the last counts
        return [text for pair in pairs.items() for text in map(str, pair)]

    def __str__(self):
        layout = f"{self.world} x {self.accumulation}"
        return f"{self.trainer:16} {self.precision:8} {self.recipe:10} {layout:6} {' '.join(map(str, self.extra)) or self.strategy:14}"


def deviation(ours, theirs):
    if len(ours) != len(theirs) or not ours:
        return float("inf")
    # A comparison with NaN is false: it must not hide behind max().
    each = [abs(a - b) / max(min(1.0, abs(b)), 1e-300) for a, b in zip(ours, theirs)]
    return max(each) if all(x == x for x in each) else float("nan")


class Table:
    """Prints a row for each comparison and remembers the violations."""

    def __init__(self):
        self.violations = []
        self.rows = 0
        print(f"{'trainer':16} {'dtype':8} {'recipe':10} {'n x k':6} {'':14} {'how':12} {'losses':>9} {'gradients':>9} {'held out':>9}"
              f" {'weights':>9}  {'bound':>6} {'s':>5}")

    def compare(self, case, how, summary, reference, seconds):
        bound = case.bound
        found = {
            "losses": deviation(summary["losses"], reference["losses"]),
            "gradient norms": deviation(summary["grad_norms"], reference["grad_norms"]),
            "held-out loss": deviation([summary["eval"]["loss"]], [reference["eval"]["loss"]]),
            "norm of the weights": deviation([summary["parameter_norm"]], [reference["parameter_norm"]]),
        }
        bounds = {"gradient norms": case.norm_bound}
        wrong = [f"{name} deviate by {value:.2e}" for name, value in found.items() if not value <= bounds.get(name, bound)]
        if case.precision == "float64" and summary["eval"].get("accuracy") != reference["eval"].get("accuracy"):
            wrong.append(f"the accuracy is {summary['eval'].get('accuracy')} and not {reference['eval'].get('accuracy')}")
        expected = {
            "steps": STEPS,
            "world_size": case.world,
            "eval samples": reference["eval"]["samples"],
            "sample_ids_checksum": reference["sample_ids_checksum"],
            "parameter_count": reference["parameter_count"],
        }
        for name, value in expected.items():
            got = summary["eval"]["samples"] if name == "eval samples" else summary[name]
            if got != value:
                wrong.append(f"{name} is {got} and not {value}")
        figures = " ".join(f"{value:9.1e}" for value in found.values())
        self.row(f"{case} {how:12} {figures}  {bound:6.0e} {seconds:5.1f}", wrong)

    def check(self, what, wrong):
        """A comparison of another kind: `wrong` says what is wrong, or is empty."""
        self.row(what, [wrong] if wrong else [])

    def row(self, line, wrong):
        self.rows += 1
        print(line + ("  VIOLATION" if wrong else ""), flush=True)
        for sentence in wrong:
            print(f"    {sentence}", flush=True)
        if wrong:
            self.violations.append(line.strip())

    def finish(self):
        print(f"{self.rows} comparisons, {len(self.violations)} violations", flush=True)
        for line in self.violations:
            print(f"VIOLATION: {line}")
        return 1 if self.violations else 0


class Trainers:
    """Runs cases and keeps the summaries of the single process."""

    def __init__(self, folder, samples):
        self.folder = pathlib.Path(folder)
        self.data = {"image_classifier": support.digits(folder, samples["image_classifier"]),
                     "language_model": support.text(folder, samples["language_model"])}
        self.singles = {}

    def run(self, case, backend):
        summary = self.folder / "summary.json"
        summary.unlink(missing_ok=True)
        flags = [*case.flags(self.data[case.trainer]), "--summary", summary]
        command = support.on_ranks(support.trainer(case.trainer, *flags), case.world, backend)
        start = time.monotonic()
        done = support.run(command)
        if done.returncode != 0:
            raise AssertionError(f"{' '.join(command)} ended with {done.returncode} and wrote:\n{done.stdout}\n{done.stderr}")
        return json.loads(summary.read_text()), time.monotonic() - start

    def single(self, case):
        case = case.reference
        if case not in self.singles:
            self.singles[case], _ = self.run(case, "none")
        return self.singles[case]


def covering_cases(backend):
    """Every trainer with every number of processes, accumulation, dtype and a recipe that shows a wrong gradient scale."""
    for trainer in support.TRAINERS:
        for world, accumulation, recipe in ((2, 1, "adamw"), (2, 2, "sgd+clip"), (4, 1, "sgd+clip"), (4, 2, "adamw+clip")):
            yield Case(trainer, "float64", recipe, world, accumulation)
        for world, accumulation, recipe in ((2, 2, "adamw"), (4, 1, "sgd+clip")):
            yield Case(trainer, "float32", recipe, world, accumulation)
        yield Case(trainer, "float64", "sgd", 1, 1, ("--strategy", "ddp"))
        if backend == "gloo":
            yield Case(trainer, "bf16", "adamw", 2)
            yield Case(trainer, "bf16", "sgd+clip", 2)
            yield Case(trainer, "float64", "sgd+clip", 1, 4)
            yield Case(trainer, "float32", "adamw", 1, 2)
            yield Case(trainer, "float64", "adamw", 2, 2, ("--workers", 2))


def all_cases(backend):
    layouts = [(1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (4, 4)]
    for trainer, precision in itertools.product(support.TRAINERS, ("float64", "float32")):
        for recipe, (world, accumulation) in itertools.product(RECIPES[trainer], layouts):
            yield Case(trainer, precision, recipe, world, accumulation)
        for recipe in RECIPES[trainer]:
            yield Case(trainer, precision, recipe, 1, 1, ("--strategy", "ddp"))
        for world, workers in itertools.product((1, 2, 4), (1, 3)):
            yield Case(trainer, precision, "adamw", world, 1, ("--workers", workers))
    for trainer in support.TRAINERS:
        yield Case(trainer, "bf16", "adamw", 2)
        yield Case(trainer, "bf16", "adamw", 4)
        yield Case(trainer, "bf16", "sgd+clip", 2)


def against_single(trainers, table, backend):
    for case in all_cases(backend) if FULL else covering_cases(backend):
        summary, seconds = trainers.run(case, "none" if backend == "gloo" and case.world == 1 else backend)
        table.compare(case, backend, summary, trainers.single(case), seconds)

    # The same run twice gives the same bytes.
    for trainer in support.TRAINERS:
        case = Case(trainer, "float32", "sgd+clip", 2, 2)
        first, again = (trainers.run(case, backend)[0]["parameter_checksum"] for _ in range(2))
        table.check(f"{case} {backend:12} run twice: parameters {first}", "" if first == again else f"the second time {again}")


def sharded_cases():
    layouts = [*itertools.product((1, 2, 3, 4), (1, 4))]
    if FULL:
        for trainer, strategy, (world, accumulation) in itertools.product(support.TRAINERS, SHARDED, layouts):
            for precision, recipe in (("float64", "adamw"), ("float64", "sgd+clip"), ("float32", "adamw"), ("bf16", "adamw")):
                yield Case(trainer, precision, recipe, world, accumulation, (), strategy)
        return
    # Every strategy on every number of processes, every precision and accumulation with every strategy, each pair once.
    precisions = (("float64", "sgd+clip"), ("bf16", "adamw"), ("float32", "adamw"), ("float64", "adamw+clip"))
    for index, strategy in enumerate(SHARDED):
        for world in (1, 2, 3, 4):
            trainer = support.TRAINERS[(index + world) % 2]
            precision, recipe = precisions[(index + world) % 4]
            yield Case(trainer, precision, recipe, world, (1, 4)[(index + world // 2) % 2], (), strategy)
    for trainer in support.TRAINERS:
        yield Case(trainer, "float64", "sgd+clip", 2, 4, (), "fsdp")
        yield Case(trainer, "bf16", "adamw", 2, 1, (), "fsdp")


def sharded(trainers, table):
    checksums = {}
    for case in sharded_cases():
        summary, seconds = trainers.run(case, "gloo" if case.world > 1 else "none")
        if summary["strategy"] != case.strategy:
            table.check(str(case), f"the strategy was {summary['strategy']}")
        table.compare(case, "single", summary, trainers.single(case), seconds)
        if case.precision == "bf16":
            table.compare(case, "single fp32", summary, trainers.single(dataclasses.replace(case, precision="float32")), seconds)
        checksums[case] = summary["parameter_checksum"]
    # fsdp and zero3 are one thing under two names.
    for case in [case for case in checksums if case.strategy == "fsdp"]:
        other = dataclasses.replace(case, strategy="zero3")
        if other not in checksums:
            checksums[other] = trainers.run(other, "gloo" if case.world > 1 else "none")[0]["parameter_checksum"]
        table.check(f"{case} is zero3 bit for bit", "" if checksums[case] == checksums[other] else "it is not")


def controls(trainers, table):
    """What the comparisons are worth: that they see a small change, and that the runs have what they are to show."""
    case = Case("image_classifier", "float64", "adamw")
    reference = trainers.single(case)
    changed, _ = trainers.run(dataclasses.replace(case, extra=("--lr", 1e-3 * (1 + 1e-6))), "none")
    found = deviation(changed["losses"], reference["losses"])
    table.check(f"{case} a learning rate 1e-6 higher is seen: losses {found:.1e}", "" if found > BOUNDS["float64"] else "unseen")
    reseeded, _ = trainers.run(dataclasses.replace(case, extra=("--seed", 43)), "none")
    table.check(f"{case} another seed takes other samples",
                "" if reseeded["sample_ids_checksum"] != reference["sample_ids_checksum"] else "it took the same samples")
    for trainer in support.TRAINERS:
        case = Case(trainer, "float64", "sgd+clip")
        summary = trainers.single(case)
        limit = RECIPES[trainer]["sgd+clip"][-1]
        clipped = sum(norm > limit for norm in summary["grad_norms"])
        table.check(f"{case} clips {clipped} steps of {STEPS}", "" if 0 < clipped < STEPS else "it was to clip some and leave some")
        first, last = summary["losses"][0], sum(summary["losses"][-5:]) / 5
        table.check(f"{case} learns: loss {first:.3f} to {last:.3f}", "" if last < 0.9 * first else "it does not learn")


def torchrun(trainers, table):
    """Python's own launcher starts our programs as well."""
    case = Case("image_classifier", "float64", "adamw", 2)
    summary = trainers.folder / "torchrun.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(support.free_port()),
               "--no-python", *support.trainer(case.trainer, *case.flags(trainers.data[case.trainer]), "--summary", summary)]
    start = time.monotonic()
    done = support.run(command)
    assert done.returncode == 0, f"torchrun ended with {done.returncode}:\n{done.stderr}"
    table.compare(case, "torchrun", json.loads(summary.read_text()), trainers.single(case), time.monotonic() - start)


def against_python(trainers, table):
    cases = []
    for trainer in support.TRAINERS:
        chosen = (("float64", "adamw", 1, 1), ("float64", "sgd+clip", 1, 2), ("float64", "adamw+clip", 2, 1), ("float64", "sgd+clip", 2, 2),
                  ("float32", "sgd+clip", 1, 1), ("float32", "adamw", 2, 1), ("bf16", "adamw", 1, 1), ("bf16", "adamw", 2, 1))
        if FULL:
            chosen = [*itertools.product(("float64", "float32"), RECIPES[trainer], (1, 2, 4), (1, 2)), *chosen[-2:]]
        cases += [Case(trainer, *case) for case in chosen]

    # One job of Python Accelerate for each number of processes: it takes its time to start.
    for world in sorted({case.world for case in cases}):
        ours_and_theirs = [case for case in cases if case.world == world]
        jobs = [{"trainer": case.trainer, "flags": case.flags(trainers.data[case.trainer])} for case in ours_and_theirs]
        (trainers.folder / "jobs.json").write_text(json.dumps(jobs))
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world), "--master-port",
                   str(support.free_port()), str(pathlib.Path(__file__).with_name("python_trainer.py")),
                   str(trainers.folder / "jobs.json"), str(trainers.folder / "results.json")]
        done = support.run(command, limit_s=600)
        assert done.returncode == 0, f"Python Accelerate ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        for case, theirs in zip(ours_and_theirs, json.loads((trainers.folder / "results.json").read_text()), strict=True):
            ours, seconds = trainers.run(case, "gloo" if world > 1 else "none")
            table.compare(case, "python", ours, theirs, seconds)


def main(suite):
    global STEPS, GLOBAL_BATCH, EPOCHS
    if suite == "sharded":
        STEPS, GLOBAL_BATCH, EPOCHS = SHARDED_STEPS, SHARDED_BATCH, SHARDED_EPOCHS
    if suite == "python" and not support.has_python_accelerate():
        print(f"SKIPPED: {sys.executable} has no accelerate to compare with. pip install accelerate")
        return SKIPPED
    table = Table()
    with tempfile.TemporaryDirectory() as folder:
        trainers = Trainers(folder, SAMPLES_PYTHON if suite == "python" else SAMPLES)
        if suite == "python":
            against_python(trainers, table)
        elif suite == "sharded":
            sharded(trainers, table)
        else:
            against_single(trainers, table, suite)
        if suite == "gloo":
            controls(trainers, table)
            torchrun(trainers, table)
    return table.finish()


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in ("gloo", "mpi", "sharded", "python"):
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
