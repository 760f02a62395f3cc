//! Routers.
use crate::dsl::Kb;
use crate::machine::Isa;
use crate::spec::KernelSpec;
use moec_ir::op::RouterDesc;
pub(crate) fn scratch_bytes(_: &RouterDesc, _: &Isa) -> usize {
    0
}
pub(super) fn rules(_: &RouterDesc, _: usize) -> Vec<(bool, &'static str)> {
    Vec::new()
}
pub(super) fn write<'k>(k: &'k Kb<'k>, _: &KernelSpec) {
    k.fail("not yet");
}
