//! Graphs of attention: conversion between a plan's inputs and outputs and those of a graph of the HTP.
//!
//! A graph of the HTP keeps no state. The executor of the graph holds keys and values of a sequence. They are
//! inputs, without the chunk; the chunk's own are outputs and are written to their places.
//!
//! | the plan gives | the graph takes |
//! |---|---|
//! | `x[T, H]` | `x[T, H]` |
//! | its slot | `keys[kv, C, qk]`, `values[kv, C, v]` |
//! | `mask[1, 1, T, C]`, `write[1, 1, C, T]` | `mask[T, C + T]`: the chunk's own keys follow those of the cache |
//! | `angles[T, R]`, cosines first | `cos[T, R/2]`, `sin[T, R/2]` |
//!
//! Results are `y[T, H]`, `new_keys[kv, T, qk]` and `new_values[kv, T, v]`.

use half::f16;
use moec_ir::plan::{GraphDecl, GraphTensor};

/// Names of the graph's inputs, in order; the last two only with a rotation.
pub const INPUTS: [&str; 6] = ["x", "keys", "values", "mask", "cos", "sin"];

/// Sizes of a graph of attention.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    rows: usize,
    context: usize,
    hidden: usize,
    outputs: usize,
    /// Channels of `angles`, and none.
    angles: usize,
    /// Heads of keys.
    heads: usize,
    /// Channels of a head of keys, and of values.
    dims: [usize; 2],
    /// Indices of `x`, `mask`, `write`, and `angles` among the plan's inputs.
    at: [usize; 4],
}

/// Inputs of a call, as a graph takes them.
#[derive(Clone, Debug, PartialEq)]
pub struct CallInputs<'a> {
    /// `[T, H]`
    pub x: &'a [f16],
    /// `[T, C + T]`: whether a row sees a key.
    pub sees: Vec<bool>,
    /// Cosines and sines, `[T, R/2]` each.
    pub angles: Option<[Vec<f16>; 2]>,
    /// Position of each row in the cache; `None` for padding.
    pub places: Vec<Option<usize>>,
}

/// The place and the extents of a port.
fn find_tensor<'a>(tensors: &'a [GraphTensor], name: &str) -> Option<(usize, &'a [u32; 4])> {
    let at = tensors.iter().position(|p| p.name == name)?;
    Some((at, &tensors[at].shape))
}

/// Name and extents of a tensor.
type Named = (&'static str, Vec<usize>);

/// Names and extents of tensors, in order.
pub type Tensors<'a> = [(&'a str, Vec<usize>)];

impl Shape {
    /// The sizes of a plan's stateful graph with inputs and outputs of these names and extents.
    ///
    /// # Errors
    /// The mismatch, for people.
    pub fn of(graph: &GraphDecl, takes: &Tensors<'_>, gives: &Tensors<'_>) -> Result<Self, String> {
        let missing = |name: &str| format!("the plan gives attention no `{name}`");
        let (x_at, x) = find_tensor(&graph.inputs, "x").ok_or_else(|| missing("x"))?;
        let (mask_at, mask) = find_tensor(&graph.inputs, "mask").ok_or_else(|| missing("mask"))?;
        let (write_at, _) = find_tensor(&graph.inputs, "write").ok_or_else(|| missing("write"))?;
        let angles = find_tensor(&graph.inputs, "angles");
        let [y] = graph.outputs.as_slice() else {
            return Err(format!("the plan takes {} results of attention", graph.outputs.len()));
        };
        let (Some((_, keys)), Some((_, values))) = (takes.get(1), takes.get(2)) else {
            return Err("it takes no keys and values".to_owned());
        };
        let (&[heads, _, qk], &[_, _, v]) = (keys.as_slice(), values.as_slice()) else {
            return Err(format!("keys and values are {keys:?} and {values:?}, not of three axes"));
        };
        let number = |n: u32| n as usize;
        let shape = Self {
            rows: number(x[0]),
            context: number(mask[3]),
            hidden: number(x[1]),
            outputs: number(y.shape[1]),
            angles: angles.map_or(0, |(_, shape)| number(shape[1])),
            heads,
            dims: [qk, v],
            at: [x_at, mask_at, write_at, angles.map_or(0, |(at, _)| at)],
        };
        let [inputs, outputs] = shape.tensors();
        let same = |found: &Tensors<'_>, expected: &Tensors<'_>| match found
            .iter()
            .zip(expected)
            .find(|(a, b)| a != b)
        {
            _ if found.len() != expected.len() => Err(format!(
                "it has {} inputs or results, but the plan's attention has {}",
                found.len(),
                expected.len()
            )),
            Some(((name, is), (expected, should))) => {
                Err(format!("`{name}` {is:?}, expected `{expected}` {should:?}"))
            }
            None => Ok(()),
        };
        same(takes, &inputs)?;
        same(gives, &outputs)?;
        let some = [shape.rows, shape.context, shape.hidden, heads, qk, v].iter().all(|n| *n > 0);
        let rotates = angles.is_some();
        let sound = some && rotates == (shape.angles > 0) && shape.angles.is_multiple_of(2);
        if sound && graph.inputs.len() == 3 + usize::from(rotates) {
            Ok(shape)
        } else {
            Err("the plan has other arguments of attention".to_owned())
        }
    }

