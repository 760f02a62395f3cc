"""`python3 bench/hosts/tests.py`: what the comparison of hosts computes itself, without a namespace and without moec."""

import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path[1:1] = [str(HERE.parent / "peers"), str(HERE.parent / "peers" / "workers")]

import network  # noqa: E402
import report  # noqa: E402
from engines import Failed  # noqa: E402


def traffic(sent, received, trips, waited):
    return {"sent_bytes": sent, "received_bytes": received, "round_trips": trips, "waited_s": waited}


class Tests(unittest.TestCase):
    def test_messages_of_a_request_are_the_difference_of_sums(self):
        first, second = {"hosts": traffic(10, 20, 3, 1.0)}, {"hosts": traffic(25, 60, 7, 1.5)}
        self.assertEqual(report.own(None, first), first)
        self.assertEqual(report.own(first, second)["hosts"], traffic(15, 40, 4, 0.5))
        self.assertEqual(report.own({"gen": 1}, {"gen": 2}), {"gen": 2})
        second["hosts"]["disks"] = [{"host": 1, "bytes": 4096}]
        self.assertEqual(report.own(first, second)["hosts"], traffic(15, 40, 4, 0.5))

    def test_decoding_is_what_more_tokens_took(self):
        # A token in 0.1 s, then 11 in 0.6 s: ten of them in 0.5 s.
        few = {"gen": 1, "decode_tokens_per_s": 10.0, "hosts": traffic(100, 100, 5, 0.05)}
        many = {"gen": 11, "decode_tokens_per_s": 11 / 0.6, "hosts": traffic(600, 600, 45, 0.3)}
        found = report.decoded(few, many, 1)
        self.assertAlmostEqual(found["rate"], 20)
        self.assertAlmostEqual(found["bytes"], 100)
        self.assertAlmostEqual(found["trips"], 4)
        self.assertAlmostEqual(found["waiting"], 0.5)
        # Four sequences: reports have the tokens of all.
        four = report.decoded(few | {"decode_tokens_per_s": 40.0}, many | {"decode_tokens_per_s": 44 / 0.6}, 4)
        self.assertAlmostEqual(four["rate"], 80)
        self.assertAlmostEqual(four["trips"], 1)
        alone = report.decoded({"gen": 1, "decode_tokens_per_s": 10.0}, {"gen": 11, "decode_tokens_per_s": 10.0}, 1)
        self.assertEqual(set(alone), {"rate"})

    def test_rows_are_medians_beside_one_host(self):
        part = lambda rate, **more: {"rate": rate} | more
        turn = lambda rate: {"start": 1.0, "one": part(rate, bytes=4096, trips=4, waiting=0.25), "four": part(2 * rate, waiting=0.5),
                             "prompt": part(10 * rate, waiting=0.125)}
        base = {"name": "one", "title": "one, one core", "network": "-", "tokens": "-"} | report.combined(
            [{"start": 0.5, "one": part(r), "four": part(2 * r), "prompt": part(10 * r)} for r in (9.0, 10.0, 30.0)])
        self.assertEqual(base["one"]["rate"], 10)
        two = {"name": "slices", "title": "two, slices", "network": "raw", "tokens": "equal"} | report.combined([turn(r) for r in (15.0, 16.0, 14.0)])
        failed = {"name": "owners", "title": "two, owners", "network": "-", "failed": "no room"}
        lines = report.table([base, two, failed])
        self.assertEqual(lines[2], "| one, one core | - | 10 | 20 | 100 | - | - | - | 0.5 | - |")
        self.assertEqual(lines[3], "| two, slices | raw | 15 (1.50×) | 30 (1.50×) | 150 (1.50×) | 4096 | 4 | 25 %, 50 %, 12 % | 1 | equal |")
        self.assertEqual(lines[4].count("|"), lines[3].count("|"))
        self.assertIn("no room", lines[4])

    def test_choices_are_held_against_what_was_measured(self):
        row = lambda name, network, *rates: {"name": name, "format": "q8", "network": network} | report.combined(
            [{"start": 1.0, "one": {"rate": rate}} for rate in rates])
        rows = [row("one", "-", 10, 11, 12), row("slices", "raw", 14, 15, 16), row("owners", "raw", 13, 13, 14), row("stages", "1 Gb/s", 9, 9, 9)]
        choice = lambda chosen, network="raw": {"format": "q8", "network": network, "chosen": chosen, "expected": {"slices": 20.0}}
        of = lambda made: report.verdict(report.measured(rows, made), made["chosen"])
        self.assertEqual(of(choice("slices")), "fastest")
        self.assertEqual(of(choice("owners")), "as fast as slices")
        self.assertEqual(of(choice("alone")), "slower than slices")
        self.assertEqual(of(choice("stages")), "not measured")
        self.assertEqual(of(choice("stages", "1 Gb/s")), "slower than alone")
        lines = report.choices({"rows": rows, "choices": [choice("slices")]})
        self.assertEqual(lines[2], "| q8 | raw | -, 11 | 20, 15 | -, - | -, 13 | slices | fastest |")

    def test_both_hosts_get_the_command_and_the_variables(self):
        words = network.launched(["moec", "run"], ["X"])
        self.assertEqual(words.count("moec"), 2)
        self.assertEqual([words[i + 1] for i, word in enumerate(words) if word == "-x"], ["X", "X"])
        self.assertEqual([words[i + 2] for i, word in enumerate(words) if word == "taskset"], ["0", "1"])
        self.assertEqual(network.alone(["moec"], 2), ["taskset", "-c", "0-1", "moec"])

    def test_users_without_rights_are_told(self):
        with mock.patch("os.geteuid", return_value=1000), self.assertRaisesRegex(Failed, "need root"):
            network.check()

    def test_the_tables_go_between_their_markers(self):
        start, end = report.MARKS[0]
        with tempfile.TemporaryDirectory() as folder:
            page = Path(folder) / "page.md"
            page.write_text(f"a {start} old {end} b")
            self.assertTrue(report.insert(page, "new\n"))
            self.assertEqual(page.read_text(), f"a {start}\nnew\n\n{end} b")
            page.write_text("no markers")
            self.assertFalse(report.insert(page, "new\n"))


if __name__ == "__main__":
    unittest.main()
