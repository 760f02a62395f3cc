//! `generate`: continue a text.

mod report;

use super::args::Generate;
use super::{Context, Failure, Io, MakeConstraint, assigned, hosts, interrupt, paging};
use crate::bundle::BundleReader;
use crate::error::{Error, Fault, Result};
use crate::exec::engine::{Engine, most_rows};
use crate::exec::timeline::Timeline;
use crate::kv::saved::{self, Saved};
use crate::kv::unsupported::max_draft_tokens;
use crate::platform::regular;
use crate::serving::best_of::{BestOf, best_of_into};
use crate::serving::big_little::Decoder;
use crate::serving::generate::{GenerateOptions, Generation, Request, check_context, generate_by};
use crate::serving::sampler::{Sampler, Sampling};
use crate::serving::speculate::DraftCounters;
use crate::serving::stops::{self, StopCondition, Stops};
use crate::serving::text::{self, Text, TextStream};
use crate::weights::Demand;
use moec_ir::FEW_ROWS;
use report::{add_draft_tokens, line_of_draft_tokens, rates, rates_of_several, report, report_of_several};
use serde_json::json;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::PathBuf;
use std::sync::Arc;

/// Tokens generated if the user does not say.
const DEFAULT_TOKENS: usize = 128;

/// Runs the subcommand. `make_constraint`: constraint on answers in addition to those of `args`.
pub(super) fn run(
    context: &Context<'_>,
    files: &BundleReader,
    args: &Generate,
    make_constraint: Option<&MakeConstraint>,
    io: &mut Io<'_>,
) -> Result<(), Failure> {
    let model = &context.program.model;
    let max = model.max_context as usize;
    let saved = args.load_prompt.as_deref().map(|path| Saved::open(path, context.program)).transpose()?;
    let (prompt, tokenizer) = if let Some(ids) = &args.ids {
        (ids.clone(), None)
    } else if let (Some(saved), None) = (&saved, &args.prompt) {
        (saved.ids().to_vec(), None)
    } else {
        let text = prompt(context, args, io)?;
        let tokenizer = Text::open(files, model.bos)?;
        (tokenizer.encode(&text)?, Some(tokenizer))
    };
    let n = args.n.unwrap_or_else(|| DEFAULT_TOKENS.min(max.saturating_sub(prompt.len())).max(1));
    check_context(prompt.len(), n, max)?;
    let decoder = decoder(context, args)?;
    let many = args.best_of.unwrap_or(1);
    if many > model.slots as usize {
        return Err(Error::few_slots(many, model.slots).into());
    }
    let sampling =
        Sampling { log_probabilities: args.log_probabilities, ..args.sampling.over(&Sampling::GREEDY) };
    if many > 1 && sampling.temperature <= 0.0 {
        return Err(Failure::Use {
            what: "with temperature 0, all sequences are the same".to_owned(),
            hint: "set a temperature above 0, such as `--temperature 0.8`".to_owned(),
        });
    }
    sampling.check_ids(model.vocab)?;
    if args.speculate.is_some() {
        check_speculation(context, args, make_constraint)?;
    }
    let tokenizer = match tokenizer {
        // Stop sequences are text.
        None if !args.stop.is_empty() => Some(Text::open(files, model.bos)?),
        other => other,
    };
    let watch = Watch::create(args)?;
    let demand = Demand { sequences: many, tokens: prompt.len() + n };
    let mut engine = context.open(&args.common, files, demand)?;
    // Ids are printed as data; without a tokenizer nothing else can be printed.
    let tokenizer = match tokenizer {
        None => {
            let json = match files.read_if_any(text::FILE, regular::TOKENIZER) {
                Err(e) if e.fault() == Fault::Bundle => return Err(e.into()),
                read => read.transpose(),
            };
            let read = json.map(|json| Text::of_file(files, &json?, model.bos)).transpose();
            read.unwrap_or_else(|e| {
                io.note(&format!("warning: {e}; ids are printed"));
                None
            })
        }
        other => other,
    };
    let end = if args.ignore_eos || (args.ids.is_some() && !args.stop_at_eos) { &[] } else { &*model.eos };
    let request = Request { slot: 0, prompt: &prompt, n, end };
    let tokenizer = tokenizer.map(Arc::new);
    let held = AnswerConstraints {
        make_constraint,
        text: tokenizer.as_ref().filter(|_| !args.stop.is_empty()),
        stop: &args.stop,
    };
    let job = Job { request, decoder, sampling, held, tokenizer: tokenizer.as_deref(), args, watch, saved };
    match args.best_of {
        None => single(&mut engine, job, io),
        Some(many) => several(&mut engine, job, many, io),
    }
}

