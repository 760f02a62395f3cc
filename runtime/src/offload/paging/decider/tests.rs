//! Tests of a decider's invariants for any behaviour of the disk.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use super::*;
use moec_ir::op::Score;
use proptest::prelude::*;
use std::collections::VecDeque;

const LAYERS: usize = 3;
const EXPERTS: u32 = 6;
const K: u32 = 2;
const POLICIES: [&str; 4] =
    ["lru", "lfu half_life=4 bypass=1", "mrs alpha=0.2 depth=2 bypass=1", "lru per-layer"];

fn plan(frames: u32, staging: u32, policy: &str, pinned: &[(u32, u32)]) -> plan::Paging {
    let layer = PagedLayer { layer: 0, experts: EXPERTS, k: K, gate_up: 0, down: 0, score: Score::Softmax };
    plan::Paging {
        budget: 0,
        threads: 1,
        resident: 0,
        process: 0,
        frame_bytes: 8192,
        frames,
        staging,
        block_bytes: 4096,
        policy: policy.to_owned(),
        pinned: pinned.to_vec(),
        neurons: 0,
        layers: vec![layer; LAYERS],
        checksums: Vec::new(),
        uses: (0..LAYERS as u32 * EXPERTS).map(|i| i % 4).collect(),
        cores: Vec::new(),
        artifacts: Vec::new(),
        regions: Vec::new(),
    }
}

const OPTIONS: DeciderOptions<'static> =
    DeciderOptions { bytes: &[8192; LAYERS], elsewhere: &[], ahead: 3, preload: true };

fn key(layer: u16, expert: u16) -> Key {
    Key { layer, expert }
}

/// State of a frame from the reader's view.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Slot {
    Free,
    /// Expert that it reads, its first part and the number of parts.
    Reading(Key, u8, u8),
    Full(Key),
    Draining,
}

/// A decider with frames, and a second one with the same events.
struct Bench {
    decider: Decider,
    replica: Decider,
    slots: Vec<Slot>,
    now: Duration,
    pinned: Vec<Key>,
    /// Experts that the requesting layer still needs.
    needed: Vec<Key>,
    /// Whether everything is being forgotten.
    resets: bool,
}

impl Bench {
    fn new(paging: &plan::Paging, options: DeciderOptions<'_>) -> Self {
        let decider = || Decider::new(paging, options).unwrap();
        let pinned = paging.pinned.iter().map(|&(l, e)| key(l as u16, e as u16)).collect();
        let slots = vec![Slot::Free; (paging.frames + paging.staging) as usize];
        let (decider, replica) = (decider(), decider());
        let (needed, now) = (Vec::new(), Duration::ZERO);
        let mut bench = Self { decider, replica, slots, now, pinned, needed, resets: false };
        bench.publish(Event::Frame(FrameEvent::Began));
        bench
    }

    fn slot(&mut self, frame: u32) -> &mut Slot {
        &mut self.slots[frame as usize]
    }

