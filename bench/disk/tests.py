"""`python3 bench/disk/tests.py`: what the scripts compute themselves, without an engine."""

import json
import math
import os
import struct
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path[1:1] = [str(HERE.parent / "peers"), str(HERE.parent / "peers" / "workers")]

import best_of  # noqa: E402
import chart  # noqa: E402
import disk  # noqa: E402
import group  # noqa: E402
import little  # noqa: E402
import report  # noqa: E402
from limits import Shape  # noqa: E402
from watch import Moment, Run, watch  # noqa: E402
from weights import least_read, shares  # noqa: E402

OLMOE = Shape(layers=16, hidden=2048, heads=16, kv_heads=16, head_dim=128, experts=64, k=8, inner=1024, vocab=50304)


class Plain(group.Group):
    """A group that limits nothing: for what is not about memory."""

    def __init__(self):
        self.version, self.path = group.V1, Path("/nowhere")

    def enter(self, command):
        return command

    def read(self, name):
        return 5

    def anonymous(self):
        return 3

    def kills(self):
        return 0


class Tests(unittest.TestCase):
    def test_spans_leave_out_the_prompt(self):
        run = Run([Moment(10.0, 100), Moment(11.0, 300), Moment(12.0, 500), Moment(16.0, 600)])
        self.assertEqual(run.span(0, 2), {"rate": 1.0, "read": 200.0})
        self.assertEqual(run.span(2, 9), {"rate": 0.25, "read": 100.0})
        self.assertIsNone(run.span(3, 9))

    def test_tokens_are_counted_as_they_come(self):
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            three = "read x; printf 5; sleep 0.1; printf ,6; sleep 0.2; printf ',7\\n'; sleep 0.1"
            run = watch(Plain(), ["sh", "-c", three], 3, log, "1\n")
            self.assertEqual((run.failed, run.ids(), run.peak, run.anonymous), (None, [5, 6, 7], 5, 3))
            times = [m.seconds for m in run.moments]
            self.assertGreater(times[2] - times[1], 0.15)
            run = watch(Plain(), ["sh", "-c", "printf 5; echo error: no more >&2; exit 3"], 3, log)
            self.assertEqual(run.failed, "ended with status 3 after 1 tokens: error: no more")

    def test_a_run_that_takes_too_long_counts_as_far_as_it_came(self):
        with tempfile.TemporaryDirectory() as folder:
            slow = "printf 1; while :; do printf ,2; sleep 0.05; done"
            run = watch(Plain(), ["sh", "-c", slow], 1000, Path(folder) / "log", limit=1.5)
            self.assertTrue(run.cut and not run.failed and len(run.moments) > 10)
            self.assertLess(run.span(2, 999)["rate"], 21)
            run = watch(Plain(), ["sh", "-c", slow], 1000, Path(folder) / "log", limit=0.1)
            self.assertIn("ended with status", run.failed)

    def test_groups_of_both_versions_are_found(self):
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            (folder / "cgroup.controllers").write_text("cpu memory io\n")
            mounts = folder / "mounts"
            mounts.write_text(f"tmpfs /tmp tmpfs rw 0 0\ncgroup2 {folder} cgroup2 rw 0 0\n")
            self.assertEqual(group.hierarchy(mounts=mounts), (folder, group.V2))
            mounts.write_text(f"cgroup {folder}/memory cgroup rw,memory 0 0\n")
            self.assertEqual(group.hierarchy(mounts=mounts), (folder / "memory", group.V1))
            mounts.write_text("tmpfs /tmp tmpfs rw 0 0\n")
            with self.assertRaisesRegex(group.NoGroup, "--cgroup"):
                group.hierarchy(mounts=mounts)

    def test_a_token_reads_what_is_not_held(self):
        everything = OLMOE.layers * OLMOE.k * OLMOE.expert * 8.5 / 8
        none, some = least_read(OLMOE, "q8", 0), least_read(OLMOE, "q8", 9 << 29)
        self.assertAlmostEqual(none["uniform"], everything)
        self.assertAlmostEqual(none["popular"] / everything, 1.0)
        self.assertTrue(0.31e9 < some["uniform"] < 0.33e9 and some["popular"] < 0.7 * some["uniform"])
        self.assertEqual(least_read(OLMOE, "q8", None), {"uniform": 0.0, "popular": 0.0})
        self.assertTrue(all(abs(sum(s) - 1) < 1e-9 and s[0] > s[-1] for s in shares(16, 64)))

    def test_the_disk_is_compared_at_the_stores_block_size(self):
        rates = [{"block_bytes": 1 << size, "order": order, "gb_per_s": size / 10} for size in (12, 19) for order in ("random", "sequential")]
        machine = {"disk": {"rates": rates}}
        row = {"said": {"disk": {"bytes": 9.5e9, "busy_seconds": 10.0}}}
        self.assertAlmostEqual(report.disk_share(row, machine), 0.5)
        row["said"]["disk"]["block_bytes"] = 1 << 13
        self.assertAlmostEqual(report.disk_share(row, machine), 0.95 / 1.2)
        self.assertIsNone(report.disk_share({"said": {"text": None}}, machine))
        self.assertIsNone(report.disk_share(row, {"disk": None}))

    def test_a_bound_is_bytes_or_arithmetic(self):
        said = {"disk": {"bytes": 4e9, "busy_seconds": 2.0}, "cache": {"bytes_belady": 5e9}}
        row = {"engine": "moec", "cap": 1, "least": {"popular": 1e9}, "said": said}
        free = {"engine": "moec", "cap": None, "warm": {"rate": 3.0}}
        self.assertEqual(report.bounds(row, [row], {}, 10), (2.0, 4.0))
        self.assertEqual(report.bounds(row, [row, free], {}, 10), (2.0, 3.0))
        faster = {"disk": {"rates": [{"block_bytes": 4096, "order": "random", "gb_per_s": 2.5}]}}
        self.assertEqual(report.bounds(row, [row], faster, 10), (2.5, 5.0))
        self.assertEqual(report.bounds(free, [free], {}, 10), (None, None))

    def test_what_is_missing_is_a_dash(self):
        phase = {"rate": 2.0, "read": 1e9}
        row = {"bits": 8, "cap": 1 << 30, "budget": None, "start": 1.0, "cold": phase, "warm": phase, "peak": 1 << 30, "rss": None,
               "anonymous": 1 << 20, "least": {"uniform": 2e9, "popular": 1e9}}
        rows = [row | {"engine": "moec", "said": {"decode_tokens_per_s": 2}}, row | {"engine": "llama.cpp", "warm": {"rate": 1.0, "read": 2e9}},
                {"bits": 8, "cap": None, "engine": "llama.cpp, repacked", "budget": None, "failed": "a | b"}]
        part = {"rows": rows, "conditions": {"tokens": 9}}
        lines = report.table(8, part | {"machine": {}})
        self.assertEqual(lines[2], "| 1 GiB | **moec** | - | 1 | 2 (1.00×) | 2 (2.00×) | 1.00 GB | 1.00 GB | 2.00 GB / 1.00 GB / - | - | - | - "
                                   "| 1.00 GiB | 0.00 GiB | - |")
        self.assertEqual(lines[4].count("|"), lines[0].count("|"))
        self.assertIn("no cap", chart.svg({"8": part}))

    def test_read_ahead_is_put_back(self):
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            number = folder.stat().st_dev
            name = f"{os.major(number)}:{os.minor(number)}"
            self.assertIsNone(disk.setting(folder, folder))
            queue = folder / name / "queue"
            queue.mkdir(parents=True)
            (queue / "read_ahead_kb").write_text("128\n")
            path = disk.setting(folder, folder)
            with mock.patch.object(disk, "setting", lambda _: path):
                with disk.read_ahead(folder, None) as kib:
                    self.assertEqual(kib, 128)
                with self.assertRaises(KeyError), disk.read_ahead(folder, 4) as kib:
                    self.assertEqual((kib, path.read_text()), (4, "4"))
                    raise KeyError
            self.assertEqual(path.read_text(), "128")

    def test_gamma_has_a_share_of_the_tokens_fall_back(self):
        found = [i / 100 for i in range(100)]
        self.assertEqual(little.gamma(found, 0.0), 0.0)
        for ratio in (0.21, 0.5):
            gamma = little.gamma(found, ratio)
            self.assertAlmostEqual(sum(p <= gamma for p in found) / 100, ratio)
        self.assertEqual(little.gamma([0.5], 0.5), 0.5)

    def test_probabilities_are_read_from_logits(self):
        logits = [0.0, 0.0, math.log(2.0), -200.0, -200.0, 7.0]
        head = json.dumps({"logits": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}).encode()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "logits.safetensors"
            path.write_bytes(struct.pack("<Q", len(head)) + head + struct.pack("<6f", *logits))
            found = little.largest_probabilities(path)
        self.assertAlmostEqual(found[0], 0.5, places=6)
        self.assertAlmostEqual(found[1], 1.0)

    def test_sequences_that_choose_alone_share_few_experts(self):
        self.assertAlmostEqual(best_of.bound(OLMOE, 1), 1.0)
        self.assertTrue(1.5 < best_of.bound(OLMOE, 4) < 1.7)
        row = {"best_of": 4, "repeat": 5, "model": "m", "prompt": 8, "gen": 9, "best_of_tokens_per_s": 30.0, "single_runs_tokens_per_s": 10.0,
               "speedup": 3.0, "bound": None}
        self.assertIn("| m | 8 | 8 | 9 | 30 | 10 | **3.00×** | - |", report.markdown({"8": {"best_of": [row]}}))


if __name__ == "__main__":
    unittest.main()
