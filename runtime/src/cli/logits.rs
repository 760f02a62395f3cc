//! `logits`: the logits of every position, as safetensors.

use super::args::Logits;
use super::{Context, Failure, Io, interrupt};
use crate::bundle::BundleReader;
use crate::error::{Error, Result};
use crate::exec::engine::LogitRows;
use crate::platform::mapped::Unfinished;
use crate::weights::Demand;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

pub(super) fn run(
    context: &Context<'_>,
    files: &BundleReader,
    args: &Logits,
    io: &mut Io<'_>,
) -> Result<(), Failure> {
    let vocab = context.program.model.vocab as usize;
    let mut engine = context.open(&args.common, files, Demand { sequences: 1, tokens: args.ids.len() })?;
    let _interrupt = interrupt::guard();
    // Written row by row: the logits of a long text are larger than many models.
    let mut file = NewFile::create(&args.out)?;
    file.put(&header(args.ids.len(), vocab))?;
    let mut bytes = Vec::with_capacity(vocab * 4);
    engine.prefill(0, 0, &args.ids, LogitRows::All, &mut |_, logits| {
        bytes.clear();
        bytes.extend(logits.iter().flat_map(|x| x.to_le_bytes()));
        file.put(&bytes)
    })?;
    file.finish()?;
    let rows = args.ids.len();
    io.note(&format!("wrote `{}`: `logits` f32 [{rows}, {vocab}]", args.out.display()));
    if args.json {
        io.say(&format!("{}\n", serde_json::json!({"out": args.out, "rows": rows, "vocab": vocab})))?;
    }
    Ok(())
}

/// Start of a safetensors file with one f32 tensor: length, JSON, spaces up to a multiple of eight bytes.
fn header(rows: usize, vocab: usize) -> Vec<u8> {
    let end = rows * vocab * 4;
    let mut json =
        format!(r#"{{"logits":{{"dtype":"F32","shape":[{rows},{vocab}],"data_offsets":[0,{end}]}}}}"#);
    while json.len() % 8 != 0 {
        json.push(' ');
    }
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.extend(json.bytes());
    header
}

/// A file that appears under its name only when it is complete.
struct NewFile {
    path: PathBuf,
    hidden: PathBuf,
    file: BufWriter<File>,
    whole: bool,
    /// Also removes the file if weights are truncated during the run, which ends the program.
    _unfinished: Unfinished,
}

impl NewFile {
    fn create(path: &Path) -> Result<Self> {
        let failed = |source| Error::io("create", path.to_owned(), source);
        let name = path.file_name().ok_or_else(|| failed(io::ErrorKind::IsADirectory.into()))?;
        // Renaming would replace a device or a pipe by a file.
        if path.is_dir() {
            return Err(failed(io::ErrorKind::IsADirectory.into()));
        }
        if path.exists() && !path.is_file() {
            return Err(failed(io::Error::other("it exists and is not a regular file")));
        }
        // In the same folder, so that renaming it is atomic.
        let hidden = path.with_file_name(format!(".{}.{}", name.to_string_lossy(), std::process::id()));
        let file = File::create_new(&hidden).map_err(failed)?;
        Ok(Self {
            path: path.to_owned(),
            _unfinished: Unfinished::new(&hidden),
            hidden,
            file: BufWriter::with_capacity(1 << 20, file),
            whole: false,
        })
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(|e| self.failed(e))
    }

    fn finish(mut self) -> Result<()> {
        self.file.flush().map_err(|e| self.failed(e))?;
        std::fs::rename(&self.hidden, &self.path).map_err(|e| self.failed(e))?;
        self.whole = true;
        Ok(())
    }

    fn failed(&self, source: io::Error) -> Error {
        Error::io("write", self.path.clone(), source)
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if !self.whole {
            let _ = std::fs::remove_file(&self.hidden);
        }
    }
}
