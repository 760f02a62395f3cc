#!/usr/bin/env python3
"""Writes the GGUF file of a Hugging Face checkpoint, with the names and keys of the gguf package.

    cargo xtask gguf
    python write.py CHECKPOINT OUT.gguf [--type TYPE] [--old] [--split N] [--decoded FOLDER]

What llama.cpp's converter does to tensors is done here, too: experts in one tensor, rows of query and key of Mixtral paired
for a rotation of neighbours, gate and up of gpt-oss apart, DeepSeek's expansions of latents each by itself. Matrices are stored
as TYPE where their rows are whole blocks, vectors and routers as F32. `--old` leaves out what converters left out before 2025.
`--decoded` writes a checkpoint of what the file's numbers mean, in the names of Hugging Face: the same weights by another way.
"""

import argparse
import json
import re
import shutil
from pathlib import Path

import gguf
import late
import numpy as np
from safetensors.numpy import save_file

ARCHITECTURES = {
    "mixtral": gguf.MODEL_ARCH.LLAMA, "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE, "olmoe": gguf.MODEL_ARCH.OLMOE,
    "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2, "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,
    "glm4_moe": gguf.MODEL_ARCH.GLM4_MOE, "phimoe": gguf.MODEL_ARCH.PHIMOE,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS, "smallthinker": gguf.MODEL_ARCH.SMALLTHINKER,
}
# Parts of names whose tensors the converter never rounds.
EXACT = ("ffn_gate_inp", "_norm.", "conv")
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")


