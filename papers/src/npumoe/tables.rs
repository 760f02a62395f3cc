//! The evaluation of NPUMoE for people, in tables, and for programs, as JSON.

use super::fit::found;
use super::overlap::TOP;
use super::paper::{Metric, Ratio};
use super::reproduce::{Measured, Report, Total};
use crate::claim::Claim;
use crate::printed::Printed;
use moec::output::table;
use moec_simulate::System;
use serde_json::{Value, json};
use std::fmt::Write as _;

/// The evaluation in tables.
pub fn text(report: &Report) -> String {
    let mut text = String::from(
        "Simulated, and in brackets what NPUMoE printed, where it did. Latency, energy and CPU at the right are ratios to ours.\n\n",
    );
    let head = ["configuration", "system", "latency", "mJ/token", "CPU busy", "latency", "energy", "CPU"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    report.measured.iter().for_each(|m| rows.extend(measured_rows(report, m)));
    text += &table(&rows);
    text += "\n* the paper does not state prompt and chunk: 1024 and 256 were assumed, and for Qwen3-MoE also the largest.\n\
             u: a constant was fitted to it.\n";
    let others = report.ratios().filter(|(r, _)| r.to != "ours");
    let row = |(r, c): (Ratio<'_>, &Claim)| {
        let of = format!("{} over {}, {}", r.of, r.to, r.metric.name());
        vec![r.config.to_owned(), of, format!("{:.2} ({})", c.ours, c.paper)]
    };
    let rows: Vec<Vec<String>> = others.map(row).collect();
    if !rows.is_empty() {
        let _ = write!(text, "\n{}", table(&rows));
    }

    let (all, wrong) = (report.orders.len(), report.reversed());
    let _ = writeln!(text, "\nOrders of two systems: {} of {all} as in the paper.", all - wrong.len());
    if !wrong.is_empty() {
        text += "The others:\n";
        let head = [
            "configuration",
            "metric",
            "the paper's better",
            "the paper's worse",
            "simulated worse / better",
        ];
        let mut rows = vec![head.map(str::to_owned).to_vec()];
        let named =
            |(name, x): (&str, Option<f64>)| x.map_or_else(|| name.to_owned(), |x| format!("{name} ({x})"));
        rows.extend(wrong.iter().map(|o| {
            vec![
                o.config.into(),
                o.metric.name().into(),
                named(o.less),
                named(o.more),
                format!("{:.2}", o.found),
            ]
        }));
        text += &table(&rows);
    }

    let outside = report.outside();
    text += "\nRanges of §5.2 over all baselines and configurations of PhiMoE (cpu: cycles there, busy time here):\n";
    let head = ["metric", "the paper's", "simulated", "outside"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for metric in Metric::ALL {
        let (from, to) = metric.range();
        let found: Vec<f64> = ratios(report, metric);
        let (least, most) = found.iter().fold((f64::MAX, 0.0_f64), |(a, b), &x| (a.min(x), b.max(x)));
        let out: Vec<String> =
            outside.iter().filter(|o| o.1 == metric).map(|o| format!("{} {} {:.2}", o.0, o.2, o.3)).collect();
        let out = if out.is_empty() { "none".to_owned() } else { out.join("; ") };
        if !found.is_empty() {
            rows.push(vec![
                metric.name().into(),
                format!("{from}–{to}"),
                format!("{least:.2}–{most:.2}"),
                out,
            ]);
        }
    }
    text += &table(&rows);

    text += "\nConstants found from figures of the paper:\n";
    let constants = found(&report.constants);
    let rows: Vec<Vec<String>> = constants
        .iter()
        .map(|f| vec![f.what.into(), format!("{:.3} {}", f.value, f.unit), f.from.into()])
        .collect();
    text += &table(&rows);
    if report.figures().next().is_some() {
        text +=
            "\nFigures of the paper (u: the device file or a constant is from it; the others check them):\n";
        let head = ["figure", "unit", "paper", "simulated", "error", ""];
        let mut rows = vec![head.map(str::to_owned).to_vec()];
        rows.extend(report.figures().map(|f| {
            let used = if f.used { "u" } else { "" };
            let (name, error) = (format!("{}, {}", f.place, f.what), percent(f.paper.error(f.ours)));
            vec![name, f.unit.clone(), f.paper.to_string(), number(f.ours), error, used.into()]
        }));
        text += &table(&rows);
    }
    text
}

/// Ratios of the baselines in PhiMoE's prefill.
fn ratios(report: &Report, metric: Metric) -> Vec<f64> {
    let stated = report.measured.iter().filter(|m| m.config.stated);
    let of = |m: &Measured| -> Vec<f64> {
        m.systems
            .iter()
            .filter(|(s, _)| s.name != "ours")
            .filter_map(|(s, _)| m.ratio(metric, s.name, "ours"))
            .collect()
    };
    stated.flat_map(of).collect()
}

fn percent(x: f64) -> String {
    format!("{:+.0} %", x * 100.0)
}

fn number(x: f64) -> String {
    if x >= 100.0 { format!("{x:.0}") } else { format!("{x:.3}") }
}

fn measured_rows(report: &Report, m: &Measured) -> Vec<Vec<String>> {
    let row = |(i, (system, total)): (usize, &(System, Total))| {
        let prompts = f64::from(total.prompts.max(1));
        let seconds = |us: f64| format!("{:.2} s", us * 1e-6 / prompts);
        let ratio = |metric: Metric| {
            let found = m.ratio(metric, system.name, "ours").unwrap_or(f64::NAN);
            match report.claims.find(&m.config.ratio(metric, system.name, "ours")) {
                Some(c) => format!("{found:.2} ({}){}", c.paper, if c.used { " u" } else { "" }),
                None => format!("{found:.2}"),
            }
        };
        let name = if m.config.stated { m.config.name.to_owned() } else { format!("{} *", m.config.name) };
        let mut row = vec![if i == 0 { name } else { String::new() }, system.name.to_owned()];
        let mj = format!("{:.0}", total.metric(Metric::Energy) * 1e3);
        row.extend([seconds(total.wall_us), mj, seconds(total.cpu_us)]);
        row.extend(Metric::ALL.map(ratio));
        row
    };
    m.systems.iter().enumerate().map(row).collect()
}

/// The evaluation as JSON.
pub fn value(report: &Report) -> Value {
    let printed = |p: Printed| match p {
        Printed::Is(x) => json!(x),
        Printed::Within(a, b) => json!([a, b]),
        Printed::Over(x) => json!({"over": x}),
        Printed::Below(x) => json!({"below": x}),
    };
    let measured = |m: &Measured| {
        let systems = m.systems.iter().map(|(s, t)| {
            json!({
                "system": s.name, "source": s.source, "prompts": t.prompts,
                "latency_s": t.wall_us * 1e-6, "cpu_busy_s": t.cpu_us * 1e-6, "npu_busy_s": t.npu_us * 1e-6,
                "energy_j": {"cpu": t.energy.cpu_j, "npu": t.energy.npu_j, "memory": t.energy.memory_j},
                "energy_per_token_j": t.metric(Metric::Energy),
            })
        });
        json!({
            "configuration": m.config.name, "device": m.config.device, "model": m.config.shape.name,
            "prompt": m.config.prompt, "chunk": m.config.chunk, "decode": m.config.decode,
            "stated": m.config.stated, "systems": systems.collect::<Vec<_>>(),
        })
    };
    json!({
        "constants": found(&report.constants).iter().map(|f| json!({
            "constant": f.what, "value": f.value, "unit": f.unit, "from": f.from,
        })).collect::<Vec<_>>(),
        "configurations": report.measured.iter().map(measured).collect::<Vec<_>>(),
        "ratios": report.ratios().map(|(r, c)| json!({
            "configuration": r.config, "metric": r.metric.name(), "of": r.of, "to": r.to,
            "paper": printed(c.paper), "simulated": c.ours, "error": c.paper.error(c.ours), "used": c.used,
            "source": c.note.as_ref().map_or_else(|| c.place.clone(), |note| format!("{}; {note}", c.place)),
        })).collect::<Vec<_>>(),
        "orders": report.orders.iter().map(|o| json!({
            "configuration": o.config, "metric": o.metric.name(), "less": o.less.0, "more": o.more.0,
            "simulated": o.found, "holds": o.holds(),
        })).collect::<Vec<_>>(),
        "outside": report.outside().iter().map(|(config, metric, system, x)| json!({
            "configuration": config, "metric": metric.name(), "system": system, "simulated": x,
        })).collect::<Vec<_>>(),
        "figures": report.figures().map(|f| json!({
            "figure": format!("{}, {}", f.place, f.what), "unit": f.unit, "paper": printed(f.paper), "simulated": f.ours,
            "error": f.paper.error(f.ours), "used": f.used,
        })).collect::<Vec<_>>(),
        "overlap": report.overlap.iter().map(|p| json!({
            "data_sets": p.domains, "top": TOP, "median": p.medians,
        })).collect::<Vec<_>>(),
    })
}
