"""moec beside llama.cpp on a model that does not fit: same weights, same tokens, same hard cap on memory, by turns.

`cargo xtask bench-disk` starts it. Python 3.10 or later, std only; llama.cpp has an environment of its own in the cache
folder, the one that `cargo xtask bench-peers` uses.
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

import best_of  # noqa: E402
import chart  # noqa: E402
import disk  # noqa: E402
import little  # noqa: E402
import report  # noqa: E402
from common import prompt_ids  # noqa: E402
from engines import Failed, Venvs, log  # noqa: E402
from group import Group, NoGroup, forget, hierarchy  # noqa: E402
from limits import Shape  # noqa: E402
from watch import median, watch  # noqa: E402
from weights import CHUNK, FORMAT, Weights, files, least_read  # noqa: E402

CAPS = {8: "2,3,4.5,6,none", 4: "1.6,2.4,3,none"}
"""What is measured by default: from what either engine can just live on, to more than the model has."""
LITTLE_CAP = {8: 4.5, 4: 2.4}
"""GiB under which big-little decoding is measured too."""
MOEC, LITTLE = "moec", "moec big-little"
PROMPT = 8
"""Tokens of the prompt: some, so that every engine computes one; few, so that decoding starts from nothing."""
SPAN = 500
"""Milliseconds that each figure of the disk is measured."""
MARGIN = 16 << 20
"""What a cap holds beside the budget: pages of the program and its libraries, what the kernel keeps for it."""


def caps(text):
    """GiB, or `none`."""
    return [None if word == "none" else round(float(word) * 2**30) for word in text.split(",")]


def arguments():
    bits = lambda text: [int(n) for n in text.split(",")]
    p = argparse.ArgumentParser(prog="cargo xtask bench-disk", description="Measure a model that is larger than the memory it may use.")
    p.add_argument("--moec", type=Path, required=True, help=argparse.SUPPRESS)
    p.add_argument("--cache", type=Path, required=True, help="folder for the environment, and on the disk to measure")
    p.add_argument("--out", type=Path, default=Path("bench/disk/results.json"), help="earlier results of other bits stay in it")
    p.add_argument("--chart", type=Path, default=Path("bench/disk/curve.svg"))
    p.add_argument("--page", type=Path, default=Path("docs/benchmarks.md"), help="file with the markers of the table")
    p.add_argument("--bits", type=bits, default=[8, 4], help="bits per weight")
    p.add_argument("--caps", type=caps, help=f"GiB of memory, or `none` (default: {CAPS[8]} of 8 bits, {CAPS[4]} of 4)")
    p.add_argument("--tokens", type=int, default=160, help="tokens to decode")
    p.add_argument("--cold", type=int, default=32, help="how many of them count as cold, the first ones")
    p.add_argument("--limit", type=int, default=150, help="seconds after which a run is cut; what it has decoded counts")
    p.add_argument("--read-ahead", type=int, help="KiB that the kernel reads ahead of a mapped file meanwhile (default: as it is)")
    p.add_argument("--layers", type=int, default=16)
    p.add_argument("--repeat", type=int, default=3)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--cgroup", type=Path, help="group to make groups in (default: the root of the hierarchy that limits memory)")
    p.add_argument("--best-of-only", action="store_true", help="measure several sequences in one batch, nothing else")
    p.add_argument("--no-best-of", action="store_true", help="leave that out")
    p.add_argument("--reuse", action="store_true", help="take the files of an earlier run, though moec is another by now")
    p.add_argument("--keep", action="store_true", help="leave the files of the last bits on the disk")
    p.add_argument("--json", action="store_true", help="print the results as JSON instead of the table")
    args = p.parse_args()
    if not set(args.bits) <= set(FORMAT):
        p.error("--bits takes 8 and 4")
    if not 0 < args.cold < args.tokens - 1:
        p.error("--cold must leave tokens that are warm")
    args.context = -(-(PROMPT + args.tokens + 1) // 64) * 64
    return args


class Engine:
    """What is run in a group, and on which files."""

    def __init__(self, name, model, command, stdin="", environment=None, budget=None):
        self.name, self.files, self.command, self.stdin = name, files(model), command, stdin
        self.environment, self.budget = environment, budget


class Bench:
    def __init__(self, args, read_ahead):
        self.args, self.read_ahead = args, read_ahead
        self.venvs = Venvs(args.cache.resolve())
        self.weights = Weights(args.cache.resolve() / "disk", args.moec.resolve(), self.venvs, args.layers, args.context, args.reuse)
        self.groups = hierarchy(args.cgroup)
        self.logs = self.weights.cache / "log"
        self.logs.mkdir(parents=True, exist_ok=True)

    def group(self, cap):
        return Group(*self.groups, cap)

    def profile(self, fmt):
        """What the machine can do, and the disk, by reads of the very file that experts are read from."""
        log("measuring the disk")
        largest = max(files(self.weights.bundle(fmt)), key=lambda path: path.stat().st_size)
        words = [self.args.moec, "profile-device", "--quiet", "--json", "--no-matmul", "--threads", self.args.threads]
        return json.loads(self.weights.run([*words, "--disk", largest, "--disk-time", SPAN], "profile-device"))

    # moec

    def run_command(self, fmt):
        """The bundle's program; where the bundle is an older one, its subcommands in moec's own process."""
        bundle = self.weights.bundle(fmt)
        return [self.args.moec.resolve(), "run", bundle] if self.args.reuse else [bundle / "run"]

    def generate(self, fmt, cap, gamma=None, words=()):
        """`run generate` on ids; those that follow are drawn, so that they do not repeat."""
        args, budget = self.args, None if cap is None else cap - MARGIN
        ids = ",".join(map(str, self.prompt))
        command = [*self.run_command(fmt), "generate", "--ids", ids, "-n", args.tokens, "--temperature", 1, "--seed", 1, "--threads", args.threads]
        command += ["--no-budget"] if cap is None else ["--budget", budget]
        command += ["--no-big-little"] if gamma is None else ["--gamma", f"{gamma:.9f}"]
        name = MOEC if gamma is None else LITTLE
        return Engine(name, self.weights.bundle(fmt), [*command, *words], budget=budget)

    def said(self, fmt, cap, gamma=None):
        """What `run generate --json` says of itself, in a run of its own: it prints no token before the last."""
        engine = self.generate(fmt, cap, gamma, ["--json"])
        forget(engine.files)
        with self.group(cap) as group:
            return json.loads(self.weights.run(group.enter(engine.command), f"json-{fmt}"))

    def gammas(self, fmt, tokens):
        """γ by the share of tokens that fall back, from what the full model makes of these tokens."""
        path = self.weights.cache / "logits.safetensors"
        ids = ",".join(map(str, tokens[:-1]))
        try:
            self.weights.run([*self.run_command(fmt), "logits", "--no-budget", "--ids", ids, "--out", path], f"logits-{fmt}")
            found = little.largest_probabilities(path)[PROMPT:]
        finally:
            path.unlink(missing_ok=True)
        return {ratio: little.gamma(found, ratio) for ratio in little.RATIOS}

    # llama.cpp

    def llama(self, fmt, repack, tokens):
        model = self.weights.gguf(fmt)
        command = [self.venvs.python("llama"), HERE / "replay.py", model, PROMPT, self.args.threads, self.args.context, CHUNK, int(repack)]
        name = "llama.cpp, repacked" if repack else "llama.cpp"
        environment = {"OMP_NUM_THREADS": str(self.args.threads)}
        return Engine(name, model, command, ",".join(map(str, tokens)), environment)

    # measuring

    def once(self, engine, cap, what):
        """One run, from a page cache that holds nothing of the model."""
        args, held = self.args, forget(engine.files)
        if held > 0.01:
            log(f"  {held:.0%} of {engine.name}'s files stay in the page cache")
        with self.group(cap) as group:
            run = watch(group, engine.command, args.tokens, self.logs / f"{what}.log", engine.stdin, engine.environment, args.limit)
        run.held = held
        return run

    def row(self, engine, bits, cap, runs, said=None):
        """Medians of what was seen; the largest of what is memory."""
        good = [r for r in runs if not r.failed]
        row = {"bits": bits, "cap": cap, "engine": engine.name, "budget": engine.budget, "runs": len(good)}
        if not good:
            return row | {"failed": runs[-1].failed, "peak": runs[-1].peak}
        spans = {"cold": (0, self.args.cold), "warm": (self.args.cold, self.args.tokens - 1)}
        for name, (first, last) in spans.items():
            found = [r.span(first, last) for r in good]
            row[name] = {key: median(f[key] for f in found if f) for key in ("rate", "read")}
            row[name]["rates"] = [f["rate"] for f in found if f]
        row["cut"] = any(r.cut for r in good)
        row["start"] = median(r.moments[0].seconds for r in good)
        for key in ("peak", "rss", "anonymous"):
            row[key] = max((getattr(r, key) or 0 for r in good), default=0) or None
        return row | ({"said": said} if said else {})

    def alternate(self, bits, cap, engines):
        """Every engine in its turn, so that what disturbs the machine disturbs all."""
        found = {key: [] for key in engines}
        for turn in range(self.args.repeat):
            for key, engine in list(engines.items())[:: 1 if turn % 2 == 0 else -1]:
                if any(run.failed for run in found[key]):
                    continue
                run = self.once(engine, cap, f"{key[0].split(',')[0]}-{FORMAT[bits]}")
                found[key].append(run)
                log(f"  {report.cap_name(cap)}: {engine.name}: {report.in_words(self.row(engine, bits, cap, [run]))}")
        return found

    def measure(self, bits):
        args, fmt = self.args, FORMAT[bits]
        log(f"{bits} bits")
        best = {} if args.no_best_of else {"best_of": best_of.measure(self.weights, fmt, args.threads, Shape.of)}
        if args.best_of_only:
            return best
        shape = self.weights.ready(fmt)
        self.prompt = prompt_ids(0, PROMPT, shape.vocab)
        before = self.profile(fmt)
        tokens = self.prompt + self.said(fmt, None)["ids"]
        gammas = self.gammas(fmt, tokens)
        rows = []
        for cap in args.caps or caps(CAPS[bits]):
            ours = {(MOEC, None): None}
            if cap == caps(str(LITTLE_CAP[bits]))[0]:
                ours |= {(LITTLE, ratio): gamma for ratio, gamma in gammas.items()}
            engines = {key: self.generate(fmt, cap, gamma) for key, gamma in ours.items()}
            peers = [self.llama(fmt, False, tokens)]
            if cap is None:
                # Copies of the weights do not fit under a cap.
                peers.append(self.llama(fmt, True, tokens))
            engines |= {(engine.name, None): engine for engine in peers}
            found = self.alternate(bits, cap, engines)
            for key, engine in engines.items():
                said = None
                if key in ours and not found[key][-1].failed:
                    said = {name: value for name, value in self.said(fmt, cap, ours[key]).items() if name != "ids"}
                row = self.row(engine, bits, cap, found[key], said) | {"least": least_read(shape, fmt, cap)}
                rows.append(row | ({"gamma": ours[key]} if ours.get(key) is not None else {}))
        return best | {"rows": rows, "machine": self.profile_again(fmt, before), "gguf_bytes": self.weights.gguf(fmt).stat().st_size,
                "bundle_bytes": sum(p.stat().st_size for p in files(self.weights.bundle(fmt)))}

    def profile_again(self, fmt, old):
        """The better of two measurements, before and after, counts as what the disk can do."""
        new = self.profile(fmt)
        for a, b in zip(old["disk"]["rates"], new["disk"]["rates"]):
            b["gb_per_s"] = max(a["gb_per_s"], b["gb_per_s"])
        return new

    def run(self):
        args, start = self.args, time.perf_counter()
        found = {}
        for bits in args.bits:
            part = self.measure(bits)
            if args.best_of_only:
                found[str(bits)] = part
                continue
            found[str(bits)] = part | {"conditions": {
                "read_ahead_kib": self.read_ahead, "tokens": args.tokens, "cold": args.cold, "prompt": PROMPT, "layers": args.layers, "threads": args.threads,
                "repetitions": args.repeat, "margin": MARGIN, "load_before": os.getloadavg()[0], "chunk": CHUNK,
                "llama": self.venvs.version(self.venvs.python("llama"), "llama-cpp-python"),
                "seconds": round(time.perf_counter() - start), "cgroup": 1 if self.groups[1].limit.endswith("in_bytes") else 2,
            }}
            if not args.keep or bits != args.bits[-1]:
                self.weights.drop()
        return found


def main():
    args = arguments()
    try:
        args.cache.mkdir(parents=True, exist_ok=True)
        with disk.read_ahead(args.cache, args.read_ahead) as kib:
            found = Bench(args, kib).run()
    except (Failed, NoGroup) as e:
        sys.exit(f"error: {e}")
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    for bits, part in found.items():
        # What was not measured again stays.
        results[bits] = results.get(bits, {}) | part
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    args.chart.write_text(chart.svg(results))
    text = report.markdown(results)
    written = report.insert(args.page, text)
    log(f"wrote {args.out}, {args.chart}" + (f" and the table in {args.page}" if written else ""))
    print(json.dumps(results, indent=1) if args.json else text)


if __name__ == "__main__":
    main()
