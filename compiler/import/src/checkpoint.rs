//! An open checkpoint: its tensors by name, decoded on demand, whatever container they are in.

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

/// Options of reading checkpoints.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImportOptions {
    /// Accept numbers that are infinite or not a number.
    pub allow_nonfinite: bool,
}

/// An open checkpoint. Nothing is decoded before it is requested.
#[derive(Debug)]
pub struct Checkpoint {
    container: Box<dyn Container>,
    options: ImportOptions,
    /// Its tokenizer, from when it was first requested.
    tokenizer: OnceLock<Option<Vec<u8>>>,
    /// Bytes of the container that were looked at since they were last let go.
    touched: AtomicUsize,
}

/// Bytes of the checkpoint that reading may keep in memory. They are the operating system's cache and come back when
/// they are wanted, but they count as this process's own.
const RESIDENT: usize = 64 << 20;

impl Checkpoint {
    /// Opens the checkpoint at a path. Reads headers only.
    ///
    /// # Errors
    /// As [`containers::open`].
    pub fn open(path: &Path, options: &ImportOptions) -> Result<Self> {
        Ok(Self::of(containers::open(path, |_| Ok(()))?, options))
    }

    /// The checkpoint in an open container.
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

    /// First and last tokens and options of sampling, as the container has them beside the configuration.
    ///
    /// # Errors
    /// They are there and cannot be read.
    pub fn generation_config(&self) -> Result<Option<Config>> {
        self.container.generation_config()
    }

    /// Beginning of texts.
    ///
    /// # Errors
    /// It is there and cannot be read.
    pub fn tokenizer_config(&self) -> Result<Option<Config>> {
        self.container.tokenizer_config()
    }

    /// Its chat templates, in the form that a bundle keeps them in, if it has any.
    ///
    /// # Errors
    /// They are there and cannot be read.
    pub fn chat_templates(&self) -> Result<Option<Vec<u8>>> {
        chat::templates(self.container.chat_template()?, self.container.tokenizer_config()?.as_ref())
    }

    /// Sampling parameters by its makers, in the form that a bundle keeps them in, if there are any.
    ///
    /// # Errors
    /// It is there and cannot be read.
    pub fn sampling(&self) -> Result<Option<Vec<u8>>> {
        Ok(sampling::sampling(self.container.generation_config()?.as_ref()))
    }

    /// The text of its tokenizer, if it has one that fits the model.
    ///
    /// # Errors
    /// One that is no tokenizer, or that of another model.
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

    /// What a run of the model cannot do, since the checkpoint lacks files for it; a sentence each.
    ///
    /// # Errors
    /// Those files are there and cannot be read.
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

    /// SHA-256 over the names, types and shapes of the tensors and their places in the files.
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

    /// Every tensor, by file and then in the order of its data.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.container.tensors().iter().map(|(name, tensor)| (name.as_str(), tensor))
    }

    /// The file that holds a tensor; the one that would name it for one that is not there.
    pub fn file_of(&self, tensor: &str) -> &str {
        let file = self.get(tensor).and_then(|t| self.files().get(t.file));
        file.map_or_else(|| self.container.index(), |file| &file.name)
    }

    /// The order in which a tensor's rows or columns are those of Hugging Face, where they are stored in another.
    pub(super) fn order(&self, tensor: &str) -> Option<(Axis, Vec<u32>)> {
        self.container.order(tensor)
    }

    /// The function that a tensor's numbers went through before they were stored.
    pub(super) fn mapped(&self, tensor: &str) -> Option<Elementwise> {
        self.container.mapped(tensor)
    }

    /// Where there are no tensors, what records which ones are requested.
    pub(super) fn requested(&self) -> Option<&containers::requested::Requested> {
        self.container.requested()
    }

    /// A tensor's stored bytes, row-major.
    pub fn bytes(&self, tensor: &str) -> Option<&[u8]> {
        self.container.bytes(self.get(tensor)?)
    }

    /// The format of weights that holds the numbers of a leaf as they are stored, if there is one.
    pub fn format(&self, leaf: &Leaf) -> Option<Format> {
        match &leaf.encoding {
            Encoding::Coded(coded) => quantised::of(&coded.layout)?.format(coded, &leaf.shape),
            Encoding::Plain => {
                let row = encodings::of(self.encodings(), &self.get(&leaf.tensor)?.dtype)?;
                row.same.map(|same| same.format)
            }
        }
    }

    /// Storage of a leaf's numbers, for people.
    pub fn stored_as(&self, leaf: &Leaf) -> String {
        match &leaf.encoding {
            Encoding::Coded(coded) => quantised::describe(coded),
            Encoding::Plain => self.get(&leaf.tensor).map(|t| t.dtype.clone()).unwrap_or_default(),
        }
    }

    /// Encodings of its types.
    pub(super) fn encodings(&self) -> &'static [&'static encodings::Encoding] {
        self.container.encodings()
    }

    /// A tensor with its stored bytes.
    pub(super) fn data(&self, tensor: &str) -> Result<(&Tensor, &[u8])> {
        let t = self.tensor(tensor)?;
        Ok((t, self.container.bytes(t).ok_or_else(|| self.missing(tensor))?))
    }

    /// A tensor that must be there.
    pub(super) fn tensor(&self, tensor: &str) -> Result<&Tensor> {
        self.get(tensor).ok_or_else(|| self.missing(tensor))
    }

    fn missing(&self, tensor: &str) -> Error {
        Error::input(format!("`{}` has no tensor `{tensor}`", self.file_of(tensor)))
            .hint("the download may be incomplete, or `config.json` may be that of another model")
    }

    /// The error for a tensor of a type that no row of the table decodes.
    pub(super) fn unsupported(&self, tensor: &str, t: &Tensor) -> Error {
        let file = self.file_of(tensor);
        let titles: Vec<&str> = self.encodings().iter().map(|row| row.title).collect();
        Error::limit(format!(
            "tensor `{tensor}` in `{file}` is stored as {}, which is not supported",
            t.dtype
        ))
        .hint(format!("a tensor may be {}", titles.join(", ")))
    }

    /// Counts bytes about to be read; past [`RESIDENT`] all are let go, so that memory does not grow with the model.
    pub(super) fn touch(&self, bytes: usize) {
        if self.touched.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes) > RESIDENT {
            self.release();
        }
    }

    /// Whether numbers that are not finite are taken.
    pub(super) fn allows_nonfinite(&self) -> bool {
        self.options.allow_nonfinite
    }

    /// Has the operating system fetch bytes of a tensor that will be read soon.
    pub(super) fn will_read(&self, t: &Tensor, bytes: Range<usize>) {
        self.container.will_read(t, bytes);
    }

    /// Lets go of what is in memory: what is read of it again comes from the files.
    pub fn release(&self) {
        self.touched.store(0, Ordering::Relaxed);
        self.container.release();
    }
}
