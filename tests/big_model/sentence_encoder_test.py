"""The example sentence_encoder against the same architecture in torch, under every device map and memory limit.

    python sentence_encoder_test.py PROGRAM

ACCELERATE_TEST_MINILM may name the folder of an all-MiniLM-L6-v2 (with its model.safetensors), which is then compared too.
"""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import unicodedata
import unittest
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

PROGRAM = sys.argv.pop(1)
PLOT = Path(__file__).resolve().parents[2] / "tools" / "plot_memory.py"
TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "Élan vital: naïve CAFÉS, Ærøskøbing & Ελλάδα!",
    "中文 and text,mixed\tin one line",
    "a\u0301ccent after its letter \u200b and nothing",
    "unknown \U0001f600 characters, and an" + "x" * 120 + " endless word",
    "",
]


# ---------------------------------------------------------------- the reference

def is_punctuation(c):
    return 33 <= ord(c) <= 47 or 58 <= ord(c) <= 64 or 91 <= ord(c) <= 96 or 123 <= ord(c) <= 126 \
        or unicodedata.category(c).startswith("P")


def words(text):
    out = ""
    for c in text:
        category = unicodedata.category(c)
        if c in "\0\ufffd" or (category in ("Cc", "Cf") and c not in "\t\n\r"):
            continue
        out += f" {c} " if 0x4E00 <= ord(c) <= 0x9FFF else " " if c.isspace() else c
    out = "".join(c for c in unicodedata.normalize("NFD", out.lower()) if unicodedata.category(c) != "Mn")
    return "".join(f" {c} " if is_punctuation(c) else c for c in out).split()


def tokenize(text, vocabulary, most):
    ids = [vocabulary["[CLS]"]]
    for word in words(text):
        pieces, begin = [], 0
        while begin < len(word) <= 100:
            for end in range(len(word), begin, -1):
                piece = ("##" if begin else "") + word[begin:end]
                if piece in vocabulary:
                    pieces.append(vocabulary[piece])
                    begin = end
                    break
            else:
                pieces = []
                break
        ids += pieces or [vocabulary["[UNK]"]]
    return ids[:most - 1] + [vocabulary["[SEP]"]]


def encode(weights, config, ids):
    def linear(x, name):
        return torch.nn.functional.linear(x, weights[name + ".weight"], weights[name + ".bias"])

    def norm(x, name):
        return torch.nn.functional.layer_norm(
            x, x.shape[-1:], weights[name + ".weight"], weights[name + ".bias"], config["layer_norm_eps"])

    ids = torch.tensor(ids)
    x = weights["embeddings.word_embeddings.weight"][ids] + weights["embeddings.token_type_embeddings.weight"][0] \
        + weights["embeddings.position_embeddings.weight"][:len(ids)]
    x = norm(x, "embeddings.LayerNorm")
    heads = config["num_attention_heads"]
    for i in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{i}."
        q, k, v = (linear(x, f"{layer}attention.self.{part}").view(len(ids), heads, -1).transpose(0, 1)
                   for part in ("query", "key", "value"))
        scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
        y = linear((scores @ v).transpose(0, 1).flatten(1), f"{layer}attention.output.dense")
        x = norm(y + x, f"{layer}attention.output.LayerNorm")
        y = linear(torch.nn.functional.gelu(linear(x, f"{layer}intermediate.dense")), f"{layer}output.dense")
        x = norm(y + x, f"{layer}output.LayerNorm")
    return x.mean(0)


