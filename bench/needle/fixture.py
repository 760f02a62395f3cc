"""A model that answers by looking a key up in its context, and prompts for it: weights are written down, not trained.

Mixtral's architecture with two layers, one head, and experts whose weights are 0. The residual stream is
[content | content of the token before | answer | 1 | zeros]. Layer 1 attends to the position before: planes of RoPE that turn fast hold a
constant, and queries are turned back by one position. It copies that token's content. Layer 2 has the content as query and the content of
the token before as key, in planes that 32768 positions turn by 0.03 rad at most, and copies the content of what it attends to. So the most
probable token after a key is the one that followed the same key before, anywhere in the context (an induction head).
"""

import json
import math
import random
import struct
from array import array

DIM = 64
"""Numbers of a token's content."""
HEAD, THETA = 128, 1e12
"""Numbers of a head, and RoPE's base. Plane i has the numbers i and i + 64 and turns by THETA ** (-i / 64) rad for each position."""
HIDDEN, INNER, EXPERTS = 256, 64, 2
CONTENT, BEFORE, ANSWER, ONE = 0, DIM, 2 * DIM, 3 * DIM
"""Places in the residual stream."""
FAST, SLOW = range(16), range(32, 64)
"""Planes of the first layer and of the second."""
SHARP, MATCH, HEAD_SCALE = 150.0, 1000.0, 40.0
"""Score of the position before, of an equal key, and logit of an answer that is found."""

COSINES = (0.95, 0.98, 0.998)
"""Cosine between a key and its near misses: that of the first key, of the second, of the third, of the first again …"""
KEYS, VALUES, VOCAB = 384, 1024, 5120
EVERY = 4096
"""Tokens of a context for each near miss of a key."""
LONGEST = 32768
MISSES = LONGEST // EVERY
FIRST_MISS, FIRST_VALUE = KEYS, KEYS * (1 + MISSES)
FIRST_FILLER = FIRST_VALUE + VALUES
"""Tokens: keys, the near misses of the first key, of the second …, values, others."""


def near(key):
    """Cosine between a key and its near misses."""
    return COSINES[key % len(COSINES)]


def unit(draw, against=None):
    """A random direction; with `against`, one orthogonal to that."""
    v = [draw.gauss(0, 1) for _ in range(DIM)]
    if against:
        along = sum(a * b for a, b in zip(v, against))
        v = [a - along * b for a, b in zip(v, against)]
    length = math.sqrt(sum(a * a for a in v))
    return [a / length for a in v]


def contents(seed=1):
    """The content of every token, a vector of length 1."""
    draw = random.Random(seed)
    keys = [unit(draw) for _ in range(KEYS)]
    misses = []
    for i, key in enumerate(keys):
        along, across = near(i), math.sqrt(1 - near(i) ** 2)
        misses += [[along * a + across * b for a, b in zip(key, unit(draw, key))] for _ in range(MISSES)]
    return keys + misses + [unit(draw) for _ in range(VOCAB - FIRST_VALUE)]


def matrix(rows, columns, entries):
    """A matrix of zeros but for `entries`: (row, column, number)."""
    out = array("f", bytes(4 * rows * columns))
    for row, column, number in entries:
        out[row * columns + column] = number
    return [rows, columns], out


