//! Parts of published models that accelerators have operators for, by the rules that placement follows.

use crate::facts;
use moec_base::Result;
use moec_base::progress::Progress;
use moec_config::Config;
use moec_costs::units::{UnitList, Units};
use moec_import::{Checkpoint, ModelSpec};
use moec_ir::{Module, Node, Role, Scope};
use moec_pipeline::{Compilation, Inputs, Stops};
use moec_synth::Like;
use std::collections::BTreeSet;
use std::path::Path;

/// Targets with an accelerator, and what it is.
pub(super) const TARGETS: [(&str, &str); 4] =
    [("m2-ultra", "NPU"), ("snapdragon-8-gen-3", "NPU"), ("spr-ndp", "DIMMs"), ("h100-x86", "GPU")];

/// Parts of a model beside its experts.
const PARTS: [(Role, &str); 4] = [
    (Role::Attention, "attention"),
    (Role::Mixer, "mixers"),
    (Role::Network, "other networks"),
    (Role::Head, "head"),
];

/// For each of [`TARGETS`], the parts of a model that its accelerator can take.
///
/// # Errors
/// Only bugs: a model that cannot be lowered.
pub(super) fn cells(like: Like) -> Result<Vec<String>> {
    let config = like.config()?.as_object().cloned().unwrap_or_default();
    let config = moec_import::Config::of("config.json", config);
    let (checkpoint, spec) = moec_import::shapes(Path::new("model"), config)?;
    TARGETS.iter().map(|(target, _)| cell(&checkpoint, &spec, target)).collect()
}

/// The parts for one target.
fn cell(checkpoint: &Checkpoint, spec: &ModelSpec, name: &str) -> Result<String> {
    let device = moec_targets::device(name)?;
    let facts = facts::of(spec, &|leaf| checkpoint.format(leaf));
    let text = moec_config::template(Path::new("model"), &facts, false, &[]);
    let config = Config::parse(&text, Path::new("model.toml"))?;
    let target = moec_targets::target_of(&device, name)?;
    let mut inputs = Inputs::new(&config, checkpoint, spec, &target);
    inputs.units = Units::of(&device);
    let mut compilation = Compilation::new(inputs);
    let stops = Stops { stop_after: Some("rewrite"), ..Stops::default() };
    compilation.run(stops, &Progress::new(true, false), &mut |_| {})?;
    let module = &compilation.module;

    let nodes = || module.entries.iter().flat_map(|g| &g.nodes);
    let (units, list) = (Units::of(&device), UnitList::of(&device));
    let runs = |node: &Node| match (&units, list.accelerators.first()) {
        (Some(units), _) => units.npu.is_legal(node.op.name()),
        (None, Some(of)) => of.unit.is_legal(node.op.name()) && of.backend.takes(&node.op),
        (None, None) => false,
    };
    let whole = |role: Role| match &units {
        Some(units) => {
            scopes(module, role).iter().all(|s| units.graphs.subgraph(module, s, units.npu).is_ok())
        }
        // Rows of several units meet on the CPU, as do angles that depend on the length of a prompt.
        None => nodes().filter(|n| n.scope.role() == role && !is_expert(n)).all(|n| meets(n) || runs(n)),
    };
    let experts = nodes().filter(|n| is_expert(n)).all(runs);
    let there = |role: Role| nodes().any(|n| n.scope.role() == role && !is_expert(n));
    let parts = PARTS.iter().filter(|(role, _)| there(*role) && whole(*role)).map(|(_, name)| *name);
    let taken: Vec<&str> = experts.then_some("experts").into_iter().chain(parts).collect();
    Ok(if taken.is_empty() { "–".to_owned() } else { taken.join(", ") })
}

/// Scopes of a role.
fn scopes(module: &Module, role: Role) -> BTreeSet<Scope> {
    let nodes = module.entries.iter().flat_map(|g| &g.nodes);
    nodes.filter(|n| n.scope.role() == role).map(|n| n.scope.clone()).collect()
}

/// Whether a node computes routed experts.
fn is_expert(node: &Node) -> bool {
    matches!(node.op.name(), "expert_ffn" | "zero_experts")
}

/// Whether a node runs on the CPU wherever the rest of its part is.
fn meets(node: &Node) -> bool {
    matches!(node.op.name(), "dispatch" | "combine" | "rope_angles")
}
