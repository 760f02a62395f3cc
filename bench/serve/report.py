"""The results of `cargo xtask bench-serve` as Markdown."""

from table import FORMAT, cells, find, number, rule

MARKS = ("<!-- bench-serve -->", "<!-- /bench-serve -->")
HOW = {"greedy": "at temperature 0", "sampled": "at temperature 0.7", "schema": "at temperature 0.7 under a JSON schema"}


def conditions(results):
    c, m = results["conditions"], results["machine"]
    peer = f"llama-server of the source that llama-cpp-python {results['llama_cpp_python']} carries, compiled by clang for this CPU, "
    peer += "continuous batching on its default, f16 cache" if results["llama_cpp_python"] else ""
    if results["failure"]:
        peer = f"llama-server: {results['failure']}"
    return [
        f"Written by `cargo xtask bench-serve`. Machine: {m['description'].split(', measured')[0]}; {m['read_gb_per_s']:.1f} GB/s of memory "
        f"read, the median of what was measured between the turns; the load before was {c['load_before']:.1f}.", "",
        f"Random weights in the shapes of OLMoE-1B-7B, {c['layers']} layers, every matrix in {FORMAT[c['format']]} (routers and norms f32), "
        f"{c['threads']} threads. Each client asks {times(c['answers'])}, with a prompt of {c['prompt']} token ids "
        f"that no other has, and gets {c['gen']} tokens {HOW[c.get('how', 'greedy')]} as a stream. {c['repeat']} turns of each server, alternating: medians of "
        f"rates, percentiles of all times of all turns. {peer}.",
    ]


def times(n):
    return "once" if n == 1 else f"{n} times, one after the other"


def speeds(rows):
    """Rates and times by number of clients, a line for each server."""
    head = ["clients", "server", "tokens/s", "first token, ms: p50", "p99", "per token, ms: p50", "p99"]
    out = [cells(*head), rule(len(head))]
    for row in rows:
        ms = lambda key: number(1e3 * row[key])
        other = find([r for r in rows if r["server"] != row["server"]], clients=row["clients"])
        ratio = f" ({row['tokens_per_s'] / other['tokens_per_s']:.2f} ×)" if other and row["server"] == "moec" else ""
        name = f"**{row['server']}**" if row["server"] == "moec" else row["server"]
        out.append(cells(str(row["clients"]), name, number(row["tokens_per_s"]) + ratio,
                         *[ms(f"{what}_p{share}") for what in ("first", "next") for share in (50, 99)]))
    return out


def gains(rows):
    """What decoding together gains over one by one, beside what bytes allow."""
    ours = [r for r in rows if r["server"] == "moec" and "limit" in r]
    one = find(ours, clients=1)
    if not one:
        return []
    head = ["clients", "tokens/s", "over one by one", "sequences of a step", "experts of a layer that it reads", "MB that it reads",
            "limit, tokens/s", "steps alone, tokens/s", "of the limit", "the limit over one by one"]
    out = [cells(*head), rule(len(head))]
    for row in ours:
        out.append(cells(
            str(row["clients"]), number(row["tokens_per_s"]), f"{row['tokens_per_s'] / one['tokens_per_s']:.2f} ×", f"{row['rows']:.1f}",
            f"{row['experts']:.1f}", number(row["step_bytes"] / 1e6), number(row["limit"]), number(row["steps_per_s"]),
            f"{100 * row['steps_per_s'] / row['limit']:.0f} %", f"{row['limit'] / one['limit']:.2f} ×",
        ))
    return out


def markdown(results):
    rows = results["rows"]
    parts = [*conditions(results), "", *speeds(rows)]
    gain = gains(rows)
    if gain:
        parts += [
            "", "Decoding together. *One by one* is one client: what the same server gives when clients wait for each other. The limit is "
            "bandwidth over the bytes of a step: the experts that the steps really touched (`moec_decode_experts_total`), all other weights once, and "
            "the cache of every sequence; steps at the beginning and the end have fewer sequences than clients. *Steps alone* is tokens over the "
            "time in which the engine decoded (`moec_decode_seconds_total`), with prompts left aside.", "", *gain,
        ]
    return "\n".join(parts) + "\n"
