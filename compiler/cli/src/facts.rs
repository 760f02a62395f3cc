//! The figures of a checkpoint, for `model.toml` and `moec inspect`.

use moec_config::Facts;
use moec_import::ModelSpec;
use moec_import::spec::{LayerSpec, Norm};
use moec_ir::{Format, Leaf, WeightClass, WeightExpr};
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashSet};

/// Parameters by class, while they are counted.
struct Count<'a> {
    classes: [Class; WeightClass::ALL.len()],
    /// Returns the format that stores a leaf exactly as the checkpoint does, if there is one.
    format: &'a dyn Fn(&Leaf) -> Option<Format>,
}

/// Facts about a class.
#[derive(Default)]
struct Class {
    parameters: u64,
    /// Formats that store its matrices exactly, without duplicates; `None` for a matrix that no format stores
    /// exactly.
    stored: Vec<Option<Format>>,
}

impl Count<'_> {
    /// Counts a weight. The importer has checked every shape.
    fn add(&mut self, class: WeightClass, w: &WeightExpr) {
        let of = &mut self.classes[class as usize];
        of.parameters += parameters(w);
        for leaf in w.leaves() {
            let format = (self.format)(leaf);
            if !of.stored.contains(&format) {
                of.stored.push(format);
            }
        }
    }
}

/// Every weight of a model.
fn weights(spec: &ModelSpec) -> impl Iterator<Item = (WeightClass, &WeightExpr)> {
    let layers = spec.layers.iter().flat_map(|l| {
        let norms = l.blocks.iter().flat_map(|b| b.norm.iter().chain(&b.post_norm));
        let exact = norms.flat_map(Norm::weights).chain(&l.scale).map(|w| (WeightClass::Exact, w));
        exact.chain(l.mixers().flat_map(|m| m.of().weights()))
    });
    let exact = spec.final_norm.weights().chain(&spec.head_bias).map(|w| (WeightClass::Exact, w));
    let tables = spec.head.iter().chain([&spec.embed]).map(|w| (WeightClass::Embeddings, w));
    layers.chain(exact).chain(tables)
}

/// Storage formats of a checkpoint, as `describe` names them, with their counts of numbers, the largest
/// first.
pub fn stored_as(spec: &ModelSpec, describe: &dyn Fn(&Leaf) -> String) -> Vec<(String, u64)> {
    let mut seen = HashSet::new();
    let mut storage: BTreeMap<String, u64> = BTreeMap::new();
    for leaf in weights(spec).flat_map(|(_, w)| w.leaves()).filter(|leaf| seen.insert(&leaf.tensor)) {
        *storage.entry(describe(leaf)).or_default() += leaf.shape.iter().map(|&d| d as u64).product::<u64>();
    }
    let mut storage: Vec<_> = storage.into_iter().collect();
    storage.sort_by_key(|(_, numbers)| Reverse(*numbers));
    storage
}

/// Count of the checkpoint's numbers in a weight. Repeated numbers count once; factors count, too.
fn parameters(w: &WeightExpr) -> u64 {
    match w {
        WeightExpr::Const(_) => 0,
        WeightExpr::Repeat { of, .. } => parameters(of),
        WeightExpr::ScaleCols { of, by } | WeightExpr::ScaleMatrices { of, by } => {
            parameters(of) + parameters(by)
        }
        WeightExpr::Concat { of, .. } | WeightExpr::Stack(of) => of.iter().map(parameters).sum(),
        _ => w.shape().map_or(0, |shape| shape.iter().map(|&d| d as u64).product()),
    }
}

/// Facts about a model. `format` returns the format that stores a leaf exactly as the checkpoint does, if
/// there is one.
pub fn of(spec: &ModelSpec, format: &dyn Fn(&Leaf) -> Option<Format>) -> Facts {
    let mut c = Count { classes: Default::default(), format };
    weights(spec).for_each(|(class, w)| c.add(class, w));
    let states = || spec.layers.iter().flat_map(LayerSpec::mixers).map(|m| m.of().state_size());
    let moe = || spec.layers.iter().filter_map(LayerSpec::moe);
    let by_class = || WeightClass::ALL.into_iter().zip(&c.classes);
    let one = |of: &Class| if let [format] = of.stored[..] { format } else { None };
    let coded = |of: &Class| {
        of.stored.iter().all(Option::is_some) && of.stored.iter().flatten().any(|f| f.is_published())
    };
    Facts {
        family: spec.family.to_owned(),
        parameters: spec.params,
        active_parameters: spec.active_params,
        layers: spec.layers.len(),
        moe_layers: moe().count(),
        experts: spec.experts(),
        experts_per_token: moe().map(|m| m.router.k).max().unwrap_or(0),
        max_context: spec.max_positions,
        kv: states().filter(|k| k.per_token > 0).map(|k| (k.per_token, k.window)).collect(),
        folded: states().map(|k| k.folded).sum(),
        by_class: by_class().map(|(class, of)| (class, of.parameters)).collect(),
        stored: by_class().filter_map(|(class, of)| Some((class, one(of)?))).collect(),
        coded: by_class().filter(|(_, of)| coded(of)).map(|(class, _)| class).collect(),
        tied_embeddings: spec.head.is_none(),
    }
}
