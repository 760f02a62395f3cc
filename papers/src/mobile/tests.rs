//! Tests that the page's statements hold in a short run.

use super::claims::claims;
use super::models::MODELS;
use super::page::{equation_1, page};
use super::plots::plots;
use super::report::{Report, Size};
use super::systems::{FULL, MOBILE, MOBILE_GATES, MOEC, MOEC_FULL, SYSTEMS, at};
use crate::claim::{Claims, check_page};
use std::sync::LazyLock;

static REPORT: LazyLock<Report> = LazyLock::new(|| Report::new(Size::QUICK).expect("a report"));
static CLAIMS: LazyLock<Claims> = LazyLock::new(|| claims(&REPORT).expect("claims"));

#[test]
fn mobile_models_have_their_named_sizes() {
    for (model, billions) in MODELS.iter().zip([14.3, 6.9]) {
        let weights = model.layers as u64 * (model.experts as u64 * model.expert() + model.dense());
        let share = weights as f64 * 1e-9 / billions;
        // Embeddings and the head are not counted.
        assert!((0.94..1.0).contains(&share), "{}: {share}", model.name);
    }
}

#[test]
fn fitted_constant_reproduces_its_measurement() {
    let used: Vec<_> = CLAIMS.compared.iter().filter(|c| c.used).collect();
    assert_eq!(used.len(), 1);
    assert!(used[0].paper.error(used[0].ours).abs() < 0.01, "{:?}", used[0]);
}

#[test]
fn speedups_follow_equation_1() {
    for row in REPORT.tasks.iter().chain(&REPORT.curve) {
        assert!((equation_1(row) / row.speedup(&MOBILE) - 1.0).abs() < 1e-9, "{row:?}");
        let drawn = row.outcomes[at(&MOBILE)].fallback;
        assert!((drawn - row.fallback).abs() < 0.08, "{drawn}, {}", row.fallback);
    }
}

#[test]
fn less_work_is_faster() {
    for row in REPORT.tasks.iter().chain(&REPORT.thresholds).chain(&REPORT.curve) {
        assert!(row.outcomes.iter().all(|o| o.token > 0.0 && o.token.is_finite()), "{row:?}");
        assert!(row.speedup(&MOBILE_GATES) > row.speedup(&MOBILE), "{row:?}");
        assert!(row.speedup(&MOEC_FULL) > 1.0 && row.speedup(&FULL) == 1.0, "{row:?}");
        // The full pass after a little one fetches less than a full pass alone, and so does the little one.
        let [full, mobile] = [FULL, MOBILE].map(|s| row.outcomes[at(&s)]);
        assert!(mobile.again < full.token && mobile.first < full.token, "{row:?}");
    }
    for pair in REPORT.curve.windows(2) {
        for system in [MOBILE, MOEC] {
            assert!(pair[0].speedup(&system) > pair[1].speedup(&system), "{}", system.name);
        }
    }
    assert!(REPORT.sizes.windows(2).all(|s| s[0] > s[1]), "{:?}", REPORT.sizes);
    for (checked, row) in REPORT.checked.iter().zip(&REPORT.tasks) {
        assert!(*checked < row.speedup(&MOBILE), "{row:?}");
    }
}

#[test]
fn mobile_speedups_are_near_the_paper() {
    for c in CLAIMS.compared.iter().filter(|c| c.unit == "×") {
        let near = if c.place == "§IV-B, Figure 5" { 0.25 } else { 0.12 };
        assert!(c.paper.error(c.ours).abs() < near, "{c:?}");
    }
}

#[test]
fn mobile_page_lists_every_figure() {
    let page = page(&CLAIMS, &REPORT);
    check_page("mobile", &page, &CLAIMS, &plots(&CLAIMS, &REPORT));
    for system in &SYSTEMS {
        assert!(page.contains(system.name), "{}", system.name);
    }
}
