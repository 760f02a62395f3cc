//! CPU time of other programs during a measurement.

use std::fs::read_to_string;

/// Cores taken by others from which a warning says that figures are too low.
const NOTABLE: f64 = 0.25;

/// CPU times up to one moment, in clock ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Busy {
    /// Busy time of all programs on the cores of this process.
    all: u64,
    /// The same, plus the idle time of the cores.
    total: u64,
    /// Time of this process, and of its children that have ended.
    own: u64,
    /// Cores of this process.
    cores: usize,
}

/// CPU time that others took.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Others {
    /// Mean number of cores that others kept busy.
    pub used: f64,
    /// Cores of this process.
    pub cores: usize,
}

impl Busy {
    /// Reads the times up to now; `None` on operating systems other than Linux, and if the times are not
    /// counted.
    pub fn now() -> Option<Self> {
        let status = read_to_string("/proc/self/status").ok()?;
        let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
        Self::parse(&read_to_string("/proc/stat").ok()?, &read_to_string("/proc/self/stat").ok()?, allowed)
    }

    /// Parses the formats of proc(5): `/proc/stat`, `/proc/self/stat`, and a list of cores such as `0-3,8`.
    fn parse(machine: &str, process: &str, allowed: &str) -> Option<Self> {
        let cores: Vec<(usize, usize)> = allowed
            .trim()
            .split(',')
            .map(|part| {
                let (first, last) = part.split_once('-').unwrap_or((part, part));
                Some((first.parse().ok()?, last.parse().ok()?))
            })
            .collect::<Option<_>>()?;
        let mut busy = Self { all: 0, total: 0, own: 0, cores: 0 };
        for line in machine.lines() {
            let mut words = line.split_whitespace();
            let core: Option<usize> = words.next().and_then(|w| w.strip_prefix("cpu")?.parse().ok());
            if core.is_none_or(|core| !cores.iter().any(|(first, last)| (first..=last).contains(&&core))) {
                continue;
            }
            // user nice system idle iowait irq softirq steal; the times of guests are in the first two.
            let times: Vec<u64> = words.take(8).map_while(|w| w.parse().ok()).collect();
            let idle: u64 = times.iter().skip(3).take(2).sum();
            busy.total += times.iter().sum::<u64>();
            busy.all += times.iter().sum::<u64>() - idle;
            busy.cores += 1;
        }
        // The name of the program, in parentheses, may have spaces. utime, stime, cutime and cstime are
        // fields 14 to 17.
        let (_, fields) = process.rsplit_once(')')?;
        busy.own = fields.split_whitespace().skip(11).take(4).map_while(|w| w.parse::<u64>().ok()).sum();
        (busy.total > 0).then_some(busy)
    }

    /// CPU time that others have taken since; `None` after too short a time.
    #[allow(clippy::cast_precision_loss, reason = "clock ticks are far below 2^52")]
    pub fn others(self, now: Option<Self>) -> Option<Others> {
        let now = now?;
        let total = now.total.checked_sub(self.total).filter(|&ticks| ticks > 0)?;
        let all = now.all.saturating_sub(self.all);
        let own = now.own.saturating_sub(self.own);
        let used = all.saturating_sub(own) as f64 / total as f64 * now.cores as f64;
        Some(Others { used, cores: now.cores })
    }
}

impl Others {
    /// Warning about figures of `threads` threads; `None` if other programs have left them enough cores.
    #[allow(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "numbers of cores are small"
    )]
    pub fn warning(self, threads: usize) -> Option<String> {
        let Self { used, cores } = self;
        let free = (cores as f64 - used).max(0.0);
        if used < NOTABLE || free + NOTABLE >= threads as f64 {
            return None;
        }
        let most = (free.round() as usize).max(1);
        let way = if most < threads {
            format!("end them, or limit threads to {most} (`--threads`, `MOEC_THREADS`)")
        } else {
            "end them".to_owned()
        };
        Some(format!("other programs used {used:.1} of {cores} cores meanwhile, so figures are low; {way}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_programs_time_is_busy_time_minus_own_time() {
        let machine = |user: u64, idle: u64| {
            format!(
                "cpu  9 9 9 9\ncpu0 {user} 0 0 {idle} 5 0 0 0 7 7\ncpu1 {user} 0 0 {idle} 5 0 0 0 0 0\ncpu2 900 0 0 9 0 0 0 0\nintr 1\n"
            )
        };
        let process = |own: u64| format!("1 (a ) b) S 0 0 0 0 0 0 0 0 0 0 {own} 0 0 0 20 0");
        let before = Busy::parse(&machine(100, 100), &process(10), "0-1\n").unwrap();
        assert_eq!(before, Busy { all: 200, total: 410, own: 10, cores: 2 });
        // 200 ticks of two busy cores, half of them by this process.
        let after = Busy::parse(&machine(200, 100), &process(110), "0,1");
        let others = before.others(after).unwrap();
        assert_eq!(others, Others { used: 1.0, cores: 2 });
        assert_eq!(
            others.warning(2).unwrap(),
            "other programs used 1.0 of 2 cores meanwhile, so figures are low; end them, or limit threads to 1 (`--threads`, `MOEC_THREADS`)"
        );
        // One thread has a core of its own; idle cores are enough for all.
        assert_eq!(others.warning(1), None);
        assert_eq!(Others { used: 2.0, cores: 8 }.warning(6), None);
        assert!(Others { used: 2.0, cores: 2 }.warning(1).unwrap().ends_with("end them"));
        assert_eq!((before.others(Some(before)), before.others(None)), (None, None));
        assert_eq!(Busy::parse("", "", "0"), None);
    }
}
