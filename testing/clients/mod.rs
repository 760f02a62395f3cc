//! Clients of a server that come and go at random, and the requirements meanwhile: rejected requests name the
//! reason, and every complete answer is right, as checked by the caller.

#![allow(dead_code, unused_imports, reason = "each program uses a part of it")]

mod answer;

pub(crate) use answer::{Answer, GAP};
use moec_testing::http::{Incoming, post};
use serde_json::{Value, json};
use std::io::Write as _;
use std::net::TcpStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Endpoint that continues texts.
pub(crate) const COMPLETIONS: &str = "/v1/completions";
/// Endpoint that answers conversations.
pub(crate) const CHAT: &str = "/v1/chat/completions";

/// Numbers that are random enough (xorshift), the same for the same client.
pub(crate) struct Random(u32);

impl Random {
    fn of(client: u32) -> Self {
        Self(client.wrapping_mul(2_654_435_761) | 1)
    }

    /// From 0 up, below `n`.
    pub(crate) fn below(&mut self, n: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 17;
        self.0 ^= self.0 << 5;
        self.0 % n
    }
}

/// A request, and its index among those with known answers.
pub(crate) struct Case {
    /// Endpoint.
    pub(crate) path: &'static str,
    /// The request, without `stream`.
    pub(crate) body: Value,
    /// Identifier that its creator gave it.
    pub(crate) key: usize,
}

/// Reference model.
pub(crate) trait Model: Sync {
    /// A request whose answer is known.
    fn case(&self, random: &mut Random) -> Case;

    /// Fails if an answer is wrong.
    fn judge(&self, case: &Case, answer: &Answer) -> Result<(), String>;

    /// A request that takes all slots for as long as it can, as a stream.
    fn long(&self) -> Value;

    /// Bytes that a body may not have.
    fn too_large(&self) -> usize;
}

/// Act of a client: its name, how often among the others, and what makes it fail.
type Act = (&'static str, u32, fn(&Clients<'_>, &mut Random) -> Result<(), String>);

/// Everything that clients do.
const ACTS: &[Act] = &[
    ("awaited", 12, awaited),
    ("left before the answer", 2, |clients, _| {
        clients.leave(&clients.model.long(), Duration::from_millis(1))
    }),
    ("left in a stream", 3, left),
    ("cancelled", 2, cancelled),
    ("broken off in a request", 1, broken_off),
    ("malformed", 2, malformed),
    ("oversized", 2, oversized),
];

/// Clients that send requests at once, for a while.
pub(crate) struct Clients<'a> {
    /// Address of the server.
    pub(crate) address: &'a str,
    /// Reference model.
    pub(crate) model: &'a dyn Model,
    /// Number of clients.
    pub(crate) many: u32,
    /// Duration.
    pub(crate) time: Duration,
    /// Requests that were sent away since too many waited.
    pub(crate) sent_away: AtomicU64,
}

/// Result.
#[derive(Debug, Default)]
pub(crate) struct ClientResult {
    /// Number of times that each thing was done.
    pub(crate) acts: Vec<(&'static str, u64)>,
    /// Failures, the first of each client.
    pub(crate) failures: Vec<String>,
}

impl<'a> Clients<'a> {
    /// The clients of a server.
    pub(crate) fn new(address: &'a str, model: &'a dyn Model, many: u32, time: Duration) -> Self {
        Self { address, model, many, time, sent_away: AtomicU64::new(0) }
    }

