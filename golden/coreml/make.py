"""Writes the packages of this folder with coremltools 9.0, and what they should compute, with numpy in f64.

    python3 -m venv venv && venv/bin/pip install coremltools==9.0 numpy && venv/bin/python make.py

Every package is a folder NAME with `NAME.mlpackage` and `cases.json`: a list of calls, in order, on the same states.
A call is {"function": …, "inputs": {name: {"shape": …, "values": …}}, "outputs": …}. Inputs are fp16 numbers.
"""
import json
import os
import shutil
import sys

import coremltools as ct
import numpy as np
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import Function, Program, types

HERE = os.path.dirname(os.path.abspath(__file__))
TARGET = ct.target.iOS18
rng = None


def f16(x):
    return np.asarray(x, np.float16)


def f64(x):
    return f16(x).astype(np.float64)


def normal(*shape, scale=1.0):
    return f16(rng.normal(size=shape) * scale)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def saved(program, path):
    model = ct.convert(
        program,
        convert_to="mlprogram",
        minimum_deployment_target=TARGET,
        compute_precision=ct.precision.FLOAT16,
        pass_pipeline=ct.PassPipeline.EMPTY,
        skip_model_load=True,
    )
    shutil.rmtree(path, ignore_errors=True)
    model.save(path)


def folder(name):
    path = os.path.join(HERE, name)
    os.makedirs(path, exist_ok=True)
    return path


def cases(name, calls):
    def tensors(of):
        return {k: {"shape": list(v.shape), "values": [float(f"{x:.7g}") for x in np.ravel(v)]} for k, v in of.items()}

    text = [{"function": f, "inputs": tensors(i), "outputs": tensors(o)} for f, i, o in calls]
    with open(os.path.join(HERE, name, "cases.json"), "w") as file:
        json.dump(text, file)


def experts():
    """A group of two experts at two capacities, in two functions that share the weights."""
    hidden, inner, count = 32, 48, 2
    gate, up = normal(count, inner, hidden, scale=0.2), normal(count, inner, hidden, scale=0.2)
    down = normal(count, hidden, inner, scale=0.2)
    out = folder("experts")
    parts, calls = ct.utils.MultiFunctionDescriptor(), []
    for capacity in (16, 32):

        @mb.program(
            input_specs=[mb.TensorSpec((count * capacity, hidden, 1, 1), dtype=types.fp16)], opset_version=TARGET
        )
        def program(x):
            rows = []
            for e, part in enumerate(mb.split(x=x, num_splits=count, axis=0)):
                w = [a[e][:, :, None, None] for a in (gate, up, down)]
                h = mb.mul(x=mb.silu(x=mb.conv(x=part, weight=w[0])), y=mb.conv(x=part, weight=w[1]))
                rows.append(mb.conv(x=h, weight=w[2]))
            return mb.concat(values=rows, axis=0, name="y")

        path = os.path.join(out, f"cap{capacity}.mlpackage")
        saved(program, path)
        parts.add_function(path, "main", f"cap{capacity}")
        x = normal(count, capacity, hidden)
        a, b = (np.einsum("eci,eoi->eco", f64(x), f64(w)) for w in (gate, up))
        y = np.einsum("eci,eoi->eco", a * sigmoid(a) * b, f64(down))
        flat = (count * capacity, hidden, 1, 1)
        calls.append((f"cap{capacity}", {"x": x.reshape(flat)}, {"y": y.reshape(flat)}))
    parts.default_function_name = "cap16"
    path = os.path.join(out, "experts.mlpackage")
    shutil.rmtree(path, ignore_errors=True)
    ct.utils.save_multifunction(parts, path)
    for capacity in (16, 32):
        shutil.rmtree(os.path.join(out, f"cap{capacity}.mlpackage"))
    cases("experts", calls)


