//! The binary form: one for every stream, and every accepted one is that of its stream.
//!
//! Integers are little-endian and of fixed width, so that every stream has exactly one encoding. The layout
//! is in `docs/ndp-isa.md`.

use crate::fault::{Fault, check_form};
use crate::fields::{BLANKS, Fields, GLUS, Separator, walk};
use crate::geometry::{Geometry, Layout, System};
use crate::op::{Activation, Glu, Lines, Number, Slab};
use crate::stream::{Access, Events, Instruction, Region, Stream};
use crate::{EVENTS, MAX_CODE, MAX_NAME, MAX_REGIONS};
use std::convert::Infallible;
use std::mem::discriminant;
use std::ops::Range;

/// First bytes of a binary form.
pub const MAGIC: [u8; 8] = *b"moec.ndp";
/// The version that is written, and the only one that is read.
pub const VERSION: u32 = 1;

/// Code for an absent event.
const NO_EVENT: u8 = 0xff;

/// Reason that bytes are not a stream, and the place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// Other bytes than [`MAGIC`] at the beginning.
    #[error("this is not an NDP command stream: it does not begin with `moec.ndp`")]
    Magic,
    /// Another version.
    #[error(
        "version {0} of the instructions, but this program reads only version {VERSION}: assemble the stream again"
    )]
    Version(u32),
    /// The bytes end too early.
    #[error("byte {at}: the stream ends inside of {what}; it has been cut off")]
    Truncated {
        /// Offset of its first byte.
        at: usize,
        /// Item that was being read.
        what: &'static str,
    },
    /// A number without a meaning.
    #[error("byte {at}: {found} is not a valid {what}")]
    Value {
        /// Offset.
        at: usize,
        /// Item that was being read.
        what: &'static str,
        /// Found value.
        found: u32,
    },
    /// More than a stream may have.
    #[error("byte {at}: {found} {what}; at most {most} are allowed")]
    TooMany {
        /// Offset of the number.
        at: usize,
        /// Name of the counted things.
        what: &'static str,
        /// Found number.
        found: u32,
        /// Largest allowed number.
        most: usize,
    },
    /// Bytes after the last instruction.
    #[error("byte {at}: {count} bytes after the last instruction")]
    Trailing {
        /// Offset of the first.
        at: usize,
        /// Number of bytes.
        count: usize,
    },
    /// A stream that can be read, but has no text form.
    #[error(transparent)]
    Malformed(#[from] Fault),
}

/// The binary form of a stream. Of a stream that [`crate::verify`] accepts, [`decode`] gives the same.
pub fn encode(stream: &Stream) -> Vec<u8> {
    let mut writer = Writer(MAGIC.to_vec());
    writer.put(VERSION);
    let (system, geometry) = (&stream.system, &stream.geometry);
    writer.name(&stream.name);
    for number in [
        system.channels,
        system.dimms,
        stream.dimm,
        geometry.subchannels,
        geometry.ranks,
        geometry.bank_groups,
        geometry.banks,
        geometry.rows,
        geometry.lines,
        stream.tokens,
        stream.slots,
        count(stream.regions.len()),
        count(stream.code.len()),
    ] {
        writer.put(number);
    }
    for region in &stream.regions {
        writer.name(&region.name);
        writer.put(region.rows.start);
        writer.put(region.rows.end);
        writer.one(region.layout, &Layout::ALL);
        writer.one(region.access, &Access::ALL);
    }
    for Instruction { op, waits, signal } in &stream.code {
        let code = BLANKS.iter().position(|blank| discriminant(blank) == discriminant(op));
        // Every operation has a blank: a test holds the table to that.
        writer.0.push(place(code));
        writer.put(waits.0);
        writer.0.push(signal.unwrap_or(NO_EVENT));
        let Ok(()) = walk(&mut op.clone(), &mut writer);
    }
    writer.0
}

