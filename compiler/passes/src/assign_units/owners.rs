//! Owners: whole experts of every layer on each host, everything else on the first.
//!
//! Hosts have ranges of experts in proportion to their rates of reading weights, the first host the first ones.
//! Which of them work depends on the router, so work is less even than with slices.

use super::{UnitAssignment, expert_rows, take, takes_experts};
use crate::decisions::Decision;
use moec_base::error::{Error, Result};
use moec_costs::units::UnitList;
use moec_ir::Module;
use moec_ir::placement::Placement;

/// Puts a range of each layer's experts on each host.
///
/// # Errors
/// Layers with fewer experts than hosts; an operator that the unit of a host does not run.
pub(super) fn owners(
    module: &Module,
    placed: &mut Placement,
    list: &UnitList<'_>,
    assignment: &mut UnitAssignment,
) -> Result<Vec<Decision>> {
    let (hosts, shares) = (list.hosts(), list.host_shares());
    let mut decisions = Vec::new();
    for layer in 0..placed.experts.len() {
        let (count, index) = (placed.experts[layer].experts.len(), placed.experts[layer].layer);
        let ends = ends(count, &shares).ok_or_else(|| {
            let hosts = hosts.len();
            Error::limit(format!("layer {index} has {count} experts, which are too few for {hosts} hosts"))
                .hint("use fewer hosts, or `hosts = \"slices\"` under `[placement]`")
        })?;
        for accelerator in hosts.iter().filter_map(|&unit| list.accelerator(unit)) {
            takes_experts(module, index, accelerator)?;
        }
        let unit = |expert: usize| hosts.get(ends.partition_point(|&end| end <= expert)).copied();
        let chosen = (0..count).filter_map(|e| Some((e as u32, unit(e)?)));
        let chosen: Vec<(u32, u32)> = chosen.filter(|&(_, unit)| unit != 0).collect();
        take(placed, layer, &chosen, assignment);
        let begins = [0].into_iter().chain(ends.iter().copied());
        let ranges = hosts.iter().zip(begins.zip(&ends)).map(|(&unit, (begin, &end))| {
            let name = list.device.units.get(unit as usize).map_or("?", |u| &u.name);
            format!("{begin} to {} on `{name}`", end - 1)
        });
        let why = "in proportion to the rates at which the hosts read weights";
        let shown = ranges.collect::<Vec<_>>().join(", ");
        decisions.push(Decision::new("assign_units", "experts of the hosts", shown, why).in_layer(index));
    }
    expert_rows(module, placed, assignment);
    Ok(decisions)
}

/// Ends of the hosts' ranges of `count` experts, one expert at least for each host; `None` if there are fewer.
fn ends(count: usize, shares: &[f64]) -> Option<Vec<usize>> {
    let hosts = shares.len();
    (count >= hosts).then_some(())?;
    let (mut sum, mut end) = (0.0, 0);
    let of = |(host, share): (usize, &f64)| {
        sum += share;
        let most = count - (hosts - host - 1);
        end = if host + 1 == hosts {
            count
        } else {
            ((sum * count as f64).round() as usize).clamp(end + 1, most)
        };
        end
    };
    Some(shares.iter().enumerate().map(of).collect())
}

#[cfg(test)]
mod tests {
    use super::ends;

    #[test]
    fn ranges_are_in_proportion_and_none_is_empty() {
        assert_eq!(ends(8, &[0.5, 0.5]), Some(vec![4, 8]));
        assert_eq!(ends(8, &[1.0 / 3.0; 3]), Some(vec![3, 5, 8]));
        assert_eq!(ends(4, &[0.98, 0.01, 0.01]), Some(vec![2, 3, 4]));
        assert_eq!(ends(2, &[0.3, 0.3, 0.4]), None);
    }
}
