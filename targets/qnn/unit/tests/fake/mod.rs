//! The library that replaces QNN's in tests, compiled by the operating system's C compiler.

use std::cell::Cell;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Its source.
const SOURCE: &str = include_str!("qnn.c");

/// A folder with both libraries, and where they write down their calls.
#[derive(Debug)]
pub(crate) struct Fake {
    pub(crate) folder: PathBuf,
    pub(crate) log: PathBuf,
    /// Lines of it that were seen.
    seen: Cell<usize>,
}

impl Fake {
    /// Compiled into `folder` by this C compiler, with these definitions.
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

    /// Calls since the last time.
    pub(crate) fn calls(&self) -> Vec<String> {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let whole = text.rsplit_once('\n').map_or("", |(lines, _)| lines);
        let new: Vec<String> = whole.lines().skip(self.seen.get()).map(str::to_owned).collect();
        self.seen.set(self.seen.get() + new.len());
        new
    }
}
