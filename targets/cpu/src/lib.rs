//! The CPU target family: emitter and host executor.