    /// Passes an event to both, carries out the decisions, and checks that they are possible.
    fn publish(&mut self, event: Event<'_>) -> Vec<Decision> {
        self.now += Duration::from_micros(50);
        let decisions = self.decider.handle(self.now, event).unwrap().to_vec();
        assert_eq!(
            self.replica.handle(self.now, event).unwrap(),
            decisions,
            "other decisions for the same events"
        );
        for decision in &decisions {
            match *decision {
                Decision::Load { frame, key, first, parts, .. } => {
                    assert_eq!(*self.slot(frame), Slot::Free, "{decision:?} into a frame that is taken");
                    assert!(first + parts <= 2);
                    *self.slot(frame) = Slot::Reading(key, first, parts);
                }
                Decision::Use { frame, key, part, first } => {
                    let Slot::Reading(own, from, parts) = *self.slot(frame) else { panic!("{decision:?}") };
                    assert_eq!((own, from), (key, first));
                    assert!((from..from + parts).contains(&part));
                }
                Decision::Evict { key, frame, reading } => {
                    assert!(self.resets || !self.pinned.contains(&key), "{key:?} is pinned");
                    assert!(self.resets || !self.needed.contains(&key), "{key:?} is in use");
                    if let Some(frame) = frame {
                        let now = if reading { Slot::Draining } else { Slot::Free };
                        match *self.slot(frame) {
                            Slot::Reading(own, ..) => assert!(reading && own == key),
                            Slot::Full(own) => assert!(!reading && own == key),
                            other => panic!("{decision:?} of {other:?}"),
                        }
                        *self.slot(frame) = now;
                    }
                }
                Decision::RaisePriority { frame, key } => {
                    assert!(matches!(*self.slot(frame), Slot::Reading(own, ..) if own == key));
                }
                Decision::ReadFailed { .. } | Decision::Enqueue { .. } => {}
            }
        }
        let held = |slot: &Slot| match *slot {
            Slot::Reading(key, ..) | Slot::Full(key) => Some(key),
            Slot::Free | Slot::Draining => None,
        };
        let mut keys: Vec<Key> = self.slots.iter().filter_map(held).collect();
        keys.sort_unstable();
        assert!(keys.windows(2).all(|w| w[0] != w[1]), "an expert is held twice: {:?}", self.slots);
        decisions
    }

    fn request(&mut self, layer: usize, active: &[i32], rows: usize, scores: &[Vec<f32>]) -> Vec<Decision> {
        self.resets = self.decider.is_broken();
        self.needed = active.iter().map(|&e| key(layer as u16, e as u16)).collect();
        let request = ExpertRequest {
            layer,
            rows,
            k: K as usize,
            active,
            accelerator_experts: &[],
            scored: scores.len(),
            scores: Scores::Recorded(scores),
            stalled: Duration::ZERO,
            disk: DiskProgress { bytes: 32 << 20, busy: Duration::from_millis(32) },
        };
        // After an error all are evicted, and read again.
        let needed = if self.resets { std::mem::take(&mut self.needed) } else { Vec::new() };
        let decisions = self.publish(Event::Requested(request));
        self.needed.extend(needed);
        self.resets = false;
        decisions
    }

    /// Publishes an event for one of the frames that the disk holds, selected by `which` and `what`. Returns
    /// false if there is no such frame.
    fn happen(&mut self, which: usize, what: u8) -> bool {
        let busy = |s: &&Slot| matches!(s, Slot::Reading(..) | Slot::Draining);
        let count = self.slots.iter().filter(busy).count();
        if count == 0 {
            return false;
        }
        let of = self.slots.iter().enumerate().filter(|(_, s)| busy(s)).map(|(i, _)| i as u32);
        let frame = of.into_iter().nth(which % count).unwrap();
        let event = match (*self.slot(frame), what) {
            (Slot::Draining, 0) => {
                // A late event of a read that is no longer needed: it ended before its cancellation, or it
                // failed.
                assert!(self.publish(Event::Frame(FrameEvent::Failed { frame })).is_empty());
                return true;
            }
            (Slot::Draining, 1) => {
                assert!(self.publish(Event::Frame(FrameEvent::Arrived { frame, part: 0 })).is_empty());
                return true;
            }
            (Slot::Draining, _) => {
                *self.slot(frame) = Slot::Free;
                FrameEvent::Released { frame }
            }
            (Slot::Reading(_, first, _), 1 | 2) => FrameEvent::Arrived { frame, part: first },
            (Slot::Reading(..), 0) => {
                let decisions = self.publish(Event::Frame(FrameEvent::Failed { frame }));
                assert!(matches!(decisions[..], [Decision::ReadFailed { .. }]));
                *self.slot(frame) = Slot::Draining;
                return true;
            }
            (Slot::Reading(key, ..), _) => {
                self.publish(Event::Frame(FrameEvent::Done { frame }));
                *self.slot(frame) = Slot::Full(key);
                return true;
            }
            (Slot::Free | Slot::Full(_), _) => return true,
        };
        self.publish(Event::Frame(event));
        true
    }

