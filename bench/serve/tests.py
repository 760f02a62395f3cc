"""`python3 bench/serve/tests.py`: what the scripts do themselves, without a server."""

import json
import sys
import tempfile
import unittest
from pathlib import Path

import main
import report
from limits import Machine, Shape

import table

ROOT = Path(__file__).resolve().parent.parent.parent


class Figures(unittest.TestCase):
    def test_percentiles_are_values_by_rank(self):
        values = [5, 1, 4, 2, 3]
        self.assertEqual([main.percentile(values, p) for p in (1, 50, 99, 100)], [1, 3, 5, 5])
        self.assertEqual(main.percentile(range(1, 201), 99), 198)

    def test_limits_count_the_experts_that_were_touched(self):
        bench = object.__new__(main.Bench)
        bench.shape = Shape(layers=2, hidden=8, heads=2, kv_heads=2, head_dim=4, experts=16, k=2, inner=4, vocab=32)
        bench.args = main.argparse.Namespace(format="bf16", prompt=6, gen=4)
        found = bench.limit(Machine(1e6, {}), 4, 5)
        # Attention, five experts and a router in each layer, a head, and ten tokens of both caches of four sequences before the middle.
        layer = 2 * (8 * 4 * 8 + 5 * 3 * 8 * 4) + 4 * 16 * 8
        size = 2 * layer + 2 * 32 * 8 + 4 * 2 * 2 * 2 * 4 * 2 * 8
        self.assertAlmostEqual(found["step_bytes"], size)
        self.assertAlmostEqual(found["limit"], 4e6 / size)

    def test_tokenizers_have_a_word_for_every_id(self):
        with tempfile.TemporaryDirectory() as folder:
            tokenizer = json.loads(main.padded(Path(folder), 3000).read_text())
        self.assertEqual(sorted(tokenizer["model"]["vocab"].values()), list(range(3000)))

    def test_the_page_has_the_table_of_the_results(self):
        results = json.loads((ROOT / "bench" / "serve.json").read_text())
        page = (ROOT / "docs" / "serve.md").read_text()
        start, end = report.MARKS
        self.assertEqual(page.partition(start)[2].partition(end)[0].strip(), report.markdown(results).strip())

    def test_tables_go_between_their_marks(self):
        with tempfile.TemporaryDirectory() as folder:
            page = Path(folder) / "page.md"
            page.write_text(f"a\n{report.MARKS[0]}\nold\n{report.MARKS[1]}\nb\n")
            self.assertTrue(table.insert(page, "new\n", *report.MARKS))
            self.assertEqual(page.read_text(), f"a\n{report.MARKS[0]}\nnew\n{report.MARKS[1]}\nb\n")


if __name__ == "__main__":
    sys.exit(unittest.main())
