//! States: memory that outlives a call, by kind, and its layout.
//!
//! The kind of a state determines the operations on a sequence: restart, copy, go back. A caller that
//! goes back checks it.
//!
//! Keys and values are stored as the panels of a weight are, so that `q · kᵀ` and `p · v` are matrix
//! products like any other. Every (slot, head) is contiguous; the last panel is padded.

use crate::types::{Codes, Format, GROUP};
use bincode::{Decode, Encode};
use std::fmt;

/// Kind of a state: what it keeps of a sequence, and so what can be done with it.
///
/// | kind | begins | goes back to an earlier position |
/// |---|---|---|
/// | `cache` | by its length alone | by its length alone: rows after it are never read before it is written again |
/// | `ring` | by its length alone | by its length alone, as long as what its window sees is not overwritten |
/// | `recurrent`, `convolution` | as zeros | from a snapshot that was taken at that position |
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Encode, Decode)]
pub enum StateKind {
    /// Keys or values of every position: `[slots, heads, ctx, dim]`.
    #[default]
    Cache,
    /// Keys or values of the last positions, for attention with a sliding window: `[slots, heads, ctx, dim]`,
    /// position `p` in row `p mod ctx` (Jiang et al., *Mistral 7B*, section 2, "rolling buffer cache").
    Ring {
        /// Positions that a token sees, its own included.
        window: u32,
    },
    /// Recurrent state after all tokens so far, one block of fixed size per slot: `[slots, heads, rows,
    /// dim]`. Linear attention has keys by values (Katharopoulos et al., *Transformers are RNNs*, equation
    /// 18), Mamba-2 channels of a head by its state (Dao and Gu, *Transformers are SSMs*, equation 1).
    Recurrent,
    /// The last K − 1 inputs of a causal convolution of width K: `[slots, groups, K − 1, channels]` (Gu and
    /// Dao, *Mamba*, section 3.4).
    Convolution,
}

impl StateKind {
    /// Its name in text forms and messages, without what else it says.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cache => "cache",
            Self::Ring { .. } => "ring",
            Self::Recurrent => "recurrent",
            Self::Convolution => "convolution",
        }
    }

    /// Whether every token changes all of it, so that only a snapshot knows what it was.
    pub const fn needs_snapshots(self) -> bool {
        match self {
            Self::Cache | Self::Ring { .. } => false,
            Self::Recurrent | Self::Convolution => true,
        }
    }
}

impl fmt::Display for StateKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ring { window } => write!(f, "{} {window}", self.name()),
            _ => f.write_str(self.name()),
        }
    }
}

/// Order of a KV-cache tensor within a (slot, head).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Encode, Decode)]
pub enum CacheOrder {
    /// `[ctx][dim]`, f32 only.
    Rows,
    /// Panels of `nr` tokens, the columns of `q · kᵀ`. f32: `[⌈ctx/nr⌉][dim][nr]`; bf16, channels in pairs:
    /// `[⌈ctx/nr⌉][⌈dim/2⌉][nr][2]`; q8: `[⌈ctx/nr⌉][⌈dim/32⌉]` of codes `[32][nr]`, then `nr` scales; q5 and
    /// q4: the same with codes in the order of a weight's panel, 5 or 4 words of 32 bits for each token.
    Keys {
        /// Tokens per panel.
        nr: u32,
    },
    /// Blocks of `block` tokens, in each panels of `nr` channels, the columns of `p · v`. f32:
    /// `[⌈ctx/block⌉][⌈dim/nr⌉][block][nr]`; bf16, tokens in pairs:
    /// `[⌈ctx/block⌉][⌈dim/nr⌉][block/2][nr][2]`; q8: in each block the codes ordered as f32, then the
    /// scales `[⌈dim/32⌉][block]`; q5 and q4: in each block, `[⌈dim/nr⌉][block][nr/2]` bytes with the low four
    /// bits of a channel of the panel's first half and of one of its second, in q5 then the fifth bits
    /// `[⌈dim/nr⌉][block][nr]`, then the scales.
    Values {
        /// Channels per panel.
        nr: u32,
        /// Tokens per block, even.
        block: u32,
    },
}

/// Snapshots of a slot that are not at fixed positions: where prompts end and part, and before tokens that
/// may be taken back.
pub const FREE_SNAPSHOTS: u32 = 2;

