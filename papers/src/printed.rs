//! Numbers as a paper prints them.

use serde::{Deserialize, Deserializer, de};
use std::fmt;

/// A number as printed, or the two ends of its range.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Printed {
    /// A number.
    Is(f64),
    /// From here to there.
    Within(f64, f64),
    /// More than this.
    Over(f64),
    /// Less than this.
    Below(f64),
}

impl Printed {
    /// The number, or the lower of two.
    pub fn value(self) -> f64 {
        match self {
            Self::Is(x) | Self::Within(x, _) | Self::Over(x) | Self::Below(x) => x,
        }
    }

    /// Distance of a number, as a share: from the number, or from the nearer end of the range that it is
    /// outside of.
    pub fn error(self, found: f64) -> f64 {
        match self {
            Self::Is(x) => found / x - 1.0,
            Self::Over(x) | Self::Within(x, _) if found < x => found / x - 1.0,
            Self::Below(x) | Self::Within(_, x) if found > x => found / x - 1.0,
            Self::Within(..) | Self::Over(_) | Self::Below(_) => 0.0,
        }
    }
}

/// A number, `[from, to]`, `"> x"`, `"< x"`, or `"a / b"` of two numbers that are printed.
impl<'de> Deserialize<'de> for Printed {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Form {
            Number(f64),
            Range([f64; 2]),
            Text(String),
        }
        let text = match Form::deserialize(from)? {
            Form::Number(x) => return Ok(Self::Is(x)),
            Form::Range([from, to]) => return Ok(Self::Within(from, to)),
            Form::Text(text) => text,
        };
        let number = |s: &str| s.trim().parse::<f64>().map_err(|e| de::Error::custom(format!("`{s}`: {e}")));
        if let Some(x) = text.strip_prefix('>') {
            return Ok(Self::Over(number(x)?));
        }
        if let Some(x) = text.strip_prefix('<') {
            return Ok(Self::Below(number(x)?));
        }
        let (a, b) =
            text.split_once('/').ok_or_else(|| de::Error::custom(format!("`{text}` is not a number")))?;
        Ok(Self::Is(number(a)? / number(b)?))
    }
}

impl fmt::Display for Printed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Is(x) => write!(f, "{}", short(*x)),
            Self::Within(a, b) => write!(f, "{a}–{b}"),
            Self::Over(x) => write!(f, "> {x}"),
            Self::Below(x) => write!(f, "< {x}"),
        }
    }
}

/// A number and the printed range that it is checked against, also for a ratio of two printed numbers.
fn short(x: f64) -> f64 {
    (x * 1e3).round() / 1e3
}
