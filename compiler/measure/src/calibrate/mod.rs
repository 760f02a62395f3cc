//! Calibration: runs a model over texts on this machine and records a [`Profile`].
//!
//! The model is compiled without rewriting: weights in the checkpoint's own format, activations in f32. So
//! each weight keeps the name that lowering gave it. The bundle is in a folder of its own in the cache, which
//! is removed after the run.
#![expect(clippy::cast_possible_truncation, reason = "numbers of one call, whose sizes the plan has")]

mod cache;
mod collect;
mod confidence;
mod gates;
mod neurons;
mod piece;
mod products;
mod record;
mod roles;
mod rows;
pub(crate) mod texts;

pub use cache::{Weighed, entry, expert_use, importance, profile};
pub use texts::{Corpus, read_ids, read_texts};

use crate::job::Job;
use collect::Collector;
use moec_base::error::{Error, Result};
use moec_base::interrupt;
use moec_base::progress::Progress;
use moec_base::scratch::Scratch;
use moec_bundle::read::Bundle;
use moec_bundle::write;
use moec_config::{Activations, Config, KvCache, Rounding, Size, Weights};
use moec_import::{Checkpoint, ModelSpec};
use moec_ir::plan::Plan;
use moec_ir::{EntryKind, Format, Module, WeightClass, WeightExpr};
use moec_pipeline::{Compilation, Compiled, Inputs, Stops};
use moec_profile::neurons::BATCHES;
use moec_profile::{Origin, Profile, Reading, Routes};
use moec_runtime::CheckLevel;
use moec_runtime::bundle::BundleReader;
use moec_runtime::serving::text::Text;
use moec_runtime::{Engine, Moment, Options, Program, Row, StepView};
use piece::{CalibrationRecord, Part, PieceRecord};
use std::ops::Range;
use texts::Window;

/// Default number of tokens of a text that are read as one sequence; the same as in `moec eval`.
pub const WINDOW: usize = 512;
/// Logits that are computed per chunk. With a large vocabulary the head reads, and the score covers, only a
/// sample of the tokens.
const LOGITS: usize = 1 << 21;

/// Most pieces of the texts: a host reads whole pieces, and the sums of a piece are sent to the first host.
const PIECES: usize = 16;
/// Fewest sequences of a piece: batches of neurons are of sequences of one piece.
const PER_PIECE: usize = 2 * BATCHES;

/// Input of a calibration.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Texts.
    pub texts: &'a [Corpus],
    /// Most tokens over all texts.
    pub tokens: usize,
    /// Most tokens of one sequence.
    pub window: usize,
    /// Hosts that divide the texts.
    pub job: Job<'a>,
}

