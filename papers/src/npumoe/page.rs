//! NPUMoE's evaluation and the simulation, as a page of the documentation: every figure, the largest misses
//! first.

use super::fit::found;
use super::paper::{Metric, Ratio};
use super::reproduce::Report;
use super::{drops, overlap};
use crate::claim::Claim;
use moec_device::BUILT_IN;
use std::fmt::Write as _;

/// A figure of the paper and ours.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Place in the paper.
    pub place: String,
    /// Description.
    pub what: String,
    /// The paper's, with its unit.
    pub paper: String,
    /// Ours.
    pub ours: f64,
    /// Ours over the paper's, or over the nearer end of its range.
    pub times: f64,
    /// Whether a constant or a figure of the device file is from it.
    pub used: bool,
    /// Whether it is a ratio of two systems.
    pub ratio: bool,
}

impl Row {
    /// Distance, whichever way: 1 is on it, 2 twice as much or half.
    pub fn miss(&self) -> f64 {
        if self.times > 0.0 { self.times.max(1.0 / self.times) } else { f64::INFINITY }
    }
}

/// Every figure, the largest miss first.
pub fn rows(report: &Report) -> Vec<Row> {
    let row = |c: &Claim| {
        let ratio = Ratio::of(c).is_some();
        let unit = if ratio || c.unit == "of 1" { String::new() } else { format!(" {}", c.unit) };
        Row {
            place: c.place.clone(),
            what: c.what.clone(),
            paper: format!("{}{unit}", c.paper),
            ours: c.ours,
            times: 1.0 + c.paper.error(c.ours),
            used: c.used,
            ratio,
        }
    };
    let mut rows: Vec<Row> = report.claims.compared.iter().map(row).collect();
    // Equal misses stay in the order of the paper.
    rows.sort_by(|a, b| b.miss().total_cmp(&a.miss()));
    rows
}

/// The page.
pub fn page(report: &Report) -> String {
    let rows = rows(report);
    let mut out = format!(
        "# NPUMoE's evaluation, simulated\n\n\
         What `cargo xtask npumoe` computes, beside every figure of the evaluation in *NPUMoE* (sections 5.1 to 5.8, its\n\
         appendix, and the figures that motivate it). `cargo xtask docs` writes this page; a stale one fails a test.\n\
         `cargo xtask npumoe --json` has the same numbers.\n\n{}\n",
        summary(report, &rows)
    );
    constants(&mut out, report);
    out += "\n## Figures that check the simulation\n\n\
            The largest misses first. *Times*: ours over the paper's, or over the nearer end of its range; 1 is within it. Ratios of\n\
            systems are to `ours`, NPUMoE's own system; `cpu` is cycles there and busy time here. \\*: the paper does not state prompt\n\
            and chunk, and ours are an assumption.\n\n";
    table(&mut out, rows.iter().filter(|r| !r.used));
    out += "\n## Fitted figures\n\nThey gave a constant or a figure of the device file, or are ratios of the latencies of Table 5, which gave the cost of a\n\
            launch. They are no check.\n\n";
    table(&mut out, rows.iter().filter(|r| r.used));
    notes(&mut out, report);
    orders(&mut out, report);
    overlap::section(&mut out, report);
    drops::section(&mut out, &report.drops);
    out += "\n## What the simulator cannot predict\n\n| where | what | the paper's | why not |\n|---|---|---|---|\n";
    for n in &report.claims.not_modelled {
        let _ = writeln!(out, "| {} | {} | {} | {} |", n.place, n.what, n.paper, n.why);
    }
    out
}

/// Figures that are not checks, with the constants or the device file's values that come from them.
fn constants(out: &mut String, report: &Report) {
    *out +=
        "## Constants, and what each was found from\n\n| constant | value | found from |\n|---|---|---|\n";
    for f in found(&report.constants) {
        let _ = writeln!(out, "| {} | {:.3} {} | {} |", f.what, f.value, f.unit, f.from);
    }
    let text = BUILT_IN.iter().find(|(name, _)| *name == "m2-ultra").map_or("", |(_, text)| text);
    if let Ok(device) = text.parse::<toml::Table>() {
        for (key, value) in &device {
            measured(out, key, value);
        }
    }
}

