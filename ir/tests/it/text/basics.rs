//! Random numbers, names, and other common parts of both text forms.

use proptest::prelude::*;

pub(super) fn list<S: Strategy>(of: S, n: std::ops::Range<usize>) -> impl Strategy<Value = Vec<S::Value>> {
    prop::collection::vec(of, n)
}

pub(super) fn float() -> impl Strategy<Value = f32> {
    prop::num::f32::ANY.prop_filter("NaN has no text", |x| !x.is_nan())
}

pub(super) fn small() -> impl Strategy<Value = usize> {
    prop_oneof![0..100_usize, any::<usize>()]
}

pub(super) fn text() -> impl Strategy<Value = String> {
    prop_oneof!["[a-z_][a-z0-9_.]{0,8}", "\\PC{0,6}", any::<String>()]
}
