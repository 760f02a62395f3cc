//! Checkpoints with other sizes than the tiny ones.

use serde_json::Value;
use std::fs;
use std::path::Path;

/// Widths of the residual stream and of the experts, if they differ from the tiny checkpoint's.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wide {
    pub(crate) hidden: usize,
    pub(crate) inner: Option<usize>,
}

impl Wide {
    /// Shape of a tensor at these sizes.
    fn shape(self, name: &str, shape: &[usize]) -> Vec<usize> {
        let mut shape = shape.to_vec();
        let last = shape.len() - 1;
        let ends = |words: &[&str]| words.iter().any(|w| name.ends_with(w));
        // Matrices that write to the residual stream have it in their rows. Projections of a latent do not
        // read it.
        let gives = ends(&[
            "o_proj.weight",
            "out_proj.weight",
            "down_proj.weight",
            "w2.weight",
            ".down.weight",
            "o_proj.bias",
            "layernorm.bias",
            "norm.bias",
        ]);
        let latent = ends(&["kv_b_proj.weight", "q_b_proj.weight"]);
        let other = ends(&[
            "q_norm.weight",
            "k_norm.weight",
            "kv_a_layernorm.weight",
            "q_a_layernorm.weight",
            "conv1d.weight",
        ]) || (last == 0 && !gives && !ends(&["layernorm.weight", "model.norm.weight"]));
        let reads = !other && !latent && !gives && !ends(&["gate_up_proj", "gate_up_proj_bias"]);
        let axis = match () {
            () if gives => Some(0),
            () if ends(&["gate_up_proj"]) => Some(1),
            () if reads => Some(last),
            () => None,
        };
        if let Some(axis) = axis {
            shape[axis] = self.hidden;
        }
        if let Some(inner) = self.inner.filter(|_| name.contains(".experts.") && shape.len() == 2) {
            shape[usize::from(gives)] = inner;
        }
        shape
    }

    /// Writes a checkpoint with these sizes, by repeating another one's numbers with changing signs.
    pub(crate) fn write(self, from: &Path, to: &Path) {
        let bytes = fs::read(from.join("model.safetensors")).unwrap();
        let old = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let mut new: Vec<(String, Vec<usize>, Vec<u8>)> = Vec::new();
        for (name, tensor) in old.tensors() {
            let shape = self.shape(&name, tensor.shape());
            let vector = shape.len() == 1;
            // Sums keep their magnitude.
            let grown =
                shape.iter().product::<usize>() as f32 / tensor.shape().iter().product::<usize>() as f32;
            let scale = if vector { 1.0 } else { grown.sqrt().recip() };
            let count = shape.iter().product::<usize>();
            let mut data = Vec::with_capacity(count * 2);
            for i in 0..count {
                let (mut at, mut rest, mut step) = (0, i, 1);
                for (&now, &was) in shape.iter().zip(tensor.shape()).rev() {
                    at += rest % now % was * step;
                    (rest, step) = (rest / now, step * was);
                }
                let number = f32::from_bits(
                    u32::from(u16::from_le_bytes([tensor.data()[at * 2], tensor.data()[at * 2 + 1]])) << 16,
                );
                let flips = !vector && (i as u32).wrapping_mul(2_654_435_761) >> 31 == 1;
                let number = if flips { -number * scale } else { number * scale };
                data.extend(((number.to_bits() >> 16) as u16).to_le_bytes());
            }
            new.push((name, shape, data));
        }
        let views = new.iter().map(|(name, shape, data)| {
            let view = safetensors::tensor::TensorView::new(safetensors::Dtype::BF16, shape.clone(), data);
            (name.as_str(), view.unwrap())
        });
        fs::write(to.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
        let text = fs::read_to_string(from.join("config.json")).unwrap();
        let mut config: Value = serde_json::from_str(&text).unwrap();
        config["hidden_size"] = self.hidden.into();
        if let Some(inner) = self.inner {
            let key = if config.get("moe_intermediate_size").is_some() {
                "moe_intermediate_size"
            } else {
                "intermediate_size"
            };
            config[key] = inner.into();
        }
        fs::write(to.join("config.json"), config.to_string()).unwrap();
    }
}
