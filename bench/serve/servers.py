"""The servers: moec's, and llama.cpp's from the source that the package llama-cpp-python carries."""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from engines import CLANGS, Failed, last_line, log

TOOLS = ("cmake", "ninja", "gguf", "safetensors", "numpy")
"""What builds llama-server and writes its file."""
PACKAGE = "llama-cpp-python"
CMAKE = ("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_BUILD_SERVER=ON", "-DLLAMA_BUILD_TOOLS=ON",
         "-DLLAMA_BUILD_COMMON=ON", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF",
         "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF")
PATIENCE = 300
"""Seconds until a server must listen."""


class Tools:
    """llama-server and the Python that writes its models: made once, kept in the cache folder."""

    def __init__(self, cache, install=True):
        self.folder, self.may = cache / "llama-server", install
        self.venv, self.ready = self.folder / "venv", self.folder / "ready"

    def python(self):
        """The interpreter of what writes GGUF files."""
        python = self.venv / "bin" / "python"
        if not (self.venv / "ready").exists():
            self.check("the tools of llama.cpp")
            self.step([sys.executable, "-m", "venv", "--clear", self.venv], "venv")
            self.step([python, "-m", "pip", "install", "--quiet", *TOOLS], "tools")
            (self.venv / "ready").touch()
        return python

    def server(self):
        """The program; compiled first, for this CPU, where it is missing."""
        program = self.folder / "build" / "bin" / "llama-server"
        if not self.ready.exists():
            self.check("llama-server")
            self.build(self.python())
            self.ready.write_text(self.version)
        self.version = self.ready.read_text().strip()
        return program

    def build(self, python):
        clang = next((c for c in CLANGS if shutil.which(c)), None)
        if not clang:
            raise Failed("llama-server needs clang: apt-get install clang-22 libomp-22-dev")
        source = self.folder / "source"
        shutil.rmtree(source, ignore_errors=True)
        self.step([python, "-m", "pip", "download", "--no-deps", "--no-binary", PACKAGE, "-d", source, PACKAGE], "source")
        archive = next(source.glob("*.tar.gz"))
        self.version = archive.name.removesuffix(".tar.gz").rsplit("-", 1)[1]
        shutil.unpack_archive(archive, source, filter="data")
        unpacked = next(path for path in source.iterdir() if path.is_dir()) / "vendor" / "llama.cpp"
        log("  compiling llama-server, some ten minutes")
        path = f"{self.venv / 'bin'}:{os.environ['PATH']}"
        env = dict(os.environ, CC=clang, CXX=clang.replace("clang", "clang++"), PATH=path)
        build = self.folder / "build"
        self.step([self.venv / "bin" / "cmake", "-G", "Ninja", "-S", unpacked, "-B", build, *CMAKE], "configure", env)
        self.step([self.venv / "bin" / "ninja", "-C", build, "llama-server"], "build", env)

    def check(self, what):
        if not self.may:
            raise Failed(f"{what}: not installed")
        self.folder.mkdir(parents=True, exist_ok=True)

    def step(self, words, what, env=None):
        path = self.folder / f"{what}.log"
        with open(path, "w") as out:
            done = subprocess.run([str(w) for w in words], stdout=out, stderr=out, env=env)
        if done.returncode:
            raise Failed(f"{what}: {last_line(path)}")


class Server:
    """A server that runs until it is left."""

    def __init__(self, words, log_path):
        self.log_path = Path(log_path)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self.log = open(self.log_path, "w")
        self.child = subprocess.Popen([str(w) for w in words], stdout=subprocess.PIPE, stderr=self.log, text=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.child.terminate()
        try:
            self.child.wait(60)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
        self.log.close()


class Moec(Server):
    title = "moec"

    def __init__(self, bundle, threads, cache):
        words = [bundle / "run", "serve", "--port", 0, "--max-queue", 1000, "--threads", threads]
        super().__init__(words, cache / "log" / "serve-moec.log")
        line = self.child.stdout.readline().strip()
        if not line.startswith("http://"):
            raise Failed(f"moec serves nothing: {last_line(self.log_path)}")
        self.address = line.removeprefix("http://")

    def metric(self, name):
        with urllib.request.urlopen(f"http://{self.address}/metrics") as reply:
            lines = reply.read().decode().splitlines()
        return next(float(line.split(" ")[1]) for line in lines if line.startswith(f"{name} "))


class Llama(Server):
    title = "llama-server"

    def __init__(self, program, gguf, slots, context, threads, port, cache):
        words = [program, "-m", gguf, "--host", "127.0.0.1", "--port", port, "-np", slots, "-c", slots * context,
                 "-t", threads, "-tb", threads, "-b", 512, "-ub", 512, "--cache-ram", 0, "--no-ui", "--offline"]
        super().__init__(words, cache / "log" / "serve-llama.log")
        self.address = f"127.0.0.1:{port}"
        start = time.monotonic()
        while not self.listens():
            if self.child.poll() is not None or time.monotonic() - start > PATIENCE:
                raise Failed(f"llama-server serves nothing: {last_line(self.log_path)}")
            time.sleep(0.2)

    def listens(self):
        try:
            with urllib.request.urlopen(f"http://{self.address}/health") as reply:
                return json.loads(reply.read()).get("status") == "ok"
        except OSError:
            return False
