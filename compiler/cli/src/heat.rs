//! A profile as an HTML page: one self-contained file without scripts, with a light and a dark style.
#![expect(clippy::cast_possible_truncation, reason = "figures for readers, and indices of a plan")]

use super::loads::{capacities, chunk_imbalance, few, list, profile_loads, uniform};
use super::neurons::{NeuronFigures, figures};
use moec_profile::Profile;
use moec_profile::importance::ENOUGH;
use moec_profile::loads::{Account, Loads};
use std::fmt::Write as _;

/// Capacities on the page, at most.
const CAPACITIES: usize = 24;
/// Width of a drawing, in its own units.
pub(super) const WIDTH: f64 = 900.0;
/// Room for the names of layers.
const LEFT: f64 = 70.0;
/// Width of a character at most, in the font of the drawings: a digit takes 0.55 to 0.65 of 11 units, whatever the font.
const LETTER: f64 = 7.2;
/// Distance between a bar and its label.
const GAP: f64 = 6.0;

pub(super) const STYLE: &str = "
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5b6470; --line: #d5dae1; --page: #ffffff;
  --heat: #1f6fd0; --one: #1f6fd0; --two: #c2540a; --cell: #f1f3f6; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7eaee; --soft: #a3adba; --line: #39424e;
  --page: #14181d; --heat: #6aa9ff; --one: #6aa9ff; --two: #ff9d57; --cell: #1e242c; } }
body { margin: 2rem auto; max-width: 60rem; padding: 0 1rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
p, li { color: var(--soft); max-width: 46rem; }
.figure { overflow-x: auto; }
svg { display: block; width: 100%; min-width: 45rem; height: auto; font: 11px system-ui, sans-serif; }
text { fill: var(--soft); } .axis { stroke: var(--line); } .cell { fill: var(--cell); }
.heat { fill: var(--heat); } .one { stroke: var(--one); fill: none; stroke-width: 2; }
.two { stroke: var(--two); fill: none; stroke-width: 2; } .name1 { fill: var(--one); }
.name2 { fill: var(--two); } .bar { fill: var(--heat); }
";

/// A share that an account gives.
type Rate = fn(&Account) -> f64;

/// The page.
pub(super) fn page(profile: &Profile) -> String {
    let origin = &profile.origin;
    let title = format!("{}: {} tokens", escaped(&origin.family), profile.reading.tokens());
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>{title}</title>\n\
         <style>{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
    );
    let _ = writeln!(
        out,
        "<p>{} layers, {} hidden, read in {} chunks of {} tokens.</p>",
        origin.layers,
        origin.hidden,
        profile.trace.chunks(),
        profile.trace.chunk
    );
    load_map(&mut out, profile);
    if let Some(loads) = profile_loads(profile) {
        imbalance(&mut out, &loads);
        by_capacity(&mut out, &loads);
    }
    neuron_maps(&mut out, &figures(profile));
    let few = few(profile);
    if !few.is_empty() {
        let _ = writeln!(out, "<h2>Experts with fewer than {ENOUGH} tokens</h2>\n<ul>");
        for (layer, experts) in few {
            let _ = writeln!(out, "<li>layer {layer}: {}</li>", list(&experts));
        }
        out += "</ul>\n";
    }
    out += "</body>\n</html>\n";
    out
}

pub(super) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Room that a label takes.
fn width(label: &str) -> f64 {
    label.chars().count() as f64 * LETTER
}

/// Begins a drawing of a height. On a narrow screen it keeps its size and can be moved: letters stay readable.
pub(super) fn begin(out: &mut String, height: f64, label: &str) {
    let _ = writeln!(
        out,
        "<div class=\"figure\" tabindex=\"0\"><svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{label}\">"
    );
}

/// Ends a drawing.
pub(super) fn end(out: &mut String) {
    out.push_str("</svg></div>\n");
}

/// A heat map: rows with names and cells. A cell is a share in 0 ..= 1 and its tooltip.
pub(super) fn heat_map(
    out: &mut String,
    label: &str,
    columns: &[String],
    rows: &[(u32, Vec<(f64, String)>)],
) {
    let count = rows.iter().map(|(_, cells)| cells.len()).max().unwrap_or(0).max(1);
    let (w, h) = ((WIDTH - LEFT) / count as f64, 18.0);
    let height = rows.len() as f64 * h + 20.0;
    begin(out, height, label);
    for (i, (layer, cells)) in rows.iter().enumerate() {
        let y = i as f64 * h;
        let _ = writeln!(out, "<text x=\"0\" y=\"{:.1}\">layer {layer}</text>", y + 13.0);
        for (j, (share, label)) in cells.iter().enumerate() {
            let x = LEFT + j as f64 * w;
            let (cw, ch) = ((w - 1.0).max(w * 0.8), h - 1.0);
            let _ = writeln!(
                out,
                "<g><rect class=\"cell\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{cw:.1}\" height=\"{ch:.1}\"/>\
                 <rect class=\"heat\" fill-opacity=\"{:.3}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{cw:.1}\" \
                 height=\"{ch:.1}\"/><title>{label}</title></g>",
                share.clamp(0.0, 1.0)
            );
        }
    }
    // As many names as have room.
    let every = (28.0 / w).ceil().max(1.0) as usize;
    for (j, name) in columns.iter().enumerate().filter(|(j, _)| j % every == 0) {
        let (x, y) = (LEFT + j as f64 * w, height - 6.0);
        if x + width(name) > WIDTH {
            continue;
        }
        let _ = writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\">{name}</text>");
    }
    end(out);
}

