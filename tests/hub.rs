//! Models by name, from a fake hub: listing, redirection, ranges, hashes, and everything that can fail.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use crate::support;

use safetensors::SafeTensors;
use serde_json::{Value, json};
use sha1::Sha1;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use support::{checkpoint, fails, moec, ok};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const MODEL: &str = "someone/tiny";

/// Behaviour of the fake hub.
#[derive(Clone, Default)]
struct Plan {
    files: BTreeMap<String, Vec<u8>>,
    /// Status and `X-Error-Code` of every reply.
    refuse: Option<(u16, &'static str)>,
    /// Each connection ends after this many bytes of a body that is longer than a KB.
    cut: Option<usize>,
    /// One byte of this file is changed.
    damage: Option<&'static str>,
    /// This file is missing when it is requested.
    gone: Option<&'static str>,
    /// Whether range headers are ignored.
    whole: bool,
    /// Fields that replace those of the list of files.
    list: Option<Value>,
}

/// A hub with a log of requests: path, range, whether a token was sent.
struct Hub {
    endpoint: String,
    plan: Arc<Mutex<Plan>>,
    log: Arc<Mutex<Vec<(String, String, bool)>>>,
    home: tempfile::TempDir,
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut hex, b| {
        let _ = write!(hex, "{b:02x}");
        hex
    })
}

fn listed(name: &str, bytes: &[u8]) -> Value {
    let git =
        hex(&Sha1::new().chain_update(format!("blob {}\0", bytes.len())).chain_update(bytes).finalize());
    let mut file = json!({"rfilename": name, "size": bytes.len(), "blobId": git});
    if bytes.len() > 10_000 {
        file["lfs"] = json!({"sha256": hex(&Sha256::digest(bytes)), "size": bytes.len()});
    }
    file
}

impl Hub {
    /// A hub with a tiny checkpoint; it redirects requests for files to a second address.
    fn new() -> Self {
        let mut files = BTreeMap::new();
        for file in fs::read_dir(checkpoint("olmoe")).unwrap() {
            let path = file.unwrap().path();
            files.insert(path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read(&path).unwrap());
        }
        files.insert("pytorch_model.bin".to_owned(), vec![0; 20_000]);
        let plan = Arc::new(Mutex::new(Plan { files, ..Plan::default() }));
        let log = Arc::new(Mutex::new(Vec::new()));
        let (front, store) =
            (TcpListener::bind("127.0.0.1:0").unwrap(), TcpListener::bind("127.0.0.1:0").unwrap());
        let at = |l: &TcpListener| format!("http://{}", l.local_addr().unwrap());
        let (endpoint, elsewhere) = (at(&front), at(&store));
        for (listener, next) in [(front, Some(elsewhere)), (store, None)] {
            let (plan, log) = (Arc::clone(&plan), Arc::clone(&log));
            std::thread::spawn(move || {
                for stream in listener.incoming() {
                    let plan = plan.lock().unwrap().clone();
                    // A client may disconnect early.
                    let _ = answer(stream.unwrap(), &plan, next.as_deref(), &log);
                }
            });
        }
        Self { endpoint, plan, log, home: tempfile::tempdir().unwrap() }
    }

    fn set(&self, change: impl FnOnce(&mut Plan)) {
        change(&mut self.plan.lock().unwrap());
        self.log.lock().unwrap().clear();
    }

    fn requests(&self) -> Vec<(String, String, bool)> {
        self.log.lock().unwrap().clone()
    }

    fn init(&self, source: &str) -> Command {
        let mut command = moec();
        command.args(["init", source, "--force"]).current_dir(self.home.path());
        command.env("HF_ENDPOINT", &self.endpoint).env("HF_HOME", self.home.path().join("hf"));
        for var in [
            "HF_TOKEN",
            "HF_TOKEN_PATH",
            "HF_HUB_CACHE",
            "HF_HUB_OFFLINE",
            "http_proxy",
            "HTTP_PROXY",
            "ALL_PROXY",
        ] {
            command.env_remove(var);
        }
        command
    }

