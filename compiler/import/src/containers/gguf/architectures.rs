//! The supported GGUF architectures, one row each.

use super::keys::Keys;
use super::names::{Change, Naming, Table};
use super::settings::{ExtraSettings, early, late};
use crate::mixers::{PROJ, Parts, STACKS, W123};
use moec_base::error::{Error, Result};
use moec_ir::{Axis, Elementwise};

/// An architecture.
#[derive(Debug)]
pub(super) struct Architecture {
    /// `general.architecture`.
    pub(super) name: &'static str,
    /// Names of its tensors, and changes by the converter.
    pub(super) naming: Naming,
    /// Adds the keys of this architecture.
    pub(super) settings: ExtraSettings,
    /// Whether layers may have different head counts and widths.
    pub(super) uneven: bool,
    /// Whether `rope_freqs.weight` is read.
    pub(super) rope_freqs: bool,
}

/// The most common names.
const MLP: Naming = Naming {
    own: &[],
    changes: &[],
    router: "mlp.gate",
    experts: "mlp.experts",
    parts: PROJ,
    shared: "mlp.shared_experts",
    dense: ("mlp", PROJ),
};

/// Names in Mixtral.
const SPARSE: Naming =
    Naming { router: "block_sparse_moe.gate", experts: "block_sparse_moe.experts", parts: W123, ..MLP };

/// Names in Qwen.
const QWEN: Naming = Naming { shared: "mlp.shared_expert", ..MLP };

/// Parts of an expert in SmallThinker.
const PLAIN: Parts = Parts { gate: "gate", up: "up", down: "down", ..PROJ };

/// Rows of queries and keys permuted for interleaved RoPE.
const PAIRED: [(&str, Change); 2] =
    [("attn_q", Change::Paired { kv: false }), ("attn_k", Change::Paired { kv: true })];

/// Tensors of Qwen's delta rule.
const DELTA: &Table = &[
    ("attn_qkv", "linear_attn.in_proj_qkv"),
    ("attn_gate", "linear_attn.in_proj_z"),
    ("ssm_in", "linear_attn.in_proj_qkvz"),
    ("ssm_ba", "linear_attn.in_proj_ba"),
    ("ssm_beta", "linear_attn.in_proj_b"),
    ("ssm_alpha", "linear_attn.in_proj_a"),
    ("ssm_conv1d", "linear_attn.conv1d"),
    ("ssm_dt.bias", "linear_attn.dt_bias"),
    ("ssm_a", "linear_attn.A_log"),
    ("ssm_norm", "linear_attn.norm"),
    ("ssm_out", "linear_attn.out_proj"),
];

/// A zero-centred norm stored as the weight itself.
const SHIFTED: Change = Change::Mapped(Elementwise::PlusOne);
/// `A_log` stored as `A`.
const RATE: Change = Change::Mapped(Elementwise::NegExp);

/// Changes to Qwen3-Next.
const QWEN_CHANGES: [(&str, Change); 6] = [
    ("attn_norm", SHIFTED),
    ("post_attention_norm", SHIFTED),
    ("attn_q_norm", SHIFTED),
    ("attn_k_norm", SHIFTED),
    ("output_norm", SHIFTED),
    ("ssm_a", RATE),
];

/// Value heads in tiled order along an axis.
const fn tiled(axis: Axis, after_keys: bool, wide: bool) -> Change {
    Change::Tiled { axis, after_keys, wide }
}

/// Changes to Qwen3.5, where value heads are tiled, too.
const TILED_CHANGES: [(&str, Change); 14] = [
    QWEN_CHANGES[0],
    QWEN_CHANGES[1],
    QWEN_CHANGES[2],
    QWEN_CHANGES[3],
    QWEN_CHANGES[4],
    QWEN_CHANGES[5],
    ("attn_qkv", tiled(Axis::Rows, true, true)),
    ("ssm_conv1d", tiled(Axis::Rows, true, true)),
    ("attn_gate", tiled(Axis::Rows, false, true)),
    ("ssm_beta", tiled(Axis::Rows, false, false)),
    ("ssm_alpha", tiled(Axis::Rows, false, false)),
    ("ssm_a", tiled(Axis::Cols, false, false)),
    ("ssm_dt.bias", tiled(Axis::Cols, false, false)),
    ("ssm_out", tiled(Axis::Cols, false, true)),
];

/// Changes to Mamba-2.
const SPACE: [(&str, Change); 4] = [
    ("ssm_a", RATE),
    ("ssm_a", Change::Reshaped),
    ("ssm_d", Change::Reshaped),
    ("ssm_norm", Change::Reshaped),
];

/// Names in Granite.
const GRANITE: Naming = Naming {
    changes: &PAIRED,
    router: "block_sparse_moe.router.layer",
    experts: "block_sparse_moe",
    parts: STACKS,
    shared: "shared_mlp",
    ..MLP
};

const fn row(name: &'static str, naming: Naming, settings: ExtraSettings) -> Architecture {
    Architecture { name, naming, settings, uneven: false, rope_freqs: false }
}

