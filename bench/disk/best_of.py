"""Best-of-4 with all experts in memory: tokens per second of four sequences in one batch, beside four runs one by one.

Sequences share the prompt's keys and values, and the weights that a step reads. How much is shared depends on how alike their
experts are: four tokens that choose alone, as often as counted, need three times the experts of one (`bound`).
"""

import json
import shutil

from engines import log
from models import FERRIS
from weights import shares

LAYERS = 4
"""Layers of OLMoE-1B-7B's shapes: speed per layer is what counts, and these are made in a minute."""
MANY, REPEAT = 4, 5
LENGTHS = ((32, 128), (512, 64))
"""Tokens of the prompt, tokens drawn: what decoding gains, and what sharing a prompt adds."""


def bound(shape, many):
    """How many times the tokens per second of one sequence `many` can reach, if memory is read as fast: bytes over bytes."""
    inner = 3 * shape.hidden * shape.inner
    per_layer = shape.mixers
    head = shape.vocab * shape.hidden
    read = lambda rows: sum(inner * (1 - (1 - min(1, shape.k * s)) ** rows) for of in shares(shape.layers, shape.experts) for s in of)
    return many * (read(1) + per_layer + head) / (read(many) + per_layer + head)


def measure(weights, fmt, threads, shape_of):
    """What `run bench --best-of` says, on a model that is made for it and removed, and on the trained one."""
    folder = weights.cache / "best-of"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    context = max(sum(lengths) for lengths in LENGTHS) + 64
    try:
        log(f"  writing {LAYERS} layers for best of {MANY}")
        source = folder / "checkpoint"
        weights.synth(source, LAYERS)
        shape = shape_of(json.loads((source / "config.json").read_text()))
        models = [(f"{LAYERS} layers of OLMoE-1B-7B's shapes", source, bound(shape, MANY)), ("ferris", FERRIS, None)]
        rows = []
        for name, source, most in models:
            bundle = folder / f"best-of-{fmt}.moec"
            weights.build(fmt, source, bundle, context, batch=MANY)
            for prompt, tokens in LENGTHS:
                words = ["bench", "--json", "--best-of", MANY, "--prompt", prompt, "--gen", tokens, "--repeat", REPEAT, "--threads", threads]
                said = json.loads(weights.run([bundle / "run", *words], f"best-of-{fmt}"))
                rate = f"{said['best_of_tokens_per_s']:.1f} tokens/s, {said['speedup']:.2f} times {MANY} single runs"
                log(f"  best of {MANY}, {name}, {tokens} tokens after {prompt}: {rate}")
                rows.append(said | {"model": name, "bound": most})
            shutil.rmtree(bundle)
        return rows
    finally:
        shutil.rmtree(folder, ignore_errors=True)
