//! NVIDIA's assembler of PTX, which says what a kernel takes of a multiprocessor.

use moec_codegen::gpu::Sm;
use std::path::Path;
use std::process::Command;

/// Resources of a kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Resources {
    /// Registers of a thread.
    pub(crate) registers: u32,
    /// Bytes of a thread that are written to memory because registers do not suffice.
    pub(crate) spilled: u32,
    /// Bytes of shared memory of a block.
    pub(crate) shared: u32,
}

/// Assembles a module of one kernel and reads what it takes.
pub(crate) fn assemble(ptxas: &Path, sm: Sm, ptx: &str) -> Result<Resources, String> {
    let dir = tempfile::tempdir().map_err(|e| e.to_string())?;
    let text = dir.path().join("kernel.ptx");
    std::fs::write(&text, ptx).map_err(|e| e.to_string())?;
    let out = Command::new(ptxas)
        .args(["-v", "-arch", sm.name(), "-o"])
        .arg(dir.path().join("kernel.cubin"))
        .arg(&text)
        .output()
        .map_err(|e| format!("{}: {e}", ptxas.display()))?;
    let output = String::from_utf8_lossy(&out.stderr).into_owned() + &String::from_utf8_lossy(&out.stdout);
    if !out.status.success() {
        return Err(output);
    }
    let before = |what: &str| {
        let number = output.find(what).and_then(|at| output[..at].trim_end().rsplit([' ', ',']).next());
        number.and_then(|n| n.parse().ok()).unwrap_or(0)
    };
    Ok(Resources {
        registers: before(" registers"),
        spilled: before(" bytes spill stores"),
        shared: before(" bytes smem"),
    })
}
