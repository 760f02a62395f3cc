//! Valid `model.toml` files, and errors of invalid ones.

use super::*;
use proptest::prelude::*;

fn parse(text: &str) -> Result<Config> {
    Config::parse(text, Path::new("dir/model.toml"))
}

/// Returns the error of a text as `message | hint`.
fn error(text: &str) -> String {
    let e = parse(text).expect_err("the text is wrong");
    format!("{e} | {}", e.hint.as_deref().unwrap_or_default())
}

fn facts() -> Facts {
    Facts {
        family: "qwen3_moe".into(),
        parameters: 6_133_000,
        active_parameters: 1_700_000,
        layers: 4,
        moe_layers: 4,
        experts: 24,
        experts_per_token: 4,
        max_context: 2048,
        kv: vec![(512, None)],
        folded: 0,
        by_class: vec![
            (WeightClass::Experts, 5_308_416),
            (WeightClass::Attention, 393_216),
            (WeightClass::Embeddings, 393_216),
            (WeightClass::Exact, 38_152),
        ],
        stored: vec![(WeightClass::Experts, Format::Bf16), (WeightClass::Attention, Format::F32)],
        coded: Vec::new(),
        tied_embeddings: true,
    }
}

#[test]
fn an_empty_file_is_the_defaults() {
    let c = parse("").unwrap();
    assert_eq!(c, Config::defaults(Path::new("dir/model.toml")));
    assert_eq!(c.model.source, Path::new("dir"));
    assert_eq!(Config::parse("", Path::new("model.toml")).unwrap().model.source, Path::new("."));
}

#[test]
fn every_default_equals_its_row() {
    for key in KEYS {
        let text = format!("[{}]\n{} = {}", key.section, key.name, key.default);
        match parse(&text) {
            Ok(c) => assert_eq!(c, parse("").unwrap(), "`{}`", key.path()),
            // The default depends on the model.
            Err(e) => assert!(["max_context", "little"].contains(&key.name), "{e}"),
        }
    }
}

#[test]
fn every_key_is_read() {
    let c = parse(
        "[model]\nsource = \"../hf\"\nallow_nonfinite = true\n\
         [shapes]\nmax_context = 1_024\nprefill_chunk = 0x40\ndecode_batch = [1, 2, 4]\n\
         [weights]\nexperts = \"f16\"\nattention = \"f32\"\nembeddings = \"q4\"\nactivations = \"i8\"\n\
         rounding = \"nearest\"\nsize = \"3 GiB\"\n\
         [memory]\nkv_cache = \"q8\"\n\
         [experts]\ntiers = 2\ngroup = 8\nsizes = 2\noverflow = \"spill\"\ncapacity = 32\ncoverage = 1\nskip = \"on\"\n\
         predict = \"coarse\"\nrecall = 0.9\nthreshold = \"12.5%\"\n\
         [decode]\nbig_little = true\ngamma = 1\nlittle = 3\n\
         [placement]\nattention = \"cpu\"\nexperts = \"npu\"\ndecode = \"npu\"\nhot = \"npu\"\nprompt = 512\ngenerate = 128\n\
         [quality]\nmax_perplexity_increase = \"0.1%\"\ntext = [\"held-out.txt\"]\n",
    )
    .unwrap();
    assert_eq!(c.model.source, Path::new("dir/../hf"));
    assert!(c.model.allow_nonfinite);
    assert_eq!(
        c.shapes,
        ShapesKeys { max_context: Some(1024), prefill_chunk: Some(64), decode_batch: vec![1, 2, 4] }
    );
    assert_eq!(
        c.weights,
        Weights {
            experts: Format::F16,
            attention: Format::F32,
            embeddings: Format::Q4,
            stored: Vec::new(),
            activations: Activations::I8,
            rounding: Rounding::Nearest,
            size: Size::Most(3 << 30),
        }
    );
    assert_eq!(c.memory.kv_cache, KvCache::Q8);
    assert_eq!(
        c.experts,
        ExpertsConfig {
            tiers: 2,
            group: Some(8),
            sizes: 2,
            overflow: Some(Overflow::Spill),
            capacity: Capacity::Rows(32),
            coverage: 1.0,
            skip: Skip::On,
            predict: Predict::Coarse,
            recall: 0.9,
            threshold: Threshold::Share(0.125),
        }
    );
    assert_eq!(c.decode, Decoding { big_little: true, gamma: Gamma::Above(1.0), little: Some(3) });
    assert_eq!(c.mix, Mix { prompt: 512, generate: 128 });
    let [cpu, npu] = ["cpu", "npu"].map(|unit| UnitSetting::Unit(unit.into()));
    let placement = PlacementConfig {
        attention: cpu,
        experts: npu.clone(),
        decode: npu.clone(),
        hot: npu,
        ..PlacementConfig::defaults()
    };
    assert_eq!(c.placement, placement);
    let text = vec!["dir/held-out.txt".into()];
    assert_eq!(c.quality, Quality { max_perplexity_increase: Some(0.001), text });
    assert_eq!(c.weights.format(WeightClass::Exact), Format::F32);
}