def reference(folder, texts):
    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text())
    vocabulary = {line: i for i, line in enumerate((folder / "vocab.txt").read_text().split("\n"))}
    most = config["max_position_embeddings"]
    if (folder / "sentence_bert_config.json").exists():
        most = min(most, json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"])
    weights = {name: tensor.double() if tensor.is_floating_point() else tensor
               for name, tensor in load_file(folder / "model.safetensors").items()}
    result = torch.stack([encode(weights, config, tokenize(text, vocabulary, most)) for text in texts])
    if (folder / "modules.json").exists() and "Normalize" in (folder / "modules.json").read_text():
        result = torch.nn.functional.normalize(result)
    return result


# ---------------------------------------------------------------- a small model

CONFIG = {
    "vocab_size": 400, "hidden_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 96,
    "max_position_embeddings": 64, "type_vocab_size": 2, "layer_norm_eps": 1e-12, "hidden_act": "gelu",
}


def make_model(folder, dtype=torch.float32):
    torch.manual_seed(0)
    width, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    weights = {
        "embeddings.word_embeddings.weight": torch.randn(CONFIG["vocab_size"], width),
        "embeddings.position_embeddings.weight": torch.randn(CONFIG["max_position_embeddings"], width),
        "embeddings.token_type_embeddings.weight": torch.randn(2, width),
        "pooler.dense.weight": torch.randn(width, width),  # not used
    }

    def linear(name, into, out):
        weights[name + ".weight"] = torch.randn(out, into) / math.sqrt(into)
        weights[name + ".bias"] = torch.randn(out) * 0.1

    def norm(name):
        weights[name + ".weight"] = 1 + torch.randn(width) * 0.1
        weights[name + ".bias"] = torch.randn(width) * 0.1

    norm("embeddings.LayerNorm")
    for i in range(CONFIG["num_hidden_layers"]):
        layer = f"encoder.layer.{i}."
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            linear(f"{layer}attention.{part}", width, width)
        norm(f"{layer}attention.output.LayerNorm")
        linear(f"{layer}intermediate.dense", width, inner)
        linear(f"{layer}output.dense", inner, width)
        norm(f"{layer}output.LayerNorm")
    folder = Path(folder)
    save_file({name: tensor.to(dtype) for name, tensor in weights.items()}, folder / "model.safetensors",
              metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    letters = "abcdefghijklmnopqrstuvwxyzαβγδεηικλοσø"
    pieces = ["the", "qu", "##ick", "brown", "fox", "jump", "over", "lazy", "dog", "cafes", "nai", "##ve", "text", "##ed",
              "中", "elan", "ελλ", "un", "##known", "nothing"]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] + list("!&,.:") + list(letters) + \
        ["##" + c for c in letters] + pieces
    assert len(vocabulary) <= CONFIG["vocab_size"]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    return vocabulary


def run(folder, *arguments, texts=TEXTS, status=0):
    command = [PROGRAM, "--model", str(folder), *arguments, "--json"]
    for text in texts:
        command += ["--text", text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode != status:
        raise AssertionError(f"{command} ended with {done.returncode}: {done.stderr}")
    return json.loads(done.stdout) if status == 0 else done.stderr


class SentenceEncoder(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.vocabulary = make_model(self.folder)

    def close(self, result, expected, tolerance=1e-5):
        difference = (torch.tensor(result["embeddings"], dtype=torch.float64) - expected).abs().max().item()
        self.assertLess(difference, tolerance)

    def test_the_same_numbers_under_every_map_and_limit(self):
        expected = reference(self.folder, TEXTS)
        file_bytes = sum(t.nbytes for name, t in load_file(self.folder / "model.safetensors").items() if "pooler" not in name)
        by_hand = self.folder / "map.json"
        by_hand.write_text(json.dumps({"embeddings": "cpu", "encoder.layer.0": "disk", "encoder.layer.1": "cpu",
                                       **{f"encoder.layer.{i}": "disk" for i in range(2, 6)}}))
        whole = run(self.folder, "--device-map", "cpu")
        self.close(whole, expected)
        self.assertEqual(whole["weights_read_bytes"], file_bytes)
        largest = 400 * 48 * 4
        for arguments in (["auto"], ["balanced"], ["disk"], [str(by_hand)], ["auto", "--max-memory", "cpu=200KiB"],
                          ["disk", "--max-memory", "cpu=100KiB"], ["disk", "--max-memory", "cpu=1KiB"],
                          [str(by_hand), "--max-memory", "cpu=400KiB"], ["auto", "--max-memory", "cpu=0KiB"]):
            with self.subTest(arguments):
                result = run(self.folder, "--device-map", *arguments)
                self.assertEqual(result["embeddings"], whole["embeddings"])  # bit for bit
                self.assertEqual(result["weights_read_bytes"], file_bytes)
                if arguments[0] == "disk":
                    self.assertLess(result["peak_tensor_bytes"], whole["peak_tensor_bytes"])
                if len(arguments) == 3 and arguments[0] == "disk":
                    # Beside weights there are what was computed: here as much as in the whole run.
                    limit = int(re.search(r"\d+", arguments[2])[0]) * 1024
                    computed = whole["peak_tensor_bytes"] - file_bytes
                    self.assertLess(result["peak_tensor_bytes"] - computed, 1.1 * (limit + largest))

    def test_tokenizers_by_their_files(self):
        expected = run(self.folder)["embeddings"]
        vocabulary = {token: i for i, token in enumerate(self.vocabulary)}
        (self.folder / "tokenizer.json").write_text(json.dumps({
            "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None,
                           "lowercase": True},
            "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                      "max_input_chars_per_word": 100, "vocab": vocabulary}}))
        (self.folder / "vocab.txt").unlink()
        self.assertEqual(run(self.folder)["embeddings"], expected)
        (self.folder / "sentence_bert_config.json").write_text('{"max_seq_length": 5}')
        (self.folder / "modules.json").write_text('[{"type": "sentence_transformers.models.Normalize"}]')
        (self.folder / "vocab.txt").write_text("\n".join(self.vocabulary))
        self.close(run(self.folder), reference(self.folder, TEXTS))

    def test_half_precision(self):
        make_model(self.folder, torch.float16)
        expected = reference(self.folder, TEXTS)
        self.close(run(self.folder), expected)  # computed in float32
        self.close(run(self.folder, "--dtype", "bfloat16", "--device-map", "disk"), expected, 0.2)

    def test_what_is_wrong_is_said(self):
        self.assertIn("embeddings", run(self.folder, "--device-map", self.write_map({"encoder": "cpu"}), status=1))
        self.assertIn("'tpu'", run(self.folder, "--device-map", self.write_map({"": "tpu"}), status=1))
        self.assertIn("unit", run(self.folder, "--max-memory", "cpu=40", status=1))
        self.assertIn("nowhere.json", run(self.folder, "--device-map", "nowhere.json", status=1))
        os.truncate(self.folder / "model.safetensors", 1000)
        self.assertIn("model.safetensors", run(self.folder, status=1))
        (self.folder / "config.json").unlink()
        self.assertIn("config.json", run(self.folder, status=1))

    def test_where_weights_were_is_recorded_and_drawn(self):
        file, picture = self.folder / "memory.json", self.folder / "memory.svg"
        plain = run(self.folder, "--device-map", "disk")
        tracked = run(self.folder, "--device-map", "disk", "--memory", str(file))
        self.assertEqual(tracked["embeddings"], plain["embeddings"])
        process = json.loads(file.read_text())["processes"][0]
        self.assertEqual([region["path"] for region in process["regions"]], ["first forward", "second forward"])
        visits = process["visits"]
        self.assertEqual({(visit["from"], visit["place"]) for visit in visits}, {("disk", "cpu")})
        # Each forward brings each module once: 4 of the embeddings and 8 a layer; beside its weights there is padding.
        self.assertEqual(len(visits), 2 * (4 + 8 * CONFIG["num_hidden_layers"]))
        for forward, region in enumerate(process["regions"]):
            inside = [visit for visit in visits if region["begin_ns"] <= visit["begin_ns"] and visit["end_ns"] <= region["end_ns"]]
            self.assertEqual(len({visit["name"] for visit in inside}), len(visits) // 2, region["path"])
            self.assertGreaterEqual(sum(visit["bytes"] for visit in inside), plain["weights_read_bytes"])
        done = subprocess.run([sys.executable, PLOT, file, "--output", picture], capture_output=True, text=True, timeout=120)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        drawn = picture.read_text()
        for words in ("encoder.layer.5.output.dense", "disk to cpu", "second forward"):
            self.assertIn(words, drawn)

    def write_map(self, entries):
        (self.folder / "some.json").write_text(json.dumps(entries))
        return str(self.folder / "some.json")

    @unittest.skipUnless(os.environ.get("ACCELERATE_TEST_MINILM"), "ACCELERATE_TEST_MINILM names no folder")
    def test_the_real_model(self):
        folder = os.environ["ACCELERATE_TEST_MINILM"]
        expected = reference(folder, TEXTS)
        whole = run(folder, "--device-map", "cpu")
        self.close(whole, expected)
        self.assertEqual(run(folder, "--device-map", "disk", "--max-memory", "cpu=40MiB")["embeddings"], whole["embeddings"])


if __name__ == "__main__":
    unittest.main()
