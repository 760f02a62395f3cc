"""Two hosts on one machine: network namespaces with a cable between them, whose rate can be limited.

A host is a namespace with a name of its own, so that MPI takes it for another machine and connects by TCP.
"""

import os
import shutil
import subprocess
from pathlib import Path

from engines import Failed

HERE = Path(__file__).resolve().parent
NAMES = ("moec-host0", "moec-host1")
ENDS = ("moec-end0", "moec-end1")
ADDRESSES = ("10.213.77.1", "10.213.77.2")
SUBNET = "10.213.77.0/24"
TOOLS = {"ip": "iproute2", "tc": "iproute2", "taskset": "util-linux", "mpirun.openmpi": "openmpi-bin", "mpicc.openmpi": "libopenmpi-dev"}
"""Programs, and the packages of Debian and Ubuntu that have them."""
BURST = "256kb"
"""What may pass at once: less than a message of a prompt, more than the kernel's timer needs at 10 Gb/s."""


def check():
    """Fails where the two hosts cannot be made."""
    if os.geteuid() != 0:
        raise Failed("network namespaces need root: run it by `sudo -E`")
    for tool, package in TOOLS.items():
        if not shutil.which(tool):
            raise Failed(f"`{tool}` is missing: apt-get install {package}")


def done(*words):
    """Runs a command that must succeed."""
    ran = subprocess.run([str(w) for w in words], capture_output=True, text=True)
    if ran.returncode:
        raise Failed(f"`{' '.join(map(str, words))}`: {ran.stderr.strip() or ran.returncode}")


class Network:
    """The two namespaces, which are gone afterwards."""

    def __enter__(self):
        check()
        self.remove()
        try:
            for name in NAMES:
                done("ip", "netns", "add", name)
            done("ip", "link", "add", ENDS[0], "netns", NAMES[0], "type", "veth", "peer", "name", ENDS[1], "netns", NAMES[1])
            for name, end, address in zip(NAMES, ENDS, ADDRESSES):
                done("ip", "-n", name, "addr", "add", f"{address}/{SUBNET.split('/')[1]}", "dev", end)
                for device in ("lo", end):
                    done("ip", "-n", name, "link", "set", device, "up")
        except Failed:
            self.remove()
            raise
        return self

    def __exit__(self, *_):
        self.remove()

    def remove(self):
        """A namespace takes its end of the cable along."""
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def limit(self, rate):
        """Limits both directions, `1gbit` for instance; `None`: no limit."""
        for name, end in zip(NAMES, ENDS):
            # There may be no limit yet.
            subprocess.run(["tc", "-n", name, "qdisc", "del", "dev", end, "root"], capture_output=True)
            if rate:
                done("tc", "-n", name, "qdisc", "add", "dev", end, "root", "tbf", "rate", rate, "burst", BURST, "latency", "50ms")


def launched(command, environment=()):
    """A command on both hosts, each on a core of its own, as MPI starts it. `environment`: variables that both get."""
    variables = [word for name in environment for word in ("-x", name)]
    words = [
        "ip", "netns", "exec", NAMES[0], "unshare", "--uts", "sh", "-c", f'hostname {NAMES[0]}; exec "$0" "$@"', "mpirun.openmpi",
        "--mca", "plm_rsh_agent", HERE / "remote_shell.sh", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", SUBNET,
        "--bind-to", "none", "--host", ",".join(f"{address}:1" for address in ADDRESSES),
    ]
    for core in range(len(NAMES)):
        words += ([":"] if core else []) + ["-n", 1, *variables, "taskset", "-c", core, *command]
    return [str(word) for word in words]


def inside(host, command):
    """A command in the namespace of a host, on its core."""
    return [str(word) for word in ["ip", "netns", "exec", NAMES[host], "taskset", "-c", host, *command]]


def alone(command, cores):
    """A command on this host, on so many cores."""
    return [str(word) for word in ["taskset", "-c", f"0-{cores - 1}", *command]]


ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
"""Variables for MPI's launcher under root."""