#[test]
fn shapes_respect_the_context_limit_of_the_model() {
    let short = parse("").unwrap().shapes_for(128).unwrap();
    assert_eq!(short, Shapes { max_context: 128, prefill_chunk: 128, decode_batch: vec![1] });
    assert_eq!(parse("").unwrap().shapes_for(131_072).unwrap().max_context, 4096);
    let e = parse("[shapes]\nmax_context = 4097").unwrap().shapes_for(4096).expect_err("too long");
    assert_eq!(e.message, "`dir/model.toml`: `shapes.max_context` is 4097, but the model's limit is 4096");
    // For an existing file, the message has line and column.
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.toml");
    std::fs::write(&path, "[model]\nsource = \".\"\n[shapes]\nmax_context = 4097\n").unwrap();
    let e = Config::load(&path).unwrap().shapes_for(4096).expect_err("too long");
    let at =
        format!("`{}:4:15`: `shapes.max_context` is 4097, but the model's limit is 4096", path.display());
    assert_eq!(e.message, at);
}

#[test]
fn prompts_are_a_length_or_a_list() {
    let of = |text: &str| parse(&format!("[placement]\n{text}")).unwrap();
    let lengths = |text: &str| (of(text).prompts, of(text).mix.prompt);
    assert_eq!(lengths(""), (vec![4096], 4096));
    assert_eq!(lengths("prompt = 300"), (vec![300], 300));
    assert_eq!(lengths("prompt = [64, 300, 4096]"), (vec![64, 300, 4096], 1486));
    let chunk = |text: &str| parse(&format!("[shapes]\n{text}")).unwrap();
    assert_eq!(chunk("prefill_chunk = \"auto\"").shapes.prefill_chunk, None);
    assert_eq!(chunk("prefill_chunk = \"auto\"").shapes_for(4096).unwrap().prefill_chunk, 256);
}

#[test]
fn gamma_is_a_number_or_a_share() {
    let of = |text: &str| parse(&format!("[decode]\n{text}")).unwrap().decode;
    assert_eq!(of("").gamma, Gamma::DEFAULT);
    assert_eq!(of("gamma = 0.25").gamma, Gamma::Above(0.25));
    for (text, share) in [("\"15%\"", 0.15), ("\"12.5 %\"", 0.125), ("\"0%\"", 0.0), ("\"100%\"", 1.0)] {
        let decode = of(&format!("gamma = {text}"));
        assert_eq!((decode.gamma, decode.gamma.fixed()), (Gamma::Share(share), None));
        // Nothing falls back if no token is decoded with fewer experts.
        assert_eq!(decode.fallback_share(), None);
        let decode = of(&format!("big_little = true\ngamma = {text}"));
        assert_eq!(decode.fallback_share(), Some(share));
    }
    assert_eq!(of("big_little = true\ngamma = 0.25").fallback_share(), None);
}

#[test]
fn the_little_model_has_fewer_experts() {
    let of = |text: &str, experts| {
        let little = parse(&format!("[decode]\n{text}")).unwrap().little(experts);
        little.map_err(|e| format!("{e} | {}", e.hint.as_deref().unwrap_or_default()))
    };
    assert_eq!(of("", Some(8)), Ok(None));
    assert_eq!(of("little = 9", Some(8)), Ok(None), "it was not requested");
    let on = "big_little = true\n";
    for (experts, half) in [(2, 1), (3, 2), (4, 2), (6, 3), (8, 4)] {
        assert_eq!(of(on, Some(experts)), Ok(Some(half)));
    }
    assert_eq!(of(&format!("{on}little = 7"), Some(8)), Ok(Some(7)));
    for (text, experts, expected) in [
        (
            "little = 8",
            Some(8),
            "`dir/model.toml`: `decode.little` is 8, but the model uses 8 experts per token | set it to 7 or less; 4 is the default",
        ),
        (
            "",
            Some(1),
            "`dir/model.toml`: `decode.big_little` is true, but the model uses one expert per token, which cannot be reduced | set `big_little = false` under `[decode]`",
        ),
        (
            "",
            None,
            "`dir/model.toml`: `decode.big_little` is true, but the model has no experts to leave out | set `big_little = false` under `[decode]`",
        ),
    ] {
        assert_eq!(of(&format!("{on}{text}"), experts), Err(expected.to_owned()));
    }
}