/// Reads the binary form. It checks form, names and limits; [`crate::verify`] checks the rest.
///
/// # Errors
/// Bytes that are the binary form of no stream.
pub fn decode(bytes: &[u8]) -> Result<Stream, DecodeError> {
    let body = bytes.strip_prefix(&MAGIC).ok_or(DecodeError::Magic)?;
    let mut reader = Reader { bytes, at: bytes.len() - body.len() };
    let version = reader.u32("the version")?;
    if version != VERSION {
        return Err(DecodeError::Version(version));
    }
    let name = reader.name()?;
    let mut number = || reader.u32("the header");
    let system = System { channels: number()?, dimms: number()? };
    let dimm = number()?;
    let geometry = Geometry {
        subchannels: number()?,
        ranks: number()?,
        bank_groups: number()?,
        banks: number()?,
        rows: number()?,
        lines: number()?,
    };
    let (tokens, slots) = (number()?, number()?);
    let regions = reader.count("regions", MAX_REGIONS)?;
    let code = reader.count("instructions", MAX_CODE)?;
    let mut stream =
        Stream { name, system, dimm, geometry, tokens, slots, regions: Vec::new(), code: Vec::new() };
    for _ in 0..regions {
        let name = reader.name()?;
        let rows = reader.u32("a region")?..reader.u32("a region")?;
        let layout = reader.one("layout", &Layout::ALL)?;
        let access = reader.one("access", &Access::ALL)?;
        stream.regions.push(Region { name, rows, layout, access });
    }
    for _ in 0..code {
        let mut op = reader.one("operation", &BLANKS)?;
        let waits = Events(reader.u32("an instruction")?);
        let at = reader.at;
        let signal = match reader.u8("an instruction")? {
            NO_EVENT => None,
            event if event < EVENTS => Some(event),
            other => return Err(DecodeError::Value { at, what: "event", found: u32::from(other) }),
        };
        walk(&mut op, &mut reader)?;
        stream.code.push(Instruction { op, waits, signal });
    }
    match bytes.len() - reader.at {
        0 => {
            check_form(&stream)?;
            Ok(stream)
        }
        count => Err(DecodeError::Trailing { at: reader.at, count }),
    }
}

/// A number of the header. One above 32 bits is above every limit, and [`decode`] refuses it.
fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

/// An index into a table. No table is long enough for the index that means absence.
fn place(at: Option<usize>) -> u8 {
    at.and_then(|at| u8::try_from(at).ok()).unwrap_or(u8::MAX)
}

/// Appends.
struct Writer(Vec<u8>);

impl Writer {
    fn put(&mut self, number: u32) {
        self.0.extend(number.to_le_bytes());
    }

    fn long(&mut self, number: u64) {
        self.0.extend(number.to_le_bytes());
    }

    fn name(&mut self, name: &str) {
        self.0.push(u8::try_from(name.len()).unwrap_or(u8::MAX));
        self.0.extend(name.bytes().take(usize::from(u8::MAX)));
    }

    /// The place of a value in a table.
    fn one<T: PartialEq>(&mut self, value: T, all: &[T]) {
        self.0.push(place(all.iter().position(|other| *other == value)));
    }
}

impl Fields for Writer {
    type Error = Infallible;

    fn slab(&mut self, slab: &mut Slab) -> Result<(), Infallible> {
        self.one(slab.number, &Number::ALL);
        self.put(slab.base);
        self.put(slab.stride);
        Ok(())
    }

    fn lines(&mut self, lines: &mut Lines) -> Result<(), Infallible> {
        self.0.extend(lines.region.to_le_bytes());
        self.long(lines.line);
        Ok(())
    }

    fn rows(&mut self, lines: &mut Lines, stride: &mut u64) -> Result<(), Infallible> {
        self.lines(lines)?;
        self.long(*stride);
        Ok(())
    }

    fn number(&mut self, _: &'static str, number: &mut u32) -> Result<(), Infallible> {
        self.put(*number);
        Ok(())
    }

    fn range(&mut self, _: &'static str, range: &mut Range<u32>) -> Result<(), Infallible> {
        self.put(range.start);
        self.put(range.end);
        Ok(())
    }

    fn activation(&mut self, kind: &mut Activation) -> Result<(), Infallible> {
        self.one(*kind, &Activation::ALL);
        Ok(())
    }

    fn glu(&mut self, kind: &mut Glu) -> Result<(), Infallible> {
        self.one(kind.name(), &GLUS.map(Glu::name));
        if let Glu::Clamped { alpha, limit } = kind {
            self.put(alpha.to_bits());
            self.put(limit.to_bits());
        }
        Ok(())
    }

