//! Reading weights from disk gives the bytes of the file, or an error that names file and extent, with either
//! reader and under all faults.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "what fails here fails the test")]

use moec_runtime::offload::disk::{
    BLOCK, Buffers, Choice, Class, Clock, Disk, Event, Extent, ExtentTable, FileEntry, Options, Priority,
    Read, ReadError, ReadFault, SystemClock, ThreadedDisk, Ticket, checksum,
};
use moec_runtime::{Error, Fault};
use moec_sim::disk::fault::{Faulty, Gate, Injected};
use moec_testing::IO_URING;
use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tempfile::TempDir;

/// Longest time that a test waits for an expected event.
const SOON: Option<Duration> = Some(Duration::from_secs(20));

/// Whether this machine has io_uring.
fn has_rings() -> bool {
    #[cfg(target_os = "linux")]
    let rings = IO_URING.ok_or_skip(io_uring::IoUring::new(2)).is_some();
    #[cfg(not(target_os = "linux"))]
    let rings = IO_URING.by(false);
    rings
}

/// Readers of this machine.
fn readers() -> impl Iterator<Item = Choice> {
    has_rings().then_some(Choice::Uring).into_iter().chain([Choice::Threads])
}

/// A clock that only tests advance.
#[derive(Debug, Default)]
struct ManualClock(AtomicU64);

impl ManualClock {
    /// Advances the clock.
    fn advance(&self, by: Duration) {
        self.0.fetch_add(by.as_nanos() as u64, Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::SeqCst))
    }

    // No signal reports that the clock was advanced, so it is read often.
    fn until(&self, moment: Duration) -> Duration {
        if moment <= self.now() { Duration::ZERO } else { Duration::from_millis(1) }
    }
}

/// A file of extents, each at the next multiple of 4096.
struct Bench {
    dir: TempDir,
    bytes: Vec<u8>,
    table: Arc<ExtentTable>,
    buffers: Arc<Buffers>,
    clock: Arc<ManualClock>,
    gate: Gate,
}

