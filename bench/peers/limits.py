"""What a model must read and compute, and how fast this machine could do it at most.

A limit is the larger of two times: the bytes that cannot be avoided over the measured bandwidth, and the operations
over the measured peak of the format's arithmetic. It counts every weight once per call, whatever an engine does.
"""

import copy
import statistics
from dataclasses import dataclass

BITS = {"bf16": 16.0, "q8": 8.5, "q6": 6.5, "q5": 5.5, "q4n": 4.5, "q4": 4.5, "q3": 3.5, "q2": 2.5, "q2s": 2.125}
"""Bits per weight, those of the scales included: both q8 and Q8_0, q4 and Q4_0 have one 16-bit scale per 32."""
ENDS = {"q6": "q8", "q5": "q8", "q3": "q4", "q2": "q4", "q2s": "q4"}
"""Formats of embeddings and head beside matrices in formats that these do not have."""
PEAK = {"bf16": "bf16"} | {fmt: "int8" for fmt in BITS if fmt != "bf16"}
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
    gated: bool = False
    """Whether attention's result is multiplied by a gate as wide as the queries."""
    shared: int = 0
    """Inner channels of the expert that all tokens take."""
    linear: int = 0
    """Layers of linear attention in place of attention."""
    linear_keys: int = 0
    """Channels of their queries, and of their keys."""
    linear_values: int = 0
    linear_heads: int = 0
    """Heads of their values, each with a state of a head's keys by its values."""
    state: int = 0
    """Numbers of a head's state."""

    @staticmethod
    def of(config):
        config = config.get("text_config", config)
        heads, hidden, get = config["num_attention_heads"], config["hidden_size"], config.get
        linear = get("layer_types", []).count("linear_attention")
        key, value = get("linear_key_head_dim", 0), get("linear_value_head_dim", 0)
        return Shape(
            layers=config["num_hidden_layers"],
            hidden=hidden,
            heads=heads,
            kv_heads=config["num_key_value_heads"],
            head_dim=get("head_dim") or hidden // heads,
            experts=get("num_experts") or config["num_local_experts"],
            k=config["num_experts_per_tok"],
            inner=get("moe_intermediate_size") or config["intermediate_size"],
            vocab=config["vocab_size"],
            gated=linear > 0,
            shared=get("shared_expert_intermediate_size", 0),
            linear=linear,
            linear_keys=key * get("linear_num_key_heads", 0),
            linear_values=value * get("linear_num_value_heads", 0),
            linear_heads=get("linear_num_value_heads", 0),
            state=key * value,
        )

    @property
    def expert(self):
        """Weights of one expert."""
        return 3 * self.hidden * self.inner

    @property
    def attends(self):
        """Layers with attention and a cache."""
        return self.layers - self.linear

    @property
    def mixers(self):
        """Weights of the projections of all layers, those of the experts left out."""
        attention = self.head_dim * ((3 if self.gated else 2) * self.heads + 2 * self.kv_heads)
        linear = 2 * self.linear_keys + 3 * self.linear_values + 2 * self.linear_heads
        shared = 3 * self.shared + (1 if self.shared else 0)
        return self.hidden * (self.attends * attention + self.linear * linear + self.layers * shared)

    @property
    def states(self):
        """Numbers that the layers of linear attention keep of a sequence."""
        return self.linear * self.linear_heads * self.state

    def touched(self, tokens):
        """Experts of a layer that so many tokens read, where every choice is equally likely."""
        return self.experts * (1 - (1 - self.k / self.experts) ** tokens)

    def weight_bytes(self, tokens, fmt):
        """Weights that a call with so many tokens reads: the routers stay f32."""
        experts, router = self.touched(tokens) * self.expert, 4 * self.experts * self.hidden
        head = self.vocab * self.hidden * BITS[ENDS.get(fmt, fmt)]
        return ((self.mixers + self.layers * experts) * BITS[fmt] + head) / 8 + self.layers * router

    def kv_bytes(self, context):
        """Cache of one sequence, and its f32 states, which are read and written."""
        return self.attends * 2 * self.kv_heads * self.head_dim * KV_BYTES * context + 2 * 4 * self.states

    def operations(self, tokens, context):
        """Of `tokens` rows, each of which attends to `context` others on average; one row's logits."""
        active = self.mixers + self.layers * (self.k * self.expert + self.experts * self.hidden)
        attend = 4 * self.attends * self.heads * self.head_dim * context
        return tokens * (2 * active + attend + 6 * self.states) + 2 * self.vocab * self.hidden


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
