//! `cargo xtask notices`: the licences of the crates that are linked into programs which are handed out.
//!
//! Every bundle carries those of its `run` ([`OF_RUN`]), and `cargo xtask dist` packs those of moec.

use crate::shell::{Failed, cargo, output, program, root, stage};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs};

/// The notices of `run`, which travel in `runner/` of every bundle.
const OF_RUN: &str = "compiler/bundle/runner/THIRD-PARTY.txt";
/// Targets of bundles.
const TARGETS: [&str; 3] = ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu", "aarch64-apple-darwin"];
/// Prefixes of the names of files with licences, in lower case.
const FILES: [&str; 6] = ["license", "licence", "copying", "copyright", "notice", "unlicense"];

const HEAD: &str = "Licences of third parties

Parts of this program are the crates of the following list. Each is under its own licence, whose text stands below the list; a crate
that offers MIT beside other licences is used under MIT. The standard library of Rust, by the Rust project's developers
(https://www.rust-lang.org), is used under MIT, too.
";

/// Writes the notices of `run`.
pub(crate) fn run() -> Result<(), Failed> {
    let path = root().join(OF_RUN);
    fs::write(&path, text(&linked_into_run()?)?)
        .map_err(|e| Failed::new(format!("`{OF_RUN}` cannot be written: {e}")))?;
    stage("Wrote", OF_RUN);
    Ok(())
}

/// A crate of others.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Crate {
    pub(crate) name: String,
    pub(crate) version: String,
    /// Licence in its manifest: an SPDX expression, or names between slashes.
    pub(crate) licence: String,
}

/// The crates of others that are linked into a `run`: into the part that is precompiled, and into what drives
/// units (`targets/*/unit`).
fn linked_into_run() -> Result<Vec<Crate>, Failed> {
    let manifest = fs::read_to_string(root().join("Cargo.toml"))
        .map_err(|e| Failed::new(format!("`Cargo.toml` cannot be read: {e}")))?;
    let folders = manifest.split('"').filter_map(|part| part.strip_prefix("targets/")?.strip_suffix("/unit"));
    let units: BTreeSet<String> = folders.map(|backend| format!("moec-{backend}-unit")).collect();
    let packages = units.iter().map(String::as_str).chain(["moec-prebuilt"]);
    linked(&packages.collect::<Vec<_>>(), &TARGETS)
}

/// The crates of others that are linked into packages of the workspace, for targets, or for this machine
/// where none is given.
pub(crate) fn linked(packages: &[&str], targets: &[&str]) -> Result<Vec<Crate>, Failed> {
    tree(
        cargo("tree", None)
            .args(["-e", "normal,no-proc-macro"])
            .args(packages.iter().flat_map(|package| ["-p", package]))
            .args(targets.iter().flat_map(|target| ["--target", target])),
    )
}

/// The crates of others that `cargo tree` lists.
pub(crate) fn tree(command: &mut std::process::Command) -> Result<Vec<Crate>, Failed> {
    command.args(["--locked", "--prefix", "none", "--format", "{p}\t{l}"]);
    let listing = output(command)
        .ok_or_else(|| Failed::new("cargo cannot list the crates").hint("`cargo tree --locked` says why"))?;
    let crates: BTreeSet<Crate> = listing.lines().filter_map(parsed).collect();
    Ok(crates.into_iter().collect())
}

/// `name v1.2.3 (proc-macro)\tMIT (*)`; none where the crate is of this tree.
fn parsed(line: &str) -> Option<Crate> {
    let (package, licence) = line.split_once('\t')?;
    let mut words = package.split(' ');
    let (name, version) = (words.next()?, words.next()?.strip_prefix('v')?);
    let own = words.next().is_some_and(|word| word.starts_with("(/"));
    (!own).then(|| Crate {
        name: name.to_owned(),
        version: version.to_owned(),
        licence: licence.trim_end_matches(" (*)").to_owned(),
    })
}

/// The list of crates and the texts of their licences, each text once.
pub(crate) fn text(crates: &[Crate]) -> Result<String, Failed> {
    let folders = sources()?;
    let mut notices = HEAD.to_owned();
    // By the text without its line breaks, which differ between copies.
    let mut texts: BTreeMap<String, (String, Vec<String>)> = BTreeMap::new();
    for of in crates {
        let name = format!("{} {}", of.name, of.version);
        let folder =
            folders.iter().map(|f| f.join(format!("{}-{}", of.name, of.version))).find(|f| f.is_dir());
        let folder = folder.ok_or_else(|| {
            Failed::new(format!("the sources of {name} are not here")).hint("`cargo fetch` brings them")
        })?;
        let files = licences(&folder, &of.licence)?;
        let without = if files.is_empty() { "; its package has no text of it" } else { "" };
        // Writing to a string does not fail.
        let _ = write!(notices, "\n  {name}: {}{without}", of.licence);
        for text in files {
            let key = text.split_whitespace().collect::<Vec<_>>().join(" ");
            texts.entry(key).or_insert((text, Vec::new())).1.push(name.clone());
        }
    }
    notices.push('\n');
    let mut texts: Vec<(String, Vec<String>)> = texts.into_values().collect();
    texts.sort_by(|a, b| a.1.cmp(&b.1).then(a.0.cmp(&b.0)));
    for (text, mut names) in texts {
        names.dedup();
        notices += &section(&names.join(", "), &text);
    }
    Ok(notices)
}

