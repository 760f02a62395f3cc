//! Many clients at once.

use crate::clients::{Answer, COMPLETIONS, Case, Clients, Model, Random};
use crate::server::{expected, long, metric, settled};
use serde_json::{Value, json};
use std::time::Duration;

/// Requests to the toy model, whose correct answers are computed from the prompts.
pub(crate) struct Toy;

impl Model for Toy {
    fn case(&self, random: &mut Random) -> Case {
        // A few beginnings, so that prefixes are shared.
        let mut prompt = vec![random.below(3), 77, 78, 79, 80, 81];
        prompt.extend((0..random.below(20)).map(|_| random.below(4)));
        let body = json!({"prompt": prompt, "max_tokens": 1 + random.below(30), "temperature": 0});
        Case { path: COMPLETIONS, body, key: 0 }
    }

    fn judge(&self, case: &Case, answer: &Answer) -> Result<(), String> {
        let number = |value: &Value| value.as_u64().unwrap() as usize;
        let prompt: Vec<u32> =
            case.body["prompt"].as_array().unwrap().iter().map(|id| number(id) as u32).collect();
        let (text, finish) = expected(&prompt, number(&case.body["max_tokens"]));
        let right = (&*answer.text, &*answer.finish) == (&*text, finish);
        if right { Ok(()) } else { Err(format!("{answer:?} in place of {text:?}")) }
    }

    fn long(&self) -> Value {
        long()
    }

    fn too_large(&self) -> usize {
        5000
    }
}

/// 64 clients for five seconds. Some disconnect, some send invalid requests; all others get the answers of
/// single runs. `cargo xtask stress-serve` does the same with a real model for two minutes.
pub(crate) fn many_clients(at: &str) {
    let done = Clients::new(at, &Toy, 64, Duration::from_secs(5)).run();
    assert!(done.failures.is_empty(), "{:#?}", done.failures);
    assert!(done.acts.iter().all(|(_, n)| *n > 0), "{:?}", done.acts);
    settled(at);
    assert!(metric(at, "moec_shared_tokens_total") > 0);
    let rows = metric(at, "moec_decode_rows_total") as f64 / metric(at, "moec_decode_steps_total") as f64;
    assert!(rows > 1.5, "{rows} rows in a step: sequences were not decoded together");
}
