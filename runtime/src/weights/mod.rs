//! Place of weights, in memory of our own or mapped from the page cache: the decision and its result.

pub mod owned;
pub(crate) mod preload;
pub mod store;

use crate::bundle::program::{HOST_BACKEND, Program};
use crate::error::{Error, Limit, Result, mib};
use crate::platform::memory::{HUGE_PAGE, Region, size};
use moec_ir::plan::{Plan, Segment, StateBuf, StateKind};
use std::ops::Range;
use std::time::Duration;

/// Place of weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Weights {
    /// In memory of our own if there is room for them, else mapped.
    #[default]
    Auto,
    /// In memory of our own ([`crate::weights::owned`]), or an error.
    Ram,
    /// Mapped ([`crate::weights::store::MappedStore`]): shared with other processes, and dropped if memory is
    /// short.
    Mmap,
}

/// Names of the choices.
const CHOICES: [(&str, Weights); 3] =
    [("auto", Weights::Auto), ("ram", Weights::Ram), ("mmap", Weights::Mmap)];

impl Weights {
    /// Names of the choices, in their order.
    pub const NAMES: [&str; 3] = [CHOICES[0].0, CHOICES[1].0, CHOICES[2].0];

    /// Reads `auto`, `ram` or `mmap`, or the former `own` and `mapped`; `None` for another name.
    pub fn parse(name: &str) -> Option<Self> {
        let name = match name {
            "own" => "ram",
            "mapped" => "mmap",
            name => name,
        };
        CHOICES.iter().find(|(known, _)| *known == name).map(|(_, choice)| *choice)
    }
}

/// Bytes that [`Weights::Auto`] leaves free: for the process itself, the file system, and other programs.
pub const RESERVE: u64 = 512 << 20;

/// Place of a program's weights, and the reason.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WeightPlacement {
    /// Whether weights are in memory of our own; otherwise they are mapped.
    pub own: bool,
    /// Reason, for people.
    pub why: String,
    /// Bytes of memory of our own for weights.
    pub bytes: u64,
    /// Bytes among them that the kernel backs with huge pages; `None` if it does not report them.
    pub huge_bytes: Option<u64>,
    /// Reader that fills this memory, for people.
    pub reader: Option<String>,
    /// Time from the start until all weights were loaded; `None` before that.
    pub took: Option<Duration>,
}

/// Sequences to hold at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Demand {
    /// Number of sequences, at most the slots of the plan.
    pub sequences: usize,
    /// Tokens of each, at most the context.
    pub tokens: usize,
}

impl Demand {
    /// All slots of the plan, full.
    pub const FULL: Self = Self { sequences: usize::MAX, tokens: usize::MAX };
}

/// A decision: whether weights are in memory of our own, and the reason, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Choice {
    pub(crate) own: bool,
    pub(crate) why: String,
}

impl Choice {
    /// Decision for the other weights if experts stay on disk.
    pub(crate) fn under_budget() -> Self {
        Self { own: false, why: "the bundle's memory budget counts them so".to_owned() }
    }
}

/// Bytes that a run with weights in its own memory takes: the weights in huge pages, and the plan's memory
/// with a full KV cache.
pub fn needed(program: &Plan, threads: usize) -> u64 {
    let sum = |bytes: &mut dyn Iterator<Item = u64>| bytes.fold(0, u64::saturating_add);
    let page = HUGE_PAGE as u64;
    let here = program.files_here();
    let files = (0..).zip(&program.files).filter(|(i, _)| here.contains(i));
    let weights = sum(&mut files.map(|(_, f)| f.bytes.div_ceil(page).saturating_mul(page)));
    let scratch = program.scratch_bytes.saturating_mul(threads as u64);
    let kv = sum(&mut program.states.iter().map(StateBuf::bytes));
    sum(&mut [weights, program.arena_bytes(), scratch, kv].into_iter())
}

/// Reason for which the weights of a program with several memories are mapped, however much memory is free; `None`
/// where memory of our own may hold them: whole files, at addresses that change when they move. Units of other hosts
/// know none of these; accelerators may.
pub(crate) fn must_be_mapped(program: &Program) -> Option<&'static str> {
    if program.memories.iter().all(|m| m.residents.is_empty()) {
        return None;
    }
    let (here, files) = (program.segments_of(0), program.files_here());
    let elsewhere = |(i, s): (u32, &Segment)| files.contains(&s.file) && !here.contains(&i);
    let accelerates = program.accelerators().any(|(_, unit)| unit.backend != HOST_BACKEND);
    let some = accelerates || (0..).zip(&program.segments).any(elsewhere);
    some.then_some("other memories hold a part of them")
}