def attention():
    """One head over a cache in a state, which two calls fill; rows are normalised first."""
    hidden, context, rows = 32, 64, 16
    gamma, beta = f16(1 + rng.normal(size=hidden) / 10), normal(hidden, scale=0.1)
    weight = {n: normal(hidden, hidden, scale=0.2) for n in "qkv"}

    @mb.program(
        input_specs=[
            mb.TensorSpec((1, 1, rows, hidden), dtype=types.fp16),
            mb.TensorSpec((1, 1, rows, context), dtype=types.fp16),
            mb.TensorSpec((4,), dtype=types.int32),
            mb.TensorSpec((4,), dtype=types.int32),
            mb.StateTensorSpec((2, 1, context, hidden), dtype=types.fp16),
        ],
        opset_version=TARGET,
    )
    def program(x, mask, begin, end, cache):
        n = mb.layer_norm(x=x, axes=[-1], gamma=gamma, beta=beta, epsilon=f16(1e-3))
        q, k, v = (mb.linear(x=n, weight=weight[m]) for m in "qkv")
        old = mb.read_state(input=cache)
        new = mb.slice_update(x=old, update=mb.concat(values=[k, v], axis=0), begin=begin, end=end)
        new = mb.coreml_update_state(state=cache, value=new)
        keys, values = mb.split(x=new, split_sizes=[1, 1], axis=0)
        scores = mb.matmul(x=mb.mul(x=q, y=f16(hidden**-0.5)), y=keys, transpose_y=True)
        p = mb.softmax(x=mb.add(x=scores, y=mask), axis=-1)
        return mb.matmul(x=p, y=values, name="y")

    saved(program, os.path.join(folder("attention"), "attention.mlpackage"))
    cache, calls = np.zeros((2, context, hidden)), []
    for start in (0, 16):
        x = normal(rows, hidden)
        n = f64(x)
        n = (n - n.mean(-1, keepdims=True)) / np.sqrt(n.var(-1, keepdims=True) + 1e-3)
        n = n * f64(gamma) + f64(beta)
        q, k, v = (n @ f64(weight[m]).T for m in "qkv")
        cache[0, start : start + rows], cache[1, start : start + rows] = k, v
        mask = np.where(np.arange(context)[None] <= start + np.arange(rows)[:, None], 0.0, -1e4)
        s = q @ cache[0].T * hidden**-0.5 + mask
        p = np.exp(s - s.max(-1, keepdims=True))
        y = p / p.sum(-1, keepdims=True) @ cache[1]
        inputs = {
            "x": x[None, None],
            "mask": mask[None, None],
            "begin": np.array([0, 0, start, 0]),
            "end": np.array([2, 1, start + rows, hidden]),
        }
        calls.append(("main", inputs, {"y": y[None, None]}))
    cases("attention", calls)


def compressed():
    """The three forms of compressed weights, with integers of 3, 4 and 8 bits."""
    inputs, outputs, rows = 32, 24, 16
    indices = rng.integers(0, 8, size=(outputs, inputs, 1, 1)).astype(np.uint8)
    table = normal(2, 1, 1, 1, 8, 1, scale=0.3)
    codes = rng.integers(-8, 8, size=(outputs, inputs, 1, 1)).astype(np.int8)
    scale = f16(rng.uniform(0.01, 0.05, size=(outputs, 2, 1, 1)))
    offset = rng.integers(-2, 3, size=scale.shape).astype(np.int8)
    bytes_ = rng.integers(0, 256, size=(outputs, inputs, 1, 1)).astype(np.uint8)
    byte_scale = f16(rng.uniform(0.001, 0.005, size=outputs))
    byte_zero = rng.integers(100, 156, size=outputs).astype(np.uint8)
    u3, i4 = types.np_uint3_dtype, types.np_int4_dtype

    @mb.program(input_specs=[mb.TensorSpec((1, inputs, 1, rows), dtype=types.fp16)], opset_version=TARGET)
    def program(x):
        lut = mb.constexpr_lut_to_dense(indices=indices.astype(u3), lut=table)
        block = mb.constexpr_blockwise_shift_scale(data=codes.astype(i4), scale=scale, offset=offset.astype(i4))
        whole = mb.constexpr_blockwise_shift_scale(
            data=bytes_, scale=byte_scale.reshape(-1, 1, 1, 1), offset=byte_zero.reshape(-1, 1, 1, 1)
        )
        names = ("by_table", "by_block", "by_channel")
        return tuple(mb.conv(x=x, weight=w, name=n) for n, w in zip(names, (lut, block, whole)))

    saved(program, os.path.join(folder("compressed"), "compressed.mlpackage"))
    half = np.arange(outputs)[:, None] // (outputs // 2)
    by_block = [np.repeat(a[:, :, 0, 0], inputs // 2, axis=1) for a in (f64(scale), offset)]
    dense = {
        "by_table": f64(table)[half, 0, 0, 0, indices[:, :, 0, 0], 0],
        "by_block": (codes[:, :, 0, 0] - by_block[1]) * by_block[0],
        "by_channel": (bytes_[:, :, 0, 0].astype(float) - byte_zero[:, None]) * f64(byte_scale)[:, None],
    }
    x = normal(1, inputs, 1, rows)
    made = {n: np.einsum("oi,bihs->bohs", w, f64(x)) for n, w in dense.items()}
    cases("compressed", [("main", {"x": x}, made)])


if __name__ == "__main__":
    for make in (experts, attention, compressed):
        if len(sys.argv) < 2 or make.__name__ in sys.argv[1:]:
            rng = np.random.default_rng(1)
            make()
