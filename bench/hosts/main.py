"""One model on two hosts beside one host: the same weights, by turns. `cargo xtask bench-hosts` starts it.

Python 3.10 or later, std only; needs root, two cores and Open MPI. The hosts are namespaces of this machine (`network.py`).
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[1:1] = [str(HERE.parent / "peers"), str(HERE.parent / "peers" / "workers")]

import report  # noqa: E402
from common import prompt_ids  # noqa: E402
from engines import CLANGS, Failed, Process, Venvs, log  # noqa: E402
from models import Models  # noqa: E402
from network import ADDRESSES, ROOT, Network, alone, check, inside, launched  # noqa: E402
from rpc import built  # noqa: E402

TOML = """[model]
source = "{source}"
[shapes]
max_context = {context}
prefill_chunk = 512
decode_batch = [1, 4]
[weights]
experts = "{fmt}"
attention = "{fmt}"
embeddings = "{fmt}"
"""
PLACEMENTS = ("slices", "stages", "owners")
"""Ways to divide a model that `[placement] hosts` names."""
NETWORKS = {"raw": (None, 0), "10 Gb/s": ("10gbit", 0), "1 Gb/s": ("1gbit", 0), "+100 µs": (None, 100), "+300 µs": (None, 300)}
"""A rate of the kernel's, and microseconds that are added to each round trip."""
DELAY = "MOEC_TEST_HOST_DELAY_US"
RPC, PORT = "llama.cpp, RPC", 50213
WARM = 8
"""Tokens of the first request, which no row counts."""


def arguments():
    words = lambda text: text.split(",")
    p = argparse.ArgumentParser(prog="cargo xtask bench-hosts", description="Measure one model on two hosts: namespaces of this machine.")
    p.add_argument("--moec", type=Path, required=True, help=argparse.SUPPRESS)
    p.add_argument("--cache", type=Path, required=True, help="folder for checkpoints and bundles")
    p.add_argument("--out", type=Path, help="default: bench/hosts/results.json, with `--memory` bench/hosts/memory.json")
    p.add_argument("--page", type=Path, default=Path("docs/benchmarks.md"), help="file with the markers of the tables")
    p.add_argument("--formats", type=words, default=["bf16", "q8", "q4"])
    p.add_argument("--placements", type=words, default=list(PLACEMENTS))
    p.add_argument("--networks", type=words, default=list(NETWORKS), help=f"of: {', '.join(NETWORKS)}")
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--memory", help="memory of each host, `4.5GiB` for instance; what does not fit is read from the disk")
    p.add_argument("--prompt", type=int, default=64, help="tokens before those that are decoded")
    p.add_argument("--long", type=int, default=512, help="tokens of the prompt that is measured")
    p.add_argument("--gen", type=int, default=64, help="tokens to decode")
    p.add_argument("--repeat", type=int, default=3, help="turns, of which the medians count")
    p.add_argument("--rpc", action="store_true", help="llama.cpp's RPC, too: its last half of the layers on the second host")
    p.add_argument("--choices", action="store_true", help="measure the hosts alone, and hold a build's choices against the rows that `--out` has")
    p.add_argument("--quick", action="store_true", help="two layers, one turn, q8, the raw network and one with a delay; no page and no file of results")
    p.add_argument("--json", action="store_true", help="print the results as JSON instead of the tables")
    args = p.parse_args()
    args.out = args.out or HERE / ("memory.json" if args.memory else "results.json")
    if args.quick:
        args.formats, args.layers, args.repeat, args.networks, args.gen = ["q8"], 2, 1, ["raw", "+300 µs"], 16
    for given, known in ((args.formats, ("bf16", "q8", "q4")), (args.placements, PLACEMENTS), (args.networks, NETWORKS)):
        if not set(given) <= set(known):
            p.error(f"`{','.join(given)}` is not of {', '.join(known)}")
    args.context = context(args.long, args.prompt, args.gen)
    return args


