//! `cargo xtask fault-injection`: damaged checkpoints and bundles by the thousand. It uses the test that runs
//! a hundred of them (`tests/fault_injection.rs`, which lists the requirements).

use crate::setup;
use crate::shell::{self, Failed, cargo, shown, stage};

/// Cases where none are named.
const CASES: &str = "1000";
/// Options and the variables that carry them to the test.
const OPTIONS: [(&str, &str, &str); 4] = [
    ("--cases", "MOEC_FAULTS_CASES", "N: how many cases [default: 1000]"),
    ("--seed", "MOEC_FAULTS_SEED", "S: what they are drawn from [default: 0]"),
    (
        "--only",
        "MOEC_FAULTS_ONLY",
        "KIND: one kind of damage, such as `bytes`, `file` or `toml`; a wrong one lists them",
    ),
    ("--case", "MOEC_FAULTS_CASE", "NUMBER: that case alone; what it leaves is kept if it fails"),
];

/// Runs the cases that the arguments name.
pub(crate) fn run(args: &[String]) -> Result<(), Failed> {
    if args.iter().any(|a| a == "--help" || a == "-h") {
        stage("Usage", "cargo xtask fault-injection [OPTIONS]");
        for (name, _, what) in OPTIONS {
            stage(name, what);
        }
        return Ok(());
    }
    let values = values(args)?;
    let llvm = setup::run()?;
    // The usual profile: the damaged files are read by unoptimised code, and compiled kernels are equally
    // fast.
    let mut test = cargo("test", Some(&llvm));
    test.args([
        "--locked",
        "--package",
        "moec",
        "--test",
        "end_to_end",
        "--",
        "--nocapture",
        "fault_injection::",
    ])
    .env(OPTIONS[0].1, CASES);
    test.envs(values);
    stage("Running", &shown(&test));
    shell::run(&mut test)
}

/// Variables and values of the options.
fn values(args: &[String]) -> Result<Vec<(&'static str, String)>, Failed> {
    let mut words = args.iter();
    let mut values = Vec::new();
    while let Some(word) = words.next() {
        let (name, joined) = word.split_once('=').map_or((word.as_str(), None), |(n, v)| (n, Some(v)));
        let Some((_, variable, _)) = OPTIONS.iter().find(|(n, ..)| *n == name) else {
            return Err(Failed::new(format!("there is no option `{name}`"))
                .hint("`cargo xtask fault-injection --help` lists them"));
        };
        let value = joined.map(str::to_owned).or_else(|| words.next().cloned());
        let value = value.ok_or_else(|| Failed::new(format!("`{name}` needs a value")))?;
        if *variable != "MOEC_FAULTS_ONLY" && value.parse::<u64>().is_err() {
            return Err(Failed::new(format!("`{name}` is `{value}`, expected a number")));
        }
        values.push((*variable, value));
    }
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::values;

    #[test]
    fn options_become_environment_variables() {
        let of = |words: &[&str]| values(&words.iter().map(|w| (*w).to_owned()).collect::<Vec<_>>());
        let found = of(&["--seed", "7", "--only=file"]).ok();
        let expected =
            [("MOEC_FAULTS_SEED", "7"), ("MOEC_FAULTS_ONLY", "file")].map(|(n, v)| (n, v.to_owned()));
        assert_eq!(found, Some(expected.to_vec()));
        for wrong in [&["--seeds", "7"][..], &["--seed"], &["--cases", "many"], &["7"]] {
            assert!(of(wrong).is_err(), "{wrong:?}");
        }
    }
}
