//! Progress for the user: stage lines, warnings and bars, all on stderr.
//!
//! | | on a terminal | elsewhere | under `--verbose` |
//! |---|---|---|---|
//! | [`Progress::stage`]: what stays true | a line that stays | a line | |
//! | [`Progress::phase`], [`Progress::items`], [`Progress::bytes`]: what goes on now | a bar, gone when it ends | a line, and one every ten seconds | |
//! | [`Progress::detail`]: what happens within | in the bar, if anywhere | nothing | a line that stays |

use crate::human;
use anstyle::{AnsiColor, Style};
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{IsTerminal as _, Write as _};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

const VERB: Style = AnsiColor::Green.on_default().bold();
/// Time between lines of a phase where no bar is drawn.
const INTERVAL: Duration = Duration::from_secs(10);
const WARNING: Style = AnsiColor::Yellow.on_default().bold();

/// Destination of stage lines and bars.
#[derive(Clone, Debug)]
pub struct Progress {
    quiet: bool,
    verbose: bool,
    bars: MultiProgress,
    draws: bool,
    /// Whether phases have lines as they go on.
    reports: bool,
}

impl Progress {
    /// Lines on stderr unless `quiet`; bars in their place where stderr is a terminal. With `MOEC_NO_PROGRESS` there are neither bars nor
    /// lines of how far a phase is.
    /// `verbose`: details have lines, too.
    pub fn new(quiet: bool, verbose: bool) -> Self {
        let wanted = std::env::var_os("MOEC_NO_PROGRESS").is_none_or(|v| v.is_empty());
        let draws = !quiet && wanted && std::io::stderr().is_terminal();
        let target = if draws { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let reports = !quiet && wanted && !draws;
        Self {
            quiet,
            verbose: verbose && !quiet,
            bars: MultiProgress::with_draw_target(target),
            draws,
            reports,
        }
    }

    /// Says nothing.
    pub fn silent() -> Self {
        Self {
            quiet: true,
            verbose: false,
            bars: MultiProgress::with_draw_target(ProgressDrawTarget::hidden()),
            draws: false,
            reports: false,
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
        let bar = self.bar(verb, Unit::None, None, "{spinner} {msg} {elapsed:.dim}", || what.to_owned());
        bar.label(what);
        bar
    }

    /// A bar over bytes.
    pub fn bytes(&self, verb: &str, total: u64) -> Bar {
        let figures = "[{bar:24}] {bytes}/{total_bytes} {bytes_per_sec}  {msg}";
        self.bar(verb, Unit::Bytes, Some(total), figures, || human::bytes(total))
    }

    /// A bar over things that are counted; `unit` is their name, in the plural.
    pub fn items(&self, verb: &str, total: u64, unit: &str) -> Bar {
        let figures = format!("[{{bar:24}}] {{pos}}/{{len}} {unit}  {{msg}}");
        let said = || if total == 1 { singular(unit) } else { format!("{total} {unit}") };
        self.bar(verb, Unit::Items(unit.to_owned()), Some(total), &figures, said)
    }

    fn bar(
        &self,
        verb: &str,
        unit: Unit,
        total: Option<u64>,
        figures: &str,
        said: impl Fn() -> String,
    ) -> Bar {
        if !self.draws {
            self.stage(verb, &said());
            let bar = ProgressBar::with_draw_target(total, ProgressDrawTarget::hidden());
            let reports = self.reports.then(|| {
                let (progress, verb, said) = (self.clone(), verb.to_owned(), said());
                Reports::start(&bar, unit, said, INTERVAL, move |line| progress.stage(&verb, line))
            });
            return Bar { bar, _reports: reports };
        }
        // Every template is of this crate.
        let template = format!("{{prefix:>12.green.bold}} {figures}");
        let style = ProgressStyle::with_template(&template).unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = total.map_or_else(ProgressBar::new_spinner, ProgressBar::new);
        let bar = self.bars.add(bar.with_style(style.progress_chars("=> ")).with_prefix(verb.to_owned()));
        bar.enable_steady_tick(Duration::from_millis(200));
        Bar { bar, _reports: None }
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

/// What a phase counts.
#[derive(Clone, Debug)]
enum Unit {
    /// Nothing: its length is not known.
    None,
    Bytes,
    /// Things of this name, in the plural.
    Items(String),
}

impl Unit {
    /// How far a bar is, in words.
    fn place(&self, bar: &ProgressBar, what: &str) -> String {
        let (done, of) = (bar.position(), bar.length().unwrap_or_default());
        match self {
            Self::None => what.to_owned(),
            Self::Bytes => format!("{} of {}", human::bytes(done), human::bytes(of)),
            Self::Items(unit) => format!("{done} of {of} {unit}"),
        }
    }
}

/// Lines of how far a phase is, where no bar is drawn, until it is dropped.
#[derive(Debug)]
struct Reports {
    _ends: Sender<()>,
}

impl Reports {
    /// Writes a line after each `interval`.
    fn start(
        bar: &ProgressBar,
        unit: Unit,
        what: String,
        interval: Duration,
        write: impl Fn(&str) + Send + 'static,
    ) -> Self {
        let (ends, ended) = channel();
        let (bar, start) = (bar.clone(), Instant::now());
        // Where no thread can be started there are no lines.
        let _ = std::thread::Builder::new().name("progress".to_owned()).spawn(move || {
            while ended.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) && !bar.is_finished() {
                write(&format!("{} after {} s", unit.place(&bar, &what), start.elapsed().as_secs()));
            }
        });
        Self { _ends: ends }
    }
}

/// A bar; it vanishes when it is finished or dropped.
#[derive(Debug)]
pub struct Bar {
    bar: ProgressBar,
    /// Lines in its place, where it is not drawn.
    _reports: Option<Reports>,
}

impl Bar {
    /// Sets what is being worked on.
    pub fn label(&self, what: &str) {
        if !self.bar.is_hidden() {
            self.bar.set_message(what.to_owned());
        }
    }

    /// Moves on.
    pub fn add(&self, n: u64) {
        self.bar.inc(n);
    }

    /// Sets how far it is, and of how much.
    pub fn place(&self, done: u64, of: u64) {
        self.bar.set_length(of);
        self.bar.set_position(done);
    }

    /// Takes it off the screen while `f` writes there.
    pub fn suspend<R>(&self, f: impl FnOnce() -> R) -> R {
        self.bar.suspend(f)
    }

    /// Takes it off the screen.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.finish();
    }
}

#[cfg(test)]
mod tests {
    use super::{ProgressBar, Reports, Unit, singular};
    use std::sync::mpsc::channel;
    use std::time::Duration;

    /// A phase without a bar: lines of how far it is, as long as it lasts.
    #[test]
    fn a_phase_without_a_bar_has_lines_at_intervals() {
        let bar = ProgressBar::hidden();
        bar.set_length(8);
        bar.inc(3);
        let (to, lines) = channel();
        let start = |unit, what: &str| {
            let to = to.clone();
            let write = move |line: &str| drop(to.send(line.to_owned()));
            Reports::start(&bar, unit, what.to_owned(), Duration::from_millis(5), write)
        };
        let reports = start(Unit::Items("windows of text".to_owned()), "");
        let next = || lines.recv_timeout(Duration::from_mins(1)).unwrap();
        assert_eq!(next(), "3 of 8 windows of text after 0 s");
        bar.inc(1);
        while next() != "4 of 8 windows of text after 0 s" {}
        drop(reports);
        let reports = start(Unit::None, "`run`");
        while next() != "`run` after 0 s" {}
        drop(reports);
        drop(to);
        // Both threads end, and with them what they write to.
        while lines.recv_timeout(Duration::from_mins(1)).is_ok() {}
        assert_eq!(Unit::Bytes.place(&bar, ""), "4 bytes of 8 bytes");
    }

    #[test]
    fn one_thing_is_no_plural() {
        assert_eq!(["tokens", "windows of text"].map(singular), ["1 token", "1 window of text"]);
    }
}
