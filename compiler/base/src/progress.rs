//! Progress for the user: stage lines, warnings and bars, all on stderr.
//!
//! | | on a terminal | elsewhere | under `--verbose` |
//! |---|---|---|---|
//! | [`Progress::stage`]: what stays true | a line that stays | a line | |
//! | [`Progress::phase`], [`Progress::items`], [`Progress::bytes`]: what goes on now | a bar, gone when it ends | a line | |
//! | [`Progress::detail`]: what happens within | in the bar, if anywhere | nothing | a line that stays |

use crate::human;
use anstyle::{AnsiColor, Style};
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{IsTerminal as _, Write as _};
use std::time::{Duration, Instant};

const VERB: Style = AnsiColor::Green.on_default().bold();
const WARNING: Style = AnsiColor::Yellow.on_default().bold();

/// Destination of stage lines and bars.
#[derive(Clone, Debug)]
pub struct Progress {
    quiet: bool,
    verbose: bool,
    bars: MultiProgress,
    draws: bool,
}

impl Progress {
    /// Lines on stderr unless `quiet`; bars in their place where stderr is a terminal and `MOEC_NO_PROGRESS` is not set.
    /// `verbose`: details have lines, too.
    pub fn new(quiet: bool, verbose: bool) -> Self {
        let wanted = std::env::var_os("MOEC_NO_PROGRESS").is_none_or(|v| v.is_empty());
        let draws = !quiet && wanted && std::io::stderr().is_terminal();
        let target = if draws { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        Self { quiet, verbose: verbose && !quiet, bars: MultiProgress::with_draw_target(target), draws }
    }

    /// Says nothing.
    pub fn silent() -> Self {
        Self {
            quiet: true,
            verbose: false,
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

    /// The last line of a subcommand, with the time since `start`.
    pub fn finished(&self, what: &str, start: Instant) {
        self.stage("Finished", &format!("{what} in {:.2}s", start.elapsed().as_secs_f64()));
    }

    /// A line `warning: …`. It is said even when stage lines are not.
    pub fn warn(&self, message: &str) {
        self.line(&format!("{WARNING}warning{WARNING:#}: {message}"));
    }

    /// A line of what happens within a phase, for those who want to know everything.
    pub fn detail(&self, verb: &str, what: &str) {
        if self.verbose {
            self.stage(verb, what);
        }
    }

    /// Whether bars are drawn. Where they are not, a caller that shows nothing else prints lines.
    pub fn draws(&self) -> bool {
        self.draws
    }

    /// A phase whose length is not known: it lasts until the bar is dropped.
    pub fn phase(&self, verb: &str, what: &str) -> Bar {
        let bar = self.bar(verb, None, "{spinner} {msg} {elapsed:.dim}", || what.to_owned());
        bar.label(what);
        bar
    }

    /// A bar over bytes.
    pub fn bytes(&self, verb: &str, total: u64) -> Bar {
        let figures = "[{bar:24}] {bytes}/{total_bytes} {bytes_per_sec}  {msg}";
        self.bar(verb, Some(total), figures, || human::bytes(total))
    }

    /// A bar over things that are counted; `unit` is their name, in the plural.
    pub fn items(&self, verb: &str, total: u64, unit: &str) -> Bar {
        let figures = format!("[{{bar:24}}] {{pos}}/{{len}} {unit}  {{msg}}");
        let said = || if total == 1 { singular(unit) } else { format!("{total} {unit}") };
        self.bar(verb, Some(total), &figures, said)
    }

    fn bar(&self, verb: &str, total: Option<u64>, figures: &str, said: impl Fn() -> String) -> Bar {
        if !self.draws {
            self.stage(verb, &said());
            return Bar(ProgressBar::hidden());
        }
        // Every template is of this crate.
        let template = format!("{{prefix:>12.green.bold}} {figures}");
        let style = ProgressStyle::with_template(&template).unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = total.map_or_else(ProgressBar::new_spinner, ProgressBar::new);
        let bar = self.bars.add(bar.with_style(style.progress_chars("=> ")).with_prefix(verb.to_owned()));
        bar.enable_steady_tick(Duration::from_millis(200));
        Bar(bar)
    }

    fn line(&self, line: &str) {
        // A closed stderr cannot be reported anywhere.
        self.bars.suspend(|| {
            let _ = writeln!(anstream::stderr().lock(), "{line}");
        });
    }
}

/// `1 token` of `tokens`: units are regular plurals, perhaps with words after them.
fn singular(unit: &str) -> String {
    let (noun, rest) = unit.split_once(' ').map_or((unit, String::new()), |(n, r)| (n, format!(" {r}")));
    format!("1 {}{rest}", noun.strip_suffix('s').unwrap_or(noun))
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

    /// Sets how far it is, and of how much.
    pub fn place(&self, done: u64, of: u64) {
        self.0.set_length(of);
        self.0.set_position(done);
    }

    /// Takes it off the screen while `f` writes there.
    pub fn suspend<R>(&self, f: impl FnOnce() -> R) -> R {
        self.0.suspend(f)
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

#[cfg(test)]
mod tests {
    use super::singular;

    #[test]
    fn one_thing_is_no_plural() {
        assert_eq!(["tokens", "windows of text"].map(singular), ["1 token", "1 window of text"]);
    }
}
