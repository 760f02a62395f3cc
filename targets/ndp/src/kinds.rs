//! Activations of the Graph as the instruction set has them.

use moec_ndp_isa as isa;

/// Function that joins gate and up; `None` where no instruction joins them so.
pub const fn glu(glu: moec_ir::Glu) -> Option<isa::Glu> {
    match glu {
        moec_ir::Glu::Gated(act) => match activation(act) {
            Some(act) => Some(isa::Glu::Gated(act)),
            None => None,
        },
        moec_ir::Glu::DRelu => Some(isa::Glu::DRelu),
        moec_ir::Glu::Clamped { alpha, limit } => Some(isa::Glu::Clamped { alpha, limit }),
        moec_ir::Glu::FatRelu { .. }
        | moec_ir::Glu::Cats { .. }
        | moec_ir::Glu::Limited { .. }
        | moec_ir::Glu::Ungated(_) => None,
    }
}

/// The activation unit's function for an activation; `None` if it has none.
pub const fn activation(act: moec_ir::Activation) -> Option<isa::Activation> {
    Some(match act {
        moec_ir::Activation::Silu => isa::Activation::Silu,
        moec_ir::Activation::Gelu => isa::Activation::Gelu,
        moec_ir::Activation::GeluTanh => isa::Activation::GeluTanh,
        moec_ir::Activation::Relu => isa::Activation::Relu,
        moec_ir::Activation::Sigmoid => isa::Activation::Sigmoid,
        moec_ir::Activation::Relu2 => return None,
    })
}
