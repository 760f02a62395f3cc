"""ik_llama.cpp through a package that follows an older interface of llama.cpp. Arguments: as for llama.cpp."""

import ctypes
import importlib.util
import sys
from pathlib import Path

from common import serve
from llama import BATCH, Llama


class Ik(Llama):
    def __init__(self, path, threads, context, fmt):
        # Its library names the one beside it, but not where that is.
        package = Path(importlib.util.find_spec("ik_llama_cpp").origin).parent
        ctypes.CDLL(str(package / "lib" / "libggml.so"), mode=ctypes.RTLD_GLOBAL)
        from ik_llama_cpp import _ctypes_api as api

        self.api = api
        api.llama_backend_init()
        params = api.llama_model_default_params()
        # Its documentation's advice for CPUs: repack at load time, which rules out mapping. There is no
        # repacked bf16 where the CPU has no instruction for it.
        params.repack_tensors = fmt != "bf16"
        params.use_mmap = fmt == "bf16"
        self.model = api.llama_model_load_from_file(path.encode(), params)
        if not self.model:
            raise RuntimeError(f"{path} does not load")
        params = api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = context, BATCH, BATCH
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn = params.fused_moe_up_gate = True
        self.context = api.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError("no context")
        self.vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.batch = api.llama_batch_init(BATCH, 0, 1)

    def clear(self):
        self.api.llama_kv_cache_clear(self.context)

    def version(self):
        import importlib.metadata

        return {"version": importlib.metadata.version("ik-llama-cpp-python")}


if __name__ == "__main__":
    path, threads, context, fmt = sys.argv[1:]
    serve(Ik(path, int(threads), int(context), fmt))
