#!/usr/bin/env python3
"""Writes checkpoints in quantised layouts: the second layer of ../hf/olmoe, each matrix by the tools of its layout.

    pip install torch transformers==5.24.0 compressed-tensors==0.20.0 nvidia-modelopt==0.47.0 autoawq==0.2.9 --no-deps && python make.py

For each layout NAME.safetensors holds the tensors that stand in place of the layer's matrices, with its `quantization_config` in the
metadata, and hashes.json the SHA-256 of each matrix, dequantised to f32 as it is stored in a plain checkpoint. Scales are stored in
the type that the tools store; they are widened to f32 before the tool dequantises, so that no product is rounded to 16 bits.

Who packs and dequantises: compressed-tensors' compressors for its formats and FP8 blocks, ModelOpt's NVFP4QTensor for its NVFP4,
transformers for the MXFP4 of gpt-oss.
AutoAWQ packs on a GPU alone: here AWQ is packed by its published order, and dequantised by AutoAWQ's
`dequantize_gemm`. GPTQ is packed and dequantised as `BaseQuantLinear.pack_original` and `dequantize_weight` of GPTQModel 7.7 do,
written anew, because the package wants a GPU.
"""

import hashlib
import importlib.util
import json
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
SOURCE = load_file(HERE / "../hf/olmoe/model.safetensors")
NAMES = sorted(n for n in SOURCE if n.startswith("model.layers.1.") and "_proj.weight" in n)