/// Settings of a generation.
struct Job<'a> {
    request: Request<'a>,
    decoder: Decoder,
    sampling: Sampling,
    held: AnswerConstraints<'a>,
    tokenizer: Option<&'a Text>,
    args: &'a Generate,
    watch: Option<Watch>,
    saved: Option<Saved>,
}

/// Constraints on answers.
#[derive(Clone, Copy)]
struct AnswerConstraints<'a> {
    make_constraint: Option<&'a MakeConstraint>,
    /// Tokenizer, if answers have stop sequences.
    text: Option<&'a Arc<Text>>,
    stop: &'a [String],
}

impl AnswerConstraints<'_> {
    /// The sampler of one answer.
    fn sampler(&self, mut sampler: Sampler) -> Result<Sampler> {
        if let Some(make_constraint) = self.make_constraint {
            sampler = sampler.constrained(make_constraint()?);
        }
        Ok(match self.text {
            Some(text) => sampler.constrained(Box::new(StopCondition::new(text.own_stream(), self.stop))),
            None => sampler,
        })
    }

    /// Part of an answer that is printed.
    fn truncate(&self, text: String) -> String {
        if self.stop.is_empty() { text } else { stops::truncate_at_stop(&text, self.stop) }
    }
}

/// Fails if speculative decoding is requested, and its tokens would not be those of a plain run.
fn check_speculation(
    context: &Context<'_>,
    args: &Generate,
    make_constraint: Option<&MakeConstraint>,
) -> Result<(), Failure> {
    if make_constraint.is_some() {
        return Err(Failure::Use {
            what: "`--speculate` requires the most probable tokens, which a grammar may forbid".to_owned(),
            hint: "leave out `--speculate` or the grammar".to_owned(),
        });
    }
    let sampling = args.sampling.over(&Sampling::GREEDY);
    if sampling != (Sampling { seed: sampling.seed, ..Sampling::default() }) {
        return Err(Failure::Use {
            what: "`--speculate` requires the most probable tokens, which other options of sampling change"
                .to_owned(),
            hint: "leave out `--speculate` or the options of sampling".to_owned(),
        });
    }
    if context.program.model.big_little.is_some() && !args.no_big_little {
        return Err(Failure::Use {
            what: "`--speculate` decodes with all experts, and the bundle was built for big-little decoding"
                .to_owned(),
            hint: "add `--no-big-little`, or leave `--speculate` out".to_owned(),
        });
    }
    if most_rows(context.program) < 2 {
        return Err(Failure::Use {
            what: format!(
                "`--speculate` checks 2 to {FEW_ROWS} tokens in one call, and the bundle has no `decode_batch` size for that"
            ),
            hint: "name a size for the draft tokens and one token more in `decode_batch` under `[shapes]` in `model.toml`, as in \
                   `decode_batch = [1, 5]`, and build again"
                .to_owned(),
        });
    }
    max_draft_tokens(context.program)?;
    Ok(())
}

/// Restores the part of a saved prompt that this prompt begins with into the slot, and returns its tokens.
fn restore(
    engine: &mut Engine<'_>,
    saved: Saved,
    request: &Request<'_>,
    io: &mut Io<'_>,
) -> Result<Vec<u32>> {
    if let Some(threshold) = saved.crossed_long_rope_threshold(request.prompt.len()) {
        io.note(&format!(
            "note: nothing of the saved prompt is used: this model has other position angles (LongRoPE) for prompts of more than {threshold} tokens"
        ));
        return Ok(Vec::new());
    }
    let shared = saved.shared_with(request.prompt);
    if shared == 0 {
        io.note("note: the saved prompt begins otherwise; nothing of it is used");
        return Ok(Vec::new());
    }
    let ids = saved.ids().to_vec();
    saved.restore(engine, request.slot)?;
    if engine.resumes(request.slot, shared) > 0 {
        return Ok(ids);
    }
    match engine.rewind(request.slot, shared) {
        Err(e @ Error::State { .. }) => io.note(&format!("note: nothing of the saved prompt is used: {e}")),
        done => done?,
    }
    Ok(Vec::new())
}

