//! A body of a request: the server reads what fits the model, and refuses all else with a status that says the client is at fault.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moec_service::Requests;
use std::sync::LazyLock;

const VOCAB: u32 = 2048;
const CONTEXT: usize = 256;

static REQUESTS: LazyLock<Requests> = LazyLock::new(|| {
    let tokenizer = include_bytes!("../../golden/models/ferris/tokenizer.json");
    let template = include_str!("../../golden/plain.jinja");
    Requests::new(tokenizer, template, VOCAB, CONTEXT).expect("the tokenizer of the demo model can be used")
});

fuzz_target!(|bytes: &[u8]| {
    let Some((first, body)) = bytes.split_first() else { return };
    match REQUESTS.read(first % 2 == 1, body) {
        Ok(request) => {
            for (prompt, n) in request {
                assert!(prompt.iter().all(|&id| id < VOCAB), "{prompt:?}");
                assert!(n > 0 && prompt.len() + n <= CONTEXT, "{} and {n}", prompt.len());
            }
        }
        Err((status, why)) => assert!((400..500).contains(&status) && !why.is_empty(), "{status}: {why}"),
    }
});
