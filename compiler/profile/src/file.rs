//! A profile on disk: magic, version, length, checksum, then the deflated stored form.
//!
//! | bytes | what |
//! |---|---|
//! | 0..8 | [`MAGIC`] |
//! | 8..12 | [`VERSION`], little-endian |
//! | 12..20 | bytes of the stored form, little-endian |
//! | 20..52 | SHA-256 of the stored form |
//! | 52.. | the stored form (bincode), deflated |

use super::{Moments, Origin, Profile, Reading, Routes, Routing, Saliency, Trace};
use bincode::Decode;
use bincode::error::DecodeError;
use moec_base::disk;
use moec_base::error::{Error, Result, io_error};
use moec_base::hashing::sha256;
use moec_runtime::platform::regular;
use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::Path;

/// First bytes of every profile.
pub const MAGIC: [u8; 8] = *b"MOECTRC\n";
/// Version of the stored form that this build writes.
pub const VERSION: u32 = 8;
/// First version with [`super::Correlations`].
const CORRELATIONS: u32 = 3;
/// First version with [`super::NeuronCounts`].
const NEURONS: u32 = 4;
/// First version with [`super::Sample`].
const SAMPLES: u32 = 5;
/// First version with [`super::Gates`].
const GATES: u32 = 6;
/// First version with [`super::Confidence`].
const CONFIDENCE: u32 = 7;
/// First version with [`super::FormatLoss`].
const LOSSES: u32 = 8;
/// Oldest version that can be read.
pub const OLDEST: u32 = 2;

const HEADER: usize = 52;
/// Largest stored form: the largest published model needs half of it.
const MOST_BYTES: usize = 1 << 31;
/// Largest ratio of inflated to deflated bytes.
const MOST_RATIO: usize = 1032;
/// Level of compression: higher levels take more time and save almost nothing.
const EFFORT: u8 = 6;

/// First part of every version. The additions of later ones follow in the order of the versions.
#[derive(Decode)]
struct Start {
    origin: Origin,
    reading: Reading,
    layers: Vec<Routing>,
    trace: Trace,
    saliency: Vec<Saliency>,
    weights: BTreeMap<String, Moments>,
    routes: Routes,
}

/// Reads the stored form of a version. Returns the profile and the remaining bytes.
fn stored(version: u32, bytes: &[u8]) -> std::result::Result<(Profile, &[u8]), DecodeError> {
    let (start, rest) = part(true, bytes)?;
    let (correlations, rest) = part(version >= CORRELATIONS, rest)?;
    let (neurons, rest) = part(version >= NEURONS, rest)?;
    let (samples, rest) = part(version >= SAMPLES, rest)?;
    let (gates, rest) = part(version >= GATES, rest)?;
    let (confidence, rest) = part(version >= CONFIDENCE, rest)?;
    let (losses, rest) = part(version >= LOSSES, rest)?;
    let Some(Start { origin, reading, layers, trace, saliency, weights, routes }) = start else {
        return Err(DecodeError::Other("a profile of nothing"));
    };
    let profile = Profile {
        origin,
        reading,
        layers,
        trace,
        saliency,
        weights,
        routes,
        correlations: correlations.unwrap_or_default(),
        neurons: neurons.unwrap_or_default(),
        samples: samples.unwrap_or_default(),
        gates: gates.unwrap_or_default(),
        confidence: confidence.unwrap_or_default(),
        losses: losses.unwrap_or_default(),
    };
    Ok((profile, rest))
}

/// Reads a part, if this version has it, and returns the remaining bytes.
#[expect(clippy::disallowed_methods, reason = "a limit is set")]
fn part<T: Decode<()>>(there: bool, bytes: &[u8]) -> std::result::Result<(Option<T>, &[u8]), DecodeError> {
    if !there {
        return Ok((None, bytes));
    }
    let config = bincode::config::standard().with_limit::<{ MOST_BYTES }>();
    let (part, read) = bincode::decode_from_slice(bytes, config)?;
    Ok((Some(part), bytes.get(read..).unwrap_or_default()))
}

