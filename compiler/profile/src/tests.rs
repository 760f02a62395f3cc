//! Profiles: stored and read back, merged, and refused.

use super::neurons::Level;
use super::*;
use proptest::collection::{btree_map, vec};
use proptest::prelude::*;

const TOKENS: std::ops::Range<u64> = 0..1 << 30;

fn origin() -> Origin {
    Origin { family: "olmoe".into(), hidden: 64, vocab: 512, layers: 2, checkpoint: [7; 32] }
}

fn moments(lead: usize, cols: usize) -> impl Strategy<Value = Moments> {
    (vec(TOKENS, lead), vec(0.0_f32..1e20, lead * cols))
        .prop_map(move |(tokens, sums)| Moments::from_sums(cols, tokens, &sums).unwrap())
}

fn correlations(reader: &str, lead: usize, cols: usize) -> impl Strategy<Value = Correlations> {
    let (reader, block) = (reader.to_owned(), 2);
    let inputs = vec(vec(-2.0_f32..2.0, cols), 3 * lead);
    inputs.prop_map(move |inputs| {
        let mut sums = Vec::new();
        for seen in inputs.chunks(3) {
            for range in correlations::blocks(cols, block) {
                let pairs = range.clone().flat_map(|i| (range.start..=i).map(move |j| (i, j)));
                sums.extend(pairs.map(|(i, j)| seen.iter().map(|x| x[i] * x[j]).sum::<f32>()));
            }
        }
        Correlations::from_sums(vec![reader.clone()], cols, block, vec![3; lead], &sums).unwrap()
    })
}

fn routing(layer: u32, k: u32, experts: usize) -> impl Strategy<Value = Routing> {
    (TOKENS, vec(-1e3_f64..1e9, experts)).prop_map(move |(tokens, weight)| {
        let mut chosen = vec![0; experts];
        (0..k as usize).for_each(|i| chosen[i] = tokens);
        // The same experts for every token: each pair of them as often as there are tokens.
        let mut routing = Routing { tokens, chosen, weight, ..Routing::new(layer, k, experts) };
        for (a, b) in (0..k as usize).flat_map(|a| (a + 1..k as usize).map(move |b| (a, b))) {
            let pair = routing.pair(a, b).unwrap();
            routing.together[pair] = tokens;
        }
        routing
    })
}

/// Counts of the four experts of layer 0, of which every token chose the first two.
fn neurons(tokens: u64) -> impl Strategy<Value = NeuronCounts> {
    vec((0_u64..64, 0_u64..64), 0..(tokens.min(5) as usize + 1)).prop_map(|seen| {
        let mut counts = NeuronCounts::new((0, "layers.0.moe.down".into()), (4, 70, true), &[0.0], 2);
        for (first, second) in seen {
            for batch in &mut counts.levels[0].batches {
                batch.add(0, 70, &[first, second]).unwrap();
                batch.add(1, 70, &[second << 58, first]).unwrap();
            }
        }
        counts
    })
}

/// Profiles of one model: all can be merged.
fn profile() -> impl Strategy<Value = Profile> {
    let reading = (btree_map(any::<[u8; 32]>(), TOKENS, 0..3), 0.0_f64..1e12)
        .prop_map(|(texts, loss)| Reading { predicted: texts.values().sum(), texts, loss });
    let norms = vec(1e-12_f64..1e12, 0..9).prop_map(|norms| {
        let mut saliency = Saliency::new(0);
        for n in norms {
            saliency.add(n);
        }
        saliency
    });
    // One token per chunk, where both layers have seen that many.
    let sequences = vec(1_usize..4, 0..3);
    let parts = (routing(0, 2, 4), routing(1, 1, 3), moments(1, 5), moments(4, 3));
    let rows = vec(vec(-1e30_f32..1e30, 3), 0..9).prop_map(|rows| {
        let mut kept = samples::Kept::default();
        for row in &rows {
            kept.add(row, samples::ROWS);
        }
        kept.finish(vec!["layers.0.moe.down".to_owned()], 3)
    });
    let together = (correlations("layers.0.attn.q", 1, 5), correlations("layers.0.moe.down", 4, 3));
    let parts = parts.prop_flat_map(|(a, b, q, down)| {
        let neurons = neurons(a.tokens);
        (Just(a), Just(b), Just(q), Just(down), neurons)
    });
    (reading, parts, norms, sequences, together, rows).prop_map(
        |(reading, (a, b, q, down, neurons), norms, sequences, together, rows)| Profile {
            neurons: vec![neurons],
            samples: vec![rows],
            gates: vec![gates(0)],
            correlations: vec![together.0, together.1],
            origin: origin(),
            reading,
            trace: {
                let mut trace = Trace::new(2);
                let most = a.tokens.min(b.tokens).min(9) as usize;
                for len in sequences {
                    trace.begin();
                    (0..len).for_each(|_| trace.push(Chunk { tokens: 1, loads: vec![1, 1, 0, 0, 1, 0, 0] }));
                }
                if trace.chunks() > most { Trace::new(2) } else { trace }
            },
            saliency: vec![norms],
            layers: vec![a, b],
            weights: [("layers.0.attn.q".to_owned(), q), ("layers.0.moe.down".to_owned(), down)].into(),
            routes: Routes::default(),
        },
    )
}

