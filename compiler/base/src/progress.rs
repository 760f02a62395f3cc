//! Progress for the user: stage lines, warnings and progress bars, all on stderr.
//!
//! | | on a terminal | elsewhere | under `--verbose` |
//! |---|---|---|---|
//! | [`Progress::stage`]: a completed step | a line that stays | a line | |
//! | [`Progress::phase`], [`Progress::items`], [`Progress::bytes`]: the current work | a bar, gone when it ends | a line, and one every ten seconds | |
//! | [`Progress::detail`]: a detail of it | in the bar, if anywhere | nothing | a line that stays |

use crate::human;
use anstyle::{AnsiColor, Style};
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{IsTerminal as _, Write as _};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

const VERB: Style = AnsiColor::Green.on_default().bold();
/// Time between the lines of a phase without a bar.
const INTERVAL: Duration = Duration::from_secs(10);
const WARNING: Style = AnsiColor::Yellow.on_default().bold();

/// Destination of stage lines and bars.
#[derive(Clone, Debug)]
pub struct Progress {
    quiet: bool,
    verbose: bool,
    /// Whether warnings are written.
    warns: bool,
    bars: MultiProgress,
    draws: bool,
    /// Whether phases write lines while they run.
    reports: bool,
}

impl Progress {
    /// Stage lines on stderr unless `quiet`, and progress bars where stderr is a terminal. `MOEC_NO_PROGRESS`
    /// turns off bars and the lines that replace them. With `verbose`, details have lines, too.
    pub fn new(quiet: bool, verbose: bool) -> Self {
        let enabled = std::env::var_os("MOEC_NO_PROGRESS").is_none_or(|v| v.is_empty());
        let draws = !quiet && enabled && std::io::stderr().is_terminal();
        let target = if draws { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let reports = !quiet && enabled && !draws;
        Self {
            quiet,
            verbose: verbose && !quiet,
            warns: true,
            bars: MultiProgress::with_draw_target(target),
            draws,
            reports,
        }
    }

    /// A destination with warnings alone.
    pub fn silent() -> Self {
        Self {
            quiet: true,
            verbose: false,
            warns: true,
            bars: MultiProgress::with_draw_target(ProgressDrawTarget::hidden()),
            draws: false,
            reports: false,
        }
    }

    /// A destination without any output, for other hosts than the first.
    pub fn muted() -> Self {
        Self { warns: false, ..Self::silent() }
    }

    /// Whether only errors, warnings and data are written.
    pub fn is_quiet(&self) -> bool {
        self.quiet
    }

    /// Writes a stage line: `     Packing layers.3`.
    pub fn stage(&self, verb: &str, what: &str) {
        if !self.quiet {
            self.line(&format!("{VERB}{verb:>12}{VERB:#} {what}"));
        }
    }

    /// Writes the last line of a subcommand, with the time since `start`.
    pub fn finished(&self, what: &str, start: Instant) {
        self.stage("Finished", &format!("{what} in {:.2}s", start.elapsed().as_secs_f64()));
    }

    /// Writes a line `warning: …`, even when stage lines are off.
    pub fn warn(&self, message: &str) {
        if self.warns {
            self.line(&format!("{WARNING}warning{WARNING:#}: {message}"));
        }
    }

    /// Writes a detail within a phase, for `--verbose`.
    pub fn detail(&self, verb: &str, what: &str) {
        if self.verbose {
            self.stage(verb, what);
        }
    }

    /// Whether bars are drawn. If they are not, callers without other output print lines.
    pub fn draws(&self) -> bool {
        self.draws
    }

    /// Begins a phase of unknown length, which lasts until the bar is dropped.
    pub fn phase(&self, verb: &str, what: &str) -> Bar {
        let bar = self.bar(verb, Unit::None, None, "{spinner} {msg} {elapsed:.dim}", || what.to_owned());
        bar.label(what);
        bar
    }

    /// Begins a bar over bytes.
    pub fn bytes(&self, verb: &str, total: u64) -> Bar {
        let figures = "[{bar:24}] {bytes}/{total_bytes} {bytes_per_sec}  {msg}";
        self.bar(verb, Unit::Bytes, Some(total), figures, || human::bytes(total))
    }

    /// Begins a bar over counted things; `unit` is their name, in the plural.
    pub fn items(&self, verb: &str, total: u64, unit: &str) -> Bar {
        let figures = format!("[{{bar:24}}] {{pos}}/{{len}} {unit}  {{msg}}");
        let text = || if total == 1 { singular(unit) } else { format!("{total} {unit}") };
        self.bar(verb, Unit::Items(unit.to_owned()), Some(total), &figures, text)
    }

    fn bar(
        &self,
        verb: &str,
        unit: Unit,
        total: Option<u64>,
        figures: &str,
        text: impl Fn() -> String,
    ) -> Bar {
        if !self.draws {
            self.stage(verb, &text());
            let bar = ProgressBar::with_draw_target(total, ProgressDrawTarget::hidden());
            let reports = self.reports.then(|| {
                let (progress, verb, text) = (self.clone(), verb.to_owned(), text());
                Reports::start(&bar, unit, text, INTERVAL, move |line| progress.stage(&verb, line))
            });
            return Bar { bar, _reports: reports };
        }
        // All templates are constants of this crate.
        let template = format!("{{prefix:>12.green.bold}} {figures}");
        let style = ProgressStyle::with_template(&template).unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = total.map_or_else(ProgressBar::new_spinner, ProgressBar::new);
        let bar = self.bars.add(bar.with_style(style.progress_chars("=> ")).with_prefix(verb.to_owned()));
        bar.enable_steady_tick(Duration::from_millis(200));
        Bar { bar, _reports: None }
    }

    fn line(&self, line: &str) {
        // If stderr is closed, that cannot be reported anywhere.
        self.bars.suspend(|| {
            let _ = writeln!(anstream::stderr().lock(), "{line}");
        });
    }
}

/// `1 token` for `tokens`. Units are regular plurals, perhaps with words after them.
fn singular(unit: &str) -> String {
    let (noun, rest) = unit.split_once(' ').map_or((unit, String::new()), |(n, r)| (n, format!(" {r}")));
    format!("1 {}{rest}", noun.strip_suffix('s').unwrap_or(noun))
}

/// Unit in which a phase counts.
#[derive(Clone, Debug)]
enum Unit {
    /// None: the length of the phase is unknown.
    None,
    Bytes,
    /// Counted things with this name, in the plural.
    Items(String),
}

impl Unit {
    /// Position of a bar, as text.
    fn place(&self, bar: &ProgressBar, what: &str) -> String {
        let (done, of) = (bar.position(), bar.length().unwrap_or_default());
        match self {
            Self::None => what.to_owned(),
            Self::Bytes => format!("{} of {}", human::bytes(done), human::bytes(of)),
            Self::Items(unit) => format!("{done} of {of} {unit}"),
        }
    }
}

/// Thread that writes lines of progress where no bar is drawn, until it is dropped.
#[derive(Debug)]
struct Reports {
    _ends: Sender<()>,
}

impl Reports {
    /// Starts a thread that writes a line after each `interval`.
    fn start(
        bar: &ProgressBar,
        unit: Unit,
        what: String,
        interval: Duration,
        write: impl Fn(&str) + Send + 'static,
    ) -> Self {
        let (ends, ended) = channel();
        let (bar, start) = (bar.clone(), Instant::now());
        // If no thread can be started, there are no lines.
        let _ = std::thread::Builder::new().name("progress".to_owned()).spawn(move || {
            while ended.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) && !bar.is_finished() {
                write(&format!("{} after {} s", unit.place(&bar, &what), start.elapsed().as_secs()));
            }
        });
        Self { _ends: ends }
    }
}

