//! Dispatch table, as the kernels of experts read it.

use crate::dsl::{I, P};
use moec_ir::op::DispatchLayout;

/// An active expert: its id and its slots.
pub(crate) struct Expert<'k> {
    pub(crate) id: I<'k>,
    pub(crate) first: I<'k>,
    pub(crate) end: I<'k>,
}

pub(crate) fn expert<'k>(dispatch: P<'k>, layout: DispatchLayout, active: I<'k>) -> Expert<'k> {
    let start = dispatch.words(layout.start()).words(active);
    Expert {
        id: dispatch.words(layout.expert()).words(active).load_int(),
        first: start.load_int(),
        end: start.words(1).load_int(),
    }
}