def awq_tools():
    root = Path(importlib.util.find_spec("awq").submodule_search_locations[0])
    spec = importlib.util.spec_from_file_location("packing_utils", root / "utils/packing_utils.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks(w, rows, cols):
    """Largest and smallest number of each block."""
    high, wide = -(-w.shape[0] // rows), -(-w.shape[1] // cols)
    padded = torch.zeros(high * rows, wide * cols)
    padded[: w.shape[0], : w.shape[1]] = w
    grid = padded.view(high, rows, wide, cols).permute(0, 2, 1, 3).reshape(high, wide, -1)
    return grid.amin(-1), grid.amax(-1)


def compressed(fmt, dtype, **args):
    """A format of compressed-tensors: its tensors by suffix, and the matrix."""
    args = QuantizationArgs(**args)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    size = {"tensor": (1 << 20, 1 << 20), "channel": (1, 1 << 20), "block": tuple(args.block_structure or ())}

    def pack(w):
        rows, cols = size.get(args.strategy) or (1, args.group_size)
        low, high = blocks(w, min(rows, w.shape[0]), min(cols, w.shape[1]))
        scale, zero = calculate_qparams(low, high, args)
        scale = scale.to(dtype)
        if args.strategy == "tensor":
            scale, zero = scale.reshape(1), zero.reshape(1)
        state = {"weight": w, "weight_scale": scale.float(), "weight_zero_point": zero.to(torch.int8)}
        if args.symmetric:
            del state["weight_zero_point"]
        kind = BaseCompressor.get_value_from_registry(fmt)
        out = kind.compress(state, scheme)
        back = kind.decompress(out, scheme)["weight"]
        out["weight_scale"] = scale
        return {f".{k}": v for k, v in out.items()}, back

    weights = json.loads(args.model_dump_json(exclude_none=True, include={
        "num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic"}))
    group = {"targets": ["Linear"], "weights": weights}
    config = {"quant_method": "compressed-tensors", "format": fmt, "quantization_status": "compressed",
              "config_groups": {"group_0": group}, "ignore": ["lm_head", "re:model.layers.0.*", "re:.*mlp.gate$"]}
    return pack, config


def fp8(rows, cols):
    """As transformers stores FP8: the inverse of the scale of each block."""
    pack_one, _ = compressed("float-quantized", torch.float32, num_bits=8, type="float", strategy="block",
                             block_structure=[rows, cols])

    def pack(w):
        out, back = pack_one(w)
        return {".weight": out[".weight"], ".weight_scale_inv": out[".weight_scale"]}, back

    return pack, {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                  "weight_block_size": [rows, cols], "modules_to_not_convert": ["lm_head", "gate"]}


def fp8_static():
    """One scale for a matrix, with one for its inputs, as AutoFP8 and ModelOpt store it."""
    pack_one, _ = compressed("float-quantized", torch.float32, num_bits=8, type="float", strategy="tensor")

    def pack(w):
        out, back = pack_one(w)
        return {".weight": out[".weight"], ".weight_scale": out[".weight_scale"].reshape(()),
                ".input_scale": torch.tensor(0.5)}, back

    return pack, {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}


def nvfp4():
    args = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)

    def pack(w):
        top = (448.0 * 6.0 / w.abs().max()).reshape(1)
        low, high = blocks(w, 1, 16)
        scale = (torch.maximum(-low, high) / 6.0 * top).to(torch.float8_e4m3fn).float()
        kind = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
        out = kind.compress({"weight": w, "weight_scale": scale, "weight_global_scale": top}, scheme)
        codes = unpack_fp4_from_uint8(out["weight_packed"], *w.shape, dtype=torch.float32)
        back = dequantize(codes, out["weight_scale"].float(), args=args, dtype=torch.float32, global_scale=top)
        return {f".{k}": v for k, v in out.items()}, back

    _, config = compressed("nvfp4-pack-quantized", torch.float32, num_bits=4, type="float",
                           strategy="tensor_group", group_size=16, symmetric=True)
    return pack, config


def mxfp4():
    """Groups of 32 input channels with a power of two each; matrices with other rows stay plain."""
    args = QuantizationArgs(num_bits=4, type="float", strategy="group", group_size=32, symmetric=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)

    def pack(w):
        if w.shape[1] % 32:
            return None
        low, high = blocks(w, 1, 32)
        scale = torch.exp2(torch.floor(torch.log2(torch.maximum(-low, high))) - 2)
        kind = BaseCompressor.get_value_from_registry("mxfp4-pack-quantized")
        out = kind.compress({"weight": w, "weight_scale": scale}, scheme)
        codes = unpack_fp4_from_uint8(out["weight_packed"], *w.shape, dtype=torch.float32)
        scale = kind._decompress_scale(out["weight_scale"], torch.float32)
        back = dequantize(codes, scale, args=args, dtype=torch.float32)
        return {f".{k}": v for k, v in out.items()}, back

    _, config = compressed("mxfp4-pack-quantized", torch.float32, num_bits=4, type="float", strategy="group",
                           group_size=32, symmetric=True)
    return pack, config


def gpt_oss():
    """Random blocks and scales as gpt-oss stores experts, and the numbers that transformers makes of them, [experts, out, in]."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    random = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (2, 8, 2, 16), generator=random, dtype=torch.uint8)
    scales = torch.randint(100, 150, (2, 8, 2), generator=random, dtype=torch.uint8)
    numbers = convert_moe_packed_tensors(packed, scales, dtype=torch.float32).transpose(1, 2)
    tensors = {"w_blocks": packed, "w_scales": scales, "numbers": numbers.contiguous()}
    save_file(tensors, HERE / "gpt_oss_mxfp4.safetensors")


def nvfp4_modelopt():
    def pack(w):
        q, scale, double = NVFP4QTensor.quantize(w, 16)
        back = q.dequantize(torch.float32, scale=scale, double_scale=double, block_sizes={-1: 16})
        tensors = {".weight": q._quantized_data, ".weight_scale": scale, ".weight_scale_2": double,
                   ".input_scale": torch.tensor(0.25)}
        return tensors, back

    return pack, {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"],
                  "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 16}}}}


def affine(w, size, bits):
    """Unsigned codes with zero points, in groups of input channels: codes and, for each group, scales and zero points, [in, out]."""
    low, high = blocks(w, 1, size)
    low, high = low.clamp(max=0).T, high.clamp(min=0).T
    scale = ((high - low) / (2**bits - 1)).clamp(min=1e-5).half()
    zero = (-low / scale.float()).round().clamp(0, 2**bits - 1).int()
    return scale, zero


def quantise(w, scale, zero, group, bits):
    return (w.T / scale.float()[group] + zero[group]).round().clamp(0, 2**bits - 1).int()


def words(codes, bits, axis, order=None):
    """Codes in words of 32 bits along an axis: code `order[i]` at place i."""
    per = 32 // bits
    order = order or list(range(per))
    codes = codes.movedim(axis, -1).to(torch.int64)
    codes = codes.reshape(*codes.shape[:-1], -1, per)[..., order]
    packed = sum(codes[..., i] << (bits * i) for i in range(per))
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
    return packed.movedim(-1, axis).contiguous()


def awq(size):
    tools = awq_tools()

    def pack(w):
        scale, zero = affine(w, size, 4)
        codes = quantise(w, scale, zero, torch.arange(w.shape[1]) // size, 4)
        qweight, qzeros = (words(x, 4, 1, tools.AWQ_ORDER) for x in (codes, zero))
        back = tools.dequantize_gemm(qweight, qzeros, scale.float(), 4, size).T
        return {".qweight": qweight, ".qzeros": qzeros, ".scales": scale}, back

    return pack, {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm", "zero_point": True,
                  "modules_to_not_convert": ["gate"]}


def gptq(bits, group_size, v2=False, act_order=False, sym=False):
    def pack(w):
        size = group_size if group_size > 0 else w.shape[1]
        group = torch.arange(w.shape[1]) // size
        if act_order:
            group = group[torch.randperm(w.shape[1], generator=torch.Generator().manual_seed(len(w)))]
        scale, zero = affine(w[:, group.argsort(stable=True)], size, bits)
        if sym:
            low, high = blocks(w, 1, size)
            scale = (torch.maximum(-low, high).T / (2 ** (bits - 1) - 1)).half()
            zero = torch.full_like(zero, 2 ** (bits - 1))
        elif not v2:
            zero = zero.clamp(min=1)  # `gptq` stores them less 1, and cannot store 0.
        codes = quantise(w, scale, zero, group, bits)
        back = ((codes - zero[group]).float() * scale.float()[group]).T
        stored = zero if v2 else zero - 1
        return {".qweight": words(codes, bits, 0), ".qzeros": words(stored, bits, 1), ".scales": scale,
                ".g_idx": group.int()}, back

    return pack, {"quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": act_order, "sym": sym,
                  "checkpoint_format": "gptq_v2" if v2 else "gptq"}


LAYOUTS = {
    "fp8_128": fp8(128, 128),
    "fp8_32": fp8(32, 32),
    "fp8_tensor": fp8_static(),
    "fp8_channel": compressed("float-quantized", torch.bfloat16, num_bits=8, type="float", strategy="channel"),
    "int8_channel": compressed("int-quantized", torch.bfloat16, num_bits=8, type="int", strategy="channel"),
    "int8_zeros": compressed("int-quantized", torch.float32, num_bits=8, type="int", strategy="channel", symmetric=False),
    "packed4_group": compressed("pack-quantized", torch.bfloat16, num_bits=4, type="int", strategy="group", group_size=16),
    "packed4_zeros": compressed("pack-quantized", torch.float16, num_bits=4, type="int", strategy="group", group_size=16,
                                symmetric=False),
    "packed4_channel": compressed("pack-quantized", torch.bfloat16, num_bits=4, type="int", strategy="channel"),
    "packed8_channel": compressed("pack-quantized", torch.bfloat16, num_bits=8, type="int", strategy="channel"),
    "nvfp4": nvfp4(),
    "mxfp4": mxfp4(),
    "nvfp4_modelopt": nvfp4_modelopt(),
    "awq": awq(16),
    "gptq": gptq(4, 16),
    "gptq_sym": gptq(4, -1, sym=True),
    "gptq_act_order": gptq(8, 16, act_order=True),
    "gptq_v2": gptq(2, 16, v2=True),
}


def main() -> None:
    hashes = {}
    for layout, (pack, config) in LAYOUTS.items():
        tensors, hashes[layout] = {}, {}
        for name in NAMES:
            stem = name.removesuffix(".weight")
            packed = pack(SOURCE[name].float())
            if packed is None:
                continue
            out, back = packed
            assert back.dtype == torch.float32 and back.shape == SOURCE[name].shape, (layout, name, back.dtype)
            near = (back - SOURCE[name].float()).abs().max() / SOURCE[name].float().abs().max()
            assert near < 0.4, (layout, name, near)
            tensors |= {f"{stem}{suffix}": t.contiguous() for suffix, t in out.items()}
            hashes[layout][name] = hashlib.sha256(back.contiguous().numpy().tobytes()).hexdigest()
        save_file(tensors, HERE / f"{layout}.safetensors", {"quantization_config": json.dumps(config)})
    gpt_oss()
    for file in HERE.glob("*.safetensors"):
        file.chmod(0o644)
    (HERE / "hashes.json").write_text(json.dumps(hashes, indent=1) + "\n")


main()
