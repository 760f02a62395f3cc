"""llama.cpp's RPC on the same two hosts: a server on the second one, and a model whose last layers are there.

Runs in llama.cpp's environment: `rpc.py server LIBRARY ADDRESS`, and `rpc.py model LIBRARY ADDRESS GGUF CONTEXT`. Its package has no
RPC: `built` compiles the library from the package's source.
"""

import ctypes
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "peers" / "workers"))

CPU = 0
"""llama.cpp's number of the CPU among the types of devices."""
SEQUENCES = 4
PACKAGE = "llama-cpp-python"
SOURCES = ("ggml-rpc.cpp", "transport.cpp")


def built(cache, python, clang):
    """The library, compiled against the one that is installed, of the same version."""
    folder = cache / "rpc"
    library = folder / "libggml-rpc.so"
    if library.exists():
        return library
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    version = f"import importlib.metadata as m; print(m.version({PACKAGE!r}))"
    version = subprocess.run([python, "-c", version], capture_output=True, text=True, check=True).stdout.strip()
    words = [python, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", PACKAGE, "-d", folder]
    subprocess.run([*words, f"{PACKAGE}=={version}"], check=True)
    shutil.unpack_archive(next(folder.glob("*.tar.gz")), folder, filter="data")
    ggml = next(folder.glob("*/vendor/llama.cpp/ggml"))
    installed = next(Path(python).parent.parent.glob("lib/python*/site-packages/llama_cpp/lib"))
    made = folder / "made.so"
    subprocess.run([
        clang, "-O2", "-std=c++17", "-shared", "-fPIC", "-DGGML_BACKEND_BUILD", "-DGGML_BACKEND_SHARED", "-DGGML_SHARED", f"-I{ggml}/include",
        f"-I{ggml}/src", *[f"{ggml}/src/ggml-rpc/{name}" for name in SOURCES], f"-L{installed}", "-lggml-base", "-lggml", "-o", made,
    ], check=True)
    made.rename(library)
    return library


def loaded(library):
    """llama.cpp's own library of devices, and that of RPC."""
    import llama_cpp  # noqa: F401, which loads the libraries that are found by name here

    devices = ctypes.CDLL("libggml.so.0", ctypes.RTLD_GLOBAL)
    rpc = ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
    devices.ggml_backend_dev_by_type.restype = ctypes.c_void_p
    devices.ggml_backend_register.argtypes = [ctypes.c_void_p]
    rpc.ggml_backend_rpc_add_server.restype = ctypes.c_void_p
    rpc.ggml_backend_rpc_start_server.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
    return devices, rpc


def answer(library, address):
    """Computes for others, with one thread, until the process is ended."""
    devices, rpc = loaded(library)
    cpu = (ctypes.c_void_p * 1)(devices.ggml_backend_dev_by_type(CPU))
    rpc.ggml_backend_rpc_start_server(address.encode(), None, 1, 1, cpu)


def await_server(address):
    """Returns when the server listens, or after a while."""
    host, _, port = address.partition(":")
    for _ in range(200):
        with socket.socket() as tried:
            if tried.connect_ex((host, int(port))) == 0:
                return
        time.sleep(0.1)


def model(library, address, path, context):
    """The model, with the last half of its layers and its head on the server."""
    from common import prompt_ids, timed
    from gguf import GGUFReader
    from llama import Llama

    devices, rpc = loaded(library)
    await_server(address)
    server = rpc.ggml_backend_rpc_add_server(address.encode())
    if not server:
        raise RuntimeError(f"no server at {address}")
    devices.ggml_backend_register(server)
    fields = GGUFReader(path).fields
    layers = next(field.contents() for name, field in fields.items() if name.endswith(".block_count"))

    class Remote(Llama):
        """Several sequences, decoded together."""

        def together(self, position, ids, sequences):
            """A token of each sequence."""
            batch = self.batch
            batch.n_tokens = sequences
            for i in range(sequences):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = ids[i], position, 1, True
                batch.seq_id[i][0] = i
            if self.api.llama_decode(self.context, batch):
                raise RuntimeError("llama_decode failed")

        def turn(self, prompt, long, gen):
            """Tokens per second of a long prompt, and of decoding one and all sequences."""
            found = {}
            for part, sequences in (("one", 1), ("four", SEQUENCES)):
                ids = [prompt_ids(i, prompt, self.vocab) for i in range(sequences)]
                self.clear()
                for i in range(sequences):
                    self.decode(ids[i], 0, lambda at: at == prompt - 1, i)
                work = lambda: [self.together(prompt + i, [of[i % prompt] for of in ids], sequences) for i in range(gen)]
                found[part] = {"rate": gen * sequences / timed(work)[0]}
            ids = prompt_ids(0, long, self.vocab)
            for _ in range(2):
                self.clear()
                seconds = timed(lambda: self.prefill(ids))[0]
            return found | {"prompt": {"rate": long / seconds}}

    return Remote(path, 1, int(context) * SEQUENCES, None, sequences=SEQUENCES, elsewhere=layers // 2 + 1)


if __name__ == "__main__":
    what, *words = sys.argv[1:]
    if what == "server":
        answer(*words)
    else:
        from common import serve

        serve(model(*words))
