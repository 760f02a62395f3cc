//! A policy with values for its parameters, and its text: `mrs alpha=0.1 depth=2 bypass=1 per-layer`.

use super::error::CacheError;
use super::experts::ExpertIndex;
use super::policy::Policy;
use super::table::{POLICIES, Parameter, PolicyInfo, Scope};
use std::fmt;
use std::str::FromStr;

/// The word for [`Scope::PerLayer`] in a setting.
const PER_LAYER: &str = "per-layer";

/// A policy with values for its parameters. Its text form names every value; reading it back gives an equal
/// one.
#[derive(Clone, Debug, PartialEq)]
pub struct Setting {
    policy: usize,
    values: Vec<f64>,
    scope: Scope,
}

impl Setting {
    /// The row of the table.
    pub fn info(&self) -> &'static PolicyInfo {
        &POLICIES[self.policy]
    }

    /// Scope that shares the bytes.
    pub fn scope(&self) -> Scope {
        self.scope
    }

    /// LRU shared by all layers.
    pub fn lru() -> Self {
        Self { policy: 0, values: Vec::new(), scope: Scope::Shared }
    }

    pub(super) fn policy(&self, experts: &ExpertIndex, capacity: u64) -> Box<dyn Policy> {
        (self.info().new)(experts, capacity, &self.values)
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.info().name)?;
        for (parameter, value) in self.info().parameters.iter().zip(&self.values) {
            write!(f, " {}={value}", parameter.name)?;
        }
        match self.scope {
            Scope::Shared => Ok(()),
            Scope::PerLayer => write!(f, " {PER_LAYER}"),
        }
    }
}

impl FromStr for Setting {
    type Err = CacheError;

    /// Parses a setting. Parameters that are not named have their default values.
    ///
    /// # Errors
    /// [`CacheError::NoPolicy`], [`CacheError::Setting`].
    fn from_str(text: &str) -> Result<Self, CacheError> {
        let mut words = text.split_whitespace();
        let name = words.next().unwrap_or_default();
        let found = POLICIES.iter().position(|p| p.name == name);
        let policy = found.ok_or_else(|| CacheError::NoPolicy {
            found: name.to_owned(),
            known: POLICIES.iter().map(|p| format!("`{}`", p.name)).collect::<Vec<_>>().join(", "),
        })?;
        let info = &POLICIES[policy];
        let wrong = |what: String| CacheError::Setting { policy: name.to_owned(), what };
        let mut values: Vec<f64> = info.parameters.iter().map(|p| p.grid[0]).collect();
        let mut scope = info.scopes[0];
        for word in words {
            if word == PER_LAYER {
                if !info.scopes.contains(&Scope::PerLayer) {
                    return Err(wrong(format!("it cannot be `{PER_LAYER}`")));
                }
                scope = Scope::PerLayer;
                continue;
            }
            let (key, value) = word.split_once('=').unwrap_or((word, ""));
            let at = info.parameters.iter().position(|p| p.name == key).ok_or_else(|| {
                let known: Vec<_> = info.parameters.iter().map(|p| format!("`{}`", p.name)).collect();
                let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
                wrong(format!("there is no parameter `{key}`; there are {known}"))
            })?;
            let Parameter { least, most, whole, .. } = info.parameters[at];
            let fits = |v: &f64| (least..=most).contains(v) && (!whole || v.fract() == 0.0);
            values[at] = value.parse().ok().filter(fits).ok_or_else(|| {
                let number = if whole { "a whole number" } else { "a number" };
                wrong(format!("`{key}` must be {number} from {least} to {most}, not `{value}`"))
            })?;
        }
        Ok(Self { policy, values, scope })
    }
}
