//! The text of a Graph: whatever parses prints as itself, and what verifies can be evaluated.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moec_ir::eval::Evaluator;
use moec_ir::text::parse_module;
use moec_ir::{Graph, Leaf, Module, Source, Type, verify};
use std::error::Error;
use std::ops::Range;

/// Largest tensor that is evaluated, in elements.
const SMALL: usize = 1024;
/// Most nodes that are evaluated.
const FEW: usize = 64;

/// Weights that take all kinds of values, the awkward ones included.
struct Numbers;

impl Source for Numbers {
    fn read(
        &self,
        leaf: &Leaf,
        matrix: usize,
        rows: Range<usize>,
        cols: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), Box<dyn Error + Send + Sync>> {
        const VALUES: [f32; 11] =
            [0.5, -1.25, 0.0, 3.0, -0.0, f32::MAX, 1e-40, f32::INFINITY, -7.5, f32::NAN, f32::NEG_INFINITY];
        let kinds = if leaf.tensor.len().is_multiple_of(2) { VALUES.len() } else { 5 };
        let places = rows.flat_map(|r| cols.clone().map(move |c| matrix + 3 * r + 5 * c));
        out.iter_mut().zip(places).for_each(|(x, place)| *x = VALUES[place % kinds]);
        Ok(())
    }
}

fn small(ty: &Type) -> bool {
    ty.elements() <= SMALL
}

/// Whether evaluating takes no time to speak of.
fn cheap(module: &Module) -> bool {
    let leaves = |m: &Module| {
        m.weights.iter().flat_map(|w| w.expr.leaves()).all(|l| l.shape.iter().product::<usize>() <= SMALL)
    };
    module.weights.iter().all(|w| w.shape.iter().product::<usize>() <= SMALL)
        && leaves(module)
        && module.states.iter().all(|s| small(&s.ty))
        && module.entries.iter().all(|g| g.nodes.len() <= FEW && g.values.iter().all(small))
}

/// Numbers that are in range for most operators, or in range for few.
fn inputs(graph: &Graph, wild: bool) -> [Vec<i32>; 4] {
    let value = |i: usize| match i % 5 {
        _ if !wild => i32::from(i % 5 != 4) * (i as i32 % 2) - i32::from(i % 5 == 4),
        0 => i32::MAX,
        1 => i32::MIN,
        _ => i as i32,
    };
    [Graph::IDS, Graph::POS, Graph::SLOT, Graph::ROWS].map(|v| {
        let low = if wild || v == Graph::POS || v == Graph::ROWS { i32::MIN } else { 0 };
        (0..graph.ty(v).rows()).map(|i| value(i).max(low)).collect()
    })
}

fuzz_target!(|text: &str| {
    let Ok(module) = parse_module(text) else { return };
    let printed = module.to_string();
    match parse_module(&printed) {
        Ok(again) => assert!(again == module, "reads back another module:\n{printed}"),
        Err(e) => panic!("does not read back: {e}\n{printed}"),
    }
    if verify::module(&module).is_err() || !cheap(&module) {
        return;
    }
    let mut evaluator = Evaluator::new(&module, &Numbers);
    for (i, graph) in module.entries.iter().enumerate() {
        for wild in [false, true] {
            let [ids, pos, slot, rows] = inputs(graph, wild);
            if let Ok(logits) = evaluator.run(i, &ids, &pos, &slot, &rows) {
                assert_eq!(logits.ty, *graph.ty(graph.output));
                assert_eq!(logits.as_f32().len(), logits.ty.elements());
            }
        }
    }
});
