"""`python3 bench/peers/tests.py`: what the scripts do themselves, without an engine."""

import io
import sys
import tempfile
import unittest
from contextlib import redirect_stderr
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import capped
import limits
import main
from engines import PEERS, Again, Failed, Venvs, Worker
from models import Models


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


    def test_heads_are_wider_than_narrow_matrices(self):
        shape = limits.Shape(layers=1, hidden=8, heads=1, kv_heads=1, head_dim=8, experts=2, k=1, inner=8, vocab=16)
        matrices, head, router = shape.mixers + shape.expert, 16 * 8, 4 * 2 * 8
        for fmt, bits, ends in (("q4", 4.5, 4.5), ("q2", 2.5, 4.5), ("q2s", 2.125, 4.5), ("q6", 6.5, 8.5)):
            self.assertEqual(shape.weight_bytes(1, fmt), (matrices * bits + head * ends) / 8 + router)


class Bundles(unittest.TestCase):
    def test_narrow_formats_have_wider_ends_and_a_budget_is_of_the_build(self):
        with tempfile.TemporaryDirectory() as folder, redirect_stderr(io.StringIO()):
            models = Models(Path(folder), __file__, None)
            models.run = lambda words, what: "{}"
            out = models.bundle(Path(folder) / "m", "q2s", 64, budget="700 MiB")
            self.assertEqual(out.name, "m-q2s-q4-auto-native-64-700MiB.moec")
            toml = out.with_suffix(".toml").read_text()
            self.assertIn('experts = "q2s"\nattention = "q2s"\nembeddings = "q4"\n', toml)
            self.assertTrue(toml.endswith('[memory]\nbudget = "700 MiB"\n'))
            plain = models.bundle(Path(folder) / "m", "q4", 64)
            self.assertNotIn("budget", plain.with_suffix(".toml").read_text())


class FromDisk(unittest.TestCase):
    SHAPE = limits.Shape(layers=2, hidden=256, heads=4, kv_heads=4, head_dim=64, experts=8, k=2, inner=256, vocab=1024)

    def test_the_cap_holds_half_of_the_experts(self):
        expert = self.SHAPE.expert * 4.5 / 8
        rest = (self.SHAPE.mixers + 2 * 1024 * 256) * 4.5 / 8 + 4 * 16 * 256 + 4 * self.SHAPE.kv_bytes(64) + capped.BUFFERS
        self.assertEqual(capped.cap(self.SHAPE, 64), round((rest + 8 * expert) / 2**20))
        self.assertEqual(capped.FORMATS, ["q4", "q3", "q2", "q2s"])

    def test_formats_are_measured_by_turns_and_what_prompts_read_is_left_out(self):
        asked = []

        class Engine:
            """Every prompt reads 1000 bytes and every token after it 10; of its four uses one misses."""

            def __init__(self, fmt, rate):
                self.fmt, self.rate, self.bytes, self.hits, self.misses = fmt, rate, 0, 0, 0

            def ask(self, line):
                asked.append(self.fmt)
                gen = int(line.split()[1])
                self.bytes, self.hits, self.misses = self.bytes + 1000 + 10 * gen, self.hits + 7 + 3 * gen, self.misses + 5 + gen
                return {"gen": gen, "decode_tokens_per_s": self.rate, "disk": {"bytes": self.bytes}, "memory": {"budget": 700 << 20, "peak": 1},
                        "cache": {"hits": self.hits, "misses": self.misses, "experts": 4, "policy": "lru"}}

            __enter__ = lambda self: self
            __exit__ = lambda self, *_: None

        def bundle(folder, fmt, context, budget):
            if fmt == "q2s":
                raise Failed("unknown")
            return fmt

        args = SimpleNamespace(prompt=[8], gen=5, repeat=2, context=64, formats=capped.FORMATS)
        models = SimpleNamespace(checkpoint=lambda *_, **__: Path("m"), shape=lambda _: self.SHAPE, bundle=bundle)
        rows, failures = [], {}
        bench = capped.Capped(args, models, rows, failures)
        bench.process = lambda fmt: Engine(fmt, {"q4": 10.0, "q3": 15.0, "q2": 20.0}[fmt])
        with mock.patch.object(capped, "PAUSE", 0), redirect_stderr(io.StringIO()):
            bench.run("olmoe", 2)
        self.assertEqual(asked, ["q4", "q3", "q2"] + ["q4", "q4", "q3", "q3", "q2", "q2"] * 2)
        self.assertEqual([(r["bytes"], r["found"], r["in_memory"]) for r in rows], [(10, 0.75, 0.25)] * 3)
        self.assertEqual(list(failures), ["moec q2s capped"])
        results = {"rows": rows, "machine": {"description": "a box, measured"},
                   "conditions": {"models": {"olmoe": 2}, "threads": 2, "gen": 5, "prompts": [8], "repetitions": 2, "date": "today"}}
        lines = capped.markdown(results, PEERS).splitlines()
        self.assertIn("olmoe, 2 layers, a cap of 700 MiB; ", lines[2])
        self.assertEqual(lines[-1], "| 2 bits | 2.5 | 25 % | 75.0 % | 1e-05 | 0.00 | 20 | 2.00 |")


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
        row = {"section": "widths", "model": "m, 16 layers", "engine": "moec", "format": "q3", "bits": 3.5, "task": "decode 1 at 512", "rate": 80.0,
               "limit": 100.0, "token_bytes": 5 * 2**20}
        peer = row | {"engine": "llama", "rate": 40.0, "ratio": 2.0}
        failed = {"section": "widths", "model": "m, 16 layers", "engine": "ik", "format": "q3", "failed": "no such type"}
        results = self.results([row, peer, failed], {})
        earlier = self.results([row | {"model": "n, 4 layers", "rate": 70.0}, row | {"rate": 60.0}], {})
        earlier["conditions"]["date"] = "an earlier day"
        main.table.keep_others(earlier, results)
        text = main.table.widths(results, PEERS)
        for line in ("| m, 16 layers | bits per weight |", "| 3 bits | 3.5 | 5 | **80** (80 %) |", "| llama.cpp, Q3_K | 3.4375 |  | 40 (moec 2.00×) |",
                     "| ik_llama.cpp, Q3_K: no such type | 3.4375 |  | – |", "| n, 4 layers | bits per weight |", "| 3 bits | 3.5 | 5 | **70** (70 %) |"):
            self.assertIn(line, text)
        self.assertNotIn("**60**", text)
        self.assertIn("**n, 4 layers.** an earlier day. Machine: ", text)
        self.assertNotIn("**m, 16 layers.** an earlier day", text)


if __name__ == "__main__":
    sys.exit(unittest.main())
