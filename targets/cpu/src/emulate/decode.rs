//! From bytes at an instruction pointer to an AMX instruction, by iced-x86: of a 64-bit program without
//! address-size or segment prefixes, which LLVM does not emit.

use iced_x86::{Code, Decoder, DecoderError, DecoderOptions, Instruction, Register};

/// Bytes of the longest instruction.
pub(super) const LONGEST: usize = 15;

/// Source of a base address.
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

/// Type of a dot product's elements.
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

/// Reason that bytes are not an AMX instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unknown {
    /// The bytes end before the instruction does.
    Truncated,
    /// Another instruction, or none.
    Other,
}

/// Decodes the instruction at the beginning of some bytes; returns its operation and length. The first call
/// creates tables, later calls only read them.
pub(super) fn decode(bytes: &[u8]) -> Result<(Op, usize), Unknown> {
    let mut decoder = Decoder::new(64, bytes, DecoderOptions::NONE);
    let found = decoder.decode();
    if decoder.last_error() == DecoderError::NoMoreBytes {
        return Err(Unknown::Truncated);
    }
    let tile = |register| number(register, Register::TMM0);
    let dot =
        |dot| Op::Dot(dot, [found.op0_register(), found.op1_register(), found.op2_register()].map(tile));
    let op = match found.code() {
        Code::VEX_Ldtilecfg_m512 => Op::LoadConfig(memory(&found)?),
        Code::VEX_Sttilecfg_m512 => Op::StoreConfig(memory(&found)?),
        Code::VEX_Tilerelease => Op::Release,
        Code::VEX_Tilezero_tmm => Op::Zero(tile(found.op0_register())),
        Code::VEX_Tileloadd_tmm_sibmem | Code::VEX_Tileloaddt1_tmm_sibmem => {
            Op::Load(tile(found.op0_register()), memory(&found)?)
        }
        Code::VEX_Tilestored_sibmem_tmm => Op::Store(tile(found.op1_register()), memory(&found)?),
        Code::VEX_Tdpbf16ps_tmm_tmm_tmm => dot(Dot::Bf16),
        Code::VEX_Tdpbuud_tmm_tmm_tmm => dot(Dot::Int8(false, false)),
        Code::VEX_Tdpbusd_tmm_tmm_tmm => dot(Dot::Int8(false, true)),
        Code::VEX_Tdpbsud_tmm_tmm_tmm => dot(Dot::Int8(true, false)),
        Code::VEX_Tdpbssd_tmm_tmm_tmm => dot(Dot::Int8(true, true)),
        _ => return Err(Unknown::Other),
    };
    Ok((op, found.len()))
}

/// Number of a register in encodings; its class begins with `first`.
fn number(register: Register, first: Register) -> u8 {
    (register as usize - first as usize) as u8
}

/// The memory operand of an instruction.
fn memory(found: &Instruction) -> Result<Memory, Unknown> {
    let general = |register| match register {
        Register::None => Ok(None),
        r if (Register::RAX..=Register::R15).contains(&r) => Ok(Some(number(r, Register::RAX))),
        _ => Err(Unknown::Other),
    };
    let scale = found.memory_index_scale().trailing_zeros() as u8;
    let index = general(found.memory_index())?.map(|index| (index, scale));
    let disp = found.memory_displacement64() as i32;
    if found.has_segment_prefix() {
        return Err(Unknown::Other);
    }
    Ok(match found.memory_base() {
        // iced-x86 gives the address for an instruction at 0.
        Register::RIP => Memory { base: Base::Next, index, disp: disp - found.len() as i32 },
        base => Memory { base: general(base)?.map_or(Base::None, Base::Reg), index, disp },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mem(base: u8, index: Option<(u8, u8)>, disp: i32) -> Memory {
        Memory { base: Base::Reg(base), index, disp }
    }

    /// Bytes from `llvm-mc --show-encoding`, LLVM 22.
    #[test]
    fn tile_instructions_decode_as_llvm_encodes_them() {
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
            assert_eq!(decode(bytes), Ok((*op, bytes.len())), "{bytes:x?}");
            assert_eq!(decode(&bytes[..bytes.len() - 1]), Err(Unknown::Truncated), "{bytes:x?}");
            assert_eq!(decode(&[*bytes, &[0x90; 4]].concat()), Ok((*op, bytes.len())), "{bytes:x?}");
        }
    }

    #[test]
    fn other_instructions_are_not_decoded() {
        let cases: [&[u8]; 10] = [
            &[0x0f, 0x0b],                         // ud2
            &[0x62, 0xf2, 0x76, 0x48, 0x52, 0xc2], // vdpbf16ps
            &[0xc4, 0xe2, 0x78, 0x49, 0xc1],       // tilerelease with a register
            &[0xc4, 0xe2, 0x70, 0x49, 0xc0],       // tilerelease with a third operand
            &[0xc4, 0xe2, 0xfb, 0x4b, 0x04, 0x08], // tileloadd with W
            &[0xc4, 0x62, 0x7b, 0x4b, 0x04, 0x08], // tileloadd to a ninth tile
            &[0xc4, 0xe2, 0x7b, 0x4b, 0x01],       // tileloadd without SIB
            &[0xc4, 0xe2, 0x33, 0x5e, 0xc1],       // tdpbssd with tile 9
            &[0x64, 0xc4, 0xe2, 0x78, 0x49, 0x00], // ldtilecfg %fs:(%rax)
            &[0x67, 0xc4, 0xe2, 0x78, 0x49, 0x00], // ldtilecfg (%eax)
        ];
        for bytes in cases {
            assert_eq!(decode(&[bytes, &[0; LONGEST]].concat()), Err(Unknown::Other), "{bytes:x?}");
        }
    }
}
