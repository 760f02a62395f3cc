"""llama.cpp through the low-level binding: token ids in, logits out. Arguments: GGUF, threads, context, format."""

import ctypes
import os
import sys
import time

import numpy as np
from common import perplexity, prompt_ids, serve, timed

BATCH = 512
"""Tokens per call and per internal batch, the chunk of moec's prefill as well."""


class Llama:
    def __init__(self, path, threads, context, _fmt, sequences=1, elsewhere=None):
        """`elsewhere`: layers that another device than the CPU has."""
        import llama_cpp as api

        self.api, self.began = api, time.perf_counter()
        api.llama_backend_init()
        how = api.llama_model_default_params()
        if os.environ.get("LLAMA_MAPS") == "0":
            how.load_mode = api.LLAMA_LOAD_MODE_NONE
        if elsewhere is not None:
            how.n_gpu_layers = elsewhere
        self.model = api.llama_model_load_from_file(path.encode(), how)
        if not self.model:
            raise RuntimeError(f"{path} does not load")
        params = api.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.n_batch, params.n_ubatch = context, sequences, BATCH, BATCH
        params.n_threads = params.n_threads_batch = threads
        params.no_perf = True
        self.context = api.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError("no context")
        self.vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.batch = api.llama_batch_init(BATCH, 0, 1)

    def clear(self):
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), False)

    def decode(self, ids, start, want, sequence=0):
        """Runs ids of a sequence from a position on; `want` says for which of them logits are wanted."""
        b = self.batch
        b.n_tokens = len(ids)
        for i, token in enumerate(ids):
            b.token[i], b.pos[i], b.n_seq_id[i], b.logits[i] = token, start + i, 1, want(i)
            b.seq_id[i][0] = sequence
        if self.api.llama_decode(self.context, b):
            raise RuntimeError("llama_decode failed")

    def prefill(self, ids):
        for start in range(0, len(ids), BATCH):
            part = ids[start : start + BATCH]
            self.decode(part, start, lambda i, s=start, n=len(ids): s + i == n - 1)

    def time(self, prompt, gen):
        ids = prompt_ids(0, prompt, self.vocab)
        self.clear()
        prefill, _ = timed(lambda: self.prefill(ids))
        decode, _ = timed(lambda: [self.decode([ids[i % prompt]], prompt + i, lambda _: True) for i in range(gen)])
        return {"prefill": prompt / prefill, "decode": gen / decode}

    def first(self, ids):
        """Seconds from behind Python's own start to the first token."""
        self.prefill(ids)
        return {"seconds": time.perf_counter() - self.began}

    def rows(self, ids):
        """Logits of all ids, f32 [ids, vocabulary]."""
        self.clear()
        self.decode(ids, 0, lambda _: True)
        row = lambda i: ctypes.cast(self.api.llama_get_logits_ith(self.context, i), ctypes.POINTER(ctypes.c_float))
        return np.stack([np.ctypeslib.as_array(row(i), (self.vocab,)).copy() for i in range(len(ids))])

    def logits(self, ids, out):
        np.save(out, self.rows(ids))
        return {"out": out}

    def perplexity(self, folder, text, window, windows):
        return {"perplexity": perplexity(folder, text, window, windows, self.rows)}

    def version(self):
        return {"version": self.api.__version__, "system": self.api.llama_print_system_info().decode()}


if __name__ == "__main__":
    path, threads, context, fmt = sys.argv[1:]
    serve(Llama(path, int(threads), int(context), fmt))
