"""The tables of several hosts, and into docs/benchmarks.md between their markers."""

import statistics

MARKS = (("<!-- bench-hosts -->", "<!-- /bench-hosts -->"), ("<!-- bench-hosts-memory -->", "<!-- /bench-hosts-memory -->"))
"""Where the tables belong, and those of hosts with too little memory."""


DIVISIONS = ("alone", "slices", "stages", "owners")


def median(values):
    values = [v for v in values if v is not None]
    return statistics.median(values) if values else None


def ratio(part, whole):
    return part / whole if whole else None


def decoded(few, many, batch):
    """What decoding took per token of one sequence: the difference of two requests, whose prompts are equal. `few` and `many`: the
    reports, with the messages of each alone."""
    tokens = (many["gen"] - few["gen"]) * batch
    seconds = lambda of: of["gen"] * batch / of["decode_tokens_per_s"]
    found = {"rate": ratio(tokens, seconds(many) - seconds(few))}
    if "hosts" in many:
        more = {key: many["hosts"][key] - few["hosts"][key] for key in many["hosts"]}
        found["bytes"] = (more["sent_bytes"] + more["received_bytes"]) / tokens
        found["trips"] = more["round_trips"] / tokens
        found["waiting"] = ratio(more["waited_s"], seconds(many) - seconds(few))
    return found


def prefilled(of):
    """What a prompt took per token. The one token after it is little beside it."""
    found = {"rate": of["prefill_tokens_per_s"]}
    if "hosts" in of:
        found["bytes"] = (of["hosts"]["sent_bytes"] + of["hosts"]["received_bytes"]) / of["prompt"]
        found["trips"] = of["hosts"]["round_trips"] / of["prompt"]
        found["waiting"] = of["hosts"]["waited_s"] / (of["prompt"] / of["prefill_tokens_per_s"])
    return found


def own(before, after):
    """A report with the messages of its request alone: the program counts all of them since its start. What other
    hosts read from their disks, a list, is left out.
    """
    if "hosts" not in after:
        return after
    counts = {key: count for key, count in after["hosts"].items() if key != "disks"}
    start = before["hosts"] if before else dict.fromkeys(counts, 0)
    return after | {"hosts": {key: counts[key] - start[key] for key in counts}}


def combined(turns):
    """Medians of turns, figure by figure."""
    keys = {(part, key) for turn in turns for part in turn if isinstance(turn[part], dict) for key in turn[part]}
    row = {}
    for part, key in sorted(keys):
        row.setdefault(part, {})[key] = median(turn[part].get(key) for turn in turns)
    row["start"] = median(turn["start"] for turn in turns)
    rates = [turn["one"]["rate"] for turn in turns]
    row["one"]["range"] = [min(rates), max(rates)]
    return row


def measured(rows, choice):
    """Rows by division, of the format and the network of a choice."""
    of = [row for row in rows if row["format"] == choice["format"] and "failed" not in row]
    found = {"alone": row for row in of if row["name"] == "one"}
    return found | {row["name"]: row for row in of if row["network"] == choice["network"]}


def verdict(found, chosen):
    """Whether the choice is the fastest in decoding one sequence, or its interval overlaps the fastest's."""
    divisions = {name: row for name, row in found.items() if name in DIVISIONS}
    if chosen not in divisions:
        return "not measured"
    fastest = max(divisions, key=lambda name: divisions[name]["one"]["rate"])
    if fastest == chosen:
        return "fastest"
    return f"as fast as {fastest}" if divisions[chosen]["one"]["range"][1] >= divisions[fastest]["one"]["range"][0] else f"slower than {fastest}"


def choices(results):
    """The table of what builds choose by the measured hosts and networks."""
    head = ["format", "network", *DIVISIONS, "the build's choice", "it is"]
    lines = [cells(*head), cells(*["---"] * len(head))]
    for choice in results["choices"]:
        found, expected = measured(results["rows"], choice), choice["expected"]
        rate = lambda name: f"{number(expected.get(name))}, {number(found[name]['one']['rate']) if name in found else '-'}"
        lines.append(cells(choice["format"], choice["network"], *[rate(name) for name in DIVISIONS], choice["chosen"], verdict(found, choice["chosen"])))
    return lines


