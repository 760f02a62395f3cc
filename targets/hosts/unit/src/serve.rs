//! Every host but the first: it executes the steps of its unit as the first host orders them.

use crate::compile::digest;
use crate::limits::{report, timeout};
use crate::message::{Answer, Command, Commands, Message, reads_data};
use crate::mpi::Mpi;
use crate::remote::await_answer;
use crate::wire::{Tag, Wire};
use moec_runtime::bundle::program::{HOST_BACKEND, Program};
use moec_runtime::exec::unit_steps::UnitSteps;
use moec_runtime::{CheckLevel, Error, Result};
use std::path::Path;
use std::sync::OnceLock;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// Longest wait for commands at a time.
const LOOK: Duration = Duration::from_secs(1);
/// Time for the first host to take an answer.
const ANSWERING: Duration = Duration::from_hours(1);
/// Time between two signs of work.
const SIGN: Duration = Duration::from_millis(500);

/// Properties that two hosts must have alike: moec's version, the plan, and the instructions of its kernels.
pub(crate) fn name_of(program: &Program) -> String {
    let plan = program.encode().unwrap_or_default();
    let hash = digest(&[&plan]);
    let target = &program.target;
    format!(
        "moec {}, plan {hash:016x}, {} ({})",
        env!("CARGO_PKG_VERSION"),
        target.cpu,
        target.features.join(",")
    )
}

/// Units of other hosts than the first, in the order of the hosts' ranks from 1.
pub fn units_of_hosts(program: &Program) -> impl Iterator<Item = u32> + '_ {
    (0..).zip(&program.units).filter(|(_, unit)| unit.backend == HOST_BACKEND).map(|(index, _)| index)
}

/// Lets all other hosts end, and then this process's part of MPI. A host that does not answer ends the job.
///
/// # Errors
/// MPI's own.
pub fn leave(mpi: &Mpi) -> Result<()> {
    if mpi.rank() == 0 {
        let (mut message, timeout) = (Message::default(), timeout()?);
        message.add(Command::Leave);
        (1..mpi.hosts()).try_for_each(|to| mpi.send(to, Tag::Commands, message.bytes(), timeout))?;
        // MPI's own end would wait for a host that has stopped.
        for from in 1..mpi.hosts() {
            let answer = await_answer(mpi, from, &format!("host {from}"), timeout, &mut Vec::new());
            answer.unwrap_or_else(|e| mpi.end_job(&e));
            // Some MPIs warn of messages that nothing received.
            while mpi.receive(from, Tag::Alive, Duration::ZERO, &mut Vec::new())? {}
        }
    }
    mpi.end()
}

/// Part of a program that a host executes.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    /// Folder of its weights.
    pub bundle: &'a Path,
    /// Index of its unit; `None`: more processes were started than the program has hosts.
    pub unit: Option<u32>,
    /// Threads; `None`: as [`UnitSteps::open`].
    pub threads: Option<usize>,
    /// Extent of the checks of its weights.
    pub check: CheckLevel,
}

/// Executes a part of a program until the first host leaves.
///
/// # Errors
/// A first host that cannot be reached; a launcher that has ended. Other errors, such as those of
/// [`UnitSteps::open`], go to the first host.
pub fn serve(wire: &dyn Wire, program: &Program, part: Part<'_>) -> Result<()> {
    let mut steps = match part.unit {
        Some(unit) => {
            giving_signs(wire, || UnitSteps::open(program, unit, part.bundle, part.threads, part.check))
        }
        None => Err(Error::machine("this process has no part of the program")),
    };
    let (mut message, mut answer) = (Vec::new(), Answer::default());
    loop {
        await_commands(wire, &mut message)?;
        let (mut sign, mut answers) = (Instant::now(), false);
        answer.clear();
        let mut obey = || -> Result<bool> {
            for command in Commands::of(&message) {
                match command? {
                    Command::Greet { program: theirs } => {
                        answers = true;
                        let own = name_of(program);
                        if own.as_bytes() != theirs {
                            let theirs = String::from_utf8_lossy(theirs);
                            return Err(Error::Bundle(format!("it runs {own}, and the first host {theirs}")));
                        }
                        ready(&mut steps)?;
                        answer.add(machine().as_bytes());
                    }
                    Command::Leave => return Ok(false),
                    Command::Write { offset, data } => ready(&mut steps)?.write(offset, data)?,
                    Command::Zero { offset, bytes } => ready(&mut steps)?.zero(offset, bytes)?,
                    Command::Copy { from, to, bytes } => ready(&mut steps)?.copy(from, to, bytes)?,
                    Command::Execute { entry, step, rows, seq_len } => {
                        ready(&mut steps)?.execute(entry, step, rows as usize, seq_len as usize)?;
                        if sign.elapsed() > SIGN {
                            wire.send(0, Tag::Alive, &[], ANSWERING)?;
                            sign = Instant::now();
                        }
                    }
                    Command::Disk => {
                        answers = true;
                        answer.add(&reads_data(ready(&mut steps)?.reads().unwrap_or_default()));
                    }
                    Command::Read { offset, bytes } => {
                        answers = true;
                        answer.add(ready(&mut steps)?.read(offset, bytes)?);
                    }
                }
            }
            Ok(true)
        };
        let goes_on = match obey() {
            Ok(true) if !answers => continue,
            Ok(goes_on) => goes_on,
            // The first host learns of it by the answer, and ends the job.
            Err(e) => {
                answer.refuse(&e);
                true
            }
        };
        wire.send(0, Tag::Answer, answer.bytes(), ANSWERING)?;
        if !goes_on {
            return Ok(());
        }
    }
}

