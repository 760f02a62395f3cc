//! Models by their names on a hub: `moec init allenai/OLMoE-1B-7B-0924`.
//!
//! Files are stored in the cache of the hub's own tools, in its layout, so that no file is stored twice. Only
//! the files that a build reads are downloaded. These are configuration, tokenizer, templates, and the
//! weights that the index names, or one GGUF file with its parts. All data from the hub is untrusted: names
//! that are not plain paths are left out, sizes limit reads, and every file is checked against its hash
//! before it gets its name. An interrupted file is kept as `HASH.incomplete`, and the next attempt resumes at
//! its end.

mod cache;
mod client;
mod download;
pub mod name;

use cache::Repo;
use client::{Client, RemoteFile};
use moec_base::error::{Error, Result};
use moec_base::progress::Progress;
use moec_base::{disk, human};
pub use name::Name;
use name::is_gguf;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Default address of the hub; `HF_ENDPOINT` overrides it.
const ENDPOINT: &str = "https://huggingface.co";
/// Small files that a build may read.
const SMALL: [&str; 8] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
];
const INDEX: &str = "model.safetensors.index.json";
const WEIGHTS: &str = "model.safetensors";
/// Most GGUF files in a hint.
const NAMED: usize = 8;

/// Returns the folder or file of a model name, and downloads it if it is not in the cache. With `offline` or
/// `HF_HUB_OFFLINE`, only the cache is used.
///
/// # Errors
/// Fails without such a model, revision or file, without access or network, with too little space, or for a
/// wrong hash. Offline, also fails for a model that is not in the cache.
pub fn fetch(name: &Name, offline: bool, progress: &Progress) -> Result<PathBuf> {
    let repo = Repo::of(name)?;
    if offline || is_requested("HF_HUB_OFFLINE") {
        return from_cache(name, &repo);
    }
    let client = client()?;
    let listing = client.list(name)?;
    let commit = &listing.commit;
    let get = |files: &[&RemoteFile]| download::all(&client, name, &repo, commit, files, progress);
    let files = if let Some(file) = &name.file {
        parts_of(name, file, &listing.files)?
    } else {
        let (small, index) = checkpoint(name, &listing.files)?;
        check_space(name, &repo, &small)?;
        get(&small)?;
        let weights = weights(name, &repo.snapshot(commit), index, &listing.files)?;
        [small, weights].concat()
    };
    check_space(name, &repo, &files)?;
    get(&files)?;
    repo.note(commit)?;
    let folder = repo.snapshot(commit);
    let bytes = files.iter().map(|f| f.bytes).fold(0, u64::saturating_add);
    progress.stage(
        "Fetched",
        &format!("{name}, commit {}, {} in `{}`", &commit[..8], human::bytes(bytes), folder.display()),
    );
    Ok(name.file.as_ref().map_or(folder.clone(), |file| folder.join(file)))
}

/// Returns the folder of a model name, with its configuration and tokenizer, and with its weights if the cache has
/// them. A GGUF file is fetched whole, since it has its configuration in it.
///
/// # Errors
/// Those of [`fetch`].
pub fn fetch_shapes(name: &Name, offline: bool, progress: &Progress) -> Result<PathBuf> {
    if name.file.is_some() || offline || is_requested("HF_HUB_OFFLINE") {
        return fetch(name, offline, progress);
    }
    let repo = Repo::of(name)?;
    let client = client()?;
    let listing = client.list(name)?;
    let (mut small, _) = checkpoint(name, &listing.files)?;
    // With an index or weights from before, a folder counts as whole, and must be.
    let folder = repo.snapshot(&listing.commit);
    if [INDEX, WEIGHTS].iter().any(|file| folder.join(file).exists()) {
        return fetch(name, offline, progress);
    }
    small.retain(|file| file.name != INDEX);
    check_space(name, &repo, &small)?;
    download::all(&client, name, &repo, &listing.commit, &small, progress)?;
    Ok(folder)
}

/// The hub's client.
fn client() -> Result<Client> {
    let endpoint = std::env::var("HF_ENDPOINT").ok().filter(|e| !e.is_empty());
    Client::new(endpoint.as_deref().unwrap_or(ENDPOINT), cache::token())
}

/// Whether a variable is set to a value that means yes.
fn is_requested(var: &str) -> bool {
    std::env::var(var).is_ok_and(|v| ["1", "true", "yes", "on"].contains(&v.to_ascii_lowercase().as_str()))
}

/// Returns the path in the cache for a name.
fn from_cache(name: &Name, repo: &Repo) -> Result<PathBuf> {
    let missing = |what: String| {
        let cached = cache::cached_models();
        let available = if cached.is_empty() {
            "the cache holds no models".to_owned()
        } else {
            format!("the cache holds {}", quoted(&cached))
        };
        Error::input(what)
            .hint(format!("{available}; run without `--offline` and `HF_HUB_OFFLINE` to download it"))
    };
    let Some(commit) = repo.commit() else {
        return Err(missing(format!("`{name}` is not in the cache, `{}`", repo.root().display())));
    };
    let folder = repo.snapshot(&commit);
    let needed = match &name.file {
        Some(file) => vec![file.clone()],
        None if folder.join(INDEX).exists() => named_by_index(name, &folder)?.into_iter().collect(),
        None => vec!["config.json".to_owned(), WEIGHTS.to_owned()],
    };
    match needed.iter().find(|file| !folder.join(file).exists()) {
        Some(file) => Err(missing(format!("the cache has `{name}` without its `{file}`"))),
        None => Ok(name.file.as_ref().map_or(folder.clone(), |file| folder.join(file))),
    }
}

fn quoted(names: &[String]) -> String {
    names.iter().map(|n| format!("`{n}`")).collect::<Vec<_>>().join(", ")
}

