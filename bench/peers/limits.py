"""What a model must read and compute, and how fast this machine could do it at most.

A limit is the larger of two times: the bytes that cannot be avoided over the measured bandwidth, and the operations
over the measured peak of the format's arithmetic. It counts every weight once per call, whatever an engine does.
"""

import copy
import statistics
from dataclasses import dataclass

BITS = {"bf16": 16.0, "q8": 8.5, "q4": 4.5}
"""Bits per weight, those of the scales included: both q8 and Q8_0, q4 and Q4_0 have one 16-bit scale per 32."""
PEAK = {"bf16": "bf16", "q8": "int8", "q4": "int8"}
"""Arithmetic whose peak bounds a format; f32 arithmetic where a machine has nothing faster."""
KV_BYTES = 2
"""Bytes per number in the cache: bf16 in moec and transformers, f16 in llama.cpp."""


@dataclass(frozen=True)
class Shape:
    """A model, from its config.json."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    k: int
    inner: int
    vocab: int

    @staticmethod
    def of(config):
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        return Shape(
            layers=config["num_hidden_layers"],
            hidden=hidden,
            heads=heads,
            kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or hidden // heads,
            experts=config.get("num_experts") or config["num_local_experts"],
            k=config["num_experts_per_tok"],
            inner=config.get("moe_intermediate_size") or config["intermediate_size"],
            vocab=config["vocab_size"],
        )

    @property
    def expert(self):
        """Weights of one expert."""
        return 3 * self.hidden * self.inner

    @property
    def attention(self):
        """Weights of a layer's four projections."""
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    def touched(self, tokens):
        """Experts of a layer that so many tokens read, where every choice is equally likely."""
        return self.experts * (1 - (1 - self.k / self.experts) ** tokens)

    def weight_bytes(self, tokens, fmt):
        """Weights that a call with so many tokens reads: the routers stay f32."""
        layer = self.attention + self.touched(tokens) * self.expert
        router = 4 * self.experts * self.hidden
        return self.layers * (layer * BITS[fmt] / 8 + router) + self.vocab * self.hidden * BITS[fmt] / 8

    def kv_bytes(self, context):
        """Cache of one sequence."""
        return self.layers * 2 * self.kv_heads * self.head_dim * KV_BYTES * context

    def operations(self, tokens, context):
        """Of `tokens` rows, each of which attends to `context` others on average; one row's logits."""
        active = self.attention + self.k * self.expert + self.experts * self.hidden
        attend = 4 * self.heads * self.head_dim * context
        return self.layers * tokens * (2 * active + attend) + 2 * self.vocab * self.hidden


def middle(reports):
    """One report of several of `moec profile-device --json`: the median of every figure."""
    one = copy.deepcopy(reports[-1])
    median = lambda figure: statistics.median(figure(r) for r in reports)
    for i, peak in enumerate(one["peaks"]):
        peak["gops"] = median(lambda r: r["peaks"][i]["gops"])
    for name in ["read_gb_per_s", "read_gb_per_s_one_thread"]:
        one[name] = median(lambda r: r[name])
    return one


@dataclass(frozen=True)
class Machine:
    """What `moec profile-device --json` measured."""

    bandwidth: float
    """Bytes per second."""
    peaks: dict
    """Operations per second by format."""

    @staticmethod
    def of(report):
        peaks = {}
        for p in report["peaks"]:
            peaks[p["format"]] = max(peaks.get(p["format"], 0.0), p["gops"] * 1e9)
        return Machine(report["read_gb_per_s"] * 1e9, peaks)

    def seconds(self, size, operations, fmt):
        peak = max(self.peaks.get(PEAK[fmt], 0.0), self.peaks["f32"])
        return max(size / self.bandwidth, operations / peak)


def prefill(machine, shape, fmt, prompt):
    """Tokens per second of a prompt, at most."""
    size = shape.weight_bytes(prompt, fmt) + shape.kv_bytes(prompt)
    return prompt / machine.seconds(size, shape.operations(prompt, prompt / 2), fmt)


def decode(machine, shape, fmt, context, batch=1):
    """Tokens per second of so many sequences together, at most."""
    size = shape.weight_bytes(batch, fmt) + batch * shape.kv_bytes(context)
    operations = shape.operations(batch, context) + 2 * (batch - 1) * shape.vocab * shape.hidden
    return batch / machine.seconds(size, operations, fmt)


def layer(machine, shape, fmt, tokens):
    """Seconds of the experts of one layer, at least."""
    size = shape.touched(tokens) * shape.expert * BITS[fmt] / 8
    return machine.seconds(size, 2 * tokens * shape.k * shape.expert, fmt)
