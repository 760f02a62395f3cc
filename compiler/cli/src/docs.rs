//! `moec docs`: the generated pages of `docs/`. Hidden; `cargo xtask docs` calls it.

mod models;
mod units;

use super::{Cli, fit, output, targets::evidence};
use clap::CommandFactory as _;
use moec_base::error::io_error;
use moec_base::{Error, Result, human};
use moec_bundle::toolchain::CROSS_TARGETS;
use moec_device::{BUILT_IN, Cache, Device, measured};
use std::fmt::Write as _;
use std::path::PathBuf;

/// A page: its file in `docs/`, and the function that writes it.
type Page = (&'static str, fn() -> Result<String>);

/// Every generated page.
pub const PAGES: &[Page] = &[
    ("cli.md", || Ok(command_line())),
    ("fit.md", fit::shapes::page),
    ("model-toml.md", || Ok(moec_config::markdown())),
    ("models.md", models::page),
    ("targets.md", targets),
];

/// Print a generated page of the documentation, or the names of all pages
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The page's file name
    pub page: Option<String>,
    /// Write manual pages of moec and its subcommands into this existing folder
    #[arg(long, value_name = "DIR", conflicts_with = "page")]
    pub man: Option<PathBuf>,
}

/// Prints a page, or the names of all pages.
///
/// # Errors
/// Fails if the page does not exist or the folder cannot be written.
pub fn run(args: &Args) -> Result<()> {
    if let Some(folder) = &args.man {
        return clap_mangen::generate_to(Cli::command(), folder).map_err(|e| io_error("write", folder, &e));
    }
    let names = || PAGES.iter().map(|(name, _)| *name).collect::<Vec<_>>();
    let Some(page) = &args.page else { return output::data(&names().join("\n")) };
    match PAGES.iter().find(|(name, _)| name == page) {
        Some((_, write)) => output::data(&write()?),
        None => Err(Error::usage(format!("there is no page `{page}`"))
            .hint(format!("the pages are {}", names().join(", ")))),
    }
}

/// Help of every subcommand.
fn command_line() -> String {
    let mut command = Cli::command().term_width(100);
    command.build();
    let mut out = String::from(
        "# Command line\n\nOutput of `moec SUBCOMMAND --help`.\n\n\
         Exit codes, of `moec` and of a bundle's `run`:\n\n\
         | code | when |\n|---|---|\n\
         | 0 | success |\n\
         | 1 | failure: a file is missing or invalid (`model.toml` included), this machine lacks a requirement, or a check failed |\n\
         | 2 | invalid command line, and nothing was done: an unknown option, a value out of range, an \
         option that this bundle, model or target does not support, or an output that exists |\n\
         | 130, 143 | interrupted by Ctrl-C, by SIGTERM |\n\n\
         `--json` prints one JSON value to stdout. Every subcommand that prints a result has it.\n",
    );
    let _ = write!(out, "\n```text\n{}\n```\n", trimmed(&mut command));
    for subcommand in command.get_subcommands_mut().filter(|c| !c.is_hide_set()) {
        let help = trimmed(subcommand);
        let _ = write!(out, "\n## moec {}\n\n```text\n{help}\n```\n", subcommand.get_name());
    }
    out
}

/// Long help without spaces at the ends of lines.
fn trimmed(command: &mut clap::Command) -> String {
    let help = command.render_long_help().to_string();
    help.lines().map(str::trim_end).collect::<Vec<_>>().join("\n").trim_end().to_owned()
}

/// The built-in devices, and the linkers for other machines.
fn targets() -> Result<String> {
    let mut out = String::from(
        "# Targets\n\n`--target` takes one of these names, or the path of a device file of your own (`moec targets NAME`\n\
         prints one to start from). Every target compiles on every machine. A CPU without a required feature rejects the\n\
         bundle before it starts, and names the feature.\n\n\
         *Evidence* states how results for a target were obtained; `moec targets` prints it, too. *Measured*: on silicon. *Tested*: executed\n\
         natively by the tests, without figures of speed. *Emulated*: executed by emulators and evaluators on the host, never on the device.\n\
         *Modelled*: a compute unit of the target is a model of hardware that is not for sale.\n\n\
         | name | evidence | what | triple | LLVM's name | caches for data | features needed at run time |\n\
         |---|---|---|---|---|---|---|\n",
    );
    for (name, _) in BUILT_IN {
        let d = Device::find(name).map_err(|e| Error::bug(e.to_string()))?;
        let (triple, cpu) = (&d.triple, &d.cpu);
        let [caches, features] = if d.is_native() {
            ["this machine's".to_owned(), "this machine's".to_owned()]
        } else {
            let cache = |c: &Cache| {
                let cores = c.shared_by.filter(|n| *n > 1).map_or_else(String::new, |n| format!(" for {n}"));
                format!("L{} {}{cores}", c.level, human::bytes(c.bytes))
            };
            [d.caches.iter().map(cache).collect::<Vec<_>>().join(", "), d.features.join(", ")]
        };
        let silicon = measured(name).map(|m| format!("{} on {}, {}", m.what, m.machine, m.when));
        let silicon: Vec<String> = silicon.collect();
        let found = evidence(&d)?;
        let evidence =
            if silicon.is_empty() { found.into() } else { format!("{found}: {}", silicon.join("; ")) };
        let _ = writeln!(
            out,
            "| `{name}` | {evidence} | {} | `{triple}` | `{cpu}` | {caches} | {features} |",
            d.description
        );
    }
    static_targets(&mut out)?;
    out.push_str(
        "\n## `run` for other machines\n\n\
         A bundle's object code needs nothing but moec. Its program `run` is linked by a C compiler on a machine of the\n\
         target's kind, from the runtime that moec carries; elsewhere by cargo and these, which compile the runtime once\n\
         per machine and target, for one to six minutes. `moec doctor` says what is missing, with the\n\
         command that installs it. Without them a bundle has all but `run`, and its folder `runner`, which has the\n\
         runtime's sources, builds with cargo on the machine that it is for (for this machine's kind: `--with-sources`). Cross-linked programs are static: they need no library of the system that\n\
         they run on. Those that load a library of the device themselves are linked with the operating system's.\n\n\
         Programs for macOS are linked on a Mac, against Apple's own libraries: `sh runner/build.sh` in the bundle\n\
         makes `run` there, with Xcode's command line tools and Rust. The object code is that of the build.\n\n\
         | system | linker | it is of | standard library | runs elsewhere with |\n|---|---|---|---|---|\n",
    );
    for c in CROSS_TARGETS {
        let _ = writeln!(
            out,
            "| `{}` | `{}` | {} | {} | {} |",
            c.triple,
            c.linker,
            c.install(),
            c.install_std(),
            if c.emulator.is_empty() { String::new() } else { format!("`{}`", c.emulator.join(" ")) }
        );
    }
    Ok(out)
}

