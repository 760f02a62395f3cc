"""The results as Markdown, and into docs/benchmarks.md between its markers."""

import itertools

START, END = "<!-- bench-peers -->", "<!-- /bench-peers -->"
FORMAT = {"bf16": "bf16"} | {f"q{bits}": f"{bits} bits" for bits in (8, 6, 5, 4, 3, 2)} | {"q4n": "4 bits, `q4n`", "q2s": "2 bits, `q2s`"}
GGUF_TYPES = {"bf16": ("BF16", 16.0), "q8": ("Q8_0", 8.5), "q4": ("Q4_0", 4.5), "q3": ("Q3_K", 3.4375), "q2": ("Q2_K", 2.625)}
"""The type of GGUF that stands beside a format, and its bits per weight."""
OURS = {"moec-default": "**moec**, default", "moec-mmap": "**moec**, `--weights mmap`", "moec": "**moec**", "moec-mapped": "**moec**, weights mapped", "moec-auto": "**moec**, weights `auto`"}
QUOTED = {
    "ik": "not measured here: {why}. Elsewhere (2 cores with AMX, same shapes) it had 1.3, 3.0 and 2.4 times "
    "llama.cpp's prefill in bf16, 8 and 4 bits, and 1.16, 1.14 and 1.05 times its decode",
}
"""What is known of a peer from another machine, where it fails on this one."""


def cells(*values):
    return "| " + " | ".join(values) + " |"


def rule(n):
    return cells(*["---"] * n)


def number(x):
    """Three digits; whole from 100 up."""
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}"


def find(rows, **wanted):
    return next((r for r in rows if all(r.get(k) == v for k, v in wanted.items())), None)


def ordered(values):
    return list(dict.fromkeys(values))


def title(engine, peers, versions):
    if engine in OURS:
        return OURS[engine]
    version = versions.get(engine, {}).get("version", "")
    return f"{peers[engine].title} {version}".strip()


def errors(results, engine, fmt):
    """Error of a layer and perplexity of ferris, as two cells."""
    found = find([r for r in results["rows"] if "failed" not in r], section="quality", engine=engine, format=fmt) or {}
    layer, perplexity = found.get("layer_error"), found.get("perplexity")
    return [f"{layer:.1e}" if layer else "–", f"{perplexity:.3f}" if perplexity else "–"]


def speeds(results, peers, model, section="model"):
    """Rates of one model: the limit, moec, then the peers, format by format."""
    rows = [r for r in results["rows"] if r["section"] == section and r.get("model", model) == model]
    good = [r for r in rows if "failed" not in r]
    tasks = ordered(r["task"] for r in good)
    # Errors of formats are measured apart, on other models.
    rated = any(r["section"] == "quality" for r in results["rows"])
    blank = [""] * 2 * rated
    head = ["tokens/s", "bits per weight", *tasks, *["error of a layer", "perplexity of ferris"][: len(blank)]]
    out = [cells(*head), rule(len(head))]
    for fmt in ordered(r["format"] for r in rows):
        of_format = [r for r in good if r["format"] == fmt]
        limits = [find(of_format, task=t) for t in tasks]
        if section == "model" and of_format:
            out.append(cells(f"*limit, {FORMAT[fmt]}*", "", *[f"*{number(r['limit'])}*" if r else "–" for r in limits], *blank))
        bits = f"{of_format[0]['bits']:g}" if of_format else "–"
        for engine in ordered(r["engine"] for r in rows if r["format"] == fmt):
            failed = find([r for r in rows if "failed" in r], engine=engine, format=fmt)
            name = title(engine, peers, results["versions"])
            if failed:
                why = QUOTED.get(engine, "{why}").format(why=failed["failed"])
                out.append(cells(f"{name}: {why.replace('|', '/')}", *["–"] * (len(head) - 1)))
                continue
            found = [find(of_format, engine=engine, task=t) for t in tasks]
            out.append(cells(name, bits, *[rate(r) for r in found], *errors(results, engine.split("-")[0], fmt)[: len(blank)]))
        if section != "model":
            mine = [find([r for r in of_format if "moec" in r], task=t) for t in tasks]
            if any(mine):
                out.append(cells("**moec**", bits, *[number(r["moec"]) if r else "–" for r in mine], *blank))
    return out