/// Runs the model of `config` over texts and returns the recorded profile, on every host of the job.
///
/// # Errors
/// Fails if the checkpoint does not compile or run here or lacks a tokenizer, if texts are too short, or on
/// an interrupt. No files remain then.
pub fn calibrate(
    config: &Config,
    checkpoint: &Checkpoint,
    spec: &ModelSpec,
    request: &Request<'_>,
    progress: &Progress,
) -> Result<Profile> {
    // The tokenizer is read before anything is computed, since texts need it.
    let is_text = request.texts.iter().any(Corpus::is_text);
    if is_text {
        checkpoint.tokenizer(spec)?;
    }
    request.texts.iter().try_for_each(|text| text.must_fit(spec.vocab))?;
    let origin = Origin::of(checkpoint, spec)?;
    let shapes = config.shapes_for(spec.max_positions)?;
    let window = request.window.min(shapes.max_context);
    let mut own = Config::defaults(&config.path);
    own.model = config.model.clone();
    own.shapes.max_context = Some(window);
    own.shapes.prefill_chunk = Some(shapes.prefill_chunk.min(window));
    own.decode.big_little = config.decode.big_little;
    own.decode.little = config.decode.little;
    own.memory.kv_cache = KvCache::F32;
    own.memory.budget = None;
    let target = moec_targets::target("native")?.with_activations(Activations::F32);

    let weights = as_stored(checkpoint, &Inputs::new(&own, checkpoint, spec, &target).lowered()?);
    let own = Config { weights, ..own.clone() };
    let inputs = Inputs { as_lowered: true, ..Inputs::new(&own, checkpoint, spec, &target) };
    let mut compilation = Compilation::new(inputs);
    compilation.run(Stops::default(), &Progress::silent(), &mut |_| {})?;
    interrupt::check()?;
    let compiled = compilation.finish()?;

    let scratch = Scratch::create("calibrate", &compiled.plan)?;
    let folder = scratch.path().join("model.moec");
    write::write(&compiled, &folder, write::Options::default(), progress)?;
    let bundle = Bundle::open(&folder)?;
    let open = || {
        Text::open(&BundleReader::of_plan(&folder, &bundle.plan, CheckLevel::Small), bundle.plan.model.bos).map_err(|_| {
            Error::input(format!("`{}` has no usable tokenizer", checkpoint.path().display())).hint(
                "put the model's `tokenizer.json` into the folder, or give tokens in place of text (`moec calibrate --ids`)",
            )
        })
    };
    let text = is_text.then(open).transpose()?;
    let windows = texts::windows(request.texts, text.as_ref(), request.tokens, window)?;
    interrupt::check()?;
    let read: Vec<&[u32]> = windows.iter().map(|w| w.ids.as_slice()).collect();
    request.job.check_same(&(&bundle.plan, read))?;

    let unit = bundle.unit()?;
    let program = Program::new(bundle.plan.clone(), &|s| unit.resolve(s)).map_err(Error::from)?;
    let options = Options::default();
    let mut engine = Engine::open(&program, &folder, options).map_err(Error::from)?;
    let mut run = Run::new(&compiled, &bundle.plan)?;
    let bar = progress.items("Reading", windows.iter().map(|w| w.ids.len() as u64).sum(), "tokens");
    let every = run.every(windows.iter().map(|w| w.ids.len()).sum());
    if let Some(first) = windows.first().filter(|_| run.collector.neurons.needs_thresholds()) {
        run.gauge(&mut engine, first)?;
    }
    let pieces = pieces(windows.len());
    let mut sums = None;
    request.job.in_order(
        pieces.len(),
        |piece, give| {
            for i in pieces[piece].clone() {
                run.collector.recorder.begin(i % every == 0);
                run.window(&mut engine, &windows[i], &|n| bar.add(n))?;
            }
            run.collector.take().parts().try_for_each(give)
        },
        |piece, part| {
            if matches!(part, Part::Begin(_)) && !request.job.computes(piece) {
                bar.add(windows[pieces[piece].clone()].iter().map(|w| w.ids.len() as u64).sum());
            }
            PieceRecord::add(&mut sums, part)
        },
    )?;
    bar.finish();
    let little = bundle.plan.model.big_little;
    let confidence = little
        .map(|little| confidence::record(&mut engine, little.experts, &windows, request.job, progress))
        .transpose()?;
    let profile = |sums: PieceRecord| -> Result<Profile> {
        let mut reading = Reading::default();
        for window in &windows {
            let of_text = reading.texts.entry(request.texts[window.text].hash).or_default();
            *of_text += window.ids.len() as u64;
        }
        let CalibrationRecord {
            layers,
            trace,
            saliency,
            weights,
            routes,
            correlations,
            neurons,
            samples,
            gates,
            predicted,
            loss,
        } = sums.finish()?;
        (reading.predicted, reading.loss) = (predicted, loss);
        let gates = gates.into_iter().map(|g| g.finish(&compiled.module, checkpoint));
        let mut gates = gates.collect::<Result<Vec<_>>>()?;
        gates.sort_by_key(|g| g.layer);
        Ok(Profile {
            origin,
            reading,
            layers,
            trace,
            saliency,
            weights,
            routes,
            correlations,
            neurons,
            samples,
            gates,
            confidence,
            losses: Vec::new(),
        })
    };
    // The first host has the sums.
    let profile = sums.map(profile).transpose()?;
    request.job.broadcast(profile)?.ok_or_else(|| Error::bug("a calibration without a profile"))
}

