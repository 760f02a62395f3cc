"""`run serve` beside llama.cpp's server: same weights, same requests, by turns. `cargo xtask bench-serve` starts it.

Python 3.10 or later, std only; what llama.cpp needs has an environment of its own in the cache folder. The clients are
`testing/examples/load_serve.rs`.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
PEERS = HERE.parent / "peers"
sys.path[1:1] = [str(PEERS)]

import limits  # noqa: E402
import table  # noqa: E402
from engines import Failed, log  # noqa: E402
from models import FERRIS, Models  # noqa: E402
from servers import Llama, Moec, Tools  # noqa: E402

TOML = """[model]
source = "{source}"
[shapes]
max_context = {context}
prefill_chunk = 512
decode_batch = {batches}
[weights]
experts = "{fmt}"
attention = "{fmt}"
embeddings = "{fmt}"
"""
COUNTED = ("steps", "rows", "experts", "seconds")
"""What moec counts of decoding: steps, their rows, experts that they computed with, and their time."""
PAUSE = 0.5
"""Seconds between turns: threads of the one that has finished may still spin."""


def arguments():
    numbers = lambda text: [int(n) for n in text.split(",")]
    p = argparse.ArgumentParser(prog="cargo xtask bench-serve", description="Compare `run serve` with llama.cpp's server.")
    p.add_argument("--moec", type=Path, required=True, help=argparse.SUPPRESS)
    p.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    p.add_argument("--cache", type=Path, required=True, help="folder for llama-server, checkpoints and converted models")
    p.add_argument("--out", type=Path, default=Path("bench/serve.json"))
    p.add_argument("--page", type=Path, default=Path("docs/serve.md"), help="file with the markers of the table")
    p.add_argument("--clients", type=numbers, default=[1, 2, 4, 8, 16])
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--format", choices=["bf16", "q8", "q4"], default="q8")
    p.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    p.add_argument("--gen", type=int, default=64, help="tokens of each answer")
    p.add_argument("--answers", type=int, default=2, help="answers that each client wants, one after the other")
    p.add_argument("--repeat", type=int, default=3, help="turns, of which the medians count")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--how", choices=["greedy", "sampled", "schema"], default="greedy",
                   help="how tokens are chosen: the most probable one, at temperature 0.7, or the same under a JSON schema (moec alone)")
    p.add_argument("--alone", action="store_true", help="leave llama-server out")
    p.add_argument("--no-install", action="store_true", help="leave it out where it is not compiled yet")
    p.add_argument("--json", action="store_true", help="print the results as JSON instead of the table")
    args = p.parse_args()
    args.alone |= args.how == "schema"
    args.context = -(-(args.prompt + args.gen + 1) // 64) * 64
    return args


def padded(folder, vocab):
    """A tokenizer as large as the vocabulary: the demo model's, and words that nothing is merged to."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads((FERRIS / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words.update((f"w{i}", i) for i in range(len(words), vocab))
    path.write_text(json.dumps(tokenizer))
    return path


