//! The DRAM of a DIMM, and the places of a region's lines in it.

use crate::MAX_LINES;

/// The DRAM of one DIMM.
///
/// A *row set* is what one row number means for the whole DIMM: that row of every bank of every rank of every
/// subchannel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Geometry {
    /// Subchannels of the DIMM: 2 of DDR5.
    pub subchannels: u32,
    /// Ranks of a subchannel.
    pub ranks: u32,
    /// Bank groups of a rank.
    pub bank_groups: u32,
    /// Banks of a bank group.
    pub banks: u32,
    /// Rows of a bank.
    pub rows: u32,
    /// Lines of 64 bytes of a row, over all chips of a rank.
    pub lines: u32,
}

/// All DIMMs of a machine. DIMM number `d` is the one at position `d % dimms` of channel `d / dimms`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct System {
    /// Memory channels.
    pub channels: u32,
    /// DIMMs of a channel.
    pub dimms: u32,
}

/// Place of one line in a DIMM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Place {
    /// Subchannel of the DIMM.
    pub subchannel: u32,
    /// Rank of the subchannel.
    pub rank: u32,
    /// Bank group of the rank.
    pub bank_group: u32,
    /// Bank of the bank group.
    pub bank: u32,
    /// Row of the bank.
    pub row: u32,
    /// Line of the row: the column address without its burst.
    pub column: u32,
}

/// Layout of consecutive lines of a region (TriMoE, §4.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// All on this DIMM, in the order that its unit reads at full internal bandwidth.
    Localized,
    /// Interleaved line by line over all channels, subchannels and DIMMs, as the host reads at full
    /// bandwidth. The region is the same rows of every DIMM, and its lines are those of the whole.
    Striped,
}

/// A digit of a line number written in mixed radix: its radix in a geometry, and its place.
struct Digit {
    radix: fn(&Geometry) -> u32,
    of: fn(&mut Place) -> &mut u32,
}

const SUBCHANNEL: Digit = Digit { radix: |g| g.subchannels, of: |p| &mut p.subchannel };
const RANK: Digit = Digit { radix: |g| g.ranks, of: |p| &mut p.rank };
const BANK_GROUP: Digit = Digit { radix: |g| g.bank_groups, of: |p| &mut p.bank_group };
const BANK: Digit = Digit { radix: |g| g.banks, of: |p| &mut p.bank };
const COLUMN: Digit = Digit { radix: |g| g.lines, of: |p| &mut p.column };

/// The unit reads every subchannel-rank over wires of its own: these change fastest, then bank groups, so
/// that bursts follow each other after tCCD_S.
const LOCALIZED: [Digit; 5] = [SUBCHANNEL, RANK, BANK_GROUP, COLUMN, BANK];
/// Ranks share the host's wires, and changing from one to the other costs a gap: they change late.
const STRIPED: [Digit; 5] = [SUBCHANNEL, BANK_GROUP, COLUMN, RANK, BANK];

impl Geometry {
    /// Lines of a row set; `None` where a number is zero, or where the DIMM has [`MAX_LINES`] lines or more.
    pub fn set_lines(&self) -> Option<u64> {
        let digits = [self.subchannels, self.ranks, self.bank_groups, self.banks, self.lines];
        let set = digits.iter().try_fold(1_u64, |product, &digit| product.checked_mul(u64::from(digit)))?;
        let all = set.checked_mul(u64::from(self.rows))?;
        (all > 0 && all < MAX_LINES).then_some(set)
    }
}

impl System {
    /// DIMMs of the machine; `None` where that is zero or overflows.
    pub fn count(&self) -> Option<u32> {
        self.channels.checked_mul(self.dimms).filter(|&count| count > 0)
    }

