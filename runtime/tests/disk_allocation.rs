//! Reading weights from disk does not allocate after the setup.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "what fails here fails the test")]

use moec_runtime::offload::disk::{
    Buffers, Choice, Class, Disk, Event, Extent, ExtentTable, FileEntry, Options, Priority, SystemClock,
    ThreadedDisk, checksum,
};
use moec_testing::IO_URING;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The system's allocator, with a count of allocations.
struct Counted;

static COUNT: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) };
    }
}

#[global_allocator]
static ALLOCATOR: Counted = Counted;

#[test]
fn disk_reads_do_not_allocate() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let bytes = vec![7; 1 << 20];
    std::fs::write(file.path(), &bytes).unwrap();
    let half = bytes.len() as u64 / 2;
    let extents = [0, half].map(|offset| Extent {
        file: 0,
        offset,
        bytes: half,
        crc32c: Some(checksum(&bytes[..half as usize])),
    });
    let entry = FileEntry { path: file.path().to_owned(), bytes: 2 * half, cached: false, identity: None };
    let table = Arc::new(ExtentTable::new(vec![entry], extents.to_vec()).unwrap());
    #[cfg(target_os = "linux")]
    let rings = IO_URING.ok_or_skip(io_uring::IoUring::new(2)).is_some();
    #[cfg(not(target_os = "linux"))]
    let rings = IO_URING.by(false);
    for reader in rings.then_some(Choice::Uring).into_iter().chain([Choice::Threads]) {
        let buffers = Buffers::new(&[Class { bytes: 2 * half, count: 4 }]).unwrap();
        let options =
            Options { reader, block_bytes: 64 << 10, depth: 8, verify_reads: true, ..Options::default() };
        let clock = Arc::new(SystemClock::default());
        let disk = ThreadedDisk::open(Arc::clone(&table), Arc::clone(&buffers), &options, clock).unwrap();
        let round = || {
            let submit = |priority| disk.submit(0, 2, priority, buffers.take(1).unwrap()).unwrap();
            submit(Priority::Demand);
            let early = submit(Priority::Prefetch);
            disk.raise(early);
            let late = submit(Priority::Prefetch);
            disk.cancel(late);
            let (mut ends, mut sum) = (0, 0);
            while ends < 3 {
                match disk.wait(None) {
                    Some(Event::Done { loaded, .. }) => {
                        ends += 1;
                        sum += loaded.bytes().iter().step_by(4096).map(|&b| u64::from(b)).sum::<u64>();
                    }
                    Some(Event::Cancelled { .. }) => ends += 1,
                    Some(Event::Arrived { .. } | Event::Released { .. }) => {}
                    other => panic!("{other:?}"),
                }
            }
            sum
        };
        round();
        // Wait for threads that start late, which allocate for themselves.
        std::thread::sleep(std::time::Duration::from_millis(200));
        round();
        let before = COUNT.load(Ordering::Relaxed);
        let sum: u64 = (0..20).map(|_| round()).sum();
        assert_eq!(COUNT.load(Ordering::Relaxed) - before, 0, "{reader:?}");
        assert!(sum >= 20 * 2 * 7 * 256);
    }
}
