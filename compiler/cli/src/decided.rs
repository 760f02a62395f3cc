//! Decisions of a build as text: the choice, the reason and the alternatives of each subject.
#![expect(clippy::cast_possible_truncation, reason = "figures for readers")]

use super::output;
use moec_base::human;
use moec_passes::decisions::{Decision, Figures};
use std::fmt::Write as _;

/// Maximum number of alternatives in a table. Chosen ones are always shown.
const SHOWN: usize = 8;

/// Decisions of all layers, or of one. A decision that several layers have in common is reported once, with
/// the ranges of its figures.
pub(super) fn shown(all: &[Decision], layer: Option<u32>) -> String {
    let mut subjects: Vec<Vec<&Decision>> = Vec::new();
    for d in all.iter().filter(|d| layer.is_none() || layer == d.layer) {
        match subjects.iter_mut().find(|s| s[0].subject == d.subject) {
            Some(same) => same.push(d),
            None => subjects.push(vec![d]),
        }
    }
    subjects.iter().map(|of| subject(of)).collect()
}

/// A line for each decision about the whole model.
pub(super) fn lines(all: &[Decision]) -> impl Iterator<Item = (String, String)> {
    let whole = all.iter().filter(|d| d.layer.is_none() && d.weights.is_empty());
    whole.map(|d| (d.subject.clone(), format!("{}: {}", d.chosen, d.reason)))
}

fn subject(of: &[&Decision]) -> String {
    let mut text = format!("\n{} ({})\n", of[0].subject, of[0].pass);
    let mut verdicts: Vec<Vec<&Decision>> = Vec::new();
    for d in of {
        match verdicts.iter_mut().find(|v| (&v[0].chosen, &v[0].reason) == (&d.chosen, &d.reason)) {
            Some(same) => same.push(d),
            None => verdicts.push(vec![d]),
        }
    }
    for same in &verdicts {
        let _ = writeln!(text, "  {}{}: {}", same[0].chosen, extent_text(same), same[0].reason);
        let figures = ranges(same.iter().map(|d| &d.figures));
        if !figures.is_empty() {
            let listed: Vec<_> = figures.iter().map(|f| format!("{} {}", f.title(), f.text())).collect();
            let _ = writeln!(text, "    {}", listed.join(", "));
        }
    }
    text + &alternatives(of)
}

/// Layers of a decision, or the number of its weights.
fn extent_text(same: &[&Decision]) -> String {
    let layers: Vec<u32> = same.iter().filter_map(|d| d.layer).collect();
    let weights: usize = same.iter().map(|d| d.weights.len()).sum();
    match (layers.as_slice(), weights) {
        ([], 0) => String::new(),
        ([], n) => format!(" ({n} weights)"),
        ([layer], _) => format!(" in layer {layer}"),
        (many, _) => format!(" in {} layers", many.len()),
    }
}

/// Table of the alternatives.
fn alternatives(of: &[&Decision]) -> String {
    let all = || of.iter().flat_map(|d| d.alternatives.iter().map(move |a| (a, a.what == d.chosen)));
    let mut names: Vec<&str> = Vec::new();
    for (a, _) in all() {
        if !names.contains(&a.what.as_str()) {
            names.push(&a.what);
        }
    }
    let titles = ranges(all().map(|(a, _)| &a.figures));
    let row = |(at, name): (usize, &&str)| {
        let own = || all().filter(|(a, _)| a.what == *name);
        let taken = own().filter(|(_, taken)| *taken).count();
        if at >= SHOWN && taken == 0 {
            return None;
        }
        let figures = ranges(own().map(|(a, _)| &a.figures));
        let cell = |title: &Range| {
            figures.iter().find(|f| f.name == title.name).map_or_else(String::new, Range::text)
        };
        let mark = match taken {
            0 => String::new(),
            n if n == of.len() => "← chosen".to_owned(),
            n => format!("← chosen in {n} of {} layers", of.len()),
        };
        Some(
            [format!("  {name}")]
                .into_iter()
                .chain(titles.iter().map(cell))
                .chain([mark])
                .collect::<Vec<_>>(),
        )
    };
    if names.is_empty() {
        return String::new();
    }
    let mut rows =
        vec![[String::new()].into_iter().chain(titles.iter().map(Range::title)).collect::<Vec<_>>()];
    rows.extend(names.iter().enumerate().filter_map(row));
    let more = names.len() + 1 - rows.len();
    let more = if more == 0 { String::new() } else { format!("  {more} others (`--json` lists them)\n") };
    output::table(&rows) + &more
}

