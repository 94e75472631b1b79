"""The bundled trainers, stopped and resumed: they must go on as if nothing had happened.

The same number of processes gives the same losses and parameters, bit for bit. Another number of processes at an equal global
batch trains on the same samples, and its losses differ by the order of additions. ACCELERATE_TEST_FULL=1 runs every strategy.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import support

FULL = os.environ.get("ACCELERATE_TEST_FULL", "0") not in ("", "0")
STEPS = 24
EVERY = 9  # in the middle of an epoch


def command(world, folder, *flags, trainer="image_classifier", batch=None, summary=None, steps=STEPS, dropout=0.1):
    sizes = ["--batch-size", batch or 32 // world, "--gradient-accumulation-steps", 1]
    where = ["--data", support.digits(folder, 12 * 32 + 6)]
    if trainer == "language_model":
        where = ["--data", support.text(folder, 20 * 32 + 5), "--layers", 1, "--width", 32, "--epochs", 3]
    out = ["--summary", summary] if summary else []
    all_flags = ["--max-steps", steps, "--dropout", dropout, *sizes, *where, *out, *flags]
    return support.on_ranks(support.trainer(trainer, *all_flags), world, "gloo" if world > 1 else "none")


def run(world, folder, *flags, **options):
    summary = pathlib.Path(folder) / "summary.json"
    done = support.run(command(world, folder, *flags, summary=summary, **options))
    assert done.returncode == 0, f"{flags} on {world} ended with {done.returncode}:\n{done.stderr}"
    return json.loads(summary.read_text())


def same_world(folder, world, strategy, trainer="image_classifier"):
    """Bit for bit what the uninterrupted run does, from a checkpoint in the middle of an epoch, with workers reading ahead."""
    flags = ["--strategy", strategy, "--workers", 2]
    kept = ["--checkpoint-dir", f"{folder}/kept", "--checkpoint-every", EVERY]
    whole = run(world, folder, *flags, *kept, trainer=trainer)
    assert whole["first_step"] == 1 and whole["steps"] == STEPS, whole
    first = f"{folder}/kept/checkpoints/checkpoint_0"
    resumed = run(world, folder, *flags, "--resume", first, trainer=trainer)
    assert resumed["first_step"] == EVERY + 1, resumed["first_step"]
    for what in ("losses", "grad_norms"):
        assert resumed[what] == whole[what][EVERY:], (what, strategy, world, resumed[what], whole[what][EVERY:])
    for what in ("eval", "parameter_checksum"):
        assert resumed[what] == whole[what], (what, strategy, world)
    print(f"{trainer}: {strategy} on {world} goes on bit for bit", flush=True)


def other_worlds(folder, pairs):
    """At an equal global batch, the same samples and the same losses up to rounding."""
    plain = ["--dtype", "float64"]
    whole = run(1, folder, *plain, dropout=0)
    for (saver, saved_with), (loader, loaded_with) in pairs:
        kept = f"{folder}/{saved_with}{saver}"
        if not os.path.isdir(kept):
            run(saver, folder, *plain, "--strategy", saved_with, "--checkpoint-dir", kept, "--checkpoint-every", EVERY,
                dropout=0)
        resumed = run(loader, folder, *plain, "--strategy", loaded_with, "--resume", f"{kept}/checkpoints/checkpoint_0",
                      dropout=0)
        assert resumed["first_step"] == EVERY + 1
        reference = whole["losses"][EVERY:]
        assert len(resumed["losses"]) == len(reference)
        worst = max(abs(a - b) / min(1, abs(b)) for a, b in zip(resumed["losses"], reference))
        assert worst < 1e-9, (saver, saved_with, loader, loaded_with, worst)
        print(f"{saved_with} on {saver} to {loaded_with} on {loader}: deviation {worst:.1e}", flush=True)


def stopped_by_a_signal(folder):
    """SIGTERM and SIGUSR1, to the trainer or to the launcher: the state is saved, the exit code is 75, and the next run goes on."""
    cases = [(1, signal.SIGTERM), (1, signal.SIGUSR1), (2, signal.SIGTERM), (2, signal.SIGUSR1)]
    for world, number in cases if FULL else cases[::3]:
        kept = f"{folder}/signal{int(number)}-{world}"
        flags = ["--checkpoint-dir", kept, "--epochs", 100000]
        process = subprocess.Popen(command(world, folder, *flags, steps=100000000), cwd=support.ROOT, env=support.environment(),
                                   stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        time.sleep(4)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 75, (world, number, process.returncode, err)
        assert "was saved" in err, err
        resumed = run(world, folder, "--checkpoint-dir", kept, "--resume", "latest", "--epochs", 100000)
        assert resumed["first_step"] > STEPS and resumed["steps"] == 0, resumed["first_step"]
    print("a signal saves and stops", flush=True)


def wrong_flags(folder):
    done = support.run(command(1, folder, "--checkpoint-dir", f"{folder}/empty", "--resume", "latest"))
    assert done.returncode == 1 and "no complete checkpoint" in done.stderr, done.stderr
    done = support.run(command(1, folder, "--resume", "latest"))
    assert done.returncode == 1 and "--checkpoint-dir" in done.stderr, done.stderr


def merged_weights(folder, kept, world):
    """accelerate-cpp merge-weights makes files that Python's safetensors reads: the weights of a whole save_model."""
    out = f"{folder}/merged"
    source = f"{kept}/checkpoints/checkpoint_0"
    done = support.run([support.LAUNCHER, "merge-weights", source, out, "--max-shard-size", "60KB"])
    assert done.returncode == 0, done.stderr
    check = ("import json,sys,safetensors.torch as s;i=json.load(open(sys.argv[1]+'/model.safetensors.index.json'));"
             "n={k:tuple(v.shape) for f in set(i['weight_map'].values()) for k,v in s.load_file(sys.argv[1]+'/'+f).items()};"
             "assert set(n)==set(i['weight_map']),n;assert n['conv1.weight']==(16,1,3,3),n;print(len(n))")
    done = support.run([sys.executable, "-c", check, out])
    assert done.returncode == 0 and int(done.stdout) == 8, done.stderr
    print(f"merge-weights of {world} processes", flush=True)


def main():
    with tempfile.TemporaryDirectory() as folder:
        wrong_flags(folder)
        stopped_by_a_signal(folder)
        cases = [(1, "single"), (2, "ddp"), (2, "fsdp")]
        if FULL:
            cases += [(2, "zero1"), (2, "zero2"), (2, "zero3"), (3, "fsdp"), (4, "ddp")]
        for world, strategy in cases:
            with tempfile.TemporaryDirectory(dir=folder) as inner:
                same_world(inner, world, strategy)
        if FULL:
            for world, strategy in cases:
                with tempfile.TemporaryDirectory(dir=folder) as inner:
                    same_world(inner, world, strategy, "language_model")
        pairs = [((2, "fsdp"), (1, "single")), ((2, "fsdp"), (4, "zero2"))]
        if FULL:
            shapes = [(1, "single"), (2, "ddp"), (4, "fsdp"), (2, "zero1"), (4, "zero2"), (2, "zero3")]
            pairs = [(a, b) for a in shapes for b in shapes]
        other_worlds(folder, pairs)
        if support.has_python_accelerate():
            merged_weights(folder, f"{folder}/fsdp2", 2)


if __name__ == "__main__":
    main()
