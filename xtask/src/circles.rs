//! `cargo xtask circles`: modules that import each other in a circle.
//!
//! Compared are siblings: the modules of a crate, and the modules below each of them; one stands for all that lies below it.
//! What a module and its parent have of each other is no circle. Tests are left out. [`ALLOWED`] holds the imports that may
//! close a circle, each with its reason; any other one fails a test, and so does a row that is needed no longer.

use crate::shell::{Failed, root};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// The crates, by the folders of their sources.
const CRATES: &[&str] = &[
    "ir/src",
    "runtime/src",
    "sim/src",
    "service/src",
    "codegen/src",
    "targets/device/src",
    "targets/family/src",
    "targets/cpu/src",
    "targets/coreml/src",
    "targets/cuda/src",
    "gguf/src",
    "targets/cuda/ptx/src",
    "targets/mirror/src",
    "targets/ndp/src",
    "targets/qnn/src",
    "targets/ndp/dram/src",
    "targets/ndp/isa/src",
    "targets/qnn/sys/src",
    "targets/cuda/unit/src",
    "targets/qnn/unit/src",
    "compiler/base/src",
    "compiler/config/src",
    "compiler/targets/src",
    "compiler/import/src",
    "compiler/profile/src",
    "compiler/costs/src",
    "compiler/passes/src",
    "compiler/pipeline/src",
    "compiler/bundle/src",
    "compiler/measure/src",
    "compiler/simulate/src",
    "compiler/driver/src",
    "compiler/synth/src",
    "compiler/filetest/src",
    "compiler/cli/src",
    "papers/src",
];

/// An import that may close a circle: folder, importing module, imported one, reason.
type Row = (&'static str, &'static str, &'static str, &'static str);

/// Every such import.
const ALLOWED: &[Row] = &[
    ("compiler/measure/src/calibrate", "products", "collect", "one way to read a number from memory"),
    ("compiler/import/src", "common", "families", "what families share takes a row of their table"),
    ("compiler/passes/src/layout", "builtins", "entry", "steps are added to the entry that is laid out"),
    ("compiler/synth/src", "shapes", "popularity", "routers are drawn so that experts get their popularity"),
    ("runtime/src", "error", "flash", "the crate's error holds that of a read"),
    ("runtime/src", "store", "owned", "a store says what is still to arrive"),
    ("targets/coreml/src/exec", "error", "table", "an error names the operators that there are"),
    ("targets/coreml/src/exec", "table", "ops", "the table of the operators"),
    (
        "targets/coreml/src/package",
        "weights",
        "manifest",
        "a blob is found by the manifest, and read for its hash",
    ),
    ("targets/cpu/src", "arithmetic", "select", "views and errors of the selection"),
    ("targets/cpu/src", "attend", "select", "views and errors of the selection"),
    ("targets/device/src", "cost", "figures", "a figure, and what is made of figures"),
    ("targets/device/src", "form", "figures", "a figure, and what is made of figures"),
    ("targets/device/src", "legality", "figures", "a figure, and what is made of figures"),
    ("targets/qnn/src/net", "infer", "op", "the table of the operators names their shape rules"),
];

/// A module's path below the crate, from the outside in.
type Module = Vec<String>;
/// Imports among siblings: folder and both modules, and a file that has it.
type Edges = BTreeMap<(String, String, String), String>;

/// Prints every circle, and fails if one is not allowed.
pub(crate) fn run() -> Result<(), Failed> {
    let edges = all()?;
    for (folder, modules) in circles(&edges) {
        println!("{folder}: {}", modules.iter().map(String::as_str).collect::<Vec<_>>().join(", "));
        for ((at, from, to), file) in &edges {
            if *at == folder && modules.contains(from) && modules.contains(to) {
                let row = ALLOWED.iter().find(|r| (r.0, r.1, r.2) == (at, from, to));
                let why = row.map_or_else(String::new, |r| format!(": {}", r.3));
                println!("  {from} -> {to} ({file}){why}");
            }
        }
    }
    match wrong(&edges, ALLOWED) {
        wrong if wrong.is_empty() => Ok(()),
        wrong => Err(Failed::new(wrong.join("\n"))
            .hint("move what is shared into a module that both import, or give the reason in `xtask/src/circles.rs`")),
    }
}

