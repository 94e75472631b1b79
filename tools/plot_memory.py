#!/usr/bin/env python3
"""Draws memory files, as the trainers' --memory and accelerate::tracking::MemoryTracker write them, side by side.

    tools/plot_memory.py ddp.json fsdp.json --output memory.svg
    sentence_encoder --model FOLDER --text "..." --device-map disk --memory disk.json

Each file becomes a column. Areas are the bytes of tensors by kind; the line above them is their exact peak between two
samples. On a GPU the device allocator's bytes are drawn instead of areas. The dotted line is the resident set (only with
--resident: it includes LibTorch itself). Regions are bands at the bottom. Where weights came and went there is a row for
each module: light while its weights are fetched or wait, dark from their first use on. docs/memory.md describes the format.
"""

import argparse
import json
import sys
from pathlib import Path

KINDS = {
    "parameters": ("parameters", "#4477aa"),
    "gradients": ("gradients", "#ccbb44"),
    "optimizer_state": ("optimizer state", "#aa3377"),
    "other": ("activations and others", "#66ccee"),
}
FETCHED, IN_USE = "#a9c4e0", "#4477aa"
REGION_COLOURS = ["#bbbbbb", "#888888", "#dddddd", "#666666"]


def fail(message):
    sys.exit(f"plot_memory: {message}")


def read(path):
    try:
        memory = json.loads(path.read_text())
    except OSError as error:
        fail(f"{path} cannot be read: {error.strerror}")
    except ValueError as error:
        fail(f"{path} is not JSON: {error}")
    if not isinstance(memory, dict) or memory.get("format") != "accelerate-cpp memory":
        fail(f"{path} is no memory file. One is written by a trainer's --memory or by MemoryTracker::write.")
    if memory.get("version") != 1:
        fail(f"{path} has version {memory.get('version')} of the format, and this program reads version 1.")
    return memory


def choose(memory, rank, path):
    for process in memory["processes"]:
        if process["rank"] == rank:
            return process
    ranks = [process["rank"] for process in memory["processes"]]
    fail(f"{path} has no rank {rank}; it has {ranks}.")


def scale(largest):
    for name, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if largest >= size:
            return name, size
    return "bytes", 1


def on_device(process):
    return any(value is not None for value in process["samples"]["device_allocated"])


def within(process, start, end):
    """Indexes of the samples between two times, in seconds."""
    times = process["samples"]["time_ns"]
    return [i for i, time in enumerate(times) if start <= time / 1e9 <= end]


def largest(process, resident, chosen):
    samples = process["samples"]
    columns = ["device_peak"] if on_device(process) else ["tensors_peak"]
    columns += ["rss"] if resident else []
    return max((samples[name][i] or 0 for name in columns for i in chosen), default=0)


def draw(axes, bands, process, chosen, start, end, unit, resident):
    samples = process["samples"]
    seconds = [samples["time_ns"][i] / 1e9 for i in chosen]

    def values(name):
        return [(samples[name][i] or 0) / unit for i in chosen]

    if on_device(process):
        axes.fill_between(seconds, values("device_allocated"), step="post", color=KINDS["other"][1], label="allocated")
        axes.step(seconds, values("device_reserved"), where="post", color="black", lw=0.8, ls="--", label="reserved")
        axes.step(seconds, values("device_peak"), where="post", color="black", lw=0.8, label="peak")
    else:
        by_kind = samples["tensors_by_kind"]
        stacks = [[by_kind[kind][i] / unit for i in chosen] for kind in KINDS]
        # As steps, so that no memory is drawn that was not there.
        axes.stackplot(seconds, stacks, step="post", labels=[name for name, _ in KINDS.values()],
                       colors=[colour for _, colour in KINDS.values()])
        axes.step(seconds, values("tensors_peak"), where="post", color="black", lw=0.8, label="peak")
    if resident:
        axes.step(seconds, values("rss"), where="post", color="black", lw=0.8, ls=":", label="resident set")
    names = sorted({region["path"] for region in process["regions"]})
    for row, name in enumerate(names):
        spans = [(region["begin_ns"] / 1e9, (region["end_ns"] - region["begin_ns"]) / 1e9)
                 for region in process["regions"] if region["path"] == name]
        spans = [(begin, length) for begin, length in spans if begin + length >= start and begin <= end]
        bands.broken_barh(spans, (row, 0.8), color=REGION_COLOURS[row % len(REGION_COLOURS)])
    bands.set_yticks([row + 0.4 for row in range(len(names))], names)
    bands.set_ylim(max(len(names), 1), 0)
    bands.set_xlim(start, end)


def visits_within(process, start, end):
    visits = [visit for visit in process.get("visits", []) if visit["end_ns"] / 1e9 >= start and visit["begin_ns"] / 1e9 <= end]
    return sorted(visits, key=lambda visit: visit["begin_ns"])


