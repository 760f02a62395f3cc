//! A profile is compared with the evaluator's values.

use super::case::{Case, WINDOW, ids};
use super::wide::Wide;
use crate::support::FAMILIES;
use moec_base::progress::Progress;
use moec_config::Config;
use moec_import::ImportOptions;
use moec_ir::eval::{self, Arg, Evaluator, Tensor};
use moec_ir::{Graph, Module, Op, Operand, ValueId, WeightClass};
use moec_measure::calibrate::{Request, calibrate, read_texts};
use moec_measure::job::Job;
use moec_pipeline::{Compilation, Inputs, Stops};
use moec_profile::Profile;
use std::collections::{BTreeMap, HashMap};

/// Sums of squares and counts for each matrix of a weight, by the weight's name.
type Sums = BTreeMap<String, (Vec<f64>, Vec<u64>)>;

/// Rows that each matrix reads, with its expert, by the weight's name.
type Rows = BTreeMap<String, Vec<(usize, Vec<f32>)>>;

/// Values in the evaluator during one call of `n` rows from position `start`.
struct Call<'a> {
    module: &'a Module,
    graph: &'a Graph,
    values: HashMap<ValueId, Tensor>,
    n: usize,
}

impl Call<'_> {
    fn value(&self, operand: Operand) -> &Tensor {
        let Operand::Value(v) = operand else { panic!("a value is expected") };
        &self.values[&v]
    }

    fn row(&self, operand: Operand, i: usize) -> &[f32] {
        let t = self.value(operand);
        &t.as_f32()[i * t.ty.cols()..(i + 1) * t.ty.cols()]
    }

    /// Adds the rows that every matrix of the graph reads.
    fn add(&self, evaluator: &mut Evaluator<'_>, sums: &mut Sums, rows: &mut Rows) {
        for node in &self.graph.nodes {
            let weight = |i: usize| match node.inputs.get(i) {
                Some(Operand::Weight(w)) => Some((*w, self.module.weight(*w))),
                _ => None,
            };
            let mut add = |name: &str, matrices: usize, matrix: usize, x: &[f32]| {
                let new = || (vec![0.0; matrices * x.len()], vec![0; matrices]);
                let (squares, tokens) = sums.entry(name.to_owned()).or_insert_with(new);
                tokens[matrix] += 1;
                let into = &mut squares[matrix * x.len()..(matrix + 1) * x.len()];
                into.iter_mut().zip(x).for_each(|(s, x)| *s += f64::from(*x).powi(2));
                rows.entry(name.to_owned()).or_default().push((matrix, x.to_vec()));
            };
            match &node.op {
                Op::Linear { .. } | Op::LinearGlu { .. } | Op::HeadLinear { .. } => {
                    let (_, w) = weight(1).unwrap();
                    if w.class == WeightClass::Exact {
                        continue;
                    }
                    for i in 0..self.n {
                        for (matrix, x) in self.row(node.inputs[0], i).chunks_exact(w.cols()).enumerate() {
                            add(&w.name, w.matrices(), matrix, x);
                        }
                    }
                }
                &Op::ExpertFfn { glu, bias, .. } => {
                    let ((gate_up, up), (_, down)) = (weight(2).unwrap(), weight(3).unwrap());
                    let Operand::Value(table) = node.inputs[1] else { panic!("a table is expected") };
                    let dispatch = &self.graph.nodes[self.graph.def(table).unwrap().0 as usize];
                    let matrices = evaluator.weight(gate_up).unwrap();
                    let biases = weight(4).map(|(b, _)| evaluator.weight(b).unwrap());
                    let chosen = self.value(dispatch.inputs[0]);
                    let k = chosen.ty.cols();
                    for (slot, &expert) in chosen.as_i32()[..self.n * k].iter().enumerate() {
                        let (x, e) = (self.row(node.inputs[0], slot / k), expert as usize);
                        add(&up.name, up.matrices(), e, x);
                        let part = |t: &Tensor, len: usize| t.as_f32()[e * len..(e + 1) * len].to_vec();
                        let (rows, cols) = (up.rows(), up.cols());
                        let x = Tensor::f32([1, cols], x.to_vec());
                        let w = Tensor::f32([rows, cols], part(&matrices, rows * cols));
                        let b = biases.as_ref().map(|b| Tensor::f32([rows], part(b, rows)));
                        let args = [&x, &w].into_iter().chain(&b).map(Arg::Tensor).collect();
                        let h = eval::op(&Op::LinearGlu { glu, bias }, args).unwrap();
                        add(&down.name, down.matrices(), e, h[0].as_f32());
                    }
                }
                _ => {}
            }
        }
    }
}