/// The small files of a checkpoint, among them the index of weights, if there is one.
fn checkpoint<'a>(
    name: &Name,
    files: &'a [RemoteFile],
) -> Result<(Vec<&'a RemoteFile>, Option<&'a RemoteFile>)> {
    let find = |file_name: &str| files.iter().find(|f| f.name == file_name);
    let index = find(INDEX);
    if find("config.json").is_none() || (index.is_none() && find(WEIGHTS).is_none()) {
        let mut ggufs: Vec<String> = files.iter().map(|f| &f.name).filter(|n| is_gguf(n)).cloned().collect();
        ggufs.sort();
        let more = ggufs.len().saturating_sub(NAMED);
        ggufs.truncate(NAMED);
        let hint = if ggufs.is_empty() {
            "moec reads safetensors and GGUF".to_owned()
        } else {
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            let names: Vec<String> = ggufs.iter().map(|file| format!("{}:{file}", name.id())).collect();
            format!("it has GGUF files; name one of them: {}{more}", quoted(&names))
        };
        return Err(Error::input(format!("`{name}` has no safetensors checkpoint")).hint(hint));
    }
    let small = SMALL.iter().filter_map(|n| find(n)).chain(index).collect();
    Ok((small, index))
}

/// The files of weights.
fn weights<'a>(
    name: &Name,
    folder: &Path,
    index: Option<&RemoteFile>,
    files: &'a [RemoteFile],
) -> Result<Vec<&'a RemoteFile>> {
    let names = match index {
        Some(_) => named_by_index(name, folder)?,
        None => BTreeSet::from([WEIGHTS.to_owned()]),
    };
    let find = |file_name: String| {
        files.iter().find(|f| f.name == file_name).ok_or_else(|| {
            Error::input(format!("`{name}` has no `{file_name}`, which its index of weights names"))
                .hint("the upload is incomplete; try another `@revision`")
        })
    };
    names.into_iter().map(find).collect()
}

/// Files in an index of weights.
fn named_by_index(name: &Name, folder: &Path) -> Result<BTreeSet<String>> {
    let path = folder.join(INDEX);
    let wrong =
        |why: String| Error::input(format!("the index of weights of `{name}` cannot be read")).because(why);
    let bytes = moec_runtime::platform::regular::read(&path, moec_runtime::platform::regular::INDEX)
        .map_err(|e| wrong(e.to_string()))?;
    let json: serde_json::Value = serde_json::from_slice(&bytes).map_err(|e| wrong(e.to_string()))?;
    let map = json["weight_map"].as_object().ok_or_else(|| wrong("it has no `weight_map`".to_owned()))?;
    map.values()
        .map(|file| file.as_str().filter(|f| name::is_plain(f)).map(str::to_owned))
        .collect::<Option<_>>()
        .ok_or_else(|| wrong("it names an invalid file".to_owned()))
}

/// A GGUF file, and the other parts if it is one of several (`-00001-of-00003.gguf`).
fn parts_of<'a>(name: &Name, file: &str, files: &'a [RemoteFile]) -> Result<Vec<&'a RemoteFile>> {
    let all = parts(file);
    let find = |file_name: &String| {
        files.iter().find(|f| f.name == *file_name).ok_or_else(|| {
            let ggufs: Vec<String> =
                files.iter().map(|f| &f.name).filter(|n| is_gguf(n)).take(NAMED).cloned().collect();
            let hint = if ggufs.is_empty() {
                "it has no GGUF files".to_owned()
            } else {
                format!("it has {}", quoted(&ggufs))
            };
            Error::input(format!("`{}` has no file `{file_name}`", name.id())).hint(hint)
        })
    };
    all.iter().map(find).collect()
}

/// The names of all parts, from the name of one part.
fn parts(file: &str) -> Vec<String> {
    let split = || {
        let stem = file.strip_suffix(".gguf")?;
        let (rest, of) = stem.rsplit_once("-of-")?;
        let (stem, at) = rest.rsplit_once('-')?;
        let five = |n: &str| (n.len() == 5).then(|| n.parse::<u32>().ok())?;
        let (of, _) = (five(of).filter(|n| (1..=1000).contains(n))?, five(at)?);
        Some((1..=of).map(|i| format!("{stem}-{i:05}-of-{of:05}.gguf")).collect())
    };
    split().unwrap_or_else(|| vec![file.to_owned()])
}

/// Fails if the disk has too little room, before any files file is downloaded.
fn check_space(name: &Name, repo: &Repo, files: &[&RemoteFile]) -> Result<()> {
    let missing = |f: &&RemoteFile| {
        let downloaded = |suffix: &str| {
            fs::metadata(format!("{}{suffix}", repo.blob(f.hash.text()).display())).map_or(0, |m| m.len())
        };
        f.bytes.saturating_sub(downloaded("").max(downloaded(".incomplete")))
    };
    let needed = files.iter().map(missing).fold(0, u64::saturating_add);
    let folder = disk::existing(repo.root());
    match disk::free_bytes(folder) {
        Some(free) if needed > free => Err(Error::environment(format!(
            "`{name}` needs {} in `{}`, and {} are free",
            human::bytes(needed),
            folder.display(),
            human::bytes(free)
        ))
        .hint("make room, or set `HF_HOME` to a folder on another disk")),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::parts;

    #[test]
    fn any_part_of_a_split_file_names_all_parts() {
        assert_eq!(parts("x/a-00002-of-00002.gguf"), ["x/a-00001-of-00002.gguf", "x/a-00002-of-00002.gguf"]);
        for alone in ["a.gguf", "a-1-of-2.gguf", "a-00001-of-00000.gguf", "a-00001-of-99999.gguf"] {
            assert_eq!(parts(alone), [alone]);
        }
    }
}