    /// Computes the layer of the request, until a needed expert fails.
    fn compute(&mut self, what: &mut impl FnMut() -> (usize, u8)) {
        for part in 0..2 {
            for at in 0..self.decider.order().len() {
                let expert = self.decider.order()[at];
                while !self.decider.is_ready(expert.id, part) {
                    if self.decider.is_broken() {
                        return self.needed.clear();
                    }
                    let (which, kind) = what();
                    assert!(self.happen(which, kind), "nothing reads {expert:?}: {:?}", self.slots);
                }
                if expert.bypasses && (part == 1 || self.decider.split()) {
                    let own = self.decider.keys()[expert.id];
                    self.needed.retain(|&k| k != own);
                    self.publish(Event::Frame(FrameEvent::Computed { at, part: part as u8 }));
                }
            }
        }
        self.needed.clear();
    }
}

/// A call: experts of every layer, rows, scores.
type Call = (Vec<Vec<i32>>, bool, Vec<Vec<f32>>);

fn call() -> impl Strategy<Value = Call> {
    let all: Vec<i32> = (0..EXPERTS as i32).collect();
    let active = prop::sample::subsequence(all, K as usize..=EXPERTS as usize).prop_shuffle();
    let scores = prop::collection::vec(prop::collection::vec(-3.0..3.0_f32, EXPERTS as usize), LAYERS);
    (prop::collection::vec(active, LAYERS), any::<bool>(), scores)
}

proptest! {
    /// No frame holds two experts, no expert is in two frames, and pinned or used experts are never evicted.
    /// Equal events give equal decisions. This holds in every order in which reads end, fail and are
    /// released. Every layer is computed or has a failure.
    #[test]
    fn decider_invariants_hold(
        calls in prop::collection::vec(call(), 1..12),
        frames in 1_u32..12,
        staging in 2_u32..6,
        policy in prop::sample::select(&POLICIES),
        pins in 0_u32..3,
        ends in prop::collection::vec((any::<usize>(), 0_u8..40), 1..64),
    ) {
        let pinned: Vec<(u32, u32)> = (0..pins.min(frames - 1)).map(|i| (i % LAYERS as u32, i)).collect();
        let mut bench = Bench::new(&plan(frames, staging, policy, &pinned), OPTIONS);
        let mut ends = ends.into_iter().cycle();
        let mut end = move || ends.next().map(|(which, what)| (which, what % 40)).unwrap();
        // A cycle of failures alone would never end.
        let mut call = 0_u8;
        let mut what = move || {
            call = call.wrapping_add(1);
            let (which, what) = end();
            (which, if call.is_multiple_of(4) { 9 } else { what })
        };
        for (active, one, scores) in calls {
            for layer in 0..LAYERS {
                let own = if one { &active[layer][..K as usize] } else { &active[layer] };
                bench.request(layer, own, if one { 1 } else { 7 }, &scores[layer..]);
                bench.compute(&mut what);
                if bench.decider.is_broken() {
                    break;
                }
            }
        }
        // In the end the disk releases everything that it holds.
        let mut left: VecDeque<u8> = [9; 64].into();
        while let Some(what) = left.pop_front() {
            if !bench.happen(0, what) {
                return Ok(());
            }
        }
        prop_assert!(false, "reads do not end: {:?}", bench.slots);
    }
}

/// Loads of a list of decisions.
fn loads(decisions: &[Decision]) -> Vec<(u32, Key)> {
    let load = |d: &Decision| match *d {
        Decision::Load { frame, key, .. } => Some((frame, key)),
        _ => None,
    };
    decisions.iter().filter_map(load).collect()
}