/// The imports among siblings of every crate.
fn all() -> Result<Edges, Failed> {
    let mut edges = Edges::new();
    for folder in CRATES {
        let mut sources = BTreeMap::new();
        read(&root().join(folder), &Vec::new(), &mut sources)
            .map_err(|e| Failed::new(format!("`{folder}` cannot be read: {e}")))?;
        edges.extend(imports(folder, &sources));
    }
    Ok(edges)
}

/// What is wrong: circles without the imports that are allowed, and rows that close none.
fn wrong(edges: &Edges, allowed: &[Row]) -> Vec<String> {
    let is = |e: &(String, String, String), r: &Row| (&*e.0, &*e.1, &*e.2) == (r.0, r.1, r.2);
    let mut left = edges.clone();
    left.retain(|e, _| !allowed.iter().any(|r| is(e, r)));
    let named = |(folder, modules): (String, BTreeSet<String>)| {
        let modules: Vec<_> = modules.into_iter().collect();
        format!("`{folder}` has a circle of {}", modules.join(", "))
    };
    let mut wrong: Vec<String> = circles(&left).into_iter().map(named).collect();
    for row in allowed {
        let mut with = left.clone();
        with.extend(edges.iter().filter(|(e, _)| is(e, row)).map(|(e, file)| (e.clone(), file.clone())));
        if circles(&with) == circles(&left) {
            wrong.push(format!("{}: {} -> {} closes no circle any more", row.0, row.1, row.2));
        }
    }
    wrong
}

/// Folders, and modules in them of which each leads to every other.
fn circles(edges: &Edges) -> Vec<(String, BTreeSet<String>)> {
    let mut next: BTreeMap<(&str, &str), Vec<&str>> = BTreeMap::new();
    for (folder, from, to) in edges.keys() {
        next.entry((folder, from)).or_default().push(to);
    }
    let from = |folder: &str, start: &str| {
        let (mut seen, mut left) = (BTreeSet::new(), vec![start.to_owned()]);
        while let Some(module) = left.pop() {
            for to in next.get(&(folder, &*module)).into_iter().flatten() {
                if seen.insert((*to).to_owned()) {
                    left.push((*to).to_owned());
                }
            }
        }
        seen
    };
    let reached: BTreeMap<_, _> = next.keys().map(|&(folder, m)| ((folder, m), from(folder, m))).collect();
    let mut found = BTreeSet::new();
    for (&(folder, m), to) in reached.iter().filter(|((_, m), to)| to.contains(*m)) {
        let back = |o: &&String| reached.get(&(folder, &***o)).is_some_and(|r| r.contains(m));
        found.insert((folder.to_owned(), to.iter().filter(back).cloned().collect::<BTreeSet<_>>()));
    }
    found.into_iter().collect()
}

/// Reads the modules of a folder, without what is only there for tests.
fn read(folder: &Path, above: &Module, sources: &mut BTreeMap<Module, Vec<String>>) -> std::io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let below = || above.iter().cloned().chain([name.clone()]).collect::<Module>();
        if path.is_dir() {
            read(&path, &below(), sources)?;
        } else if path.extension().is_some_and(|e| e == "rs") && !name.ends_with("tests") && name != "main" {
            let module = if matches!(&*name, "lib" | "mod") { above.clone() } else { below() };
            sources.insert(module, words(&fs::read_to_string(&path)?));
        }
    }
    Ok(())
}

