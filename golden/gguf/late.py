"""The families of 2026 as llama.cpp's converter stores them: what it does to each tensor, and which keys it writes.

`FAMILIES` has a row for each: the architecture of the gguf package, what `stored` makes of the tensors, and what `metadata` adds to
the keys that all have. Tensors keep a name of Hugging Face that the package maps to the file's.
"""

import math
import re

import gguf
import numpy as np

ARCH, GATING, SCALING = gguf.MODEL_ARCH, gguf.ExpertGatingFuncType, gguf.RopeScalingType
EXPERT = re.compile(r"(?:model|backbone)\.layers\.(\d+)\..*?experts\.(\d+)\.(\w+)\.weight")
PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
# Where the package expects a word of its own in front of `.bias`.
BIASES = {"e_score_correction_bias": "e_score_correction.bias", "expert_bias": "expert_bias.bias",
          "router_bias": "router_bias.bias", "dt_bias": "dt_proj.bias"}


def theta(c, kind="full_attention"):
    """Base of the rotation of a kind of layer."""
    rope = c.get("rope_parameters") or {}
    return rope.get(kind, rope).get("rope_theta")


def heads_of(c):
    """Heads, heads of keys and values, channels of a head."""
    heads = c["num_attention_heads"]
    return heads, c.get("num_key_value_heads", heads), c.get("head_dim") or c["hidden_size"] // heads


def layers_of(c):
    return c.get("num_hidden_layers") or len(c["layers_block_type"])


def attends(c):
    """Whether each layer attends to all tokens."""
    return [kind == "full_attention" for kind in c.get("layer_types") or c["layers_block_type"]]


def slides(c):
    return [kind == "sliding_attention" for kind in c["layer_types"]]


def dense_first(c):
    """Dense layers in front of the others."""
    types = c.get("mlp_layer_types") or []
    return c.get("first_k_dense_replace", types.count("dense"))


# What is done to tensors.


def stacked(tensors):
    """Experts of a layer in one tensor each for gate, up and down, and names as the package has them."""
    experts = {}
    for name, t in tensors.items():
        found = EXPERT.fullmatch(name)
        if found:
            layer, e, part = found.groups()
            part = PARTS.get(part, part)
            experts.setdefault(f"model.layers.{layer}.mlp.experts.{part}.weight", {})[int(e)] = t
            continue
        for old, new in BIASES.items():
            if name.endswith(f".{old}"):
                name = name.removesuffix(old) + new
        yield name, t
    for name, of in experts.items():
        yield name, np.stack([of[e] for e in range(len(of))])


def plain(c, tensors):
    return stacked(tensors)


def one_more(name):
    """Norms that are stored as what they differ from 1 are stored whole."""
    return name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")


def delta(c, tensors):
    """Layers of Qwen's delta rule: query, key and value in one tensor, all heads of each together; the gate in another."""
    keys, values = c["linear_num_key_heads"], c["linear_num_value_heads"]
    key, value = c["linear_key_head_dim"], c["linear_value_head_dim"]
    each = values // keys
    for name, t in stacked(tensors):
        if one_more(name):
            t = t + np.float32(1)
        elif name.endswith("A_log"):
            t = -np.exp(t)
        elif name.endswith("conv1d.weight"):
            t = t[:, 0]
        if name.endswith("in_proj_qkvz.weight"):
            groups = t.reshape(keys, 2 * key + 2 * each * value, -1)
            q, k, v, z = np.split(groups, [key, 2 * key, 2 * key + each * value], axis=1)
            whole = [x.reshape(-1, t.shape[1]) for x in (q, k, v, z)]
            yield name.replace("qkvz", "qkv"), np.concatenate(whole[:3])
            yield name.replace("qkvz", "z"), whole[3]
        else:
            yield name, t


