//! Candidates as a table and as plots over their size: in characters for a terminal, and as an HTML page.

use super::candidate::{Candidate, figures};
use super::limits::Limits;
use super::loss::Losses;
use crate::heat::{self, begin, end, escaped};
use crate::output;
use moec_base::human;
use moec_config::Facts;
use std::fmt::Write as _;

/// Columns and lines of a plot in characters.
const COLUMNS: usize = 64;
const LINES: usize = 10;
/// Drawing: height, and room for the axes.
const HEIGHT: f64 = 260.0;
const LEFT: f64 = 70.0;
const BOTTOM: f64 = 40.0;
/// Radius of a point.
const RADIUS: f64 = 4.0;

/// Points over the size of the weights.
struct Plot {
    title: String,
    /// Unit of the vertical axis.
    unit: &'static str,
    points: Vec<Point>,
}

/// A candidate in a plot.
struct Point {
    /// Bytes.
    size: f64,
    /// Value on the vertical axis.
    value: f64,
    name: String,
    mark: Mark,
}

/// Form in which a candidate is drawn.
#[derive(Clone, Copy, PartialEq)]
enum Mark {
    Chosen,
    Fits,
    Breaks,
}

impl Mark {
    const fn letter(self) -> char {
        match self {
            Self::Chosen => '*',
            Self::Fits => 'o',
            Self::Breaks => '.',
        }
    }

    const fn style(self) -> &'static str {
        match self {
            Self::Chosen => "var(--two)",
            Self::Fits => "var(--one)",
            Self::Breaks => "var(--line)",
        }
    }
}

/// Table, plots and notes for a terminal.
pub(super) fn text(
    candidates: &[Candidate],
    chosen: Option<usize>,
    limits: &Limits,
    losses: &Losses<'_>,
) -> String {
    let mut out = output::table(&rows(candidates, chosen, limits, losses));
    if let Some(note) = note(losses) {
        let _ = write!(out, "\n{note}\n");
    }
    for plot in plots(candidates, chosen, limits, losses) {
        out.push('\n');
        out += &plot.text();
    }
    out
}

/// The same as an HTML page.
pub(super) fn page(
    facts: &Facts,
    candidates: &[Candidate],
    chosen: Option<usize>,
    limits: &Limits,
    losses: &Losses<'_>,
) -> String {
    let title = escaped(&super::title(facts));
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>{title}</title>\n\
         <style>{}\ntable {{ border-collapse: collapse; }} td, th {{ padding: .2rem .8rem .2rem 0; text-align: left; }}\n</style>\n\
         </head>\n<body>\n<h1>{title}</h1>\n<p>Memory limit {}. Rows that were built are measured, all others predicted.</p>\n",
        heat::STYLE,
        human::bytes(limits.memory)
    );
    for plot in plots(candidates, chosen, limits, losses) {
        plot.draw(&mut out);
    }
    out += "<div class=\"figure\"><table>\n";
    for (i, row) in rows(candidates, chosen, limits, losses).iter().enumerate() {
        let cell = if i == 0 { "th" } else { "td" };
        let cells = row.iter().map(|text| format!("<{cell}>{}</{cell}>", escaped(text)));
        let _ = writeln!(out, "<tr>{}</tr>", cells.collect::<String>());
    }
    out += "</table></div>\n";
    if let Some(note) = note(losses) {
        let _ = writeln!(out, "<p>{}</p>", escaped(&note));
    }
    out + "</body>\n</html>\n"
}

/// Sentence about losses that are not this model's.
fn note(losses: &Losses<'_>) -> Option<String> {
    let names = losses.names();
    (!names.is_empty()).then(|| {
        format!(
            "Losses are those of {}, not of this model: `moec calibrate --losses` records its own, for `--profile`.",
            names.join(" and ")
        )
    })
}

/// Rows of the table, its head first.
fn rows(
    candidates: &[Candidate],
    chosen: Option<usize>,
    limits: &Limits,
    losses: &Losses<'_>,
) -> Vec<Vec<String>> {
    let names = losses.names();
    let head = [
        "",
        "experts",
        "rest",
        "KV",
        "context",
        "kept in",
        "size",
        "memory",
        "decode tokens/s",
        "prefill tokens/s",
    ];
    let mut head: Vec<String> = head.map(str::to_owned).to_vec();
    if names.is_empty() {
        head.push("loss".to_owned());
    }
    head.extend(names.iter().map(|name| format!("loss of {name}")));
    head.push("limits".to_owned());
    let share =
        |nats: Option<f64>| nats.map_or_else(|| "-".to_owned(), |n| format!("{:+.2} %", 100.0 * n.exp_m1()));
    let row = |(i, c): (usize, &Candidate)| {
        let (experts, rest, kv) = c.formats;
        let mark = if chosen == Some(i) { "*" } else { "" };
        let mut row = vec![
            mark.to_owned(),
            experts.to_string(),
            rest.to_string(),
            kv.to_string(),
            c.context.to_string(),
            c.kept(),
        ];
        row.extend(figures(c));
        if names.is_empty() {
            row.push(share(c.loss));
        }
        row.extend(losses.others(c.formats).map(|(_, nats)| share(nats)));
        let by = if c.measured { "measured: " } else { "" };
        row.push(format!("{by}{}", limits.broken_by(c).unwrap_or_else(|| "fits".to_owned())));
        row
    };
    std::iter::once(head).chain(candidates.iter().enumerate().map(row)).collect()
}

