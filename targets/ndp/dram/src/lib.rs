//! A cycle-level model of DDR5 memory and its controllers: when each command to a rank is sent, and so how
//! long streams of lines of 64 bytes take.
//!
//! | to | use |
//! |---|---|
//! | run a trace of requests | [`trace::simulate`] |
//! | know how long an expert takes over a module's private buses, or over the host's channel | [`Channel`] |
//! | simulate a unit whose requests depend on earlier data | [`Bus`] |
//! | serve streams of several masters | [`serve`] |
//! | go clock by clock | [`Controller`] |
//!
//! Clocks are those of the memory bus ([`Timing::mhz`]) and count from 1. `docs/ndp-dram.md` says what is
//! modelled, where its constants come from, and what it was compared with.
#![cfg_attr(test, allow(clippy::cast_possible_truncation, reason = "numbers of tests are small"))]

mod bus;
mod chips;
mod command;
mod controller;
mod geometry;
mod layout;
mod port;
mod serve;
mod stream;
mod timing;
pub mod trace;

pub use bus::Bus;
pub use command::{COMMANDS, Clock, Command};
pub use controller::{Controller, HOST, Issued, Options};
pub use geometry::{Address, Geometry, Kind, Request};
pub use layout::{Axis, Layout};
pub use port::{Offer, PATIENCE};
pub use serve::{Feed, Served, serve};
pub use stream::{Channel, Path, Placement, Together};
pub use timing::{RFC1_NS, TIMINGS, Timing};
