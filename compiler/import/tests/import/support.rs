//! Checkpoints that tests read, change, and write again.

use moec_cpu::{Packer, Scratch};
use moec_import::lower::{Shapes, lower};
use moec_import::{Checkpoint, ImportOptions, ModelSpec};
use moec_ir::eval::Evaluator;
use moec_ir::plan::{Layout, Segment};
use moec_ir::{Format, Source, Weight};
use safetensors::tensor::{Dtype, SafeTensors, View};
use serde_json::Value;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// A folder of `golden/`.
pub(crate) fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../golden").join(path)
}

/// A tensor in memory.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) data: Vec<u8>,
}

impl View for &Tensor {
    fn dtype(&self) -> Dtype {
        self.dtype
    }
    fn shape(&self) -> &[usize] {
        &self.shape
    }
    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.data)
    }
    fn data_len(&self) -> usize {
        self.data.len()
    }
}

impl Tensor {
    /// An f32 tensor.
    pub(crate) fn f32(shape: &[usize], numbers: &[f32]) -> Self {
        let data = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
        Self { dtype: Dtype::F32, shape: shape.to_vec(), data }
    }

    /// A tensor of bytes.
    pub(crate) fn bytes(dtype: Dtype, shape: &[usize], data: Vec<u8>) -> Self {
        Self { dtype, shape: shape.to_vec(), data }
    }

    /// The numbers of an f32 or bf16 tensor.
    pub(crate) fn numbers(&self) -> Vec<f32> {
        match self.dtype {
            Dtype::F32 => self.data.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            Dtype::BF16 => {
                let two = self.data.as_chunks().0.iter();
                two.map(|b| half::bf16::from_le_bytes(*b).to_f32()).collect()
            }
            other => panic!("numbers of {other}"),
        }
    }
}

/// A checkpoint in memory.
#[derive(Clone, Debug)]
pub(crate) struct Folder {
    pub(crate) config: Value,
    pub(crate) tensors: BTreeMap<String, Tensor>,
}

impl Folder {
    /// Reads a golden checkpoint.
    pub(crate) fn golden(family: &str) -> Self {
        let dir = golden("hf").join(family);
        Self {
            config: serde_json::from_slice(&fs::read(dir.join("config.json")).unwrap()).unwrap(),
            tensors: load(&dir.join("model.safetensors")),
        }
    }

    /// Sets a key of the config.
    pub(crate) fn set(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.config[key] = value.into();
        self
    }

    /// Removes a key of the config and returns its value.
    pub(crate) fn cut(&mut self, key: &str) -> Option<Value> {
        self.config.as_object_mut().unwrap().shift_remove(key)
    }

    /// Removes a tensor.
    pub(crate) fn take(&mut self, tensor: &str) -> Tensor {
        self.tensors.remove(tensor).unwrap_or_else(|| panic!("no {tensor}"))
    }

    fn write_config(&self) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("config.json"), self.config.to_string()).unwrap();
        dir
    }

    /// Writes the checkpoint as one file.
    pub(crate) fn write(&self) -> tempfile::TempDir {
        let dir = self.write_config();
        fs::write(dir.path().join("model.safetensors"), serialize(&self.tensors)).unwrap();
        dir
    }

    /// Writes the checkpoint as two shards with an index; every second tensor is in the second shard.
    pub(crate) fn write_sharded(&self) -> tempfile::TempDir {
        let dir = self.write_config();
        let mut parts = [BTreeMap::new(), BTreeMap::new()];
        let mut map = serde_json::Map::new();
        for (i, (name, tensor)) in self.tensors.iter().enumerate() {
            parts[i % 2].insert(name.clone(), tensor.clone());
            map.insert(name.clone(), shard(i % 2).into());
        }
        for (i, part) in parts.iter().enumerate() {
            fs::write(dir.path().join(shard(i)), serialize(part)).unwrap();
        }
        write_index(dir.path(), Value::Object(map));
        dir
    }
}

/// Name of one of two shards.
pub(crate) fn shard(i: usize) -> String {
    format!("model-{:05}-of-00002.safetensors", i + 1)
}

