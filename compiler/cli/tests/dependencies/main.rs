//! Each package depends on the foundation crates that it uses, and uses those that it depends on. A backend
//! is named only in its own crates, in the table of backends, and in the places of a table here. [`matches`]
//! checks the same for operators, kernels, weight formats and mixers.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod matches;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use toml::{Table, Value};

/// The foundation crates, and what each one is for.
const FOUNDATION: [(&str, &str); 10] = [
    ("syn", "parses the generated source of `run`"),
    ("quote", "builds it"),
    ("proc-macro2", "holds its tokens"),
    ("egg", "rewrites graphs"),
    ("serde", "reads and writes device files, manifests and answers"),
    ("bincode", "encodes plans"),
    ("inkwell", "compiles kernels with LLVM"),
    ("safetensors", "reads checkpoints"),
    ("insta", "compares with snapshots"),
    ("pyo3", "runs coremltools"),
];

/// Crates that only tests need.
const OF_TESTS: [&str; 1] = ["insta"];

/// Names of backends, as words in code. The CPU's is left out, since every bundle has its kernels and packed
/// weights.
const BACKENDS: [&str; 5] = ["coreml", "cuda", "mirror", "ndp", "qnn"];

/// Places outside of `targets/BACKEND` that may name one, and the reason.
const NAMERS: [(&str, &str); 11] = [
    ("codegen/src/gpu/mod.rs", "LLVM's triple of PTX"),
    ("compiler/cli/src/docs/units.rs", "names of device files"),
    ("compiler/cli/src/inspect.rs", "tells users which files it reads"),
    ("compiler/simulate/src/", "systems of NPUMoE's tables"),
    ("compiler/targets/", "the rows"),
    ("papers/", "evaluations of one machine each"),
    ("targets/device/src/figures.rs", "the kinds of units"),
    ("targets/device/src/find.rs", "names of device files"),
    ("targets/hosts/", "all hosts in one process are as many modelled memories"),
    ("testing/", "what tests need from others"),
    ("xtask/", "commands that install and measure one thing each"),
];

/// A package of this repository.
struct Package {
    folder: PathBuf,
    manifest: Table,
}

impl Package {
    fn new(folder: PathBuf) -> Self {
        let manifest = fs::read_to_string(folder.join("Cargo.toml")).unwrap().parse().unwrap();
        Self { folder, manifest }
    }

    /// Whether a table of the manifest lists this crate.
    fn has(&self, table: &str, name: &str) -> bool {
        self.manifest.get(table).and_then(Value::as_table).is_some_and(|t| t.contains_key(name))
    }

    /// Whether a source of the library or program uses a path of this crate; with `tests`, also tests and
    /// examples.
    fn uses(&self, name: &str, tests: bool) -> bool {
        let mut sources = files(&self.folder.join("src"));
        if tests {
            sources.extend(["tests", "examples", "benches"].iter().flat_map(|f| files(&self.folder.join(f))));
            let listed = self.manifest.get("test").and_then(Value::as_array).into_iter().flatten();
            sources.extend(listed.map(|test| self.folder.join(test["path"].as_str().unwrap())));
        }
        let path = format!("{}::", name.replace('-', "_"));
        sources.iter().filter(|file| file.extension().is_some_and(|e| e == "rs")).any(|file| {
            let text = fs::read_to_string(file).unwrap();
            text.lines().filter(|line| !line.trim_start().starts_with("//")).any(|line| has_path(line, &path))
        })
    }
}

/// Whether a line contains a path that begins with `path`.
fn has_path(line: &str, path: &str) -> bool {
    let before = |at: usize| line[..at].chars().next_back();
    line.match_indices(path)
        .any(|(at, _)| before(at).is_none_or(|c| !c.is_alphanumeric() && !matches!(c, '_' | ':')))
}

/// The files in a folder, recursively.
fn files(folder: &Path) -> Vec<PathBuf> {
    let (mut folders, mut files) = (vec![folder.to_owned()], Vec::new());
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten() {
            let path = entry.unwrap().path();
            if path.is_dir() { folders.push(path) } else { files.push(path) }
        }
    }
    files
}