/// Devices with static graphs, and the abilities of their units.
fn static_targets(out: &mut String) -> Result<()> {
    out.push_str(
        "\n## Static graphs\n\nUnits that run static graphs only. Which operators of the Graph an operation means, and the source of every\n\
         figure, are in the device's file (`moec targets NAME`). Groups of experts on\n\
         such a unit become packages; `--stop-after assign_residency --print-after assign_residency` shows the decisions.\n\n\
         | device | unit | bytes of a graph, at most | launch and wait | runs in another form | never runs |\n|---|---|---|---|---|---|\n",
    );
    for (name, _) in BUILT_IN {
        let d = Device::find(name).map_err(|e| Error::bug(e.to_string()))?;
        for u in d.units.iter().filter(|u| !u.legality.is_empty()) {
            let limit = u.graph_limit().map_or_else(String::new, |n| n.to_string());
            let never: Vec<&str> =
                u.legality.iter().filter(|row| !row.legal).map(|row| row.operation.as_str()).collect();
            let other = u.legality.iter().filter_map(|row| {
                let ops: Vec<_> = row.ops.iter().map(|op| format!("`{op}`")).collect();
                Some(format!("{} as `{}`", ops.join(", "), row.form.as_ref()?))
            });
            let (unit, launch, other) = (&u.name, u.launch_us(), other.collect::<Vec<_>>().join("; "));
            let _ = writeln!(
                out,
                "| `{name}` | {unit} | {limit} | {launch} µs | {other} | {} |",
                never.join(", ")
            );
        }
    }
    static_forms(out)
}

/// Formats of these units' graphs, with sources.
fn static_forms(out: &mut String) -> Result<()> {
    out.push_str(
        "\n`[unit.graph]` of a device file describes the format of a unit's graphs, each key with its source:\n\n\
         * `last_axis_bytes`: what the last axis of a tensor is padded to. Where that is more than the 2 bytes of a number,\n  \
         tensors inside of a graph are `[1, channels, 1, rows]`, experts stand side by side in the channels, and grouped\n  \
         convolutions compute several of them; a tensor inside with a last axis of 1 is refused. Without the key they are\n  \
         `[rows, channels, 1, 1]`, as every graph takes and gives them (NPUMoE, §4.2).\n\
         * `row_bytes`: what rows of a graph's inputs, results and states are multiples of; packages are read back and checked\n  \
         for it (NPUMoE, §3.2).\n\
         * `weights`: formats besides f16 that a graph may store, `q8` and `q4`. Codes and scales are then those of the\n  \
         CPU's weights, in `constexpr_blockwise_shift_scale`; matrices whose rows are not whole groups of 32 stay f16.\n\
         * `counted`: whether the limit on a graph counts the bytes that are `stored`, or those of f16 (`dense`).\n\
         * `cache_write`: how a chunk of a prompt comes into the KV cache. `product` blends it in by a matrix of zeros and\n  \
         ones, at any position; `slice_update` has a function for every place where a chunk of a prompt can begin, which\n  \
         looks at no more of the cache than is filled, and the product for rows that begin elsewhere.\n\n\
         | device | key | value | source |\n|---|---|---|---|\n",
    );
    for (name, _) in BUILT_IN {
        let d = Device::find(name).map_err(|e| Error::bug(e.to_string()))?;
        for u in &d.units {
            for (key, value, source) in u.graph.rows() {
                let _ = writeln!(out, "| `{name}` | `{key}` | {value} | {source} |");
            }
        }
    }
    Ok(())
}
