//! `serve`: an OpenAI-compatible HTTP server.
//!
//! One thread owns the engine ([`worker`]): it steps the scheduler and takes requests from a channel.
//! Everything else, connections, text and JSON, is asynchronous on another one ([`http`]), and never waits
//! for a kernel.

mod answers;
mod body;
mod chat;
mod completions;
mod connections;
mod constraints;
mod error;
mod fields;
mod fuzz_reader;
mod http;
mod log;
mod metrics;
mod names;
mod request;
mod stream;
mod worker;

use crate::grammar::remote::Workers;
use crate::grammar::words::{Word, words};
use crate::template::{MAX_SOURCE, Template, Templates};
use axum::http::HeaderValue;
use axum::http::StatusCode;
use clap::{Args, FromArgMatches};
use connections::Limits;
use constraints::Constraints;
use error::{Answer, ApiError};
use log::LogFormat;
use metrics::Metrics;
use moec_runtime::bundle::BundleReader;
use moec_runtime::cli::args::Common;
use moec_runtime::cli::{AddedSubcommand, Context, Failure, Io, interrupt};
use moec_runtime::platform::regular;
use moec_runtime::serving::text;
use moec_runtime::{Decoder, Demand, Engine, Error, Limit, Sampling, Scheduler, Setting, Text};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, SystemTime};
use tokio::sync::Semaphore;
use worker::Command;

pub use fuzz_reader::{RequestPrompts, Requests};

/// Limit of a template's file.
const TEMPLATE: regular::Limit = regular::Limit { what: "a chat template", bytes: MAX_SOURCE as u64 };
/// The variable with the key that clients must send.
const KEY: &str = "MOEC_API_KEY";

/// Start an OpenAI-compatible HTTP server with a web page to chat.
///
/// `POST /v1/completions` and `/v1/chat/completions`, `GET /v1/models`, `/health/live`,
/// `/health/ready`, `/metrics` and `/`.
/// Sequences of all clients are decoded together. Their number is limited by the slots of the KV cache (the
/// largest `decode_batch` in `model.toml`) and by free memory.
#[derive(Args)]
struct Serve {
    /// Address to bind; use 0.0.0.0 to accept remote connections
    #[arg(long, value_name = "ADDRESS", default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    host: IpAddr,
    /// Port to listen at; 0 takes a free one
    #[arg(long, value_name = "N", default_value_t = 8080)]
    port: u16,
    /// Key that clients must send as `Authorization: Bearer KEY` [default: `MOEC_API_KEY`, else none]
    #[arg(long, value_name = "KEY")]
    api_key: Option<String>,
    /// Chat template (Jinja) in place of the bundle's own
    #[arg(long, value_name = "FILE")]
    template: Option<PathBuf>,
    /// Name of the model in requests and answers [default: the name of the bundle's folder]
    #[arg(long, value_name = "NAME")]
    model_name: Option<String>,
    /// Maximum number of queued sequences; further requests get HTTP 429
    #[arg(long, value_name = "N", default_value_t = 64)]
    max_queue: usize,
    /// Time limit of an answer in seconds, without the time before it gets a slot; a longer answer is cut,
    /// with `finish_reason` "length"
    #[arg(long, value_name = "S", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
    /// Maximum size of a request body in bytes
    #[arg(long, value_name = "BYTES", default_value_t = 4 << 20, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=1 << 30))]
    max_body: usize,
    /// Maximum number of open connections; further ones get status 503
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=1 << 20))]
    max_connections: usize,
    /// Maximum number of open connections per address; further ones get status 429. With a proxy, all
    /// connections have its address: set this to `--max-connections`
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=1 << 20))]
    max_connections_per_address: usize,
    /// Time limit in seconds for each of these: a request's head, its body, a pause in reading, and the time
    /// between two requests
    #[arg(long, value_name = "S", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3600))]
    client_timeout: u64,
    /// Time in seconds for which the server still answers new requests after SIGTERM or Ctrl-C, while
    /// `/health/ready` has status 503: the time in which a load balancer sends clients elsewhere
    #[arg(long, value_name = "S", default_value_t = 0, value_parser = clap::value_parser!(u64).range(0..=3600))]
    drain: u64,
    /// Allowed CORS origin, or `*` [default: same origin only]
    #[arg(long, value_name = "ORIGIN")]
    cors: Option<HeaderValue>,
    /// Tokens of prompts between two steps of decoding, at least one chunk [default: the largest chunk that
    /// was compiled]
    #[arg(long, value_name = "N")]
    prompt_tokens: Option<usize>,
    /// Bitwise-reproducible answers, independent of batching: rows decode one by one, and only whole chunks
    /// of prompts are shared
    #[arg(long)]
    exact: bool,
    /// Decode every token with all experts
    #[arg(long)]
    no_big_little: bool,
    /// Write a line for each request to standard error: method, path, status, tokens, and times
    #[arg(long, short)]
    verbose: bool,
    /// Format of these lines; naming it requests them, as `--verbose` does [default: text]
    #[arg(long, value_name = "FORMAT", value_enum)]
    log: Option<LogFormat>,
    #[command(flatten)]
    common: Common,
}