    /// The DIMM of a line of striped data, and the line's number in the share of that DIMM. Channels change
    /// fastest, then subchannels, then the DIMMs of a channel. `None` where the system or the geometry is
    /// empty.
    pub fn share(&self, geometry: &Geometry, line: u64) -> Option<(u32, u64)> {
        self.count()?;
        let (rest, channel) = split(line, self.channels)?;
        let (rest, subchannel) = split(rest, geometry.subchannels)?;
        let (rest, position) = split(rest, self.dimms)?;
        let own = rest.checked_mul(u64::from(geometry.subchannels))?.checked_add(u64::from(subchannel))?;
        Some((channel * self.dimms + position, own))
    }

    /// The line of striped data that is line `own` in the share of a DIMM: the inverse of [`Self::share`].
    pub fn whole(&self, geometry: &Geometry, dimm: u32, own: u64) -> Option<u64> {
        if dimm >= self.count()? {
            return None;
        }
        let (rest, subchannel) = split(own, geometry.subchannels)?;
        let rest = join(rest, self.dimms, dimm % self.dimms)?;
        let rest = join(rest, geometry.subchannels, subchannel)?;
        join(rest, self.channels, dimm / self.dimms)
    }

    /// DIMM and place of a line of striped data whose rows begin at `first_row`. `None` where it is outside
    /// of the geometry.
    pub fn place(&self, geometry: &Geometry, first_row: u32, line: u64) -> Option<(u32, Place)> {
        let (dimm, own) = self.share(geometry, line)?;
        Some((dimm, Layout::Striped.place(geometry, first_row, own)?))
    }

    /// The line of striped data at a place of a DIMM: the inverse of [`Self::place`].
    pub fn line(&self, geometry: &Geometry, first_row: u32, dimm: u32, place: Place) -> Option<u64> {
        self.whole(geometry, dimm, Layout::Striped.line(geometry, first_row, place)?)
    }
}

impl Layout {
    /// Both layouts.
    pub const ALL: [Self; 2] = [Self::Localized, Self::Striped];

    /// Name in the text form.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Localized => "localized",
            Self::Striped => "striped",
        }
    }

    const fn digits(self) -> &'static [Digit; 5] {
        match self {
            Self::Localized => &LOCALIZED,
            Self::Striped => &STRIPED,
        }
    }

    /// The place of a line of this DIMM, counted from the beginning of row set `first_row`. Of striped data,
    /// `line` counts this DIMM's share ([`System::share`]). `None` where it is outside of the geometry.
    pub fn place(self, geometry: &Geometry, first_row: u32, line: u64) -> Option<Place> {
        let (mut place, mut rest) = (Place::default(), line);
        for digit in self.digits() {
            let (quotient, remainder) = split(rest, (digit.radix)(geometry))?;
            *(digit.of)(&mut place) = remainder;
            rest = quotient;
        }
        place.row = u32::try_from(rest).ok()?.checked_add(first_row)?;
        (place.row < geometry.rows).then_some(place)
    }

    /// The line at a place: the inverse of [`Self::place`]. `None` where the place is outside of the geometry
    /// or before `first_row`.
    pub fn line(self, geometry: &Geometry, first_row: u32, mut place: Place) -> Option<u64> {
        if place.row >= geometry.rows {
            return None;
        }
        let row = u64::from(place.row.checked_sub(first_row)?);
        self.digits().iter().rev().try_fold(row, |rest, digit| {
            let (radix, value) = ((digit.radix)(geometry), *(digit.of)(&mut place));
            if value < radix { join(rest, radix, value) } else { None }
        })
    }
}

/// Quotient and remainder; `None` where the radix is zero.
fn split(number: u64, radix: u32) -> Option<(u64, u32)> {
    let radix = u64::from(radix);
    Some((number.checked_div(radix)?, u32::try_from(number.checked_rem(radix)?).ok()?))
}

/// `rest · radix + digit`
fn join(rest: u64, radix: u32, digit: u32) -> Option<u64> {
    rest.checked_mul(u64::from(radix))?.checked_add(u64::from(digit))
}
