//! Resolves parsed modules to executable code: names become numbers, types are checked, calls are inlined.
#![expect(
    clippy::cast_possible_truncation,
    reason = "registers hold 64 bits of which an instruction takes its own; counts are below the limits of a module"
)]

mod build;
mod control;
mod convert;
mod flatten;
mod float;
mod form;
mod integer;
mod logic;
mod memory;
mod names;
mod special;
mod warp;

pub(crate) use flatten::kernel;

use crate::opcode::Opcode;
use form::{Form, Resolved};

/// Decides what an instruction does.
fn resolve(form: &mut Form<'_, '_>) -> Resolved<()> {
    use Opcode::*;
    match form.opcode() {
        Add | Sub | Mul | Mad | Fma | Div | Rem | Abs | Neg | Min | Max | Sqrt | Rcp | Copysign | Testp => {
            if form.last_is_float() {
                float::resolve(form)
            } else {
                integer::resolve(form)
            }
        }
        Ex2 | Lg2 | Sin | Cos | Tanh | Rsqrt => special::resolve(form),
        Bfe | Bfi | Bfind | Brev | Clz | Popc | Cnot | Dp2a | Dp4a | Mul24 | Sad => integer::resolve(form),
        And | Or | Xor | Not | Shl | Shr | Shf | Lop3 | Prmt => logic::bits(form),
        Setp | Set | Selp | Slct | Mov => logic::choose(form),
        Cvt => convert::resolve(form),
        Ld | Ldu | St | Atom | Red | Cp | Ldmatrix | Prefetch | Cvta | Isspacep => memory::resolve(form),
        Shfl | Vote | Activemask | Redux | Mma | Bar | Barrier => warp::resolve(form),
        Bra | Brx | Call | Ret | Exit | Trap | Membar | Fence | Nanosleep => control::resolve(form),
    }
}