#[test]
fn wrong_files_are_refused_by_line_and_key() {
    for (text, expected) in [
        (
            "[shapes]\nmax_contxt = 1",
            "`dir/model.toml:2:1`: unknown key `shapes.max_contxt` | did you mean `max_context`?",
        ),
        (
            "[shapes]\nfish = 1",
            "`dir/model.toml:2:1`: unknown key `shapes.fish` | the keys of `[shapes]` are `max_context`, `prefill_chunk`, `decode_batch`",
        ),
        (
            "[model]\nmax_context = 1",
            "`dir/model.toml:2:1`: unknown key `model.max_context` | `max_context` belongs under `[shapes]`",
        ),
        ("[shape]\n", "`dir/model.toml:1:2`: unknown section `[shape]` | did you mean `[shapes]`?"),
        (
            "source = \".\"",
            "`dir/model.toml:1:1`: `source` is outside of its section | put it under `[model]`",
        ),
        (
            "model = 3",
            "`dir/model.toml:1:1`: `model` is an integer, expected a section | write `[model]` on a line of its own and its keys below it",
        ),
        ("\n[qualty]\n", "`dir/model.toml:2:2`: unknown section `[qualty]` | did you mean `[quality]`?"),
        ("[experts]\ntier = 3", "`dir/model.toml:2:1`: unknown key `experts.tier` | did you mean `tiers`?"),
        (
            "[experts]\ntiers = 7",
            "`dir/model.toml:2:9`: `experts.tiers` is `7`, expected 1..=6 | the default is 6",
        ),
        (
            "[experts]\ngroup = \"all\"",
            "`dir/model.toml:2:9`: `experts.group` is `\"all\"`, expected \"auto\" or 1..=1024 | the default is \"auto\"",
        ),
        (
            "[experts]\ngroup = 1.5",
            "`dir/model.toml:2:9`: `experts.group` is a float, expected \"auto\" or an integer | it may be \"auto\" or 1..=1024; the default is \"auto\"",
        ),
        (
            "[experts]\noverflow = \"drop\"",
            "`dir/model.toml:2:12`: `experts.overflow` is `\"drop\"`, expected \"auto\", \"prune\" or \"spill\" | the default is \"auto\"",
        ),
        (
            "[experts]\nthreshold = \"96%\"",
            "`dir/model.toml:2:13`: `experts.threshold` is `\"96%\"`, expected \"off\", \"auto\", or a share in \"0%\"..=\"95%\" | the default is \"off\"",
        ),
        (
            "[experts]\ncoverage = 0.4",
            "`dir/model.toml:2:12`: `experts.coverage` is `0.4`, expected a number in 0.5..=1.0 | the default is 0.99",
        ),
        (
            "[experts]\ncoverage = \"95%\"",
            "`dir/model.toml:2:12`: `experts.coverage` is a string, expected a number | it may be a number in 0.5..=1.0; the default is 0.99",
        ),
        (
            "[decode]\ngamma = 1.5",
            "`dir/model.toml:2:9`: `decode.gamma` is `1.5`, expected a number in 0.0..=1.0, or a share in \"0%\"..=\"100%\" | the default is 0.7",
        ),
        (
            "[decode]\ngamma = nan",
            "`dir/model.toml:2:9`: `decode.gamma` is `nan`, expected a number in 0.0..=1.0, or a share in \"0%\"..=\"100%\" | the default is 0.7",
        ),
        (
            "[decode]\ngamma = \"101%\"",
            "`dir/model.toml:2:9`: `decode.gamma` is `\"101%\"`, expected a number in 0.0..=1.0, or a share in \"0%\"..=\"100%\" | the default is 0.7",
        ),
        (
            "[decode]\ngamma = \"0.5\"",
            "`dir/model.toml:2:9`: `decode.gamma` is `\"0.5\"`, expected a number in 0.0..=1.0, or a share in \"0%\"..=\"100%\" | the default is 0.7",
        ),
        (
            "[decode]\ngamma = true",
            "`dir/model.toml:2:9`: `decode.gamma` is a boolean, expected a number or a share | it may be a number in 0.0..=1.0, or a share in \"0%\"..=\"100%\"; the default is 0.7",
        ),
        (
            "[decode]\nlittle = 0",
            "`dir/model.toml:2:10`: `decode.little` is `0`, expected 1..=1024, and fewer than the model's experts per token | the default is half of the model's experts per token, rounded up",
        ),
        (
            "[decode]\nbig_litle = true",
            "`dir/model.toml:2:1`: unknown key `decode.big_litle` | did you mean `big_little`?",
        ),
        (
            "[decode]\nbig_little = 1",
            "`dir/model.toml:2:14`: `decode.big_little` is an integer, expected true or false | it may be true or false; the default is false",
        ),
        (
            "[placement]\nattention = \"npu:50%\"",
            "`dir/model.toml:2:13`: `placement.attention` is `\"npu:50%\"`, expected \"auto\", or the name or kind of a unit of the target (\"cpu\", \"npu\") | the default is \"auto\"",
        ),
        (
            "[placement]\nexperts = \"gpu:0%\"",
            "`dir/model.toml:2:11`: `placement.experts` is `\"gpu:0%\"`, expected \"auto\", the name or kind of a unit of the target (\"cpu\", \"npu\"), or one with a share (\"gpu:50%\") | the default is \"auto\"",
        ),
        (
            "[quality]\nmax_perplexity_increase = \"101%\"",
            "`dir/model.toml:2:27`: `quality.max_perplexity_increase` is `\"101%\"`, expected \"none\", or a share in \"0%\"..=\"100%\" | the default is \"none\"",
        ),
        (
            "[shapes]\nprefill_chunk = 0",
            "`dir/model.toml:2:17`: `shapes.prefill_chunk` is `0`, expected \"auto\" or 1..=4096 | the default is 256",
        ),
        (
            "[shapes]\nprefill_chunk = -1",
            "`dir/model.toml:2:17`: `shapes.prefill_chunk` is `-1`, expected \"auto\" or 1..=4096 | the default is 256",
        ),
        (
            "[shapes]\nprefill_chunk = \"8\"",
            "`dir/model.toml:2:17`: `shapes.prefill_chunk` is `\"8\"`, expected \"auto\" or 1..=4096 | the default is 256",
        ),
        (
            "[shapes]\nprefill_chunk = true",
            "`dir/model.toml:2:17`: `shapes.prefill_chunk` is a boolean, expected \"auto\" or an integer | it may be \"auto\" or 1..=4096; the default is 256",
        ),
        (
            "[placement]\nslices = [1, 0]",
            "`dir/model.toml:2:10`: `placement.slices` is `[1, 0]`, expected \"auto\", 1..=64, or a list of such numbers | the default is \"auto\"",
        ),
        (
            "[placement]\nslices = []",
            "`dir/model.toml:2:10`: `placement.slices` is `[]`, expected \"auto\", 1..=64, or a list of such numbers | the default is \"auto\"",
        ),
        (
            "[placement]\nprompt = []",
            "`dir/model.toml:2:10`: `placement.prompt` is `[]`, expected 1..=1048576, or a list of such numbers | the default is 4096",
        ),
        (
            "[shapes]\ndecode_batch = [2, 1]",
            "`dir/model.toml:2:16`: `shapes.decode_batch` is `[2, 1]`, expected a list of integers in 1..=64, ascending | the default is [1]",
        ),
        (
            "[shapes]\ndecode_batch = [1, 1]",
            "`dir/model.toml:2:16`: `shapes.decode_batch` is `[1, 1]`, expected a list of integers in 1..=64, ascending | the default is [1]",
        ),
        (
            "[shapes]\ndecode_batch = []",
            "`dir/model.toml:2:16`: `shapes.decode_batch` is `[]`, expected a list of integers in 1..=64, ascending | the default is [1]",
        ),
        (
            "[shapes]\ndecode_batch = [1, 65]",
            "`dir/model.toml:2:16`: `shapes.decode_batch` is `[1, 65]`, expected a list of integers in 1..=64, ascending | the default is [1]",
        ),
        (
            "[shapes]\ndecode_batch = [1.5]",
            "`dir/model.toml:2:16`: `shapes.decode_batch` is a list, expected a list of integers | it may be a list of integers in 1..=64, ascending; the default is [1]",
        ),
        (
            "[weights]\nembeddings = \"q4o\"",
            "`dir/model.toml:2:14`: `weights.embeddings` is `\"q4o\"`, which this version does not support | it may be \"f32\", \"bf16\", \"f16\", \"q8\", \"q4n\", \"q4\", \"q8h\", \"q4h\", \"mxfp4\" or \"stored\"",
        ),
        (
            "[weights]\nexperts = \"int4\"",
            "`dir/model.toml:2:11`: `weights.experts` is `\"int4\"`, expected \"f32\", \"bf16\", \"f16\", \"q8\", \"q6\", \"q5\", \"q4n\", \"q4\", \"q3\", \"q2\", \"q2s\", \"q8h\", \"q4h\", \"mxfp4\", \"q4o\", \"q4c\" or \"stored\" | the default is \"bf16\"",
        ),
        (
            "[weights]\nactivations = \"f16\"",
            "`dir/model.toml:2:15`: `weights.activations` is `\"f16\"`, expected \"auto\", \"f32\", \"bf16\" or \"i8\" | the default is \"auto\"",
        ),
        (
            "[memory]\nkv_cache = \"q3\"",
            "`dir/model.toml:2:12`: `memory.kv_cache` is `\"q3\"`, expected \"auto\", \"bf16\", \"f32\", \"q8\", \"q5\" or \"q4\" | the default is \"auto\"",
        ),
        (
            "[model]\nsource = \"\"",
            "`dir/model.toml:2:10`: `model.source` is `\"\"`, expected a path | the default is \".\"",
        ),
        (
            "[model]\nsource = \".\"\nsource = \".\"",
            "`dir/model.toml:3:1`: duplicate key | the file is TOML: `key = value` under `[section]`",
        ),
    ] {
        assert_eq!(error(text), expected);
    }
}

