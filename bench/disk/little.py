"""Big-little decoding on random weights: which γ has as many tokens fall back as on a real model.

The largest probability that a model of random weights gives any token is tiny, so that no token would pass MoBiLE's γ of 0.7.
What big-little decoding costs and gains depends on how many tokens fall back; so that share is given, and γ is the quantile
of the probabilities that belongs to it.
"""

import array
import json
import math
import struct

RATIOS = {
    0.0: "none fall back",
    0.21: "as OLMoE does (MoBiLE, Table III, γ = 0.7)",
    0.5: "every other one",
}
"""Shares of tokens that fall back, which are measured, and why these."""


def largest_probabilities(path):
    """Of every row of logits (f32 [rows, vocabulary], safetensors), the largest of its softmax."""
    with open(path, "rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        facts = json.loads(file.read(size))["logits"]
        rows, vocab = facts["shape"]
        file.seek(8 + size + facts["data_offsets"][0])
        found = []
        for _ in range(rows):
            row = array.array("f")
            row.fromfile(file, vocab)
            top = max(row)
            found.append(1 / math.fsum(math.exp(z - top) for z in row))
    return found


def gamma(probabilities, ratio):
    """The γ that this share of the probabilities does not exceed."""
    if ratio <= 0:
        return 0.0
    ordered = sorted(probabilities)
    at = ratio * len(ordered) - 0.5
    low = min(max(math.floor(at), 0), len(ordered) - 1)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])
