//! The reference page of `model.toml`, from the rows of [`KEYS`].

use super::KEYS;
use std::fmt::Write as _;

/// The page, as Markdown.
pub fn markdown() -> String {
    let mut out = String::from(
        "# model.toml\n\n\
         What is to be built from a checkpoint. `moec init HF_DIR` writes one with the model's own figures.\n\
         Every key has a default and a range; an unknown key, a wrong type and a value out of range are errors\n\
         that name file, line and key. Paths are seen from the file itself.\n",
    );
    let mut section = "";
    for key in KEYS {
        if key.section != section {
            section = key.section;
            let _ = write!(
                out,
                "\n## [{section}]\n\n| key | default | may be | what it does |\n|---|---|---|---|\n"
            );
        }
        let _ = writeln!(
            out,
            "| `{}` | {} | {} | {} |",
            key.name,
            code(key.default),
            code(key.range),
            key.help.join(" ")
        );
    }
    out
}

/// Puts TOML in backticks; leaves words as they are.
fn code(s: &str) -> String {
    let toml = format!("x = {s}").parse::<toml::Table>().is_ok();
    if toml { format!("`{s}`") } else { s.to_owned() }
}
