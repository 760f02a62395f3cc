//! `cargo xtask deny`: licences, sources, bans and advisories of all crates, by cargo-deny as `deny.toml`
//! says.

use crate::shell::{Failed, cache_dir, output, program, root, run as finish, stage};
use std::ffi::OsString;

/// The version that is installed if cargo-deny is missing.
const VERSION: &str = "0.20.2";
/// Workspaces with a separate lock file.
const WORKSPACES: [&str; 3] = ["Cargo.toml", "fuzz/Cargo.toml", "targets/coreml/helper/Cargo.toml"];

/// Checks every workspace; advisories where their database can be fetched.
pub(crate) fn run() -> Result<(), Failed> {
    let deny = installed()?;
    let command = |workspace: &str| {
        let mut command = program(&deny);
        command.args(["--locked", "--config"]).arg(root().join("deny.toml"));
        command.args(["--manifest-path", workspace]);
        command
    };
    let fetched = output(command(WORKSPACES[0]).args(["fetch", "db"])).is_some();
    for workspace in WORKSPACES {
        stage("Checking", workspace);
        let mut check = command(workspace);
        check.args(["check", "licenses", "bans", "sources"]).args(fetched.then_some("advisories"));
        finish(&mut check)?;
    }
    if !fetched {
        stage(
            "Skipped",
            "advisories: their database cannot be fetched from here (`cargo deny check advisories` says why)",
        );
    }
    Ok(())
}

/// cargo-deny: the one that is installed already, or one in moec's cache folder.
fn installed() -> Result<OsString, Failed> {
    let folder = cache_dir()?.join("deny");
    let own = folder.join("bin/cargo-deny");
    let found = [OsString::from("cargo-deny"), own.clone().into()]
        .into_iter()
        .find(|path| output(program(path).arg("--version")).is_some());
    if let Some(path) = found {
        return Ok(path);
    }
    stage("Installing", &format!("cargo-deny {VERSION}, which takes some minutes"));
    let mut install = crate::shell::cargo("install", None);
    install.args(["cargo-deny", "--locked", "--version", VERSION, "--root"]).arg(&folder);
    finish(&mut install)?;
    Ok(own.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::notices;
    use crate::shell::cargo;
    use std::fs;

    /// The strings of a list of `deny.toml`.
    fn list<'t>(text: &'t str, key: &str) -> Vec<&'t str> {
        let (_, rest) = text.split_once(&format!("\n{key} = [")).expect("the list is there");
        let (list, _) = rest.split_once(']').expect("the list ends");
        list.split('"').skip(1).step_by(2).collect()
    }

    /// Whether an expression of licences is satisfied. `AND` binds more closely than `OR`; manifests here do
    /// not nest deeper than `(a OR b) AND c`.
    fn is_met_by(licence: &str, allowed: &[&str]) -> bool {
        let any = |text: &str| {
            text.replace('/', " OR ").split(" OR ").any(|one| {
                one.split(" AND ").all(|one| allowed.contains(&one.trim().trim_matches(['(', ')'])))
            })
        };
        if licence.starts_with('(') { licence.split(" AND ").all(any) } else { any(licence) }
    }

    /// `cargo xtask deny` checks the licences of all targets and workspaces. Without cargo-deny, this test
    /// checks those of this machine's crates.
    #[test]
    fn licences_of_all_crates_are_allowed() {
        let text = fs::read_to_string(root().join("deny.toml")).unwrap();
        let allowed = list(&text, "allow");
        assert!(allowed.contains(&"MIT") && !allowed.iter().any(|name| name.contains("GPL")));
        let crates =
            notices::tree(cargo("tree", None).args(["--workspace", "-e", "normal,build,dev"])).unwrap();
        assert!(crates.len() > 100, "cargo lists the crates");
        for of in crates {
            assert!(
                is_met_by(&of.licence, &allowed),
                "{} {} is under `{}`, which deny.toml does not allow",
                of.name,
                of.version,
                of.licence
            );
        }
    }

    #[test]
    fn licence_expressions_are_checked_against_the_allowed() {
        let allowed = ["MIT", "Unicode-3.0"];
        for licence in ["MIT", "GPL-3.0 OR MIT", "Apache-2.0/MIT", "(MIT OR Apache-2.0) AND Unicode-3.0"] {
            assert!(is_met_by(licence, &allowed), "{licence}");
        }
        for licence in ["", "GPL-3.0", "MIT AND GPL-3.0", "(MIT OR Apache-2.0) AND NCSA"] {
            assert!(!is_met_by(licence, &allowed), "{licence}");
        }
    }

    /// Builds with `--locked`, and cargo-deny, refuse a lock file that does not fit the manifests.
    #[test]
    fn lock_files_of_all_workspaces_are_fresh() {
        for workspace in WORKSPACES {
            let mut tree = cargo("tree", None);
            let out = tree.args(["--locked", "--quiet", "--manifest-path", workspace]).output().unwrap();
            // Without a network, cargo may lack a crate's manifest, and reports that instead.
            let stderr = String::from_utf8_lossy(&out.stderr);
            assert!(
                !stderr.contains("--locked"),
                "{workspace}: {stderr}\nhint: `cargo update -w --manifest-path {workspace}`"
            );
        }
    }
}
