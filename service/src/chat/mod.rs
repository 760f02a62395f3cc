//! `chat`: a conversation in the terminal, or line by line from standard input.

mod commands;
mod lines;
pub mod session;

use crate::error::{Error, Result};
use crate::grammar::{Grammar, GrammarArgs, Grammars};
use crate::template::{Message, Prompt, Render, Template, Templates};
use crate::tools::{Event, Parser, Syntax};
use clap::{Args, FromArgMatches as _};
use lines::{Line, Lines};
use moec_runtime::bundle::BundleReader;
use moec_runtime::cli::args::{Common, SamplingArgs};
use moec_runtime::cli::{AddedSubcommand, Context, Failure, Io, interrupt};
use moec_runtime::platform::regular;
use moec_runtime::serving::generate::rate;
use moec_runtime::serving::stops::Stops;
use moec_runtime::serving::text::TextStream;
use moec_runtime::{Decoder, Demand, Sampler, Sampling, Text};
use serde_json::{Map, Value, json};
use session::{Answer, End, Session};
use std::path::{Path, PathBuf};

/// The subcommand.
pub(crate) const SUBCOMMAND: AddedSubcommand = AddedSubcommand { command, run };

/// Limit of a file with a conversation.
const FILE: regular::Limit = regular::Limit { what: "a conversation", bytes: 64 << 20 };

/// Hold a conversation, in the terminal or line by line
#[derive(Args)]
struct Chat {
    /// System prompt
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    system: Option<String>,
    /// Chat template (Jinja) in place of the bundle's own
    #[arg(long, value_name = "FILE")]
    template: Option<PathBuf>,
    /// Variable of the template, as in `enable_thinking=false`; the value is JSON, or else a text
    #[arg(long, value_name = "NAME=VALUE", value_parser = variable)]
    var: Vec<(String, Value)>,
    /// Maximum number of tokens of an answer [default: as many as the context has left]
    #[arg(short = 'n', long = "tokens", value_name = "N")]
    n: Option<std::num::NonZeroU32>,
    /// End an answer at this text, which is not printed; may be given several times
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    stop: Vec<String>,
    /// Print one JSON object for each answer
    #[arg(long)]
    json: bool,
    /// Do not print the rates
    #[arg(long, short)]
    quiet: bool,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    grammar: GrammarArgs,
    #[command(flatten)]
    common: Common,
}

fn command() -> clap::Command {
    Chat::augment_args(clap::Command::new("chat"))
}

/// Reads a variable of the template.
fn variable(text: &str) -> Result<(String, Value), String> {
    let (name, value) =
        text.split_once('=').ok_or("must be a name and a value, as in `enable_thinking=false`")?;
    Ok((name.to_owned(), json_or_text(value)))
}

fn json_or_text(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| text.into())
}

