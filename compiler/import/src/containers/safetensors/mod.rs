//! The folder of a Hugging Face checkpoint: safetensors files and JSON files.

mod header;
mod shards;

use super::{Container, File, Kind, Tensor, folder};
use crate::config::Config;
use crate::map::Map;
use indexmap::IndexMap;
use moec_base::error::{Error, Result};
use moec_runtime::platform::regular;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The row of the container table.
pub(super) const KIND: Kind = Kind {
    name: "safetensors",
    description: "the folder of a Hugging Face checkpoint, with its `config.json` and its weights as safetensors",
    is: |path| {
        [CONFIG, shards::SINGLE, shards::INDEX].iter().any(|name| path.join(name).symlink_metadata().is_ok())
    },
    config: |dir| {
        config(dir, CONFIG)?.ok_or_else(|| {
            Error::input(format!("`{}` has no `{CONFIG}`", dir.display()))
                .hint("give the folder of a Hugging Face checkpoint")
        })
    },
    open: |dir, config| Ok(Box::new(Safetensors::open(dir, config)?)),
};

const CONFIG: &str = "config.json";

/// Whether a folder has a configuration and no weights.
pub(crate) fn is_config_alone(dir: &Path) -> bool {
    let has = |name: &str| dir.join(name).symlink_metadata().is_ok();
    has(CONFIG) && !has(shards::SINGLE) && !has(shards::INDEX)
}

/// An open folder, whose weights are mapped.
#[derive(Debug)]
struct Safetensors {
    dir: PathBuf,
    config: Config,
    files: Vec<File>,
    /// Maps, one for each file.
    maps: Vec<Map>,
    tensors: IndexMap<String, Tensor>,
}

/// Type of the tensors whose numbers are elsewhere, and bytes of one number.
const SHAPES_IN: (&str, usize) = ("BF16", 2);

/// A folder whose weights are elsewhere: it has tensors of these names and shapes, in bf16, without bytes.
pub(crate) fn shapes(dir: &Path, config: Config, tensors: Vec<(String, Vec<usize>)>) -> Box<dyn Container> {
    let (dtype, size) = SHAPES_IN;
    let mut end = 0_usize;
    let mut tensor = |(name, shape): (String, Vec<usize>)| {
        let start = end;
        end = shape.iter().fold(size, |bytes, &d| bytes.saturating_mul(d)).saturating_add(start);
        (name, Tensor { file: 0, dtype: dtype.to_owned(), shape, bytes: start..end })
    };
    let tensors = tensors.into_iter().map(&mut tensor).collect();
    let files = vec![File { name: CONFIG.to_owned(), path: dir.join(CONFIG) }];
    Box::new(Safetensors { dir: dir.to_owned(), config, files, maps: Vec::new(), tensors })
}

impl Safetensors {
    /// Opens a folder with `model.safetensors`, or with the shards of `model.safetensors.index.json`. Reads
    /// headers only.
    ///
    /// # Errors
    /// Fails if files are missing, truncated, outside the folder or invalid. Also fails if tensors are
    /// duplicates or not in the files that the index gives.
    fn open(dir: &Path, config: Config) -> Result<Self> {
        let shards = shards::find(dir)?;
        let mut open = Self {
            dir: dir.to_owned(),
            config,
            files: Vec::new(),
            maps: Vec::new(),
            tensors: IndexMap::new(),
        };
        for (name, path) in shards.files {
            open.add(File { name, path })?;
        }
        for (tensor, file) in &shards.tensors {
            let file_name = &open.files[*file].name;
            match open.tensors.get(tensor) {
                Some(t) if t.file == *file => {}
                found => {
                    let error = Error::input(format!("`{file_name}` has no tensor `{tensor}`"))
                        .hint("index and shards are of different checkpoints; download them again");
                    let error = error.because(format!("`{}` names this file for it", shards::INDEX));
                    return Err(match found {
                        Some(t) => error.because(format!("it is in `{}`", open.files[t.file].name)),
                        None => error,
                    });
                }
            }
        }
        Ok(open)
    }

    fn add(&mut self, new: File) -> Result<()> {
        let map = Map::open(&new.path).map_err(|e| folder::unreadable(&new.name, &e))?;
        let header = header::read(&new.name, &map)?;
        let file = self.files.len();
        for (tensor, info) in header.tensors {
            let (start, end) = info.data_offsets;
            let bytes = header.data + start..header.data + end;
            let stored = Tensor { file, dtype: info.dtype.to_string(), shape: info.shape, bytes };
            if let Some(old) = self.tensors.insert(tensor.clone(), stored) {
                let (first, name) = (&self.files[old.file].name, &new.name);
                return Err(Error::input(format!("tensor `{tensor}` is both in `{first}` and in `{name}`"))
                    .hint("remove the files that are not of this checkpoint, or download it again"));
            }
        }
        self.files.push(new);
        self.maps.push(map);
        Ok(())
    }
}

impl Container for Safetensors {
    fn path(&self) -> &Path {
        &self.dir
    }

    fn files(&self) -> &[File] {
        &self.files
    }

    fn tensors(&self) -> &IndexMap<String, Tensor> {
        &self.tensors
    }

    fn bytes(&self, tensor: &Tensor) -> Option<&[u8]> {
        self.maps.get(tensor.file)?.get(tensor.bytes.clone())
    }

    fn config(&self) -> &Config {
        &self.config
    }

    fn generation_config(&self) -> Result<Option<Config>> {
        config(&self.dir, "generation_config.json")
    }

    fn tokenizer_config(&self) -> Result<Option<Config>> {
        config(&self.dir, "tokenizer_config.json")
    }

    fn chat_template(&self) -> Result<Option<String>> {
        let name = "chat_template.jinja";
        let read = read(&self.dir, name, regular::CONFIG)?.map(String::from_utf8);
        read.transpose().map_err(|e| Error::input(format!("`{name}` is not text in UTF-8")).because(e))
    }

    fn tokenizer(&self) -> Result<Option<Vec<u8>>> {
        read(&self.dir, "tokenizer.json", regular::TOKENIZER)
    }

    fn index(&self) -> &str {
        match self.files.as_slice() {
            [only] => &only.name,
            _ => shards::INDEX,
        }
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

/// The JSON object in a file of the folder, if it has that file.
fn config(dir: &Path, name: &str) -> Result<Option<Config>> {
    read(dir, name, regular::CONFIG)?.map(|text| Config::parse(name, &text)).transpose()
}

/// Contents of a file of the folder, if it has that file.
fn read(dir: &Path, name: &str, limit: regular::Limit) -> Result<Option<Vec<u8>>> {
    let Some(path) = folder::find(dir, name)? else { return Ok(None) };
    regular::read(&path, limit).map(Some).map_err(|e| folder::unreadable(name, &e))
}
