"""`python3 bench/disk/neuron_tests.py`: what the comparison of neurons computes itself, without an engine."""

import sys
import tempfile
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[1:1] = [str(HERE.parent / "peers"), str(HERE.parent / "peers" / "workers")]

import neuron_report as report  # noqa: E402
from limits import Shape  # noqa: E402
from neuron_weights import NEURONS, WHOLE  # noqa: E402

SHAPE = Shape(layers=4, hidden=2048, heads=16, kv_heads=16, head_dim=128, experts=64, k=8, inner=1024, vocab=50304)
PAGING = {"frame_bytes": 4352, "neurons_per_frame": 1}


def said(used, belady, block):
    return {"disk": {"block_bytes": block}, "cache": {"bytes_used": used, "bytes_belady": belady}}


def seen(rate, read):
    return {"rate": rate, "read": read, "read_later": read, "peak": 1 << 30, "of_no_file": 1 << 29}


class Tests(unittest.TestCase):
    def test_experts_are_most_of_a_model(self):
        experts, rest = report.sizes(SHAPE, "q8")
        self.assertAlmostEqual(experts, 4 * 64 * 3 * 2048 * 1024 * 8.5 / 8)
        self.assertTrue(0.28e9 < rest < 0.30e9)

    def test_the_least_of_neurons_has_the_padding_of_disk(self):
        found = report.least(said(4352 * 900, 4352 * 300, 8192), PAGING, 4)
        self.assertEqual(found, {"least": 8192 * 100, "asked": 8192 * 300})
        whole = report.least(said(900, 300, 4096), {"frame_bytes": 8, "neurons_per_frame": 0}, 4)
        self.assertEqual(whole, {"least": 100, "asked": 300})
        self.assertIsNone(report.least(said(1, None, 4096), PAGING, 4)["least"])

    def test_the_share_of_the_awake_is_what_was_requested(self):
        every = 3 * SHAPE.layers * SHAPE.k * SHAPE.inner
        self.assertAlmostEqual(report.active(said(4352 * every // 4, 0, 8192), SHAPE, PAGING, 4), 0.25)

    def test_rows_say_how_many_times_faster(self):
        row = {"zeros": 70, "bits": 8, "memory": 50, "cap": 1 << 30, NEURONS: seen(20.0, 30e6) | {"least": 12.34e6},
               WHOLE: seen(10.0, 60e6) | {"least": 40e6}, report.LLAMA: {"failed": "ended by the kernel", "peak": 1 << 30}}
        lines = report.table([row])
        self.assertEqual(lines[2], "| 70 % | 8 | 50 % | 1.00 GiB | 30 | 60 | - | 12.3 / 40 | 20 | 10 (neurons 2.00×) | - |")
        self.assertEqual(lines[0].count("|"), lines[2].count("|"))

    def test_the_table_goes_between_its_markers(self):
        start, end = report.MARKS
        with tempfile.TemporaryDirectory() as folder:
            page = Path(folder) / "page.md"
            page.write_text(f"a {start} old {end} b")
            self.assertTrue(report.insert(page, "new\n"))
            self.assertEqual(page.read_text(), f"a {start}\nnew\n{end} b")
            page.write_text("no markers")
            self.assertFalse(report.insert(page, "new\n"))


if __name__ == "__main__":
    unittest.main()