/// A chunk of which the first of two experts gets `first` tokens.
fn chunk(tokens: u32, first: u16) -> Chunk {
    Chunk { tokens, loads: vec![first, tokens as u16 - first] }
}

fn example() -> Profile {
    let mut layer = Routing::new(0, 1, 2);
    (layer.tokens, layer.chosen, layer.weight) = (100, vec![99, 1], vec![49.5, 0.5]);
    Profile {
        origin: origin(),
        reading: Reading { texts: [([1; 32], 100)].into(), predicted: 100, loss: 300.0 },
        layers: vec![layer],
        trace: Trace { chunk: 64, sequences: vec![vec![chunk(64, 63), chunk(36, 36)]] },
        saliency: vec![Saliency::new(0)],
        weights: [(
            "layers.0.moe.down".to_owned(),
            Moments::from_sums(2, vec![99, 1], &[99.0, 198.0, 7.0, 8.0]).unwrap(),
        )]
        .into(),
        routes: Routes { sequences: vec![sequence(3)] },
        neurons: vec![fired()],
        samples: vec![sample(0)],
        gates: vec![gates(0)],
        correlations: vec![
            Correlations::from_sums(
                vec!["layers.0.moe.down".to_owned()],
                2,
                2,
                vec![99, 1],
                &[99.0, -99.0, 198.0, 7.0, 3.0, 8.0],
            )
            .unwrap(),
        ],
    }
}

/// Gates of a layer's experts.
fn gates(layer: u32) -> Gates {
    let mut gates = Gates::new(layer, format!("layers.{layer}.moe.gate_up"));
    for x in [0.25, -0.125, 3.0] {
        gates.add(x);
    }
    gates
}

/// Three rows of the channels of both experts' inputs.
fn sample(first: u8) -> Sample {
    let mut kept = samples::Kept::default();
    (first..first + 3).for_each(|i| kept.add(&[f32::from(i), -0.5], samples::ROWS));
    kept.finish(vec!["layers.0.moe.down".to_owned()], 2)
}

/// Three neurons of each of two experts: two tokens of the first one, and the batch of both.
fn fired() -> NeuronCounts {
    let mut counts = NeuronCounts::new((0, "layers.0.moe.down".into()), (2, 3, true), &[0.0], 2);
    let [alone, both] = counts.levels[0].batches.as_mut_slice() else { panic!("two sizes of batches") };
    alone.add(0, 3, &[0b100]).unwrap();
    alone.add(0, 3, &[0b110]).unwrap();
    both.add(0, 3, &[0b110]).unwrap();
    counts
}