    /// Inputs and results of a graph.
    fn tensors(&self) -> [Vec<Named>; 2] {
        let Self { rows, context, heads, dims: [qk, v], .. } = *self;
        let half = vec![rows, self.angles / 2];
        let extents = [
            vec![rows, self.hidden],
            vec![heads, context, qk],
            vec![heads, context, v],
            vec![rows, context.saturating_add(rows)],
            half.clone(),
            half,
        ];
        let count = if self.angles > 0 { 6 } else { 4 };
        let inputs = INPUTS.into_iter().zip(extents).take(count).collect();
        let outputs = vec![
            ("y", vec![rows, self.outputs]),
            ("new_keys", vec![heads, rows, qk]),
            ("new_values", vec![heads, rows, v]),
        ];
        [inputs, outputs]
    }

    /// Numbers of the keys and of the values that a sequence has.
    pub fn cache_lengths(&self) -> [usize; 2] {
        self.dims.map(|dim| self.heads.saturating_mul(self.context).saturating_mul(dim))
    }

    /// Numbers of a chunk's own keys and values.
    pub fn chunk_lengths(&self) -> [usize; 2] {
        self.dims.map(|dim| self.heads.saturating_mul(self.rows).saturating_mul(dim))
    }

    /// Converts the inputs of the plan's call to those of the graph.
    ///
    /// # Errors
    /// For people: inputs of other sizes, or a row that is written twice.
    pub fn call_inputs<'a>(&self, inputs: &[&'a [f16]]) -> Result<CallInputs<'a>, String> {
        let &Self { rows, context, at: [x, mask, write, angles], .. } = self;
        let of = |at: usize, count: usize| match inputs.get(at) {
            Some(given) if given.len() == count => Ok(*given),
            Some(given) => Err(format!("input {at} has {} numbers, not {count}", given.len())),
            None => Err(format!("input {at} is not given")),
        };
        let x = of(x, rows * self.hidden)?;
        let (mask, write) = (of(mask, rows * context)?, of(write, rows * context)?);
        let mut places = vec![None; rows];
        for (position, cells) in write.chunks_exact(rows).enumerate() {
            for (place, _) in places.iter_mut().zip(cells).filter(|(_, cell)| **cell != f16::ZERO) {
                if place.replace(position).is_some() {
                    return Err("a row is written to two positions".to_owned());
                }
            }
        }
        let mut sees = vec![false; rows * (context + rows)];
        for (row, sees) in mask.chunks_exact(context).zip(sees.chunks_exact_mut(context + rows)) {
            let (before, own) = sees.split_at_mut(context);
            before.iter_mut().zip(row).for_each(|(sees, mask)| *sees = *mask == f16::ZERO);
            // A row sees the chunk's own keys after the cache, which holds something else at their places.
            for (own, position) in
                own.iter_mut().zip(&places).filter_map(|(own, place)| Some((own, (*place)?)))
            {
                *own = std::mem::take(&mut before[position]);
            }
        }
        let half = self.angles / 2;
        let split = |all: &[f16]| {
            let part = |from: usize| {
                all.chunks_exact(2 * half).flat_map(|row| &row[from..from + half]).copied().collect()
            };
            [part(0), part(half)]
        };
        let angles = if half > 0 { Some(split(of(angles, rows * 2 * half)?)) } else { None };
        Ok(CallInputs { x, sees, angles, places })
    }

    /// Writes a chunk's keys and values, `new[kv, T, dim]` each, to their places in the caches `[kv, C,
    /// dim]`. A number may have several elements, `widths`: bytes.
    pub fn write_caches<E: Copy>(
        &self,
        caches: [&mut [E]; 2],
        new: [&[E]; 2],
        widths: [usize; 2],
        places: &[Option<usize>],
    ) {
        let sizes = self.dims.into_iter().zip(widths);
        for ((cache, new), (dim, width)) in caches.into_iter().zip(new).zip(sizes) {
            let row = dim * width;
            for (head, new) in
                cache.chunks_exact_mut(self.context * row).zip(new.chunks_exact(self.rows * row))
            {
                for (new, place) in new.chunks_exact(row).zip(places) {
                    if let Some(to) = place.and_then(|place| head.get_mut(place * row..(place + 1) * row)) {
                        to.copy_from_slice(new);
                    }
                }
            }
        }
    }
}

