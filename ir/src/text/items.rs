//! Lines that plans and placements have in common.

use super::attrs::{Attrs, Value};
use super::cursor::{Cursor, Parsed};

/// Reads the index that every numbered line carries; it must be the next one.
pub(super) fn index(c: &mut Cursor<'_>, next: usize) -> Parsed<()> {
    let at = c.at();
    let found: usize = c.int("an index")?;
    if found == next {
        Ok(())
    } else {
        Err(c.error_at(at, format!("expected the index {next}, found {found}")))
    }
}

/// An attribute list whose reader takes every attribute.
pub(super) fn with_attrs<'t, T>(
    c: &mut Cursor<'t>,
    read: impl FnOnce(&Cursor<'t>, &mut Attrs<'t>) -> Parsed<T>,
) -> Parsed<T> {
    let mut attrs = Attrs::braces(c)?;
    let value = read(c, &mut attrs)?;
    attrs.finish(c)?;
    Ok(value)
}

pub(super) fn string(v: Value<'_>) -> Option<String> {
    match v {
        Value::Str(s) => Some(s),
        _ => None,
    }
}