impl Bench {
    fn new(sizes: &[u64]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (mut bytes, mut extents) = (Vec::new(), Vec::new());
        let mut state = 1_u32;
        for &size in sizes {
            bytes.resize(bytes.len().next_multiple_of(BLOCK as usize), 0);
            let offset = bytes.len() as u64;
            bytes.extend((0..size).map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 24) as u8
            }));
            let crc32c = checksum(&bytes[offset as usize..]);
            extents.push(Extent { file: 0, offset, bytes: size, crc32c: Some(crc32c) });
        }
        let path = dir.path().join("experts.bin");
        std::fs::write(&path, &bytes).unwrap();
        let entry = FileEntry { path, bytes: bytes.len() as u64, cached: false, identity: None };
        let table = Arc::new(ExtentTable::new(vec![entry], extents).unwrap());
        let buffers = Buffers::new(&[Class { bytes: bytes.len() as u64, count: 8 }]).unwrap();
        Self { dir, bytes, table, buffers, clock: Arc::default(), gate: Gate::default() }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("experts.bin")
    }

    fn open(&self, options: Options, plan: impl FnMut(&Read) -> Injected + Send + 'static) -> ThreadedDisk {
        let gate = self.gate.clone();
        let wrap = |reader| -> Box<dyn moec_runtime::offload::disk::Reader> {
            Box::new(Faulty::new(reader, gate, plan))
        };
        let (table, buffers) = (Arc::clone(&self.table), Arc::clone(&self.buffers));
        ThreadedDisk::with_reader(table, buffers, &options, self.clock.clone(), wrap).unwrap()
    }

    /// Checks that a fetch has the file's bytes in its extents. Bytes between them do not matter.
    fn is_right(&self, first: u32, count: u32, found: &[u8]) -> bool {
        let extents = &self.table.extents()[first as usize..][..count as usize];
        let end = extents[extents.len() - 1];
        found.len() as u64 == end.offset + end.bytes - extents[0].offset
            && extents.iter().all(|e| {
                let (at, n) = ((e.offset - extents[0].offset) as usize, e.bytes as usize);
                found[at..at + n] == self.bytes[e.offset as usize..][..n]
            })
    }

    fn fetch(&self, disk: &ThreadedDisk, first: u32, count: u32) -> Ticket {
        let buffer = self.buffers.take(1).unwrap();
        disk.submit(first, count, Priority::Demand, buffer).unwrap()
    }

    /// Reads extents and compares their bytes.
    fn read(&self, disk: &ThreadedDisk, first: u32, count: u32) -> Result<(), ReadError> {
        let ticket = self.fetch(disk, first, count);
        loop {
            match disk.wait(SOON).expect("an event") {
                Event::Done { ticket: t, loaded } if t == ticket => {
                    assert!(self.is_right(first, count, loaded.bytes()), "other bytes than the file's");
                    return Ok(());
                }
                Event::Failed { ticket: t, error } if t == ticket => return Err(error),
                _ => {}
            }
        }
    }

    /// Waits until all buffers are free.
    fn settle(&self) {
        for _ in 0..2000 {
            if self.buffers.free(1) == self.buffers.len() {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        panic!("{} of {} buffers are free", self.buffers.free(1), self.buffers.len());
    }
}

fn options(reader: Choice) -> Options {
    let few = Options { block_bytes: 16 << 10, depth: 4, interruptions: 5, ..Options::default() };
    Options { reader, verify_reads: false, ..few }
}

/// Faults for the first `times` reads of the file's first block, and none later.
fn first_times(times: u32, injected: Injected) -> impl FnMut(&Read) -> Injected {
    let mut left = times;
    move |read| {
        if read.offset < 16 << 10 && left > 0 {
            left -= 1;
            injected
        } else {
            Injected::Nothing
        }
    }
}

const SIZES: [u64; 4] = [200_000, 70_001, 4096, 1];

#[test]
fn extents_read_back_as_written() {
    let bench = Bench::new(&SIZES);
    for reader in readers() {
        for direct in [true, false] {
            for verify_reads in [true, false] {
                let disk =
                    bench.open(Options { direct, verify_reads, ..options(reader) }, |_| Injected::Nothing);
                for (first, count) in [(0, 1), (1, 1), (3, 1), (0, 4), (1, 2)] {
                    bench.read(&disk, first, count).unwrap();
                }
                let stats = disk.stats();
                assert_eq!(stats.bytes, 274_098 + 200_000 + 70_001 + 1 + 74_097);
                assert_eq!((stats.repeated, stats.failed), (0, 0));
                assert_eq!(stats.checked, if verify_reads { 9 } else { 0 });
            }
        }
    }
}

#[test]
fn description_names_the_read_method() {
    let bench = Bench::new(&SIZES);
    let text = |options| bench.open(options, |_| Injected::Nothing).describe().to_owned();
    if has_rings() {
        let uring = text(options(Choice::Uring));
        assert!(uring.contains("io_uring") && uring.contains("16 KiB"), "{uring}");
    }
    let threads = text(Options { direct: false, ..options(Choice::Threads) });
    assert!(threads.contains("pread on 4 threads") && threads.contains("page cache"), "{threads}");
}

/// Threads of this process with such a name that may use that core alone.
#[cfg(target_os = "linux")]
fn threads_on(core: usize, name: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let is_one = |task: &std::fs::DirEntry| {
        // A thread of another test may have ended.
        let Ok(status) = std::fs::read_to_string(task.path().join("status")) else { return false };
        let value = |key: &str| status.lines().find_map(|l| l.strip_prefix(key)).map(str::trim);
        value("Name:").is_some_and(|n| n.starts_with(name))
            && value("Cpus_allowed_list:") == Some(&core.to_string())
    };
    tasks.filter(is_one).count()
}

#[cfg(target_os = "linux")]
#[test]
fn threads_that_read_are_bound_to_the_core_of_the_options() {
    use moec_runtime::platform::cpu::CoreSet;
    let core = CoreSet::of_this_thread().unwrap().cores().last().copied().unwrap();
    let bench = Bench::new(&SIZES);
    for reader in readers() {
        let settings = Options { depth: 32, core: Some(core), ..options(reader) };
        let disk = bench.open(settings, |_| Injected::Nothing);
        bench.read(&disk, 0, 4).unwrap();
        let text = disk.describe();
        assert!(text.ends_with(&format!(", on core {core}")), "{text}");
        assert_eq!(text.contains("pread on 4 threads"), reader == Choice::Threads, "{text}");
        // A thread binds itself when it starts, perhaps after others have read all. Where the machine has
        // one core, threads of other tests have it, too.
        let preads = if reader == Choice::Threads { 4 } else { 0 };
        let bound = || threads_on(core, "moec-disk") >= 1 && threads_on(core, "moec-read-") >= preads;
        assert!((0..2000).any(|_| bound() || {
            std::thread::sleep(Duration::from_millis(1));
            false
        }));
    }
    // A core that does not exist leaves threads as they are.
    for core in [1023, usize::MAX] {
        let disk =
            bench.open(Options { core: Some(core), ..options(Choice::Threads) }, |_| Injected::Nothing);
        bench.read(&disk, 0, 4).unwrap();
    }
}

#[test]
fn interrupted_reads_are_repeated() {
    let bench = Bench::new(&SIZES);
    for reader in readers() {
        for errno in [libc::EINTR, libc::EAGAIN] {
            let disk = bench.open(options(reader), first_times(5, Injected::Error(errno)));
            bench.read(&disk, 0, 2).unwrap();
            assert_eq!(disk.stats().repeated, 5);
            // No extent needs a check: no byte of a refused read was used.
            assert_eq!(disk.stats().checked, 0);
            let disk = bench.open(options(reader), first_times(u32::MAX, Injected::Error(errno)));
            let error = bench.read(&disk, 0, 2).unwrap_err();
            assert_eq!(error.fault, ReadFault::System { errno, attempts: 6 });
        }
        bench.settle();
    }
}

#[test]
fn failing_block_is_retried_then_reported() {
    let bench = Bench::new(&SIZES);
    for reader in readers() {
        let disk = bench.open(options(reader), first_times(3, Injected::Error(libc::EIO)));
        bench.read(&disk, 0, 1).unwrap();
        assert_eq!((disk.stats().repeated, disk.stats().checked), (3, 1));
        let disk = bench.open(options(reader), |read| match read.offset {
            200_704.. => Injected::Error(libc::EIO),
            _ => Injected::Nothing,
        });
        let error = bench.read(&disk, 0, 2).unwrap_err();
        assert_eq!(error.fault, ReadFault::System { errno: libc::EIO, attempts: 4 });
        assert_eq!((error.extent, error.offset, error.bytes), (1, 200_704, 70_001));
        assert_eq!(error.path, bench.path());
        let text = error.to_string();
        assert!(
            text.contains("experts.bin") && text.contains("extent 1") && text.contains("4 attempts"),
            "{text}"
        );
        // Other extents are not affected.
        bench.read(&disk, 0, 1).unwrap();
        bench.settle();
    }
}

#[test]
fn short_reads_continue_at_their_end() {
    let bench = Bench::new(&SIZES);
    for reader in readers() {
        for most in [1, 4095, 4096, 5000, 12_288, 16_383] {
            let disk = bench.open(options(reader), first_times(2, Injected::Short(most)));
            bench.read(&disk, 0, 1).unwrap();
            assert!(disk.stats().repeated >= 1 && disk.stats().checked == 1);
        }
        // Every read ends after one page, so there is always progress.
        let disk = bench.open(options(reader), |_| Injected::Short(4096));
        bench.read(&disk, 0, 4).unwrap();
        // No read ever completes a page.
        let disk = bench.open(options(reader), |_| Injected::Short(4095));
        let error = bench.read(&disk, 0, 1).unwrap_err();
        assert_eq!(error.fault, ReadFault::Nothing { attempts: 4 });
        let disk = bench.open(options(reader), first_times(u32::MAX, Injected::End));
        assert_eq!(bench.read(&disk, 0, 1).unwrap_err().fault, ReadFault::Nothing { attempts: 4 });
    }
}

#[test]
fn truncated_file_is_named() {
    for reader in readers() {
        for found in [0, 4096, 100_001, 200_703 + 70_000] {
            let bench = Bench::new(&SIZES[..2]);
            let disk = bench.open(options(reader), |_| Injected::Nothing);
            bench.read(&disk, 0, 2).unwrap();
            std::fs::File::options().write(true).open(bench.path()).unwrap().set_len(found).unwrap();
            let error = bench.read(&disk, 0, 2).unwrap_err();
            assert_eq!(error.fault, ReadFault::Truncated { found });
            assert_eq!(error.path, bench.path());
            let error = Error::Read(Box::new(error));
            assert_eq!(error.fault(), Fault::Bundle);
            assert!(error.hint().unwrap().contains("rebuild"));
        }
    }
}

#[test]
fn corrupt_bytes_are_reread_and_never_returned() {
    let bench = Bench::new(&SIZES);
    for reader in readers() {
        let verify = Options { verify_reads: true, ..options(reader) };
        let disk = bench.open(verify, first_times(3, Injected::Flip(77)));
        bench.read(&disk, 0, 4).unwrap();
        assert_eq!(disk.stats().repeated, 3);
        let disk = bench.open(verify, first_times(u32::MAX, Injected::Flip(77)));
        let error = bench.read(&disk, 0, 4).unwrap_err();
        let expected = bench.table.extents()[0].crc32c.unwrap();
        assert!(
            matches!(error.fault, ReadFault::Checksum { expected: e, attempts: 4, .. } if e == expected),
            "{error}"
        );
        // Without verification only an extent with a failed read is checked.
        let mut calls = 0;
        let disk = bench.open(options(reader), move |read| {
            calls += u32::from(read.offset == 0);
            match (read.offset, calls) {
                (0, 1) => Injected::Error(libc::EIO),
                (0, 2) => Injected::Flip(3),
                _ => Injected::Nothing,
            }
        });
        bench.read(&disk, 0, 1).unwrap();
        assert_eq!(disk.stats().checked, 2);
    }
}

#[test]
fn file_changed_in_place_fails_its_checksum() {
    let bench = Bench::new(&SIZES);
    let mut changed = bench.bytes.clone();
    changed[200_704 + 69_000] ^= 4;
    std::fs::write(bench.path(), changed).unwrap();
    for reader in readers() {
        let disk = bench.open(Options { verify_reads: true, ..options(reader) }, |_| Injected::Nothing);
        bench.read(&disk, 0, 1).unwrap();
        let error = bench.read(&disk, 0, 3).unwrap_err();
        assert!(matches!(error.fault, ReadFault::Checksum { .. }) && error.extent == 1, "{error}");
    }
}

#[test]
fn stalled_device_is_named_and_keeps_its_buffer() {
    for reader in readers() {
        let bench = Bench::new(&SIZES);
        let stalls = |read: &Read| if read.offset == 16 << 10 { Injected::Stall } else { Injected::Nothing };
        let disk = bench.open(options(reader), stalls);
        let ticket = bench.fetch(&disk, 0, 1);
        assert!(disk.wait(Some(Duration::from_millis(20))).is_none());
        bench.clock.advance(Duration::from_secs(29));
        assert!(disk.wait(Some(Duration::from_millis(20))).is_none());
        bench.clock.advance(Duration::from_secs(1));
        let Some(Event::Failed { ticket: t, error }) = disk.wait(SOON) else { panic!("no error") };
        assert_eq!((t, error.extent, &error.path), (ticket, 0, &bench.path()));
        assert_eq!(error.fault, ReadFault::Stalled { limit: Duration::from_secs(30) });
        assert!(error.to_string().contains("no answer within 30s"), "{error}");
        // The device may still write there, so the buffer is not free.
        assert_eq!(bench.buffers.free(1), 7);
        // Other reads continue.
        bench.read(&disk, 1, 2).unwrap();
        bench.gate.open();
        bench.settle();
        bench.read(&disk, 0, 1).unwrap();
        assert!(disk.poll().is_none());
    }
}

#[test]
fn reads_queued_on_a_stalled_device_fail_too() {
    for reader in readers() {
        let bench = Bench::new(&SIZES);
        let disk = bench.open(options(reader), |_| Injected::Stall);
        let tickets = [bench.fetch(&disk, 0, 1), bench.fetch(&disk, 1, 1), bench.fetch(&disk, 2, 1)];
        std::thread::sleep(Duration::from_millis(20));
        bench.clock.advance(Duration::from_secs(31));
        // Fetches that had not begun are released at once.
        let mut failed: Vec<_> = std::iter::from_fn(|| disk.wait(SOON))
            .filter(|event| !matches!(event, Event::Released { .. }))
            .map(|event| match event {
                Event::Failed { ticket, error } => {
                    assert!(matches!(error.fault, ReadFault::Stalled { .. }));
                    (tickets.iter().position(|t| *t == ticket).unwrap(), error.extent)
                }
                other => panic!("{other:?}"),
            })
            .take(3)
            .collect();
        failed.sort_unstable();
        assert_eq!(failed, [(0, 0), (1, 1), (2, 2)]);
        bench.gate.open();
        bench.settle();
        bench.read(&disk, 0, 4).unwrap();
    }
}

#[test]
fn duplicate_completions_count_once() {
    let bench = Bench::new(&SIZES);
    for reader in readers() {
        let disk = bench.open(options(reader), |_| Injected::Twice);
        for _ in 0..3 {
            bench.read(&disk, 0, 4).unwrap();
        }
        assert_eq!(disk.stats().bytes, 3 * 274_098);
    }
}

#[test]
fn failed_reader_ends_all_reads_with_an_error() {
    for reader in readers() {
        let bench = Bench::new(&SIZES);
        let broken = AtomicU32::new(0);
        let disk = bench.open(options(reader), move |_| match broken.fetch_add(1, Ordering::SeqCst) {
            5 => Injected::Break,
            _ => Injected::Nothing,
        });
        let error = bench.read(&disk, 0, 4).unwrap_err();
        assert_eq!(error.fault, ReadFault::Reader { errno: libc::EBADF });
        let refused = loop {
            // The thread may be ending: either way there is an error.
            match disk.submit(0, 1, Priority::Demand, bench.buffers.take(1).unwrap()) {
                Err(e) => break e,
                Ok(_) => assert!(matches!(disk.wait(SOON), Some(Event::Failed { .. }))),
            }
        };
        assert!(matches!(refused, Error::Read(_)), "{refused}");
    }
}

/// Order in which extents were first read, while the very first read is held back.
fn order(reader: Choice, act: impl FnOnce(&Bench, &ThreadedDisk)) -> (Vec<u32>, HashMap<&'static str, u32>) {
    let bench = Bench::new(&[16 << 10; 6]);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let writer = Arc::clone(&seen);
    let disk = bench.open(Options { depth: 1, ..options(reader) }, move |read| {
        let mut seen = writer.lock().unwrap();
        seen.push((read.offset >> 14) as u32);
        if seen.len() == 1 { Injected::Stall } else { Injected::Nothing }
    });
    bench.fetch(&disk, 0, 1);
    while seen.lock().unwrap().is_empty() {
        std::thread::yield_now();
    }
    act(&bench, &disk);
    // Commands are executed in order, and an iteration of the thread takes all that are queued.
    std::thread::sleep(Duration::from_millis(20));
    bench.gate.open();
    let mut ends = HashMap::new();
    while bench.buffers.free(1) < 8 {
        match disk.wait(SOON).expect("an event") {
            Event::Done { .. } => *ends.entry("done").or_default() += 1,
            Event::Cancelled { .. } => *ends.entry("cancelled").or_default() += 1,
            Event::Released { .. } => {}
            other => panic!("{other:?}"),
        }
        if ends.values().sum::<u32>() == 6 {
            break;
        }
    }
    bench.settle();
    let order = seen.lock().unwrap().clone();
    (order, ends)
}

#[test]
fn demand_reads_precede_prefetches() {
    for reader in readers() {
        let (order, ends) = order(reader, |bench, disk| {
            let submit = |i, priority| disk.submit(i, 1, priority, bench.buffers.take(1).unwrap()).unwrap();
            let early = [1, 2].map(|i| submit(i, Priority::Prefetch));
            submit(3, Priority::Demand);
            submit(4, Priority::Prefetch);
            submit(5, Priority::Demand);
            disk.raise(early[1]);
        });
        assert_eq!(order, [0, 3, 5, 2, 1, 4], "{reader:?}");
        assert_eq!(ends["done"], 6);
    }
}

#[test]
fn read_cancelled_before_its_start_is_skipped() {
    for reader in readers() {
        let (order, ends) = order(reader, |bench, disk| {
            let submit = |i, priority| disk.submit(i, 1, priority, bench.buffers.take(1).unwrap()).unwrap();
            let tickets = [1, 2, 3, 4, 5].map(|i| submit(i, Priority::Prefetch));
            disk.cancel(tickets[1]);
            disk.cancel(tickets[4]);
            disk.cancel(tickets[4]);
        });
        assert_eq!(order, [0, 1, 3, 4], "{reader:?}");
        assert_eq!((ends["done"], ends["cancelled"]), (4, 2));
    }
}

#[test]
fn each_extent_is_announced_when_it_is_read() {
    for reader in readers() {
        let bench = Bench::new(&SIZES);
        // The second extent is held back.
        let disk = bench.open(Options { verify_reads: true, ..options(reader) }, |read| match read.offset {
            200_704..=204_800 => Injected::Stall,
            _ => Injected::Nothing,
        });
        let buffer = bench.buffers.take(1).unwrap();
        let at = buffer.addr();
        let ticket = disk.submit(0, 2, Priority::Demand, buffer).unwrap();
        let Some(Event::Arrived { ticket: t, extent: 0 }) = disk.wait(SOON) else { panic!("not there") };
        assert_eq!(t, ticket);
        // SAFETY: the extent has arrived at the front of the buffer, and nothing writes to it.
        let bytes = unsafe { std::slice::from_raw_parts(at.ptr(), 200_000) };
        assert!(bench.is_right(0, 1, bytes));
        bench.gate.open();
        let Some(Event::Done { loaded, .. }) = disk.wait(SOON) else { panic!("not done") };
        assert!(bench.is_right(0, 2, loaded.bytes()));
        assert_eq!(loaded.addr(), at);
        // The same memory again.
        let ticket = disk.submit(1, 1, Priority::Prefetch, loaded.into_buffer()).unwrap();
        let Some(Event::Done { ticket: t, loaded }) = disk.wait(SOON) else { panic!("not done") };
        assert!(t == ticket && bench.is_right(1, 1, loaded.bytes()));
    }
}

#[test]
fn invalid_disk_requests_are_rejected() {
    let bench = Bench::new(&SIZES);
    let disk = bench.open(options(Choice::Threads), |_| Injected::Nothing);
    let submit = |first, count, buffer| disk.submit(first, count, Priority::Demand, buffer);
    let take = || bench.buffers.take(1).unwrap();
    assert!(submit(0, 5, take()).is_err() && submit(4, 1, take()).is_err() && submit(0, 0, take()).is_err());
    let foreign = Buffers::new(&[Class { bytes: 1 << 20, count: 1 }]).unwrap();
    assert!(submit(0, 1, foreign.take(1).unwrap()).is_err());
    assert_eq!((foreign.free(1), bench.buffers.free(1)), (1, 8));
    let small = Buffers::new(&[Class { bytes: 8192, count: 1 }]).unwrap();
    let clock = Arc::new(SystemClock::default());
    let table = Arc::clone(&bench.table);
    let disk = ThreadedDisk::open(table, Arc::clone(&small), &Options::default(), clock).unwrap();
    assert!(disk.submit(0, 1, Priority::Demand, small.take(1).unwrap()).is_err());
    assert!(disk.submit(2, 1, Priority::Demand, small.take(1).unwrap()).is_ok());
}

#[test]
fn disk_file_of_wrong_size_is_rejected() {
    let bench = Bench::new(&SIZES);
    let open = || {
        let clock = Arc::new(SystemClock::default());
        let (table, buffers) = (Arc::clone(&bench.table), Arc::clone(&bench.buffers));
        ThreadedDisk::open(table, buffers, &Options::default(), clock).map(|_| ())
    };
    open().unwrap();
    std::fs::write(bench.path(), [0; 5000]).unwrap();
    assert!(matches!(open(), Err(Error::BadFile { what, .. }) if what.starts_with("has 5000 bytes")));
    std::fs::remove_file(bench.path()).unwrap();
    assert!(matches!(open(), Err(Error::MissingFile(p)) if p == bench.path()));
}

#[test]
fn dropping_the_disk_ends_pending_reads() {
    for reader in readers() {
        let bench = Bench::new(&SIZES);
        let disk = bench.open(options(reader), |_| Injected::Nothing);
        for _ in 0..7 {
            bench.fetch(&disk, 0, 4);
        }
        drop(disk);
        bench.settle();
        // A read that never ends never releases its buffer.
        let disk = bench.open(options(reader), first_times(1, Injected::Stall));
        bench.fetch(&disk, 0, 1);
        std::thread::sleep(Duration::from_millis(20));
        drop(disk);
        assert_eq!(bench.buffers.free(1), 7);
    }
}

mod any_mix {
    use super::*;
    use proptest::prelude::*;

    fn fault() -> impl Strategy<Value = Injected> {
        prop_oneof![
            12 => Just(Injected::Nothing),
            2 => prop_oneof![Just(libc::EINTR), Just(libc::EAGAIN), Just(libc::EIO), Just(libc::ENOMEM)]
                .prop_map(Injected::Error),
            2 => (0_u32..70_000).prop_map(Injected::Short),
            2 => any::<u32>().prop_map(Injected::Flip),
            1 => Just(Injected::End),
            1 => Just(Injected::Stall),
            1 => Just(Injected::Twice),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

        /// For any reads, cancellations, changes of priority and faults: the result is the file's bytes, or
        /// an error that names an extent of the fetch. In the end all memory is free again.
        #[test]
        fn disk_yields_the_file_bytes_or_an_error(
            uring in any::<bool>(),
            direct in any::<bool>(),
            block in 1_u32..=16,
            depth in 1_u32..=6,
            sizes in prop::collection::vec(1_u64..150_000, 1..6),
            fetches in prop::collection::vec((any::<prop::sample::Index>(), 1_u32..4, 0_u8..8), 1..8),
            faults in prop::collection::vec(fault(), 1..200),
            truncate in prop::option::weighted(0.2, 0_u64..150_000),
        ) {
            let bench = Bench::new(&sizes);
            let options = Options {
                reader: if uring && has_rings() { Choice::Uring } else { Choice::Threads },
                direct,
                block_bytes: block * 4096,
                depth,
                // Only checksums find reads with wrong bytes.
                verify_reads: true,
                interruptions: 20,
                ..Options::default()
            };
            let mut faults = faults.into_iter();
            let disk = bench.open(options, move |_| faults.next().unwrap_or(Injected::Nothing));
            let mut open = HashMap::new();
            let mut over = HashSet::new();
            for (index, count, act) in fetches {
                let first = index.index(sizes.len()) as u32;
                let count = count.min(sizes.len() as u32 - first);
                let priority = if act & 1 == 0 { Priority::Demand } else { Priority::Prefetch };
                let ticket = disk.submit(first, count, priority, bench.buffers.take(1).unwrap()).unwrap();
                open.insert(ticket, (first, count, act >= 6));
                match act {
                    3 => disk.raise(ticket),
                    6.. => disk.cancel(ticket),
                    _ => {}
                }
            }
            if let Some(bytes) = truncate.filter(|&n| n < bench.bytes.len() as u64) {
                std::fs::File::options().write(true).open(bench.path()).unwrap().set_len(bytes).unwrap();
            }
            let mut naps = 0;
            while !open.is_empty() {
                let Some(event) = disk.wait(Some(Duration::from_millis(5))) else {
                    // Only stalled reads are left, or the machine is busy.
                    naps += 1;
                    prop_assert!(naps < 4000, "{open:?} never ended");
                    bench.clock.advance(Duration::from_secs(1));
                    continue;
                };
                match event {
                    Event::Arrived { ticket, extent } => {
                        let (first, count, _) = open[&ticket];
                        prop_assert!((first..first + count).contains(&extent));
                    }
                    Event::Done { ticket, loaded } => {
                        let (first, count, _) = open.remove(&ticket).unwrap();
                        prop_assert!(bench.is_right(first, count, loaded.bytes()), "other bytes");
                    }
                    Event::Failed { ticket, error } => {
                        let (first, count, _) = open.remove(&ticket).unwrap();
                        prop_assert!((first..first + count).contains(&error.extent), "{error}");
                        prop_assert_eq!(&error.path, &bench.path());
                        prop_assert!(over.insert(ticket));
                    }
                    Event::Cancelled { ticket } => {
                        let (_, _, cancelled) = open.remove(&ticket).unwrap();
                        prop_assert!(cancelled);
                        prop_assert!(over.insert(ticket));
                    }
                    // A release comes after the end of its fetch, and once.
                    Event::Released { ticket } => prop_assert!(over.remove(&ticket)),
                }
            }
            bench.gate.open();
            bench.settle();
        }
    }
}
