//! Runs a program on a pseudo-terminal, and computes the text on its screen.

use std::fs::File;
use std::io::Read;
use std::os::fd::{FromRawFd, OwnedFd};
use std::process::{Command, ExitStatus, Stdio};

/// Runs a command whose stderr is a terminal of 120 columns. Returns the exit status, and every byte written
/// to the terminal.
pub fn on_terminal(command: &mut Command) -> (ExitStatus, String) {
    let (mut ours, mut theirs) = (0, 0);
    let mut size = libc::winsize { ws_row: 40, ws_col: 120, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the three addresses are of variables that outlive the call, and the others may be null.
    let opened = unsafe {
        libc::openpty(
            &raw mut ours,
            &raw mut theirs,
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            &raw mut size,
        )
    };
    assert_eq!(opened, 0, "a terminal can be had");
    // SAFETY: both were just opened, and nothing else owns them.
    let (ours, theirs) = unsafe { (OwnedFd::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs)) };
    command.env("TERM", "xterm-256color").env_remove("MOEC_NO_PROGRESS").env_remove("NO_COLOR");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::from(theirs));
    let mut child = command.spawn().expect("the program starts");
    // The command holds the other side of the terminal, which would keep it open.
    command.stderr(Stdio::null());
    let mut output = Vec::new();
    let mut ours = File::from(ours);
    let mut some = [0; 4096];
    // Linux reports an error once the other side is closed.
    while let Ok(n @ 1..) = ours.read(&mut some) {
        output.extend_from_slice(&some[..n]);
    }
    (child.wait().expect("it ends"), String::from_utf8_lossy(&output).into_owned())
}

/// Lines that remain on the screen, without colours, after erasing and overwriting.
pub fn screen_lines(output: &str) -> Vec<String> {
    let mut screen: Vec<Vec<char>> = vec![Vec::new()];
    let (mut row, mut column) = (0_usize, 0_usize);
    let mut chars = output.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\r' => column = 0,
            '\n' => {
                row += 1;
                if row == screen.len() {
                    screen.push(Vec::new());
                }
            }
            '\u{1b}' if chars.next_if_eq(&'[').is_some() => {
                let mut number = String::new();
                while let Some(c) = chars.next_if(|c| c.is_ascii_digit() || ";?".contains(*c)) {
                    number.push(c);
                }
                let times = number.parse().unwrap_or(1);
                match chars.next() {
                    Some('A') => row = row.saturating_sub(times),
                    Some('B') => row = (row + times).min(screen.len() - 1),
                    Some('C') => column += times,
                    Some('D') => column = column.saturating_sub(times),
                    Some('K') if number == "2" => screen[row].clear(),
                    Some('K') => screen[row].truncate(column),
                    Some('J') => {
                        screen[row].truncate(column);
                        screen.truncate(row + 1);
                    }
                    Some('m' | 'h' | 'l') => {}
                    other => panic!("an unknown control sequence: [{number}{other:?}"),
                }
            }
            c => {
                let line = &mut screen[row];
                line.resize(line.len().max(column + 1), ' ');
                line[column] = c;
                column += 1;
            }
        }
    }
    let lines = screen.into_iter().map(|line| line.into_iter().collect::<String>().trim_end().to_owned());
    lines.filter(|line| !line.is_empty()).collect()
}
