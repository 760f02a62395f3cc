//! Bars and curves as SVG.

use std::fmt::Write as _;

const WIDTH: f64 = 700.0;
const HEIGHT: f64 = 340.0;
/// Left end of axes.
const LEFT: f64 = 58.0;
const RIGHT: f64 = 688.0;
const TOP: f64 = 58.0;
const BOTTOM: f64 = 270.0;
/// Colours that are distinguished without red and green.
pub const COLOURS: [&str; 5] = ["#9ca3af", "#60a5fa", "#1d4ed8", "#f59e0b", "#c2410c"];

/// Values of one colour.
#[derive(Clone, Debug)]
pub struct Series {
    /// Name in the legend.
    pub name: String,
    /// Colour.
    pub colour: &'static str,
    /// Bars: one for each group, 0 for none. Curves: one for each place of the axis.
    pub values: Vec<f64>,
}

/// Labels of a chart.
#[derive(Clone, Debug)]
pub struct Labels {
    /// Above it.
    pub title: String,
    /// Of the upward axis.
    pub up: &'static str,
    /// Of the other one.
    pub across: &'static str,
    /// Groups of bars, or places of curves; of several lines.
    pub groups: Vec<String>,
    /// A marked range of the vertical axis, with its label.
    pub range: Option<(f64, f64, String)>,
}

/// Groups of bars.
pub fn bars(labels: &Labels, series: &[Series]) -> String {
    let mut chart = Chart::new(labels, series);
    let group = (RIGHT - LEFT) / labels.groups.len().max(1) as f64;
    let width = group * 0.8 / series.len().max(1) as f64;
    for (s, of) in series.iter().enumerate() {
        for (g, &value) in of.values.iter().enumerate().filter(|v| *v.1 > 0.0) {
            let x = LEFT + group * (g as f64 + 0.1) + width * s as f64;
            let y = chart.up(value);
            let _ = writeln!(
                chart.out,
                "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{}\"><title>{}: {value:.2}</title></rect>",
                width * 0.92,
                BOTTOM - y,
                of.colour,
                escaped(&of.name),
            );
            if width > 19.0 {
                let x = x + width * 0.46;
                let _ = writeln!(
                    chart.out,
                    "<text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\" class=\"small\">{value:.2}</text>",
                    y - 3.0
                );
            }
        }
    }
    chart.end(labels, series)
}

/// Curves; places of the other axis are equally far from each other.
pub fn curves(labels: &Labels, series: &[Series]) -> String {
    let mut chart = Chart::new(labels, series);
    let place = (RIGHT - LEFT) / labels.groups.len().max(1) as f64;
    for of in series {
        let at = |(g, &value): (usize, &f64)| (LEFT + place * (g as f64 + 0.5), chart.up(value), value);
        let points: Vec<(f64, f64, f64)> = of.values.iter().enumerate().map(at).collect();
        let path: Vec<String> = points.iter().map(|(x, y, _)| format!("{x:.1},{y:.1}")).collect();
        let _ = writeln!(
            chart.out,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2.5\"/>",
            path.join(" "),
            of.colour
        );
        for (x, y, value) in points {
            let _ = writeln!(
                chart.out,
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" fill=\"{}\"><title>{}: {value:.2}</title></circle>",
                of.colour,
                escaped(&of.name)
            );
        }
    }
    chart.end(labels, series)
}

/// A chart on its way.
struct Chart {
    out: String,
    most: f64,
}

impl Chart {
    /// With its axes.
    fn new(labels: &Labels, series: &[Series]) -> Self {
        let values = series.iter().flat_map(|s| &s.values).copied();
        let largest = values.chain(labels.range.iter().map(|r| r.1)).fold(0.0, f64::max);
        let step = nice(largest / 5.0);
        let most = (largest / step).ceil().max(1.0) * step;
        let mut chart = Self { out: String::new(), most };
        let _ = writeln!(
            chart.out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" role=\"img\">\n\
             <title>{0}</title>\n\
             <style>text {{ font: 13px sans-serif; fill: #111827 }} .title {{ font-weight: bold }} .small {{ font-size: 10px }} \
             .grid {{ stroke: #e5e7eb }}</style>\n\
             <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n\
             <text x=\"{LEFT}\" y=\"20\" class=\"title\">{0}</text>",
            escaped(&labels.title)
        );
        if let Some((low, high, name)) = &labels.range {
            let (top, bottom) = (chart.up(*high), chart.up(*low));
            let _ = writeln!(
                chart.out,
                "<rect x=\"{LEFT}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"#fde68a\" opacity=\"0.6\"><title>{}</title></rect>",
                RIGHT - LEFT,
                bottom - top,
                escaped(name)
            );
        }
        for tick in 0..=(chart.most / step).round() as u32 {
            let value = f64::from(tick) * step;
            let y = chart.up(value);
            let _ = writeln!(
                chart.out,
                "<line x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{RIGHT}\" y2=\"{y:.1}\" class=\"grid\"/>\n\
                 <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                LEFT - 6.0,
                y + 4.0,
                short(value)
            );
        }
        chart
    }