def tiled(c, tensors):
    """As above, with the heads of values that share a key far apart: the first of every key, then the second of every key."""
    keys, values = c["linear_num_key_heads"], c["linear_num_value_heads"]
    key, value = c["linear_key_head_dim"], c["linear_value_head_dim"]

    def apart(t, width):
        grouped = t.reshape(keys, values // keys, width, -1)
        return grouped.swapaxes(0, 1).reshape(t.shape)

    for name, t in delta(c, tensors):
        if ".linear_attn." in name:
            if "in_proj_qkv." in name or "conv1d" in name:
                both = 2 * keys * key
                t = np.concatenate([t[:both], apart(t[both:], value)])
            elif "in_proj_z." in name:
                t = apart(t, value)
            elif "out_proj" in name:
                t = apart(np.ascontiguousarray(t.T), value).T
            elif "norm" not in name:
                t = apart(t, 1)
        yield name, t


def convolved(c, tensors):
    """LFM2's short convolutions without their axis of one."""
    for name, t in stacked(tensors):
        yield name, t[:, 0] if ".conv.conv." in name else t


def gemma(c, tensors):
    for name, t in stacked(tensors):
        layer = name.split(".")[2]
        if name.endswith("router.scale"):
            yield f"blk.{layer}.ffn_gate_inp.scale", t
        elif name.endswith("per_expert_scale"):
            yield f"blk.{layer}.ffn_down_exps.scale", t
        elif ".experts." in name or name.endswith("layer_scalar"):
            yield f"{name}.weight", t
        else:
            yield name, t
    rope = c["rope_parameters"]["full_attention"]
    pairs = wide_head(c) // 2
    turned = int(pairs * rope["partial_rotary_factor"])
    yield "rope_freqs.weight", np.array([1.0] * turned + [1e30] * (pairs - turned), np.float32)


def wide_head(c):
    """Channels of a head in Gemma's layers that see all."""
    return max(layer["head_dim"] for layer in c["per_layer_config"].values())


def mamba2(c, tensors):
    """Rates, skips and norms with the axes that llama.cpp computes with."""
    groups = c.get("n_groups") or c["mamba_n_groups"]
    for name, t in stacked(tensors):
        if name.endswith("A_log"):
            t = -np.exp(t).reshape(-1, 1)
        elif name.endswith((".mixer.D", ".mamba.D")):
            t = t.reshape(-1, 1)
        elif name.endswith((".mixer.norm.weight", ".mamba.norm.weight")):
            t = t.reshape(groups, -1)
        elif name.endswith("conv1d.weight"):
            t = t[:, 0]
        if name.endswith(".mixer.dt_proj.bias"):
            name = name.replace("dt_proj", "dt")
        yield name, t


def paired(t, heads):
    """Rows of each head taken by turns from its halves, as a rotation of neighbours wants them."""
    return t.reshape(heads, 2, -1, t.shape[1]).swapaxes(1, 2).reshape(t.shape)


def granite(c, tensors):
    for name, t in mamba2(c, tensors) if "mamba_n_heads" in c else stacked(tensors):
        layer = name.split(".")[2]
        if name.endswith("q_proj.weight"):
            yield name, paired(t, c["num_attention_heads"])
        elif name.endswith("k_proj.weight"):
            yield name, paired(t, c["num_key_value_heads"])
        elif name.endswith("block_sparse_moe.input_linear.weight"):
            for part, half in zip(("gate", "up"), np.split(t, 2, axis=1)):
                yield f"model.layers.{layer}.mlp.experts.{part}_proj.weight", half
        elif name.endswith("shared_mlp.input_linear.weight"):
            for part, half in zip(("gate", "up"), np.split(t, 2)):
                yield f"blk.{layer}.ffn_{part}_shexp.weight", half
        else:
            yield name, t


def latent(c, tensors, more=plain):
    """Expansions of latents each by itself, that of keys turned."""
    for name, t in more(c, tensors):
        if name.endswith("kv_b_proj.weight"):
            nope, value = c["qk_nope_head_dim"], c["v_head_dim"]
            both = t.reshape(c["num_attention_heads"], nope + value, -1)
            yield name.replace("kv_b", "k_b"), both[:, :nope].swapaxes(1, 2)
            yield name.replace("kv_b", "v_b"), both[:, nope:]
        elif name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            yield f"{name}.weight", t
        else:
            yield name, t


def kimi(c, tensors):
    for name, t in latent(c, tensors):
        if name.endswith("conv1d.weight"):
            t = t.reshape(1, t.shape[0], 1, -1)
        elif name.endswith("A_log"):
            t = -np.exp(t)
        yield name, t


def llama4(c, tensors):
    for name, t in stacked(tensors):
        if name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), np.split(t.swapaxes(1, 2), 2, axis=1)):
                yield name.replace("gate_up", part) + ".weight", half
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight", t.swapaxes(1, 2)
        else:
            yield name, t
    _, _, head = heads_of(c)
    yield from stretched(c["rope_parameters"], head)


