"""Shows that the checks of the documentation find what they are there to find, in pages made up for it."""

import contextlib
import io
import tempfile
import unittest
from pathlib import Path

import check_pages
import snippets

PAGES = {
    "README.md": "See [the guide](docs/guide.md#the-loop).\n",
    "docs/guide.md": "# The loop\n",
    "docs/from_python.md": "`ACCELERATE_TIMEOUT`\n",
    "docs/trainers.md": "`--max-steps`, `losses`\n",
    "src/comm/world.cpp": 'get("ACCELERATE_TIMEOUT")',
    "examples/support/trainer.cpp": 'app.add_option("--max-steps", x); summary["losses"] = x;',
}


class Check(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name).resolve()

    def problems(self, changes):
        for name, text in {**PAGES, **changes}.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            code = check_pages.main(self.root)
        self.assertEqual(code == 0, " 0 problems" in output.getvalue())
        return output.getvalue()

    def test_accepts_what_is_right(self):
        self.assertIn("4 pages, 0 problems", self.problems({}))

    def test_finds_broken_links(self):
        self.assertIn("leads nowhere", self.problems({"README.md": "[x](docs/no.md)"}))
        self.assertIn("has no heading #nowhere", self.problems({"README.md": "[x](docs/guide.md#nowhere)"}))

    def test_finds_what_is_not_documented(self):
        self.assertIn("ACCELERATE_TIMEOUT of src", self.problems({"docs/from_python.md": "`ACCELERATE_TIMEOUTS`"}))
        self.assertIn("--max-steps of examples", self.problems({"docs/trainers.md": "`--max-steps-more`, `losses`"}))
        self.assertIn("losses of examples", self.problems({"docs/trainers.md": "`--max-steps`"}))

    def snippets_of(self, text):
        page, output = self.root / "page.md", self.root / "out.cpp"
        page.write_text(text)
        snippets.main(output, [page])
        return output.read_text()

    def test_takes_the_code_out(self):
        source = self.snippets_of("Text\n```cpp program\n#include <map>\nint main() {}\n```\n```\nnot code\n```\n```cpp\nint x;\n```\n")
        self.assertIn("#include <map>", source.splitlines()[:2])
        self.assertIn(f'#line 10 "{self.root / "page.md"}"\nint x;', source)
        self.assertNotIn("not code", source)

    def test_refuses_pages_it_cannot_read(self):
        for text in ("```cpp\nint x;\n", "```cpp magic\n```\n", "no code\n"):
            with self.assertRaises(SystemExit):
                self.snippets_of(text)


if __name__ == "__main__":
    unittest.main()