def rate(row):
    """`1234 (56 % of the limit)` of moec, `123 (moec 4.5×)` of a peer."""
    if not row:
        return "–"
    if "ratio" in row:
        return f"{number(row['rate'])} (moec {row['ratio']:.2f}×)"
    return f"**{number(row['rate'])}** ({100 * row['rate'] / row['limit']:.0f} %)"


def layer(results, peers):
    rows = [r for r in results["rows"] if r["section"] == "layer"]
    out = [cells("experts of one layer", "bits per weight", "ms", "of the limit", "error"), rule(5)]
    for r in rows:
        name = title(r["engine"], peers, results["versions"])
        if "failed" in r:
            out.append(cells(f"{name}, {FORMAT[r['format']]}: {r['failed']}", *["–"] * 4))
            continue
        ratio = f" (moec {r['ratio']:.2f}×)" if "ratio" in r else ""
        bits = "8 and a scale per row" if (r["engine"], r["format"]) == ("kt", "q8") else f"{r['bits']:g}"
        out.append(cells(name, bits, f"{number(1e3 * r['rate'])}{ratio}", f"{100 * r['limit'] / r['rate']:.0f} %",
                         errors(results, r["engine"], r["format"])[0]))
    return out


def first_tokens(results, peers):
    """Seconds to the first token, one column per format and state of the page cache."""
    rows = [r for r in results["rows"] if r["section"] == "first"]
    formats, states = ordered(r["format"] for r in rows), [s for s in ("cold", "warm") if any(s in r for r in rows)]
    heads = [f"{FORMAT[f]}, {s}" for f in formats for s in states]
    out = [cells("seconds to the first token", *heads), rule(1 + len(heads))]
    for engine in ordered(r["engine"] for r in rows):
        found = [(find(rows, engine=engine, format=f) or {}).get(s) for f in formats for s in states]
        out.append(cells(title(engine, peers, results["versions"]), *[number(s) if s else "–" for s in found]))
    return out


def warm(results, peers):
    """First tokens of warm starts, by the size of the files: medians, and what they vary between."""
    rows, machine, c = [r for r in results["rows"] if r["section"] == "warm"], results["machine"], results["conditions"]
    models = ordered(r["model"] for r in rows)
    heads = [f"{find(rows, model=m)['bytes'] / 1e9:.1f} GB" for m in models]
    options = "".join(f" {word}" for word in ["--warm", ",".join(str(gb) for gb in c["warm"])])
    out = [
        f"Written by `cargo xtask bench-peers{options}`, {c['date']}. Machine: {machine['description'].split(', measured')[0]}; "
        f"{machine['read_gb_per_s']:.1f} GB/s of memory read.", "",
        cells("seconds to the first token, files in the page cache", *heads), rule(1 + len(heads)),
    ]
    for engine in ordered(r["engine"] for r in rows):
        found = [find(rows, engine=engine, model=m) for m in models]
        seconds = lambda r: f"{number(r['seconds'])} ({number(r['least'])} to {number(r['most'])})" if r else "–"
        out.append(cells(title(engine, peers, results["versions"]), *[seconds(r) for r in found]))
    return "\n".join(out) + "\n"


def machine_of(results):
    m = results["machine"]
    best = {}
    for p in m["peaks"]:
        if p["gops"] >= best.get(p["format"], {"gops": 0})["gops"]:
            best[p["format"]] = p
    peaks = ", ".join(f"{f} {p['gops'] / 1e3:.2f} T{'FLOP' if f != 'int8' else 'OP'}/s ({p['instruction']})" for f, p in best.items())
    return (f"Machine: {m['description'].split(', measured')[0]}; measured in the same run, by medians: {m['read_gb_per_s']:.1f} GB/s of "
            f"memory read ({m['read_gb_per_s_one_thread']:.1f} with one thread), {peaks}.")


