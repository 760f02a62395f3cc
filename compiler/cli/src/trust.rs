//! Origin of a bundle, in `verify`, `run` and `inspect`: its manifest's hash, and its signer.

use super::output;
use moec_base::paths::RUN;
use moec_base::progress::Progress;
use moec_base::{Error, Result, human};
use moec_bundle::read::Bundle;
use moec_bundle::signature::{self, Signed};
use moec_measure::verify::statics::StaticReport;
use serde::Serialize;
use serde_json::{Value, json};
use std::path::Path;

/// Origin of a bundle: the manifest's hash, and the signature.
pub(super) struct Trust {
    manifest_sha256: String,
    signed: Option<Signed>,
}

impl Trust {
    /// Reads the origin of a bundle, and checks the signature if there is a public key. Unlisted files are
    /// then an error, since no signature covers them.
    ///
    /// # Errors
    /// Fails if there is no valid signature of this key for this manifest, or the bundle has an unlisted
    /// file.
    pub(super) fn of(bundle: &Bundle, key: Option<&Path>, progress: &Progress) -> Result<Self> {
        let unlisted = bundle.unlisted()?;
        let foreign = unlisted.first().map(|first| {
            let shown = bundle.folder.display();
            format!("`{shown}` contains {} that its manifest does not list: `{first}`", count(unlisted.len()))
        });
        let signed = match (key, foreign) {
            (Some(_), Some(foreign)) => {
                return Err(Error::input(foreign).hint("remove it, because the signature does not cover it"));
            }
            (Some(key), None) => Some(signature::check(bundle, key)?),
            (None, foreign) => {
                if let Some(foreign) = foreign {
                    progress.warn(&foreign);
                }
                signature::found(&bundle.folder)?
            }
        };
        let run_is_later =
            !bundle.manifest.files.contains_key(RUN) && bundle.folder.join(RUN).symlink_metadata().is_ok();
        if run_is_later {
            let shown = bundle.folder.display();
            progress.warn(&format!(
                "`{shown}/{RUN}` was built after the manifest, which does not list it: it is not checked"
            ));
        }
        Ok(Self { manifest_sha256: bundle.manifest_sha256(), signed })
    }

    /// Two rows for people.
    pub(super) fn rows(&self) -> Vec<Vec<String>> {
        vec![
            vec!["manifest".to_owned(), format!("SHA-256 {}", self.manifest_sha256)],
            vec!["signature".to_owned(), signature(self.signed.as_ref())],
        ]
    }

    /// A report as JSON, with the origin added.
    pub(super) fn with_signature(&self, report: &impl Serialize) -> Result<Value> {
        let mut value = serde_json::to_value(report).map_err(|e| Error::bug(e.to_string()))?;
        value["manifest_sha256"] = json!(self.manifest_sha256);
        value["signature"] = json!(self.signed);
        Ok(value)
    }

    /// Prints what was found without executing anything.
    pub(super) fn print_static(&self, report: &StaticReport, as_json: bool) -> Result<()> {
        if as_json {
            let mut value = self.with_signature(report)?;
            value["executed"] = json!(false);
            return output::json(&value);
        }
        let row = |name: &str, value: String| vec![name.to_owned(), value];
        let r = report;
        let mut rows = self.rows();
        rows.extend([
            row("files", format!("{}, {}, each with its SHA-256", r.files, human::bytes(r.bytes))),
            row("plan", format!("{} entry points, {} steps", r.entries, r.steps)),
            row("graph", format!("{} nodes", r.nodes)),
            row(
                "object code",
                format!("all {} kernels, which call only functions that copy or set memory", r.kernels),
            ),
        ]);
        if r.functions > 0 {
            rows.push(row("packages", format!("{} functions that the plan calls", r.functions)));
        }
        let weights = r.weights.map_or_else(
            || "not compared: give the checkpoint with `--source`".to_owned(),
            |n| format!("all {n} packed weights are those of the checkpoint, rounded to their formats"),
        );
        rows.push(row("weights", weights));
        output::data(&output::table(&rows))
    }
}

/// A signature, for people.
pub(super) fn signature(signed: Option<&Signed>) -> String {
    match signed {
        None => "none".to_owned(),
        Some(s) if s.checked => format!("good, of key {}", s.key_id),
        Some(s) => format!("of key {}, not checked: use `moec verify --key PUB`", s.key_id),
    }
}

fn count(n: usize) -> String {
    if n == 1 { "a file".to_owned() } else { format!("{n} files") }
}
