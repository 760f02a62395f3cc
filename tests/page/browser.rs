//! Headless Chromium, controlled by the DevTools protocol over two pipes.

use crate::support::clean;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Time limit of the browser, and of waiting for the page.
const PATIENCE: Duration = Duration::from_mins(1);

/// A browser with one page; dropping it ends the browser.
pub(super) struct Browser {
    child: Child,
    commands: ChildStdin,
    messages: Receiver<Value>,
    last: u64,
    /// Session id of the page in messages.
    session: Option<String>,
    _profile: tempfile::TempDir,
}

impl Browser {
    /// Starts the browser, and opens a page.
    pub(super) fn open(url: &str) -> Self {
        let profile = tempfile::tempdir().unwrap();
        // The browser reads commands from descriptor 3, and writes answers to descriptor 4.
        let mut shell = clean(Command::new("sh"));
        shell.args([
            "-c",
            "exec chromium \"$@\" 3<&0 4>&1 0</dev/null 1>&2",
            "sh",
            "--headless",
            "--no-sandbox",
        ]);
        shell.args(["--disable-gpu", "--disable-background-networking", "--no-first-run"]);
        shell.args(["--remote-debugging-pipe", "--hide-scrollbars"]);
        shell.arg(format!("--user-data-dir={}", profile.path().display()));
        shell.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = shell.spawn().unwrap();
        let (commands, out) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (send, messages) = channel();
        std::thread::spawn(move || {
            for message in BufReader::new(out).split(0).map_while(Result::ok) {
                if send.send(serde_json::from_slice(&message).unwrap()).is_err() {
                    return;
                }
            }
        });
        let mut browser = Self { child, commands, messages, last: 0, session: None, _profile: profile };
        let target = browser.call("Target.createTarget", json!({"url": "about:blank"}))["targetId"].clone();
        let attached = browser.call("Target.attachToTarget", json!({"targetId": target, "flatten": true}));
        browser.session = attached["sessionId"].as_str().map(str::to_owned);
        browser.call("Page.enable", json!({}));
        browser.call("Page.navigate", json!({"url": url}));
        browser.until(
            "document.readyState === 'complete' && document.getElementById('model').textContent !== ''",
        );
        browser
    }

    /// Sends a command, and returns its result.
    pub(super) fn call(&mut self, method: &str, params: Value) -> Value {
        self.last += 1;
        let mut command = json!({"id": self.last, "method": method, "params": params});
        if let Some(session) = &self.session {
            command["sessionId"] = json!(session);
        }
        self.commands.write_all(format!("{command}\0").as_bytes()).unwrap();
        loop {
            let message = self.messages.recv_timeout(PATIENCE).unwrap_or_else(|e| panic!("{method}: {e}"));
            if message["id"] == self.last {
                assert!(message.get("error").is_none(), "{method}: {message}");
                return message["result"].clone();
            }
        }
    }

    /// Value of an expression on the page.
    pub(super) fn value(&mut self, expression: &str) -> Value {
        let result = self.call("Runtime.evaluate", json!({"expression": expression, "returnByValue": true}));
        assert!(result.get("exceptionDetails").is_none(), "{expression}: {result}");
        result["result"]["value"].clone()
    }

    /// Text value of an expression on the page.
    pub(super) fn text(&mut self, expression: &str) -> String {
        let value = self.value(expression);
        value.as_str().unwrap_or_else(|| panic!("{expression}: {value}")).to_owned()
    }

    /// Waits until an expression on the page is true.
    pub(super) fn until(&mut self, expression: &str) {
        let start = Instant::now();
        while self.value(expression) != true {
            if start.elapsed() > PATIENCE {
                let page = self.value("document.body.innerText");
                panic!("`{expression}` stays false: {page}");
            }
            sleep(Duration::from_millis(20));
        }
    }

    /// Types a text into the empty field, and sends it by its key.
    pub(super) fn send(&mut self, text: &str) {
        self.value("document.getElementById('text').value = ''; document.getElementById('text').focus()");
        self.call("Input.insertText", json!({"text": text}));
        for kind in ["keyDown", "keyUp"] {
            let key = json!({"type": kind, "key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"});
            self.call("Input.dispatchKeyEvent", key);
        }
    }

    /// Sends a text, and waits until the page has received the whole answer.
    pub(super) fn send_and_wait(&mut self, text: &str) {
        self.send(text);
        self.until("running === null && document.getElementById('stop').hidden");
    }

    /// Sets the size of the window, and the preferred colour scheme.
    pub(super) fn look(&mut self, width: u32, height: u32, scheme: &str) {
        let size = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false});
        self.call("Emulation.setDeviceMetricsOverride", size);
        let preferred = json!([{"name": "prefers-color-scheme", "value": scheme}]);
        self.call("Emulation.setEmulatedMedia", json!({"features": preferred}));
    }

    /// Writes a screenshot to a file.
    pub(super) fn screenshot(&mut self, path: &Path) {
        let image = self.call("Page.captureScreenshot", json!({"format": "png"}));
        std::fs::write(path, STANDARD.decode(image["data"].as_str().unwrap()).unwrap()).unwrap();
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
