"""Checkpoints, bundles and GGUF files: made once, kept in the cache folder."""

import json
import shutil
import subprocess
from pathlib import Path

from engines import HERE, Failed, last_line, log
from limits import ENDS, Shape

ROOT = HERE.parent.parent
FERRIS = ROOT / "golden" / "models" / "ferris"
COUNTS = ROOT / "golden" / "traces" / "olmoe_expert_counts.csv"
"""How often tokens chose each expert of OLMoE."""
LAYERS = {"olmoe": 4, "qwen3-30b-a3b": 1, "phi-tiny": 4, "qwen3.6-35b-a3b": 4}
"""Layers that are kept: what 24 GB hold several times."""
CHUNK = 512
"""Tokens of a prompt that moec computes at once, as llama.cpp's n_ubatch."""
TOML = """[model]
source = "{source}"
[shapes]
max_context = {context}
prefill_chunk = {chunk}
decode_batch = [1, 4]
[weights]
experts = "{fmt}"
attention = "{fmt}"
embeddings = "{ends}"
activations = "{activations}"
"""


class Models:
    """Everything that is derived from weights."""

    def __init__(self, cache, moec, venvs):
        self.cache, self.moec, self.venvs = cache, Path(moec), venvs
        stat = self.moec.stat()
        # Bundles are of one compiler and built in less time than they are measured; GGUF files and checkpoints stay.
        self.stamp = f"{stat.st_size:x}-{stat.st_mtime_ns:x}"
        self.built = {}

    def run(self, command, what):
        """Runs a program to its end; gives its stdout."""
        path = self.cache / "log" / f"{what.replace('/', '-')}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w") as err:
            done = subprocess.run([str(c) for c in command], stdout=subprocess.PIPE, stderr=err, text=True)
        if done.returncode:
            raise Failed(f"{what}: {last_line(path)}")
        return done.stdout

    def checkpoint(self, like, layers, context, vocab=None, routed=False):
        """A random model in real shapes; one that is routed chooses experts as often as OLMoE does, others each as often."""
        folder = self.cache / "models" / f"{like}-{layers}{f'-{vocab}' if vocab else ''}{'-routed' if routed else ''}"
        if not folder.exists():
            log(f"  writing {folder.name}")
            folder.parent.mkdir(parents=True, exist_ok=True)
            words = [self.moec, "synth", "--quiet", "--like", like, "--layers", layers, folder]
            words += [*(["--vocab", vocab] if vocab else []), *(["--popularity", COUNTS] if routed else [])]
            self.run(words, f"synth-{folder.name}")
        # Weights are random: the longest prompt that is measured fits any of them.
        path = folder / "config.json"
        config = json.loads(path.read_text())
        if config.get("text_config", config)["max_position_embeddings"] < context:
            config["max_position_embeddings"] = context
            path.write_text(json.dumps(config, indent=2))
        return folder

    def probe(self):
        """The model of one layer whose logits show the error of its experts."""
        folder = self.cache / "models" / "probe"
        if not (folder / "config.json").exists():
            source = self.checkpoint("olmoe", 1, 4096, vocab=2048)
            shutil.rmtree(folder, ignore_errors=True)
            hidden = folder.with_name(".probe")
            shutil.rmtree(hidden, ignore_errors=True)
            self.run([self.venvs.python("llama"), HERE / "convert" / "probe.py", "make", source, hidden], "probe")
            hidden.rename(folder)
            shutil.rmtree(source)
        return folder

    def shape(self, folder):
        return Shape.of(json.loads((folder / "config.json").read_text()))

    def bundle(self, folder, fmt, context, target="native", ends=None, activations="auto", link=False, budget=None):
        """A bundle; builds it unless this very compiler has. With a budget of memory, experts that do not fit stay on the disk."""
        ends = ends or ENDS.get(fmt, fmt)
        name = f"{folder.name}-{fmt}-{ends}-{activations}-{Path(target).stem}-{context}"
        name += f"-{budget.replace(' ', '')}" if budget else ""
        out = self.cache / "bundles" / self.stamp / f"{name}.moec"
        facts = out.with_suffix(".json")
        if not facts.exists():
            self.drop_bundles(but=self.stamp)
            log(f"  building {name}")
            out.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(out, ignore_errors=True)
            toml = out.with_suffix(".toml")
            toml.write_text(TOML.format(
                source=folder.resolve(), context=context, chunk=CHUNK, fmt=fmt, ends=ends, activations=activations,
            ) + (f'[memory]\nbudget = "{budget}"\n' if budget else ""))
            words = [self.moec, "build", "--quiet", toml, "--target", target, "-o", out, "--json"]
            facts.write_text(self.run(words + ([] if link else ["--no-run"]), f"build-{name}"))
        self.built[name] = json.loads(facts.read_text())
        return out

    def drop_bundles(self, but=None):
        """Bundles are large. Those of another compiler are of no use at all."""
        for old in (self.cache / "bundles").glob("*"):
            if old.name != but:
                shutil.rmtree(old)

    def drop(self, folder):
        """Removes a checkpoint and everything that was made of it."""
        for path in [folder, *self.cache.glob(f"gguf/{folder.name}-*"), *self.cache.glob(f"openvino/{folder.name}")]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def gguf_path(self, folder, fmt):
        return self.cache / "gguf" / f"{folder.name}-{fmt}.gguf"

    def gguf(self, folder, fmt, exact_ends=False):
        path = self.gguf_path(folder, fmt)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            if fmt != "bf16":
                self.gguf(folder, "bf16", exact_ends)
            log(f"  converting {path.name}")
            words = [self.venvs.python("llama"), HERE / "convert" / "to_gguf.py", folder, path, fmt]
            self.run(words + (["--exact-ends"] if exact_ends else []), f"gguf-{path.stem}")
        return path

    def relabelled(self, source):
        """OLMoE under a name that ik_llama.cpp knows: a copy, gone with the bundles of its format."""
        out = self.cache / "bundles" / self.stamp / f"{source.stem}-qwen3moe.gguf"
        if not out.exists():
            log(f"  converting {out.name}")
            out.parent.mkdir(parents=True, exist_ok=True)
            words = [self.venvs.python("llama"), HERE / "convert" / "to_gguf.py", source, out, "qwen3moe"]
            self.run(words, f"gguf-{out.stem}")
        return out

    def is_olmoe(self, folder):
        return json.loads((folder / "config.json").read_text())["model_type"] == "olmoe"

    def openvino(self, folder):
        out = self.cache / "openvino" / folder.name
        if not (out / "openvino_model.xml").exists():
            log(f"  exporting {folder.name} for OpenVINO")
            python = self.venvs.python("openvino")
            self.run([python, HERE / "convert" / "to_openvino.py", folder, out], f"openvino-{folder.name}")
        return out

    def source(self, peer, folder, fmt, exact_ends=False):
        """What a peer loads."""
        if peer == "ik":
            source = self.gguf(folder, fmt, exact_ends)
            return self.relabelled(source) if self.is_olmoe(folder) else source
        if peer.startswith("llama"):
            return self.gguf(folder, fmt, exact_ends)
        return self.openvino(folder) if peer == "openvino" else folder

    def layer_error(self, path, *flags):
        """Relative error of a layer's output against f64, from what an engine gave for the probe."""
        words = [self.venvs.python("llama"), HERE / "convert" / "probe.py", "error", self.probe(), path, *flags]
        return json.loads(self.run(words, "error"))["error"]