/// Names and marks of a source: without comments, literals and what follows `#[cfg(test)]`.
fn words(text: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let end =
            |from: usize, mark: &str| rest[from..].find(mark).map_or(rest.len(), |at| from + at + mark.len());
        let mut take = c.len_utf8();
        if rest.starts_with("//") {
            take = end(2, "\n");
        } else if rest.starts_with("/*") {
            take = end(2, "*/");
        } else if rest.starts_with("r#\"") {
            take = end(3, "\"#");
        } else if c == '"' {
            let mut escaped = false;
            let close = rest[1..].find(|c| {
                let closes = c == '"' && !escaped;
                escaped = c == '\\' && !escaped;
                closes
            });
            take = close.map_or(rest.len(), |at| at + 2);
        } else if rest.starts_with("'\"'") || rest.starts_with("'{'") || rest.starts_with("'}'") {
            take = 3;
        } else if rest.starts_with("'\\") {
            take = end(3, "'");
        } else if rest.starts_with("::") {
            take = 2;
            words.push("::".to_owned());
        } else if c.is_alphanumeric() || c == '_' {
            take = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
            words.push(rest[..take].to_owned());
        } else if !c.is_whitespace() {
            words.push(c.to_string());
        }
        rest = &rest[take..];
    }
    without_tests(&words)
}

/// Words without the items that `#[cfg(test)]` stands before.
fn without_tests(words: &[String]) -> Vec<String> {
    const MARK: [&str; 7] = ["#", "[", "cfg", "(", "test", ")", "]"];
    let (mut out, mut i) = (Vec::new(), 0);
    while i < words.len() {
        if words[i..].iter().zip(MARK).filter(|(word, mark)| word == mark).count() < MARK.len() {
            out.push(words[i].clone());
            i += 1;
            continue;
        }
        let mut depth = 0_i32;
        i += MARK.len();
        while let Some(word) = words.get(i) {
            i += 1;
            depth += i32::from(word == "{") - i32::from(word == "}");
            if depth == 0 && matches!(&**word, "}" | ";") {
                break;
            }
        }
    }
    out
}

/// The imports among siblings of a crate.
fn imports(folder: &str, sources: &BTreeMap<Module, Vec<String>>) -> Edges {
    let mut modules: BTreeSet<Module> = BTreeSet::new();
    for module in sources.keys() {
        modules.extend((0..=module.len()).map(|n| module[..n].to_vec()));
    }
    // What `pub use` gives another place: module and name, and the module that it is from.
    let mut given: BTreeMap<(Module, String), Module> = BTreeMap::new();
    for (module, words) in sources {
        for (path, public) in paths(words) {
            let target = resolve(module, &path, &modules, &given);
            if let (true, Some(target), Some(name)) = (public, target, path.last()) {
                given.insert((module.clone(), name.clone()), target);
            }
        }
    }
    let mut edges = Edges::new();
    for (module, words) in sources {
        for (path, _) in paths(words) {
            let Some(target) = resolve(module, &path, &modules, &given) else { continue };
            let same = module.iter().zip(&target).take_while(|(a, b)| a == b).count();
            if let (Some(from), Some(to)) = (module.get(same), target.get(same)) {
                let at = std::iter::once(folder).chain(module[..same].iter().map(String::as_str));
                let key = (at.collect::<Vec<_>>().join("/"), from.clone(), to.clone());
                edges.entry(key).or_insert_with(|| format!("{}: {}", module.join("::"), path.join("::")));
            }
        }
    }
    edges
}

/// The module that a path leads to from another; none where it leads out of the crate.
fn resolve(
    from: &Module,
    path: &[String],
    modules: &BTreeSet<Module>,
    given: &BTreeMap<(Module, String), Module>,
) -> Option<Module> {
    let mut at = from.clone();
    for (i, name) in path.iter().enumerate() {
        match &**name {
            "crate" => at.clear(),
            "self" => {}
            "super" => at.truncate(at.len().saturating_sub(1)),
            _ => {
                at.push(name.clone());
                if !modules.contains(&at) {
                    at.pop();
                    let other = given.get(&(at.clone(), name.clone()));
                    // A first name that is no module's is that of another crate.
                    return if i == 0 { None } else { Some(other.cloned().unwrap_or(at)) };
                }
            }
        }
    }
    Some(at)
}