/// A late event of a cancelled read is not taken for one of the frame's next read: the frame has no next read
/// before the reader has released it.
#[test]
fn frame_is_reused_only_after_its_reader_releases_it() {
    let paging = plan::Paging { uses: Vec::new(), ..plan(1, 2, "lru", &[]) };
    let mut bench = Bench::new(&paging, DeciderOptions { ahead: 0, ..OPTIONS });
    let first = loads(&bench.request(0, &[0, 1], 7, &[]));
    assert_eq!(first, [(0, key(0, 0)), (1, key(0, 1))]);
    bench.publish(Event::Frame(FrameEvent::Failed { frame: 0 }));
    bench.slots[0] = Slot::Draining;
    assert!(bench.decider.is_broken());
    bench.needed.clear();
    // The next call starts afresh: reads in flight are cancelled, and only the third frame is free.
    let again = loads(&bench.request(0, &[2, 3, 4], 7, &[]));
    assert_eq!(again, [(2, key(0, 2))]);
    // The failure of the second frame is reported late, and twice: it applies to no expert.
    for _ in 0..2 {
        assert!(bench.publish(Event::Frame(FrameEvent::Failed { frame: 1 })).is_empty());
    }
    assert!(!bench.decider.is_broken());
    bench.slots[1] = Slot::Free;
    assert_eq!(loads(&bench.publish(Event::Frame(FrameEvent::Released { frame: 1 }))), [(1, key(0, 3))]);
    // A second release does not affect the new read.
    assert!(bench.publish(Event::Frame(FrameEvent::Released { frame: 1 })).is_empty());
    let decisions = bench.publish(Event::Frame(FrameEvent::Done { frame: 1 }));
    assert!(
        decisions.iter().all(|d| matches!(d, Decision::Use { frame: 1, .. })) && decisions.len() == 2,
        "{decisions:?}"
    );
}

#[test]
fn wrong_prefetches_are_evicted_and_right_ones_prioritised() {
    let paging = plan::Paging { uses: Vec::new(), ..plan(12, 5, "lru", &[]) };
    let mut bench = Bench::new(&paging, OPTIONS);
    let mut done = || (0, 9);
    let scores = |e: usize| {
        let mut logits = vec![0.0; EXPERTS as usize];
        (logits[e], logits[(e + 1) % 6]) = (9.0, 6.0);
        vec![logits.clone(), logits.clone(), logits]
    };
    let ahead = |decisions: &[Decision]| -> Vec<Key> {
        let prefetch = |d: &Decision| match *d {
            Decision::Enqueue { key, priority: Priority::Prefetch, .. } => Some(key),
            _ => None,
        };
        decisions.iter().filter_map(prefetch).collect()
    };
    // The first call measures the time of a layer; from then on it pays to look ahead.
    for layer in 0..LAYERS {
        bench.now += Duration::from_secs(1);
        bench.request(layer, &[0, 1], 1, &[]);
        bench.compute(&mut done);
    }
    let decisions = bench.request(0, &[0, 1], 1, &scores(2));
    let prefetched = ahead(&decisions);
    assert!(prefetched.contains(&key(1, 2)), "{decisions:?}");
    bench.compute(&mut done);
    let reading = bench.slots.iter().any(|s| matches!(s, Slot::Reading(k, ..) if *k == key(1, 2)));
    let decisions = bench.request(1, &[2, 0], 1, &[]);
    assert!(
        !reading
            || decisions
                .iter()
                .any(|d| matches!(d, Decision::RaisePriority { key: k, .. } if *k == key(1, 2)))
    );
    assert_eq!(bench.decider.counts().predicted, 1);
    // Prefetched entries of the layer that it did not request are evicted.
    for k in prefetched.iter().filter(|k| k.layer == 1 && k.expert != 2) {
        assert!(
            decisions.iter().any(|d| matches!(d, Decision::Evict { key, .. } if key == k)),
            "{decisions:?}"
        );
    }
}
