//! A client of HTTP for tests of servers: every request on a connection of its own, answers as they come.

use std::io::{self, BufRead, BufReader, Error, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

/// How long a server may say nothing.
const PATIENCE: Duration = Duration::from_mins(2);

/// Sends a request, and nothing of an answer is read. `head`: the request line and headers but for `Host`, `Connection` and
/// `Content-Length`.
///
/// # Errors
/// Nobody listens. A server that refuses need not read all of a body: that is none.
pub fn send(address: &str, head: &str, body: &str) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_nodelay(true)?;
    Ok(send_over(stream, head, body))
}

/// As [`send`], over a connection that is open.
pub fn send_over(mut stream: TcpStream, head: &str, body: &str) -> TcpStream {
    let length = body.len();
    let text =
        format!("{head}\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}");
    let _ = stream.write_all(text.as_bytes());
    stream
}

/// The head of a request with a body of JSON.
pub fn post(path: &str) -> String {
    format!("POST {path} HTTP/1.1\r\nContent-Type: application/json")
}

/// Sends a request and reads the answer.
///
/// # Errors
/// As [`send`] and [`Incoming::of`].
pub fn ask(address: &str, head: &str, body: &str) -> io::Result<Reply> {
    Incoming::of(send(address, head, body)?)?.whole()
}

/// An answer.
#[derive(Clone, Debug)]
pub struct Reply {
    /// Its status.
    pub status: u16,
    /// Its status line and headers, in lower case.
    pub headers: String,
    /// Its body. What is no UTF-8 is replaced.
    pub body: String,
}

impl Reply {
    /// What the events of a stream say; `None` where it is none, or does not end with `[DONE]`.
    pub fn events(&self) -> Option<Vec<&str>> {
        let events = self.body.split("\n\n").filter(|event| !event.is_empty());
        let mut events: Vec<&str> =
            events.map(|event| event.strip_prefix("data: ")).collect::<Option<_>>()?;
        (events.pop() == Some("[DONE]")).then_some(events)
    }
}

/// An answer whose head has come.
#[derive(Debug)]
pub struct Incoming {
    /// Its status.
    pub status: u16,
    /// Its status line and headers, in lower case.
    pub headers: String,
    body: BufReader<Body>,
}

impl Incoming {
    /// Reads the head of an answer.
    ///
    /// # Errors
    /// The connection ends first, or what comes is no HTTP.
    pub fn of(stream: TcpStream) -> io::Result<Self> {
        let mut from = BufReader::new(stream);
        let mut headers = String::new();
        while !headers.ends_with("\r\n\r\n") {
            if from.read_line(&mut headers)? == 0 {
                return Err(Error::new(
                    ErrorKind::UnexpectedEof,
                    format!("the answer ends early: {headers:?}"),
                ));
            }
        }
        let headers = headers.to_lowercase();
        let status = headers.split(' ').nth(1).and_then(|status| status.parse().ok());
        let status = status.ok_or_else(|| Error::new(ErrorKind::InvalidData, headers.clone()))?;
        let length =
            headers.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok());
        let left = match length {
            _ if headers.contains("transfer-encoding: chunked") => Left::Chunk(0),
            Some(bytes) => Left::Bytes(bytes),
            None => Left::All,
        };
        Ok(Self { status, headers, body: BufReader::new(Body { from, left }) })
    }

    /// What the next event of a stream says; `None` behind the last one, which is `[DONE]`.
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

    /// Reads the rest. A connection that is cut behind an answer is no error.
    ///
    /// # Errors
    /// A connection that ends inside of one.
    pub fn whole(mut self) -> io::Result<Reply> {
        let mut body = Vec::new();
        self.body.read_to_end(&mut body)?;
        let body = String::from_utf8_lossy(&body).into_owned();
        Ok(Reply { status: self.status, headers: self.headers, body })
    }

    /// Has enough, and says so to the server.
    pub fn leave(self) {
        // It may have ended by itself.
        let _ = self.body.get_ref().from.get_ref().shutdown(Shutdown::Both);
    }
}

/// What is to come of a body.
#[derive(Debug)]
enum Left {
    /// So many bytes of a chunk, and then other chunks; 0: the size of the next one comes first.
    Chunk(usize),
    /// So many bytes.
    Bytes(usize),
    /// All until the connection ends.
    All,
}

/// The body of an answer.
#[derive(Debug)]
struct Body {
    from: BufReader<TcpStream>,
    left: Left,
}

impl Body {
    /// The size of the next chunk; 0 behind the last one.
    fn next_chunk(&mut self) -> io::Result<usize> {
        let mut line = String::new();
        // Behind a chunk stands an empty line.
        while line.trim().is_empty() {
            line.clear();
            if self.from.read_line(&mut line)? == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
        }
        usize::from_str_radix(line.trim(), 16).map_err(|_| Error::new(ErrorKind::InvalidData, line))
    }
}

impl Read for Body {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let left = match &mut self.left {
            Left::All => return self.from.read(to),
            Left::Chunk(0) => {
                let size = self.next_chunk()?;
                self.left = if size == 0 { Left::Bytes(0) } else { Left::Chunk(size) };
                return self.read(to);
            }
            Left::Bytes(left) | Left::Chunk(left) => left,
        };
        let most = to.len().min(*left);
        if most == 0 {
            return Ok(0);
        }
        let n = self.from.read(&mut to[..most])?;
        if n == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        *left -= n;
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    /// What a client makes of an answer that comes in two pieces.
    fn of(answer: [&'static str; 2]) -> io::Result<Reply> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 512];
            let n = stream.read(&mut request).unwrap();
            for piece in answer {
                stream.write_all(piece.as_bytes()).unwrap();
                std::thread::sleep(Duration::from_millis(5));
            }
            String::from_utf8_lossy(&request[..n]).into_owned()
        });
        let reply = ask(&address, &post("/x"), "{}");
        let request = server.join().unwrap();
        assert!(
            request.starts_with("POST /x HTTP/1.1\r\n") && request.ends_with("Content-Length: 2\r\n\r\n{}")
        );
        reply
    }

    #[test]
    fn bodies_end_where_they_say() {
        let reply = of(["HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\na", "bcdef"]).unwrap();
        assert_eq!((reply.status, &*reply.body), (200, "abcd"));
        let head = "HTTP/1.1 429 No\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nda";
        let reply =
            of([head, "t\r\nb\r\na: {}\n\ndata\r\n13\r\n: 1\n\ndata: [DONE]\n\n\r\n0\r\n\r\n"]).unwrap();
        assert_eq!((reply.status, reply.events().unwrap()), (429, vec!["{}", "1"]));
        assert!(of(["HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n", "a"]).is_err());
        assert!(of(["HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "4\r\na"]).is_err());
        assert!(of(["no", "thing"]).is_err());
        assert!(of(["HTTP/1.1 200 OK\r\n\r\ndata: 1", "\n\n"]).unwrap().events().is_none());
    }
}