/// Receives the next message of the first host, however long it takes.
///
/// # Errors
/// A first host that cannot be reached; a launcher that has ended.
pub fn await_commands(wire: &dyn Wire, message: &mut Vec<u8>) -> Result<()> {
    check_launcher()?;
    while !wire.receive(0, Tag::Commands, LOOK, message)? {
        check_launcher()?;
    }
    Ok(())
}

/// Checks that the process that started this one runs since the first call. The launcher ends this process if the first
/// host's ends; nothing does if the launcher ends.
///
/// # Errors
/// It has ended.
fn check_launcher() -> Result<()> {
    static LAUNCHER: OnceLock<libc::pid_t> = OnceLock::new();
    if *LAUNCHER.get_or_init(parent) == parent() {
        Ok(())
    } else {
        Err(Error::machine("the launcher of this process has ended"))
    }
}

/// Name of this machine.
pub fn machine() -> String {
    let mut name = [0_u8; 256];
    // SAFETY: writes at most so many bytes.
    let failed = unsafe { libc::gethostname(name.as_mut_ptr().cast(), name.len()) } != 0;
    let end = name.iter().position(|&byte| byte == 0).filter(|_| !failed).unwrap_or(0);
    String::from_utf8_lossy(name.get(..end).unwrap_or_default()).into_owned()
}

/// The process that started this one, or that took it over.
pub(crate) fn parent() -> libc::pid_t {
    // SAFETY: takes nothing and cannot fail.
    unsafe { libc::getppid() }
}

/// The steps, if they could be opened.
fn ready<'a, 'p>(steps: &'a mut Result<UnitSteps<'p>>) -> Result<&'a mut UnitSteps<'p>> {
    steps.as_mut().map_err(|e| Error::Bundle(e.to_string()))
}

/// Does long work, and gives signs of it meanwhile: weights may take minutes to read. Ends this process if its launcher has
/// ended.
pub fn giving_signs<T>(wire: &dyn Wire, work: impl FnOnce() -> T) -> T {
    let (done, ended) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            while ended.recv_timeout(SIGN) == Err(RecvTimeoutError::Timeout) {
                if let Err(e) = check_launcher() {
                    report(&e);
                    // SAFETY: ends the process, whose work may wait for a host that has ended, too.
                    unsafe { libc::_exit(1) };
                }
                // A first host that is gone is found when its commands are waited for.
                let _ = wire.send(0, Tag::Alive, &[], ANSWERING);
            }
        });
        let result = work();
        drop(done);
        result
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    /// Counts signs.
    #[derive(Debug, Default)]
    struct Signs(AtomicU32);

    impl Wire for Signs {
        fn rank(&self) -> usize {
            1
        }

        fn hosts(&self) -> usize {
            2
        }

        fn send(&self, to: usize, tag: Tag, bytes: &[u8], _wait: Duration) -> Result<()> {
            assert_eq!((to, tag, bytes), (0, Tag::Alive, &[][..]));
            self.0.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }

        fn receive(&self, _from: usize, _tag: Tag, _wait: Duration, _message: &mut Vec<u8>) -> Result<bool> {
            Ok(false)
        }

        fn end_job(&self, why: &Error) -> ! {
            panic!("{why}")
        }
    }

    #[test]
    fn host_that_reads_its_weights_gives_signs() {
        let wire = Signs::default();
        assert_eq!(giving_signs(&wire, || 7), 7);
        assert_eq!(wire.0.load(Ordering::Relaxed), 0);
        giving_signs(&wire, || std::thread::sleep(SIGN * 3 + SIGN / 2));
        assert!((2..=3).contains(&wire.0.load(Ordering::Relaxed)));
    }
}