/// Snapshots that a plan gives each slot room for: fixed ones, whole chunks apart, and [`FREE_SNAPSHOTS`].
/// The fixed ones take no more memory than the slot, but are two at least. `folded` and `slot` are bytes of a
/// slot: of the states that need snapshots, and of all.
pub fn snapshots(folded: u64, slot: u64, context: u32, chunk: u32) -> u32 {
    let Some(fit) = slot.checked_div(folded) else { return 0 };
    let fixed = u32::try_from(fit.max(2)).unwrap_or(u32::MAX).min(context.div_ceil(chunk.max(1)));
    fixed.saturating_add(FREE_SNAPSHOTS).min(context)
}

/// A state. Its memory begins as zeros: `[slots, heads, rows, dim]` as kernels see it, the rows of a cache or
/// ring being positions; then as much again for each snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct StateBuf {
    /// Name.
    pub name: String,
    /// Index into [`crate::plan::Plan::memories`].
    pub memory: u32,
    /// Extents.
    pub shape: [u32; 4],
    /// Number format: one of [`CACHED`].
    pub format: Format,
    /// Order of the numbers.
    pub order: CacheOrder,
    /// Channels of a block of a head that is stored [rotated](rotate); 1: numbers as they are.
    pub rotated: u32,
    /// Kind: what it keeps of a sequence.
    pub kind: StateKind,
    /// Snapshots that each slot has room for. All slots share the room of all: how many earlier positions
    /// their sequences can go back to. Caches and rings need none, and have none.
    pub snapshots: u32,
}

/// Formats of a KV cache, those of more bits first.
pub const CACHED: [Format; 5] = [Format::F32, Format::Bf16, Format::Q8, Format::Q5, Format::Q4];

/// Whether a KV cache in this format stores heads [rotated](rotate).
///
/// Codes have one scale for 32 channels, and the largest of them decides on it. A rotation spreads channels that
/// are always large over a block (Ashkboos et al., *QuaRot*, section 4): with 8, 5 and 4 bits the probabilities of
/// the project's models diverge less (`docs/benchmarks.md`).
pub const fn stores_rotated(format: Format) -> bool {
    format.is_quantised()
}

/// Channels of a block of a head that is rotated: the largest power of two that divides all `extents`.
pub fn rotated_channels(extents: &[usize]) -> usize {
    let shared = extents.iter().fold(0, |all, n| all | n);
    if shared > 0 { 1 << shared.trailing_zeros() } else { 1 }
}

/// Factor that makes a Hadamard matrix of `block` rows orthonormal.
pub fn rotation_factor(block: usize) -> f32 {
    (block as f32).sqrt().recip()
}

/// Multiplies each block of `block` numbers, a power of two, by the orthonormal Hadamard matrix of Sylvester's
/// order (Fino and Algazi, *Unified matrix treatment of the fast Walsh-Hadamard transform*). It is its own
/// inverse, and keeps products of two rotated vectors: so scores of rotated queries and keys are those of the
/// originals.
pub fn rotate(numbers: &mut [f32], block: usize) {
    if block < 2 {
        return;
    }
    let factor = rotation_factor(block);
    for block in numbers.chunks_exact_mut(block) {
        let mut len = 1;
        while len < block.len() {
            for pairs in block.chunks_exact_mut(2 * len) {
                let (first, second) = pairs.split_at_mut(len);
                for (a, b) in first.iter_mut().zip(second) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            len *= 2;
        }
        for x in block.iter_mut() {
            *x *= factor;
        }
    }
}

/// One (slot, head) of a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CacheHead {
    /// Number format: one of [`CACHED`].
    pub format: Format,
    /// Order.
    pub order: CacheOrder,
    /// Tokens.
    pub ctx: usize,
    /// Channels.
    pub dim: usize,
}

/// Place of a number: byte offsets from the start of its (slot, head).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheOffsets {
    /// The number, or the byte with its code, of which q5 and q4 have the low four bits there.
    pub at: usize,
    /// Position of the code's bits in their byte.
    pub shift: usize,
    /// In q5, the byte with the code's fifth bit, and the position there.
    pub fifth: Option<(usize, usize)>,
    /// Its bf16 scale, of codes.
    pub scale: Option<usize>,
}

impl CacheOffsets {
    const fn plain(at: usize) -> Self {
        Self { at, shift: 0, fifth: None, scale: None }
    }
}

