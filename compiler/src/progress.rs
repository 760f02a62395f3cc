//! What the user sees while he waits: stage lines, warnings and bars, all on stderr.

use crate::human;
use anstyle::{AnsiColor, Style};
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{IsTerminal as _, Write as _};
use std::time::{Duration, Instant};

const VERB: Style = AnsiColor::Green.on_default().bold();
const WARNING: Style = AnsiColor::Yellow.on_default().bold();

/// Where stage lines and bars go.
#[derive(Clone, Debug)]
pub struct Progress {
    quiet: bool,
    bars: MultiProgress,
    draws: bool,
}

impl Progress {
    /// Lines on stderr unless `quiet`; bars too where stderr is a terminal and `MOEC_NO_PROGRESS` is not set.
    pub fn new(quiet: bool) -> Self {
        let wanted = std::env::var_os("MOEC_NO_PROGRESS").is_none_or(|v| v.is_empty());
        let draws = !quiet && wanted && std::io::stderr().is_terminal();
        let target = if draws { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        Self { quiet, bars: MultiProgress::with_draw_target(target), draws }
    }

    /// Says nothing.
    pub fn silent() -> Self {
        Self {
            quiet: true,
            bars: MultiProgress::with_draw_target(ProgressDrawTarget::hidden()),
            draws: false,
        }
    }

    /// Whether only errors, warnings and data are to be said.
    pub fn is_quiet(&self) -> bool {
        self.quiet
    }

    /// A line `     Packing layers.3`.
    pub fn stage(&self, verb: &str, what: &str) {
        if !self.quiet {
            self.line(&format!("{VERB}{verb:>12}{VERB:#} {what}"));
        }
    }

    /// The last line of a verb, with the time since `start`.
    pub fn finished(&self, what: &str, start: Instant) {
        self.stage("Finished", &format!("{what} in {:.2}s", start.elapsed().as_secs_f64()));
    }

    /// A line `warning: …`. It is said even when stage lines are not.
    pub fn warn(&self, message: &str) {
        self.line(&format!("{WARNING}warning{WARNING:#}: {message}"));
    }

    /// A bar over bytes.
    pub fn bytes(&self, verb: &str, total: u64) -> Bar {
        self.bar(verb, total, "{bytes}/{total_bytes} {bytes_per_sec}", || human::bytes(total))
    }

    /// A bar over things that are counted.
    pub fn items(&self, verb: &str, total: u64) -> Bar {
        self.bar(verb, total, "{pos}/{len}", || total.to_string())
    }

    fn bar(&self, verb: &str, total: u64, figures: &str, size: impl Fn() -> String) -> Bar {
        if !self.draws {
            self.stage(verb, &size());
            return Bar(ProgressBar::hidden());
        }
        // Two drawn bars never differ but in verb and figures, and both come from this crate.
        let template = format!("{{prefix:>12.green.bold}} [{{bar:24}}] {figures}  {{msg}}");
        let style = ProgressStyle::with_template(&template).unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar =
            ProgressBar::new(total).with_style(style.progress_chars("=> ")).with_prefix(verb.to_owned());
        let bar = self.bars.add(bar);
        bar.enable_steady_tick(Duration::from_millis(200));
        Bar(bar)
    }

    fn line(&self, line: &str) {
        // A closed stderr leaves nobody to tell.
        self.bars.suspend(|| {
            let _ = writeln!(anstream::stderr().lock(), "{line}");
        });
    }
}

/// A bar; it vanishes when it is finished or dropped.
#[derive(Debug)]
pub struct Bar(ProgressBar);

impl Bar {
    /// Sets what is being worked on.
    pub fn label(&self, what: &str) {
        if !self.0.is_hidden() {
            self.0.set_message(what.to_owned());
        }
    }

    /// Moves on.
    pub fn add(&self, n: u64) {
        self.0.inc(n);
    }

    /// Takes it off the screen.
    pub fn finish(&self) {
        self.0.finish_and_clear();
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.finish();
    }
}
