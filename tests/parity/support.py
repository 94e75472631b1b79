"""What the tests that run whole programs share: where the programs are, how ranks are started, and data of a chosen size."""

import os
import pathlib
import random
import shlex
import socket
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.environ.get("ACCELERATE_TEST_BIN", ROOT / "build" / "bin"))
MPIEXEC = shlex.split(os.environ.get("ACCELERATE_TEST_MPIEXEC", "mpiexec --allow-run-as-root --oversubscribe"))
LAUNCHER = str(BIN / "accelerate-cpp")
TRAINERS = ("image_classifier", "language_model")
LIMIT_S = 300  # of one program, long past what any needs

CONTEXT = 128  # characters of one piece of text, as language_model cuts it


def environment(**variables):
    """This process' environment without what an outer launcher may have left, one thread per process, and `variables`."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    clean = {k: v for k, v in os.environ.items() if k not in launcher and not k.startswith(("OMPI_", "PMIX_", "SLURM_"))}
    clean.update(OMP_NUM_THREADS="1", ACCELERATE_TIMEOUT="120")
    clean.update({name: str(value) for name, value in variables.items()})
    return clean


def trainer(name, *flags):
    """The command of a trainer on the CPU, without a progress bar."""
    return [str(BIN / name), "--cpu", "--quiet", *map(str, flags)]


def on_ranks(command, world, backend):
    """`command` started on `world` ranks: "gloo" by our launcher, "mpi" by mpirun, "none" as it is."""
    if backend == "gloo":
        return [LAUNCHER, "launch", "-n", str(world), *command]
    if backend == "mpi":
        return [*MPIEXEC, "-n", str(world), *command]
    return command


def run(command, limit_s=LIMIT_S, **variables):
    """Runs a program to its end, in the repository's root, where the trainers find their data. Its process group is killed when the time is up, which is an error."""
    process = subprocess.Popen(command, env=environment(**variables), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        out, err = process.communicate()
        raise AssertionError(f"{' '.join(command)} did not end within {limit_s} s and wrote:\n{out}\n{err}") from None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def free_port():
    """One that the kernel gives to nobody unasked, so that it is still free when a rank listens at it."""
    while True:
        with socket.socket() as listener:
            port = random.randrange(10000, 32768)
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def digits(folder, training):
    """A file of the first digits, so many that `training` of them are trained on. Every fifth row is held out."""
    rows = (ROOT / "examples/data/digits.csv").read_text().splitlines(keepends=True)
    count = next(n for n in range(len(rows) + 1) if n - n // 5 == training)
    path = pathlib.Path(folder) / f"digits_{training}.csv"
    path.write_text("".join(rows[:count]))
    return path


def text(folder, training):
    """A file of the beginning of the text, with `training` pieces that are trained on. Every tenth is held out."""
    whole = (ROOT / "examples/data/pentateuch.txt").read_bytes()
    count = next(n for n in range(len(whole) // CONTEXT) if n - n // 10 == training)
    path = pathlib.Path(folder) / f"text_{training}.txt"
    path.write_bytes(whole[:count * CONTEXT + 1])
    return path


def has_python_accelerate():
    probe = [sys.executable, "-c", "import accelerate"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0