/// The text of a licence below the names of its crates.
pub(crate) fn section(names: &str, text: &str) -> String {
    format!("\n{}\n{names}\n\n{}\n", "-".repeat(80), text.trim())
}

/// The texts of a crate that must be kept: MIT's if offered, and notices; else all.
fn licences(folder: &Path, licence: &str) -> Result<Vec<String>, Failed> {
    let failed = |path: &Path, e| Failed::new(format!("cannot read `{}`: {e}", path.display()));
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).map_err(|e| failed(folder, e))?.flatten() {
        let name = entry.file_name().to_string_lossy().to_lowercase();
        if entry.path().is_file() && FILES.iter().any(|start| name.starts_with(start)) {
            files.push((name, entry.path()));
        }
    }
    files.sort();
    if offers_mit(licence) && files.iter().any(|(name, _)| name.contains("mit")) {
        files.retain(|(name, _)| name.contains("mit") || name.starts_with("notice"));
    }
    let read = |path: &Path| fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).replace('\r', ""));
    files.iter().map(|(_, path)| read(path).map_err(|e| failed(path, e))).collect()
}

/// Whether MIT is one of the licences to choose from.
fn offers_mit(licence: &str) -> bool {
    !licence.contains(" AND ") && licence.replace('/', " OR ").split(" OR ").any(|one| one.trim() == "MIT")
}

/// Folders where cargo unpacks crates of registries.
fn sources() -> Result<Vec<PathBuf>, Failed> {
    let home = env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| env::home_dir().map(|home| home.join(".cargo")));
    let registry = home.unwrap_or_default().join("registry/src");
    let entries = fs::read_dir(&registry).map_err(|e| {
        Failed::new(format!("cannot read `{}`: {e}", registry.display())).hint("`cargo fetch` fills it")
    })?;
    Ok(entries.flatten().map(|entry| entry.path()).collect())
}

/// Licences, by Debian, of the packages that files belong to: of libraries that are linked into a program.
pub(crate) fn of_system(files: &[PathBuf]) -> Result<String, Failed> {
    let mut notices = String::new();
    let mut packages = BTreeSet::new();
    for file in files {
        let owner = output(program("dpkg").arg("-S").arg(file))
            .and_then(|line| Some(line.split_once(':')?.0.to_owned()))
            .ok_or_else(|| {
                Failed::new(format!(
                    "no package has `{}`, whose licence belongs to the program",
                    file.display()
                ))
                .hint("`dpkg -S` must know it: install it from Debian or Ubuntu")
            })?;
        packages.insert(owner);
    }
    for package in packages {
        let path = Path::new("/usr/share/doc").join(&package).join("copyright");
        let text =
            fs::read(&path).map_err(|e| Failed::new(format!("cannot read `{}`: {e}", path.display())))?;
        let text = String::from_utf8_lossy(&text).into_owned();
        notices += &section(&format!("{package}, linked statically"), &text);
    }
    Ok(notices)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cargo_output_lines_are_parsed() {
        let of = |name: &str, version: &str, licence: &str| {
            Some(Crate { name: name.into(), version: version.into(), licence: licence.into() })
        };
        assert_eq!(
            parsed("ahash v0.8.12\tMIT OR Apache-2.0 (*)"),
            of("ahash", "0.8.12", "MIT OR Apache-2.0")
        );
        assert_eq!(parsed("serde_derive v1.0.1 (proc-macro)\tMIT"), of("serde_derive", "1.0.1", "MIT"));
        assert_eq!(parsed("moec-ir v0.1.0 (/moec/ir)\tMIT OR Apache-2.0"), None);
        assert_eq!(parsed(""), None);
    }

    #[test]
    fn mit_is_chosen_where_it_is_offered() {
        for licence in ["MIT", "MIT/Apache-2.0", "Apache-2.0 / MIT", "Zlib OR Apache-2.0 OR MIT"] {
            assert!(offers_mit(licence), "{licence}");
        }
        for licence in ["MIT AND BSD-3-Clause", "(MIT OR Apache-2.0) AND Unicode-3.0", "MIT-0", "ISC"] {
            assert!(!offers_mit(licence), "{licence}");
        }
    }

    /// `cargo xtask notices` updates the notices.
    #[test]
    fn notices_in_bundles_name_every_crate_of_run() {
        let text = fs::read_to_string(root().join(OF_RUN)).unwrap();
        let listed: BTreeSet<&str> = text.lines().filter_map(|line| line.strip_prefix("  ")).collect();
        for of in linked_into_run().unwrap() {
            let row = format!("{} {}: {}", of.name, of.version, of.licence);
            assert!(
                listed.iter().any(|line| line.split(';').next() == Some(&row)),
                "{OF_RUN} does not list `{row}`: run `cargo xtask notices`"
            );
        }
    }
}
