"""Runs random programs (fuzz_main.cpp) under random strategies, and compares each with LibTorch alone.

    python fuzz.py PROGRAM LAUNCHER [--count 60] [--first 1] [--seeds FILE] [--docs FOLDER] [--no-shrink]

Every seed has to come out the same, or as an error of the library that the pages name (REFUSALS), on every rank; never as a
wrong number, a crash or a hang. Prints a command for each seed that fails, made as small as taking features away can make it.
ACCELERATE_TEST_FULL=1 runs 1,000 programs. The seeds of FILE, which failed once, are always run.
"""

import argparse
import collections
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

BATCH = 20
# What a program may be refused for: part of the message -> (page, part of the sentence there that says so).
REFUSALS = {
    "safetensors files do not have": ("checkpoints.md", "cannot save parameters of complex dtypes"),
    "a second time in one backward": ("guide.md", "gets two gradients in one backward, a `StateError`"),
    "had found that no output of the forward depends on it": ("guide.md", "hides parameters from it"),
    "The ranks went different ways": ("interception.md", "all raise the same `ShardingError`"),
}
MOST_REFUSED = 0.05
FEW = 3  # so many refusals are no rate yet


def ranks_of(seed):
    return (2, 1, 2, 3)[seed % 4]


def run(arguments, seeds, without=(), extra=()):
    """Runs seeds of one number of ranks in one launch. Gives {seed: (verdict, text)} of those that ran."""
    ranks = ranks_of(seeds[0])
    command = [
        arguments.launcher, "launch", "-n", str(ranks), arguments.program, "--seeds", ",".join(map(str, seeds))]
    if without := list(arguments.without) + list(without):
        command += ["--without", ",".join(without)]
    command += list(extra)
    environment = dict(os.environ, OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="1", ACCELERATE_BACKEND="gloo",
                       ACCELERATE_TIMEOUT="15", ACCELERATE_HEARTBEAT_TIMEOUT="8")
    limit = (60 + 3 * len(seeds)) * arguments.patience
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment,
                                   start_new_session=True)
        try:
            process.wait(limit)
            ended = f"ended with {process.returncode}"
        except subprocess.TimeoutExpired:
            ended = f"did not end within {limit:.0f} s"
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        text = output.read()
    results, begun, features = {}, None, []
    for line in text.splitlines():
        if found := re.match(r"(begin|ok|refused|failed) (\d+) ?(.*)", line):
            verdict, seed, rest = found.group(1), int(found.group(2)), found.group(3)
            if verdict == "begin":
                begun = seed
            elif results.get(seed, ("ok",))[0] != "failed":
                results[seed] = (verdict, rest)
        elif line.startswith("features "):
            features = line.split()[1].split(",") if " " in line else []
    if begun is not None and begun not in results:
        tail = "\n".join(text.splitlines()[-30:])
        results[begun] = ("failed", f"the launch {ended} in the middle:\n{tail}")
    elif begun is None:
        results[seeds[0]] = ("failed", f"the launch {ended} before the first program:\n{text[-3000:]}")
    return results, features


def run_all(arguments, seeds):
    """All seeds of one number of ranks, in as many launches as it takes."""
    results, left = {}, list(seeds)
    while left:
        some, _ = run(arguments, left[:BATCH])
        results.update(some)
        for seed, (verdict, text) in some.items():
            if verdict != "ok":  # so that it is known though the run be cut off
                print(f"{verdict} {seed} {text[:200]}", file=sys.stderr, flush=True)
        left = [seed for seed in left if seed not in results]
    return results


def kind_of(text):
    for part in REFUSALS:
        if part in text:
            return part
    return None


def same_failure(one, other):
    """Of a kind: a wrong number stays one, a crash stays a crash."""
    word = lambda text: re.sub(r"[\d.e+-]+", "", text)[:60]
    return one[0] == other[0] and word(one[1]) == word(other[1])


