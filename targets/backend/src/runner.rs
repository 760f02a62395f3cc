//! Crates by which the `run` of a bundle drives units: they travel with its generated crate.

use include_dir::Dir;

/// Libraries of a bundle's program besides the runtime.
#[derive(Clone, Copy, Debug)]
pub struct Runner {
    /// Feature of the runner crate that adds the crates.
    pub feature: &'static str,
    /// Path of the constant with the units, a `moec_runtime::cli::Native`.
    pub native: &'static str,
    /// Part of the triples of machines that have such units; empty: any may.
    pub system: &'static str,
    /// Its crates, of which the last one has the constant.
    pub crates: &'static [RunnerCrate],
    /// Lock file of the runner crate with these: `runner.lock` in the folder of the last one. `MOEC_BLESS=1`
    /// renews it in the tests of bundles.
    pub lock: &'static str,
}

/// A crate of the workspace that travels along.
#[derive(Clone, Copy, Debug)]
pub struct RunnerCrate {
    /// Name of the package.
    pub name: &'static str,
    /// Text of its `Cargo.toml`.
    pub manifest: &'static str,
    /// Its folder `src`.
    pub sources: &'static Dir<'static>,
}