/// Refuses a run that may need more memory than `free` for activations, scratch, and the states of the
/// demanded sequences. The operating system provides memory at the first write, and ends the process if there
/// is none left. Weights are not counted: mapped ones can be dropped, and memory of our own is taken only if
/// all of this fits beside it ([`choose`]).
///
/// # Errors
/// [`Error::Limit`], with the number of sequences that there is memory for.
pub(crate) fn check_room(program: &Program, threads: usize, demand: Demand, free: u64) -> Result<()> {
    let model = &program.model;
    let (slots, context) = (model.slots.max(1) as usize, model.max_context.max(1) as usize);
    let (sequences, tokens) = (demand.sequences.clamp(1, slots), demand.tokens.clamp(1, context));
    let of_state = |s: &StateBuf| {
        let one = s.bytes().div_ceil(slots as u64).saturating_mul(sequences as u64);
        // Only caches grow with their sequence.
        let grows = matches!(s.kind, StateKind::Cache);
        if grows { one.div_ceil(context as u64).saturating_mul(tokens as u64) } else { one }
    };
    let here = program.states.iter().filter(|s| s.memory == 0);
    let kv = here.map(of_state).fold(0, u64::saturating_add);
    let scratch = program.scratch_bytes.saturating_mul(threads as u64);
    let rest = program.arena_bytes().saturating_add(scratch);
    if kv.saturating_add(rest) <= free {
        return Ok(());
    }
    let each = kv.div_ceil(sequences as u64).max(1);
    let fit = usize::try_from(free.saturating_sub(rest) / each).unwrap_or(usize::MAX);
    let what = format!(
        "the KV cache of {sequences} sequences of {tokens} tokens takes {} and activations {}, but {} are free",
        mib(kv, true),
        mib(rest, true),
        mib(free, false)
    );
    Err(Error::limit(Limit::Memory, fit, what).with_hint(
        "end other programs or raise the limit of the control group, or build with a smaller `max_context` or a smaller largest \
         `decode_batch` under `[shapes]` in `model.toml`",
    ))
}

/// Decides for a run that takes `needed` of `available` bytes (`None`: not reported by the operating system).
/// Available memory includes the page cache, which has `cached` bytes of the run's files. `lazy`: weights are
/// loaded only when they are read.
///
/// # Errors
/// [`Error::Machine`] if memory of our own is requested by name and there is too little. If there is enough,
/// but less than [`RESERVE`] would be left, it is taken nevertheless.
pub(crate) fn choose(
    weights: Weights,
    lazy: bool,
    needed: u64,
    cached: Option<u64>,
    available: Option<u64>,
) -> Result<Choice> {
    let choice = |own, why: String| Ok(Choice { own, why });
    let required = needed.saturating_add(RESERVE);
    match (weights, available) {
        (Weights::Mmap, _) => choice(false, "as requested".to_owned()),
        (Weights::Ram, Some(available)) if needed > available => {
            let what = format!(
                "a run with weights in memory of its own takes {}, and {} are free: {} are missing",
                mib(needed, true),
                mib(available, false),
                mib(needed - available, true)
            );
            Err(Error::machine(what)
                .with_hint("leave it to moec with `--weights auto`, or map them with `--weights mmap`"))
        }
        (Weights::Ram, _) => choice(true, "as requested".to_owned()),
        (Weights::Auto, _) if lazy => choice(false, "read when first needed, as requested".to_owned()),
        (Weights::Auto, None) => {
            choice(false, "the operating system does not report how much memory is free".to_owned())
        }
        (Weights::Auto, Some(available)) => {
            let own = required <= available;
            if let Some(cached) = cached.filter(|c| own && required.saturating_add(*c) > available) {
                // A copy would evict its own source from the page cache, which would then be read from disk.
                let (cached, available) = (size(cached), size(available));
                let why = format!(
                    "the page cache has {cached} of them, which a copy would drive out: {available} are free"
                );
                return choice(false, why);
            }
            let verb = if own { "needs" } else { "would need" };
            let (needed, reserve, available) = (size(needed), size(RESERVE), size(available));
            let why = format!("a run {verb} {needed}, and {reserve} to spare, of {available} that are free");
            choice(own, why)
        }
    }
}

/// Bytes of the memory at these addresses that are backed by huge pages.
#[cfg(target_os = "linux")]
pub(crate) fn huge_bytes(range: Range<usize>) -> Option<u64> {
    sum_of_huge(&std::fs::read_to_string("/proc/self/smaps").ok()?, &range)
}

/// Not reported on this operating system.
#[cfg(not(target_os = "linux"))]
pub(crate) fn huge_bytes(_range: Range<usize>) -> Option<u64> {
    None
}