    fn blobs(&self) -> Vec<PathBuf> {
        let folder = self.home.path().join("hf/hub/models--someone--tiny/blobs");
        fs::read_dir(folder).into_iter().flatten().map(|e| e.unwrap().path()).collect()
    }

    fn snapshot(&self) -> PathBuf {
        self.home.path().join("hf/hub/models--someone--tiny/snapshots").join(COMMIT)
    }
}

/// Answers one request, and closes the connection.
fn answer(
    stream: TcpStream,
    plan: &Plan,
    elsewhere: Option<&str>,
    log: &Mutex<Vec<(String, String, bool)>>,
) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let request = lines.next().unwrap_or(Ok(String::new()))?;
    let path = request.split(' ').nth(1).unwrap_or_default().to_owned();
    let mut headers = BTreeMap::new();
    for line in lines {
        let line = line?;
        let Some((key, value)) = line.split_once(": ") else { break };
        headers.insert(key.to_ascii_lowercase(), value.to_owned());
    }
    let range = headers.get("range").cloned().unwrap_or_default();
    log.lock().unwrap().push((path.clone(), range.clone(), headers.contains_key("authorization")));
    let mut out = stream;
    let end = "Connection: close\r\n\r\n";
    if let Some((status, code)) = plan.refuse {
        return write!(out, "HTTP/1.1 {status} No\r\nX-Error-Code: {code}\r\nContent-Length: 0\r\n{end}");
    }
    if path.starts_with("/api/models/someone/tiny/revision/") {
        let siblings: Vec<Value> = plan.files.iter().map(|(name, bytes)| listed(name, bytes)).collect();
        let mut list = json!({"sha": COMMIT, "siblings": siblings});
        for (key, value) in plan.list.iter().filter_map(Value::as_object).flatten() {
            list[key] = value.clone();
        }
        let text = list.to_string();
        return write!(out, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n{end}{text}", text.len());
    }
    let missing = |mut out: TcpStream| {
        write!(out, "HTTP/1.1 404 No\r\nX-Error-Code: EntryNotFound\r\nContent-Length: 0\r\n{end}")
    };
    let Some((name, bytes)) =
        path.rsplit_once(&format!("{COMMIT}/")).and_then(|(_, f)| plan.files.get_key_value(f))
    else {
        return missing(out);
    };
    if plan.gone == Some(&**name) {
        return missing(out);
    }
    if let Some(elsewhere) = elsewhere {
        return write!(
            out,
            "HTTP/1.1 302 Found\r\nLocation: {elsewhere}{path}\r\nContent-Length: 0\r\n{end}"
        );
    }
    let mut bytes = bytes.clone();
    if plan.damage == Some(&**name) {
        bytes[7] ^= 1;
    }
    let range_of = range.strip_prefix("bytes=").and_then(|r| r.split_once('-')).filter(|_| !plan.whole);
    let (from, to) = match range_of {
        Some((from, to)) => (from.parse().unwrap(), bytes.len().min(to.parse::<usize>().unwrap() + 1)),
        None => (0, bytes.len()),
    };
    let status = if range_of.is_some() { "206 Partial Content" } else { "200 OK" };
    let length = bytes.len();
    write!(
        out,
        "HTTP/1.1 {status}\r\nContent-Length: {}\r\nContent-Range: bytes {from}-{}/{length}\r\n{end}",
        to - from,
        to.saturating_sub(1)
    )?;
    let sent = match plan.cut.filter(|_| to - from > 1024) {
        Some(cut) => to.min(from + cut),
        None => to,
    };
    out.write_all(&bytes[from..sent])
}

fn is_link(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|m| m.is_symlink())
}

