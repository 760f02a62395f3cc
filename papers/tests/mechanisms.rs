//! Checks of the list of mechanisms: named items exist, every state has its evidence, and the page is
//! current.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use moec_papers::mechanisms::{Mechanism, MechanismState, Paper, page, papers};
use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Text of a file in the tree; `None` if it does not exist.
fn source(file: &str) -> Option<String> {
    fs::read_to_string(root().join(file)).ok()
}

/// Whether a line of Rust defines an item of this name.
fn defines(line: &str, item: &str) -> bool {
    let words: Vec<&str> =
        line.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|w| !w.is_empty()).collect();
    let kinds = ["fn", "struct", "enum", "trait", "const", "static", "type", "mod"];
    let comment = line.trim_start().starts_with("//");
    !comment && words.windows(2).any(|w| kinds.contains(&w[0]) && w[1] == item)
}

/// Attributes of the test of this name; `None` if no function of this name has the attribute `test`.
fn attributes(text: &str, test: &str) -> Option<Vec<String>> {
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let at = lines.iter().position(|line| line.starts_with(&format!("fn {test}(")))?;
    let above = lines[..at].iter().rev().take_while(|l| l.starts_with("#[") || l.starts_with("///"));
    let attributes: Vec<String> = above.filter(|l| l.starts_with("#[")).map(|l| (*l).to_owned()).collect();
    attributes.iter().any(|a| a == "#[test]").then_some(attributes)
}

/// Rows of the runner's table of tests that only `--all` runs: program, and test (empty: the whole program).
fn left_out(tables: &str) -> Vec<(String, String)> {
    let (_, rest) = tables.split_once("SLOW: &[(&str, &str, &str)] = &[").unwrap();
    let (rows, _) = rest.split_once("];").unwrap();
    let strings: Vec<&str> = rows.split('"').skip(1).step_by(2).collect();
    let (rows, []) = strings.as_chunks::<3>() else { panic!("a row of other than three texts: {strings:?}") };
    rows.iter().map(|[program, test, _]| ((*program).to_owned(), (*test).to_owned())).collect()
}

/// Whether the runner omits a test of a file.
fn is_left_out(rows: &[(String, String)], file: &str, test: &str) -> bool {
    let stem = |name: &str| name.trim_end_matches(".rs").to_owned();
    rows.iter().any(|(program, slow)| {
        let program = program.rsplit('/').next().unwrap();
        let inside = file.split('/').any(|part| stem(part) == program);
        inside && (slow.is_empty() || slow.rsplit("::").next() == Some(test))
    })
}

/// Errors in a row of the list.
fn faults(m: &Mechanism, slow: &[(String, String)]) -> Vec<String> {
    let mut found = Vec::new();
    let mut fault = |what: String| found.push(format!("{}, {}: {what}", m.section, m.what));
    if !m.section.contains('§') && !m.section.contains("Algorithm") {
        fault("no section".to_owned());
    }
    if !m.what.ends_with('.') || m.why.as_ref().is_some_and(|why| !why.ends_with('.')) {
        fault("no sentence".to_owned());
    }
    let (needs_test, needs_reason) = match m.state {
        MechanismState::Executed => (true, false),
        MechanismState::Simulated => (true, true),
        MechanismState::Different | MechanismState::Missing => (false, true),
    };
    if needs_test && (m.tests.is_empty() || m.code.is_empty()) {
        fault("no code or no test".to_owned());
    }
    if needs_reason && m.why.is_none() {
        fault("no reason".to_owned());
    }
    for place in &m.code {
        let (file, item) = place.split_once('#').map_or((&**place, None), |(f, i)| (f, Some(i)));
        match (source(file), item) {
            (None, _) => fault(format!("there is no `{file}`")),
            (Some(text), Some(item)) if !text.lines().any(|line| defines(line, item)) => {
                fault(format!("`{file}` has no `{item}`"));
            }
            (Some(_), _) => {}
        }
    }
    for place in &m.tests {
        let Some((file, test)) = place.split_once("::") else {
            fault(format!("`{place}` names no test"));
            continue;
        };
        match source(file).map(|text| attributes(&text, test)) {
            None => fault(format!("there is no `{file}`")),
            Some(None) => fault(format!("`{file}` has no test `{test}`")),
            Some(Some(of)) if of.iter().any(|a| a.starts_with("#[ignore")) => {
                fault(format!("`{test}` is ignored"));
            }
            Some(Some(_)) if is_left_out(slow, file, test) => fault(format!("only `--all` runs `{test}`")),
            Some(Some(_)) => {}
        }
    }
    found
}

