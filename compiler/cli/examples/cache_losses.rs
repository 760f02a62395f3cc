//! Losses of the forms of the KV cache, as a table: `cache_losses MODEL.TOML PROFILE TOKENS TEXT…`. With `--json` first,
//! the losses of the forms that builds have, as `moec fit` reads them.
#![allow(clippy::print_stdout, reason = "an example prints")]

use moec_base::error::{Error, Result};
use moec_base::progress::Progress;
use moec_config::Config;
use moec_import::ImportOptions;
use moec_ir::state::stores_rotated;
use moec_measure::mix::losses::{CacheLoss, OF_CACHES, caches};
use moec_profile::Profile;
use std::path::PathBuf;

fn main() -> Result<()> {
    let mut args: Vec<String> = std::env::args().skip(1).collect();
    let json = args.first().is_some_and(|first| first == "--json");
    args.drain(..usize::from(json));
    let [toml, profile, tokens, texts @ ..] = &args[..] else {
        return Err(Error::usage("expected MODEL.TOML PROFILE TOKENS TEXT…"));
    };
    let tokens = tokens.parse().map_err(|e| Error::usage(format!("`{tokens}`: {e}")))?;
    let config = Config::load(&PathBuf::from(toml))?;
    let (checkpoint, spec) = moec_import::open(&config.model.source, &ImportOptions::default())?;
    let profile = Profile::read(&PathBuf::from(profile))?;
    let texts: Vec<PathBuf> = texts.iter().map(PathBuf::from).collect();
    let found =
        caches((&config, &texts), (&checkpoint, &spec), &profile, tokens, &Progress::new(false, false))?;
    if json {
        let built = |c: &&CacheLoss| OF_CACHES.contains(&c.format) && c.rotates == stores_rotated(c.format);
        let losses: Vec<_> = found
            .iter()
            .filter(built)
            .map(|c| serde_json::json!({"key": "kv_cache", "format": c.format.name(), "tokens": c.tokens, "nats_per_token": c.loss}))
            .collect();
        println!("{}", serde_json::json!(losses));
        return Ok(());
    }
    let facts = moec::facts::of(&spec, &|leaf| checkpoint.format(leaf));
    println!(
        "| KV cache | heads | bytes per token | perplexity | divergence, nats | same token | repeated |"
    );
    println!("|---|---|---|---|---|---|---|");
    for c in &found {
        println!(
            "| {} | {} | {} | {:+.3} % | {:.5} | {:.2} % | {:.1} % |",
            c.format,
            if c.rotates { "rotated" } else { "as they are" },
            facts.kv_bytes_per_token(c.format),
            100.0 * c.loss.exp_m1(),
            c.divergence,
            100.0 * c.same,
            100.0 * c.repeated,
        );
    }
    Ok(())
}
