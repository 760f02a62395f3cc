//! Profiles: stored and read back, merged, and refused.

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

fn routing(layer: u32, k: u32, experts: usize) -> impl Strategy<Value = Routing> {
    (TOKENS, vec(-1e3_f64..1e9, experts)).prop_map(move |(tokens, weight)| {
        let mut chosen = vec![0; experts];
        (0..k as usize).for_each(|i| chosen[i] = tokens);
        Routing { layer, k, tokens, chosen, weight }
    })
}

/// Profiles of one model: all can be merged.
fn profile() -> impl Strategy<Value = Profile> {
    let reading = (btree_map(any::<[u8; 32]>(), TOKENS, 0..3), 0.0_f64..1e12)
        .prop_map(|(texts, loss)| Reading { predicted: texts.values().sum(), texts, loss });
    (reading, routing(0, 2, 4), routing(1, 1, 3), moments(1, 5), moments(4, 3)).prop_map(
        |(reading, a, b, q, down)| Profile {
            origin: origin(),
            reading,
            layers: vec![a, b],
            weights: [("layers.0.attn.q".to_owned(), q), ("layers.0.moe.down".to_owned(), down)].into(),
        },
    )
}

fn example() -> Profile {
    let mut layer = Routing::new(0, 1, 2);
    (layer.tokens, layer.chosen, layer.weight) = (100, vec![99, 1], vec![49.5, 0.5]);
    Profile {
        origin: origin(),
        reading: Reading { texts: [([1; 32], 100)].into(), predicted: 100, loss: 300.0 },
        layers: vec![layer],
        weights: [(
            "layers.0.moe.down".to_owned(),
            Moments::from_sums(2, vec![99, 1], &[99.0, 198.0, 7.0, 8.0]).unwrap(),
        )]
        .into(),
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
    bytes.extend(crate::bundle::hashing::sha256(stored));
    bytes.extend(miniz_oxide::deflate::compress_to_vec(stored, 6));
    bytes
}

#[test]
fn what_does_not_hold_is_refused() {
    type Change = fn(&mut Profile);
    let cases: [(&str, Change); 9] = [
        ("family", |p| p.origin.family = "a\nb".into()),
        ("more tokens than anyone", |p| p.reading.texts = [([0; 32], u64::MAX)].into()),
        ("more predictions than tokens", |p| p.reading.predicted = 101),
        ("a loss of NaN", |p| p.reading.loss = f64::NAN),
        ("layer 0: 2 experts with 1 weights", |p| {
            let _ = p.layers[0].weight.pop();
        }),
        ("layer 0: 101 choices", |p| p.layers[0].chosen[0] = 100),
        ("routing weight that is not finite", |p| p.layers[0].weight[0] = f64::INFINITY),
        ("weight name", |p| {
            let m = p.weights["layers.0.moe.down"].clone();
            p.weights.insert(String::new(), m);
        }),
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
        ("version 2", wrapped(2, len, &stored)),
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
    assert!(Profile::decode(&bytes).is_err());
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
    let layer =
        Routing { layer: 3, k: 2, tokens: 6, chosen: vec![6, 0, 4, 2], weight: vec![3.0, 0.0, 1.0, 2.0] };
    assert_eq!(layer.used(), 3);
    assert_eq!(layer.imbalance(), 2.0);
    assert_eq!(layer.least_used(), [1, 3, 2, 0]);
    assert_eq!(layer.below(4), [1, 3]);
    assert_eq!([0, 1, 2].map(|e| layer.mean_weight(e)), [0.5, 0.0, 0.25]);
    assert_eq!(Routing::new(0, 1, 4).imbalance(), 0.0);
}

mod channels {
    use super::*;
    use crate::profile::importance::{ENOUGH, too_few};
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

/// Fuzzing starts from a file, and from what such a file holds deflated. `MOEC_RENEW_SEEDS=1` writes both.
#[test]
fn seeds_of_fuzzing_are_of_this_version() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/seeds/profile");
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