/// Choices of routers and outputs of attention, layer by layer.
#[derive(Default)]
struct Behaviour {
    /// Experts of every token, chunk by chunk.
    chosen: BTreeMap<u32, Vec<Vec<Vec<usize>>>>,
    /// L2 norms of attention's outputs, token by token.
    norms: BTreeMap<u32, Vec<f64>>,
}

impl Behaviour {
    fn add(&mut self, call: &Call<'_>) {
        for node in &call.graph.nodes {
            let layer = || node.scope.layer.unwrap();
            match &node.op {
                Op::Router(d) => {
                    let ids = call.values[&node.outputs[0]].as_i32()[..call.n * d.k].chunks_exact(d.k);
                    let ids = ids.map(|ids| ids.iter().map(|&e| e as usize).collect()).collect();
                    self.chosen.entry(layer()).or_default().push(ids);
                }
                // `x + o`, where `o` is the output of attention or another mixer.
                Op::Add if node.scope.role().mixes_tokens() => {
                    let norm =
                        |i| call.row(node.inputs[1], i).iter().map(|&x| f64::from(x).powi(2)).sum::<f64>();
                    self.norms.entry(layer()).or_default().extend((0..call.n).map(|i| norm(i).sqrt()));
                }
                _ => {}
            }
        }
    }

    fn check(&self, profile: &Profile, family: &str) {
        let chunks: Vec<_> = profile.trace.sequences.iter().flatten().collect();
        assert_eq!(chunks.iter().map(|c| c.tokens as usize).sum::<usize>(), WINDOW, "{family}");
        let mut first = 0;
        for layer in &profile.layers {
            let chosen = &self.chosen[&layer.layer];
            let mut together = vec![0; layer.together.len()];
            for (chunk, tokens) in chunks.iter().zip(chosen) {
                let mut loads = vec![0_u16; layer.chosen.len()];
                for experts in tokens {
                    for &e in experts {
                        loads[e] += 1;
                    }
                    for (i, &a) in experts.iter().enumerate() {
                        for &b in &experts[..i] {
                            together[layer.pair(a, b).unwrap()] += 1;
                        }
                    }
                }
                assert_eq!(chunk.loads[first..first + loads.len()], loads, "{family} layer {}", layer.layer);
            }
            assert_eq!(layer.together, together, "{family} layer {}", layer.layer);
            first += layer.chosen.len();
        }
        assert!(profile.saliency.iter().map(|s| s.layer).eq(self.norms.keys().copied()), "{family}");
        for saliency in &profile.saliency {
            let norms = &self.norms[&saliency.layer];
            let mean = norms.iter().sum::<f64>() / norms.len() as f64;
            assert_eq!(saliency.tokens(), norms.len() as u64, "{family}");
            let (got, most) = (saliency.mean(), norms.iter().copied().fold(0.0, f64::max));
            assert!((got - mean).abs() < 1e-3 * mean, "{family} layer {}: {got}, not {mean}", saliency.layer);
            let ratio = saliency.quantile(1.0) / most;
            assert!((0.9..1.1).contains(&ratio), "{family} layer {}: {ratio}", saliency.layer);
        }
    }
}

/// Runs the evaluator on the one window of the texts.
fn reference(module: &Module, source: &dyn moec_ir::Source, ids: &[u32]) -> (Sums, Behaviour, Rows) {
    let graph = &module.entries[0];
    let (rows, out) = (graph.kind.rows(), graph.ty(Graph::ROWS).rows());
    assert!(out == rows, "every row has logits");
    let mut evaluator = Evaluator::new(module, source);
    let (mut sums, mut behaviour, mut seen) = (Sums::new(), Behaviour::default(), Rows::new());
    for (c, ids) in ids.chunks(rows).enumerate() {
        let padded = |pad: i32, of: &dyn Fn(usize) -> i32| -> Vec<i32> {
            (0..rows).map(|i| if i < ids.len() { of(i) } else { pad }).collect()
        };
        let mut values = HashMap::new();
        evaluator
            .run_with(
                0,
                &padded(0, &|i| ids[i] as i32),
                &padded(-1, &|i| (c * rows + i) as i32),
                &padded(0, &|_| 0),
                &padded(-1, &|i| i as i32),
                &mut |id, results: &[&Tensor]| {
                    let node = &graph.nodes[id.0 as usize];
                    values.extend(node.outputs.iter().copied().zip(results.iter().map(|&t| t.clone())));
                },
            )
            .unwrap();
        let call = Call { module, graph, values, n: ids.len() };
        call.add(&mut evaluator, &mut sums, &mut seen);
        behaviour.add(&call);
    }
    (sums, behaviour, seen)
}

