//! Tile registers (AMX): eight of up to 16 rows of 64 bytes, named by number.
//!
//! The compiler does not allocate them: a kernel names the register of every operand, in one function, and
//! LLVM keeps the order of these instructions. So nothing of them is ever spilled.

use super::{I, Kb, P};
use inkwell::values::{BasicMetadataValueEnum, BasicValueEnum};

const LOAD_CONFIG: &str = "llvm.x86.ldtilecfg";
const RELEASE: &str = "llvm.x86.tilerelease";
const ZERO: &str = "llvm.x86.tilezero";
const LOAD: &str = "llvm.x86.tileloadd64";
const STORE: &str = "llvm.x86.tilestored64";
const DOT: &str = "llvm.x86.tdpbf16ps";
const FENCE: &str = "llvm.x86.sse.sfence";

/// Instructions of a machine with tiles.
pub(super) const INSTRUCTIONS: [&str; 7] = [LOAD_CONFIG, RELEASE, ZERO, LOAD, STORE, DOT, FENCE];

/// Rows of a tile, at most.
pub(crate) const TILE_ROWS: usize = 16;
/// Bytes of a row of a tile, at most.
pub(crate) const TILE_ROW_BYTES: usize = 64;
/// Tile registers.
const TILES: usize = 8;
/// Bytes of a configuration.
pub(crate) const TILE_CONFIG_BYTES: usize = 64;

/// A tile register.
#[derive(Clone, Copy)]
pub(crate) struct Tile(pub(crate) u8);

impl<'k> Kb<'k> {
    fn tile_instruction(&'k self, name: &'static str, args: &[BasicMetadataValueEnum<'k>]) {
        match self.instructions.get(name) {
            Some(function) => self.done(self.b.build_call(*function, args, "")),
            None => self.fail(format!("this machine has no {name}")),
        }
    }

    fn tile(&self, tile: Tile) -> BasicMetadataValueEnum<'k> {
        self.ctx.i8_type().const_int(u64::from(tile.0), false).into()
    }

    /// Gives every tile its shape, bytes per row (baked in) and rows, and clears it. The configuration is
    /// written to `at`, [`TILE_CONFIG_BYTES`] of scratch. No shape may be empty.
    pub(crate) fn shape_tiles(&'k self, at: P<'k>, shapes: [(usize, I<'k>); TILES]) {
        let word = |i: usize| at.bytes(4 * i);
        // Palette 1; bytes per row from byte 16 on, 16 bits each; rows from byte 48 on, 8 bits each.
        let mut words = [0i64; TILE_CONFIG_BYTES / 4];
        words[0] = 1;
        for (i, (bytes, _)) in shapes.iter().enumerate() {
            words[4 + i / 2] |= (*bytes as i64) << (16 * (i % 2));
        }
        for (i, &w) in words.iter().enumerate() {
            word(i).store_int(self.i32(w as i32));
        }
        for (half, shapes) in shapes.chunks_exact(4).enumerate() {
            let mut rows = self.i(0);
            for (i, (_, count)) in shapes.iter().enumerate() {
                rows = rows | count.shl(8 * i as i64);
            }
            word(12 + half).store_int(rows.narrow());
        }
        self.tile_instruction(LOAD_CONFIG, &[at.v.into()]);
    }

    /// Gives the tiles back: the operating system need not save them any more.
    pub(crate) fn release_tiles(&'k self) {
        self.tile_instruction(RELEASE, &[]);
    }

    /// Orders stores past the caches before all later stores, for every thread.
    pub(crate) fn fence_stores(&'k self) {
        self.tile_instruction(FENCE, &[]);
    }

    /// Clears a tile.
    pub(crate) fn zero_tile(&'k self, tile: Tile) {
        self.tile_instruction(ZERO, &[self.tile(tile)]);
    }

    /// `to += a · b`, f32 by pairs of bf16.
    pub(crate) fn dot_tiles(&'k self, to: Tile, a: Tile, b: Tile) {
        self.tile_instruction(DOT, &[self.tile(to), self.tile(a), self.tile(b)]);
    }
}

impl<'k> P<'k> {
    /// Loads a tile whose rows are `stride` bytes apart.
    pub(crate) fn load_tile(self, tile: Tile, stride: usize) {
        self.tile_access(LOAD, tile, stride);
    }

    /// Stores a tile to rows that are `stride` bytes apart.
    pub(crate) fn store_tile(self, tile: Tile, stride: usize) {
        self.tile_access(STORE, tile, stride);
    }

    fn tile_access(self, name: &'static str, tile: Tile, stride: usize) {
        let k = self.k;
        let stride: BasicValueEnum<'k> = k.i64t().const_int(stride as u64, false).into();
        k.tile_instruction(name, &[k.tile(tile), self.v.into(), stride.into()]);
    }
}