/// Keys and values of one sequence.
pub type Cache<E> = [Vec<E>; 2];

/// Keys and values of every artifact of attention, sequence by sequence. Those of a sequence take memory from
/// its first call on.
#[derive(Debug)]
pub struct Caches<E> {
    packages: Vec<String>,
    slots: usize,
    all: Vec<Cache<E>>,
}

impl<E> Default for Caches<E> {
    fn default() -> Self {
        Self { packages: Vec::new(), slots: 0, all: Vec::new() }
    }
}

impl<E: Clone> Caches<E> {
    /// For as many sequences as a program has.
    pub fn new(slots: usize) -> Self {
        Self { slots, ..Self::default() }
    }

    /// The number of an artifact: its graphs keep the same.
    pub fn package(&mut self, name: &str) -> usize {
        self.packages.iter().position(|known| known == name).unwrap_or_else(|| {
            self.packages.push(name.to_owned());
            self.all.extend((0..self.slots).map(|_| Cache::<E>::default()));
            self.packages.len() - 1
        })
    }

    /// State of a sequence for an artifact; at first `empty` is.
    ///
    /// # Errors
    /// The sequence does not exist; message for people.
    pub fn of_sequence(
        &mut self,
        package: usize,
        slot: usize,
        empty: impl FnOnce() -> Result<Cache<E>, String>,
    ) -> Result<&mut Cache<E>, String> {
        let at = package.checked_mul(self.slots).and_then(|first| first.checked_add(slot));
        let cache = at.filter(|_| slot < self.slots).and_then(|at| self.all.get_mut(at));
        let cache = cache.ok_or_else(|| format!("there is no sequence {slot}, of {}", self.slots))?;
        if cache.iter().all(Vec::is_empty) {
            *cache = empty()?;
        }
        Ok(cache)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moec_runtime::exec::chunk;

    const CONTEXT: usize = 6;

    fn graph(rows: u32) -> GraphDecl {
        let tensor = |name: &str, shape| GraphTensor { name: name.to_owned(), shape };
        let context = CONTEXT as u32;
        GraphDecl {
            package: "artifacts/layers.0.attn.qnn".to_owned(),
            function: format!("chunk{rows}"),
            inputs: vec![
                tensor("x", [rows, 4, 1, 1]),
                tensor("angles", [rows, 2, 1, 1]),
                tensor("mask", [1, 1, rows, context]),
                tensor("write", [1, 1, context, rows]),
            ],
            outputs: vec![tensor("y", [rows, 4, 1, 1])],
            stateful: true,
        }
    }

    fn takes(rows: usize) -> Vec<(&'static str, Vec<usize>)> {
        let half = vec![rows, 1];
        let extents = [
            vec![rows, 4],
            vec![2, CONTEXT, 3],
            vec![2, CONTEXT, 1],
            vec![rows, CONTEXT + rows],
            half.clone(),
            half,
        ];
        INPUTS.into_iter().zip(extents).collect()
    }

    fn gives(rows: usize) -> Vec<(&'static str, Vec<usize>)> {
        vec![("y", vec![rows, 4]), ("new_keys", vec![2, rows, 3]), ("new_values", vec![2, rows, 1])]
    }

    /// Inputs of a call with these positions; the remaining rows are padding.
    fn inputs(rows: usize, positions: &[u32], window: Option<usize>) -> Vec<Vec<f16>> {
        let mut all = vec![vec![f16::ZERO; rows * 4], vec![f16::ZERO; rows * 2]];
        all[1].iter_mut().enumerate().for_each(|(i, x)| *x = f16::from_f32(i as f32));
        all.extend([vec![f16::ZERO; rows * CONTEXT], vec![f16::ZERO; rows * CONTEXT]]);
        chunk::mask(&mut all[2], CONTEXT, positions, window).unwrap();
        chunk::write(&mut all[3], CONTEXT, positions).unwrap();
        all
    }

    #[test]
    fn rows_attend_to_the_cache_and_earlier_rows() {
        let shape = Shape::of(&graph(3), &takes(3), &gives(3)).unwrap();
        let all = inputs(3, &[2, 3], None);
        let all: Vec<&[f16]> = all.iter().map(|x| &**x).collect();
        let given = shape.call_inputs(&all).unwrap();
        let row = |at: usize| -> String {
            given.sees[at * 9..(at + 1) * 9].iter().map(|sees| if *sees { '1' } else { '0' }).collect()
        };
        assert_eq!([row(0), row(1), row(2)], ["110000100", "110000110", "000000000"]);
        assert_eq!(given.places, [Some(2), Some(3), None]);
        let [cos, sin] = given.angles.unwrap().map(|x| x.iter().map(|x| x.to_f32()).collect::<Vec<_>>());
        assert_eq!((cos, sin), (vec![0.0, 2.0, 4.0], vec![1.0, 3.0, 5.0]));
        let all = inputs(3, &[2, 3, 4], Some(2));
        let all: Vec<&[f16]> = all.iter().map(|x| &**x).collect();
        let sees = shape.call_inputs(&all).unwrap().sees;
        let row = |at: usize| -> String {
            sees[at * 9..(at + 1) * 9].iter().map(|s| if *s { '1' } else { '0' }).collect()
        };
        assert_eq!([row(0), row(1), row(2)], ["010000100", "000000110", "000000011"]);
    }

    #[test]
    fn keys_and_values_are_written_at_row_positions() {
        let shape = Shape::of(&graph(2), &takes(2), &gives(2)).unwrap();
        assert_eq!((shape.cache_lengths(), shape.chunk_lengths()), ([36, 12], [12, 4]));
        let (mut keys, mut values) = (vec![0_u32; 36], vec![0_u32; 12]);
        let new: [Vec<u32>; 2] = [(1..=12).collect(), (1..=4).collect()];
        shape.write_caches([&mut keys, &mut values], [&new[0], &new[1]], [1, 1], &[Some(4), None]);
        assert_eq!(keys[12..15], [1, 2, 3]);
        assert_eq!(keys[18 + 12..18 + 15], [7, 8, 9]);
        assert_eq!(values, [0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 3, 0]);
        assert_eq!(keys.iter().filter(|x| **x != 0).count(), 6);
    }

    #[test]
    fn other_graphs_and_other_inputs_are_refused() {
        let wrong =
            |takes: &Tensors<'_>, gives: &Tensors<'_>| Shape::of(&graph(2), takes, gives).unwrap_err();
        let mut other = takes(2);
        other[3].1[1] = CONTEXT;
        assert!(wrong(&other, &gives(2)).contains("`mask` [2, 6], expected `mask` [2, 8]"));
        assert!(wrong(&takes(2)[..2], &gives(2)).contains("no keys and values"));
        assert!(
            wrong(&takes(2)[..4], &gives(2)).contains("4 inputs or results, but the plan's attention has 6")
        );
        assert!(wrong(&takes(2), &gives(2)[..1]).contains("1 inputs or results"));
        let mut graph = graph(2);
        graph.inputs.remove(3);
        assert!(Shape::of(&graph, &takes(2), &gives(2)).unwrap_err().contains("no `write`"));
    }

    #[test]
    fn a_call_of_another_size_is_refused() {
        let shape = Shape::of(&graph(2), &takes(2), &gives(2)).unwrap();
        let all = inputs(2, &[0, 1], None);
        let some: Vec<&[f16]> = all.iter().map(|x| &**x).take(3).collect();
        assert!(shape.call_inputs(&some).unwrap_err().contains("input 3 is not given"));
        let mut twice = all.clone();
        twice[3].fill(f16::ONE);
        let twice: Vec<&[f16]> = twice.iter().map(|x| &**x).collect();
        assert!(shape.call_inputs(&twice).unwrap_err().contains("two positions"));
    }

    #[test]
    fn sequences_keep_separate_caches() {
        let mut caches = Caches::<u8>::new(2);
        let (a, b) = (caches.package("a"), caches.package("b"));
        assert_eq!((a, b, caches.package("a")), (0, 1, 0));
        let empty = || Ok([vec![7], vec![8]]);
        caches.of_sequence(a, 1, empty).unwrap()[0][0] = 1;
        assert_eq!(*caches.of_sequence(a, 1, empty).unwrap(), [vec![1], vec![8]]);
        assert_eq!(*caches.of_sequence(b, 1, empty).unwrap(), [vec![7], vec![8]]);
        assert!(caches.of_sequence(b, 2, empty).unwrap_err().contains("no sequence 2"));
    }
}
