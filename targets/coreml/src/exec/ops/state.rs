//! Operators that read and write states.

use super::super::States;
use super::super::call::Call;
use super::super::error::Fault;
use super::super::table::Results;
use super::super::tensor::Tensor;
use std::sync::Arc;

/// `read_state`: the state as the last write left it.
pub(in super::super) fn read(call: &Call<'_>, states: &States) -> Results {
    let (name, _) = call.state("input")?;
    Ok(vec![Arc::clone(states.0.get(name).ok_or(Fault::Missing("input"))?)])
}

fn write(
    call: &Call<'_>,
    states: &mut States,
    state: &'static str,
    value: &'static str,
) -> Result<Arc<Tensor>, Fault> {
    let (name, ty) = call.state(state)?;
    let value_of = call.tensor(value)?;
    if value_of.ty() != *ty {
        return Err(Fault::argument(value, format!("{} for a state of {ty}", value_of.ty())));
    }
    states.0.insert(name.to_owned(), Arc::clone(&value_of));
    Ok(value_of)
}

/// `write_state`: the state becomes `data`.
pub(in super::super) fn write_state(call: &Call<'_>, states: &mut States) -> Results {
    write(call, states, "input", "data")?;
    Ok(Vec::new())
}

/// `coreml_update_state`: the state becomes `value`, which is also the result.
pub(in super::super) fn update(call: &Call<'_>, states: &mut States) -> Results {
    Ok(vec![write(call, states, "state", "value")?])
}
