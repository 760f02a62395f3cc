//! `generate`: continue a text.

use super::args::Generate;
use super::{Context, Failure, Io, interrupt, paging};
use crate::error::{Error, Result};
use crate::generate::{Generation, check_room, generate};
use crate::sampler::{Sampler, Sampling};
use crate::text::{self, Text, TextStream};
use serde_json::json;
use std::fs::File;
use std::io::{BufWriter, Write};

/// Tokens generated if the user does not say.
const DEFAULT_TOKENS: usize = 128;

pub(super) fn run(context: &Context<'_, '_>, args: &Generate, io: &mut Io<'_>) -> Result<(), Failure> {
    let model = &context.program.model;
    let max = model.max_context as usize;
    let (prompt, tokenizer) = if let Some(ids) = &args.ids {
        (ids.clone(), None)
    } else {
        let text = prompt(context, args, io)?;
        let tokenizer = Text::open(context.bundle, model.bos)?;
        (tokenizer.encode(&text)?, Some(tokenizer))
    };
    let n = args.n.unwrap_or_else(|| DEFAULT_TOKENS.min(max.saturating_sub(prompt.len())).max(1));
    check_room(prompt.len(), n, max)?;
    let mut engine = context.open_recording(&args.common, args.json)?;
    // The ids are data of their own; without a tokenizer they are all there is.
    let tokenizer = match tokenizer {
        None if text::path(context.bundle).is_file() => match Text::open(context.bundle, model.bos) {
            Ok(tokenizer) => Some(tokenizer),
            Err(e) => {
                io.note(&format!("warning: {e}; ids are printed"));
                None
            }
        },
        other => other,
    };
    let end = if args.ignore_eos || (args.ids.is_some() && !args.stop_at_eos) { &[] } else { model.eos };
    let mut sampler = Sampler::new(Sampling {
        temperature: args.temperature,
        top_p: args.top_p,
        top_k: args.top_k,
        seed: args.seed,
    });
    let timeline = args.timeline.as_ref().map(|_| engine.watch());
    let interrupt = interrupt::guard();
    let mut printer = Printer { stream: tokenizer.as_ref().map(Text::stream), first: true };
    let mut any = false;
    let done = generate(&mut engine, 0, &prompt, n, &mut sampler, end, &mut |id| {
        any = true;
        if args.json { Ok(()) } else { printer.push(id, io) }
    });
    drop(interrupt);
    if let (Some(path), Some(timeline)) = (&args.timeline, &timeline) {
        let failed = |source| Error::Io { doing: "write", path: path.clone(), source };
        let mut out = BufWriter::new(File::create(path).map_err(failed)?);
        timeline.write(&mut out, &|entry, step| engine.step_name(entry, step)).map_err(failed)?;
        out.flush().map_err(failed)?;
    }
    if args.json {
        let done = done?;
        let text = tokenizer.as_ref().map(|t| t.decode(&done.ids)).transpose()?;
        let mut report = report(&done, text);
        if let Some(did) = engine.paging() {
            paging::add(&mut report, &did);
        }
        io.say(&format!("{report}\n"))?;
    } else {
        // Also after an interrupt or an error: what is there stays, whole, on a line of its own.
        if (any || done.is_ok()) && !matches!(done, Err(Error::Output(_))) {
            printer.finish(io)?;
        }
        let done = done?;
        if !args.quiet {
            io.note(&rates(&done));
            if let Some(did) = engine.paging() {
                io.note(&paging::line(&did));
            }
        }
    }
    Ok(())
}

/// The text to continue.
fn prompt(context: &Context<'_, '_>, args: &Generate, io: &mut Io<'_>) -> Result<String, Failure> {
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
    input.read_to_end(&mut bytes).map_err(Error::Input)?;
    let mut text = String::from_utf8(bytes).map_err(|_| Error::NotUtf8)?;
    // The end of the last line is the shell's, not the user's.
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
    first: bool,
}

impl Printer<'_> {
    fn push(&mut self, id: u32, io: &mut Io<'_>) -> Result<()> {
        let comma = if std::mem::replace(&mut self.first, false) { "" } else { "," };
        let piece = match &mut self.stream {
            Some(stream) => stream.push(id)?,
            None => format!("{comma}{id}"),
        };
        if piece.is_empty() { Ok(()) } else { io.say(&piece) }
    }

    fn finish(self, io: &mut Io<'_>) -> Result<()> {
        let rest = self.stream.map(TextStream::finish).transpose()?.unwrap_or_default();
        io.say(&format!("{rest}\n"))
    }
}

/// The object that `--json` prints.
fn report(done: &Generation, text: Option<String>) -> serde_json::Value {
    json!({
        "ids": done.ids,
        "text": text,
        "prefill_tokens_per_s": done.prefill_rate(),
        "decode_tokens_per_s": done.decode_rate(),
    })
}

fn rates(done: &Generation) -> String {
    let show = |rate: Option<f64>| rate.map_or("–".to_owned(), |r| format!("{r:.1} tokens/s"));
    format!(
        "prefill: {} tokens, {}; decode: {} tokens, {}",
        done.prompt,
        show(done.prefill_rate()),
        done.ids.len(),
        show(done.decode_rate()),
    )
}