/// The subcommand.
pub(crate) const SUBCOMMAND: AddedSubcommand = AddedSubcommand { command, run };

fn command() -> clap::Command {
    Serve::augment_args(clap::Command::new("serve"))
}

/// State that all requests share.
struct Server {
    model: String,
    started: u64,
    context: usize,
    slots: usize,
    vocab: u32,
    eos: Vec<u32>,
    /// Default sampling options of requests.
    sampling: Sampling,
    /// The tokenizer, or the reason that there is none.
    text: Result<Arc<Text>, String>,
    /// Contents of the tokenizer's file.
    tokenizer: Arc<[u8]>,
    constraints: Arc<Constraints>,
    words: OnceLock<Option<Arc<[Word]>>>,
    /// Chat templates, if the bundle has any, or the reason that they cannot be used.
    templates: Result<Option<Templates>, String>,
    worker: Sender<Command>,
    metrics: Arc<Metrics>,
    tickets: AtomicU64,
    key: Option<String>,
    cors: Option<HeaderValue>,
    /// Whether it answers only to the names of this machine: it listens at a loopback address, and requires
    /// no key.
    local: bool,
    /// Maximum bytes of a body.
    body: usize,
    /// Maximum time of an answer.
    limit: Duration,
    /// Time that a client may take for each part of a request.
    client_timeout: Duration,
    /// Whether it ends soon: clients should go elsewhere.
    draining: AtomicBool,
    /// Permits for large bodies.
    large_bodies: Arc<Semaphore>,
    /// Permits for cores, as many as there are.
    cores: Arc<Semaphore>,
}

impl Server {
    /// The tokenizer.
    ///
    /// # Errors
    /// There is none.
    fn text(&self) -> Answer<Arc<Text>> {
        let missing = |why: &String| ApiError::new(StatusCode::BAD_REQUEST, why.clone());
        self.text.as_ref().map(Arc::clone).map_err(missing)
    }

    /// Runs long work on a thread of its own, as many at a time as there are cores.
    ///
    /// # Errors
    /// It panicked.
    async fn on_core<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Answer<T> {
        let failed = |e: String| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, e);
        let permit = Arc::clone(&self.cores).acquire_owned().await.map_err(|e| failed(e.to_string()))?;
        // The permit moves with the work, which continues even if its client has disconnected.
        let done = tokio::task::spawn_blocking(move || (work(), permit)).await;
        done.map(|(done, _)| done).map_err(|e| failed(e.to_string()))
    }

    /// A unique id for an answer.
    fn name(&self, kind: &str) -> String {
        format!("{kind}-{:x}-{:x}", self.started, self.tickets.fetch_add(1, Ordering::Relaxed))
    }

    /// Whether it can answer conversations.
    fn has_chat(&self) -> bool {
        matches!(self.templates, Ok(Some(_)))
    }

    /// The bytes of all tokens, if the tokenizer defines them; read at the first use.
    fn words(&self) -> Option<Arc<[Word]>> {
        let read = || {
            let json = serde_json::from_slice(&self.tokenizer).ok()?;
            words(&json, self.vocab as usize).ok().map(Arc::from)
        };
        self.words.get_or_init(read).clone()
    }
}