/// The format of each class that holds the checkpoint's numbers exactly. Block formats are computed in bf16,
/// as in any build.
pub(crate) fn as_stored(checkpoint: &Checkpoint, module: &Module) -> Weights {
    let of = |class: WeightClass| {
        let mut found: Option<Format> = None;
        for weight in module.weights.iter().filter(|w| w.class == class) {
            for leaf in weight.expr.leaves() {
                let format = match weight.expr {
                    WeightExpr::ScaleCols { .. }
                    | WeightExpr::ScaleMatrices { .. }
                    | WeightExpr::Map { .. } => Format::F32,
                    _ => checkpoint.format(leaf).filter(|f| !f.is_grouped()).unwrap_or(Format::Bf16),
                };
                found = Some(found.map_or(format, |f| if f == format { f } else { Format::F32 }));
            }
        }
        found.unwrap_or(Format::F32)
    };
    Weights {
        experts: of(WeightClass::Experts),
        attention: of(WeightClass::Attention),
        embeddings: of(WeightClass::Embeddings),
        stored: Vec::new(),
        activations: Activations::F32,
        rounding: Rounding::Nearest,
        size: Size::Any,
    }
}

/// Windows of each piece.
fn pieces(windows: usize) -> Vec<Range<usize>> {
    let each = windows.div_ceil(PIECES).max(PER_PIECE);
    (0..windows).step_by(each).map(|start| start..(start + each).min(windows)).collect()
}

/// A run over windows of text.
struct Run<'a> {
    plan: &'a Plan,
    /// Index of the prefill entry point.
    entry: usize,
    collector: Collector<'a>,
    /// Steps with taps of the collector.
    stops: Vec<bool>,
}

impl<'a> Run<'a> {
    fn new(compiled: &'a Compiled<'_>, plan: &'a Plan) -> Result<Self> {
        let entry = plan.entries.iter().position(|e| matches!(e.kind, EntryKind::Prefill(_)));
        let entry = entry.ok_or_else(|| Error::bug("a model without prefill"))?;
        let collector =
            Collector::new(&compiled.module, &plan.entries[entry], entry, &compiled.segment_weights)?;
        let stops = collector.stops();
        Ok(Self { plan, entry, collector, stops })
    }

    /// Sampling interval: one in so many sequences is recorded token by token, if they have `tokens` tokens in all.
    fn every(&self, tokens: usize) -> usize {
        tokens.div_ceil(Routes::most(self.collector.layers()).max(1)).max(1)
    }

