"""moec beside other engines: same weights, same prompts, by turns. `cargo xtask bench-peers` starts it.

Nothing here is needed to build or to run a model. Python 3.10 or later, std only; each peer has an environment of its
own in the cache folder. What a peer cannot do becomes a row that says why.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import capped
import limits
import roundings
import table
from capped import Capped
from engines import PEERS, Again, Failed, Process, Venvs, Worker, log
from models import FERRIS, LAYERS, Models
from roundings import Roundings

FORMATS = ["bf16", "q8", "q4"]
MAIN = {"olmoe": ["llama", "llama-read", "ik", "transformers"], "qwen3-30b-a3b": ["llama", "openvino"], "phi-tiny": ["llama", "transformers"],
        "qwen3.6-35b-a3b": ["llama", "ik"]}
"""Peers of whole models. optimum-intel exports no OLMoE."""
HYBRIDS = ["qwen3.6-35b-a3b"]
WIDTHS_OF = {"olmoe": 16, "qwen3.6-35b-a3b": 4}
"""Models that are measured in many numbers of bits, and their layers."""
MODES = {"warm": table.warm, "hybrids": table.hybrids, "widths": table.widths, "capped": capped.markdown,
         "roundings": roundings.markdown}
"""Comparisons with tables of their own: the option, which is the name of the method, and the function that writes the table."""
WINDOW, WINDOWS = 512, 40
"""As in `reference_metrics.json` of ferris."""
PAUSE = 0.3
"""Seconds between turns: threads of the one that has finished may still spin."""


def arguments():
    numbers = lambda text: [int(n) for n in text.split(",")]
    words = lambda text: [w for w in text.split(",") if w]
    p = argparse.ArgumentParser(prog="cargo xtask bench-peers", description="Compare moec with other engines on this machine.")
    p.add_argument("--moec", type=Path, required=True, help=argparse.SUPPRESS)
    p.add_argument("--cache", type=Path, required=True, help="folder for environments and converted models")
    p.add_argument("--out", type=Path, help="default: bench/results.json; of a comparison with a table of its own, bench/peers/NAME.json")
    p.add_argument("--page", type=Path, default=Path("docs/benchmarks.md"), help="file with the markers of the table")
    p.add_argument("--models", type=words, default=list(LAYERS), help=f"of {','.join(LAYERS)}; the first has every row")
    p.add_argument("--layers", type=int, help="layers of the first model")
    p.add_argument("--peers", type=words, default=list(PEERS), help=f"of {','.join(PEERS)}")
    p.add_argument("--formats", type=words, default=FORMATS)
    p.add_argument("--prompt", type=numbers, default=[512, 2048, 8192], help="moec measures each, peers the first")
    p.add_argument("--peer-prompt", type=numbers, help="prompts that peers measure")
    p.add_argument("--gen", type=int, default=32, help="tokens to decode after each prompt")
    p.add_argument("--repeat", type=int, default=5)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--quick", action="store_true", help="first model only, 2 layers, prompts of 256 and 1024, 3 repetitions")
    p.add_argument("--warm", type=numbers, metavar="GB,GB…",
                   help="measure only the first token of warm starts, of bf16 models whose files have about so many GB")
    p.add_argument("--hybrids", action="store_true",
                   help="measure only models with recurrent layers, and the share of the limit that each operator reaches")
    p.add_argument("--widths", action="store_true", help="measure only moec, and the peers that `--peers` names, in every number of bits per weight; rows of other models stay")
    p.add_argument("--capped", action="store_true",
                   help="measure only moec's decoding of OLMoE from the disk, in 4 bits per weight and fewer, under one cap on memory")
    p.add_argument("--roundings", action="store_true",
                   help="measure only what formats of fewer bits lose on ferris, moec's beside those of llama.cpp and ik_llama.cpp")
    p.add_argument("--keep", action="store_true", help="keep the files of every model, not only of the first")
    p.add_argument("--no-install", action="store_true", help="leave out peers that are not installed")
    p.add_argument("--json", action="store_true", help="print the results as JSON instead of the table")
    args = p.parse_args()
    given = lambda name: getattr(args, name) != p.get_default(name)
    if args.hybrids and not given("models"):
        args.models = HYBRIDS
    if args.widths:
        args.models = args.models if given("models") else list(WIDTHS_OF)
        args.formats = args.formats if given("formats") else list(limits.BITS)
        args.peers = args.peers if given("peers") else []
    if args.capped:
        args.models = ["olmoe"]
        args.formats = args.formats if given("formats") else capped.FORMATS
        args.prompt, args.gen = args.prompt if given("prompt") else [128], args.gen if given("gen") else 128
    if args.quick:
        args.models, args.layers = args.models[:1], args.layers or 2
        args.prompt, args.gen, args.repeat = [256, 1024], 16, 3
    args.peer_prompt = args.peer_prompt or args.prompt[:1]
    args.mode = next((mode for mode in MODES if getattr(args, mode)), None)
    args.out = args.out or Path(f"bench/peers/{args.mode}.json" if args.mode else "bench/results.json")
    args.context = -(-(max(args.prompt) + args.gen + 64) // 64) * 64
    unknown = [x for x in args.models if x not in LAYERS] + [x for x in args.peers if x not in PEERS]
    if unknown:
        p.error(f"unknown: {', '.join(unknown)}")
    return args


WEIGHTS = {"moec": "ram", "moec-mapped": "mmap"}
"""`--weights` of a row."""
OWN = {"moec": WEIGHTS["moec"]}
FIRST = ",".join(str(i) for i in range(1, 9))
"""Prompt before a first token."""
FIRSTS = 2
"""How often each is measured."""
LAYER_GB, ENDS_GB = 0.85, 0.41
"""Of OLMoE in bf16: a layer; embeddings and head."""
WARM = {"moec-default": [], "moec-mmap": ["--weights", "mmap"]}
"""Options of moec's rows of warm starts."""
DROP_CACHES = Path("/proc/sys/vm/drop_caches")


