//! Checkpoints of random weights in the shapes of real models, for measuring without a download.
//!
//! Tensors are streamed: memory does not grow with the model. A tensor's numbers depend on the seed and on
//! its name only, so that a model cut to fewer layers agrees with the whole one on those it has.
#![expect(clippy::cast_possible_truncation, reason = "synthetic numbers")]

mod popularity;
mod shapes;
mod sparse;

pub use popularity::Popularity;
pub use shapes::{Like, Popular, ReducedDims};

use moec_base::progress::Progress;
use moec_base::{Error, Result, disk, human, interrupt};
use serde_json::{Map, Value, json};
use shapes::{Normal, Tensor, first_numbers};
use std::fs::{self, File};
use std::io::{self, BufWriter, Write as _};
use std::path::Path;

/// Numbers of which an expectation over one normal variable is taken.
const GRID: u32 = 4096;
/// Size of a shard, in bytes.
const SHARD: u64 = 2_000_000_000;

/// Writes a checkpoint to a folder that does not exist yet. Where it fails nothing is left behind. With a
/// popularity, tokens choose experts in its proportions; without, every expert is as likely.
///
/// # Errors
/// The folder exists, the disk is full, the popularity is of another number of experts, or the user
/// interrupts.
pub fn write(
    dir: &Path,
    like: Like,
    cut: ReducedDims,
    seed: u64,
    popular: Option<Popular<'_>>,
    progress: &Progress,
) -> Result<()> {
    let (config, tensors) = like.describe(cut, popular)?;
    write_tensors(dir, &config, &tensors, seed, SHARD, progress)
}

fn write_tensors(
    dir: &Path,
    config: &Value,
    tensors: &[Tensor],
    seed: u64,
    shard: u64,
    progress: &Progress,
) -> Result<()> {
    let start = std::time::Instant::now();
    let shown = dir.display();
    let total: u64 = tensors.iter().map(Tensor::bytes).sum();
    if dir.exists() {
        return Err(Error::usage(format!("`{shown}` exists already"))
            .hint("give a folder that does not, or remove it first"));
    }
    if let Some(free) = disk::free_bytes(disk::existing(dir))
        && free < total
    {
        return Err(Error::environment(format!(
            "the checkpoint takes {}, but only {} are free at `{shown}`",
            human::bytes(total),
            human::bytes(free)
        ))
        .hint("`--layers N` makes it smaller"));
    }
    let _hold = interrupt::hold();
    fs::create_dir_all(dir).map_err(|e| failed(dir, &e))?;
    let result = write_files(dir, config, tensors, seed, shard, progress);
    if result.is_err() {
        // The error that stopped the writing is the one to tell.
        let _ = fs::remove_dir_all(dir);
    } else {
        progress.finished(&format!("`{shown}`, {}", human::bytes(total)), start);
    }
    result
}

fn write_files(
    dir: &Path,
    config: &Value,
    tensors: &[Tensor],
    seed: u64,
    shard: u64,
    progress: &Progress,
) -> Result<()> {
    let json = |name: &str, value: &Value| {
        let path = dir.join(name);
        fs::write(&path, format!("{value:#}\n")).map_err(|e| failed(&path, &e))
    };
    json("config.json", config)?;
    let total = tensors.iter().map(Tensor::bytes).sum();
    let bar = progress.bytes("Writing", total);
    let shards = split(tensors, shard);
    let mut weight_map = Map::new();
    for (i, part) in shards.iter().enumerate() {
        let name = match shards.len() {
            1 => "model.safetensors".to_owned(),
            n => format!("model-{:05}-of-{n:05}.safetensors", i + 1),
        };
        let path = dir.join(&name);
        write_shard(&path, part, seed, &mut |tensor, bytes| {
            bar.label(tensor);
            bar.add(bytes);
        })
        .map_err(|e| {
            if interrupt::requested() {
                Error::environment("interrupted; nothing was left behind")
            } else {
                failed(&path, &e)
            }
        })?;
        weight_map.extend(part.iter().map(|t| (t.name.clone(), json!(name))));
    }
    if shards.len() > 1 {
        let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
        json("model.safetensors.index.json", &index)?;
    }
    bar.finish();
    Ok(())
}

