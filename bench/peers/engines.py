"""The engines: how each is installed, and a process that answers requests, one JSON object per line."""

import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
CLANGS = ["clang-22", "clang-21", "clang-20", "clang-19", "clang"]
"""llama.cpp is compiled with clang: GCC 12 drops the configuration of AMX tiles, and the result crashes."""
AVX2 = "-DGGML_NATIVE=OFF -DGGML_SSE42=ON -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON"
AVX512 = AVX2 + " -DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON"


class Failed(Exception):
    """An engine that cannot be installed, or does not do what it is asked."""


class Again(Failed):
    """A failure that was told before: its cause still stands, and nothing was tried anew."""


def log(text):
    """Progress, on stderr."""
    print(f"{text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Peer:
    """One engine, as PyPI has it."""

    title: str
    package: str
    worker: str
    formats: tuple
    venv: str
    """Engines that get on with each other share a folder: torch is large."""
    packages: tuple = ()
    """What it needs beside itself."""
    no_deps: bool = False
    """Its own requirements would bring a second torch."""
    cmake: str = ""
    """Compiled here, with these options."""
    missing: dict = field(default_factory=dict)
    """Files that its source package forgot and its build requires."""
    lacks: tuple = ()
    """What must not appear among the features that it says it was compiled for."""
    environment: dict = field(default_factory=dict)
    note: str = ""
    """What a reader of the table must know."""
    above: str = ""
    """Folder whose packages are seen where this one has none of that name."""


LLAMA = ("gguf", "safetensors", "tokenizers")
PEERS = {
    "llama": Peer(
        "llama.cpp", "llama-cpp-python", "llama.py", ("bf16", "q8", "q4", "q3", "q2"), "llama", LLAMA, cmake="-DGGML_NATIVE=ON",
        note="compiled by clang for this CPU; weights mapped, repacked where it does so by default; flash "
        "attention on its default; f16 cache; n_batch = n_ubatch = 512",
    ),
    "llama-read": Peer(
        "llama.cpp, weights read (`--no-mmap`)", "llama-cpp-python", "llama.py", ("bf16", "q8", "q4"), "llama", LLAMA,
        cmake="-DGGML_NATIVE=ON", environment={"LLAMA_MAPS": "0"},
    ),
    "ik": Peer(
        "ik_llama.cpp", "ik-llama-cpp-python", "ik.py", ("bf16", "q8", "q4", "q3", "q2"), "ik", ("safetensors", "tokenizers"),
        # Attention over quantised caches takes most of the time to compile, and is not measured.
        cmake="-DGGML_NATIVE=ON -DGGML_IQK_FA_ALL_QUANTS=OFF",
        missing={
            "vendor/ik_llama.cpp/common/cmake/build-info-gen-cpp.cmake":
                'foreach(name NUMBER COMMIT COMPILER TARGET)\n  set(BUILD_${name} 0)\nendforeach()\n'
                'configure_file("common/build-info.cpp.in" "common/build-info.cpp" @ONLY)\n',
        },
        note="a third party's package of it, compiled by clang for this CPU; it knows no OLMoE, so the same "
        "weights under the name qwen3moe, which differs in norms alone; 8 and 4 bits repacked at load time (`-rtr`), "
        "fused gate and up (`-fmoe`), flash attention; f16 cache; n_batch = n_ubatch = 512",
    ),
    "transformers": Peer(
        "transformers + torch", "transformers", "transformers_model.py", ("bf16",), "torch",
        ("torch", "safetensors", "numpy"), note="bf16, `grouped_mm` experts, SDPA attention, the prompt in one piece",
    ),
    "openvino": Peer(
        "OpenVINO GenAI", "openvino-genai", "openvino_model.py", ("q8",), "openvino", ("optimum-intel",), above="torch",
        note="exported by optimum-intel with int8 weights (one scale per channel)",
    ),
    "kt": Peer(
        "kt-kernel", "kt-kernel", "kt.py", ("bf16", "q8"), "torch",
        ("torch", "safetensors", "numpy", "gguf", "typer", "rich", "pyyaml", "httpx", "packaging"), no_deps=True,
        note="bf16: `BF16`; 8 bits: `AMXINT8`, which needs no AMX; one scale per row",
    ),
    "llama-avx512": Peer(
        "llama.cpp, AVX-512 without AMX", "llama-cpp-python", "llama.py", ("bf16", "q8", "q4"), "llama-avx512", LLAMA,
        cmake=AVX512, lacks=("AMX_INT8",),
    ),
    "llama-avx2": Peer(
        "llama.cpp, AVX2", "llama-cpp-python", "llama.py", ("bf16", "q8", "q4"), "llama-avx2", LLAMA, cmake=AVX2,
        lacks=("AVX512",),
    ),
}


class Venvs:
    """Virtual environments in the cache folder. One that is whole holds a file `ready`.

    What cannot be installed is tried once: compiling an engine takes a quarter of an hour, and there is a row for each format.
    """

    def __init__(self, cache):
        self.root, self.logs, self.broken = cache, cache / "log", {}

    def python(self, name):
        """The interpreter that a peer runs in, installed first where it is missing."""
        peer = PEERS[name]
        folder = self.root / f"venv-{peer.venv}"
        # Peers may be one package, run in two ways.
        ready, python = folder / f"ready-{peer.package}", folder / "bin" / "python"
        if name in self.broken:
            raise Again(self.broken[name])
        if not ready.exists():
            try:
                self.install(name, peer, folder, python)
                ready.write_text(self.version(python, peer.package))
            except (Failed, subprocess.SubprocessError, OSError) as e:
                self.broken[name] = str(e)
                raise
        return python

    def version(self, python, package):
        code = f"import importlib.metadata as m; print(m.version({package!r}))"
        return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()

    def install(self, name, peer, folder, python):
        self.logs.mkdir(parents=True, exist_ok=True)
        path = self.logs / f"install-{name}.log"
        log(f"  installing {peer.package} for {peer.title} (log: {path})")
        environment = dict(os.environ, **peer.environment)
        first = []
        if peer.cmake:
            clang = next((c for c in CLANGS if shutil.which(c)), None)
            if not clang:
                raise Failed("needs clang: apt-get install clang-22 libomp-22-dev")
            environment |= {"CC": clang, "CXX": clang.replace("clang", "clang++"), "CMAKE_ARGS": f"{peer.cmake} -DLLAVA_BUILD=OFF"}
            # pip would take the wheel that it built with other options.
            first = ["--no-cache-dir", "--no-binary", peer.package]
        with open(path, "w") as out:
            if not python.exists():
                subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, stdout=out, stderr=out)
            source = self.completed(peer, python, out) if peer.missing else peer.package
            steps = [["-m", "pip", "install", *first, *(["--no-deps"] if peer.no_deps else []), str(source)]]
            if peer.packages:
                steps.append(["-m", "pip", "install", *peer.packages])
            if peer.above:
                below = next((self.root / f"venv-{peer.above}").glob("lib/python*/site-packages"), None)
                if not below:
                    raise Failed("needs torch, which is not installed")
                site = next(folder.glob("lib/python*/site-packages"))
                (site / "above.pth").write_text(f"{below}\n")
            for step in steps:
                done = subprocess.run([str(python), *step], env=environment, stdout=out, stderr=out)
                if done.returncode:
                    killed = f" (ended by signal {-done.returncode})" if done.returncode < 0 else ""
                    raise Failed(f"could not be installed: {last_line(path)}{killed}")


    def completed(self, peer, python, out):
        """A source package, unpacked, with the files that it lacks."""
        folder = self.root / "source" / peer.package
        shutil.rmtree(folder, ignore_errors=True)
        words = [str(python), "-m", "pip", "download", "--no-deps", "--no-binary", peer.package, "-d", str(folder)]
        if subprocess.run([*words, peer.package], stdout=out, stderr=out).returncode:
            raise Failed("its source could not be downloaded")
        archive = next(folder.glob("*.tar.gz"))
        shutil.unpack_archive(archive, folder, filter="data")
        unpacked = next(path for path in folder.iterdir() if path.is_dir())
        for name, text in peer.missing.items():
            (unpacked / name).parent.mkdir(parents=True, exist_ok=True)
            (unpacked / name).write_text(text)
        return unpacked