/// A progress bar, which disappears when it is finished or dropped.
#[derive(Debug)]
pub struct Bar {
    bar: ProgressBar,
    /// Lines of progress, where no bar is drawn.
    _reports: Option<Reports>,
}

impl Bar {
    /// Sets the text of the current item.
    pub fn label(&self, what: &str) {
        if !self.bar.is_hidden() {
            self.bar.set_message(what.to_owned());
        }
    }

    /// Advances the bar.
    pub fn add(&self, n: u64) {
        self.bar.inc(n);
    }

    /// Sets the position and the length.
    pub fn place(&self, done: u64, of: u64) {
        self.bar.set_length(of);
        self.bar.set_position(done);
    }

    /// Hides the bar while `f` writes to the terminal.
    pub fn suspend<R>(&self, f: impl FnOnce() -> R) -> R {
        self.bar.suspend(f)
    }

    /// Removes the bar from the terminal.
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

    /// A phase without a bar writes lines of progress as long as it lasts.
    #[test]
    fn phase_without_a_bar_reports_progress_lines() {
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
        // Both threads end, and so does their output.
        while lines.recv_timeout(Duration::from_mins(1)).is_ok() {}
        assert_eq!(Unit::Bytes.place(&bar, ""), "4 bytes of 8 bytes");
    }

    #[test]
    fn count_of_one_is_singular() {
        assert_eq!(["tokens", "windows of text"].map(singular), ["1 token", "1 window of text"]);
    }
}
