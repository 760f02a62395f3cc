"""Writes a checkpoint as GGUF, in bf16, and quantises it with llama.cpp's own quantiser.

    to_gguf.py CHECKPOINT OUT FORMAT [--exact-ends] [--direct [--consume]] [--tokenizer FILE]

`FORMAT` is bf16, q8 (Q8_0), q4 (Q4_0), q3 (Q3_K) or q2 (Q2_K), for every matrix alike, as moec stores them, but for embedding and head
of q3 and q2, which are Q4_0; norms, biases and routers are f32. `--exact-ends` keeps embedding and head in f32. There is no tokenizer, ids go in and logits come out, unless `--tokenizer` names
one of bytes with merges (GPT-2's kind), for engines that speak in text.

A family of 2026 is converted layer by layer, by the rules of `golden/gguf/late.py`.

What has fewer bits is made of the bf16 file beside OUT. With `--direct` q8 and q4 are made of the checkpoint, matrix by matrix, by
gguf-py's quantisers, whose bits are those of llama.cpp's: for models that the disk holds once only. `--consume` gives
the space of each shard back as soon as it has been read; the checkpoint is of no use afterwards.

    to_gguf.py OLMOE.gguf OUT qwen3moe

The same weights under an architecture that differs in norms alone: for ik_llama.cpp, which knows no OLMoE. Queries and
keys are normalised head by head, and the weights of the chosen experts add up to one.
"""

import argparse
import json
import os
import re
import sys
from pathlib import Path

import gguf
import numpy as np

F32, BF16 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.BF16
STORED = {"bf16": BF16, "q8": gguf.GGMLQuantizationType.Q8_0, "q4": gguf.GGMLQuantizationType.Q4_0}
FILE_TYPES = {
    "bf16": gguf.LlamaFileType.MOSTLY_BF16, "q8": gguf.LlamaFileType.MOSTLY_Q8_0, "q4": gguf.LlamaFileType.MOSTLY_Q4_0,
}
ARCHITECTURES = {"OlmoeForCausalLM": "olmoe", "Qwen3MoeForCausalLM": "qwen3moe", "PhiMoEForCausalLM": "phimoe"}
LATE = Path(__file__).resolve().parents[3] / "golden" / "gguf"
"""Where the rules for the families of 2026 are."""
EXACT = ("ffn_gate_inp", "_norm.", "conv")
"""Parts of names, in families of 2026, of tensors that stay f32."""
ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
MROPE = [11, 11, 10]
"""Pairs of channels that Qwen3.5 rotates by time, height and width."""
BLOCK = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp", "block_sparse_moe.gate": "ffn_gate_inp",
}
EXPERTS = {
    "gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps",
}


