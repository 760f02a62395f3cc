//! Output of the command: data to stdout, errors to stderr.

use anstyle::{AnsiColor, Style};
use comfy_table::{Table, presets};
use moec_base::{Error, Result};
use std::fmt::Write as _;
use std::io::{ErrorKind, Write as _};

const ERROR: Style = AnsiColor::Red.on_default().bold();
const HINT: Style = AnsiColor::Cyan.on_default().bold();

/// Prints data. A closed pipe (`moec inspect … | head`) is not an error.
///
/// # Errors
/// Stdout cannot be written.
pub fn data(text: &str) -> Result<()> {
    let mut out = anstream::stdout().lock();
    let result = out.write_all(text.as_bytes()).and_then(|()| {
        if !text.ends_with('\n') {
            out.write_all(b"\n")?;
        }
        out.flush()
    });
    match result {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => {
            Err(Error::environment("stdout cannot be written").because(e))
        }
        _ => Ok(()),
    }
}

/// Prints one JSON object.
///
/// # Errors
/// Stdout cannot be written.
pub fn json(value: &serde_json::Value) -> Result<()> {
    data(&format!("{value:#}"))
}

/// Formats an error for the user.
pub fn render(error: &Error) -> String {
    let mut out = format!("{ERROR}error{ERROR:#}: {}\n", error.message);
    for cause in &error.causes {
        // Further lines of a cause, such as a tool's output, are indented.
        let cause = cause.trim_end().replace('\n', "\n    ");
        let _ = writeln!(out, "  caused by: {cause}");
    }
    if let Some(hint) = &error.hint {
        let _ = write!(out, "\n{HINT}hint{HINT:#}: {hint}\n");
    }
    out
}

/// Formats a usage error of clap like our own errors: its tips become hints, which come last.
pub fn bad_use(e: &clap::Error) -> String {
    let (mut message, mut hints) = (String::new(), String::new());
    for line in e.render().ansi().to_string().lines() {
        let plain = anstream::adapter::strip_str(line).to_string();
        let tip = plain.trim_start().strip_prefix("tip: ").map(str::to_owned);
        let more = || {
            Some(format!("for more, {}", plain.strip_prefix("For more information, ")?.trim_end_matches('.')))
        };
        if let Some(hint) = tip.or_else(more) {
            let _ = writeln!(hints, "{HINT}hint{HINT:#}: {hint}");
        } else if !(plain.is_empty() && message.ends_with("\n\n")) {
            message += line;
            message.push('\n');
        }
    }
    message.truncate(message.trim_end().len());
    if hints.is_empty() { message + "\n" } else { format!("{message}\n\n{hints}") }
}

/// Prints a message of clap: help and version are data, the rest is an error.
pub fn usage(e: &clap::Error) {
    // A closed stream cannot be reported anywhere.
    let _ = if e.use_stderr() && e.render().to_string().starts_with("error: ") {
        anstream::stderr().lock().write_all(bad_use(e).as_bytes())
    } else {
        e.print()
    };
}

/// Prints an error.
pub fn error(error: &Error) {
    // A closed stderr cannot be reported anywhere.
    let _ = anstream::stderr().lock().write_all(render(error).as_bytes());
}

/// Rows in columns, two spaces apart.
pub fn table(rows: &[Vec<String>]) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).add_rows(rows);
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table.lines().map(|line| line.trim_end().to_owned() + "\n").collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_causes_and_a_hint() {
        let e = Error::input("`a` is wrong").because("b\nc").because("d").hint("do `e`");
        let plain = anstream::adapter::strip_str(&render(&e)).to_string();
        assert_eq!(plain, "error: `a` is wrong\n  caused by: b\n    c\n  caused by: d\n\nhint: do `e`\n");
    }

    #[test]
    fn tip_from_clap_is_shown_as_a_hint() {
        let command = clap::Command::new("moec").arg(clap::arg!(--target <T>));
        let e = command.try_get_matches_from(["moec", "--traget", "x"]).unwrap_err();
        let text = bad_use(&e);
        let plain = anstream::adapter::strip_str(&text).to_string();
        assert_eq!(
            plain,
            "error: unexpected argument '--traget' found\n\nUsage: moec --target <T>\n\n\
             hint: a similar argument exists: '--target'\nhint: for more, try '--help'\n"
        );
        assert!(text.contains('\u{1b}'), "colours are kept until it is known where it goes");
    }

    #[test]
    fn tables_are_aligned() {
        let rows = [vec!["a".into(), "long".into(), "x".into()], vec!["bcd".into(), String::new()]];
        assert_eq!(table(&rows), "a    long  x\nbcd\n");
    }
}