fn run(context: &Context<'_>, matches: &clap::ArgMatches, io: &mut Io<'_>) -> Result<(), Failure> {
    let args = Chat::from_arg_matches(matches).map_err(|e| Failure::Use {
        what: e.to_string(),
        hint: format!("see `{} help chat`", context.name),
    })?;
    let files = context.files(&args.common, !args.quiet, io)?;
    let advised = crate::sampling::open(&files)?;
    let sampling = args.sampling.over(&Sampling { seed: crate::sampling::random_seed(), ..advised });
    sampling.check_ids(context.program.model.vocab)?;
    let template = template(context, &files, args.template.as_deref())?;
    let text = Text::open(&files, context.program.model.bos)?;
    let grammar = args.grammar.read()?;
    let grammars = grammar.as_ref().map(|_| Grammars::open(&files, context.program)).transpose()?;
    if let (Some(grammars), Some(grammar)) = (&grammars, &grammar) {
        // An invalid grammar is refused before weights are opened.
        grammars.constraint(grammar)?;
    }
    let mut engine = context.open(&args.common, &files, Demand::FULL)?;
    let mut decoder = Decoder::of(context.program)?;
    let session = Session::new(&mut engine, &mut decoder)?;
    let mut chat = Conversation {
        ends: &context.program.model.eos,
        max: context.program.model.max_context as usize,
        syntax: syntax(&template, grammar.as_ref()),
        template,
        text: &text,
        grammar: grammars.as_ref().zip(grammar.as_ref()),
        session,
        seed: sampling.seed,
        sampling,
        stop: args.stop,
        n: args.n.map(|n| n.get() as usize),
        vars: args.var.into_iter().collect(),
        messages: Vec::new(),
        first: 0,
        json: args.json,
        quiet: args.quiet,
    };
    chat.reset(args.system);
    if !chat.quiet && !chat.json {
        io.note(&chat.sampling_line());
    }
    let mut lines = Lines::open(io)?;
    let (mut read, mut failed) = (0, 0);
    loop {
        read += 1;
        let done = match lines.next(io)? {
            Line::End => break,
            Line::Nothing => Ok(()),
            Line::Invalid(e) => Err(e.into()),
            Line::Text(line) => match line.strip_prefix('/') {
                Some("quit" | "exit") => break,
                Some(command) => commands::run(&mut chat, command, io),
                None => chat.send(line, io),
            },
        };
        // A line that fails does not end the conversation.
        let (what, hint) = match done {
            Ok(()) => continue,
            Err(Failure::Error(e)) if lines.ends_with(&e) => return Err(e.into()),
            Err(Failure::Error(e)) => (e.to_string(), e.hint()),
            Err(Failure::Other { what, hint }) => (what, hint),
            Err(e @ Failure::Use { .. }) => return Err(e),
        };
        failed += 1;
        if lines.is_terminal() {
            io.error(&what, hint.as_deref());
        } else {
            io.error(&format!("line {read}: {what}"), hint.as_deref());
        }
    }
    if lines.is_terminal() || failed == 0 {
        return Ok(());
    }
    // A script learns of failed lines from the exit status.
    let lines = if failed == 1 { "1 line".to_owned() } else { format!("{failed} lines") };
    Err(Error::new(format!("{lines} of standard input failed")).into())
}

/// The requested template, or the bundle's own.
fn template(context: &Context<'_>, files: &BundleReader, file: Option<&Path>) -> Result<Template> {
    let own = Templates::open(files)?;
    let Some(path) = file else {
        let own = own.map(|own| own.choose(false)).transpose()?;
        // An invalid template is an error at the start.
        own.iter().try_for_each(|own| own.check()?.map_or(Ok(()), Err))?;
        return own.ok_or_else(|| {
            Error::new(
                "the bundle has no chat template: its model continues texts, or was published without one",
            )
            .hint(format!(
                "continue a text with `{} generate --prompt TEXT`, or give a template with `--template FILE`",
                context.name
            ))
        });
    };
    let source = regular::read_text(path, regular::CONFIG)
        .map_err(|e| Error::new(format!("cannot read `{}`: {e}", path.display())))?;
    Template::new(&source, &own.map(|own| own.tokens).unwrap_or_default())
}

/// Syntax of answers. With a grammar, the output is text from its first token on, independent of the prompt,
/// unless the grammar itself writes reasoning or calls.
fn syntax(template: &Template, grammar: Option<&Grammar>) -> &'static Syntax {
    let own = Syntax::of(template.source());
    let writes = match grammar {
        None => true,
        Some(Grammar::Lark(text) | Grammar::Regex(text)) => own.is_written_by(text),
        Some(Grammar::Schema(_)) => false,
    };
    if writes { own } else { Syntax::text_alone() }
}

/// A conversation, with the session that answers it.
struct Conversation<'a, 'e, 'p> {
    template: Template,
    syntax: &'static Syntax,
    text: &'a Text,
    grammar: Option<(&'a Grammars, &'a Grammar)>,
    session: Session<'e, 'p>,
    ends: &'a [u32],
    max: usize,
    sampling: Sampling,
    /// Seed of the next answer: each answer has its own.
    seed: u64,
    stop: Vec<String>,
    n: Option<usize>,
    vars: Map<String, Value>,
    messages: Vec<Message>,
    /// The first message after the system prompt that the model still gets.
    first: usize,
    json: bool,
    quiet: bool,
}

