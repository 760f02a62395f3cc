//! Commands of the model compared with those of Ramulator 2.1, an independent simulator. `ramulator2.toml` has
//! traces and its figures; `ramulator2.py` runs it.

mod support;

use moec_dram::{Clock, Command, Controller, Feed, Geometry, Issued, Kind, Request, Timing, serve};
use serde::Deserialize;
use support::{Dice, at, options};

/// The file of cases.
#[derive(Deserialize)]
struct File {
    simulator: String,
    version: String,
    requests: u32,
    /// Numbers of reads and writes whose clocks are compared.
    marks: Vec<u64>,
    case: Vec<Case>,
}

/// Part of an address.
#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Axis {
    Rank,
    Group,
    Bank,
    Row,
    Column,
}

/// A trace, the memory that it runs on, and the figures of the other simulator.
#[derive(Deserialize)]
struct Case {
    name: String,
    axes: Vec<(Axis, u32)>,
    seed: Option<u64>,
    writes: Option<(u32, u32)>,
    timing: String,
    faw: Option<u32>,
    density: Option<u32>,
    ranks: u32,
    queue: usize,
    refresh: bool,
    #[serde(flatten)]
    figures: Figures,
}

/// Result of a run up to the last mark.
#[derive(Debug, Default, PartialEq, Deserialize)]
struct Figures {
    cycles: Vec<Clock>,
    act: u64,
    pre: u64,
    r#ref: u64,
    digest: String,
}

fn file() -> File {
    toml::from_str(include_str!("ramulator2.toml")).expect("the file of cases is right")
}

impl Case {
    /// The trace, as the head of the file describes it.
    fn requests(&self, n: u32) -> Vec<Request> {
        let mut dice = self.seed.map(Dice);
        let (writes, of) = self.writes.unwrap_or((0, 1));
        let request = |i: u32| {
            let (mut place, mut left) = ([0; 5], i);
            for &(axis, size) in &self.axes {
                place[axis as usize] = dice.as_mut().map_or(left % size, |dice| dice.below(size));
                left /= size;
            }
            let [rank, group, bank, row, column] = place;
            let at = at(rank, group, bank, row, column);
            let turn = dice.as_mut().map_or(i % of, |dice| dice.below(of));
            Request { kind: if turn < writes { Kind::Write } else { Kind::Read }, at }
        };
        (0..n).map(request).collect()
    }

    fn timing(&self) -> Timing {
        let mut timing = Timing::named(&self.timing).expect("a set that has a name");
        timing.faw = self.faw.unwrap_or(timing.faw);
        self.density.map_or(Some(timing), |gigabits| timing.with_density(gigabits)).expect("a density")
    }

    /// Figures of the model for the trace, with this timing.
    fn run(&self, timing: &Timing, file: &File) -> Figures {
        let geometry = Geometry { ranks: self.ranks, ..Geometry::trimoe() };
        let mut controller = Controller::new(timing, geometry, options(self.queue, self.refresh));
        let feed: Feed<'_> = Box::new(self.requests(file.requests).into_iter());
        let mut log = Vec::new();
        serve(&mut controller, vec![feed], Clock::MAX, |issued| log.push(issued));
        figures(&log, &file.marks)
    }
}

/// Figures of the commands up to the last mark.
fn figures(log: &[Issued], marks: &[u64]) -> Figures {
    let (mut found, mut issued, mut digest) = (Figures::default(), 0, 0xcbf2_9ce4_8422_2325_u64);
    for Issued { clock, command, at, .. } in log {
        let number = match command {
            Command::Activate => 0,
            Command::Precharge => 1,
            Command::PrechargeAll => 2,
            Command::Read => 3,
            Command::Write => 4,
            Command::Refresh => 5,
        };
        for word in [*clock, number, at.rank.into(), at.group.into(), at.bank.into()] {
            digest = (digest ^ word).wrapping_mul(0x0100_0000_01b3);
        }
        match command {
            Command::Activate => found.act += 1,
            Command::Precharge | Command::PrechargeAll => found.pre += 1,
            Command::Refresh => found.r#ref += 1,
            Command::Read | Command::Write => {
                issued += 1;
                if marks.contains(&issued) {
                    found.cycles.push(*clock);
                }
            }
        }
        if marks.last() == Some(&issued) {
            break;
        }
    }
    found.digest = format!("{digest:016x}");
    found
}

#[test]
fn commands_are_issued_at_the_clocks_of_ramulator() {
    let file = file();
    for case in &file.case {
        let found = case.run(&case.timing(), &file);
        let other = format!("{} {}", file.simulator, file.version);
        assert_eq!(found, case.figures, "{}: this model, then {other}", case.name);
    }
}

/// No constant of the timing could be a clock longer without a difference in some case.
#[test]
fn every_timing_constant_changes_a_case() {
    type Constant = fn(&mut Timing) -> &mut u32;
    let constants: [(&str, Constant); 23] = [
        ("CL", |t| &mut t.cl),
        ("tRCD", |t| &mut t.rcd),
        ("tRP", |t| &mut t.rp),
        ("tRAS", |t| &mut t.ras),
        ("tRC", |t| &mut t.rc),
        ("CWL", |t| &mut t.cwl),
        ("BL", |t| &mut t.bl),
        ("tCCD_S", |t| &mut t.ccd_s),
        ("tCCD_L", |t| &mut t.ccd_l),
        ("tCCD_S_WR", |t| &mut t.ccd_s_wr),
        ("tCCD_L_WR", |t| &mut t.ccd_l_wr),
        ("tRRD_S", |t| &mut t.rrd_s),
        ("tRRD_L", |t| &mut t.rrd_l),
        ("tFAW", |t| &mut t.faw),
        ("tWTR_S", |t| &mut t.wtr_s),
        ("tWTR_L", |t| &mut t.wtr_l),
        ("tWR", |t| &mut t.wr),
        ("tRTP", |t| &mut t.rtp),
        ("tPPD", |t| &mut t.ppd),
        ("preamble", |t| &mut t.preamble),
        ("change of rank", |t| &mut t.cs),
        ("tRFC", |t| &mut t.rfc),
        ("tREFI", |t| &mut t.refi),
    ];
    let file = file();
    for (name, constant) in constants {
        let differs = file.case.iter().any(|case| {
            let mut timing = case.timing();
            *constant(&mut timing) += 1;
            case.run(&timing, &file) != case.figures
        });
        assert!(differs, "{name}");
    }
}

/// The page's table has these figures: `| name | timing | ranks | queue | refresh | Ramulator | this model |`.
#[test]
fn dram_page_contains_the_table_of_cases() {
    let page = include_str!("../../../../docs/ndp-dram.md");
    let file = file();
    for case in &file.case {
        let last = |figures: &Figures| figures.cycles.last().copied().expect("marks");
        let Case { name, timing, ranks, queue, .. } = case;
        let refresh = if case.refresh { "yes" } else { "no" };
        let (other, own) = (last(&case.figures), last(&case.run(&case.timing(), &file)));
        let row = format!("| {name} | `{timing}` | {ranks} | {queue} | {refresh} | {other} | {own} |");
        assert!(page.contains(&row), "{row}");
    }
}