def context(long, prompt, gen):
    """Tokens that every request of a turn has room in."""
    return -(-(max(long, prompt + gen) + 2) // 64) * 64


class Engine:
    """One way to run the model: a name, its words in the table, and how its program starts."""

    def __init__(self, name, title, bundle, cores=1, network=None):
        self.name, self.title, self.bundle, self.cores, self.network = name, title, bundle, cores, network

    def command(self, moec, words):
        command = [moec, "run", self.bundle, *words, "--threads", self.cores]
        return launched(command, [DELAY]) if self.network else alone(command, self.cores)

    def environment(self):
        delay = NETWORKS[self.network][1] if self.network else 0
        return os.environ | ROOT | {DELAY: str(delay)}


class Session:
    """`run bench --stdin` of an engine."""

    def __init__(self, engine, moec, log_file):
        log_file.parent.mkdir(parents=True, exist_ok=True)
        self.before, self.log = None, log_file
        with open(log_file, "w") as err:
            self.child = subprocess.Popen(
                engine.command(moec, ["bench", "--stdin"]), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err, text=True,
                env=engine.environment(),
            )

    def ask(self, prompt, gen, batch):
        """A report, with the messages of this request alone."""
        try:
            self.child.stdin.write(f"{prompt} {gen} {batch}\n")
            self.child.stdin.flush()
        except BrokenPipeError:
            pass
        line = self.child.stdout.readline()
        if not line:
            lines = [text for text in self.log.read_text().splitlines() if text.strip()]
            errors = [text for text in lines if text.startswith("error:")]
            raise Failed((errors or lines or ["it ended without a word"])[0])
        found = json.loads(line)
        self.before, before = found, self.before
        return report.own(before, found)

    def end(self):
        self.child.stdin.close()
        self.child.stdout.close()
        self.child.wait()


class Rpc:
    """llama.cpp's model on the first host, and its server on the second."""

    name, title, bundle = "rpc", RPC, None

    def __init__(self, bench, source, fmt, network):
        self.bench, self.network = bench, network
        self.python = bench.models.venvs.python("llama")
        clang = next((c for c in CLANGS if shutil.which(c)), None)
        self.library = built(bench.cache, self.python, (clang or "clang").replace("clang", "clang++"))
        self.gguf = bench.models.gguf(source, fmt)

    def turn(self):
        """As [`Bench.turn`]."""
        args, address = self.bench.args, f"{ADDRESSES[1]}:{PORT}"
        words = lambda what: [self.python, HERE / "rpc.py", what, self.library, address]
        begin = time.perf_counter()
        with open(self.bench.cache / "log" / "hosts-rpc-server.log", "w") as out:
            server = subprocess.Popen(inside(1, words("server")), stdout=out, stderr=out)
            try:
                with Process(inside(0, [*words("model"), self.gguf, args.context]), self.bench.cache / "log" / "hosts-rpc.log") as model:
                    model.ask('{"do": "version"}')
                    start = time.perf_counter() - begin
                    ask = {"do": "turn", "prompt": args.prompt, "long": args.long, "gen": args.gen}
                    return {"start": start} | model.ask(json.dumps(ask))
            finally:
                server.kill()
                server.wait()


class Bench:
    def __init__(self, args):
        self.args, self.cache = args, args.cache.resolve()
        self.models = Models(self.cache, args.moec.resolve(), Venvs(self.cache))
        self.moec = args.moec.resolve()

    def device(self, name, network):
        """A device file of the two hosts on this network, as moec measures it."""
        rate, delay = NETWORKS[name]
        network.limit(rate)
        folder, slug = self.cache / "hosts", "".join(c for c in name if c.isalnum() and c.isascii())
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{slug}.toml").unlink(missing_ok=True)
        words = [self.moec, "profile-device", "--hosts", "--no-matmul", "--threads", 1, "--name", slug, "--quiet", folder]
        words += ["--disk", self.cache] if self.args.memory else []
        ran = subprocess.run(launched(words, [DELAY]), capture_output=True, text=True, env=os.environ | ROOT | {DELAY: str(delay)}, stdin=subprocess.DEVNULL)
        if ran.returncode:
            raise Failed(f"profile-device: {next((l for l in ran.stderr.splitlines() if l.startswith('error:')), 'failed')}")
        return folder / f"{slug}.toml"

    def choices(self, source, formats, devices):
        """The choices of all builds."""
        return [{"format": fmt, "network": name} | self.choice(source, fmt, device) for fmt in formats for name, device in devices.items()]

    def choice(self, source, fmt, device):
        """The division that a build takes for these hosts, and what it expects of each: tokens per second of one sequence."""
        bundle = self.bundle(source, fmt, None, device)
        words = [self.moec, "explain", "--json", bundle]
        decisions = json.loads(self.models.run(words, f"explain-{bundle.stem}"))["decisions"]
        shutil.rmtree(bundle)
        made = next(d for d in decisions if d["pass"] == "hosts")
        return {"chosen": made["chosen"], "expected": {a["what"]: a["figures"]["decode_tokens_per_s"] for a in made["alternatives"]}}

    def bundle(self, source, fmt, placement, device=None):
        """A bundle for one host, or for two with this placement; for the hosts of a device file, as moec chooses."""
        args, name = self.args, f"hosts-{self.args.layers}-{fmt}-{placement or (device.stem if device else 'one')}-{self.args.context}"
        out = self.cache / "bundles" / self.models.stamp / f"{name}.moec"
        if not out.exists():
            log(f"  building {name}")
            out.parent.mkdir(parents=True, exist_ok=True)
            toml = out.with_suffix(".toml")
            lines = f'[placement]\nhosts = "{placement}"\n' if placement else ""
            lines += f'[memory]\nbudget = "{args.memory}"\n' if args.memory else ""
            toml.write_text(TOML.format(source=source.resolve(), context=args.context, fmt=fmt) + lines)
            words = [self.moec, "build", "--quiet", "--no-run", toml, "--target", device or ("native-x2" if placement else "native"), "-o", out]
            self.models.run(words, f"build-{name}")
        return out

    def engines(self, source, fmt):
        """All ways to run a format; a placement that this moec does not build is a failed one."""
        failed = []
        # Before the bundles, since a conversion takes the room of two files.
        rpc = self.rpc(source, fmt, failed) if self.args.rpc else []
        one = self.bundle(source, fmt, None)
        engines = [Engine("one", "one, one core", one), Engine("two-cores", "one, two cores", one, cores=2)]
        for placement in self.args.placements:
            title = f"two, {placement}"
            try:
                bundle = self.bundle(source, fmt, placement)
            except Failed as e:
                failed.append({"name": placement, "title": title, "network": "-", "failed": str(e)})
                continue
            engines += [Engine(placement, title, bundle, network=network) for network in self.args.networks]
        return engines + rpc, failed

    def rpc(self, source, fmt, failed):
        """llama.cpp on the networks that are not moec's own, as a delay is."""
        networks = [name for name in self.args.networks if not NETWORKS[name][1]]
        try:
            engines = [Rpc(self, source, fmt, network) for network in networks]
        except (Failed, subprocess.SubprocessError) as e:
            failed.append({"name": Rpc.name, "title": RPC, "network": "-", "failed": str(e)})
            return []
        if fmt != "bf16" and fmt == self.args.formats[-1]:
            # No other format is converted from it.
            self.models.gguf_path(source, "bf16").unlink(missing_ok=True)
        return engines

    def turn(self, engine, network):
        """All requests of one engine, in a process of its own."""
        args, begin = self.args, time.perf_counter()
        network.limit(NETWORKS[engine.network][0] if engine.network else None)
        if isinstance(engine, Rpc):
            return engine.turn()
        session = Session(engine, self.moec, self.cache / "log" / f"hosts-{engine.name}.log")
        try:
            session.ask(WARM, 1, 1)
            found = {"start": time.perf_counter() - begin}
            session.ask(args.long, 1, 1)
            found["prompt"] = report.prefilled(session.ask(args.long, 1, 1))
            for part, batch in (("one", 1), ("four", 4)):
                few, many = session.ask(args.prompt, 1, batch), session.ask(args.prompt, args.gen + 1, batch)
                found[part] = report.decoded(few, many, batch)
        finally:
            session.end()
        return found

    def tokens(self, engine, vocab):
        """What it says after a prompt; two hosts, and one process that computes the parts of both."""
        ids = ",".join(map(str, prompt_ids(0, self.args.prompt, vocab)))
        words = ["generate", "--ids", ids, "-n", self.args.gen, "--ignore-eos", "--quiet"]
        single = Engine(engine.name, engine.title, engine.bundle)
        said = []
        for of in (engine, single):
            ran = subprocess.run(of.command(self.moec, words), capture_output=True, text=True, env=of.environment(), stdin=subprocess.DEVNULL)
            if ran.returncode:
                raise Failed((ran.stderr.strip().splitlines() or ["it ended without a word"])[0])
            said.append(ran.stdout.split())
        return "equal" if said[0] == said[1] else "differ"

    def format(self, source, fmt, network):
        log(fmt)
        engines, rows = self.engines(source, fmt)
        vocab = self.models.shape(source).vocab
        turns, failed, tokens = {engine: [] for engine in engines}, {}, {}
        for turn in range(self.args.repeat):
            for engine in engines[:: 1 if turn % 2 == 0 else -1]:
                if engine in failed:
                    continue
                try:
                    if engine.network and engine.bundle and engine.name not in tokens:
                        network.limit(None)
                        tokens[engine.name] = self.tokens(engine, vocab)
                    turns[engine].append(self.turn(engine, network))
                    rate = turns[engine][-1]["one"]["rate"]
                    log(f"  {engine.title}, {engine.network or '-'}: {report.number(rate)} tokens/s")
                except Failed as e:
                    failed[engine] = str(e)
                    log(f"  {engine.title}, {engine.network or '-'}: {e}")
        made = []
        for engine in engines:
            row = {"name": engine.name, "title": engine.title, "network": engine.network or "-", "tokens": tokens.get(engine.name, "-")}
            made.append(row | ({"failed": failed[engine]} if engine in failed else report.combined(turns[engine])))
        # The disk holds the bundles of one format.
        for bundle in {engine.bundle for engine in engines if engine.bundle}:
            shutil.rmtree(bundle)
        return [{"format": fmt} | row for row in made + rows]

    def again(self):
        """The results of an earlier run with choices by hosts that are measured now."""
        found = json.loads(self.args.out.read_text())
        c = found["conditions"]
        self.args.layers, self.args.memory, self.args.context = c["layers"], c["memory"], context(c["long"], c["prompt"], c["gen"])
        source = self.models.checkpoint("olmoe", c["layers"], self.args.context, routed=bool(c["memory"]))
        with Network() as network:
            devices = {name: self.device(name, network) for name in dict.fromkeys(choice["network"] for choice in found["choices"])}
        return found | {"choices": self.choices(source, dict.fromkeys(choice["format"] for choice in found["choices"]), devices)}

    def run(self):
        args, start = self.args, time.perf_counter()
        source = self.models.checkpoint("olmoe", args.layers, args.context, routed=bool(args.memory))
        with Network() as network:
            devices = {name: self.device(name, network) for name in args.networks}
            rows = [row for fmt in args.formats for row in self.format(source, fmt, network)]
        choices = self.choices(source, args.formats, devices)
        words = [self.moec, "profile-device", "--quiet", "--json", "--no-matmul", "--threads", 2]
        machine = json.loads(self.models.run(words, "profile-device"))["description"].split(", measured")[0]
        return {
            "conditions": {
                "machine": machine, "layers": args.layers, "prompt": args.prompt, "long": args.long, "gen": args.gen, "repeat": args.repeat, "memory": args.memory,
                "seconds": round(time.perf_counter() - start),
            },
            "rows": rows, "choices": choices,
        }


def main():
    args = arguments()
    try:
        check()
        args.cache.mkdir(parents=True, exist_ok=True)
        bench = Bench(args)
        found = bench.again() if args.choices else bench.run()
    except Failed as e:
        sys.exit(f"error: {e}")
    text = report.markdown(found)
    if not args.quick:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
        written = report.insert(args.page, text, bool(args.memory))
        log(f"wrote {args.out}" + (f" and the tables in {args.page}" if written else ""))
    print(json.dumps(found, indent=1) if args.json else text)


if __name__ == "__main__":
    main()
