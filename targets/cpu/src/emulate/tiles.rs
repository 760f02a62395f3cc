//! The tile registers of a thread and the effect of instructions on them, after the "Operation" sections of
//! Intel's manual (volume 2, `LDTILECFG` … `TILEZERO`; volume 1, chapter 18).

use super::decode::Dot;

/// Tile registers.
const TILES: usize = 8;
/// Rows of a tile, at most; the multiplier takes as many rows of its second operand.
const ROWS: usize = 16;
/// Bytes of a row, at most.
const ROW_BYTES: usize = 64;
/// 32-bit words of a row, at most.
const WORDS: usize = ROW_BYTES / 4;
/// Bytes of a configuration in memory.
pub(super) const CONFIG_BYTES: usize = 64;
/// Offset of the bytes per row in a configuration, 16 bits each.
const COLSB_AT: usize = 16;
/// Offset of the rows in a configuration, 8 bits each.
const ROWS_AT: usize = 48;

/// The CPU would have raised an exception: `#UD`, or `#GP` for a bad configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fault;

/// Shape of a tile.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Shape {
    rows: u8,
    /// Bytes per row.
    colsb: u16,
}

/// Configuration and contents.
#[repr(align(64))]
pub(super) struct Tiles {
    /// 0: not configured.
    palette: u8,
    /// First row of the next load or store: not 0 only after one that was interrupted.
    start_row: u8,
    shapes: [Shape; TILES],
    data: [[[u32; WORDS]; ROWS]; TILES],
}

impl Tiles {
    /// State after a reset.
    pub(super) const INIT: Self = Self {
        palette: 0,
        start_row: 0,
        shapes: [Shape { rows: 0, colsb: 0 }; TILES],
        data: [[[0; WORDS]; ROWS]; TILES],
    };

    /// `tilerelease`
    pub(super) fn release(&mut self) {
        // In place: a signal stack has no room for another set of tiles.
        self.palette = 0;
        self.start_row = 0;
        self.shapes = [Shape::default(); TILES];
        self.data.as_flattened_mut().fill([0; WORDS]);
    }

    /// `ldtilecfg`: clears every tile. A configuration of palette 0 releases.
    pub(super) fn configure(&mut self, config: &[u8; CONFIG_BYTES]) -> Result<(), Fault> {
        let mut shapes = [Shape::default(); TILES];
        for (i, shape) in shapes.iter_mut().enumerate() {
            let at = COLSB_AT + 2 * i;
            *shape =
                Shape { rows: config[ROWS_AT + i], colsb: u16::from_le_bytes([config[at], config[at + 1]]) };
        }
        let palette = config[0];
        if palette == 0 {
            self.release();
            return Ok(());
        }
        let reserved = [2..COLSB_AT, COLSB_AT + 2 * TILES..ROWS_AT, ROWS_AT + TILES..CONFIG_BYTES];
        let fits = |s: &Shape| {
            usize::from(s.rows) <= ROWS
                && usize::from(s.colsb) <= ROW_BYTES
                && (s.rows == 0) == (s.colsb == 0)
        };
        if palette != 1
            || !shapes.iter().all(fits)
            || reserved.into_iter().any(|r| config[r].iter().any(|&b| b != 0))
        {
            return Err(Fault);
        }
        self.release();
        (self.palette, self.start_row, self.shapes) = (palette, config[1], shapes);
        Ok(())
    }

    /// `sttilecfg`
    pub(super) fn configuration(&self) -> [u8; CONFIG_BYTES] {
        let mut config = [0; CONFIG_BYTES];
        config[0] = self.palette;
        config[1] = self.start_row;
        for (i, s) in self.shapes.iter().enumerate() {
            config[COLSB_AT + 2 * i..][..2].copy_from_slice(&s.colsb.to_le_bytes());
            config[ROWS_AT + i] = s.rows;
        }
        config
    }

    /// Shape of a tile that instructions may name.
    fn shape(&self, tile: u8) -> Result<Shape, Fault> {
        match self.shapes.get(usize::from(tile)) {
            Some(s) if self.palette != 0 && s.rows > 0 => Ok(*s),
            _ => Err(Fault),
        }
    }

    /// `tilezero`
    pub(super) fn zero(&mut self, tile: u8) -> Result<(), Fault> {
        self.shape(tile)?;
        self.data[usize::from(tile)].fill([0; WORDS]);
        self.start_row = 0;
        Ok(())
    }

