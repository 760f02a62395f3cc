//! All policies over steps whose loads drift.

use super::drawn::{MODELS, run};
use crate::schedule::SCHEDULED;

#[test]
fn each_part_of_the_scheme_helps() {
    let model = &MODELS[0];
    let mean = SCHEDULED.map(|system| run(system, model, 512, 50).0);
    let [klotski, _, ktransformers, monde, greedy, paper, full, .., complete] = mean;
    assert!(paper < greedy && full < paper && complete < full, "{}: {mean:?}", model.name);
    assert!(complete < klotski.min(ktransformers).min(monde), "{mean:?}");
}
