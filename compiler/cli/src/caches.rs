//! `moec inspect PROFILE --cache SIZES`: hit rates of every cache policy, replayed on the routing of a
//! profile.
#![expect(clippy::cast_possible_truncation, reason = "figures for readers, and indices of a plan")]

use super::output;
use moec_base::error::{Error, Result};
use moec_profile::Profile;
use moec_sim::cache::{CacheCounters, Choice, Pin, Reason, Row, Trace, choose};
use serde_json::{Value, json};
use std::path::Path;
use std::str::FromStr;

/// Size of a cache as a share of all experts: `25%`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Share(f64);

impl FromStr for Share {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let percent = text.trim().strip_suffix('%').and_then(|n| n.trim().parse::<f64>().ok());
        match percent.filter(|p| *p > 0.0 && *p <= 100.0) {
            Some(percent) => Ok(Self(percent)),
            None => Err("expected a percentage of all experts, such as `25%`".to_owned()),
        }
    }
}

/// A cache of one size.
struct Sized {
    share: Share,
    experts: u64,
    choice: Choice,
}

/// Replays the routing of a profile.
///
/// # Errors
/// Fails if the profile cannot be read or has too little routing.
pub(super) fn inspect(path: &Path, shares: &[Share], as_json: bool) -> Result<()> {
    let profile = Profile::read(path)?;
    let context = |e: Error| e.context(format!("`{}` cannot be replayed", path.display()));
    let again = "record it again with `moec calibrate`, over a few hundred tokens or more";
    if profile.routes.is_empty() {
        return Err(context(Error::input("the profile has no routing of single tokens").hint(again)));
    }
    let trace = profile.routes.trace(&profile.layers);
    let trace = trace.map_err(|e| context(Error::bug("a profile that was checked").because(e)))?;
    let sized = sizes(&trace, shares).map_err(|e| context(e.hint(again)))?;
    if as_json { output::json(&as_value(&trace, &sized)) } else { output::data(&text(&trace, &sized)) }
}

fn sizes(trace: &Trace, shares: &[Share]) -> Result<Vec<Sized>> {
    let all = trace.experts().count() as f64;
    let sized = |&share: &Share| {
        let experts = (all * share.0 / 100.0).round().max(1.0) as u64;
        let choice = choose(trace, experts, Pin::Auto).map_err(|e| Error::input(e.to_string()))?;
        Ok(Sized { share, experts, choice })
    };
    shares.iter().map(sized).collect()
}

fn percent(counters: CacheCounters) -> String {
    format!("{:.1} %", 100.0 * counters.hit_rate())
}

/// Hit rates by policy and size, then the choices with their reasons.
fn text(trace: &Trace, sized: &[Sized]) -> String {
    let (layers, tokens) = (trace.experts().layers().len(), trace.tokens());
    let (uses, experts) = (trace.accesses(), trace.experts().count());
    let mut out = format!(
        "{tokens} tokens in {layers} layers use {uses} of {experts} experts; hit rates of one cache for all \
         layers, or of one cache per layer (`per-layer`)\n\n"
    );
    let row = |name: &str, cell: &dyn Fn(&Sized) -> String| {
        std::iter::once(name.to_owned()).chain(sized.iter().map(cell)).collect::<Vec<_>>()
    };
    let mut rows =
        vec![row("cache", &|s| format!("{} %", s.share.0)), row("experts", &|s| s.experts.to_string())];
    let policies = sized.first().map_or(0, |s| s.choice.best_of_each().len());
    for i in 0..policies {
        let best = |s: &Sized| s.choice.best_of_each()[i].clone();
        let name = best(&sized[0]).setting.info().name;
        rows.push(row(name, &|s| percent(best(s).counters)));
    }
    rows.push(row("best with pins", &|s| {
        s.choice.best_pinned().map_or("-".to_owned(), |r| percent(r.counters))
    }));
    rows.push(row("Belady (bound)", &|s| percent(s.choice.optimum)));
    out += &output::table(&rows);
    out.push('\n');
    let mut rows =
        vec![["cache", "chosen", "held out", "LRU, held out", "reason"].map(str::to_owned).to_vec()];
    for Sized { share, choice, .. } in sized {
        rows.push(vec![
            format!("{} %", share.0),
            choice.chosen.to_string(),
            percent(choice.held_out),
            percent(choice.held_out_lru),
            why(choice),
        ]);
    }
    out += &output::table(&rows);
    out.push('\n');
    let mut rows = vec![["cache", "best of each policy, and with pins"].map(str::to_owned).to_vec()];
    for Sized { share, choice, .. } in sized {
        let best = choice.best_of_each();
        let best = best.into_iter().chain(choice.best_pinned());
        let best = best.map(|row| vec![format!("{} %", share.0), row.to_string()]);
        rows.extend(best);
    }
    out + &output::table(&rows)
}