    /// `tileloadd`: row `r` from `base + r · stride`.
    ///
    /// # Safety
    /// The rows of the tile's shape must be readable there.
    pub(super) unsafe fn load(&mut self, tile: u8, base: usize, stride: usize) -> Result<(), Fault> {
        let shape = self.shape(tile)?;
        let (first, end) = (usize::from(self.start_row), usize::from(shape.rows));
        for (r, row) in self.data[usize::from(tile)].iter_mut().enumerate().skip(first) {
            *row = [0; WORDS];
            if r < end {
                let from = base.wrapping_add(r.wrapping_mul(stride)) as *const u8;
                // SAFETY: the caller vouches for `colsb` bytes at each row's address; a row of ours holds
                // as many, and no other memory overlaps it.
                unsafe { from.copy_to_nonoverlapping(row.as_mut_ptr().cast(), usize::from(shape.colsb)) };
            }
        }
        self.start_row = 0;
        Ok(())
    }

    /// `tilestored`: row `r` to `base + r · stride`.
    ///
    /// # Safety
    /// The rows of the tile's shape must be writable there.
    pub(super) unsafe fn store(&mut self, tile: u8, base: usize, stride: usize) -> Result<(), Fault> {
        let shape = self.shape(tile)?;
        let rows = &self.data[usize::from(tile)][..usize::from(shape.rows)];
        for (r, row) in rows.iter().enumerate().skip(usize::from(self.start_row)) {
            let to = base.wrapping_add(r.wrapping_mul(stride)) as *mut u8;
            // SAFETY: as in `load`.
            unsafe { to.copy_from_nonoverlapping(row.as_ptr().cast(), usize::from(shape.colsb)) };
        }
        self.start_row = 0;
        Ok(())
    }

    /// `tdpbf16ps`, `tdpbssd` and their kin: `destination += first · second`.
    pub(super) fn dot(&mut self, dot: Dot, [to, a, b]: [u8; 3]) -> Result<(), Fault> {
        let (t, x, y) = (self.shape(to)?, self.shape(a)?, self.shape(b)?);
        let agree = t.rows == x.rows && t.colsb == y.colsb && x.colsb == 4 * u16::from(y.rows);
        if !agree || t.colsb % 4 != 0 || to == a || to == b || a == b || self.start_row != 0 {
            return Err(Fault);
        }
        let (depth, columns) = (usize::from(y.rows), usize::from(t.colsb / 4));
        let [to, x, y] = [to, a, b].map(usize::from);
        for m in 0..usize::from(t.rows) {
            let mut row = self.data[to][m];
            let (first, second) = (&self.data[x][m][..depth], &self.data[y][..depth]);
            match dot {
                Dot::Bf16 => dot_bf16(&mut row, first, second),
                Dot::Int8(signed, also) => dot_int8(&mut row, first, second, [signed, also]),
            }
            row[columns..].fill(0);
            self.data[to][m] = row;
        }
        self.data[to][usize::from(t.rows)..].fill([0; WORDS]);
        Ok(())
    }
}

/// A row of `tdpbf16ps`: two chains of fused multiply-adds, for the low and the high element of each pair,
/// joined at the end. Denormals are zeros on the way in and on the way out; ties round to even.
fn dot_bf16(row: &mut [u32; WORDS], first: &[u32], second: &[[u32; WORDS]]) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx512f") {
        // SAFETY: the CPU has the features.
        return unsafe { dot_bf16_wide(row, first, second) };
    }
    dot_bf16_plain(row, first, second);
}

/// The same instructions as [`dot_bf16_plain`], which the compiler then turns into vectors.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx2,fma")]
fn dot_bf16_wide(row: &mut [u32; WORDS], first: &[u32], second: &[[u32; WORDS]]) {
    dot_bf16_plain(row, first, second);
}

#[allow(clippy::inline_always, reason = "the caller compiles it for its own target features")]
#[inline(always)]
fn dot_bf16_plain(row: &mut [u32; WORDS], first: &[u32], second: &[[u32; WORDS]]) {
    let (mut low, mut high) = ([0f32; WORDS], [0f32; WORDS]);
    for (&a, b) in first.iter().zip(second) {
        let (a0, a1) = (flush(bf16_low(a)), flush(bf16_high(a)));
        for n in 0..WORDS {
            low[n] = flush(a0.mul_add(flush(bf16_low(b[n])), low[n]));
            high[n] = flush(a1.mul_add(flush(bf16_high(b[n])), high[n]));
        }
    }
    for n in 0..WORDS {
        row[n] = flush(flush(f32::from_bits(row[n])) + flush(low[n] + high[n])).to_bits();
    }
}