def stretched(rope, dim):
    """What divides each frequency of a rotation of `dim` channels that llama 3's rule stretches."""
    if rope.get("rope_type") != "llama3":
        return
    low, high, context = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    out = []
    for i in range(dim // 2):
        wave = 2 * math.pi * rope["rope_theta"] ** (2 * i / dim)
        if wave < context / high:
            out.append(1.0)
        elif wave > context / low:
            out.append(rope["factor"])
        else:
            smooth = (context / wave - low) / (high - low)
            out.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    yield "rope_freqs.weight", np.array(out, np.float32)


def jamba(c, tensors):
    for name, t in stacked(tensors):
        if name.endswith("A_log"):
            t = -np.exp(t)
        elif name.endswith("conv1d.weight"):
            t = t[:, 0]
        yield name, t


def step(c, tensors):
    for name, t in stacked(tensors):
        yield name, t + np.float32(1) if one_more(name) else t
    rope = c["rope_parameters"]["full_attention"]
    head = c["head_dim"]
    # The layers that see all turn half of the channels, and read as many factors.
    for name, t in stretched(rope, int(head * rope["partial_rotary_factor"])):
        yield name, np.concatenate([t, np.repeat(t[-1:], head // 2 - len(t))])


def sinks(c, tensors):
    for name, t in stacked(tensors):
        yield name + ".weight" if name.endswith("attention_sink_bias") else name, t


# Keys.


def base(w, c):
    """Keys that every family has, as far as its configuration says them."""
    heads, kv, _ = heads_of(c)
    w.add_block_count(layers_of(c))
    w.add_context_length(c.get("max_position_embeddings") or c["model_max_length"])
    w.add_embedding_length(c["hidden_size"])
    w.add_vocab_size(c["vocab_size"])
    if "intermediate_size" in c:
        w.add_feed_forward_length(c["intermediate_size"])
    w.add_head_count(heads)
    if theta(c) is not None:
        w.add_rope_freq_base(theta(c))
    sliding = (c.get("rope_parameters") or {}).get("sliding_attention")
    if sliding:
        w.add_rope_freq_base_swa(sliding["rope_theta"])
    w.add_layer_norm_rms_eps(c.get("rms_norm_eps") or c.get("norm_eps") or c["layer_norm_epsilon"])
    for add, keys in (
        (w.add_expert_count, ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")),
        (w.add_expert_used_count, ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_k", "moe_topk")),
        (w.add_expert_group_count, ("n_group", "num_expert_group")),
        (w.add_expert_group_used_count, ("topk_group",)),
        (w.add_expert_feed_forward_length, ("moe_intermediate_size",)),
    ):
        for key in keys:
            if key in c:
                add(c[key])
    rope = c.get("rope_parameters") or {}
    if rope.get("rope_type") == "yarn":
        w.add_rope_scaling_type(SCALING.YARN)
        w.add_rope_scaling_factor(rope["factor"])
        w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "beta_fast" in rope:
            w.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
            w.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if "kv_lora_rank" not in c and c.get("head_dim"):
        w.add_key_length(c["head_dim"])
        w.add_value_length(c["head_dim"])
    w.add_head_count_kv(kv)


def ssm(w, conv, state, groups, rank, inner):
    w.add_ssm_conv_kernel(conv)
    w.add_ssm_state_size(state)
    if groups:
        w.add_ssm_group_count(groups)
    w.add_ssm_time_step_rank(rank)
    w.add_ssm_inner_size(inner)


def qwen(w, c):
    base(w, c)
    ssm(w, c["linear_conv_kernel_dim"], c["linear_key_head_dim"], c["linear_num_key_heads"],
        c["linear_num_value_heads"], c["linear_num_value_heads"] * c["linear_value_head_dim"])
    w.add_full_attention_interval(c["layer_types"].index("full_attention") + 1)
    w.add_rope_dimension_count(int(c["head_dim"] * c["rope_parameters"]["partial_rotary_factor"]))
    if "mrope_section" in c["rope_parameters"]:
        w.add_rope_dimension_sections(c["rope_parameters"]["mrope_section"] + [0])
    w.add_expert_shared_feed_forward_length(c["shared_expert_intermediate_size"])


def where(w, c, here):
    """Heads of keys and values in the layers that attend, none in the others."""
    w.add_head_count_kv([c["num_key_value_heads"] if attends else 0 for attends in here])


def lfm2(w, c):
    base(w, c)
    where(w, c, attends(c))
    w.add_leading_dense_block_count(c["num_dense_layers"])
    w.add_expert_gating_func(GATING.SIGMOID)
    w.add_shortconv_l_cache(c["conv_L_cache"])


def gemma4(w, c):
    base(w, c)
    of, wide = slides(c), wide_head(c)
    narrow = min(layer["num_key_value_heads"] for layer in c["per_layer_config"].values())
    w.add_shared_kv_layers(c["num_kv_shared_layers"])
    w.add_embedding_length_per_layer_input(c["hidden_size_per_layer_input"])
    w.add_sliding_window(c["sliding_window"])
    w.add_sliding_window_pattern(of)
    w.add_key_length(wide)
    w.add_value_length(wide)
    w.add_key_length_swa(c["head_dim"])
    w.add_value_length_swa(c["head_dim"])
    w.add_head_count_kv([c["num_key_value_heads"] if local else narrow for local in of])
    w.add_rope_dimension_count(wide)
    w.add_rope_dimension_count_swa(c["head_dim"])
    w.add_final_logit_softcapping(c["final_logit_softcapping"])


def nemotron(w, c):
    base(w, c)
    where(w, c, attends(c))
    width = {"moe": c["moe_intermediate_size"], "mlp": c["intermediate_size"]}
    w.add_feed_forward_length([width.get(kind, 0) for kind in c["layers_block_type"]])
    ssm(w, c["conv_kernel"], c["ssm_state_size"], c["n_groups"], c["mamba_num_heads"],
        c["mamba_num_heads"] * c["mamba_head_dim"])
    w.add_expert_shared_feed_forward_length(c["moe_shared_expert_intermediate_size"])
    w.add_expert_shared_count(c["n_shared_experts"])
    w.add_expert_weights_norm(c["norm_topk_prob"])
    w.add_expert_weights_scale(c["routed_scaling_factor"])


def granites(w, c):
    base(w, c)
    w.add_attention_scale(c["attention_multiplier"])
    w.add_embedding_scale(c["embedding_multiplier"])
    w.add_residual_scale(c["residual_multiplier"])
    w.add_logit_scale(c["logits_scaling"])
    w.add_rope_dimension_count(heads_of(c)[2])
    if c.get("shared_intermediate_size"):
        w.add_expert_shared_feed_forward_length(c["shared_intermediate_size"])
    if "mamba_n_heads" in c:
        where(w, c, attends(c))
        ssm(w, c["mamba_d_conv"], c["mamba_d_state"], c["mamba_n_groups"], c["mamba_n_heads"],
            c["mamba_expand"] * c["hidden_size"])
        w.add_rope_scaling_finetuned(c["position_embedding_type"] == "rope")


def mla(w, c):
    """Attention over latents, which llama.cpp counts as one wide head."""
    nope, rotated, low = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["kv_lora_rank"]
    w.add_head_count_kv(1)
    w.add_kv_lora_rank(low)
    if c.get("q_lora_rank"):
        w.add_q_lora_rank(c["q_lora_rank"])
    w.add_key_length(low + rotated)
    w.add_value_length(low)
    w.add_key_length_mla(nope + rotated)
    w.add_value_length_mla(c["v_head_dim"])
    w.add_rope_dimension_count(rotated)


def routed(w, c, shared):
    """DeepSeek-V3's routing."""
    w.add_leading_dense_block_count(dense_first(c))
    w.add_expert_shared_count(c.get(shared) or 0)
    if c.get("routed_scaling_factor") is not None:
        w.add_expert_weights_scale(c["routed_scaling_factor"])
    if c.get("norm_topk_prob"):
        w.add_expert_weights_norm(True)


def glm_lite(w, c):
    base(w, c)
    mla(w, c)
    routed(w, c, "n_shared_experts")
    w.add_expert_gating_func(GATING.SIGMOID)


def mistral4(w, c):
    base(w, c)
    mla(w, c)
    routed(w, c, "n_shared_experts")
    w.add_expert_gating_func(GATING.SOFTMAX)
    rope = c["rope_parameters"]
    w.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    w.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    w.add_attn_temperature_length(rope["original_max_position_embeddings"])


def ernie(w, c):
    base(w, c)
    w.add_interleave_moe_layer_step(c["moe_layer_interval"])
    w.add_leading_dense_block_count(c["moe_layer_start_index"])
    w.add_expert_shared_count(c["moe_num_shared_experts"])


def minimax(w, c):
    base(w, c)
    w.add_expert_feed_forward_length(c["intermediate_size"])
    w.add_expert_gating_func(GATING.SIGMOID)
    w.add_rope_dimension_count(c["rotary_dim"])


def kimis(w, c):
    base(w, c)
    mla(w, c)
    w.add_head_count_kv([int(attends) for attends in attends(c)])
    w.add_ssm_conv_kernel(c["linear_conv_kernel_dim"])
    w.add_kda_head_dim(c["linear_head_dim"])
    routed(w, c, "num_shared_experts")


def llama(w, c):
    base(w, c)
    w.add_feed_forward_length(c["intermediate_size_mlp"])
    w.add_expert_feed_forward_length(c["intermediate_size"])
    w.add_interleave_moe_layer_step(c["interleave_moe_layer_step"])
    w.add_rope_dimension_count(c["head_dim"])


def hunyuan(w, c):
    base(w, c)
    rope, (_, _, head) = c["rope_parameters"], heads_of(c)
    w.add_expert_feed_forward_length(c["intermediate_size"])
    w.add_expert_shared_feed_forward_length(c["intermediate_size"])
    w.add_rope_freq_base(rope["rope_theta"] * rope["alpha"] ** (head / (head - 2)))
    w.add_rope_scaling_type(SCALING.NONE)
    w.add_rope_scaling_factor(1)


def dots(w, c):
    base(w, c)
    routed(w, c, "n_shared_experts")
    w.add_expert_gating_func(GATING.SIGMOID)


def jambas(w, c):
    base(w, c)
    layers = range(layers_of(c))
    where(w, c, [i % c["attn_layer_period"] == c["attn_layer_offset"] for i in layers])
    ssm(w, c["mamba_d_conv"], c["mamba_d_state"], None, c["mamba_dt_rank"], c["mamba_expand"] * c["hidden_size"])


def afmoe(w, c):
    base(w, c)
    w.add_leading_dense_block_count(c["num_dense_layers"])
    w.add_expert_shared_count(c["num_shared_experts"])
    w.add_expert_weights_norm(True)
    w.add_expert_weights_scale(c["route_scale"])
    w.add_expert_gating_func(GATING.SIGMOID)
    w.add_sliding_window(c["sliding_window"])
    w.add_rope_dimension_count(c["head_dim"])


def steps(w, c):
    base(w, c)
    of = slides(c)
    heads, more = c["num_attention_heads"], c["num_sliding_attention_heads"]
    w.add_head_count([more if local else heads for local in of])
    w.add_head_count_kv([c["num_key_value_heads"]] * len(of))
    w.add_sliding_window(c["sliding_window"])
    w.add_sliding_window_pattern(of)
    w.add_expert_shared_feed_forward_length(c["share_expert_dim"])
    w.add_expert_weights_scale(c["moe_router_scaling_factor"])
    w.add_expert_gating_func(GATING.SIGMOID)
    w.add_leading_dense_block_count(dense_first(c))
    w.add_swiglu_clamp_exp([float(x) for x in c["swiglu_limits"]])
    w.add_swiglu_clamp_shexp([float(x) for x in c["swiglu_limits_shared"]])


def mimo(w, c):
    base(w, c)
    of, kv = slides(c), c["num_key_value_heads"]
    w.add_head_count_kv([2 * kv if local else kv for local in of])
    # As it is published, which leaves out the token itself.
    w.add_sliding_window(c["sliding_window"] - 1)
    w.add_sliding_window_pattern([int(local) for local in of])
    w.add_value_length(c["v_head_dim"])
    w.add_rope_dimension_count(int(c["head_dim"] * c["rope_parameters"]["full_attention"]["partial_rotary_factor"]))
    w.add_float32(f"{w.arch}.attention.value_scale", c["attention_value_scale"])
    w.add_expert_gating_func(GATING.SIGMOID)


def exaone(w, c):
    base(w, c)
    routed(w, c, "num_shared_experts")
    w.add_sliding_window(c["sliding_window"])
    w.add_sliding_window_pattern(slides(c))
    w.add_expert_shared_feed_forward_length(c["moe_intermediate_size"] * c["num_shared_experts"])
    w.add_rope_scaling_type(SCALING.NONE)
    w.add_expert_gating_func(GATING.SIGMOID)


def solar(w, c):
    base(w, c)
    routed(w, c, "n_shared_experts")
    w.add_feed_forward_length(c["moe_intermediate_size"])
    w.add_rope_dimension_count(int(c["head_dim"] * c["rope_parameters"]["partial_rotary_factor"]))
    w.add_expert_gating_func(GATING.SIGMOID)


FAMILIES = {
    "qwen3_next": (ARCH.QWEN3NEXT, delta, qwen),
    "qwen3_5_moe_text": (ARCH.QWEN35MOE, tiled, qwen),
    "lfm2_moe": (ARCH.LFM2MOE, convolved, lfm2),
    "gemma4_text": (ARCH.GEMMA4, gemma, gemma4),
    "nemotron_h": (ARCH.NEMOTRON_H_MOE, mamba2, nemotron),
    "granitemoehybrid": (ARCH.GRANITE_HYBRID, granite, granites),
    "granitemoe": (ARCH.GRANITE_MOE, granite, granites),
    "granitemoeshared": (ARCH.GRANITE_MOE, granite, granites),
    "glm4_moe_lite": (ARCH.DEEPSEEK2, latent, glm_lite),
    "mistral4": (ARCH.MISTRAL4, latent, mistral4),
    "ernie4_5_moe": (ARCH.ERNIE4_5_MOE, plain, ernie),
    "minimax_m2": (ARCH.MINIMAXM2, plain, minimax),
    "kimi_linear": (ARCH.KIMI_LINEAR, kimi, kimis),
    "llama4_text": (ARCH.LLAMA4, llama4, llama),
    "hunyuan_v1_moe": (ARCH.HUNYUAN_MOE, plain, hunyuan),
    "dots1": (ARCH.DOTS1, plain, dots),
    "jamba": (ARCH.JAMBA, jamba, jambas),
    "afmoe": (ARCH.AFMOE, plain, afmoe),
    "step3p5": (ARCH.STEP35, step, steps),
    "mimo_v2_flash": (ARCH.MIMO2, sinks, mimo),
    "exaone_moe": (ARCH.EXAONE_MOE, plain, exaone),
    "solar_open": (ARCH.GLM4_MOE, plain, solar),
}
