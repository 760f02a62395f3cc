//! GGUF files, one or several of one model: metadata and tensors of llama.cpp, with the names of Hugging
//! Face.
//!
//! Each architecture is a row of [`architectures`]: the names of its tensors, the changes by its converter,
//! and the keys of its configuration. Experts are consecutive in one tensor; each is presented as a tensor of
//! its own, a range of the bytes. Numbers stay as they are stored, and [`encodings`] decodes them. Other
//! changes to a tensor are [`Change`]s.

mod architectures;
mod encodings;
mod files;
mod keys;
mod names;
mod settings;
mod tokenizer;

use super::{Container, File, Kind, Tensor};
use crate::config::Config;
use crate::encodings::Encoding;
use crate::map::Map;
use indexmap::IndexMap;
use keys::Keys;
use moec_base::error::{Error, Result};
use moec_gguf::Header;
use moec_ir::{Axis, Elementwise};
use names::{Change, Names, Placed, Sizes};
use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The row of the container table.
pub(super) const KIND: Kind = Kind {
    name: "GGUF",
    description: "a GGUF file (the first of a split one)",
    is: |path| path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf")),
    config: |path| Ok(Gguf::open(path)?.config),
    open: |path, _| Ok(Box::new(Gguf::open(path)?)),
};

/// Open files, whose weights are mapped.
#[derive(Debug)]
struct Gguf {
    path: PathBuf,
    config: Config,
    files: Vec<File>,
    /// Maps, one for each file.
    maps: Vec<Map>,
    tensors: IndexMap<String, Tensor>,
    /// Reorderings of rows and columns, and functions that were applied to numbers, by tensor.
    orders: HashMap<String, (Axis, Vec<u32>)>,
    mapped: HashMap<String, Elementwise>,
}

impl Gguf {
    /// Opens the file at a path, and the other files of its model. Reads headers only.
    ///
    /// # Errors
    /// Fails if files are missing, damaged or not of one model, or if the model is not supported.
    fn open(path: &Path) -> Result<Self> {
        let (files, maps) = files::open(path)?;
        let headers = files.iter().zip(&maps).map(|(file, map)| read(&file.name, map));
        let headers = headers.collect::<Result<Vec<_>>>()?;
        files::check(&files, &headers)?;
        let Some((first, header)) = files.first().zip(headers.first()) else {
            return Err(Error::bug("a checkpoint of no files"));
        };
        let keys = Keys::new(&first.name, header);
        let row = architectures::find(&keys)?;
        let mut stored = IndexMap::new();
        for (i, (file, header)) in files.iter().zip(&headers).enumerate() {
            for tensor in header.tensors() {
                if let Some((old, _)) = stored.insert(tensor.name, (i, tensor)) {
                    let (old, new): (&File, _) = (&files[old], file);
                    return Err(Error::input(format!(
                        "tensor `{}` is both in `{}` and in `{}`",
                        tensor.name, old.name, new.name
                    ))
                    .hint("the files are of different models: download all of them again"));
                }
            }
        }
        let model = settings::Model { keys, tensors: &stored, maps: &maps };
        let config = Config::of(&first.name, settings::config(row, &model)?);
        let names = Names::new(row.naming, sizes(&config)?, stored.keys().copied());
        let (mut tensors, mut orders, mut mapped) = (IndexMap::new(), HashMap::new(), HashMap::new());
        for (name, (file, tensor)) in &stored {
            for Placed { name: hf, shape, bytes, changes } in names.place(tensor) {
                orders.extend(names.order(&changes, &shape).map(|order| (hf.clone(), order)));
                mapped.extend(changes.iter().filter_map(|change| match change {
                    Change::Mapped(map) => Some((hf.clone(), *map)),
                    _ => None,
                }));
                let of = Tensor { file: *file, dtype: tensor.kind.name.to_owned(), shape, bytes };
                if tensors.contains_key(&hf) {
                    return Err(Error::input(format!("`{name}` in `{}` is a duplicate", files[*file].name))
                        .because(format!("another tensor also maps to `{hf}`")));
                }
                tensors.insert(hf, of);
            }
        }
        Ok(Self { path: path.to_owned(), config, files, maps, tensors, orders, mapped })
    }

    /// The header of the first file, which has the metadata.
    fn header(&self) -> Result<(&str, Header<'_>)> {
        let first = self.files.first().zip(self.maps.first());
        let (file, map) = first.ok_or_else(|| Error::bug("a checkpoint of no files"))?;
        Ok((&file.name, read(&file.name, map)?))
    }
}

/// Returns the sizes that names and orders depend on.
fn sizes(config: &Config) -> Result<Sizes> {
    let size = |key| -> Result<usize> { Ok(config.opt_size(&[key])?.map_or(0, |s| s.n)) };
    let heads = size("num_attention_heads")?;
    Ok(Sizes {
        heads,
        kv_heads: config.opt_size(&["num_key_value_heads"])?.map_or(heads, |s| s.n),
        experts: size("num_experts")?,
        delta: [
            size("linear_num_key_heads")?,
            size("linear_num_value_heads")?,
            size("linear_key_head_dim")?,
            size("linear_value_head_dim")?,
        ],
    })
}

/// Reads the header of a file.
fn read<'a>(name: &str, map: &'a [u8]) -> Result<Header<'a>> {
    Header::read(map)
        .map_err(|e| Error::input(format!("`{name}` is not a valid GGUF file")).hint(e.hint()).because(e))
}

impl Container for Gguf {
    fn path(&self) -> &Path {
        &self.path
    }

    fn files(&self) -> &[File] {
        &self.files
    }

    fn tensors(&self) -> &IndexMap<String, Tensor> {
        &self.tensors
    }

    fn order(&self, tensor: &str) -> Option<(Axis, Vec<u32>)> {
        self.orders.get(tensor).cloned()
    }

    fn mapped(&self, tensor: &str) -> Option<Elementwise> {
        self.mapped.get(tensor).copied()
    }

    fn bytes(&self, tensor: &Tensor) -> Option<&[u8]> {
        self.maps.get(tensor.file)?.get(tensor.bytes.clone())
    }

    fn config(&self) -> &Config {
        &self.config
    }

    fn tokenizer_config(&self) -> Result<Option<Config>> {
        let (name, header) = self.header()?;
        tokenizer::config(&Keys::new(name, &header)).map(|map| Some(Config::of(name, map)))
    }

    fn tokenizer(&self) -> Result<Option<Vec<u8>>> {
        let (name, header) = self.header()?;
        tokenizer::json(&Keys::new(name, &header))
    }

    fn encodings(&self) -> &'static [&'static Encoding] {
        &encodings::ENCODINGS
    }

    fn will_read(&self, tensor: &Tensor, bytes: Range<usize>) {
        if let Some(map) = self.maps.get(tensor.file) {
            map.will_read(tensor.bytes.start + bytes.start..tensor.bytes.start + bytes.end);
        }
    }

    fn release(&self) {
        self.maps.iter().for_each(|map| map.release(0..map.len()));
    }
}
