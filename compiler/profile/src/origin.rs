//! The model that a profile was taken from.

use super::ProfileFault;
use bincode::{Decode, Encode};
use moec_base::error::{Error, Result};
use moec_import::{Checkpoint, ModelSpec};
use sha2::{Digest, Sha256};

/// Limit of the checkpoint's tensors whose first bytes are hashed.
const SAMPLES: usize = 512;
/// Hashed bytes of each tensor.
const SAMPLE_BYTES: usize = 256;

/// The model that a profile was taken from.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Origin {
    /// Family (`qwen3_moe`).
    pub family: String,
    /// Hidden size.
    pub hidden: u32,
    /// Vocabulary size.
    pub vocab: u32,
    /// Layers.
    pub layers: u32,
    /// SHA-256 over the names, types, shapes and offsets of the checkpoint's tensors and over the first bytes
    /// of some of them. It differs between two trainings of one architecture.
    pub checkpoint: [u8; 32],
}

impl Origin {
    /// The origin of profiles of an open checkpoint.
    ///
    /// # Errors
    /// Fails if sizes exceed 32 bits.
    pub fn of(checkpoint: &Checkpoint, spec: &ModelSpec) -> Result<Self> {
        let int = |n: usize| u32::try_from(n).map_err(|_| Error::limit(format!("{n} is past 32 bits")));
        let mut sha = Sha256::new();
        sha.update(checkpoint.fingerprint());
        let step = checkpoint.tensors().count().div_ceil(SAMPLES).max(1);
        for (name, _) in checkpoint.tensors().step_by(step) {
            let bytes = checkpoint.bytes(name).unwrap_or_default();
            sha.update(&bytes[..bytes.len().min(SAMPLE_BYTES)]);
        }
        // The hash has mapped a few bytes of each tensor, and the pages around them.
        checkpoint.release();
        Ok(Self {
            family: spec.family.to_owned(),
            hidden: int(spec.hidden)?,
            vocab: int(spec.vocab)?,
            layers: int(spec.layers.len())?,
            checkpoint: sha.finalize().into(),
        })
    }

    /// Fails with the difference if `other` is another model.
    pub(super) fn same(&self, other: &Self) -> Result<(), ProfileFault> {
        if self.family != other.family {
            return Err(format!("one is of family `{}`, one of `{}`", self.family, other.family));
        }
        let sizes = [
            ("hidden size", self.hidden, other.hidden),
            ("vocabulary", self.vocab, other.vocab),
            ("number of layers", self.layers, other.layers),
        ];
        if let Some((what, a, b)) = sizes.into_iter().find(|(_, a, b)| a != b) {
            return Err(format!("their {what} differs: {a} and {b}"));
        }
        if self.checkpoint != other.checkpoint {
            return Err("their shapes agree, but their weights differ".to_owned());
        }
        Ok(())
    }

    /// Checks that `model` is this one. `profile` names the file in the message.
    ///
    /// # Errors
    /// Fails with the difference if it is another model.
    pub fn must_be(&self, model: &Self, profile: &str) -> Result<()> {
        self.same(model).map_err(|e| {
            Error::input(format!("`{profile}` was taken from another model"))
                .because(e)
                .hint("`moec calibrate` takes a profile of this one")
        })
    }

    pub(super) fn check(&self) -> Result<(), ProfileFault> {
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
        if self.family.is_empty() || self.family.len() > 64 || !self.family.chars().all(plain) {
            return Err(format!("family {:?}", self.family));
        }
        Ok(())
    }
}
