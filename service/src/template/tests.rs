//! Tests of limits of templates. `tests/templates.rs` tests equality with transformers.

use super::*;
use serde_json::json;

fn render(source: &str, messages: &[Json]) -> Result<String> {
    let tokens = [("bos_token".to_owned(), "<s>".to_owned())].into();
    Template::new(source, &tokens)?.render(&Render {
        messages,
        add_generation_prompt: true,
        ..Render::default()
    })
}

#[test]
fn template_engine_matches_transformers() {
    let messages = [json!({"role": "user", "content": "<é> 'q'\n", "n": 1.0, "flag": true, "none": null})];
    let of = |source: &str| render(source, &messages).unwrap();
    assert_eq!(of("{{ bos_token }}{% if add_generation_prompt %}x{% endif %}\n"), "<s>x");
    assert_eq!(
        of("{{ messages[0] | tojson }}"),
        r#"{"role": "user", "content": "<é> 'q'\n", "n": 1.0, "flag": true, "none": null}"#
    );
    assert_eq!(of("{{ messages[0].flag }} {{ messages[0].none }} {{ messages[0].n }}"), "True None 1.0");
    assert_eq!(of("{{ [1, 'a', {'b': false}] }}"), "[1, 'a', {'b': False}]");
    assert_eq!(of("{{ {'a': [1, []]} | tojson(indent=2) }}"), "{\n  \"a\": [\n    1,\n    []\n  ]\n}");
    assert_eq!(
        of("{{ {'b': 1, 'a': 'é'} | tojson(separators=(',', ':'), sort_keys=true, ensure_ascii=true) }}"),
        r#"{"a":"\u00e9","b":1}"#
    );
    assert_eq!(of("  {% for m in messages %}\n  {{- m.role }}\n  {% endfor %}\nend"), "user\nend");
    assert_eq!(of("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"), "01");
    assert_eq!(of("a\n{%- generation %}b{% endgeneration -%}\n c"), "abc");
    let kinds =
        "{% for v in [none, nothing, 1, 'a', [], {}] %}{{ v is iterable }} {{ v is sequence }},{% endfor %}";
    assert_eq!(of(kinds), "False False,True True,False False,True True,True True,True True,");
    assert_eq!(of("{{ messages[0].content.strip().split()[0] }}{{ nothing }}"), "<é>");
}

#[test]
fn template_uses_the_given_clock() {
    use chrono::TimeZone as _;
    let template = Template::new("{{ strftime_now('%d %B %Y') }}", &BTreeMap::new()).unwrap();
    let now = chrono::Local.with_ymd_and_hms(2024, 7, 26, 12, 0, 0).single().map(|now| now.fixed_offset());
    assert_eq!(template.render(&Render { now, ..Render::default() }).unwrap(), "26 July 2024");
    let bad = Template::new("{{ strftime_now('%!') }}", &BTreeMap::new()).unwrap();
    assert!(bad.render(&Render::default()).unwrap_err().what.contains("not a format of a time"));
}

#[test]
fn impossible_template_operations_are_reported() {
    let says = |source: &str, words: &[&str]| {
        let e = render(source, &[]).unwrap_err();
        assert!(words.iter().all(|w| e.what.contains(w)), "{e}");
    };
    says("a\n{% if %}", &["line 2"]);
    says("{{ raise_exception('roles must alternate') }}", &["roles must alternate", "line 1"]);
    says("{{ nothing.inside }}", &["undefined"]);
    says("{{ missing | tojson }}", &["not JSON serializable"]);
    says(&"x".repeat(MAX_SOURCE + 1), &["1048577 bytes"]);
}

#[test]
fn templates_cannot_exhaust_time_or_memory() {
    let says = |source: &str| {
        let e = render(source, &[]).unwrap_err();
        assert!(e.what.contains("in time") || e.what.contains("line"), "{e}");
    };
    says("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}");
    says("{% set n = namespace(s='x') %}{% for a in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}");
    says("{{ 'x' * 9999999999 }}");
    says("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}");
    // Nested as deep as fuel allows; dropping the value must not overflow the stack.
    let deep = "{% set n = namespace(a=[]) %}{% for i in range(99999) %}{% set n.a = [n.a] %}{% endfor %}";
    render(deep, &[]).unwrap();
    says(&format!("{deep}{{{{ n.a | tojson }}}}"));
    says(&format!("{deep}{{{{ n.a }}}}"));
}

