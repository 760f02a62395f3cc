//! The table of cases. Limits of memory are bounds against what would take gigabytes, and no measurements.

use super::Case;
use super::attack::{Attack, Post, never_ends_its_body, never_ends_its_head, never_reads, stays};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
/// Bytes of a long prompt: nearly what `--max-body` allows.
const LONG: usize = 4_000_000;
/// A server for few connections, which waits for clients for a second.
const FEW: &[&str] =
    &["--max-connections", "48", "--max-connections-per-address", "32", "--client-timeout", "1"];
/// As many connections as by default.
const MANY: &[&str] = &["--client-timeout", "5"];
/// The same behind a proxy, from whose address all clients come.
const PROXY: &[&str] = &["--client-timeout", "5", "--max-connections-per-address", "512"];
/// MiB that a grammar may take.
const GRAMMAR: u64 = 512;
/// MiB that prompts may take, as docs/serve.md says.
const PROMPTS: u64 = 192;
/// MiB that a template may take.
const TEMPLATE: u64 = 256;
/// MiB that connections may take.
const CONNECTIONS: u64 = 128;

const fn requests(
    name: &'static str,
    memory: u64,
    make: fn() -> Vec<Post>,
    statuses: &'static [u16],
) -> Case {
    Case { name, in_test: false, options: &[], attack: Attack::Requests { make, statuses }, memory }
}

const fn template(name: &'static str, source: fn() -> String, statuses: &'static [u16]) -> Case {
    let attack = Attack::Template { source, statuses };
    Case { name, in_test: false, options: &[], attack, memory: TEMPLATE }
}

const fn tokenizer(name: &'static str, change: fn(&mut Value)) -> Case {
    Case { name, in_test: false, options: &[], attack: Attack::Tokenizer(change), memory: TEMPLATE }
}

const fn connections(
    name: &'static str,
    options: &'static [&'static str],
    count: usize,
    hold: fn(&mut std::net::TcpStream) -> std::io::Result<()>,
) -> Case {
    let attack = Attack::Connections { count, hold };
    Case { name, in_test: false, options, attack, memory: CONNECTIONS }
}

impl Case {
    /// One of the test's.
    const fn in_test(mut self) -> Self {
        self.in_test = true;
        self
    }
}

/// Every case.
pub(crate) const CASES: &[Case] = &[
    // A grammar that is not refused ends with the time of an answer.
    requests("schema of 12 patterns that multiply", GRAMMAR, || vec![schema(12)], &[200, 400, 504]).in_test(),
    requests("schema of 40 patterns that multiply", GRAMMAR, || vec![schema(40)], &[200, 400, 504]),
    requests(
        "four such schemas at once",
        GRAMMAR,
        || vec![schema(20), schema(24), schema(28), schema(32)],
        &[200, 400, 504],
    ),
    requests("a tool whose call is held to 28 such patterns", GRAMMAR, || vec![tool(28)], &[200, 400, 504]),
    requests(
        "a pattern of 400 000 options",
        GRAMMAR,
        || vec![held(json!({"type": "string", "pattern": "a?".repeat(400_000)}))],
        &[200, 400, 504],
    ),
    requests("a prompt of 4 MB of digits", PROMPTS, || vec![completion(json!("1".repeat(LONG)))], &[400]),
    requests(
        "four prompts of 4 MB of digits at once",
        PROMPTS,
        || vec![completion(json!("1".repeat(LONG))); 4],
        &[400],
    )
    .in_test(),
    requests(
        "sixteen prompts of 4 MB of words at once",
        PROMPTS,
        || vec![completion(json!("ab ".repeat(LONG / 3))); 16],
        &[400, 503],
    ),
    requests(
        "64 prompts of 60 KB in a request",
        PROMPTS,
        || vec![completion(json!(vec!["7".repeat(60_000); 64]))],
        &[400],
    ),
    requests(
        "two million token ids",
        PROMPTS,
        || vec![completion(json!(vec![1; LONG / 2 - 100])); 4],
        &[400],
    ),
    requests(
        "as many token ids as a body may have",
        PROMPTS,
        || vec![completion(json!(vec![1; 199_000])); 4],
        &[400],
    ),
    requests(
        "a message of 4 MB of digits, four at once",
        PROMPTS,
        || vec![message(&"1".repeat(LONG)); 4],
        &[400],
    )
    .in_test(),
    requests(
        "a message of special tokens alone",
        PROMPTS,
        || vec![message(&"<|endoftext|>".repeat(LONG / 13)); 2],
        &[400],
    ),
    requests("35 000 messages", PROMPTS, || vec![many_messages(35_000)], &[400]),
    template("a template of 5408 signs", || format!("{{{{ {}1 }}}}", "-".repeat(5408)), &[200, 400])
        .in_test(),
    template(
        "a template of 20 000 conditions",
        || format!("{{% if a %}}{}{{% endif %}}", "{% elif a %}".repeat(20_000)),
        &[400],
    ),
    template(
        "a template of 20 000 filters",
        || format!("{{{{ 'a'{} }}}}", "|upper".repeat(20_000)),
        &[200, 400],
    ),
    template("a namespace that holds itself", || namespace("ns"), &[200, 400]),
    template("a namespace that holds itself, as JSON", || namespace("ns|tojson"), &[400]),
    template("a namespace that holds itself, compared", || namespace("[ns] == [ns]"), &[200, 400]),
    template("a date of ten million years", || "{{ strftime_now('%Y' * 10000000) }}".to_owned(), &[400])
        .in_test(),
    template("lists doubled thirty times and compared", doubled, &[200, 400]),
    template("a number a gigabyte wide", || "{{ '{:>1000000000}'.format(1) }}".to_owned(), &[400]),
    tokenizer("normalizers that make 10 000 000 000 letters of one", |tokenizer| {
        tokenizer["normalizer"] = json!({"type": "Sequence", "normalizers": vec![growing_normalizer(); 5]});
    }),
    tokenizer("decoders that make 10 000 000 000 letters of one", |tokenizer| {
        tokenizer["decoder"] = json!({"type": "Sequence", "decoders": vec![growing_normalizer(); 5]});
    }),
    connections("40 connections that write and never read", FEW, 40, never_reads).in_test(),
    connections("40 heads that do not end", FEW, 40, never_ends_its_head).in_test(),
    connections("40 bodies that do not end", FEW, 40, never_ends_its_body),
    connections("40 connections that stay after an answer", FEW, 40, stays),
    connections("1040 connections that write and never read", MANY, 1040, never_reads),
    connections("1040 heads that do not end", MANY, 1040, never_ends_its_head),
    connections("1040 such connections behind a proxy", PROXY, 1040, never_reads),
    requests("answers for all slots, again and again", PROMPTS, all_slots, &[200]).in_test(),
];

