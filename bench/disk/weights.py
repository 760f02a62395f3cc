"""The model: random weights with a recorded routing, as a bundle and as GGUF, of equal bits.

The checkpoint in bf16 is twice as large as either. It is written, compiled, converted, and gone: the conversion gives
each of its files back once it has read it. Never more than checkpoint and bundle are on the disk.
"""

import csv
import json
import shutil
from pathlib import Path

from common import prompt_ids
from engines import HERE as PEERS
from engines import Failed, log
from limits import BITS, Shape
from models import COUNTS, Models

FORMAT = {8: "q8", 4: "q4"}
POLICY = "lfu half_life=0 bypass=1"
"""What keeps experts: routing that repeats only by popularity, for all time, is what this policy is the best for."""
LINES = f'[memory]\nbudget = "4.5 GiB"\nprefetch = 1\npolicy = "{POLICY}"\n[decode]\nbig_little = true\n'
"""What model.toml says besides. Each run is given its own budget, and whether to try fewer experts first."""
CHUNK = 64
"""Tokens of a prompt that an engine computes at once: few, since its buffers grow with them."""
TOML = """[model]
source = "{source}"
[shapes]
max_context = {context}
prefill_chunk = {chunk}
decode_batch = {batch}
[weights]
experts = "{fmt}"
attention = "{fmt}"
embeddings = "{fmt}"
"""
READ = 2048
"""Tokens that are read beforehand, to see which experts are used most: random ones, and others than those that are decoded."""
CALIBRATE = '[calibrate]\nprofile = "{profile}"\n'
SPARE = 2 << 30
"""Bytes of disk that are left alone."""


class Weights(Models):
    """Everything that is derived from the checkpoint."""

    def __init__(self, folder, moec, venvs, layers, context, reuse):
        super().__init__(folder, moec, venvs)
        self.layers, self.context, self.reuse = layers, context, reuse

    def bundle(self, fmt):
        return self.cache / f"moec-{fmt}.moec"

    def gguf(self, fmt):
        return self.cache / f"olmoe-{fmt}.gguf"

    def ready(self, fmt):
        """Makes what is missing; all of it, since the checkpoint is not kept. Gives the shape of the model."""
        facts, made = self.cache / f"{fmt}.json", {"moec": self.stamp, "layers": self.layers, "context": self.context}
        found = json.loads(facts.read_text()) if facts.exists() else None
        if found and (found["made"] == made or self.reuse):
            return Shape.of(found["config"])
        self.drop()
        config = self.make(fmt)
        facts.write_text(json.dumps({"made": made, "config": config}))
        return Shape.of(config)

    def make(self, fmt):
        source = self.cache / "checkpoint"
        log(f"  writing {self.layers} layers of OLMoE-1B-7B's shapes, routed as in {COUNTS.name}")
        self.synth(source, self.layers)
        config = json.loads((source / "config.json").read_text())
        size = sum(path.stat().st_size for path in source.iterdir())
        # Calibration compiles the checkpoint as it is, and removes that again.
        room = shutil.disk_usage(self.cache).free - size - SPARE
        try:
            if room < 0:
                raise Failed(f"{self.cache} lacks {-room / 1e9:.1f} GB: give another folder with --cache")
            profile = self.calibrate(fmt, source, shape=Shape.of(config))
            # Rounded to the nearest codes, as the other engine does.
            lines = 'rounding = "nearest"\n' + LINES + CALIBRATE.format(profile=profile)
            self.build(fmt, source, self.bundle(fmt), self.context, lines=lines)
            log(f"  converting {self.gguf(fmt).name}")
            words = [self.venvs.python("llama"), PEERS / "convert" / "to_gguf.py", source, self.gguf(fmt), fmt]
            self.run([*words, "--direct", "--consume"], "gguf")
        finally:
            shutil.rmtree(source)
        return config

    def synth(self, source, layers):
        self.cache.mkdir(parents=True, exist_ok=True)
        words = [self.moec, "synth", "--quiet", "--like", "olmoe", "--layers", layers, "--popularity", COUNTS, source]
        self.run(words, "synth")

    def calibrate(self, fmt, source, shape):
        """A profile of the routing of random tokens."""
        log(f"  reading {READ} tokens")
        ids, profile, toml = (self.cache / name for name in ("calibrate.ids", "calibrate.trace", "calibrate.toml"))
        ids.write_text(" ".join(map(str, prompt_ids(1, READ, shape.vocab))))
        toml.write_text(TOML.format(source=source.resolve(), context=512, chunk=512, batch=[1], fmt=fmt))
        self.run([self.moec, "calibrate", "--quiet", toml, "--ids", ids, "--tokens", READ, "-o", profile], "calibrate")
        return profile

    def build(self, fmt, source, bundle, context, batch=1, lines=""):
        """A bundle that decodes one sequence, or as many as `batch` too."""
        log(f"  building {bundle.name}")
        toml = self.cache / "model.toml"
        sizes = sorted({1, batch})
        toml.write_text(TOML.format(source=source.resolve(), context=context, chunk=CHUNK, batch=sizes, fmt=fmt) + lines)
        self.run([self.moec, "build", "--quiet", toml, "-o", bundle], f"build-{bundle.stem}")

    def drop(self):
        """Removes all that was made, of whatever format."""
        shutil.rmtree(self.cache / "checkpoint", ignore_errors=True)
        for path in [*self.cache.glob("*.moec"), *self.cache.glob("*.gguf"), *self.cache.glob(".*.gguf"), *self.cache.glob("q?.json")]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def files(path):
    """A file, or the files of a folder."""
    return [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else [path]


def shares(layers, experts):
    """Share of the choices that each expert gets, layer by layer, largest first: as `moec synth` is requested."""
    counts = {}
    with open(COUNTS) as file:
        for row in csv.DictReader(file):
            of = counts.setdefault(int(row["layer"]), [0] * experts)
            of[int(row["expert"])] += int(row["count"])
    deepest = max(counts)
    place = lambda layer: layer * deepest / max(layers - 1, 1)
    nearest = lambda layer: min(sorted(counts), key=lambda known: abs(known - place(layer)))
    of_layers = [counts[nearest(layer)] for layer in range(layers)]
    return [sorted((n / sum(of) for n in of), reverse=True) for of in of_layers]


def least_read(shape, fmt, cap):
    """Bytes that a token reads, where as many experts as fit stay in memory: any, or those that are chosen most often.

    An expert that is chosen comes from the disk unless it is in memory. Everything else (attention, embeddings, routers)
    is taken to stay there. A cache that changes its content can do better where neighbouring tokens choose alike."""
    expert = shape.expert * BITS[fmt] / 8
    rest = shape.mixers * BITS[fmt] / 8 + 4 * shape.layers * shape.experts * shape.hidden
    rest += 2 * shape.vocab * shape.hidden * BITS[fmt] / 8
    total = shape.layers * shape.experts
    held = total if cap is None else max(0, min(total, int((cap - rest) / expert)))
    every = sorted((s for of in shares(shape.layers, shape.experts) for s in of), reverse=True)
    token = shape.k * expert
    return {"uniform": token * shape.layers * (1 - held / total), "popular": token * sum(every[held:])}
