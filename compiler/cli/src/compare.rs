//! `moec compare`: two bundles side by side.

use super::output;
use super::report::summary::{self, Cell, Summary};
use moec_base::{Result, human};
use moec_bundle::read::Bundle;
use moec_ir::EntryKind;
use moec_ir::plan::Plan;
use serde_json::json;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// Compare two bundles: shapes, formats, placement, memory, expected speed, measured quality, plans
///
/// Rows that differ begin with `*`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// First bundle
    pub a: PathBuf,
    /// Second bundle
    pub b: PathBuf,
    /// Show only rows that differ
    #[arg(long)]
    pub different: bool,
    /// Print one JSON object to stdout
    #[arg(long)]
    pub json: bool,
}

/// A property of a bundle: part, name and value.
type Row = (&'static str, String, String);

/// Compares two bundles and prints the properties.
///
/// # Errors
/// Fails if a bundle cannot be read.
pub fn run(args: &Args) -> Result<()> {
    let mut rows = pair_rows(&side(&args.a)?, &side(&args.b)?);
    if args.different {
        rows.retain(|(.., a, b)| a != b);
    }
    if args.json {
        let row =
            |(part, what, a, b): &Pair| json!({"part": part, "what": what, "a": a, "b": b, "same": a == b});
        let different = rows.iter().filter(|(.., a, b)| a != b).count();
        return output::json(&json!({
            "a": args.a, "b": args.b, "different": different, "rows": rows.iter().map(row).collect::<Vec<_>>(),
        }));
    }
    let mut text = output::table(&[
        vec!["a".to_owned(), args.a.display().to_string()],
        vec!["b".to_owned(), args.b.display().to_string()],
    ]);
    let mut part = "";
    let mut table = Vec::new();
    for (of, what, a, b) in &rows {
        if *of != part {
            text += &output::table(&std::mem::take(&mut table));
            let _ = writeln!(text, "\n{of}");
            part = of;
        }
        let mark = if a == b { " " } else { "*" };
        let side = |x: &Option<String>| x.clone().unwrap_or_else(|| "–".to_owned());
        table.push(vec![format!("{mark} {what}"), side(a), side(b)]);
    }
    if rows.is_empty() {
        text += "\nthe bundles do not differ\n";
    }
    output::data(&(text + &output::table(&table)))
}

/// The properties of the bundle at a path.
fn side(path: &Path) -> Result<Vec<Row>> {
    let bundle = Bundle::open(path)?;
    Ok(rows(&bundle.plan, &summary::of(&bundle, None)?))
}

/// A property of two bundles.
type Pair = (&'static str, String, Option<String>, Option<String>);

/// Pairs rows by part and name, in the order of `a`. Rows that only `b` has follow at the end of their part.
fn pair_rows(a: &[Row], b: &[Row]) -> Vec<Pair> {
    let mut parts: Vec<&'static str> = Vec::new();
    a.iter().chain(b).for_each(|(part, ..)| {
        if !parts.contains(part) {
            parts.push(part);
        }
    });
    let of = |rows: &[Row], part: &str, what: &str| {
        rows.iter().find(|(p, w, _)| *p == part && w == what).map(|(.., value)| value.clone())
    };
    let mut all = Vec::new();
    for part in parts {
        let mut names: Vec<&String> = Vec::new();
        a.iter().chain(b).filter(|(p, ..)| *p == part).for_each(|(_, what, _)| {
            if !names.contains(&what) {
                names.push(what);
            }
        });
        all.extend(names.into_iter().map(|what| (part, what.clone(), of(a, part, what), of(b, part, what))));
    }
    all
}

/// All properties of a bundle.
fn rows(plan: &Plan, s: &Summary) -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    let mut add = |part, what: &str, value: String| rows.push((part, what.to_owned(), value));
    let (model, target) = (&plan.model, &plan.target);
    add("model", "family", model.family.clone());
    for (name, value) in &s.head {
        add("model", name, value.clone());
    }
    add("model", "target", format!("{} ({})", target.name, target.triple));
    let sizes = |of_kind: fn(EntryKind) -> bool| {
        let sizes = plan.entries.iter().filter(|e| of_kind(e.kind)).map(|e| e.kind.rows().to_string());
        sizes.collect::<Vec<_>>().join(", ")
    };
    add("shapes", "rows of a prefill call", sizes(|k| matches!(k, EntryKind::Prefill(_))));
    add("shapes", "sequences of a decode call", sizes(|k| matches!(k, EntryKind::Decode(_))));
    add("shapes", "KV cache", plan.cache_format().map_or("none".to_owned(), |f| f.name().to_owned()));
    add(
        "shapes",
        "big-little",
        model.big_little.map_or("no".to_owned(), |b| format!("{} experts, gamma {}", b.experts, b.gamma())),
    );
    let mut formats: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for w in &s.weights {
        formats.entry(w.class).or_default().push(format!("{} {}", w.format, human::bytes(w.bytes)));
    }
    for (class, of) in &formats {
        add("formats", class, of.join(", "));
    }
    for (name, value) in placed(s) {
        add("places", &name, value);
    }
    for part in &s.memory {
        add("memory", &format!("{}: {}", part.memory, part.what), human::bytes(part.bytes));
    }
    for e in &s.expected {
        let ms = format!("{:.3} ms on the CPU", 1e3 * e.parts.seconds());
        let value = e.rate.map_or(ms.clone(), |rate| format!("{ms}, {rate:.1} tokens/s"));
        add("expected speed, modelled", &e.entry, value);
    }
    let expected: Vec<(f32, f32)> = s.tiers.iter().filter_map(|t| t.2).collect();
    if !expected.is_empty() {
        let mean =
            |f: fn(&(f32, f32)) -> f32| 100.0 * expected.iter().map(f).sum::<f32>() / expected.len() as f32;
        add("quality", "expected overflow", format!("{:.2} %", mean(|e| e.0)));
        add("quality", "expected padding", format!("{:.2} %", mean(|e| e.1)));
    }
    for (name, value) in &s.decisions {
        let part = if ["mix of formats", "thresholds", "rounding", "profile"].contains(&name.as_str()) {
            "quality"
        } else {
            "decisions"
        };
        add(part, name, value.clone());
    }
    for e in &plan.entries {
        let barriers = moec_passes::barriers::count(e);
        add("plan", &e.kind.to_string(), format!("{} steps, {barriers} barriers", e.steps.len()));
    }
    add("plan", "kernels", plan.kernels.len().to_string());
    add("plan", "graphs", plan.graphs.len().to_string());
    add("plan", "units", plan.units.iter().map(|u| u.name.as_str()).collect::<Vec<_>>().join(", "));
    let bytes = s.files.iter().map(|(_, bytes)| *bytes).fold(0, u64::saturating_add);
    add("plan", "files", format!("{}, {}", s.files.len(), human::bytes(bytes)));
    rows
}

/// Share of each unit over all layers, by column.
fn placed(s: &Summary) -> Vec<(String, String)> {
    let column = |(j, name): (usize, &String)| {
        let cells: Vec<&Cell> =
            s.places.iter().filter_map(|(_, cells)| cells.get(j)).filter(|c| !c.units.is_empty()).collect();
        let mut sums: BTreeMap<&str, f64> = BTreeMap::new();
        cells.iter().flat_map(|c| &c.units).for_each(|(unit, share)| *sums.entry(unit).or_default() += share);
        let shares =
            sums.iter().map(|(unit, sum)| format!("{unit} {:.0} %", 100.0 * sum / cells.len() as f64));
        (name.clone(), shares.collect::<Vec<_>>().join(", "))
    };
    s.columns.iter().enumerate().map(column).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_paired_by_part_and_name() {
        let row = |part, what: &str, value: &str| (part, what.to_owned(), value.to_owned());
        let a = [row("x", "one", "1"), row("x", "two", "2"), row("y", "one", "3")];
        let b = [row("x", "two", "2"), row("x", "three", "4"), row("z", "one", "5")];
        let some = |v: &str| Some(v.to_owned());
        let pairs = pair_rows(&a, &b);
        let expected = [
            ("x", "one", some("1"), None),
            ("x", "two", some("2"), some("2")),
            ("x", "three", None, some("4")),
            ("y", "one", some("3"), None),
            ("z", "one", None, some("5")),
        ];
        assert_eq!(pairs, expected.map(|(p, w, a, b)| (p, w.to_owned(), a, b)));
    }
}