fn why(choice: &Choice) -> String {
    let margin = 100.0 * choice.margin();
    match choice.reason {
        _ if choice.chosen.pinned > 0 => {
            format!("pinning raises the rate from {}", percent(choice.held_out_unpinned))
        }
        Reason::BeatsLru => format!("at least {margin:.1} points above LRU on held-out tokens"),
        Reason::NothingBeatsLru => format!("no policy is {margin:.1} points above LRU on held-out tokens"),
    }
}

fn as_value(trace: &Trace, sized: &[Sized]) -> Value {
    let counters = |t: CacheCounters| json!({"hits": t.hits, "misses": t.misses, "hit_rate": t.hit_rate()});
    let size = |s: &Sized| {
        let row = |r: &Row| {
            let mut value = counters(r.counters);
            value["setting"] = r.setting.to_string().into();
            value["policy"] = r.setting.info().name.into();
            value["pinned_percent"] = r.pinned.into();
            value
        };
        json!({
            "percent": s.share.0,
            "experts": s.experts,
            "chosen": s.choice.chosen.setting.to_string(),
            "pinned_percent": s.choice.chosen.pinned,
            "pinned": s.choice.pinned.len(),
            "beats_lru": s.choice.reason == Reason::BeatsLru,
            "chosen_hit_rate": s.choice.chosen.counters.hit_rate(),
            "held_out": counters(s.choice.held_out),
            "held_out_unpinned": counters(s.choice.held_out_unpinned),
            "held_out_lru": counters(s.choice.held_out_lru),
            "bound": counters(s.choice.optimum),
            "settings": s.choice.rows.iter().map(row).collect::<Vec<_>>(),
            "pinned_settings": s.choice.pinned_rows.iter().map(row).collect::<Vec<_>>(),
        })
    };
    json!({
        "kind": "cache",
        "tokens": trace.tokens(),
        "layers": trace.experts().layers().len(),
        "experts": trace.experts().count(),
        "accesses": trace.accesses(),
        "caches": sized.iter().map(size).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use moec_runtime::offload::cache::{CachedLayer, ExpertIndex};
    use moec_sim::cache::synthetic;

    #[test]
    fn the_table_of_a_skewed_router() {
        let experts = ExpertIndex::uniform(2, CachedLayer { experts: 16, k: 2, bytes: 1 }).unwrap();
        let popularity = vec![(0, (1..=16).map(|n| 1.0 / f64::from(n)).collect())];
        let trace = synthetic::trace(&experts, &popularity, 0.3, 2000, 11).unwrap();
        let sized = sizes(&trace, &[Share(25.0), Share(50.0), Share(75.0)]).unwrap();
        insta::assert_snapshot!(text(&trace, &sized));
    }

    #[test]
    fn cache_sizes_are_parsed_as_percentages() {
        assert_eq!("25%".parse::<Share>(), Ok(Share(25.0)));
        assert_eq!(" 12.5 % ".parse::<Share>(), Ok(Share(12.5)));
        for wrong in ["25", "0%", "101%", "x%", "NaN%", ""] {
            assert!(wrong.parse::<Share>().is_err(), "{wrong}");
        }
    }
}
