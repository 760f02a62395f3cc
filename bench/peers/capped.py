"""What fewer bits gain where experts come from the disk: moec in formats of 4 bits and fewer under one cap on memory, by turns."""

import statistics
import time
from contextlib import ExitStack

import limits
from engines import Failed, Process, log
from table import FORMAT, cells, number, rule

FORMATS = ["q4", "q3", "q2", "q2s"]
HALVED = "q4"
"""The cap is what this format needs with half of the experts in memory."""
SEQUENCES = 4
"""For which bundles reserve a cache."""
BUFFERS = 96 << 20
"""Bytes of a run beside weights and caches: activations, the program."""
PAUSE = 0.3
"""As between other turns."""


def cap(shape, context):
    """MiB that a run in `HALVED` needs with half of the experts in memory, about."""
    experts = shape.layers * shape.experts
    matrices = shape.mixers + 2 * shape.vocab * shape.hidden + experts * shape.expert / 2
    weights = matrices * limits.BITS[HALVED] / 8 + 4 * experts * shape.hidden
    return round((weights + SEQUENCES * shape.kv_bytes(context) + BUFFERS) / 2**20)


def decoded(before, one, all):
    """Rate of the tokens after a prompt, what each read from the disk, and the share of the experts it used that were in memory.

    These are reports of a process: before two requests, after the one for a prompt and one token, after the one for the prompt again
    and more tokens. Their counts are sums, and what a prompt reads is in both requests."""
    grown = lambda part, name: (all[part][name] - one[part][name]) - (one[part][name] - before[part][name])
    hits, misses = grown("cache", "hits"), grown("cache", "misses")
    return {"rate": all["decode_tokens_per_s"], "bytes": grown("disk", "bytes") / (all["gen"] - one["gen"]), "found": hits / (hits + misses)}


class Capped:
    def __init__(self, args, models, rows, failures):
        self.args, self.models, self.rows, self.failures = args, models, rows, failures

    def bundles(self, folder, limit):
        """A bundle of each format that this moec has."""
        found = {}
        for fmt in self.args.formats:
            try:
                found[fmt] = self.models.bundle(folder, fmt, self.args.context, budget=f"{limit} MiB")
            except Failed as e:
                log(f"  moec {fmt}: {e}")
                self.failures[f"moec {fmt} capped"] = str(e)
        return found

    def process(self, bundle):
        words = [self.args.moec, "run", bundle, "bench", "--stdin", "--threads", self.args.threads]
        return Process(words, self.models.cache / "log" / f"moec-{bundle.stem}.log")

    def run(self, model, layers):
        """Measures a model that is routed as the real one; gives its checkpoint."""
        args, prompt = self.args, self.args.prompt[0]
        folder = self.models.checkpoint(model, layers, args.context, routed=True)
        shape = self.models.shape(folder)
        bundles = self.bundles(folder, cap(shape, args.context))
        found = {fmt: [] for fmt in bundles}
        with ExitStack() as stack:
            running = {fmt: stack.enter_context(self.process(bundle)) for fmt, bundle in bundles.items()}
            # The first request fills the memory.
            last = {fmt: process.ask(f"{prompt} {args.gen} 1") for fmt, process in running.items()}
            for _ in range(args.repeat):
                for fmt, process in running.items():
                    time.sleep(PAUSE)
                    one, all = (process.ask(f"{prompt} {gen} 1") for gen in (1, args.gen))
                    found[fmt].append(decoded(last[fmt], one, all))
                    last[fmt] = all
        for fmt, figures in found.items():
            said, median = last[fmt], {name: statistics.median(f[name] for f in figures) for name in figures[0]}
            self.rows.append({
                "section": "capped", "model": model, "format": fmt, "bits": limits.BITS[fmt], "cap_bytes": said["memory"]["budget"],
                "peak_bytes": said["memory"]["peak"], "policy": said["cache"]["policy"],
                "in_memory": said["cache"]["experts"] / (shape.layers * shape.experts), **median,
            })
            log(f"  {fmt}: {median['rate']:.1f} tokens/s, {median['bytes'] / 1e6:.1f} MB from the disk per token")
        return folder


def markdown(results, peers):
    """A row for each format, beside the first."""
    rows, c = results["rows"], results["conditions"]
    model, first = next(iter(c["models"].items())), rows[0]
    out = [
        f"Written by `cargo xtask bench-peers --capped`, {c['date']}. Machine: {results['machine']['description'].split(', measured')[0]}.", "",
        f"{model[0]}, {model[1]} layers, a cap of {first['cap_bytes'] / 2**20:.0f} MiB; {c['threads']} threads, {c['gen']} tokens decoded after a "
        f"prompt of {c['prompts'][0]}, medians of {c['repetitions']}, formats by turns; the expert cache by `{first['policy']}`.", "",
        cells("format", "bits per weight", "experts in memory", "uses found there", "MB read per token", "read, GB/s", "decode, tokens/s",
              f"times {FORMAT[first['format']]}"),
        rule(8),
    ]
    for r in rows:
        out.append(cells(
            FORMAT[r["format"]], f"{r['bits']:g}", f"{100 * r['in_memory']:.0f} %", f"{100 * r['found']:.1f} %", number(r["bytes"] / 1e6),
            f"{r['rate'] * r['bytes'] / 1e9:.2f}", number(r["rate"]), f"{r['rate'] / first['rate']:.2f}"))
    return "\n".join(out) + "\n"
