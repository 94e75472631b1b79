"""How the programs fail: what a user sees on the terminal when something is wrong, and how soon."""

import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

import support

SOON_S = 10  # until a wrong argument is refused, on a busy machine
AFTER_DEATH_S = 15  # until the other ranks have ended

# LibTorch writes of its own accord that a connection failed, with its stack; our message comes beside it.
LIBTORCH = re.compile(r"^(\[[EW]\d{4} .*\[c10d\]|Exception raised from |frame #\d+: )")
MESSAGE = re.compile(r"^(?:\d\d:\d\d:\d\d (?:error|warning) (?:\[rank \d+\] )?|(?:\[rank \d+\] )?The program ends with an error: )(.*)$")


def sentences(stderr):
    """The messages on stderr without time and rank, each once. Whatever else is there is kept as it is, but for LibTorch's own log and
    what is said for information, as which strategy was chosen."""
    lines = (MESSAGE.sub(r"\1", line) for line in stderr.splitlines() if line.strip() and not LIBTORCH.match(line) and " info " not in line)
    return list(dict.fromkeys(lines))


def torchrun_variables(rank, world, port):
    """What torchrun sets."""
    return {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


class Ranks:
    """Ranks of one command, or of one each, started with nothing but environment variables. Ended on leaving the scope."""

    def __init__(self, commands, **variables):
        port = support.free_port()
        self.logs = [tempfile.TemporaryFile("w+") for _ in commands]
        self.processes = [
            subprocess.Popen(command, env=support.environment(**torchrun_variables(rank, len(commands), port), **variables),
                             cwd=support.ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self.logs[rank])
            for rank, command in enumerate(commands)
        ]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process, log in zip(self.processes, self.logs):
            process.kill()
            process.wait()
            log.close()

    def wait(self, rank, limit_s):
        """The exit code of a rank."""
        try:
            return self.processes[rank].wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"rank {rank} was still running after {limit_s} s, having written: {self.stderr(rank)!r}") from None

    def stderr(self, rank):
        self.logs[rank].seek(0)
        return self.logs[rank].read()


def processor_seconds(pid):
    """What a process has used. It has to be running."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    assert fields[0] != "Z", f"process {pid} has ended"
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def running(pid):
    """Whether a process is there and has not ended."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition, limit_s=60, what=""):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {limit_s} s"
        time.sleep(0.05)


def until_trains(pid):
    """Training has begun once a process has used more processor time than starting takes."""
    until(lambda: processor_seconds(pid) > 1.0, what="training")


