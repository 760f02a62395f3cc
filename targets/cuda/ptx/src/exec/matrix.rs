//! Products of small matrices by a warp (PTX ISA, section 9.7.14.5): which lane holds which element, and in
//! what order they are summed.
//!
//! Products of floating point are summed by f32 multiply-adds, each rounded to the nearest, along the columns
//! of `a` in order. The ISA leaves order and width open, and tensor cores sum several products at once with
//! fewer roundings: results differ in the last bits.

use crate::code::{Element, Matrix};
use crate::lanes::{Lanes, WARP, mask, signed};
use crate::number::{BF16, E4M3, E5M2, F16};

const ROWS: usize = 16;
const COLUMNS: usize = 8;

/// An element of a register.
fn element(register: u64, i: u32, of: Element) -> f64 {
    let bits = 32 / of.per_register();
    let part = register >> (i * bits) & mask(bits);
    match of {
        Element::F16 => F16.value(part),
        Element::Bf16 => BF16.value(part),
        Element::E4m3 => E4M3.value(part),
        Element::E5m2 => E5M2.value(part),
        // Bits below the first ten of the significand are not read.
        Element::Tf32 => f64::from(f32::from_bits(part as u32 & !0x1fff)),
        Element::S8 => signed(part, 8) as f64,
        Element::U8 => part as f64,
    }
}

/// `a * b + c`, in the registers of every lane: four of `d`. Registers are those of `a`, `b` and `c`, in
/// order.
pub(super) fn product<'r>(matrix: Matrix, register: &dyn Fn(usize) -> &'r Lanes) -> [Lanes; 4] {
    let depth = matrix.depth as usize;
    let (of_a, of_b) = (matrix.a.per_register() as usize, matrix.b.per_register() as usize);
    let (mut a, mut b) = (vec![0.0; ROWS * depth], vec![0.0; depth * COLUMNS]);
    let (count_a, count_b) = (ROWS * depth / WARP / of_a, COLUMNS * depth / WARP / of_b);
    for lane in 0..WARP {
        let (group, place) = (lane / 4, lane % 4);
        for r in 0..count_a {
            for j in 0..of_a {
                let (row, column) = (group + 8 * (r & 1), place * of_a + j + 4 * of_a * (r >> 1));
                a[row * depth + column] = element(register(r)[lane], j as u32, matrix.a);
            }
        }
        for r in 0..count_b {
            for j in 0..of_b {
                let row = place * of_b + j + 4 * of_b * r;
                b[row * COLUMNS + group] = element(register(count_a + r)[lane], j as u32, matrix.b);
            }
        }
    }
    let mut found = [[0; WARP]; 4];
    for (i, out) in found.iter_mut().enumerate() {
        let sums = register(count_a + count_b + i);
        for lane in 0..WARP {
            let (row, column) = (lane / 4 + 8 * (i / 2), 2 * (lane % 4) + i % 2);
            let pairs = (0..depth).map(|k| (a[row * depth + k], b[k * COLUMNS + column]));
            out[lane] = if matrix.a.is_integer() {
                let sum = pairs.fold(i64::from(sums[lane] as i32), |sum, (a, b)| sum + a as i64 * b as i64);
                u64::from(sum as u32)
            } else {
                let first = f32::from_bits(sums[lane] as u32);
                let sum = pairs.fold(first, |sum, (a, b)| (a as f32).mul_add(b as f32, sum));
                if sum.is_nan() { 0x7fff_ffff } else { u64::from(sum.to_bits()) }
            };
        }
    }
    found
}