class Checkpoint:
    """Tensors of a folder of safetensors, mapped."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.config = json.loads((self.folder / "config.json").read_text())
        self.tensors, self.shards = {}, {}
        for path in sorted(self.folder.glob("model*.safetensors")):
            with open(path, "rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(size))
            data = np.memmap(path, np.uint8, "r", offset=8 + size)
            for name, info in header.items():
                if name != "__metadata__":
                    begin, end = info["data_offsets"]
                    self.tensors[name] = (info["dtype"], info["shape"], data[begin:end])
                    self.shards.setdefault(path, set()).add(name)

    def consume(self, names):
        """Says that these tensors are not wanted again. A shard of which none is loses its content."""
        for path, left in self.shards.items():
            if left and not left.difference_update(names) and not left:
                os.truncate(path, 0)

    def bits(self, name):
        """bf16 as u16."""
        dtype, shape, data = self.tensors[name]
        if dtype != "BF16":
            raise SystemExit(f"{name} is {dtype}, not BF16")
        return data.view(np.uint16).reshape(shape)

    def f32(self, name):
        return (self.bits(name).astype(np.uint32) << 16).view(np.float32)


def check(config):
    """Ends where llama.cpp has no such model."""
    heads = config["num_attention_heads"]
    channels = heads * (config.get("head_dim") or config["hidden_size"] // heads)
    if config["architectures"][0] == "PhiMoEForCausalLM" and channels != config["hidden_size"]:
        raise SystemExit(f"error: llama.cpp's phimoe wants heads of {config['hidden_size']} channels in all, not {channels}")


def plan(checkpoint):
    """GGUF name → names of the tensors that it stacks, or the one that it is."""
    names = {}
    for name in checkpoint.tensors:
        stem, _, kind = name.rpartition(".")
        if stem in ENDS:
            names[f"{ENDS[stem]}.{kind}"] = name
            continue
        _, _, layer, rest = stem.split(".", 3)
        if rest in BLOCK:
            names[f"blk.{layer}.{BLOCK[rest]}.{kind}"] = name
            continue
        block, _, expert, matrix = rest.split(".")
        names.setdefault(f"blk.{layer}.{EXPERTS[matrix]}.{kind}", {})[int(expert)] = name
    return {k: [v[e] for e in sorted(v)] if isinstance(v, dict) else v for k, v in names.items()}


def stays_f32(name, shape, exact_ends):
    """Norms and biases (one dimension), routers, and ends that shall be exact."""
    return len(shape) == 1 or "ffn_gate_inp" in name or (exact_ends and name in ("token_embd.weight", "output.weight"))


def packed(checkpoint, names, kind):
    """Matrices of equal shape one behind the other, as the file has them."""
    shape = checkpoint.tensors[names[0]][1]
    rows = gguf.quant_shape_to_byte_shape(shape, kind)
    out = np.empty((len(names), *rows), np.uint8)
    for at, name in enumerate(names):
        bits = checkpoint.bits(name)
        out[at] = bits.view(np.uint8) if kind == BF16 else gguf.quants.quantize(checkpoint.f32(name), kind)
    return out


def vocabulary(writer, path, config):
    """The words and merges of a `tokenizer.json`."""
    tokenizer = json.loads(Path(path).read_text())
    special = {token["id"] for token in tokenizer["added_tokens"] if token["special"]}
    words = sorted(tokenizer["model"]["vocab"].items(), key=lambda word: word[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([word for word, _ in words])
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if i in special else normal for _, i in words])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def write(checkpoint, out, fmt, exact_ends, consume=False, tokenizer=None):
    check(checkpoint.config)
    c = checkpoint.config
    writer = gguf.GGUFWriter(str(out), ARCHITECTURES[c["architectures"][0]])
    heads = c["num_attention_heads"]
    head_dim = c.get("head_dim") or c["hidden_size"] // heads
    inner = c.get("moe_intermediate_size") or c["intermediate_size"]
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_expert_feed_forward_length(inner)
    writer.add_expert_count(c.get("num_experts") or c["num_local_experts"])
    writer.add_expert_used_count(c["num_experts_per_tok"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    rope = c.get("rope_parameters") or {}
    writer.add_rope_freq_base(float(c.get("rope_theta") or rope["rope_theta"]))
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_layer_norm_eps(c["rms_norm_eps"])
    writer.add_file_type(FILE_TYPES[fmt])
    writer.add_vocab_size(c["vocab_size"])
    if tokenizer:
        vocabulary(writer, tokenizer, c)
    else:
        writer.add_tokenizer_model("no_vocab")

    kind, names = STORED[fmt], plan(checkpoint)
    for name, source in names.items():
        shape = checkpoint.tensors[source][1] if isinstance(source, str) else None
        shape = shape or [len(source), *checkpoint.tensors[source[0]][1]]
        if stays_f32(name, shape, exact_ends):
            writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * int(np.prod(shape)), raw_dtype=F32)
        else:
            stored = gguf.quant_shape_to_byte_shape(shape, kind)
            writer.add_tensor_info(name, stored, np.dtype(np.uint8), int(np.prod(stored)), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, source in names.items():
        sources = source if isinstance(source, list) else [source]
        if isinstance(source, str) and stays_f32(name, checkpoint.tensors[source][1], exact_ends):
            writer.write_tensor_data(np.ascontiguousarray(checkpoint.f32(source)))
        else:
            writer.write_tensor_data(packed(checkpoint, sources, kind))
        if consume:
            checkpoint.consume(sources)
    writer.close()


def spelt(checkpoint, names):
    """Tensors in the spelling that `golden/gguf/late.py` reads: no word for the modality, gate and up of experts apart, three axes of a convolution."""
    for name in names:
        t, name = checkpoint.f32(name), name.replace("model.language_model.", "model.")
        if name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate_proj", "up_proj"), np.split(t, 2, axis=1)):
                yield name.replace("gate_up_proj", f"{part}.weight"), half
        elif name.endswith("conv1d.weight") and t.ndim == 2:
            yield name, t[:, None]
        else:
            yield name + ".weight" * name.endswith("experts.down_proj"), t


def write_late(checkpoint, out):
    """A family of 2026 in bf16, layer by layer."""
    sys.path.insert(0, str(LATE))
    import late

    config = checkpoint.config.get("text_config", checkpoint.config)
    if config["model_type"].startswith("qwen3_5_moe"):
        # As published. Positions of a text are the same in all sections.
        config["rope_parameters"].setdefault("mrope_section", MROPE)
    arch, of_tensors, of_keys = late.FAMILIES[config["model_type"]]
    names = gguf.get_tensor_name_map(arch, late.layers_of(config))
    writer = gguf.GGUFWriter(str(out), gguf.MODEL_ARCH_NAMES[arch], use_temp_file=True)
    of_keys(writer, config)
    writer.add_file_type(FILE_TYPES["bf16"])
    writer.add_tokenizer_model("no_vocab")
    layers = {}
    for name in checkpoint.tensors:
        found = re.search(r"\.layers\.(\d+)\.", name)
        layers.setdefault(found and int(found[1]), []).append(name)
    for of_layer in layers.values():
        for hf, t in of_tensors(config, dict(spelt(checkpoint, of_layer))):
            own = hf.startswith(("blk.", "rope_freqs"))
            name = hf if own else names.get_name(hf, try_suffixes=(".weight", ".bias"))
            exact = t.ndim == 1 or not name.endswith(".weight") or any(part in name for part in EXACT)
            kind = F32 if exact else BF16
            writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(t), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantise(source, out, fmt, exact_ends):
    import llama_cpp as api

    params = api.llama_model_quantize_default_params()
    types = {
        "q8": api.LLAMA_FTYPE_MOSTLY_Q8_0, "q4": api.LLAMA_FTYPE_MOSTLY_Q4_0,
        "q3": api.LLAMA_FTYPE_MOSTLY_Q3_K_M, "q2": api.LLAMA_FTYPE_MOSTLY_Q2_K,
    }
    params.ftype = types[fmt]
    params.nthread = os.cpu_count()
    params.allow_requantize = params.pure = True
    if exact_ends or fmt in ("q3", "q2"):
        params.token_embedding_type = params.output_tensor_type = int(F32 if exact_ends else STORED["q4"])
    if api.llama_model_quantize(str(source).encode(), str(out).encode(), params):
        raise SystemExit(f"{source} cannot be quantised")


def relabel(source, out):
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(str(out), "qwen3moe")
    for key, field in reader.fields.items():
        if key.startswith("olmoe.") or key in ("tokenizer.ggml.model", "general.file_type"):
            writer.add_key_value(key.replace("olmoe.", "qwen3moe."), field.contents(), field.types[0])
    head_dim = reader.fields["olmoe.attention.key_length"].contents()
    data = {t.name: t.data[:head_dim] if t.name.endswith(("q_norm.weight", "k_norm.weight")) else t.data for t in reader.tensors}
    for t in reader.tensors:
        d = data[t.name]
        writer.add_tensor_info(t.name, d.shape, d.dtype, d.nbytes, raw_dtype=t.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for t in reader.tensors:
        writer.write_tensor_data(np.ascontiguousarray(data[t.name]))
    writer.close()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("out", type=Path)
    parser.add_argument("format", choices=["bf16", "q8", "q4", "q3", "q2", "qwen3moe"])
    parser.add_argument("--exact-ends", action="store_true")
    parser.add_argument("--direct", action="store_true")
    parser.add_argument("--consume", action="store_true")
    parser.add_argument("--tokenizer")
    args = parser.parse_args()
    # A file that is there is whole.
    hidden = args.out.with_name(f".{args.out.name}")
    if args.format == "qwen3moe":
        relabel(args.checkpoint, hidden)
    elif args.format == "bf16" and Checkpoint(args.checkpoint).config["architectures"][0] not in ARCHITECTURES:
        write_late(Checkpoint(args.checkpoint), hidden)
    elif args.format == "bf16" or args.direct:
        write(Checkpoint(args.checkpoint), hidden, args.format, args.exact_ends, args.direct and args.consume, args.tokenizer)
    else:
        bf16 = args.out.with_name(args.out.name.replace(args.format, "bf16"))
        quantise(bf16, hidden, args.format, args.exact_ends)
    hidden.rename(args.out)


if __name__ == "__main__":
    main()
