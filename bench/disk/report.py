"""The results as Markdown, and into docs/benchmarks.md between its markers."""

START, END = "<!-- bench-disk -->", "<!-- /bench-disk -->"
HEAD = [
    "cap", "engine", "budget", "first token, s", "cold, tokens/s", "warm, tokens/s", "read per token, cold", "warm",
    "least: uniform / popular / Belady", "of the disk's rate", "bound, tokens/s: popular / Belady", "reached", "peak of the group",
    "of no file", "RSS",
]


def cells(*values):
    return "| " + " | ".join(values) + " |"


def number(x):
    """Three digits; whole from 100 up; `-` where nothing is known."""
    return "-" if x is None else f"{x:.0f}" if x >= 100 else f"{x:.3g}"


def gib(x):
    return "-" if x is None else f"{x / 2**30:.2f} GiB"


def gb(x):
    return "-" if x is None else f"{x / 1e9:.2f} GB" if x >= 1e8 else f"{x / 1e6:.0f} MB"


def cap_name(cap):
    return "no cap" if cap is None else f"{cap / 2**30:g} GiB"


def field(row, path):
    """A number that a run said of itself, by its place (`cache.bytes_belady`), or `None`."""
    value = row.get("said")
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, (int, float)) else None


def disk_rate(machine, block):
    """Best rate of random reads in blocks of a size, bytes per second; without a size, of the largest that was measured.
    Also the block size that it was measured with: the largest that is no larger."""
    rates = [r for r in ((machine or {}).get("disk") or {}).get("rates", []) if r["order"] == "random"]
    sizes = sorted({r["block_bytes"] for r in rates})
    if not sizes:
        return None, None
    size = max([s for s in sizes if block is None or s <= block], default=sizes[0])
    return max(r["gb_per_s"] for r in rates if r["block_bytes"] == size) * 1e9, size


def disk_share(row, machine):
    """Rate at which the store moved its bytes while it was busy, of what the disk was measured at."""
    moved, busy = field(row, "disk.bytes"), field(row, "disk.busy_seconds")
    rate, _ = disk_rate(machine, field(row, "disk.block_bytes"))
    return moved / busy / rate if moved and busy and rate else None


def belady(row, tokens):
    """Bytes per token that a cache of the same size would read if it knew the future."""
    found = field(row, "cache.bytes_belady")
    return found / tokens if found is not None else None


def bounds(row, rows, machine, tokens):
    """Tokens per second that no schedule passes, with the best fixed set of experts and with a cache that knew the future: the
    bytes at the disk's rate, or the arithmetic, whichever takes longer. The disk's rate is what the store reached while it
    was busy, or the measured one of random reads, if that is better; the arithmetic, a token without a cap."""
    moved, busy = field(row, "disk.bytes"), field(row, "disk.busy_seconds")
    if row["cap"] is None or not moved or not busy:
        return None, None
    rate = max(moved / busy, disk_rate(machine, field(row, "disk.block_bytes"))[0] or 0)
    free = next((r for r in rows if r["engine"] == row["engine"] == "moec" and r["cap"] is None and "failed" not in r), None)
    arithmetic = 1 / free["warm"]["rate"] if free and free["warm"]["rate"] else 0
    seconds = [None if b is None else max(b / rate, arithmetic) for b in (row["least"]["popular"], belady(row, tokens))]
    return tuple(1 / s if s else None for s in seconds)


def in_words(row):
    """One row for the log."""
    if "failed" in row:
        return row["failed"]
    cold, warm = row["cold"], row["warm"]
    return (f"cold {number(cold['rate'])}, warm {number(warm['rate'])} tokens/s, {gb(cold['read'])} and {gb(warm['read'])} per token; "
            f"group {gib(row['peak'])}, of no file {gib(row['anonymous'])}")


def table(bits, part):
    rows, tokens = part["rows"], part["conditions"]["tokens"]
    out = [cells(*HEAD), cells(*["---"] * len(HEAD))]
    for row in rows:
        name = row["engine"] + (" (cut)" if row.get("cut") else "")
        fallbacks = field(row, "fallback_ratio")
        if "gamma" in row and fallbacks is not None:
            name += f", {100 * fallbacks:.0f} % fall back"
        first = [cap_name(row["cap"]), f"**{name}**" if name.startswith("moec") else name]
        if "failed" in row:
            out.append(cells(*first, gib(row["budget"]), row["failed"].replace("|", "/"), *["-"] * 8, gib(row.get("peak")), "-", "-"))
            continue
        base = next((r for r in rows if r["engine"] == "llama.cpp" and r["cap"] == row["cap"] and "failed" not in r), None)
        speeds = []
        for phase in ("cold", "warm"):
            one, other = row[phase]["rate"], base[phase]["rate"] if base and base is not row else None
            ratio = f" ({one / other:.2f}×)" if one and other else ""
            speeds.append(number(row[phase]["rate"]) + ratio)
        least = " / ".join(gb(x) for x in (row["least"]["uniform"], row["least"]["popular"], belady(row, tokens)))
        share = disk_share(row, part["machine"])
        most = bounds(row, rows, part["machine"], tokens)
        reached = row["warm"]["rate"] / most[0] if most[0] and row["warm"]["rate"] else None
        out.append(cells(
            *first, gib(row["budget"] or field(row, "memory.budget")), number(row["start"]), *speeds,
            gb(row["cold"]["read"]), gb(row["warm"]["read"]), least, "-" if share is None else f"{100 * share:.0f} %",
            " / ".join(map(number, most)) if most[0] else "-", "-" if reached is None else f"{100 * reached:.0f} %",
            gib(row["peak"]), gib(row["anonymous"]), gib(row["rss"]),
        ))
    return out