/// A row for an architecture whose layers differ.
const fn uneven(name: &'static str, naming: Naming, settings: ExtraSettings) -> Architecture {
    Architecture { uneven: true, ..row(name, naming, settings) }
}

/// Every supported architecture.
static ARCHITECTURES: [Architecture; 28] = [
    row("llama", Naming { changes: &PAIRED, ..SPARSE }, early::mixtral),
    row("qwen2moe", QWEN, early::qwen2_moe),
    row("qwen3moe", MLP, early::qwen3_moe),
    row("olmoe", MLP, early::olmoe),
    row("deepseek2", MLP, early::deepseek),
    row("glm4moe", MLP, early::glm4_moe),
    row("phimoe", SPARSE, early::phimoe),
    row("gpt-oss", Naming { router: "mlp.router", ..MLP }, early::gpt_oss),
    row(
        "smallthinker",
        Naming { router: "block_sparse_moe.primary_router", parts: PLAIN, ..SPARSE },
        early::smallthinker,
    ),
    row("qwen3next", Naming { own: DELTA, changes: &QWEN_CHANGES, ..QWEN }, late::qwen3_next),
    row("qwen35moe", Naming { own: DELTA, changes: &TILED_CHANGES, ..QWEN }, late::qwen3_5_moe),
    uneven("lfm2moe", LFM2, late::lfm2_moe),
    Architecture { rope_freqs: true, ..uneven("gemma4", GEMMA4, late::gemma4) },
    uneven("nemotron_h_moe", NEMOTRON, late::nemotron_h),
    row("granitemoe", GRANITE, late::granite_moe),
    uneven("granitehybrid", GRANITE_HYBRID, late::granite_hybrid),
    row("mistral4", MLP, late::mistral4),
    row(
        "ernie4_5-moe",
        Naming { own: &[("exp_probs_b.bias", "mlp.moe_statics.e_score_correction_bias")], ..MLP },
        late::ernie4_5_moe,
    ),
    row(
        "minimax-m2",
        Naming { own: &[("exp_probs_b.bias", "block_sparse_moe.e_score_correction_bias")], ..SPARSE },
        late::minimax_m2,
    ),
    uneven("kimi-linear", KIMI, late::kimi_linear),
    Architecture { rope_freqs: true, ..row("llama4", LLAMA4, late::llama4) },
    row("hunyuan-moe", HUNYUAN, late::hunyuan_v1_moe),
    row("dots1", MLP, late::dots1),
    uneven("jamba", JAMBA, late::jamba),
    row("afmoe", AFMOE, late::afmoe),
    Architecture { rope_freqs: true, ..uneven("step35", STEP, late::step3p5) },
    uneven(
        "mimo2",
        Naming { own: &[("attn_sinks.weight", "self_attn.attention_sink_bias")], ..MLP },
        late::mimo_v2_flash,
    ),
    Architecture {
        rope_freqs: true,
        ..row(
            "exaone-moe",
            Naming { own: &[("exp_probs_b.bias", "mlp.e_score_correction_bias")], ..MLP },
            late::exaone_moe,
        )
    },
];

const LFM2: Naming = Naming {
    own: &[
        ("attn_norm", "operator_norm"),
        ("ffn_norm", "ffn_norm"),
        ("attn_q_norm", "self_attn.q_layernorm"),
        ("attn_k_norm", "self_attn.k_layernorm"),
        ("attn_output", "self_attn.out_proj"),
        ("shortconv.conv", "conv.conv"),
        ("shortconv.in_proj", "conv.in_proj"),
        ("shortconv.out_proj", "conv.out_proj"),
        ("exp_probs_b.bias", "feed_forward.expert_bias"),
    ],
    router: "feed_forward.gate",
    experts: "feed_forward.experts",
    parts: W123,
    dense: ("feed_forward", W123),
    ..MLP
};

const GEMMA4: Naming = Naming {
    own: &[
        ("ffn_norm", "pre_feedforward_layernorm"),
        ("pre_ffw_norm_2", "pre_feedforward_layernorm_2"),
        ("post_ffw_norm", "post_feedforward_layernorm"),
        ("post_ffw_norm_1", "post_feedforward_layernorm_1"),
        ("post_ffw_norm_2", "post_feedforward_layernorm_2"),
        ("layer_output_scale.weight", "layer_scalar"),
        ("ffn_gate_inp.scale", "router.scale"),
        ("ffn_down_exps.scale", "router.per_expert_scale"),
    ],
    router: "router.proj",
    experts: "experts",
    ..MLP
};

const NEMOTRON: Naming = Naming {
    own: &[
        ("attn_norm", "norm"),
        ("attn_q", "mixer.q_proj"),
        ("attn_k", "mixer.k_proj"),
        ("attn_v", "mixer.v_proj"),
        ("attn_output", "mixer.o_proj"),
        ("ssm_in", "mixer.in_proj"),
        ("ssm_conv1d", "mixer.conv1d"),
        ("ssm_dt.bias", "mixer.dt_bias"),
        ("ssm_a", "mixer.A_log"),
        ("ssm_d", "mixer.D"),
        ("ssm_norm", "mixer.norm"),
        ("ssm_out", "mixer.out_proj"),
        ("ffn_latent_down", "mixer.fc1_latent_proj"),
        ("ffn_latent_up", "mixer.fc2_latent_proj"),
        ("exp_probs_b.bias", "mixer.gate.e_score_correction_bias"),
    ],
    changes: &SPACE,
    router: "mixer.gate",
    experts: "mixer.experts",
    shared: "mixer.shared_experts",
    dense: ("mixer", PROJ),
    ..MLP
};

