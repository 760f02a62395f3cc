"""Retrieval from long contexts, by the form of the KV cache. `cargo xtask bench-needle` starts it.

Python 3.10 or later, std only. The model and its prompts are written by `fixture.py`; moec builds the model once for each form of the
cache and gives the logits of every position, of which those of the last ones, the questions, are read.
"""

import argparse
import json
import math
import struct
import sys
import time
from array import array
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[1:1] = [str(HERE.parent / "peers")]

import fixture  # noqa: E402
from engines import Failed, log  # noqa: E402
from models import Models  # noqa: E402
from table import cells, find, insert, ordered, rule  # noqa: E402

TOML = """[model]
source = "model"
[shapes]
max_context = {context}
prefill_chunk = 512
[weights]
activations = "f32"
[memory]
kv_cache = "{cache}"
"""
MARKS = ("<!-- bench-needle -->", "<!-- /bench-needle -->")
PIECE = 4096
"""Token ids of one argument: the kernel bounds an argument's bytes."""


def arguments():
    numbers = lambda text: [int(n) for n in text.split(",")]
    p = argparse.ArgumentParser(prog="cargo xtask bench-needle", description="Measure retrieval from long contexts, by the form of the KV cache.")
    p.add_argument("--moec", type=Path, required=True, help=argparse.SUPPRESS)
    p.add_argument("--cache", type=Path, required=True, help="folder for the checkpoint and bundles")
    p.add_argument("--out", type=Path, default=HERE / "results.json")
    p.add_argument("--page", type=Path, default=Path("docs/benchmarks.md"), help="file with the markers of the table")
    p.add_argument("--lengths", type=numbers, default=[4096, 8192, 16384, 32768], help=f"tokens of prompts, {fixture.EVERY} to {fixture.LONGEST}")
    p.add_argument("--caches", type=lambda text: text.split(","), default=["bf16", "q8", "q5", "q4"], help="forms of the KV cache")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--json", action="store_true", help="print the results as JSON instead of the table")
    args = p.parse_args()
    if not all(fixture.EVERY <= n <= fixture.LONGEST for n in args.lengths):
        p.error(f"a prompt has {fixture.EVERY} to {fixture.LONGEST} tokens")
    return args


def last_rows(path, rows):
    """The last rows of the logits in a file of moec's."""
    with open(path, "rb") as file:
        start = 8 + struct.unpack("<Q", file.read(8))[0]
        _, vocab = json.loads(file.read(start - 8))["logits"]["shape"]
        file.seek(-4 * vocab * rows, 2)
        for _ in range(rows):
            row = array("f")
            row.frombytes(file.read(4 * vocab))
            yield row


def measured(rows, ids, answers):
    """For each cosine of near misses: the questions, the share whose most probable next token is the answer, and the mean of −ln p(answer)."""
    found = {near: [] for near in fixture.COSINES}
    for row, key, answer in zip(rows, ids[-len(answers):], answers):
        most = max(row)
        surprise = most - row[answer] + math.log(sum(math.exp(x - most) for x in row))
        found[fixture.near(key)].append((row[answer] == most, surprise))
    mean = lambda column: sum(column) / len(column)
    return [{"cosine": near, "questions": len(of), "found": mean([hit for hit, _ in of]), "nats": mean([s for _, s in of])}
            for near, of in found.items()]


def table(results):
    """Lengths as columns: the share of answers that are found, and −ln p."""
    rows = results["rows"]
    lengths = ordered(r["length"] for r in rows)
    out = [cells("cosine", "KV cache", "bytes per token", *[f"{n} tokens" for n in lengths]), rule(3 + len(lengths))]
    for near in fixture.COSINES:
        for cache in ordered(r["cache"] for r in rows):
            found = [find(rows, cosine=near, cache=cache, length=n) for n in lengths]
            out.append(cells(str(near), cache, str(found[0]["bytes_per_token"]), *[f"{100 * r['found']:.1f} %, {r['nats']:.3f}" for r in found]))
    return "\n".join(out) + "\n"


class Bench:
    def __init__(self, args):
        self.args, self.folder, self.moec = args, args.cache.resolve() / "needle", args.moec.resolve()
        self.models = Models(args.cache.resolve(), self.moec, None)

    def bundle(self, cache):
        toml, bundle = self.folder / f"{cache}.toml", self.folder / f"{cache}.moec"
        toml.write_text(TOML.format(context=fixture.LONGEST, cache=cache))
        self.models.run([self.moec, "build", "--quiet", "--no-run", toml, "-o", bundle], f"build-needle-{cache}")
        return bundle

    def rows(self, cache):
        bundle, out = self.bundle(cache), self.folder / "logits.safetensors"
        info = json.loads(self.models.run([self.moec, "run", bundle, "info", "--json"], "needle-info"))
        size = info["memory"]["kv_bytes"] // info["model"]["max_context"]
        for length in self.args.lengths:
            ids, answers = fixture.prompt(length)
            words = [self.moec, "run", bundle, "logits", "--threads", self.args.threads, "--out", out]
            for at in range(0, length, PIECE):
                words += ["--ids", ",".join(map(str, ids[at : at + PIECE]))]
            self.models.run(words, f"needle-{cache}-{length}")
            found = measured(last_rows(out, len(answers)), ids, answers)
            out.unlink()
            log(f"  {cache}, {length} tokens: " + ", ".join(f"{100 * r['found']:.1f} % at {r['cosine']}" for r in found))
            yield from ({"cache": cache, "bytes_per_token": size, "length": length} | r for r in found)

    def run(self):
        start = time.perf_counter()
        fixture.write(self.folder / "model")
        rows = [row for cache in self.args.caches for row in self.rows(cache)]
        return {"date": time.strftime("%d %B %Y"), "seconds": round(time.perf_counter() - start), "rows": rows}


def main():
    args = arguments()
    results = Bench(args).run()
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    text = table(results)
    written = insert(args.page, text, *MARKS)
    log(f"wrote {args.out}" + (f" and the table in {args.page}" if written else ""))
    print(json.dumps(results, indent=1) if args.json else text)


if __name__ == "__main__":
    try:
        main()
    except Failed as e:
        raise SystemExit(f"error: {e}") from None