#[test]
fn a_named_model_is_fetched_checked_and_built_from() {
    let hub = Hub::new();
    let out = ok(hub.init(MODEL).env("HF_TOKEN", "hf_secret"));
    assert!(String::from_utf8_lossy(&out.stderr).contains("Fetched someone/tiny, commit 01234567"));
    let folder = hub.snapshot();
    for file in ["config.json", "model.safetensors"] {
        assert!(is_link(&folder.join(file)));
        assert_eq!(fs::read(folder.join(file)).unwrap(), fs::read(checkpoint("olmoe").join(file)).unwrap());
    }
    // Files that no build reads are not fetched, and files in the cache are not fetched again.
    let requests = hub.requests();
    assert!(
        !requests.iter().any(|(path, ..)| path.ends_with("_model.bin") || path.ends_with("README.md")),
        "{requests:?}"
    );
    // The token is sent to the hub only, not to the address of a redirection.
    let of_file: Vec<bool> =
        requests.iter().filter(|(p, ..)| p.ends_with("config.json")).map(|a| a.2).collect();
    assert!(of_file.contains(&true) && of_file.contains(&false), "{requests:?}");
    let toml = fs::read_to_string(hub.home.path().join("model.toml")).unwrap();
    assert!(toml.contains(&format!("snapshots/{COMMIT}")), "{toml}");
    hub.set(|_| ());
    ok(&mut hub.init(MODEL));
    assert_eq!(hub.requests().len(), 1, "{:?}", hub.requests());
    // Offline there are no requests; by commit or revision, the same folder is found.
    hub.set(|_| ());
    for command in [
        hub.init(MODEL).arg("--offline"),
        hub.init(MODEL).env("HF_HUB_OFFLINE", "1"),
        hub.init(&format!("{MODEL}@{COMMIT}")).arg("--offline"),
    ] {
        ok(command);
    }
    assert!(hub.requests().is_empty());
    // Outside of the cache there is only the requested file.
    let mut made: Vec<String> = fs::read_dir(hub.home.path())
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    made.sort();
    assert_eq!(made, ["hf", "model.toml"]);
}

/// `moec fit` predicts from the configuration, and fetches weights when it builds.
#[test]
fn weights_are_fetched_only_for_a_build_of_what_fits() {
    let hub = Hub::new();
    // The environment of `init`, with another subcommand.
    let fit = |options: &[&str]| {
        let init = hub.init("someone/tiny");
        let mut command = moec();
        command.args(["fit", "someone/tiny", "--force"]).args(options).current_dir(hub.home.path());
        for (key, value) in init.get_envs() {
            match value {
                Some(value) => command.env(key, value),
                None => command.env_remove(key),
            };
        }
        command
    };
    let weights = || hub.requests().iter().any(|(path, ..)| path.ends_with(".safetensors"));
    ok(&mut fit(&["--no-build", "--memory", "1GiB"]));
    assert!(hub.requests().iter().any(|(path, ..)| path.ends_with("config.json")) && !weights());
    let (code, _) = fails(&mut fit(&["--memory", "1MiB"]));
    assert!(code == 1 && !weights(), "weights were fetched for nothing");
    ok(&mut fit(&["--memory", "1GiB", "-o", "fit.moec"]));
    assert!(weights() && hub.home.path().join("fit.moec/manifest.json").exists());
}

#[test]
fn processes_that_fetch_one_model_at_once_all_get_it() {
    let hub = Hub::new();
    let children: Vec<_> = (0..6)
        .map(|n| {
            let mut init = hub.init(MODEL);
            init.args(["-o", &format!("{n}.toml")]).stdout(Stdio::null()).stderr(Stdio::piped());
            init.spawn().unwrap()
        })
        .collect();
    for child in children {
        let done = child.wait_with_output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    }
    for file in ["config.json", "model.safetensors"] {
        assert_eq!(
            fs::read(hub.snapshot().join(file)).unwrap(),
            fs::read(checkpoint("olmoe").join(file)).unwrap()
        );
    }
    let left: Vec<_> = hub.blobs().into_iter().filter(|b| b.extension().is_some()).collect();
    assert!(left.is_empty(), "left behind: {left:?}");
    // Concurrent processes do not fetch a file twice: the bytes of each file are requested once, at both
    // addresses.
    let requests = hub.requests().iter().filter(|(path, ..)| path.ends_with("/model.safetensors")).count();
    assert_eq!(requests, 2);
}