const GRANITE_HYBRID: Naming = Naming {
    own: &[
        ("ssm_in", "mamba.in_proj"),
        ("ssm_conv1d", "mamba.conv1d"),
        ("ssm_dt.bias", "mamba.dt_bias"),
        ("ssm_a", "mamba.A_log"),
        ("ssm_d", "mamba.D"),
        ("ssm_norm", "mamba.norm"),
        ("ssm_out", "mamba.out_proj"),
    ],
    changes: &[PAIRED[0], PAIRED[1], SPACE[0], SPACE[1], SPACE[2], SPACE[3]],
    ..GRANITE
};

const KIMI: Naming = Naming {
    own: &[
        ("ssm_conv1d_q", "self_attn.q_conv1d"),
        ("ssm_conv1d_k", "self_attn.k_conv1d"),
        ("ssm_conv1d_v", "self_attn.v_conv1d"),
        ("ssm_f_a", "self_attn.f_a_proj"),
        ("ssm_f_b", "self_attn.f_b_proj"),
        ("ssm_g_a", "self_attn.g_a_proj"),
        ("ssm_g_b", "self_attn.g_b_proj"),
        ("ssm_beta", "self_attn.b_proj"),
        ("ssm_dt.bias", "self_attn.dt_bias"),
        ("ssm_a", "self_attn.A_log"),
        ("ssm_norm", "self_attn.o_norm"),
        ("exp_probs_b.bias", "block_sparse_moe.gate.e_score_correction_bias"),
    ],
    changes: &[("ssm_a", RATE)],
    shared: "block_sparse_moe.shared_experts",
    ..SPARSE
};

const LLAMA4: Naming = Naming {
    router: "feed_forward.router",
    experts: "feed_forward.experts",
    shared: "feed_forward.shared_expert",
    dense: ("feed_forward", PROJ),
    ..MLP
};

const HUNYUAN: Naming = Naming {
    own: &[("attn_q_norm", "self_attn.query_layernorm"), ("attn_k_norm", "self_attn.key_layernorm")],
    router: "mlp.gate.wg",
    shared: "mlp.shared_mlp",
    ..MLP
};

const JAMBA: Naming = Naming {
    own: &[
        ("ffn_norm", "pre_ff_layernorm"),
        ("ssm_in", "mamba.in_proj"),
        ("ssm_conv1d", "mamba.conv1d"),
        ("ssm_x", "mamba.x_proj"),
        ("ssm_dt", "mamba.dt_proj"),
        ("ssm_dt_norm", "mamba.dt_layernorm"),
        ("ssm_b_norm", "mamba.b_layernorm"),
        ("ssm_c_norm", "mamba.c_layernorm"),
        ("ssm_a", "mamba.A_log"),
        ("ssm_d", "mamba.D"),
        ("ssm_out", "mamba.out_proj"),
    ],
    changes: &[("ssm_a", RATE)],
    router: "feed_forward.router",
    experts: "feed_forward.experts",
    dense: ("feed_forward", PROJ),
    ..MLP
};

const AFMOE: Naming = Naming {
    own: &[
        ("attn_gate", "self_attn.gate_proj"),
        ("ffn_norm", "pre_mlp_layernorm"),
        ("post_ffw_norm", "post_mlp_layernorm"),
        ("exp_probs_b.bias", "mlp.expert_bias"),
    ],
    router: "mlp.router.gate",
    ..MLP
};

const STEP: Naming = Naming {
    own: &[("attn_gate", "self_attn.g_proj"), ("exp_probs_b.bias", "moe.router_bias")],
    changes: &[
        ("attn_norm", SHIFTED),
        ("ffn_norm", SHIFTED),
        ("attn_q_norm", SHIFTED),
        ("attn_k_norm", SHIFTED),
        ("output_norm", SHIFTED),
    ],
    router: "moe.gate",
    experts: "moe",
    shared: "share_expert",
    ..MLP
};

/// Returns the row for a file.
///
/// # Errors
/// Fails if the architecture is not supported, or the file is not a model.
pub(super) fn find(keys: &Keys<'_>) -> Result<&'static Architecture> {
    const TYPE: &str = "general.type";
    if let Some(kind) = keys.text(TYPE)?.filter(|kind| *kind != "model") {
        return Err(Error::limit(format!("{} is `{kind}`, which is not a model by itself", keys.name(TYPE)))
            .hint("give the GGUF file of a language model"));
    }
    let name = keys.architecture()?;
    ARCHITECTURES.iter().find(|row| row.name == name).ok_or_else(|| {
        keys.unsupported("general.architecture", name, &ARCHITECTURES.each_ref().map(|row| row.name))
    })
}
