//! `moec docs`: the generated pages of `docs/`. Hidden; `cargo xtask docs` calls it.

use super::{Cli, output};
use crate::import::FAMILIES;
use crate::{Error, Result, config};
use clap::CommandFactory as _;
use moec_device::{BUILT_IN, Device};
use std::fmt::Write as _;

/// A page: its file in `docs/`, and what writes it.
type Page = (&'static str, fn() -> Result<String>);

/// Every generated page.
pub const PAGES: &[Page] = &[
    ("cli.md", || Ok(command_line())),
    ("model-toml.md", || Ok(config::markdown())),
    ("models.md", || Ok(models())),
    ("targets.md", targets),
];

/// Print a generated page of the documentation, or the names of all
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The page's file name
    pub page: Option<String>,
}

/// Prints it.
///
/// # Errors
/// No such page.
pub fn run(args: &Args) -> Result<()> {
    let names = || PAGES.iter().map(|(name, _)| *name).collect::<Vec<_>>();
    let Some(page) = &args.page else { return output::data(&names().join("\n")) };
    match PAGES.iter().find(|(name, _)| name == page) {
        Some((_, write)) => output::data(&write()?),
        None => Err(Error::usage(format!("there is no page `{page}`"))
            .hint(format!("the pages are {}", names().join(", ")))),
    }
}

/// Help of every verb.
fn command_line() -> String {
    let mut command = Cli::command().term_width(100);
    command.build();
    let mut out = String::from(
        "# Command line\n\nWhat `moec VERB --help` prints. Exit code: 0, 1 (failed), 2 (bad use).\n",
    );
    let _ = write!(out, "\n```text\n{}\n```\n", trimmed(&mut command));
    for verb in command.get_subcommands_mut().filter(|c| !c.is_hide_set()) {
        let help = trimmed(verb);
        let _ = write!(out, "\n## moec {}\n\n```text\n{help}\n```\n", verb.get_name());
    }
    out
}

/// Long help without spaces at the ends of lines.
fn trimmed(command: &mut clap::Command) -> String {
    let help = command.render_long_help().to_string();
    help.lines().map(str::trim_end).collect::<Vec<_>>().join("\n").trim_end().to_owned()
}

/// The built-in devices.
fn targets() -> Result<String> {
    let mut out = String::from(
        "# Targets\n\n`--target` takes one of these names, or the path of a device file of your own (`moec targets NAME`\n\
         prints one to start from).\n\n| name | what | LLVM's name | features needed at run time |\n|---|---|---|---|\n",
    );
    for (name, _) in BUILT_IN {
        let d = Device::find(name).map_err(|e| Error::bug(e.to_string()))?;
        let features = if d.is_native() { "this machine's".to_owned() } else { d.features.join(", ") };
        let _ = writeln!(out, "| `{name}` | {} | `{}` | {features} |", d.description, d.cpu);
    }
    Ok(out)
}

/// The supported families.
fn models() -> String {
    let mut out = String::from(
        "# Models\n\nA checkpoint is supported when the first of its `architectures` (in `config.json`) stands here. Anything\n\
         else is refused by name.\n\n| family | `model_type` | `architectures` | published checkpoints |\n|---|---|---|---|\n",
    );
    for f in FAMILIES {
        let names: Vec<_> = f.architectures.iter().map(|a| format!("`{a}`")).collect();
        let _ = writeln!(
            out,
            "| {} | `{}` | {} | {} |",
            f.title,
            f.name,
            names.join(", "),
            f.examples.join(", ")
        );
    }
    out
}