def operators(rows):
    """Each operator of a call: its share of the time, and of the least that the machine needs; the longest first."""
    tasks = ordered(r["task"] for r in rows)
    seconds = lambda op: max((r["seconds"] for r in rows if r["op"] == op), default=0.0)
    out = [cells("operator", *itertools.chain(*[(f"{t}, ms", "of the limit") for t in tasks])), rule(1 + 2 * len(tasks))]
    for op in sorted(ordered(r["op"] for r in rows), key=seconds, reverse=True):
        found = [find(rows, op=op, task=t) for t in tasks]
        if all(r and r["seconds"] < 1e-3 * sum(o["seconds"] for o in rows if o["task"] == r["task"]) for r in found):
            continue
        one = lambda r: [number(1e3 * r["seconds"]), f"{100 * r['limit'] / r['seconds']:.0f} %" if r["limit"] else ""] if r else ["–", ""]
        out.append(cells(f"`{op}`", *itertools.chain(*[one(r) for r in found])))
    return out


def hybrids(results, peers):
    """Models with recurrent layers: speeds beside peers, then operators."""
    rows, c = results["rows"], results["conditions"]
    out = [
        f"Written by `cargo xtask bench-peers --hybrids`, {c['date']}. {machine_of(results)}", "",
        f"{c['threads']} threads, {c['gen']} tokens decoded, medians of {c['repetitions']}, moec and peer by turns.",
    ]
    for name, layers in c["models"].items():
        out += ["", f"{name}, {layers} layers:", "", *speeds(results, peers, name)]
        for fmt in ordered(r["format"] for r in rows if r["section"] == "operators"):
            of_format = [r for r in rows if r["section"] == "operators" and (r["model"], r["format"]) == (name, fmt)]
            out += ["", f"Operators of {name}, {FORMAT[fmt]}:", "", *operators(of_format)]
            step = [next((r for r in of_format if r["op"] == "delta_rule" and r["task"].startswith(t)), None) for t in ("prefill", "decode")]
            if all(step):
                tokens = int(step[0]["task"].split()[1])
                each = [1e6 * step[0]["seconds"] / step[0]["steps"] / tokens, 1e6 * step[1]["seconds"] / step[1]["steps"]]
                out += ["", f"The delta rule of a layer takes {number(each[0])} µs for a token by chunks, {number(each[1])} µs by the step: "
                        f"chunks are {each[1] / each[0]:.1f} times as fast."]
    return "\n".join(out) + "\n"


def widths(results, peers):
    """moec in every number of bits per weight, and peers in formats of about as many."""
    rows, c, said = [r for r in results["rows"] if r["section"] == "widths"], results["conditions"], measured(results)
    good = [r for r in rows if "failed" not in r]
    tasks = ordered(r["task"] for r in good)
    out = [
        f"Written by `cargo xtask bench-peers --widths`. {c['threads']} threads, {c['gen']} tokens decoded, medians of {c['repetitions']}; in brackets the share of the limit, of a peer how many times as fast moec was in the same turns.",
    ]
    for model in ordered(r["model"] for r in rows):
        head = [model, "bits per weight", "MiB of a token", *tasks]
        out += ["", f"**{model}.** {said[model]}", "", cells(*head), rule(len(head))]
        of_model = [r for r in rows if r["model"] == model]
        for fmt, engine in ordered((r["format"], r["engine"]) for r in of_model):
            found = [find(good, model=model, format=fmt, engine=engine, task=t) for t in tasks]
            first = next((r for r in found if r), None)
            if engine in OURS and first:
                out.append(cells(FORMAT[fmt], f"{first['bits']:g}", number(first["token_bytes"] / 2**20), *[rate(r) for r in found]))
            elif engine not in OURS:
                name, bits = GGUF_TYPES[fmt]
                why = "" if first else f": {find(of_model, format=fmt, engine=engine)['failed']}"
                out.append(cells(f"{title(engine, peers, results['versions'])}, {name}{why}", f"{bits:g}", "", *[rate(r) for r in found]))
    return "\n".join(out) + "\n"


def measured(results):
    """When and on what machine each model was measured."""
    said = f"{results['conditions']['date']}. {machine_of(results)}"
    return results.get("measured") or {r["model"]: said for r in results["rows"]}


def keep_others(before, results):
    """Adds the rows and versions that an earlier run has of models that this one has not measured."""
    new = measured(results)
    results["measured"] = {model: said for model, said in measured(before).items() if model not in new} | new
    results["rows"] = [r for r in before["rows"] if r["model"] not in new] + results["rows"]
    results["versions"] = before["versions"] | results["versions"]


