//! Tests of parsing, printing and refusing settings and traces.

use super::*;
use moec_runtime::offload::cache::{CacheError, POLICIES, Scope};
use moec_sim::cache::grid;

#[test]
fn setting_round_trips_through_text() {
    let all = grid(true);
    for setting in &all {
        assert_eq!(setting.to_string().parse::<Setting>().unwrap(), *setting);
    }
    for (i, setting) in all.iter().enumerate() {
        assert!(!all[..i].contains(setting), "{setting} is there twice");
    }
    assert_eq!(all[0], Setting::lru());
    assert!(grid(false).iter().all(|s| !s.info().scored));
    assert_eq!(setting("mrs per-layer alpha=0.25").to_string(), "mrs alpha=0.25 depth=2 bypass=1 per-layer");
    assert_eq!(setting("lru per-layer").scope(), Scope::PerLayer);
}

#[test]
fn grid_values_are_within_parameter_ranges() {
    for p in POLICIES.iter().flat_map(|p| p.parameters) {
        let fits = |v: &&f64| **v < p.least || **v > p.most || p.whole && v.fract() != 0.0;
        assert!(!p.grid.is_empty() && p.grid.iter().find(fits).is_none(), "{}", p.name);
    }
}

#[test]
fn invalid_setting_text_is_rejected() {
    for (text, words) in [
        ("fifo", "no cache policy `fifo`; there are `lru`, `lfu`, `mrs`, `page-cache`"),
        ("", "no cache policy ``"),
        ("lru alpha=1", "cache policy `lru`: there is no parameter `alpha`; there are none"),
        ("mrs alpha", "`alpha` must be a number from 0.0001 to 0.999, not ``"),
        ("mrs alpha=1", "not `1`"),
        ("mrs alpha=NaN", "not `NaN`"),
        ("mrs depth=1.5", "`depth` must be a whole number from 1 to 8, not `1.5`"),
        ("page-cache per-layer", "cannot be `per-layer`"),
    ] {
        let e = text.parse::<Setting>().unwrap_err().to_string();
        assert!(e.contains(words), "`{words}` is not in `{e}`");
    }
}

#[test]
fn trace_rejects_tokens_inconsistent_with_the_model() {
    let mut trace = Trace::new(experts(2, 4, 2), true);
    let ranked = |first: (u16, f32)| [first, (1, 0.25), (2, 0.25), (3, 0.0)].repeat(2);
    let good = ranked((0, 0.5));
    for (chosen, ranked, words) in [
        (vec![0, 1, 2], good.clone(), "3 experts for 4"),
        (vec![0, 1, 2, 3], vec![], "0 scores for 8"),
        (vec![0, 1, 2, 4], good.clone(), "of 4 in layer 1"),
        (vec![3, 3, 0, 1], good.clone(), "of 4 in layer 0"),
        (vec![0, 1, 2, 3], ranked((0, 0.1)), "scores in layer 0"),
        (vec![0, 1, 2, 3], ranked((4, 0.5)), "scores in layer 0"),
        (vec![0, 1, 2, 3], ranked((0, f32::NAN)), "scores in layer 0"),
    ] {
        let e = trace.push(&chosen, &ranked).unwrap_err().to_string();
        assert!(e.starts_with("token 0") && e.contains(words), "`{words}` is not in `{e}`");
    }
    assert_eq!((trace.tokens(), trace.accesses()), (0, 0));
    trace.push(&[0, 1, 2, 3], &good).unwrap();
    trace.push(&[1, 0, 3, 2], &good).unwrap();
    assert_eq!(trace.step(1, 1).chosen, [3, 2]);
    assert_eq!(trace.step(1, 1).ranked[0], (0, 0.5));
    let part = trace.part(1..9);
    assert_eq!((part.tokens(), part.step(0, 0)), (1, trace.step(1, 0)));
    assert_eq!(trace.part(5..9).tokens(), 0);
}

#[test]
fn impossible_cached_models_are_rejected() {
    let layer = CachedLayer { experts: 4, k: 2, bytes: 1 };
    for layers in [
        vec![],
        vec![CachedLayer { k: 5, ..layer }],
        vec![CachedLayer { k: 0, ..layer }],
        vec![CachedLayer { bytes: 0, ..layer }],
        vec![CachedLayer { bytes: u64::MAX, ..layer }],
        vec![CachedLayer { experts: 60_000, ..layer }; 20],
    ] {
        assert!(matches!(ExpertIndex::new(&layers), Err(CacheError::Experts(_))), "{layers:?}");
    }
}
