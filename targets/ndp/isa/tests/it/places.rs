//! Addresses of lines: every line has an address of its own, inside of its rows.

use crate::common::geometry;
use moec_ndp_isa::*;
use proptest::prelude::*;
use std::collections::BTreeSet;

proptest! {
    /// The lines of the first rows fill these rows exactly, and each address maps back to its line.
    #[test]
    fn a_layout_is_a_bijection(geometry in geometry(), first in 0..5_u32) {
        let first = first % geometry.rows;
        let set = geometry.set_lines().expect("small");
        let lines = set * u64::from(geometry.rows - first);
        for layout in Layout::ALL {
            let mut seen = BTreeSet::new();
            for line in 0..lines {
                let place = layout.place(&geometry, first, line).expect("inside");
                prop_assert_eq!(u64::from(place.row - first), line / set);
                prop_assert!(place.subchannel < geometry.subchannels && place.rank < geometry.ranks);
                prop_assert!(place.bank_group < geometry.bank_groups && place.bank < geometry.banks);
                prop_assert!(place.row < geometry.rows && place.column < geometry.lines);
                prop_assert_eq!(layout.line(&geometry, first, place), Some(line));
                prop_assert!(seen.insert(place));
            }
            prop_assert_eq!(layout.place(&geometry, first, lines), None);
        }
    }

    /// Striped data fills the same rows of every DIMM exactly.
    #[test]
    fn stripes_are_a_bijection(geometry in geometry(), channels in 1..5_u32, dimms in 1..4_u32, rows in 1..3_u32) {
        let system = System { channels, dimms };
        let rows = rows.min(geometry.rows);
        let first = geometry.rows - rows;
        let own = geometry.set_lines().expect("small") * u64::from(rows);
        let lines = own * u64::from(channels * dimms);
        let mut seen = BTreeSet::new();
        for line in 0..lines {
            let (dimm, place) = system.place(&geometry, first, line).expect("inside");
            prop_assert!(dimm < channels * dimms && place.row >= first);
            prop_assert_eq!(system.line(&geometry, first, dimm, place), Some(line));
            let (owner, share) = system.share(&geometry, line).expect("inside");
            prop_assert!(owner == dimm && share < own);
            prop_assert_eq!(system.whole(&geometry, dimm, share), Some(line));
            prop_assert!(seen.insert((dimm, place)));
        }
        prop_assert_eq!(system.place(&geometry, first, lines), None);
        prop_assert_eq!(system.whole(&geometry, channels * dimms, 0), None);
    }

    /// For any numbers, nothing panics or overflows.
    #[test]
    fn address_mapping_never_panics(n in any::<[u32; 10]>(), line in any::<u64>()) {
        let [subchannels, ranks, bank_groups, banks, rows, lines, channels, dimms, first, dimm] = n;
        for zero in 0..7 {
            let mut radices = [subchannels, ranks, bank_groups, banks, rows, lines, channels];
            radices[zero] = 0;
            for [subchannels, ranks, bank_groups, banks, rows, lines, channels] in [radices, radices.map(|r| r % 9)] {
                let geometry = Geometry { subchannels, ranks, bank_groups, banks, rows, lines };
                let system = System { channels, dimms };
                let empty = geometry.set_lines().is_none() || system.count().is_none();
                prop_assert!(empty);
                prop_assert_eq!(system.place(&geometry, first, line), None);
                prop_assert_eq!(system.line(&geometry, first, dimm, Place::default()), None);
            }
        }
        let geometry = Geometry { subchannels, ranks, bank_groups, banks, rows, lines };
        let system = System { channels, dimms };
        if let Some((dimm, place)) = system.place(&geometry, first, line) {
            prop_assert_eq!(system.line(&geometry, first, dimm, place), Some(line));
        }
    }
}

/// Purpose of the address orders: a unit's reads change the subchannel-rank with every line, then the bank
/// group. The host's reads change the channel, then subchannel and DIMM, and the rank last.
#[test]
fn consecutive_lines_interleave_over_the_buses() {
    let geometry = Geometry { subchannels: 2, ranks: 4, bank_groups: 8, banks: 4, rows: 16, lines: 64 };
    let local = |line| Layout::Localized.place(&geometry, 3, line).expect("inside");
    let ranks: BTreeSet<_> = (0..8).map(|i| (local(i).subchannel, local(i).rank)).collect();
    let groups: BTreeSet<_> = (0..64).map(|i| local(i).bank_group).collect();
    assert_eq!((ranks.len(), groups.len()), (8, 8));
    assert_eq!(local(8), Place { bank_group: 1, row: 3, ..Place::default() });
    assert_eq!(local(64), Place { column: 1, row: 3, ..Place::default() });
    assert_eq!(local(64 * 64), Place { bank: 1, row: 3, ..Place::default() });
    assert_eq!(local(64 * 64 * 4), Place { row: 4, ..Place::default() });

    let system = System { channels: 8, dimms: 2 };
    let striped = |line| system.place(&geometry, 3, line).expect("inside");
    let dimms: Vec<_> = [0, 1, 7, 8, 16, 32].map(|line| (striped(line).0, striped(line).1.subchannel)).into();
    assert_eq!(dimms, [(0, 0), (2, 0), (14, 0), (0, 1), (1, 0), (0, 0)]);
    assert_eq!(striped(32).1.bank_group, 1);
    assert_eq!(striped(32 * 8 * 64).1, Place { rank: 1, row: 3, ..Place::default() });
}
