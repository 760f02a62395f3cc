//! The runner crate, whose sources are embedded in moec.
//!
//! `runner/` in a bundle is a workspace of its own with the generated crate. If the crate is to be built from
//! the bundle, `vendor/` has copies of `moec-runtime`, `moec-service`, `moec-ir` and the executors of the
//! bundle's static graphs. [`super::cargo`] builds it.

use super::toolchain::{MAC_SCRIPT, deployment_target};
use include_dir::{Dir, include_dir};
use moec_backend::{Runner, RunnerCrate};
use moec_base::error::{Error, Result, io_error};
use moec_cpu::SourceFile;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use toml::{Table, Value};

static RUNTIME: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/../../runtime/src");
static SERVICE: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/../../service/src");
static IR: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/../../ir/src");
const WORKSPACE_MANIFEST: &str = include_str!("../../../Cargo.toml");

/// The crates that every runner has.
static CRATES: [RunnerCrate; 3] = [
    RunnerCrate {
        name: "moec-runtime",
        manifest: include_str!("../../../runtime/Cargo.toml"),
        sources: &RUNTIME,
    },
    RunnerCrate {
        name: "moec-service",
        manifest: include_str!("../../../service/Cargo.toml"),
        sources: &SERVICE,
    },
    RunnerCrate { name: "moec-ir", manifest: include_str!("../../../ir/Cargo.toml"), sources: &IR },
];

/// The crates of a runner.
fn crates(more: Option<&'static Runner>) -> impl Iterator<Item = &'static RunnerCrate> {
    CRATES.iter().chain(more.map_or(&[][..], |more| more.crates))
}

/// The lock file of a runner.
pub(super) fn lock_of(more: Option<&Runner>) -> &'static str {
    more.map_or(include_str!("../runner/Cargo.lock"), |more| more.lock)
}

const MAC_SCRIPT_TEXT: &str = include_str!("../runner/build.sh.txt");
const BUILD_SCRIPT: &str = include_str!("../runner/build.rs.txt");
/// Licences of the crates that are linked into `run`, written by `cargo xtask notices`.
const NOTICES: &str = include_str!("../runner/THIRD-PARTY.txt");

/// Folder of copied crates in the runner.
const VENDOR: &str = "vendor";

/// Writes the runner crate into `folder`, which is created. `more`: what it has besides the runtime;
/// `vendored`: whether the sources of both are written, too.
///
/// # Errors
/// A file that cannot be written.
pub fn write_sources(
    folder: &Path,
    generated: &[SourceFile],
    more: Option<&'static Runner>,
    vendored: bool,
) -> Result<()> {
    for (path, text) in fixed_files(more)? {
        if vendored || !path.starts_with(VENDOR) {
            write(&folder.join(path), text.as_bytes())?;
        }
    }
    for file in generated {
        write(&folder.join(file.path), file.text.as_bytes())?;
    }
    Ok(())
}

/// Writes the script that builds `run` on a Mac into the bundle, if its target is one. `more`: what the
/// runner has besides the runtime.
///
/// # Errors
/// A file that cannot be written.
pub fn write_script(bundle: &Path, triple: &str, more: Option<&Runner>) -> Result<()> {
    let Some(version) = deployment_target(triple) else { return Ok(()) };
    let features = more.map_or_else(String::new, |more| format!(" --features {}", more.feature));
    let text = MAC_SCRIPT_TEXT.replace("@VERSION@", &version).replace("@FEATURES@", &features);
    write(&bundle.join(MAC_SCRIPT), text.as_bytes())
}

