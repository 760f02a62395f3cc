//! Requests to a hub: the list of a model's files, and the bytes of a file, in pieces.

use super::name::{Name, is_hash, is_path};
use moec_base::error::{Error, Result};
use serde_json::Value;
use std::io::Read;
use std::time::Duration;
use ureq::http::Response;
use ureq::{Agent, Body};

/// Most bytes of a list of files.
const MOST_LIST: u64 = 64 << 20;
/// Most redirections that are followed.
const HOPS: usize = 5;
/// Time limit for a connection and for the beginning of a response.
const PATIENCE: Duration = Duration::from_secs(30);
/// Time limit for a piece of at most [`PIECE`] bytes.
const PIECE_PATIENCE: Duration = Duration::from_mins(10);
/// Bytes of one request. A stalled connection is noticed at the end of a request, and the bytes received so
/// far are kept.
pub(super) const PIECE: u64 = 256 << 20;

/// A file in the hub's list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RemoteFile {
    pub(super) name: String,
    pub(super) bytes: u64,
    pub(super) hash: Hash,
}

/// Hash of a file's content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Hash {
    /// SHA-256 of the content, for large files.
    Sha256(String),
    /// Git's SHA-1 of `blob`, the length and the content, for small files.
    Git(String),
}

impl Hash {
    pub(super) fn text(&self) -> &str {
        match self {
            Self::Sha256(text) | Self::Git(text) => text,
        }
    }
}

/// A commit and its files.
#[derive(Clone, Debug)]
pub(super) struct Listing {
    pub(super) commit: String,
    pub(super) files: Vec<RemoteFile>,
}

/// Client of one hub.
pub(super) struct Client {
    agent: Agent,
    endpoint: String,
    token: Option<String>,
}

/// Reason that a piece was not received.
pub(super) enum TransferError {
    /// A temporary error: a retry may succeed.
    Temporary(String),
    /// A permanent error.
    Permanent(Error),
}

impl Client {
    /// Creates a client. `endpoint` is an address such as `https://huggingface.co`.
    pub(super) fn new(endpoint: &str, token: Option<String>) -> Result<Self> {
        let endpoint = endpoint.trim_end_matches('/').to_owned();
        if authority(&endpoint).is_none() {
            return Err(Error::environment(format!(
                "`HF_ENDPOINT` is `{endpoint}`, which is not an address"
            ))
            .hint("it begins with `https://`, as in `https://huggingface.co`"));
        }
        let agent = Agent::config_builder()
            .max_redirects(0)
            .max_redirects_will_error(false)
            .http_status_as_error(false)
            .timeout_connect(Some(PATIENCE))
            .timeout_recv_response(Some(PATIENCE))
            .timeout_recv_body(Some(PIECE_PATIENCE))
            .user_agent(concat!("moec/", env!("CARGO_PKG_VERSION")))
            .build()
            .into();
        Ok(Self { agent, endpoint, token })
    }

    /// Sends a request and follows redirections. The token is sent to the hub alone.
    fn request(&self, url: &str, range: Option<(u64, u64)>) -> Result<Response<Body>, TransferError> {
        let mut url = url.to_owned();
        for _ in 0..=HOPS {
            let mut request = self.agent.get(&url);
            if let Some((from, to)) = range {
                request = request.header("Range", format!("bytes={from}-{to}"));
            }
            if let Some(token) = self.token.as_ref().filter(|_| authority(&url) == authority(&self.endpoint))
            {
                request = request.header("Authorization", format!("Bearer {token}"));
            }
            let response = request.call().map_err(|e| TransferError::Temporary(e.to_string()))?;
            if !response.status().is_redirection() {
                return Ok(response);
            }
            let location = header(&response, "location").unwrap_or_default();
            url = match location {
                path if path.starts_with('/') && !path.starts_with("//") => {
                    format!("{}{path}", authority(&url).unwrap_or_default())
                }
                whole if authority(whole).is_some() => whole.to_owned(),
                _ => {
                    return Err(TransferError::Permanent(Error::environment(
                        "the hub redirects to an invalid address",
                    )));
                }
            };
        }
        Err(TransferError::Permanent(Error::environment("the hub redirects too many times")))
    }

    /// Lists the files of a revision.
    pub(super) fn list(&self, name: &Name) -> Result<Listing> {
        let revision = name.revision.replace('/', "%2F");
        let url = format!("{}/api/models/{}/revision/{revision}?blobs=true", self.endpoint, name.id());
        let mut response = self.request(&url, None).map_err(|broken| self.unreachable(broken))?;
        if response.status().as_u16() != 200 {
            return Err(self.refusal(name, &response));
        }
        let bytes = response.body_mut().with_config().limit(MOST_LIST).read_to_vec();
        let bytes = bytes.map_err(|e| self.unreachable(TransferError::Temporary(e.to_string())))?;
        listing(&bytes).map_err(|why| {
            Error::environment(format!("the hub's list of the files of `{name}` cannot be read")).because(why)
        })
    }

    /// Returns the bytes `from..to` of a file of a commit.
    pub(super) fn piece(
        &self,
        name: &Name,
        commit: &str,
        file: &str,
        (from, to): (u64, u64),
    ) -> Result<impl Read + use<>, TransferError> {
        let url = format!("{}/{}/resolve/{commit}/{file}", self.endpoint, name.id());
        let response = self.request(&url, Some((from, to - 1)))?;
        let status = response.status().as_u16();
        match status {
            206 => {
                let content_range = header(&response, "content-range").unwrap_or_default();
                if !content_range.starts_with(&format!("bytes {from}-")) {
                    return Err(TransferError::Permanent(Error::environment(format!(
                        "the hub sends another part of `{file}` than was requested"
                    ))));
                }
            }
            // A server without range support sends the whole file.
            200 if from == 0 => {}
            200 => {
                return Err(TransferError::Permanent(Error::environment(format!(
                    "the hub cannot resume the download of `{file}`"
                ))));
            }
            429 | 500..=599 => {
                return Err(TransferError::Temporary(format!("the hub answers with status {status}")));
            }
            _ => return Err(TransferError::Permanent(self.refusal(name, &response))),
        }
        Ok(response.into_body().into_reader().take(to - from))
    }

