"""What a trainer's --memory writes, against what is known of each strategy, and the pictures that tools/plot_memory.py makes of it.

The model has n parameters in float32, so n x 4 bytes are one copy of it. With AdamW and p processes:
ddp has parameters of 1 copy, gradients of 2 (autograd's and the buckets they are reduced in) and optimizer state of 2; zero2 gradients and states of 1/p; fsdp all three.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

import support

PROCESSES = 2
FLAGS = ["--layers", 6, "--width", 192, "--batch-size", 1, "--max-steps", 4]
PLOT = support.ROOT / "tools" / "plot_memory.py"


def plot(*arguments):
    return subprocess.run([sys.executable, str(PLOT), *map(str, arguments)], capture_output=True, text=True, check=False, timeout=120)


class MemoryFile(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.path = pathlib.Path(cls.folder.name)
        cls.memory, cls.summary = {}, {}
        data = support.text(cls.path, 40)
        for strategy in ("ddp", "zero2", "fsdp"):
            file, summary = cls.path / f"{strategy}.json", cls.path / f"{strategy}.summary"
            command = support.trainer("language_model", *FLAGS, "--data", data, "--strategy", strategy, "--memory", file, "--summary", summary)
            done = support.run(support.on_ranks(command, PROCESSES, "gloo"))
            if done.returncode != 0:
                raise AssertionError(done.stderr)
            cls.memory[strategy] = json.loads(file.read_text())
            cls.summary[strategy] = json.loads(summary.read_text())

    def test_says_what_it_is_and_has_every_process(self):
        for strategy, memory in self.memory.items():
            self.assertEqual((memory["format"], memory["version"], memory["units"]), ("accelerate-cpp memory", 1, "bytes"))
            self.assertEqual([process["rank"] for process in memory["processes"]], list(range(PROCESSES)))
            for process in memory["processes"]:
                self.assertEqual(process["label"], f"{strategy}, {PROCESSES} processes")
                self.assertEqual((process["clock"]["kind"], process["clock"]["unit"]), ("monotonic", "ns"))
                self.assertIsNone(process["sampling"]["failure"])
                samples = process["samples"]
                columns = [values for name, values in samples.items() if name != "tensors_by_kind"] + list(samples["tensors_by_kind"].values())
                self.assertEqual({len(values) for values in columns}, {len(samples["time_ns"])})
                self.assertEqual(samples["time_ns"], sorted(samples["time_ns"]))
                self.assertGreater(min(samples["rss"]), 2**20)
                for kinds, total in zip(zip(*samples["tensors_by_kind"].values()), samples["tensors"]):
                    self.assertEqual(sum(kinds), total)

    def test_peaks_are_the_allocators(self):
        for strategy, memory in self.memory.items():
            for process, peak in zip(memory["processes"], self.summary[strategy]["peak_tensor_bytes"]):
                # The summary's counts from the start of the program, the file's from the end of prepare.
                self.assertLessEqual(process["peaks"]["tensors"], peak)
                self.assertEqual(sum(process["peaks"]["tensors_at_peak"].values()), process["peaks"]["tensors"])
                totals = process["region_totals"]
                self.assertEqual({name: total["count"] for name, total in totals.items()}, {"forward": 4, "backward": 4, "step": 4})
                self.assertLessEqual(max(total["peaks"]["tensors"] for total in totals.values()), process["peaks"]["tensors"])
                self.assertEqual(len(process["regions"]), 12)

    def test_kinds_are_those_of_the_strategy(self):
        for strategy, copies in {"ddp": (1, 2, 2), "zero2": (1, 0.5, 1), "fsdp": (0.5, 0.5, 1)}.items():
            one = 4 * self.summary[strategy]["parameter_count"]
            for process in self.memory[strategy]["processes"]:
                # What is held while the optimizer steps: between two units' gathers.
                held = process["region_totals"]["step"]["peaks"]["tensors_by_kind"]
                for kind, expected in zip(("parameters", "gradients", "optimizer_state"), copies):
                    # Padding, and the root unit, which stays from forward to the end of backward.
                    self.assertGreater(held[kind] / one, expected * 0.98, f"{strategy}: {kind}")
                    self.assertLess(held[kind] / one, expected * 1.06 + 0.02, f"{strategy}: {kind}")

    def test_draws(self):
        files = [self.path / f"{strategy}.json" for strategy in self.memory]
        for name, begins in {"m.svg": b"<?xml", "m.png": b"\x89PNG"}.items():
            done = plot(*files, "--output", self.path / name, "--to", 1000, "--label", "all of it", "--resident")
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertTrue((self.path / name).read_bytes().startswith(begins))
        picture = (self.path / "m.svg").read_text()
        for words in ("all of it", "zero2, 2 processes", "optimizer state", "backward", "MiB", "resident set"):
            self.assertIn(words, picture)
        self.assertEqual(plot("--help").returncode, 0)

    def test_refuses_what_it_cannot_draw(self):
        (self.path / "summary.json").write_text("{}")
        (self.path / "broken.json").write_text("{")
        memory = self.path / "ddp.json"
        for arguments, words in (
            ([self.path / "none.json"], "cannot be read"),
            ([self.path / "broken.json"], "is not JSON"),
            ([self.path / "summary.json"], "is no memory file"),
            ([memory, "--rank", 7], "has no rank 7"),
            ([memory, "--from", 5000], "has no sample"),
            ([memory, "--output", self.path / "m.docx"], "cannot be written"),
        ):
            done = plot(*arguments)
            self.assertEqual(done.returncode, 1, arguments)
            self.assertIn(words, done.stderr)
            self.assertNotIn("Traceback", done.stderr)

    def test_a_file_that_cannot_be_written_is_an_error(self):
        command = support.trainer("language_model", *FLAGS, "--data", support.text(self.path, 40), "--memory", self.path / "no" / "folder.json")
        done = support.run(command)
        self.assertEqual(done.returncode, 1)
        self.assertIn("cannot be written", done.stderr)
        self.assertNotIn("loss", done.stdout, "found out after training")


if __name__ == "__main__":
    unittest.main()
