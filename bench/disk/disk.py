"""The disk's read-ahead: how much more than a page the kernel reads when a mapped file is touched. Direct reads know none."""

import os
from contextlib import contextmanager
from pathlib import Path

from engines import Failed


def setting(folder, sys=Path("/sys/dev/block")):
    """The kernel's file for the disk that holds a folder, KiB; `None` where it has none."""
    number = os.stat(folder).st_dev
    disk = sys / f"{os.major(number)}:{os.minor(number)}"
    # A partition has the setting of its disk.
    found = (disk / "queue" / "read_ahead_kb", disk.resolve().parent / "queue" / "read_ahead_kb")
    return next((path for path in found if path.exists()), None)


@contextmanager
def read_ahead(folder, kib):
    """With another read-ahead, which is what it was before in the end; gives the KiB that hold. `kib` `None`: as it is."""
    path = setting(folder)
    before = int(path.read_text()) if path else None
    if kib is None:
        yield before
        return
    try:
        path.write_text(str(kib))
    except (OSError, AttributeError) as e:
        raise Failed(f"the read-ahead of the disk of {folder} cannot be set: {e}") from e
    try:
        yield kib
    finally:
        path.write_text(str(before))
