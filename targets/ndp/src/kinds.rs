//! Activations of the Graph as the instruction set has them.

use moec_ndp_isa as isa;

/// How gate and up join.
pub const fn glu(glu: moec_ir::Glu) -> isa::Glu {
    match glu {
        moec_ir::Glu::Gated(act) => isa::Glu::Gated(activation(act)),
        moec_ir::Glu::DRelu => isa::Glu::DRelu,
        moec_ir::Glu::Clamped { alpha, limit } => isa::Glu::Clamped { alpha, limit },
    }
}

/// A function of the activation unit.
pub const fn activation(act: moec_ir::Activation) -> isa::Activation {
    match act {
        moec_ir::Activation::Silu => isa::Activation::Silu,
        moec_ir::Activation::Gelu => isa::Activation::Gelu,
        moec_ir::Activation::GeluTanh => isa::Activation::GeluTanh,
        moec_ir::Activation::Relu => isa::Activation::Relu,
        moec_ir::Activation::Sigmoid => isa::Activation::Sigmoid,
    }
}