def number(x, digits=3):
    """So many digits that matter."""
    if x is None:
        return "-"
    text = f"{x:.{digits}g}"
    return f"{float(text):.0f}" if "e" in text or abs(x) >= 10 ** (digits - 1) else text


def cells(*words):
    return "| " + " | ".join(words) + " |"


def times(x, base):
    return f" ({x / base:.2f}×)" if x and base else ""


HEAD = ("hosts", "network", "decode 1", "decode 4", "prefill", "bytes per token", "round trips", "waiting: decode 1, 4, prefill", "start, s", "tokens")
PARTS = ("one", "four", "prompt")


def line(row, base):
    """A row; `base`: the one of a host with a core."""
    if "failed" in row:
        return cells(row["title"], row["network"], row["failed"], *["-"] * (len(HEAD) - 3))
    rates = [number(row[part]["rate"]) + ("" if row is base else times(row[part]["rate"], base and base[part]["rate"])) for part in PARTS]
    one = row["one"]
    waits = [row[part].get("waiting") for part in PARTS]
    share = ", ".join(f"{100 * w:.0f} %" for w in waits) if all(w is not None for w in waits) else "-"
    return cells(row["title"], row["network"], *rates, number(one.get("bytes"), 4), number(one.get("trips")), share,
                 number(row["start"]), row["tokens"])


def table(rows):
    base = next((row for row in rows if row["name"] == "one" and "failed" not in row), None)
    return [cells(*HEAD), cells(*["---"] * len(HEAD)), *[line(row, base) for row in rows]]


def markdown(results):
    c = results["conditions"]
    parts = [
        "",
        f"Written by `cargo xtask bench-hosts`. {c['machine']}. {c['layers']} layers of OLMoE-1B-7B's shapes, random weights"
        f"{', routed as `golden/traces` counts, ' + c['memory'] + ' of memory on each host' if c['memory'] else ''}; each host is a network "
        f"namespace of this machine with one core and one thread, connected by Open MPI over TCP. Tokens per second, of all sequences together; in "
        f"brackets: times one host with one core. Decoding after {c['prompt']} tokens, {c['gen']} tokens; a prompt of {c['long']}. *Bytes* and *round "
        "trips*: per token of one sequence. *Waiting*: share of the time in which the first host's CPU waited. *Start*: until the first answer. "
        "*Tokens*: whether they are those of one process that computes the same slices, layers or experts. Delays are added to each round trip by "
        f"moec (`MOEC_TEST_HOST_DELAY_US`), rates are limited by the kernel (`tbf`). Medians of {c['repeat']}, by turns.",
        "",
        "The hosts share one memory and its caches, and the kernel's work for the network takes their cores: "
        + ("two hosts gain what they need not read from the disk." if c["memory"] else "two hosts cannot be faster here than one host with two cores.")
        + (" *llama.cpp, RPC* has the last half of the layers and the head on the second host (f16 cache; its loader sends the weights at each "
           "start)." if any(row["name"] == "rpc" for row in results["rows"]) else ""),
    ]
    for fmt in dict.fromkeys(row["format"] for row in results["rows"]):
        parts += ["", f"**{fmt}**", "", *table([row for row in results["rows"] if row["format"] == fmt])]
    parts += [
        "",
        "**Choices.** The division that a build takes for hosts that `moec profile-device --hosts` measured in the same namespaces, for each network. "
        "Tokens per second of one sequence: expected by the build, and measured. Intervals are all turns.",
        "",
        *choices(results),
    ]
    return "\n".join(parts) + "\n"


def insert(path, text, memory=False):
    """Puts the text between the markers; false where there are none."""
    if not path.exists():
        return False
    (start, end), old = MARKS[memory], path.read_text()
    before, found, rest = old.partition(start)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        return False
    path.write_text(f"{before}{start}\n{text}\n{end}{after}")
    return True
