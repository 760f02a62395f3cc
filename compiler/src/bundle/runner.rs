//! The runner crate, whose sources travel inside of moec.
//!
//! `runner/` in a bundle is a workspace of its own: the generated crate, and copies of `moec-runtime` and
//! `moec-ir` under `vendor/`. [`super::cargo`] builds it.

use super::toolchain::{MAC_SCRIPT, deployment_target};
use crate::error::{Error, Result, io_error};
use include_dir::{Dir, include_dir};
use moec_cpu::SourceFile;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use toml::{Table, Value};

static RUNTIME: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/../runtime/src");
static IR: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/../ir/src");
const RUNTIME_MANIFEST: &str = include_str!("../../../runtime/Cargo.toml");
const IR_MANIFEST: &str = include_str!("../../../ir/Cargo.toml");
const WORKSPACE_MANIFEST: &str = include_str!("../../../Cargo.toml");
pub(super) const LOCK: &str = include_str!("../../runner/Cargo.lock");
const MAC_SCRIPT_TEXT: &str = include_str!("../../runner/build.sh.txt");
const BUILD_SCRIPT: &str = include_str!("../../runner/build.rs.txt");

/// Writes the runner crate into `folder`, which is created.
///
/// # Errors
/// A file that cannot be written.
pub fn write_sources(folder: &Path, generated: &[SourceFile]) -> Result<()> {
    for (path, text) in fixed_files()? {
        write(&folder.join(path), text.as_bytes())?;
    }
    for file in generated {
        write(&folder.join(file.path), file.text.as_bytes())?;
    }
    Ok(())
}

/// Writes the script that builds `run` on a Mac into the bundle, if its target is one.
///
/// # Errors
/// A file that cannot be written.
pub fn write_script(bundle: &Path, triple: &str) -> Result<()> {
    let Some(version) = deployment_target(triple) else { return Ok(()) };
    let text = MAC_SCRIPT_TEXT.replace("@VERSION@", &version);
    write(&bundle.join(MAC_SCRIPT), text.as_bytes())
}

/// Removes what another moec left in the cache folder: a module that lies elsewhere by now would be found twice.
pub(super) fn remove_others(folder: &Path, generated: &[SourceFile]) -> Result<()> {
    let fixed = fixed_files()?.into_iter().map(|(path, _)| path);
    let own: BTreeSet<PathBuf> = fixed.chain(generated.iter().map(|f| f.path.into())).collect();
    let mut folders = vec![folder.to_owned()];
    while let Some(at) = folders.pop() {
        for entry in fs::read_dir(&at).map_err(|e| io_error("read", &at, &e))? {
            let entry = entry.map_err(|e| io_error("read", &at, &e))?;
            let path = entry.path();
            if entry.file_type().is_ok_and(|t| t.is_dir()) {
                folders.push(path);
            } else if path.strip_prefix(folder).is_ok_and(|p| !own.contains(p)) {
                fs::remove_file(&path).map_err(|e| io_error("remove", &path, &e))?;
            }
        }
    }
    Ok(())
}

/// Everything but the generated sources: path and text.
fn fixed_files() -> Result<Vec<(PathBuf, String)>> {
    let mut files: Vec<(PathBuf, String)> = vec![
        ("Cargo.toml".into(), root_manifest()?),
        ("Cargo.lock".into(), LOCK.into()),
        ("build.rs".into(), BUILD_SCRIPT.into()),
        ("vendor/moec-runtime/Cargo.toml".into(), vendored_manifest(RUNTIME_MANIFEST)?),
        ("vendor/moec-ir/Cargo.toml".into(), vendored_manifest(IR_MANIFEST)?),
    ];
    for (dir, to) in [(&RUNTIME, "vendor/moec-runtime/src"), (&IR, "vendor/moec-ir/src")] {
        collect(dir, Path::new(to), &mut files);
    }
    files.sort();
    Ok(files)
}

fn collect(dir: &Dir<'static>, to: &Path, files: &mut Vec<(PathBuf, String)>) {
    for file in dir.files() {
        if let Some(text) = file.contents_utf8() {
            files.push((to.join(file.path()), text.into()));
        }
    }
    dir.dirs().for_each(|d| collect(d, to, files));
}

fn parse(manifest: &str) -> Result<Table> {
    manifest.parse().map_err(|e| Error::bug("an embedded manifest is no TOML").because(e))
}

/// A crate's manifest without what only its own tests need.
fn vendored_manifest(manifest: &str) -> Result<String> {
    let mut table = parse(manifest)?;
    for key in ["dev-dependencies", "lints", "bench"] {
        table.remove(key);
    }
    Ok(table.to_string())
}

