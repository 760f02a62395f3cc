//! Work on texts that the hosts of a job divide.
//!
//! All hosts run the same subcommand: each compiles the model for itself, and all take the same decisions. A text is
//! read in pieces, whose number does not depend on the number of hosts. Each piece is read by one host, and the first
//! host merges their results in the order of the pieces, so that sums round alike on any number of hosts. The first
//! host alone prints and writes.

use bincode::{Decode, Encode};
use moec_backend::Links;
use moec_base::error::{Error, Result};
use moec_base::hashing::sha256;
use moec_base::interrupt;
use moec_base::progress::Progress;
use moec_targets::backends;
use std::fmt::Write as _;

/// This process alone, or with those that a launcher of MPI started.
#[derive(Clone, Copy, Debug)]
pub struct Job<'a>(Option<&'a dyn Links>);

/// Runs a subcommand alone, or on every host of the job that this process belongs to.
///
/// # Errors
/// Those of `body`, and hosts that cannot be reached. An error of another host than the first ends the job.
pub fn run(progress: &Progress, body: impl Fn(Job<'_>, &Progress) -> Result<()>) -> Result<()> {
    let Some(links) = backends::job()? else { return body(Job::ALONE, progress) };
    let job = Job(Some(links.as_ref()));
    if job.is_first() {
        body(job, progress)?;
    } else {
        let mut done = Ok(());
        links.work(&mut || done = body(job, &Progress::muted()));
        if let Err(e) = done {
            interrupt::check()?;
            links.end_job(&e.to_string(), e.hint);
        }
    }
    links.leave().map_err(Error::from)
}

impl Job<'_> {
    /// No other hosts.
    pub const ALONE: Job<'static> = Job(None);

    /// Whether this host writes and prints.
    pub fn is_first(self) -> bool {
        self.0.is_none_or(Links::is_first)
    }

    fn hosts(self) -> usize {
        self.0.map_or(1, Links::hosts)
    }

    /// Whether this host computes a piece.
    pub fn computes(self, piece: usize) -> bool {
        piece % self.hosts() == self.0.map_or(0, Links::rank)
    }

    /// Computes pieces, each on one host, and merges them on the first in their order. `compute` gives what a piece
    /// consists of, part by part; `merge` gets the piece and a part of it.
    ///
    /// # Errors
    /// Those of both, and hosts that cannot be reached.
    pub fn in_order<P: Encode + Decode<()>>(
        self,
        pieces: usize,
        mut compute: impl FnMut(usize, &mut dyn FnMut(P) -> Result<()>) -> Result<()>,
        mut merge: impl FnMut(usize, P) -> Result<()>,
    ) -> Result<()> {
        for piece in 0..pieces {
            match self.0 {
                None => compute(piece, &mut |part| merge(piece, part))?,
                Some(links) if links.is_first() => {
                    if self.computes(piece) {
                        compute(piece, &mut |part| merge(piece, part))?;
                        continue;
                    }
                    let from = piece % links.hosts();
                    while let Some(part) = decode::<Option<P>>(&links.receive(from)?)? {
                        merge(piece, part)?;
                    }
                }
                Some(links) if self.computes(piece) => {
                    compute(piece, &mut |part| Ok(links.send(&encode(&Some(part))?)?))?;
                    links.send(&encode(&None::<P>)?)?;
                }
                Some(_) => {}
            }
        }
        Ok(())
    }

    /// Small results of pieces, each computed by one host, in their order on every host. `count` is called on the first
    /// host for each.
    ///
    /// # Errors
    /// Those of `compute`, and hosts that cannot be reached.
    pub fn all<P: Encode + Decode<()>>(
        self,
        pieces: usize,
        mut compute: impl FnMut(usize) -> Result<P>,
        count: impl Fn(),
    ) -> Result<Vec<P>> {
        let mut all = Vec::new();
        let merge = |_, result| {
            all.push(result);
            count();
            Ok(())
        };
        self.in_order(pieces, |piece, give| give(compute(piece)?), merge)?;
        self.broadcast(all)
    }

    /// A result of every host, in their order, on every host.
    ///
    /// # Errors
    /// Hosts that cannot be reached.
    pub fn each<P: Encode + Decode<()> + Clone>(self, own: &P) -> Result<Vec<P>> {
        self.all(self.hosts(), |_| Ok(own.clone()), || ())
    }

    /// The value of the first host, on every host.
    ///
    /// # Errors
    /// Hosts that cannot be reached.
    pub fn broadcast<T: Encode + Decode<()>>(self, own: T) -> Result<T> {
        match self.0 {
            None => Ok(own),
            Some(links) if links.is_first() => {
                links.broadcast(&encode(&own)?)?;
                Ok(own)
            }
            Some(links) => decode(&links.broadcast(&[])?),
        }
    }

    /// Checks that all hosts have the same version of moec, the same kind of CPU, and the same inputs.
    ///
    /// # Errors
    /// A host that differs, or cannot be reached.
    pub fn check_same(self, inputs: &impl Encode) -> Result<()> {
        let Some(links) = self.0 else { return Ok(()) };
        let cpu = moec_targets::target("native")?.info();
        let machine = (env!("CARGO_PKG_VERSION"), cpu.triple, cpu.cpu, cpu.features);
        let own = sha256(&encode(&(machine, inputs))?);
        if !links.is_first() {
            return Ok(links.send(&own)?);
        }
        let mut others = String::new();
        for host in 1..links.hosts() {
            if links.receive(host)? != own {
                let _ = write!(others, "{}host {host}", if others.is_empty() { "" } else { ", " });
            }
        }
        if others.is_empty() {
            return Ok(());
        }
        let what =
            format!("{others}: another model, text, kind of CPU or version of moec than the first host's");
        Err(Error::environment(what)
            .hint("all hosts of a job read the same files with the same moec, on CPUs of one kind"))
    }
}

