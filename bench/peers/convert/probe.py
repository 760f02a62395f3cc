"""A checkpoint whose logits show what its only layer of experts gives, and the error of an engine on it.

    probe.py make SYNTH OUT       from a random OLMoE of one layer and as many tokens as channels
    probe.py error PROBE FILE     relative error of logits (or of the experts' own output, `--output`; `--renorm`: of an
                                  engine that lets the weights of the chosen experts add up to one)

Attention adds nothing (its output projection is zero), the head is the identity and the last norm's weight is one,
so that logits are `(e + m) / rms(e + m)` of embedding `e` and experts' output `m`. The experts give zero in channel 0,
where every embedding is one eighth: that undoes the norm, and `m` is what remains. So one number compares engines
that give nothing but logits: `|m − m₀| / |m₀|` against f64 from the checkpoint's own bf16 weights.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from to_gguf import Checkpoint  # noqa: E402

TOKENS = 64
"""Ids 0 to 63."""
MARK = 0.125
"""Channel 0 of every embedding."""


def make(source, out):
    """Copies the checkpoint and rewrites some tensors in place."""
    shutil.copytree(source, out)
    path = out / "model.safetensors"
    with open(path, "r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        data = np.memmap(file, np.uint8, "r+", offset=8 + size)

        def bits(name):
            begin, end = header[name]["data_offsets"]
            return data[begin:end].view(np.uint16).reshape(header[name]["shape"])

        one, mark = 0x3F80, int(np.float32(MARK).view(np.uint32) >> 16)
        bits("model.layers.0.self_attn.o_proj.weight")[:] = 0
        bits("model.norm.weight")[:] = one
        head = bits("lm_head.weight")
        head[:] = np.eye(*head.shape, dtype=np.uint16) * one
        bits("model.embed_tokens.weight")[:, 0] = mark
        for name in header:
            if name.endswith("down_proj.weight"):
                bits(name)[0, :] = 0
        data.flush()


def reference(checkpoint):
    """Embeddings, the experts' output in f64, and what the weights of the chosen ones add up to."""
    config, get = checkpoint.config, lambda name: checkpoint.f32(name).astype(np.float64)
    e = get("model.embed_tokens.weight")[:TOKENS]
    x = e / np.sqrt((e * e).mean(1, keepdims=True) + config["rms_norm_eps"])
    x *= get("model.layers.0.post_attention_layernorm.weight")
    scores = x @ get("model.layers.0.mlp.gate.weight").T
    scores = np.exp(scores - scores.max(1, keepdims=True))
    scores /= scores.sum(1, keepdims=True)
    chosen = np.argsort(-scores, axis=1, kind="stable")[:, : config["num_experts_per_tok"]]
    total = np.take_along_axis(scores, chosen, 1).sum(1, keepdims=True)
    m = np.zeros_like(e)
    for expert in range(scores.shape[1]):
        rows = np.nonzero((chosen == expert).any(1))[0]
        if not len(rows):
            continue
        gate, up, down = (
            get(f"model.layers.0.mlp.experts.{expert}.{p}_proj.weight") for p in ("gate", "up", "down")
        )
        g = x[rows] @ gate.T
        m[rows] += scores[rows, expert, None] * ((g / (1 + np.exp(-g)) * (x[rows] @ up.T)) @ down.T)
    return e, m, total


def load(path):
    if str(path).endswith(".npy"):
        return np.load(path).astype(np.float64)
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        info = json.loads(file.read(size))["logits"]
        return np.fromfile(file, np.float32).reshape(info["shape"]).astype(np.float64)


def error(probe, path, is_output, renorm):
    checkpoint = Checkpoint(probe)
    kept = Path(probe) / "experts.npz"
    if not kept.exists():
        np.savez(kept, **dict(zip("emt", reference(checkpoint))))
    e, m, total = (np.load(kept)[name] for name in "emt")
    m = m / total if renorm else m
    found = load(path)
    if not is_output:
        found = found * (MARK / found[:, :1]) - e
    return float(np.sqrt(((found - m) ** 2).sum() / (m**2).sum()))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["make", "error"])
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--output", action="store_true")
    parser.add_argument("--renorm", action="store_true")
    args = parser.parse_args()
    if args.what == "make":
        make(args.first, args.second)
    else:
        print(json.dumps({"error": error(args.first, args.second, args.output, args.renorm)}))


if __name__ == "__main__":
    main()
