//! A fake of QNN's library, compiled by the operating system's C compiler.

use std::cell::Cell;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// C source of the fake.
const SOURCE: &str = include_str!("qnn.c");

/// A folder with both fake libraries, and the log of their calls.
#[derive(Debug)]
pub(crate) struct Fake {
    pub(crate) folder: PathBuf,
    pub(crate) log: PathBuf,
    /// Number of lines of the log that were read.
    seen: Cell<usize>,
}

impl Fake {
    /// Compiles the fake into `folder` with this C compiler and these definitions.
    pub(crate) fn new(folder: &Path, compiler: &str, defines: &[&str]) -> Self {
        fs::create_dir_all(folder).unwrap();
        let (source, log) = (folder.join("qnn.c"), folder.join("calls"));
        fs::write(&source, SOURCE).unwrap();
        for (part, file) in [("-DHTP", "libQnnHtp.so"), ("-DSYSTEM", "libQnnSystem.so")] {
            let mut cc = Command::new(compiler);
            cc.args([
                "-std=gnu11",
                "-Wall",
                "-Wextra",
                "-Werror",
                "-Wno-unused-function",
                "-shared",
                "-fPIC",
            ]);
            cc.args([part, &format!("-DLOG=\"{}\"", log.display())]).args(defines);
            cc.arg(&source).arg("-o").arg(folder.join(file));
            assert!(cc.status().unwrap().success(), "{cc:?}");
        }
        Self { folder: folder.to_owned(), log, seen: Cell::new(0) }
    }

    /// Calls since the last query.
    pub(crate) fn calls(&self) -> Vec<String> {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let whole = text.rsplit_once('\n').map_or("", |(lines, _)| lines);
        let new: Vec<String> = whole.lines().skip(self.seen.get()).map(str::to_owned).collect();
        self.seen.set(self.seen.get() + new.len());
        new
    }
}
