//! The architectures of GGUF that are read, one row each.

use super::keys::Keys;
use super::settings::{self, Model, Settings};
use crate::error::{Error, Result};
use crate::import::moe::{PROJ, Parts, W123};

/// How an architecture calls its parts, and what its configuration is.
#[derive(Debug)]
pub(super) struct Architecture {
    /// `general.architecture`.
    pub(super) name: &'static str,
    /// Whether the rows of query and key are paired anew, for a rotation of neighbours.
    pub(super) paired: bool,
    /// The router in a layer.
    pub(super) router: &'static str,
    /// The experts in a layer.
    pub(super) experts: &'static str,
    /// The parts of an expert.
    pub(super) parts: Parts,
    /// The network in a layer that all tokens go through beside their experts.
    pub(super) shared: &'static str,
    /// Adds the keys that are its own to those that all have.
    pub(super) settings: fn(&Model<'_>, &mut Settings) -> Result<()>,
}

/// As most have it.
const MLP: Architecture = Architecture {
    name: "",
    paired: false,
    router: "mlp.gate",
    experts: "mlp.experts",
    parts: PROJ,
    shared: "mlp.shared_experts",
    settings: |_, _| Ok(()),
};

/// As Mixtral has it.
const SPARSE: Architecture =
    Architecture { router: "block_sparse_moe.gate", experts: "block_sparse_moe.experts", parts: W123, ..MLP };

/// As SmallThinker calls the parts of an expert.
const PLAIN: Parts = Parts { gate: "gate", up: "up", down: "down" };

/// Every architecture that is read.
static ARCHITECTURES: [Architecture; 9] = [
    Architecture { name: "llama", paired: true, settings: settings::mixtral, ..SPARSE },
    Architecture { name: "qwen2moe", shared: "mlp.shared_expert", settings: settings::qwen2_moe, ..MLP },
    Architecture { name: "qwen3moe", settings: settings::qwen3_moe, ..MLP },
    Architecture { name: "olmoe", settings: settings::olmoe, ..MLP },
    Architecture { name: "deepseek2", settings: settings::deepseek, ..MLP },
    Architecture { name: "glm4moe", settings: settings::glm4_moe, ..MLP },
    Architecture { name: "phimoe", settings: settings::phimoe, ..SPARSE },
    Architecture { name: "gpt-oss", router: "mlp.router", settings: settings::gpt_oss, ..MLP },
    Architecture {
        name: "smallthinker",
        router: "block_sparse_moe.primary_router",
        parts: PLAIN,
        settings: settings::smallthinker,
        ..SPARSE
    },
];

/// The row of a file.
///
/// # Errors
/// An architecture that is not read, and files that hold no model.
pub(super) fn find(keys: &Keys<'_>) -> Result<&'static Architecture> {
    const TYPE: &str = "general.type";
    if let Some(kind) = keys.text(TYPE)?.filter(|kind| *kind != "model") {
        return Err(Error::limit(format!("{} is `{kind}`, which is no model by itself", keys.name(TYPE)))
            .hint("give the GGUF file of a language model"));
    }
    let name = keys.architecture()?;
    ARCHITECTURES.iter().find(|row| row.name == name).ok_or_else(|| {
        keys.unsupported("general.architecture", name, &ARCHITECTURES.each_ref().map(|row| row.name))
    })
}
