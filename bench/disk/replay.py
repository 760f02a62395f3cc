"""llama.cpp on given token ids: `replay.py GGUF PROMPT THREADS CONTEXT CHUNK REPACK`, ids to follow on stdin.

Reads `ID,ID,…`, computes the first PROMPT of them as a prompt in calls of CHUNK tokens, then one call for each that follows.
Prints an id once it is known (its predecessor has been computed), separated by commas, as a bundle's `run generate` does;
so both are timed in the same way. Weights are mapped. REPACK 1 lets llama.cpp make copies of weights in a layout of its
own where it does so by default, which take memory that cannot be dropped; 0 forbids it.
"""

import sys

import llama_cpp as api


def decode(context, batch, ids, start, last):
    """Runs ids from a position on; logits of the last where wanted."""
    batch.n_tokens = len(ids)
    for i, token in enumerate(ids):
        batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, start + i, 1
        batch.logits[i], batch.seq_id[i][0] = last and i == len(ids) - 1, 0
    if api.llama_decode(context, batch):
        raise SystemExit("error: llama_decode failed")


def main():
    path, *numbers = sys.argv[1:]
    prompt, threads, n_ctx, chunk, repack = (int(n) for n in numbers)
    ids = [int(i) for i in sys.stdin.read().split(",")]
    api.llama_backend_init()
    params = api.llama_model_default_params()
    params.use_extra_bufts = bool(repack)
    if hasattr(params, "load_mode"):
        params.load_mode = api.LLAMA_LOAD_MODE_MMAP
    else:  # older packages
        params.use_mmap = True
    model = api.llama_model_load_from_file(path.encode(), params)
    if not model:
        raise SystemExit(f"error: {path} does not load")
    params = api.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, chunk, chunk
    params.n_threads = params.n_threads_batch = threads
    params.no_perf = True
    context = api.llama_init_from_model(model, params)
    if not context:
        raise SystemExit("error: no context")
    batch = api.llama_batch_init(chunk, 0, 1)
    for start in range(0, prompt, chunk):
        part = ids[start : min(start + chunk, prompt)]
        decode(context, batch, part, start, start + len(part) == prompt)
    print(ids[prompt], end="", flush=True)
    for at in range(prompt, len(ids) - 1):
        decode(context, batch, [ids[at]], at, True)
        print(f",{ids[at + 1]}", end="", flush=True)
    print(flush=True)


if __name__ == "__main__":
    main()