/// A permit for each core.
fn cores() -> Arc<Semaphore> {
    Arc::new(Semaphore::new(thread::available_parallelism().map_or(1, usize::from)))
}

/// Seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

fn run(context: &Context<'_>, matches: &clap::ArgMatches, io: &mut Io<'_>) -> Result<(), Failure> {
    let args = Serve::from_arg_matches(matches)
        .map_err(|e| Failure::Use { what: e.to_string(), hint: "see `serve --help`".to_owned() })?;
    let files = context.files(&args.common, true, io)?;
    // A server that ended earlier in this process has set it.
    interrupt::flag().store(false, Ordering::Relaxed);
    let at = SocketAddr::new(args.host, args.port);
    let failed = |source| Error::io("listen at", PathBuf::from(at.to_string()), source);
    let templates = templates(&files, args.template.as_deref())?;
    let sampling = crate::sampling::open(&files)?;
    let tokenizer: Arc<[u8]> = files.read_if_any(text::FILE, regular::TOKENIZER)?.unwrap_or_default().into();
    let listener = TcpListener::bind(at).map_err(failed)?;
    let at = listener.local_addr().map_err(failed)?;
    let (mut engine, sequences) = open(context, &args.common, &files)?;
    let program = context.program;
    let mut decoder = if args.no_big_little { Decoder::full() } else { Decoder::of(program)? };
    let (worker, commands) = channel();
    let metrics = Arc::new(Metrics::new(engine.memory()));
    let setting = Setting {
        queue: args.max_queue,
        budget: args.prompt_tokens,
        exact: args.exact,
        slots: 0..sequences,
        ..Setting::default()
    };
    let mut scheduler = Scheduler::new(&mut engine, &mut decoder, &setting)?;
    let key = args.api_key.or_else(|| std::env::var(KEY).ok()).filter(|key| !key.is_empty());
    let text = Text::open(&files, program.model.bos);
    let text = text.map(|text| text.at_most(program.model.max_context as usize, program.model.vocab));
    let (slots, ends) = (scheduler.load().slots, program.model.eos.clone());
    let workers = Workers::new(Arc::clone(&tokenizer), program.model.vocab as usize, ends)?;
    let constraints = Constraints::new(workers, slots, args.max_queue);
    let server = Arc::new(Server {
        model: args.model_name.unwrap_or_else(|| name(context)),
        started: now(),
        context: program.model.max_context as usize,
        slots,
        vocab: program.model.vocab,
        eos: program.model.eos.clone(),
        sampling,
        text: text.map(Arc::new).map_err(|e| e.to_string()),
        tokenizer,
        constraints: Arc::new(constraints),
        words: OnceLock::new(),
        templates,
        worker,
        metrics: Arc::clone(&metrics),
        tickets: AtomicU64::new(0),
        local: args.host.is_loopback() && key.is_none(),
        key,
        cors: args.cors,
        body: args.max_body,
        limit: Duration::from_secs(args.timeout),
        client_timeout: Duration::from_secs(args.client_timeout),
        draining: AtomicBool::new(false),
        large_bodies: body::large_bodies(),
        cores: cores(),
    });
    if let Err(why) = &server.text {
        io.note(&format!("warning: {why}; requests with text cannot be answered"));
    }
    if !args.host.is_loopback() && server.key.is_none() {
        io.note(&format!("warning: other machines reach {at} without an API key; `--api-key` requires one"));
    }
    metrics.publish(scheduler.counters(), scheduler.load(), scheduler.engine());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    let signals = {
        let _inside = runtime.enter();
        Signals::new().map_err(failed)?
    };
    let model = server.model.clone();
    let limits = Limits { total: args.max_connections, per_address: args.max_connections_per_address };
    let (finish, drain) = (server.worker.clone(), Duration::from_secs(args.drain));
    let log = args
        .log
        .or(args.verbose.then_some(LogFormat::Text))
        .map(LogFormat::dispatch)
        .transpose()
        .map_err(|source| Error::io("write to", PathBuf::from("standard error"), source))?;
    let web = thread::Builder::new()
        .name("http".to_owned())
        .spawn(move || {
            let serve = || runtime.block_on(http::serve(listener, server, limits, drain, signals));
            let done = match &log {
                Some(log) => tracing::dispatcher::with_default(log, serve),
                None => serve(),
            };
            // Tasks that still run have no clients any more.
            runtime.shutdown_background();
            // Other threads may still hold the server, and with it a sender of commands.
            let _ = finish.send(Command::Finish);
            done
        })
        .map_err(failed)?;
    io.note(&format!("serving {model}: {}; Ctrl-C ends it", capacity(scheduler.engine(), sequences)));
    io.say(&format!("http://{at}\n"))?;
    worker::work(&mut scheduler, &commands, &metrics)?;
    match web.join() {
        Ok(done) => Ok(done.map_err(failed)?),
        Err(_) => Err(Error::internal("the server's thread ended in a panic").into()),
    }
}

