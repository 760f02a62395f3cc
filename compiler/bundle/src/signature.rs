//! Signatures of bundles, in the form of minisign: Ed25519 over `manifest.json`, which holds the hashes of
//! all other files.
//!
//! A signature is a file beside the manifest and not listed in it, so that signing changes nothing of the
//! bundle. Keys and signatures are minisign's own files: either program makes and checks them.

use super::manifest::digest;
use super::read::Bundle;
use minisign::{KeyPair, PublicKeyBox, SecretKey, SecretKeyBox, SignatureBox};
use minisign_verify::{Error as Fault, PublicKey, Signature};
use moec_base::error::{Error, Result, io_error};
use moec_base::paths::MANIFEST;
use moec_base::paths::SIGNATURE;
use moec_runtime::platform::regular;
use serde::Serialize;
use std::fs::{self, OpenOptions};
use std::io::{Cursor, ErrorKind, Write as _};
use std::path::{Path, PathBuf};

/// Signer of a bundle.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Signed {
    /// Sixteen digits that distinguish keys, as minisign shows them.
    pub key_id: String,
    /// Comment of the signer, covered by the signature.
    pub comment: String,
    /// Whether it was checked with a public key. If not, its author is unknown.
    pub checked: bool,
}

/// The signature of a bundle, not checked; `None` if there is none.
///
/// # Errors
/// A file that is no signature.
pub fn found(folder: &Path) -> Result<Option<Signed>> {
    Ok(read(folder)?.map(|(signature, key_id)| Signed {
        key_id,
        comment: signature.trusted_comment().to_owned(),
        checked: false,
    }))
}

/// Checks the signature of a bundle against the public key in a file. The manifest's files are checked
/// separately ([`super::manifest::Manifest::check`]).
///
/// # Errors
/// Fails if there is no signature, if it is by another key or for another manifest, or if a file is not a
/// key.
pub fn check(bundle: &Bundle, key: &Path) -> Result<Signed> {
    let shown = bundle.folder.display();
    let text = text_of(key)?;
    let no_key = |e: &dyn std::fmt::Display| {
        Error::input(format!("`{}` is not a public key", key.display()))
            .because(e)
            .hint("a public key is the file `….pub` that `moec sign --new-key` or `minisign -G` writes")
    };
    let public = PublicKey::decode(&text).map_err(|e| no_key(&e))?;
    let own = PublicKeyBox::from_string(&text).and_then(PublicKeyBox::into_public_key);
    let own = shown_id(own.map_err(|e| no_key(&e))?.keynum());
    let Some((signature, key_id)) = read(&bundle.folder)? else {
        return Err(Error::input(format!("`{shown}` is not signed"))
            .because(format!("there is no `{SIGNATURE}` in it"))
            .hint("get the signature from the source of the bundle, or sign it with `moec sign`"));
    };
    match public.verify(&bundle.manifest_bytes, &signature, false) {
        Ok(()) => Ok(Signed { key_id, comment: signature.trusted_comment().to_owned(), checked: true }),
        Err(Fault::UnexpectedKeyId) => Err(Error::input(format!("`{shown}` was signed with another key"))
            .because(format!("its signature is by key {key_id}, but `{}` is key {own}", key.display()))
            .hint("do not run it unless you trust that key, too")),
        Err(e) => Err(Error::input(format!("`{shown}/{MANIFEST}` was changed after it was signed"))
            .because(e)
            .hint("do not run the bundle: get it again, or sign it again")),
    }
}

/// Signs a bundle, whose files must be as built, with the secret key in a file. `password` is called if the
/// key has one.
///
/// # Errors
/// A changed file, a file that is no key, a wrong password, a signature that cannot be written.
pub fn sign(bundle: &Bundle, key: &Path, password: &dyn Fn() -> Result<String>) -> Result<Signed> {
    // Before minutes of hashing: a key that cannot be used is an error at once.
    let secret = secret(key, password)?;
    bundle.manifest.check(&bundle.folder, true)?;
    let comment = format!("file:{MANIFEST} sha256:{}", digest(&bundle.manifest_bytes));
    let failed = |e| Error::environment("cannot sign").because(e);
    let signature = minisign::sign(
        None,
        &secret,
        Cursor::new(&bundle.manifest_bytes),
        Some(&comment),
        Some("signature of a moec bundle"),
    )
    .map_err(failed)?;
    let path = bundle.folder.join(SIGNATURE);
    // The file is created again, so that a link in its place is not followed.
    match fs::remove_file(&path) {
        Err(e) if e.kind() != ErrorKind::NotFound => return Err(io_error("replace", &path, &e)),
        _ => write_new(&path, &signature.into_string(), 0o644)?,
    }
    Ok(Signed { key_id: shown_id(secret.keynum()), comment, checked: true })
}

