"""What puts work in order is left out of the library, one place after another, and somebody has to notice.

    orderings_test.py BIN LIBRARY

Programs run on the simulated device, which writes down from which places of LIBRARY (libaccelerate_on_sim.so) a stream was told to wait,
the host waited, or an allocator was told of another stream. Then each place in turn is left out in the programs that met it. One of them
has to end with an error: a race, or results that are not the CPU's. Some of the places are left out, unless ACCELERATE_TEST_FULL=1 asks for
all of them. BIN is the folder of the test programs.
"""

import collections
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

FULL = os.environ.get("ACCELERATE_TEST_FULL", "0") not in ("", "0")
CHOSEN = 4
LIMIT_S = 120

# Name, processes, whether there is an NCCL, test program, its cases.
PROGRAMS = (
    ("loaders", 1, 1, "sim_facade_test", "OnSim.BatchesComeAhead:OnSim.ALoopRuns*"),
    ("activations", 1, 1, "sim_facade_test", "OnSim.Activations*"),
    ("shards on the host", 1, 1, "sim_facade_test", "OnSim.Shards*"),
    ("optimizer state", 1, 1, "sim_facade_test", "OnSim.OptimizerState*"),
    ("device maps", 1, 1, "sim_facade_test", "OnSim.Models*:OnSim.ALarge*"),
    ("checkpoints", 1, 1, "sim_facade_test", "OnSim.Saves*"),
    ("ddp, two processes", 2, 1, "accelerator_cuda_test_on_sim", "Cuda.Trains*:Cuda.Fp16*"),
    ("shards, two processes", 2, 1, "sim_distributed_test", "*/attention:*/tied"),
    ("without NCCL", 2, 0, "sim_distributed_test", "OnSim*:*/attention"),
    ("ddp without NCCL", 2, 0, "accelerator_cuda_test_on_sim", "Cuda.Trains*"),
)


def run(folder, program, **variables):
    """The exit code of a program, None when it did not end, and what it wrote."""
    _, processes, nccl, test, cases = program
    command = [str(folder / test), f"--gtest_filter={cases}"]
    if processes > 1:
        command = [str(folder / "accelerate-cpp"), "launch", "-n", str(processes), *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "0", "ACCELERATE_TIMEOUT": "30", "SIM_NCCL": str(nccl),
                   "ACCELERATE_TEST_NO_DELAYS": "1", **variables}
    environment.pop("ACCELERATE_TEST_FULL", None)
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               text=True, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        return None, output
    return process.returncode, output


def source_lines(library, addresses):
    """Of each address, the file and line of the library's code that it belongs to; the address itself where nobody knows."""
    found = {address: address for address in addresses}
    tool = shutil.which("addr2line")
    if tool is None or not addresses:
        return found
    # Once for all, since it reads the whole library first. "0xADDRESS", then pairs of a function and "FILE:LINE", the innermost inlined one first.
    command = [tool, "-aife", str(library), *sorted(addresses)]
    address = None
    for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
        if re.fullmatch("0x[0-9a-f]+", line):
            address = line.removeprefix("0x").lstrip("0")
        place = re.search(r"/(?:src|include/accelerate)/([a-z_/]+[.][ch]pp:[0-9]+)", line)
        if place and found.get(address) == address:
            found[address] = place.group(1)
    return found


def reason(code, output):
    """How a program noticed, in some words."""
    race = re.search(r"Race on [^(:]*", output)
    if race:
        return race.group(0).strip()
    if code is None:
        return "it did not end"
    return "other results" if "Failure" in output else f"exit code {code}"


def main(folder, library):
    asked = []  # program, kind, address
    with tempfile.TemporaryDirectory() as scratch:
        for program in PROGRAMS:
            places = pathlib.Path(scratch) / "places"
            places.unlink(missing_ok=True)
            code, output = run(folder, program, SIM_ORDERINGS=str(places))
            if code != 0:
                print(f"{program[0]} fails though nothing was left out:\n{output}")
                return 1
            lines = places.read_text().splitlines() if places.exists() else []
            asked += [(program, *line.split()[:2]) for line in lines]
    names = source_lines(library, {address for _, _, address in asked})
    met = collections.defaultdict(lambda: collections.defaultdict(set))  # by kind and line: addresses and programs
    for program, kind, address in asked:
        met[kind, names[address]]["addresses"].add(address)
        met[kind, names[address]]["programs"].add(program)
    everything = sorted(met)
    step = 1 if FULL else max(1, len(everything) // CHOSEN)
    # Which ones: ACCELERATE_TEST_SEED, 0 unless it is set.
    first = 0 if FULL else int(os.environ.get("ACCELERATE_TEST_SEED", "0")) % step
    unnoticed = []
    print(f"{len(everything)} places put work in order", flush=True)
    for kind, name in everything[first::step]:
        place = met[kind, name]
        noticed = None
        for program in (p for p in PROGRAMS if p in place["programs"]):
            code, output = run(folder, program, SIM_LEAVE_OUT=",".join(sorted(place["addresses"])))
            if code != 0:
                noticed = f"{program[0]}: {reason(code, output)}"
                break
        print(f"| {kind} | {name} | {noticed or 'NOT NOTICED, by ' + ', '.join(p[0] for p in PROGRAMS if p in place['programs'])} |", flush=True)
        if noticed is None:
            unnoticed.append(name)
    print(f"{len(everything[first::step])} left out, {len(unnoticed)} not noticed")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])))
