//! From bytes at an instruction pointer to an AMX instruction: the encodings of Intel's manual, volume 2,
//! for a 64-bit program without address-size or segment prefixes, which LLVM does not emit.

/// First byte of a three-byte VEX prefix.
const VEX: u8 = 0xc4;
/// Opcode map `0F38`, in the prefix's second byte.
const MAP_0F38: u8 = 2;
/// ModRM's r/m and SIB's "none": what a register number of 4 means there.
const SIB: u8 = 4;
/// ModRM's r/m or SIB's base of 5 without displacement bits: no base register.
const NO_BASE: u8 = 5;

/// Where a base address comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Base {
    /// Nowhere: 0.
    None,
    /// A general register, by its number in the encoding (0 rax, 1 rcx, … 15 r15).
    Reg(u8),
    /// The address of the next instruction.
    Next,
}

/// An operand in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Memory {
    /// Base.
    pub(super) base: Base,
    /// Index register and the power of two that it is multiplied with. Tile rows are that far apart.
    pub(super) index: Option<(u8, u8)>,
    /// Displacement in bytes.
    pub(super) disp: i32,
}

/// How the elements of a dot product are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dot {
    /// Pairs of bf16.
    Bf16,
    /// Quads of 8-bit integers: whether those of the first and the second operand are signed.
    Int8(bool, bool),
}

/// An AMX instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Op {
    /// `ldtilecfg`
    LoadConfig(Memory),
    /// `sttilecfg`
    StoreConfig(Memory),
    /// `tilerelease`
    Release,
    /// `tilezero`
    Zero(u8),
    /// `tileloadd` and `tileloaddt1`
    Load(u8, Memory),
    /// `tilestored`
    Store(u8, Memory),
    /// `tdpbf16ps` and `tdpb[su][su]d`: destination, first and second operand.
    Dot(Dot, [u8; 3]),
}

/// Decodes the instruction whose byte `i` is `at(i)`: what it is and how long. Only bytes of the
/// instruction are asked for. `None`: no AMX instruction of those above.
pub(super) fn decode(at: impl Fn(usize) -> u8) -> Option<(Op, usize)> {
    if at(0) != VEX {
        return None;
    }
    // Register extensions and the third operand are stored inverted.
    let (rxb, wvlp) = (at(1), at(2));
    let (r, x, b) = (!rxb >> 7 & 1, !rxb >> 6 & 1, !rxb >> 5 & 1);
    let (wide, third, long, prefix) = (wvlp >> 7, !wvlp >> 3 & 15, wvlp >> 2 & 1, wvlp & 3);
    if rxb & 31 != MAP_0F38 || wide != 0 || long != 0 || r != 0 {
        return None;
    }
    let (opcode, modrm) = (at(3), at(4));
    let (mode, reg, rm) = (modrm >> 6, modrm >> 3 & 7, modrm & 7);
    let registers = mode == 3;
    if !matches!(opcode, 0x5c | 0x5e) && third != 0 {
        return None;
    }
    let memory = || memory(&at, mode, rm, x, b);
    Some(match (opcode, prefix, registers) {
        (0x49, 0, false) if reg == 0 => memory().map(|(m, len)| (Op::LoadConfig(m), len))?,
        (0x49, 1, false) if reg == 0 => memory().map(|(m, len)| (Op::StoreConfig(m), len))?,
        (0x49, 0, true) if reg == 0 && rm == 0 && b == 0 => (Op::Release, 5),
        (0x49, 3, true) if rm == 0 && b == 0 => (Op::Zero(reg), 5),
        (0x4b, 1 | 3, false) if rm == SIB => memory().map(|(m, len)| (Op::Load(reg, m), len))?,
        (0x4b, 2, false) if rm == SIB => memory().map(|(m, len)| (Op::Store(reg, m), len))?,
        (0x5c | 0x5e, _, true) if b == 0 && third < 8 => {
            let dot = match (opcode, prefix) {
                (0x5c, 2) => Dot::Bf16,
                (0x5e, 0) => Dot::Int8(false, false),
                (0x5e, 1) => Dot::Int8(false, true),
                (0x5e, 2) => Dot::Int8(true, false),
                (0x5e, 3) => Dot::Int8(true, true),
                _ => return None,
            };
            (Op::Dot(dot, [reg, rm, third]), 5)
        }
        _ => return None,
    })
}