fn failed(path: &Path, e: &io::Error) -> Error {
    Error::environment(format!("`{}` cannot be written", path.display())).because(e)
}

/// Cuts the list where a shard would grow beyond `limit`; a tensor that is larger has a shard of its own.
fn split(tensors: &[Tensor], limit: u64) -> Vec<&[Tensor]> {
    let mut shards = Vec::new();
    let (mut start, mut bytes) = (0, 0);
    for (i, t) in tensors.iter().enumerate() {
        if i > start && bytes + t.bytes() > limit {
            shards.push(&tensors[start..i]);
            (start, bytes) = (i, 0);
        }
        bytes += t.bytes();
    }
    shards.push(&tensors[start..]);
    shards
}

/// One safetensors file: the header's length, the header, the numbers.
fn write_shard(
    path: &Path,
    tensors: &[Tensor],
    seed: u64,
    wrote: &mut dyn FnMut(&str, u64),
) -> io::Result<()> {
    let mut header = Map::new();
    header.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut offset = 0;
    for t in tensors {
        let end = offset + t.bytes();
        header.insert(
            t.name.clone(),
            json!({"dtype": "BF16", "shape": t.shape, "data_offsets": [offset, end]}),
        );
        offset = end;
    }
    let mut header = Value::Object(header).to_string();
    header.extend(std::iter::repeat_n(' ', header.len().next_multiple_of(8) - header.len()));
    let mut out = BufWriter::with_capacity(1 << 20, File::create(path)?);
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(header.as_bytes())?;
    let mut tables: Vec<(Normal, Vec<u16>)> = Vec::new();
    let mut chunk = Vec::with_capacity(1 << 16);
    for t in tensors {
        let known = tables.iter().position(|(draw, _)| *draw == t.distribution);
        let at = known.unwrap_or_else(|| {
            tables.push((t.distribution, quantiles(t.distribution)));
            tables.len() - 1
        });
        let table = &tables[at].1;
        let mut numbers = Numbers(seed ^ fnv(&t.name));
        let (mut left, mut written) = (t.bytes(), 0);
        while left > 0 {
            if interrupt::requested() {
                return Err(io::Error::other("interrupted"));
            }
            chunk.clear();
            while chunk.len() < left.min(1 << 16) as usize {
                let bits = numbers.next();
                for lane in 0..4 {
                    let index = (bits >> (16 * lane)) as u16;
                    chunk.extend(table[usize::from(index)].to_le_bytes());
                }
            }
            chunk.truncate(left.min(1 << 16) as usize);
            for (at, number) in first_numbers(t, written / 2, chunk.len() / 2) {
                chunk[2 * at..2 * at + 2].copy_from_slice(&half::bf16::from_f64(number).to_le_bytes());
            }
            written += chunk.len() as u64;
            out.write_all(&chunk)?;
            left -= chunk.len() as u64;
            wrote(&t.name, chunk.len() as u64);
        }
    }
    out.flush()
}

/// SplitMix64.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// FNV-1a.
fn fnv(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3))
}

/// 65536 equally likely numbers of a normal distribution, in bf16.
fn quantiles(draw: Normal) -> Vec<u16> {
    (0..=u16::MAX)
        .map(|i| {
            let z = probit((f64::from(i) + 0.5) / 65536.0);
            half::bf16::from_f64(draw.mean + draw.std * z).to_bits()
        })
        .collect()
}

