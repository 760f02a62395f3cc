//! The processes of a job: work that they divide, and their connections, measured with the messages that runs exchange.
#![expect(clippy::cast_possible_truncation, reason = "sizes of messages")]

use moec_backend::links::{Links, Peer, Trip};
use moec_hosts_unit::message::{Answer, Command, Commands, Message, answered};
use moec_hosts_unit::mpi::Mpi;
use moec_hosts_unit::{
    Delayed, Tag, Wire, await_answer, await_commands, giving_signs, leave, machine, receive_whole,
    send_whole, timeout,
};
use moec_runtime::{Error, Result};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Sizes of measured messages.
const SIZES: [u64; 7] = [64, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20];
/// Fewest messages of each size, and how long more of them are sent.
const FEWEST: usize = 20;
const SPAN: Duration = Duration::from_millis(700);
/// Longest time to go on while other programs disturb all messages of a size.
const LONGEST: Duration = Duration::from_secs(30);
/// Time for a host to measure itself, and to answer.
const ANSWERING: Duration = Duration::from_mins(10);

/// The processes of a job.
#[derive(Debug)]
pub(crate) struct Job(pub(crate) Arc<Mpi>);

impl Links for Job {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn hosts(&self) -> usize {
        self.0.hosts()
    }

    fn work(&self, work: &mut dyn FnMut()) {
        giving_signs(self.0.as_ref(), work);
    }

    fn send(&self, message: &[u8]) -> Result<()> {
        // The first host takes it after work of its own, however long that is.
        send_whole(self.0.as_ref(), 0, Tag::Answer, message, Duration::MAX)
    }

    fn receive(&self, from: usize) -> Result<Vec<u8>> {
        let (wire, host, timeout) = (self.0.as_ref(), format!("host {from}"), timeout()?);
        receive_whole(|part| await_answer(wire, from, &host, timeout, part))
    }

    fn broadcast(&self, message: &[u8]) -> Result<Vec<u8>> {
        let wire: &Mpi = &self.0;
        if !self.is_first() {
            return receive_whole(|part| await_commands(wire, part));
        }
        let timeout = timeout()?;
        (1..wire.hosts()).try_for_each(|to| send_whole(wire, to, Tag::Commands, message, timeout))?;
        Ok(message.to_vec())
    }

    fn leave(&self) -> Result<()> {
        if !self.is_first() {
            echo(self.0.as_ref(), "")?;
        }
        leave(&self.0)
    }

    fn end_job(&self, why: &str, hint: Option<String>) -> ! {
        let error = Error::machine(format!("host {} (`{}`): {why}", self.rank(), machine()));
        self.0.end_job(&match hint {
            Some(hint) => error.with_hint(hint),
            None => error,
        })
    }

    fn meet(&self, says: &str) -> Result<Vec<Peer>> {
        let wire: &Mpi = &self.0;
        let met: Result<Vec<Peer>> = if self.is_first() {
            (1..wire.hosts()).map(|host| measure(wire, host)).collect()
        } else {
            Delayed::from_environment(wire).and_then(|wire| echo(&wire, says)).map(|()| Vec::new())
        };
        met.and_then(|peers| leave(wire).map(|()| peers))
    }
}

/// Asks a host what it says, and measures the connection with it.
fn measure(wire: &dyn Wire, host: usize) -> Result<Peer> {
    let mut message = Message::default();
    message.add(Command::Greet { program: &[] });
    let says = String::from_utf8_lossy(&ask(wire, host, &message)?).into_owned();
    Ok(Peer { says, to: trips(wire, host, true)?, from: trips(wire, host, false)? })
}

/// Measures messages of each size to a host (`to`), or answers of it, in turns. The least time of a size counts: what
/// other programs disturb takes longer.
fn trips(wire: &dyn Wire, host: usize, to: bool) -> Result<Vec<Trip>> {
    let messages = SIZES.map(|bytes| {
        let (there, back) = if to { (bytes, 0) } else { (0, bytes) };
        let mut message = Message::default();
        message.add(Command::Write { offset: 0, data: &vec![0; there as usize] });
        message.add(Command::Read { offset: 0, bytes: back });
        message
    });
    let mut trips = SIZES.map(|bytes| Trip { bytes, us: f64::INFINITY });
    let begin = Instant::now();
    for turn in 0.. {
        for (trip, message) in trips.iter_mut().zip(&messages) {
            let sent = Instant::now();
            ask(wire, host, message)?;
            trip.us = trip.us.min(sent.elapsed().as_secs_f64() * 1e6);
        }
        let enough = turn >= FEWEST && begin.elapsed() >= SPAN && Trip::gb_per_s(&trips).is_some();
        if enough || begin.elapsed() >= LONGEST {
            break;
        }
    }
    Ok(trips.to_vec())
}

/// Sends a message, and waits for its answer.
fn ask(wire: &dyn Wire, host: usize, message: &Message) -> Result<Vec<u8>> {
    wire.send(host, Tag::Commands, message.bytes(), ANSWERING)?;
    let mut got = Vec::new();
    if !wire.receive(host, Tag::Answer, ANSWERING, &mut got)? {
        let minutes = ANSWERING.as_secs() / 60;
        return Err(Error::machine(format!("host {host} gives no answer for {minutes} minutes")));
    }
    answered(&got).map(<[u8]>::to_vec).map_err(|why| Error::machine(format!("host {host}: {why}")))
}

/// Answers the first host until it leaves.
fn echo(wire: &dyn Wire, says: &str) -> Result<()> {
    let (mut message, mut answer) = (Vec::new(), Answer::default());
    let mut goes_on = true;
    while goes_on {
        await_commands(wire, &mut message)?;
        answer.clear();
        for command in Commands::of(&message) {
            match command? {
                Command::Greet { .. } => answer.add(says.as_bytes()),
                Command::Read { bytes, .. } => answer.add(&vec![0; bytes as usize]),
                Command::Leave => goes_on = false,
                _ => {}
            }
        }
        wire.send(0, Tag::Answer, answer.bytes(), ANSWERING)?;
    }
    Ok(())
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

        fn receive(&self, _from: usize, _tag: Tag, wait: Duration, message: &mut Vec<u8>) -> Result<bool> {
            let came = self.from.lock().unwrap().recv_timeout(wait).map(|found| *message = found);
            Ok(came.is_ok())
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
            first.send(1, Tag::Commands, message.bytes(), ANSWERING).unwrap();
            served.join().unwrap().unwrap();
        });
    }
}
