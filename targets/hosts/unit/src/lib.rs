//! Several hosts as one device, through MPI: the first host runs the program, the others execute the steps of
//! their units.
//!
//! [`Remote`] is such a unit as the first host sees it. [`serve`] is what every other host does. They exchange
//! [`message`]s through a [`Wire`]: what a call's steps read goes to a host in one message, and what they write comes
//! back in another. Each host reads its own weights from its own files.
//!
//! MPI starts the processes, connects them and ends them together. It is loaded when a program of several hosts
//! is started by its launcher ([`mpi`]); nothing links to it.
#![expect(
    clippy::cast_possible_truncation,
    reason = "indices of a plan, and sizes of messages, which are bounded"
)]
#![expect(clippy::cast_possible_wrap, reason = "MPI counts by `int`; messages and ranks are fewer")]

mod compile;
mod delay;
mod launcher;
mod limits;
pub mod message;
pub mod mpi;
mod parts;
mod remote;
mod serve;
mod wire;

pub use compile::library;
pub use delay::{DELAY_VARIABLE, Delayed};
pub use limits::{TIMEOUT_VARIABLE, timeout};
pub use parts::{receive_whole, send_whole};
pub use remote::{Remote, await_answer};
pub use serve::{Part, await_commands, giving_signs, leave, machine, serve, units_of_hosts};
pub use wire::{Tag, Wire};

/// Variables that launchers set for every process: Open MPI, MPICH and Slurm.
const LAUNCHED: [&str; 3] = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"];

/// Number of processes that a launcher of MPI started this one with; `None` without a launcher.
pub fn launched() -> Option<usize> {
    LAUNCHED.iter().find_map(|name| std::env::var(name).ok()?.parse().ok()).filter(|&n| n > 1)
}
