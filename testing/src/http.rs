//! A client of HTTP for tests of servers: each request on a new connection, with streamed answers.

use std::fmt::Display;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::LazyLock;
use std::time::Duration;
use ureq::http::{HeaderMap, request};
use ureq::{Agent, BodyReader};

/// Time that a server may take to begin an answer.
const PATIENCE: Duration = Duration::from_mins(2);
/// Time that an answer may take.
const WHOLE: Duration = Duration::from_mins(10);

/// Every status is an answer, and no connection is used twice.
static AGENT: LazyLock<Agent> = LazyLock::new(|| {
    let config = Agent::config_builder().http_status_as_error(false).max_redirects(0).proxy(None);
    config.max_idle_connections(0).timeout_recv_body(Some(WHOLE)).build().into()
});

/// A request.
#[derive(Debug)]
pub struct Request {
    head: request::Builder,
    /// `None` if the method has no body.
    body: Option<String>,
}

/// A request by a method that has no body.
pub fn bare(method: &str, address: &str, path: &str) -> Request {
    let head = request::Builder::new().method(method).uri(format!("http://{address}{path}"));
    Request { head, body: None }
}

/// A `GET`.
pub fn get(address: &str, path: &str) -> Request {
    bare("GET", address, path)
}

/// A `POST` of a text, whose content type is set later.
pub fn text(address: &str, path: &str, body: &str) -> Request {
    Request { body: Some(body.to_owned()), ..bare("POST", address, path) }
}

/// A `POST` of JSON.
pub fn post(address: &str, path: &str, body: impl Display) -> Request {
    text(address, path, &body.to_string()).header("Content-Type", "application/json")
}

impl Request {
    /// With one more header.
    #[must_use]
    pub fn header(self, name: &str, value: &str) -> Self {
        Self { head: self.head.header(name, value), ..self }
    }

    /// Sends it and reads the answer.
    ///
    /// # Errors
    /// Fails without a server, or without a whole answer.
    pub fn call(self) -> io::Result<Reply> {
        self.send()?.whole()
    }

    /// Sends it and reads the head of the answer.
    ///
    /// # Errors
    /// Fails without a server, or without an answer.
    pub fn send(self) -> io::Result<Incoming> {
        self.run(PATIENCE).map_err(ureq::Error::into_io)
    }

    /// Sends it, and closes the connection after this time if no answer has begun, else as soon as one has.
    ///
    /// # Errors
    /// Fails without a server.
    pub fn leave(self, after: Duration) -> io::Result<()> {
        match self.run(after) {
            Ok(_) | Err(ureq::Error::Timeout(_)) => Ok(()),
            Err(e) => Err(e.into_io()),
        }
    }

    fn run(self, patience: Duration) -> Result<Incoming, ureq::Error> {
        let limit = Some(patience);
        let answer =
            match self.body {
                Some(body) => AGENT
                    .run(AGENT.configure_request(self.head.body(body)?).timeout_recv_response(limit).build()),
                None => AGENT
                    .run(AGENT.configure_request(self.head.body(())?).timeout_recv_response(limit).build()),
            };
        let (head, body) = answer?.into_parts();
        let body = BufReader::new(body.into_reader());
        Ok(Incoming { status: head.status.as_u16(), headers: lines(&head.headers), body })
    }
}

fn lines(headers: &HeaderMap) -> String {
    let line = |(name, value): (_, &ureq::http::HeaderValue)| {
        format!("{name}: {}\n", String::from_utf8_lossy(value.as_bytes()).to_lowercase())
    };
    headers.iter().map(line).collect()
}

/// Sends what no client would over a connection, and reads until the server closes it.
///
/// # Errors
/// No answer comes.
pub fn raw(mut stream: TcpStream, request: &str) -> io::Result<Reply> {
    stream.set_read_timeout(Some(stream.read_timeout()?.unwrap_or(PATIENCE)))?;
    // A server that refuses a request need not read all of it; unread bytes reset the connection after its
    // answer.
    let _ = stream.write_all(request.as_bytes());
    let mut answer = Vec::new();
    let read = stream.read_to_end(&mut answer);
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let parts = answer.split_once("\r\n\r\n").and_then(|(headers, body)| {
        let status = headers.split(' ').nth(1)?.parse().ok()?;
        Some(Reply { status, headers: headers.to_lowercase(), body: body.to_owned() })
    });
    parts.ok_or_else(|| read.err().unwrap_or_else(|| io::Error::new(ErrorKind::UnexpectedEof, answer)))
}

/// An answer.
#[derive(Clone, Debug)]
pub struct Reply {
    /// Its status.
    pub status: u16,
    /// Its headers, a line each, in lower case.
    pub headers: String,
    /// Its body. Invalid UTF-8 is replaced.
    pub body: String,
}

impl Reply {
    /// Events of a stream; `None` if it is not a stream, or does not end with `[DONE]`.
    pub fn events(&self) -> Option<Vec<&str>> {
        let events = self.body.split("\n\n").filter(|event| !event.is_empty());
        let mut events: Vec<&str> =
            events.map(|event| event.strip_prefix("data: ")).collect::<Option<_>>()?;
        (events.pop() == Some("[DONE]")).then_some(events)
    }
}

/// An answer whose head has come. Dropping it closes the connection.
pub struct Incoming {
    /// Its status.
    pub status: u16,
    /// Its headers, a line each, in lower case.
    pub headers: String,
    body: BufReader<BodyReader<'static>>,
}

impl Incoming {
    /// Next event of a stream; `None` after the last one, which is `[DONE]`.
    ///
    /// # Errors
    /// The connection or the answer ends before that.
    pub fn event(&mut self) -> io::Result<Option<String>> {
        let mut line = String::new();
        while self.body.read_line(&mut line)? > 0 {
            if let Some(event) = line.strip_prefix("data: ") {
                let event = event.trim_end();
                return Ok((event != "[DONE]").then(|| event.to_owned()));
            }
            line.clear();
        }
        Err(ErrorKind::UnexpectedEof.into())
    }

    /// Reads the rest.
    ///
    /// # Errors
    /// A connection that ends inside of an answer.
    pub fn whole(mut self) -> io::Result<Reply> {
        let mut body = Vec::new();
        self.body.read_to_end(&mut body)?;
        let body = String::from_utf8_lossy(&body).into_owned();
        Ok(Reply { status: self.status, headers: self.headers, body })
    }
}
