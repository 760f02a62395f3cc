//! Every host but the first: it executes the steps of its unit as the first host orders them.

use crate::compile::digest;
use crate::message::{Command, Commands, Message, answer};
use crate::mpi::Mpi;
use crate::wire::{Tag, Wire};
use moec_runtime::bundle::program::Program;
use moec_runtime::exec::unit_steps::UnitSteps;
use moec_runtime::{Error, Result};
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// Longest wait for commands at a time.
const LOOK: Duration = Duration::from_secs(1);
/// Time for the first host to take an answer, and for a host to take the farewell.
const ANSWERING: Duration = Duration::from_hours(1);
const LEAVING: Duration = Duration::from_mins(1);
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

/// Backend of units of other hosts.
pub const BACKEND: &str = "host";

/// Units of other hosts than the first, in the order of the hosts' ranks from 1.
pub fn units_of_hosts(program: &Program) -> impl Iterator<Item = u32> + '_ {
    (0..).zip(&program.units).filter(|(_, unit)| unit.backend == BACKEND).map(|(index, _)| index)
}

/// Lets all other hosts end, and then this process's part of MPI.
///
/// # Errors
/// MPI's own.
pub fn leave(mpi: &Mpi) -> Result<()> {
    if mpi.rank() == 0 {
        let mut message = Message::default();
        message.add(Command::Leave);
        (1..mpi.hosts()).try_for_each(|to| mpi.send(to, Tag::Commands, message.bytes(), LEAVING))?;
    }
    mpi.end()
}

/// Executes the steps of a unit until the first host leaves.
///
/// # Errors
/// As [`UnitSteps::open`]; a first host that cannot be reached, or has another program.
pub fn serve(
    wire: &dyn Wire,
    program: &Program,
    unit: u32,
    bundle: &Path,
    threads: Option<usize>,
) -> Result<()> {
    let mut steps = open(wire, program, unit, bundle, threads);
    let mut sign = Instant::now();
    loop {
        // The launcher ends this process if the first host's ends.
        let Some(message) = wire.receive(0, Tag::Commands, LOOK)? else { continue };
        let (mut data, mut answers) = (Vec::new(), false);
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
                    }
                    Command::Leave => return Ok(false),
                    Command::Write { offset, data } => ready(&mut steps)?.write(offset, data)?,
                    Command::Execute { entry, step, rows, seq_len } => {
                        ready(&mut steps)?.execute(entry, step, rows as usize, seq_len as usize)?;
                        if sign.elapsed() > SIGN {
                            wire.send(0, Tag::Alive, &[], ANSWERING)?;
                            sign = Instant::now();
                        }
                    }
                    Command::Read { offset, bytes } => {
                        answers = true;
                        data.extend(ready(&mut steps)?.read(offset, bytes)?);
                    }
                }
            }
            Ok(true)
        };
        let obeyed = obey();
        match obeyed {
            Ok(false) => return Ok(()),
            Ok(true) if answers => wire.send(0, Tag::Answer, &answer(&Ok(data)), ANSWERING)?,
            Ok(true) => {}
            // The first host learns of it by the answer, and ends the job.
            Err(e) => wire.send(0, Tag::Answer, &answer(&Err(e)), ANSWERING)?,
        }
    }
}

/// The steps, if they could be opened.
fn ready<'a, 'p>(steps: &'a mut Result<UnitSteps<'p>>) -> Result<&'a mut UnitSteps<'p>> {
    steps.as_mut().map_err(|e| Error::Bundle(e.to_string()))
}

/// Opens the steps, and gives signs of work meanwhile: weights may take minutes to read.
fn open<'p>(
    wire: &dyn Wire,
    program: &'p Program,
    unit: u32,
    bundle: &Path,
    threads: Option<usize>,
) -> Result<UnitSteps<'p>> {
    let (opened, ended) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            while ended.recv_timeout(SIGN) == Err(RecvTimeoutError::Timeout) {
                // A first host that is gone is found when its commands are waited for.
                let _ = wire.send(0, Tag::Alive, &[], ANSWERING);
            }
        });
        let steps = UnitSteps::open(program, unit, bundle, threads);
        drop(opened);
        steps
    })
}