/// Writes an index of shards.
pub(crate) fn write_index(dir: &Path, map: Value) {
    let index = serde_json::json!({"metadata": {"total_size": 1}, "weight_map": map});
    fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

/// The bytes of a safetensors file.
pub(crate) fn serialize(tensors: &BTreeMap<String, Tensor>) -> Vec<u8> {
    safetensors::serialize(tensors.iter(), None).unwrap()
}

/// Reads a safetensors file.
pub(crate) fn load(path: &Path) -> BTreeMap<String, Tensor> {
    let bytes = fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensors = file.iter().map(|(name, t)| {
        let t = Tensor::bytes(t.dtype(), t.shape(), t.data().to_vec());
        (name.to_owned(), t)
    });
    tensors.collect()
}

/// Shapes that fit the golden checkpoints.
pub(crate) fn shapes(max_context: usize, chunk: usize) -> Shapes {
    Shapes {
        max_context,
        rings: Some(128),
        prefill_chunk: chunk,
        prefill_out_rows: chunk,
        decode_batch: vec![1, 2],
        slots: 2,
        little: None,
    }
}

/// Imports a folder.
pub(crate) fn spec(dir: &Path) -> ModelSpec {
    moec_import::open(dir, &ImportOptions::default()).unwrap_or_else(|e| panic!("{e}")).1
}

/// Imports a folder and evaluates it on tokens. The chunk does not divide the prompt; the last tokens are
/// decoded one by one in a batch of two.
pub(crate) fn logits(dir: &Path, ids: &[u32], chunk: usize) -> Vec<f32> {
    let (checkpoint, _) = moec_import::open(dir, &ImportOptions::default()).unwrap_or_else(|e| panic!("{e}"));
    logits_of(&checkpoint, ids, chunk)
}

/// Like [`logits`], for an open checkpoint.
pub(crate) fn logits_of(checkpoint: &Checkpoint, ids: &[u32], chunk: usize) -> Vec<f32> {
    let spec = moec_import::read(checkpoint).unwrap_or_else(|e| panic!("{e}"));
    let shapes = shapes(ids.len().max(64), chunk);
    let module = lower(&spec, &shapes).unwrap_or_else(|e| panic!("{e}"));
    moec_ir::verify::module(&module).unwrap_or_else(|e| panic!("{e}"));
    let mut evaluator = Evaluator::new(&module, checkpoint);
    let (prompt, rest) = ids.split_at(ids.len() - 3);
    let mut out = evaluator.logits_from(0, 1, 0, prompt).unwrap().as_f32().to_vec();
    let rest = evaluator.logits_from(2, 1, prompt.len(), rest).unwrap();
    out.extend_from_slice(rest.as_f32());
    out
}

/// Elements of a matrix, or of several.
pub(crate) fn numbers(weight: &Weight, source: &dyn Source) -> Vec<f32> {
    let (rows, cols) = (weight.rows(), weight.cols());
    let mut all = vec![0.0; weight.matrices() * rows * cols];
    for (matrix, out) in all.chunks_mut(rows * cols).enumerate() {
        weight.expr.read(matrix, 0..rows, 0..cols, source, out).unwrap_or_else(|e| panic!("{e}"));
    }
    all
}

/// Like [`numbers`], but packed in panels of a format as in a build, and read back.
pub(crate) fn packed(weight: &Weight, format: Format, source: &dyn Source) -> Vec<f32> {
    let layout = Layout::Panels { nr: 16 };
    let (rows, cols, matrices) = (weight.rows(), weight.cols(), weight.matrices());
    let bytes = moec_cpu::packed_bytes(layout, format, &weight.shape).unwrap();
    let segment = Segment {
        name: weight.name.clone(),
        file: 0,
        offset: 0,
        bytes,
        pitch: bytes / matrices as u64,
        shape: weight.shape.iter().map(|&d| d as u32).collect(),
        format,
        layout,
    };
    let packer = Packer::new(&segment, weight, source, None, 0..matrices).unwrap_or_else(|e| panic!("{e}"));
    let (mut scratch, mut held) = (Scratch::default(), Vec::new());
    for block in packer.blocks() {
        packer.pack(&block, &mut scratch, &mut held).unwrap_or_else(|e| panic!("{e}"));
    }
    let mut all = vec![0.0; matrices * rows * cols];
    for (matrix, out) in all.chunks_mut(rows * cols).enumerate() {
        moec_cpu::unpack(&segment, &held, matrix, 0..rows, 0..cols, out).unwrap();
    }
    all
}

/// Prompt and logits from transformers.
pub(crate) fn expected(dir: &Path) -> (Vec<u32>, Vec<f32>) {
    let tensors = load(&dir.join("expected.safetensors"));
    let ids = tensors["input_ids"].data.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
    (ids, tensors["logits"].numbers())
}

/// Largest absolute difference.
pub(crate) fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// The error of importing a folder, as it is shown to the user.
pub(crate) fn refusal(dir: &Path) -> String {
    refusal_with(dir, &ImportOptions::default())
}

/// Like [`refusal`], with options.
pub(crate) fn refusal_with(dir: &Path, options: &ImportOptions) -> String {
    match moec_import::open(dir, options) {
        Ok(_) => "accepted".to_owned(),
        Err(e) => {
            let mut text = format!("{:?}: {}", e.fault, e.message);
            for cause in &e.causes {
                text.push_str("\n  because ");
                text.push_str(cause);
            }
            if let Some(hint) = &e.hint {
                text.push_str("\n  hint: ");
                text.push_str(hint);
            }
            text.replace(&dir.display().to_string(), "DIR")
        }
    }
}
