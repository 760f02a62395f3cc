//! Connections: limits on their number, in total and per address, and on a client's time for each part.

use super::error::ApiError;
use axum::http::StatusCode;
use std::collections::HashMap;
use std::future::poll_fn;
use std::io::{self, ErrorKind, IoSlice, Write as _};
use std::net::{IpAddr, Ipv6Addr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::time::{Sleep, sleep, timeout};

/// Maximum number of refused connections at a time that are given time to read the reason; others are closed
/// at once.
const REFUSALS: usize = 128;
/// Time that a refused client may take to read the reason.
const REFUSAL_TIME: Duration = Duration::from_secs(2);

/// Limits on the number of connections.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) total: usize,
    pub(super) per_address: usize,
}

/// Open connections, by address.
pub(super) struct Connections {
    limits: Limits,
    open: Mutex<HashMap<IpAddr, usize>>,
    refusals: Arc<Semaphore>,
}

/// An open connection, until it is dropped.
pub(super) struct Admission {
    connections: Arc<Connections>,
    address: IpAddr,
}

impl Connections {
    pub(super) fn new(limits: Limits) -> Arc<Self> {
        Arc::new(Self { limits, open: Mutex::default(), refusals: Arc::new(Semaphore::new(REFUSALS)) })
    }

    /// Admits a connection from an address.
    ///
    /// # Errors
    /// A limit is reached.
    pub(super) fn admit(self: &Arc<Self>, from: IpAddr) -> Result<Admission, ApiError> {
        let address = network(from);
        let Limits { total, per_address } = self.limits;
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if open.values().sum::<usize>() >= total {
            let message =
                format!("the server has {total} connections open, which is its limit; hint: try again soon");
            return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message).code("too_many_connections"));
        }
        let of_address = open.entry(address).or_default();
        if *of_address >= per_address {
            let message = format!(
                "your address has {per_address} connections open, which is the limit per address; hint: close some, or try again soon"
            );
            return Err(ApiError::new(StatusCode::TOO_MANY_REQUESTS, message).code("too_many_connections"));
        }
        *of_address += 1;
        Ok(Admission { connections: Arc::clone(self), address })
    }

    /// Answers a connection that is not admitted, and closes it.
    pub(super) fn refuse(&self, mut stream: TcpStream, why: &ApiError) {
        let answer = why.http1();
        let Ok(permit) = Arc::clone(&self.refusals).try_acquire_owned() else {
            // The client may lose the answer, if it has sent something.
            let _ = stream.into_std().and_then(|mut stream| stream.write(answer.as_bytes()));
            return;
        };
        tokio::spawn(async move {
            let refusal = async {
                stream.writable().await?;
                // A new connection has buffer space for it.
                stream.try_write(answer.as_bytes())?;
                poll_fn(|context| Pin::new(&mut stream).poll_shutdown(context)).await?;
                // Closing a connection with unread input resets it, and the client loses the answer.
                let mut unread = [0; 4096];
                loop {
                    stream.readable().await?;
                    match stream.try_read(&mut unread) {
                        Ok(0) => return io::Result::Ok(()),
                        Err(e) if e.kind() != ErrorKind::WouldBlock => return Err(e),
                        _ => {}
                    }
                }
            };
            // A client that does not read it in time is not waited for.
            let _ = timeout(REFUSAL_TIME, refusal).await;
            drop(permit);
        });
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        let mut open = self.connections.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(n) = open.get_mut(&self.address) {
            *n -= 1;
            if *n == 0 {
                open.remove(&self.address);
            }
        }
    }
}

/// Network that counts as one address: of IPv6 the first half, since the owner of one address has all of its
/// second half.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits() & (u128::MAX << 64)).into(),
        v4 @ IpAddr::V4(_) => v4,
    }
}

/// A connection that fails when its client reads nothing for some time while there is something to write.
pub(super) struct WriteTimeout {
    stream: TcpStream,
    limit: Duration,
    /// Timer that runs while a write waits.
    waits: Option<Pin<Box<Sleep>>>,
}

impl WriteTimeout {
    pub(super) fn new(stream: TcpStream, limit: Duration) -> Self {
        Self { stream, limit, waits: None }
    }

    /// Result of a write, or an error if it waits too long.
    fn in_time<T>(&mut self, context: &mut Context<'_>, write: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if write.is_ready() {
            self.waits = None;
            return write;
        }
        let waits = self.waits.get_or_insert_with(|| Box::pin(sleep(self.limit)));
        ready!(waits.as_mut().poll(context));
        Poll::Ready(Err(ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for WriteTimeout {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        to: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, to)
    }
}

impl AsyncWrite for WriteTimeout {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let write = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.in_time(context, write)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let write = Pin::new(&mut self.stream).poll_write_vectored(context, bytes);
        self.in_time(context, write)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_are_counted_in_all_and_by_address() {
        let connections = Connections::new(Limits { total: 3, per_address: 2 });
        let admit = |from: &str| connections.admit(from.parse().unwrap()).map_err(|e| e.status.as_u16());
        let mut first = vec![admit("10.0.0.1").ok(), admit("::ffff:10.0.0.1").ok()];
        assert_eq!(admit("10.0.0.1").err(), Some(429));
        let other = admit("10.0.0.2");
        assert!(other.is_ok());
        assert_eq!(admit("10.0.0.3").err(), Some(503));
        first.pop();
        assert!(admit("10.0.0.1").is_ok());
        drop((first, other));
        assert!(connections.open.lock().unwrap().is_empty());
        let addresses = [admit("2001:db8::1"), admit("2001:db8::2:0:0:1")];
        assert!(addresses.iter().all(Result::is_ok));
        assert_eq!(admit("2001:db8::3").err(), Some(429));
        assert!(admit("2001:db8:0:1::1").is_ok());
    }
}
