//! The architectures of GGUF that are read, one row each.

use super::keys::Keys;
use super::names::Naming;
use super::settings::{self, Own};
use crate::mixers::{PROJ, Parts, W123};
use moec_base::error::{Error, Result};

/// An architecture.
#[derive(Debug)]
pub(super) struct Architecture {
    /// `general.architecture`.
    pub(super) name: &'static str,
    /// How its tensors are called.
    pub(super) naming: Naming,
    /// What adds the keys that are its own to those that all have.
    pub(super) settings: Own,
}

/// As most have it.
const MLP: Naming = Naming {
    paired: false,
    router: "mlp.gate",
    experts: "mlp.experts",
    parts: PROJ,
    shared: "mlp.shared_experts",
};

/// As Mixtral has it.
const SPARSE: Naming =
    Naming { router: "block_sparse_moe.gate", experts: "block_sparse_moe.experts", parts: W123, ..MLP };

/// As SmallThinker calls the parts of an expert.
const PLAIN: Parts = Parts { gate: "gate", up: "up", down: "down", ..PROJ };

const fn row(name: &'static str, naming: Naming, settings: Own) -> Architecture {
    Architecture { name, naming, settings }
}

/// Every architecture that is read.
static ARCHITECTURES: [Architecture; 9] = [
    row("llama", Naming { paired: true, ..SPARSE }, settings::mixtral),
    row("qwen2moe", Naming { shared: "mlp.shared_expert", ..MLP }, settings::qwen2_moe),
    row("qwen3moe", MLP, settings::qwen3_moe),
    row("olmoe", MLP, settings::olmoe),
    row("deepseek2", MLP, settings::deepseek),
    row("glm4moe", MLP, settings::glm4_moe),
    row("phimoe", SPARSE, settings::phimoe),
    row("gpt-oss", Naming { router: "mlp.router", ..MLP }, settings::gpt_oss),
    row(
        "smallthinker",
        Naming { router: "block_sparse_moe.primary_router", parts: PLAIN, ..SPARSE },
        settings::smallthinker,
    ),
];

/// The row of a file.
///
/// # Errors
/// An architecture that is not read, and files that hold no model.
pub(super) fn find(keys: &Keys<'_>) -> Result<&'static Architecture> {
    const TYPE: &str = "general.type";
    if let Some(kind) = keys.text(TYPE)?.filter(|kind| *kind != "model") {
        return Err(Error::limit(format!("{} is `{kind}`, which is not a model by itself", keys.name(TYPE)))
            .hint("give the GGUF file of a language model"));
    }
    let name = keys.architecture()?;
    ARCHITECTURES.iter().find(|row| row.name == name).ok_or_else(|| {
        keys.unsupported("general.architecture", name, &ARCHITECTURES.each_ref().map(|row| row.name))
    })
}
