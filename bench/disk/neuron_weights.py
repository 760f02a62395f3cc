"""A sparse model, as two bundles and as GGUF, of equal bits."""

import shutil

from engines import HERE as PEERS
from engines import log
from weights import CALIBRATE, COUNTS, POLICY, Weights

NEURONS, WHOLE = "neurons", "whole experts"
WAYS = (NEURONS, WHOLE)
LINES = {
    NEURONS: '[experts]\nskip = "on"\n[memory]\nbudget = "{budget}"\n',
    WHOLE: f'[experts]\nskip = "off"\n[memory]\nbudget = "{{budget}}"\nprefetch = 1\npolicy = "{POLICY}"\n',
}
"""What model.toml says of experts, either way. Each run is given its own budget."""
BUDGET = "64 GiB"
"""Of the bundle: more than any model here has."""


class NeuronWeights(Weights):
    """Everything that is derived from a checkpoint of which a share of the neurons is 0."""

    def __init__(self, folder, moec, venvs, args, zeros):
        super().__init__(folder, moec, venvs, args.layers, args.context, False)
        self.zeros, self.peers = zeros, not args.no_llama

    def way(self, way, fmt):
        return self.cache / f"{way.split()[0]}-{fmt}.moec"

    def made(self, fmt):
        """The files that are compared."""
        return [self.way(way, fmt) for way in WAYS] + ([self.gguf(fmt)] if self.peers else [])

    def make(self, fmt, config):
        source, lines = self.cache / "checkpoint", 'rounding = "nearest"\n'
        profile = self.calibrate(fmt, source, shape=config)
        for way in WAYS:
            ours = LINES[way].format(budget=BUDGET) + CALIBRATE.format(profile=profile)
            self.build(fmt, source, self.way(way, fmt), self.context, lines=lines + ours)
        if self.peers:
            log(f"  converting {self.gguf(fmt).name}")
            words = [self.venvs.python("llama"), PEERS / "convert" / "to_gguf.py", source, self.gguf(fmt), fmt]
            self.run([*words, "--direct", "--consume"], "gguf")

    def ready(self, fmt):
        """Makes all of it, since a disk does not hold several. Gives the shape of the model."""
        self.drop()
        source = self.cache / "checkpoint"
        log(f"  writing {self.layers} layers of OLMoE-1B-7B's shapes with {self.zeros:.0%} zeros, routed as in {COUNTS.name}")
        try:
            self.synth(source, self.layers)
            shape = self.shape(source)
            self.make(fmt, shape)
        finally:
            shutil.rmtree(source, ignore_errors=True)
        return shape

    def synth(self, source, layers):
        self.cache.mkdir(parents=True, exist_ok=True)
        words = [self.moec, "synth", "--quiet", "--like", "olmoe", "--layers", layers, "--popularity", COUNTS, "--zeros", self.zeros, source]
        self.run(words, "synth")
