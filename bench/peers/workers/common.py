"""What the workers share: the loop that answers requests, the prompts, and perplexity."""

import json
import os
import sys
import time
from pathlib import Path


def prompt_ids(sequence, n, vocab):
    """The same ids as `run bench`."""
    def one(i):
        return ((i * 2654435761 & (1 << 64) - 1) >> 8 & (1 << 32) - 1) % vocab

    return [one(sequence * n + i) for i in range(n)]


def timed(work):
    """Seconds, and what came out."""
    start = time.perf_counter()
    value = work()
    return time.perf_counter() - start, value


def windows_of(folder, text, window, windows):
    """Token ids of a text, cut as `moec eval` cuts it: id 0 in front, windows that share nothing but that the last
    token of one predicts the first of the next."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    ids = [0] + tokenizer.encode(Path(text).read_text(), add_special_tokens=False).ids
    starts = range(0, len(ids) - 1, window)
    cut = [(ids[s : s + window], ids[s + 1 : s + 1 + window]) for s in starts][:windows]
    return [(inputs[: len(following)], following) for inputs, following in cut]


def perplexity(folder, text, window, windows, logits_of):
    """Over windows; `logits_of(ids)` gives f32 [ids, vocabulary]."""
    import numpy as np

    loss, count = 0.0, 0
    for ids, following in windows_of(folder, text, window, windows):
        logits = np.asarray(logits_of(ids), dtype=np.float64)
        top = logits.max(axis=1, keepdims=True)
        logsum = np.log(np.exp(logits - top).sum(axis=1)) + top[:, 0]
        loss += float((logsum - logits[np.arange(len(following)), following]).sum())
        count += len(following)
    return float(np.exp(loss / count))


def serve(engine):
    """Answers `{"do": NAME, …}` with what the method of that name returns."""
    # Libraries print to stdout; the answers have it for themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(engine, request.pop("do"))(**request)
        except Exception as e:  # whatever it is, the table names it
            answer = {"error": f"{type(e).__name__}: {e}"}
        print(json.dumps(answer), file=answers, flush=True)
