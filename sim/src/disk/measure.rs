//! Speed of reads from a disk: by block size, reads in flight, order and range.

use moec_runtime::error::{Error, Result};
use moec_runtime::offload::disk::files::Files;
use moec_runtime::offload::disk::{
    BLOCK, Buffers, Class, ExtentTable, FileEntry, Options, Read, ReadResult, Reader, open,
};
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Block sizes of a device's bandwidth table, in bytes (PowerInfer-2, §2.3.2).
pub const BLOCKS: [u32; 8] =
    [4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10];

/// Settings of one measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Point {
    /// Bytes of a read; as [`Options::block_bytes`].
    pub block_bytes: u32,
    /// Reads in flight.
    pub depth: u32,
    /// Whether blocks are read in random order, or sequentially.
    pub random: bool,
    /// Bytes from the start of the file that are read.
    pub range_bytes: u64,
}

/// Result of a measurement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    /// Its settings.
    pub point: Point,
    /// 10⁹ bytes per second.
    pub gb_per_s: f64,
}

/// Measured rates.
#[derive(Clone, Debug, PartialEq)]
pub struct DiskRates {
    /// Description of the reader.
    pub reader: String,
    /// Whether the page cache was bypassed. If not, the rates may be those of memory.
    pub direct: bool,
    /// One rate per point, in their order.
    pub rates: Vec<Rate>,
}

impl DiskRates {
    /// The best rate of random reads all over the file, by block size, ascending.
    pub fn random(&self) -> Vec<Rate> {
        let whole = self.rates.iter().map(|r| r.point.range_bytes).max();
        BLOCKS
            .iter()
            .filter_map(|block| self.best(*block, |p| p.random && Some(p.range_bytes) == whole))
            .collect()
    }

    /// The best rate of reads that follow each other, by block size, ascending.
    pub fn sequential(&self) -> Vec<Rate> {
        BLOCKS.iter().filter_map(|block| self.best(*block, |p| !p.random)).collect()
    }

    /// Rates of random reads within a part of the file.
    pub fn narrow(&self) -> impl Iterator<Item = &Rate> {
        let whole = self.rates.iter().map(|r| r.point.range_bytes).max();
        self.rates.iter().filter(move |r| r.point.random && Some(r.point.range_bytes) < whole)
    }

    fn best(&self, block: u32, of: impl Fn(&Point) -> bool) -> Option<Rate> {
        let rates = self.rates.iter().filter(|r| r.point.block_bytes == block && of(&r.point));
        rates.max_by(|a, b| a.gb_per_s.total_cmp(&b.gb_per_s)).copied()
    }
}

/// The points of a device file: every block size at random with 1, 8 and 32 reads in flight, and sequentially
/// with 32; the smallest blocks also within an eighth of the range.
pub fn points(range_bytes: u64) -> Vec<Point> {
    let mut points = Vec::new();
    for block_bytes in BLOCKS {
        let point = |depth, random, range_bytes| Point { block_bytes, depth, random, range_bytes };
        points.extend([1, 8, 32].map(|depth| point(depth, true, range_bytes)));
        points.push(point(32, false, range_bytes));
        if block_bytes == BLOCKS[0] {
            points.push(point(32, true, range_bytes / 8));
        }
    }
    points
}

/// Reads a file for about `span` per point. `tick` is called after every measurement.
///
/// Only `reader` and `direct` of the options are used. The file must be on the disk, not only in the page
/// cache ([`Scratch`] ensures this), and larger than the drive's own cache.
///
/// # Errors
/// The file cannot be read, or the range of a point holds no block.
pub fn measure_rates(
    path: &Path,
    points: &[Point],
    options: &Options,
    span: Duration,
    tick: &mut dyn FnMut(&Rate),
) -> Result<DiskRates> {
    let failed = |source| Error::io("read", path.to_owned(), source);
    let bytes = std::fs::metadata(path).map_err(failed)?.len();
    let table = ExtentTable::new(
        vec![FileEntry { path: path.to_owned(), bytes, cached: false, identity: None }],
        Vec::new(),
    )?;
    let files = Arc::new(Files::open(&table, options.direct)?);
    let direct = files.is_direct();
    let (mut described, mut rates) = (String::new(), Vec::with_capacity(points.len()));
    for &point in points {
        let options = Options { block_bytes: point.block_bytes, depth: point.depth, ..*options };
        options.check()?;
        let class = Class { bytes: u64::from(point.block_bytes), count: point.depth };
        let buffers = Buffers::new(&[class])?;
        if !direct && let Some(file) = files.get(0) {
            forget(file);
        }
        let mut reader = open::reader(&files, &buffers, &options)?;
        described = reader.describe();
        let blocks = point.range_bytes.min(bytes) / u64::from(point.block_bytes);
        let places = Places { blocks, at: 0, state: 0x9e37_79b9_7f4a_7c15, point };
        let rate = Rate { point, gb_per_s: measure(&mut *reader, &buffers, places, span).map_err(failed)? };
        tick(&rate);
        rates.push(rate);
    }
    Ok(DiskRates { reader: described, direct, rates })
}

/// Offsets to read at.
struct Places {
    blocks: u64,
    at: u64,
    state: u64,
    point: Point,
}

impl Places {
    fn next(&mut self) -> u64 {
        // xorshift64: an order that no drive predicts.
        for shift in [13_i32, -7, 17] {
            self.state ^= if shift > 0 { self.state << shift } else { self.state >> -shift };
        }
        self.at += 1;
        let block = if self.point.random { self.state } else { self.at } % self.blocks;
        block * u64::from(self.point.block_bytes)
    }
}

