//! Checks of static graphs and of the experts that they compute.

use super::{VerifyError, require};
use crate::plan::{GraphDecl, Plan, Subgraph};
use std::collections::HashSet;

/// Every graph has distinct tensors of some size inside the address space; every set's groups fit their
/// graphs, and no expert is in two of them. A set without groups only bounds its experts. In a set for
/// decoding an expert has room for all rows of the batch; of each cluster of hot neurons every expert has a
/// graph of its own.
pub(super) fn check(plan: &Plan) -> Result<(), VerifyError> {
    for (i, g) in plan.graphs.iter().enumerate() {
        let at = || format!("graphs[{i}]");
        require(super::stays_inside(&g.package), at, || {
            format!("path {:?} does not stay inside the bundle", g.package)
        })?;
        require(!g.inputs.is_empty() && !g.outputs.is_empty(), at, || "no inputs, or no outputs".into())?;
        let mut names = HashSet::new();
        for tensor in g.inputs.iter().chain(&g.outputs) {
            let fits = tensor.checked_elements().is_some_and(|n| n > 0 && n <= isize::MAX as usize / 4);
            require(fits && names.insert(&tensor.name), at, || {
                format!("tensor {:?} {:?}", tensor.name, tensor.shape)
            })?;
        }
    }
    let mut layers = HashSet::new();
    for (i, s) in plan.expert_sets.iter().enumerate() {
        let at = || format!("sets[{i}]");
        require(layers.insert((s.layer, s.batch)), at, || format!("layer {} occurs twice", s.layer))?;
        require(!s.capacities.is_empty(), at, || "no experts".into())?;
        for group in &s.groups {
            let graph = plan.graphs.get(group.graph as usize);
            let rows = u32::try_from(group.experts.len()).ok().and_then(|n| n.checked_mul(group.capacity));
            let fits = |d: &GraphDecl| match (d.inputs.as_slice(), d.outputs.as_slice()) {
                ([x], [y]) => x.shape == y.shape && Some(x.shape[0]) == rows && x.shape[2..] == [1, 1],
                _ => false,
            };
            let sound = group.capacity > 0
                && !group.experts.is_empty()
                && graph.is_some_and(|d| fits(d) && !d.stateful);
            require(sound, at, || format!("graph {} does not hold its experts", group.graph))?;
        }
        if let Some(batch) = s.batch {
            let room = batch > 0 && s.capacities.iter().all(|&c| c == 0 || c >= batch);
            require(room, at, || format!("an expert without room for {batch} rows that are decoded"))?;
        }
        if let Some(neurons) = s.hot {
            let batch = s.batch.unwrap_or(0);
            let room = batch > 0 && neurons > 0 && s.capacities.iter().all(|&c| c == batch);
            let whole = !s.groups.is_empty() && s.groups.len().is_multiple_of(s.capacities.len());
            let separate = whole && s.groups.iter().all(|g| g.experts.len() == 1);
            require(room && separate, at, || {
                format!("experts without a graph of their own for {batch} rows of hot neurons")
            })?;
        }
        for groups in s.addends() {
            let mut seen = HashSet::new();
            // Groups of the same experts, one after the other, are sizes of one graph.
            for sizes in groups.chunk_by(|a, b| a.experts == b.experts) {
                let Some(largest) = sizes.last() else { continue };
                require(sizes.is_sorted_by(|a, b| a.capacity < b.capacity), at, || {
                    format!("the sizes of graph {} do not ascend", largest.graph)
                })?;
                for &e in &largest.experts {
                    let room = s.capacities.get(e as usize) == Some(&largest.capacity);
                    require(room && seen.insert(e), at, || format!("expert {e} has no room, or two places"))?;
                }
            }
            let missing = (0u32..).zip(&s.capacities).find(|&(e, &c)| c > 0 && !seen.contains(&e));
            require(missing.is_none(), at, || "an expert with a capacity is in no graph".into())?;
        }
    }
    check_parts(plan)
}

/// Every graph of a part takes what the runtime gives, and their results have the part's channels in all.
fn check_parts(plan: &Plan) -> Result<(), VerifyError> {
    for (i, p) in plan.subgraphs.iter().enumerate() {
        let at = || format!("parts[{i}]");
        require(!p.graphs.is_empty() && p.inputs > 0, at, || "no graphs, or no channels".into())?;
        let (mut channels, mut anywhere) = (0u64, 0);
        let mut rows = None;
        for &g in &p.graphs {
            let graph = plan.graphs.get(g as usize);
            let fits = graph.is_some_and(|g| part_takes(p, g, &mut rows));
            require(fits, at, || format!("graph {g} has other inputs"))?;
            let own: u64 = graph.map_or(0, |g| g.outputs.iter().map(|o| u64::from(o.shape[1])).sum());
            let fixed = p.attention.is_some() && graph.is_some_and(|g| g.fixed_start().is_some());
            // Of an attention's graphs one runs: that of the place where the rows begin, or the one that
            // writes anywhere.
            if fixed {
                require(own == u64::from(p.outputs), at, || format!("graph {g} has {own} output channels"))?;
            } else {
                channels += own;
                anywhere += 1;
            }
        }
        let one = p.attention.is_none() || anywhere == 1;
        require(one, at, || format!("{anywhere} attention graphs write at any position"))?;
        require(channels == u64::from(p.outputs), at, || {
            format!("{channels} channels, expected {}", p.outputs)
        })?;
    }
    Ok(())
}

/// Whether a graph has the tensors that a part gives and takes, with as many rows as the graphs before it.
fn part_takes(p: &Subgraph, g: &GraphDecl, rows: &mut Option<u32>) -> bool {
    let t = *rows.get_or_insert(g.inputs[0].shape[0]);
    let mut expected = vec![("x", [t, p.inputs, 1, 1])];
    if let Some(a) = p.attention {
        expected.extend((a.angles > 0).then_some(("angles", [t, a.angles, 1, 1])));
        match g.fixed_start() {
            None => expected.extend([("mask", [1, 1, t, a.context]), ("write", [1, 1, a.context, t])]),
            Some(start) => match start.checked_add(t).filter(|end| *end <= a.context) {
                Some(end) => expected.push(("mask", [1, 1, t, end])),
                None => return false,
            },
        }
    }
    let given =
        |&(name, shape): &(&str, [u32; 4])| g.inputs.iter().any(|i| i.name == name && i.shape == shape);
    g.inputs.len() == expected.len()
        && expected.iter().all(given)
        && g.outputs.iter().all(|o| o.shape[0] == t && o.shape[2..] == [1, 1])
        && g.stateful == p.attention.is_some()
}
