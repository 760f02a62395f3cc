//! The page of models: families, sizes, layouts of quantised checkpoints.

use super::units;
use clap::ValueEnum as _;
use moec_base::{Result, human};
use moec_import::FAMILIES;
use moec_synth::Like;
use std::fmt::Write as _;

/// The page.
///
/// # Errors
/// A model's configuration that cannot be read.
pub(super) fn page() -> Result<String> {
    let mut out = String::from(
        "# Models\n\nA checkpoint is supported if the first of its `architectures` (in `config.json`) is in this table. Anything\n\
         else is refused by name.\n\n| family | `model_type` | `architectures` | published checkpoints |\n|---|---|---|---|\n",
    );
    for f in FAMILIES {
        let names: Vec<_> = f.architectures.iter().map(|a| format!("`{a}`")).collect();
        let _ = writeln!(
            out,
            "| {} | `{}` | {} | {} |",
            f.title,
            f.name,
            names.join(", "),
            f.examples.join(", ")
        );
    }
    sizes(&mut out)?;
    what_runs_where(&mut out)?;
    Ok(out + LIMITS + QUANTISED + RELU)
}

/// Sizes of published models, counted from their configurations.
fn sizes(out: &mut String) -> Result<()> {
    out.push_str(
        "\n## Sizes\n\nOf models whose shapes moec knows (`moec synth --like NAME` writes random weights in them), counted from their\n\
         configurations.\n\n\
         | `--like` | family | parameters | of a token | layers | experts | of a token |\n|---|---|---|---|---|---|---|\n",
    );
    for like in Like::value_variants() {
        let spec = like.spec()?;
        let _ = writeln!(
            out,
            "| `{}` | {} | {} | {} | {} | {} | {} |",
            name(*like),
            spec.title,
            human::count(spec.params),
            human::count(spec.active_params),
            spec.layers.len(),
            spec.experts(),
            spec.experts_per_token().unwrap_or(0),
        );
    }
    Ok(())
}

/// Parts of these models that the accelerators of some targets can take.
fn what_runs_where(out: &mut String) -> Result<()> {
    out.push_str(
        "\n## What runs where\n\nA CPU runs every part of every family. The accelerators of other targets can take these parts of the same models\n\
         (*mixers*: delta rules, state spaces and short convolutions); the others stay on the CPU. Whether a build gives them a part is decided by\n\
         costs, or by `[placement]`; `moec explain` says which unit runs which part of a bundle, and why.\n\n| `--like` |",
    );
    for (target, unit) in units::TARGETS {
        let _ = write!(out, " `{target}`: {unit} |");
    }
    let _ = writeln!(out, "\n|---|{}", "---|".repeat(units::TARGETS.len()));
    for like in Like::value_variants() {
        let _ = writeln!(out, "| `{}` | {} |", name(*like), units::cells(*like)?.join(" | "));
    }
    Ok(())
}

/// The name on the command line.
fn name(like: Like) -> String {
    like.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// Limits of some families: parts that are not read, or that some units do not compute.
const LIMITS: &str = "
## Limits of some families

- **Mistral Small 4, Llama 4, Step 3.7** and other multimodal models are read as text models: vision tensors are skipped, with a note.
- **Llama 4:** one expert per token. Attention over chunks and queries that grow with their positions are computed by CPUs and GPUs; a graph of an
  NPU has neither, and a placement that requests one is refused by name.
- **Step 3.5 and 3.7:** no instruction of NDP DIMMs bounds a network after its activation; the experts stay on the CPU. Layers that predict several
  tokens at once are skipped.
- **LongCat-Flash:** a layer of the checkpoint is two here. It has zero-computation experts, so that all experts stay on the CPU and in RAM, and
  `moec calibrate` refuses the model.
";

/// The layouts of quantised checkpoints.
const QUANTISED: &str = "
## Quantised checkpoints

Besides f32, bf16 and f16, safetensors checkpoints of every family are read in the layouts below, as `quantization_config` in `config.json`
says. Which matrices are quantised is seen by their tensors, one by one and experts fused into one tensor alike, so that lists of
modules (`ignore`, `modules_to_not_convert`, `targets`) may say anything. `moec inspect` lists the storage formats of a checkpoint.

| `quant_method` | what | tensors of a matrix |
|---|---|---|
| `fp8`, `fbgemm_fp8` | E4M3 with a scale for a block of any size (`weight_block_size`), an output channel, or the tensor | `weight`, `weight_scale_inv` or `weight_scale` |
| `mxfp4` | MXFP4 of gpt-oss | `…_blocks`, `…_scales` |
| `compressed-tensors` | `pack-quantized` of 2, 4 and 8 bits, with zero points and `actorder` | `weight_packed`, `weight_scale`, `weight_zero_point`, `weight_g_idx` |
| | `int-quantized`, `float-quantized` (E4M3), `naive-quantized` | `weight`, `weight_scale`, `weight_zero_point` |
| | `nvfp4-pack-quantized`, `mxfp4-pack-quantized` | `weight_packed`, `weight_scale`, `weight_global_scale` |
| `modelopt` | `FP8`, `FP8_PER_CHANNEL_PER_TOKEN`, `FP8_PB_WO`, `NVFP4` | `weight`, `weight_scale`, `weight_scale_2` |
| `awq` | 4 bits, `version` `gemm` | `qweight`, `qzeros`, `scales` |
| `gptq` | 2, 4 and 8 bits, `checkpoint_format` `gptq` and `gptq_v2`, `desc_act` | `qweight`, `qzeros`, `scales`, `g_idx` |

Numbers are those that the tool of the layout gives when it dequantises to f32, equal to the bit (`golden/quantised`); tools that
compute in 16 bits round each product once more. Weights alone are quantised here: scales of activations and caches are not used, and a
build says so. INT4 and INT8 of compressed-tensors without zero points, in groups of 32 input channels or a multiple, are stored as `q4h` and
`q8h` without rounding where their scales are numbers of f16; so are AWQ and GPTQ where all codes less their zero points are in −8 … 7 or
−128 … 127. MXFP4 is `mxfp4`. Everything else is decoded, and rounded to the format that is requested. Other methods, sparsity
(`sparsity_config`), rotations (`transform_config`), bits that differ by module (`dynamic`) and other versions are refused by name.
";

/// Peculiarities of families with ReLU.
const RELU: &str = "
## Models with ReLU

Most neurons of these are 0 for most tokens, which engines such as PowerInfer make use of. `g` and `u` are a network's gate and up
projections.

- **SmallThinker:** `relu(g) · u`. A layer's router reads the layer's input, before any norm. The experts with
  the largest logits are chosen; their weights are a softmax of these logits where `moe_primary_router_apply_softmax` is true,
  else their sigmoids divided by the sum of these. Layers with 0 in `rope_layout` are not rotated; those with 1 in
  `sliding_window_layout` see `sliding_window_size` tokens, their own included. The predictor of the head, which some engines
  load from a file of its own, is not read.
- **TurboSparse-Mixtral:** Mixtral with `relu(g) · relu(u)`. **Bamboo** and TurboSparse-Mistral: Mistral's layers with the
  same. Predictors of neurons that a checkpoint has (`….predictor.…`) are not used, and the build says so: the published code
  of TurboSparse-Mistral multiplies by its predictor's output, 0 or 1, so its results differ if the predictor errs.
- **ProSparse-Llama:** Llama with `g · u` where `g ≥ hidden_act_param`, else 0 (FATReLU). `shiftrelu` is refused.

Bamboo and ProSparse-Llama have no experts: keys of a `model.toml` that require experts, such as `big_little`, are errors.
Their networks count as attention for formats and placement.
";
