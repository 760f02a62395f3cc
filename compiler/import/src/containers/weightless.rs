//! A checkpoint without weights: a configuration alone, which records the tensors that a family requests.

use super::{Container, File, Tensor};
use crate::config::Config;
use indexmap::IndexMap;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// The tensors that were requested.
#[derive(Debug)]
pub struct RequestedTensors {
    /// Suffixes of the names of optional tensors that exist.
    optional: &'static [&'static str],
    /// Names and shapes, in the order of the requests.
    tensors: Mutex<IndexMap<String, Vec<usize>>>,
}

impl RequestedTensors {
    /// Whether an optional tensor exists.
    pub fn has(&self, name: &str) -> bool {
        self.optional.iter().any(|end| name.ends_with(end))
    }

    /// Records a tensor.
    pub fn add(&self, name: &str, shape: &[usize]) {
        let mut all = self.tensors.lock().unwrap_or_else(PoisonError::into_inner);
        all.insert(name.to_owned(), shape.to_vec());
    }

    /// Names and shapes, in the order of the requests.
    pub fn all(&self) -> Vec<(String, Vec<usize>)> {
        let all = self.tensors.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().map(|(name, shape)| (name.clone(), shape.clone())).collect()
    }
}

/// The container of such a checkpoint.
#[derive(Debug)]
pub(crate) struct WeightlessCheckpoint {
    config: Config,
    none: IndexMap<String, Tensor>,
    requested: RequestedTensors,
}

impl WeightlessCheckpoint {
    /// Creates a checkpoint with this configuration. `optional` is the suffixes of the names of optional tensors
    /// that exist; families choose between spellings by them.
    pub(crate) fn new(config: Config, optional: &'static [&'static str]) -> Self {
        Self {
            config,
            none: IndexMap::new(),
            requested: RequestedTensors { optional, tensors: Mutex::default() },
        }
    }
}

impl Container for WeightlessCheckpoint {
    fn path(&self) -> &Path {
        Path::new("")
    }

    fn files(&self) -> &[File] {
        &[]
    }

    fn tensors(&self) -> &IndexMap<String, Tensor> {
        &self.none
    }

    fn bytes(&self, _tensor: &Tensor) -> Option<&[u8]> {
        None
    }

    fn config(&self) -> &Config {
        &self.config
    }

    fn requested(&self) -> Option<&RequestedTensors> {
        Some(&self.requested)
    }
}
