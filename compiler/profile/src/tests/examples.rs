//! An example of a profile, and strategies for random ones.

use super::*;

pub(super) const TOKENS: std::ops::Range<u64> = 0..1 << 30;

pub(super) fn origin() -> Origin {
    Origin { family: "olmoe".into(), hidden: 64, vocab: 512, layers: 2, checkpoint: [7; 32] }
}

pub(super) fn moments(matrices: usize, cols: usize) -> impl Strategy<Value = Moments> {
    (vec(TOKENS, matrices), vec(0.0_f32..1e20, matrices * cols))
        .prop_map(move |(tokens, sums)| Moments::from_sums(cols, tokens, &sums).unwrap())
}

pub(super) fn correlations(
    reader: &str,
    matrices: usize,
    cols: usize,
) -> impl Strategy<Value = Correlations> {
    let (reader, block) = (reader.to_owned(), 2);
    let inputs = vec(vec(-2.0_f32..2.0, cols), 3 * matrices);
    inputs.prop_map(move |inputs| {
        let mut sums = Vec::new();
        for seen in inputs.chunks(3) {
            for range in correlations::blocks(cols, block) {
                let pairs = range.clone().flat_map(|i| (range.start..=i).map(move |j| (i, j)));
                sums.extend(pairs.map(|(i, j)| seen.iter().map(|x| x[i] * x[j]).sum::<f32>()));
            }
        }
        Correlations::from_sums(vec![reader.clone()], cols, block, vec![3; matrices], &sums).unwrap()
    })
}

pub(super) fn routing(layer: u32, k: u32, experts: usize) -> impl Strategy<Value = Routing> {
    (TOKENS, vec(-1e3_f64..1e9, experts)).prop_map(move |(tokens, weight)| {
        let mut chosen = vec![0; experts];
        (0..k as usize).for_each(|i| chosen[i] = tokens);
        // Every token chose the same experts, so that each pair counts all tokens.
        let mut routing = Routing { tokens, chosen, weight, ..Routing::new(layer, k, experts) };
        for (a, b) in (0..k as usize).flat_map(|a| (a + 1..k as usize).map(move |b| (a, b))) {
            let pair = routing.pair(a, b).unwrap();
            routing.together[pair] = tokens;
        }
        routing
    })
}

/// Counts of the four experts of layer 0; every token chose the first two.
pub(super) fn neurons(tokens: u64) -> impl Strategy<Value = NeuronCounts> {
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

/// Profiles of one model, which can all be merged.
pub(super) fn profile() -> impl Strategy<Value = Profile> {
    let reading = (btree_map(any::<[u8; 32]>(), TOKENS, 0..3), 0.0_f64..1e12)
        .prop_map(|(texts, loss)| Reading { predicted: texts.values().sum(), texts, loss });
    let norms = vec(1e-12_f64..1e12, 0..9).prop_map(|norms| {
        let mut saliency = Saliency::new(0);
        for n in norms {
            saliency.add(n);
        }
        saliency
    });
    // One token per chunk, if both layers have that many.
    let sequences = vec(1_usize..4, 0..3);
    let parts = (routing(0, 2, 4), routing(1, 1, 3), moments(1, 5), moments(4, 3));
    let rows = vec(vec(-1e30_f32..1e30, 3), 0..9).prop_map(|rows| {
        let mut kept = samples::RowSample::default();
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
            confidence: Some(confidence()),
            losses: vec![loss()],
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

/// A chunk in which the first of two experts gets `first` tokens.
pub(super) fn chunk(tokens: u32, first: u16) -> Chunk {
    Chunk { tokens, loads: vec![first, tokens as u16 - first] }
}

/// The loss of a format.
fn loss() -> FormatLoss {
    FormatLoss { key: "experts".to_owned(), format: moec_ir::Format::Q4, tokens: 64, loss: 0.5 }
}

pub(super) fn example() -> Profile {
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
        neurons: vec![neuron_counts()],
        samples: vec![sample(0)],
        gates: vec![gates(0)],
        confidence: Some(confidence()),
        losses: vec![loss()],
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

/// Three tokens of a little pass with one expert.
pub(super) fn confidence() -> Confidence {
    let mut confidence = Confidence::new(1);
    for probability in [Some(0.25), Some(0.75), None] {
        confidence.add(probability);
    }
    confidence
}

/// Gates of a layer's experts.
pub(super) fn gates(layer: u32) -> Gates {
    let mut gates = Gates::new(layer, format!("layers.{layer}.moe.gate_up"));
    for x in [0.25, -0.125, 3.0] {
        gates.add(x);
    }
    gates
}

/// Three rows of the channels of both experts' inputs.
pub(super) fn sample(first: u8) -> Sample {
    let mut kept = samples::RowSample::default();
    (first..first + 3).for_each(|i| kept.add(&[f32::from(i), -0.5], samples::ROWS));
    kept.finish(vec!["layers.0.moe.down".to_owned()], 2)
}

/// Counts of three neurons of each of two experts: two tokens of the first expert, and the batch of both.
pub(super) fn neuron_counts() -> NeuronCounts {
    let mut counts = NeuronCounts::new((0, "layers.0.moe.down".into()), (2, 3, true), &[0.0], 2);
    let [alone, both] = counts.levels[0].batches.as_mut_slice() else { panic!("two sizes of batches") };
    alone.add(0, 3, &[0b100]).unwrap();
    alone.add(0, 3, &[0b110]).unwrap();
    both.add(0, 3, &[0b110]).unwrap();
    counts
}

/// Tokens that all chose expert 0 of two.
pub(super) fn sequence(tokens: usize) -> routes::Sequence {
    routes::Sequence {
        chosen: vec![0; tokens],
        ranked: [0, 1].repeat(tokens),
        scores: [200, 100].repeat(tokens),
    }
}