/// The memory operand behind the ModRM byte at 4, and where the instruction ends.
fn memory(at: &impl Fn(usize) -> u8, mode: u8, rm: u8, x: u8, b: u8) -> Option<(Memory, usize)> {
    let disp32 = |from: usize| i32::from_le_bytes([at(from), at(from + 1), at(from + 2), at(from + 3)]);
    let (low, index, mut end) = if rm == SIB {
        let sib = at(5);
        let number = x << 3 | sib >> 3 & 7;
        (sib & 7, (number != SIB).then_some((number, sib >> 6)), 6)
    } else {
        (rm, None, 5)
    };
    let mut base = Base::Reg(b << 3 | low);
    let disp = match mode {
        0 if low == NO_BASE => {
            base = if rm == SIB { Base::None } else { Base::Next };
            end += 4;
            disp32(end - 4)
        }
        0 => 0,
        1 => {
            end += 1;
            i32::from(at(end - 1).cast_signed())
        }
        2 => {
            end += 4;
            disp32(end - 4)
        }
        _ => return None,
    };
    Some((Memory { base, index, disp }, end))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mem(base: u8, index: Option<(u8, u8)>, disp: i32) -> Memory {
        Memory { base: Base::Reg(base), index, disp }
    }

    /// Bytes from `llvm-mc --show-encoding`, LLVM 22.
    #[test]
    fn as_the_assembler_encodes() {
        let cases: &[(&[u8], Op)] = &[
            // ldtilecfg (%rax)
            (&[0xc4, 0xe2, 0x78, 0x49, 0x00], Op::LoadConfig(mem(0, None, 0))),
            // ldtilecfg 64(%rsp)
            (&[0xc4, 0xe2, 0x78, 0x49, 0x44, 0x24, 0x40], Op::LoadConfig(mem(4, None, 64))),
            // ldtilecfg -128(%rbp,%r9,4)
            (&[0xc4, 0xa2, 0x78, 0x49, 0x44, 0x8d, 0x80], Op::LoadConfig(mem(5, Some((9, 2)), -128))),
            // ldtilecfg 0x1000(%rip)
            (
                &[0xc4, 0xe2, 0x78, 0x49, 0x05, 0x00, 0x10, 0x00, 0x00],
                Op::LoadConfig(Memory { base: Base::Next, index: None, disp: 4096 }),
            ),
            // ldtilecfg (%r13)
            (&[0xc4, 0xc2, 0x78, 0x49, 0x45, 0x00], Op::LoadConfig(mem(13, None, 0))),
            // sttilecfg (%r12)
            (&[0xc4, 0xc2, 0x79, 0x49, 0x04, 0x24], Op::StoreConfig(mem(12, None, 0))),
            // sttilecfg 0x12345678(%rdi)
            (
                &[0xc4, 0xe2, 0x79, 0x49, 0x87, 0x78, 0x56, 0x34, 0x12],
                Op::StoreConfig(mem(7, None, 0x1234_5678)),
            ),
            // tilerelease
            (&[0xc4, 0xe2, 0x78, 0x49, 0xc0], Op::Release),
            // tilezero %tmm0
            (&[0xc4, 0xe2, 0x7b, 0x49, 0xc0], Op::Zero(0)),
            // tilezero %tmm7
            (&[0xc4, 0xe2, 0x7b, 0x49, 0xf8], Op::Zero(7)),
            // tileloadd (%rdi,%rsi,1), %tmm0
            (&[0xc4, 0xe2, 0x7b, 0x4b, 0x04, 0x37], Op::Load(0, mem(7, Some((6, 0)), 0))),
            // tileloadd 64(%rdi,%rsi,1), %tmm3
            (&[0xc4, 0xe2, 0x7b, 0x4b, 0x5c, 0x37, 0x40], Op::Load(3, mem(7, Some((6, 0)), 64))),
            // tileloadd 0x2000(%r15,%r14,8), %tmm7
            (
                &[0xc4, 0x82, 0x7b, 0x4b, 0xbc, 0xf7, 0x00, 0x20, 0x00, 0x00],
                Op::Load(7, mem(15, Some((14, 3)), 0x2000)),
            ),
            // tileloadd (%rax), %tmm1
            (&[0xc4, 0xe2, 0x7b, 0x4b, 0x0c, 0x20], Op::Load(1, mem(0, None, 0))),
            // tileloadd 0x1000(,%rbx,2), %tmm2
            (
                &[0xc4, 0xe2, 0x7b, 0x4b, 0x14, 0x5d, 0x00, 0x10, 0x00, 0x00],
                Op::Load(2, Memory { base: Base::None, index: Some((3, 1)), disp: 4096 }),
            ),
            // tileloadd (%rbp,%r12,1), %tmm4
            (&[0xc4, 0xa2, 0x7b, 0x4b, 0x64, 0x25, 0x00], Op::Load(4, mem(5, Some((12, 0)), 0))),
            // tileloaddt1 (%r13,%rax,1), %tmm5
            (&[0xc4, 0xc2, 0x79, 0x4b, 0x6c, 0x05, 0x00], Op::Load(5, mem(13, Some((0, 0)), 0))),
            // tilestored %tmm6, -64(%rcx,%rdx,4)
            (&[0xc4, 0xe2, 0x7a, 0x4b, 0x74, 0x91, 0xc0], Op::Store(6, mem(1, Some((2, 2)), -64))),
            // tilestored %tmm0, (%rsp)
            (&[0xc4, 0xe2, 0x7a, 0x4b, 0x04, 0x24], Op::Store(0, mem(4, None, 0))),
            // tdpbf16ps %tmm2, %tmm1, %tmm0
            (&[0xc4, 0xe2, 0x6a, 0x5c, 0xc1], Op::Dot(Dot::Bf16, [0, 1, 2])),
            // tdpbf16ps %tmm7, %tmm5, %tmm3
            (&[0xc4, 0xe2, 0x42, 0x5c, 0xdd], Op::Dot(Dot::Bf16, [3, 5, 7])),
            // tdpbssd %tmm2, %tmm1, %tmm0
            (&[0xc4, 0xe2, 0x6b, 0x5e, 0xc1], Op::Dot(Dot::Int8(true, true), [0, 1, 2])),
            // tdpbsud %tmm6, %tmm5, %tmm4
            (&[0xc4, 0xe2, 0x4a, 0x5e, 0xe5], Op::Dot(Dot::Int8(true, false), [4, 5, 6])),
            // tdpbusd %tmm2, %tmm1, %tmm0
            (&[0xc4, 0xe2, 0x69, 0x5e, 0xc1], Op::Dot(Dot::Int8(false, true), [0, 1, 2])),
            // tdpbuud %tmm3, %tmm4, %tmm7
            (&[0xc4, 0xe2, 0x60, 0x5e, 0xfc], Op::Dot(Dot::Int8(false, false), [7, 4, 3])),
        ];
        for (bytes, op) in cases {
            let read =
                |i: usize| *bytes.get(i).unwrap_or_else(|| panic!("{bytes:x?}: byte {i} is not its own"));
            assert_eq!(decode(read), Some((*op, bytes.len())), "{bytes:x?}");
        }
    }

    #[test]
    fn others_are_not_ours() {
        let cases: [&[u8]; 8] = [
            &[0x0f, 0x0b],                         // ud2
            &[0x62, 0xf2, 0x76, 0x48, 0x52, 0xc2], // vdpbf16ps
            &[0xc4, 0xe2, 0x78, 0x49, 0xc1],       // tilerelease with a register
            &[0xc4, 0xe2, 0x70, 0x49, 0xc0],       // tilerelease with a third operand
            &[0xc4, 0xe2, 0xfb, 0x4b, 0x04, 0x08], // tileloadd with W
            &[0xc4, 0x62, 0x7b, 0x4b, 0x04, 0x08], // tileloadd to a ninth tile
            &[0xc4, 0xe2, 0x7b, 0x4b, 0x01],       // tileloadd without SIB
            &[0xc4, 0xe2, 0x33, 0x5e, 0xc1],       // tdpbssd with tile 9
        ];
        for bytes in cases {
            assert_eq!(decode(|i| bytes.get(i).copied().unwrap_or(0)), None, "{bytes:x?}");
        }
    }
}