/// Generates an answer by the arguments: restores a saved prompt, saves this one, drafts tokens.
fn made(
    engine: &mut Engine<'_>,
    job: (&Request<'_>, Option<Saved>, &mut Decoder, &mut Sampler, &Generate),
    io: &mut Io<'_>,
    on_token: &mut dyn FnMut(u32, &mut Io<'_>) -> Result<()>,
) -> Result<(Generation, Option<DraftCounters>)> {
    let (request, saved, decoder, sampler, args) = job;
    let held = saved.map_or(Ok(Vec::new()), |saved| restore(engine, saved, request, io))?;
    let mut save = |engine: &Engine<'_>| match &args.save_prompt {
        Some(path) => saved::save(engine, request.slot, request.prompt, path).map(drop),
        None => Ok(()),
    };
    let options = GenerateOptions {
        held: &held,
        draft_tokens: args.speculate.unwrap_or(0),
        after_prompt: Some(&mut save),
    };
    let (done, did) = generate_by(engine, request, options, (decoder, sampler), &mut |id| on_token(id, io))?;
    Ok((done, args.speculate.map(|_| did)))
}

/// Writer of a timeline. The file is created before any work, so that a bad path is an error at once.
struct Watch {
    path: PathBuf,
    file: File,
    timeline: Option<Arc<Timeline>>,
}

impl Watch {
    fn create(args: &Generate) -> Result<Option<Self>> {
        let Some(path) = &args.timeline else { return Ok(None) };
        let failed = |source| Error::io("create", path.clone(), source);
        let file = File::create(path).map_err(failed)?;
        Ok(Some(Self { path: path.clone(), file, timeline: None }))
    }

    fn start(&mut self, engine: &mut Engine<'_>) {
        self.timeline = Some(engine.watch());
    }

    fn finish(self, engine: &Engine<'_>) -> Result<()> {
        let Self { path, file, timeline } = self;
        let mut out = BufWriter::new(file);
        let written =
            timeline.map_or(Ok(()), |t| t.write(&mut out, &|entry, step| engine.step_name(entry, step)));
        written.and_then(|()| out.flush()).map_err(|source| Error::io("write", path, source))
    }
}

/// Decoder: big-little if the bundle was built for it, unless that is turned off.
fn decoder(context: &Context<'_>, args: &Generate) -> Result<Decoder> {
    match args.gamma {
        _ if args.no_big_little => Ok(Decoder::full()),
        Some(gamma) => Decoder::big_little(context.program, gamma),
        None => Decoder::of(context.program),
    }
}

/// One sequence, printed as it comes.
fn single(engine: &mut Engine<'_>, job: Job<'_>, io: &mut Io<'_>) -> Result<(), Failure> {
    let Job { request, mut decoder, sampling, held, tokenizer, args, mut watch, saved } = job;
    let mut sampler = held.sampler(Sampler::new(sampling))?;
    if let Some(watch) = &mut watch {
        watch.start(engine);
    }
    let interrupt = interrupt::guard();
    let stops = Stops::new(args.stop.iter().cloned());
    let mut printer = Printer { stream: tokenizer.map(Text::stream), stops, first: true };
    let mut any = false;
    let what = (&request, saved, &mut decoder, &mut sampler, args);
    let done = made(engine, what, io, &mut |id, io| {
        any = true;
        if args.json { Ok(()) } else { printer.push(id, io) }
    });
    drop(interrupt);
    let watched = watch.map_or(Ok(()), |w| w.finish(engine));
    if args.json {
        let (done, draft_tokens) = done?;
        let text = tokenizer.map(|t| t.decode(&done.ids)).transpose()?.map(|text| held.truncate(text));
        let mut report = report(&done, text, args.log_probabilities.is_some());
        if args.load_prompt.is_some() {
            report["loaded_tokens"] = json!(done.held);
            report["prefilled_tokens"] = json!(done.prompt - done.held);
        }
        if let Some(did) = draft_tokens {
            add_draft_tokens(&mut report, did);
        }
        if let Some(did) = engine.paging() {
            paging::add(&mut report, &did);
        }
        if let Some(did) = engine.assigned() {
            assigned::add(&mut report, &did);
        }
        hosts::add(&mut report, engine);
        io.say(&format!("{report}\n"))?;
    } else {
        // Also after an interrupt or an error, so that the text so far ends with a line break.
        if (any || done.is_ok()) && !matches!(done, Err(Error::Output(_))) {
            printer.finish(io)?;
        }
        let (done, draft_tokens) = done?;
        if !args.quiet {
            io.note(&rates(&done));
            if let Some(did) = draft_tokens {
                io.note(&line_of_draft_tokens(did));
            }
            if let Some(did) = engine.paging() {
                io.note(&paging::line(&did));
            }
            if let Some(did) = engine.assigned() {
                io.note(&assigned::line(&did));
            }
            if let Some(line) = hosts::line(engine) {
                io.note(&line);
            }
        }
    }
    Ok(watched?)
}

/// Several sequences, of which the best is printed, or all.
fn several(engine: &mut Engine<'_>, job: Job<'_>, many: usize, io: &mut Io<'_>) -> Result<(), Failure> {
    let Job { request, mut decoder, sampling, held, tokenizer, args, mut watch, .. } = job;
    if let Some(watch) = &mut watch {
        watch.start(engine);
    }
    let interrupt = interrupt::guard();
    let mut sampled = BestOf::default();
    let made = &mut |sampler| held.sampler(sampler);
    let done = best_of_into(engine, &request, many, &mut decoder, (&sampling, made), &mut sampled);
    drop(interrupt);
    let watched = watch.map_or(Ok(()), |w| w.finish(engine));
    let ranking = sampled.ranking();
    let text = |ids: &[u32]| match tokenizer {
        Some(t) => t.decode(ids).map(|text| Some(held.truncate(text))),
        None => Ok(None),
    };
    if args.json {
        done?;
        let mut report = report_of_several(&sampled, &ranking, &text)?;
        if let Some(did) = engine.paging() {
            paging::add(&mut report, &did);
        }
        if let Some(did) = engine.assigned() {
            assigned::add(&mut report, &did);
        }
        hosts::add(&mut report, engine);
        io.say(&format!("{report}\n"))?;
        return Ok(watched?);
    }
    // Also after an interrupt or an error: finished sequences are printed.
    let shown = if args.all { &ranking[..] } else { &ranking[..ranking.len().min(1)] };
    for &i in shown {
        let c = &sampled.candidates[i];
        let words = text(&c.ids)?;
        let words = words.unwrap_or_else(|| c.ids.iter().map(u32::to_string).collect::<Vec<_>>().join(","));
        let cut = if c.ended { "" } else { ", cut short" };
        let head = if args.all {
            format!("# seed {}, mean log-probability {:.4}{cut}\n", c.seed, c.score())
        } else {
            String::new()
        };
        io.say(&format!("{head}{words}\n"))?;
        if !c.ended && !args.all {
            io.note("note: no sequence was complete; this is the most probable one so far");
        }
    }
    done?;
    if !args.quiet {
        io.note(&rates_of_several(&sampled));
        if let Some(did) = engine.paging() {
            io.note(&paging::line(&did));
        }
        if let Some(did) = engine.assigned() {
            io.note(&assigned::line(&did));
        }
        if let Some(line) = hosts::line(engine) {
            io.note(&line);
        }
    }
    Ok(watched?)
}

/// The text to continue.
fn prompt(context: &Context<'_>, args: &Generate, io: &mut Io<'_>) -> Result<String, Failure> {
    let explicit = match args.prompt.as_deref() {
        Some("-") => true,
        Some(text) => return Ok(text.to_owned()),
        None => false,
    };
    let Some(input) = &mut io.input else {
        let what = if explicit { "standard input is a terminal" } else { "there is nothing to continue" };
        let hint = format!(
            "give text with `{0} generate --prompt TEXT`, or token ids with `--ids 1,2,3`",
            context.name
        );
        return Err(Failure::Use { what: what.to_owned(), hint });
    };
    let mut bytes = Vec::new();
    input.read_to_end(&mut bytes).map_err(Error::input)?;
    let mut text = String::from_utf8(bytes).map_err(|_| Error::not_utf8())?;
    // The last line break comes from the shell, not from the user.
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    Ok(text)
}

/// Prints tokens as they come: text, or ids separated by commas.
struct Printer<'a> {
    stream: Option<TextStream<'a>>,
    stops: Stops,
    first: bool,
}

impl Printer<'_> {
    fn push(&mut self, id: u32, io: &mut Io<'_>) -> Result<()> {
        let comma = if std::mem::replace(&mut self.first, false) { "" } else { "," };
        let piece = match &mut self.stream {
            Some(stream) => self.stops.push(&stream.push(id)?),
            None => format!("{comma}{id}"),
        };
        if piece.is_empty() { Ok(()) } else { io.say(&piece) }
    }

    fn finish(mut self, io: &mut Io<'_>) -> Result<()> {
        let rest = self.stream.map(TextStream::finish).transpose()?.unwrap_or_default();
        let mut rest = self.stops.push(&rest);
        if self.stops.found().is_none() {
            rest += &self.stops.finish();
        }
        io.say(&format!("{rest}\n"))
    }
}