/// Paths of a source that begin at a module, each with whether `pub use` gives it on: those of `use`, and others that begin
/// with `crate`, `self` or `super`.
fn paths(words: &[String]) -> Vec<(Module, bool)> {
    let mut found = Vec::new();
    for (i, word) in words.iter().enumerate() {
        let before = |n: usize| i.checked_sub(n).and_then(|at| words.get(at)).map(String::as_str);
        let next = words.get(i + 1).map(String::as_str);
        let mut own = Vec::new();
        if word == "use" {
            tree(words, &mut (i + 1), &Vec::new(), &mut own);
            let public = matches!(before(1), Some("pub" | ")"));
            found.extend(own.into_iter().map(|path| (path, public)));
        } else if matches!(&**word, "crate" | "self" | "super")
            && next == Some("::")
            && !matches!(before(1), Some("use" | "::" | "in"))
        {
            tree(words, &mut { i }, &Vec::new(), &mut own);
            found.extend(own.into_iter().map(|path| (path, false)));
        }
    }
    found
}

/// The paths of a tree `a::{b, c::d}` that begins at a word.
fn tree(words: &[String], at: &mut usize, above: &Module, found: &mut Vec<Module>) {
    let mut path = above.clone();
    while let Some(word) = words.get(*at) {
        match &**word {
            "{" => {
                while words.get(*at).is_some_and(|w| w == "{" || w == ",") {
                    *at += 1;
                    tree(words, at, &path, found);
                }
                *at += 1;
                return;
            }
            "::" => {}
            name if name.chars().all(|c| c.is_alphanumeric() || c == '_') && name != "as" => {
                path.push(name.to_owned());
                if words.get(*at + 1).is_none_or(|w| w != "::") {
                    *at += 1;
                    break;
                }
            }
            _ => break,
        }
        *at += 1;
    }
    // `as name`.
    if words.get(*at).is_some_and(|w| w == "as") {
        *at += 2;
    }
    // `*`.
    if words.get(*at).is_some_and(|w| w == "*") {
        *at += 1;
    }
    if path.len() > above.len() || path.last().is_some_and(|_| !above.is_empty()) {
        found.push(path);
    }
}

#[cfg(test)]
mod tests {

    use super::*;

    #[test]
    fn every_circle_is_allowed() {
        let wrong = wrong(&all().map_err(|f| f.to_string()).unwrap(), ALLOWED);
        assert!(wrong.is_empty(), "{}\nhint: `cargo xtask circles` shows the imports", wrong.join("\n"));
    }

    /// A crate of `(module, text)`; the edges without their folder and file.
    fn edges(sources: &[(&str, &str)]) -> Edges {
        let module = |m: &str| m.split("::").filter(|s| !s.is_empty()).map(str::to_owned).collect::<Module>();
        imports("src", &sources.iter().map(|(m, text)| (module(m), words(text))).collect())
    }

    #[test]
    fn imports_are_found_however_they_are_written() {
        let found = edges(&[
            ("", "pub use low::Base; mod low; mod high;"),
            (
                "low",
                "use std::fmt; /* crate::high */ fn f() -> &'static str { \"crate::high\" } // crate::high",
            ),
            ("high", "use crate::{Base as B, low::{self, *}}; #[cfg(test)] mod tests { use crate::other; }"),
            ("other", "fn f(x: super::Base) -> crate::high::inner::X {}"),
            ("high::inner", "use super::deep; fn f() { super::super::low::g() }"),
            ("high::deep", "pub(in crate::other) fn f() {}"),
        ]);
        let found: Vec<_> = found.keys().map(|(at, a, b)| format!("{at}: {a} -> {b}")).collect();
        let expected =
            ["src: high -> low", "src: other -> high", "src: other -> low", "src/high: inner -> deep"];
        assert_eq!(found, expected);
    }

    #[test]
    fn a_circle_needs_a_row_and_a_row_a_circle() {
        let found = edges(&[
            ("", ""),
            ("a", "use crate::b;"),
            ("b", "use crate::c;"),
            ("c", "use crate::a;"),
            ("d", "use crate::a;"),
        ]);
        assert_eq!(wrong(&found, &[]), ["`src` has a circle of a, b, c"]);
        assert!(wrong(&found, &[("src", "c", "a", "so")]).is_empty());
        let two = wrong(&found, &[("src", "c", "a", "so"), ("src", "d", "a", "so")]);
        assert_eq!(two, ["src: d -> a closes no circle any more"]);
    }
}
