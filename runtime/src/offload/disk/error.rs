//! Errors of reads.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// An extent could not be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadError {
    /// File.
    pub path: PathBuf,
    /// Index of the extent in its table.
    pub extent: u32,
    /// Layer and expert of the matrix, if known.
    pub expert: Option<(u32, u32)>,
    /// Offset of the extent in the file.
    pub offset: u64,
    /// Size of the extent.
    pub bytes: u64,
    /// The fault.
    pub fault: ReadFault,
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { extent, offset, bytes, fault, .. } = self;
        f.write_str("cannot read ")?;
        if let Some((layer, expert)) = self.expert {
            write!(f, "expert {expert} of layer {layer}, ")?;
        }
        write!(f, "extent {extent} of `{}` ({bytes} bytes at {offset}): {fault}", self.path.display())
    }
}

impl std::error::Error for ReadError {}

/// Reason that an extent could not be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReadFault {
    /// The operating system reported an error at every attempt.
    System {
        /// Error number.
        errno: i32,
        /// Times that the block was read.
        attempts: u32,
    },
    /// The file has become shorter than it was.
    Truncated {
        /// Bytes that it has now.
        found: u64,
    },
    /// The operating system returned no bytes before the end of the file.
    Nothing {
        /// Times that the block was read.
        attempts: u32,
    },
    /// The read did not end in time.
    Stalled {
        /// Time limit.
        limit: Duration,
    },
    /// The checksum does not match.
    Checksum {
        /// CRC-32C in the extent table.
        expected: u32,
        /// CRC-32C of the bytes that were read last.
        found: u32,
        /// Times that the extent was read.
        attempts: u32,
    },
    /// The reader itself failed.
    Reader {
        /// Error number.
        errno: i32,
    },
}

impl fmt::Display for ReadFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let error = |errno: &i32| io::Error::from_raw_os_error(*errno);
        match self {
            Self::System { errno, attempts } => write!(f, "{} ({attempts} attempts)", error(errno)),
            Self::Truncated { found } => write!(f, "the file was shortened to {found} bytes"),
            Self::Nothing { attempts } => {
                write!(f, "the operating system returned no bytes ({attempts} attempts)")
            }
            Self::Stalled { limit } => write!(f, "no answer within {limit:?}"),
            Self::Checksum { expected, found, attempts } => {
                write!(f, "its CRC-32C is {found:08x}, not {expected:08x} ({attempts} attempts)")
            }
            Self::Reader { errno } => write!(f, "the reader stopped: {}", error(errno)),
        }
    }
}

impl ReadFault {
    /// Remedy.
    pub fn hint(&self) -> &'static str {
        if self.is_of_the_file() {
            "the file was changed or damaged after the build; copy the bundle again, or rebuild it with `moec build`"
        } else {
            "the disk does not answer as it should; see the operating system's log, or copy the bundle to another one"
        }
    }

    /// Whether the fault is the file's, not the machine's.
    pub fn is_of_the_file(&self) -> bool {
        matches!(self, Self::Truncated { .. } | Self::Checksum { .. })
    }
}