def last_line(path):
    """The line of a log that says most: the last one with an error, else the last."""
    lines = [line.strip() for line in Path(path).read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return ((errors or lines or ["no output"])[-1])[:200]


class Process:
    """A program that answers each line of its input with a line of its output."""

    def __init__(self, command, log_path, environment=None):
        self.log_path = Path(log_path)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self.log = open(self.log_path, "w")
        pipe = subprocess.PIPE
        env = dict(os.environ, **(environment or {}))
        self.child = subprocess.Popen(
            [str(c) for c in command], stdin=pipe, stdout=pipe, stderr=self.log, text=True, env=env
        )

    def ask(self, line, timeout=900):
        """The answer, parsed. What is no JSON object (libraries print to stdout) is passed over."""
        timer = threading.Timer(timeout, self.child.kill)
        timer.start()
        try:
            self.child.stdin.write(line + "\n")
            self.child.stdin.flush()
            for answer in self.child.stdout:
                if answer.startswith("{"):
                    value = json.loads(answer)
                    if "error" in value:
                        raise Failed(value["error"])
                    return value
        except BrokenPipeError:
            pass
        finally:
            timer.cancel()
        code = self.child.wait()
        raise Failed(f"ended with status {code}: {last_line(self.log_path)}")

    def close(self):
        try:
            self.child.stdin.close()
            self.child.wait(30)
        except (subprocess.TimeoutExpired, OSError):
            self.child.kill()
            self.child.wait()
        self.log.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Worker(Process):
    """A peer with a model."""

    def __init__(self, venvs, name, model, threads, context, fmt):
        peer = PEERS[name]
        environment = {
            "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "PYTHONPATH": str(HERE),
            "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error",
        }
        command = [venvs.python(name), HERE / "workers" / peer.worker, model, threads, context, fmt]
        super().__init__(command, venvs.logs / f"{name}-{fmt}.log", environment | peer.environment)
        self.name, self.peer = name, peer

    def version(self):
        """Its version; refuses a build that uses more of the CPU than the row says."""
        found = self.do("version")
        too_much = [f for f in self.peer.lacks if f"{f} = 1" in found.get("system", "")]
        if too_much:
            raise Failed(f"was compiled with {', '.join(too_much)}")
        return found

    def do(self, what, **values):
        return self.ask(json.dumps({"do": what, **values}))