impl Conversation<'_, '_, '_> {
    /// Begins a new conversation.
    fn reset(&mut self, system: Option<String>) {
        self.messages.clear();
        self.first = 0;
        self.messages.extend(system.map(|text| Message::new("system", text)));
    }

    /// System prompt.
    fn system(&self) -> Option<String> {
        self.messages.first().filter(|m| m.role == "system").map(|m| m.content.clone())
    }

    /// Sends a message, and prints the answer. A message without an answer is removed.
    fn send(&mut self, line: String, io: &mut Io<'_>) -> Result<(), Failure> {
        self.messages.push(Message::new("user", line));
        let done = self.answer(io);
        if done.is_err() {
            self.messages.pop();
        }
        done
    }

    /// Sampling options, in words.
    fn sampling_line(&self) -> String {
        let Sampling { temperature, top_p, top_k, min_p, .. } = self.sampling;
        if temperature <= 0.0 {
            return "sampling: temperature 0, always the most probable token".to_owned();
        }
        let filters = [
            (top_k > 0).then(|| format!(", top_k {top_k}")),
            (top_p < 1.0).then(|| format!(", top_p {top_p}")),
            (min_p > 0.0).then(|| format!(", min_p {min_p}")),
        ];
        let filters: String = filters.into_iter().flatten().collect();
        format!("sampling: temperature {temperature}{filters}; seed {}", self.seed)
    }

    /// The prompt of the messages that the model still gets, and the number of tokens that the context has
    /// left.
    fn render(&self) -> Result<(Prompt, usize)> {
        let system = usize::from(self.system().is_some());
        let shown = self.messages.iter().enumerate().filter(|(i, _)| *i < system || *i >= self.first);
        let messages: Vec<Value> = shown.map(|(_, m)| json!(m)).collect();
        let request = Render {
            messages: &messages,
            add_generation_prompt: true,
            more: Some(&self.vars),
            ..Render::default()
        };
        let prompt = self.template.prompt(self.text, &request)?;
        let left = self.max.saturating_sub(prompt.ids.len());
        Ok((prompt, left))
    }

    /// The prompt. If the context is full, the oldest turns are left out from then on, so that several
    /// answers have room.
    fn prompt(&mut self, io: &mut Io<'_>) -> Result<(Prompt, usize)> {
        let before = self.first;
        let mut reserve = self.n.unwrap_or(self.max).min(self.max / 8).max(1);
        let (prompt, left) = loop {
            let (prompt, left) = self.render()?;
            let begin = self.first.max(usize::from(self.system().is_some()));
            let mut later = self.messages.iter().enumerate().skip(begin + 1);
            match later.find(|(_, m)| m.role == "user") {
                Some((next, _)) if left < reserve => {
                    self.first = next;
                    reserve = self.max / 4;
                }
                _ => break (prompt, left),
            }
        };
        if left == 0 {
            self.first = before;
            let what =
                format!("the prompt has {} tokens, and the context holds {}", prompt.ids.len(), self.max);
            return Err(Error::new(what).hint("shorten it, or start a new conversation with `/reset`"));
        }
        if self.first > before {
            // Counts all turns that are left out, so that each note has a larger number.
            let out = self.messages[..self.first].iter().filter(|m| m.role == "user").count();
            let turns = if out == 1 { "turn".to_owned() } else { format!("{out} turns") };
            io.note(&format!("note: the context is full: the model no longer sees the oldest {turns}"));
        }
        Ok((prompt, left))
    }

    /// Answers the last message.
    fn answer(&mut self, io: &mut Io<'_>) -> Result<(), Failure> {
        let (prompt, left) = self.prompt(io)?;
        let mut sampler = Sampler::new(Sampling { seed: self.seed, ..self.sampling.clone() });
        if let Some((grammars, grammar)) = self.grammar {
            sampler = sampler.constrained(grammars.constraint(grammar)?);
        }
        let stream =
            if self.syntax.is_text_alone() { self.text.stream() } else { self.text.stream_with_special() };
        let mut printer = AnswerPrinter {
            stream: Some(stream),
            stops: Stops::new(self.stop.iter().cloned()),
            parser: Some(Parser::new(self.syntax, &prompt.text)),
            message: Message::new("assistant", ""),
            calls: Vec::new(),
            quiet: self.json,
        };
        let interrupt = interrupt::guard();
        let n = self.n.unwrap_or(left).min(left);
        let answer = self.session.answer(&prompt.ids, n, self.ends, sampler, &mut |id| printer.push(id, io));
        drop(interrupt);
        let answer = answer?;
        printer.finish(io)?;
        self.report(&printer, &answer, io)?;
        self.seed = self.seed.wrapping_add(1);
        if answer.end == End::Length && n == left && !self.json {
            io.note("note: the context is full: the answer is cut");
        }
        self.messages.push(printer.message);
        Ok(())
    }

    fn report(&self, printer: &AnswerPrinter<'_>, answer: &Answer, io: &mut Io<'_>) -> Result<(), Failure> {
        if self.json {
            let report = json!({
                "text": printer.message.content,
                "reasoning": printer.message.reasoning_content,
                "tool_calls": printer.calls,
                "ids": answer.ids,
                "end": answer.end.name(),
                "seed": self.seed,
                "prompt_tokens": answer.prompt,
                "kept_tokens": answer.kept,
                "prefilled_tokens": answer.prompt - answer.kept,
                "prefill_tokens_per_s": rate(answer.prompt - answer.kept, answer.prefill),
                "decode_tokens_per_s": rate(answer.ids.len().saturating_sub(1), answer.decode),
            });
            return Ok(io.say(&format!("{report}\n"))?);
        }
        if answer.end == End::Interrupted {
            io.note("note: interrupted");
        }
        if !self.quiet {
            let shown = |r: Option<f64>| r.map_or("–".to_owned(), |r| format!("{r:.1} tokens/s"));
            io.note(&format!(
                "prompt: {} tokens ({} cached), {}; answer: {} tokens, {}",
                answer.prompt,
                answer.kept,
                shown(rate(answer.prompt - answer.kept, answer.prefill)),
                answer.ids.len(),
                shown(rate(answer.ids.len().saturating_sub(1), answer.decode)),
            ));
        }
        Ok(())
    }
}

