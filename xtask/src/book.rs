//! `cargo xtask book`: the pages of the project as a book, by mdBook.
//!
//! mdBook reads one folder, and the pages are in `docs/` and at the root. So they are copied below
//! `target/book/src` under their own paths, in the order of `docs/SUMMARY.md`. A link to anything else in the
//! tree becomes plain text there.

use crate::shell::{Failed, cache_dir, cargo, output, program, root, run as finish, shown, stage};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::path::{Component, Path, PathBuf};

/// The version that is installed if mdBook is missing.
const VERSION: &str = "0.5.4";
/// The list of pages, and the folder that its links start from.
const SUMMARY: &str = "docs/SUMMARY.md";
/// Sources of the book; `book.toml` has the same path.
const SOURCES: &str = "target/book/src";
/// First page of the built book; `book.toml` has its folder.
const FIRST: &str = "target/book/html/index.html";

/// Copies the pages and builds the book.
pub(crate) fn run() -> Result<(), Failed> {
    let mdbook = installed()?;
    copy()?;
    let mut build = program(&mdbook);
    build.arg("build").arg(root());
    finish(&mut build)?;
    stage("Wrote", FIRST);
    Ok(())
}

/// mdBook: the one that is installed already, or one in moec's cache folder.
fn installed() -> Result<OsString, Failed> {
    let folder = cache_dir()?.join("book");
    let own = folder.join("bin/mdbook");
    let found = [OsString::from("mdbook"), own.clone().into()]
        .into_iter()
        .find(|path| output(program(path).arg("--version")).is_some());
    if let Some(path) = found {
        return Ok(path);
    }
    stage("Installing", &format!("mdBook {VERSION}, which takes some minutes"));
    let mut install = cargo("install", None);
    install.args(["mdbook", "--locked", "--version", VERSION, "--root"]).arg(&folder);
    finish(&mut install).map_err(|_| {
        Failed::new("mdBook is missing and could not be installed").hint(format!("`{}`", shown(&install)))
    })?;
    Ok(own.into())
}

/// Writes the sources of the book again.
fn copy() -> Result<(), Failed> {
    let sources = root().join(SOURCES);
    if sources.exists() {
        fs::remove_dir_all(&sources).map_err(|e| Failed::new(format!("`{SOURCES}`: {e}")))?;
    }
    let summary = read(Path::new(SUMMARY))?;
    let mut files: BTreeSet<PathBuf> = links(&summary).iter().filter_map(|l| target(SUMMARY, l)).collect();
    let pages: Vec<PathBuf> = files.iter().cloned().collect();
    let texts = pages.iter().map(|page| read(page)).collect::<Result<Vec<_>, _>>()?;
    // Images of the pages travel with them.
    for (page, text) in pages.iter().zip(&texts) {
        let images =
            links(text).into_iter().filter(|link| Path::new(link).extension().is_some_and(|e| e == "svg"));
        files.extend(images.filter_map(|link| target(&page.to_string_lossy(), &link)));
    }
    for file in files.iter().filter(|file| !pages.contains(file)) {
        let bytes =
            fs::read(root().join(file)).map_err(|e| Failed::new(format!("`{}`: {e}", file.display())))?;
        write(&sources.join(file), &bytes)?;
    }
    for (page, text) in pages.iter().zip(&texts) {
        write(&sources.join(page), kept(page, text, &files).as_bytes())?;
    }
    write(&sources.join("SUMMARY.md"), from_root(&summary).as_bytes())
}

fn read(page: &Path) -> Result<String, Failed> {
    fs::read_to_string(root().join(page)).map_err(|e| Failed::new(format!("`{}`: {e}", page.display())))
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), Failed> {
    let made = path.parent().map_or(Ok(()), fs::create_dir_all);
    made.and_then(|()| fs::write(path, bytes))
        .map_err(|e| Failed::new(format!("`{}` cannot be written: {e}", path.display())))
}

