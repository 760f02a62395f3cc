"""Neurons from disk beside whole experts and llama.cpp: the same shapes, the same hard cap on memory, by turns.

`cargo xtask bench-neurons` starts it. As `main.py`, whose groups, clocks and llama.cpp it uses.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
PEERS = HERE.parent / "peers"
sys.path[1:1] = [str(PEERS), str(PEERS / "workers")]

import neuron_report as report  # noqa: E402
from common import prompt_ids  # noqa: E402
from engines import Failed, Venvs, log  # noqa: E402
from group import Group, NoGroup, forget, hierarchy  # noqa: E402
from main import MARGIN, PROMPT, Engine  # noqa: E402
from neuron_report import LLAMA  # noqa: E402
from neuron_weights import NEURONS, WAYS, NeuronWeights  # noqa: E402
from watch import median, watch  # noqa: E402
from weights import CHUNK, FORMAT, files  # noqa: E402

PROCESS = 48 << 20
"""What a run takes beside weights and experts: its program, tables of addresses, activations, the cache of keys and values."""


def arguments():
    numbers = lambda text: [int(n) for n in text.split(",")]
    p = argparse.ArgumentParser(prog="cargo xtask bench-neurons", description="Measure neurons from disk under a cap on memory.")
    p.add_argument("--moec", type=Path, required=True, help=argparse.SUPPRESS)
    p.add_argument("--cache", type=Path, required=True, help="folder for the environment, and on the disk to measure")
    p.add_argument("--out", type=Path, default=Path("bench/disk/neurons.json"), help="earlier results of other zeros and bits stay in it")
    p.add_argument("--page", type=Path, default=Path("docs/neuron-cache.md"), help="file with the markers of the table")
    p.add_argument("--zeros", type=numbers, default=[50, 70, 90], help="percent of a token's neurons that are 0")
    p.add_argument("--bits", type=numbers, default=[8, 4], help="bits per weight")
    p.add_argument("--memory", type=numbers, default=[50, 75], help="percent of the experts' bytes that the cap has room for")
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--tokens", type=int, default=256, help="tokens to decode")
    p.add_argument("--cold", type=int, default=64, help="how many of them fill memory and are not timed, the first ones")
    p.add_argument("--limit", type=int, default=150, help="seconds after which a run is cut; what it has decoded counts")
    p.add_argument("--repeat", type=int, default=3)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--cgroup", type=Path, help="group to make groups in (default: the root of the hierarchy that limits memory)")
    p.add_argument("--no-llama", action="store_true", help="leave llama.cpp out")
    p.add_argument("--json", action="store_true", help="print the results as JSON instead of the table")
    args = p.parse_args()
    if not set(args.bits) <= set(FORMAT):
        p.error("--bits takes 8 and 4")
    if not all(5 <= z <= 99 for z in args.zeros):
        p.error("--zeros takes 5 to 99")
    if not 0 < args.cold < args.tokens - 1:
        p.error("--cold must leave tokens that are timed")
    args.context = -(-(PROMPT + args.tokens + 1) // 64) * 64
    return args


class Bench:
    def __init__(self, args):
        self.args, self.venvs, self.groups = args, Venvs(args.cache.resolve()), hierarchy(args.cgroup)

    # what runs

    def generate(self, way, cap, words=()):
        """`run generate` of a bundle: ids that are drawn, so that they do not repeat."""
        args, bundle = self.args, self.weights.way(way, self.fmt)
        command = [bundle / "run", "generate", "--ids", ",".join(map(str, self.prompt)), "-n", args.tokens, "--temperature", 1, "--seed", 1,
                   "--threads", args.threads, "--budget", cap - MARGIN, *words]
        return Engine(way, bundle, command, budget=cap - MARGIN)

    def said(self, way, cap):
        """What `run generate --json` says of itself, in a run of its own: it prints no token before the last."""
        engine = self.generate(way, cap, ["--json"])
        forget(engine.files)
        with Group(*self.groups, cap) as group:
            return json.loads(self.weights.run(group.enter(engine.command), f"json-{way}-{self.fmt}"))

    def llama(self, tokens):
        model = self.weights.gguf(self.fmt)
        command = [self.venvs.python("llama"), HERE / "replay.py", model, PROMPT, self.args.threads, self.args.context, CHUNK, 0]
        return Engine(LLAMA, model, command, ",".join(map(str, tokens)), {"OMP_NUM_THREADS": str(self.args.threads)})

    # measuring

    def once(self, engine, cap):
        """One run, from a page cache that holds nothing of the model."""
        forget(engine.files)
        log_file = self.weights.cache / "log" / f"{engine.name.replace(' ', '-')}-{self.fmt}.log"
        with Group(*self.groups, cap) as group:
            return watch(group, engine.command, self.args.tokens, log_file, engine.stdin, engine.environment, self.args.limit)

    def alternate(self, cap, engines):
        """Every engine in its turn, so that what disturbs the machine disturbs all."""
        found = {engine.name: [] for engine in engines}
        for turn in range(self.args.repeat):
            for engine in engines[:: 1 if turn % 2 == 0 else -1]:
                if any(run.failed for run in found[engine.name]):
                    continue
                run = self.once(engine, cap)
                found[engine.name].append(run)
                log(f"  {cap / 2**30:.2f} GiB, {engine.name}: {run.failed or report.in_words(self.seen([run]))}")
        return found

    def seen(self, runs):
        """Medians of what was seen: tokens per second behind those that fill memory, bytes per token of all."""
        good = [run for run in runs if not run.failed]
        if not good:
            return {"failed": runs[-1].failed, "peak": runs[-1].peak}
        timed = [run.span(self.args.cold, self.args.tokens - 1) for run in good]
        every = [run.span(0, self.args.tokens - 1) for run in good]
        return {
            "rate": median(s["rate"] for s in timed if s), "rates": [s["rate"] for s in timed if s],
            "read": median(s["read"] for s in every if s), "read_later": median(s["read"] for s in timed if s),
            "peak": max((run.peak or 0 for run in good), default=0) or None,
            "of_no_file": max(run.anonymous for run in good), "cut": any(run.cut for run in good), "runs": len(good),
        }

    def measure(self, zeros, bits):
        """All caps of a model."""
        args, self.fmt = self.args, FORMAT[bits]
        log(f"{zeros} % zeros, {bits} bits")
        folder = args.cache.resolve() / "neurons" / str(zeros)
        self.weights = NeuronWeights(folder, args.moec.resolve(), self.venvs, args, zeros / 100)
        shape = self.weights.ready(self.fmt)
        self.prompt = prompt_ids(0, PROMPT, shape.vocab)
        rows = []
        for share in args.memory:
            experts, rest = report.sizes(shape, self.fmt)
            cap = round(rest + experts * share / 100) + PROCESS + MARGIN
            said = {way: self.said(way, cap) for way in WAYS}
            engines = [self.generate(way, cap) for way in WAYS]
            if not args.no_llama:
                engines.append(self.llama(self.prompt + said[NEURONS]["ids"]))
            found = self.alternate(cap, engines)
            row = {"zeros": zeros, "bits": bits, "memory": share, "cap": cap}
            for name, runs in found.items():
                row[name] = self.seen(runs)
                if name in said:
                    row[name] |= report.least(said[name], self.paging(name), args.tokens)
                    row[name]["said"] = {key: said[name][key] for key in ("memory", "disk", "cache")}
            row["active"] = report.active(said[NEURONS], shape, self.paging(NEURONS), args.tokens)
            rows.append(row)
        size = {p.name: sum(f.stat().st_size for f in files(p)) for p in self.weights.made(self.fmt)}
        self.weights.drop()
        return rows, size

    def run(self):
        args, start, rows = self.args, time.perf_counter(), []
        load, sizes = os.getloadavg()[0], {}
        for zeros in args.zeros:
            for bits in args.bits:
                found, sizes[str(bits)] = self.measure(zeros, bits)
                rows += found
        return {
            "conditions": {
                "tokens": args.tokens, "cold": args.cold, "prompt": PROMPT, "layers": args.layers, "threads": args.threads,
                "repetitions": args.repeat, "margin": MARGIN, "process": PROCESS, "load_before": load, "bytes": sizes,
                "llama": None if args.no_llama else self.venvs.version(self.venvs.python("llama"), "llama-cpp-python"),
                "machine": self.machine(), "seconds": round(time.perf_counter() - start),
            },
            "rows": rows,
        }

    def paging(self, way):
        """What a bundle says of its frames."""
        words = [self.weights.way(way, self.fmt) / "run", "info", "--json"]
        return json.loads(self.weights.run(words, f"info-{way}"))["paging"]

    def machine(self):
        words = [self.args.moec, "profile-device", "--quiet", "--json", "--no-matmul", "--threads", self.args.threads]
        return json.loads(self.weights.run(words, "profile-device"))["description"].split(", measured")[0]


def main():
    args = arguments()
    try:
        args.cache.mkdir(parents=True, exist_ok=True)
        found = Bench(args).run()
    except (Failed, NoGroup) as e:
        sys.exit(f"error: {e}")
    results = json.loads(args.out.read_text()) if args.out.exists() else {"rows": []}
    key = lambda row: (row["zeros"], row["bits"], row["memory"])
    new = {key(row) for row in found["rows"]}
    # What was not measured again stays.
    found["rows"] = sorted([row for row in results["rows"] if key(row) not in new] + found["rows"], key=key)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    text = report.markdown(found)
    written = report.insert(args.page, text)
    log(f"wrote {args.out}" + (f" and the table in {args.page}" if written else ""))
    print(json.dumps(found, indent=1) if args.json else text)


if __name__ == "__main__":
    main()
