//! The artifacts of a unit: its kernels as PTX, and as machine code where the build had NVIDIA's assembler.

use moec_ir::plan::{GpuKernel, Plan};
use moec_runtime::bundle::BundleReader;
use moec_runtime::platform::regular;
use moec_runtime::{Error, Result};

/// The kernels of a unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Artifact {
    /// Path of the text, relative to the bundle.
    pub path: String,
    /// PTX.
    pub text: String,
    /// Machine code by the assembler for the generation of the text, if it is there.
    pub code: Option<Vec<u8>>,
}

/// Path of the machine code of a text: `artifacts/UNIT.cubin` of `artifacts/UNIT.ptx`.
pub fn code_path(text: &str) -> String {
    format!("{}.cubin", text.strip_suffix(".ptx").unwrap_or(text))
}

/// Reads the artifact of a unit, by its index in the plan.
///
/// # Errors
/// An artifact that is missing, not as it was built, or cannot be read; kernels of one unit in several.
pub fn read(bundle: &BundleReader, plan: &Plan, unit: u32) -> Result<Artifact> {
    let name = plan.units.get(unit as usize).map_or("?", |u| &*u.name);
    let own = || plan.launches.iter().filter(|k| k.unit == unit);
    let Some(first) = own().next() else {
        return Err(Error::plan(format!("`{name}` launches no kernel")));
    };
    if let Some(other) = own().find(|k| k.artifact != first.artifact) {
        return Err(Error::plan(format!(
            "`{name}` launches kernels of `{}` and of `{}`",
            first.artifact, other.artifact
        )));
    }
    let path = first.artifact.clone();
    let text = bundle.read(&path, regular::PTX)?;
    let text = String::from_utf8(text).map_err(|_| Error::plan(format!("`{path}` is not text")))?;
    // A plan that lists the code needs it; one that does not ignores it, whatever is in the folder.
    let code_at = code_path(&path);
    let listed = plan.files.iter().any(|f| f.path == code_at);
    let code = listed.then(|| bundle.read(&code_at, regular::PTX)).transpose()?;
    Ok(Artifact { path, text, code })
}

impl Artifact {
    /// The generation that it is for: `sm_90`.
    pub fn generation(&self) -> Option<&str> {
        let target = self.text.lines().find_map(|l| l.trim().strip_prefix(".target "))?;
        target.split([',', ' ']).next()
    }

    /// Whether the text has a kernel with the parameters of the plan: this many addresses, and a number of
    /// rows.
    ///
    /// # Errors
    /// The missing kernel or parameter, for people.
    pub fn check(&self, kernel: &GpuKernel) -> Result<(), String> {
        let missing = || format!("there is no kernel of that name in `{}`", self.path);
        let begins = |text: &str| text.trim_start().starts_with('(');
        let mut found = self.text.match_indices(".entry ").filter_map(|(at, word)| {
            let rest = self.text[at + word.len()..].trim_start().strip_prefix(&*kernel.symbol)?;
            begins(rest).then_some(rest)
        });
        let rest = found.next().ok_or_else(missing)?;
        let (parameters, _) = rest.split_once(')').ok_or_else(missing)?;
        let of =
            |ty: &str| parameters.split(',').filter(|p| p.split_whitespace().any(|word| word == ty)).count();
        let (addresses, rows, all) = (of(".u64"), of(".u32"), parameters.split(',').count());
        if (addresses, rows, all) == (kernel.operands as usize, 1, addresses + rows) {
            return Ok(());
        }
        Err(format!(
            "it takes {all} parameters, {addresses} of them addresses, not {} addresses and a number of rows",
            kernel.operands
        ))
    }
}

/// Whether machine code is an ELF file that has everything of which its head speaks.
pub(crate) fn is_whole(code: &[u8]) -> bool {
    /// Sections without bytes in the file.
    const EMPTY: u64 = 8;
    let number = |at: u64, bytes: usize| -> Option<u64> {
        let at = usize::try_from(at).ok()?;
        let bytes = code.get(at..at.checked_add(bytes)?)?;
        Some(bytes.iter().rev().fold(0, |n, &b| n << 8 | u64::from(b)))
    };
    let inside = |at: u64, bytes: u64| at.checked_add(bytes).is_some_and(|end| end <= code.len() as u64);
    // Places in the head that describe the tables of segments and of sections: their start, the bytes of a
    // row, the rows.
    let tables = [(32, 54, 56), (40, 58, 60)].map(|(at, each, count)| {
        let (at, each, count) = (number(at, 8)?, number(each, 2)?, number(count, 2)?);
        inside(at, each * count).then_some((at, each, count))
    });
    let [Some(_), Some((sections, each, count))] = tables else { return false };
    code.starts_with(b"\x7fELF\x02")
        && (0..count).all(|i| {
            let row = sections + i * each;
            let of = [(4, 4), (24, 8), (32, 8)].map(|(at, bytes)| number(row + at, bytes));
            matches!(of, [Some(kind), Some(at), Some(bytes)] if kind == EMPTY || inside(at, bytes))
        })
}
