//! Rules that look at the package as a whole.

use super::Scope;
use super::function::blobs;
use crate::package::{Blob, Dtype, Feature, Function, Origin, Place, Stored, ValueId};
use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{Hash, Hasher};

pub(super) fn signatures(scope: &mut Scope<'_>) {
    let program = &scope.package.program;
    for name in program.described.keys().filter(|n| !program.functions.contains_key(*n)) {
        scope.error(Place::function(name), "described, but missing");
    }
    for (name, f) in &program.functions {
        let Some(described) = program.described.get(name) else {
            scope.error(Place::function(name), "not described");
            continue;
        };
        compare(scope, name, f, "inputs", &f.inputs, &described.inputs);
        compare(scope, name, f, "outputs", &f.outputs, &described.outputs);
        compare(scope, name, f, "states", &f.states, &described.states);
    }
}

fn compare(
    scope: &mut Scope<'_>,
    name: &str,
    f: &Function,
    what: &str,
    ids: &[ValueId],
    features: &[Feature],
) {
    let own: Vec<&str> = ids.iter().map(|id| f.values[id.0].name.as_str()).collect();
    let described: Vec<&str> = features.iter().map(|d| d.name.as_str()).collect();
    if own != described {
        let message = format!("{what} are {own:?}, described as {described:?}");
        return scope.error(Place::function(name), message);
    }
    for (&id, feature) in ids.iter().zip(features) {
        let place = || Place::item(name, format!("feature `{}`", feature.name));
        let ty = &f.values[id.0].ty;
        match &feature.ty {
            Some(described) if described != ty => {
                scope.error(place(), format!("is {ty}, described as {described}"));
            }
            None if what != "outputs" => scope.error(place(), "described without a shape"),
            _ => {}
        }
        if feature.flexible {
            scope.error(place(), "described with several shapes: the Neural Engine requires one");
        }
        if feature.optional {
            scope.error(place(), "described as optional: the function needs it");
        }
    }
}

/// Checks the description of a package by moec. A package of others is not refused for lacking one.
pub(super) fn about(scope: &mut Scope<'_>) {
    let program = &scope.package.program;
    let a = &scope.package.about;
    for (what, text) in [
        ("author", &a.author),
        ("description", &a.description),
        ("license", &a.license),
        ("version", &a.version),
    ] {
        if text.is_empty() {
            scope.warning(Place::model(), format!("it has no {what}"));
        }
    }
    for (name, described) in &program.described {
        let all = described.inputs.iter().chain(&described.outputs).chain(&described.states);
        for feature in all {
            let place = || Place::item(name, format!("feature `{}`", feature.name));
            let known = |f: &Function| {
                let ids = f.inputs.iter().chain(&f.outputs).chain(&f.states);
                ids.map(|id| &f.values[id.0])
                    .find(|v| v.name == feature.name)
                    .map(|v| format!("{:?}", v.ty.shape))
            };
            let shape = program.functions.get(name).and_then(|f| known(f));
            if feature.about.is_empty() {
                scope.warning(place(), "it has no description");
            } else if let Some(shape) = shape.filter(|shape| !feature.about.contains(shape.as_str())) {
                scope.warning(place(), format!("its description is of another shape than {shape}"));
            }
        }
    }
}

/// Numbers read at a time.
const BLOCK: usize = 1 << 14;

pub(super) fn finite(scope: &mut Scope<'_>) {
    let package = scope.package;
    let mut seen = BTreeSet::new();
    for (name, f) in &package.program.functions {
        for value in &f.values {
            let Origin::Constant(constant) = &value.origin else { continue };
            let new = match constant.stored {
                Stored::Blob(blob) => seen.insert(blob),
                _ => true,
            };
            if !new || !constant.ty.dtype.is_float() {
                continue;
            }
            let count = constant.ty.elements();
            let mut block = vec![0.0; count.min(BLOCK)];
            for start in (0..count).step_by(BLOCK) {
                let len = (count - start).min(BLOCK);
                constant.floats(&package.weights, start, &mut block[..len]);
                let Some(i) = block[..len].iter().position(|x| !x.is_finite()) else { continue };
                let message = format!("element {} is {}; a mask takes −10000", start + i, block[i]);
                scope.error(Place::item(name, format!("constant `{}`", value.name)), message);
                break;
            }
        }
    }
}

pub(super) fn shared(scope: &mut Scope<'_>) {
    let package = scope.package;
    let mut readers: BTreeMap<Blob, Place> = BTreeMap::new();
    for (name, f) in &package.program.functions {
        for value in &f.values {
            let Origin::Constant(c) = &value.origin else { continue };
            // Only weights count: constants of small types are packed, and equal masks occur often.
            let Stored::Blob(blob) = c.stored else { continue };
            if c.ty.dtype != Dtype::Bool {
                readers
                    .entry(blob)
                    .or_insert_with(|| Place::item(name, format!("constant `{}`", value.name)));
            }
        }
    }
    let mut by_hash: BTreeMap<(usize, u64), Vec<Blob>> = BTreeMap::new();
    for (&blob, place) in &readers {
        let bytes = package.weights.bytes(blob);
        let mut hasher = DefaultHasher::new();
        bytes.hash(&mut hasher);
        let equal = by_hash.entry((blob.len, hasher.finish())).or_default();
        let duplicate = equal.iter().find(|b| package.weights.bytes(**b) == bytes).copied();
        match duplicate.and_then(|t| readers.get(&t)) {
            Some(duplicate) => {
                scope.error(place.clone(), format!("stored a second time; the first is {duplicate}"));
            }
            None => equal.push(blob),
        }
    }
    let read: BTreeSet<Blob> = package.program.functions.values().flat_map(|f| blobs(f)).collect();
    for file in 0..package.weights.files() {
        let Some((name, stored)) = package.weights.file(file) else { continue };
        let count = read.iter().filter(|b| b.file == file).count();
        if count != stored as usize {
            let place = Place { function: None, item: Some(format!("`{name}`")) };
            scope.warning(place, format!("{stored} weights are stored, {count} are read"));
        }
    }
}
