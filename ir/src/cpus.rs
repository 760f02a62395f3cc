//! Lists of CPUs, in the form that Linux prints and takes them: `0-15,32`.

use bincode::{Decode, Encode};
use std::fmt;
use std::str::FromStr;

/// Number above those of all CPUs: a set of the operating system has so many.
pub const MOST_CPUS: u32 = 1024;

/// CPUs (hardware threads) of a machine, by the numbers that its operating system gives them: each once, ascending.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct CpuList(Vec<u32>);

impl CpuList {
    /// Whether there is no CPU.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Number of CPUs.
    pub const fn len(&self) -> usize {
        self.0.len()
    }

    /// The CPUs.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().copied()
    }

    /// Whether a CPU is one of them.
    pub fn contains(&self, cpu: u32) -> bool {
        self.0.binary_search(&cpu).is_ok()
    }

    /// The first CPU that is also in another list.
    pub fn shared(&self, other: &Self) -> Option<u32> {
        self.iter().find(|&cpu| other.contains(cpu))
    }

    /// Whether CPUs ascend and have possible numbers: a decoded list may be anything.
    pub fn is_valid(&self) -> bool {
        self.0.is_sorted_by(|a, b| a < b) && self.0.last().is_none_or(|&cpu| cpu < MOST_CPUS)
    }
}

impl FromIterator<u32> for CpuList {
    fn from_iter<I: IntoIterator<Item = u32>>(cpus: I) -> Self {
        let mut cpus: Vec<u32> = cpus.into_iter().collect();
        cpus.sort_unstable();
        cpus.dedup();
        Self(cpus)
    }
}

impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, run) in self.0.chunk_by(|a, b| a.checked_add(1) == Some(*b)).enumerate() {
            let comma = if i > 0 { "," } else { "" };
            match *run {
                [first, .., last] => write!(f, "{comma}{first}-{last}")?,
                [one] => write!(f, "{comma}{one}")?,
                [] => {}
            }
        }
        Ok(())
    }
}

/// Text that is not a list of CPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected CPUs such as `0-15,32`, with numbers below {MOST_CPUS}")]
pub struct CpuListError;

impl FromStr for CpuList {
    type Err = CpuListError;

    fn from_str(text: &str) -> Result<Self, CpuListError> {
        let text = text.trim();
        if text.is_empty() {
            return Ok(Self::default());
        }
        let number = |text: &str| text.trim().parse().ok().filter(|&cpu: &u32| cpu < MOST_CPUS);
        let range = |part: &str| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = number(first).zip(number(last)).ok_or(CpuListError)?;
            if first <= last { Ok(first..=last) } else { Err(CpuListError) }
        };
        let ranges = text.split(',').map(range).collect::<Result<Vec<_>, _>>()?;
        Ok(ranges.into_iter().flatten().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_and_printed_as_the_kernel_does() {
        let list = |text: &str| text.parse::<CpuList>();
        for text in ["", "0", "0-1", "0-15,32", "3,5,7-1023"] {
            assert_eq!(list(text).unwrap().to_string(), text);
        }
        assert_eq!(list(" 4-6, 5,0\n").unwrap().to_string(), "0,4-6");
        for wrong in ["-", "1-", "3-1", "1024", "a", "1,,2", "0-99999999999"] {
            assert_eq!(list(wrong), Err(CpuListError), "{wrong}");
        }
        let (first, second) = (list("0-3,8").unwrap(), list("4-7,8-9").unwrap());
        assert_eq!(
            (first.len(), first.shared(&second), second.shared(&list("0-3").unwrap())),
            (5, Some(8), None)
        );
        assert!(first.is_valid() && !CpuList(vec![1, 1]).is_valid() && !CpuList(vec![1024]).is_valid());
    }
}
