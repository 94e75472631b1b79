#!/usr/bin/env python3
"""Draws where a dispatched module's weights were over time, from what Dispatched::trace_residency wrote.

    plot_residency.py TRACE.json PICTURE.png|svg
    sentence_encoder --model FOLDER --text "..." --device-map disk --trace TRACE.json

One line for each module: light while its weights are fetched or wait to be used, dark while they are in use. Below, the
bytes of all of these. Needs matplotlib.
"""

import argparse
import json


def intervals(trace):
    """(module, begin, here, gone) in milliseconds; `here` or `gone` of what has not come or gone yet is the end."""
    end = max(event[0] for event in trace["events"]) / 1e6
    under_way, found = {}, []
    for nanoseconds, module, what in trace["events"]:
        at = nanoseconds / 1e6
        if what == "begins":
            under_way[module] = [module, at, end, end]
            found.append(under_way[module])
        elif module in under_way:
            under_way[module][2 if what == "here" else 3] = at
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("picture")
    options = parser.parse_args()
    with open(options.trace) as file:
        trace = json.load(file)
    if not trace["events"]:
        parser.error(f"{options.trace} has no events: nothing was brought while it was traced")

    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    spans = intervals(trace)
    order = list(dict.fromkeys(span[0] for span in spans))
    row = {module: i for i, module in enumerate(order)}
    figure, (modules, total) = pyplot.subplots(
        2, 1, sharex=True, figsize=(9, 2.5 + 0.16 * len(order)), height_ratios=[max(3, 0.16 * len(order)), 1.2],
        layout="constrained")
    for module, begin, here, gone in spans:
        modules.barh(row[module], here - begin, left=begin, color="#9ecae1", height=0.8)
        modules.barh(row[module], gone - here, left=here, color="#08519c", height=0.8)
    labels = [f"{trace['modules'][module]['name']} ({trace['modules'][module]['bytes'] / 1e6:.2f} MB)" for module in order]
    modules.set_yticks(range(len(order)), labels, fontsize=6)
    modules.margins(y=0.01)
    modules.invert_yaxis()
    modules.set_title(f"Weights on {trace['main_device']}: fetched ahead (light), in use (dark)", fontsize=9)
    changes = sorted([(begin, trace["modules"][m]["bytes"]) for m, begin, _, _ in spans] +
                     [(gone, -trace["modules"][m]["bytes"]) for m, _, _, gone in spans])
    times, held = [0.0], [0.0]
    for at, bytes_ in changes:
        times.append(at)
        held.append(held[-1] + bytes_ / 1e6)
    total.step(times, held, where="post", color="#08519c")
    total.axhline(sum(m["bytes"] for m in trace["modules"]) / 1e6, color="grey", linestyle="--", linewidth=0.8)
    total.set_ylabel("MB (dashed: all)", fontsize=7)
    total.set_xlabel("milliseconds", fontsize=8)
    total.set_ylim(bottom=0)
    figure.savefig(options.picture, dpi=100)


if __name__ == "__main__":
    main()
