//! The server with the runtime's toy model, whose logits are exact: every answer is that of a single run,
//! whatever other clients request.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr, reason = "what fails here fails the test")]

#[path = "../../../testing/clients/mod.rs"]
mod clients;
#[path = "../../../runtime/tests/common/mod.rs"]
mod common;

mod answers;
mod chats;
mod limits;
mod many;
mod refusals;
mod server;

use answers::{answers, first_words, offsets_are_those_of_tokens, pieces, stop_strings_end_at_once};
use chats::{conversations, reasoning};
use limits::{
    a_draining_server_answers_and_sends_clients_away, a_second_signal_ends_what_waits,
    connections_have_limits, connections_without_a_request_do_not_hold_up_the_end,
    slots_are_as_many_as_memory_is_free_for, too_many_are_sent_away, who_goes_away_frees_the_slot,
};
use many::many_clients;
use moec_testing::http::get;
use refusals::{keys_and_origins, only_this_machine_is_answered, refusals};
use serde_json::{Value, json};
use server::{ReplyExt as _, complete, expected, send, with_bundle, with_server};

/// The server's processes for grammars: this program, run with the name of this test.
#[test]
fn bounded_worker() {
    moec_service::worker::run().unwrap();
}

/// All in one test, since a signal applies to the whole process.
#[test]
fn server_answers_requests() {
    let status = with_server(&["--max-queue", "2", "--max-body", "4096"], |at| {
        answers(at);
        offsets_are_those_of_tokens(at);
        stop_strings_end_at_once(at);
        refusals(at);
        only_this_machine_is_answered(at);
        who_goes_away_frees_the_slot(at);
        too_many_are_sent_away(at);
    });
    assert_eq!(status, 0);
    let advised = with_bundle(&[("sampling.json", r#"{"temperature": 2, "top_k": 1}"#)], &[], |at| {
        let prompt = [72, 105, 32];
        let text = |body: Value| complete(at, &body).json()["choices"][0]["text"].clone();
        assert_eq!(text(json!({"prompt": prompt, "max_tokens": 20})), expected(&prompt, 20).0);
        assert_ne!(
            text(json!({"prompt": prompt, "max_tokens": 20, "top_k": 0, "seed": 1})),
            expected(&prompt, 20).0
        );
    });
    assert_eq!(advised, 0);
    slots_are_as_many_as_memory_is_free_for();
    let named = with_server(&["--model-name", "org/toy"], |at| {
        for path in ["org/toy", "org%2Ftoy"] {
            let reply = send(get(at, &format!("/v1/models/{path}")));
            assert_eq!((reply.status, reply.json()["id"].as_str()), (200, Some("org/toy")));
        }
        assert_eq!(send(get(at, "/v1/models/org/other")).status, 404);
    });
    assert_eq!(named, 0);
    let key =
        with_server(&["--api-key", "secret", "--cors", "https://a.example", "--exact"], keys_and_origins);
    assert_eq!(key, 0);
    a_second_signal_ends_what_waits();
    a_draining_server_answers_and_sends_clients_away();
    connections_without_a_request_do_not_hold_up_the_end();
    let few = ["--max-connections", "4", "--max-connections-per-address", "3", "--client-timeout", "3"];
    // Other operating systems have only one loopback address.
    if cfg!(target_os = "linux") {
        assert_eq!(with_server(&few, connections_have_limits), 0);
    }
    let folder = tempfile::tempdir().unwrap();
    let template = folder.path().join("template.jinja");
    let source = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}T{% endif %}";
    std::fs::write(&template, source).unwrap();
    assert_eq!(with_server(&["--template", template.to_str().unwrap()], conversations), 0);
    assert_eq!(
        with_bundle(
            &[("tokenizer.json", &pieces())],
            &["--template", template.to_str().unwrap()],
            first_words
        ),
        0
    );
    std::fs::write(&template, "{{ messages[0].content }}<think>{# </think> #}").unwrap();
    assert_eq!(with_server(&["--template", template.to_str().unwrap()], reasoning), 0);
    assert_eq!(with_server(&["--max-queue", "1000", "--max-body", "4096"], many_clients), 0);
}
