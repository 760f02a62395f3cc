//! The instructions of an NDP DIMM: a unit on its buffer chip that multiplies weights where they lie.
//!
//! A [`Stream`] is the work of one DIMM for one expert. It has a text form ([`parse`], [`print()`]), a binary
//! form ([`encode`], [`decode`]) and a verifier ([`verify`]). `docs/ndp-isa.md` defines the meaning of its
//! instructions, bit by bit. The unit is that of TriMoE (§4.1): a GEMV unit, an activation unit, a buffer of
//! 256 KB, a relayout unit and a DIMM-Link.
#![cfg_attr(test, allow(clippy::cast_possible_truncation, reason = "numbers of tests are small"))]

mod binary;
mod fault;
mod fields;
mod geometry;
mod op;
mod stream;
mod text;
mod uses;
mod verify;

pub use binary::{DecodeError, MAGIC, VERSION, decode, encode};
pub use fault::Fault;
pub use geometry::{Geometry, Layout, Place, System};
pub use op::{Activation, Engine, Glu, Lines, Number, Op, Slab};
pub use stream::{Access, Events, Instruction, Region, Stream};
pub use text::{SyntaxError, parse, print};
pub use uses::{Block, LinesUse, SlabUse, Touch};
pub use verify::verify;

/// Bytes of the buffer on the chip (TriMoE, §4.1).
pub const BUFFER: u32 = 256 * 1024;
/// Bytes of a line of DRAM: one burst of BL16 on a DDR5 subchannel of 32 bits (JESD79-5).
pub const LINE: u32 = 64;
/// Bytes that the base and the stride of a slab are multiples of.
pub const ALIGN: u32 = 64;
/// Events of a unit, `e0` to `e31`.
pub const EVENTS: u8 = 32;
/// Output columns of a panel of weights.
pub const PANEL: u32 = 32;
/// Outputs of a panel that holds gate and up columns of the same outputs.
pub const GLU_PANEL: u32 = 16;
/// Lines of one record of a panel: two input channels of its 32 columns in bf16.
pub const PAIR_LINES: u32 = 2;
/// Records of a full tile: 64 input channels by 32 columns, the 2048 weights that 256 multipliers of 8
/// numbers take at once.
pub const TILE_PAIRS: u32 = 32;

/// Most tokens of a block.
pub const MAX_TOKENS: u32 = 4096;
/// Most slots of an inbox or outbox.
pub const MAX_SLOTS: u32 = 1 << 20;
/// Most regions of a stream.
pub const MAX_REGIONS: usize = 256;
/// Most instructions of a stream.
pub const MAX_CODE: usize = 4096;
/// Most bytes of a name.
pub const MAX_NAME: usize = 64;
/// Line numbers, strides and the lines of a whole system are below this.
pub const MAX_LINES: u64 = 1 << 40;
