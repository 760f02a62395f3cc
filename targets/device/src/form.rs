//! Form of a unit's graphs, and assumptions about its memory.
#![expect(
    clippy::cast_possible_truncation,
    reason = "a number of a device file becomes a whole one; floats saturate"
)]

use crate::Figure;
use serde::{Deserialize, Serialize};

/// Bytes of a number that a graph computes with: f16.
pub const NUMBER_BYTES: usize = 2;

/// Something that is chosen for a unit, with the reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Choice<T> {
    /// The choice.
    pub value: T,
    /// Reason: a document with its page, or how it was measured.
    pub source: String,
}

/// Formats in which a graph may hold the weights of its convolutions, besides f16.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StoredFormat {
    /// Bytes, a scale for each 32 input channels.
    Q8,
    /// Four bits, with one scale for each 32 input channels.
    Q4,
}

impl StoredFormat {
    /// The format of codes with this many bits.
    pub const fn of_bits(bits: usize) -> Option<Self> {
        match bits {
            8 => Some(Self::Q8),
            4 => Some(Self::Q4),
            _ => None,
        }
    }
}

/// Bytes that the limit on a graph counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Counted {
    /// The bytes that the package stores.
    Stored,
    /// The bytes that its weights have in f16, whatever they are stored as.
    #[default]
    Dense,
}

/// Method of writing a prompt's chunk to the KV cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CacheWrite {
    /// Product with a matrix of zeros and ones, at any position.
    #[default]
    Product,
    /// `slice_update` at constant positions: one function for every position where a chunk can begin, and the
    /// product for rows that begin elsewhere.
    SliceUpdate,
}

/// Form of a unit's graphs. Without a key, nothing is assumed, and graphs are written in the simplest form.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GraphForm {
    /// Bytes to which the last axis of a tensor is padded. If that is more than the size of a number, tensors
    /// inside of a graph are `[1, channels, 1, rows]`. None of them may then have a last axis of 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_axis_bytes: Option<Figure>,
    /// Bytes that the rows of a graph's inputs, results and states are multiples of: entries of their first
    /// axis.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub row_bytes: Option<Figure>,
    /// Formats of weights besides f16.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weights: Option<Choice<Vec<StoredFormat>>>,
    /// Bytes that the limit on a graph counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub counted: Option<Choice<Counted>>,
    /// Method of writing the KV cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_write: Option<Choice<CacheWrite>>,
}

impl GraphForm {
    /// Whether no key is there.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Bytes to which the last axis of a tensor is padded; without a key, those of a number.
    pub fn last_axis(&self) -> usize {
        self.last_axis_bytes.as_ref().map_or(NUMBER_BYTES, |f| f.value as usize)
    }

    /// Bytes that rows at the boundary of a graph are multiples of; without a key, those of a number.
    pub fn row_bytes(&self) -> usize {
        self.row_bytes.as_ref().map_or(NUMBER_BYTES, |f| f.value as usize)
    }

    /// Bytes that a tensor of f16 takes in the unit's memory, what pads its last axis included.
    pub fn tensor_bytes(&self, shape: &[usize]) -> u64 {
        let (last, outer) = shape.split_last().map_or((1, shape), |(last, outer)| (*last, outer));
        let row = last.saturating_mul(NUMBER_BYTES).next_multiple_of(self.last_axis().max(NUMBER_BYTES));
        outer.iter().fold(row as u64, |n, &d| n.saturating_mul(d as u64))
    }

    /// Whether weights may be stored in a format.
    pub fn stores(&self, format: StoredFormat) -> bool {
        self.weights.as_ref().is_some_and(|w| w.value.contains(&format))
    }

    /// Bytes that the limit on a graph counts.
    pub fn counted(&self) -> Counted {
        self.counted.as_ref().map(|c| c.value).unwrap_or_default()
    }

    /// Method of writing the KV cache.
    pub fn cache_write(&self) -> CacheWrite {
        self.cache_write.as_ref().map(|c| c.value).unwrap_or_default()
    }

    /// Keys that are there: name, value as it is written, source.
    pub fn rows(&self) -> Vec<(&'static str, String, &str)> {
        fn row<'a, T: Serialize>(
            key: &'static str,
            of: Option<&'a Choice<T>>,
        ) -> Option<(&'static str, String, &'a str)> {
            let Choice { value, source } = of?;
            Some((key, toml::Value::try_from(value).map(|v| v.to_string()).unwrap_or_default(), source))
        }
        let bytes = [("last_axis_bytes", &self.last_axis_bytes), ("row_bytes", &self.row_bytes)];
        let bytes = bytes
            .into_iter()
            .filter_map(|(key, figure)| figure.as_ref().map(|f| (key, f.value.to_string(), &*f.source)));
        let rest = [
            row("weights", self.weights.as_ref()),
            row("counted", self.counted.as_ref()),
            row("cache_write", self.cache_write.as_ref()),
        ];
        bytes.chain(rest.into_iter().flatten()).collect()
    }

    /// Keys with their sources.
    pub(crate) fn sources(&self) -> impl Iterator<Item = (&'static str, f64, &str)> {
        let last = self.last_axis_bytes.iter().map(|f| ("unit.graph.last_axis_bytes", f.value, &*f.source));
        let row = self.row_bytes.iter().map(|f| ("unit.graph.row_bytes", f.value, &*f.source));
        let weights = self.weights.iter().map(|c| ("unit.graph.weights", 0.0, &*c.source));
        let counted = self.counted.iter().map(|c| ("unit.graph.counted", 0.0, &*c.source));
        let written = self.cache_write.iter().map(|c| ("unit.graph.cache_write", 0.0, &*c.source));
        last.chain(row).chain(weights).chain(counted).chain(written)
    }

    /// Error of the form, if it has one: the key, and the expected value.
    pub(crate) fn fault(&self) -> Option<(&'static str, String)> {
        let figures = [
            ("unit.graph.last_axis_bytes", &self.last_axis_bytes),
            ("unit.graph.row_bytes", &self.row_bytes),
        ];
        figures.into_iter().find_map(|(key, figure)| {
            let value = figure.as_ref()?.value;
            let fine = value >= NUMBER_BYTES as f64 && value <= 4096.0 && value % NUMBER_BYTES as f64 == 0.0;
            let message = format!("{value} is not a multiple of {NUMBER_BYTES} from {NUMBER_BYTES} to 4096");
            (!fine).then_some((key, message))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_axis_of_one_occupies_its_padded_size() {
        let form = |value: f64| GraphForm {
            last_axis_bytes: Some(Figure { value, source: "a test".into() }),
            ..GraphForm::default()
        };
        assert_eq!(GraphForm::default().tensor_bytes(&[64, 4096, 1, 1]), 64 * 4096 * 2);
        assert_eq!(form(64.0).tensor_bytes(&[64, 4096, 1, 1]), 64 * 4096 * 64);
        assert_eq!(form(64.0).tensor_bytes(&[1, 4096, 1, 64]), 64 * 4096 * 2);
        assert_eq!(form(64.0).tensor_bytes(&[]), 64);
        let rows = |value: f64| GraphForm {
            row_bytes: Some(Figure { value, source: "a test".into() }),
            ..GraphForm::default()
        };
        assert_eq!(rows(3.0).fault().map(|f| f.0), Some("unit.graph.row_bytes"));
        assert_eq!((rows(16.0).fault(), rows(16.0).row_bytes(), form(64.0).row_bytes()), (None, 16, 2));
        assert!(form(3.0).fault().is_some() && form(0.0).fault().is_some() && form(64.0).fault().is_none());
    }
}