    /// Makes all of them send requests. One that fails stops.
    pub(crate) fn run(&self) -> ClientResult {
        let end = Instant::now() + self.time;
        let counts: Vec<AtomicU64> = ACTS.iter().map(|_| AtomicU64::new(0)).collect();
        let client = |client: u32| {
            let mut random = Random::of(client + 1);
            while Instant::now() < end {
                let mut at = random.below(ACTS.iter().map(|act| act.1).sum());
                let act = ACTS.iter().position(|act| {
                    let here = at < act.1;
                    at = at.saturating_sub(act.1);
                    here
                });
                let act = act.unwrap_or(0);
                (ACTS[act].2)(self, &mut random).map_err(|e| format!("{}: {e}", ACTS[act].0))?;
                counts[act].fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        };
        let failures = std::thread::scope(|scope| {
            let client = &client;
            let all: Vec<_> = (0..self.many).map(|i| scope.spawn(move || client(i))).collect();
            let ends =
                all.into_iter().map(|c| c.join().unwrap_or_else(|_| Err("a client panicked".to_owned())));
            ends.filter_map(Result::err).collect()
        });
        let acts = ACTS.iter().zip(counts).map(|(act, n)| (act.0, n.into_inner())).collect();
        ClientResult { acts, failures }
    }

    /// Sends a request, and goes if no answer begins in that time.
    fn leave(&self, body: &Value, after: Duration) -> Result<(), String> {
        post(self.address, COMPLETIONS, body).leave(after).map_err(|e| e.to_string())
    }

    /// Sends a request and reads the head of the answer; `None` if it is rejected.
    fn begin(&self, path: &str, body: &Value) -> Result<Option<Incoming>, String> {
        let incoming = post(self.address, path, body).send().map_err(|e| e.to_string())?;
        match incoming.status {
            200 => Ok(Some(incoming)),
            429 => {
                self.sent_away.fetch_add(1, Ordering::Relaxed);
                Ok(None)
            }
            _ => Err(format!("{:?}", incoming.whole())),
        }
    }

    /// Sends a request that must be refused in this way.
    fn refused(&self, body: &str, status: u16) -> Result<(), String> {
        let reply = post(self.address, COMPLETIONS, body).call().map_err(|e| e.to_string())?;
        let named =
            serde_json::from_str::<Value>(&reply.body).is_ok_and(|v| v["error"]["message"].is_string());
        let right = reply.status == status && named;
        if right { Ok(()) } else { Err(format!("status {} for {status}: {}", reply.status, reply.body)) }
    }
}

/// Awaits an answer, whole or as events, and has it judged.
fn awaited(clients: &Clients<'_>, random: &mut Random) -> Result<(), String> {
    let mut case = clients.model.case(random);
    let stream = random.below(2) == 0;
    case.body["stream"] = json!(stream);
    let Some(incoming) = clients.begin(case.path, &case.body)? else { return Ok(()) };
    let reply = incoming.whole().map_err(|e| e.to_string())?;
    let answer = Answer::of(&reply, stream)?;
    clients.model.judge(&case, &answer).map_err(|e| format!("{}: {e}", case.body))
}

/// Reads some events of a stream, and goes.
fn left(clients: &Clients<'_>, random: &mut Random) -> Result<(), String> {
    let Some(mut incoming) = clients.begin(COMPLETIONS, &clients.model.long())? else { return Ok(()) };
    for _ in 0..random.below(20) {
        let event = incoming.event().map_err(|e| e.to_string())?;
        if event.is_none() {
            break;
        }
    }
    Ok(())
}

/// Requests a whole answer, and disconnects while it is computed.
fn cancelled(clients: &Clients<'_>, random: &mut Random) -> Result<(), String> {
    let mut long = clients.model.long();
    long["stream"] = json!(false);
    clients.leave(&long, Duration::from_millis(u64::from(random.below(300)) + 1))
}

/// Says that a body comes, and goes before all of it has.
fn broken_off(clients: &Clients<'_>, _: &mut Random) -> Result<(), String> {
    let mut stream = TcpStream::connect(clients.address).map_err(|e| e.to_string())?;
    let half =
        format!("POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{{\"prompt\":");
    let _ = stream.write_all(half.as_bytes());
    Ok(())
}

/// Requests nonsense.
fn malformed(clients: &Clients<'_>, random: &mut Random) -> Result<(), String> {
    const NONSENSE: [&str; 6] = [
        "{",
        "[]",
        r#"{"prompt": 3}"#,
        r#"{"prompt": "a", "max_tokens": -1}"#,
        r#"{"prompt": "a", "temperature": "hot"}"#,
        r#"{"prompt": [4000000000]}"#,
    ];
    clients.refused(NONSENSE[random.below(NONSENSE.len() as u32) as usize], 400)
}

/// Requests too much: of the body, or of the slots.
fn oversized(clients: &Clients<'_>, random: &mut Random) -> Result<(), String> {
    match random.below(3) {
        0 => clients.refused(&"x".repeat(clients.model.too_large()), 413),
        1 => clients.refused(r#"{"prompt": "a", "best_of": 4000}"#, 400),
        _ => clients.refused(r#"{"prompt": "a", "n": 4000}"#, 400),
    }
}