/// Sums `AnonHugePages` of the mappings that overlap a range of addresses. `smaps` has the format of
/// `/proc/self/smaps`.
#[cfg(target_os = "linux")]
fn sum_of_huge(smaps: &str, range: &Range<usize>) -> Option<u64> {
    let (mut inside, mut sum) = (false, None);
    for line in smaps.lines() {
        let first = line.split(' ').next().unwrap_or_default();
        if let Some((start, end)) = first.split_once('-') {
            let at = |text| usize::from_str_radix(text, 16).ok();
            if let (Some(start), Some(end)) = (at(start), at(end)) {
                inside = start < range.end && range.start < end;
            }
        } else if inside && let Some(kib) = crate::platform::available::field(line, "AnonHugePages:") {
            sum = Some(sum.unwrap_or(0_u64).saturating_add(kib.saturating_mul(1024)));
        }
    }
    sum
}

/// Whether a request for huge pages is granted now; `None` if the operating system does not report it.
pub(crate) fn gets_huge_pages() -> Option<bool> {
    let region = Region::in_huge_pages("a huge page", HUGE_PAGE as u64).ok()?;
    region.populate(0, region.bytes());
    let first = region.base().ptr().addr();
    huge_bytes(first..first + region.bytes()).map(|bytes| bytes > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_options_are_parsed() {
        for (name, choice) in CHOICES {
            assert_eq!(Weights::parse(name), Some(choice));
        }
        assert_eq!(Weights::parse("mine"), None);
    }

    #[test]
    fn weights_are_copied_to_ram_if_memory_suffices() {
        const GIB: u64 = 1 << 30;
        use Weights::{Auto, Mmap, Ram};
        let half = Some(2 * GIB);
        for (weights, lazy, needed, cached, available, own) in [
            (Auto, false, 3 * GIB, None, Some(4 * GIB), Some(true)),
            (Auto, false, 4 * GIB - RESERVE, None, Some(4 * GIB), Some(true)),
            (Auto, false, 4 * GIB - RESERVE + 1, None, Some(4 * GIB), Some(false)),
            (Auto, false, 2 * GIB - RESERVE, half, Some(4 * GIB), Some(true)),
            (Auto, false, 2 * GIB - RESERVE + 1, half, Some(4 * GIB), Some(false)),
            (Ram, false, 3 * GIB, half, Some(4 * GIB), Some(true)),
            (Auto, false, u64::MAX, None, Some(u64::MAX), Some(true)),
            (Auto, false, 1, None, Some(0), Some(false)),
            (Auto, false, 1, None, None, Some(false)),
            (Auto, true, 1, None, Some(4 * GIB), Some(false)),
            (Mmap, false, 1, None, Some(4 * GIB), Some(false)),
            (Ram, false, 4 * GIB, None, Some(4 * GIB), Some(true)),
            (Ram, false, 4 * GIB + 1, None, Some(4 * GIB), None),
            (Ram, false, u64::MAX, None, None, Some(true)),
        ] {
            let found = choose(weights, lazy, needed, cached, available);
            assert_eq!(
                found.as_ref().ok().map(|c| c.own),
                own,
                "{weights:?} {needed} of {available:?}: {found:?}"
            );
        }
        let why = choose(Auto, false, 3 * GIB, None, Some(2 * GIB)).unwrap().why;
        assert_eq!(why, "a run would need 3.0 GiB, and 512 MiB to spare, of 2.0 GiB that are free");
        let why = choose(Auto, false, 3 * GIB, half, Some(4 * GIB)).unwrap().why;
        assert_eq!(why, "the page cache has 2.0 GiB of them, which a copy would drive out: 4.0 GiB are free");
        let error = choose(Ram, false, 3 * GIB, None, Some(2 * GIB)).unwrap_err().to_string();
        assert!(error.contains("3072.0 MiB") && error.contains("1024.0 MiB are missing"), "{error}");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn huge_pages_of_a_range_are_counted() {
        let smaps = "7f00-8000 rw-p 00000000 00:00 0 \nSize: 4 kB\nAnonHugePages:      2048 kB\nVmFlags: rd wr\n\
                     8000-9000 rw-p 00000000 00:00 0 [anon: x]\nAnonHugePages:      4096 kB\n\
                     a000-b000 r--p 00000000 00:00 0 /a-b\nAnonHugePages:         6 kB\n";
        assert_eq!(sum_of_huge(smaps, &(0x8000..0x8001)), Some(4096 << 10));
        assert_eq!(sum_of_huge(smaps, &(0x7fff..0x8001)), Some(6144 << 10));
        assert_eq!(sum_of_huge(smaps, &(0x9000..0xa000)), None);
        assert!(gets_huge_pages().is_some());
    }
}