/// Inverse of the normal distribution, by Abramowitz and Stegun 26.2.23 (error below 4.5e-4).
fn probit(p: f64) -> f64 {
    let tail = p.min(1.0 - p);
    let t = (-2.0 * tail.ln()).sqrt();
    let above = 2.515_517 + t * (0.802_853 + t * 0.010_328);
    let below = 1.0 + t * (1.432_788 + t * (0.189_269 + t * 0.001_308));
    let z = t - above / below;
    if p < 0.5 { -z } else { z }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shapes::First;

    #[test]
    fn drawn_weights_are_normally_distributed() {
        let table = quantiles(Normal { mean: 0.0, std: 0.02 });
        let value = |b: &u16| half::bf16::from_bits(*b).to_f64();
        let mean = table.iter().map(value).sum::<f64>() / 65536.0;
        let std = (table.iter().map(|b| value(b).powi(2)).sum::<f64>() / 65536.0).sqrt();
        assert!(mean.abs() < 1e-5 && (std - 0.02).abs() < 2e-4, "{mean} {std}");
        assert!(table.iter().map(value).all(f64::is_finite));
    }

    #[test]
    fn shapes_are_those_of_the_published_models() {
        for (like, billions, layers) in [
            (Like::Olmoe, 6.92, 16),
            (Like::Qwen3_30bA3b, 30.53, 48),
            (Like::PhiTiny, 3.76, 32),
            (Like::Qwen3_6_35bA3b, 34.66, 40),
            (Like::Qwen3Next80bA3b, 79.67, 48),
            (Like::Glm47Flash, 29.94, 47),
            (Like::GptOss20b, 20.91, 24),
            (Like::Nemotron3Nano, 31.58, 52),
            (Like::Gemma4_26bA4b, 25.23, 30),
            (Like::Glm45Air, 106.85, 46),
            (Like::DeepseekV3, 671.03, 61),
        ] {
            let (config, tensors) = like.describe(ReducedDims::default(), None).unwrap();
            let count: u64 = tensors.iter().map(|t| t.bytes() / 2).sum();
            assert!((count as f64 / 1e9 - billions).abs() < 0.01, "{like:?}: {count}");
            assert_eq!(config["num_hidden_layers"], layers);
        }
    }

    #[test]
    fn every_tensor_is_in_exactly_one_shard() {
        let (_, tensors) = Like::Olmoe.describe(ReducedDims::default(), None).unwrap();
        let shards = split(&tensors, SHARD);
        assert_eq!(shards.concat(), tensors);
        assert!(shards.iter().all(|s| s.iter().map(Tensor::bytes).sum::<u64>() <= SHARD));
        assert_eq!(shards.len(), 7);
    }

    #[test]
    fn synthetic_checkpoint_round_trips() {
        let dir = tempfile::tempdir().unwrap();
        let tensor = |name: &str, rows| Tensor {
            name: name.into(),
            shape: vec![rows, 3],
            distribution: Normal { mean: 1.0, std: 0.1 },
            first: First::Drawn,
        };
        let tensors = [tensor("a", 5), tensor("b", 20_000), tensor("c", 7)];
        let (out, again) = (dir.path().join("one"), dir.path().join("two"));
        for (out, limit) in [(&out, 60_000), (&again, SHARD)] {
            write_tensors(out, &json!({}), &tensors, 1, limit, &Progress::silent()).unwrap();
        }
        let index = fs::read_to_string(out.join("model.safetensors.index.json")).unwrap();
        let index: Value = serde_json::from_str(&index).unwrap();
        let whole = fs::read(again.join("model.safetensors")).unwrap();
        let whole = safetensors::SafeTensors::deserialize(&whole).unwrap();
        for t in &tensors {
            let file = index["weight_map"][&t.name].as_str().unwrap();
            let part = fs::read(out.join(file)).unwrap();
            let part = safetensors::SafeTensors::deserialize(&part)
                .unwrap()
                .tensor(&t.name)
                .unwrap()
                .data()
                .to_vec();
            assert_eq!(part.len() as u64, t.bytes());
            assert_eq!(part, whole.tensor(&t.name).unwrap().data());
        }
        let e = write_tensors(&out, &json!({}), &tensors, 1, SHARD, &Progress::silent())
            .expect_err("it is there");
        assert!(e.message.ends_with("exists already"));
    }
}