/// Keeps the reader busy for `span`; returns 10⁹ bytes per second.
fn measure(
    reader: &mut dyn Reader,
    buffers: &Arc<Buffers>,
    mut places: Places,
    span: Duration,
) -> io::Result<f64> {
    if places.blocks == 0 {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the range is smaller than a block"));
    }
    let held: Vec<_> = std::iter::from_fn(|| buffers.take(BLOCK)).take(reader.depth()).collect();
    let size = places.point.block_bytes;
    let mut read = |token: u64| {
        let buffer = &held[token as usize];
        let (at, buffer) = (buffer.addr(), buffer.index());
        Read { token, file: 0, offset: places.next(), bytes: size, at, buffer }
    };
    let mut next: Vec<_> = (0..held.len() as u64).map(&mut read).collect();
    let (mut done, mut bytes): (Vec<ReadResult>, u64) = (Vec::with_capacity(held.len()), 0);
    let (start, mut in_flight, mut failure) = (Instant::now(), 0, None);
    loop {
        // SAFETY: every read has a buffer of its own, which is held and never read; there are as many buffers
        // as the depth.
        unsafe { reader.submit(&next) }?;
        in_flight += next.len();
        next.clear();
        if in_flight == 0 {
            break;
        }
        reader.wait(&mut done, None)?;
        in_flight -= done.len();
        for d in done.drain(..) {
            match d.result {
                Ok(n) if n == size => bytes += u64::from(n),
                Err(libc::EINTR | libc::EAGAIN) => {}
                Ok(_) => failure = Some(io::ErrorKind::UnexpectedEof.into()),
                Err(errno) => failure = Some(io::Error::from_raw_os_error(errno)),
            }
            if failure.is_none() && start.elapsed() < span {
                next.push(read(d.token));
            }
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    failure.map_or(Ok(bytes as f64 / seconds / 1e9), Err)
}

/// Drops a file from the page cache, as far as the operating system does that.
fn forget(file: &File) {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    {
        use std::os::fd::AsRawFd;
        // SAFETY: no pointers; the descriptor is open. A refusal changes nothing.
        unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    }
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    let _ = file;
}

/// A file to measure with; removed when dropped.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
}

impl Scratch {
    /// Writes `bytes` bytes that no disk can compress to a new file in `folder`, down to the disk.
    ///
    /// # Errors
    /// [`Error::Io`]: the folder cannot be written to, or is full.
    pub fn create(folder: &Path, bytes: u64) -> Result<Self> {
        let path = folder.join(format!("moec-disk-{}.tmp", std::process::id()));
        let failed = |source| Error::io("write", path.clone(), source);
        let mut file = File::create_new(&path).map_err(failed)?;
        // From here on the file is removed in any case.
        let scratch = Self { path: path.clone() };
        let (mut state, mut part) = (1_u64, vec![0; 1 << 20]);
        let mut left = bytes;
        while left > 0 {
            for word in part.as_chunks_mut().0 {
                // The multiplier of a linear congruential generator (Knuth, MMIX); its upper bits suffice.
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                *word = ((state >> 32) as u32).to_le_bytes();
            }
            let n = left.min(part.len() as u64);
            file.write_all(&part[..n as usize]).map_err(failed)?;
            left -= n;
        }
        file.sync_all().map_err(failed)?;
        forget(&file);
        Ok(scratch)
    }

    /// Path.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A failure is not worth an error: the file's name shows its purpose.
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moec_runtime::offload::disk::Choice;

    #[test]
    fn every_point_has_a_rate() {
        let dir = tempfile::tempdir().unwrap();
        let scratch = Scratch::create(dir.path(), 2 << 20).unwrap();
        for choice in [Choice::Auto, Choice::Threads] {
            let options = Options { reader: choice, ..Options::default() };
            let mut ticks = 0;
            let points = points(2 << 20);
            let span = Duration::from_millis(1);
            let found = measure_rates(scratch.path(), &points, &options, span, &mut |_| ticks += 1).unwrap();
            assert_eq!((ticks, found.rates.len()), (points.len(), points.len()));
            assert!(found.rates.iter().all(|r| r.gb_per_s > 0.0), "{found:?}");
            assert_eq!(found.random().iter().map(|r| r.point.block_bytes).collect::<Vec<_>>(), BLOCKS);
        }
        let path = scratch.path().to_owned();
        drop(scratch);
        assert!(!path.exists());
    }

    #[test]
    fn blocks_in_order_cover_the_range_and_random_ones_stay_in_it() {
        let point = Point { block_bytes: 4096, depth: 1, random: false, range_bytes: 40_960 };
        let mut places = Places { blocks: 10, at: 0, state: 1, point };
        let mut found: Vec<_> = (0..10).map(|_| places.next() / 4096).collect();
        found.sort_unstable();
        assert_eq!(found, (0..10).collect::<Vec<_>>());
        places.point.random = true;
        let found: std::collections::BTreeSet<_> = (0..100).map(|_| places.next() / 4096).collect();
        assert!(found.iter().all(|&b| b < 10) && found.len() > 5);
    }

    #[test]
    fn range_smaller_than_one_block_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let scratch = Scratch::create(dir.path(), 8192).unwrap();
        let point = Point { block_bytes: 16_384, depth: 2, random: true, range_bytes: 1 << 20 };
        let options = Options::default();
        assert!(measure_rates(scratch.path(), &[point], &options, Duration::ZERO, &mut |_| {}).is_err());
    }
}
