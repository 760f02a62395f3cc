//! Answers: text, log-probabilities, offsets, stop strings, leading spaces.

use crate::clients::CHAT;
use crate::common::*;
use crate::server::{ReplyExt as _, complete, expected, metric, named, send, settled, text_of};
use moec_runtime::{Decoder, Request, Sampler, Sampling, Text, generate};
use moec_testing::http::{get, post};
use serde_json::{Map, Value, json};

pub(crate) fn answers(at: &str) {
    let prompt = [72, 105, 32];
    let (text, finish) = expected(&prompt, 20);
    let body = json!({"model": "toy", "prompt": prompt, "max_tokens": 20, "temperature": 0, "user": "unknown fields pass"});
    let reply = complete(at, &body);
    assert_eq!(reply.status, 200, "{}", reply.body);
    let value = reply.json();
    assert_eq!(value["object"], "text_completion");
    assert_eq!(
        (&value["choices"][0]["text"], &value["choices"][0]["finish_reason"]),
        (&json!(text), &json!(finish))
    );
    assert_eq!(value["usage"]["prompt_tokens"], 3);
    // The same answer as a stream of events.
    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    streamed["stream_options"] = json!({"include_usage": true});
    let reply = complete(at, &streamed);
    assert!(reply.headers.contains("content-type: text/event-stream"), "{}", reply.headers);
    let events = reply.event_values();
    let joined: String = events.iter().filter_map(|e| e["choices"][0]["text"].as_str()).collect();
    assert_eq!(joined, text);
    let last = events.last().unwrap();
    assert_eq!((&last["usage"]["prompt_tokens"], last["choices"].as_array().unwrap().len()), (&json!(3), 0));
    assert_eq!(last["usage"]["prompt_tokens_details"]["cached_tokens"], 2, "the prompt lay in a slot");
    // Even with a tiny `top_p`, the most probable token remains.
    let mut narrow = body.clone();
    (narrow["temperature"], narrow["top_p"]) = (json!(2.0), json!(1e-6));
    assert_eq!(complete(at, &narrow).json()["choices"][0]["text"], text);
    // `max_tokens` past the context: the answer ends at the context's last position.
    let most = json!({"prompt": prompt, "max_tokens": 1000, "temperature": 0, "ignore_eos": true});
    let value = complete(at, &most).json();
    assert_eq!(
        (&value["choices"][0]["finish_reason"], &value["usage"]["total_tokens"]),
        (&json!("length"), &json!(64))
    );
    // By default tokens are sampled, and the answer shows the seed.
    let mut sampled = json!({"prompt": prompt, "max_tokens": 20, "temperature": 2.0, "ignore_eos": true});
    let first = complete(at, &sampled).json();
    sampled["seed"] = first["seed"].clone();
    let again = complete(at, &sampled).json();
    assert!(
        first["seed"].is_u64() && again["choices"][0]["text"] == first["choices"][0]["text"],
        "{first} {again}"
    );
    sampled["seed"] = json!(null);
    assert_ne!(complete(at, &sampled).json()["seed"], first["seed"]);
    // Several prompts and answers with a seed and log-probabilities: equal to the library's results.
    let body = json!({"prompt": [[1, 2, 3], [9, 8]], "n": 2, "max_tokens": 6, "temperature": 2.0, "seed": 5, "logprobs": 2,
        "ignore_eos": true});
    let value = complete(at, &body).json();
    let choices = value["choices"].as_array().unwrap().clone();
    assert_eq!(choices.len(), 4, "{value}");
    with_engine(&ENTRIES, 1, |engine| {
        for (i, choice) in choices.iter().enumerate() {
            let prompt: &[u32] = [&[1, 2, 3][..], &[9, 8]][i / 2];
            let sampling = Sampling { temperature: 2.0, seed: 5 + i as u64, ..Sampling::GREEDY };
            let request = Request { slot: 0, prompt, n: 6, end: &[] };
            let mut sampler = Sampler::new(sampling);
            let alone =
                generate(engine, &request, &mut Decoder::full(), &mut sampler, &mut |_| Ok(())).unwrap();
            assert_eq!(choice["text"], text_of(&alone.ids), "choice {i}");
            let lists = &choice["logprobs"];
            assert_eq!(lists["tokens"], alone.ids.iter().map(|&id| named(id)).collect::<Value>());
            assert_eq!(lists["top_logprobs"][0].as_object().unwrap().len(), 2, "{lists}");
            assert!(lists["token_logprobs"][0].as_f64().unwrap() <= 0.0);
        }
    });
    // Prompts that are copied from the first answer's slot do not count as cached.
    let usage =
        complete(at, &json!({"prompt": [201, 202, 203], "n": 3, "max_tokens": 2})).json()["usage"].clone();
    assert_eq!(
        (&usage["prompt_tokens"], &usage["prompt_tokens_details"]["cached_tokens"]),
        (&json!(3), &json!(0))
    );
    // A stop string ends the answer and is not part of it.
    if let Some((i, c)) = text.char_indices().nth(3) {
        let body = json!({"prompt": prompt, "max_tokens": 20, "temperature": 0, "stop": [c.to_string()]});
        let value = complete(at, &body).json();
        let before = &text[..text.find(c).unwrap().min(i)];
        assert_eq!(
            (&value["choices"][0]["text"], &value["choices"][0]["finish_reason"]),
            (&json!(before), &json!("stop"))
        );
    }
    let value = send(get(at, "/v1/models")).json();
    assert_eq!((&value["data"][0]["id"], &value["data"][0]["chat"]), (&json!("toy"), &json!(false)));
    assert_eq!(send(get(at, "/v1/models/toy")).status, 200);
    assert_eq!(send(get(at, "/health")).json(), json!({"status": "ok"}));
    let page = send(get(at, "/"));
    assert!(page.body.contains("<title>moec</title>") && page.headers.contains("content-security-policy"));
    assert!(metric(at, "moec_tokens_total") > 0 && metric(at, "moec_slots") == SLOTS as u64);
}