    fn layout(&mut self, _: &'static str, layout: &mut Layout) -> Result<(), Infallible> {
        self.one(*layout, &Layout::ALL);
        Ok(())
    }

    fn separator(&mut self, _: Separator) -> Result<(), Infallible> {
        Ok(())
    }
}

/// Reads from the front.
struct Reader<'b> {
    bytes: &'b [u8],
    at: usize,
}

type Decoded<T> = Result<T, DecodeError>;

impl<'b> Reader<'b> {
    fn take(&mut self, count: usize, what: &'static str) -> Decoded<&'b [u8]> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let taken = rest.get(..count).ok_or(DecodeError::Truncated { at: self.at, what })?;
        self.at += count;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &'static str) -> Decoded<[u8; N]> {
        let at = self.at;
        self.take(N, what)?.try_into().map_err(|_| DecodeError::Truncated { at, what })
    }

    fn u8(&mut self, what: &'static str) -> Decoded<u8> {
        self.array(what).map(u8::from_le_bytes)
    }

    fn u32(&mut self, what: &'static str) -> Decoded<u32> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &'static str) -> Decoded<u64> {
        self.array(what).map(u64::from_le_bytes)
    }

    fn count(&mut self, what: &'static str, most: usize) -> Decoded<u32> {
        let at = self.at;
        let found = self.u32("the header")?;
        if found as usize > most {
            return Err(DecodeError::TooMany { at, what, found, most });
        }
        Ok(found)
    }

    fn name(&mut self) -> Decoded<String> {
        let at = self.at;
        let length = self.u8("a name")?;
        if usize::from(length) > MAX_NAME {
            return Err(DecodeError::TooMany {
                at,
                what: "bytes of a name",
                found: u32::from(length),
                most: MAX_NAME,
            });
        }
        // Bytes that are no UTF-8 make a character that no name has.
        Ok(String::from_utf8_lossy(self.take(usize::from(length), "a name")?).into_owned())
    }

    fn one<T: Clone>(&mut self, what: &'static str, all: &[T]) -> Decoded<T> {
        let at = self.at;
        let found = self.u8(what)?;
        all.get(usize::from(found)).cloned().ok_or(DecodeError::Value { at, what, found: u32::from(found) })
    }
}

const OPERAND: &str = "an operand";

impl Fields for Reader<'_> {
    type Error = DecodeError;

    fn slab(&mut self, slab: &mut Slab) -> Decoded<()> {
        let number = self.one("kind of number", &Number::ALL)?;
        *slab = Slab { number, base: self.u32(OPERAND)?, stride: self.u32(OPERAND)? };
        Ok(())
    }

    fn lines(&mut self, lines: &mut Lines) -> Decoded<()> {
        let region = self.array(OPERAND).map(u16::from_le_bytes)?;
        *lines = Lines { region, line: self.u64(OPERAND)? };
        Ok(())
    }

    fn rows(&mut self, lines: &mut Lines, stride: &mut u64) -> Decoded<()> {
        self.lines(lines)?;
        *stride = self.u64(OPERAND)?;
        Ok(())
    }

    fn number(&mut self, _: &'static str, number: &mut u32) -> Decoded<()> {
        *number = self.u32(OPERAND)?;
        Ok(())
    }

    fn range(&mut self, _: &'static str, range: &mut Range<u32>) -> Decoded<()> {
        *range = self.u32(OPERAND)?..self.u32(OPERAND)?;
        Ok(())
    }

    fn activation(&mut self, kind: &mut Activation) -> Decoded<()> {
        *kind = self.one("function", &Activation::ALL)?;
        Ok(())
    }

    fn glu(&mut self, kind: &mut Glu) -> Decoded<()> {
        *kind = self.one("join of gate and up", &GLUS)?;
        if let Glu::Clamped { alpha, limit } = kind {
            *alpha = f32::from_bits(self.u32(OPERAND)?);
            *limit = f32::from_bits(self.u32(OPERAND)?);
        }
        Ok(())
    }

    fn layout(&mut self, _: &'static str, layout: &mut Layout) -> Decoded<()> {
        *layout = self.one("layout", &Layout::ALL)?;
        Ok(())
    }

    fn separator(&mut self, _: Separator) -> Decoded<()> {
        Ok(())
    }
}
