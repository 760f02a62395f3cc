"""A hard limit on memory that counts the page cache: a control group of the kernel, version 1 or 2.

A process that is placed in the group before it opens a model has its anonymous memory and every page of every file that
it is the first to read counted together. At the limit the kernel drops pages of files; where there is none left to
drop, it ends the process.
"""

import ctypes
import os
import time
from dataclasses import dataclass
from pathlib import Path

HINT = (
    "run this as root, or give a group of your own with --cgroup DIR "
    "(`systemd-run --user --scope -p Delegate=yes bash` starts a shell in one)"
)


class NoGroup(Exception):
    """No group can be made here; says what to do."""


@dataclass(frozen=True)
class Version:
    """What the files of a group are called."""

    limit: str
    no_limit: str
    swap: tuple
    """File, and what turns swapping off; `None` as value: the limit again."""
    used: str
    peak: str
    anonymous: str
    """Row of memory.stat with the memory that belongs to no file."""
    kills: tuple
    """File and row that count processes ended for want of memory."""


V1 = Version(
    "memory.limit_in_bytes", "-1", ("memory.swappiness", "0"), "memory.usage_in_bytes", "memory.max_usage_in_bytes", "rss",
    ("memory.oom_control", "oom_kill"),
)
V2 = Version("memory.max", "max", ("memory.swap.max", "0"), "memory.current", "memory.peak", "anon", ("memory.events", "oom_kill"))


def hierarchy(given=None, mounts="/proc/mounts"):
    """Folder where groups can be made, and its version."""
    if given:
        given = Path(given)
        for version in (V1, V2):
            if (given / version.limit).exists() or (version is V2 and (given / "cgroup.controllers").exists()):
                return given, version
        raise NoGroup(f"{given} is no group that limits memory; {HINT}")
    for line in Path(mounts).read_text().splitlines():
        _, path, kind, options, *_ = line.split()
        if kind == "cgroup" and "memory" in options.split(","):
            return Path(path), V1
        if kind == "cgroup2" and "memory" in (Path(path) / "cgroup.controllers").read_text().split():
            return Path(path), V2
    raise NoGroup(f"this kernel has no group that limits memory; {HINT}")


def rows(path):
    """A file of rows `NAME NUMBER`."""
    return {name: int(value) for name, _, value in (line.partition(" ") for line in Path(path).read_text().splitlines()) if value.isdigit()}


class Group:
    """One group; gone with the block that it was made for."""

    def __init__(self, parent, version, limit):
        self.version, self.limit = version, limit
        self.path = parent / f"moec-disk-{os.getpid()}-{time.monotonic_ns()}"
        try:
            if version is V2:
                control = parent / "cgroup.subtree_control"
                if "memory" not in control.read_text().split():
                    control.write_text("+memory")
            self.path.mkdir()
            (self.path / version.limit).write_text(version.no_limit if limit is None else str(limit))
            swap, off = version.swap
            if (self.path / swap).exists():
                (self.path / swap).write_text(off)
        except OSError as e:
            self.close()
            raise NoGroup(f"no group can be made in {parent} ({e.strerror}); {HINT}") from e

    def enter(self, command):
        """The command, placed in the group before it becomes itself."""
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.path / "cgroup.procs"), *[str(c) for c in command]]

    def read(self, name):
        path = self.path / name
        return int(path.read_text()) if path.exists() else None

    def used(self):
        """Bytes that are accounted to the group now: its processes and the pages of files that they read first."""
        return self.read(self.version.used)

    def peak(self):
        """The most that it ever had; `None` where the kernel does not say (version 2 before Linux 5.19)."""
        return self.read(self.version.peak)

    def anonymous(self):
        """Bytes of it that belong to no file."""
        return rows(self.path / "memory.stat").get(self.version.anonymous)

    def kills(self):
        """Processes that the kernel ended because there was nothing left to drop."""
        file, row = self.version.kills
        return rows(self.path / file).get(row, 0)

    def close(self):
        if not self.path.exists():
            return
        force = self.path / "memory.force_empty"
        for _ in range(50):
            try:
                if force.exists():
                    force.write_text("0")
                self.path.rmdir()
                return
            except OSError:
                time.sleep(0.1)  # its last process is still ending

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def forget(files):
    """Drops files from the page cache; gives the share of them that is in it still."""
    os.sync()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    page, held, all_pages = os.sysconf("SC_PAGE_SIZE"), 0, 0
    for path in files:
        size = os.path.getsize(path)
        if not size:
            continue
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            pages = -(-size // page)
            at = libc.mmap(None, size, 1, 1, fd, 0)  # PROT_READ, MAP_SHARED; nothing is read
            if at not in (None, ctypes.c_void_p(-1).value):
                seen = (ctypes.c_ubyte * pages)()
                if libc.mincore(at, size, seen) == 0:
                    held += sum(b & 1 for b in bytes(seen))
                libc.munmap(at, size)
            all_pages += pages
        finally:
            os.close(fd)
    return held / all_pages if all_pages else 0.0