def quality(results, peers):
    rows = [r for r in results["rows"] if r["section"] == "quality" and "failed" not in r]
    base = find(rows, engine="moec", format="bf16 weights, f32 activations") or {}
    out = [cells("format", "bits per weight", "error of a layer", "perplexity of ferris", "change"), rule(5)]
    for r in rows:
        perplexity = r.get("perplexity")
        change = f"{100 * (perplexity / base['perplexity'] - 1):+.3f} %" if perplexity and base else "–"
        out.append(cells(f"{title(r['engine'], peers, results['versions'])}, {r['format']}", f"{r['bits']:g}",
                         f"{r['layer_error']:.1e}", f"{perplexity:.4f}" if perplexity else "–", change))
    return out


def conditions(results, peers):
    c = results["conditions"]
    models = ", ".join(f"{name} ({n} layers)" for name, n in c["models"].items())
    notes = "; ".join(f"{title(n, peers, results['versions'])}: {peers[n].note}" for n in results["versions"] if peers[n].note)
    return [
        f"Written by `cargo xtask bench-peers{' --quick' if c['quick'] else ''}`. {machine_of(results)}", "",
        f"Equal conditions: {c['threads']} threads; random weights in the shapes of {models}; the same weights in every engine, "
        f"every matrix in the row's format (routers and norms f32); the same token ids; one sequence unless the column says "
        f"otherwise (`decode 4 at 64`: four sequences that hold 64 tokens each, tokens of all together); {c['gen']} tokens "
        f"decoded; medians of {c['repetitions']}, moec and peer by turns. moec: activations `auto`, "
        f"prompts in chunks of 512, KV cache `auto`, weights of its own unless the row says mapped. {notes}.", "",
        "The limit is the larger of bytes over bandwidth and operations over peak, every weight read once; in brackets the "
        "share of it, or how many times faster moec was in the same turns. Error of a layer: of the experts' output for 64 "
        "tokens, relative to f64 on the bf16 weights. Perplexity: 40 windows of 512 tokens of ferris's evaluation text.",
    ]


def markdown(results, peers):
    rows, parts = results["rows"], conditions(results, peers)
    for name, layers in results["conditions"]["models"].items():
        if any(r.get("model") == name for r in rows):
            parts += ["", f"{name}, {layers} layers:", "", *speeds(results, peers, name)]
    first = next(iter(results["conditions"]["models"]))
    for section in ordered(r["section"] for r in rows if r["section"].startswith("llama-av")):
        parts += ["", f"The same machine restricted ({peers[section].title.split(', ')[1]}), both engines compiled for that:", "",
                  *speeds(results, peers, first, section)]
    if not any(f.startswith("amx") for f in results["machine"]["features"]):
        parts += ["", "This machine has no AMX: its first table is the one restricted to AVX-512."]
    if any(r["section"] == "layer" for r in rows):
        parts += ["", *layer(results, peers)]
    if any(r["section"] == "first" for r in rows):
        parts += ["", "A process of its own and a prompt of 8 tokens; *cold*: nothing is in the page cache. moec's times begin with the "
                  "process, the peers' behind Python's own start:", "", *first_tokens(results, peers)]
    parts += ["", *quality(results, peers), ""]
    start = find(rows, section="startup")
    if start:
        parts.append(f"Start of the process to the first token of ferris: {1e3 * start['seconds']:.0f} ms.")
    builds = [r for r in rows if r["section"] == "build"]
    if builds:
        worst = max(builds, key=lambda r: r["seconds_per_gb"])
        peak = max(r["peak_memory_bytes"] for r in builds)
        parts.append(f"`moec build`: at most {worst['seconds_per_gb']:.1f} s per GB of weights written, {peak / 2**20:.0f} MiB of memory.")
    return "\n".join(parts) + "\n"


def insert(path, text, start=START, end=END):
    """Puts the text between the markers; false where there are none."""
    if not path.exists():
        return False
    old = path.read_text()
    before, found, rest = old.partition(start)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        return False
    path.write_text(f"{before}{start}\n{text}{end}{after}")
    return True


MARKS = {mode: (f"<!-- {name} -->", f"<!-- /{name} -->") for mode, name in [
    ("warm", "warm-starts"), ("hybrids", "bench-hybrids"), ("widths", "bench-widths"), ("capped", "bench-capped"),
    ("roundings", "bench-roundings")]}
"""Places of the tables that have one of their own."""
