//! `cargo xtask size`: non-blank lines of hand-written files, by crate, compared with `size.txt`.
//!
//! A row that grows past `size.txt` fails: a change that is meant to grow it writes the new number there,
//! with the reason for it. There is no total to reach.

use crate::shell::{Failed, root};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The file that holds the rows.
const FILE: &str = "size.txt";
/// Names of files that count.
const ENDINGS: &[&str] = &["rs", "py", "sh", "toml", "html", "js", "css", "md", "yml"];
/// Folders whose files are written by programs.
const GENERATED: &[&str] = &["golden/snapshots", "bench/results"];

/// Prints the rows, those that grew marked.
pub(crate) fn run() -> Result<(), Failed> {
    let (found, held) = (measure(&root())?, rows(&root(), FILE)?);
    let mut text = String::new();
    for (row, lines) in &found {
        let was = held.get(row).copied();
        let mark = match was {
            Some(was) if *lines > was => format!("  was {was}"),
            Some(_) => String::new(),
            None => "  new".to_owned(),
        };
        let _ = writeln!(text, "{lines:>8}  {row}{mark}");
    }
    let _ = writeln!(text, "{:>8}  all together", found.values().sum::<usize>());
    print!("{text}");
    let wrong = wrong(&found, &held);
    if wrong.is_empty() { Ok(()) } else { Err(Failed::new(wrong.join("\n")).hint(HINT)) }
}

const HINT: &str = "make it smaller, or write the number and the reason into `size.txt`";

/// Violations of `size.txt`.
fn wrong(found: &BTreeMap<String, usize>, held: &BTreeMap<String, usize>) -> Vec<String> {
    let grown = found.iter().filter_map(|(row, &lines)| match held.get(row) {
        Some(&most) if lines <= most => None,
        Some(most) => Some(format!("{row} has {lines} lines, and `{FILE}` allows {most}")),
        None => Some(format!("{row} has {lines} lines, and no row in `{FILE}`")),
    });
    let gone = held.keys().filter(|row| !found.contains_key(*row));
    grown.chain(gone.map(|row| format!("`{FILE}` has a row {row}, which does not exist"))).collect()
}

/// Rows of a file such as `size.txt`: a crate's folder and its number; what follows is the reason.
pub(crate) fn rows(root: &Path, file: &str) -> Result<BTreeMap<String, usize>, Failed> {
    let path = root.join(file);
    let text = fs::read_to_string(&path).map_err(|e| Failed::new(format!("{}: {e}", path.display())))?;
    let rows = text.lines().filter(|l| !l.is_empty() && !l.starts_with('#'));
    let row = |line: &str| {
        let mut words = line.split_whitespace();
        let lines = words.next().and_then(|n| n.parse().ok());
        words.next().zip(lines).map(|(row, lines)| (row.to_owned(), lines))
    };
    rows.map(|line| row(line).ok_or_else(|| Failed::new(format!("{file}: `{line}` is not a row")))).collect()
}

/// Names of all tracked files.
pub(crate) fn tracked(root: &Path) -> Result<Vec<String>, Failed> {
    let output = Command::new("git").args(["ls-files", "-z"]).current_dir(root).output();
    let output = output.map_err(|e| Failed::new(format!("git ls-files: {e}")))?;
    if !output.status.success() {
        return Err(
            Failed::new("git ls-files failed").hint("lines are counted of tracked files, in a checkout")
        );
    }
    let names = String::from_utf8_lossy(&output.stdout);
    Ok(names.split('\0').filter(|name| !name.is_empty()).map(str::to_owned).collect())
}

/// Non-blank lines of tracked files, by the innermost folder with a `Cargo.toml`, else by the first folder.
fn measure(root: &Path) -> Result<BTreeMap<String, usize>, Failed> {
    let mut rows = BTreeMap::new();
    for name in tracked(root)?.iter().filter(|name| counts(name)) {
        // A file that was deleted and is tracked yet has no lines.
        let Ok(text) = fs::read_to_string(root.join(name)) else { continue };
        let lines = text.lines().filter(|l| !l.trim().is_empty()).count();
        *rows.entry(row_of(root, name)).or_default() += lines;
    }
    Ok(rows)
}

/// Whether a file is written by hand.
fn counts(name: &str) -> bool {
    let path = Path::new(name);
    let ending = path.extension().and_then(|e| e.to_str()).unwrap_or_default();
    ENDINGS.contains(&ending) && !GENERATED.iter().any(|folder| path.starts_with(folder))
}

/// Row of a file: the innermost folder with a `Cargo.toml`, else the first folder.
pub(crate) fn row_of(root: &Path, name: &str) -> String {
    let folders = || Path::new(name).ancestors().skip(1).filter(|f| !f.as_os_str().is_empty());
    let of_crate = folders().find(|f| root.join(f).join("Cargo.toml").is_file());
    let row = of_crate.or_else(|| folders().last()).map_or_else(|| PathBuf::from("."), Path::to_owned);
    row.display().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_crate_grows_without_a_reason() {
        // A source package is not a checkout, and has no tracked files.
        if !root().join(".git").exists() {
            return;
        }
        let wrong = wrong(&measure(&root()).unwrap(), &rows(&root(), FILE).unwrap());
        assert!(wrong.is_empty(), "{}\nhint: {HINT}", wrong.join("\n"));
    }

    #[test]
    fn line_counts_are_checked_against_their_rows() {
        let rows = |of: &[(&str, usize)]| of.iter().map(|&(row, n)| (row.to_owned(), n)).collect();
        let held = rows(&[("ir", 10), ("gone", 1)]);
        let wrong = wrong(&rows(&[("ir", 11), ("new", 3)]), &held);
        assert_eq!(
            wrong,
            [
                "ir has 11 lines, and `size.txt` allows 10",
                "new has 3 lines, and no row in `size.txt`",
                "`size.txt` has a row gone, which does not exist",
            ]
        );
        assert!(super::wrong(&rows(&[("ir", 9), ("gone", 1)]), &held).is_empty());
        assert!(counts("ir/src/op.rs") && !counts("golden/snapshots/a.md") && !counts("Cargo.lock"));
    }
}
