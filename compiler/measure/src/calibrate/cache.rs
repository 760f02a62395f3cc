//! The profile that a build uses, and the importance of weights that follows from it. The profile is the one
//! that `model.toml` names, or is recorded from its texts.
//!
//! A profile that a build records itself is kept in the cache under a hash of everything that it depends on.

use super::{Request, WINDOW, calibrate, read_texts};
use crate::job::Job;
use moec_base::cache_dir;
use moec_base::error::{Error, Result};
use moec_base::hashing::{hex, sha256};
use moec_base::progress::Progress;
use moec_bundle::manifest::ProfileEntry;
use moec_config::Config;
use moec_ir::Module;
use moec_passes::decisions::ExpertUse;
use moec_pipeline::Inputs;
use moec_profile::importance::too_few;
use moec_profile::{Importance, Origin, Profile, file};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// Returns the profile for a build: the one that `model.toml` names, else that of its texts. `None` if
/// `model.toml` has no calibration.
///
/// # Errors
/// Fails if a profile is invalid or of another model, or if the calibration fails.
pub fn profile(c: &Inputs<'_>, job: Job<'_>, progress: &Progress) -> Result<Option<Profile>> {
    let origin = || Origin::of(c.checkpoint()?, c.spec()?);
    Ok(match &c.config.calibrate.profile {
        Some(path) => Some(named(path, &origin()?)?),
        None if !c.config.calibrate.text.is_empty() => Some(cached(c, &origin()?, job, progress)?),
        None => None,
    })
}

/// Reads a profile from a file, and checks that it is of this model.
fn named(path: &Path, origin: &Origin) -> Result<Profile> {
    let profile = Profile::read(path)?;
    profile.origin.must_be(origin, &path.display().to_string())?;
    Ok(profile)
}

/// Parts of a profile that a build uses for its weights.
#[derive(Debug)]
pub struct Weighed {
    /// Importance of the weights.
    pub importance: Importance,
    /// Name and hash of the profile.
    pub entry: ProfileEntry,
    /// Number of times that each expert was chosen.
    pub expert_use: Vec<ExpertUse>,
}

/// Returns the importance of weights for a build, and its profile. `None` if `model.toml` has no calibration,
/// or if no weight is rounded enough for importance to matter.
///
/// # Errors
/// Fails if a profile is invalid or of another model, or if the calibration fails.
pub fn importance(
    c: &Inputs<'_>,
    module: &Module,
    job: Job<'_>,
    progress: &Progress,
) -> Result<Option<Weighed>> {
    if !module.weights.iter().any(|w| w.format.is_quantised()) {
        // A profile that `model.toml` names must be valid in any case.
        if let Some(path) = &c.config.calibrate.profile {
            named(path, &Origin::of(c.checkpoint()?, c.spec()?)?)?;
        }
        return Ok(None);
    }
    let Some(profile) = profile(c, job, progress)? else { return Ok(None) };
    if let Some(few) = too_few(&profile) {
        progress.warn(&few);
    }
    let (lowered, checkpoint) = (c.lowered()?, c.checkpoint()?);
    let importance = Importance::new(&profile, &lowered, module, checkpoint, |w| w.format.is_quantised())?;
    let (entry, expert_use) = (entry(c.config, &profile)?, expert_use(&profile));
    let importance = importance.rounded(c.config.weights.rounding, profile.correlations);
    Ok(Some(Weighed { importance, entry, expert_use }))
}

/// Number of times that a profile saw each expert chosen.
pub fn expert_use(profile: &Profile) -> Vec<ExpertUse> {
    profile.layers.iter().map(|l| ExpertUse { layer: l.layer, chosen: l.chosen.clone() }).collect()
}

/// Manifest entry for the profile that a bundle was built with.
///
/// # Errors
/// Only bugs of moec: a profile that cannot be encoded.
pub fn entry(config: &Config, profile: &Profile) -> Result<ProfileEntry> {
    let configured = &config.calibrate;
    let name =
        configured.profile.as_ref().map_or_else(|| file_names(&configured.text), |path| file_names([path]));
    Ok(ProfileEntry { name, sha256: hex(&sha256(&profile.encode()?)) })
}

/// Names of files without their folders, which are specific to this machine.
fn file_names<'a>(paths: impl IntoIterator<Item = &'a PathBuf>) -> String {
    let names = paths.into_iter().filter_map(|p| p.file_name()).map(|n| n.to_string_lossy().into_owned());
    names.collect::<Vec<_>>().join(", ")
}

/// Returns the profile of the texts of `model.toml`, from the cache if possible.
fn cached(c: &Inputs<'_>, origin: &Origin, job: Job<'_>, progress: &Progress) -> Result<Profile> {
    let configured = &c.config.calibrate;
    let texts = read_texts(&configured.text)?;
    let tokenizer = c.tokenizer()?.unwrap_or_default();
    let mut key = format!("{} {}", env!("CARGO_PKG_VERSION"), file::VERSION);
    let shapes = c.config.shapes_for(c.spec()?.max_positions)?;
    let window = WINDOW.min(shapes.max_context);
    let _ = write!(key, " {window} {} {}", shapes.prefill_chunk, configured.tokens);
    // The profile has the confidences of the little pass, if there is one.
    if let Some(little) = c.config.little(c.spec()?.experts_per_token())? {
        let _ = write!(key, " little {little}");
    }
    for hash in [origin.checkpoint, sha256(tokenizer)].iter().chain(texts.iter().map(|t| &t.hash)) {
        let _ = write!(key, " {}", hex(hash));
    }
    let name = format!("{}.trace", hex(&sha256(key.as_bytes())));
    let path = cache_dir::path()?.join("profiles").join(name);
    // A cached file that cannot be used is recorded again, for any reason. The first host decides.
    let own = if job.is_first() { Profile::read(&path).ok() } else { None };
    if let Some(cached) = job.broadcast(own.filter(|p| p.origin == *origin))? {
        progress.stage("Calibrated", &format!("before ({})", path.display()));
        return Ok(cached);
    }
    let request = Request { texts: &texts, tokens: configured.tokens, window: WINDOW, job };
    let profile = calibrate(c.config, c.checkpoint()?, c.spec()?, &request, progress)
        .map_err(|e: Error| e.context("the calibration that `[calibrate]` requests failed"))?;
    if job.is_first() {
        profile.write(&path)?;
    }
    Ok(profile)
}
