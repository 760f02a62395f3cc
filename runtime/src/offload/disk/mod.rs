//! Weights that stay on disk: extents of the weight files, read into memory taken beforehand.
//!
//! * [`extent`]: which bytes of which file are read and checked together.
//! * [`buffer`]: the memory that they are read into.
//! * [`reader`]: one attempt to read one block; [`uring`] and [`threads`] are the two ways to do it, and [`open`] takes one.
//! * `scheduler`: extents cut into blocks, the urgent ones first; what failed is read again or ends in an
//!   error that names file and extent.
//! * [`worker`]: that by turns; [`handle`]: [`ThreadedDisk`], which takes them on a thread of its own, and [`Disk`], what others see of it.
//!
//! Invariant: bytes are handed out only after all of them were read and their checksum, where they have one, agreed. Where checksums are turned off,
//! that holds for extents of which a read has failed on the way.

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