/// An answer in progress: converts tokens to text, up to a stop string, and parses the text.
struct AnswerPrinter<'a> {
    stream: Option<TextStream<'a>>,
    stops: Stops,
    parser: Option<Parser>,
    message: Message,
    calls: Vec<Value>,
    /// Whether nothing is printed before the end.
    quiet: bool,
}

impl AnswerPrinter<'_> {
    /// Handles one more token; returns whether the answer continues.
    fn push(&mut self, id: u32, io: &mut Io<'_>) -> moec_runtime::Result<bool> {
        let piece = self.stream.as_mut().map(|s| s.push(id)).transpose()?.unwrap_or_default();
        self.push_text(&piece, io)?;
        Ok(self.stops.found().is_none())
    }

    fn push_text(&mut self, piece: &str, io: &mut Io<'_>) -> moec_runtime::Result<()> {
        let text = self.stops.push(piece);
        let events = self.parser.as_mut().map(|p| p.push(&text)).unwrap_or_default();
        self.show(events, io)
    }

    /// Prints the text that was held back.
    fn finish(&mut self, io: &mut Io<'_>) -> moec_runtime::Result<()> {
        let rest = self.stream.take().map(TextStream::finish).transpose()?.unwrap_or_default();
        self.push_text(&rest, io)?;
        let rest = if self.stops.found().is_none() {
            std::mem::take(&mut self.stops).finish()
        } else {
            String::new()
        };
        let mut events = self.parser.as_mut().map(|p| p.push(&rest)).unwrap_or_default();
        events.extend(self.parser.take().map(Parser::finish).unwrap_or_default());
        self.show(events, io)?;
        if self.quiet { Ok(()) } else { io.say("\n") }
    }

    /// Prints the answer; reasoning goes to the output for notes.
    fn show(&mut self, events: Vec<Event>, io: &mut Io<'_>) -> moec_runtime::Result<()> {
        for event in events {
            match event {
                Event::Content(text) => {
                    self.message.content.push_str(&text);
                    if !self.quiet {
                        io.say(&text)?;
                    }
                }
                Event::Reasoning(text) => {
                    if !self.quiet {
                        let _ = write!(io.err, "{text}");
                    }
                    self.message.reasoning_content.get_or_insert_default().push_str(&text);
                }
                Event::Call(call) => {
                    io.note(&format!(
                        "note: the model calls `{}` with {}, but `chat` has no tools",
                        call.name, call.arguments
                    ));
                    self.calls.push(json!({"name": call.name, "arguments": call.arguments}));
                }
                Event::Broken { text, why } => {
                    io.note(&format!("note: a call that cannot be read ({why}): {text}"));
                }
            }
        }
        Ok(())
    }
}