/// Loss over size and speed over size. Losses are the model's own, or those of the first other model.
fn plots(candidates: &[Candidate], chosen: Option<usize>, limits: &Limits, losses: &Losses<'_>) -> Vec<Plot> {
    let points = |value: &dyn Fn(&Candidate) -> Option<f64>| -> Vec<Point> {
        let point = |(i, c): (usize, &Candidate)| {
            let mark = match limits.broken_by(c) {
                _ if chosen == Some(i) => Mark::Chosen,
                None => Mark::Fits,
                Some(_) => Mark::Breaks,
            };
            Some(Point { size: c.size as f64, value: value(c)?, name: c.name(), mark })
        };
        candidates.iter().enumerate().filter_map(point).collect()
    };
    let loss = |c: &Candidate| {
        let other = losses.others(c.formats).next().and_then(|(_, nats)| nats);
        c.loss.or(other).map(|nats| 100.0 * nats.exp_m1())
    };
    let of =
        losses.names().first().map_or_else(String::new, |name| format!(" of {name}, not of this model,"));
    let all = [
        Plot { title: format!("loss{of} over size"), unit: "%", points: points(&loss) },
        Plot { title: "decode speed over size".to_owned(), unit: "tokens/s", points: points(&|c| c.decode) },
    ];
    all.into_iter().filter(|plot| plot.points.len() > 1).collect()
}

impl Plot {
    /// Largest size and largest value.
    fn most(&self) -> (f64, f64) {
        let most = |of: &dyn Fn(&Point) -> f64| self.points.iter().map(of).fold(f64::MIN_POSITIVE, f64::max);
        (most(&|p| p.size), most(&|p| p.value))
    }

    /// The plot in characters.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "places in a grid")]
    fn text(&self) -> String {
        let (size, value) = self.most();
        let mut grid = vec![vec![' '; COLUMNS]; LINES];
        let place = |share: f64, count: usize| (share.clamp(0.0, 1.0) * (count - 1) as f64).round() as usize;
        // Where two share a place, the one that matters more is shown.
        for mark in [Mark::Breaks, Mark::Fits, Mark::Chosen] {
            for p in self.points.iter().filter(|p| p.mark == mark) {
                let (x, y) = (place(p.size / size, COLUMNS), place(p.value / value, LINES));
                if let Some(cell) = grid.get_mut(LINES - 1 - y).and_then(|line| line.get_mut(x)) {
                    *cell = mark.letter();
                }
            }
        }
        let mut out = format!("{} (* chosen, o fits, . breaks a limit)\n", self.title);
        for (i, line) in grid.iter().enumerate() {
            let label = match i {
                0 => format!("{value:.1} {}", self.unit),
                _ if i + 1 == LINES => "0".to_owned(),
                _ => String::new(),
            };
            let line: String = line.iter().collect();
            let _ = writeln!(out, "{label:>16} |{}", line.trim_end());
        }
        let end = human::bytes(size as u64);
        let _ = writeln!(out, "{:>16} +{}", "", "-".repeat(COLUMNS));
        let _ = writeln!(out, "{:>16}  0{end:>width$}", "", width = COLUMNS - 1);
        out
    }

    /// The plot as SVG.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes of a label")]
    fn draw(&self, out: &mut String) {
        let (size, value) = self.most();
        let _ = writeln!(out, "<h2>{}</h2>", escaped(&self.title));
        begin(out, HEIGHT, &escaped(&self.title));
        let (width, height) = (heat::WIDTH - LEFT - 10.0, HEIGHT - BOTTOM - 10.0);
        let bottom = 10.0 + height;
        let _ = writeln!(
            out,
            "<line class=\"axis\" x1=\"{LEFT}\" y1=\"{bottom}\" x2=\"{:.1}\" y2=\"{bottom}\"/>\n\
             <line class=\"axis\" x1=\"{LEFT}\" y1=\"10\" x2=\"{LEFT}\" y2=\"{bottom}\"/>\n\
             <text x=\"0\" y=\"18\">{value:.1} {}</text>\n<text x=\"0\" y=\"{bottom}\">0</text>\n\
             <text x=\"{LEFT}\" y=\"{:.1}\">0</text>\n<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            LEFT + width,
            self.unit,
            bottom + 16.0,
            LEFT + width,
            bottom + 16.0,
            human::bytes(size as u64),
        );
        for p in &self.points {
            let (x, y) = (LEFT + width * p.size / size, bottom - height * (p.value / value).clamp(0.0, 1.0));
            let _ = writeln!(
                out,
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{RADIUS}\" style=\"fill: {}\"><title>{}: {}, {:.2} {}</title></circle>",
                p.mark.style(),
                escaped(&p.name),
                human::bytes(p.size as u64),
                p.value,
                self.unit
            );
        }
        end(out);
    }
}