def best_of(results):
    """Several sequences in one batch."""
    parts = [(bits, row) for bits in sorted(results, key=int, reverse=True) for row in results[bits].get("best_of", [])]
    if not parts:
        return []
    many, repeat = parts[0][1]["best_of"], parts[0][1]["repeat"]
    head = ["model", "bits", "prompt", "drawn", f"best of {many}, tokens/s", f"{many} single runs, tokens/s", "times", "bound of decoding"]
    out = [
        "",
        f"Best of {many} with all experts in memory, prompts included; medians of {repeat}, by turns. *Bound of decoding*: bytes over bytes, "
        "where each sequence chooses its experts alone; a prompt that is computed once instead of "
        f"{many} times comes on top.",
        "",
        cells(*head), cells(*["---"] * len(head)),
    ]
    for bits, row in parts:
        most = "-" if row["bound"] is None else f"{row['bound']:.2f}×"
        rates = [number(row["best_of_tokens_per_s"]), number(row["single_runs_tokens_per_s"])]
        out.append(cells(row["model"], bits, str(row["prompt"]), str(row["gen"]), *rates, f"**{row['speedup']:.2f}×**", most))
    return out


def conditions(bits, part):
    c, m = part["conditions"], part["machine"]
    rate, size = disk_rate(m, None)
    disk = f"random reads of {size >> 10} KiB {rate / 1e9:.2f} GB/s" if rate else "not measured"
    ahead = f", read-ahead of mapped files {c['read_ahead_kib']} KiB" if c.get("read_ahead_kib") else ""
    return (
        f"{bits} bits. Machine: {m['description'].split(', measured')[0]}; memory {m['read_gb_per_s']:.1f} GB/s, disk {disk}{ahead}. "
        f"{c['layers']} layers of OLMoE-1B-7B's shapes, random weights, routed as `golden/traces` counts; bundle "
        f"{part['bundle_bytes'] / 1e9:.2f} GB, GGUF {part['gguf_bytes'] / 1e9:.2f} GB (llama.cpp {c['llama']}, mapped, not repacked "
        f"unless the row says so). {c['threads']} threads, a prompt of {c['prompt']} tokens, then {c['tokens']} that are the same for "
        f"both; the first {c['cold']} count as cold, the rest as warm; medians of {c['repetitions']}, by turns."
    )


def markdown(results):
    parts = [
        "Written by `cargo xtask bench-disk`. Every engine is a process in a control group of its own with a hard limit (the cap) "
        "that counts the page cache, and starts with nothing of the model in it. *Read per token*: what the process made the "
        "kernel read from the disk. *Least*: what a token must read if as many experts as the cap holds stay in memory: "
        "with every expert as likely as any other, with those that are chosen most often, and with the best that a cache could do that "
        "knew the future. *Bound*: these bytes at the disk's rate, or the arithmetic, whichever takes longer; *reached*: warm tokens per "
        "second of the bound with the best fixed set. *Peak of the group*: as the kernel accounts for it, page cache included; *of no file*: the part that it "
        "cannot drop; *RSS*: also counts pages that are mapped. *Fall back*: tokens of big-little decoding that were decoded with all "
        "experts after all; γ is set for that share, since random weights are never as sure as a trained model. In brackets: times "
        "llama.cpp. *Cut*: stopped for taking too long; what it had decoded counts.",
    ]
    for bits in (bits for bits in sorted(results, key=int, reverse=True) if "rows" in results[bits]):
        parts += ["", conditions(bits, results[bits]), "", *table(bits, results[bits])]
    parts += best_of(results)
    return "\n".join(parts) + "\n"


def insert(path, text, marks=(START, END)):
    """Puts the text between the markers; false where there are none."""
    if not path.exists():
        return False
    (start, end), old = marks, path.read_text()
    before, found, rest = old.partition(start)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        return False
    path.write_text(f"{before}{start}\n{text}{end}{after}")
    return True
