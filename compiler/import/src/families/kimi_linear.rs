//! Kimi Linear: one layer of latent attention without rotation after every three of delta attention,
//! DeepSeek-V3's routing.

use super::Family;
use crate::checkpoint::Checkpoint;
use crate::common::{Base, PRE_NORMS};
use crate::config::Config;
use crate::mixers::{KdaSizes, Mixer, Mixture, MlaOptions, MoeNames, W123};
use crate::spec::ModelSpec;
use crate::tensors;
use moec_base::error::Result;
use moec_ir::RopeStyle;

pub(super) static FAMILY: Family = Family {
    name: "kimi_linear",
    title: "Kimi Linear",
    architectures: &["KimiLinearForCausalLM"],
    examples: &["moonshotai/Kimi-Linear-48B-A3B-Instruct"],
    read,
};

const NAMES: MoeNames = MoeNames {
    gate: "block_sparse_moe.gate",
    bias: Some("block_sparse_moe.gate.e_score_correction_bias"),
    experts: "block_sparse_moe.experts",
    parts: W123,
    shared: "block_sparse_moe.shared_experts",
};

fn read(config: &Config, checkpoint: &Checkpoint) -> Result<ModelSpec> {
    let b = Base::read(config, checkpoint)?;
    let moe = Mixture::noaux_tc(&b, (1, 1), 1.0, NAMES)?;
    let dense = b.dense_layers(1)?;
    let linear = config.opt_section("linear_attn_config")?;
    let folds: Box<dyn Fn(usize) -> bool> = match &linear {
        Some(section) => {
            // Layers are counted from 1.
            let attends = section.opt_ids("full_attn_layers")?.unwrap_or_default();
            Box::new(move |l| !attends.iter().any(|&n| n as usize == l + 1))
        }
        None => Box::new(b.is_first_kind(["linear_attention", "full_attention"])?),
    };
    let of = linear.as_ref().unwrap_or(config);
    let sizes = KdaSizes {
        heads: of.size(&["num_heads", "linear_num_heads"])?.into(),
        dim: of.size(&["linear_head_dim", "head_dim"])?.into(),
        taps: tensors::taps(of, &["short_conv_kernel_size", "linear_conv_kernel_dim"])?,
    };
    let attention = MlaOptions { rotated: false, ..MlaOptions::of(RopeStyle::Half) };
    b.pre_norm_model(&FAMILY, PRE_NORMS, |b, l| {
        let at = format!("{}.self_attn", b.layer(l));
        let mixer: Mixer =
            if folds(l) { b.kda(&at, &sizes, None, "o_proj")?.into() } else { b.mla(l, attention)?.into() };
        Ok([mixer, if dense(l) { b.dense(l, false)? } else { moe.moe(b, l)?.into() }])
    })
}
