//! Overlap@K between data sets (§5.1, §5.8): of the K busiest experts of a layer with one text, the share that
//! is among the K busiest with another.
//!
//! The paper's routing is not published. The counts are those of OLMoE-1B-7B in six domains of text
//! (`golden/traces`), three layers, compared as `moec inspect A --against B` compares profiles.

use super::reproduce::Report;
use crate::recorded::{ALL, Recorded};
use crate::shapes::OLMOE;
use moec_base::{Error, Result};
use moec_profile::overlap::overlap;
use moec_profile::{Origin, Profile, Reading, Routes, Trace};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Compared K. The paper's, of 16 experts, are 4 and 8; a quarter and a half of 64 are 16 and 32.
pub const TOP: [usize; 4] = [4, 8, 16, 32];

/// Overlap@K of two data sets.
#[derive(Clone, Debug, PartialEq)]
pub struct Pair {
    /// Both.
    pub domains: [&'static str; 2],
    /// Medians over the layers, from 0 to 1, in the order of [`TOP`].
    pub medians: [f64; TOP.len()],
}

/// Every pair of recorded data sets.
///
/// # Errors
/// Our bug: counts that do not parse.
pub fn overlaps() -> Result<Vec<Pair>> {
    let recorded = Recorded::every()?;
    let profiles: Vec<Profile> = ALL.iter().map(|d| profile(&recorded, d)).collect::<Result<_>>()?;
    let mut out = Vec::new();
    for (i, a) in profiles.iter().enumerate() {
        for (j, b) in profiles.iter().enumerate().skip(i + 1) {
            let mut medians = [0.0; TOP.len()];
            for (median, k) in medians.iter_mut().zip(TOP) {
                *median = overlap(a, b, k)?.median;
            }
            out.push(Pair { domains: [ALL[i], ALL[j]], medians });
        }
    }
    Ok(out)
}

/// A profile that has routing only.
fn profile(recorded: &Recorded, domain: &str) -> Result<Profile> {
    let layers = recorded
        .routing(domain, OLMOE.k)
        .ok_or_else(|| Error::bug(format!("no recorded counts of `{domain}`")))?;
    let origin = Origin {
        family: OLMOE.name.to_owned(),
        hidden: OLMOE.hidden as u32,
        vocab: OLMOE.vocab as u32,
        layers: OLMOE.layers,
        checkpoint: [0; 32],
    };
    Ok(Profile {
        origin,
        reading: Reading::default(),
        layers,
        trace: Trace::default(),
        saliency: Vec::new(),
        weights: BTreeMap::new(),
        routes: Routes::default(),
        correlations: Vec::new(),
        neurons: Vec::new(),
        samples: Vec::new(),
        gates: Vec::new(),
        confidence: None,
        losses: Vec::new(),
    })
}

/// Mean over the pairs, in the order of [`TOP`].
pub fn mean(pairs: &[Pair]) -> [f64; TOP.len()] {
    std::array::from_fn(|at| pairs.iter().map(|p| p.medians[at]).sum::<f64>() / pairs.len().max(1) as f64)
}

/// Writes the section of the page.
pub fn section(out: &mut String, report: &Report) {
    let pairs = &report.overlap[..];
    *out += "\n## Overlap@K between data sets\n\n\
             Of the K busiest experts of a layer with one text, the share that is among the K busiest with the other; the median of the\n\
             layers. Ours are recorded counts of OLMoE-1B-7B in six domains of text (`golden/traces`): 64 experts, 8 of a token, layers 0, 7\n\
             and 15. The paper's are of PhiMoE, 16 experts, 2 of a token; its K of 4 and 8 are a quarter and a half of them, as 16 and 32 are\n\
             of 64. *By chance*: K over the number of experts. Counts do not tell prompts from decoding. Nothing here checks the simulation.\n\n\
             | data sets |";
    for k in TOP {
        let _ = write!(out, " top {k} |");
    }
    *out += "\n|---|---|---|---|---|\n";
    let mut row = |name: &str, of: [f64; TOP.len()]| {
        let _ = write!(out, "| {name} |");
        for x in of {
            let _ = write!(out, " {:.1} % |", x * 100.0);
        }
        out.push('\n');
    };
    for pair in pairs {
        row(&pair.domains.join(" and "), pair.medians);
    }
    row("mean of the pairs", mean(pairs));
    row("by chance", TOP.map(|k| k as f64 / OLMOE.experts as f64));
    *out += "\n| where | of PhiMoE | the paper's |\n|---|---|---|\n";
    for n in report.claims.not_modelled.iter().filter(|n| n.what.starts_with("Overlap@K")) {
        let _ = writeln!(out, "| {} | {} | {} |", n.place, n.what, n.paper);
    }
    let mean = mean(pairs).map(|m| m * 100.0);
    let _ = writeln!(
        out,
        "\nOf OLMoE's experts the top 16 overlap by {:.0} % on the mean of the pairs, where chance gives {:.0} %: its busy experts depend on\n\
         the kind of text, while the paper finds those of PhiMoE stable. Calibration should read text like that of the requests.",
        mean[2],
        100.0 * TOP[2] as f64 / OLMOE.experts as f64,
    );
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn data_sets_overlap_more_than_by_chance_on_average() {
        let pairs = overlaps().unwrap();
        assert_eq!(pairs.len(), ALL.len() * (ALL.len() - 1) / 2);
        for pair in &pairs {
            assert!(pair.medians.iter().all(|m| (0.0..=1.0).contains(m)), "{pair:?}");
        }
        for (mean, k) in mean(&pairs).into_iter().zip(TOP) {
            assert!(mean > k as f64 / OLMOE.experts as f64, "{k}: {mean}");
        }
        // Source code is closer to papers than to narratives.
        let of = |a: &str, b: &str| pairs.iter().find(|p| p.domains == [a, b]).unwrap().medians;
        assert!(of("arxiv", "github")[2] > of("book", "github")[2], "{pairs:?}");
    }

    #[test]
    fn equal_profiles_overlap_fully() {
        let one = profile(&Recorded::every().unwrap(), "c4").unwrap();
        assert!(TOP.iter().all(|&k| overlap(&one, &one, k).unwrap().median == 1.0));
        assert_eq!(one.layers.iter().map(|l| l.layer).collect::<Vec<_>>(), [0, 7, 15]);
        assert!(profile(&Recorded::every().unwrap(), "none").is_err());
    }
}
