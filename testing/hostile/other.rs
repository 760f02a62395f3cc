//! The client that is harmed: it repeats the same request from a separate address.

use super::attack::LIMIT;
use moec_testing::http::{Reply, raw};
use serde_json::{Value, json};
use socket2::{Domain, Socket, Type};
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

/// Between two tries where the server has no room.
const PAUSE: Duration = Duration::from_millis(50);
/// Its address: not that of the clients that attack.
const FROM: &str = "127.0.0.2:0";

pub(crate) struct Other {
    address: String,
    /// The right answer: the one from before.
    expected: Value,
    /// Longest time of an answer.
    pub(crate) slowest: Duration,
}

impl Other {
    pub(crate) fn new(address: &str) -> Result<Self, String> {
        let mut other = Self { address: address.to_owned(), expected: Value::Null, slowest: Duration::ZERO };
        other.expected = other.answer()?;
        Ok(other)
    }

    /// Sends the request, again as long as there is no room.
    ///
    /// # Errors
    /// Another answer than before, or none in time.
    pub(crate) fn check(&mut self) -> Result<(), String> {
        let start = Instant::now();
        let answer = self.answer()?;
        self.slowest = self.slowest.max(start.elapsed());
        if answer != self.expected {
            return Err(format!("the other client got {answer}, and before {}", self.expected));
        }
        Ok(())
    }

    fn answer(&self) -> Result<Value, String> {
        let body = json!({"prompt": "The borrow checker", "max_tokens": 8, "temperature": 0}).to_string();
        let start = Instant::now();
        loop {
            let reply = connect(&self.address, FROM).and_then(|stream| send_completion(stream, &body));
            match reply {
                Ok(reply) if reply.status == 200 => {
                    let value: Value = serde_json::from_str(&reply.body).map_err(|e| e.to_string())?;
                    return Ok(value["choices"].clone());
                }
                Ok(reply) if ![429, 503].contains(&reply.status) => {
                    return Err(format!("the other client got {}: {}", reply.status, reply.body));
                }
                Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
                    return Err("the server is gone".to_owned());
                }
                failed if start.elapsed() > LIMIT => {
                    let why = failed.map_or_else(|e| e.to_string(), |reply| reply.body);
                    return Err(format!("the other client had no answer in {} s: {why}", LIMIT.as_secs()));
                }
                _ => thread::sleep(PAUSE),
            }
        }
    }
}

fn send_completion(stream: TcpStream, body: &str) -> io::Result<Reply> {
    let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json";
    raw(stream, &format!("{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len()))
}

/// A connection from an address of this machine, which neither reads nor writes for longer than the limit.
fn connect(to: &str, from: &str) -> io::Result<TcpStream> {
    let [to, from]: [SocketAddr; 2] =
        [to.parse().map_err(io::Error::other)?, from.parse().map_err(io::Error::other)?];
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.bind(&from.into())?;
    socket.connect_timeout(&to.into(), LIMIT)?;
    let stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(LIMIT))?;
    stream.set_write_timeout(Some(LIMIT))?;
    Ok(stream)
}
