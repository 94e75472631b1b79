"""The examples as their readers run them: they end well, and learn what they are there to learn."""

import json
import pathlib
import re
import sys
import tempfile
import unittest

import support

EXPORTED = pathlib.Path(sys.argv.pop()) if len(sys.argv) > 1 and sys.argv[-1].endswith(".pt") else None
DIGITS = support.ROOT / "examples/data/digits.csv"


def on_two_ranks(*command):
    return support.run(support.on_ranks([str(part) for part in command], 2, "gloo"), ACCELERATE_USE_CPU=1)


class Examples(unittest.TestCase):
    def numbers(self, done, pattern):
        self.assertEqual(done.returncode, 0, done.stderr)
        found = re.findall(pattern, done.stdout)
        self.assertTrue(found, done.stdout)
        return [float(number) for number in found]

    def test_accelerated_loop(self):
        losses = self.numbers(on_two_ranks(support.BIN / "accelerated_loop"), r"epoch \d loss ([-0-9.e]+)")
        self.assertEqual(len(losses), 10)
        self.assertLess(losses[-1], 0.01)

    def test_torchscript_module(self):
        done = on_two_ranks(support.BIN / "torchscript_module", EXPORTED, DIGITS)
        accuracies = self.numbers(done, r"epoch \d accuracy ([0-9.]+) %")
        self.assertEqual(len(accuracies), 8)
        self.assertGreater(accuracies[-1], 90)

    def test_a_module_that_is_not_there(self):
        done = support.run([str(support.BIN / "torchscript_module"), "absent.pt", str(DIGITS)])
        self.assertEqual(done.returncode, 1)
        self.assertIn("The module absent.pt cannot be read", done.stderr)

    def test_image_classifier_reaches_what_the_demo_asks(self):
        with tempfile.TemporaryDirectory() as folder:
            summary = pathlib.Path(folder) / "summary.json"
            done = on_two_ranks(*support.trainer("image_classifier", "--data", DIGITS, "--summary", summary))
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertGreaterEqual(json.loads(summary.read_text())["eval"]["accuracy"], 0.95)


if __name__ == "__main__":
    unittest.main(verbosity=2)
