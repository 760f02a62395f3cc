//! Reads checkpoints without moec's code: the weights that packages must hold.

use super::*;

/// A matrix `[rows, cols]` of a checkpoint, cast to f16.
#[derive(Clone)]
pub(crate) struct Matrix {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) data: Vec<f16>,
}

impl Matrix {
    pub(crate) fn at(&self, row: usize, col: usize) -> f16 {
        self.data[row * self.cols + col]
    }

    pub(crate) fn of(rows: usize, cols: usize, at: impl Fn(usize, usize) -> f16) -> Self {
        let data = (0..rows * cols).map(|i| at(i / cols, i % cols)).collect();
        Self { rows, cols, data }
    }

    pub(crate) fn part(&self, start: usize, rows: usize) -> Self {
        Self::of(rows, self.cols, |r, c| self.at(start + r, c))
    }

    pub(crate) fn transposed(&self) -> Self {
        Self::of(self.cols, self.rows, |r, c| self.at(c, r))
    }

    /// Every second row from `start`.
    pub(crate) fn second(&self, start: usize) -> Self {
        Self::of(self.rows / 2, self.cols, |r, c| self.at(2 * r + start, c))
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.data.iter().flat_map(|x| x.to_le_bytes()).collect()
    }
}

/// A checkpoint, read without moec's code.
pub(crate) struct Weights {
    pub(crate) bytes: Vec<u8>,
    pub(crate) config: Value,
}

impl Weights {
    pub(crate) fn open(family: &str) -> Self {
        let folder = checkpoint(family);
        let config = serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap();
        Self { bytes: fs::read(folder.join("model.safetensors")).unwrap(), config }
    }

    pub(crate) fn number(&self, key: &str) -> usize {
        self.config[key].as_u64().unwrap() as usize
    }

    /// A tensor; if one tensor has the matrices of all experts, `entry` selects one.
    pub(crate) fn find(&self, name: &str, entry: Option<usize>) -> Option<Matrix> {
        let tensors = SafeTensors::deserialize(&self.bytes).unwrap();
        let tensor = tensors.tensor(name).ok()?;
        assert_eq!(tensor.dtype(), Stored::BF16);
        let of_two = tensor.data().chunks_exact(2);
        let all = of_two.map(|b| f16::from_f32(bf16::from_le_bytes([b[0], b[1]]).to_f32()));
        let shape = tensor.shape();
        let cols = *shape.last().unwrap();
        let rows = shape.iter().rev().nth(1).copied().unwrap_or(1);
        let data = all.skip(entry.unwrap_or(0) * rows * cols).take(rows * cols).collect();
        Some(Matrix { rows, cols, data })
    }

    pub(crate) fn matrix(&self, name: &str) -> Matrix {
        self.find(name, None).unwrap_or_else(|| panic!("the checkpoint has no `{name}`"))
    }

    /// The matrices that a package must have; it must not have others.
    pub(crate) fn expected(&self, package: &str, plan: &Plan) -> Vec<Matrix> {
        let words: Vec<&str> = package.split('.').collect();
        let ["layers", layer, part, ref rest @ ..] = *words.as_slice() else {
            assert_eq!(package, "head");
            return vec![self.matrix("lm_head.weight")];
        };
        let at = format!("model.layers.{layer}");
        match part {
            "attn" => self.attention(&format!("{at}.self_attn")),
            "ffn" => self.gated(&format!("{at}.mlp"), ["gate_proj", "up_proj", "down_proj"]).unwrap(),
            "shared" => {
                let of =
                    |name| self.gated(&format!("{at}.mlp.{name}"), ["gate_proj", "up_proj", "down_proj"]);
                of("shared_experts").or_else(|| of("shared_expert")).unwrap()
            }
            _ => {
                let layer: u32 = layer.parse().unwrap();
                let table = plan.placement.experts.iter().find(|t| t.layer == layer).unwrap();
                let group = &table.groups[rest[0].parse::<usize>().unwrap()];
                group.experts.iter().flat_map(|&e| self.expert(&at, e as usize)).collect()
            }
        }
    }

    pub(crate) fn gated(&self, at: &str, names: [&str; 3]) -> Option<Vec<Matrix>> {
        names.iter().map(|name| self.find(&format!("{at}.{name}.weight"), None)).collect()
    }

    pub(crate) fn expert(&self, at: &str, e: usize) -> Vec<Matrix> {
        let of_mlp = || self.gated(&format!("{at}.mlp.experts.{e}"), ["gate_proj", "up_proj", "down_proj"]);
        let of_moe = || self.gated(&format!("{at}.block_sparse_moe.experts.{e}"), ["w1", "w3", "w2"]);
        of_mlp().or_else(of_moe).unwrap_or_else(|| {
            // gpt-oss: transposed, gate and up interleaved.
            let both = self.find(&format!("{at}.mlp.experts.gate_up_proj"), Some(e)).unwrap().transposed();
            let down = self.find(&format!("{at}.mlp.experts.down_proj"), Some(e)).unwrap().transposed();
            vec![both.second(0), both.second(1), down]
        })
    }

    pub(crate) fn attention(&self, at: &str) -> Vec<Matrix> {
        let matrix = |name: &str| self.matrix(&format!("{at}.{name}.weight"));
        if self.find(&format!("{at}.kv_b_proj.weight"), None).is_none() {
            return ["q_proj", "k_proj", "v_proj", "o_proj"].map(matrix).to_vec();
        }
        let mut all = match self.find(&format!("{at}.q_proj.weight"), None) {
            Some(q) => vec![q],
            None => vec![matrix("q_a_proj"), matrix("q_b_proj")],
        };
        all.extend([matrix("kv_a_proj_with_mqa"), matrix("o_proj")]);
        let (nope, v) = (self.number("qk_nope_head_dim"), self.number("v_head_dim"));
        let up = matrix("kv_b_proj");
        for head in 0..self.number("num_attention_heads") {
            let start = head * (nope + v);
            all.extend([up.part(start, nope).transposed(), up.part(start + nope, v)]);
        }
        all
    }
}