impl CacheHead {
    /// Bytes with padding; `None` where that overflows, and where the format has no such order.
    pub fn bytes(&self) -> Option<usize> {
        let Self { format, order, ctx, dim } = *self;
        let padded = |n: usize, to: u32| n.checked_next_multiple_of(to as usize).filter(|_| to > 0);
        let product = |factors: &[usize]| factors.iter().try_fold(1_usize, |n, &f| n.checked_mul(f));
        match (order, format) {
            (CacheOrder::Rows, Format::F32) => product(&[ctx, dim, 4]),
            (CacheOrder::Keys { nr }, Format::F32) => product(&[padded(ctx, nr)?, dim, 4]),
            (CacheOrder::Keys { nr }, Format::Bf16) => product(&[padded(ctx, nr)?, dim.div_ceil(2), 4]),
            (CacheOrder::Keys { nr }, Format::Q8 | Format::Q5 | Format::Q4) => {
                product(&[padded(ctx, nr)?, dim.div_ceil(GROUP), format.group_bytes()?])
            }
            (CacheOrder::Values { block, .. }, _) if block % 2 == 1 => None,
            (CacheOrder::Values { nr, block }, Format::F32) => {
                product(&[padded(ctx, block)?, padded(dim, nr)?, 4])
            }
            (CacheOrder::Values { nr, block }, Format::Bf16) => {
                product(&[padded(ctx, block)?, padded(dim, nr)?, 2])
            }
            // Fifth bits of a panel are whole bytes.
            (CacheOrder::Values { nr, .. }, Format::Q5) if nr % 8 > 0 => None,
            (CacheOrder::Values { nr, .. }, Format::Q4) if nr % 2 > 0 => None,
            (CacheOrder::Values { nr, block }, Format::Q8 | Format::Q5 | Format::Q4) => {
                let codes = product(&[padded(dim, nr)?, format.spec().bits])? / 8;
                let token = codes.checked_add(product(&[dim.div_ceil(GROUP), 2])?)?;
                product(&[padded(ctx, block)?, token])
            }
            _ => None,
        }
    }

    /// Place of channel `c` of token `t`; of a head that [`Self::bytes`] gives a size.
    pub fn offsets(&self, t: usize, c: usize) -> CacheOffsets {
        let plain = CacheOffsets::plain;
        // Two neighbours in one word, words in steps of a panel's width.
        let pair = |along: usize, across: usize, nr: usize| (along / 2 * nr + across) * 2 + along % 2;
        let size = match self.format {
            Format::F32 => 4,
            Format::Q8 => 1,
            _ => 2,
        };
        match self.order {
            CacheOrder::Rows => plain((t * self.dim + c) * 4),
            CacheOrder::Keys { nr } => {
                let nr = nr as usize;
                let (panel, t) = (t / nr, t % nr);
                let group = |bytes: usize| (panel * self.dim.div_ceil(GROUP) + c / GROUP) * nr * bytes;
                match self.format {
                    Format::F32 => plain(((panel * self.dim + c) * nr + t) * 4),
                    Format::Q8 => {
                        let group = group(GROUP + 2);
                        let scale = Some(group + nr * GROUP + t * 2);
                        CacheOffsets { scale, ..plain(group + c % GROUP * nr + t) }
                    }
                    Format::Q5 | Format::Q4 => {
                        let bits = self.format.spec().bits;
                        let group = group(GROUP * bits / 8 + 2);
                        let (quad, byte) = (c % GROUP / 4, c % 4);
                        // The planes of four bits and of one.
                        let mut planes = Codes::planes(bits).map(|plane| {
                            let (word, bit) = plane.of_quad(quad);
                            (group + (word * nr + t) * 4 + byte, bit)
                        });
                        let (at, shift) = planes.next().unwrap_or_default();
                        let scale = Some(group + nr * bits * 4 + t * 2);
                        CacheOffsets { at, shift, fifth: planes.next(), scale }
                    }
                    _ => plain((panel * self.dim.div_ceil(2) * 2 * nr + pair(c, t, nr)) * size),
                }
            }
            CacheOrder::Values { nr, block } => {
                let (nr, block) = (nr as usize, block as usize);
                let (index, t) = (t / block, t % block);
                let codes = self.dim.next_multiple_of(nr) * block;
                let panel = c / nr * nr * block;
                let within = match self.format {
                    Format::Bf16 | Format::F16 => pair(t, c % nr, nr),
                    _ => t * nr + c % nr,
                };
                if !self.format.is_quantised() {
                    return plain((index * codes + panel + within) * size);
                }
                let bits = self.format.spec().bits;
                let all = codes * bits / 8;
                let start = index * (all + self.dim.div_ceil(GROUP) * block * 2);
                let scale = Some(start + all + (c / GROUP * block + t) * 2);
                if self.format == Format::Q8 {
                    return CacheOffsets { scale, ..plain(start + panel + within) };
                }
                let half = nr / 2;
                let at = start + panel / 2 + t * half + c % nr % half;
                let fifth = start + codes / 2 + panel / 8 + t * (nr / 8) + c % nr / 8;
                CacheOffsets {
                    at,
                    shift: c % nr / half * 4,
                    fifth: (bits == 5).then_some((fifth, c % 8)),
                    scale,
                }
            }
        }
    }

