"""The table of neurons from disk, and into docs/neuron-cache.md between its markers."""

import report
from limits import BITS
from neuron_weights import NEURONS, WHOLE
from report import cells, gib, number

MARKS = ("<!-- bench-neurons -->", "<!-- /bench-neurons -->")
LLAMA = "llama.cpp"


def mb(x):
    """Three digits of megabytes."""
    return "-" if x is None else number(x / 1e6)


def sizes(shape, fmt):
    """Bytes of all experts, and of the weights beside them."""
    experts = shape.layers * shape.experts * shape.expert * BITS[fmt] / 8
    rest = shape.mixers * BITS[fmt] / 8 + 4 * shape.layers * shape.experts * shape.hidden
    return experts, rest + 2 * shape.vocab * shape.hidden * BITS[fmt] / 8


def least(said, paging, tokens):
    """Bytes per decoded token that the best choice of who goes would have read, blocks of the disk as they are; and those that all
    that was requested would take, if memory held nothing."""
    cache, each = said["cache"], paging["neurons_per_frame"]
    # Of neurons the run counts what a frame holds; a read has what pads them on disk, too.
    scale = said["disk"]["block_bytes"] / paging["frame_bytes"] if each else 1.0
    decoded = tokens - 1
    return {name: None if cache[key] is None else cache[key] * scale / decoded
            for name, key in (("least", "bytes_belady"), ("asked", "bytes_used"))}


def active(said, shape, paging, tokens):
    """Share of the neurons of the experts that tokens chose which were requested: the ones that are not 0, and those that share
    their reads."""
    used = said["cache"]["bytes_used"] / paging["frame_bytes"] * paging["neurons_per_frame"]
    return used / ((tokens - 1) * shape.layers * shape.k * shape.inner)


def in_words(row):
    return (f"{number(row['rate'])} tokens/s, {mb(row['read'])} MB per token, later {mb(row['read_later'])}; "
            f"group {gib(row['peak'])}, of no file {gib(row['of_no_file'])}")


def rate(row, ours=None):
    """Tokens per second; how many times faster neurons are."""
    if not row or "failed" in row:
        return "-"
    if not ours or "failed" in ours:
        return number(row["rate"])
    return f"{number(row['rate'])} (neurons {ours['rate'] / row['rate']:.2f}×)"


def table(rows):
    head = ["zeros", "bits", "memory", "cap", "neurons, MB", "whole experts, MB", "llama.cpp, MB", "least, neurons / experts", "neurons, tokens/s",
            "whole experts", "llama.cpp"]
    out = [cells(*head), cells(*["---"] * len(head))]
    for row in rows:
        engines = [row.get(name) for name in (NEURONS, WHOLE, LLAMA)]
        reads = [mb(e.get("read")) if e else "-" for e in engines]
        lowest = " / ".join(mb(e.get("least")) for e in engines[:2])
        out.append(cells(f"{row['zeros']} %", str(row["bits"]), f"{row['memory']} %", gib(row["cap"]), *reads, lowest, rate(engines[0]),
                         *[rate(e, engines[0]) for e in engines[1:]]))
    return out


def markdown(results):
    c = results["conditions"]
    llama = f" llama.cpp {c['llama']} maps its weights and repacks none." if c["llama"] else ""
    text = (
        f"Written by `cargo xtask bench-neurons`. {c['machine']}. {c['layers']} layers of OLMoE-1B-7B's shapes (64 experts of 1024 neurons, 8 per "
        f"token), {c['threads']} threads; a prompt of {c['prompt']} tokens, then {c['tokens']}: megabytes per token are of all of these, tokens per "
        f"second of those behind the first {c['cold']}. Medians of {c['repetitions']}, by turns, each from an empty page cache.{llama}"
    )
    return "\n".join(["", text, "", *table(results["rows"]), ""])


def insert(path, text):
    """Puts the text between the markers; false where there are none."""
    return report.insert(path, text, MARKS)
