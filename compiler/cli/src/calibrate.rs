//! `moec calibrate`.

use super::{output, trace};
use moec_base::progress::Progress;
use moec_base::{Error, Result, human};
use moec_config::Config;
use moec_import::ImportOptions;
use moec_measure::calibrate::{self, Request, WINDOW};
use moec_measure::job::{self, Job};
use moec_measure::mix::losses::losses;
use moec_profile::importance::too_few;
use moec_profile::losses::merge;
use moec_profile::{Origin, Profile};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Run a model over text and record a profile
///
/// Compiles the model for this machine with the checkpoint's own weights, and runs it on the texts. The
/// profile records the routing of tokens to experts and the magnitudes of every matrix's inputs. Builds use
/// it to round quantised weights and to place experts. `moec inspect` shows a profile. Started by `mpirun -n 2`, two
/// hosts divide the texts; the profile has the bytes of one host's.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Path of the model.toml: the model, its prefill chunk, and the texts under `[calibrate]`
    #[arg(value_name = "MODEL.TOML")]
    pub config: PathBuf,
    /// Text to read; may be given more than once [default: `text` under `[calibrate]`]
    #[arg(long, value_name = "FILE")]
    pub text: Vec<PathBuf>,
    /// Token ids to read instead of text, separated by white space or commas; may be given more than once
    #[arg(long, value_name = "FILE")]
    pub ids: Vec<PathBuf>,
    /// Maximum number of tokens to read, over all texts [default: `tokens` under `[calibrate]`]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    pub tokens: Option<u32>,
    /// Tokens per sequence
    #[arg(long, value_name = "TOKENS", default_value_t = WINDOW as u32, value_parser = clap::value_parser!(u32).range(2..=1 << 20))]
    pub window: u32,
    /// Profile to merge with; may be given more than once. Without `--text`, the profiles are merged and no
    /// text is read
    #[arg(long, value_name = "FILE.TRACE")]
    pub merge: Vec<PathBuf>,
    /// Also measure what each format of weights and of the KV cache loses, on text that the calibration has not
    /// read: `moec fit --profile` predicts losses by it. Builds and runs thirteen models
    #[arg(long)]
    pub losses: bool,
    /// Profile to write [default: `profile` under `[calibrate]`, or the checkpoint's name and `.trace`]
    #[arg(long, short, value_name = "FILE.TRACE")]
    pub output: Option<PathBuf>,
    /// Print one JSON object to stdout when done
    #[arg(long)]
    pub json: bool,
}

/// Runs the calibration and writes the profile.
///
/// # Errors
/// Fails if the profile cannot be written.
pub fn run(args: &Args, progress: &Progress) -> Result<()> {
    job::run(progress, |job, progress| record(args, job, progress))
}

fn record(args: &Args, job: Job<'_>, progress: &Progress) -> Result<()> {
    let start = Instant::now();
    let config = Config::load(&args.config)?;
    let configured = &config.calibrate;
    let given = !(args.text.is_empty() && args.ids.is_empty() && args.merge.is_empty());
    let texts = if given { &args.text } else { &configured.text };
    if texts.is_empty() && !given {
        return Err(Error::usage("there is no text to calibrate on").hint(format!(
            "name one with `--text FILE` (`--ids FILE` for tokens), or write `text = [\"FILE\"]` under `[calibrate]` in `{}`",
            args.config.display()
        )));
    }
    // Checks that can fail at once come before the model runs.
    let mut texts = calibrate::read_texts(texts)?;
    texts.extend(calibrate::read_ids(&args.ids)?);
    let merged = args.merge.iter().map(|p| Profile::read(p)).collect::<Result<Vec<_>>>()?;
    let options = ImportOptions { allow_nonfinite: config.model.allow_nonfinite };
    progress.stage("Opening", &config.model.source.display().to_string());
    let (checkpoint, spec) = moec_import::open(&config.model.source, &options)?;
    spec.warnings.iter().for_each(|w| progress.warn(w));
    let origin = Origin::of(&checkpoint, &spec)?;
    for (profile, path) in merged.iter().zip(&args.merge) {
        profile.origin.must_be(&origin, &path.display().to_string())?;
    }

    let request = Request {
        texts: &texts,
        tokens: args.tokens.map_or(configured.tokens, |n| n as usize),
        window: args.window as usize,
        job,
    };
    let taken = (!texts.is_empty())
        .then(|| calibrate::calibrate(&config, &checkpoint, &spec, &request, progress))
        .transpose()?;
    let mut all = taken.into_iter().chain(merged);
    let first = all.next().ok_or_else(|| Error::bug("nothing was read and nothing merged"))?;
    let mut profile = all.try_fold(first, |sum, next| sum.merge(&next))?;
    if args.losses {
        let texts = if args.text.is_empty() { &configured.text } else { &args.text };
        let measured =
            losses((&config, texts), (&checkpoint, &spec), &profile, request.tokens, (job, progress))?;
        profile.losses = merge(&profile.losses, &measured);
    }
    if !job.is_first() {
        return Ok(());
    }
    if let Some(few) = too_few(&profile) {
        progress.warn(&few);
    }
    let path = args.output.clone().or_else(|| configured.profile.clone());
    let path = path.unwrap_or_else(|| default_output(&config));
    let bytes = profile.write(&path)?;
    let tokens = human::count(profile.reading.tokens());
    progress.finished(&format!("{} ({tokens} tokens, {})", path.display(), human::bytes(bytes)), start);
    if args.json {
        let mut value = trace::json(&profile);
        value["profile"] = path.display().to_string().into();
        value["bytes"] = bytes.into();
        value["seconds"] = start.elapsed().as_secs_f64().into();
        output::json(&value)?;
    }
    Ok(())
}

/// Default path of the profile, next to the `model.toml`: `olmoe.trace`.
fn default_output(config: &Config) -> PathBuf {
    let source = std::fs::canonicalize(&config.model.source).unwrap_or_else(|_| config.model.source.clone());
    let name = source.file_name().unwrap_or_else(|| Path::new("model").as_os_str()).to_owned();
    let mut name = name;
    name.push(".trace");
    config.path.with_file_name(name)
}