/// Creates a pair of keys: `path`, which no other user may read and which has no password, and `path.pub`.
/// Returns the public key's path and the pair's id.
///
/// # Errors
/// Fails if a file exists already, or cannot be written.
pub fn new_key(path: &Path) -> Result<(PathBuf, String)> {
    let mut public = path.as_os_str().to_owned();
    public.push(".pub");
    let public = PathBuf::from(public);
    if let Some(there) = [path, &public].iter().find(|p| p.symlink_metadata().is_ok()) {
        return Err(Error::usage(format!("`{}` exists", there.display())).hint("name a new file"));
    }
    let failed = |e| Error::environment("cannot make a key").because(e);
    let pair = KeyPair::generate_unencrypted_keypair().map_err(failed)?;
    let secret = pair.sk.to_box(Some("moec secret key: keep it to yourself")).map_err(failed)?;
    let shared = pair.pk.to_box().map_err(failed)?;
    write_new(path, &secret.into_string(), 0o600)?;
    write_new(&public, &shared.into_string(), 0o644)?;
    Ok((public, shown_id(pair.pk.keynum())))
}

fn secret(key: &Path, password: &dyn Fn() -> Result<String>) -> Result<SecretKey> {
    const HINT: &str = "`moec sign --new-key FILE` creates a key pair";
    let parsed = SecretKeyBox::from_string(&text_of(key).map_err(|e| e.hint(HINT))?);
    let no_key = |e: minisign::PError| {
        Error::input(format!("`{}` is not a secret key, or the password is wrong", key.display()))
            .because(e)
            .hint(HINT)
    };
    let parsed = parsed.map_err(no_key)?;
    match parsed.clone().into_unencrypted_secret_key() {
        Ok(secret) => Ok(secret),
        Err(_) if has_password(&parsed) => parsed.into_secret_key(Some(password()?)).map_err(no_key),
        Err(e) => Err(no_key(e)),
    }
}

/// Whether a secret key is protected by a password: its bytes begin with `EdSc`, as the format's description
/// specifies.
fn has_password(key: &SecretKeyBox) -> bool {
    key.to_string().lines().nth(1).is_some_and(|line| line.starts_with("RWRTY"))
}

/// Signature and the id of its key; `None` if there is no signature.
fn read(folder: &Path) -> Result<Option<(Signature, String)>> {
    let path = folder.join(SIGNATURE);
    if matches!(fs::symlink_metadata(&path), Err(e) if e.kind() == ErrorKind::NotFound) {
        return Ok(None);
    }
    let text = text_of(&path)?;
    let malformed = |e: &dyn std::fmt::Display| {
        Error::input(format!("`{}` is not a signature", path.display()))
            .because(e)
            .hint("sign the bundle again with `moec sign`, or remove the file")
    };
    let signature = Signature::decode(&text).map_err(|e| malformed(&e))?;
    let id = SignatureBox::from_string(&text).map_err(|e| malformed(&e))?;
    Ok(Some((signature, shown_id(id.keynum()))))
}

fn text_of(path: &Path) -> Result<String> {
    regular::read_text(path, regular::SETTINGS).map_err(|e| io_error("read", path, &e))
}

/// An id as minisign shows it: a number, the last byte first.
fn shown_id(bytes: &[u8]) -> String {
    bytes.iter().rev().fold(String::new(), |id, b| format!("{id}{b:02X}"))
}

/// Writes a file that is not there yet.
fn write_new(path: &Path, text: &str, mode: u32) -> Result<()> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, mode);
    #[cfg(not(unix))]
    let _ = mode;
    let write = |mut file: fs::File| file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
    options.open(path).and_then(write).map_err(|e| io_error("write", path, &e))
}
