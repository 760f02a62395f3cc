"""`python3 bench/peers/tests.py`: what the scripts do themselves, without an engine."""

import io
import sys
import tempfile
import unittest
from contextlib import redirect_stderr
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import limits
import main
from engines import PEERS, Again, Failed, Venvs, Worker


class Installer:
    """In place of pip: counts how often each peer is installed, and fails for some."""

    def __init__(self, broken):
        self.broken, self.tried = broken, []

    def __call__(self, name, peer, folder, python):
        self.tried.append(name)
        if name in self.broken:
            raise Failed("could not be installed: no compiler")
        folder.mkdir(parents=True, exist_ok=True)


class Installing(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.venvs = Venvs(Path(folder.name))
        self.venvs.install = Installer({"ik"})
        self.venvs.version = lambda python, package: "1"

    def bench(self):
        """A bench without moec, models and engines: its venvs are these."""
        bench = object.__new__(main.Bench)
        bench.venvs, bench.rows, bench.failures = self.venvs, [], {}
        bench.args = SimpleNamespace(peers=list(PEERS))
        return bench

    def test_what_cannot_be_installed_is_tried_and_told_once(self):
        bench, said = self.bench(), io.StringIO()
        with redirect_stderr(said):
            for section in ("quality", "model"):
                for fmt in PEERS["ik"].formats:
                    work = lambda f=fmt: Worker(self.venvs, "ik", "nowhere", 2, 64, f)
                    self.assertIsNone(bench.attempt("ik", fmt, section, work))
        self.assertEqual(self.venvs.install.tried, ["ik"])
        self.assertEqual(said.getvalue().count("no compiler"), 1)
        # Every format keeps its row, with the cause.
        self.assertEqual([r["format"] for r in bench.rows], [*PEERS["ik"].formats] * 2)
        self.assertEqual({r["failed"] for r in bench.rows}, {"could not be installed: no compiler"})

    def test_a_peer_that_is_installed_is_not_installed_again(self):
        for _ in range(3):
            self.assertTrue(self.venvs.python("llama").name.startswith("python"))
        self.assertEqual(self.venvs.install.tried, ["llama"])
        # One that failed does not stand in the way of others, and is tried again in the next run.
        for kind in (Failed, Again):
            with self.assertRaises(kind):
                self.venvs.python("ik")
        again = Venvs(self.venvs.root)
        with mock.patch.object(again, "install", Installer(set())), mock.patch.object(again, "version", self.venvs.version):
            self.assertTrue(again.python("ik"))

    def test_a_failure_of_a_format_is_told_for_each(self):
        bench, said = self.bench(), io.StringIO()

        def work():
            raise Failed("no such format")

        with redirect_stderr(said):
            for fmt in ("q8", "q4"):
                bench.attempt("llama", fmt, "model", work)
        self.assertEqual(said.getvalue().count("no such format"), 2)


class Limits(unittest.TestCase):
    def test_weights_of_a_hybrid_are_those_of_its_model_card(self):
        """Qwen3.6-35B-A3B: 35 billion parameters, of which a token takes 3 billion."""
        kinds = [("full" if (i + 1) % 4 == 0 else "linear") + "_attention" for i in range(40)]
        shape = limits.Shape.of({"text_config": {
            "num_hidden_layers": 40, "layer_types": kinds, "hidden_size": 2048, "num_attention_heads": 16,
            "num_key_value_heads": 2, "head_dim": 256, "num_experts": 256, "num_experts_per_tok": 8,
            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "vocab_size": 248320,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        }})
        whole = shape.mixers + shape.layers * (shape.experts * shape.expert + shape.experts * shape.hidden) + 2 * shape.vocab * shape.hidden
        self.assertEqual(round(whole / 1e8), 347)
        self.assertEqual(round(shape.operations(1, 0) / 2e9), 3)
        self.assertEqual((shape.attends, shape.states), (10, 30 * 32 * 128 * 128))


class WarmStarts(unittest.TestCase):
    def test_layers_follow_the_size_of_the_file(self):
        self.assertEqual([main.layers_with(gb) for gb in (0, 1, 4, 16)], [1, 1, 4, 18])

    def test_every_way_is_warmed_and_timed_by_turns(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        bundle = Path(folder.name) / "m.moec"
        (bundle / "artifacts").mkdir(parents=True)
        (bundle / "weights.bin").write_bytes(b"w" * 1000)
        (bundle / "artifacts" / "more").write_bytes(b"m" * 24)
        bench = object.__new__(main.Bench)
        bench.rows, bench.failures, bench.versions = [], {}, {}
        bench.args = SimpleNamespace(peers=[], repeat=3, threads=2, context=64, moec="moec")
        bench.models = SimpleNamespace(bundle=lambda *_, **__: bundle, run=lambda words, _: ran.append(words[1:]))
        ran, warmed = [], []
        with mock.patch.object(main, "read", warmed.append), mock.patch.object(main, "PAUSE", 0), redirect_stderr(io.StringIO()):
            bench.warm_of(Path("olmoe-1"))
        mapped = ["--weights" in words for words in ran]
        self.assertEqual((mapped, warmed), ([False, True] * 3, [bundle] * 6))
        self.assertEqual([(r["engine"], r["bytes"]) for r in bench.rows], [("moec-default", 1024), ("moec-mmap", 1024)])
        results = {"rows": bench.rows, "versions": {}, "machine": {"description": "a box, measured", "read_gb_per_s": 1.0},
                   "conditions": {"warm": [1], "date": "today"}}
        text = main.table.warm(results, PEERS)
        self.assertIn("| **moec**, default | ", text)
        self.assertEqual(text.count("\n| "), 4)


class Tables(unittest.TestCase):
    def results(self, rows, models):
        peak = {"format": "f32", "gops": 1.0, "instruction": "fma"}
        machine = {"description": "a box, measured", "read_gb_per_s": 2.0, "read_gb_per_s_one_thread": 1.0, "peaks": [peak]}
        conditions = {"threads": 2, "gen": 8, "repetitions": 3, "models": models, "date": "today"}
        return {"rows": rows, "versions": {}, "machine": machine, "conditions": conditions}

    def test_hybrids_show_speeds_operators_and_both_forms_of_the_delta_rule(self):
        row = lambda task, rate: {"section": "model", "model": "m", "engine": "moec", "format": "q8", "bits": 8.5, "task": task,
                                  "rate": rate, "limit": 100.0}
        op = lambda op, task, seconds, limit: {"section": "operators", "model": "m", "format": "q8", "task": task, "op": op, "steps": 3,
                                               "seconds": seconds, "limit": limit}
        rows = [row("prefill 512", 50.0), row("decode 1 at 512", 25.0), op("delta_rule", "prefill 512", 0.1536, 0.0768),
                op("delta_rule", "decode 1 at 512", 0.0006, 0.0003), op("dispatch", "prefill 512", 0.01, 0.0)]
        text = main.table.hybrids(self.results(rows, {"m": 4}), PEERS)
        self.assertIn("| **moec** | 8.5 | **50** (50 %) | **25** (25 %) |", text)
        self.assertIn("| `delta_rule` | 154 | 50 % | 0.6 | 50 % |", text)
        self.assertIn("| `dispatch` | 10 |  | – |  |", text)
        self.assertIn("takes 100 µs for a token by chunks, 200 µs by the step: chunks are 2.0 times as fast", text)

    def test_widths_show_bytes_and_shares(self):
        row = {"section": "widths", "model": "m", "engine": "moec", "format": "q3", "bits": 3.5, "task": "decode 1 at 512", "rate": 80.0,
               "limit": 100.0, "token_bytes": 5 * 2**20}
        text = main.table.widths(self.results([row], {"m": 16}), PEERS)
        self.assertIn("| 3 bits | 3.5 | 5 | **80** (80 %) |", text)


if __name__ == "__main__":
    sys.exit(unittest.main())