/// True if these first bytes of a file are those of a profile.
pub fn is_profile(start: &[u8]) -> bool {
    start.starts_with(&MAGIC)
}

/// True if a file starts as a profile does; false if it cannot be read.
pub fn looks_like_one(path: &Path) -> bool {
    let mut start = [0; MAGIC.len()];
    regular::open(path).and_then(|mut f| f.read_exact(&mut start)).is_ok() && is_profile(&start)
}

impl Profile {
    /// Encodes a profile as the bytes of a file.
    ///
    /// # Errors
    /// Fails if it is larger than a profile may be.
    pub fn encode(&self) -> Result<Vec<u8>> {
        self.check().map_err(|e| Error::bug("a profile that does not hold").because(e))?;
        let stored = bincode::encode_to_vec(self, bincode::config::standard())
            .map_err(|e| Error::bug("a profile cannot be stored").because(e))?;
        if stored.len() > MOST_BYTES {
            return Err(Error::limit(format!("a profile of {} bytes is too large", stored.len())));
        }
        let mut bytes = MAGIC.to_vec();
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend((stored.len() as u64).to_le_bytes());
        bytes.extend(sha256(&stored));
        bytes.extend(miniz_oxide::deflate::compress_to_vec(&stored, EFFORT));
        Ok(bytes)
    }

    /// Decodes the bytes of a file.
    ///
    /// # Errors
    /// Fails with the reason if the bytes are not a profile of this version. A false length in the file
    /// reserves no memory.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        if !is_profile(bytes) {
            return Err(Error::input("it is not a profile").hint("`moec calibrate` writes one"));
        }
        let damaged = |why: &str| {
            Error::input("it is damaged")
                .because(why)
                .hint("copy it again, or record it again with `moec calibrate`")
        };
        let header = bytes.get(..HEADER).ok_or_else(|| damaged("it ends in its header"))?;
        let word = |at: usize| header[at..at + 4].iter().rev().fold(0_u32, |n, &b| n << 8 | u32::from(b));
        let version = word(8);
        if !(OLDEST..=VERSION).contains(&version) {
            return Err(Error::limit(format!("it is of version {version}"))
                .because(format!("this moec reads versions {OLDEST} to {VERSION}"))
                .hint("record it again with `moec calibrate`"));
        }
        let len = u64::from(word(12)) | u64::from(word(16)) << 32;
        let packed = &bytes[HEADER..];
        let len = usize::try_from(len).ok().filter(|&n| n <= MOST_BYTES && n <= packed.len() * MOST_RATIO);
        let len = len.ok_or_else(|| damaged("its length cannot be right"))?;
        let stored = miniz_oxide::inflate::decompress_to_vec_with_limit(packed, len)
            .map_err(|e| damaged(&format!("it does not inflate ({:?})", e.status)))?;
        if stored.len() != len || sha256(&stored) != header[20..HEADER] {
            return Err(damaged("its checksum is wrong"));
        }
        let (profile, rest) = self::stored(version, &stored).map_err(|e| damaged(&e.to_string()))?;
        if !rest.is_empty() {
            return Err(damaged("it goes on after its end"));
        }
        profile.check().map_err(|e| damaged(&e))?;
        Ok(profile)
    }

    /// Reads a file.
    ///
    /// # Errors
    /// Fails if the file cannot be read or is not a profile of this version.
    pub fn read(path: &Path) -> Result<Self> {
        let bytes = regular::read(path, regular::PROFILE).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => Error::input(format!("there is no profile `{}`", path.display()))
                .hint("`moec calibrate MODEL.TOML` writes one"),
            _ => io_error("read", path, &e),
        })?;
        Self::decode(&bytes)
            .map_err(|e| e.context(format!("`{}` cannot be used as a profile", path.display())))
    }

    /// Writes a file atomically. Returns its size.
    ///
    /// # Errors
    /// Fails if the folder cannot be written.
    pub fn write(&self, path: &Path) -> Result<u64> {
        let bytes = self.encode()?;
        disk::write_whole(path, &bytes).map_err(|e| io_error("write", path, &e))?;
        Ok(bytes.len() as u64)
    }
}
