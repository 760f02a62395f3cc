//! Tests of systems over steps with drifting loads.

use super::drawn::{MODELS, run};
use super::systems::SYSTEMS;

#[test]
fn each_part_of_trimoes_scheme_helps() {
    let model = &MODELS[0];
    let mean = SYSTEMS.map(|system| run(system, model, 512, 50).0);
    let [gpu, cpu, near, greedy, refined, best, .., complete] = mean;
    assert!(refined < greedy && best < refined && complete < best, "{}: {mean:?}", model.name);
    assert!(complete < gpu.min(cpu).min(near), "{mean:?}");
}
