//! Reading of untrusted files: only regular files, and at most as many bytes as their kind can have.
//!
//! With a FIFO, a device or a socket in place of a file a reader could wait forever, or read without end. The
//! type is checked before a path is opened, and again on the open file, without waiting for a writer. The
//! number of bytes read is bounded independently of the reported size: files of `/proc` report none, and a
//! file may grow.

use std::fmt;
use std::fs::{self, File, FileType, Metadata};
use std::io::{self, Read as _, Seek as _};
use std::path::Path;

/// A kind of file, and its largest size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Kind of such a file, as in "too long for a plan".
    pub what: &'static str,
    /// Most bytes.
    pub bytes: u64,
}

/// A kind of file with its most MiB.
const fn limit(what: &'static str, mib: u64) -> Limit {
    Limit { what, bytes: mib << 20 }
}

/// `config.json` and similar files: lists of layers and tokens, some KiB in all published ones.
pub const CONFIG: Limit = limit("a model's configuration", 16);
/// `model.safetensors.index.json`: an index of 100 000 tensors takes a tenth of this.
pub const INDEX: Limit = limit("an index of weights", 100);
/// `tokenizer.json`: those of the largest vocabularies (262 144 tokens) have 33 MB.
pub const TOKENIZER: Limit = limit("a tokenizer", 256);
/// `model.toml`, and device files: written by hand.
pub const SETTINGS: Limit = limit("a file of settings", 4);
/// Texts and questions: calibration reads some ten thousand tokens; a larger text is probably a mistake.
pub const TEXT: Limit = limit("a text", 256);
/// Profiles: the largest published model needs half of this.
pub const PROFILE: Limit = limit("a profile", 2048);
/// `manifest.json`: some hundred bytes for each file of the bundle.
pub const MANIFEST: Limit = limit("a manifest", 64);
/// `plan.bin`, `graph.moe`, `decisions.json`: some MB, growing with layers and experts.
pub const PLAN: Limit = limit("a plan", 512);
/// Command streams of a layer: some hundred instructions for each expert.
pub const STREAMS: Limit = limit("command streams", 64);
/// GPU kernels: some tens of KB each.
pub const PTX: Limit = limit("GPU kernels", 256);
/// Networks of static graphs. Their weights are in other files; scales of output channels take most of the
/// size.
pub const NETWORK: Limit = limit("a network", 64);
/// `kernels.o`: a kernel for each matrix format and shape, some hundred KB in all.
pub const OBJECT: Limit = limit("object code", 512);

/// Reason that a path is not read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refused {
    /// It is not a regular file.
    Kind(&'static str),
    /// It has more bytes than such a file can have. `found` is its reported size; `None` if it had more bytes
    /// than reported.
    Long {
        /// Limit of the expected file.
        limit: Limit,
        /// Its size.
        found: Option<u64>,
    },
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kind(what) => write!(f, "it is {what}, not a regular file"),
            Self::Long { limit, found: Some(found) } => {
                write!(
                    f,
                    "its {found} bytes are too many for {}, which has {} at most",
                    limit.what, limit.bytes
                )
            }
            Self::Long { limit, found: None } => {
                write!(f, "it goes on after the {} bytes that {} has at most", limit.bytes, limit.what)
            }
        }
    }
}

impl std::error::Error for Refused {}

impl Refused {
    /// Remedy.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Kind(FOLDER) => "give the file itself, not a folder",
            Self::Kind(_) => "give a regular file: a pipe or a device may never end",
            Self::Long { .. } => "check that it is the file that was meant",
        }
    }
}

impl From<Refused> for io::Error {
    fn from(why: Refused) -> Self {
        let kind = match why {
            Refused::Kind(FOLDER) => io::ErrorKind::IsADirectory,
            Refused::Kind(_) => io::ErrorKind::InvalidInput,
            Refused::Long { .. } => io::ErrorKind::FileTooLarge,
        };
        Self::new(kind, why)
    }
}

