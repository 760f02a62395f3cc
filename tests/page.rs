//! The server's page in a browser. Screenshots are written to `page/` in cargo's folder for tests,
//! `target/tmp`.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod browser;
mod scripted;

use crate::support::{Setup, built, ferris, moec};
use browser::Browser;
use moec_testing::CHROMIUM;
use moec_testing::server::Server;
use scripted::{ENDLESS, FAILURES, LENGTH, REASONING};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Expressions for the turns on the page, the status line, and the input field.
const TURNS: &str = "[...document.querySelectorAll('.turn')].map(t => t.innerText).join('|')";
const STATE: &str = "document.getElementById('state').textContent";
const FIELD: &str = "document.getElementById('text').value";

fn pictures() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("page");
    fs::create_dir_all(&folder).unwrap();
    folder
}

#[test]
fn conversations_on_the_page() {
    if !CHROMIUM.met_or_skip() {
        return;
    }
    let (address, seen) = scripted::start();
    let body_of = |i: usize| seen.lock().unwrap().bodies[i].clone();
    let mut page = Browser::open(&format!("http://{address}/"));
    page.look(900, 700, "light");
    reasoning_is_shown_separately(&mut page, &body_of);
    let before = page.text(TURNS);
    // A failed turn is removed from the page, and its text is in the input field again.
    for (text, why) in FAILURES {
        page.send_and_wait(text);
        assert_eq!((page.text(TURNS), page.text(FIELD)), (before.clone(), text.to_owned()));
        assert_eq!(page.text(STATE), why);
        assert_eq!(page.value("document.getElementById('state').className"), "error");
    }
    page.send_and_wait(LENGTH);
    let messages = body_of(4)["messages"].clone();
    let roles: Vec<&str> = messages.as_array().unwrap().iter().map(|m| m["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["user", "assistant", "user"], "{messages}");
    assert_eq!(messages[1]["reasoning_content"], "Two and two are to be added.\nThat is easy.");
    let last = page.text("document.querySelector('.turn:last-child').innerText");
    assert!(last.contains("Cut: the context is full"), "{last}");
    pictures_of(&mut page);
    // Starting a new conversation ends a running answer.
    page.send(ENDLESS);
    page.until("document.getElementById('turns').innerText.includes('leak')");
    page.value("document.getElementById('new').click()");
    page.send_and_wait(REASONING);
    assert_eq!(body_of(6)["messages"], json!([{"role": "user", "content": REASONING}]));
    let turns = page.text(TURNS);
    assert!(!turns.contains("leak") && turns.matches("You").count() == 1, "{turns}");
    let start = Instant::now();
    while seen.lock().unwrap().left == 0 {
        assert!(start.elapsed() < Duration::from_secs(30), "the answer of the old conversation still comes");
        std::thread::sleep(Duration::from_millis(10));
    }
    // A stopped answer remains, and so does text typed meanwhile.
    page.send(ENDLESS);
    page.until("document.querySelector('.turn:last-child').innerText.includes('leak')");
    page.call("Input.insertText", json!({"text": "meanwhile"}));
    page.value("document.getElementById('stop').click()");
    page.until("running === null");
    assert_eq!((page.text(FIELD), page.text(STATE)), ("meanwhile".to_owned(), "stopped".to_owned()));
    assert_eq!(page.value("turns.length"), 4);
    // The limit of the settings; without one, the server's default.
    page.value("document.getElementById('max_tokens').value = '60'");
    page.send_and_wait(LENGTH);
    assert_eq!(body_of(8)["max_tokens"], 60);
    let last = page.text("document.querySelector('.turn:last-child').innerText");
    assert!(last.contains("Cut at 60 tokens"), "{last}");
}

fn reasoning_is_shown_separately(page: &mut Browser, body_of: &impl Fn(usize) -> Value) {
    page.send_and_wait(REASONING);
    for name in ["max_tokens", "temperature", "top_p", "seed"] {
        assert!(body_of(0).get(name).is_none(), "{}", body_of(0));
    }
    assert_eq!(page.text("document.querySelector('.thinking summary').textContent"), "Thinking");
    let reasoning = page.text("document.querySelector('.thinking div').textContent");
    assert_eq!(reasoning, "Two and two are to be added.\nThat is easy.");
    assert_eq!(page.value("document.querySelector('.thinking').open"), false);
    assert_eq!(
        page.text("document.querySelector('.assistant .what').textContent"),
        "The sum is 4:\nlet sum = 2 + 2;"
    );
    assert_eq!(page.text(STATE).split(", ").next(), Some("9 prompt tokens (3 cached)"));
}

/// Light, dark and narrow: the colours change, and nothing is wider than the window.
fn pictures_of(page: &mut Browser) {
    page.value(
        "document.querySelector('.thinking').open = true; document.getElementById('turns').scrollTop = 0",
    );
    for (name, width, scheme, paper) in [
        ("light", 900, "light", "rgb(251, 250, 248)"),
        ("dark", 900, "dark", "rgb(25, 24, 22)"),
        ("narrow", 360, "light", "rgb(251, 250, 248)"),
        ("narrow-dark", 360, "dark", "rgb(25, 24, 22)"),
    ] {
        page.look(width, 700, scheme);
        assert_eq!(page.text("getComputedStyle(document.body).backgroundColor"), paper, "{name}");
        for dialog in [false, true] {
            let suffix = if dialog { "-settings" } else { "" };
            if dialog {
                page.value("document.getElementById('open').click()");
            }
            let wide = "[...document.querySelectorAll('header *, .turn *, form *, dialog')].filter(e => e.offsetParent && !e.closest('pre') && \
                        e.getBoundingClientRect().right > innerWidth).map(e => e.outerHTML).join()";
            assert_eq!(page.text(wide), "", "{name}{suffix}");
            page.screenshot(&pictures().join(format!("{name}{suffix}.png")));
        }
        page.value("document.getElementById('settings').close()");
    }
    page.look(900, 700, "light");
}

/// The real server with a template that begins reasoning. The demo model never ends it, so its answer is cut.
#[test]
fn a_thinking_template_on_the_page() {
    if !CHROMIUM.met_or_skip() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let bundle = folder.path().join("ferris.moec");
    let setup = Setup { format: "bf16", chunk: 64, batch: &[1, 2], context: 64 };
    built(&setup.write(&ferris(), folder.path()), &[], &bundle);
    let template = folder.path().join("template.jinja");
    fs::write(&template, "{{ messages[-1].content }}<think>{# </think> #}").unwrap();
    let serve = |options: &[&str]| {
        let mut command = moec();
        command.arg("run").arg(&bundle).args(["serve", "--port", "0", "--threads", "1"]).args(options);
        Server::start(&mut command).unwrap()
    };
    let server = serve(&["--template", template.to_str().unwrap()]);
    // A link may contain the first text.
    let mut page = Browser::open(&format!("http://{}/#ask=The%20borrow%20checker", server.address()));
    page.until("running === null && turns.length === 2");
    let reasoning = page.text("document.querySelector('.thinking div').textContent");
    assert!(reasoning.chars().filter(|c| c.is_alphabetic()).count() > 8, "{reasoning}");
    assert_eq!(page.value("document.querySelector('.thinking').open"), true);
    let note = page.text("document.querySelector('.note').textContent");
    assert!(note.starts_with("Cut: the context is full"), "{note}");
    drop(page);
    // Without a template a text is continued up to the end of the context.
    let server = serve(&[]);
    let mut page = Browser::open(&format!("http://{}/", server.address()));
    page.send_and_wait("The borrow checker");
    let state = page.text(STATE);
    let out: u32 = state.split(" generated").next().unwrap().rsplit(' ').next().unwrap().parse().unwrap();
    assert!(out > 16, "{state}");
}