/// The list of pages with links that start at the root.
fn from_root(summary: &str) -> String {
    edited(summary, &mut |link| target(SUMMARY, link).map(|path| path.display().to_string()))
}

/// A page of the book, in which links to files outside of the book are plain text.
fn kept(page: &Path, text: &str, files: &BTreeSet<PathBuf>) -> String {
    let page = page.to_string_lossy();
    edited(text, &mut |link| {
        let path = link.split('#').next().unwrap_or_default();
        let inside = path.is_empty() || link.contains("://");
        (inside || target(&page, link).is_some_and(|path| files.contains(&path))).then(|| link.to_owned())
    })
}

/// Targets of a text's links, outside of code.
fn links(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    edited(text, &mut |link| {
        found.push(link.to_owned());
        None
    });
    found
}

/// A text with other targets of its links; a link without one becomes its text. Code stays as it is.
fn edited(text: &str, change: &mut dyn FnMut(&str) -> Option<String>) -> String {
    let (mut out, mut fenced, mut code) = (String::new(), false, false);
    for line in text.split_inclusive('\n') {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        if fence || fenced {
            out.push_str(line);
            continue;
        }
        // A span of code ends in its own paragraph.
        code &= !line.trim().is_empty();
        let mut rest = line;
        while let Some(at) = rest.find(['`', ']']) {
            let (before, tail) = rest.split_at(at);
            out.push_str(before);
            let link = tail.strip_prefix("](").filter(|_| !code).and_then(|tail| tail.split_once(')'));
            if let Some((link, after)) = link {
                match change(link) {
                    Some(to) => out.extend(["](", &*to, ")"]),
                    None => {
                        if let Some(open) = out.rfind('[') {
                            out.remove(open);
                        }
                    }
                }
                rest = after;
            } else {
                code ^= tail.starts_with('`');
                let (mark, after) = tail.split_at(1);
                out.push_str(mark);
                rest = after;
            }
        }
        out.push_str(rest);
    }
    out
}

/// The file that a link of a page leads to, from the root on; `None` outside of the tree.
fn target(page: &str, link: &str) -> Option<PathBuf> {
    let path = link.split('#').next().filter(|path| !path.is_empty() && !path.contains("://"))?;
    let mut out = PathBuf::new();
    for part in Path::new(page).with_file_name(path).components() {
        match part {
            Component::Normal(name) => out.push(name),
            Component::CurDir => {}
            Component::ParentDir if out.pop() => {}
            _ => return None,
        }
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_out_of_the_book_become_text() {
        let files = BTreeSet::from([PathBuf::from("docs/b.md"), PathBuf::from("README.md")]);
        let text = "[`x`](../src/x.rs) [b\nb](b.md#c) `[no](no.md)` [r](../README.md) [w](https://w.org) [h](#h)\n```\n[f](f.rs)\n```\n";
        let expected = "`x` [b\nb](b.md#c) `[no](no.md)` [r](../README.md) [w](https://w.org) [h](#h)\n```\n[f](f.rs)\n```\n";
        assert_eq!(kept(Path::new("docs/a.md"), text, &files), expected);
    }

    #[test]
    fn links_of_the_summary_start_at_the_root() {
        assert_eq!(
            from_root("# S\n- [A](../A.md)\n- [G](guide.md)\n"),
            "# S\n- [A](A.md)\n- [G](docs/guide.md)\n"
        );
        assert_eq!(target("docs/SUMMARY.md", "../../x.md"), None);
    }

    #[test]
    fn book_toml_has_the_paths_of_this_command() {
        let toml = fs::read_to_string(root().join("book.toml")).unwrap();
        assert!(toml.contains(&format!("src = \"{SOURCES}\"")), "{toml}");
        let folder = FIRST.trim_end_matches("/index.html");
        assert!(toml.contains(&format!("build-dir = \"{folder}\"")), "{toml}");
    }
}
