"""Runs the cases of `ramulator2.toml` with Ramulator 2.1 and compares its figures with those of the file.

    PYTHONPATH=RAMULATOR/python python3 ramulator2.py DIR [--write]

RAMULATOR is a clone of the commit that the file names, built as its README says. DIR receives the trace of each case, its configuration
as YAML, and the log of commands. `--write` puts the figures into the file. Python 3.11 or later is required.
"""

import re
import sys
import tomllib
from pathlib import Path

import ramulator
from ramulator.export import dict_to_yaml

FILE = Path(__file__).with_suffix(".toml")
COMMANDS = ["ACT", "PREpb", "PREab", "RD", "WR", "REFab"]
MASK = 2**64 - 1


def generator(seed):
    """Returns a function that draws a random number below its argument, by xorshift64*."""
    x = seed

    def below(n):
        nonlocal x
        x ^= x >> 12
        x ^= (x << 25) & MASK
        x ^= x >> 27
        return ((x * 0x2545F4914F6CDD1D & MASK) >> 32) % n

    return below


def trace(case, requests):
    """Yields the lines of a case's trace for LoadStoreTrace, with addresses in the order of RoBaRaCoCh."""
    below = generator(case["seed"]) if "seed" in case else None
    writes, of = case.get("writes", [0, 1])
    sizes = {"row": 0, "bank": 4, "group": 8, "rank": case["ranks"], "column": 64}
    for i in range(requests):
        at, left = {}, i
        for axis, size in case["axes"]:
            at[axis] = below(size) if below else left % size
            left //= size
        write = (below(of) if below else i % of) < writes
        address = 0
        for axis, size in sizes.items():
            address = address * size + at.get(axis, 0)
        yield f"{'ST' if write else 'LD'} {64 * address:#x}\n"


def components(case, file, path):
    """Returns the frontend and the memory system of a case."""
    names = file["configuration"]

    def make(kind, **parameters):
        return getattr(getattr(ramulator, kind), names[kind])(**parameters)

    dram = ramulator.dram.DDR5(
        org_preset=f"DDR5_{case['density']}Gb_x8" if "density" in case else names["org_preset"],
        timing_preset=names["timing_preset"],
        rank=case["ranks"],
        nFAW=case.get("faw", 32),
        **file["overrides"][case["timing"]],
    )
    controller = make(
        "controller",
        dram=dram,
        scheduler=make("scheduler"),
        refresh_manager=make("refresh_manager") if case["refresh"] else ramulator.refresh_manager.NoRefresh(),
        row_policy=make("row_policy"),
        addr_mapper=make("addr_mapper"),
        controller_plugins=[ramulator.controller_plugin.CmdTraceRecorder(path=f"{path}.commands")],
        read_buffer_size=case["queue"],
        write_buffer_size=case["queue"],
    )
    memory = make("memory_system", clock_ratio=1, controllers=[controller], channel_mapper=make("channel_mapper"))
    return make("frontend", clock_ratio=1, path=f"{path}.trace"), memory


def figures(log, marks):
    """Returns the figures of a log of commands."""
    cycles, counts, digest, issued = [], dict.fromkeys(COMMANDS, 0), 0xCBF29CE484222325, 0
    for line in log.splitlines()[1:]:
        clock, command, _channel, *at = line.split(",")
        counts[command] += 1
        for word in [int(clock), COMMANDS.index(command)] + [max(int(a), 0) for a in at[:3]]:
            digest = (digest ^ word) * 0x100000001B3 & MASK
        if command in ("RD", "WR"):
            issued += 1
            if issued in marks:
                cycles.append(int(clock))
        if issued == marks[-1]:
            break
    pre = counts["PREpb"] + counts["PREab"]
    return {"cycles": cycles, "act": counts["ACT"], "pre": pre, "ref": counts["REFab"], "digest": f"{digest:016x}"}


def run(case, file, path):
    """Runs a case and returns its figures."""
    Path(f"{path}.trace").write_text("".join(trace(case, file["requests"])))
    frontend, memory = components(case, file, path)
    config = {"frontend": frontend.to_config(), "memory_system": memory.to_config()}
    Path(f"{path}.yaml").write_text(dict_to_yaml(config))
    simulation = ramulator.Simulation(frontend, memory)
    simulation.run()
    simulation.finalize()
    return figures(Path(f"{path}.commands.ch0").read_text(), file["marks"])


def main(out, write):
    text = FILE.read_text()
    file = tomllib.loads(text)
    out.mkdir(parents=True, exist_ok=True)
    for case in file["case"]:
        found = run(case, file, out / re.sub(r"\W+", "_", case["name"]))
        same = all(case.get(key) == value for key, value in found.items())
        print(f"{'equal' if same else 'differs'}: {case['name']}: {found}", flush=True)
        lines = "".join(f"{key} = {value!r}\n".replace("'", '"') for key, value in found.items())
        head, name, tail = text.partition(f'name = "{case["name"]}"\n')
        block, end, tail = tail.partition("\n[[case]]\n")
        block = re.sub(r"^(cycles|act|pre|ref|digest) = .*\n", "", block + "\n" * (not end), flags=re.M).rstrip("\n")
        text = head + name + block + "\n" + lines + end + tail
    if write:
        FILE.write_text(text)


if __name__ == "__main__":
    arguments = [a for a in sys.argv[1:] if a != "--write"]
    if len(arguments) != 1:
        sys.exit(__doc__)
    main(Path(arguments[0]), "--write" in sys.argv)
