//! `cargo xtask docs`: the pages of `docs/` that moec itself writes.

use crate::setup;
use crate::shell::{Failed, cargo, output, root, stage};

/// Writes every page.
pub(crate) fn run() -> Result<(), Failed> {
    let llvm = setup::run()?;
    let moec = |args: &[&str]| {
        let mut command = cargo("run", Some(&llvm));
        command.args(["--quiet", "--package", "moec", "--"]).args(args);
        output(&mut command).ok_or_else(|| {
            Failed::new("moec does not run").hint("`cargo run --package moec -- docs` says why")
        })
    };
    stage("Building", "moec");
    let folder = root().join("docs");
    for page in moec(&["docs"])?.lines() {
        let text = moec(&["docs", page])?;
        let path = folder.join(page);
        std::fs::create_dir_all(&folder)
            .and_then(|()| std::fs::write(&path, text + "\n"))
            .map_err(|e| Failed::new(format!("`docs/{page}` cannot be written: {e}")))?;
        stage("Wrote", &format!("docs/{page}"));
    }
    Ok(())
}
