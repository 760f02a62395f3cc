//! Experts to prefetch (HybriMoE §IV-C): those that save the most time for the cost of their reads.
//!
//! The gates of the next layers, applied to the current hidden state, predict the experts. The residual
//! stream changes little from layer to layer, so they are often right. For up to [`DEPTH`] layers ahead a
//! small simulation gives the time of a layer with and without an expert in memory. The difference, times the
//! probability that the expert is needed, is the gain of reading it now. The cost is the time for which the
//! read delays a nearer layer. The best expert is read first, and the rest is estimated again, as long as the
//! disk is idle before the next layer starts. The gates of that layer predict better.

/// Maximum number of layers ahead.
pub const DEPTH: usize = 3;

/// An expert that may be needed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// Expert.
    pub expert: u16,
    /// Probability that it is needed.
    pub probability: f64,
    /// Whether it is in memory, or being read.
    pub resident: bool,
}

/// A layer ahead. Times are in seconds.
#[derive(Clone, Copy, Debug)]
pub struct LookaheadLayer<'a> {
    /// Time until the layer needs its experts.
    pub start: f64,
    /// Time to read one of its experts.
    pub load: f64,
    /// Time to compute one of its experts.
    pub compute: f64,
    /// Experts that it uses.
    pub k: usize,
    /// Its experts, the most probable first. The layer is assumed to use the first `k`.
    pub candidates: &'a [Candidate],
}

/// An expert to read ahead.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prefetch {
    /// Layers ahead, from 1.
    pub ahead: usize,
    /// Expert.
    pub expert: u16,
    /// Seconds that it saves, less what it costs.
    pub gain: f64,
}

/// Seconds from the start of a layer until its last expert is computed. Those in memory are computed first,
/// then the others as they arrive: the first after `first` seconds, then one every `load` seconds.
pub fn finish(resident: usize, missing: usize, first: f64, load: f64, compute: f64) -> f64 {
    let start = resident as f64 * compute;
    (0..missing).fold(start, |t, i| t.max(first + i as f64 * load) + compute)
}