/// Reason that a path was refused, if this error has one.
pub fn refused(e: &io::Error) -> Option<&Refused> {
    e.get_ref()?.downcast_ref()
}

const FOLDER: &str = "a folder";

/// Opens a regular file for reading. Never blocks.
///
/// # Errors
/// [`Refused::Kind`] for other file types; errors of the operating system.
pub fn open(path: &Path) -> io::Result<File> {
    open_with(path, 0)
}

/// As [`open`], with more flags of the operating system's `open`.
///
/// # Errors
/// As [`open`].
pub fn open_with(path: &Path, flags: i32) -> io::Result<File> {
    // Even opening a device may have an effect.
    check(&fs::metadata(path)?)?;
    let mut options = File::options();
    options.read(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt as _;
        // If the path has become a FIFO meanwhile, opening does not wait. For regular files the flag has no
        // effect.
        options.custom_flags(flags | libc::O_NONBLOCK | libc::O_CLOEXEC);
    }
    #[cfg(not(unix))]
    let _ = flags;
    let file = options.open(path)?;
    check(&file.metadata()?)?;
    #[cfg(unix)]
    wait_again(&file)?;
    Ok(file)
}

/// Identity of an open file, independent of its path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId {
    device: u64,
    inode: u64,
}

/// Identity of an open file; `None` if the operating system does not report it.
///
/// # Errors
/// Errors of the operating system.
#[cfg(unix)]
pub fn identity(file: &File) -> io::Result<Option<FileId>> {
    use std::os::unix::fs::MetadataExt as _;
    let meta = file.metadata()?;
    Ok(Some(FileId { device: meta.dev(), inode: meta.ino() }))
}

/// Not reported on this operating system.
///
/// # Errors
/// None.
#[cfg(not(unix))]
#[allow(clippy::unnecessary_wraps, reason = "as on Unix")]
pub fn identity(_file: &File) -> io::Result<Option<FileId>> {
    Ok(None)
}

/// Clears `O_NONBLOCK`: with it io_uring fails reads whose data is not in the page cache.
#[cfg(unix)]
fn wait_again(file: &File) -> io::Result<()> {
    use std::os::fd::AsRawFd as _;
    let fd = file.as_raw_fd();
    // SAFETY: calls on an open descriptor; no memory is passed.
    let done = unsafe {
        let flags = libc::fcntl(fd, libc::F_GETFL);
        flags >= 0 && libc::fcntl(fd, libc::F_SETFL, flags & !libc::O_NONBLOCK) == 0
    };
    if done { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Size of a regular file.
///
/// # Errors
/// As [`open`].
pub fn size(path: &Path) -> io::Result<u64> {
    let meta = fs::metadata(path)?;
    check(&meta)?;
    Ok(meta.len())
}

/// Reads a regular file whole.
///
/// # Errors
/// As [`open`]; [`Refused::Long`]; [`io::ErrorKind::Interrupted`] if a signal comes during a read.
pub fn read(path: &Path, limit: Limit) -> io::Result<Vec<u8>> {
    read_open(&open(path)?, limit)
}

/// As [`read`], for a file that [`open`] returned, from its beginning.
///
/// # Errors
/// As [`read`].
pub fn read_open(mut file: &File, limit: Limit) -> io::Result<Vec<u8>> {
    file.rewind()?;
    let found = file.metadata()?.len();
    if found > limit.bytes {
        return Err(Refused::Long { limit, found: Some(found) }.into());
    }
    let mut bytes = Vec::with_capacity(usize::try_from(found + 1).unwrap_or(0));
    let mut piece = vec![0; 64 << 10];
    loop {
        // Not `read_to_end`: it continues after a signal.
        let n = file.read(&mut piece)?;
        if n == 0 {
            return Ok(bytes);
        }
        bytes.extend_from_slice(&piece[..n]);
        if bytes.len() as u64 > limit.bytes {
            return Err(Refused::Long { limit, found: None }.into());
        }
    }
}

/// As [`read`]; every link is refused.
///
/// # Errors
/// As [`read`].
pub fn read_unlinked(path: &Path, limit: Limit) -> io::Result<Vec<u8>> {
    check(&fs::symlink_metadata(path)?)?;
    read(path, limit)
}

/// As [`read`], for text in UTF-8.
///
/// # Errors
/// As [`read`]; [`io::ErrorKind::InvalidData`] if the text is not UTF-8.
pub fn read_text(path: &Path, limit: Limit) -> io::Result<String> {
    String::from_utf8(read(path, limit)?).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        io::Error::new(io::ErrorKind::InvalidData, format!("it is not text in UTF-8 (byte {at} cannot be)"))
    })
}

