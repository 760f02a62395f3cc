//! An open checkpoint: its tensors by name, decoded on demand, in any container.

use super::containers::{self, Container};
use super::encodings;
use super::quantised;
use super::{Config, ModelSpec, chat, sampling, tokenizer};
use moec_base::error::{Error, Result};
use moec_ir::{Axis, Elementwise, Encoding, Format, Leaf};
use std::ops::Range;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

pub use super::containers::{File, Tensor};

/// Options for reading checkpoints.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImportOptions {
    /// Whether infinities and NaNs are accepted.
    pub allow_nonfinite: bool,
}

/// An open checkpoint. No tensor is decoded before it is requested.
#[derive(Debug)]
pub struct Checkpoint {
    container: Box<dyn Container>,
    options: ImportOptions,
    /// Its tokenizer, cached after the first request.
    tokenizer: OnceLock<Option<Vec<u8>>>,
    /// Bytes of the container that have been read since the last release.
    touched: AtomicUsize,
}

/// Bytes of the checkpoint that may stay in memory. They are the operating system's cache and can be
/// reclaimed, but they count as memory of this process.
const RESIDENT: usize = 64 << 20;

impl Checkpoint {
    /// Opens the checkpoint at a path. Reads headers only.
    ///
    /// # Errors
    /// Those of [`containers::open`].
    pub fn open(path: &Path, options: &ImportOptions) -> Result<Self> {
        Ok(Self::of(containers::open(path, |_| Ok(()))?, options))
    }

    /// Returns the checkpoint in an open container.
    pub fn of(container: Box<dyn Container>, options: &ImportOptions) -> Self {
        Self { container, options: options.clone(), tokenizer: OnceLock::new(), touched: AtomicUsize::new(0) }
    }

    /// Path.
    pub fn path(&self) -> &Path {
        self.container.path()
    }

    /// The model's configuration.
    pub fn config(&self) -> &Config {
        self.container.config()
    }

    /// First and last tokens and sampling options, which the container has besides the configuration.
    ///
    /// # Errors
    /// Fails if they exist and cannot be read.
    pub fn generation_config(&self) -> Result<Option<Config>> {
        self.container.generation_config()
    }

    /// Tokens that are added before texts.
    ///
    /// # Errors
    /// Fails if it exists and cannot be read.
    pub fn tokenizer_config(&self) -> Result<Option<Config>> {
        self.container.tokenizer_config()
    }

    /// Its chat templates, in the form that a bundle has them in, if there are any.
    ///
    /// # Errors
    /// Fails if they exist and cannot be read.
    pub fn chat_templates(&self) -> Result<Option<Vec<u8>>> {
        chat::templates(self.container.chat_template()?, self.container.tokenizer_config()?.as_ref())
    }

    /// Sampling options of its authors, in the form that a bundle has them in, if there are any.
    ///
    /// # Errors
    /// Fails if they exist and cannot be read.
    pub fn sampling(&self) -> Result<Option<Vec<u8>>> {
        Ok(sampling::sampling(self.container.generation_config()?.as_ref()))
    }

    /// The text of its tokenizer, if there is one for this model.
    ///
    /// # Errors
    /// Fails if it is invalid or of another model.
    pub fn tokenizer(&self, spec: &ModelSpec) -> Result<Option<&[u8]>> {
        let read = if let Some(read) = self.tokenizer.get() {
            read
        } else {
            let read = self.container.tokenizer()?;
            read.as_deref().map_or(Ok(()), |json| tokenizer::check(json, spec))?;
            self.tokenizer.get_or_init(|| read)
        };
        Ok(read.as_deref())
    }

    /// Sentences about features that a run of the model lacks, since the checkpoint lacks files for them.
    ///
    /// # Errors
    /// Fails if those files exist and cannot be read.
    pub fn limits(&self, spec: &ModelSpec) -> Result<Vec<String>> {
        if self.tokenizer(spec)?.is_none() {
            let text = "the checkpoint has no tokenizer (`tokenizer.json`): `run` takes token ids (`--ids`) and no text; \
                        `chat` and `serve` cannot be used";
            return Ok(vec![text.to_owned()]);
        }
        if self.chat_templates()?.is_none() {
            let text = "the checkpoint has no chat template: `run generate` and `/v1/completions` continue texts; \
                        `run chat` and `/v1/chat/completions` cannot be used";
            return Ok(vec![text.to_owned()]);
        }
        Ok(Vec::new())
    }

    /// SHA-256 over the names, types and shapes of the tensors and their positions in the files.
    pub fn fingerprint(&self) -> String {
        use std::fmt::Write as _;
        let mut text = String::new();
        for (name, t) in self.tensors() {
            let _ = writeln!(text, "{name} {} {} {:?} {:?}", t.file, t.dtype, t.shape, t.bytes);
        }
        moec_base::hashing::hex(&moec_base::hashing::sha256(text.as_bytes()))
    }

