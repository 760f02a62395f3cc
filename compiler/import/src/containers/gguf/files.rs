//! The files of a model: one file, or several numbered ones (`NAME-00001-of-00003.gguf`).

use super::super::{File, folder};
use crate::map::Map;
use moec_base::error::{Error, Result};
use moec_gguf::Header;
use std::path::Path;

const COUNT: &str = "split.count";
const NUMBER: &str = "split.no";
const TENSORS: &str = "split.tensors.count";
const HINT: &str = "download all files of the model again, into one folder";
/// Digits of each number in a name.
const DIGITS: usize = 5;

/// Parts of a numbered name: the prefix, the number of the file from 1 on, and the number of files.
fn counted(name: &str) -> Option<(&str, usize, usize)> {
    let stem = name.strip_suffix(".gguf")?;
    let (stem, of) = stem.rsplit_once("-of-")?;
    let (stem, number) = stem.rsplit_once('-')?;
    let count = |text: &str| {
        let plain = text.len() == DIGITS && text.bytes().all(|b| b.is_ascii_digit());
        plain.then(|| text.parse().ok())?
    };
    Some((stem, count(number)?, count(of)?))
}

/// Maps the file at a path and, if its name is numbered, the other files.
///
/// # Errors
/// Fails if files are missing, outside the folder or unreadable, or if the path is not that of the first
/// file.
pub(super) fn open(path: &Path) -> Result<(Vec<File>, Vec<Map>)> {
    let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let mut files = vec![File { name: name.clone(), path: path.to_owned() }];
    if let Some((stem, number, count)) = counted(&name) {
        if number != 1 {
            return Err(Error::input(format!("`{name}` is file {number} of {count}"))
                .hint(format!("give the first: `{stem}-00001-of-{count:05}.gguf`")));
        }
        let dir = match path.parent() {
            Some(dir) if !dir.as_os_str().is_empty() => dir,
            _ => Path::new("."),
        };
        for number in 2..=count {
            let other = format!("{stem}-{number:05}-of-{count:05}.gguf");
            let path = folder::find(dir, &other)?.ok_or_else(|| {
                Error::input(format!("`{other}` is missing"))
                    .because(format!("`{name}` is the first of {count} files"))
                    .hint(HINT)
            })?;
            files.push(File { name: other, path });
        }
    }
    let maps = files.iter().map(|f| Map::open(&f.path).map_err(|e| folder::unreadable(&f.name, &e)));
    let maps = maps.collect::<Result<_>>()?;
    Ok((files, maps))
}

/// Checks that the number of files is the stated one, that each has its stated number, and that all tensors
/// are there.
///
/// # Errors
/// Fails for the first file that does not fit.
pub(super) fn check(files: &[File], headers: &[Header<'_>]) -> Result<()> {
    for (i, (file, header)) in files.iter().zip(headers).enumerate() {
        let number = |key| header.get(key).and_then(moec_gguf::Value::as_u64);
        let (n, of) = (number(NUMBER).unwrap_or(0), number(COUNT).unwrap_or(1).max(1));
        if (n, of) != (i as u64, files.len() as u64) {
            return Err(Error::input(format!(
                "`{}` is file {} of {of} by its header, but file {} of {} by its name",
                file.name,
                n.saturating_add(1),
                i + 1,
                files.len()
            ))
            .because(format!("the header has `{NUMBER}` and `{COUNT}`"))
            .hint(HINT));
        }
    }
    let declared = headers.first().and_then(|h| h.get(TENSORS)).and_then(moec_gguf::Value::as_u64);
    let all: usize = headers.iter().map(|h| h.tensors().len()).sum();
    match (declared, files.first()) {
        (Some(declared), Some(first)) if declared != all as u64 => Err(Error::input(format!(
            "the files of `{}` have {all} tensors, expected {declared}",
            first.name
        ))
        .because(format!("`{TENSORS}` in the header sets this number"))
        .hint(HINT)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn split_file_names_are_parsed() {
        assert_eq!(counted("a-b-00002-of-00013.gguf"), Some(("a-b", 2, 13)));
        for other in [
            "a.gguf",
            "a-2-of-3.gguf",
            "a-00002-of-0003.gguf",
            "00001-of-00002.gguf",
            "a-0000x-of-00002.gguf",
        ] {
            assert_eq!(counted(other), None, "{other}");
        }
    }
}