def shrink(arguments, seed, result):
    """Takes features away as long as the seed fails in the same way."""
    _, features = run(arguments, [seed], extra=["--list"])
    without, tried = [], 0
    steps = [name for name in features if re.fullmatch(r"step\d+", name)]
    for name in steps + [name for name in features if name not in steps]:
        if any(name.startswith(gone + ".") for gone in without):
            continue
        tried += 1
        if tried > 40:
            break
        again, _ = run(arguments, [seed], without + [name])
        if seed in again and same_failure(again[seed], result):
            without.append(name)
    again, left = run(arguments, [seed], without, ["--list"])
    return without, left, again.get(seed, result)


def command_of(arguments, seed, without):
    without = list(arguments.without) + list(without)
    end = f" --without {','.join(without)}" if without else ""
    return (f"OMP_NUM_THREADS=1 ACCELERATE_USE_CPU=1 ACCELERATE_TIMEOUT=15 {arguments.launcher} launch -n {ranks_of(seed)} "
            f"{arguments.program} --seeds {seed}{end}")


def check_pages(docs):
    """Each kind of refusal is in the page that REFUSALS names."""
    missing = []
    for part, (page, sentence) in REFUSALS.items():
        text = " ".join((docs / page).read_text().split())
        if sentence not in text:
            missing.append(f"{page} does not say \"{sentence}\", for programs refused with \"{part}\"")
    return missing


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("launcher")
    parser.add_argument("--count", type=int)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--seeds", type=Path, help="a file of seeds, one a line, that failed once")
    parser.add_argument("--docs", type=Path)
    parser.add_argument("--without", type=lambda text: text.split(","), default=[], help="features to leave out of all")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--patience", type=float, default=1.0, help="factor on time limits")
    arguments = parser.parse_args()
    full = os.environ.get("ACCELERATE_TEST_FULL", "0") not in ("", "0")
    count = arguments.count if arguments.count is not None else 1000 if full else 60
    kept = []
    if arguments.seeds:
        kept = [int(line.split("#")[0]) for line in arguments.seeds.read_text().splitlines() if line.split("#")[0].strip()]
    seeds = sorted(set(kept) | set(range(arguments.first, arguments.first + count)))

    began = time.monotonic()
    problems = check_pages(arguments.docs) if arguments.docs else []
    batches = []
    for ranks in (3, 2, 1):
        mine = [seed for seed in seeds if ranks_of(seed) == ranks]
        batches += [mine[i:i + BATCH] for i in range(0, len(mine), BATCH)]
    results = {}
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for some in pool.map(lambda batch: run_all(arguments, batch), batches):
            results.update(some)

    refused = collections.Counter()
    for seed, (verdict, text) in sorted(results.items()):
        if verdict == "refused":
            kind = kind_of(text)
            if kind is None:
                problems.append(f"seed {seed} is refused for what no page names: {text}\n  {command_of(arguments, seed, [])}")
            refused[kind] += 1
        elif verdict == "failed":
            without, left = [], []
            result = (verdict, text)
            if not arguments.no_shrink:
                without, left, result = shrink(arguments, seed, result)
            problems.append(f"seed {seed}: {result[1]}\n  with {','.join(left)}\n  {command_of(arguments, seed, without)}")
    for problem in problems:
        print(problem, "\n")
    print(f"{len(results)} programs in {time.monotonic() - began:.0f} s: "
          f"{sum(verdict == 'ok' for verdict, _ in results.values())} as LibTorch alone, {sum(refused.values())} refused, "
          f"{sum(verdict == 'failed' for verdict, _ in results.values())} failed")
    for kind, number in refused.most_common():
        print(f"  {number} refused: {kind or 'for what no page names'}")
    if sum(refused.values()) > max(FEW, MOST_REFUSED * len(results)):
        problems.append("too many")
        print(f"More than {MOST_REFUSED:.0%} are refused.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