/// The runner's manifest. It is the root of a workspace that gives the vendored crates what they inherit.
fn root_manifest() -> Result<String> {
    let table = |t: &Table, key: &str| t.get(key).and_then(Value::as_table).cloned().unwrap_or_default();
    let outer = table(&parse(WORKSPACE_MANIFEST)?, "workspace");
    let all = table(&outer, "dependencies");
    let mut dependencies = Table::new();
    for manifest in [RUNTIME_MANIFEST, IR_MANIFEST] {
        let manifest = parse(manifest)?;
        // Some are asked for on one system only (`[target.'cfg(…)'.dependencies]`).
        let targets = table(&manifest, "target");
        let of_targets = targets.values().filter_map(Value::as_table);
        for part in of_targets.chain([&manifest]) {
            for name in table(part, "dependencies").keys() {
                if let Some(value) = all.get(name) {
                    dependencies.insert(name.clone(), value.clone());
                }
            }
        }
    }
    let path = |p: &str| Value::Table(Table::from_iter([("path".to_owned(), Value::String(p.to_owned()))]));
    dependencies.insert("moec-ir".to_owned(), path("vendor/moec-ir"));
    let members = ["vendor/moec-runtime", "vendor/moec-ir"].map(|m| Value::String(m.to_owned()));
    let workspace = Table::from_iter([
        ("members".to_owned(), Value::Array(members.to_vec())),
        ("package".to_owned(), Value::Table(table(&outer, "package"))),
        ("dependencies".to_owned(), Value::Table(dependencies)),
    ]);
    let rest = Table::from_iter([("workspace".to_owned(), Value::Table(workspace))]);
    Ok(format!("{MANIFEST_HEAD}\n{rest}"))
}

const MANIFEST_HEAD: &str = r#"# The binary of one bundle. Generated by moec; do not edit.
[package]
name = "moec-runner"
version = "0.1.0"
edition = "2024"
publish = false

[dependencies]
moec-runtime = { path = "vendor/moec-runtime" }

[profile.release]
panic = "abort"
strip = true
"#;

pub(super) fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).map_err(|e| io_error("create", parent, &e))?;
    }
    // An unchanged file keeps its time, so that cargo does not rebuild what depends on it.
    if fs::read(path).is_ok_and(|old| old == bytes) {
        return Ok(());
    }
    fs::write(path, bytes).map_err(|e| io_error("write", path, &e))
}

#[cfg(test)]
mod tests {
    use super::super::toolchain::cargo;
    use super::*;
    use std::process::Command;

    /// The embedded lock file must be what cargo makes of this workspace's own. `MOEC_BLESS=1` renews it.
    #[test]
    fn the_embedded_lock_file_is_fresh() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let folder = tempfile::tempdir().unwrap();
        write_sources(folder.path(), &[SourceFile { path: "src/main.rs", text: "fn main() {}".into() }])
            .unwrap();
        let lock = folder.path().join("Cargo.lock");
        fs::copy(root.join("Cargo.lock"), &lock).unwrap();
        let offline = Command::new(cargo())
            .current_dir(folder.path())
            .args(["metadata", "--format-version", "1", "--quiet"])
            .output()
            .unwrap();
        assert!(offline.status.success(), "{}", String::from_utf8_lossy(&offline.stderr));
        let fresh = fs::read_to_string(&lock).unwrap();
        if std::env::var_os("MOEC_BLESS").is_some() {
            fs::write(root.join("compiler/runner/Cargo.lock"), &fresh).unwrap();
        } else {
            assert!(fresh == LOCK, "compiler/runner/Cargo.lock is stale; run the test with MOEC_BLESS=1");
        }
    }

    #[test]
    fn what_another_version_left_goes() {
        let folder = tempfile::tempdir().unwrap();
        let generated = [SourceFile { path: "src/main.rs", text: "fn main() {}".into() }];
        write_sources(folder.path(), &generated).unwrap();
        let [old, kept] =
            ["vendor/moec-runtime/src/elsewhere.rs", "src/main.rs"].map(|p| folder.path().join(p));
        fs::write(&old, "").unwrap();
        remove_others(folder.path(), &generated).unwrap();
        assert!(!old.exists() && kept.exists());
        assert!(fixed_files().unwrap().iter().all(|(p, _)| folder.path().join(p).exists()));
    }

    #[test]
    fn what_travels_is_whole_and_points_nowhere() {
        let files = fixed_files().unwrap();
        assert!(files.iter().any(|(p, _)| p == Path::new("vendor/moec-runtime/src/lib.rs")));
        assert!(files.iter().any(|(p, _)| p == Path::new("vendor/moec-ir/src/lib.rs")));
        for (path, text) in files {
            assert!(!text.contains(env!("CARGO_MANIFEST_DIR")), "{} names a checkout", path.display());
        }
    }
}
