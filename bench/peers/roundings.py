"""What formats of fewer bits lose on ferris: moec's, and those of other engines, rounded by their own code and read by moec.

One tool measures all: perplexity, divergence and the same choice are those of `moec eval --against` the model in bf16.
"""

import json

from engines import HERE, Failed, log
from models import FERRIS
from table import cells, number, ordered, rule

TYPES = {
    "moec": ["q8", "q6", "q5", "q4n", "q4", "q3", "q2", "q2s"],
    "llama": ["q8_0", "q6_K", "q5_K", "q4_K", "iq4_xs", "q3_K", "iq3_s", "iq3_xxs", "q2_K", "iq2_s", "iq2_xs", "iq2_xxs"],
    "ik": ["iq6_k", "iq5_k", "iq4_k", "iq4_ks", "iq4_kt", "iq3_k", "iq3_kt", "iq2_k", "iq2_ks", "iq2_kt"],
}
"""Formats of each engine."""
SCOPES = {"experts": "experts", "all": "experts and attention"}
TOML = """[model]
source = "{source}"
[shapes]
max_context = 1024
[weights]
activations = "f32"
{weights}"""


class Roundings:
    def __init__(self, args, models, venvs, rows, failures):
        self.moec, self.models, self.venvs, self.rows, self.failures = args.moec.resolve(), models, venvs, rows, failures
        self.peers = [p for p in TYPES if p == "moec" or p in args.peers]
        self.folder = args.cache.resolve() / "roundings"
        self.folder.mkdir(parents=True, exist_ok=True)

    def build(self, source, weights, out):
        toml, bundle = self.folder / "model.toml", self.folder / out
        toml.write_text(TOML.format(source=source, weights=weights))
        self.models.run([self.moec, "build", "--quiet", "--no-run", toml, "-o", bundle], "build-rounding")
        return bundle

    def lost(self, bundle, exact):
        words = [self.moec, "eval", "--quiet", bundle, "--against", exact, "--text", FERRIS / "eval" / "text.txt", "--json"]
        return json.loads(self.models.run(words, "eval-rounding"))

    def rounded(self, engine, kind, scope, moments):
        """A build whose matrices an engine has rounded, and the bits that each weight takes there."""
        library = self.library(engine)
        source = self.folder / "rounded"
        # The script reads checkpoints as the converter to GGUF does, whose packages are llama.cpp's.
        words = [self.venvs.python("llama"), HERE / "convert" / "rounded.py", FERRIS, moments, source, library, kind, scope]
        # Libraries may print before it.
        bits = json.loads(self.models.run(words, "rounded").splitlines()[-1])["bits"]
        exact = "".join(f'{part} = "f32"\n' for part in ("experts", "attention", "embeddings"))
        return self.build(source, exact, "rounding.moec"), bits

    def library(self, engine):
        folder = self.venvs.python(engine).parent.parent
        found = [p for name in ("libggml-base.so", "libggml.so") for p in sorted(folder.rglob(name))]
        if not found:
            raise Failed("its package has no libggml")
        return found[0]

    def run(self, bits_of):
        """Every format, first on the experts alone, then on attention too."""
        exact = self.build(FERRIS, "", "exact.moec")
        trace, moments = self.folder / "ferris.trace", self.folder / "moments.json"
        text = FERRIS / "eval" / "calibration.txt"
        self.models.run([self.moec, "calibrate", "--quiet", self.folder / "model.toml", "--text", text, "-o", trace], "calibrate")
        self.models.run([self.moec, "inspect", trace, "--moments", moments, "--json"], "inspect")
        base = self.lost(exact, exact)["perplexity"]
        profile = f'[calibrate]\nprofile = "{trace}"\ntext = ["{text}"]\n'
        for scope in SCOPES:
            parts = ("experts",) if scope == "experts" else ("experts", "attention")
            for engine in self.peers:
                for kind in TYPES[engine]:
                    try:
                        if engine == "moec":
                            weights = "".join(f'{part} = "{kind}"\n' for part in parts)
                            bundle, bits = self.build(FERRIS, weights + profile, "rounding.moec"), bits_of[kind]
                        else:
                            bundle, bits = self.rounded(engine, kind, scope, moments)
                        found = self.lost(bundle, exact)
                    except Failed as e:
                        log(f"  {engine} {kind}: {e}")
                        self.failures[f"{engine} {kind} {scope}"] = str(e)
                        continue
                    row = {"section": "roundings", "engine": engine, "format": kind, "scope": scope, "bits": bits,
                           "increase": found["perplexity"] / base - 1, "divergence": found["divergence"],
                           "same": found["same_choice"]}
                    self.rows.append(row)
                    log(f"  {SCOPES[scope]} {engine} {kind}, {bits:.2f} bits: {100 * row['increase']:+.2f} %, {row['divergence']:.2e}")


def markdown(results, peers):
    """Formats by bits, the most first; what each loses on the experts, and on attention too."""
    rows = results["rows"]
    heads = [f"{scope}: {what}" for scope in SCOPES.values() for what in ("perplexity", "divergence", "same choice")]
    out = [f"Written by `cargo xtask bench-peers --roundings`, {results['conditions']['date']}.", "",
           cells("format", "bits per weight", *heads), rule(2 + len(heads))]
    names = ordered((r["engine"], r["format"], r["bits"]) for r in sorted(rows, key=lambda r: (-round(r["bits"], 1), r["engine"])))
    for engine, kind, bits in names:
        found = {r["scope"]: r for r in rows if (r["engine"], r["format"], r["bits"]) == (engine, kind, bits)}
        of = lambda r: [f"{100 * r['increase']:+.2f} %", f"{1e3 * r['divergence']:.2f}e-3", f"{100 * r['same']:.1f} %"] if r else ["–"] * 3
        title = f"**moec** {kind}" if engine == "moec" else f"{peers[engine].title} {kind}"
        out.append(cells(title, number(bits), *[cell for scope in SCOPES for cell in of(found.get(scope))]))
    return "\n".join(out) + "\n"