def draw_visits(axes, visits):
    rows = {}
    for visit in visits:
        rows.setdefault((visit["name"], visit["bytes"], visit["from"], visit["place"]), []).append(visit)
    for row, spans in enumerate(rows.values()):
        begins, uses, ends = ([visit[key] / 1e9 for visit in spans] for key in ("begin_ns", "used_ns", "end_ns"))
        axes.broken_barh([(begin, use - begin) for begin, use in zip(begins, uses)], (row - 0.4, 0.8), color=FETCHED)
        axes.broken_barh([(use, end - use) for use, end in zip(uses, ends)], (row - 0.4, 0.8), color=IN_USE)
    labels = []
    for name, size, *_ in rows:
        unit, per = scale(size)
        labels.append(f"{name} ({size / per:.1f} {unit})")
    axes.set_yticks(range(len(rows)), labels, fontsize=5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    ways = sorted({f"{source} to {place}" for _, _, source, place in rows})
    axes.set_title(f"weights, {' and '.join(ways)}: fetched (light), in use (dark)", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a memory file; each becomes a column")
    parser.add_argument("--output", "-o", type=Path, default=Path("memory.svg"),
                        help="the picture: .svg, .png or .pdf (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=0, help="the process that is drawn (default: %(default)s)")
    parser.add_argument("--label", action="append", default=[], help="the name of a column instead of the file's; repeat")
    parser.add_argument("--from", type=float, default=0, dest="start", metavar="S", help="seconds after the start")
    parser.add_argument("--to", type=float, default=float("inf"), dest="end", metavar="S", help="seconds after the start")
    parser.add_argument("--resident", action="store_true", help="draw the resident set too")
    options = parser.parse_args(arguments)

    processes = [choose(read(path), options.rank, path) for path in options.files]
    for path, process in zip(options.files, processes):
        if process["sampling"]["failure"]:
            print(f"plot_memory: {path} ends early: {process['sampling']['failure']}", file=sys.stderr)
        if not on_device(process) and all(value is None for value in process["samples"]["tensors"]):
            fail(f"{path} has no bytes of tensors: its program did not call tracking::count_cpu_tensors().")
    spans = [(options.start, min(options.end, process["clock"]["length_ns"] / 1e9)) for process in processes]
    chosen = [within(process, *span) for process, span in zip(processes, spans)]
    visits = [visits_within(process, *span) for process, span in zip(processes, spans)]
    for path, process, indexes, span in zip(options.files, processes, chosen, spans):
        if not indexes:
            fail(f"{path} has no sample between {span[0]:g} s and {span[1]:g} s.")
        kept = process["sampling"].get("visits_kept_one_in", 1)
        if kept > 1:
            print(f"plot_memory: {path} has one in {kept} of the times that weights came; there were too many.", file=sys.stderr)
    name, unit = scale(max(largest(process, options.resident, indexes) for process, indexes in zip(processes, chosen)))

    try:
        import matplotlib
    except ImportError:
        fail("matplotlib is missing. Install it where this Python finds it: pip install matplotlib")
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"
    matplotlib.rcParams["svg.hashsalt"] = "accelerate-cpp"
    from matplotlib import pyplot

    # Inches of height; the rows of weights only where there are some.
    modules = max(len({visit["name"] for visit in each}) for each in visits)
    heights = [3.0, *([0.3 + 0.1 * modules] if modules else []), 0.6]
    figure, axes = pyplot.subplots(len(heights), len(processes), figsize=((5 if modules else 1) + 4.2 * len(processes), sum(heights) + 0.8),
                                   sharex="col", squeeze=False, height_ratios=heights, layout="constrained")
    for column, (path, process) in enumerate(zip(options.files, processes)):
        top, bands = axes[0][column], axes[-1][column]
        top.sharey(axes[0][0])
        bands.sharey(axes[-1][0])
        if modules:
            draw_visits(axes[1][column], visits[column])
        draw(top, bands, process, chosen[column], *spans[column], unit, options.resident)
        label = options.label[column] if column < len(options.label) else process["label"] or path.stem
        peak = process["peaks"]["device" if on_device(process) else "tensors"] / unit
        top.set_title(f"{label}\npeak {peak:.1f} {name}", fontsize=10)
        bands.set_xlabel("seconds")
        top.spines[["top", "right"]].set_visible(False)
        bands.spines[["top", "right", "left"]].set_visible(False)
    axes[0][0].set_ylabel(name)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(labels)), frameon=False, fontsize=9)
    try:
        figure.savefig(options.output, dpi=110, metadata={"Date": None} if options.output.suffix == ".svg" else None)
    except (OSError, ValueError) as error:
        fail(f"{options.output} cannot be written: {error}")
    print(options.output)


if __name__ == "__main__":
    main(sys.argv[1:])
