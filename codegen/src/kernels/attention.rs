//! Attention.
use crate::dsl::Kb;
use crate::machine::Isa;
use crate::spec::KernelSpec;
use moec_ir::op::AttentionDesc;
pub(crate) struct Scratch;
impl Scratch {
    pub(crate) fn of(_: &AttentionDesc, _: &Isa) -> Self {
        Self
    }
    pub(crate) fn bytes(&self) -> usize {
        0
    }
}
pub(super) fn write<'k>(k: &'k Kb<'k>, _: &KernelSpec) {
    k.fail("not yet");
}