#[test]
fn impossible_formats_are_limits_and_unknown_ones_bad_input() {
    use moec_base::Fault;
    assert_eq!(parse("[weights]\nembeddings = \"q4o\"").expect_err("not of tables").fault, Fault::Limit);
    assert_eq!(parse("[weights]\nexperts = \"f64\"").expect_err("never").fault, Fault::Input);
}

#[test]
fn template_contains_the_defaults() {
    for all in [true, false] {
        let text = template(Path::new("."), &facts(), all, &[]);
        let read = parse(&text).unwrap();
        let mut plain = parse("[shapes]\ndecode_batch = [1, 2, 4]").unwrap();
        assert_eq!(read.shapes_for(2048).unwrap(), plain.shapes_for(2048).unwrap());
        assert_eq!(read.decode.little, all.then_some(2));
        plain.shapes.max_context = read.shapes.max_context;
        plain.decode.little = read.decode.little;
        assert_eq!(read, plain);
        let keys = text.lines().filter(|line| !line.starts_with('#') && line.contains(" = ")).count();
        assert_eq!(keys, if all { KEYS.len() } else { 10 });
        if all {
            insta::assert_snapshot!(text);
        }
    }
}

#[test]
fn template_keeps_formats_of_stored_codes() {
    let stored = vec![(WeightClass::Experts, Format::Mxfp4), (WeightClass::Embeddings, Format::Q8h)];
    let text = template(Path::new("."), &Facts { stored, ..facts() }, true, &[]);
    let read = parse(&text).unwrap().weights;
    assert_eq!((read.experts, read.attention, read.embeddings), (Format::Mxfp4, Format::Bf16, Format::Q8h));
    let notes: Vec<&str> =
        text.lines().filter(|line| line.contains("stores them") || line.contains("Keys")).collect();
    insta::assert_snapshot!(notes.join("\n"));
}

#[test]
fn template_escapes_any_folder_name() {
    for name in ["a b", "quo\"te", "back\\slash", "líne", "new\nline", "#"] {
        let text = template(Path::new(name), &Facts { family: "evil\n[x]".into(), ..facts() }, false, &[]);
        assert_eq!(parse(&text).unwrap().model.source, Path::new("dir").join(name));
    }
}

proptest! {
    #[test]
    fn no_config_text_panics(text in "\\PC{0,200}") {
        let _ = parse(&text);
    }

    #[test]
    fn no_value_makes_it_panic(key in 0..KEYS.len(), value in "[\\[\\]{}\"0-9a-zé.,_ +-]{0,80}") {
        let key = &KEYS[key];
        let _ = parse(&format!("[{}]\n{} = {value}", key.section, key.name));
    }
}