fn slow() -> Vec<(String, String)> {
    left_out(&source("xtask/src/suite/tables.rs").unwrap())
}

#[test]
fn mechanism_list_names_existing_code_with_evidence() {
    let (papers, slow) = (papers().unwrap(), slow());
    let names: Vec<&str> = papers.iter().map(|p| &*p.name).collect();
    assert_eq!(names, ["NPUMoE", "PowerInfer-2", "HybriMoE", "TriMoE", "MoBiLE"]);
    let wrong: Vec<String> =
        papers.iter().flat_map(|p| &p.mechanism).flat_map(|m| faults(m, &slow)).collect();
    assert!(wrong.is_empty(), "papers/mechanisms.toml:\n{}", wrong.join("\n"));
    for paper in &papers {
        let mut seen = HashSet::new();
        for m in &paper.mechanism {
            assert!(seen.insert(&m.what), "{}: `{}` is there twice", paper.name, m.what);
        }
        assert!(source(&format!("docs/{}", paper.page)).is_some(), "{}", paper.page);
    }
}

#[test]
fn invalid_mechanism_rows_are_detected() {
    let slow = slow();
    assert!(is_left_out(&slow, "tests/golden.rs", "all_families_of_2026"), "{slow:?}");
    assert!(!is_left_out(&slow, "tests/golden.rs", "six_families_of_2026"));
    let row = |state, code: &[&str], tests: &[&str], why: Option<&str>| Mechanism {
        section: "§1".to_owned(),
        what: "It does.".to_owned(),
        code: code.iter().map(|c| (*c).to_owned()).collect(),
        tests: tests.iter().map(|t| (*t).to_owned()).collect(),
        state,
        why: why.map(str::to_owned),
    };
    let own = "papers/tests/mechanisms.rs::invalid_mechanism_rows_are_detected";
    let code = "papers/src/mechanisms.rs#page";
    assert_eq!(faults(&row(MechanismState::Executed, &[code], &[own], None), &slow), [""; 0]);
    for (row, expected) in [
        (row(MechanismState::Executed, &[code], &[], None), "no code or no test"),
        (row(MechanismState::Missing, &[], &[], None), "no reason"),
        (
            row(MechanismState::Executed, &["papers/src/none.rs"], &[own], None),
            "there is no `papers/src/none.rs`",
        ),
        (row(MechanismState::Executed, &["papers/src/mechanisms.rs#pages"], &[own], None), "has no `pages`"),
        (
            row(MechanismState::Executed, &[code], &["papers/tests/mechanisms.rs::row"], None),
            "has no test `row`",
        ),
        (
            row(MechanismState::Executed, &[code], &["tests/replace.rs::replacing_child_process"], None),
            "is ignored",
        ),
        (
            row(MechanismState::Executed, &[code], &["tests/golden.rs::all_families_of_2026"], None),
            "only `--all`",
        ),
    ] {
        let found = faults(&row, &slow);
        assert!(found.len() == 1 && found[0].contains(expected), "{found:?}");
    }
}

/// The page's table of counts equals that of the list, row by row.
#[test]
fn mechanism_counts_match_the_list() {
    let (papers, page) = (papers().unwrap(), page().unwrap());
    let of = |papers: &[Paper]| -> Vec<usize> {
        let states = MechanismState::ALL.map(|s| papers.iter().map(|p| p.count(s)).sum::<usize>());
        [states.iter().sum::<usize>()].into_iter().chain(states).collect()
    };
    let shown = |name: &str| -> Vec<usize> {
        let row = page.lines().find(|line| line.starts_with(&format!("| {name}"))).expect(name);
        row.split(" | ").skip(1).map(|n| n.trim_end_matches(" |").parse().unwrap()).collect()
    };
    for paper in &papers {
        assert_eq!(shown(&format!("[{}]", paper.name)), of(std::slice::from_ref(paper)), "{}", paper.name);
        for state in MechanismState::ALL {
            let section = page.split(&format!("\n## {}\n", paper.name)).nth(1).unwrap();
            let section = section.split("\n## ").next().unwrap();
            assert_eq!(section.matches(&format!(". | {state} | ")).count(), paper.count(state), "{state}");
        }
    }
    assert_eq!(shown("all "), of(&papers));
}

#[test]
fn mechanisms_page_is_current() {
    let stored = source("docs/mechanisms.md").unwrap_or_default();
    assert!(
        stored.trim_end() == page().unwrap().trim_end(),
        "docs/mechanisms.md is stale\nhint: cargo xtask docs"
    );
}
