//! The objects of single kernels as one object.

use crate::error::{Error, Result};
use object::read::elf::ElfFile64;
use object::write::{Object, Relocation, SectionId, StandardSection, Symbol, SymbolId, SymbolSection};
use object::{
    BinaryFormat, Endianness, Object as _, ObjectSection as _, ObjectSymbol as _, RelocationTarget,
    SectionFlags, SectionIndex, SectionKind, SymbolFlags, SymbolIndex, SymbolKind, SymbolScope,
};
use std::collections::HashMap;

/// Marks the stack as not executable, as LLVM's own objects do.
const STACK: &[u8] = b".note.GNU-stack";

/// One ELF object with the code, the constants and the symbols of all, in their order. The same objects give
/// the same bytes.
///
/// # Errors
/// [`Error::Bug`] for objects that LLVM does not write for kernels.
pub(crate) fn merge(objects: &[Vec<u8>]) -> Result<Vec<u8>> {
    let files = objects.iter().map(|bytes| ElfFile64::<Endianness>::parse(&**bytes).map_err(Error::bug));
    let files = files.collect::<Result<Vec<_>>>()?;
    let Some(first) = files.first() else { return Err(Error::Bug("there are no objects".to_owned())) };
    let mut out = Object::new(BinaryFormat::Elf, first.architecture(), first.endianness());
    let stack = out.add_section(Vec::new(), STACK.to_vec(), SectionKind::Other);
    out.section_mut(stack).flags = SectionFlags::Elf { sh_flags: 0 };
    let mut undefined = HashMap::new();
    for file in &files {
        add(&mut out, file, &mut undefined)?;
    }
    out.write().map_err(Error::bug)
}

/// Adds an object. `undefined`: symbols that some object needs and none defines, by name.
fn add(
    out: &mut Object<'_>,
    file: &ElfFile64<'_, Endianness>,
    undefined: &mut HashMap<Vec<u8>, SymbolId>,
) -> Result<()> {
    // Start of each section.
    let mut sections: HashMap<SectionIndex, (SectionId, u64)> = HashMap::new();
    for section in file.sections() {
        let id = match section.kind() {
            SectionKind::Text => out.section_id(StandardSection::Text),
            SectionKind::ReadOnlyData | SectionKind::ReadOnlyString => {
                out.section_id(StandardSection::ReadOnlyData)
            }
            _ if section.size() == 0 || !is_loaded(section.flags()) => continue,
            kind => return Err(Error::Bug(format!("kernels have a section of kind {kind:?}"))),
        };
        let data = section.data().map_err(Error::bug)?;
        sections.insert(section.index(), (id, out.append_section_data(id, data, section.align())));
    }

    // Each symbol, and what is added to offsets from it.
    let mut symbols: HashMap<SymbolIndex, (SymbolId, u64)> = HashMap::new();
    for symbol in file.symbols() {
        let section = symbol.section_index().and_then(|index| sections.get(&index).copied());
        let moved = match (symbol.kind(), section) {
            (SymbolKind::File, _) => continue,
            (SymbolKind::Section, Some((id, at))) => (out.section_symbol(id), at),
            (_, Some((id, at))) => {
                let SymbolFlags::Elf { st_info, st_other } = symbol.flags() else { continue };
                let scope = if symbol.is_local() { SymbolScope::Compilation } else { SymbolScope::Dynamic };
                let id = out.add_symbol(Symbol {
                    name: symbol.name_bytes().map_err(Error::bug)?.to_vec(),
                    value: at + symbol.address(),
                    size: symbol.size(),
                    kind: symbol.kind(),
                    scope,
                    weak: symbol.is_weak(),
                    section: SymbolSection::Section(id),
                    flags: SymbolFlags::Elf { st_info, st_other },
                });
                (id, 0)
            }
            (_, None) if symbol.is_undefined() => {
                let name = symbol.name_bytes().map_err(Error::bug)?.to_vec();
                let symbol = Symbol {
                    name: name.clone(),
                    value: 0,
                    size: 0,
                    kind: SymbolKind::Unknown,
                    scope: SymbolScope::Unknown,
                    weak: false,
                    section: SymbolSection::Undefined,
                    flags: SymbolFlags::None,
                };
                (*undefined.entry(name).or_insert_with(|| out.add_symbol(symbol)), 0)
            }
            (..) => continue,
        };
        symbols.insert(symbol.index(), moved);
    }

    for section in file.sections() {
        let Some(&(id, at)) = sections.get(&section.index()) else { continue };
        for (offset, relocation) in section.relocations() {
            let RelocationTarget::Symbol(target) = relocation.target() else {
                return Err(Error::Bug("a relocation has no symbol".to_owned()));
            };
            let (symbol, moved) = *symbols
                .get(&target)
                .ok_or_else(|| Error::Bug("a relocation has an unknown symbol".to_owned()))?;
            let addend = relocation.addend().wrapping_add_unsigned(moved);
            out.add_relocation(
                id,
                Relocation { offset: at + offset, symbol, addend, flags: relocation.flags() },
            )
            .map_err(Error::bug)?;
        }
    }
    Ok(())
}

/// Whether a program has the section in memory.
fn is_loaded(flags: SectionFlags) -> bool {
    matches!(flags, SectionFlags::Elf { sh_flags } if sh_flags & u64::from(object::elf::SHF_ALLOC) != 0)
}
