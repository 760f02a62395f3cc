//! Connections between hosts, measured with the messages that runs exchange.
#![expect(clippy::cast_possible_truncation, reason = "sizes of messages")]

use moec_backend::links::{Links, Peer, Trip};
use moec_hosts_unit::message::{Command, Commands, Message, answer, answered};
use moec_hosts_unit::mpi::Mpi;
use moec_hosts_unit::{Tag, Wire, leave};
use moec_runtime::{Error, Result};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Sizes of measured messages.
const SIZES: [u64; 7] = [64, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20];
/// Fewest messages of a size, and how long more of them are sent.
const FEWEST: usize = 20;
const SPAN: Duration = Duration::from_millis(100);
/// Time for a host to measure itself, and to answer.
const ANSWERING: Duration = Duration::from_mins(10);
/// Longest wait for a message at a time.
const LOOK: Duration = Duration::from_secs(1);

/// The processes of a job.
#[derive(Debug)]
pub(crate) struct Job(pub(crate) Arc<Mpi>);

impl Links for Job {
    fn is_first(&self) -> bool {
        self.0.rank() == 0
    }

    fn meet(&self, says: &str) -> Result<Vec<Peer>> {
        let wire: &Mpi = &self.0;
        let met: Result<Vec<Peer>> = if self.is_first() {
            (1..wire.hosts()).map(|host| measure(wire, host)).collect()
        } else {
            echo(wire, says).map(|()| Vec::new())
        };
        met.and_then(|peers| leave(wire).map(|()| peers))
    }
}

/// Asks a host what it says, and measures the connection with it.
fn measure(wire: &dyn Wire, host: usize) -> Result<Peer> {
    let mut message = Message::default();
    message.add(Command::Greet { program: &[] });
    let says = String::from_utf8_lossy(&ask(wire, host, &message)?).into_owned();
    let trips = |to: bool| SIZES.iter().map(|&bytes| trip(wire, host, bytes, to)).collect::<Result<Vec<_>>>();
    Ok(Peer { says, to: trips(true)?, from: trips(false)? })
}

/// Measures messages of a size to a host (`to`), or answers of it.
fn trip(wire: &dyn Wire, host: usize, bytes: u64, to: bool) -> Result<Trip> {
    let (there, back) = if to { (bytes, 0) } else { (0, bytes) };
    let data = vec![0; there as usize];
    let mut message = Message::default();
    message.add(Command::Write { offset: 0, data: &data });
    message.add(Command::Read { offset: 0, bytes: back });
    let mut us = Vec::new();
    let begin = Instant::now();
    while us.len() < FEWEST || begin.elapsed() < SPAN {
        let sent = Instant::now();
        ask(wire, host, &message)?;
        us.push(sent.elapsed().as_secs_f64() * 1e6);
    }
    // What other programs disturb takes longer.
    us.sort_by(f64::total_cmp);
    Ok(Trip { bytes, us: us[us.len() / 10] })
}

/// Sends a message, and waits for its answer.
fn ask(wire: &dyn Wire, host: usize, message: &Message) -> Result<Vec<u8>> {
    wire.send(host, Tag::Commands, message.bytes(), ANSWERING)?;
    let got = wire.receive(host, Tag::Answer, ANSWERING)?;
    let got = got.ok_or_else(|| {
        let minutes = ANSWERING.as_secs() / 60;
        Error::machine(format!("host {host} gives no answer for {minutes} minutes"))
    })?;
    answered(&got).map(<[u8]>::to_vec).map_err(|why| Error::machine(format!("host {host}: {why}")))
}

/// Answers the first host until it leaves.
fn echo(wire: &dyn Wire, says: &str) -> Result<()> {
    loop {
        // The launcher ends this process if the first host's ends.
        let Some(message) = wire.receive(0, Tag::Commands, LOOK)? else { continue };
        let mut data = Vec::new();
        for command in Commands::of(&message) {
            match command? {
                Command::Greet { .. } => data.extend(says.as_bytes()),
                Command::Read { bytes, .. } => data.resize(bytes as usize, 0),
                Command::Leave => return wire.send(0, Tag::Answer, &answer(&Ok(Vec::new())), ANSWERING),
                _ => {}
            }
        }
        wire.send(0, Tag::Answer, &answer(&Ok(data)), ANSWERING)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;
    use std::sync::mpsc::{Receiver, Sender, channel};

    /// An end of a connection of two threads.
    #[derive(Debug)]
    struct End {
        rank: usize,
        to: Sender<Vec<u8>>,
        from: Mutex<Receiver<Vec<u8>>>,
    }

    impl Wire for End {
        fn rank(&self) -> usize {
            self.rank
        }

        fn hosts(&self) -> usize {
            2
        }

        fn send(&self, _to: usize, _tag: Tag, bytes: &[u8], _wait: Duration) -> Result<()> {
            self.to.send(bytes.to_vec()).map_err(|e| Error::machine(e.to_string()))
        }

        fn receive(&self, _from: usize, _tag: Tag, wait: Duration) -> Result<Option<Vec<u8>>> {
            Ok(self.from.lock().unwrap().recv_timeout(wait).ok())
        }

        fn end_job(&self, why: &Error) -> ! {
            panic!("{why}")
        }
    }

    #[test]
    fn hosts_answer_with_what_was_asked() {
        let ((to_other, at_other), (to_first, at_first)) = (channel(), channel());
        let first = End { rank: 0, to: to_other, from: Mutex::new(at_first) };
        let other = End { rank: 1, to: to_first, from: Mutex::new(at_other) };
        std::thread::scope(|scope| {
            let served = scope.spawn(move || echo(&other, "a machine"));
            let peer = measure(&first, 1).unwrap();
            assert_eq!(peer.says, "a machine");
            for trips in [&peer.to, &peer.from] {
                assert!(trips.iter().map(|t| t.bytes).eq(SIZES) && trips.iter().all(|t| t.us > 0.0));
            }
            let mut message = Message::default();
            message.add(Command::Leave);
            first.send(1, Tag::Commands, message.bytes(), LOOK).unwrap();
            served.join().unwrap().unwrap();
        });
    }
}