    /// Reads one sequence only to measure thresholds of its neurons.
    fn gauge(&mut self, engine: &mut Engine<'_>, window: &Window) -> Result<()> {
        engine.reset(0).map_err(Error::from)?;
        self.collector.neurons.gauge();
        for (c, ids) in window.ids.chunks(self.plan.entries[self.entry].kind.rows()).enumerate() {
            interrupt::check()?;
            let start = c * self.plan.entries[self.entry].kind.rows();
            let rows: Vec<Row> =
                ids.iter().enumerate().map(|(i, &id)| Row { slot: 0, pos: start + i, id }).collect();
            let (collector, stops) = (&mut self.collector, &self.stops);
            let stops = |i: usize| stops.get(i).copied().unwrap_or(true);
            let look = &mut |moment, view: &StepView<'_>| {
                collector.observe(moment, view);
                Ok(())
            };
            let outputs = [rows.len() - 1];
            let len = window.ids.len();
            engine.trace_steps(self.entry, &rows, &outputs, len, &stops, look).map_err(Error::from)?;
        }
        Ok(())
    }

    /// Reads one sequence, chunk by chunk.
    fn window(&mut self, engine: &mut Engine<'_>, window: &Window, tick: &dyn Fn(u64)) -> Result<()> {
        let entry = &self.plan.entries[self.entry];
        let vocab = self.plan.model.vocab as usize;
        let most = (LOGITS / vocab.max(1)).clamp(1, entry.out_rows as usize);
        engine.reset(0).map_err(Error::from)?;
        self.collector.begin();
        let mut start = 0;
        for ids in window.ids.chunks(entry.kind.rows()) {
            interrupt::check()?;
            let rows: Vec<Row> =
                ids.iter().enumerate().map(|(i, &id)| Row { slot: 0, pos: start + i, id }).collect();
            let outputs = spread(rows.len(), most);
            let collector = &mut self.collector;
            let mut scored = (0, 0.0);
            let last = entry.steps.len().saturating_sub(1);
            let stops = |i: usize| i == last || self.stops.get(i).copied().unwrap_or(true);
            let len = window.ids.len();
            let result = engine.trace_steps(self.entry, &rows, &outputs, len, &stops, &mut |moment, view| {
                collector.observe(moment, view);
                if view.index() == last && moment == Moment::After {
                    scored = score(view, entry, vocab, &outputs, &window.ids[start..]);
                }
                Ok(())
            });
            result.map_err(Error::from)?;
            self.collector.end_chunk(ids.len());
            self.collector.piece.predicted += scored.0;
            self.collector.piece.loss += scored.1;
            start += ids.len();
            tick(ids.len() as u64);
        }
        Ok(())
    }
}

/// Number of predictions, and sum of −ln p, over the requested rows; `ids[i]` is the token of row `i`.
fn score(
    view: &StepView<'_>,
    entry: &moec_ir::plan::Entry,
    vocab: usize,
    outputs: &[usize],
    ids: &[u32],
) -> (u64, f64) {
    let (mut predicted, mut loss) = (0, 0.0);
    let stride = entry.buffers.get(entry.logits as usize).map_or(vocab, |b| b.stride as usize);
    let logits = view.buffer(entry.logits).unwrap_or_default();
    for (row, &at) in logits.chunks(stride.max(1) * 4).zip(outputs) {
        let Some(&next) = ids.get(at + 1) else { continue };
        let row = row.chunks_exact(4).take(vocab).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        let max = row.clone().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = row.clone().map(|z| f64::from((z - max).exp())).sum();
        let nll = sum.ln() - row.clone().nth(next as usize).map_or(0.0, |z| f64::from(z - max));
        if nll.is_finite() {
            predicted += 1;
            loss += nll.max(0.0);
        }
    }
    (predicted, loss)
}

/// At most `most` of `n` rows, evenly spaced, ascending.
fn spread(n: usize, most: usize) -> Vec<usize> {
    let count = n.min(most);
    (0..count).map(|i| i * n / count).collect()
}

#[cfg(test)]
mod tests {
    use super::{PER_PIECE, PIECES, pieces, spread};

    #[test]
    fn pieces_have_all_windows_in_order() {
        for windows in [1, 7, 8, 9, 100, 128, 129, 5000] {
            let pieces = pieces(windows);
            assert!(pieces.iter().flat_map(Clone::clone).eq(0..windows), "{windows}");
            assert!(pieces.len() <= PIECES);
            assert!(pieces[..pieces.len() - 1].iter().all(|p| p.len() >= PER_PIECE));
        }
        assert_eq!(pieces(128).len(), PIECES);
    }

    #[test]
    fn rows_are_spread_over_the_chunk() {
        assert_eq!(spread(4, 9), [0, 1, 2, 3]);
        assert_eq!(spread(9, 3), [0, 3, 6]);
        assert_eq!(spread(5, 1), [0]);
        assert!(spread(0, 3).is_empty());
    }
}