fn completion(prompt: Value) -> Post {
    (COMPLETIONS, json!({"prompt": prompt, "max_tokens": 2}).to_string())
}

fn message(text: &str) -> Post {
    (CHAT, json!({"messages": [{"role": "user", "content": text}], "max_tokens": 2}).to_string())
}

fn many_messages(n: usize) -> Post {
    let message = json!({"role": "user", "content": "a"});
    (CHAT, json!({"messages": vec![message; n], "max_tokens": 2}).to_string())
}

/// Patterns with a large product of automata: each must store the positions of another letter among its last
/// letters.
fn patterns(n: u8) -> Value {
    let one = |i| json!({"type": "string", "pattern": format!(".*[a-{}].{{{}}}.*", char::from(b'b' + i % 24), 10 + i)});
    json!({"allOf": (0..n).map(one).collect::<Value>()})
}

fn held(schema: Value) -> Post {
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
    let messages = json!([{"role": "user", "content": "a"}]);
    (CHAT, json!({"messages": messages, "response_format": format, "max_tokens": 32}).to_string())
}

fn schema(n: u8) -> Post {
    held(patterns(n))
}

fn tool(n: u8) -> Post {
    let parameters = json!({"type": "object", "properties": {"p": patterns(n)}, "required": ["p"]});
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": parameters}}]);
    let messages = json!([{"role": "user", "content": "a"}]);
    (
        CHAT,
        json!({"messages": messages, "tools": tools, "tool_choice": "required", "max_tokens": 32})
            .to_string(),
    )
}

fn namespace(expression: &str) -> String {
    format!("{{% set ns = namespace() %}}{{% set ns.a = ns %}}{{{{ {expression} }}}}")
}

fn doubled() -> String {
    let double = "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}";
    format!(
        "{{% set ns = namespace(a=[1], b=[1]) %}}{{% for i in range(30) %}}{double}{{% endfor %}}{{{{ ns.a == ns.b }}}}"
    )
}

fn growing_normalizer() -> Value {
    json!({"type": "Replace", "pattern": {"String": "a"}, "content": "a".repeat(100)})
}

/// All slots of the demo model for each request, and a long answer at the same time.
fn all_slots() -> Vec<Post> {
    let body = |n, tokens| json!({"prompt": "The", "n": n, "max_tokens": tokens, "temperature": 1.0, "seed": 1, "ignore_eos": true, "stream": true});
    [body(1, 900), body(4, 900), body(4, 900), body(4, 100)].map(|b| (COMPLETIONS, b.to_string())).into()
}