def percentile(values, share):
    """By nearest rank."""
    ranked = sorted(values)
    return ranked[max(0, -(-len(ranked) * share // 100) - 1)]


class Bench:
    def __init__(self, args):
        self.args, self.cache = args, args.cache.resolve()
        self.tools = Tools(self.cache, not args.no_install)
        self.models = Models(self.cache, args.moec.resolve(), self.tools)
        self.reports, self.failure, self.seed, self.version = [], None, int(time.time()) % 100_000, None

    def prepare(self):
        """The model, as each server wants it."""
        args = self.args
        folder = self.models.checkpoint("olmoe", args.layers, args.context)
        self.shape = self.models.shape(folder)
        tokenizer = padded(folder, self.shape.vocab)
        batches = sorted({1, *args.clients})
        name = f"serve-{args.layers}-{args.format}-{args.context}-{max(batches)}"
        bundle = self.cache / "bundles" / self.models.stamp / f"{name}.moec"
        # A bundle is there whole or not at all, and is of this very compiler.
        if not bundle.exists():
            log(f"  building {name}")
            bundle.parent.mkdir(parents=True, exist_ok=True)
            toml = bundle.with_suffix(".toml")
            toml.write_text(TOML.format(source=folder, context=args.context, batches=batches, fmt=args.format))
            self.models.run([args.moec, "build", "--quiet", toml, "-o", bundle], "serve-build")
        gguf = self.cache / "gguf" / f"{folder.name}-{args.format}-words.gguf"
        if not args.alone and not gguf.exists():
            log(f"  converting {gguf.name}")
            gguf.parent.mkdir(parents=True, exist_ok=True)
            words = [self.tools.python(), PEERS / "convert" / "to_gguf.py", folder, gguf, args.format, "--direct"]
            self.models.run([*words, "--tokenizer", tokenizer], "serve-gguf")
        return bundle, gguf

    def profile(self):
        """Measures memory once. A busy machine swings: what counts is the median of what was measured between the turns."""
        words = [self.args.moec, "profile-device", "--quiet", "--json", "--no-matmul", "--threads", self.args.threads]
        self.reports.append(json.loads(self.models.run(words, "profile-device")))

    def turn(self, server, clients, answers):
        """All clients of one turn."""
        self.seed += 1
        args = self.args
        words = [args.load, server.address, clients, answers, args.prompt, args.gen, self.shape.vocab, self.seed, args.how]
        before = self.counted(server)
        done = subprocess.run([str(w) for w in words], capture_output=True, text=True)
        if done.returncode:
            raise Failed(f"{server.title}: {done.stderr.strip()}")
        found = json.loads(done.stdout)
        after = self.counted(server)
        return found | {"counted": {what: after[what] - before[what] for what in COUNTED}}

    def counted(self, server):
        """Of each of [`COUNTED`], how many so far; of another server none."""
        return {what: server.metric(f"moec_decode_{what}_total") if isinstance(server, Moec) else 0 for what in COUNTED}

    def measure(self, servers):
        for server in servers:
            self.turn(server, 1, 1)
        rows = []
        for clients in self.args.clients:
            found = {s.title: [] for s in servers}
            for turn in range(self.args.repeat):
                self.profile()
                for server in servers if turn % 2 == 0 else servers[::-1]:
                    time.sleep(PAUSE)
                    found[server.title].append(self.turn(server, clients, self.args.answers))
            for title, turns in found.items():
                rows.append(self.row(title, clients, turns))
                log(f"  {clients} clients, {title}: {rows[-1]['tokens_per_s']:.1f} tokens/s")
        machine = limits.Machine.of(limits.middle(self.reports))
        return [row | (self.limit(machine, row["rows"], row["experts"]) if "rows" in row else {}) for row in rows]

    def row(self, title, clients, turns):
        """Of all turns with so many clients: medians of rates, percentiles of all times."""
        pooled = lambda what: [t for turn in turns for t in turn[what]]
        times = {f"{what}_p{share}": percentile(pooled(what), share) for what in ("first", "next") for share in (50, 99)}
        row = {"server": title, "clients": clients, "answers": len(pooled("first")), **times,
               "tokens_per_s": statistics.median(t["tokens"] / t["seconds"] for t in turns)}
        steps, rows, experts, seconds = (sum(t["counted"][what] for t in turns) for what in COUNTED)
        if steps:
            # Of an average step: the first and the last ones have fewer rows.
            row |= {"rows": rows / steps, "experts": experts / steps / self.shape.layers, "steps_per_s": rows / seconds}
        return row

    def limit(self, machine, rows, experts):
        """What the bytes allow that a step with so many sequences reads: experts that it touched, all other weights once, and each
        sequence's cache, over the bandwidth that was measured between the turns."""
        shape, fmt = self.shape, self.args.format
        weights = shape.weight_bytes(rows, fmt)
        weights += shape.layers * (experts - shape.touched(rows)) * shape.expert * limits.BITS[fmt] / 8
        size = weights + rows * shape.kv_bytes(self.args.prompt + self.args.gen / 2)
        return {"step_bytes": size, "bandwidth": machine.bandwidth, "limit": rows * machine.bandwidth / size}

    def run(self):
        start, load = time.perf_counter(), os.getloadavg()[0]
        bundle, gguf = self.prepare()
        args = self.args
        with Moec(bundle, args.threads, self.cache) as moec:
            try:
                if args.alone:
                    raise Failed("left out")
                program = self.tools.server()
                self.version = self.tools.version
                with socket.socket() as free:
                    free.bind(("127.0.0.1", 0))
                    port = free.getsockname()[1]
                slots = max(args.clients)
                with Llama(program, gguf, slots, args.context, args.threads, port, self.cache) as llama:
                    rows = self.measure([moec, llama])
            except Failed as e:
                log(f"  llama-server: {e}")
                self.failure = str(e)
                rows = self.measure([moec])
        keys = ["clients", "layers", "format", "prompt", "gen", "answers", "repeat", "threads", "how"]
        return {
            "conditions": {key: getattr(args, key) for key in keys} | {"load_before": load},
            "machine": limits.middle(self.reports), "llama_cpp_python": self.version, "failure": self.failure,
            "rows": rows, "seconds": round(time.perf_counter() - start),
        }


def main():
    args = arguments()
    args.cache.mkdir(parents=True, exist_ok=True)
    results = Bench(args).run()
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    import report

    text = report.markdown(results)
    written = table.insert(args.page, text, *report.MARKS)
    log(f"wrote {args.out}" + (f" and the table in {args.page}" if written else ""))
    print(json.dumps(results, indent=1) if args.json else text)


if __name__ == "__main__":
    main()
