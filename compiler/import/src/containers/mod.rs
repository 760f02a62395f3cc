//! Containers: the formats in which checkpoints are published, one row and one folder each.

mod folder;
mod gguf;
mod safetensors;
pub(crate) mod weightless;

pub(crate) use safetensors::{is_config_alone, shapes};

use super::config::Config;
use super::encodings::{ENCODINGS, Encoding};
use indexmap::IndexMap;
use moec_base::error::{Error, Result};
use moec_ir::{Axis, Elementwise};
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// A container: its recognition and its reader.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    /// Name for people.
    pub name: &'static str,
    /// Description of the path to give, which follows "give" in a message.
    pub description: &'static str,
    /// Whether a path has this container, judged by file names alone. The first matching row of the table is
    /// used.
    pub is: fn(&Path) -> bool,
    /// Reads the configuration, without any weight.
    pub config: fn(&Path) -> Result<Config>,
    /// Opens the checkpoint with this configuration.
    pub open: fn(&Path, Config) -> Result<Box<dyn Container>>,
}

/// Every container that is read.
pub const CONTAINERS: [&Kind; 2] = [&safetensors::KIND, &gguf::KIND];

/// Returns the row for a path.
pub fn find(path: &Path) -> Option<&'static Kind> {
    CONTAINERS.into_iter().find(|kind| (kind.is)(path))
}

/// Opens the checkpoint at a path. `fits` checks its configuration before the weights are read.
///
/// # Errors
/// Fails if no container of [`CONTAINERS`] is there, or if it is damaged; errors of `fits` are returned.
pub fn open(path: &Path, fits: impl FnOnce(&Config) -> Result<()>) -> Result<Box<dyn Container>> {
    let kind = find(path).ok_or_else(|| {
        Error::input(format!("`{}` is not a checkpoint", path.display()))
            .hint(format!("give {}", CONTAINERS.map(|kind| kind.description).join(", or ")))
    })?;
    let config = (kind.config)(path)?;
    fits(&config)?;
    (kind.open)(path, config)
}

/// An open checkpoint in its container. Implementations have checked the files: no read goes beyond them, and
/// no tensor ends after the end of its file.
pub trait Container: fmt::Debug + Send + Sync {
    /// Path.
    fn path(&self) -> &Path;

    /// The files that hold tensors; [`Tensor::file`] is an index into them.
    fn files(&self) -> &[File];

    /// Every tensor by its Hugging Face name, in the order of files and of data.
    fn tensors(&self) -> &IndexMap<String, Tensor>;

    /// The order that restores its rows or columns to those of Hugging Face, if they are stored in another.
    /// Index `i` is the stored index `order[i]`, and the order is a permutation.
    fn order(&self, _tensor: &str) -> Option<(Axis, Vec<u32>)> {
        None
    }

    /// The function that was applied to its numbers before they were stored. Families apply that function to
    /// the numbers of Hugging Face.
    fn mapped(&self, _tensor: &str) -> Option<Elementwise> {
        None
    }

    /// A tensor's stored bytes, row-major.
    fn bytes(&self, tensor: &Tensor) -> Option<&[u8]>;

    /// The model's configuration, in the keys of `config.json`.
    fn config(&self) -> &Config;

    /// First and last tokens and sampling options, in the keys of `generation_config.json`.
    ///
    /// # Errors
    /// Fails if it exists and cannot be read.
    fn generation_config(&self) -> Result<Option<Config>> {
        Ok(None)
    }

    /// Tokens that are added before texts, in the keys of `tokenizer_config.json`.
    ///
    /// # Errors
    /// Fails if it exists and cannot be read.
    fn tokenizer_config(&self) -> Result<Option<Config>> {
        Ok(None)
    }

    /// A chat template in a file of its own, which has priority over the one in the tokenizer's
    /// configuration.
    ///
    /// # Errors
    /// Fails if it exists and cannot be read.
    fn chat_template(&self) -> Result<Option<String>> {
        Ok(None)
    }

    /// The tokenizer, in the form of `tokenizer.json`.
    ///
    /// # Errors
    /// Fails if it exists and cannot be read.
    fn tokenizer(&self) -> Result<Option<Vec<u8>>> {
        Ok(None)
    }

    /// Encodings of the container's types.
    fn encodings(&self) -> &'static [&'static Encoding] {
        &ENCODINGS
    }

    /// The file that lists the tensors, for messages; by default the only file.
    fn index(&self) -> &str {
        self.files().first().map_or("", |file| &file.name)
    }

    /// Recorder of requested tensors, for a checkpoint without tensors.
    fn requested(&self) -> Option<&weightless::RequestedTensors> {
        None
    }

    /// Announces that bytes of a tensor, counted from its first, will be read soon.
    fn will_read(&self, _tensor: &Tensor, _bytes: Range<usize>) {}

    /// Releases the memory of data that was read; later reads load it from the files again.
    fn release(&self) {}
}

/// A file that holds tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    /// Name in messages.
    pub name: String,
    /// Path.
    pub path: PathBuf,
}

/// A tensor as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Index of its file.
    pub file: usize,
    /// Stored type, by the container's name: `BF16`.
    pub dtype: String,
    /// Stored shape.
    pub shape: Vec<usize>,
    /// Byte range in the file.
    pub bytes: Range<usize>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn container_kind_is_detected_from_file_names() {
        for (name, kind) in [
            ("config.json", Some("safetensors")),
            ("model.safetensors", Some("safetensors")),
            ("model.safetensors.index.json", Some("safetensors")),
            ("manifest.json", None),
            ("model.gguf", None),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let file = folder.path().join(name);
            fs::write(&file, "{}").unwrap();
            assert_eq!(find(folder.path()).map(|kind| kind.name), kind, "{name}");
            let itself = file.extension().is_some_and(|e| e == "gguf").then_some("GGUF");
            assert_eq!(find(&file).map(|kind| kind.name), itself);
        }
        let error = open(Path::new("nowhere"), |_| Ok(())).unwrap_err();
        let hint = error.hint.unwrap();
        assert!(CONTAINERS.iter().all(|kind| hint.contains(kind.description)), "{hint}");
    }
}
