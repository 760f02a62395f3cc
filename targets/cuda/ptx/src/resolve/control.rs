//! Branches, calls, ends and fences.

use super::form::{Form, Resolved};
use crate::code::{Action, Class};
use crate::fault::wrong;
use crate::module::Operand;
use crate::opcode::Opcode;
use crate::types::Type;

/// Scope and order qualifiers of fences: an interpreter orders everything.
const FENCES: [(&str, ()); 10] = [
    ("gl", ()),
    ("cta", ()),
    ("sys", ()),
    ("gpu", ()),
    ("cluster", ()),
    ("sc", ()),
    ("acq_rel", ()),
    ("acquire", ()),
    ("release", ()),
    ("proxy", ()),
];

pub(super) fn resolve(form: &mut Form<'_, '_>) -> Resolved<()> {
    match form.opcode() {
        Opcode::Bra => {
            form.flag("uni");
            form.end(1, 1)?;
            let Operand::Name(name, 0) = form.operand(0)? else {
                return wrong("a branch to no label", "`bra LABEL;`");
            };
            let label = form.build.label(name)?;
            form.emit(Action::Branch(label), Class::Control, 0);
        }
        Opcode::Brx => table(form)?,
        Opcode::Call => {
            form.flag("uni");
            form.end(1, 3)?;
            if form.build.guard.is_some() {
                return wrong("a call that only some threads make", "branch around it");
            }
        }
        Opcode::Ret => {
            form.flag("uni");
            form.end(0, 0)?;
            let end = form.build.end();
            form.emit(Action::Branch(end), Class::Control, 0);
        }
        Opcode::Exit => {
            form.end(0, 0)?;
            form.emit(Action::Exit, Class::Control, 0);
        }
        Opcode::Trap => {
            form.end(0, 0)?;
            form.emit(Action::Trap, Class::Control, 0);
        }
        Opcode::Nanosleep => {
            form.ty(&[Type::U32])?;
            form.end(1, 1)?;
            form.src(0, Type::U32)?;
            form.emit(Action::Nothing, Class::Control, 0);
        }
        _ => {
            let before = form.peek();
            while form.one_of(&FENCES).is_some() {}
            if before.is_none() {
                return form.missing("what is ordered", "`membar.gl`, `fence.acq_rel.gpu`");
            }
            form.end(0, 0)?;
            form.emit(Action::Nothing, Class::Barrier, 0);
        }
    }
    Ok(())
}

/// `brx.idx %r1, TARGETS;`
fn table(form: &mut Form<'_, '_>) -> Resolved<()> {
    form.need("`.idx`", &[("idx", ())])?;
    form.flag("uni");
    form.end(2, 2)?;
    form.src(0, Type::U32)?;
    let Operand::Name(name, 0) = form.operand(1)? else {
        return wrong("a branch to no list of labels", "`brx.idx %r1, TARGETS;`");
    };
    let names = form.build.table(name)?;
    let labels = names.iter().map(|name| form.build.label(name)).collect::<Resolved<Vec<_>>>()?;
    form.emit(Action::BranchTable(labels.into()), Class::Control, 0);
    Ok(())
}
