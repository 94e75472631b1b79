"""Puts the C++ of the documentation into one source file, so that a compiler can check it.

    python snippets.py OUTPUT.cpp PAGE.md...

A block fenced as ```cpp is part of a function body, in which the names of snippets.hpp are known. ```cpp definitions stands
outside of functions, ```cpp program is a whole source file. Errors are reported at the line of the page.
"""

import re
import sys
from pathlib import Path

FENCE = re.compile(r"^```(.*)$")


def blocks(page):
    """(kind, number of the first line, lines) of each C++ block of a page."""
    kind, first, lines = None, 0, []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        fence = FENCE.match(line)
        if not fence:
            lines.append(line)
        elif kind is None:
            kind, first, lines = fence.group(1).strip(), number + 1, []
        else:
            if kind.split()[:1] == ["cpp"]:
                yield kind, first, lines
            kind = None
    if kind is not None:
        raise SystemExit(f"{page}:{first - 1}: this block is not closed")


def main(output, pages):
    includes, text, count = ["#include \"snippets.hpp\""], [], 0
    for page in pages:
        for kind, first, lines in blocks(page):
            count += 1
            body = []
            for line in lines:
                if line.startswith("#include"):
                    includes.append(line)
                    line = ""
                body.append(line)
            body = [f'#line {first} "{page}"', *body]
            if kind == "cpp":
                text += [f"void snippet_{count}() {{", "SNIPPET_NAMES", "{", *body, "}", "}"]
            elif kind == "cpp definitions":
                text += body
            elif kind == "cpp program":
                text += [f"namespace program_{count} {{", *body, "}"]
            else:
                raise SystemExit(f"{page}:{first - 1}: unknown kind of block \"{kind}\"")
    if count == 0:
        raise SystemExit("there is no C++ in these pages")
    output.write_text("\n".join([*dict.fromkeys(includes), *text, ""]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(page) for page in sys.argv[2:]])
