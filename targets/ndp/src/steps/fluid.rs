//! Sharing of resources between flows, as long as none begins or ends.
//!
//! A flow is a piece of work that goes from 0 to 1. It has a maximum speed of its own, and for each resource
//! the time that all of it takes there. Resources serve classes in their order. In a class all flows get the
//! same share of their own maximum speed until a resource is exhausted; flows that do not use that one
//! continue to rise.

/// A resource by number.
pub(super) type Resource = u16;

/// A running piece of work.
#[derive(Clone, Debug)]
pub(super) struct Flow {
    /// Its number, by which its owner knows it.
    pub(super) task: usize,
    /// The lower, the earlier it is served.
    pub(super) class: u32,
    /// Rest of it, from 1 to 0.
    pub(super) left: f64,
    /// Speed that it has alone: 1 over microseconds.
    pub(super) best: f64,
    /// Speed that it has now.
    pub(super) speed: f64,
    /// Microseconds of each resource that the whole flow takes.
    pub(super) uses: Vec<(Resource, f64)>,
}

/// Assigns a speed to every flow. Flows are ordered by class; `free` is scratch memory for the remaining
/// capacity of resources.
pub(super) fn share(flows: &mut [Flow], resources: usize, scratch: &mut Scratch) {
    scratch.free.clear();
    scratch.free.resize(resources, 1.0);
    scratch.load.clear();
    scratch.load.resize(resources, 0.0);
    for class in flows.chunk_by_mut(|a, b| a.class == b.class) {
        fill(class, scratch);
    }
}

/// Buffers of sharing beside the flows.
#[derive(Clone, Debug, Default)]
pub(super) struct Scratch {
    free: Vec<f64>,
    load: Vec<f64>,
    frozen: Vec<bool>,
}

/// Amount of a resource that counts as nothing.
const NOTHING: f64 = 1e-9;

fn fill(flows: &mut [Flow], scratch: &mut Scratch) {
    let Scratch { free, load, frozen } = scratch;
    frozen.clear();
    frozen.resize(flows.len(), false);
    // The part of its best speed that every flow has that is not frozen.
    let mut part = 0.0_f64;
    loop {
        load.fill(0.0);
        let mut any = false;
        for (flow, _) in flows.iter().zip(frozen.iter()).filter(|f| !f.1) {
            any = true;
            for &(r, us) in &flow.uses {
                load[usize::from(r)] += us * flow.best;
            }
        }
        if !any {
            return;
        }
        // The increase that is still possible for all.
        let mut rise = 1.0 - part;
        for (free, load) in free.iter().zip(load.iter()).filter(|l| *l.1 > NOTHING) {
            rise = rise.min(free.max(0.0) / load);
        }
        part += rise;
        for (free, load) in free.iter_mut().zip(load.iter()) {
            *free -= rise * load;
        }
        for (flow, frozen) in flows.iter_mut().zip(frozen.iter_mut()).filter(|f| !*f.1) {
            flow.speed = part * flow.best;
            let full = |&(r, us): &(Resource, f64)| us > 0.0 && free[usize::from(r)] <= NOTHING;
            *frozen = part >= 1.0 || flow.uses.iter().any(full);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow(class: u32, best: f64, uses: &[(Resource, f64)]) -> Flow {
        Flow { task: 0, class, left: 1.0, best, speed: 0.0, uses: uses.to_vec() }
    }

    fn speeds(mut flows: Vec<Flow>, resources: usize) -> Vec<f64> {
        share(&mut flows, resources, &mut Scratch::default());
        flows.iter().map(|f| f.speed).collect()
    }

    fn close(found: &[f64], expected: &[f64]) {
        assert_eq!(found.len(), expected.len());
        for (f, w) in found.iter().zip(expected) {
            assert!((f - w).abs() < 1e-6, "{found:?} {expected:?}");
        }
    }

    #[test]
    fn single_flow_has_its_best_speed() {
        close(&speeds(vec![flow(0, 0.1, &[(0, 10.0), (1, 5.0)])], 2), &[0.1]);
    }

    #[test]
    fn flows_share_only_common_resources() {
        let flows = vec![flow(0, 0.1, &[(0, 10.0)]), flow(0, 0.1, &[(0, 10.0)]), flow(0, 0.1, &[(1, 10.0)])];
        close(&speeds(flows, 2), &[0.05, 0.05, 0.1]);
    }

    #[test]
    fn first_class_flows_have_priority() {
        let flows = vec![flow(0, 0.1, &[(0, 4.0)]), flow(1, 0.1, &[(0, 10.0)]), flow(2, 1.0, &[(0, 1.0)])];
        close(&speeds(flows, 1), &[0.1, 0.06, 0.0]);
    }

    #[test]
    fn compute_bound_flows_leave_bandwidth_to_others() {
        let flows = vec![flow(0, 0.01, &[(0, 10.0)]), flow(0, 0.1, &[(0, 10.0)])];
        let found = speeds(flows, 1);
        // Both get the same share of their full speed: 1 / 1.1.
        close(&found, &[0.01 / 1.1, 0.1 / 1.1]);
    }

    #[test]
    fn resources_are_not_oversubscribed() {
        let flows: Vec<Flow> = (0..20u16)
            .map(|i| flow(u32::from(i / 7), 0.05 + f64::from(i) / 100.0, &[(i % 3, 9.0), (3 + i % 2, 4.0)]))
            .collect();
        let mut flows = flows;
        share(&mut flows, 5, &mut Scratch::default());
        for r in 0..5 {
            let used: f64 =
                flows.iter().flat_map(|f| f.uses.iter().filter(|u| u.0 == r).map(|u| u.1 * f.speed)).sum();
            assert!(used <= 1.0 + 1e-6, "{r}: {used}");
        }
        assert!(flows.iter().all(|f| f.speed <= f.best + 1e-12));
    }
}
