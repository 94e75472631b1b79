"""Checks that whoever follows the README has every header and library that the build uses.

    python check_origins.py SOURCE_FOLDER BUILD_FOLDER LIBTORCH_FOLDER COMPILER

Reads which headers each object was compiled from (ninja's record) and which libraries each program and library loads
(ldd). Each file must come from the project, from LibTorch or the Python environment it lies in, from a Debian package
that tools/setup names or that such a package depends on, or from the compiler's own package. So a header that only
this machine happens to have, from an installed CUDA toolkit for example, is found. Prints each file that breaks the
rule and exits with 1; exits with 77 on a system without dpkg, where nothing can be said.
"""

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

SKIPPED = 77
DPKG = Path("/var/lib/dpkg")


def one_name(path):
    """One name for files of /lib and /usr/lib, which are the same folder on a merged system."""
    return re.sub(r"^/(?=(bin|sbin|lib|lib32|lib64)/)", "/usr/", str(path))


def named_by_setup(setup):
    """The Debian packages that the script tools/setup installs."""
    return set(re.findall(r'\|([a-z0-9][a-z0-9.+-]*)"$', setup, re.MULTILINE))


def dependencies(status):
    """Package -> packages that it depends on, of the alternatives all; a virtual package stands for its providers."""
    needs, provided_by = {}, defaultdict(set)
    for paragraph in status.split("\n\n"):
        fields = dict(re.findall(r"^([A-Za-z-]+): (.*)$", paragraph, re.MULTILINE))
        if "Package" not in fields or not fields.get("Status", "").endswith(" installed"):
            continue
        name = fields["Package"]
        listed = ",".join(fields.get(field, "") for field in ("Depends", "Pre-Depends"))
        needs.setdefault(name, set()).update(re.findall(r"(?:^|[,|])\s*([a-z0-9][a-z0-9.+-]*)", listed))
        for virtual in re.findall(r"(?:^|,)\s*([a-z0-9][a-z0-9.+-]*)", fields.get("Provides", "")):
            provided_by[virtual].add(name)
    return needs, provided_by


def closure(roots, needs, provided_by):
    reached, waiting = set(), list(roots)
    while waiting:
        name = waiting.pop()
        if name in reached:
            continue
        reached.add(name)
        waiting += needs.get(name, ())
        waiting += provided_by.get(name, ())
    return reached


def owners(folder):
    """File -> the packages that installed it."""
    found = defaultdict(set)
    for listing in folder.glob("*.list"):
        package = listing.stem.split(":")[0]
        for line in listing.read_text().splitlines():
            found[one_name(line)].add(package)
    return found


def headers(build):
    """File -> an object that was compiled from it."""
    listing = subprocess.run(["ninja", "-C", build, "-t", "deps"], capture_output=True, text=True, check=True).stdout
    used, target = {}, None
    for line in listing.splitlines():
        if line.startswith("    "):
            used.setdefault((build / line.strip()).absolute(), target)
        elif line:
            target = line.split(":")[0]
    return used


def libraries(build):
    """File -> a program or library of the build that loads it."""
    used = {}
    programs = [path for folder in ("bin", "lib") for path in sorted((build / folder).glob("*")) if path.is_file()]
    for program in programs:
        with program.open("rb") as file:
            if file.read(4) != b"\x7fELF":
                continue
        listing = subprocess.run(["ldd", program], capture_output=True, text=True).stdout
        for line in listing.splitlines():
            if "not found" in line:
                used.setdefault(Path(line.split()[0]), program.name)
            elif found := re.search(r"(?:=> |^\s*)(/\S+)", line):
                used.setdefault(Path(found.group(1)), program.name)
    return used


def strangers(used, folders, owner_of, packages):
    """A line for each file that nobody brings."""
    inside = tuple(f"{Path(folder).resolve()}/" for folder in folders)
    for path, user in sorted(used.items()):
        real = path.resolve()
        if str(real).startswith(inside):
            continue
        owning = owner_of.get(one_name(real)) or owner_of.get(one_name(path)) or set()
        if not owning & packages:
            whose = f"of the package {' and '.join(sorted(owning))}" if owning else "of no package"
            yield f"{user} uses {path}, {whose}, which tools/setup does not bring"


def main(source, build, libtorch, compiler):
    if not (DPKG / "status").exists():
        print("NOT RUN: this system has no dpkg, so where its files come from cannot be said.")
        return SKIPPED
    used = headers(build)
    if not used:
        print(f"ninja has no record of headers in {build}; build first")
        return 1
    used |= libraries(build)
    owner_of = owners(DPKG / "info")
    roots = named_by_setup((source / "tools" / "setup").read_text()) | owner_of.get(one_name(compiler.resolve()), set())
    packages = closure(roots, *dependencies((DPKG / "status").read_text()))
    # LibTorch from a wheel stands beside the wheels of its libraries.
    torch_folders = [libtorch.parent] if (libtorch.parent / "torch" / "version.py").exists() else [libtorch]
    problems = list(strangers(used, [source, build, *torch_folders], owner_of, packages))
    print("\n".join(problems))
    print(f"{len(used)} files, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(*(Path(argument).absolute() for argument in sys.argv[1:])))
