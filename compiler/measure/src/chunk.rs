//! Tokens per prefill step, if `model.toml` leaves them to costs (NPUMoE, §5.8).
//!
//! A static graph computes a whole chunk. A large chunk spreads launches and the reading of weights over more
//! tokens; a small one pads the end of a prompt less. So each allowed size is placed as a build would place
//! it, and the prompts under `[placement]` are simulated on each placement.

use moec_base::error::{Error, Fault, Result};
use moec_base::interrupt;
use moec_base::progress::Progress;
use moec_config::Mix;
use moec_costs::request::Request;
use moec_costs::units::Units;
use moec_passes::decisions::Decision;
use moec_pipeline::{Compilation, Inputs, Stops};

/// Allowed sizes in tokens, ascending. Of these a build can use those that fit into its context.
pub const SIZES: [usize; 6] = [64, 128, 256, 512, 1024, 2048];

/// Costs of a size: the means over all prompts.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Cost {
    tokens: usize,
    /// Milliseconds of a request.
    ms: f64,
    /// Millijoules of a token.
    mj: f64,
}

/// Chooses the size with which the prompts under `[placement]` take the least time, the smallest of equal
/// ones. `None` if `model.toml` has a size. Targets without static graphs pad nothing: they get the default.
///
/// # Errors
/// Fails as the passes until `assign_residency` do. A size with which the model exceeds a limit of the device
/// is left out, unless no size is left.
pub fn choose(c: &Inputs<'_>) -> Result<Option<(usize, Decision)>> {
    if c.config.shapes.prefill_chunk.is_some() {
        return Ok(None);
    }
    let shapes = c.shapes()?;
    let decision = |tokens: usize, why: String| {
        Decision::new("prefill_chunk", "tokens per prefill step", tokens.to_string(), why)
    };
    let Some(units) = &c.units else {
        let why = "a target without static graphs pads no prompt: the default".to_owned();
        return Ok(Some((shapes.prefill_chunk, decision(shapes.prefill_chunk, why))));
    };
    let (mut tried, mut refused) = (Vec::new(), None);
    for tokens in allowed(shapes.max_context) {
        interrupt::check()?;
        match cost(c, units, tokens, shapes.max_context) {
            Ok(cost) => tried.push(cost),
            Err(e) if e.fault == Fault::Limit => refused = Some(e),
            Err(e) => return Err(e),
        }
    }
    let Some(least) = least(&tried) else {
        return Err(refused.unwrap_or_else(|| Error::bug("no size of a chunk was tried")));
    };
    let lengths: Vec<String> = c.config.prompts.iter().map(ToString::to_string).collect();
    let why = format!("prompts of {} tokens, simulated", lengths.join(", "));
    let figures = |cost: &Cost| [("request_ms", cost.ms), ("token_mj", cost.mj)];
    let chosen = decision(least.tokens, why).with(&figures(&least));
    let all = tried.iter().fold(chosen, |d, cost| d.or(cost.tokens.to_string(), &figures(cost)));
    Ok(Some((least.tokens, all)))
}

/// Sizes for a context: those of [`SIZES`] that it holds, or the whole of a shorter one.
fn allowed(context: usize) -> Vec<usize> {
    let fit: Vec<usize> = SIZES.into_iter().filter(|&tokens| tokens <= context).collect();
    if fit.is_empty() { vec![context] } else { fit }
}

/// The first cost with the least time.
fn least(costs: &[Cost]) -> Option<Cost> {
    costs.iter().copied().min_by(|a, b| a.ms.total_cmp(&b.ms))
}

/// Costs of the prompts of the configuration with chunks of `tokens` tokens.
fn cost(c: &Inputs<'_>, units: &Units<'_>, tokens: usize, context: usize) -> Result<Cost> {
    let mut compilation = Compilation::new(Inputs { chunk: Some(tokens), ..c.clone() });
    let until = Stops { stop_after: Some("assign_residency"), ..Stops::default() };
    compilation.run(until, &Progress::silent(), &mut |_| {})?;
    let placed = &compilation.placed;
    let (placement, loads) = placed
        .placement
        .as_ref()
        .zip(placed.loads.as_ref())
        .ok_or_else(|| Error::bug("a target with static graphs, and no placement"))?;
    let context = u32::try_from(context).map_err(|_| Error::limit("a context past 32 bits"))?;
    let mut sum = Cost { tokens, ms: 0.0, mj: 0.0 };
    for &prompt in &c.config.prompts {
        let mix = Mix { prompt, ..c.config.mix };
        let outcome = Request::new(&compilation.module, units, loads, mix, context)?.run(placement);
        sum.ms += outcome.timeline.wall_us * 1e-3;
        sum.mj += outcome.joules_per_token() * 1e3;
    }
    let prompts = c.config.prompts.len().max(1) as f64;
    Ok(Cost { tokens, ms: sum.ms / prompts, mj: sum.mj / prompts })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_fit_into_the_context() {
        assert_eq!(allowed(4096), SIZES);
        assert_eq!(allowed(300), [64, 128, 256]);
        assert_eq!(allowed(40), [40]);
    }

    #[test]
    fn smallest_of_equally_fast_sizes_is_chosen() {
        let of = |tokens, ms| Cost { tokens, ms, mj: 1.0 };
        let costs = [of(64, 3.0), of(128, 2.0), of(256, 2.0), of(512, 2.5)];
        assert_eq!(least(&costs).map(|c| c.tokens), Some(128));
        assert_eq!(least(&[]), None);
    }
}
