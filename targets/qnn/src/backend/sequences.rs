//! Keys and values of sequences, where networks of attention are executed on this machine: as reals, which
//! codes come back from.

use crate::emit;
use crate::net::Network;
use moec_ir::plan::GraphDecl;
use moec_qnn_unit::attention::{Cache, Caches, CallInputs, Shape};
use moec_runtime::exec::graphs::f16;
use std::sync::{Mutex, PoisonError};

/// The sizes of a plan's graph, if a network matches it.
///
/// # Errors
/// The mismatch, for people.
pub(super) fn shape(graph: &GraphDecl, network: &Network) -> Result<Shape, String> {
    let of = |ids: &[crate::net::TensorId]| -> Vec<(&str, Vec<usize>)> {
        ids.iter().map(|id| network.tensor(*id)).map(|t| (&*t.name, t.shape.clone())).collect()
    };
    let shape = Shape::of(graph, &of(&network.inputs), &of(&network.outputs))?;
    let form = |id: &crate::net::TensorId| (network.tensor(*id).ty, &network.tensor(*id).quant);
    let same = network.inputs[1..3].iter().map(form).eq(network.outputs[1..3].iter().map(form));
    if same {
        Ok(shape)
    } else {
        Err("its keys and values have different types as input and as output".into())
    }
}

/// Keys and values that a network has with its host, as reals.
#[derive(Debug, Default)]
pub(super) struct Sequences(Mutex<Caches<f32>>);

/// Facts of a network of attention that a host knows.
#[derive(Debug)]
pub(super) struct AttentionNetwork {
    shape: Shape,
    package: usize,
    mask: [f32; 2],
}

impl Sequences {
    /// For as many sequences as a program has.
    pub(super) fn new(slots: usize) -> Self {
        Self(Mutex::new(Caches::new(slots)))
    }

    /// Shapes of a loaded graph's state; `None` for a graph without one.
    ///
    /// # Errors
    /// Fails if the network differs from the plan's.
    pub(super) fn attention_network(
        &mut self,
        graph: &GraphDecl,
        network: &Network,
    ) -> Result<Option<AttentionNetwork>, String> {
        if !graph.stateful {
            return Ok(None);
        }
        let package = self.0.get_mut().unwrap_or_else(PoisonError::into_inner).package(&graph.package);
        Ok(Some(AttentionNetwork { shape: shape(graph, network)?, package, mask: emit::mask(network) }))
    }

    /// Executes a network of attention with the state of a slot's sequence. Gives its first result.
    ///
    /// # Errors
    /// Errors of `execute`; inputs of other sizes.
    pub(super) fn run(
        &self,
        attends: &AttentionNetwork,
        slot: usize,
        inputs: &[&[f16]],
        execute: impl FnOnce(&[&[f32]]) -> Result<Vec<Vec<f32>>, String>,
    ) -> Result<Vec<Vec<f32>>, String> {
        let given = attends.shape.call_inputs(inputs)?;
        let mut caches = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let empty = || Ok(attends.shape.cache_lengths().map(|count| vec![0.0; count]));
        let cache = caches.of_sequence(attends.package, slot, empty)?;
        let results = {
            let all = reals(&given, cache, attends.mask);
            execute(&all.iter().map(|x| &**x).collect::<Vec<_>>())?
        };
        write_caches(&attends.shape, cache, results, &given)
    }
}

/// Writes a network's keys and values to their places; gives the other results.
///
/// # Errors
/// Other results than attention has.
pub(super) fn write_caches(
    shape: &Shape,
    cache: &mut Cache<f32>,
    mut results: Vec<Vec<f32>>,
    given: &CallInputs<'_>,
) -> Result<Vec<Vec<f32>>, String> {
    let [_, keys, values] = results.as_slice() else {
        return Err(format!("it has {} results", results.len()));
    };
    let [old_keys, old_values] = cache;
    shape.write_caches([old_keys, old_values], [keys, values], [1, 1], &given.places);
    results.truncate(1);
    Ok(results)
}

/// Inputs of a network in reals.
pub(super) fn reals(given: &CallInputs<'_>, cache: &Cache<f32>, [hidden, seen]: [f32; 2]) -> Vec<Vec<f32>> {
    let floats = |x: &[f16]| x.iter().map(|x| x.to_f32()).collect::<Vec<_>>();
    let mask = given.sees.iter().map(|sees| if *sees { seen } else { hidden }).collect();
    let mut all = vec![floats(given.x), cache[0].clone(), cache[1].clone(), mask];
    all.extend(given.angles.iter().flatten().map(|x| floats(x)));
    all
}
