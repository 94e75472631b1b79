"""Checks that the documentation keeps up with the source.

    python check_pages.py SOURCE_FOLDER

Links between pages lead somewhere; every environment variable that the library reads, every flag of the trainers and
every entry of their summary is documented. Prints what is wrong; exits with 1 when something is.
"""

import re
import sys
from pathlib import Path

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
VARIABLE = re.compile(r'"(ACCELERATE_[A-Z_]+)"')
FLAG = re.compile(r'add_(?:option|flag)\("(--[a-z-]+)"')
ENTRY = re.compile(r'summary\["([a-z_]+)"\]')


def anchor(heading):
    """GitHub's name for a heading."""
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).strip().replace(" ", "-")


def broken_links(page, root):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, fragment = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists():
            yield f"{page.relative_to(root)}: the link to {target} leads nowhere"
        elif fragment and file.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", file.read_text(), flags=re.M)
            if fragment not in map(anchor, headings):
                yield f"{page.relative_to(root)}: {path or page.name} has no heading #{fragment}"


def undocumented(pattern, sources, page, root):
    text = page.read_text()
    for source in sources:
        for name in sorted(set(pattern.findall(source.read_text()))):
            if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text):
                yield f"{page.relative_to(root)}: {name} of {source.relative_to(root)} is not documented"


def main(root):
    pages = [*root.glob("*.md"), *sorted((root / "docs").glob("*.md"))]
    problems = [problem for page in pages for problem in broken_links(page, root)]
    # "ACCELERATE_HAS_MPI" and its like are settings of the build.
    variables = [path for path in sorted(root.glob("src/**/*.cpp")) if path.parent.name != "cli"]
    problems += undocumented(VARIABLE, variables, root / "docs" / "from_python.md", root)
    trainer = [root / "examples" / "support" / "trainer.cpp"]
    problems += undocumented(FLAG, trainer, root / "docs" / "trainers.md", root)
    problems += undocumented(ENTRY, trainer, root / "docs" / "trainers.md", root)
    print("\n".join([*problems, f"{len(pages)} pages, {len(problems)} problems"]))
    return 1 if problems or not pages else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