/// Checks the counts of neurons against the inputs of their down matrices. Values within rounding of a
/// threshold may be on either side of it.
fn neurons_are_those(profile: &Profile, seen: &Rows, family: &str) {
    for layer in &profile.layers {
        assert!(profile.neurons(layer.layer).is_some_and(|c| c.routed), "{family}: layer {}", layer.layer);
    }
    for counts in &profile.neurons {
        let rows = &seen[&counts.weight];
        let what = format!("{family} {}", counts.weight);
        assert_eq!(rows[0].1.len(), counts.width as usize, "{what}");
        for (l, level) in counts.levels.iter().enumerate() {
            for (expert, neuron) in
                (0..counts.experts()).flat_map(|e| (0..rows[0].1.len()).map(move |n| (e, n)))
            {
                let own = rows.iter().filter(|r| r.0 == expert);
                let past = |t: f32| own.clone().filter(|r| r.1[neuron].abs() > t).count() as u64;
                let slack = level.threshold * 1e-3 + 1e-6;
                let (got, of) = counts.active_at(l, expert, neuron, 1);
                assert_eq!(of, own.clone().count() as u64, "{what}");
                let (least, most) = (past(level.threshold + slack), past((level.threshold - slack).max(0.0)));
                assert!(
                    least <= got && got <= most.max(1),
                    "{what} [{expert}, {neuron}]: {got}, not {least} to {most}"
                );
                assert_eq!(counts.active_at(l, expert, neuron, 2), (0, 0), "{what}: there is one sequence");
            }
        }
    }
}

#[test]
fn profile_matches_the_evaluator() {
    for family in FAMILIES {
        is_what_the_evaluator_sees(family, None);
    }
}

/// Rows that are whole pages apart are copied before a matrix reads them, perhaps long before. From then on
/// the original's memory may be reused, so the profile must record the copied rows.
#[test]
fn profile_with_page_wide_rows_matches_the_evaluator() {
    for family in FAMILIES {
        is_what_the_evaluator_sees(family, Some(Wide { hidden: 1024, inner: None }));
    }
    for (family, inner) in [("olmoe", 1024), ("phimoe", 1024), ("phimoe", 112)] {
        is_what_the_evaluator_sees(family, Some(Wide { hidden: 2048, inner: Some(inner) }));
    }
    // Neither a multiple of a page nor of any vector.
    for family in FAMILIES {
        is_what_the_evaluator_sees(family, Some(Wide { hidden: 136, inner: None }));
    }
}

fn is_what_the_evaluator_sees(family: &str, wide: Option<Wide>) {
    let case = Case::with(family, wide);
    let ids = ids(WINDOW);
    let texts = read_texts(&[case.text("text.txt", &ids)]).unwrap();
    let config = Config::load(&case.toml).unwrap();
    let (checkpoint, spec) = moec_import::open(&config.model.source, &ImportOptions::default()).unwrap();
    let request = Request { texts: &texts, tokens: 1000, window: WINDOW, job: Job::ALONE };
    let profile = calibrate(&config, &checkpoint, &spec, &request, &Progress::silent()).unwrap();
    assert_eq!(profile.reading.tokens(), WINDOW as u64, "{family}");
    assert_eq!(profile.reading.predicted, WINDOW as u64 - 1, "{family}");

    let device = moec_targets::target("native").unwrap();
    let mut lowered = Compilation::new(Inputs::new(&config, &checkpoint, &spec, &device));
    let stops = Stops { stop_after: Some("lower"), ..Stops::default() };
    lowered.run(stops, &Progress::silent(), &mut |_| {}).unwrap();
    let (sums, behaviour, seen) = reference(&lowered.module, &checkpoint, &ids);
    behaviour.check(&profile, family);
    neurons_are_those(&profile, &seen, family);
    assert!(profile.weights.keys().eq(sums.keys()), "{family}: other weights");
    for (name, (squares, tokens)) in &sums {
        let moments = &profile.weights[name];
        assert_eq!(&moments.tokens, tokens, "{family} {name}");
        for (matrix, &n) in tokens.iter().enumerate() {
            let most = moments.of(matrix).iter().copied().fold(0.0, f32::max);
            for (c, &got) in moments.of(matrix).iter().enumerate() {
                let want = squares[matrix * moments.cols + c] / n.max(1) as f64;
                let error = (f64::from(got) - want).abs();
                assert!(
                    error <= want * 2e-3 + 1e-9 + 1e-7 * f64::from(most),
                    "{family} {name} [{matrix}, {c}]: {got}, not {want}"
                );
            }
        }
    }
    for layer in &profile.layers {
        let of_gate_up = &profile.weights[&format!("layers.{}.moe.gate_up", layer.layer)].tokens;
        assert_eq!(&layer.chosen, of_gate_up, "{family} layer {}", layer.layer);
        let weight: f64 = layer.weight.iter().sum();
        assert!(weight > 0.0, "{family} layer {}: no routing weights", layer.layer);
    }
}
