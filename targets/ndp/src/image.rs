//! The bytes of one expert in a DIMM.
//!
//! `[gate_up panels][down panels][gate_up bias, f32][down bias, f32]`. Panels are those of packed segments of
//! 32 columns ([`moec_ir::plan::Layout`]). So a weight is copied into a DIMM as it is in the bundle, and the
//! CPU can read the unit's data. Every part is whole lines: a record of a panel is two of them, and biases
//! are as long as their panels are wide.
#![expect(
    clippy::cast_possible_truncation,
    reason = "numbers of a memory system below 2⁴⁰ lines, and of one layer"
)]

use moec_ir::Glu;
use moec_ir::plan::Layout;
use moec_ndp_isa::{GLU_PANEL, LINE, PAIR_LINES, PANEL};
use std::ops::Range;

/// Most channels of an expert, hidden or inner.
pub const MAX_CHANNELS: u32 = 1 << 20;
/// Lines of the sums of one panel, in f32.
pub(crate) const SUM_LINES: u64 = (PANEL * 4 / LINE) as u64;

/// Whether streams read weights with that layout.
pub fn is_read(layout: Layout) -> bool {
    matches!(layout, Layout::Panels { nr: PANEL } | Layout::GluPanels { nr: PANEL })
}

/// The gated feed-forward network of an expert.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// Channels of a token.
    pub hidden: u32,
    /// Outputs of the gate, and of up.
    pub inner: u32,
    /// Function that joins gate and up.
    pub glu: Glu,
    /// Whether both matrices have a bias.
    pub bias: bool,
}

/// A matrix of panels, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matrix {
    /// First line in the image.
    pub line: u64,
    /// Panels of 32 columns.
    pub panels: u32,
    /// Pairs of input channels.
    pub pairs: u32,
}

/// Places of an expert's parts in its image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Image {
    /// Gate and up: 16 gate columns before the 16 up columns of the same outputs.
    pub gate_up: Matrix,
    /// Down.
    pub down: Matrix,
    /// First line of the biases of gate and up, `32·panels` f32 in the order of the panels, and of those of
    /// down.
    pub biases: Option<(u64, u64)>,
    /// Lines in all.
    pub lines: u64,
}

/// An expert that has no image.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    /// No channels, or too many.
    #[error(
        "an expert of {hidden} by {inner} channels: both numbers are at least 1 and at most {MAX_CHANNELS}"
    )]
    Channels {
        /// Channels of a token.
        hidden: u32,
        /// Channels between gate and down.
        inner: u32,
    },
    /// A part that has another size.
    #[error("the {part} of an expert of {hidden} by {inner} take {want} bytes, but {found} are given")]
    Bytes {
        /// Channels of a token.
        hidden: u32,
        /// Channels between gate and down.
        inner: u32,
        /// Name of the part.
        part: &'static str,
        /// Bytes that are there.
        found: u64,
        /// Bytes that the shape requires.
        want: u64,
    },
    /// Biases for a shape without, or none for one with them.
    #[error("an expert {} biases, but {} are given", if *.expected { "with" } else { "without" }, if *.expected { "none" } else { "some" })]
    Biases {
        /// Whether the shape has them.
        expected: bool,
    },
}

/// Packed parts of an expert, from which its image is assembled.
#[derive(Clone, Copy, Debug)]
pub struct Packed<'a> {
    /// Panels of gate and up, as a packed segment of [`moec_ir::plan::Layout::GluPanels`] has them.
    pub gate_up: &'a [u8],
    /// Panels of down, as [`moec_ir::plan::Layout::Panels`] has them.
    pub down: &'a [u8],
    /// Biases as the Graph has them: `[2·inner]`, the gate's first, and `[hidden]`.
    pub biases: Option<(&'a [f32], &'a [f32])>,
}

impl Matrix {
    /// Lines of one panel.
    pub const fn panel_lines(&self) -> u64 {
        self.pairs as u64 * PAIR_LINES as u64
    }

    /// Lines of the matrix.
    pub const fn lines(&self) -> u64 {
        self.panels as u64 * self.panel_lines()
    }

    /// Lines of the matrix in its image.
    pub const fn range(&self) -> Range<u64> {
        self.line..self.line + self.lines()
    }

    /// Weights, those included that fill the last panel.
    pub const fn weights(&self) -> u64 {
        self.panels as u64 * self.pairs as u64 * 2 * PANEL as u64
    }
}

impl Shape {
    /// Places of the parts.
    ///
    /// # Errors
    /// [`ImageError::Channels`].
    pub fn image(&self) -> Result<Image, ImageError> {
        let &Self { hidden, inner, bias, .. } = self;
        let fits = 1..=MAX_CHANNELS;
        if !fits.contains(&hidden) || !fits.contains(&inner) {
            return Err(ImageError::Channels { hidden, inner });
        }
        let gate_up = Matrix { line: 0, panels: inner.div_ceil(GLU_PANEL), pairs: hidden.div_ceil(2) };
        let down = Matrix { line: gate_up.lines(), panels: hidden.div_ceil(PANEL), pairs: inner.div_ceil(2) };
        let weights = down.range().end;
        let of_down = weights + u64::from(gate_up.panels) * SUM_LINES;
        let end = of_down + u64::from(down.panels) * SUM_LINES;
        let (biases, lines) = if bias { (Some((weights, of_down)), end) } else { (None, weights) };
        Ok(Image { gate_up, down, biases, lines })
    }