    /// The files that hold tensors.
    pub fn files(&self) -> &[File] {
        self.container.files()
    }

    /// A tensor.
    pub fn get(&self, tensor: &str) -> Option<&Tensor> {
        self.container.tensors().get(tensor)
    }

    /// Every tensor, in the order of files and of data.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.container.tensors().iter().map(|(name, tensor)| (name.as_str(), tensor))
    }

    /// The file that holds a tensor; for a missing tensor, the file that would name it.
    pub fn file_of(&self, tensor: &str) -> &str {
        let file = self.get(tensor).and_then(|t| self.files().get(t.file));
        file.map_or_else(|| self.container.index(), |file| &file.name)
    }

    /// The order that restores a tensor's rows or columns to those of Hugging Face, if they are stored in
    /// another.
    pub(super) fn order(&self, tensor: &str) -> Option<(Axis, Vec<u32>)> {
        self.container.order(tensor)
    }

    /// The function that was applied to a tensor's numbers before they were stored.
    pub(super) fn mapped(&self, tensor: &str) -> Option<Elementwise> {
        self.container.mapped(tensor)
    }

    /// The recorder of requested tensors, for a checkpoint without tensors.
    pub(super) fn requested(&self) -> Option<&containers::weightless::RequestedTensors> {
        self.container.requested()
    }

    /// A tensor's stored bytes, row-major.
    pub fn bytes(&self, tensor: &str) -> Option<&[u8]> {
        self.container.bytes(self.get(tensor)?)
    }

    /// The format of weights that holds the numbers of a leaf exactly as they are stored, if there is one.
    pub fn format(&self, leaf: &Leaf) -> Option<Format> {
        match &leaf.encoding {
            Encoding::Coded(coded) => quantised::of(&coded.layout)?.format(coded, &leaf.shape),
            Encoding::Plain => {
                let row = encodings::of(self.encodings(), &self.get(&leaf.tensor)?.dtype)?;
                row.native_format.map(|native| native.format)
            }
        }
    }

    /// Storage type of a leaf's numbers, for people.
    pub fn stored_as(&self, leaf: &Leaf) -> String {
        match &leaf.encoding {
            Encoding::Coded(coded) => quantised::describe(coded),
            Encoding::Plain => self.get(&leaf.tensor).map(|t| t.dtype.clone()).unwrap_or_default(),
        }
    }

    /// Encodings of the container's types.
    pub(super) fn encodings(&self) -> &'static [&'static encodings::Encoding] {
        self.container.encodings()
    }

    /// A tensor with its stored bytes.
    pub(super) fn data(&self, tensor: &str) -> Result<(&Tensor, &[u8])> {
        let t = self.tensor(tensor)?;
        Ok((t, self.container.bytes(t).ok_or_else(|| self.missing(tensor))?))
    }

    /// Returns a required tensor.
    pub(super) fn tensor(&self, tensor: &str) -> Result<&Tensor> {
        self.get(tensor).ok_or_else(|| self.missing(tensor))
    }

    fn missing(&self, tensor: &str) -> Error {
        Error::input(format!("`{}` has no tensor `{tensor}`", self.file_of(tensor)))
            .hint("the download may be incomplete, or `config.json` may be that of another model")
    }

    /// The error for a tensor of a type that no encoding decodes.
    pub(super) fn unsupported(&self, tensor: &str, t: &Tensor) -> Error {
        let file = self.file_of(tensor);
        let titles: Vec<&str> = self.encodings().iter().map(|row| row.title).collect();
        Error::limit(format!(
            "tensor `{tensor}` in `{file}` is stored as {}, which is not supported",
            t.dtype
        ))
        .hint(format!("a tensor may be {}", titles.join(", ")))
    }

    /// Counts bytes about to be read. Above [`RESIDENT`] all bytes are released, so that memory does not grow
    /// with the model.
    pub(super) fn touch(&self, bytes: usize) {
        if self.touched.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes) > RESIDENT {
            self.release();
        }
    }

    /// Whether infinities and NaNs are accepted.
    pub(super) fn allows_nonfinite(&self) -> bool {
        self.options.allow_nonfinite
    }

    /// Makes the operating system prefetch bytes of a tensor that will be read soon.
    pub(super) fn will_read_bytes(&self, t: &Tensor, bytes: Range<usize>) {
        self.container.will_read(t, bytes);
    }

    /// Releases the memory of the files; later reads load from the files again.
    pub fn release(&self) {
        self.touched.store(0, Ordering::Relaxed);
        self.container.release();
    }
}