class Refusals(unittest.TestCase):
    """Wrong input: an exit code, one sentence, and soon."""

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.path = pathlib.Path(cls.folder.name)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def file(self, name, content):
        (self.path / name).write_text(content)
        return self.path / name

    def refused(self, command, *words, **variables):
        """One sentence has all `words` in it; it is all there is."""
        with self.subTest(" ".join([*(f"{k}={v}" for k, v in variables.items()), *command])):
            done = support.run(command, limit_s=SOON_S, **variables)
            said = sentences(done.stderr)
            self.assertGreater(done.returncode, 0, f"a signal ended it, or nothing did: {done.stderr}")
            self.assertLess(done.returncode, 128, done.stderr)
            self.assertEqual(len(said), 1, said)
            for word in words:
                self.assertIn(word, said[0])
            own, _, _ = said[0].partition(" Caused by: ")
            self.assertTrue(own.endswith("."), said[0])
            self.assertLess(len(own), 400)

    def test_flags(self):
        image = support.trainer("image_classifier")
        self.refused([*image, "--nonsense"], "--nonsense", "--help")
        self.refused([*image, "surplus"], "surplus")
        self.refused([*image, "--batch-size", "0"], "--batch-size", '"0"')
        self.refused([*image, "--batch-size", "2.5"], "--batch-size", "2.5")
        self.refused([*image, "--max-steps", "many"], "--max-steps", "many")
        self.refused([*image, "--lr", "nan"], "--lr", "nan")
        self.refused([*image, "--clip-norm", "nan"], "--clip-norm", "nan")
        self.refused([*image, "--epochs", "99999999999999999999"], "--epochs")
        self.refused([*image, "--strategy", "none"], "--strategy", "none", "ddp")
        self.refused([*image, "--backend", "nccl"], "nccl", "cpu", "gloo")
        self.refused([*image, "--layers", "2"], "--layers")
        self.refused(support.trainer("language_model", "--width", 17), "17", "16")

    def test_precision(self):
        for trainer in support.TRAINERS:
            self.refused(support.trainer(trainer, "--dtype", "float64", "--mixed-precision", "bf16"), "float64", "bf16")
            self.refused(support.trainer(trainer, "--mixed-precision", "fp16"), "fp16", "CPU", "bf16")

    def test_data(self):
        digits = (support.ROOT / "examples/data/digits.csv").read_text().splitlines()
        for trainer in support.TRAINERS:
            self.refused(support.trainer(trainer, "--data", self.path / "absent"), "absent", "--data")
            self.refused(support.trainer(trainer, "--data", self.path), str(self.path), "--data")
            self.refused(support.trainer(trainer, "--data", self.file("empty", "")), "empty")
        for name, row in (("short.csv", "1,2,3"), ("word.csv", digits[2].replace(",", ",x", 1)), ("digit.csv", digits[2] + "1"),
                          ("nan.csv", digits[2].rpartition(",")[0] + ",nan"), ("long.csv", digits[2] + ",1"), ("blank.csv", "")):
            data = self.file(name, "\n".join([*digits[:2], row, *digits[3:20]]))
            self.refused(support.trainer("image_classifier", "--data", data), name, "line 3")
        self.refused(support.trainer("language_model", "--data", self.file("short.txt", "In the beginning")), "short.txt", "16")
        self.refused(support.trainer("image_classifier", "--batch-size", 5000), "1438", "5000")

    def test_environment(self):
        image = support.trainer("image_classifier", "--max-steps", 1)
        self.refused(image, "WORLD_SIZE", "RANK", RANK=0)
        self.refused(image, "RANK", WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=29500)
        self.refused(image, "RANK", "2", WORLD_SIZE=2, RANK=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=29500)
        self.refused(image, "RANK", "zero", RANK="zero", WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=29500)
        self.refused(image, "ACCELERATE_TIMEOUT", "soon", ACCELERATE_TIMEOUT="soon")
        self.refused(image, "fp8", ACCELERATE_MIXED_PRECISION="fp8")
        self.refused([*image, "--dtype", "float64"], "float64", "bf16", ACCELERATE_MIXED_PRECISION="bf16")
        with socket.socket() as holder:
            holder.bind(("", 0))
            holder.listen()
            port = holder.getsockname()[1]
            self.refused(image, str(port), "taken", RANK=0, WORLD_SIZE=2, LOCAL_RANK=0, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)

    def test_a_rank_that_never_comes(self):
        variables = torchrun_variables(0, 2, support.free_port())
        self.refused(support.trainer("image_classifier"), "rank 1", "3.0 s", ACCELERATE_TIMEOUT=3, **variables)
        variables = torchrun_variables(1, 2, support.free_port())
        self.refused(support.trainer("image_classifier"), "rank 0", "3.0 s", ACCELERATE_TIMEOUT=3, **variables)

    def test_on_every_rank(self):
        """What is wrong on every rank is said by one or more of them in the same words, and then by the launcher."""
        for flags, words in ((["--strategy", "single"], ["single", "2 processes"]), (["--data", "absent"], ["absent"]),
                             (["--nonsense"], ["--nonsense"])):
            with self.subTest(flags):
                done = support.run([support.LAUNCHER, "launch", "-n", "2", *support.trainer("image_classifier", *flags)], limit_s=SOON_S)
                self.assertEqual(done.returncode, 1, done.stderr)
                cause, verdict = sentences(done.stderr)
                for word in words:
                    self.assertIn(word, cause)
                self.assertRegex(verdict, r"^accelerate-cpp: The run failed: rank [01] of 2 .*exit code 1")

    def test_the_launcher(self):
        # Its usage errors are CLI11's own, so only what they name is looked at.
        for arguments, word in ((["launch", "-n", "0", "true"], "0"), (["launch", "-n", "2", str(self.path / "absent")], "absent"),
                                (["launch", "-n", "2"], "PROGRAM"), (["nonsense"], "nonsense"), ([], "subcommand")):
            with self.subTest(arguments):
                done = support.run([support.LAUNCHER, *arguments], limit_s=SOON_S)
                self.assertIn(done.returncode, (1, 2, 126, 127), done.stderr)
                self.assertIn(word, done.stderr)

    def test_help(self):
        for command, words in (([support.LAUNCHER, "-h"], ["launch", "env", "version"]), ([support.LAUNCHER, "launch", "-h"], ["--num-processes"]),
                               ([str(support.BIN / "image_classifier"), "--help"], ["--strategy", "--summary"]),
                               ([str(support.BIN / "language_model"), "--help"], ["--strategy", "--layers", "--width"])):
            with self.subTest(command):
                done = support.run(command, limit_s=SOON_S)
                self.assertEqual(done.returncode, 0)
                self.assertEqual(done.stderr, "")
                for word in words:
                    self.assertIn(word, done.stdout)


class Ranks_that_disagree(unittest.TestCase):
    def test_models_that_differ(self):
        """Every rank says which parameter differs."""
        commands = [support.trainer("language_model", "--width", width, "--max-steps", 5) for width in (32, 32, 64)]
        with Ranks(commands) as ranks:
            for rank in range(3):
                self.assertEqual(ranks.wait(rank, AFTER_DEATH_S), 1, ranks.stderr(rank))
                self.assertIn("tokens.weight", ranks.stderr(rank))

    def test_batches_that_differ(self):
        commands = [support.trainer("image_classifier", "--batch-size", size, "--max-steps", 5) for size in (8, 16)]
        with Ranks(commands) as ranks:
            for rank in range(2):
                self.assertEqual(ranks.wait(rank, AFTER_DEATH_S), 1, ranks.stderr(rank))
                self.assertIn("batch", ranks.stderr(rank))


