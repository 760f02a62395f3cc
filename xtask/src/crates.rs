//! `cargo xtask crates`: the picture of the workspace in ARCHITECTURE.md, from what `cargo tree` says.

use crate::shell::{Failed, cargo, output, root, stage};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;

const PAGE: &str = "ARCHITECTURE.md";
/// Marks before and after the picture.
const MARKS: [&str; 2] = ["<!-- crates: `cargo xtask crates` -->\n", "<!-- /crates -->"];

/// Crates, and those of the workspace that each depends on.
type Arrows = BTreeMap<String, BTreeSet<String>>;

/// Writes the picture.
pub(crate) fn run() -> Result<(), Failed> {
    let path = root().join(PAGE);
    let page = fs::read_to_string(&path).map_err(|e| Failed::new(format!("`{PAGE}`: {e}")))?;
    let (before, _, after) =
        parts(&page).ok_or_else(|| Failed::new(format!("`{PAGE}` has no marks of crates")))?;
    let [open, close] = MARKS;
    let text = format!("{before}{open}{}{close}{after}", picture(&direct(&arrows()?)));
    fs::write(&path, text).map_err(|e| Failed::new(format!("`{PAGE}`: {e}")))?;
    stage("Wrote", PAGE);
    Ok(())
}

/// Text before the picture, the picture, and the text after it.
fn parts(page: &str) -> Option<(&str, &str, &str)> {
    let [open, close] = MARKS;
    let (before, rest) = page.split_once(open)?;
    let (picture, after) = rest.split_once(close)?;
    Some((before, picture, after))
}

/// Dependencies of the crates of the workspace on each other, those of tests and build scripts left out.
fn arrows() -> Result<Arrows, Failed> {
    let mut tree = cargo("tree", None);
    tree.args([
        "--workspace",
        "--locked",
        "--edges",
        "normal",
        "--depth",
        "1",
        "--prefix",
        "depth",
        "--no-dedupe",
    ]);
    let tree_output = output(&mut tree).ok_or_else(|| Failed::new("`cargo tree` says nothing"))?;
    Ok(read(&tree_output))
}

/// Parses the output of `cargo tree --depth 1 --prefix depth`: `0` before each crate, `1` before what it
/// depends on.
fn read(listing: &str) -> Arrows {
    let mut all = Arrows::new();
    let mut of = None;
    for line in listing.lines() {
        let name = line.get(1..).and_then(|rest| rest.split(' ').next()).unwrap_or_default().to_owned();
        match (line.as_bytes().first(), &of) {
            (Some(b'0'), _) => {
                all.entry(name.clone()).or_default();
                of = Some(name);
            }
            (Some(b'1'), Some(of)) => {
                all.entry(of.clone()).or_default().insert(name);
            }
            _ => {}
        }
    }
    let own: BTreeSet<String> = all.keys().cloned().collect();
    for to in all.values_mut() {
        to.retain(|name| own.contains(name));
    }
    all
}

/// The arrows that no longer way makes needless.
fn direct(all: &Arrows) -> Arrows {
    let reach = |from: &String| {
        let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
        while let Some(name) = next.pop() {
            next.extend(all.get(name).into_iter().flatten().filter(|to| seen.insert((*to).clone())));
        }
        seen
    };
    let needed = |to: &BTreeSet<String>| {
        let other = |name: &&String| !to.iter().any(|other| other != *name && reach(other).contains(*name));
        to.iter().filter(other).cloned().collect()
    };
    all.iter().map(|(from, to)| (from.clone(), needed(to))).collect()
}

/// The picture, in mermaid's language.
fn picture(arrows: &Arrows) -> String {
    let mut text = "\n```mermaid\ngraph TD\n".to_owned();
    for (from, to) in arrows.iter().filter(|(_, to)| !to.is_empty()) {
        let to: Vec<&str> = to.iter().map(String::as_str).collect();
        let _ = writeln!(text, "  {from} --> {}", to.join(" & "));
    }
    text + "```\n\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transitive_dependencies_are_left_out_of_the_graph() {
        let listing =
            "0a v1 (/x)\n1b v1 (/y)\n1c v1 (/z)\n1serde v1\n\n0b v1 (/y)\n1c v1 (/z) (*)\n\n0c v1 (/z)\n";
        let text = picture(&direct(&read(listing)));
        assert_eq!(text, "\n```mermaid\ngraph TD\n  a --> b\n  b --> c\n```\n\n");
    }

    #[test]
    fn crate_graph_matches_the_workspace() {
        let page = fs::read_to_string(root().join(PAGE)).unwrap();
        let (_, written, _) = parts(&page).unwrap();
        assert_eq!(written, picture(&direct(&arrows().unwrap())), "`cargo xtask crates` writes it");
    }
}