def load(path):
    """Tensors of a safetensors file, as float32."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    out = {}
    for name, t in json.loads(raw[8 : 8 + size]).items():
        if name == "__metadata__":
            continue
        start, end = t["data_offsets"]
        data = raw[8 + size + start : 8 + size + end]
        if t["dtype"] == "BF16":
            numbers = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            numbers = np.frombuffer(data, {"F32": np.float32, "F16": np.float16}[t["dtype"]]).astype(np.float32)
        out[name] = numbers.reshape(t["shape"])
    return out


def paired(weights, heads):
    """Rows of each head taken by turns from its halves."""
    rows, cols = weights.shape
    return weights.reshape(heads, 2, rows // heads // 2, cols).swapaxes(1, 2).reshape(rows, cols)


def unpaired(weights, heads):
    rows, cols = weights.shape
    return weights.reshape(heads, rows // heads // 2, 2, cols).swapaxes(1, 2).reshape(rows, cols)


def stored(config, tensors, old):
    """Pairs of a name of Hugging Face, as the package maps it, and a tensor of the file."""
    family, experts = config["model_type"], {}
    heads = config["num_attention_heads"]
    for name, t in tensors.items():
        found = EXPERT.fullmatch(name)
        if found:
            at, e, part = found.groups()
            experts.setdefault(f"{at}.{part}.weight", {})[int(e)] = t
        elif family == "mixtral" and name.endswith(("q_proj.weight", "k_proj.weight")):
            key = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            yield name, paired(t, config[key])
        elif name.endswith("kv_b_proj.weight") and not old:
            nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
            both = t.reshape(heads, nope + value, -1)
            yield name.replace("kv_b", "k_b"), np.ascontiguousarray(both[:, :nope].swapaxes(1, 2))
            yield name.replace("kv_b", "v_b"), np.ascontiguousarray(both[:, nope:])
        elif family == "gpt_oss" and ".experts." in name:
            name = name.removesuffix("_bias")
            kind = ".bias" if t.ndim == 2 else ".weight"
            t = t if t.ndim == 2 else t.swapaxes(1, 2)
            if name.endswith("gate_up_proj"):
                yield name.replace("gate_up", "gate") + kind, np.ascontiguousarray(t[:, 0::2])
                yield name.replace("gate_up", "up") + kind, np.ascontiguousarray(t[:, 1::2])
            else:
                yield name + kind, np.ascontiguousarray(t)
        elif name.endswith("sinks"):
            yield name + ".weight", t
        elif name.endswith("shared_expert_gate.weight"):
            yield name, t.reshape(-1)
        elif name.endswith("e_score_correction_bias"):
            yield name.replace("e_score_correction_bias", "e_score_correction.bias"), t
        else:
            yield name, t
    for name, of in experts.items():
        yield name, np.stack([of[e] for e in range(len(of))])


def back(config, name, t):
    """A decoded tensor of the file in the spelling of Hugging Face; those that are several by their names."""
    family = config["model_type"]
    if ".experts." in name and family != "gpt_oss":
        at, part, kind = name.rsplit(".", 2)
        return {f"{at}.{e}.{part}.{kind}": x for e, x in enumerate(t)}
    if family == "mixtral" and name.endswith(("q_proj.weight", "k_proj.weight")):
        key = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
        return {name: unpaired(t, config[key])}
    if name.endswith("sinks.weight"):
        return {name.removesuffix(".weight"): t}
    if name.endswith("shared_expert_gate.weight"):
        return {name: t.reshape(1, -1)}
    return {name.replace("correction.bias", "correction_bias"): t}


def merge(config, out):
    """Puts together what the file has apart."""
    for name in [n for n in out if n.endswith("k_b_proj.weight")]:
        both = np.concatenate([out.pop(name).swapaxes(1, 2), out.pop(name.replace("k_b", "v_b"))], axis=1)
        out[name.replace("k_b", "kv_b")] = both.reshape(-1, both.shape[-1])
    if config["model_type"] == "gpt_oss":
        for name in [n for n in out if ".experts.gate_proj" in n]:
            both = np.stack([out.pop(name), out.pop(name.replace("gate_proj", "up_proj"))], axis=2)
            both = both.reshape(both.shape[0], -1, *both.shape[3:])
            name = name.replace("gate_proj.bias", "gate_up_proj_bias").replace("gate_proj.weight", "gate_up_proj")
            out[name] = both if both.ndim == 2 else both.swapaxes(1, 2)
        for name in [n for n in out if ".experts.down_proj." in n]:
            t = out.pop(name)
            name = name.replace("proj.bias", "proj_bias").replace("proj.weight", "proj")
            out[name] = t if t.ndim == 2 else t.swapaxes(1, 2)


def metadata(writer, config, old):
    """Keys of the model, as the converter has them."""
    family, get = config["model_type"], config.get
    rope = get("rope_parameters") or get("rope_scaling") or {}
    heads, kv = config["num_attention_heads"], get("num_key_value_heads")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(1 if family.startswith("deepseek") and not old else kv)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope.get("rope_theta", get("rope_theta", 10000.0)))
    head = get("head_dim") or config["hidden_size"] // heads
    experts = ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_primary_experts"]
    writer.add_expert_count(next(config[key] for key in experts if key in config))
    writer.add_expert_used_count(get("num_experts_per_tok") or config["moe_num_active_primary_experts"])
    inner = get("moe_intermediate_size") or get("moe_ffn_hidden_size")
    writer.add_feed_forward_length(get("intermediate_size") or inner)
    if inner and not (old and family == "qwen2_moe"):
        writer.add_expert_feed_forward_length(inner)
    if get("bos_token_id") is not None:
        writer.add_bos_token_id(config["bos_token_id"])
    if get("eos_token_id") is not None:
        writer.add_eos_token_id(config["eos_token_id"])
    if rope.get("rope_type", rope.get("type")) == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "mscale_all_dim" in rope:
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    if family in ("qwen3_moe", "gpt_oss", "smallthinker", "glm4_moe"):
        writer.add_key_length(head)
        writer.add_value_length(head)
    if get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if family == "qwen2_moe" and not old:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if family == "mixtral":
        writer.add_rope_dimension_count(head)
    if family == "smallthinker":
        softmax = get("moe_primary_router_apply_softmax")
        kinds = gguf.ExpertGatingFuncType
        writer.add_expert_gating_func(kinds.SOFTMAX if softmax else kinds.SIGMOID)
        if any(get("sliding_window_layout") or []):
            writer.add_sliding_window(config["sliding_window_size"])
    if family.startswith("deepseek") or family == "glm4_moe":
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        if config["norm_topk_prob"]:
            writer.add_expert_weights_norm(True)
        if family != "deepseek_v2" or not old:
            v3 = family != "deepseek_v2"
            kinds = gguf.ExpertGatingFuncType
            writer.add_expert_gating_func(kinds.SIGMOID if v3 else kinds.SOFTMAX)
        if config["n_group"] > 1:
            writer.add_expert_group_count(config["n_group"])
            writer.add_expert_group_used_count(config["topk_group"])
    if family == "glm4_moe":
        writer.add_rope_dimension_count(int(head * rope.get("partial_rotary_factor", 0.5)))
    if family.startswith("deepseek"):
        nope, rotated, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
        latent = config["kv_lora_rank"]
        writer.add_kv_lora_rank(latent)
        if get("q_lora_rank"):
            writer.add_q_lora_rank(config["q_lora_rank"])
        writer.add_rope_dimension_count(rotated)
        writer.add_key_length(nope + rotated if old else latent + rotated)
        writer.add_value_length(value if old else latent)
        if not old:
            writer.add_key_length_mla(nope + rotated)
            writer.add_value_length_mla(value)
    if rope.get("rope_type") == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for kind in ("long", "short"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32))


def vocabulary(writer, folder, pre):
    """The tokenizer, if the checkpoint has one."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return
    tokenizer = json.loads(path.read_text())
    model, added = tokenizer["model"], {t["id"]: t for t in tokenizer["added_tokens"]}
    ids = {i: token for token, i in model["vocab"].items()} | {i: t["content"] for i, t in added.items()}
    kinds = gguf.TokenType
    special = lambda i: kinds.CONTROL if added[i]["special"] else kinds.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([ids[i] for i in range(len(ids))])
    writer.add_token_types([special(i) if i in added else kinds.NORMAL for i in range(len(ids))])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in model["merges"]])
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    writer.add_add_bos_token(bool(settings.get("add_bos_token")))
    if settings.get("chat_template"):
        writer.add_chat_template(settings["chat_template"])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", default="BF16")
    parser.add_argument("--pre", default="smollm")
    parser.add_argument("--old", action="store_true")
    parser.add_argument("--split", type=int, default=0)
    parser.add_argument("--decoded", type=Path)
    args = parser.parse_args()
    config = json.loads((args.checkpoint / "config.json").read_text())
    config = config.get("text_config", config)
    tensors = load(args.checkpoint / "model.safetensors")
    if config["model_type"] in late.FAMILIES:
        arch, of_tensors, of_keys = late.FAMILIES[config["model_type"]]
        given, layers = of_tensors(config, tensors), late.layers_of(config)
        keys = lambda writer: of_keys(writer, config)
    else:
        arch, layers = ARCHITECTURES[config["model_type"]], config["num_hidden_layers"]
        given = stored(config, tensors, args.old)
        keys = lambda writer: metadata(writer, config, args.old)
    names = gguf.get_tensor_name_map(arch, layers)
    kind = gguf.GGMLQuantizationType[args.type]
    writer = gguf.GGUFWriter(args.out, gguf.MODEL_ARCH_NAMES[arch], split_max_tensors=args.split)
    writer.add_type("model")
    keys(writer)
    vocabulary(writer, args.checkpoint, args.pre)
    decoded = {}
    for hf, t in given:
        own = hf.startswith(("blk.", "rope_freqs"))
        name = hf if own else names.get_name(hf, try_suffixes=(".weight", ".bias"))
        assert name, hf
        exact = t.ndim == 1 or any(part in name for part in EXACT) or not name.endswith(".weight")
        fits = t.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
        use = gguf.GGMLQuantizationType.F32 if exact else kind if fits else gguf.GGMLQuantizationType.F16
        t = np.ascontiguousarray(t)
        data = gguf.quantize(t, use)
        writer.add_tensor(name, data, raw_dtype=use)
        if args.decoded:
            decoded |= back(config, hf, gguf.dequantize(data, use).reshape(t.shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if args.decoded:
        merge(config, decoded)
        args.decoded.mkdir()
        save_file({n: np.ascontiguousarray(t) for n, t in decoded.items()}, args.decoded / "model.safetensors")
        for file in args.checkpoint.glob("*.json"):
            shutil.copy(file, args.decoded)


main()