def tensors(seed=1):
    """Name, shape and numbers of every tensor."""
    tokens = contents(seed)
    place = lambda at, scale: [(t, at + i, scale * x) for t, token in enumerate(tokens) for i, x in enumerate(token)]
    constant = [(t, ONE, 1.0) for t in range(VOCAB)]
    ones = lambda: ([HIDDEN], array("f", [1.0] * HIDDEN))
    yield "model.embed_tokens.weight", *matrix(VOCAB, HIDDEN, place(CONTENT, 1.0) + constant)
    # A norm divides by the root mean square: the stream's parts have length 1, and there are two, three and four.
    gain = lambda parts: math.sqrt(HIDDEN / parts)
    copy = lambda at, gain: matrix(HEAD, HIDDEN, [(i, at + i, 1 / gain) for i in range(DIM)])
    back = lambda at: matrix(HIDDEN, HEAD, [(at + i, i, 1.0) for i in range(DIM)])
    turns = [THETA ** (-2 * i / HEAD) for i in FAST]
    # Faster planes weigh more: they tell neighbours apart.
    weight = [math.sqrt(t) for t in turns]
    size = [math.sqrt(SHARP * math.sqrt(HEAD) * w / sum(weight)) for w in weight]
    half = HEAD // 2
    slow = [i for plane in SLOW for i in (plane, plane + half)]
    layers = [
        ([e for i, a, t in zip(FAST, size, turns) for e in ((i, ONE, a * math.cos(t) / gain(2)), (i + half, ONE, -a * math.sin(t) / gain(2)))],
         [(i, ONE, a / gain(2)) for i, a in zip(FAST, size)], copy(CONTENT, gain(2)), back(BEFORE)),
        ([(to, CONTENT + i, MATCH * math.sqrt(HEAD) / gain(3)) for i, to in enumerate(slow)],
         [(to, BEFORE + i, 1 / gain(3)) for i, to in enumerate(slow)], copy(CONTENT, gain(3)), back(ANSWER)),
    ]
    for n, (query, key, value, out) in enumerate(layers):
        layer = f"model.layers.{n}"
        yield f"{layer}.input_layernorm.weight", *ones()
        yield f"{layer}.self_attn.q_proj.weight", *matrix(HEAD, HIDDEN, query)
        yield f"{layer}.self_attn.k_proj.weight", *matrix(HEAD, HIDDEN, key)
        yield f"{layer}.self_attn.v_proj.weight", *value
        yield f"{layer}.self_attn.o_proj.weight", *out
        yield f"{layer}.post_attention_layernorm.weight", *ones()
        yield f"{layer}.block_sparse_moe.gate.weight", *matrix(EXPERTS, HIDDEN, [])
        for expert in range(EXPERTS):
            for name, shape in (("w1", (INNER, HIDDEN)), ("w2", (HIDDEN, INNER)), ("w3", (INNER, HIDDEN))):
                yield f"{layer}.block_sparse_moe.experts.{expert}.{name}.weight", *matrix(*shape, [])
    yield "model.norm.weight", *ones()
    yield "lm_head.weight", *matrix(VOCAB, HIDDEN, place(ANSWER, HEAD_SCALE / gain(4)))


CONFIG = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "dtype": "bfloat16", "vocab_size": VOCAB, "hidden_size": HIDDEN,
    "intermediate_size": INNER, "num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": HEAD,
    "hidden_act": "silu", "max_position_embeddings": LONGEST, "rms_norm_eps": 1e-6, "rope_theta": THETA, "sliding_window": None,
    "num_local_experts": EXPERTS, "num_experts_per_tok": 1, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None,
}


def bf16(numbers):
    """Their nearest bf16, as bytes."""
    bits = array("I", numbers.tobytes())
    return array("H", [(b + 0x7FFF + (b >> 16 & 1)) >> 16 for b in bits]).tobytes()


def write(folder, seed=1):
    """Writes the checkpoint into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    header, data = {}, bytearray()
    for name, shape, numbers in tensors(seed):
        start = len(data)
        data += bf16(numbers)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, len(data)]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + data)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")


def prompt(length, seed=1):
    """Token ids, whose last ones are the keys, each once; and the answers, key by key. Every key is in the context once with its answer
    after it, every near miss with another value after it, at random places."""
    draw = random.Random(seed * 1_000_003 + length)
    value = lambda: FIRST_VALUE + draw.randrange(VALUES)
    answers = [value() for _ in range(KEYS)]
    parts = [[key, answer] for key, answer in enumerate(answers)]
    for key, answer in enumerate(answers):
        for miss in range(length // EVERY):
            other = value()
            while other == answer:
                other = value()
            parts.append([FIRST_MISS + key * MISSES + miss, other])
    filler = lambda: FIRST_FILLER + draw.randrange(VOCAB - FIRST_FILLER)
    parts += [[filler()] for _ in range(length - KEYS - 2 * len(parts) - 1)]
    draw.shuffle(parts)
    # The first position has none before it, and attends to itself.
    ids = [filler()] + [token for part in parts for token in part]
    asked = list(range(KEYS))
    draw.shuffle(asked)
    return ids + asked, [answers[key] for key in asked]
