//! `moec sign`.

use super::output;
use moec_base::paths::SIGNATURE;
use moec_base::{Error, Result};
use moec_bundle::read::Bundle;
use moec_bundle::signature;
use serde_json::json;
use std::io::{BufRead as _, IsTerminal as _};
use std::path::{Path, PathBuf};

const AFTER: &str = "\
Create a key pair once; `moec.key.pub` is the public key:
  moec sign --new-key moec.key
Sign a bundle, and check the signature on another machine:
  moec sign model.moec --key moec.key
  moec verify model.moec --key moec.key.pub --static";

/// Sign a bundle, or create a key pair
///
/// Signs the manifest, which contains the hashes of all other files. The signature is written to
/// `manifest.json.minisig` in the bundle; no other file changes. Keys and signatures have minisign's format.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = AFTER)]
pub struct Args {
    /// The bundle
    #[arg(required_unless_present = "new_key")]
    pub bundle: Option<PathBuf>,
    /// Secret key to sign with
    ///
    /// If the key has a password, moec prompts for it, or reads it from standard input if that is not a
    /// terminal.
    #[arg(long, value_name = "FILE", requires = "bundle")]
    pub key: Option<PathBuf>,
    /// Create a secret key without a password, readable only by you, and its public key `FILE.pub`
    #[arg(long, value_name = "FILE", conflicts_with_all = ["bundle", "key"])]
    pub new_key: Option<PathBuf>,
    /// Print one JSON object to stdout
    #[arg(long)]
    pub json: bool,
}

/// Signs a bundle, or creates a key pair.
///
/// # Errors
/// Fails if the bundle was changed, or a key cannot be used.
pub fn run(args: &Args) -> Result<()> {
    let row = |name: &str, value: String| vec![name.to_owned(), value];
    let (value, rows) = match (&args.new_key, &args.bundle, &args.key) {
        (Some(path), _, _) => {
            let (public, id) = signature::new_key(path)?;
            (
                json!({"secret_key": path, "public_key": public, "key_id": id}),
                vec![
                    row("secret key", format!("{} (keep it secret)", path.display())),
                    row("public key", public.display().to_string()),
                    row("key ID", id),
                ],
            )
        }
        (None, Some(folder), Some(key)) => {
            let bundle = Bundle::open(folder)?;
            let signed = signature::sign(&bundle, key, &|| password(key))?;
            let sha256 = bundle.manifest_sha256();
            (
                json!({"bundle": folder, "key_id": signed.key_id, "manifest_sha256": sha256}),
                vec![
                    row("signature", folder.join(SIGNATURE).display().to_string()),
                    row("key ID", signed.key_id),
                    row("manifest", format!("SHA-256 {sha256}")),
                ],
            )
        }
        _ => {
            return Err(Error::usage("a secret key is required to sign a bundle")
                .hint("use `moec sign BUNDLE --key FILE`; `moec sign --new-key FILE` creates a key pair"));
        }
    };
    if args.json { output::json(&value) } else { output::data(&output::table(&rows)) }
}

/// Prompts for a key's password.
fn password(key: &Path) -> Result<String> {
    let failed = |e| Error::environment("cannot read the password").because(e);
    if std::io::stdin().is_terminal() {
        return rpassword::prompt_password(format!("Password of `{}`: ", key.display())).map_err(failed);
    }
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line).map_err(failed)?;
    Ok(line.trim_end_matches(['\r', '\n']).to_owned())
}
