"""ferris's documents, split and mix: 72 % text, 2 % repeats, 25 % retrieval, 1 % sums."""
import json
import random

import torch
from tokenizers import Tokenizer

V, T, EOT = 2048, 512, 0
WORDS = """amber anchor apple arrow autumn badge basil beacon bishop blossom bottle breeze bridge bronze butter
candle canyon carbon castle cedar cherry circle clover cobalt comet copper coral cotton crater crystal
dagger dancer desert dragon eagle ember falcon feather fennel forest galaxy garden ginger glacier granite
harbor hazel helmet honey island ivory jasmine jungle kettle lantern lemon lily lotus magnet maple marble
meadow mirror monarch nectar needle nickel oasis ocean olive onyx orchid oyster palace panda pearl pepper
pilot planet plum prism quartz rabbit raven ribbon river rocket saddle saffron salmon shadow silver
spruce summit sunset temple thunder tiger topaz tulip tunnel velvet violet walnut willow winter zebra""".split()


def needle(rng, filler, keys):
    """A question for one of `keys` pass keys hidden in `filler`, and its answer."""
    names = rng.sample(WORDS, keys)
    values = [str(rng.randrange(1000, 10000)) for _ in names]
    cuts = sorted(rng.randrange(len(filler) + 1) for _ in names)
    parts, at = [], 0
    for cut, name, value in zip(cuts, names, values):
        parts += [filler[at:cut], f" The pass key for {name} is {value}. "]
        at = cut
    parts.append(filler[at:])
    j = rng.randrange(keys)
    return ''.join(parts) + f"\nQuestion: What is the pass key for {names[j]}? Answer:", f" {values[j]}."


def arithmetic(rng):
    a, b = rng.randrange(100), rng.randrange(100)
    if rng.random() < .5:
        return f"{a} + {b} =", f" {a + b}."
    return f"{max(a, b)} - {min(a, b)} =", f" {abs(a - b)}."


class Data:
    """`held_out`: names of the documents kept out of training."""

    def __init__(self, docs='docs.json', tokenizer='tokenizer.json', held_out='val_docs.json'):
        tk = Tokenizer.from_file(tokenizer)
        self.enc = lambda s: tk.encode(s).ids
        out = set(json.load(open(held_out)))
        docs = [(n, t) for n, t in json.load(open(docs))
                if sum(ord(c) > 127 for c in t) / len(t) < 0.01]
        random.Random(7).shuffle(docs)
        self.texts = [t for n, t in docs if n not in out]
        self.val = [t for n, t in docs if n in out]
        assert len(self.val) == len(out), 'the documentation differs from ferris\'s'
        stream = lambda texts: torch.tensor([i for t in texts for i in [EOT] + self.enc(t)])
        self.train_ids, self.val_ids = stream(self.texts), stream(self.val)

    def sample(self, rng):
        """Token ids [T+1] and the loss weight of each next token [T]."""
        r = rng.random()
        if .02 <= r < .74:
            o = rng.randrange(len(self.train_ids) - T - 1)
            return self.train_ids[o:o + T + 1], torch.ones(T)
        ids, weight = [EOT], [0.0]
        while len(ids) < T + 1:
            if r < .02:
                i, w = self.repeats(rng)
            elif r < .99:
                n = rng.choice([0, 0, 0, 10, 30, 60, 120, 250, 500, 900, 1300])
                t = rng.choice(self.texts)
                o = rng.randrange(max(1, len(t) - n))
                i, w = self.question(needle(rng, t[o:o + n], rng.choice([1, 1, 2, 3, 4])), .25, 3.0, 1.0)
            else:
                i, w = self.question(arithmetic(rng), .1, 1.0, .3)
            ids, weight = ids + i, weight + w
        return torch.tensor(ids[:T + 1]), torch.tensor(weight[1:T + 1])

    def repeats(self, rng):
        n = rng.randrange(8, 90)
        if rng.random() < .5:
            seq = [rng.randrange(1, V) for _ in range(n)]
        else:
            seq = self.enc(''.join(str(rng.randrange(10)) if rng.random() < .6 else ' ' + rng.choice(WORDS)
                                   for _ in range(n)))
        times = rng.choice([2, 2, 3])
        return seq * times, [0.02] * len(seq) + [1.0] * (len(seq) * (times - 1))

    def question(self, pair, ask, answer, end):
        a, b = self.enc(pair[0]), self.enc(pair[1])
        return a + b + [EOT], [ask] * len(a) + [answer] * len(b) + [end]
