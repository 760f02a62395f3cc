//! The page: tiles, bars, maps and tables, drawn as SVG of our own.

use super::speed::Expected;
use super::summary::{Cell, Part, Stored, Summary, Tiers};
use crate::heat::{self, begin, end, escaped, heat_map};
use moec_base::human;
use std::collections::BTreeSet;
use std::fmt::Write as _;

/// Width of what is drawn.
const WIDTH: f64 = heat::WIDTH;
/// Width of the column of names.
const LEFT: f64 = 70.0;
/// Colours of the page's style sheet for things that are distinguished.
const COLOURS: usize = 8;
/// Files that are listed one by one.
const FILES: usize = 12;
/// Bars thinner than this have no label.
const LETTER: f64 = 7.2;

const STYLE: &str = "
:root { --c0: #2f6fde; --c1: #d9660a; --c2: #2a9d63; --c3: #a04bc8; --c4: #c2334d; --c5: #0c93a6; --c6: #8a7a12; --c7: #6b7684;
  --tile: #f5f7fa; }
@media (prefers-color-scheme: dark) { :root { --c0: #6aa0ff; --c1: #ff9d57; --c2: #5fd29a; --c3: #cf8cf0; --c4: #ff7d92; --c5: #4fd0e2;
  --c6: #d3c35a; --c7: #9aa5b3; --tile: #1b2129; } }
.c0 { --own: var(--c0); } .c1 { --own: var(--c1); } .c2 { --own: var(--c2); } .c3 { --own: var(--c3); } .c4 { --own: var(--c4); }
.c5 { --own: var(--c5); } .c6 { --own: var(--c6); } .c7 { --own: var(--c7); } rect[class^=c] { fill: var(--own, var(--cell)); }
.of { margin: .8rem 0 .2rem; font-size: .8rem; } .stack { display: flex; gap: 1px; height: 1.4rem; }
.stack span { flex: 0 1 0; min-width: 4px; overflow: hidden; white-space: nowrap; background: var(--own); color: var(--page);
  font-size: .72rem; line-height: 1.4rem; font-weight: 600; text-indent: .3rem; }
@media (max-width: 48rem) { .stack span { color: transparent; } }
h1 { margin-bottom: .2rem; } h2 { border-top: 1px solid var(--line); padding-top: 1.4rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr)); gap: .6rem; padding: 0; margin: 1.2rem 0; }
.tiles div { background: var(--tile); border-radius: .5rem; padding: .6rem .8rem; overflow-wrap: anywhere; }
.tiles dt { color: var(--soft); font-size: .8rem; } .tiles dd { margin: 0; font-size: 1.05rem; font-weight: 600; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; padding: 0; margin: .6rem 0; list-style: none; }
.legend li { max-width: none; } .legend svg { display: inline-block; width: .8em; height: .8em; min-width: 0; margin-right: .4em; vertical-align: -.05em; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .35rem 1rem .35rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 500; white-space: nowrap; } td.n, th.n { text-align: right; white-space: nowrap; }
td { overflow-wrap: break-word; } tr > :last-child { padding-right: 0; }
";

/// The page of a bundle.
pub(super) fn page(s: &Summary) -> String {
    let title = escaped(&s.title);
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>{title}</title>\n\
         <style>{}{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n<p>Compilation report</p>\n",
        heat::STYLE
    );
    out += "<dl class=\"tiles\">\n";
    for (name, value) in &s.head {
        let _ = writeln!(out, "<div><dt>{name}</dt><dd>{}</dd></div>", escaped(value));
    }
    out += "</dl>\n";
    unit_map(&mut out, s);
    memory(&mut out, &s.memory);
    weights(&mut out, &s.weights);
    loads(&mut out, s);
    tiers(&mut out, s);
    expected(&mut out, s);
    decisions(&mut out, s);
    files(&mut out, s);
    out += "</body>\n</html>\n";
    out
}

/// Colours by name, in the order in which names first come up.
#[derive(Default)]
struct Colours<'a>(Vec<&'a str>);