/// Map of layer × expert: frequency of each expert.
fn load_map(out: &mut String, profile: &Profile) {
    let relative = |l: &moec_profile::Routing, n: u64| {
        let sum: u64 = l.chosen.iter().sum();
        n as f64 * l.chosen.len() as f64 / sum.max(1) as f64
    };
    let most = profile.layers.iter().map(moec_profile::Routing::imbalance).fold(1.0, f64::max);
    let rows: Vec<_> = profile
        .layers
        .iter()
        .map(|l| {
            let cell = |(e, &n): (usize, &u64)| {
                let r = relative(l, n);
                (r / most, format!("layer {}, expert {e}: {n} tokens, {r:.2} × the mean", l.layer))
            };
            (l.layer, l.chosen.iter().enumerate().map(cell).collect())
        })
        .collect();
    let experts = profile.layers.iter().map(|l| l.chosen.len()).max().unwrap_or(0);
    let names: Vec<String> = (0..experts).map(|e| e.to_string()).collect();
    let _ = writeln!(
        out,
        "<h2>Load of each expert</h2>\n<p>Tokens that chose an expert, over the mean of its layer. The stronger the \
         colour of a cell, the more tokens chose the expert; full colour is {most:.2} times the mean.</p>"
    );
    heat_map(out, "load by layer and expert", &names, &rows);
}

/// Layer × slice of the neurons, from hot to cold: how often they are active, a map for each size of the batch.
fn neuron_maps(out: &mut String, all: &[NeuronFigures]) {
    let batches = all.iter().map(|s| s.batch).max().unwrap_or(0);
    for batch in 1..=batches {
        let of: Vec<&NeuronFigures> = all.iter().filter(|s| s.batch == batch).collect();
        let rows: Vec<_> = of
            .iter()
            .map(|s| {
                let cell = |(i, f): (usize, f64)| {
                    (f, format!("layer {}, slice {i}: active in {:.1} %", s.layer, f * 100.0))
                };
                (s.layer, s.slices().into_iter().enumerate().map(cell).collect::<Vec<_>>())
            })
            .collect();
        let count = rows.iter().map(|(_, cells)| cells.len()).max().unwrap_or(0);
        let names: Vec<String> = (0..count).map(|i| format!("{} %", i * 100 / count)).collect();
        let _ = writeln!(
            out,
            "<h2>Neurons in batches of {batch}</h2>\n<p>The neurons of a layer from hot to cold. The stronger the colour, \
             the more often they are active; full colour is always.</p>"
        );
        heat_map(out, &format!("neurons by layer, batches of {batch}"), &names, &rows);
    }
}

