//! A checkpoint that can be calibrated, and its calibration text.

use super::wide::Wide;
use crate::support::{Setup, add_words, cache, checkpoint, copy_checkpoint, moec, ok};
use serde_json::Value;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

pub(crate) const CHUNK: usize = 16;
pub(crate) const WINDOW: usize = 24;
pub(crate) const VOCAB: usize = 320;

/// A tiny checkpoint with a tokenizer that has the words `w0` … `w319`.
pub(crate) struct Case {
    pub(crate) folder: TempDir,
    pub(crate) toml: PathBuf,
}

impl Case {
    pub(crate) fn new(family: &str) -> Self {
        Self::with(family, None)
    }

    pub(crate) fn with(family: &str, wide: Option<Wide>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("hf");
        fs::create_dir(&source).unwrap();
        match wide {
            Some(wide) => wide.write(&checkpoint(family), &source),
            None => copy_checkpoint(&checkpoint(family), &source),
        }
        add_words(&source);
        let toml =
            Setup { format: "bf16", chunk: CHUNK, batch: &[1], context: 64 }.write(&source, folder.path());
        Self { folder, toml }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes words as a text.
    pub(crate) fn text(&self, name: &str, ids: &[u32]) -> PathBuf {
        let text = ids.iter().fold(String::new(), |mut s, id| {
            let _ = write!(s, "w{id} ");
            s
        });
        let path = self.path(name);
        fs::write(&path, text).unwrap();
        path
    }

    pub(crate) fn append(&self, text: &str) {
        let old = fs::read_to_string(&self.toml).unwrap();
        fs::write(&self.toml, format!("{old}{text}")).unwrap();
    }

    /// Calibration with one thread, since on a busy machine waiting threads cost more than they gain.
    pub(crate) fn calibrate(&self) -> Command {
        let mut command = moec();
        command.env("MOEC_THREADS", "1");
        command.env("MOEC_CACHE", cache(self.folder.path())).arg("calibrate").arg(&self.toml).arg("--quiet");
        command
    }

    /// Checks that the folder has only these files, and that the cache has no model. Profiles, records of
    /// packed weights and kernel objects may remain.
    pub(crate) fn nothing_left(&self, besides: &[&str]) {
        let names = |folder: &Path| -> Vec<String> {
            let entries = fs::read_dir(folder).into_iter().flatten();
            entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
        };
        let mut left = names(self.folder.path());
        left.retain(|n| {
            !["hf", "model.toml", "cache"].contains(&n.as_str()) && !besides.contains(&n.as_str())
        });
        assert!(left.is_empty(), "left behind: {left:?}");
        let mut cache = names(&self.path("cache"));
        cache.retain(|n| !["profiles", "packed", "objects"].contains(&n.as_str()));
        assert!(cache.is_empty(), "left in the cache: {cache:?}");
    }
}

/// Token ids spread over the vocabulary.
pub(crate) fn ids(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| (i + 1).wrapping_mul(2_654_435_761) % VOCAB as u32).collect()
}

pub(crate) fn json(command: &mut Command) -> Value {
    serde_json::from_slice(&ok(command.arg("--json")).stdout).unwrap()
}