impl<'a> Colours<'a> {
    fn of(&mut self, name: &'a str) -> usize {
        let at = self.0.iter().position(|n| *n == name).unwrap_or_else(|| {
            self.0.push(name);
            self.0.len() - 1
        });
        at % COLOURS
    }

    fn legend(&self, out: &mut String) {
        *out += "<ul class=\"legend\">";
        for (i, name) in self.0.iter().enumerate() {
            let colour = i % COLOURS;
            let _ = write!(
                out,
                "<li><svg viewBox=\"0 0 10 10\" aria-hidden=\"true\"><rect class=\"c{colour}\" width=\"10\" height=\"10\" rx=\"2\"/></svg>{}</li>",
                escaped(name)
            );
        }
        *out += "</ul>\n";
    }
}

/// Map of layers × parts, coloured by unit.
fn unit_map(out: &mut String, s: &Summary) {
    *out += "<h2>Placement</h2>\n<p>Every layer, in the largest prefill call and in the smallest decode \
             call. Experts are counted by their unit, other parts by their steps.</p>\n";
    let mut colours = Colours::default();
    let names = s.places.iter().flat_map(|(_, cells)| cells).flat_map(|c| &c.units);
    names.for_each(|(name, _)| {
        colours.of(name);
    });
    colours.legend(out);
    let (w, h, top) = ((WIDTH - LEFT) / s.columns.len().max(1) as f64, 18.0, 18.0);
    begin(out, top + s.places.len() as f64 * h + 2.0, "placement, by layer");
    for (j, column) in s.columns.iter().enumerate() {
        let _ = writeln!(out, "<text x=\"{:.1}\" y=\"11\">{}</text>", LEFT + j as f64 * w, escaped(column));
    }
    for (i, (layer, cells)) in s.places.iter().enumerate() {
        let y = top + i as f64 * h;
        let _ = writeln!(out, "<text x=\"0\" y=\"{:.1}\">layer {layer}</text>", y + 13.0);
        for (j, cell) in cells.iter().enumerate() {
            place(out, cell, &mut colours, (LEFT + j as f64 * w, y, w - 8.0, h - 3.0), *layer);
        }
    }
    end(out);
}

fn place<'a>(
    out: &mut String,
    cell: &'a Cell,
    colours: &mut Colours<'a>,
    (x, y, w, h): (f64, f64, f64, f64),
    layer: u32,
) {
    let _ =
        write!(out, "<g><rect class=\"cell\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{w:.1}\" height=\"{h:.1}\"/>");
    let mut at = x;
    let mut shares = Vec::new();
    for (name, share) in &cell.units {
        let wide = share * w;
        let _ = write!(
            out,
            "<rect class=\"c{}\" x=\"{at:.1}\" y=\"{y:.1}\" width=\"{wide:.1}\" height=\"{h:.1}\"/>",
            colours.of(name)
        );
        at += wide;
        shares.push(format!("{:.0} % of the {} on {}", 100.0 * share, cell.of, escaped(name)));
    }
    let shares = if shares.is_empty() { "no such part".to_owned() } else { shares.join(", ") };
    let _ = writeln!(out, "<title>layer {layer}: {shares}</title></g>");
}

/// A bar for each memory; all bars have the same scale.
fn memory(out: &mut String, parts: &[Part]) {
    *out +=
        "<h2>Memory</h2>\n<p>Contents of each memory when the KV cache is full, all bars to one scale.</p>\n";
    let mut of: Vec<(&str, Vec<&Part>)> = Vec::new();
    for part in parts {
        match of.iter_mut().find(|(name, _)| *name == part.memory) {
            Some((_, parts)) => parts.push(part),
            None => of.push((&part.memory, vec![part])),
        }
    }
    let sum = |parts: &[&Part]| parts.iter().map(|p| p.bytes).fold(0, u64::saturating_add);
    let most = of.iter().map(|(_, parts)| sum(parts)).max().unwrap_or(0).max(1) as f64;
    let mut colours = Colours::default();
    for part in parts {
        colours.of(&part.what);
    }
    colours.legend(out);
    for (name, parts) in &of {
        let all = sum(parts);
        let _ = writeln!(
            out,
            "<p class=\"of\">{}: {}</p>\n<div class=\"stack\" style=\"width: {:.2}%\">",
            escaped(name),
            human::bytes(all),
            100.0 * all as f64 / most
        );
        for part in parts {
            let (colour, bytes) = (colours.of(&part.what), human::bytes(part.bytes));
            let fits = bytes.len() as f64 * LETTER + 8.0 < part.bytes as f64 / most * WIDTH;
            let label = if fits { &*bytes } else { "" };
            let _ = writeln!(
                out,
                "<span class=\"c{colour}\" style=\"flex-grow: {}\" title=\"{}: {bytes}\">{label}</span>",
                part.bytes,
                escaped(&part.what)
            );
        }
        *out += "</div>\n";
    }
    let rows = parts.iter().map(|p| vec![p.memory.clone(), p.what.clone(), human::bytes(p.bytes)]).collect();
    table(out, &["memory", "what", "#bytes"], rows);
}