    fn up(&self, value: f64) -> f64 {
        BOTTOM - (BOTTOM - TOP) * (value / self.most).clamp(0.0, 1.0)
    }

    /// Names and legend.
    fn end(mut self, labels: &Labels, series: &[Series]) -> String {
        let place = (RIGHT - LEFT) / labels.groups.len().max(1) as f64;
        for (g, name) in labels.groups.iter().enumerate() {
            let x = LEFT + place * (g as f64 + 0.5);
            for (line, name) in name.lines().enumerate() {
                let (y, name) = (BOTTOM + 18.0 + 16.0 * line as f64, escaped(name));
                let _ =
                    writeln!(self.out, "<text x=\"{x:.1}\" y=\"{y}\" text-anchor=\"middle\">{name}</text>");
            }
        }
        let middle = f64::midpoint(LEFT, RIGHT);
        let _ = writeln!(
            self.out,
            "<text x=\"{middle}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n\
             <text x=\"16\" y=\"{up:.1}\" text-anchor=\"middle\" transform=\"rotate(-90 16 {up:.1})\">{}</text>",
            BOTTOM + 56.0,
            escaped(labels.across),
            escaped(labels.up),
            up = f64::midpoint(TOP, BOTTOM),
        );
        let range = labels.range.iter().map(|r| (r.2.as_str(), "#fde68a"));
        let mut x = LEFT;
        for (name, colour) in series.iter().map(|s| (s.name.as_str(), s.colour)).chain(range) {
            let _ = writeln!(
                self.out,
                "<rect x=\"{x:.1}\" y=\"31\" width=\"12\" height=\"12\" fill=\"{colour}\"/>\n\
                 <text x=\"{:.1}\" y=\"42\">{}</text>",
                x + 16.0,
                escaped(name)
            );
            x += 34.0 + 7.0 * name.chars().count() as f64;
        }
        self.out.push_str("</svg>\n");
        self.out
    }
}

/// 1, 2 or 5 times a power of ten, no less than this.
fn nice(least: f64) -> f64 {
    let power = 10_f64.powf(least.max(1e-9).log10().floor());
    [1.0, 2.0, 5.0, 10.0].map(|m| m * power).into_iter().find(|&s| s >= least).unwrap_or(10.0 * power)
}

fn short(value: f64) -> String {
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(groups: &[&str]) -> Labels {
        Labels {
            title: "a < b".to_owned(),
            up: "×",
            across: "batch",
            groups: groups.iter().map(|g| (*g).to_owned()).collect(),
            range: Some((1.0, 2.0, "theirs".to_owned())),
        }
    }

    #[test]
    fn every_chart_value_is_drawn_within_the_axes() {
        let series =
            [1.0, 3.0].map(|v| Series { name: format!("{v}"), colour: COLOURS[0], values: vec![v, 2.0 * v] });
        let svg = bars(&labels(&["x", "y"]), &series);
        // Two series of two, their legend, two ranges, the background.
        assert_eq!(svg.matches("<rect").count(), 4 + 2 + 2 + 1);
        assert!(svg.contains("a &lt; b") && svg.contains("batch") && !svg.contains("a < b"));
        let svg = curves(&labels(&["x", "y"]), &series);
        assert_eq!((svg.matches("<circle").count(), svg.matches("<polyline").count()), (4, 2));
        for y in svg.split("cy=\"").skip(1) {
            let y: f64 = y.split('"').next().and_then(|y| y.parse().ok()).expect("a number");
            assert!((TOP..=BOTTOM).contains(&y), "{y}");
        }
    }

    #[test]
    fn axis_steps_are_round_numbers() {
        assert_eq!([0.3, 0.11, 7.0, 2.0].map(nice), [0.5, 0.2, 10.0, 2.0]);
        assert_eq!([0.0, 0.5, 10.0].map(short), ["0", "0.5", "10"]);
    }
}