class Moec(Process):
    """`run bench --stdin` of a bundle, in moec's own process."""

    def __init__(self, bench, bundle, weights="ram"):
        words = [bench.args.moec, "run", bundle, "bench", "--stdin", "--threads", bench.args.threads, "--weights", weights]
        super().__init__(words, bench.cache / "log" / f"moec-{bundle.stem}-{weights}.log")

    def time(self, prompt, gen, batch=1):
        found = self.ask(f"{prompt} {gen} {batch}")
        return {"prefill": found["prefill_tokens_per_s"], "decode": found["decode_tokens_per_s"]}


def median(values):
    return statistics.median(values)


def layers_with(gb):
    """Layers of OLMoE whose weights take about so many GB in bf16."""
    return max(1, round((gb - ENDS_GB) / LAYER_GB))


def parts(path):
    """A file, or the files of a folder."""
    return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]


def size(path):
    return sum(p.stat().st_size for p in parts(path))


def read(path):
    """Reads all of it, so that it is in the page cache as far as that has room."""
    for part in parts(path):
        with open(part, "rb", buffering=0) as file:
            while file.read(1 << 24):
                pass


def forget(path):
    """Takes all of it out of the page cache."""
    for part in parts(path):
        with open(part, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Bench:
    def __init__(self, args):
        self.args, self.cache = args, args.cache.resolve()
        self.venvs = Venvs(self.cache)
        if args.no_install:
            self.venvs.install = self.refuse
        self.models = Models(self.cache, args.moec.resolve(), self.venvs)
        self.rows, self.versions, self.failures = [], {}, {}
        self.machine, self.reports = None, []

    def refuse(self, *_):
        raise Failed("not installed")

    def profile(self):
        """Measures the roofline once. A busy machine swings: limits are medians of what was measured between the turns that
        they stand for, and the table names the medians of all."""
        words = [self.args.moec, "profile-device", "--quiet", "--json", "--no-matmul", "--threads", self.args.threads]
        self.reports.append(json.loads(self.models.run(words, "profile-device")))

    def limits_of(self, first):
        """Limits from now on are those of the reports from the index `first` on."""
        self.machine = limits.Machine.of(limits.middle(self.reports[first:]))

    def peers(self, names, fmt):
        return [p for p in names if p in self.args.peers and fmt in PEERS[p].formats]

    def attempt(self, peer, fmt, what, work, model=None):
        """Runs what a peer has to measure; a failure is noted, never fatal. One that stands since before is not reported again."""
        try:
            return work()
        except (Failed, subprocess.SubprocessError, OSError) as e:
            if not isinstance(e, Again):
                log(f"  {PEERS[peer].title} {fmt}: {e}")
            self.failures[f"{peer} {fmt} {what}"] = str(e)
            row = {"section": what, "engine": peer, "format": fmt, "failed": str(e)}
            self.rows.append(row | ({"model": model} if model else {}))
            return None

    def note_version(self, peer, worker):
        if peer not in self.versions:
            self.versions[peer] = worker.version()

    def row(self, section, engine, fmt, task, rate, limit, **more):
        self.rows.append({
            "section": section, "engine": engine, "format": fmt, "bits": limits.BITS[fmt], "task": task,
            "rate": rate, "limit": limit, **more,
        })

    def alone(self, model, folder, fmt, target="native", section="model", weights=WEIGHTS):
        """moec by itself, with weights of its own and with mapped ones: every prompt, and four sequences at once, by turns."""
        shape, args = self.models.shape(folder), self.args
        bundle = self.models.bundle(folder, fmt, args.context, target)
        tasks = [(prompt, 1) for prompt in args.prompt] + [(64, 4)]
        found, first = {(name, *task): [] for name in weights for task in tasks}, len(self.reports)
        with ExitStack() as stack:
            both = {name: stack.enter_context(Moec(self, bundle, how)) for name, how in weights.items()}
            for moec in both.values():
                moec.time(args.prompt[0], 2)
            for _ in range(args.repeat):
                time.sleep(PAUSE)
                self.profile()
                for (prompt, batch), (name, moec) in itertools.product(tasks, both.items()):
                    time.sleep(PAUSE)
                    found[name, prompt, batch].append(moec.time(prompt, args.gen, batch))
        self.limits_of(first)
        for (name, prompt, batch), times in found.items():
            rate = lambda what: median([t[what] for t in times])
            if batch == 1:
                self.row(section, name, fmt, f"prefill {prompt}", rate("prefill"),
                         limits.prefill(self.machine, shape, fmt, prompt), model=model, token_bytes=shape.weight_bytes(1, fmt))
            self.row(section, name, fmt, f"decode {batch} at {prompt}", rate("decode"),
                     limits.decode(self.machine, shape, fmt, prompt + args.gen / 2, batch), model=model)

    def pair(self, peer, model, folder, fmt, target="native", section="model"):
        """moec and a peer by turns."""
        shape, args = self.models.shape(folder), self.args
        bundle = self.models.bundle(folder, fmt, args.context, target)
        source = self.models.source(peer, folder, fmt)
        context = max(args.peer_prompt) + args.gen + 64
        with Moec(self, bundle) as moec, Worker(self.venvs, peer, source, args.threads, context, fmt) as worker:
            self.note_version(peer, worker)
            for prompt in args.peer_prompt:
                ours, theirs = [], []
                moec.time(prompt, 2), worker.do("time", prompt=prompt, gen=2)
                for _ in range(args.repeat):
                    time.sleep(PAUSE)
                    ours.append(moec.time(prompt, args.gen))
                    time.sleep(PAUSE)
                    theirs.append(worker.do("time", prompt=prompt, gen=args.gen))
                for what, task, limit in [
                    ("prefill", f"prefill {prompt}", limits.prefill(self.machine, shape, fmt, prompt)),
                    ("decode", f"decode 1 at {prompt}", limits.decode(self.machine, shape, fmt, prompt + args.gen / 2)),
                ]:
                    rate, mine = median([t[what] for t in theirs]), median([t[what] for t in ours])
                    self.row(section, peer, fmt, task, rate, limit, model=model, moec=mine, ratio=mine / rate)
                    log(f"  {fmt} {task}: {PEERS[peer].title} {rate:.1f}, moec {mine:.1f} tokens/s ({mine / rate:.2f}x)")

    def layers_of(self, i, model):
        """Layers that are kept of the model at place `i`."""
        usual = WIDTHS_OF if self.args.widths or self.args.capped else LAYERS
        return (self.args.layers if i == 0 else None) or usual.get(model, LAYERS[model])

    def speed(self):
        """Whole models."""
        for i, model in enumerate(self.args.models):
            layers = self.layers_of(i, model)
            log(f"{model}, {layers} layers")
            folder = self.models.checkpoint(model, layers, self.args.context)
            for fmt in self.args.formats:
                self.moec_alone(model, folder, fmt)
                for peer in self.peers(MAIN[model], fmt):
                    self.attempt(peer, fmt, "model", lambda p=peer, f=fmt: self.pair(p, model, folder, f), model)
                if i == 0:
                    self.first_tokens(folder, fmt)
                self.models.drop_bundles()
            if i == 0:
                self.restricted(model, folder)
            elif not self.args.keep:
                self.models.drop(folder)

    def hybrids(self):
        """Models with recurrent layers, beside engines that know them, and operator by operator."""
        for i, model in enumerate(self.args.models):
            folder = self.models.checkpoint(model, self.layers_of(i, model), self.args.context)
            for fmt in self.args.formats:
                log(f"{folder.name}, {fmt}")
                self.moec_alone(model, folder, fmt, weights=OWN)
                self.operators(model, folder, fmt)
                for peer in self.peers(MAIN[model], fmt):
                    self.attempt(peer, fmt, "model", lambda p=peer, f=fmt: self.pair(p, model, folder, f), model)
                self.models.drop_bundles()
            if not self.args.keep:
                self.models.drop(folder)

    def operators(self, model, folder, fmt):
        """Seconds of every operator of a prompt and of a token after it, and the least that this machine needs for it."""
        args, prompt = self.args, self.args.prompt[0]
        bundle = self.models.bundle(folder, fmt, args.context)
        for task, call in [(f"prefill {prompt}", ["--prefill", prompt]), (f"decode 1 at {prompt}", ["--decode", 1, "--context", prompt])]:
            words = [args.moec, "steps", bundle, *call, "--limits", "--json", "--threads", args.threads]
            steps, sums = json.loads(self.models.run(words, "steps"))["steps"], {}
            for step in steps:
                sums.setdefault(step["op"], []).append((step["seconds"], step.get("limit", {}).get("seconds", 0.0)))
            for op, found in sums.items():
                seconds, limit = (sum(column) for column in zip(*found))
                # Steps without a limit of their own move rows between others.
                self.rows.append({"section": "operators", "model": model, "format": fmt, "task": task, "op": op,
                                  "steps": len(found), "seconds": seconds, "limit": limit})

    def widths(self):
        """moec in every number of bits per weight, and peers in those that they have."""
        for i, model in enumerate(self.args.models):
            layers = self.layers_of(i, model)
            folder, title = self.models.checkpoint(model, layers, self.args.context), f"{model}, {layers} layers"
            for fmt in self.args.formats:
                log(f"{folder.name}, {fmt}")
                self.moec_alone(title, folder, fmt, section="widths", weights=OWN)
                for peer in self.peers(MAIN[model], fmt):
                    self.attempt(peer, fmt, "widths", lambda p=peer, f=fmt: self.pair(p, title, folder, f, section="widths"), title)
                self.models.drop_bundles()
            if not self.args.keep:
                self.models.drop(folder)

    def capped(self):
        """moec in formats of few bits, with experts on the disk."""
        for i, model in enumerate(self.args.models):
            folder = Capped(self.args, self.models, self.rows, self.failures).run(model, self.layers_of(i, model))
            self.models.drop_bundles()
            if not self.args.keep:
                self.models.drop(folder)

    def roundings(self):
        """What formats lose."""
        Roundings(self.args, self.models, self.venvs, self.rows, self.failures).run(limits.BITS)

    def first_tokens(self, folder, fmt):
        """Seconds to the first token of a process, where the files are in the page cache and where they are not."""
        bundle = self.models.bundle(folder, fmt, self.args.context)
        words = [self.args.moec, "run", bundle, "generate", "--ids", FIRST, "-n", "1", "--threads", self.args.threads]

        def moec(weights):
            start = time.perf_counter()
            self.models.run([*words, "--weights", weights], "first")
            return time.perf_counter() - start

        def peer(name):
            source = self.models.source(name, folder, fmt)
            with Worker(self.venvs, name, source, self.args.threads, 64, fmt) as worker:
                return worker.do("first", ids=[int(i) for i in FIRST.split(",")])["seconds"]

        ways = {name: lambda w=weights: moec(w) for name, weights in {**WEIGHTS, "moec-auto": "auto"}.items()}
        ways |= {name: lambda n=name: peer(n) for name in self.peers(["llama", "llama-read"], fmt)}
        found = {name: {"cold": [], "warm": []} for name in ways}
        for _ in range(FIRSTS):
            for name, way in ways.items():
                try:
                    if os.access(DROP_CACHES, os.W_OK):
                        os.sync()
                        DROP_CACHES.write_text("1")
                        found[name]["cold"].append(way())
                    way()
                    found[name]["warm"].append(way())
                except (Failed, OSError) as e:
                    log(f"  first token of {name} {fmt}: {e}")
        for name, times in found.items():
            seconds = {state: median(t) for state, t in times.items() if t}
            if seconds:
                log(f"  {fmt}, first token of {name}: " + ", ".join(f"{state} {s:.2f} s" for state, s in seconds.items()))
                self.rows.append({"section": "first", "engine": name, "format": fmt, "bits": limits.BITS[fmt], **seconds})

    def warm(self):
        """Seconds to the first token of a process whose files are in the page cache, by the size of the files: moec with its
        default weights and with mapped ones, and llama.cpp, by turns."""
        for gb in self.args.warm:
            folder = self.models.checkpoint("olmoe", layers_with(gb), self.args.context)
            try:
                self.warm_of(folder)
            except Failed as e:
                log(f"  {folder.name}: {e}")
                self.failures[f"warm {folder.name}"] = str(e)
            finally:
                if not self.args.keep:
                    self.models.drop_bundles()
                    self.models.drop(folder)

    def warm_of(self, folder):
        gguf = self.models.source("llama", folder, "bf16") if self.peers(["llama"], "bf16") else None
        bundle = self.models.bundle(folder, "bf16", self.args.context, link=True)
        words = [bundle / "run", "generate", "--ids", FIRST, "-n", "1", "--threads", self.args.threads]

        def moec(options):
            start = time.perf_counter()
            self.models.run([*words, *options], "first")
            return time.perf_counter() - start

        def llama():
            with Worker(self.venvs, "llama", gguf, self.args.threads, 64, "bf16") as worker:
                self.note_version("llama", worker)
                return worker.do("first", ids=[int(i) for i in FIRST.split(",")])["seconds"]

        ways = {name: lambda o=options: moec(o) for name, options in WARM.items()}
        files = {name: bundle for name in WARM}
        if gguf:
            ways["llama"], files["llama"] = llama, gguf
        times = {name: [] for name in ways}
        for _ in range(self.args.repeat):
            for name, way in ways.items():
                # Only files of this one are in the page cache, whatever came before.
                for path in files.values():
                    if path != files[name]:
                        forget(path)
                read(files[name])
                time.sleep(PAUSE)
                times[name].append(way())
        for name, found in times.items():
            seconds = median(found)
            log(f"  {folder.name}, {size(files[name]) / 1e9:.2f} GB: first token of {name} after {seconds:.3f} s")
            self.rows.append({"section": "warm", "engine": name, "model": folder.name, "bytes": size(files[name]),
                              "seconds": seconds, "least": min(found), "most": max(found)})

    def moec_alone(self, model, folder, fmt, **more):
        try:
            self.alone(model, folder, fmt, **more)
        except Failed as e:
            log(f"  moec {fmt}: {e}")
            self.failures[f"moec {fmt} {more.get('section', 'model')}"] = str(e)

    def restricted(self, model, folder):
        """The same machine with fewer instructions."""
        targets = {"llama-avx2": "x86-64-v3"}
        amx = [f for f in self.reports[-1]["features"] if f.startswith("amx")]
        if amx:
            targets["llama-avx512"] = self.without_amx()
        for peer, target in targets.items():
            for fmt in [f for f in self.args.formats if self.peers([peer], f)]:
                self.attempt(peer, fmt, peer, lambda p=peer, t=target, f=fmt: self.pair(p, model, folder, f, t, section=p))
                self.models.drop_bundles()

    def without_amx(self):
        r = self.reports[-1]
        features = [f for f in r["features"] if not f.startswith("amx")]
        path = self.cache / "avx512.toml"
        path.write_text(
            f'name = "avx512"\ndescription = "this machine without AMX"\nfamily = "cpu"\n'
            f'triple = "{r["triple"]}"\ncpu = "{r["cpu"]}"\nfeatures = {json.dumps(features)}\n'
        )
        return str(path)

    def layer(self):
        """The experts of one layer."""
        log("one layer of experts")
        probe, args = self.models.probe(), self.args
        shape, tokens = self.models.shape(probe), args.prompt[0]
        for fmt in args.formats:
            try:
                bundle = self.models.bundle(probe, fmt, 1024, ends="f32")
                steps = lambda: self.moec_layer(bundle, tokens)
                steps()
                limit = limits.layer(self.machine, shape, fmt, tokens)
                if self.peers(["kt"], fmt):
                    self.attempt("kt", fmt, "layer", lambda f=fmt, l=limit, s=steps: self.kt(probe, f, tokens, s, l))
                ours = median([steps() for _ in range(args.repeat)])
                self.row("layer", "moec", fmt, f"layer {tokens}", ours, limit)
            except Failed as e:
                log(f"  moec {fmt}: {e}")

    def moec_layer(self, bundle, tokens):
        """Seconds from the sorted pairs to the summed output: what kt-kernel does in one call."""
        words = [self.args.moec, "steps", bundle, "--prefill", tokens, "--repeat", 1, "--json", "--threads", self.args.threads]
        steps = json.loads(self.models.run(words, "steps"))["steps"]
        return sum(s["seconds"] for s in steps if s["op"].startswith(("dispatch", "expert", "combine")))

    def kt(self, probe, fmt, tokens, steps, limit):
        ids = [i % 2048 for i in range(tokens)]
        with Worker(self.venvs, "kt", probe, self.args.threads, 1024, fmt) as worker:
            self.note_version("kt", worker)
            ours, theirs = [], []
            worker.do("layer_time", ids=ids)
            for _ in range(self.args.repeat):
                time.sleep(PAUSE)
                ours.append(steps())
                time.sleep(PAUSE)
                theirs.append(worker.do("layer_time", ids=ids)["seconds"])
            rate, mine = median(theirs), median(ours)
            self.row("layer", "kt", fmt, f"layer {tokens}", rate, limit, moec=mine, ratio=rate / mine)
            log(f"  {fmt}: kt-kernel {rate * 1e3:.1f} ms, moec {mine * 1e3:.1f} ms")

    def quality(self):
        """Errors of formats: of a layer, and as perplexity of ferris."""
        log("errors of the formats")
        for fmt, activations in [("bf16", "f32")] + [(f, "auto") for f in self.args.formats]:
            name = fmt if activations == "auto" else f"{fmt} weights, f32 activations"
            try:
                self.rows.append({"section": "quality", "engine": "moec", "format": name, "bits": limits.BITS[fmt],
                                  **self.moec_quality(fmt, activations)})
            except Failed as e:
                log(f"  moec {name}: {e}")
                self.rows.append({"section": "quality", "engine": "moec", "format": name, "failed": str(e)})
        for fmt in self.args.formats:
            for peer in self.peers(["llama", "ik", "transformers", "kt"], fmt):
                found = self.attempt(peer, fmt, "quality", lambda p=peer, f=fmt: self.peer_quality(p, f))
                if found:
                    self.rows.append({"section": "quality", "engine": peer, "format": fmt, "bits": limits.BITS[fmt], **found})

    def moec_quality(self, fmt, activations):
        ids = ",".join(str(i) for i in range(64))
        bundle = self.models.bundle(self.models.probe(), fmt, 1024, ends="f32", activations=activations)
        out = self.cache / "moec-logits.safetensors"
        out.unlink(missing_ok=True)
        self.models.run([self.args.moec, "run", bundle, "logits", "--ids", ids, "--out", out], "logits")
        error = self.models.layer_error(out)
        ferris = self.models.bundle(FERRIS, fmt, 1024, activations=activations)
        words = [self.args.moec, "eval", "--quiet", ferris, "--text", FERRIS / "eval" / "text.txt", "--window", WINDOW,
                 "--windows", WINDOWS, "--json"]
        perplexity = json.loads(self.models.run(words, "eval"))["perplexity"]
        log(f"  moec {fmt}, activations {activations}: layer {error:.2e}, perplexity {perplexity:.4f}")
        return {"layer_error": error, "perplexity": perplexity}

    def peer_quality(self, peer, fmt):
        probe, found, direct = self.models.probe(), {}, peer in ("kt", "transformers")
        out, ids = str(self.cache / f"{peer}-logits.npy"), list(range(64))
        source = self.models.source(peer, probe, fmt, exact_ends=True)
        with Worker(self.venvs, peer, source, self.args.threads, 1024, fmt) as worker:
            self.note_version(peer, worker)
            worker.do("output" if direct else "logits", ids=ids, out=out)
        found["layer_error"] = self.models.layer_error(out, *["--output"] * direct, *["--renorm"] * (peer == "ik"))
        if peer in ("llama", "ik"):
            source = self.models.gguf(FERRIS, fmt)
            with Worker(self.venvs, peer, source, self.args.threads, 1024, fmt) as worker:
                found |= worker.do("perplexity", folder=str(FERRIS), text=str(FERRIS / "eval" / "text.txt"),
                                   window=WINDOW, windows=WINDOWS)
        log(f"  {PEERS[peer].title} {fmt}: {found}")
        return found

    def startup(self):
        """Wall time of `run generate` to its first token, process start included."""
        log("start to first token")
        try:
            bundle = self.models.bundle(FERRIS, "bf16", 1024, link=True)
        except Failed as e:
            log(f"  {e}")
            return
        times = []
        for _ in range(2 * self.args.repeat + 1):
            start = time.perf_counter()
            words = [bundle / "run", "generate", "--ids", "1,2,3,4,5,6,7,8", "-n", "1", "--threads", str(self.args.threads)]
            subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
            times.append(time.perf_counter() - start)
        self.rows.append({"section": "startup", "engine": "moec", "seconds": median(times)})

    def facts(self):
        """Cost of builds, of those that are large enough to say something."""
        for name, b in self.models.built.items():
            if b["weight_bytes"] > 1e9:
                gb = b["weight_bytes"] / 1e9
                self.rows.append({"section": "build", "name": name, "gb": gb, "seconds_per_gb": b["seconds"] / gb,
                                  "peak_memory_bytes": b["peak_memory_bytes"]})

    def results(self, seconds):
        return {
            "conditions": {
                "threads": self.args.threads, "repetitions": self.args.repeat, "gen": self.args.gen,
                "prompts": self.args.prompt, "models": {m: self.layers_of(i, m) for i, m in enumerate(self.args.models)},
                "quick": self.args.quick, "load_before": self.load, "warm": self.args.warm, "date": time.strftime("%d %B %Y"),
            },
            "machine": limits.middle(self.reports) if self.reports else None, "versions": self.versions, "failures": self.failures, "rows": self.rows,
            "seconds": round(seconds),
        }

    def run(self):
        start = time.perf_counter()
        self.load = os.getloadavg()[0]
        if not self.args.roundings:
            log("measuring the machine")
            for _ in range(3):
                self.profile()
            self.limits_of(0)
        if self.args.mode:
            getattr(self, self.args.mode)()
            return self.results(time.perf_counter() - start)
        self.quality()
        self.layer()
        self.speed()
        self.startup()
        self.facts()
        return self.results(time.perf_counter() - start)


def main():
    args = arguments()
    args.cache.mkdir(parents=True, exist_ok=True)
    results = Bench(args).run()
    if args.widths and args.out.exists():
        table.keep_others(json.loads(args.out.read_text()), results)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    text = MODES.get(args.mode, table.markdown)(results, PEERS)
    written = table.insert(args.page, text, *table.MARKS.get(args.mode, ()))
    log(f"wrote {args.out}" + (f" and the table in {args.page}" if written else ""))
    print(json.dumps(results, indent=1) if args.json else text)


if __name__ == "__main__":
    try:
        main()
    except Failed as e:
        raise SystemExit(f"error: {e}") from None