#[test]
fn formatting_values_consumes_fuel() {
    // A list that contains itself twice, nested forty times: small in memory, but huge when printed.
    let wide = "{% set n = namespace(a=[]) %}{% for i in range(40) %}{% set n.a = [n.a, n.a] %}{% endfor %}";
    let huge = "{% set x = 'x' * 1000000 %}{% set l = range(100000) | list %}";
    for (before, written) in [
        (wide, "n.a"),
        (wide, "n.a | string | length"),
        (wide, "n.a | tojson"),
        (wide, "{'a': n.a}"),
        (huge, "l | tojson(separators=[x, x])"),
        (huge, "l | tojson(indent=x)"),
    ] {
        let e = render(&format!("{before}{{{{ {written} }}}}"), &[]).unwrap_err();
        assert!(e.what.contains("takes too long"), "{written}: {e}");
    }
    // A large value is printed if the template requests it.
    let messages = [json!({"content": "x".repeat(1 << 20)}), json!({"content": vec![json!("é"); 1 << 16]})];
    let all =
        render("{{ messages | tojson(indent=4, ensure_ascii=true) }}{{ messages }}", &messages).unwrap();
    assert!(all.len() > 3 << 20, "{}", all.len());
}

/// Templates that overflow a stack, or take memory or time within one engine step, end only their own
/// process.
#[test]
fn hostile_templates_end_only_their_own_process() {
    let doubled =
        "{% set n = namespace(a=[1]) %}{% for i in range(30) %}{% set n.a = [n.a, n.a] %}{% endfor %}";
    let own = "{% set n = namespace() %}{% set n.n = n %}";
    let elif = format!("{{% if a %}}{}{{% endif %}}", "{% elif b %}".repeat(40_000));
    for source in [
        format!("{{{{ {}1 }}}}", "-".repeat(5408)),
        format!("{{{{ {}1 }}}}", "-".repeat(500_000)),
        format!("{{{{ {}1{} }}}}", "(".repeat(100_000), ")".repeat(100_000)),
        format!("{{{{ 'a'{} }}}}", "|upper".repeat(100_000)),
        elif,
        format!("{own}{{{{ n }}}}{{{{ n == n }}}}{{{{ [n] | tojson }}}}"),
        format!("{doubled}{{{{ n.a == n.a }}}}"),
        "{{ strftime_now('%Y' * 10000000) }}".to_owned(),
        "{{ '{:>1000000000}'.format(1) }}".to_owned(),
        "{{ '%1000000000d' % 1 }}".to_owned(),
    ] {
        // An answer or an error: this process continues, and the next template is rendered.
        if let Err(e) = render(&source, &[]) {
            assert!(e.what.contains("the chat template"), "{e}");
        }
        assert_eq!(render("{{ 1 + 1 }}", &[]).unwrap(), "2");
    }
    let deep = render(&format!("{{{{ {}1 }}}}", "-".repeat(500_000)), &[]).unwrap_err();
    assert!(deep.what.contains("takes more than") && deep.hint.is_some(), "{deep}");
}

#[test]
fn conversations_share_one_template_process() {
    let templates = Templates::new(
        [("default".to_owned(), "{{ messages | length }}".to_owned())].into(),
        BTreeMap::new(),
    );
    for n in 0..3 {
        let messages = vec![json!({"role": "user", "content": "a"}); n];
        let request = Render { messages: &messages, ..Render::default() };
        assert_eq!(templates.choose(true).unwrap().render(&request).unwrap(), n.to_string());
        assert_eq!(templates.pool.idle(), 1);
    }
}

#[test]
fn final_message_is_continued() {
    let source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}";
    let messages =
        [json!({"role": "user", "content": "a"}), json!({"role": "assistant", "content": "to be "})];
    let request = Render { messages: &messages, continue_final_message: true, ..Render::default() };
    let of = |source: &str| Template::new(source, &BTreeMap::new()).unwrap().render(&request);
    assert_eq!(of(source).unwrap(), "[user]a</s>[assistant]to be ");
    assert_eq!(of(&source.replace("m.content", "m.content.strip()")).unwrap(), "[user]a</s>[assistant]to be");
    assert!(of("nothing").unwrap_err().what.contains("cannot be continued"));
    let both = Render { add_generation_prompt: true, ..request };
    assert!(Template::new(source, &BTreeMap::new()).unwrap().render(&both).is_err());
}
