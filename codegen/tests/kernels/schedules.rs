//! Schedules do not change any bit of a matrix kernel's results.

use crate::experts::{down_cases, gate_up_cases};
use crate::harness::{Case, PRODUCTS, Rng, every_second, same_bits};
use crate::matrix::{Shape, case};
use moec_codegen::Schedule;
use moec_ir::op::{Activation, Glu};

/// A schedule with random fields; some machines have no kernels for it.
fn random(rng: &mut Rng) -> Schedule {
    Schedule {
        rows: rng.pick(&[16, 32, 48, 96, 192, 384]),
        unroll: rng.pick(&[4, 8, 16]),
        block: rng.pick(&[1, 3, 7, 32, 64, 200, 4096]),
        ahead: rng.pick(&[0, 64, 2048, 8192]),
    }
}

/// Every second case, each with two random schedules.
fn with_schedules(rng: &mut Rng, cases: Vec<Case>) -> Vec<(Case, Vec<Schedule>)> {
    every_second(cases).into_iter().map(|c| (c, vec![random(rng), random(rng)])).collect()
}

#[test]
fn no_schedule_changes_a_linear_layer() {
    let mut rng = Rng::new(60);
    let mut cases = Vec::new();
    for n_rows in [1, 2, 3, 7, 13, 15, 26, 49, 101, 203] {
        for (format, compute) in PRODUCTS {
            let glu = rng.pick(&[None, Some(Glu::Gated(Activation::Silu))]);
            let shape = Shape {
                n_rows,
                k: rng.pick(&[80, 56, 24, 17, 1, 35, 131]),
                n: 2 * rng.pick(&[1, 5, 15, 17, 40]),
                groups: rng.pick(&[1, 1, 2]),
                format,
                compute,
                bias: rng.pick(&[true, false]),
                residual: glu.is_none() && rng.pick(&[true, false]),
                glu,
            };
            cases.push(case(&mut rng, &shape));
        }
    }
    same_bits(&with_schedules(&mut rng, cases));
}

/// Blocks begin at whole tiles, so the last one may be empty.
#[test]
fn blocks_of_few_rows_may_be_empty() {
    let mut rng = Rng::new(62);
    let schedule = Schedule { rows: 48, ..Schedule::default() };
    let mut cases = Vec::new();
    for n_rows in [49, 50, 63, 97] {
        for (format, compute) in PRODUCTS {
            let (k, n, bias) = (rng.pick(&[80, 131]), 70, false);
            let shape = Shape { n_rows, k, n, groups: 1, format, compute, bias, residual: false, glu: None };
            cases.push((case(&mut rng, &shape), vec![schedule]));
        }
    }
    same_bits(&cases);
}

#[test]
fn no_schedule_changes_experts() {
    let mut rng = Rng::new(61);
    let mut cases = gate_up_cases(&mut rng);
    cases.extend(down_cases(&mut rng));
    same_bits(&with_schedules(&mut rng, cases));
}