fn check(meta: &Metadata) -> io::Result<()> {
    if meta.is_file() { Ok(()) } else { Err(Refused::Kind(kind(meta.file_type())).into()) }
}

/// Name of the file type in place of a regular file.
fn kind(found: FileType) -> &'static str {
    if found.is_dir() {
        return FOLDER;
    }
    if found.is_symlink() {
        return "a link";
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt as _;
        let kinds = [
            (found.is_fifo(), "a FIFO (a named pipe)"),
            (found.is_char_device(), "a character device"),
            (found.is_block_device(), "a block device"),
            (found.is_socket(), "a socket"),
        ];
        if let Some((_, what)) = kinds.into_iter().find(|(is, _)| *is) {
            return what;
        }
    }
    "something else"
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStrExt as _;

    fn why(result: io::Result<Vec<u8>>) -> String {
        let e = result.expect_err("it is refused");
        assert!(refused(&e).is_some_and(|r| !r.hint().is_empty()), "{e}");
        e.to_string()
    }

    #[test]
    fn only_regular_files_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("file"), "abc").unwrap();
        assert_eq!(read(&at("file"), SETTINGS).unwrap(), b"abc");
        let path = std::ffi::CString::new(at("fifo").as_os_str().as_bytes()).unwrap();
        // SAFETY: a path that ends in a zero byte.
        assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
        let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
        for (path, what) in [
            (at("fifo"), "a FIFO"),
            (at("socket"), "a socket"),
            (dir.path().to_owned(), "a folder"),
            ("/dev/zero".into(), "a character device"),
        ] {
            std::os::unix::fs::symlink(&path, at("link")).unwrap();
            for path in [path, at("link")] {
                let message = why(read(&path, SETTINGS));
                assert!(message.contains(what) && message.contains("not a regular file"), "{message}");
                assert!(open(&path).is_err() && size(&path).is_err());
            }
            fs::remove_file(at("link")).unwrap();
        }
        assert_eq!(read(&at("none"), SETTINGS).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn files_over_the_size_limit_are_rejected() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("long");
        // Sparse: it takes no room on the disk, and would take all memory.
        File::create(&path).unwrap().set_len(1 << 40).unwrap();
        assert!(why(read(&path, TEXT)).contains("1099511627776 bytes are too many for a text"));
        let few = Limit { what: "a few bytes", bytes: 4 };
        fs::write(&path, "1234").unwrap();
        assert_eq!(read(&path, few).unwrap(), b"1234");
        fs::write(&path, "12345").unwrap();
        assert!(why(read(&path, few)).contains("too many for a few bytes"));
        // A file that reports no size is read up to the limit.
        #[cfg(target_os = "linux")]
        {
            assert_eq!(fs::metadata("/proc/self/maps").unwrap().len(), 0);
            assert!(why(read(Path::new("/proc/self/maps"), few)).contains("goes on after the 4 bytes"));
        }
        fs::write(&path, [b'a', 0xff]).unwrap();
        assert!(read_text(&path, TEXT).unwrap_err().to_string().contains("byte 1"));
    }
}
