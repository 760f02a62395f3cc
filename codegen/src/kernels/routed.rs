//! What the dispatch table tells the kernels of experts.

use crate::dsl::{I, P};
use moec_ir::op::DispatchLayout;

/// An active expert: its id and its slots.
pub(super) struct Expert<'k> {
    pub(super) id: I<'k>,
    pub(super) first: I<'k>,
    pub(super) end: I<'k>,
}

pub(super) fn expert<'k>(dispatch: P<'k>, layout: DispatchLayout, active: I<'k>) -> Expert<'k> {
    let start = dispatch.words(layout.start()).words(active);
    Expert {
        id: dispatch.words(layout.expert()).words(active).load_int(),
        first: start.load_int(),
        end: start.words(1).load_int(),
    }
}