    /// Lines of a token's activations, bf16.
    pub const fn input_lines(&self) -> u64 {
        (self.hidden as u64 * 2).div_ceil(LINE as u64)
    }

    /// Lines of a token's results, f32.
    pub const fn output_lines(&self) -> u64 {
        (self.hidden as u64 * 4).div_ceil(LINE as u64)
    }

    /// The image of an expert: its parts one after the other, no weight changed.
    ///
    /// # Errors
    /// A shape without an image, and parts that are not of this shape.
    pub fn pack(&self, parts: Packed<'_>) -> Result<Vec<u8>, ImageError> {
        let image = self.image()?;
        let size = |part, found: usize, want: u64| {
            let (found, &Self { hidden, inner, .. }) = (found as u64, self);
            if found == want { Ok(()) } else { Err(ImageError::Bytes { hidden, inner, part, found, want }) }
        };
        size("gate and up panels", parts.gate_up.len(), image.gate_up.lines() * u64::from(LINE))?;
        size("down panels", parts.down.len(), image.down.lines() * u64::from(LINE))?;
        let mut bytes = Vec::with_capacity((image.lines * u64::from(LINE)) as usize);
        bytes.extend_from_slice(parts.gate_up);
        bytes.extend_from_slice(parts.down);
        match parts.biases {
            Some((gate_up, down)) if self.bias => {
                size("gate and up biases", gate_up.len() * 4, u64::from(self.inner) * 8)?;
                size("down biases", down.len() * 4, u64::from(self.hidden) * 4)?;
                let (gate, up) = gate_up.split_at(self.inner as usize);
                for (gate, up) in gate.chunks(GLU_PANEL as usize).zip(up.chunks(GLU_PANEL as usize)) {
                    put(&mut bytes, gate, GLU_PANEL as usize);
                    put(&mut bytes, up, GLU_PANEL as usize);
                }
                put(&mut bytes, down, (image.down.panels * PANEL) as usize);
            }
            None if !self.bias => {}
            _ => return Err(ImageError::Biases { expected: self.bias }),
        }
        Ok(bytes)
    }
}

/// Numbers, and zeros up to `width` of them.
fn put(bytes: &mut Vec<u8>, numbers: &[f32], width: usize) {
    let filled = numbers.iter().copied().chain(std::iter::repeat(0.0)).take(width);
    bytes.extend(filled.flat_map(f32::to_le_bytes));
}

#[cfg(test)]
mod tests {
    use super::*;
    use moec_ir::Activation;

    fn shape(hidden: u32, inner: u32, bias: bool) -> Shape {
        Shape { hidden, inner, glu: Glu::Gated(Activation::Silu), bias }
    }

    #[test]
    fn image_parts_are_consecutive() {
        let image = shape(100, 36, true).image().expect("an image");
        assert_eq!(image.gate_up, Matrix { line: 0, panels: 3, pairs: 50 });
        assert_eq!(image.down, Matrix { line: 300, panels: 4, pairs: 18 });
        assert_eq!(image.biases, Some((444, 450)));
        assert_eq!(image.lines, 458);
    }

    #[test]
    fn deepseek_v2_takes_47_megabytes() {
        let image = shape(5120, 1536, false).image().expect("an image");
        assert_eq!(image.lines * 64, 5120 * 1536 * 3 * 2);
    }

    #[test]
    fn channels_are_bounded() {
        for (hidden, inner) in [(0, 1), (1, 0), (MAX_CHANNELS + 1, 1), (1, u32::MAX)] {
            assert_eq!(shape(hidden, inner, false).image(), Err(ImageError::Channels { hidden, inner }));
        }
        assert!(shape(MAX_CHANNELS, MAX_CHANNELS, true).image().is_ok());
    }

    #[test]
    fn biases_are_laid_out_like_panels() {
        let shape = shape(2, 17, true);
        let image = shape.image().expect("an image");
        let (gate_up, down) =
            (vec![0; image.gate_up.lines() as usize * 64], vec![0; image.down.lines() as usize * 64]);
        let bias: Vec<f32> = (0..34).map(|i| i as f32).collect();
        let parts = Packed { gate_up: &gate_up, down: &down, biases: Some((&bias, &[7.0, 8.0])) };
        let bytes = shape.pack(parts).expect("an image");
        let at = |i: usize| {
            let from = image.biases.expect("biases").0 as usize * 64 + 4 * i;
            f32::from_le_bytes([bytes[from], bytes[from + 1], bytes[from + 2], bytes[from + 3]])
        };
        assert_eq!((at(0), at(15), at(16), at(31)), (0.0, 15.0, 17.0, 32.0));
        assert_eq!((at(32), at(33), at(48), at(49)), (16.0, 0.0, 33.0, 0.0));
        assert_eq!((at(64), at(65), at(66)), (7.0, 8.0, 0.0));
        assert_eq!(bytes.len() as u64, image.lines * 64);
        let wrong = shape.pack(Packed { down: &down[64..], ..parts }).expect_err("too short");
        assert_eq!(
            wrong.to_string(),
            "the down panels of an expert of 2 by 17 take 1152 bytes, but 1088 are given"
        );
        let none = shape.pack(Packed { biases: None, ..parts }).expect_err("no biases");
        assert_eq!(none.to_string(), "an expert with biases, but none are given");
    }
}
