//! Compiles the part of `run` that is the same for all bundles (`prebuilt/`), for moec to embed.
//!
//! A cargo of its own builds it, since it needs other settings than moec: optimised whatever moec's profile
//! is, ended by panics, and without this machine's paths. What it compiles is kept beside the target folder's
//! profiles, so that checks, lints, debug and release builds share it and nothing is compiled twice; where
//! none of its sources ([`watch`]) has changed, cargo does not run this at all. It needs no network beyond
//! what moec's own dependencies need.
//!
//! If [`GIVEN`] names such a library, that one is embedded, and nothing is compiled here: `cargo xtask test`
//! and `cargo xtask demo` make it of what moec itself links, and are done sooner.
//!
//! Without the feature `prebuilt`, and for systems other than Linux, nothing is embedded: `run` is then
//! built by cargo from the bundle's `runner/`.

use std::collections::BTreeSet;
use std::env;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Names the static library of `prebuilt/` that is embedded.
const GIVEN: &str = "MOEC_PREBUILT";

/// Files that decide what is built, beside the packages of the library; relative to the workspace.
const WORKSPACE: &[&str] = &["Cargo.toml", "Cargo.lock"];

/// Variables that describe the outer build and would leak into the inner one: whole names, or all that begin
/// so.
const LEAKS: &[&str] = &[
    "CARGO_BUILD_*",
    "CARGO_CFG_*",
    "CARGO_ENCODED_RUSTFLAGS",
    "CARGO_FEATURE_*",
    "CARGO_INCREMENTAL",
    "CARGO_MANIFEST_*",
    "CARGO_PKG_*",
    "CARGO_PRIMARY_PACKAGE",
    "CARGO_PROFILE_*",
    "CARGO_TARGET_DIR",
    "CARGO_UNSTABLE_*",
    "CLIPPY_ARGS",
    "DEBUG",
    "DEP_*",
    "HOST",
    "NUM_JOBS",
    "OPT_LEVEL",
    "OUT_DIR",
    "PROFILE",
    "RUSTC_LINKER",
    "RUSTC_WORKSPACE_WRAPPER",
    "RUSTC_WRAPPER",
    "RUSTDOCFLAGS",
    "RUSTFLAGS",
    "TARGET",
];

/// Flags that leave out sections that `main` does not reach; linkers that cannot do it link everything.
const PARTIAL_LINKS: &[&[&str]] = &[&["-Wl,--gc-sections,--entry=main"], &[]];

/// Compression of what is embedded, of 10: for a moec that is kept, and for one that is built to be tried.
const EFFORT: u8 = 9;
const LITTLE_EFFORT: u8 = 1;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> Result<()> {
    println!("cargo::rustc-check-cfg=cfg(prebuilt)");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed={GIVEN}");
    let is = |variable: &str, value: &str| env::var(variable).is_ok_and(|v| v == value);
    let enabled = env::var_os("CARGO_FEATURE_PREBUILT").is_some();
    if !enabled || !is("CARGO_CFG_TARGET_OS", "linux") || !is("CARGO_CFG_TARGET_ENV", "gnu") {
        return Ok(());
    }
    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("../..").canonicalize()?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let (library, effort) = if let Some(given) = env::var_os(GIVEN) {
        println!("cargo::rerun-if-changed={}", given.display());
        (PathBuf::from(given), LITTLE_EFFORT)
    } else {
        let library = library(&root, &prebuilt_folder(&out))?;
        watch(&root, &library.with_extension("d"))?;
        (library, EFFORT)
    };
    let object = out.join("prebuilt.o");
    link(&library, &object)?;
    let packed = miniz_oxide::deflate::compress_to_vec(&fs::read(&object)?, effort);
    fs::write(out.join("prebuilt.o.deflate"), packed)?;
    fs::remove_file(&object)?;
    println!("cargo::rustc-cfg=prebuilt");
    Ok(())
}

/// Folder of compiled code: `TARGET/prebuilt` of `TARGET/PROFILE/build/moec-bundle-HASH/out`.
fn prebuilt_folder(out: &Path) -> PathBuf {
    let mut above = out.ancestors().skip(2);
    let usual = above.next().and_then(Path::file_name).is_some_and(|n| n == "build");
    above.nth(1).filter(|_| usual).map_or_else(|| out.join("target"), |target| target.join("prebuilt"))
}

/// The static library, built below `target`.
fn library(root: &Path, target: &Path) -> Result<PathBuf> {
    let triple = env::var("TARGET")?;
    let cargo_home =
        env::var_os("CARGO_HOME").map(PathBuf::from).or_else(|| Some(env::home_dir()?.join(".cargo")));
    let paths = [(Some(root), "/moec"), (cargo_home.as_deref(), "/cargo"), (Some(target), "/target")];
    let flags = paths
        .iter()
        .filter_map(|(from, to)| Some(format!("--remap-path-prefix={}={to}", (*from)?.display())));
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo
        .current_dir(root)
        .args([
            "build",
            "--locked",
            "--package",
            "moec-prebuilt",
            "--profile",
            "prebuilt",
            "--target",
            &triple,
        ])
        .arg("--target-dir")
        .arg(target);
    for (name, _) in env::vars_os() {
        let leaks = name.to_str().is_some_and(|name| {
            LEAKS.iter().any(|l| l.strip_suffix('*').map_or(name == *l, |start| name.starts_with(start)))
        });
        if leaks {
            cargo.env_remove(name);
        }
    }
    cargo.env("CARGO_ENCODED_RUSTFLAGS", flags.collect::<Vec<_>>().join("\u{1f}"));
    run(&mut cargo)?;
    Ok(target.join(triple).join("prebuilt/libmoec_prebuilt.a"))
}

/// Has cargo run this again where a package of the library has changed. `list` is cargo's list of the sources
/// that it was made of: `LIBRARY: FILE FILE …`, with a backslash before each space in a path.
fn watch(root: &Path, list: &Path) -> Result<()> {
    let listed = fs::read_to_string(list)?.replace("\\ ", "\0");
    let files = listed.split_whitespace().skip(1).map(|path| PathBuf::from(path.replace('\0', " ")));
    let folder = |file: PathBuf| Some(file.ancestors().find(|at| at.join("Cargo.toml").exists())?.to_owned());
    let packages: BTreeSet<PathBuf> = files.filter_map(folder).collect();
    let parts = packages.iter().flat_map(|package| ["Cargo.toml", "src"].map(|part| package.join(part)));
    for path in parts.chain(WORKSPACE.iter().map(|part| root.join(part))) {
        println!("cargo::rerun-if-changed={}", path.display());
    }
    Ok(())
}

/// One object of all that `main` reaches.
fn link(library: &Path, object: &Path) -> Result<()> {
    let mut last = Ok(());
    for flags in PARTIAL_LINKS {
        let mut cc = Command::new("cc");
        cc.args(["-r", "-nostdlib", "-Wl,--strip-debug,--undefined=main"]).args(*flags);
        cc.arg("-o").arg(object).arg(library);
        last = run(&mut cc);
        if last.is_ok() {
            break;
        }
    }
    last
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output().map_err(|e| format!("cannot start {command:?}: {e}"))?;
    if output.status.success() {
        return Ok(());
    }
    let why = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(format!(
        "{command:?} failed:\n{why}\nhint: moec can be built without a precompiled runtime: \
         `--no-default-features --features llvm22`"
    )
    .into())
}