/// Opens the engine for as many sequences with a full context as fit into free memory; at least one, and no
/// more than the bundle has slots. Returns their number.
fn open<'a>(
    context: &Context<'a>,
    common: &Common,
    files: &BundleReader,
) -> Result<(Engine<'a>, u32), Error> {
    let slots = context.program.model.slots.max(1);
    let open = |sequences: u32| {
        let demand = Demand { sequences: sequences as usize, tokens: usize::MAX };
        context.open(common, files, demand).map(|engine| (engine, sequences))
    };
    match open(slots) {
        Err(Error::Limit { limit: Limit::Memory, most, .. }) if slots > 1 => {
            open(u32::try_from(most).unwrap_or(slots).clamp(1, slots - 1))
        }
        done => done,
    }
}

/// The number of parallel sequences and the reason that there are no more, in words.
fn capacity(engine: &Engine<'_>, sequences: u32) -> String {
    let slots = engine.program().model.slots.max(1);
    let each = engine.memory().kv as f64 / f64::from(slots) / (1 << 20) as f64;
    let why = if sequences < slots {
        format!("free memory is enough for no more of the bundle's {slots} slots")
    } else {
        "the largest `decode_batch` of the bundle".to_owned()
    };
    format!("{sequences} sequences at a time ({why}), each with up to {each:.1} MiB of KV cache")
}

/// The chat templates of the bundle, or the one of a file, which replaces them all. If those of a bundle
/// cannot be used, requests for conversations return the reason.
fn templates(
    files: &BundleReader,
    file: Option<&Path>,
) -> Result<Result<Option<Templates>, String>, Failure> {
    let own = Templates::open(files);
    let Some(path) = file else { return Ok(own.map_err(|e| e.what)) };
    let read = regular::read_text(path, TEMPLATE);
    let source = read.map_err(|source| Error::io("read", path.to_owned(), source))?;
    let tokens = own.ok().flatten().map(|t| t.tokens).unwrap_or_default();
    // An invalid template is an error at the start.
    Template::new(&source, &tokens)?;
    let templates = Templates::new([("default".to_owned(), source)].into(), tokens);
    Ok(Ok(Some(templates)))
}

/// Name of the bundle's folder, without the extension of bundles.
fn name(context: &Context<'_>) -> String {
    let folder = context.bundle.canonicalize().unwrap_or_else(|_| context.bundle.to_owned());
    let name = folder.file_name().map_or_else(|| "moec".to_owned(), |n| n.to_string_lossy().into_owned());
    name.strip_suffix(".moec").unwrap_or(&name).to_owned()
}

/// Signals that stop the server: SIGINT and, on Unix, SIGTERM.
struct Signals {
    #[cfg(unix)]
    both: [tokio::signal::unix::Signal; 2],
}

impl Signals {
    /// Registers the signals, inside of a runtime.
    #[cfg(unix)]
    fn new() -> std::io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self { both: [signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?] })
    }

    /// Registers the signal.
    #[cfg(not(unix))]
    #[expect(clippy::unnecessary_wraps, reason = "as on Unix")]
    fn new() -> std::io::Result<Self> {
        Ok(Self {})
    }

    /// Waits for the next signal.
    async fn next(&mut self) {
        #[cfg(unix)]
        {
            let [a, b] = &mut self.both;
            tokio::select! {
                _ = a.recv() => {}
                _ = b.recv() => {}
            }
        }
        #[cfg(not(unix))]
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}
