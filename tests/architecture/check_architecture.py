"""Checks that the source keeps to the shape it was given. docs/architecture.md explains the rooms.

    python check_architecture.py SOURCE_FOLDER

A room is a folder of include/accelerate/ and src/. It may include headers of the rooms the table names, and of those
that these may use in turn. Prints each line that breaks a rule; exits with 1 when one does.
"""

import re
import sys
from pathlib import Path

# Room -> rooms it may use. "parallel:strategy" is that room's interface, strategy.hpp, alone.
ROOMS = {
    "base": [],
    "io": ["base"],
    "device_map": ["base", "io"],
    "core": ["base"],
    "net": ["base"],
    "comm": ["core", "net"],
    "state": ["core", "comm"],
    "intercept": ["core"],
    "precision": ["core", "comm", "intercept"],
    "parallel": ["core", "comm", "io", "precision", "intercept"],
    "data": ["core", "comm"],
    "optim": ["core", "comm", "io", "precision", "parallel:strategy"],
    "checkpoint": ["core", "comm", "io", "precision", "parallel", "data", "optim"],
    "big_model": [
        "core", "io", "intercept", "device_map", "tracking:memory_tracker",
        "checkpoint:tensor_file", "checkpoint:pt_file", "checkpoint:py_value",
    ],
    "tracking": ["core", "io"],
    "accelerator": [
        "base", "io", "device_map", "core", "comm", "state", "intercept", "precision", "parallel", "data", "optim",
        "checkpoint", "big_model", "tracking",
    ],
    "launch": ["base", "io", "net"],
    "cli": ["base", "io", "device_map", "launch"],
}
# These have no LibTorch in them: the launcher must start at once, and spdlog cannot meet LibTorch's fmt.
WITHOUT_TORCH = {"base", "io", "net", "device_map", "launch", "cli"}
# Ways to train in parallel do not know of each other.
SIBLINGS = {"ddp", "fsdp", "zero", "tensor", "pipeline", "context", "checkpointing", "local"}
# Too wide for a public header: a file that includes one compiles for 11 to 25 s.
TOO_WIDE = {
    "torch/torch.h", "torch/all.h", "torch/extension.h", "torch/nn.h", "torch/optim.h", "torch/data.h", "torch/script.h",
    "ATen/ATen.h", "ATen/Functions.h",
}
MOST_LINES = 800

TORCH = re.compile(r"^(torch|ATen|c10|caffe2)/")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
# A bare abort() may be a method: c10d's backends have one.
ENDS_PROCESS = re.compile(
    r"(?:std::|(?<!\w)::)(?:exit|abort|_Exit|quick_exit|terminate)\s*\(|(?<![\w.>:~])(?:exit|_Exit|quick_exit)\s*\(")
# Text that a stranger may have written goes through parse_json.hpp, which bounds its depth and the time it takes.
PARSES_JSON = re.compile(r"\b(?:[Jj]son|basic_json|parser)::(?:parse|sax_parse|accept)\s*\(|\"_json\b")
MAY_PARSE_JSON = "src/base/parse_json.cpp"


def closure(room):
    """The rooms that `room` may use, itself included."""
    reached, waiting = set(), [room]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += [] if ":" in name else ROOMS[name]
    return reached


def room_of(path, root):
    """The room of a source file, or None for the umbrella header."""
    for base in (root / "include" / "accelerate", root / "src"):
        if path.is_relative_to(base):
            parts = path.relative_to(base).parts
            return parts[0] if len(parts) > 1 else None
    raise ValueError(path)


def includes(path):
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if found := INCLUDE.match(line):
            yield number, found.group(1) == "<", found.group(2)


def sibling(name):
    word = Path(name).stem.split("_")[0]
    return word if word in SIBLINGS else None


def check_file(path, root):
    room = room_of(path, root)
    public = path.is_relative_to(root / "include")
    where = path.relative_to(root)
    if room is not None and room not in ROOMS:
        yield f"{where}: there is no room {room}; the table in tests/architecture knows {', '.join(ROOMS)}"
        return
    allowed = closure(room) if room else set(ROOMS)
    for number, angled, name in includes(path):
        at = f"{where}:{number}"
        own = name.removeprefix("accelerate/")
        if TORCH.match(name):
            if room in WITHOUT_TORCH:
                yield f"{at}: {name}, and {room} has no LibTorch in it"
            if public and name in TOO_WIDE:
                yield f"{at}: {name} is too wide for a public header; include the narrowest one that works"
            continue
        if "pybind11/" in name or name == "Python.h":
            yield f"{at}: {name}, and this library has no Python in it"
        if name.startswith("spdlog/") and room != "base":
            yield f"{at}: {name}, and logging goes through accelerate/base/log.hpp"
        if name.startswith("accelerate/") and not angled:
            yield f'{at}: write <{name}>, in angle brackets'
        if public and not angled:
            yield f'{at}: "{name}" is not installed; a public header includes public headers'
        target = own.split("/")[0] if "/" in own else None
        if target not in ROOMS or (angled and not name.startswith("accelerate/")):
            continue
        if target not in allowed and f"{target}:{Path(own).stem}" not in allowed:
            yield f"{at}: {room} may not use {target}"
        if room == "parallel" and target == "parallel":
            mine, other = sibling(path.name), sibling(own)
            if mine and other and mine != other:
                yield f"{at}: {mine} may not know of {other}"


def check_text(path, root):
    where = path.relative_to(root)
    lines = path.read_text().splitlines()
    if len(lines) > MOST_LINES:
        yield f"{where}: {len(lines)} lines; above {MOST_LINES} a file asks to become two"
    if path.suffix == ".hpp" and "#pragma once" not in lines[:5]:
        yield f"{where}: does not begin with #pragma once"
    in_library = not path.is_relative_to(root / "src" / "cli") and (
        path.is_relative_to(root / "src") or path.is_relative_to(root / "include"))
    for number, line in enumerate(lines, 1):
        code = line.split("//")[0]
        if in_library and (found := ENDS_PROCESS.search(code)):
            yield f"{where}:{number}: {found.group().strip()}) ends the user's process; throw an error"
        in_source = path.is_relative_to(root / "src") or path.is_relative_to(root / "include")
        if in_source and where.as_posix() != MAY_PARSE_JSON and PARSES_JSON.search(code):
            yield f"{where}:{number}: read JSON with parse_json() of base/parse_json.hpp, which no file can bring down"


def sources(root, *folders):
    for folder in folders:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in {".hpp", ".cpp"}:
                yield path


def main(root):
    problems = []
    checked = list(sources(root, "include", "src"))
    if not checked:
        problems.append(f"{root} has no sources in include/ or src/")
    for path in checked:
        problems += check_file(path, root)
    for path in sources(root, "include", "src", "tests", "examples", "benchmarks"):
        problems += check_text(path, root)
    print("\n".join(problems))
    print(f"{len(checked)} files, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
