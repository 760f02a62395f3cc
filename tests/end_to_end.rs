//! End-to-end tests of the real binary, in one program, since each program would link all of moec. Each file
//! is a module, which `cargo xtask test` treats as a separate program: `cargo xtask test golden`.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod support;

mod aarch64;
mod amx;
mod apple;
mod approximations;
mod bad_input;
mod budget;
mod caches;
mod calibrate;
mod chat;
mod contracts;
mod coreml;
mod cuda;
mod decode;
mod deploy;
mod device;
mod documents;
mod evaluator;
mod fault_injection;
mod filetests;
mod fit;
mod fuse;
mod gates_on_disk;
mod gguf;
mod golden;
mod gpu_driver;
mod host_budgets;
mod host_costs;
mod host_faults;
mod host_goldens;
mod host_heads;
mod host_links;
mod host_placements;
mod host_serving;
mod host_texts;
mod hosts;
mod hub;
mod hybrid;
mod linking;
mod measure;
mod mirror;
mod mix;
mod ndp;
mod neurons;
mod neurons_on_disk;
mod numa;
mod page;
mod paging;
mod passes;
mod placement;
mod predictors;
mod prefixes;
mod qnn;
mod quantised;
mod replace;
mod report;
mod reproducible;
mod reuse;
mod routing;
mod rules;
mod serve;
mod simulate;
mod targets;
mod thresholds;
mod trust;
mod tune;
mod untrusted;
mod weights;
mod windows;

/// Program of the process that renders templates: this program, run with the name of this test.
#[test]
fn bounded_worker() {
    moec_service::worker::run().unwrap();
}