/// The least and the largest number of a name.
struct Range<'a> {
    name: &'a str,
    least: f64,
    most: f64,
}

/// The ranges of all figures, by their names.
fn ranges<'a>(of: impl Iterator<Item = &'a Figures>) -> Vec<Range<'a>> {
    let mut all: Vec<Range<'a>> = Vec::new();
    for (name, &value) in of.flatten() {
        match all.iter_mut().find(|r| r.name == name) {
            Some(r) => (r.least, r.most) = (r.least.min(value), r.most.max(value)),
            None => all.push(Range { name, least: value, most: value }),
        }
    }
    all
}

/// Suffix of a figure's name for its unit, and the formatter of such figures.
type UnitName = (&'static str, fn(f64) -> String);

const UNITS: [UnitName; 7] = [
    ("_bytes", |x| human::bytes(x as u64)),
    ("_share", |x| format!("{:.2} %", 100.0 * x)),
    ("_us", |x| format!("{x:.1} µs")),
    ("_ms", |x| format!("{x:.1} ms")),
    ("_mj", |x| format!("{x:.3} mJ")),
    ("_nats", |x| format!("{x:.4} nats")),
    ("_tokens_per_s", |x| format!("{x:.1} tokens/s")),
];

impl Range<'_> {
    fn unit(&self) -> Option<&'static UnitName> {
        UNITS.iter().find(|(end, _)| self.name.ends_with(end))
    }

    /// The name as shown, without its unit.
    fn title(&self) -> String {
        let end = self.unit().map_or("", |(end, _)| end);
        self.name.strip_suffix(end).unwrap_or(self.name).replace('_', " ")
    }

    /// The number, or the least and the largest.
    fn text(&self) -> String {
        let plain = |x: f64| if x.fract() == 0.0 { format!("{x:.0}") } else { format!("{x:.4}") };
        let one = |x: f64| self.unit().map_or_else(|| plain(x), |(_, print)| print(x));
        let (least, most) = (one(self.least), one(self.most));
        if least == most { least } else { format!("{least} to {most}") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn predictor(layer: u32, chosen: &str, found: f64) -> Decision {
        Decision::new("cluster", "predictors of neurons", chosen, "reads less than gates")
            .in_layer(layer)
            .with(&[("active_share", 0.25)])
            .or("off", &[("found_share", 1.0), ("token_bytes", 4096.0)])
            .or("coarse", &[("found_share", found), ("token_bytes", 1024.0)])
    }

    #[test]
    fn decisions_are_shown_for_all_layers_or_one() {
        let all = [
            Decision::new("assign_residency", "attention", "cpu", "simulated")
                .or("npu", &[("request_ms", 2.0)])
                .or("cpu", &[("request_ms", 1.0)]),
            predictor(0, "coarse", 0.99),
            predictor(1, "coarse", 0.97),
            predictor(2, "off", 0.5),
        ];
        insta::assert_snapshot!("decisions", shown(&all, None));
        insta::assert_snapshot!("decisions_of_a_layer", shown(&all, Some(1)));
        assert_eq!(lines(&all).collect::<Vec<_>>(), [("attention".to_owned(), "cpu: simulated".to_owned())]);
        assert_eq!(shown(&[], None), "");
    }
}
