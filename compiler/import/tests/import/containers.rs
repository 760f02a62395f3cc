//! Test of a second container, in memory: a new container takes no more code than this file has.

use super::support::{self, Folder, distance, expected, golden, logits_of};
use indexmap::IndexMap;
use moec_import::checkpoint::{File, Tensor};
use moec_import::containers::Container;
use moec_import::encodings::{ENCODINGS, Encoding};
use moec_import::{Checkpoint, Config, ImportOptions};
use moec_ir::{Encoding as Stored, Leaf, Source};
use serde_json::{Value, json};
use std::path::Path;

/// Eight bits with one factor for each 32 numbers, in one tensor: an encoding that no container of the
/// compiler has.
const Q8: Encoding = Encoding {
    title: "Q8",
    dtype: "Q8",
    block: 32,
    bytes: 36,
    native_format: None,
    decode: |stored, from, out| {
        for (x, col) in out.iter_mut().zip(from % 32..) {
            let block = &stored[col / 32 * 36..][..36];
            let (factor, codes) = block.split_first_chunk().unwrap();
            *x = f32::from_le_bytes(*factor) * f32::from(codes[col % 32].cast_signed());
        }
    },
};

/// Encodings of this container: all supported ones, and one more.
const READ: [&Encoding; ENCODINGS.len() + 1] = {
    let mut all = [&Q8; ENCODINGS.len() + 1];
    let mut i = 0;
    while i < ENCODINGS.len() {
        all[i] = ENCODINGS[i];
        i += 1;
    }
    all
};

/// A checkpoint in memory.
#[derive(Debug)]
struct Memory {
    config: Config,
    files: [File; 1],
    tensors: IndexMap<String, Tensor>,
    data: Vec<u8>,
}

impl Memory {
    fn new(config: &Value) -> Self {
        let config = Config::parse("memory", config.to_string().as_bytes()).unwrap();
        let files = [File { name: "memory".to_owned(), path: "memory".into() }];
        Self { config, files, tensors: IndexMap::new(), data: Vec::new() }
    }

    fn with(mut self, name: &str, dtype: &str, shape: &[usize], bytes: &[u8]) -> Self {
        let start = self.data.len();
        self.data.extend(bytes);
        let bytes = start..self.data.len();
        let tensor = Tensor { file: 0, dtype: dtype.to_owned(), shape: shape.to_vec(), bytes };
        assert!(self.tensors.insert(name.to_owned(), tensor).is_none());
        self
    }

    fn open(self) -> Checkpoint {
        Checkpoint::of(Box::new(self), &ImportOptions::default())
    }
}

impl Container for Memory {
    fn path(&self) -> &Path {
        Path::new("memory")
    }

    fn files(&self) -> &[File] {
        &self.files
    }

    fn tensors(&self) -> &IndexMap<String, Tensor> {
        &self.tensors
    }

    fn bytes(&self, tensor: &Tensor) -> Option<&[u8]> {
        self.data.get(tensor.bytes.clone())
    }

    fn config(&self) -> &Config {
        &self.config
    }

    fn encodings(&self) -> &'static [&'static Encoding] {
        &READ
    }
}

/// A row of a matrix, read by itself.
fn row(checkpoint: &Checkpoint, leaf: &Leaf, row: usize) -> Vec<f32> {
    let mut out = vec![0.0; leaf.shape[1]];
    checkpoint.read(leaf, 0, row..row + 1, 0..out.len(), &mut out).unwrap();
    out
}

/// A golden checkpoint, with matrices in Q8 if `quantised`, otherwise unchanged.
fn memory(folder: &Folder, quantised: bool) -> Memory {
    folder.tensors.iter().fold(Memory::new(&folder.config), |memory, (name, t)| match t.shape[..] {
        [_, cols] if quantised && cols % 32 == 0 => memory.with(name, "Q8", &t.shape, &to_q8(&t.numbers())),
        _ => memory.with(name, &t.dtype.to_string(), &t.shape, &t.data),
    })
}

fn to_q8(numbers: &[f32]) -> Vec<u8> {
    let block = |block: &[f32]| {
        let factor = block.iter().fold(0.0_f32, |m, x| m.max(x.abs())) / 127.0;
        let codes = block.iter().map(move |x| (x / factor.max(f32::MIN_POSITIVE)).round() as i8 as u8);
        factor.to_le_bytes().into_iter().chain(codes).collect::<Vec<u8>>()
    };
    numbers.chunks_exact(32).flat_map(block).collect()
}