    pub(super) fn unreachable(&self, broken: TransferError) -> Error {
        match broken {
            TransferError::Permanent(error) => error,
            TransferError::Temporary(why) => {
                Error::environment(format!("`{}` does not answer", self.endpoint)).because(why).hint(
                    "check the network and `HF_ENDPOINT`; with `--offline` only what the cache has is used",
                )
            }
        }
    }

    /// The error for a status other than 200.
    fn refusal(&self, name: &Name, response: &Response<Body>) -> Error {
        let status = response.status().as_u16();
        let code = header(response, "x-error-code").unwrap_or_default();
        let page = format!("{}/{}", self.endpoint, name.id());
        match (status, code) {
            (_, "GatedRepo") | (403, _) => {
                Error::environment(format!("`{}` requires that you accept its terms", name.id()))
                    .hint(format!("accept them at {page}, and set `HF_TOKEN` to a token of that account"))
            }
            (_, "RevisionNotFound") => {
                Error::input(format!("`{}` has no revision `{}`", name.id(), name.revision))
                    .hint(format!("{page} lists them"))
            }
            (404, "EntryNotFound") => {
                Error::environment(format!("a file that the hub lists for `{name}` is not there"))
                    .hint("try again later, or another `@revision`")
            }
            (401, _) if self.token.is_none() => {
                Error::input(format!("`{}` does not exist, or is not public", name.id()))
                    .hint("check the spelling; for a private model set `HF_TOKEN`")
            }
            (401, _) => Error::input(format!(
                "the hub does not accept the token for `{}`, or there is no such model",
                name.id()
            ))
            .hint("check the spelling and `HF_TOKEN`"),
            (404, _) => Error::input(format!("there is no model `{}` on `{}`", name.id(), self.endpoint))
                .hint("check the spelling"),
            _ => Error::environment(format!("the hub answers with status {status} for `{name}`"))
                .hint("try again later"),
        }
    }
}

/// `scheme://host:port` of an address.
fn authority(url: &str) -> Option<&str> {
    let scheme = ["https://", "http://"].into_iter().find(|s| url.starts_with(s))?;
    let host = url[scheme.len()..].split(['/', '?', '#']).next()?;
    (!host.is_empty() && !host.contains('@')).then(|| &url[..scheme.len() + host.len()])
}

fn header<'a>(response: &'a Response<Body>, name: &str) -> Option<&'a str> {
    response.headers().get(name)?.to_str().ok()
}

/// Parses a list of files. Files without a plain name, size or hash are left out, since a build does not need
/// them.
fn listing(bytes: &[u8]) -> Result<Listing, String> {
    let json: Value = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
    let commit = json["sha"].as_str().filter(|sha| is_hash(sha, 40)).ok_or("it names no commit")?;
    let siblings = json["siblings"].as_array().ok_or("it lists no files")?;
    let files = siblings.iter().filter_map(|file| {
        let name = file["rfilename"].as_str().filter(|name| is_path(name))?;
        let large = file["lfs"]["sha256"].as_str().or_else(|| file["lfs"]["oid"].as_str());
        let hash = match large {
            Some(hash) => Hash::Sha256(hash.to_owned()).checked(64)?,
            None => Hash::Git(file["blobId"].as_str()?.to_owned()).checked(40)?,
        };
        let bytes = file["lfs"]["size"].as_u64().or_else(|| file["size"].as_u64())?;
        Some(RemoteFile { name: name.to_owned(), bytes, hash })
    });
    Ok(Listing { commit: commit.to_owned(), files: files.collect() })
}

impl Hash {
    fn checked(self, digits: usize) -> Option<Self> {
        is_hash(self.text(), digits).then_some(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn authority_is_parsed_from_hub_addresses() {
        assert_eq!(authority("https://a.b/c?d"), Some("https://a.b"));
        assert_eq!(authority("http://127.0.0.1:80"), Some("http://127.0.0.1:80"));
        for bad in ["", "a.b", "ftp://a", "https://", "https:///x", "https://u@h/"] {
            assert_eq!(authority(bad), None, "{bad}");
        }
    }

    #[test]
    fn hub_listing_omits_paths_that_leave_the_folder() {
        let sha = "0123456789012345678901234567890123456789";
        let text = format!(
            r#"{{"sha": "{sha}", "siblings": [
                {{"rfilename": "config.json", "size": 3, "blobId": "{sha}"}},
                {{"rfilename": "../x", "size": 3, "blobId": "{sha}"}}, {{"rfilename": "/x", "size": 3, "blobId": "{sha}"}},
                {{"rfilename": "y", "size": 3, "blobId": "../../{sha}"}}, {{"rfilename": "z", "size": -3, "blobId": "{sha}"}},
                {{"rfilename": "w", "size": 3, "lfs": {{"sha256": "{sha}", "size": 3}}}}, {{}}, 7]}}"#
        );
        let listing = listing(text.as_bytes()).unwrap();
        let names: Vec<&str> = listing.files.iter().map(|f| &*f.name).collect();
        assert_eq!((&*listing.commit, names), (sha, vec!["config.json"]));
        for bad in ["", "[]", "{}", r#"{"sha": "../x", "siblings": []}"#, &text.replace("siblings", "s")] {
            assert!(super::listing(bad.as_bytes()).is_err(), "{bad}");
        }
    }
}
