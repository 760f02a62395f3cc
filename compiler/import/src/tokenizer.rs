//! The checkpoint's tokenizer: read with the crate that runs it, and compared with the model.

use super::ModelSpec;
use moec_base::error::{Error, Result};
use moec_runtime::serving::text::Text;

/// Name of the checked file.
const FILE: &str = "tokenizer.json";
const HINT: &str =
    "download the checkpoint's `tokenizer.json` again, or remove it: then the bundle takes token ids alone";

/// Checks a `tokenizer.json`.
///
/// # Errors
/// Fails if the text is not a tokenizer, or if it has more tokens than the model.
pub(crate) fn check(json: &[u8], spec: &ModelSpec) -> Result<()> {
    let unusable = |why| Error::input(format!("`{FILE}` is not a usable tokenizer")).because(why).hint(HINT);
    let text = Text::parse(json, None).map_err(unusable)?;
    // Tokens that it adds before a text need not be in its vocabulary.
    let framing = text.encode("").map_err(|e| unusable(e.to_string()))?;
    let largest = text.largest().into_iter().chain(framing.iter().map(|&id| (id, String::new()))).max();
    match largest {
        Some((id, token)) if id as usize >= spec.vocab => {
            let named = if token.is_empty() { String::new() } else { format!(" (`{token}`)") };
            let message =
                format!("`{FILE}` has token ids up to {id}{named}, but the model has {} tokens", spec.vocab);
            Err(Error::input(message)
                .because("`vocab_size` in `config.json` sets this number")
                .hint("tokenizer and weights are of different models: download them again"))
        }
        _ => Ok(()),
    }
}