#[test]
fn cut_connection_resumes_at_its_offset() {
    let hub = Hub::new();
    let size = fs::metadata(checkpoint("olmoe").join("model.safetensors")).unwrap().len() as usize;
    hub.set(|plan| plan.cut = Some(size / 3 + 1));
    ok(&mut hub.init(MODEL));
    let froms: Vec<usize> = hub
        .requests()
        .iter()
        .filter(|(p, ..)| p.ends_with("model.safetensors"))
        .map(|(_, range, _)| {
            range.strip_prefix("bytes=").unwrap().split('-').next().unwrap().parse().unwrap()
        })
        .collect();
    assert!(
        froms.contains(&0) && froms.contains(&(size / 3 + 1)) && froms.contains(&(2 * (size / 3 + 1))),
        "{froms:?}"
    );
    assert_eq!(fs::read(hub.snapshot().join("model.safetensors")).unwrap().len(), size);
}

#[test]
fn partial_downloads_are_resumed_or_replaced() {
    let hub = Hub::new();
    let weights = fs::read(checkpoint("olmoe").join("model.safetensors")).unwrap();
    let blobs = hub.home.path().join("hf/hub/models--someone--tiny/blobs");
    fs::create_dir_all(&blobs).unwrap();
    let partial = blobs.join(format!("{}.incomplete", hex(&Sha256::digest(&weights))));
    fs::write(&partial, &weights[..5000]).unwrap();
    ok(&mut hub.init(MODEL));
    assert!(
        hub.requests()
            .iter()
            .any(|(p, range, _)| p.ends_with("model.safetensors") && range.starts_with("bytes=5000-"))
    );
    // Wrong bytes are detected by the hash and removed; the next attempt starts from the beginning.
    fs::remove_dir_all(hub.home.path().join("hf")).unwrap();
    fs::create_dir_all(&blobs).unwrap();
    fs::write(&partial, vec![9; 5000]).unwrap();
    let (code, stderr) = fails(&mut hub.init(MODEL));
    assert!(
        code == 1 && stderr.contains("was downloaded with wrong content") && !partial.exists(),
        "{stderr}"
    );
    ok(&mut hub.init(MODEL));
    // A partial file longer than the file is discarded. A server without ranges sends the whole file.
    fs::remove_dir_all(hub.home.path().join("hf")).unwrap();
    fs::create_dir_all(&blobs).unwrap();
    fs::write(&partial, vec![9; weights.len() + 1]).unwrap();
    hub.set(|plan| plan.whole = true);
    ok(&mut hub.init(MODEL));
    assert!(!hub.blobs().iter().any(|p| p.extension().is_some()), "{:?}", hub.blobs());
}

