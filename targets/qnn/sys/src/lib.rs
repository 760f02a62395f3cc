//! Interface to QNN, Qualcomm's library for the Hexagon tensor processor (HTP). Graphs are composed, compiled
//! for a chip, executed by the library's emulator of it, and saved as context binaries and DLC. See
//! `docs/qnn.md`.
//!
//! The library is loaded while the program runs, from where it is [installed](find). A [graph] is data,
//! checked in itself; a [`Context`] composes it. QNN is foreign code and may crash on unexpected input. So
//! moec calls it in [a process of its own](worker), which takes the same graphs and gives the same results.
#![cfg_attr(test, allow(clippy::cast_possible_truncation, reason = "numbers of tests are small"))]

mod abi;
mod call;
mod error;
pub mod find;
pub mod graph;
mod soc;
pub mod worker;

pub use call::{Backend, BinaryInfo, Context, Device, Graph, GraphInfo, System, TensorInfo, write_dlc};
pub use error::{Error, INSTALL, LIMIT, Result, VARIABLE};
pub use find::Installation;
pub use graph::{DType, Data, GraphSpec, Node, Options, Param, Quant, Role, Scalar, TensorId, TensorSpec};
pub use soc::{SNAPDRAGON_8_GEN_3, SNAPDRAGON_8_PLUS_GEN_1, SOCS, Soc};
