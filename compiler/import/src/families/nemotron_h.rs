//! Nemotron-H and Nemotron 3. A layer has one mixer: Mamba-2, attention without rotation, a network, or
//! experts. Experts have no gate, and may read rows of fewer channels.
//!
//! Mamba-2 steps are not clamped, as in the published code; transformers clamps those of whole chunks to at
//! least `time_step_min`.

use super::Family;
use crate::checkpoint::Checkpoint;
use crate::common::{Base, LAYERS, activation_of, only_silu};
use crate::config::Config;
use crate::mixers::{GqaOptions, Mixer, Mixture, Moe, MoeNames, Shared, StateSpaceSizes};
use crate::spec::{Block, LayerSpec, ModelSpec};
use crate::tensors;
use crate::tensors::Dim;
use moec_base::error::{Error, Result};
use moec_ir::Glu;

pub(super) static FAMILY: Family = Family {
    name: "nemotron_h",
    title: "Nemotron 3",
    architectures: &["NemotronHForCausalLM"],
    examples: &["nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"],
    read,
};

const NAMES: MoeNames = MoeNames {
    gate: "mixer.gate",
    bias: Some("mixer.gate.e_score_correction_bias"),
    experts: "mixer.experts",
    ..MoeNames::DEEPSEEK
};

/// Published configurations have a letter for the kind of each layer.
const PATTERN: &str = "hybrid_override_pattern";
/// Kinds of layers, by name and letter.
const KINDS: [[&str; 2]; 4] =
    [["linear_attention", "M"], ["full_attention", "*"], ["moe", "E"], ["mlp", "-"]];

/// The name of each layer's kind.
fn kinds(b: &Base<'_>) -> Result<Vec<&'static str>> {
    let (key, by, letters): (_, _, Vec<String>) = match b.config.opt_text(PATTERN)? {
        Some(letters) => (PATTERN, 1, letters.chars().map(String::from).collect()),
        None => (LAYERS, 0, b.config.opt_texts(LAYERS)?.unwrap_or_default()),
    };
    if letters.len() < b.layers {
        let (name, n) = (b.config.name(key), letters.len());
        return Err(Error::input(format!("{name} has {n} entries, but the model has {} layers", b.layers)));
    }
    let kind = |letters: &String| match KINDS.iter().find(|kind| kind[by] == letters) {
        Some([name, _]) => Ok(*name),
        None => Err(b.config.unsupported(key, letters, &KINDS.map(|kind| kind[by]))),
    };
    letters.iter().take(b.layers).map(kind).collect()
}

fn read(config: &Config, checkpoint: &Checkpoint) -> Result<ModelSpec> {
    let glu = Glu::Ungated(activation_of(config, "mlp_hidden_act", "relu2")?);
    let mut b = Base::read_with_glu(glu, config, checkpoint)?;
    b.latent = config.opt_size(&["moe_latent_size"])?.map(Dim::from);
    let kinds = kinds(&b)?;
    only_silu(config, "mamba_hidden_act")?;
    let sizes = StateSpaceSizes {
        heads: config.size(&["mamba_num_heads"])?.into(),
        dim: config.size(&["mamba_head_dim"])?.into(),
        groups: config.size(&["n_groups"])?.into(),
        state: config.size(&["ssm_state_size"])?.into(),
        taps: tensors::taps(config, &["conv_kernel"])?,
        conv_bias: config.flag_or("use_conv_bias", true)?,
        bias: config.flag_or("use_bias", false)?,
    };
    let biased = config.flag_or("attention_bias", false)?;
    let attention =
        GqaOptions { at: "mixer", rope: None, qkv_bias: biased, o_bias: biased, ..GqaOptions::default() };
    let bias = config.flag_or("mlp_bias", false)?;
    let mixture = if kinds.contains(&"moe") {
        let shared = Dim::from(config.size(&["moe_shared_expert_intermediate_size"])?);
        let routed = Mixture { shared: None, ..Mixture::noaux_tc(&b, (1, 1), 1.0, NAMES)? };
        Some((routed, shared))
    } else {
        None
    };
    let layers = b.each_layer(|l| {
        let at = format!("{}.mixer", b.layer(l));
        let mixer: Mixer = match (kinds[l], &mixture) {
            ("linear_attention", _) => b.state_space(&at, &sizes)?.into(),
            ("full_attention", _) => b.gqa(l, attention)?.into(),
            ("moe", Some((routed, shared))) => {
                let mlp = b.mlp(&format!("{at}.shared_experts"), shared, bias)?;
                let project = |name: &str, out, input| {
                    b.tensors.projection(&format!("{at}.{name}_latent_proj"), out, input, bias)
                };
                let latent = match &b.latent {
                    Some(n) => Some([project("fc1", n, &b.hidden)?, project("fc2", &b.hidden, n)?]),
                    None => None,
                };
                Moe { latent, shared: Some(Shared { mlp, gate: None }), ..routed.moe(&b, l)? }.into()
            }
            _ => b.mlp(&at, &config.size(&["intermediate_size"])?.into(), bias)?.into(),
        };
        let norm = Some(b.rms_norm(&format!("{}.norm", b.layer(l)))?);
        Ok(LayerSpec { blocks: vec![Block { norm, mixers: vec![mixer], post_norm: None }], scale: None })
    })?;
    let norm = b.final_norm()?;
    b.finish(&FAMILY, layers, norm, false)
}