    /// The number at a place of `head`, as f32; `None` outside of it.
    pub fn read(&self, head: &[u8], place: CacheOffsets) -> Option<f32> {
        let bf16 = |at: usize| {
            let bytes = head.get(at..at.checked_add(2)?)?;
            Some(f32::from_bits(u32::from(u16::from_le_bytes(bytes.try_into().ok()?)) << 16))
        };
        match self.format {
            Format::F32 => {
                let bytes = head.get(place.at..place.at.checked_add(4)?)?;
                Some(f32::from_le_bytes(bytes.try_into().ok()?))
            }
            Format::Q8 => Some(f32::from(head.get(place.at)?.cast_signed()) * bf16(place.scale?)?),
            Format::Q5 | Format::Q4 => {
                let low = i16::from(head.get(place.at)? >> place.shift & 15);
                let high = match place.fifth {
                    Some((at, bit)) => i16::from(head.get(at)? >> bit & 1) << 4,
                    None => 0,
                };
                let lowest = i16::from(self.format.spec().codes?.lowest);
                Some(f32::from(low + high + lowest) * bf16(place.scale?)?)
            }
            _ => bf16(place.at),
        }
    }
}

impl StateBuf {
    /// View of one (slot, head).
    pub fn head(&self) -> CacheHead {
        let [_, _, ctx, dim] = self.shape.map(|n| n as usize);
        CacheHead { format: self.format, order: self.order, ctx, dim }
    }

    /// Bytes of one slot, or `None` where that overflows or the format has no such order.
    pub fn slot_bytes(&self) -> Option<u64> {
        u64::from(self.shape[1]).checked_mul(self.head().bytes()? as u64)
    }

    /// Bytes that kernels see; `None` as for [`Self::slot_bytes`]. Snapshots follow, each as large.
    pub fn live_bytes(&self) -> Option<u64> {
        self.slot_bytes()?.checked_mul(u64::from(self.shape[0]))
    }

    /// Size in bytes with all snapshots; `None` as for [`Self::slot_bytes`].
    pub fn checked_bytes(&self) -> Option<u64> {
        self.live_bytes()?.checked_mul(u64::from(self.snapshots) + 1)
    }

    /// Size in bytes with all snapshots, of a state that [`crate::verify::plan`] accepts.
    pub fn bytes(&self) -> u64 {
        self.checked_bytes().unwrap_or(u64::MAX)
    }

    /// The tensor `[slots, heads, rows, dim]` as f32, without snapshots and not rotated, from the memory of the
    /// state; `None` where that is too short.
    pub fn read(&self, memory: &[u8]) -> Option<Vec<f32>> {
        let head = self.head();
        let [slots, heads, ctx, dim] = self.shape.map(|n| n as usize);
        let mut out = Vec::with_capacity(slots.checked_mul(heads)?.checked_mul(ctx)?.checked_mul(dim)?);
        for bytes in
            memory.get(..usize::try_from(self.live_bytes()?).ok()?)?.chunks_exact(head.bytes()?.max(1))
        {
            for t in 0..ctx {
                let row = out.len();
                for c in 0..dim {
                    out.push(head.read(bytes, head.offsets(t, c))?);
                }
                rotate(out.get_mut(row..)?, self.rotated as usize);
            }
        }
        Some(out)
    }
}
