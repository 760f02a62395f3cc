//! Containers: the forms in which checkpoints are published, one row and one folder each.

mod folder;
mod gguf;
pub(crate) mod requested;
mod safetensors;

use super::config::Config;
use super::encodings::{ENCODINGS, Encoding};
use indexmap::IndexMap;
use moec_base::error::{Error, Result};
use moec_ir::{Axis, Elementwise};
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Recognition and opening of a container.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    /// Name for people.
    pub name: &'static str,
    /// Description of what is recognised, as a message goes on after "give".
    pub looks: &'static str,
    /// Whether this is one, from names alone; the first row of the table that says so takes it.
    pub is: fn(&Path) -> bool,
    /// Reads its configuration; no weight is looked at.
    pub config: fn(&Path) -> Result<Config>,
    /// Opens what has this configuration.
    pub open: fn(&Path, Config) -> Result<Box<dyn Container>>,
}

/// Every container that is read.
pub const CONTAINERS: [&Kind; 2] = [&safetensors::KIND, &gguf::KIND];

/// The row of what lies at a path.
pub fn find(path: &Path) -> Option<&'static Kind> {
    CONTAINERS.into_iter().find(|kind| (kind.is)(path))
}

/// Opens what lies at a path, if `fits` takes its configuration, which is checked before the weights are.
///
/// # Errors
/// None of [`CONTAINERS`] is there, or it is damaged; those of `fits`.
pub fn open(path: &Path, fits: impl FnOnce(&Config) -> Result<()>) -> Result<Box<dyn Container>> {
    let kind = find(path).ok_or_else(|| {
        Error::input(format!("`{}` is not a checkpoint", path.display()))
            .hint(format!("give {}", CONTAINERS.map(|kind| kind.looks).join(", or ")))
    })?;
    let config = (kind.config)(path)?;
    fits(&config)?;
    (kind.open)(path, config)
}

/// An open checkpoint, as its container has it. An implementation has checked what the files say: nothing is read
/// outside of them, and no tensor ends after its file.
pub trait Container: fmt::Debug + Send + Sync {
    /// Path.
    fn path(&self) -> &Path;

    /// The files that hold tensors; [`Tensor::file`] counts them.
    fn files(&self) -> &[File];

    /// Every tensor by its name in the spelling of Hugging Face, by file and then in the order of its data.
    fn tensors(&self) -> &IndexMap<String, Tensor>;

    /// The order in which its rows or columns are those of Hugging Face, where they are stored in another: index `i` is the stored
    /// index `order[i]`, and each is there once.
    fn order(&self, _tensor: &str) -> Option<(Axis, Vec<u32>)> {
        None
    }

    /// The function that its numbers went through before they were stored: they are what a family makes of those of Hugging Face.
    fn mapped(&self, _tensor: &str) -> Option<Elementwise> {
        None
    }

    /// A tensor's stored bytes, row-major.
    fn bytes(&self, tensor: &Tensor) -> Option<&[u8]>;

    /// The model's configuration, in the keys of `config.json`.
    fn config(&self) -> &Config;

    /// First and last tokens and options of sampling, in the keys of `generation_config.json`.
    ///
    /// # Errors
    /// It is there and cannot be read.
    fn generation_config(&self) -> Result<Option<Config>> {
        Ok(None)
    }

    /// Beginning of texts, in the keys of `tokenizer_config.json`.
    ///
    /// # Errors
    /// It is there and cannot be read.
    fn tokenizer_config(&self) -> Result<Option<Config>> {
        Ok(None)
    }

    /// A chat template that stands beside the configuration of the tokenizer, and goes before the one inside of it.
    ///
    /// # Errors
    /// It is there and cannot be read.
    fn chat_template(&self) -> Result<Option<String>> {
        Ok(None)
    }

    /// The tokenizer, in the form of `tokenizer.json`.
    ///
    /// # Errors
    /// It is there and cannot be read.
    fn tokenizer(&self) -> Result<Option<Vec<u8>>> {
        Ok(None)
    }

    /// Encodings of its types.
    fn encodings(&self) -> &'static [&'static Encoding] {
        &ENCODINGS
    }

    /// The file that says which tensors there are, for messages: the only one, if nothing else is said.
    fn index(&self) -> &str {
        self.files().first().map_or("", |file| &file.name)
    }

    /// Recorder of the requested tensors, where there are none.
    fn requested(&self) -> Option<&requested::Requested> {
        None
    }

    /// Hears that bytes of a tensor, counted from its first, will be read soon.
    fn will_read(&self, _tensor: &Tensor, _bytes: Range<usize>) {}

    /// Lets go of what was read and is in memory: if it is wanted again it comes from the files.
    fn release(&self) {}
}

/// A file that holds tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    /// Name, as messages have it.
    pub name: String,
    /// Path.
    pub path: PathBuf,
}

/// A tensor as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Index of its file.
    pub file: usize,
    /// Stored type, as the container names it: `BF16`.
    pub dtype: String,
    /// Stored shape.
    pub shape: Vec<usize>,
    /// Its bytes in the file.
    pub bytes: Range<usize>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_folder_is_known_by_what_it_holds() {
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
        let said = open(Path::new("nowhere"), |_| Ok(())).unwrap_err();
        let hint = said.hint.unwrap();
        assert!(CONTAINERS.iter().all(|kind| hint.contains(kind.looks)), "{hint}");
    }
}