/// The offset of each token is where its text begins, streamed or not, even if text is held back because a
/// stop string might follow.
pub(crate) fn offsets_are_those_of_tokens(at: &str) {
    const N: usize = 20;
    let visible = |prompt: &[u32; 2]| (33..127).contains(&continuation(prompt, 1)[0]);
    let prompt = (1..128).map(|i| [i, 2]).find(visible).unwrap();
    let text = Text::parse(tokenizer().as_bytes(), None).unwrap();
    let (mut stream, mut all) = (text.stream(), String::new());
    let mut offsets = Vec::new();
    for id in continuation(&prompt, N) {
        offsets.push(all.chars().count() as u64);
        all += &stream.push(id).unwrap();
    }
    all += &stream.finish().unwrap();
    assert_eq!(offsets[..2], [0, 1]);
    let never = format!("{}\u{1}\u{1}\u{1}", all.chars().next().unwrap());
    for (stop, stream) in [(None, false), (None, true), (Some(&never), false), (Some(&never), true)] {
        let body = json!({"prompt": prompt, "max_tokens": N, "temperature": 0, "ignore_eos": true, "logprobs": 0, "stop": stop,
            "stream": stream});
        let reply = complete(at, &body);
        let values = if stream { reply.event_values() } else { vec![reply.json()] };
        let (mut joined, mut found) = (String::new(), Vec::new());
        for choice in values.iter().map(|event| &event["choices"][0]) {
            joined += choice["text"].as_str().unwrap();
            let of = choice["logprobs"]["text_offset"].as_array();
            found.extend(of.into_iter().flatten().filter_map(Value::as_u64));
        }
        assert_eq!((&joined, &found), (&all, &offsets), "{stop:?}, {stream}: {}", reply.body);
    }
}

