//! Takes quantised weights out of a checkpoint.

use super::{LayoutSpec, Packing, decode, named};
use crate::tensors::{Dim, Tensors};
use moec_base::error::{Error, Result};
use moec_ir::{Coded, Encoding, Leaf, WeightExpr};

/// A quantised weight that is being read.
struct Weight<'a> {
    tensors: &'a Tensors<'a>,
    layout_spec: &'a LayoutSpec,
    name: &'a str,
    /// Name of the codes.
    codes: &'a str,
    /// Axes before the two of a matrix.
    outer: &'a [&'a Dim],
}

impl Tensors<'_> {
    /// Reads a weight of this decoded shape as codes with their scales and other factors.
    ///
    /// # Errors
    /// Fails if tensors are missing or do not fit.
    pub(crate) fn take_quantised(
        &self,
        layout_spec: &LayoutSpec,
        name: &str,
        codes: String,
        want: &[&Dim],
    ) -> Result<WeightExpr> {
        let (layout, bits) = (layout_spec.layout, layout_spec.bits);
        let [outer @ .., out, input] = want else {
            return Err(Error::bug(format!("tensor `{codes}` has no rows")));
        };
        let block = [layout_spec.block[0].unwrap_or(out.n), layout_spec.block[1].unwrap_or(input.n)];
        if block[0] == 1 && !input.n.is_multiple_of(block[1]) {
            return Err(Error::input(format!("tensor `{codes}` cannot hold rows of {} numbers", input.n))
                .because(format!(
                    "{} has groups of {}, and {} sets the rows",
                    layout_spec.title(),
                    block[1],
                    input.why
                )));
        }
        // From here on, rows and columns are those of the tensors.
        let (matrix, block) =
            if layout.transposed { ([*input, *out], [block[1], block[0]]) } else { ([*out, *input], block) };
        let blocks = [matrix[0].blocks(block[0]), matrix[1].blocks(block[1])];
        let weight = Weight { tensors: self, layout_spec, name, codes: &codes, outer };
        let words = layout.codes.words_of(bits, matrix.map(Clone::clone));
        let words: Vec<Dim> = match (layout.split, words) {
            (Some(bytes), [rows, cols]) => {
                vec![rows, cols.blocks(bytes), Dim::new(bytes, format!("{}'s block", layout_spec.title()))]
            }
            (None, words) => words.into(),
        };
        self.typed(&codes, &weight.with_leading_axes(&words), &[layout.codes.dtype])?;
        let scales = weight.scales(&blocks)?;
        let zeros = match &layout.zeros {
            Some(of) => {
                let words = of.words_of(bits, blocks.clone());
                weight.further(
                    "zero points",
                    of.suffix,
                    layout_spec.zeros,
                    &weight.with_leading_axes(&words),
                    &[of.dtype],
                )?
            }
            None => None,
        };
        let factor = match &layout.factor {
            Some(of) => {
                let tensor = named(name, of.suffix);
                // One factor for all matrices is enough.
                let one = self.shape(&tensor).is_some_and(|shape| shape.iter().all(|&n| n == 1));
                let shape = if one { Vec::new() } else { weight.with_leading_axes(&[]) };
                weight.further("a global scale", of.suffix, true, &shape, &["F32"])?
            }
            None => None,
        };
        let groups = match layout.groups {
            Some(suffix) => {
                let found =
                    weight.further("groups", suffix, layout_spec.groups, &[(*input).clone()], &["I32"])?;
                let count = if layout.transposed { blocks[0].n } else { blocks[1].n };
                found.map(|tensor| weight.groups(tensor, input.n, count)).transpose()?.flatten()
            }
            None => None,
        };
        if let Some(suffix) = layout.idle {
            self.skip(&named(name, suffix));
        }
        self.count(&codes, want.iter().map(|d| d.n as u64).product());
        let shape = outer.iter().map(|d| d.n).chain(matrix.map(|d| d.n)).collect();
        let coded = Coded { layout: layout.name.to_owned(), bits, block, scales, zeros, factor, groups };
        let leaf = Leaf { tensor: codes, shape, encoding: Encoding::Coded(Box::new(coded)) };
        let leaf = WeightExpr::Leaf(leaf);
        Ok(if layout.transposed { WeightExpr::Transpose(Box::new(leaf)) } else { leaf })
    }
}

impl Packing {
    /// Extents of the words for a matrix of codes.
    fn words_of(&self, bits: u32, [rows, cols]: [Dim; 2]) -> [Dim; 2] {
        let codes = self.codes(bits);
        if self.by_rows() { [rows.blocks(codes), cols] } else { [rows, cols.blocks(codes)] }
    }
}

impl Weight<'_> {
    /// A shape with the axes before those of a matrix.
    fn with_leading_axes(&self, shape: &[Dim]) -> Vec<Dim> {
        self.outer.iter().copied().chain(shape).cloned().collect()
    }

    /// The tensor of this suffix, if it exists, counted as read.
    fn further(
        &self,
        what: &str,
        suffix: &str,
        must: bool,
        want: &[Dim],
        dtypes: &[&str],
    ) -> Result<Option<String>> {
        let tensor = named(self.name, suffix);
        let checkpoint = self.tensors.checkpoint();
        if checkpoint.get(&tensor).is_some() {
            self.tensors.typed(&tensor, want, dtypes)?;
            self.tensors.skip(&tensor);
            return Ok(Some(tensor));
        }
        if !must {
            return Ok(None);
        }
        let (file, title) = (checkpoint.file_of(self.codes), self.layout_spec.title());
        Err(Error::input(format!("tensor `{}` in `{file}` is {title} without {what}", self.codes))
            .because(format!("there is no tensor `{tensor}`"))
            .hint("the download may be incomplete, or `quantization_config` may be that of another model"))
    }

    /// The scales, under the first of their names that exists.
    fn scales(&self, blocks: &[Dim]) -> Result<String> {
        let (suffixes, of) = self.layout_spec.layout.scales;
        let there =
            suffixes.iter().find(|suffix| self.tensors.checkpoint().get(&named(self.name, suffix)).is_some());
        let suffix = there.or(suffixes.first()).copied().unwrap_or_default();
        let dtypes: Vec<&str> = of.iter().map(|of| of.dtype).collect();
        Ok(self
            .further("scales", suffix, true, &self.with_leading_axes(blocks), &dtypes)?
            .unwrap_or_default())
    }

    /// The tensor of groups, unless groups are consecutive.
    fn groups(&self, tensor: String, channels: usize, count: usize) -> Result<Option<String>> {
        let checkpoint = self.tensors.checkpoint();
        let groups = decode::groups(checkpoint, &tensor)?;
        let file = checkpoint.file_of(&tensor);
        if let Some((channel, group)) = groups.iter().enumerate().find(|(_, group)| **group >= count) {
            return Err(Error::input(format!("tensor `{tensor}` in `{file}` is damaged"))
                .because(format!(
                    "it gives input channel {channel} group {group}, and there are {count} groups"
                ))
                .hint("download the checkpoint again"));
        }
        let size = channels / count.max(1);
        if groups.iter().enumerate().all(|(channel, group)| channel / size.max(1) == *group) {
            return Ok(None);
        }
        if self.outer.is_empty() {
            return Ok(Some(tensor));
        }
        Err(Error::limit(format!(
            "tensor `{tensor}` in `{file}` orders the channels of several matrices, which is not supported"
        )))
    }
}