/// Bars of the imbalance of each layer.
fn imbalance(out: &mut String, loads: &Loads) {
    let _ = writeln!(
        out,
        "<h2>Imbalance of each layer</h2>\n<p>r: load of the busiest expert over the mean load, over all text (bar) \
         and on average within a chunk of {} tokens (line).</p>",
        loads.chunk
    );
    let rows: Vec<(u32, f64, f64)> =
        loads.layers.iter().map(|l| (l.layer, l.imbalance(), chunk_imbalance(l))).collect();
    let most = rows.iter().map(|r| r.1.max(r.2)).fold(1.0, f64::max);
    let (h, height) = (18.0, rows.len() as f64 * 18.0 + 4.0);
    begin(out, height, "imbalance of each layer");
    let label = |all: &f64, chunk: &f64| format!("{all:.2}, in a chunk {chunk:.2}");
    // The longest bar leaves room for the longest label.
    let room = rows.iter().map(|(_, all, chunk)| width(&label(all, chunk))).fold(0.0, f64::max);
    let scale = (WIDTH - LEFT - GAP - room) / most;
    for (i, (layer, all, chunk)) in rows.iter().enumerate() {
        let y = i as f64 * h;
        let (text, mark) = (y + 13.0, LEFT + chunk * scale);
        let _ = writeln!(
            out,
            "<g><text x=\"0\" y=\"{text:.1}\">layer {layer}</text><rect class=\"bar\" x=\"{LEFT}\" y=\"{:.1}\" \
             width=\"{:.1}\" height=\"12\"/><line class=\"two\" x1=\"{mark:.1}\" x2=\"{mark:.1}\" y1=\"{:.1}\" \
             y2=\"{:.1}\"/><text x=\"{:.1}\" y=\"{text:.1}\">{}</text></g>",
            y + 3.0,
            all * scale,
            y + 1.0,
            y + 17.0,
            LEFT + all.max(*chunk) * scale + GAP,
            label(all, chunk)
        );
    }
    end(out);
}

/// Overflow and padding if all experts have the same capacity: over the model as lines, by layer as maps.
fn by_capacity(out: &mut String, loads: &Loads) {
    let capacities = capacities(loads, CAPACITIES);
    let names: Vec<String> = capacities.iter().map(ToString::to_string).collect();
    let of = |c: u32| loads.layers.iter().map(|l| uniform(l, c)).fold(Account::default(), Account::and);
    let sums: Vec<Account> = capacities.iter().map(|&c| of(c)).collect();
    out.push_str(
        "<h2>Overflow and padding by capacity</h2>\n<p>If all experts have the same capacity: the share of \
         (token, expert) pairs that exceed it, and the share of rows that are padding.</p>\n",
    );
    let (top, bottom) = (10.0, 190.0);
    let x = |i: usize| LEFT + i as f64 * (WIDTH - LEFT - 90.0) / (capacities.len().max(2) - 1) as f64;
    let y = |share: f64| bottom - share * (bottom - top);
    begin(out, 220.0, "overflow and padding by capacity");
    for percent in [0, 25, 50, 75, 100] {
        let at = y(f64::from(percent) / 100.0);
        let _ = writeln!(
            out,
            "<line class=\"axis\" x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>\
             <text x=\"20\" y=\"{:.1}\">{percent} %</text>",
            WIDTH - 90.0,
            at + 4.0
        );
    }
    let lines: [(&str, &str, Rate); 2] =
        [("one", "overflow", Account::overflow_rate), ("two", "padding", Account::padding_rate)];
    for (number, (class, name, rate)) in lines.iter().enumerate() {
        let points: Vec<String> =
            sums.iter().enumerate().map(|(i, a)| format!("{:.1},{:.1}", x(i), y(rate(a)))).collect();
        let _ = writeln!(out, "<polyline class=\"{class}\" points=\"{}\"/>", points.join(" "));
        for (i, a) in sums.iter().enumerate() {
            let _ = writeln!(
                out,
                "<circle class=\"{class}\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\"><title>capacity {}: {:.2} % {name}\
                 </title></circle>",
                x(i),
                y(rate(a)),
                capacities[i],
                rate(a) * 100.0
            );
        }
        if let Some(last) = sums.last() {
            let (tx, ty) = (x(sums.len() - 1) + 8.0, y(rate(last)) + 4.0);
            let n = number + 1;
            let _ = writeln!(out, "<text class=\"name{n}\" x=\"{tx:.1}\" y=\"{ty:.1}\">{name}</text>");
        }
    }
    let every = capacities.len().div_ceil(12).max(1);
    for (i, name) in names.iter().enumerate().filter(|(i, _)| i % every == 0) {
        let _ = writeln!(out, "<text x=\"{:.1}\" y=\"208\">{name}</text>", x(i) - 8.0);
    }
    end(out);
    for (title, rate) in
        [("Overflow, by layer", Account::overflow_rate as Rate), ("Padding, by layer", Account::padding_rate)]
    {
        let _ = writeln!(
            out,
            "<h2>{title}</h2>\n<p>A column is a capacity. Full colour is 100 %, none is 0 %.</p>"
        );
        let rows: Vec<_> = loads
            .layers
            .iter()
            .map(|l| {
                let cell = |&c: &u32| {
                    let share = rate(&uniform(l, c));
                    (share, format!("layer {}, capacity {c}: {:.2} %", l.layer, share * 100.0))
                };
                (l.layer, capacities.iter().map(cell).collect())
            })
            .collect();
        heat_map(out, title, &names, &rows);
    }
}