/// The folder of the workspace.
fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// The packages of the workspace, and the package outside of it.
fn packages() -> Vec<Package> {
    let workspace = Package::new(root().to_owned());
    let members = workspace.manifest["workspace"]["members"].as_array().unwrap();
    let members = members.iter().map(|m| m.as_str().unwrap());
    members.chain(["targets/coreml/helper"]).map(|member| Package::new(root().join(member))).collect()
}

#[test]
fn every_foundation_crate_is_a_dependency_and_is_used() {
    let packages = packages();
    for (name, purpose) in FOUNDATION {
        let table = if OF_TESTS.contains(&name) { "dev-dependencies" } else { "dependencies" };
        assert!(
            packages.iter().any(|p| p.has(table, name)),
            "no package depends on `{name}`, which {purpose}"
        );
        for package in &packages {
            for (table, tests) in [("dependencies", false), ("dev-dependencies", true)] {
                assert!(
                    !package.has(table, name) || package.uses(name, tests),
                    "`{name}` under [{table}] of `{}` is not used",
                    package.folder.display()
                );
            }
        }
    }
}

#[test]
fn core_ml_packages_are_written_with_coremltools() {
    let helper = packages().into_iter().find(|p| p.has("dependencies", "pyo3")).unwrap();
    let script = fs::read_to_string(helper.folder.join("src/emit.py")).unwrap();
    assert!(
        script.lines().any(|l| l.trim_start().starts_with("import coremltools")),
        "no `import coremltools`"
    );
    let program = fs::read_to_string(helper.folder.join("src/main.rs")).unwrap();
    assert!(program.contains("include_str!(\"emit.py\")"), "the helper does not contain `emit.py`");
}

/// Code of a source, without comments and tests. Also left out: the term for a kind of memory that has the
/// same name as a backend.
fn code(text: &str) -> String {
    let own = text.split("#[cfg(test)]\nmod tests").next().unwrap();
    own.lines()
        .map(|line| line.split("//").next().unwrap())
        .collect::<Vec<_>>()
        .join("\n")
        .replace("NDP DIMMs", "")
        .replace("NDP units", "")
}

/// The words of code or a name: `moec_cuda_unit::NATIVE` has four.
fn words(code: &str) -> impl Iterator<Item = String> {
    code.split(|c: char| !c.is_alphanumeric()).map(str::to_lowercase)
}

#[test]
fn backends_are_named_by_their_own_crates_and_rows() {
    let named = |code: &str| words(code).find(|word| BACKENDS.contains(&&**word));
    let mut seen = 0;
    let mut namers = BTreeSet::new();
    for package in packages() {
        let folder = package.folder.strip_prefix(root()).unwrap().to_str().unwrap().to_owned();
        if BACKENDS.iter().any(|backend| format!("{folder}/").starts_with(&format!("targets/{backend}/"))) {
            continue;
        }
        let is_code =
            |path: &PathBuf| path.extension().is_some_and(|e| e == "rs") && !path.ends_with("tests.rs");
        for path in files(&package.folder.join("src")).into_iter().filter(is_code) {
            let name = path.strip_prefix(root()).unwrap().to_str().unwrap();
            if name.contains("/tests/") {
                continue;
            }
            seen += 1;
            let backend = named(&code(&fs::read_to_string(&path).unwrap()));
            if let Some((namer, _)) = NAMERS.iter().find(|(namer, _)| name.starts_with(namer)) {
                namers.extend(backend.map(|_| *namer));
                continue;
            }
            assert_eq!(backend, None, "{name} names a backend: ask its row, or give the reason in NAMERS");
        }
        let manifest = format!("{folder}/Cargo.toml");
        if !NAMERS.iter().any(|(namer, _)| manifest.starts_with(namer)) {
            let table = package.manifest.get("dependencies").and_then(Value::as_table);
            let backend = table.into_iter().flat_map(Table::keys).find_map(|name| named(name));
            assert_eq!(backend, None, "{manifest} depends on a crate of a backend");
        }
    }
    assert!(seen > 300, "only {seen} sources");
    for (namer, _) in NAMERS {
        assert!(namers.contains(namer), "{namer} names no backend any more: remove its row");
    }
    assert_eq!(named("moec_cuda_unit::NATIVE").as_deref(), Some("cuda"));
    assert_eq!(named(&code("// cuda\nx(\"mirrors\") // qnn")), None);
}
