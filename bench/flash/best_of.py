"""Best-of-4 with all experts in memory: tokens per second of four sequences in one batch, beside four runs one by one."""

import json
import shutil

from engines import log

LAYERS = 4
"""Layers of the model: speed per layer is what counts, and these fit beside the others."""
MANY, PROMPT, TOKENS, REPEAT = 4, 32, 128, 5


def measure(weights, fmt, threads):
    """What `run bench --best-of` says, on a model that is made for it and removed."""
    folder = weights.cache / "best-of"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        log(f"  writing {LAYERS} layers of it for best-of-{MANY}")
        source, bundle = folder / "checkpoint", folder / f"best-of-{fmt}.moec"
        weights.synth(source, LAYERS)
        weights.build(fmt, source, bundle, PROMPT + TOKENS + 32, batch=MANY)
        words = ["bench", "--json", "--best-of", MANY, "--prompt", PROMPT, "--gen", TOKENS, "--repeat", REPEAT, "--threads", threads]
        said = json.loads(weights.run([bundle / "run", *words], f"best-of-{fmt}"))
        log(f"  best of {MANY}: {said['best_of_tokens_per_s']:.1f} tokens/s, {said['speedup']:.2f} times {MANY} single runs")
        return said | {"layers": LAYERS}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