#[test]
fn model_in_memory_equals_the_one_on_disk() {
    let folder = Folder::golden("olmoe");
    let dir = folder.write();
    let (disk, spec) = moec_import::open(dir.path(), &ImportOptions::default()).unwrap();
    let checkpoint = memory(&folder, false).open();
    assert_eq!(moec_import::read(&checkpoint).unwrap(), spec);
    assert_eq!(checkpoint.tokenizer(&spec).unwrap(), None);
    let (ids, want) = expected(&golden("hf/olmoe"));
    assert!(distance(&logits_of(&checkpoint, &ids, 20), &want) < 1e-4);
    for name in ["model.embed_tokens.weight", "model.layers.1.mlp.experts.3.down_proj.weight"] {
        let shape = folder.tensors[name].shape.clone();
        let leaf = Leaf { tensor: name.to_owned(), shape: shape.clone(), encoding: Stored::Plain };
        let rows: Vec<f32> = (0..shape[0]).flat_map(|r| row(&checkpoint, &leaf, r)).collect();
        assert_eq!(rows, folder.tensors[name].numbers());
        assert_eq!(checkpoint.format(&leaf), disk.format(&leaf));
    }
    assert_eq!(checkpoint.tensors().count(), disk.tensors().count());
    assert_eq!((checkpoint.fingerprint().len(), checkpoint.file_of("none")), (64, "memory"));
}

#[test]
fn container_may_define_its_own_encoding() {
    let folder = Folder::golden("olmoe");
    let checkpoint = memory(&folder, true).open();
    let mut rounded = folder.clone();
    for (name, t) in &mut rounded.tensors {
        if checkpoint.get(name).unwrap().dtype == "Q8" {
            let leaf = Leaf { tensor: name.clone(), shape: t.shape.clone(), encoding: Stored::Plain };
            assert_eq!(checkpoint.format(&leaf), None);
            let rows: Vec<f32> = (0..t.shape[0]).flat_map(|r| row(&checkpoint, &leaf, r)).collect();
            // Any range of columns equals that range of the row.
            let mut part = [0.0; 10];
            checkpoint.read(&leaf, 0, 3..4, 27..37, &mut part).unwrap();
            assert_eq!(part, rows[3 * t.shape[1]..][27..37]);
            let numbers = t.numbers();
            let largest = numbers.iter().fold(0.0_f32, |m, x| m.max(x.abs()));
            let off = distance(&rows, &numbers);
            assert!(off > 0.0 && off <= largest / 254.0 * 1.01, "{name}: {off}");
            *t = support::Tensor::f32(&t.shape, &rows);
        }
    }
    let ids: Vec<u32> = (0..24).map(|i| i * 37 % 320).collect();
    let dir = rounded.write();
    let disk = Checkpoint::open(dir.path(), &ImportOptions::default()).unwrap();
    assert_eq!(distance(&logits_of(&checkpoint, &ids, 10), &logits_of(&disk, &ids, 10)), 0.0);
}

#[test]
fn inconsistent_container_tensors_are_refused() {
    let leaf = |shape: &[usize]| Leaf { tensor: "w".into(), shape: shape.to_vec(), encoding: Stored::Plain };
    let read = |memory: Memory, shape: &[usize]| {
        let mut out = vec![0.0; shape[1]];
        memory.open().read(&leaf(shape), 0, 1..2, 0..shape[1], &mut out).map_err(|e| e.to_string())
    };
    let one =
        |dtype, shape: &[usize], bytes| Memory::new(&json!({})).with("w", dtype, shape, &vec![0; bytes]);
    assert_eq!(read(one("Q8", &[2, 64], 144), &[2, 64]), Ok(()));
    // Too few bytes, or too many; rows with incomplete blocks; a shape other than the leaf's.
    for (bytes, stored, shape) in
        [(143, [2, 64], [2, 64]), (180, [2, 64], [2, 64]), (144, [2, 63], [2, 63]), (144, [4, 32], [2, 64])]
    {
        let error = read(one("Q8", &stored, bytes), &shape).unwrap_err();
        assert!(error.contains("does not fit tensor `w`"), "{error}");
    }
    insta::assert_snapshot!(read(one("Q9", &[2, 64], 144), &[2, 64]).unwrap_err(), @"tensor `w` in `memory` is stored as Q9, which is not supported");
    // A tensor after the end of the data.
    let mut cut = one("F32", &[2, 64], 512);
    cut.data.truncate(500);
    insta::assert_snapshot!(read(cut, &[2, 64]).unwrap_err(), @"`memory` has no tensor `w`");
}