/// If one of two answers ends at a stop string, it takes no further tokens; the other continues.
pub(crate) fn stop_strings_end_at_once(at: &str) {
    const N: usize = 40;
    let long = [9, 8];
    let others = continuation(&long, N);
    let early = |i: u32| {
        let ids = continuation(&[i, 2], N);
        let letter = |id: &u32| (97..123).contains(id) && !others.contains(id);
        let place = ids.iter().take(12).position(letter)?;
        Some(([i, 2], text_of(&[ids[place]]), place + 1))
    };
    let (short, letter, tokens) = (1..256).find_map(early).unwrap();
    settled(at);
    for stream in [false, true] {
        let before = metric(at, "moec_tokens_total");
        let mut body = json!({"prompt": [short, long], "max_tokens": N, "temperature": 0, "ignore_eos": true, "stop": letter,
            "stream": stream});
        if stream {
            body["stream_options"] = json!({"include_usage": true});
        }
        let reply = complete(at, &body);
        let values = if stream { reply.event_values() } else { vec![reply.json()] };
        let choices = values.iter().flat_map(|e| e["choices"].as_array().unwrap());
        let ends = choices.filter(|c| !c["finish_reason"].is_null());
        let mut ends: Vec<_> = ends.map(|c| (c["index"].as_u64(), c["finish_reason"].as_str())).collect();
        ends.sort_unstable();
        assert_eq!(ends, [(Some(0), Some("stop")), (Some(1), Some("length"))], "{}", reply.body);
        assert_eq!(values.last().unwrap()["usage"]["completion_tokens"], tokens + N);
        settled(at);
        assert_eq!(metric(at, "moec_tokens_total") - before, (tokens + N) as u64);
    }
}

/// The byte tokenizer in SentencePiece's spelling, whose decoder strips the first space of a text.
pub(crate) fn pieces() -> String {
    let mut json: Value = serde_json::from_str(&tokenizer()).unwrap();
    let spelled = |b: u32| match char::from_u32(b).filter(char::is_ascii_graphic) {
        Some(c) => c.to_string(),
        None if b == 32 => "▁".to_owned(),
        None => format!("<0x{b:02X}>"),
    };
    let vocab: Map<String, Value> = (0..256u32).map(|b| (spelled(b), b.into())).collect();
    json["model"]["vocab"] = vocab.into();
    json["pre_tokenizer"] = Value::Null;
    let replace = json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "});
    let strip = json!({"type": "Strip", "content": " ", "start": 1, "stop": 0});
    json["decoder"] =
        json!({"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]});
    json.to_string()
}

/// A continuation keeps the space of its first word, also with stop strings. A chat message does not.
pub(crate) fn first_words(at: &str) {
    // Only spaces are allowed.
    let others = (0..V as u32).filter(|&id| id != 32);
    let bias: Map<String, Value> = others.map(|id| (id.to_string(), json!(-100))).collect();
    let body = json!({"prompt": [65, 66], "max_tokens": 3, "temperature": 0, "logit_bias": bias});
    let with = |name: &str, value: Value| {
        let mut body = body.clone();
        body[name] = value;
        body
    };
    assert_eq!(complete(at, &body).json()["choices"][0]["text"], "   ");
    let values = complete(at, &with("stream", json!(true))).event_values();
    let joined: String = values.iter().filter_map(|e| e["choices"][0]["text"].as_str()).collect();
    assert_eq!(joined, "   ");
    let value = complete(at, &with("stop", json!("  "))).json();
    assert_eq!(
        (&value["choices"][0]["text"], &value["usage"]["completion_tokens"]),
        (&json!(""), &json!(2)),
        "{value}"
    );
    let messages = json!([{"role": "user", "content": "a"}]);
    let value = send(post(at, CHAT, with("messages", messages))).json();
    assert_eq!(value["choices"][0]["message"]["content"], "  ", "{value}");
}
