//! `cargo xtask docs`: the pages of `docs/` that moec and `moec-papers` write.

use crate::setup;
use crate::shell::{Failed, cargo, output, root, shown, stage};

/// Writes every page.
pub(crate) fn run() -> Result<(), Failed> {
    let llvm = setup::run()?;
    let run_crate = |package: &str, args: &[&str]| {
        let mut command = cargo("run", Some(&llvm));
        command.args(["--quiet", "--package", package, "--"]).args(args);
        output(&mut command).ok_or_else(|| {
            Failed::new(format!("{package} does not run")).hint(format!("`{}` says why", shown(&command)))
        })
    };
    stage("Building", "moec");
    let mut pages = Vec::new();
    for page in run_crate("moec", &["docs"])?.lines() {
        pages.push((page.to_owned(), run_crate("moec", &["docs", page])?));
    }
    for (subcommand, page) in [("page", "npumoe.md"), ("mechanisms", "mechanisms.md")] {
        pages.push((page.to_owned(), run_crate("moec-papers", &[subcommand])?));
    }
    let folder = root().join("docs");
    for (page, text) in pages {
        let path = folder.join(&page);
        std::fs::create_dir_all(&folder)
            .and_then(|()| std::fs::write(&path, text + "\n"))
            .map_err(|e| Failed::new(format!("`docs/{page}` cannot be written: {e}")))?;
        stage("Wrote", &format!("docs/{page}"));
    }
    Ok(())
}