class Deaths(unittest.TestCase):
    """A rank that is killed, or hangs, during training."""

    endless = support.trainer("image_classifier", "--epochs", 10**6, "--batch-size", 8)

    def test_under_our_launcher(self):
        launcher = subprocess.Popen([support.LAUNCHER, "launch", "-n", "3", *self.endless], env=support.environment(), text=True,
                                    cwd=support.ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        ranks = {}
        try:
            def started():
                for pid in pathlib.Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split():
                    variables = dict(v.split("=", 1) for v in pathlib.Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in v)
                    if "RANK" in variables:
                        ranks[int(variables["RANK"])] = int(pid)
                return len(ranks) == 3

            until(started, what="the start of three ranks")
            until_trains(ranks[1])
            os.kill(ranks[1], signal.SIGKILL)
            _, stderr = launcher.communicate(timeout=AFTER_DEATH_S)
        finally:
            launcher.kill()
            launcher.wait()
        self.assertEqual(launcher.returncode, 128 + signal.SIGKILL, stderr)
        self.assertRegex(stderr, r"The run failed: rank 1 of 3 \(pid \d+\) was killed by SIGKILL")
        for rank, pid in ranks.items():
            self.assertFalse(pathlib.Path(f"/proc/{pid}").exists(), f"rank {rank} is still there")

    def dies(self, victim, sent, reason, **variables):
        """Without our launcher, the survivors end by themselves and name the dead rank."""
        with self.subTest(victim=victim, sent=sent.name), Ranks([self.endless] * 3, **variables) as ranks:
            for process in ranks.processes:
                until_trains(process.pid)
            ranks.processes[victim].send_signal(sent)
            for rank in {0, 1, 2} - {victim}:
                self.assertEqual(ranks.wait(rank, AFTER_DEATH_S), 1, ranks.stderr(rank))
                said = sentences(ranks.stderr(rank))
                self.assertEqual(len(said), 1, said)
                self.assertIn(f"rank {victim} was lost: {reason}", said[0])

    def test_killed_without_our_launcher(self):
        # Rank 0 more often: it keeps the store, and the others learn of its end in two ways, in either order.
        for victim in (1, 0, 2, 0, 0):
            self.dies(victim, signal.SIGKILL, "its process ended")
        for victim in (0, 1):
            self.dies(victim, signal.SIGKILL, "its process ended", ACCELERATE_STRATEGY="fsdp")

    def test_torchrun_is_killed(self):
        """What it started ends too, and says why."""
        variables = support.environment(OMP_NUM_THREADS=1)
        with tempfile.TemporaryFile("w+") as log:
            torchrun = subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--no-python", "--nproc-per-node", "2",
                                         "--master-port", str(support.free_port()), *self.endless],
                                        env=variables, cwd=support.ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log)
            ranks = []
            try:
                def started():
                    ranks[:] = map(int, pathlib.Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split())
                    return len(ranks) == 2

                until(started, what="the start of two ranks")
                for rank in ranks:
                    until_trains(rank)
                torchrun.kill()
                start = time.monotonic()
                until(lambda: not any(running(rank) for rank in ranks), limit_s=AFTER_DEATH_S, what="the end of torchrun's ranks")
                self.assertLess(time.monotonic() - start, 8)  # 5 s on a quiet machine
                log.seek(0)
                said = log.read()
                self.assertIn("torchrun that started", said)
                self.assertEqual(said.count("which lets in everybody"), 1, said)
            finally:
                torchrun.kill()
                torchrun.wait()
                for rank in filter(running, ranks):
                    os.kill(rank, signal.SIGKILL)

    def test_a_timeout_says_what_was_being_done(self):
        """Without heartbeats nobody knows that a rank stands still; what was waited for is said all the same. Where in its
        step the other rank was stopped is chance."""
        with Ranks([self.endless] * 2, ACCELERATE_HEARTBEAT_TIMEOUT=0, ACCELERATE_TIMEOUT=4, ACCELERATE_STRATEGY="fsdp") as ranks:
            for process in ranks.processes:
                until_trains(process.pid)
            ranks.processes[1].send_signal(signal.SIGSTOP)
            self.assertEqual(ranks.wait(0, AFTER_DEATH_S), 1, ranks.stderr(0))
            sharding = r"((Gathering|Reducing the gradients of) the unit '.*'|Taking the norm of the sharded gradients) failed"
            between_epochs = r"in group \"world\""
            self.assertRegex(ranks.stderr(0), f"{sharding}|{between_epochs}")
            self.assertIn("the timeout of 4.0 s", ranks.stderr(0))

    def test_stopped_without_our_launcher(self):
        for victim in (0, 2):
            self.dies(victim, signal.SIGSTOP, "it has been silent for 3", ACCELERATE_HEARTBEAT_TIMEOUT=3)
        self.dies(1, signal.SIGSTOP, "it has been silent for 3", ACCELERATE_HEARTBEAT_TIMEOUT=3, ACCELERATE_STRATEGY="fsdp")


if __name__ == "__main__":
    unittest.main(verbosity=2)