/// The figures of a device file whose source is a table or a figure of the paper.
fn measured(out: &mut String, key: &str, value: &toml::Value) {
    match value {
        toml::Value::Array(all) => all.iter().for_each(|v| measured(out, key, v)),
        toml::Value::Table(t) => {
            let source = t.get("source").and_then(toml::Value::as_str).unwrap_or_default();
            let numbers: Vec<String> = t
                .iter()
                .filter(|(_, v)| v.is_integer() || v.is_float())
                .map(|(k, v)| if k == "value" { v.to_string() } else { format!("{k} {v}") })
                .collect();
            if !numbers.is_empty() && ["Table ", "Figure "].iter().any(|w| source.contains(w)) {
                let _ = writeln!(out, "| m2-ultra, `{key}` | {} | {source} |", numbers.join(", "));
            }
            for (k, v) in t {
                measured(out, k, v);
            }
        }
        _ => {}
    }
}

/// Notes on the places of ratios.
fn notes(out: &mut String, report: &Report) {
    let mut seen: Vec<(&str, &str)> = Vec::new();
    for c in &report.claims.compared {
        let Some(note) = &c.note else { continue };
        if !seen.contains(&(&*c.place, note)) {
            seen.push((&c.place, note));
        }
    }
    out.push_str("\n## Notes on the paper\n\n");
    for (place, note) in seen {
        let _ = writeln!(out, "- {place}: {note}.");
    }
    *out += "- Table 4: the rows in the column of ours sum to 1707 ms, its last row says 2165. What takes 0.8 to 0.9 s per layer to\n\
             scatter and 0.4 s to add the residual is not stated; the bytes that are moved take 5 and 3 ms at the rate of its Gather.\n\
             - Table 3: capacities in the paper drop a tenth to a fifth of the tokens; ours are moec's defaults, which keep nearly all.\n";
}

fn table<'a>(out: &mut String, rows: impl Iterator<Item = &'a Row>) {
    *out += "| where | what | the paper's | ours | times |\n|---|---|---|---|---|\n";
    for r in rows {
        let _ = writeln!(
            out,
            "| {} | {} | {} | {} | {} |",
            r.place,
            r.what,
            r.paper,
            significant(r.ours),
            significant(r.times)
        );
    }
}

/// A number with three digits.
fn significant(x: f64) -> String {
    let digits = if x == 0.0 || !x.is_finite() { 0.0 } else { x.abs().log10().floor() };
    let after = (2.0 - digits).clamp(0.0, 6.0) as usize;
    format!("{x:.after$}")
}

/// Orders of two systems that are reversed in the simulation.
fn orders(out: &mut String, report: &Report) {
    let wrong = report.reversed();
    let (all, held) = (report.orders.len(), report.orders.len() - wrong.len());
    let _ = writeln!(
        out,
        "\n## Orders of two systems\n\n{held} of {all} are as in the paper. The others, the clearest first:\n\n\
         | configuration | metric | the paper's better | the paper's worse | worse over better, ours |\n|---|---|---|---|---|"
    );
    let mut wrong = wrong;
    wrong.sort_by(|a, b| a.found.total_cmp(&b.found));
    for o in wrong {
        let named =
            |(name, x): (&str, Option<f64>)| x.map_or_else(|| name.to_owned(), |x| format!("{name} ({x})"));
        let (less, more) = (named(o.less), named(o.more));
        let _ = writeln!(out, "| {} | {} | {less} | {more} | {:.2} |", o.config, o.metric.name(), o.found);
    }
}

