//! Granite MoE with an expert for every token next to the others.

use super::Family;
use super::granitemoe::{attention, mixture, multiplied};
use crate::checkpoint::Checkpoint;
use crate::common::{Base, PRE_NORMS};
use crate::config::Config;
use crate::mixers::{Mlp, Moe, Shared};
use crate::spec::{ModelSpec, Projection};
use crate::tensors::Dim;
use moec_base::error::Result;
use moec_ir::{Axis, WeightExpr};

pub(super) static FAMILY: Family = Family {
    name: "granitemoeshared",
    title: "Granite MoE with a shared expert",
    architectures: &["GraniteMoeSharedForCausalLM"],
    examples: &["ibm-research/moe-7b-1b-active-shared-experts"],
    read,
};

fn read(config: &Config, checkpoint: &Checkpoint) -> Result<ModelSpec> {
    let b = multiplied(Base::read(config, checkpoint)?)?;
    let (attention, moe) = (attention(&b)?, mixture(&b)?);
    b.pre_norm_model(&FAMILY, PRE_NORMS, |b, l| {
        let moe = Moe { shared: shared(b, l)?, ..moe.moe(b, l)? };
        Ok([b.gqa(l, attention)?.into(), moe.into()])
    })
}

/// The expert of a layer for every token, with gate and up in one matrix or in two.
pub(super) fn shared(b: &Base<'_>, layer: usize) -> Result<Option<Shared>> {
    let Some(inner) = b.config.opt_count(&["shared_intermediate_size"])?.filter(|s| s.n > 0) else {
        return Ok(None);
    };
    let inner = Dim::from(inner);
    let at = format!("{}.shared_mlp", b.layer(layer));
    let both = format!("{at}.input_linear.weight");
    if b.tensors.has(&format!("{at}.gate_proj.weight")) {
        return Ok(Some(Shared { mlp: b.mlp(&at, &inner, false)?, gate: None }));
    }
    let both = b.tensors.take(&both, &[&inner.doubled(), &b.hidden])?;
    let half = |start| Projection {
        weight: WeightExpr::Slice {
            axis: Axis::Rows,
            start,
            step: 1,
            len: inner.n,
            of: Box::new(both.clone()),
        },
        bias: None,
    };
    let down = b.tensors.projection(&format!("{at}.output_linear"), &b.hidden, &inner, false)?;
    Ok(Some(Shared { mlp: Mlp { gate: Some(half(0)), up: half(inner.n), down, glu: b.glu }, gate: None }))
}
