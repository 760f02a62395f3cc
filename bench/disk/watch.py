"""One run of an engine in a group: when each token came, and what had been read from the disk by then."""

import os
import select
import statistics
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from engines import last_line

STALL = 300
"""Seconds without a token after which a run is given up."""
ENOUGH = 8
"""Tokens that say something, where a run is cut because it takes too long."""


@dataclass
class Moment:
    """The process when a token had been printed."""

    seconds: float
    """Since the process was started."""
    read: int
    """Bytes that it had caused to be read from the disk."""


@dataclass
class Run:
    """What was seen of a process."""

    moments: list = field(default_factory=list)
    text: str = ""
    rss: int = 0
    """Its largest resident set, pages of files included: what it maps, not what it is charged for."""
    anonymous: int = 0
    """Largest memory of the group that belongs to no file."""
    peak: int | None = None
    """Largest memory of the group."""
    failed: str | None = None
    cut: bool = False
    """Whether it was ended before its last token."""

    def span(self, first, last):
        """Tokens per second and bytes read per token, over tokens `first` to `last` (token 0 comes with the prompt)."""
        last = min(last, len(self.moments) - 1)
        if last <= first:
            return None
        a, b = self.moments[first], self.moments[last]
        return {"rate": (last - first) / (b.seconds - a.seconds), "read": (b.read - a.read) / (last - first)}

    def ids(self):
        return [int(i) for i in self.text.split(",") if i.strip()]


def status(pid):
    """Rows of /proc/PID/status in bytes."""
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if value.endswith("kB"):
            found[name] = 1024 * int(value.split()[0])
    return found


def read_bytes(pid):
    """Bytes that a process caused to be read from the disk: faults on mapped files and direct reads alike."""
    return next(int(line.split()[1]) for line in Path(f"/proc/{pid}/io").read_text().splitlines() if line.startswith("read_bytes"))


def watch(group, command, tokens, log, stdin="", environment=None, limit=float("inf")):
    """Runs a command in a group until it has printed ids of so many tokens, separated by commas, or has ended. After
    `limit` seconds it is cut, and what it has printed counts if that is enough to say something."""
    run, start = Run(), time.perf_counter()
    with open(log, "w") as err:
        child = subprocess.Popen(
            group.enter(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err,
            env=dict(os.environ, **(environment or {})),
        )
        try:
            try:
                child.stdin.write(stdin.encode())
                child.stdin.close()
            except BrokenPipeError:
                pass
            follow(run, child, group, start, tokens, limit)
        finally:
            try:
                child.wait(60 if len(run.moments) >= tokens else 1)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            child.stdout.close()
    run.peak = group.peak()
    if group.kills():
        run.failed = "ended by the kernel: more memory than the cap that cannot be dropped"
    elif len(run.moments) < tokens and time.perf_counter() - start >= limit and len(run.moments) >= ENOUGH:
        run.cut = True
    elif len(run.moments) < tokens:
        run.failed = f"ended with status {child.returncode} after {len(run.moments)} tokens: {last_line(log)}"
    return run


def follow(run, child, group, start, tokens, limit):
    """Notes every token as it comes."""
    pipe = child.stdout.fileno()
    os.set_blocking(pipe, False)
    while len(run.moments) < tokens:
        left = start + limit - time.perf_counter()
        piece = os.read(pipe, 1 << 16) if ready(pipe, min(STALL, left)) else None
        if not piece:
            return  # it has ended, stalls, or takes too long
        seen = time.perf_counter()
        run.text += piece.decode(errors="replace")
        try:
            moment, held = Moment(seen - start, read_bytes(child.pid)), status(child.pid)
        except (OSError, StopIteration):  # it ends after its last token
            moment, held = Moment(seen - start, run.moments[-1].read if run.moments else 0), {}
        run.rss = max(run.rss, held.get("VmHWM", 0))
        run.anonymous = max(run.anonymous, group.anonymous() or 0)
        # Ids are printed whole, the comma before them.
        while len(run.moments) < run.text.count(",") + 1:
            run.moments.append(moment)


def ready(pipe, seconds):
    return bool(select.select([pipe], [], [], max(seconds, 0.0))[0])


def median(values):
    """Of those that are there; `None` where there are none."""
    found = [v for v in values if v is not None]
    return statistics.median(found) if found else None