/// Summary that a reader should know before all figures.
fn summary(report: &Report, rows: &[Row]) -> String {
    let free: Vec<&Row> = rows.iter().filter(|r| !r.used).collect();
    let within = |times: f64| free.iter().filter(|r| r.miss() <= times).count();
    let mut out = format!(
        "Of {} figures that were not used to fit a constant, {} are within a factor of 1.1 of the paper's or its range, {} within 1.25 and\n\
         {} within 1.5; {} are off by more than a factor of 2. {} more are fitted and check nothing: they have a table of their own.\n",
        free.len(),
        within(1.1),
        within(1.25),
        within(1.5),
        free.len() - within(2.0),
        rows.len() - free.len()
    );
    for (metric, name) in [
        (Metric::Latency, "latency"),
        (Metric::Energy, "energy per token"),
        (Metric::Cpu, "CPU time (cycles there)"),
    ] {
        let free = report.ratios().filter(|(r, c)| r.metric == metric && !c.used);
        let off = |c: &Claim| {
            let times = 1.0 + c.paper.error(c.ours);
            times.max(1.0 / times.max(f64::MIN_POSITIVE))
        };
        let Some((r, c)) = free.max_by(|a, b| off(a.1).total_cmp(&off(b.1))) else { continue };
        let _ = writeln!(
            out,
            "The worst ratio of {name}: {:.2} against {} ({}, {} over {}).",
            c.ours, c.paper, r.config, r.of, r.to
        );
    }
    let mut seen: Vec<&str> = Vec::new();
    let mut named = Vec::new();
    for r in &free {
        if !r.ratio && !seen.contains(&r.place.as_str()) && r.miss() > 1.5 {
            seen.push(&r.place);
            named.push(format!("{} ({}: {} against {})", r.place, r.what, significant(r.ours), r.paper));
        }
    }
    if !named.is_empty() {
        let _ = writeln!(
            out,
            "Tables and figures that are off by more than a factor of 1.5, each with its largest miss: {}.",
            named.join("; ")
        );
    }
    let (all, wrong) = (report.orders.len(), report.reversed().len());
    let _ = writeln!(out, "Of {all} orders of two systems {} are as in the paper.", all - wrong);
    out
}

#[cfg(test)]
mod tests {
    use super::{page, rows, significant};
    use crate::claim::printed;
    use crate::npumoe::paper::CLAIMS;
    use crate::npumoe::report as reported;

    #[test]
    fn page_lists_every_paper_figure_with_misses_first() {
        let report = reported(None).unwrap();
        let (rows, page) = (rows(&report), page(&report));
        assert_eq!(rows.len(), printed(CLAIMS).unwrap().len());
        for place in (1..=9)
            .filter(|n| *n != 2)
            .map(|n| format!("Table {n}"))
            .chain([2, 7, 8, 14].map(|n| format!("Figure {n}")))
        {
            let listed = rows.iter().any(|r| r.place.starts_with(&place) || r.place.contains(&place));
            assert!(listed || place == "Table 7", "{place}");
        }
        for section in ["§5.1", "§5.2", "§5.3", "§5.4", "§5.5", "§5.7", "§5.8"] {
            assert!(rows.iter().any(|r| r.place.contains(section)), "{section}");
        }
        // Sorted by the size of the error, in either direction.
        assert!(rows.windows(2).all(|w| w[0].miss() >= w[1].miss()));
        let (free, used): (Vec<_>, Vec<_>) = rows.iter().partition(|r| !r.used);
        assert!(used.len() > 10 && free.len() > 100, "{} and {}", used.len(), free.len());
        let first = page.find(&format!("| {} | {} |", free[0].place, free[0].what)).unwrap();
        let last = page.find(&format!("| {} | {} |", free[9].place, free[9].what)).unwrap();
        assert!(first < last);
    }

    #[test]
    fn numbers_have_three_digits() {
        assert_eq!(
            [0.04712, 1.0, 23.456, 1234.5, 0.0].map(significant),
            ["0.0471", "1.00", "23.5", "1234", "0.00"]
        );
    }
}