#[allow(clippy::inline_always, reason = "the caller compiles it for its own target features")]
#[inline(always)]
fn bf16_low(pair: u32) -> f32 {
    f32::from_bits(pair << 16)
}

#[allow(clippy::inline_always, reason = "the caller compiles it for its own target features")]
#[inline(always)]
fn bf16_high(pair: u32) -> f32 {
    f32::from_bits(pair & 0xffff_0000)
}

/// A denormal becomes a zero of its sign.
#[allow(clippy::inline_always, reason = "the caller compiles it for its own target features")]
#[inline(always)]
fn flush(x: f32) -> f32 {
    let bits = x.to_bits();
    let sign = bits & 0x8000_0000;
    f32::from_bits(if bits & 0x7f80_0000 == 0 { sign } else { bits })
}

/// A row of `tdpb[su][su]d`: sums wrap around.
fn dot_int8(row: &mut [u32; WORDS], first: &[u32], second: &[[u32; WORDS]], signed: [bool; 2]) {
    let wide = |byte: u8, signed: bool| {
        if signed { i32::from(byte.cast_signed()) } else { i32::from(byte) }
    };
    for (a, b) in first.iter().zip(second) {
        let a = a.to_le_bytes().map(|x| wide(x, signed[0]));
        for (sum, b) in row.iter_mut().zip(b) {
            let b = b.to_le_bytes().map(|x| wide(x, signed[1]));
            let products = (a.iter().zip(b)).fold(0i32, |s, (&x, y)| s.wrapping_add(x * y));
            *sum = sum.wrapping_add(products.cast_unsigned());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A configuration of tiles of `(rows, bytes per row)`.
    fn config(shapes: &[(u8, u16)]) -> [u8; CONFIG_BYTES] {
        let mut c = [0; CONFIG_BYTES];
        c[0] = 1;
        for (i, &(rows, colsb)) in shapes.iter().enumerate() {
            c[COLSB_AT + 2 * i..][..2].copy_from_slice(&colsb.to_le_bytes());
            c[ROWS_AT + i] = rows;
        }
        c
    }

    fn configured(shapes: &[(u8, u16)]) -> Tiles {
        let mut t = Tiles::INIT;
        t.configure(&config(shapes)).unwrap();
        t
    }

    fn pair(low: f32, high: f32) -> u32 {
        low.to_bits() >> 16 | high.to_bits() & 0xffff_0000
    }

    #[test]
    fn tile_configuration_is_stored_and_validated() {
        let good = config(&[(16, 64), (3, 8), (1, 1)]);
        let mut t = Tiles::INIT;
        t.configure(&good).unwrap();
        assert_eq!(t.configuration(), good);
        for (at, value) in [(0, 2), (2, 1), (16, 65), (32, 1), (48, 17), (49, 0), (56, 1), (63, 1)] {
            let mut bad = good;
            bad[at] = value;
            assert_eq!(t.configure(&bad), Err(Fault), "byte {at}");
            assert_eq!(t.configuration(), good, "a fault changes nothing");
        }
        t.configure(&[0; CONFIG_BYTES]).unwrap();
        assert_eq!(t.configuration(), [0; CONFIG_BYTES]);
        assert_eq!(t.zero(0), Err(Fault), "nothing is configured");
    }

    #[test]
    fn tile_loads_and_stores_respect_the_shape() {
        let mut t = configured(&[(3, 10)]);
        let from: Vec<u8> = (0..100).collect();
        let mut to = vec![0xeeu8; 60];
        // SAFETY: three rows of ten bytes, 30 and 20 bytes apart, are inside the vectors.
        unsafe {
            t.load(0, from.as_ptr() as usize, 30).unwrap();
            t.store(0, to.as_mut_ptr() as usize, 20).unwrap();
        }
        for r in 0..3 {
            assert_eq!(to[20 * r..20 * r + 10], from[30 * r..30 * r + 10]);
            assert!(to[20 * r + 10..20 * r + 20].iter().all(|&b| b == 0xee));
        }
        assert_eq!(t.data[0][0][2], u32::from_le_bytes([8, 9, 0, 0]), "the rest of a row is zero");
        // SAFETY: no tile 1 is configured, so nothing is read.
        assert_eq!(unsafe { t.load(1, from.as_ptr() as usize, 1) }, Err(Fault));
    }

    #[test]
    fn tile_dot_products_require_matching_shapes() {
        let shapes = [(4, 32), (4, 12), (3, 32), (4, 16)];
        let mut t = configured(&shapes);
        assert_eq!(t.dot(Dot::Bf16, [0, 1, 2]), Ok(()));
        for bad in [[0, 1, 1], [0, 0, 2], [0, 2, 0], [0, 3, 2], [1, 1, 2], [3, 1, 2], [0, 1, 4]] {
            assert_eq!(t.dot(Dot::Bf16, bad), Err(Fault), "{bad:?}");
        }
    }

    #[test]
    fn bf16_dot_sums_in_two_chains() {
        let mut t = configured(&[(1, 4), (1, 8), (2, 4)]);
        // 2^24 + 1 rounds to 2^24 in one f32 sum, but the 1 is kept if it goes to the other sum.
        let big = 16_777_216.0;
        t.data[1][0][..2].copy_from_slice(&[pair(big, 1.0), pair(0.0, 1.0)]);
        t.data[2][0][0] = pair(1.0, 1.0);
        t.data[2][1][0] = pair(1.0, 1.0);
        t.data[0][0][0] = 0.5f32.to_bits();
        t.dot(Dot::Bf16, [0, 1, 2]).unwrap();
        // (2^24 + (1 + 1)) + 0.5, where the last sum rounds to even.
        assert_eq!(f32::from_bits(t.data[0][0][0]), big + 2.0);
        assert_eq!(t.data[0][0][1..], [0; WORDS - 1]);
    }

    #[test]
    fn bf16_denormals_are_zeros() {
        let denormal = f32::from_bits(0x0040_0000);
        let smallest = f32::MIN_POSITIVE;
        let run = |sum: f32, a: [f32; 2], b: [f32; 2]| {
            let mut row = [0; WORDS];
            row[0] = sum.to_bits();
            let mut second = [[0; WORDS]; 1];
            second[0][0] = pair(b[0], b[1]);
            let mut plain = row;
            dot_bf16(&mut row, &[pair(a[0], a[1])], &second);
            dot_bf16_plain(&mut plain, &[pair(a[0], a[1])], &second);
            assert_eq!(row, plain, "vectors and scalars agree");
            f32::from_bits(row[0])
        };
        assert_eq!(run(0.0, [denormal, 0.0], [1e30, 0.0]), 0.0, "in an operand");
        assert_eq!(run(denormal, [0.0; 2], [0.0; 2]), 0.0, "in the destination");
        assert_eq!(run(0.0, [smallest, 0.0], [0.5, 0.0]), 0.0, "of a product");
        assert_eq!(run(smallest, [-smallest, 0.0], [0.5, 0.0]), smallest, "of a product, then added");
        assert_eq!(run(0.0, [smallest, smallest], [1.5, -1.0]), 0.0, "of the two chains' sum");
        assert_eq!(run(0.0, [smallest, smallest], [1.0, 1.0]), 2.0 * smallest);
        assert!(run(0.0, [f32::INFINITY, 0.0], [0.0, 0.0]).is_nan());
    }

    #[test]
    fn int8_dot_respects_signs_and_wraps() {
        for (dot, x, y) in [
            (Dot::Int8(true, true), -1, -2),
            (Dot::Int8(true, false), -1, 254),
            (Dot::Int8(false, true), 255, -2),
            (Dot::Int8(false, false), 255, 254),
        ] {
            let mut t = configured(&[(2, 8), (2, 4), (1, 8)]);
            t.data[1][1][0] = u32::from_le_bytes([0xff, 0xff, 0, 1]);
            t.data[2][0][1] = u32::from_le_bytes([0xfe, 0xfe, 7, 1]);
            t.data[0][1][1] = 10;
            t.dot(dot, [0, 1, 2]).unwrap();
            assert_eq!(t.data[0][1][1].cast_signed(), 10 + 2 * x * y + 1);
            assert_eq!(t.data[0][0][1], 0);
        }
        let mut row = [i32::MAX.cast_unsigned(); WORDS];
        dot_int8(&mut row, &[1], &[[1; WORDS]], [true, true]);
        assert_eq!(row[0].cast_signed(), i32::MIN);
    }
}
