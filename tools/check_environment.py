"""Says what is missing from this Python environment for the requirements given, or damaged in it.

    python check_environment.py [--discard-damaged] torch==2.11.0 numpy ...

Follows the requirements of the requirements, and looks at every file that belongs to them, so that an
installation that was interrupted, or lost files since, is found. Prints one line for each problem and
exits with 1 when there is one. With --discard-damaged, takes away the records of the damaged packages, so that
pip installs them again instead of believing the records.
"""

import csv
import os
import shutil
import sys
from importlib.metadata import PackageNotFoundError, distribution

from pip._vendor.packaging.requirements import Requirement


def damage(found):
    """What is wrong with an installed package, or None."""
    record = found.read_text("RECORD")
    if not record:
        return "has no list of its files: its installation was interrupted"
    for name, _, size in csv.reader(record.splitlines()):
        # Byte code comes and goes; scripts lie outside and change when the environment is moved.
        if not size or name.endswith(".pyc") or name.startswith(".."):
            continue
        try:
            actual = os.stat(found.locate_file(name)).st_size
        except OSError:
            return f"lacks {name}"
        if actual != int(size):
            return f"has a {name} of {actual} bytes where {size} were expected"
    return None


def main(arguments):
    discard = "--discard-damaged" in arguments
    waiting = [Requirement(text) for text in arguments if not text.startswith("--")]
    seen = set()
    problems = []
    while waiting:
        requirement = waiting.pop()
        try:
            found = distribution(requirement.name)
        except PackageNotFoundError:
            problems.append(f"{requirement.name} is not installed")
            continue
        key = (requirement.name.lower(), str(requirement.specifier), tuple(sorted(requirement.extras)))
        if key in seen:
            continue
        seen.add(key)
        if not requirement.specifier.contains(found.version, prereleases=True):
            problems.append(f"{requirement.name} {found.version} is installed and {requirement} was asked for")
            continue
        if wrong := damage(found):
            problems.append(f"{requirement.name} {found.version} {wrong}")
            if discard:
                shutil.rmtree(found._path)
            continue
        for text in found.requires or []:
            needed = Requirement(text)
            extras = requirement.extras or {""}
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(needed)
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
