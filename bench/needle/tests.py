"""`python3 bench/needle/tests.py`: the model that looks keys up, its prompts, and what is read from logits, without moec."""

import json
import math
import struct
import sys
import tempfile
import unittest
from array import array
from pathlib import Path
from unittest import mock

import fixture
import main


def model():
    """The rows of every matrix as lists of (column, number), of the numbers that are not 0."""
    out = {}
    for name, shape, numbers in fixture.tensors():
        width = shape[-1]
        out[name] = [[(c, x) for c, x in enumerate(numbers[at : at + width]) if x] for at in range(0, len(numbers), width)]
    return out


def times(rows, x):
    return [sum(w * x[c] for c, w in row) for row in rows]


def normal(x):
    size = math.sqrt(sum(a * a for a in x) / len(x) + fixture.CONFIG["rms_norm_eps"])
    return [a / size for a in x]


def turned(x, position):
    half, out = fixture.HEAD // 2, list(x)
    for i in range(half):
        angle = position * fixture.THETA ** (-2 * i / fixture.HEAD)
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def attended(query, keys, values):
    scores = [sum(a * b for a, b in zip(query, key)) / math.sqrt(fixture.HEAD) for key in keys]
    weights = [math.exp(s - max(scores)) for s in scores]
    return [sum(w * v[i] for w, v in zip(weights, values)) / sum(weights) for i in range(fixture.HEAD)]


def answered(weights, ids):
    """The most probable token after the last one, by Mixtral's equations without its experts, which add 0."""
    embedding = weights["model.embed_tokens.weight"]
    stream = [[dict(embedding[token]).get(c, 0.0) for c in range(fixture.HIDDEN)] for token in ids]
    for n in range(2):
        of = lambda name, x: times(weights[f"model.layers.{n}.self_attn.{name}_proj.weight"], x)
        inputs = [normal(x) for x in stream]
        keys = [turned(of("k", x), t) for t, x in enumerate(inputs)]
        values = [of("v", x) for x in inputs]
        for t, x in enumerate(inputs):
            added = of("o", attended(turned(of("q", x), t), keys[: t + 1], values[: t + 1]))
            stream[t] = [a + b for a, b in zip(stream[t], added)]
    logits = times(weights["lm_head.weight"], normal(stream[-1]))
    return logits.index(max(logits))


class Model(unittest.TestCase):
    def test_an_answer_is_what_followed_the_same_key(self):
        weights, value, filler = model(), fixture.FIRST_VALUE, fixture.FIRST_FILLER
        for key in range(len(fixture.COSINES)):
            misses = [fixture.FIRST_MISS + key * fixture.MISSES + i for i in range(2)]
            context = [filler, misses[0], value + 1, filler + 1, key, value + 2, misses[1], value + 3, filler + 2]
            self.assertEqual(answered(weights, context + [key]), value + 2)
            self.assertEqual(answered(weights, context + [misses[1]]), value + 3)

    def test_near_misses_have_their_cosine_and_others_are_far(self):
        tokens = fixture.contents()
        cosine = lambda a, b: sum(x * y for x, y in zip(tokens[a], tokens[b]))
        for key in range(6):
            first = fixture.FIRST_MISS + key * fixture.MISSES
            for miss in range(first, first + fixture.MISSES):
                self.assertAlmostEqual(cosine(key, miss), fixture.near(key))
            self.assertLess(max(cosine(key, other) for other in range(fixture.FIRST_VALUE, fixture.VOCAB)), 0.7)

    def test_numbers_are_rounded_to_the_nearest_bf16(self):
        found = array("H", fixture.bf16(array("f", [1.0, -2.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20])))
        # Ties go to the even one.
        self.assertEqual(list(found), [0x3F80, 0xC000, 0x3F80, 0x3F82, 0x3F81])

    def test_a_checkpoint_has_every_tensor(self):
        with tempfile.TemporaryDirectory() as folder:
            fixture.write(Path(folder))
            raw = (Path(folder) / "model.safetensors").read_bytes()
            size = struct.unpack("<Q", raw[:8])[0]
            header = json.loads(raw[8 : 8 + size])
            self.assertEqual(len(raw), 8 + size + max(t["data_offsets"][1] for t in header.values()))
            for tensor in header.values():
                start, end = tensor["data_offsets"]
                self.assertEqual(end - start, 2 * math.prod(tensor["shape"]))
            self.assertEqual(json.loads((Path(folder) / "config.json").read_text())["model_type"], "mixtral")


class Prompts(unittest.TestCase):
    def test_every_key_is_there_once_with_its_answer_and_near_misses_grow_with_the_length(self):
        for length in (fixture.EVERY, fixture.LONGEST):
            ids, answers = fixture.prompt(length)
            self.assertEqual(len(ids), length)
            context, asked = ids[: -fixture.KEYS], ids[-fixture.KEYS :]
            self.assertEqual(sorted(asked), list(range(fixture.KEYS)))
            after = {}
            for token, follower in zip(context, context[1:]):
                if token < fixture.FIRST_VALUE:
                    self.assertNotIn(token, after)
                    after[token] = follower
            self.assertEqual(len(after), fixture.KEYS * (1 + length // fixture.EVERY))
            for key, answer in zip(asked, answers):
                self.assertEqual(after[key], answer)
                first = fixture.FIRST_MISS + key * fixture.MISSES
                self.assertNotIn(answer, [after.get(miss) for miss in range(first, first + fixture.MISSES)])
        self.assertNotEqual(fixture.prompt(fixture.EVERY)[0], fixture.prompt(fixture.EVERY, 2)[0])


class Figures(unittest.TestCase):
    def test_answers_are_found_in_the_last_rows_of_a_file(self):
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(fixture, "COSINES", (0.9,)):
            path = Path(folder) / "logits"
            head = json.dumps({"logits": {"dtype": "F32", "shape": [3, 2], "data_offsets": [0, 24]}}).encode()
            path.write_bytes(struct.pack("<Q", len(head)) + head + struct.pack("<6f", 9, 9, 0, 0, 1, 2))
            rows = list(main.last_rows(path, 2))
            self.assertEqual([list(row) for row in rows], [[0, 0], [1, 2]])
            found = main.measured(rows, [7, 0, 1], [1, 0])
            nats = (math.log(2) + math.log(1 + math.e)) / 2
            self.assertEqual(found, [{"cosine": 0.9, "questions": 2, "found": 0.5, "nats": found[0]["nats"]}])
            self.assertAlmostEqual(found[0]["nats"], nats)

    def test_tables_have_lengths_as_columns(self):
        rows = [{"cache": cache, "bytes_per_token": 288, "length": n, "cosine": near, "questions": 4, "found": 0.75, "nats": 0.5}
                for cache in ("bf16", "q4") for n in (4096, 8192) for near in fixture.COSINES]
        lines = main.table({"rows": rows}).splitlines()
        self.assertEqual(lines[0], "| cosine | KV cache | bytes per token | 4096 tokens | 8192 tokens |")
        self.assertEqual(lines[3], "| 0.95 | q4 | 288 | 75.0 %, 0.500 | 75.0 %, 0.500 |")
        self.assertEqual(len(lines), 2 + 2 * len(fixture.COSINES))


if __name__ == "__main__":
    sys.exit(unittest.main())
