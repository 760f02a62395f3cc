"""Writes Core ML packages from programs that moec has planned.

Every operator of a program is final: no pass of coremltools runs, shapes are only compared. What a package
holds is a function of the program and the weight files alone, to the byte.
"""

import json
import os
import shutil
import sys
import uuid

PROTOCOL = 2
COREMLTOOLS = "9.0"
# Version of the format of models: iOS 18, macOS 15, the first with states and several functions.
SPECIFICATION = 9
FOLDER = "com.apple.CoreML"

# Attributes that Core ML's compiler wants spelled out, with the only values that a program has.
IMPLIED = {
    "conv": {"strides": [1, 1], "pad_type": "valid", "pad": [0, 0, 0, 0], "dilations": [1, 1], "groups": 1},
    "concat": {"interleave": False},
}
# Operators that coremltools calls otherwise than MIL.
CALLED = {"write_state": "coreml_update_state"}
# The parameter that coremltools calls otherwise.
RENAMED = {("read_state", "state"): "input"}


class Refused(Exception):
    """What went wrong, with what to do about it."""

    def __init__(self, kind, message, hint=None):
        super().__init__(message)
        self.kind, self.hint = kind, hint


def versions():
    """Imports coremltools; gives the versions of everything that decides what is written."""
    try:
        import coremltools
        import numpy
    except ImportError as e:
        raise Refused("missing", f"{e} (Python {sys.version.split()[0]})") from e
    if coremltools.__version__ != COREMLTOOLS:
        raise Refused("version", f"coremltools is {coremltools.__version__}, {COREMLTOOLS} is needed")
    return {
        "protocol": PROTOCOL,
        "python": sys.version.split()[0],
        "coremltools": coremltools.__version__,
        "numpy": numpy.__version__,
    }