#[cfg(test)]
mod tests {
    use super::page;
    use moec_profile::{Chunk, Origin, Profile, Reading, Routes, Routing, Trace};
    use std::collections::BTreeMap;

    /// A layer with even loads over all text; one chunk sends every token to one of `experts`, so its label
    /// is the longest.
    fn profile(experts: usize) -> Profile {
        const TOKENS: u16 = 64;
        let mut layer = Routing::new(0, 1, experts);
        let mut trace = Trace::new(u32::from(TOKENS));
        trace.begin();
        for busy in 0..experts {
            let loads = (0..experts).map(|e| if e == busy { TOKENS } else { 0 }).collect();
            trace.push(Chunk { tokens: u32::from(TOKENS), loads });
        }
        layer.chosen.fill(u64::from(TOKENS));
        layer.tokens = experts as u64 * u64::from(TOKENS);
        Profile {
            origin: Origin { family: "a".to_owned(), hidden: 8, vocab: 8, layers: 1, checkpoint: [0; 32] },
            reading: Reading::default(),
            layers: vec![layer],
            trace,
            saliency: Vec::new(),
            weights: BTreeMap::new(),
            routes: Routes::default(),
            correlations: Vec::new(),
            neurons: Vec::new(),
            samples: Vec::new(),
            gates: Vec::new(),
            confidence: None,
            losses: Vec::new(),
        }
    }

    /// The text between two words, from a position on; and the rest.
    fn between<'a>(text: &'a str, from: &str, to: &str) -> Option<(&'a str, &'a str)> {
        text.split_once(from)?.1.split_once(to)
    }

    #[test]
    fn every_label_is_inside_its_drawing() {
        // A digit of DejaVu Sans, which is wide, at 11 units.
        const DIGIT: f64 = 7.0;
        for experts in [2, 7, 24, 128, 700] {
            let text = page(&profile(experts));
            let (mut rest, mut labels) = (text.as_str(), 0);
            while let Some((drawing, behind)) = between(rest, "<svg viewBox=\"0 0 ", "</svg>") {
                rest = behind;
                let (size, _) = drawing.split_once('"').unwrap();
                let size: Vec<f64> = size.split(' ').map(|n| n.parse().unwrap()).collect();
                let mut inside = drawing;
                while let Some((label, behind)) = between(inside, "<text ", "</text>") {
                    inside = behind;
                    let number =
                        |name: &str| -> f64 { between(label, name, "\"").unwrap().0.parse().unwrap() };
                    let (x, y, words) = (number("x=\""), number("y=\""), label.split_once('>').unwrap().1);
                    let right = x + words.chars().count() as f64 * DIGIT;
                    assert!(x >= 0.0 && right <= size[0], "`{words}` ends at {right} of {}", size[0]);
                    assert!(y > 8.0 && y <= size[1], "`{words}` stands at {y} of {}", size[1]);
                    labels += 1;
                }
            }
            assert!(labels > 10, "{labels} labels");
            assert!(text.contains("in a chunk"), "{text}");
        }
    }
}
