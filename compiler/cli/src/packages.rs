//! Sizes of packages for accelerators, against these units' limits.

use moec_backend::{ArtifactSizes, HotLayer, UnitSizes};
use moec_base::{Result, human};
use moec_bundle::read::Bundle;
use moec_costs::units::Units;

/// Sizes of the packages of a bundle; `None` if it has none or their backend reports no sizes.
///
/// # Errors
/// A package that cannot be read.
pub(super) fn sizes(bundle: &Bundle) -> Result<Option<UnitSizes>> {
    if bundle.plan.graphs.is_empty() {
        return Ok(None);
    }
    let device = bundle.device()?;
    let Some(units) = Units::of(&device) else { return Ok(None) };
    let sizes = units.graphs.sizes(&bundle.folder, units.npu)?;
    Ok(sizes.filter(|sizes| !sizes.artifacts.is_empty()))
}

/// Number of a bundle's functions of hot neurons, and the bytes of their weights; `None` if it has none.
///
/// # Errors
/// As [`sizes`].
pub(super) fn hot(bundle: &Bundle) -> Result<Option<(usize, u64)>> {
    Ok(sizes(bundle)?.as_ref().and_then(hot_of))
}

/// The same, from known sizes.
pub(super) fn hot_of(sizes: &UnitSizes) -> Option<(usize, u64)> {
    let name = |a: &&ArtifactSizes| {
        let path = std::path::Path::new(&a.package);
        path.file_stem().is_some_and(|stem| HotLayer::has_name(&stem.to_string_lossy()))
    };
    let own = sizes.artifacts.iter().filter(name);
    let hot = own.fold((0, 0), |(n, b), a| (n + a.functions, b + a.weights));
    Some(hot).filter(|(functions, _)| *functions > 0)
}

/// Sizes for people: the sum of all packages, and the maximum of each limited size.
pub(super) fn rows(sizes: &UnitSizes) -> Vec<Vec<String>> {
    let all = &sizes.artifacts;
    let sum = |of: fn(&ArtifactSizes) -> u64| all.iter().map(of).sum::<u64>();
    let most = |of: fn(&ArtifactSizes) -> u64| human::bytes(all.iter().map(of).max().unwrap_or(0));
    let row = |name: &str, value: String| vec![name.to_owned(), value];
    let functions: usize = all.iter().map(|a| a.functions).sum();
    let of =
        |limit: Option<u64>| limit.map_or_else(String::new, |limit| format!(" of {}", human::bytes(limit)));
    let mut rows = vec![
        row(
            "codes",
            format!(
                "{} of {functions} functions in {} packages; {} without sharing",
                human::bytes(sum(|a| a.weights)),
                all.len(),
                human::bytes(sum(|a| a.unshared))
            ),
        ),
        row("largest function", format!("{}{}", most(|a| a.largest), of(sizes.graph_limit))),
        row("widest node", format!("{}{}", most(|a| a.activations), of(sizes.tile_memory))),
    ];
    let built = all.iter().filter(|a| a.context.is_some()).count();
    if built > 0 {
        let total = sum(|a| a.context.unwrap_or(0));
        let largest = most(|a| a.context.unwrap_or(0));
        let limit = human::bytes(sizes.context_limit);
        rows.push(row(
            "contexts",
            format!("{built}: {}, the largest {largest} of {limit}", human::bytes(total)),
        ));
    }
    rows
}