/// Fills `out` with the experts to read ahead, in order. `busy` is the time in seconds until the disk is done
/// with its earlier work; `wear` is the share of time in which it is busy anyway: this share of a useless
/// read is lost for other reads. Layers past [`DEPTH`] are ignored. Allocates only if `out` is too short.
pub fn plan(layers: &[LookaheadLayer<'_>], busy: f64, wear: f64, out: &mut Vec<Prefetch>) {
    out.clear();
    let layers = &layers[..layers.len().min(DEPTH)];
    let Some(next) = layers.first() else { return };
    let mut free = busy.max(0.0);
    while free < next.start {
        let mut best: Option<(Prefetch, f64)> = None;
        for (i, layer) in layers.iter().enumerate() {
            let ahead = i + 1;
            for (rank, candidate) in layer.candidates.iter().enumerate() {
                let &Candidate { expert, probability, resident } = candidate;
                if resident || taken(out, ahead, expert) {
                    continue;
                }
                let end = free + layer.load;
                let wasted = (1.0 - probability) * layer.load * wear;
                let gain =
                    probability * saved(layer, ahead, rank, end, out) - delay(next, ahead, end, out) - wasted;
                // Gain per second of the disk, the scarce resource.
                let gain_per_second = gain / layer.load.max(f64::MIN_POSITIVE);
                if gain > 0.0 && best.is_none_or(|(_, w)| gain_per_second > w) {
                    best = Some((Prefetch { ahead, expert, gain }, gain_per_second));
                }
            }
        }
        let Some((prefetch, _)) = best else { return };
        free += layers[prefetch.ahead - 1].load;
        out.push(prefetch);
    }
}

fn taken(out: &[Prefetch], ahead: usize, expert: u16) -> bool {
    out.iter().any(|p| p.ahead == ahead && p.expert == expert)
}

/// Counts of experts in memory and of missing ones among those that a layer is assumed to use, without the
/// candidate of one rank.
fn others(layer: &LookaheadLayer<'_>, ahead: usize, rank: Option<usize>, out: &[Prefetch]) -> (usize, usize) {
    let used = layer.candidates.iter().take(layer.k).enumerate().filter(|(r, _)| Some(*r) != rank);
    let there = |c: &Candidate| c.resident || taken(out, ahead, c.expert);
    used.fold((0, 0), |(h, m), (_, c)| if there(c) { (h + 1, m) } else { (h, m + 1) })
}

/// Time that a layer saves if it uses a candidate that has arrived at `end`.
fn saved(layer: &LookaheadLayer<'_>, ahead: usize, rank: usize, end: f64, out: &[Prefetch]) -> f64 {
    let (resident, missing) = others(layer, ahead, Some(rank), out);
    let &LookaheadLayer { load, compute, start, .. } = layer;
    let without = finish(resident, missing + 1, load, load, compute);
    let late = end - start;
    let with = if late <= 0.0 {
        finish(resident + 1, missing, load, load, compute)
    } else {
        finish(resident, missing + 1, late, load, compute)
    };
    without - with
}

/// Time by which the next layer's own experts are delayed if the disk reads for a later layer until `end`.
fn delay(next: &LookaheadLayer<'_>, ahead: usize, end: f64, out: &[Prefetch]) -> f64 {
    let late = end - next.start;
    if ahead == 1 || late <= 0.0 {
        return 0.0;
    }
    let (resident, missing) = others(next, 1, None, out);
    let &LookaheadLayer { load, compute, .. } = next;
    finish(resident, missing, load + late, load, compute) - finish(resident, missing, load, load, compute)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidates(of: &[(u16, f64, bool)]) -> Vec<Candidate> {
        let candidate =
            |&(expert, probability, resident): &(u16, f64, bool)| Candidate { expert, probability, resident };
        of.iter().map(candidate).collect()
    }

    fn look(start: f64, candidates: &[Candidate]) -> LookaheadLayer<'_> {
        LookaheadLayer { start, load: 3.0, compute: 1.0, k: 2, candidates }
    }

    fn planned(layers: &[LookaheadLayer<'_>], busy: f64) -> Vec<(usize, u16)> {
        let mut out = Vec::new();
        plan(layers, busy, 0.0, &mut out);
        out.iter().map(|p| (p.ahead, p.expert)).collect()
    }

    #[test]
    fn resident_experts_are_computed_while_others_are_read() {
        // With four experts resident, one that arrives at 3 is computed at 4, in its turn. With two resident,
        // two arrive at 3 and 6.
        assert_eq!(finish(4, 1, 3.0, 3.0, 1.0), 5.0);
        assert_eq!(finish(2, 2, 3.0, 3.0, 1.0), 7.0);
        assert_eq!(finish(0, 0, 3.0, 3.0, 1.0), 0.0);
    }

    #[test]
    fn reads_hidden_by_computation_are_not_prefetched() {
        // One of five experts is missing, and arrives before the others are computed.
        let of =
            candidates(&[(0, 0.9, true), (1, 0.9, true), (2, 0.9, true), (3, 0.9, true), (4, 0.9, false)]);
        let layer = LookaheadLayer { k: 5, ..look(3.0, &of) };
        assert!(planned(&[layer], 0.0).is_empty());
    }

    #[test]
    fn layer_with_the_larger_saving_is_prefetched_first() {
        // One layer ahead an expert is missing, and computing hides a third of its read; two layers ahead
        // both are missing.
        let near = candidates(&[(0, 0.8, true), (1, 0.8, false)]);
        let far = candidates(&[(5, 0.8, false), (6, 0.8, false)]);
        let (mut near, far) = (look(3.0, &near), look(8.0, &far));
        assert_eq!(planned(&[near, far], 0.0), [(2, 5)]);
        // With time for two reads, both are read.
        near.start = 4.0;
        assert_eq!(planned(&[near, far], 0.0), [(2, 5), (1, 1)]);
    }

    #[test]
    fn more_probable_expert_is_prefetched_first() {
        let of = candidates(&[(0, 0.3, false), (1, 0.9, false)]);
        assert_eq!(planned(&[look(2.0, &of)], 0.0), [(1, 1)]);
    }

    #[test]
    fn delaying_the_next_layer_is_charged_to_a_prefetch() {
        let near = candidates(&[(0, 0.9, false), (1, 0.9, false)]);
        let far = |p: f64| candidates(&[(7, p, false), (8, 0.0, false)]);
        // The disk is idle for one second before the next layer starts. Reading an expert of the next layer
        // saves that second. Reading one of a later layer would save three seconds, and cost two.
        let (sure, vague) = (far(1.0), far(0.4));
        assert_eq!(planned(&[look(4.0, &near), look(9.0, &vague)], 3.0), [(1, 0)]);
        let none = candidates(&[(0, 0.9, true), (1, 0.9, true)]);
        assert_eq!(planned(&[look(4.0, &none), look(9.0, &sure)], 3.0), [(2, 7)]);
    }

    #[test]
    fn wasted_prefetch_is_charged_on_a_busy_disk() {
        let of = candidates(&[(0, 0.4, false), (1, 0.4, false)]);
        let with = |wear| {
            let mut out = Vec::new();
            plan(&[look(4.0, &of)], 0.0, wear, &mut out);
            out.len()
        };
        // One read is hidden by the other: 0.4 · 3 s are saved, and 0.6 · 3 s are lost if every second
        // counts.
        assert_eq!((with(0.0), with(1.0)), (2, 0));
    }

    #[test]
    fn busy_disk_plans_no_prefetch() {
        let of = candidates(&[(0, 0.9, false), (1, 0.9, false)]);
        assert!(planned(&[look(4.0, &of)], 4.0).is_empty());
        assert!(planned(&[], 0.0).is_empty());
    }

    #[test]
    fn prefetch_depth_is_at_most_three_layers() {
        let (all, one) = (candidates(&[(0, 1.0, true)]), candidates(&[(9, 1.0, false)]));
        let layers = [1.0, 2.0, 3.0, 4.0].map(|start| look(start, if start > 3.0 { &one } else { &all }));
        assert!(planned(&layers, 0.0).is_empty());
        let layers = [1.0, 2.0, 3.0].map(|start| look(start, if start > 2.0 { &one } else { &all }));
        assert_eq!(planned(&layers, 0.0), [(3, 9)]);
    }
}