class Weights:
    """Maps weight files, each once."""

    def __init__(self, table, folder):
        import numpy

        self.numpy, self.table, self.folder, self.files, self.arrays = numpy, table, folder, {}, {}

    def get(self, index):
        """The array of an entry of the weight table, with its scales where it is codes, else None."""
        if index not in self.arrays:
            weight = self.table[index]
            shape, blocks = tuple(weight["shape"]), weight.get("blocks")
            if blocks is None:
                self.arrays[index] = self.map(weight, weight["offset"], shape, self.numpy.float16), None
            else:
                codes = self.map(weight, weight["offset"], shape, self.numpy.int8)
                of = (shape[0], shape[1] // blocks["size"]) + shape[2:]
                self.arrays[index] = codes, self.map(weight, blocks["scales"], of, self.numpy.float16)
        return self.arrays[index]

    def map(self, weight, offset, shape, dtype):
        """Maps an array and checks it. It stays in its file until it is written."""
        name = weight["file"]
        if name not in self.files:
            path = os.path.join(self.folder, name)
            try:
                self.files[name] = self.numpy.memmap(path, dtype=self.numpy.uint8, mode="r")
            except (OSError, ValueError) as e:
                raise Refused("weights", f"`{path}` cannot be mapped: {e}") from e
        size = self.numpy.dtype(dtype).itemsize
        for n in shape:
            size *= n
        raw = self.files[name][offset : offset + size]
        if len(raw) != size:
            raise Refused("weights", f"`{name}` ends before byte {offset + size} of weight `{weight['name']}`")
        array = raw.view(dtype).reshape(shape)
        if not self.numpy.isfinite(array).all():
            raise Refused("weights", f"weight `{weight['name']}` has values that f16 cannot hold",
                          "keep this layer on another unit, or scale the weight")
        return array


def function(description, weights):
    """One function of a program in coremltools' form."""
    import numpy
    from coremltools.converters.mil.mil import Builder as mb
    from coremltools.converters.mil.mil import Function, types
    from coremltools import target

    values = description["values"]
    index = lambda text: int(text[1:])

    def placeholder(make, v):
        value = values[index(v)]
        return value["name"], make(value["shape"], dtype=types.fp16)

    inputs = dict(placeholder(mb.placeholder, v) for v in description["inputs"])
    inputs.update(placeholder(mb.state_tensor_placeholder, v) for v in description["states"])
    made = {}
    with Function(inputs, opset_version=target.iOS18) as built:
        for v in description["inputs"] + description["states"]:
            made[index(v)] = built.inputs[values[index(v)]["name"]]

        def const(array, label, key):
            made = mb.const(val=array, name=label)
            # Constants with the same key have the same bytes, in every function of the package.
            made.op.weight_id = key
            return made

        def resolve(argument):
            if isinstance(argument, str) and argument.startswith("%"):
                return made[index(argument)]
            if isinstance(argument, list):
                return [resolve(a) for a in argument]
            return numpy.float16(argument) if isinstance(argument, float) else argument

        for op in description["ops"]:
            name, args, results = op["op"], op["args"], [index(v) for v in op["results"]]
            label = values[results[0]]["name"] if results else f"{name}_{index(args['state'])}"
            if name == "const":
                shape = values[results[0]]["shape"]
                if "weight" in args:
                    (array, scales), key = weights.get(args["weight"]), f"weight {args['weight']}"
                else:
                    array, scales = numpy.full(shape, args["splat"], dtype=numpy.float16), None
                    key = f"splat {args['splat']} {shape}"
                if scales is None:
                    outs = const(array if shape else array[()], label, key)
                else:
                    if weights.table[args["weight"]]["blocks"]["bits"] == 4:
                        array = array.astype(types.nptype_from_builtin(types.int4))
                    outs = mb.constexpr_blockwise_shift_scale(
                        data=const(array, f"{label}_codes", f"{key} codes"),
                        scale=const(scales, f"{label}_scales", f"{key} scales"),
                        name=label,
                    )
            else:
                arguments = {RENAMED.get((name, k), k): resolve(a) for k, a in args.items()}
                build = getattr(mb, CALLED.get(name, name))
                outs = build(**{**IMPLIED.get(name, {}), **arguments}, name=label)
            if not results:
                continue
            outs = outs if isinstance(outs, (tuple, list)) else [outs]
            for out, v in zip(outs, results, strict=True):
                value = values[v]
                if list(out.shape) != value["shape"]:
                    raise Refused("shape", f"`{value['name']}` ({name}) is {list(out.shape)} for coremltools, "
                                           f"{value['shape']} in the program")
                out.name = value["name"]
                made[v] = out
        built.set_outputs([made[index(v)] for v in description["outputs"]])
    return built


def describe(description, program, about):
    """Says what a package is, and what its inputs, results and states are, as Core ML's tools show it."""
    metadata = description.metadata
    metadata.shortDescription, metadata.author = program["description"], about["author"]
    metadata.license, metadata.versionString = about["license"], about["version"]
    for function, described in zip(program["functions"], description.functions, strict=True):
        texts = {v["name"]: v["about"] for v in function["values"] if "about" in v}
        for feature in [*described.input, *described.output, *described.state]:
            feature.shortDescription = texts.get(feature.name, "")


def emit(program, folder, out, about):
    """Writes one package; gives the bytes of its weights and in all.

    A package that is there is replaced when the new one is whole.
    """
    from coremltools.converters.mil.backend.mil.load import load as to_proto
    from coremltools.converters.mil.mil import Program

    if not out.endswith(".mlpackage"):
        raise Refused("write", f"`{out}` does not end in .mlpackage", "Core ML takes no other name")
    built = Program()
    weights = Weights(program["weights"], folder)
    for description in program["functions"]:
        built.add_function(description["name"], function(description, weights))
    built.default_function_name = program["functions"][0]["name"]
    built.export_as_multifunction = True
    built.skip_all_passes = True

    partial = out + ".partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        data = os.path.join(partial, "Data", FOLDER)
        os.makedirs(os.path.join(data, "weights"))
        proto = to_proto(built, os.path.join(data, "weights"), specification_version=SPECIFICATION)
        describe(proto.description, program, about)
        with open(os.path.join(data, "model.mlmodel"), "wb") as f:
            f.write(proto.SerializeToString(deterministic=True))
        with open(os.path.join(partial, "Manifest.json"), "w", encoding="utf-8") as f:
            json.dump(manifest(program["name"]), f, indent=4, sort_keys=True)
            f.write("\n")
        sizes = [os.path.getsize(os.path.join(d, f)) for d, _, files in os.walk(partial) for f in files]
        blob = os.path.join(data, "weights", "weight.bin")
        stored = os.path.getsize(blob) if os.path.exists(blob) else 0
        shutil.rmtree(out, ignore_errors=True)
        os.replace(partial, out)
    except OSError as e:
        raise Refused("write", f"`{out}` cannot be written: {e}") from e
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return {"weight_bytes": stored, "bytes": sum(sizes)}


def manifest(name):
    """The package's table of contents. Identifiers are made of the names, so they are the same every time."""
    space = uuid.uuid5(uuid.NAMESPACE_URL, f"moec/coreml/{name}")
    entry = lambda path, what: (
        str(uuid.uuid5(space, path)).upper(),
        {"author": FOLDER, "description": what, "name": path.rpartition("/")[2], "path": f"{FOLDER}/{path}"},
    )
    model, blob = entry("model.mlmodel", "CoreML Model Specification"), entry("weights", "CoreML Model Weights")
    return {
        "fileFormatVersion": "1.0.0",
        "itemInfoEntries": dict([model, blob]),
        "rootModelIdentifier": model[0],
    }


def run(jobs, say):
    """Writes every package that is requested and says each."""
    asked = jobs.get("protocol")
    if asked != PROTOCOL:
        raise Refused("version", f"moec speaks version {asked} of the protocol, the helper {PROTOCOL}")
    for job in jobs["packages"]:
        sizes = emit(job["program"], job["weights"], job["out"], jobs["about"])
        say({"event": "package", "name": job["program"]["name"], "out": job["out"], **sizes})


def main(arguments, lines):
    """`versions`, or `emit` with jobs on stdin. What there is to say goes to `lines`; gives the exit status."""

    def say(event):
        print(json.dumps(event), file=lines, flush=True)

    try:
        found = versions()
        if arguments == ["versions"]:
            say({"event": "versions", **found})
        elif arguments == ["emit"]:
            run(json.load(sys.stdin), say)
            say({"event": "done"})
        else:
            raise Refused("usage", "usage: moec-coreml --venv FOLDER versions | emit < JOBS.json")
        return 0
    except Refused as e:
        say({"event": "error", "kind": e.kind, "message": str(e), "hint": e.hint})
    except Exception as e:  # of coremltools: what it says is all there is
        say({"event": "error", "kind": "coremltools", "message": f"{type(e).__name__}: {e}", "hint": None})
    return 1
