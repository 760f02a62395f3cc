//! γ of big-little decoding, if `model.toml` gives a share of tokens in its place (MoBiLE, §III-B).
//!
//! γ is a quantile of the little pass's largest probabilities, which calibration records. A share is only
//! worth requesting if two passes of some tokens cost less than the experts that the others leave out:
//! equation 1 of the paper estimates this.

use moec_base::error::{Error, Result};
use moec_base::progress::Progress;
use moec_import::ModelSpec;
use moec_import::spec::LayerSpec;
use moec_passes::decisions::Decision;
use moec_pipeline::Inputs;
use moec_profile::Confidence;

/// Chooses γ for the share of tokens under `[decode]` that are to be decoded with all experts; `None` if
/// `model.toml` gives no share. Warns if fewer experts are not expected to save time with this share.
///
/// # Errors
/// Fails without a profile that has confidences, or if these are of another number of experts per token.
pub fn choose(c: &Inputs<'_>, progress: &Progress) -> Result<Option<(f64, Decision)>> {
    let Some(share) = c.config.decode.fallback_share() else { return Ok(None) };
    let spec = c.spec()?;
    let Some(little) = c.config.little(spec.experts_per_token())? else { return Ok(None) };
    let confidence = recorded(c, little)?;
    let gamma = confidence.quantile(share);
    let fallbacks = confidence.fallbacks(gamma).unwrap_or(0.0);
    let pass = little_pass(c, spec, little);
    let speedup = speedup(pass, fallbacks);
    if speedup <= 1.0 {
        progress.warn(&format!(
            "`gamma` under `[decode]`: big-little decoding is not expected to save time if {:.0} % of the tokens are decoded again: a pass with {little} experts per token takes about {:.0} % of a full one; request a share below {:.0} %",
            100.0 * fallbacks,
            100.0 * pass,
            100.0 * (1.0 - pass)
        ));
    }
    let why = format!("{:.0} % of {} calibration tokens fall back", 100.0 * fallbacks, confidence.tokens());
    let chosen = Decision::new("gamma", "big-little decoding", format!("γ {}", rounded(gamma)), why).with(&[
        ("gamma", gamma),
        ("requested_share", share),
        ("fallback_share", fallbacks),
        ("little_pass_share", pass),
        ("expected_speedup", speedup),
    ]);
    Ok(Some((gamma, chosen)))
}

/// The confidences of the profile, which must be of a little pass with `little` experts per token.
fn recorded<'a>(c: &Inputs<'a>, little: usize) -> Result<&'a Confidence> {
    const SHARE: &str = "`gamma` under `[decode]` is a share of tokens";
    let profile = c.profile.ok_or_else(|| {
        Error::input(format!("{SHARE}, which needs a profile"))
            .hint("name `text` or `profile` under `[calibrate]`, or set `gamma` to a number")
    })?;
    let again = "record it again with `moec calibrate` and this `model.toml`, or set `gamma` to a number";
    match &profile.confidence {
        None => Err(Error::input(format!("{SHARE}, but the profile has no confidences of the little pass"))
            .because("it was recorded without `big_little`, or by an earlier version of moec")
            .hint(again)),
        Some(of) if of.experts as usize != little => Err(Error::input(format!(
            "{SHARE}, but the profile's confidences are of {} experts per token, and `little` is {little}",
            of.experts
        ))
        .hint(again)),
        Some(of) => Ok(of),
    }
}

/// Time of a little pass as a share of a full one, `T_l / T`, estimated by the weights that each reads. If
/// experts are read from disk or transferred, they take all the time, as in the paper.
fn little_pass(c: &Inputs<'_>, spec: &ModelSpec, little: usize) -> f64 {
    let mixture = spec.layers.iter().find_map(LayerSpec::moe);
    let (all, used) = mixture.map_or((1, 1), |m| (m.router.experts.max(1), m.router.k.max(1)));
    let lower_bound = little as f64 / used as f64;
    let moved = c.config.memory.budget.is_some() || !c.list.accelerators.is_empty();
    if moved || all <= used {
        return lower_bound.min(1.0);
    }
    // Experts that a token does not choose are the difference of the two counts.
    let unused = spec.params.saturating_sub(spec.active_params) as f64;
    let expert = unused / (all - used) as f64;
    let left_out = used.saturating_sub(little) as f64 * expert;
    (1.0 - left_out / spec.active_params.max(1) as f64).clamp(lower_bound.min(1.0), 1.0)
}

/// Equation 1 of MoBiLE, with full passes after a fallback that take as long as any other (`T_b = T`):
/// prefetching makes them shorter at best.
fn speedup(little_pass: f64, fallbacks: f64) -> f64 {
    1.0 / (little_pass + fallbacks)
}

/// γ with at most three decimals.
fn rounded(gamma: f64) -> String {
    let text = format!("{gamma:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Table III of MoBiLE: 1.85 times as fast without fallbacks. By equation 1, more than 46 % of them lose.
    #[test]
    fn fallbacks_cost_the_speed_that_fewer_experts_gain() {
        let pass = 1.0 / 1.85;
        assert!((speedup(pass, 0.0) - 1.85).abs() < 1e-9);
        assert!((speedup(pass, 0.1) - 1.56).abs() < 0.01);
        assert!(speedup(pass, 0.45) > 1.0 && speedup(pass, 0.47) < 1.0);
    }

    #[test]
    fn gamma_is_shown_with_three_decimals() {
        assert_eq!([0.0, 0.179_687_5, 0.5, 1.0].map(rounded), ["0", "0.18", "0.5", "1"]);
    }
}
