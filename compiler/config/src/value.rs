//! A value of a key, and the reason that it is invalid.

use std::ops::RangeInclusive;
use toml::de::DeValue;

/// A value of a key.
pub(super) struct Value<'a>(pub(super) &'a DeValue<'a>);

/// Reason that a value is invalid.
pub(super) enum Wrong {
    /// It does not have this type.
    Type(&'static str),
    /// It is outside the key's range.
    Range,
    /// It will be valid in a later version.
    Unsupported,
}

impl Wrong {
    /// Returns the same reason for a key that also accepts another type.
    pub(super) fn of(self, expected: &'static str) -> Self {
        if let Self::Type(_) = self { Self::Type(expected) } else { self }
    }
}

impl<'a> Value<'a> {
    pub(super) fn text(&self) -> Result<&'a str, Wrong> {
        self.0.as_str().ok_or(Wrong::Type("a string"))
    }

    pub(super) fn texts(&self) -> Result<Vec<&'a str>, Wrong> {
        let wrong = || Wrong::Type("a list of strings");
        let list = self.0.as_array().ok_or_else(wrong)?;
        list.iter().map(|v| v.get_ref().as_str().ok_or_else(wrong)).collect()
    }

    pub(super) fn boolean(&self) -> Result<bool, Wrong> {
        self.0.as_bool().ok_or(Wrong::Type("true or false"))
    }

    pub(super) fn integer<T: TryFrom<usize>>(&self, range: RangeInclusive<usize>) -> Result<T, Wrong> {
        let n = self.0.as_integer().ok_or(Wrong::Type("an integer"))?;
        let n = usize::from_str_radix(n.as_str(), n.radix()).map_err(|_| Wrong::Range)?;
        if range.contains(&n) { T::try_from(n).map_err(|_| Wrong::Range) } else { Err(Wrong::Range) }
    }

    /// Returns a float, or an integer as a float.
    pub(super) fn number(&self, range: RangeInclusive<f64>) -> Result<f64, Wrong> {
        let text = self.0.as_float().map(|x| x.as_str().to_owned());
        let text = text.or_else(|| self.0.as_integer().map(|n| n.as_str().to_owned()));
        let x: f64 = text.ok_or(Wrong::Type("a number"))?.parse().map_err(|_| Wrong::Range)?;
        if range.contains(&x) { Ok(x) } else { Err(Wrong::Range) }
    }

    pub(super) fn integers(&self, range: RangeInclusive<usize>) -> Result<Vec<usize>, Wrong> {
        let list = self.0.as_array().ok_or(Wrong::Type("a list of integers"))?;
        list.iter()
            .map(|v| Value(v.get_ref()).integer(range.clone()))
            .map(|r| {
                r.map_err(|w| if let Wrong::Type(_) = w { Wrong::Type("a list of integers") } else { w })
            })
            .collect()
    }
}