#[test]
fn download_errors_name_their_cause() {
    let hub = Hub::new();
    let refused = |plan: &dyn Fn(&mut Plan), words: &[&str]| {
        hub.set(|p| {
            p.refuse = None;
            p.damage = None;
            p.gone = None;
            p.list = None;
            plan(p);
        });
        let (code, stderr) = fails(&mut hub.init(MODEL));
        assert_eq!(code, 1);
        for word in words {
            assert!(stderr.contains(word), "`{word}` is not in:\n{stderr}");
        }
    };
    refused(
        &|p| p.refuse = Some((401, "RepoNotFound")),
        &["does not exist, or is not public", "set `HF_TOKEN`"],
    );
    refused(
        &|p| p.refuse = Some((401, "GatedRepo")),
        &["requires that you accept its terms", "/someone/tiny"],
    );
    refused(&|p| p.refuse = Some((403, "")), &["requires that you accept its terms"]);
    refused(&|p| p.refuse = Some((404, "RevisionNotFound")), &["has no revision `main`"]);
    refused(
        &|p| p.refuse = Some((404, "RepoNotFound")),
        &["there is no model `someone/tiny`", "is not a local path"],
    );
    refused(&|p| p.refuse = Some((503, "")), &["status 503"]);
    // A small file first: it is in the cache, so it is not fetched again.
    refused(&|p| p.damage = Some("config.json"), &["was downloaded with wrong content"]);
    refused(
        &|p| p.damage = Some("model.safetensors"),
        &["was downloaded with wrong content", "the file was removed"],
    );
    refused(&|p| p.gone = Some("model.safetensors"), &["a file that the hub lists", "is not there"]);
    refused(
        &|p| p.list = Some(json!({"siblings": []})),
        &["has no safetensors checkpoint", "reads safetensors and GGUF"],
    );
    refused(&|p| p.list = Some(json!({"sha": "../../x"})), &["cannot be read", "names no commit"]);
    let config = fs::read(checkpoint("olmoe").join("config.json")).unwrap();
    let huge = json!({"siblings": [listed("config.json", &config), {"rfilename": "model.safetensors", "lfs": {"sha256": "a".repeat(64), "size": 1_u64 << 60}}]});
    refused(&|p| p.list = Some(huge.clone()), &["are free", "make room"]);
    let ggufs = json!({"siblings": [listed("a-Q4_0.gguf", b"x"), listed("b.gguf", b"x")]});
    refused(
        &|p| p.list = Some(ggufs.clone()),
        &["name one of them: `someone/tiny:a-Q4_0.gguf`, `someone/tiny:b.gguf`"],
    );
    assert!(!hub.blobs().iter().any(|p| p.extension().is_some()), "{:?}", hub.blobs());
    let (_, stderr) = fails(hub.init("other/model").arg("--offline"));
    assert!(
        stderr.contains("is not in the cache") && stderr.contains("the cache holds `someone/tiny`"),
        "{stderr}"
    );
    let (_, stderr) = fails(hub.init(MODEL).env("HF_ENDPOINT", "http://127.0.0.1:1"));
    assert!(stderr.contains("does not answer") && stderr.contains("--offline"), "{stderr}");
    let (_, stderr) = fails(hub.init(MODEL).env("HF_ENDPOINT", "huggingface"));
    assert!(stderr.contains("which is not an address"), "{stderr}");
}

#[test]
fn fetched_weights_are_those_of_the_index() {
    let hub = Hub::new();
    let bytes = fs::read(checkpoint("olmoe").join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let index = |file: &str| {
        let map: serde_json::Map<String, Value> =
            tensors.names().iter().map(|n| ((*n).to_owned(), json!(file))).collect();
        json!({"metadata": {}, "weight_map": map}).to_string().into_bytes()
    };
    let part = "model-00001-of-00001.safetensors";
    hub.set(|plan| {
        let weights = plan.files.remove("model.safetensors").unwrap();
        plan.files.insert(part.to_owned(), weights);
        plan.files.insert("model.safetensors.index.json".to_owned(), index(part));
    });
    ok(&mut hub.init(MODEL));
    assert!(is_link(&hub.snapshot().join(part)));
    ok(hub.init(MODEL).arg("--offline"));
    for (file, word) in
        [("../../x", "it names an invalid file"), ("absent.safetensors", "has no `absent.safetensors`")]
    {
        hub.set(|plan| drop(plan.files.insert("model.safetensors.index.json".to_owned(), index(file))));
        let (_, stderr) = fails(&mut hub.init(MODEL));
        assert!(stderr.contains(word), "{stderr}");
    }
    fs::remove_file(hub.snapshot().join(part)).unwrap();
    hub.set(|plan| drop(plan.files.insert("model.safetensors.index.json".to_owned(), index(part))));
    // A folder of the user has priority, so there are no requests.
    fs::create_dir_all(hub.home.path().join("someone")).unwrap();
    std::os::unix::fs::symlink(checkpoint("olmoe"), hub.home.path().join(MODEL)).unwrap();
    hub.set(|_| ());
    ok(&mut hub.init(MODEL));
    assert!(hub.requests().is_empty());
}
