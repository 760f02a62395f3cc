//! A group of numbers: a scale, and whole codes that it multiplies.

use moec_ir::types::GROUP;

/// A group as it is stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Group {
    /// Scale: a number that scales of the format hold.
    pub scale: f32,
    /// Codes.
    pub codes: [i8; GROUP],
}

impl Group {
    /// All zeros.
    pub const ZERO: Self = Self { scale: 0.0, codes: [0; GROUP] };

    /// The numbers that are stored.
    pub fn values(&self) -> [f32; GROUP] {
        self.codes.map(|q| f32::from(q) * self.scale)
    }
}