/// Removes the files of another moec from the cache folder: a module that has moved since would be found
/// twice.
pub(super) fn remove_others(
    folder: &Path,
    generated: &[SourceFile],
    more: Option<&'static Runner>,
) -> Result<()> {
    let fixed = fixed_files(more)?.into_iter().map(|(path, _)| path);
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
fn fixed_files(more: Option<&'static Runner>) -> Result<Vec<(PathBuf, String)>> {
    let mut files: Vec<(PathBuf, String)> = vec![
        ("Cargo.toml".into(), root_manifest(more)?),
        ("Cargo.lock".into(), lock_of(more).into()),
        ("build.rs".into(), BUILD_SCRIPT.into()),
        ("THIRD-PARTY.txt".into(), NOTICES.into()),
    ];
    for RunnerCrate { name, manifest, sources } in crates(more) {
        let to = Path::new(VENDOR).join(name);
        files.push((to.join("Cargo.toml"), vendored_manifest(manifest)?));
        collect(sources, &to.join("src"), &mut files);
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
    manifest.parse().map_err(|e| Error::bug("an embedded manifest is not valid TOML").because(e))
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
fn root_manifest(more: Option<&'static Runner>) -> Result<String> {
    let table = |t: &Table, key: &str| t.get(key).and_then(Value::as_table).cloned().unwrap_or_default();
    let outer = table(&parse(WORKSPACE_MANIFEST)?, "workspace");
    let all = table(&outer, "dependencies");
    let mut dependencies = Table::new();
    for RunnerCrate { manifest, .. } in crates(more) {
        let manifest = parse(manifest)?;
        // Some are requested on one system only (`[target.'cfg(…)'.dependencies]`).
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
    let mut members = Vec::new();
    for RunnerCrate { name, .. } in crates(more) {
        let at = format!("vendor/{name}");
        if dependencies.contains_key(*name) {
            dependencies.insert((*name).to_owned(), path(&at));
        }
        members.push(Value::String(at));
    }
    let workspace = Table::from_iter([
        ("members".to_owned(), Value::Array(members)),
        ("package".to_owned(), Value::Table(table(&outer, "package"))),
        ("dependencies".to_owned(), Value::Table(dependencies)),
    ]);
    let rest = Table::from_iter([("workspace".to_owned(), Value::Table(workspace))]);
    let (mut needs, mut features) = (String::new(), String::new());
    if let Some((feature, name)) = more.and_then(|more| Some((more.feature, more.crates.last()?.name))) {
        needs = format!("{name} = {{ path = \"vendor/{name}\", optional = true }}\n");
        features = format!("\n[features]\n{feature} = [\"dep:{name}\"]\n");
    }
    Ok(format!("{}\n{rest}", MANIFEST_HEAD.replace("@NEEDS@\n", &needs).replace("@FEATURES@\n", &features)))
}

const MANIFEST_HEAD: &str = r#"# The binary of one bundle. Generated by moec; do not edit. `moec build --with-sources` brings the crates below `vendor/`.
[package]
name = "moec-runner"
version = "0.1.0"
edition = "2024"
publish = false

[dependencies]
moec-runtime = { path = "vendor/moec-runtime" }
moec-service = { path = "vendor/moec-service" }
@NEEDS@
@FEATURES@

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
    use moec_targets::backends::BACKENDS;
    use std::process::Command;

    /// All runners: that of the runtime alone (`None`), and one for each backend with its own crates.
    fn runners() -> impl Iterator<Item = Option<&'static Runner>> {
        [None].into_iter().chain(BACKENDS.iter().filter_map(|backend| backend.runner()).map(Some))
    }

    /// Path of a runner's lock file, in the crate of its units.
    fn lock_path(more: Option<&Runner>) -> String {
        let Some(last) = more.and_then(|more| more.crates.last()) else {
            return "compiler/bundle/runner/Cargo.lock".into();
        };
        let workspace = parse(WORKSPACE_MANIFEST).unwrap();
        let folder = workspace["workspace"]["dependencies"][last.name]["path"].as_str().unwrap();
        format!("{folder}/runner.lock")
    }

    /// The embedded lock files must be those that cargo derives from this workspace's lock file.
    /// `MOEC_BLESS=1` updates them.
    #[test]
    fn the_embedded_lock_files_are_fresh() {
        runners().for_each(is_fresh);
    }

    fn is_fresh(more: Option<&'static Runner>) {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let main = [SourceFile { path: "src/main.rs", text: "fn main() {}".into() }];
        write_sources(folder.path(), &main, more, true).unwrap();
        let lock = folder.path().join("Cargo.lock");
        fs::copy(root.join("Cargo.lock"), &lock).unwrap();
        let offline = Command::new(cargo())
            .current_dir(folder.path())
            .args(["metadata", "--format-version", "1", "--quiet"])
            .output()
            .unwrap();
        assert!(offline.status.success(), "{}", String::from_utf8_lossy(&offline.stderr));
        let (fresh, path) = (fs::read_to_string(&lock).unwrap(), lock_path(more));
        if std::env::var_os("MOEC_BLESS").is_some() {
            fs::write(root.join(path), &fresh).unwrap();
        } else {
            assert!(fresh == lock_of(more), "{path} is stale; run the test with MOEC_BLESS=1");
        }
    }

    #[test]
    fn sources_of_another_version_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let generated = [SourceFile { path: "src/main.rs", text: "fn main() {}".into() }];
        write_sources(folder.path(), &generated, None, true).unwrap();
        let [old, kept] =
            ["vendor/moec-runtime/src/elsewhere.rs", "src/main.rs"].map(|p| folder.path().join(p));
        fs::write(&old, "").unwrap();
        remove_others(folder.path(), &generated, None).unwrap();
        assert!(!old.exists() && kept.exists());
        assert!(fixed_files(None).unwrap().iter().all(|(p, _)| folder.path().join(p).exists()));
    }

    #[test]
    fn mac_script_builds_the_backend_feature() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("runner")).unwrap();
        for more in runners() {
            write_script(folder.path(), "arm64-apple-macosx15.0.0", more).unwrap();
            let script = fs::read_to_string(folder.path().join(MAC_SCRIPT)).unwrap();
            let options = more.map_or_else(String::new, |more| format!(" --features {}", more.feature));
            assert!(script.contains(&format!("--locked{options} --target-dir")), "{script}");
            let name = more.and_then(|more| more.crates.last()).map_or("moec-runtime", |last| last.name);
            assert!(root_manifest(more).unwrap().contains(&format!("vendor/{name}\"")));
        }
    }

    #[test]
    fn embedded_sources_are_complete_and_name_no_checkout() {
        for more in runners() {
            let files = fixed_files(more).unwrap();
            let vendored: BTreeSet<&Path> =
                files.iter().filter_map(|(path, _)| path.strip_prefix(VENDOR).ok()).collect();
            let folders: BTreeSet<_> = vendored.iter().filter_map(|path| path.iter().next()).collect();
            assert_eq!(folders, crates(more).map(|c| c.name.as_ref()).collect());
            for RunnerCrate { name, .. } in crates(more) {
                assert!(vendored.contains(&*Path::new(name).join("src/lib.rs")), "{name}");
            }
            for (path, text) in files {
                assert!(!text.contains(env!("CARGO_MANIFEST_DIR")), "{} names a checkout", path.display());
            }
        }
    }
}