fn weights(out: &mut String, weights: &[Stored]) {
    *out += "<h2>Formats of weights</h2>\n";
    let row = |s: &Stored| {
        let bits = s.bytes as f64 * 8.0 / s.numbers.max(1) as f64;
        vec![
            s.class.to_owned(),
            s.format.to_string(),
            human::count(s.numbers),
            format!("{bits:.2}"),
            human::bytes(s.bytes),
        ]
    };
    table(
        out,
        &["weights", "format", "#numbers", "#bits each, as stored", "#bytes"],
        weights.iter().map(row).collect(),
    );
}

fn loads(out: &mut String, s: &Summary) {
    *out += "<h2>Hot and rare experts</h2>\n";
    let Some(loads) = &s.loads else {
        *out += "<p>The build did not use a profile: <code>[calibrate]</code> names none, or nothing in this bundle depends on one. \
                 <code>moec calibrate</code> records one, and <code>moec inspect --html</code> draws it.</p>\n";
        return;
    };
    let most = loads.layers.iter().flat_map(|(_, l)| l).copied().fold(1.0, f64::max);
    let (few, all) = loads.few;
    let seen = 100.0 * (all - few.min(all)) as f64 / all.max(1) as f64;
    let _ = writeln!(
        out,
        "<p>Tokens that chose an expert in calibration, over the mean of its layer; full colour is {most:.2} \
         times the mean. {seen:.0} % of the {all} experts were chosen often enough to judge them.</p>"
    );
    let columns = loads.layers.iter().map(|(_, l)| l.len()).max().unwrap_or(0);
    let names: Vec<String> = (0..columns).map(|e| e.to_string()).collect();
    let cell = |layer: u32, (e, &r): (usize, &f64)| {
        (r / most, format!("layer {layer}, expert {e}: {r:.2} × the mean"))
    };
    let rows: Vec<_> = loads
        .layers
        .iter()
        .map(|(layer, l)| (*layer, l.iter().enumerate().map(|x| cell(*layer, x)).collect()))
        .collect();
    heat_map(out, "use by layer and expert", &names, &rows);
}

fn tiers(out: &mut String, s: &Summary) {
    if s.tiers.is_empty() {
        return;
    }
    *out += "<h2>Capacities</h2>\n<p>Rows of an expert in a call, by tier, and the overflow and padding that the profile predicts.</p>\n";
    let share = |x: Option<f32>| x.map_or("–".to_owned(), |x| format!("{:.2} %", 100.0 * x));
    let row = |(layer, tiers, expected): &Tiers| {
        let tiers: Vec<String> = tiers.iter().map(ToString::to_string).collect();
        vec![layer.to_string(), tiers.join(", "), share(expected.map(|e| e.0)), share(expected.map(|e| e.1))]
    };
    table(out, &["layer", "capacities", "#overflow", "#padding"], s.tiers.iter().map(row).collect());
}

