//! A bundle on the device that it was built for, compared with the baselines on the same model.

use super::systems::{ABLATIONS, ANEMLL, COREML_CPU, COREML_NAIVE};
use moec_base::error::{Error, Result};
use moec_bundle::read::Bundle;
use moec_config::ExpertsConfig;
use moec_costs::constants::Constants;
use moec_costs::model::Model;
use moec_costs::request::{placed, prompt};
use moec_costs::run::{Outcome, Scenario};
use moec_costs::units::Units;
use moec_device::{BUILT_IN, Device};
use moec_ir::placement::Placement;
use moec_profile::Profile;
use moec_profile::loads::{LayerLoads, Loads, loads};
use moec_targets::backends;

/// Options of a bundle's simulation.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The device.
    pub device: &'a Device,
    /// Loads of the experts; none: the means that the bundle remembers of its own profile.
    pub profile: Option<&'a Profile>,
    /// Tokens of the prompt; none: four chunks, or the context.
    pub prompt: Option<u32>,
    /// Tokens decoded after it; none: what is usual for such a bundle.
    pub decode: Option<u32>,
}

/// Result.
#[derive(Clone, Debug)]
pub struct Simulated {
    /// Tokens of a chunk.
    pub chunk: u32,
    /// Tokens of the prompt, whole chunks.
    pub prompt: u32,
    /// Tokens decoded.
    pub decode: u32,
    /// Source of the loads.
    pub loads: String,
    /// The bundle first, then the baselines and the ablations, by name.
    pub outcomes: Vec<(&'static str, Outcome)>,
}

/// Name of the bundle among the systems.
pub const BUNDLE: &str = "this bundle";

/// Simulates a bundle.
///
/// # Errors
/// A bundle or a device without static graphs, a profile of another model, a prompt past the context.
pub fn simulate(bundle: &Bundle, request: &Request<'_>) -> Result<Simulated> {
    let (device, decode) = (request.device, request.decode.unwrap_or(0));
    let placement = &bundle.plan.placement;
    let target = &bundle.plan.target.name;
    if placement.is_dynamic() {
        return Err(Error::input(format!(
            "the bundle is for `{target}`, which has no static graphs"
        ))
        .hint(format!(
            "bundles for {} can be simulated, and those with `[memory] budget`; `moec steps` times one of this machine",
            targets(|d| has_npu(d) || has_ndp_dimms(d))
        )));
    }
    let units = Units::of(device).ok_or_else(|| {
        Error::input(format!("`{}` has no neural processing unit", device.name))
            .hint(format!("targets with one are {}", targets(has_npu)))
    })?;
    if units.names() != placement.units {
        return Err(Error::input(format!(
            "the bundle was placed on {}, and `{}` has {}",
            placement.units.join(", "),
            device.name,
            units.names().join(", ")
        )));
    }
    let model = Model::of(&bundle.graph()?, &bundle.plan.model.family, bundle.plan.model.layers)?;
    let chunk = placement.chunk;
    let loads = match request.profile {
        Some(profile) => loads(profile, chunk)?,
        None => mean_loads(placement)?,
    };
    check(&loads, placement)?;
    let context = bundle.plan.model.max_context;
    let length = request.prompt.unwrap_or_else(|| chunk.saturating_mul(4).min(context)).max(1);
    if length.saturating_add(decode) > context {
        return Err(Error::usage(format!(
            "a prompt of {length} tokens and {decode} decoded ones do not fit into a context of {context}"
        ))
        .hint("`--prompt` and `--decode` say how many"));
    }
    let prompt = prompt(&loads, chunk, length.div_ceil(chunk), decode);
    let scene = Scenario {
        model: &model,
        units: &units,
        constants: Constants::NPUMOE,
        calibration: &loads,
        coverage: ExpertsConfig::DEFAULT.coverage,
        overflow: placement.overflow,
    };
    let mut outcomes = vec![(BUNDLE, scene.run(&placed(placement, &units), &prompt))];
    for system in [COREML_CPU, COREML_NAIVE, ANEMLL].iter().chain(&ABLATIONS) {
        outcomes.push((system.name, scene.run(&system.place(&scene)?, &prompt)));
    }
    let tokens = prompt.tokens();
    Ok(Simulated { chunk, prompt: tokens, decode, loads: loads.origin, outcomes })
}

/// Names of the built-in targets that fit, in words.
fn targets(fits: impl Fn(&Device) -> bool) -> String {
    let names = BUILT_IN.iter().map(|(name, _)| *name);
    let fitting = names.filter(|name| Device::find(name).is_ok_and(|device| fits(&device)));
    fitting.map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

/// Returns `true` if a device has a neural processing unit.
fn has_npu(device: &Device) -> bool {
    Units::of(device).is_some()
}

/// Returns `true` if a device has NDP DIMMs.
fn has_ndp_dimms(device: &Device) -> bool {
    device
        .units
        .iter()
        .any(|unit| backends::of(unit, device).is_ok_and(|family| family.command_streams().is_some()))
}

/// One chunk of mean loads, as the profile that a bundle was built with gave them.
fn mean_loads(placement: &Placement) -> Result<Loads> {
    let mut layers = Vec::new();
    for table in &placement.experts {
        let sample: Option<Vec<u32>> =
            table.experts.iter().map(|row| row.load.map(|l| l.round().max(0.0) as u32)).collect();
        let sample = sample.ok_or_else(|| {
            Error::input("the bundle does not remember the loads of its experts")
                .hint("`--trace` names a profile")
        })?;
        layers.push(LayerLoads {
            layer: table.layer,
            k: table.k,
            tokens: u64::from(placement.chunk),
            chosen: sample.iter().map(|&n| u64::from(n)).collect(),
            samples: vec![sample],
        });
    }
    Ok(Loads { chunk: placement.chunk, origin: "mean loads of the bundle's own profile".to_owned(), layers })
}

/// Whether loads are of the model that was placed.
fn check(loads: &Loads, placement: &Placement) -> Result<()> {
    let same = loads.layers.len() == placement.experts.len()
        && loads
            .layers
            .iter()
            .zip(&placement.experts)
            .all(|(l, t)| (l.layer, l.k, l.experts()) == (t.layer, t.k, t.experts.len()));
    if same && loads.layers.iter().all(|l| !l.samples.is_empty()) {
        return Ok(());
    }
    Err(Error::input("the profile is of another model than the bundle")
        .hint("`moec calibrate` with the `model.toml` of the bundle records one"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;
    use moec_costs::timeline::Queue;

    const TEXT: &str = r#"
placement {chunk = 64, overflow = spill, units = ["cpu", "npu"]}
placed prefill[64] "layers.*.attn" "attention" {unit = 1, nodes = 1, why = "so"}
placed decode[1] "layers.*.attn" "attention" {unit = 0, nodes = 1, why = "so"}
placed decode[1] "layers.*.ffn" "expert_ffn" {unit = 1, nodes = 1, why = "so"}
experts {layer = 3, k = 1, tiers = [32]} {
  group 0 {tier = 0, unit = 1, experts = [0, 1], bytes = 64, cost_us = [9.0, 3.0], why = "so"}
  expert 0 {capacity = 32, group = 0, unit = 1, tier = 0, fallback = 0, load = 31.6}
  expert 1 {capacity = 32, group = 0, unit = 1, tier = 0, fallback = 0}
}
"#;

    #[test]
    fn hints_name_every_target_that_can_be_simulated() {
        assert_eq!(targets(has_npu), "`m2-max`, `m2-ultra`, `snapdragon-8-gen-3`, `snapdragon-8-plus-gen-1`");
        assert_eq!(targets(has_ndp_dimms), "`spr-ndp`, `h100-spr-ndp`");
    }

    #[test]
    fn queues_of_calls_follow_the_placement() {
        let mut placement = moec_ir::text::parse_placement(TEXT).unwrap();
        let device = Device::find("m2-ultra").unwrap();
        let found = placed(&placement, &Units::of(&device).unwrap());
        assert_eq!((found.attention, found.decode_attention), (Queue::Npu, Queue::Cpu));
        assert!(found.decode_batch == 1 && found.resident);
        // Without a load for each expert, there are no mean loads.
        assert!(mean_loads(&placement).unwrap_err().hint.unwrap().contains("--trace"));
        placement.experts[0].experts[1].load = Some(32.4);
        let loads = mean_loads(&placement).unwrap();
        assert_eq!(loads.layers[0].samples, [[32, 32]]);
        check(&loads, &placement).unwrap();
        let prompt = prompt(&loads, 64, 3, 1);
        assert_eq!((prompt.chunks.len(), prompt.tokens(), prompt.decode.len()), (3, 192, 1));
        assert_eq!(prompt.decode[0][0].iter().sum::<u32>(), 1);
        placement.experts[0].k = 2;
        assert!(check(&loads, &placement).unwrap_err().to_string().contains("another model"));
    }
}
