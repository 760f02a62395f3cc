#!/usr/bin/env python3
"""Two builds of moec on this machine: every step of the same models, compiled by each, timed by turns.

    python3 bench/versions.py OLD NEW [--model FOLDER …] [--formats bf16/f32,q8/auto] [--threads 1,2] [--turns 9] [--json]

OLD and NEW are moec's programs. Each compiles every model in every format; `moec steps` times a call of each kind, the two by turns,
and a ratio above 1 says that NEW is faster. The interval is that of the ratio's median, from 4000 resampled sets of turns."""

import argparse
import json
import random
import statistics
import subprocess
import tempfile
from pathlib import Path

FERRIS = Path(__file__).resolve().parent.parent / "golden" / "models" / "ferris"
CALLS = {"prefill 512": ["--prefill", "512"], "decode 1": ["--decode", "1"], "decode 4": ["--decode", "4"]}
RESAMPLED = 4000
TOML = """[model]
source = "{source}"
[shapes]
max_context = 1024
prefill_chunk = 512
decode_batch = [1, 4]
[weights]
experts = "{fmt}"
attention = "{fmt}"
embeddings = "{fmt}"
activations = "{activations}"
"""


def arguments():
    words = lambda text: text.split(",")
    p = argparse.ArgumentParser(description="Compare the speed of what two builds of moec compile.")
    p.add_argument("old", type=Path)
    p.add_argument("new", type=Path)
    p.add_argument("--model", type=Path, action="append", help="folder of a checkpoint [default: the demo model]")
    p.add_argument("--formats", type=words, default=["bf16/f32", "bf16/auto", "q8/auto", "q4/auto"], help="weights/activations")
    p.add_argument("--threads", type=words, default=["1", "2"])
    p.add_argument("--turns", type=int, default=9)
    p.add_argument("--repeat", default="21", help="calls of each kind in a turn, of which the median counts")
    p.add_argument("--json", action="store_true", help="print one JSON object for each row instead")
    return p.parse_args()


def run(*words):
    return subprocess.run([str(w) for w in words], check=True, stdout=subprocess.PIPE, text=True).stdout


def interval(ratios):
    """95 % of the medians of resampled turns."""
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLED))
    return medians[RESAMPLED // 40], medians[-RESAMPLED // 40]


def rows(args, model, fmt, folder):
    """A row for each kind of call and number of threads."""
    weights, activations = fmt.split("/")
    toml = folder / "model.toml"
    toml.write_text(TOML.format(source=model.resolve(), fmt=weights, activations=activations))
    programs = {"old": args.old.resolve(), "new": args.new.resolve()}
    for name, moec in programs.items():
        run(moec, "build", "--quiet", "--no-run", toml, "-o", folder / name)
    for threads in args.threads:
        for call, words in CALLS.items():
            seconds = {"old": [], "new": []}
            for turn in range(args.turns):
                for name in sorted(programs, reverse=turn % 2 == 0):
                    timed = run(programs[name], "steps", folder / name, *words, "--threads", threads, "--repeat", args.repeat, "--json")
                    seconds[name].append(json.loads(timed)["seconds"])
            ratios = [old / new for old, new in zip(seconds["old"], seconds["new"])]
            low, high = interval(ratios)
            yield {"model": model.name, "format": fmt, "call": call, "threads": int(threads),
                   "old_ms": statistics.median(seconds["old"]) * 1e3, "new_ms": statistics.median(seconds["new"]) * 1e3,
                   "ratio": statistics.median(ratios), "low": low, "high": high}


def main():
    args = arguments()
    for model in args.model or [FERRIS]:
        for fmt in args.formats:
            with tempfile.TemporaryDirectory() as folder:
                for row in rows(args, model, fmt, Path(folder)):
                    print(json.dumps(row) if args.json else
                          "{model} {format}, {call}, {threads} threads: {old_ms:.3f} → {new_ms:.3f} ms, "
                          "{ratio:.3f} ({low:.3f} to {high:.3f}) times as fast".format(**row), flush=True)


if __name__ == "__main__":
    main()
