//! Weights that stay on disk: extents of the weight files, read into memory taken beforehand.
//!
//! * [`extent`]: ranges of files that are read and checked together.
//! * [`buffer`]: the memory that they are read into.
//! * [`reader`]: one attempt to read one block; [`uring`] and [`threads`] are the two implementations, and
//!   [`open`] chooses one.
//! * `scheduler`: extents cut into blocks, the urgent ones first; failed reads are repeated, or end in an
//!   error that names file and extent.
//! * [`worker`]: runs scheduler and reader in turns; [`handle`]: [`ThreadedDisk`], which does so on a thread
//!   of its own, and its public trait [`Disk`].
//!
//! Invariant: bytes are handed out only after all of them were read and their checksum, if there is one,
//! matched. If checksums are turned off, only extents with a failed read are checked.

pub mod buffer;
pub mod clock;
pub mod error;
mod event;
pub mod extent;
pub mod files;
pub mod handle;
pub mod open;
mod options;
mod progress;
pub mod reader;
mod scheduler;
pub mod threads;
#[cfg(target_os = "linux")]
pub mod uring;
pub mod worker;

pub use buffer::{Buffer, Buffers, Class, Loaded};
pub use clock::{Clock, SystemClock};
pub use error::{ReadError, ReadFault};
pub use event::{Event, MAX_PARTS, Priority, Ticket};
pub use extent::{BLOCK, Extent, ExtentTable, FileEntry, checksum, checksum_after};
pub use handle::{Disk, ThreadedDisk};
pub use options::{Choice, LARGEST_BLOCK, Options, SMALLEST_BLOCK};
pub use reader::{Read, ReadResult, Reader, Wake};
pub use worker::{DiskQueue, Stats, Worker};