fn expected(out: &mut String, s: &Summary) {
    let (timed, all) = s.timed;
    let machine = &s.machine;
    let _ = writeln!(
        out,
        "<h2>Expected speed</h2>\n<p>Modelled, not measured: <code>run bench</code> measures tokens/s. The model adds up matrix kernels (of \
         {all} schedules {timed} were chosen by measurement), attention over {} tokens of each sequence, all other steps, barriers, and \
         sampling, on {} threads; reads are bounded by the memory bandwidth. It ignores other programs and \
         changing clock rates, so the rate may be wrong by a factor of two.</p>",
        machine.tokens, machine.threads
    );
    if s.expected.is_empty() {
        *out += "<p>No matrix is multiplied on the CPU.</p>\n";
        return;
    }
    let row = |e: &Expected| {
        let (p, seconds) = (&e.parts, e.parts.seconds());
        let share = |part: f64| format!("{:.0} %", 100.0 * part / seconds);
        vec![
            if e.prompt { "chunk of a prompt" } else { "decode step" }.to_owned(),
            e.entry.clone(),
            format!("{:.3} ms", 1e3 * seconds),
            e.rate.map_or("–".to_owned(), |rate| format!("{rate:.1} tokens/s")),
            share(p.matrices),
            share(p.states),
            share(p.barriers),
            share(p.others + p.sampling),
            share(p.reading),
        ]
    };
    table(
        out,
        &[
            "call",
            "entry point",
            "#modelled time",
            "#modelled rate",
            "#matrices",
            "#attention",
            "#barriers",
            "#others",
            "#memory-bound matrices",
        ],
        s.expected.iter().map(row).collect(),
    );
    if s.expected.iter().any(|e| e.rate.is_none()) {
        *out += "<p>Steps of other units and reads from SSD are not in the model: these entry points have the time of their CPU steps, and no rate. \
                 <code>moec simulate</code> models the others.</p>\n";
    }
    let rows = machine.assumptions.iter().map(|a| vec![a.what.to_owned(), a.value.clone(), a.source.clone()]);
    table(out, &["machine", "value", "source"], rows.collect());
}

fn decisions(out: &mut String, s: &Summary) {
    *out += "<h2>Decisions</h2>\n";
    // A reason that several operators share is listed once.
    let mut printed: BTreeSet<(&str, &str)> = BTreeSet::new();
    let rows = s.decisions.iter().filter(|(name, what)| printed.insert((name, what)));
    table(
        out,
        &["subject", "choice and reason"],
        rows.map(|(name, what)| vec![name.clone(), what.clone()]).collect(),
    );
}

fn files(out: &mut String, s: &Summary) {
    let sum = |files: &[(String, u64)]| files.iter().map(|(_, b)| *b).fold(0, u64::saturating_add);
    let _ =
        writeln!(out, "<h2>Files</h2>\n<p>{} in {} files.</p>", human::bytes(sum(&s.files)), s.files.len());
    let (shown, rest) = s.files.split_at(s.files.len().min(FILES));
    let mut rows: Vec<_> =
        shown.iter().map(|(name, bytes)| vec![name.clone(), human::bytes(*bytes)]).collect();
    if !rest.is_empty() {
        rows.push(vec![format!("{} more", rest.len()), human::bytes(sum(rest))]);
    }
    table(out, &["file", "#bytes"], rows);
}

/// A table; columns whose names begin with `#` are numbers.
fn table(out: &mut String, head: &[&str], rows: Vec<Vec<String>>) {
    *out += "<div class=\"scroll\"><table>\n<tr>";
    let numbers: Vec<bool> = head.iter().map(|h| h.starts_with('#')).collect();
    let class = |j: usize| if numbers.get(j) == Some(&true) { " class=\"n\"" } else { "" };
    for (j, h) in head.iter().enumerate() {
        let _ = write!(out, "<th{}>{}</th>", class(j), h.trim_start_matches('#'));
    }
    *out += "</tr>\n";
    for row in rows {
        *out += "<tr>";
        for (j, cell) in row.iter().enumerate() {
            let _ = write!(out, "<td{}>{}</td>", class(j), marked(cell));
        }
        *out += "</tr>\n";
    }
    *out += "</table></div>\n";
}

/// A text, with the parts in backquotes as code.
fn marked(text: &str) -> String {
    let text = escaped(text);
    let pieces = text.split('`').enumerate();
    pieces
        .map(|(i, piece)| if i % 2 == 1 { format!("<code>{piece}</code>") } else { piece.to_owned() })
        .collect()
}
