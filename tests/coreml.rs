//! Core ML packages of whole models: golden checkpoints built for a Mac with a Neural Engine, the packages
//! compared with the checkpoint and checked by the rules, and every function executed.
//!
//! These tests are skipped if coremltools is not installed.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test fails by panicking, and says what it skips"
)]

#[path = "coreml/case.rs"]
mod case;
#[path = "coreml/decode.rs"]
mod decode;
#[path = "coreml/engine.rs"]
mod engines;
#[path = "coreml/golden.rs"]
mod golden;
#[path = "coreml/limits.rs"]
mod limits;
#[path = "coreml/parts.rs"]
mod of_parts;
#[path = "coreml/stored.rs"]
mod stored;
use crate::support;
#[path = "coreml/weights.rs"]
mod weights;

use case::{Case, ON_NPU, SETUP, engine, small};
use half::{bf16, f16};
use moec_base::progress::Progress;
use moec_bundle::read::Bundle;
use moec_config::Config;
use moec_coreml::check;
use moec_coreml::package::{Dtype, Function, Origin as Made, Package};
use moec_coreml::program::Rules;
use moec_coreml::subgraphs::{self, CoreMlSubgraph};
use moec_device::{CacheWrite, Choice, Device, UnitKind};
use moec_import::ImportOptions;
use moec_ir::Op;
use moec_ir::plan::Plan;
use moec_measure::host_build::HostBuild;
use moec_pipeline::{Compilation, Inputs, Stops};
use moec_profile::{Chunk, Origin, Profile, Reading, Routes, Routing, Trace};
use moec_runtime::exec::overflow::OverflowCounters;
use moec_runtime::{Decoder, Engine, LogitRows, Request, Sampler, Sampling, best_of, generate};
use safetensors::{Dtype as Stored, SafeTensors};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use support::{Setup, cache, checkpoint, coreml, expected, fails, list, logits_file, moec, ok, tree};
use tempfile::TempDir;
use weights::{Matrix, Weights};