/// Most bytes that a result takes in memory: more than the second moments of one input.
const MOST: usize = 16 << 30;

fn encode(value: &impl Encode) -> Result<Vec<u8>> {
    let config = bincode::config::standard();
    bincode::encode_to_vec(value, config).map_err(|e| Error::bug("a result cannot be sent").because(e))
}

#[expect(clippy::disallowed_methods, reason = "with a limit")]
fn decode<T: Decode<()>>(message: &[u8]) -> Result<T> {
    let config = bincode::config::standard().with_limit::<MOST>();
    let (value, _) = bincode::decode_from_slice(message, config)
        .map_err(|e| Error::bug("a result of another host cannot be read").because(e))?;
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use moec_backend::Peer;
    use std::sync::Mutex;
    use std::sync::mpsc::{Receiver, Sender, channel};

    /// Messages of one direction.
    #[derive(Debug)]
    struct Queue(Mutex<Sender<Vec<u8>>>, Mutex<Receiver<Vec<u8>>>);

    impl Queue {
        fn new(_: usize) -> Self {
            let (to, from) = channel();
            Self(Mutex::new(to), Mutex::new(from))
        }

        fn put(&self, message: &[u8]) {
            self.0.lock().unwrap().send(message.to_vec()).unwrap();
        }

        fn take(&self) -> Vec<u8> {
            self.1.lock().unwrap().recv().unwrap()
        }
    }

    /// A host of a job of threads: its rank, and messages of each host to the first and back.
    #[derive(Debug)]
    struct Host<'a>(usize, &'a [[Queue; 2]]);

    impl Links for Host<'_> {
        fn rank(&self) -> usize {
            self.0
        }

        fn hosts(&self) -> usize {
            self.1.len()
        }

        fn work(&self, work: &mut dyn FnMut()) {
            work();
        }

        fn send(&self, message: &[u8]) -> moec_runtime::Result<()> {
            self.1[self.0][0].put(message);
            Ok(())
        }

        fn receive(&self, from: usize) -> moec_runtime::Result<Vec<u8>> {
            Ok(self.1[from][0].take())
        }

        fn broadcast(&self, message: &[u8]) -> moec_runtime::Result<Vec<u8>> {
            if self.0 > 0 {
                return Ok(self.1[self.0][1].take());
            }
            self.1.iter().skip(1).for_each(|[_, back]| back.put(message));
            Ok(message.to_vec())
        }

        fn leave(&self) -> moec_runtime::Result<()> {
            Ok(())
        }

        fn end_job(&self, why: &str, _hint: Option<String>) -> ! {
            panic!("{why}")
        }

        fn meet(&self, _says: &str) -> moec_runtime::Result<Vec<Peer>> {
            Ok(Vec::new())
        }
    }

    /// The results of several hosts.
    fn on<T: Send>(hosts: usize, body: impl Fn(Job<'_>) -> T + Sync) -> Vec<T> {
        let queues: Vec<_> = (0..hosts).map(|_| [0, 1].map(Queue::new)).collect();
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..hosts)
                .map(|rank| {
                    let (queues, body) = (&queues, &body);
                    scope.spawn(move || body(Job(Some(&Host(rank, queues)))))
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    /// Parts of pieces in the order of their merge, and the pieces that this host computed.
    fn merged(job: Job<'_>, pieces: usize) -> (Vec<(usize, u32)>, Vec<usize>) {
        let (mut merged, mut computed) = (Vec::new(), Vec::new());
        job.in_order(
            pieces,
            |piece, give| {
                computed.push(piece);
                (0..3).take(piece % 3).try_for_each(give)
            },
            |piece, part| {
                merged.push((piece, part));
                Ok(())
            },
        )
        .unwrap();
        (merged, computed)
    }

    #[test]
    fn pieces_are_divided_and_merged_in_one_order() {
        let (want, all) = merged(Job::ALONE, 8);
        assert_eq!(all, (0..8).collect::<Vec<_>>());
        for hosts in [1, 2, 3, 11] {
            let found = on(hosts, |job| merged(job, 8));
            assert_eq!(found[0].0, want, "{hosts} hosts");
            assert!(found.iter().skip(1).all(|(merged, _)| merged.is_empty()));
            let mut computed: Vec<_> = found.into_iter().flat_map(|(_, computed)| computed).collect();
            computed.sort_unstable();
            assert_eq!(computed, all, "each piece once");
        }
    }

    #[test]
    fn results_are_the_same_on_every_host() {
        let squares = |job: Job<'_>| job.all(5, |piece| Ok(piece * piece), || ()).unwrap();
        let want = squares(Job::ALONE);
        assert!(on(3, squares).iter().all(|found| *found == want));
        let each = on(3, |job| job.each(&job.computes(1)).unwrap());
        assert!(each.iter().all(|found| *found == [false, true, false]));
        assert_eq!(Job::ALONE.each(&7).unwrap(), [7]);
        let firsts = on(2, |job| job.broadcast(job.is_first().then_some("first".to_owned())).unwrap());
        assert!(firsts.iter().all(|found| found.as_deref() == Some("first")));
    }

    #[test]
    fn host_with_other_inputs_is_named() {
        let found = on(3, |job| job.check_same(&job.computes(2)));
        let error = found[0].clone().unwrap_err();
        assert!(error.to_string().contains("host 2") && !error.to_string().contains("host 1"), "{error}");
        assert!(found[1..].iter().all(Result::is_ok));
        assert!(on(3, |job| job.check_same(&7_u32)).iter().all(Result::is_ok));
    }
}