/// Tokens of which each chose expert 0 of two.
fn sequence(tokens: usize) -> routes::Sequence {
    routes::Sequence {
        chosen: vec![0; tokens],
        ranked: [0, 1].repeat(tokens),
        scores: [200, 100].repeat(tokens),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn what_is_stored_is_read_back(p in profile()) {
        let bytes = p.encode().unwrap();
        prop_assert_eq!(Profile::decode(&bytes).unwrap(), p);
    }

    #[test]
    fn merging_commutes_and_counts(a in profile(), b in profile()) {
        let merged = a.merge(&b).unwrap();
        prop_assert_eq!(&merged, &b.merge(&a).unwrap());
        prop_assert_eq!(merged.reading.tokens(), a.reading.tokens() + b.reading.tokens());
        for ((m, a), b) in merged.layers.iter().zip(&a.layers).zip(&b.layers) {
            prop_assert_eq!(m.tokens, a.tokens + b.tokens);
        }
        for (name, m) in &merged.weights {
            let (a, b) = (&a.weights[name], &b.weights[name]);
            for lead in 0..m.lead() {
                let (n, k) = (a.tokens[lead] as f64, b.tokens[lead] as f64);
                for ((m, a), b) in m.of(lead).iter().zip(a.of(lead)).zip(b.of(lead)) {
                    let want = (f64::from(*a) * n + f64::from(*b) * k) / (n + k).max(1.0);
                    prop_assert!((f64::from(*m) - want).abs() <= want / 2048.0, "{} instead of {}", m, want);
                }
            }
        }
        prop_assert_eq!(Profile::decode(&merged.encode().unwrap()).unwrap(), merged);
    }

    #[test]
    fn no_bytes_make_it_panic(bytes in vec(any::<u8>(), 0..200), header in any::<bool>()) {
        let mut all = if header { example().encode().unwrap()[..20].to_vec() } else { Vec::new() };
        all.extend(bytes);
        let _ = Profile::decode(&all);
    }

    #[test]
    fn no_changed_byte_goes_unseen(at in any::<prop::sample::Index>(), change in 1_u8..) {
        let p = example();
        let mut bytes = p.encode().unwrap();
        let at = at.index(bytes.len());
        bytes[at] ^= change;
        // A deflate stream has bits without meaning; what is read is still what was stored.
        if let Ok(read) = Profile::decode(&bytes) {
            prop_assert_eq!(read, p);
        }
    }
}

/// The stored form, changed before it is checked and hashed, as somebody would who means it.
fn forged(change: impl FnOnce(&mut Profile)) -> Error {
    let mut p = example();
    change(&mut p);
    let stored = bincode::encode_to_vec(&p, bincode::config::standard()).unwrap();
    Profile::decode(&wrapped(file::VERSION, stored.len() as u64, &stored)).expect_err("it is wrong")
}

fn wrapped(version: u32, len: u64, stored: &[u8]) -> Vec<u8> {
    let mut bytes = file::MAGIC.to_vec();
    bytes.extend(version.to_le_bytes());
    bytes.extend(len.to_le_bytes());
    bytes.extend(moec_base::hashing::sha256(stored));
    bytes.extend(miniz_oxide::deflate::compress_to_vec(stored, 6));
    bytes
}

#[test]
fn what_does_not_hold_is_refused() {
    type Change = fn(&mut Profile);
    let cases: [(&str, Change); 25] = [
        ("family", |p| p.origin.family = "a\nb".into()),
        ("more tokens than anyone", |p| p.reading.texts = [([0; 32], u64::MAX)].into()),
        ("more predictions than tokens", |p| p.reading.predicted = 101),
        ("a loss of NaN", |p| p.reading.loss = f64::NAN),
        ("layer 0: 2 experts with 1 weights", |p| {
            let _ = p.layers[0].weight.pop();
        }),
        ("layer 0: 101 choices", |p| p.layers[0].chosen[0] = 100),
        ("routing weight that is not finite", |p| p.layers[0].weight[0] = f64::INFINITY),
        ("layer 0: 1 pairs of choices", |p| p.layers[0].together[0] = 1),
        ("a chunk of 65 tokens", |p| p.trace.sequences[0][0].tokens = 65),
        ("a chunk of 0 tokens", |p| p.trace.sequences[0].push(chunk(0, 0))),
        ("layer 0: 63 choices in a chunk", |p| p.trace.sequences[0][0].loads[0] = 62),
        ("more choices than its layers", |p| p.trace.sequences.push(vec![chunk(2, 2)])),
        ("a sum of norms of -1", |p| p.saliency[0].sum = -1.0),
        ("weight name", |p| {
            let m = p.weights["layers.0.moe.down"].clone();
            p.weights.insert(String::new(), m);
        }),
        ("neurons are not in order", |p| p.neurons.push(fired())),
        ("layer 0: 2 experts of 0 neurons", |p| p.neurons[0].width = 0),
        ("layer 0: counts of neurons", |p| p.neurons[0].width = 4),
        ("layer 0: thresholds", |p| p.neurons[0].levels[0].threshold = f32::NAN),
        ("layer 7: neurons of no layer", |p| p.neurons[0].layer = 7),
        ("layer 0: neurons of experts that nothing chose", |p| {
            (0..99).for_each(|_| p.neurons[0].levels[0].batches[0].add(1, 3, &[1]).unwrap());
        }),
        ("rows of an input that no weight has", |p| p.samples[0].readers = vec!["layers.0.moe.up".into()]),
        ("rows of an input that no weight has", |p| p.samples[0].cols = 3),
        ("rows of an input that no weight has", |p| p.samples.push(sample(9))),
        ("recorded routing", |p| p.routes.sequences[0].chosen[0] = 2),
        ("numbers for 1 × 2 channels", |p| {
            if let Some(m) = p.weights.get_mut("layers.0.moe.down") {
                m.tokens.pop();
            }
        }),
    ];
    for (words, change) in cases {
        let e = forged(change);
        assert!(e.to_string().contains(words), "`{words}` is not in `{e}`");
        assert!(e.hint.is_some());
    }
}

#[test]
fn what_is_no_profile_is_refused() {
    let stored = bincode::encode_to_vec(example(), bincode::config::standard()).unwrap();
    let len = stored.len() as u64;
    let whole = wrapped(file::VERSION, len, &stored);
    assert_eq!(Profile::decode(&whole).unwrap(), example());
    let longer = [stored.as_slice(), &[0]].concat();
    for (words, bytes) in [
        ("no profile", b"MOECTRX\n".to_vec()),
        ("no profile", Vec::new()),
        ("ends in its header", whole[..30].to_vec()),
        ("version 1", wrapped(1, len, &stored)),
        ("length", wrapped(file::VERSION, u64::MAX, &stored)),
        ("length", wrapped(file::VERSION, 1 << 31, &stored)),
        ("checksum", wrapped(file::VERSION, len + 1, &stored)),
        ("does not inflate", wrapped(file::VERSION, len - 1, &stored)),
        ("does not inflate", whole[..whole.len() - 9].to_vec()),
        ("behind its end", wrapped(file::VERSION, len + 1, &longer)),
    ] {
        let e = Profile::decode(&bytes).expect_err(words);
        assert!(e.to_string().contains(words), "`{words}` is not in `{e}`");
        assert!(e.hint.is_some());
    }
}

#[test]
fn a_bomb_is_not_inflated() {
    // A gigabyte of zeros in a megabyte, said to be 1 GiB: the numbers that it claims are not there.
    let zeros = vec![0_u8; 1 << 20];
    let mut bytes = wrapped(file::VERSION, 1 << 30, &zeros);
    assert!(Profile::decode(&bytes).is_err());
    // A list that claims more elements than the file has bytes.
    let claim = [5, b'o', b'l', b'm', b'o', b'e', 1, 1, 1].iter().copied().chain([3; 32]).chain([253]);
    let stored: Vec<u8> = claim.chain([0xff; 8]).collect();
    bytes = wrapped(file::VERSION, stored.len() as u64, &stored);
    let e = Profile::decode(&bytes).expect_err("more than the limit");
    assert!(e.to_string().contains("LimitExceeded"), "{e}");
}

#[test]
fn only_profiles_of_one_model_merge() {
    let a = example();
    for change in [
        (|o: &mut Origin| o.family = "mixtral".into()) as fn(&mut Origin),
        |o| o.hidden = 1,
        |o| o.vocab = 1,
        |o| o.layers = 1,
        |o| o.checkpoint = [0; 32],
    ] {
        let mut b = example();
        change(&mut b.origin);
        assert!(a.merge(&b).expect_err("different models").to_string().contains("different models"));
        assert!(a.origin.must_be(&b.origin, "x.trace").is_err());
    }
    let mut b = example();
    b.weights.clear();
    assert!(a.merge(&b).is_err());
    a.origin.must_be(&example().origin, "x.trace").unwrap();
}

#[test]
fn figures_of_a_layer() {
    let layer = Routing {
        tokens: 6,
        chosen: vec![6, 0, 4, 2],
        weight: vec![3.0, 0.0, 1.0, 2.0],
        together: vec![0, 4, 2, 0, 0, 0],
        ..Routing::new(3, 2, 4)
    };
    assert_eq!(layer.used(), 3);
    assert_eq!(layer.imbalance(), 2.0);
    assert_eq!(layer.least_used(), [1, 3, 2, 0]);
    assert_eq!(layer.below(4), [1, 3]);
    assert_eq!([0, 1, 2].map(|e| layer.mean_weight(e)), [0.5, 0.0, 0.25]);
    assert_eq!(Routing::new(0, 1, 4).imbalance(), 0.0);
    assert_eq!([layer.both(0, 2), layer.both(3, 0), layer.both(1, 1), layer.both(0, 9)], [4, 2, 0, 0]);
    assert_eq!(layer.closest(5), [(0, 2, 4), (0, 3, 2)]);
}

#[test]
fn every_pair_has_a_place_of_its_own() {
    for n in [1, 2, 5, 160] {
        let layer = Routing::new(0, 1, n);
        let all: Vec<_> = (0..n).flat_map(|a| (a + 1..n).map(move |b| (a, b))).collect();
        let places: Vec<_> = all.iter().map(|&(a, b)| layer.pair(a, b).unwrap()).collect();
        assert!(places.iter().copied().eq(0..layer.together.len()), "{n}");
    }
}

#[test]
fn norms_have_a_mean_and_quantiles() {
    let mut s = Saliency::new(0);
    assert_eq!((s.mean(), s.quantile(0.5)), (0.0, 0.0));
    (1..=100).for_each(|n| s.add(f64::from(n)));
    for n in [f64::NAN, f64::INFINITY, -1.0] {
        s.add(n);
    }
    assert_eq!((s.tokens(), s.mean()), (100, 50.5));
    for (q, want) in [(0.1, 10.0), (0.5, 50.0), (1.0, 100.0)] {
        let got = s.quantile(q);
        assert!((got / want - 1.0).abs() < 0.1, "{got} instead of {want}");
    }
    s.add(0.0);
    s.add(1e300);
    assert_eq!(s.tokens(), 102);
}

mod overlapping {
    use super::*;
    use crate::overlap::overlap;

    fn profile(layers: &[[u64; 4]]) -> Profile {
        let layer = |(i, chosen): (usize, &[u64; 4])| Routing {
            chosen: chosen.to_vec(),
            ..Routing::new(i as u32, 1, 4)
        };
        let layers = layers.iter().enumerate().map(layer).collect();
        Profile { layers, trace: Trace::default(), ..example() }
    }

    #[test]
    fn counts_the_busiest_that_both_share() {
        let a = profile(&[[9, 5, 1, 0], [4, 3, 2, 1], [7, 7, 7, 7]]);
        let b = profile(&[[9, 1, 5, 0], [1, 2, 3, 4], [1, 1, 1, 1]]);
        let o = overlap(&a, &b, 2).unwrap();
        // Ties go to the lowest index, so that the last layer agrees.
        assert_eq!(o.layers, [(0, 0.5), (1, 0.0), (2, 1.0)]);
        assert_eq!((o.median, o.mean), (0.5, 0.5));
        assert_eq!(overlap(&b, &a, 2).unwrap(), o);
        assert_eq!(overlap(&a, &a, 3).unwrap().median, 1.0);
        assert_eq!(overlap(&a, &b, 4).unwrap().mean, 1.0);
        assert!(overlap(&a, &profile(&[[1, 0, 0, 0]]), 2).is_err());
    }
}

mod chunks {
    use super::*;
    use crate::loads::{Account, loads};

    #[test]
    fn are_joined_and_scaled_to_the_size_of_a_build() {
        let p = example();
        // As read: the half chunk counts, scaled up.
        let own = loads(&p, 64).unwrap();
        assert_eq!(own.layers[0].samples, [[63, 1], [64, 0]]);
        assert!(own.origin.contains("1 of 2 scaled to 64"), "{}", own.origin);
        assert_eq!(loads(&p, 32).unwrap().layers[0].samples, [[32, 1], [32, 0]]);
        // Joined to one of 100 tokens, scaled to 128; halves round up.
        let joined = loads(&p, 128).unwrap();
        assert_eq!(joined.layers[0].samples, [[127, 2]]);
        assert_eq!(
            loads(&Profile { trace: Trace::default(), ..p }, 64).unwrap_err().fault,
            moec_base::Fault::Input
        );
    }

    #[test]
    fn a_short_rest_does_not_count() {
        let mut p = example();
        p.trace.sequences = vec![vec![chunk(64, 63), chunk(31, 31)]];
        assert_eq!(loads(&p, 64).unwrap().layers[0].samples, [[63, 1]]);
        p.trace.sequences = vec![vec![chunk(31, 31)]];
        assert_eq!(loads(&p, 64).unwrap().layers[0].samples, [[64, 0]], "there is nothing else");
    }

    #[test]
    fn quantiles_and_means_are_those_of_the_samples() {
        let mut layer = loads(&example(), 64).unwrap().layers.remove(0);
        layer.samples = vec![vec![4, 0], vec![1, 3], vec![2, 2], vec![3, 1]];
        assert_eq!([0.0, 0.25, 0.5, 0.75, 1.0].map(|q| layer.quantile(0, q)), [1, 1, 2, 3, 4]);
        assert_eq!((layer.mean(0, 100), layer.mean(1, 100)), (99.0, 1.0));
        assert_eq!(layer.imbalance(), 99.0 * 2.0 / 100.0);
    }

    /// NPUMoE, §4.2: four experts get 64, 32, 32 and 0 tokens with room for 64 each.
    #[test]
    fn rows_past_a_capacity_and_padding_are_counted() {
        let mut layer = loads(&example(), 64).unwrap().layers.remove(0);
        (layer.chosen, layer.samples) = (vec![64, 32, 32, 0], vec![vec![64, 32, 32, 0]]);
        let grouped = layer.account(&|_| Some(64), &|_| 0);
        assert_eq!(grouped, Account { routed: 128, overflow: 0, rows: 256, padding: 128 });
        // On its own, the expert without tokens is not launched.
        let apart = layer.account(&|_| Some(48), &|e| e);
        assert_eq!(apart, Account { routed: 128, overflow: 16, rows: 144, padding: 32 });
        let free = layer.account(&|e| (e > 0).then_some(16), &|e| e);
        assert_eq!((free.overflow, free.rows), (32, 32));
        assert_eq!((apart.and(apart).overflow_rate(), apart.padding_rate()), (0.125, 32.0 / 144.0));
    }

    /// Capacities that hold all of the text that they were made from do not hold other text.
    #[test]
    fn overflow_is_expected_of_text_that_capacities_were_not_made_for() {
        let mut layer = loads(&example(), 64).unwrap().layers.remove(0);
        // Ten chunks of two texts: the second loads expert 1 twice as much.
        let sample = |i: usize| if i < 8 { vec![40, 20] } else { vec![20, 40] };
        layer.samples = (0..10).map(sample).collect();
        layer.chosen = vec![360, 240];
        let capacity = |rows: [u32; 2]| move |e: usize| Some(rows[e]);
        assert_eq!(layer.account(&capacity([40, 40]), &|e| e).overflow, 0);
        // Without the last fold, expert 1 has room for 20 rows of the 40 of both its chunks.
        assert_eq!(layer.held_out_overflow(&capacity([40, 40])), 40.0 / 600.0);
        // With half as much room again above its loads, it has room for 30.
        assert_eq!(layer.held_out_overflow(&capacity([60, 60])), 20.0 / 600.0);
        assert_eq!(layer.held_out_overflow(&|_| None), 0.0);
        // Only equal loads leave no overflow on held-out text.
        layer.samples = vec![vec![40, 20]; 10];
        assert_eq!(layer.held_out_overflow(&capacity([40, 20])), 0.0);
        layer.samples.truncate(1);
        assert_eq!(layer.held_out_overflow(&capacity([30, 20])), 10.0 / 60.0);
    }
}

mod channels {
    use super::*;
    use crate::importance::{ENOUGH, too_few};
    use moec_cpu::WeightImportance;
    use moec_ir::{Axis, Encoding, Format, Leaf, Module, Source, Weight, WeightClass, WeightExpr};
    use std::ops::Range;

    /// Every number is 2.
    struct Twos;

    impl Source for Twos {
        fn read(
            &self,
            _: &Leaf,
            _: usize,
            _: Range<usize>,
            _: Range<usize>,
            out: &mut [f32],
        ) -> std::result::Result<(), Box<dyn std::error::Error + Send + Sync>> {
            out.fill(2.0);
            Ok(())
        }
    }

    fn leaf(tensor: &str, shape: &[usize]) -> WeightExpr {
        WeightExpr::Leaf(Leaf { tensor: tensor.into(), shape: shape.into(), encoding: Encoding::Plain })
    }

    fn weight(name: &str, expr: WeightExpr) -> Weight {
        let shape = expr.shape().unwrap();
        Weight { name: name.into(), shape, class: WeightClass::Attention, format: Format::F32, expr }
    }

    /// Two matrices with one input, of mean squares 3 and 1, and two experts of which one saw little.
    fn profile() -> Profile {
        let seen = |lead: &[u64], sums: &[f32]| Moments::from_sums(2, lead.to_vec(), sums).unwrap();
        let weights = [
            ("gate".to_owned(), seen(&[100], &[300.0, 100.0])),
            ("up".to_owned(), seen(&[100], &[300.0, 100.0])),
            ("experts".to_owned(), seen(&[ENOUGH, ENOUGH - 1], &[64.0, 64.0, 63.0, 0.0])),
        ];
        Profile { weights: weights.into(), ..example() }
    }

    fn importance(lowered: Vec<Weight>, rewritten: Weight) -> Result<Option<Vec<f32>>> {
        let module = |weights| Module { weights, ..Module::default() };
        let (leads, lowered, rewritten) = (rewritten.lead(), module(lowered), module(vec![rewritten]));
        let found = Importance::new(&profile(), &lowered, &rewritten, &Twos, |_| true)?;
        assert_eq!(found.importance("w", leads), None);
        Ok((0..leads).map(|lead| found.importance("w", lead)).collect::<Option<Vec<_>>>().map(|c| c.concat()))
    }

    fn of(expr: WeightExpr) -> Option<Vec<f32>> {
        let lowered = vec![
            weight("gate", leaf("g", &[4, 2])),
            weight("up", leaf("u", &[4, 2])),
            weight("experts", leaf("e", &[2, 4, 2])),
            weight("norm", leaf("n", &[2])),
        ];
        importance(lowered, weight("w", expr)).unwrap()
    }

    #[allow(clippy::ref_option, reason = "what is looked at is an option")]
    fn near(got: &Option<Vec<f32>>, want: &[f32]) {
        let got = got.as_ref().expect("there is an importance");
        assert_eq!(got.len(), want.len());
        assert!(got.iter().zip(want).all(|(a, b)| (a - b).abs() < 0.02), "{got:?} instead of {want:?}");
    }

    #[test]
    fn follow_the_expression_of_a_rewritten_weight() {
        let (gate, up) = (leaf("g", &[4, 2]), leaf("u", &[4, 2]));
        near(&of(gate.clone()), &[1.5, 0.5]);
        let joined = WeightExpr::Concat { axis: Axis::Rows, of: vec![gate.clone(), up.clone()] };
        near(&of(joined), &[1.5, 0.5]);
        let rows =
            WeightExpr::Slice { axis: Axis::Rows, start: 1, step: 1, len: 2, of: Box::new(gate.clone()) };
        near(&of(rows), &[1.5, 0.5]);
        let wide = WeightExpr::Concat { axis: Axis::Cols, of: vec![gate.clone(), up] };
        near(&of(wide), &[1.5, 0.5, 1.5, 0.5]);
        let by = Box::new(WeightExpr::Const(vec![1.0, 0.5]));
        // The input of the scaled matrix is the recorded one over the factors: 3 and 4.
        near(&of(WeightExpr::ScaleCols { of: Box::new(gate), by }), &[6.0 / 7.0, 8.0 / 7.0]);
        assert_eq!(of(leaf("other", &[4, 2])), None);
    }

    #[test]
    fn of_an_expert_that_saw_little_are_its_layers() {
        // Mean over both: 127/127 and 64/127.
        near(&of(leaf("e", &[2, 4, 2])), &[1.0, 1.0, 1.33, 0.67]);
    }

    #[test]
    fn are_never_silent() {
        let mut profile = profile();
        profile.weights = [("w".to_owned(), Moments::from_sums(2, vec![100], &[100.0, 0.0]).unwrap())].into();
        let module = Module { weights: vec![weight("w", leaf("w", &[4, 2]))], ..Module::default() };
        let found = Importance::new(&profile, &module, &module, &Twos, |_| true).unwrap();
        let channels = found.importance("w", 0).unwrap();
        assert!(channels[1] > 0.0 && channels[1] < 0.02, "{channels:?}");
        let none = Importance::new(&profile, &module, &module, &Twos, |_| false).unwrap();
        assert_eq!(none.importance("w", 0), None);
    }

    #[test]
    fn of_another_shape_are_refused() {
        let e = importance(vec![weight("gate", leaf("g", &[4, 3]))], weight("w", leaf("g", &[4, 3])));
        assert!(e.expect_err("three channels").to_string().contains("`gate`"));
    }

    #[test]
    fn experts_with_little_text_are_named() {
        let said = too_few(&example()).unwrap();
        assert!(said.starts_with("1 of 2 experts saw fewer than 64 tokens (1 in layer 0)"), "{said}");
    }
}

/// What was written before gates were measured is read as it was.
#[test]
fn a_profile_of_version_five_is_read() {
    let p = example();
    let start = (&p.origin, &p.reading, &p.layers, &p.trace, &p.saliency, &p.weights, &p.routes);
    let old = (start, &p.correlations, &p.neurons, &p.samples);
    let stored = bincode::encode_to_vec(old, bincode::config::standard()).unwrap();
    let read = Profile::decode(&wrapped(5, stored.len() as u64, &stored)).unwrap();
    assert_eq!(read.merge(&p).unwrap().gates, p.gates);
    assert_eq!(read, Profile { gates: Vec::new(), ..p });
}

/// What was written before rows were kept is read as it was, and merged with a new one it has none either.
#[test]
fn a_profile_of_version_four_is_read() {
    let p = example();
    let start = (&p.origin, &p.reading, &p.layers, &p.trace, &p.saliency, &p.weights, &p.routes);
    let old = (start, &p.correlations, &p.neurons);
    let stored = bincode::encode_to_vec(old, bincode::config::standard()).unwrap();
    let read = Profile::decode(&wrapped(4, stored.len() as u64, &stored)).unwrap();
    assert!(read.merge(&p).unwrap().samples.is_empty());
    assert_eq!(read, Profile { samples: Vec::new(), gates: Vec::new(), ..p });
}

/// What was written before neurons were counted is read as it was.
#[test]
fn a_profile_of_version_three_is_read() {
    let p = example();
    let old =
        (&p.origin, &p.reading, &p.layers, &p.trace, &p.saliency, &p.weights, &p.routes, &p.correlations);
    let stored = bincode::encode_to_vec(old, bincode::config::standard()).unwrap();
    let read = Profile::decode(&wrapped(3, stored.len() as u64, &stored)).unwrap();
    assert_eq!(read, Profile { neurons: Vec::new(), samples: Vec::new(), gates: Vec::new(), ..p });
}

/// And so is what was written before there were correlations.
#[test]
fn a_profile_of_version_two_is_read() {
    let new = example();
    let old = (&new.origin, &new.reading, &new.layers, &new.trace, &new.saliency, &new.weights, &new.routes);
    let stored = bincode::encode_to_vec(old, bincode::config::standard()).unwrap();
    let mut bytes = file::MAGIC.to_vec();
    bytes.extend(2_u32.to_le_bytes());
    bytes.extend((stored.len() as u64).to_le_bytes());
    bytes.extend(moec_base::hashing::sha256(&stored));
    bytes.extend(miniz_oxide::deflate::compress_to_vec(&stored, 6));
    let read = Profile::decode(&bytes).unwrap();
    let none = Profile {
        correlations: Vec::new(),
        neurons: Vec::new(),
        samples: Vec::new(),
        gates: Vec::new(),
        ..new.clone()
    };
    assert_eq!(read, none);
    // Merged with a new one, there are none either.
    assert!(read.merge(&new).unwrap().correlations.is_empty());
    bytes[8] = 1;
    assert!(Profile::decode(&bytes).unwrap_err().to_string().contains("version 1"));
}

#[test]
fn neurons_have_frequencies_zeros_and_an_order() {
    let p = example();
    let c = p.neurons(0).unwrap();
    assert_eq!(
        [(0, 2, 1), (0, 1, 1), (0, 0, 1), (1, 2, 1)].map(|(e, n, b)| c.active(e, n, b)),
        [(2, 2), (1, 2), (0, 2), (0, 0)]
    );
    assert_eq!(
        (c.active(0, 1, 2), c.active(0, 1, 3), c.active(0, 3, 1), c.active(2, 0, 1)),
        ((1, 1), (0, 0), (0, 0), (0, 0))
    );
    assert_eq!(c.hottest(0, 1), [2, 1, 0]);
    assert_eq!((c.zeros(0, 1), c.zeros(0, 0), c.zeros(1, 1)), (Some(0.5), None, None));
    // The expert that nothing chose says nothing of its neurons.
    assert_eq!(c.frequencies(0, 1), [1.0, 0.5, 0.0]);
    assert_eq!(c.frequencies(0, 2), [1.0, 1.0, 0.0]);
    assert!(p.neurons(1).is_none());
    // What one profile counted is not lost where the other counted nothing.
    let none = Profile { neurons: Vec::new(), ..example() };
    assert_eq!(p.merge(&none).unwrap().neurons, p.neurons);
    assert_eq!(p.merge(&p).unwrap().neurons(0).unwrap().active(0, 1, 1), (2, 4));
    // Counts at other thresholds are of other neurons.
    let at =
        |t: f32| NeuronCounts { levels: vec![Level { threshold: t, ..c.levels[0].clone() }], ..c.clone() };
    let (a, b) =
        (Profile { neurons: vec![at(0.5)], ..example() }, Profile { neurons: vec![at(0.25)], ..example() });
    assert!(a.merge(&b).unwrap().neurons.is_empty());
    assert_eq!(a.merge(&a).unwrap().neurons(0).unwrap().active_at(0, 0, 2, 1), (4, 4));
}

#[test]
fn correlations_are_those_of_the_sums() {
    let of = |c: &Correlations, lead| c.of(lead).flat_map(|(_, r)| r).collect::<Vec<_>>();
    let seen = &example().correlations[0];
    assert!((of(seen, 0)[0] + 0.5_f64.sqrt()).abs() < 1e-4);
    assert!((of(seen, 1)[0] - 3.0 / 56.0_f64.sqrt()).abs() < 1e-4);
    // Twice the same text tells the same.
    let both = example().merge(&example()).unwrap();
    assert_eq!(of(&both.correlations[0], 0), of(seen, 0));
    assert_eq!(both.correlations[0].tokens, [198, 2]);
    // Blocks are as wide as there is room for them.
    assert_eq!(correlations::block_for(96, 96), correlations::WIDEST);
    assert_eq!(correlations::block_for(1024, 1024), 256);
    assert_eq!(correlations::block_for(1 << 20, 1 << 20), moec_ir::types::GROUP);
    // Each must fit the moments that it goes with.
    for wrong in [
        Correlations { readers: vec!["other".into()], ..seen.clone() },
        Correlations { readers: Vec::new(), ..seen.clone() },
        Correlations { cols: 3, ..seen.clone() },
        Correlations { block: 0, ..seen.clone() },
        Correlations { block: correlations::WIDEST + 1, ..seen.clone() },
        Correlations { tokens: vec![u64::MAX, 1], ..seen.clone() },
    ] {
        assert!(Profile { correlations: vec![wrong], ..example() }.check().is_err());
    }
}

/// Fuzzing starts from a file, and from what such a file holds deflated. `MOEC_RENEW_SEEDS=1` writes both.
#[test]
fn seeds_of_fuzzing_are_of_this_version() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/profile");
    let stored = bincode::encode_to_vec(example(), bincode::config::standard()).unwrap();
    for (name, bytes) in [("file", example().encode().unwrap()), ("stored", stored)] {
        let path = folder.join(name);
        if std::env::var_os("MOEC_RENEW_SEEDS").is_some() {
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(&path, &bytes).unwrap();
        }
        let seed = std::fs::read(&path).unwrap();
        assert!(seed == bytes, "`{}` is of another version; MOEC_RENEW_SEEDS=1 renews it", path.display());
    }
}
