//! Tests of profiles: encoding, decoding, merging, and errors.

mod channels;
mod chunks;
mod decoding;
mod examples;
mod overlapping;
mod versions;

use super::neurons::Level;
use super::*;
use examples::*;
use proptest::collection::{btree_map, vec};
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn profiles_round_trip(p in profile()) {
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
            for matrix in 0..m.matrices() {
                let (n, k) = (a.tokens[matrix] as f64, b.tokens[matrix] as f64);
                for ((m, a), b) in m.of(matrix).iter().zip(a.of(matrix)).zip(b.of(matrix)) {
                    let want = (f64::from(*a) * n + f64::from(*b) * k) / (n + k).max(1.0);
                    prop_assert!((f64::from(*m) - want).abs() <= want / 2048.0, "{} instead of {}", m, want);
                }
            }
        }
        prop_assert_eq!(Profile::decode(&merged.encode().unwrap()).unwrap(), merged);
    }

    #[test]
    fn decoding_arbitrary_bytes_does_not_panic(bytes in vec(any::<u8>(), 0..200), header in any::<bool>()) {
        let mut all = if header { example().encode().unwrap()[..20].to_vec() } else { Vec::new() };
        all.extend(bytes);
        let _ = Profile::decode(&all);
    }

    #[test]
    fn any_changed_byte_of_a_profile_is_detected(at in any::<prop::sample::Index>(), change in 1_u8..) {
        let p = example();
        let mut bytes = p.encode().unwrap();
        let at = at.index(bytes.len());
        bytes[at] ^= change;
        // Some bits of a deflate stream have no meaning; then the result must equal the stored profile.
        if let Ok(read) = Profile::decode(&bytes) {
            prop_assert_eq!(read, p);
        }
    }
}

/// Error for a profile that was changed before it was hashed, as an attacker could do.
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
fn inconsistent_profiles_are_rejected() {
    type Change = fn(&mut Profile);
    let cases: [(&str, Change); 26] = [
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
        ("neurons are not in order", |p| p.neurons.push(neuron_counts())),
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
        ("bins of confidences of 0 experts", |p| p.confidence = Some(Confidence::new(0))),
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
fn invalid_profile_files_are_refused() {
    let stored = bincode::encode_to_vec(example(), bincode::config::standard()).unwrap();
    let len = stored.len() as u64;
    let whole = wrapped(file::VERSION, len, &stored);
    assert_eq!(Profile::decode(&whole).unwrap(), example());
    let longer = [stored.as_slice(), &[0]].concat();
    for (words, bytes) in [
        ("not a profile", b"MOECTRX\n".to_vec()),
        ("not a profile", Vec::new()),
        ("ends in its header", whole[..30].to_vec()),
        ("version 1", wrapped(1, len, &stored)),
        ("length", wrapped(file::VERSION, u64::MAX, &stored)),
        ("length", wrapped(file::VERSION, 1 << 31, &stored)),
        ("checksum", wrapped(file::VERSION, len + 1, &stored)),
        ("does not inflate", wrapped(file::VERSION, len - 1, &stored)),
        ("does not inflate", whole[..whole.len() - 9].to_vec()),
        ("after its end", wrapped(file::VERSION, len + 1, &longer)),
    ] {
        let e = Profile::decode(&bytes).expect_err(words);
        assert!(e.to_string().contains(words), "`{words}` is not in `{e}`");
        assert!(e.hint.is_some());
    }
}

#[test]
fn decompression_bomb_is_refused() {
    // A gigabyte of zeros, deflated to a megabyte: the file does not have the numbers that it claims.
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
fn every_pair_of_experts_has_its_own_index() {
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
    // An expert without tokens has no frequencies.
    assert_eq!(c.frequencies(0, 1), [1.0, 0.5, 0.0]);
    assert_eq!(c.frequencies(0, 2), [1.0, 1.0, 0.0]);
    assert!(p.neurons(1).is_none());
    // Counts in one profile only are kept.
    let none = Profile { neurons: Vec::new(), ..example() };
    assert_eq!(p.merge(&none).unwrap().neurons, p.neurons);
    assert_eq!(p.merge(&p).unwrap().neurons(0).unwrap().active(0, 1, 1), (2, 4));
    // Counts at other thresholds cannot be merged.
    let at =
        |t: f32| NeuronCounts { levels: vec![Level { threshold: t, ..c.levels[0].clone() }], ..c.clone() };
    let (a, b) =
        (Profile { neurons: vec![at(0.5)], ..example() }, Profile { neurons: vec![at(0.25)], ..example() });
    assert!(a.merge(&b).unwrap().neurons.is_empty());
    assert_eq!(a.merge(&a).unwrap().neurons(0).unwrap().active_at(0, 0, 2, 1), (4, 4));
}

#[test]
fn correlations_are_computed_from_the_sums() {
    let of = |c: &Correlations, matrix| c.of(matrix).flat_map(|(_, r)| r).collect::<Vec<_>>();
    let seen = &example().correlations[0];
    assert!((of(seen, 0)[0] + 0.5_f64.sqrt()).abs() < 1e-4);
    assert!((of(seen, 1)[0] - 3.0 / 56.0_f64.sqrt()).abs() < 1e-4);
    // The same text twice changes no correlation.
    let both = example().merge(&example()).unwrap();
    assert_eq!(of(&both.correlations[0], 0), of(seen, 0));
    assert_eq!(both.correlations[0].tokens, [198, 2]);
    // Blocks are as wide as the limit allows.
    assert_eq!(correlations::block_for(96, 96), correlations::WIDEST);
    assert_eq!(correlations::block_for(1024, 1024), 256);
    assert_eq!(correlations::block_for(1 << 20, 1 << 20), moec_ir::types::GROUP);
    // Correlations must fit their moments.
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
