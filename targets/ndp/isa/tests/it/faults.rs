//! Error messages for invalid streams.

use crate::common::{EXPERT, expert, with};
use moec_ndp_isa::*;

fn messages(text: &str) -> String {
    let stream = match parse(text) {
        Ok(stream) => stream,
        Err(e) => return format!("no stream: {e}"),
    };
    verify(&stream).map_or_else(|fault| fault.to_string(), |()| "well-formed".into())
}

#[test]
fn messages_of_the_verifier() {
    let tail = |code: &str| format!("{EXPERT}{code}\n");
    let link = |code: &str| {
        let wide =
            with("region outbox", "region wide rows 30..31 layout striped access write\nregion outbox");
        format!("{wide}{code}\n")
    };
    let texts = [
        with("ranks 4", "ranks 0"),
        with("rows 65536", "rows 4294967295"),
        with("channels 8 dimms 2", "channels 65536 dimms 65536"),
        with("dimm 5", "dimm 16"),
        with("tokens 8", "tokens 0"),
        with("slots 512", "slots 1048577"),
        with("rows 15..19", "rows 15..15"),
        with("rows 15..19", "rows 15..65537"),
        with("rows 15..19", "rows 14..19"),
        with("\nend", ""),
        with("\nend", "\nend\nend"),
        with("\nend", "\nloop\nend"),
        tail("init f32[0 + t*64], count 1"),
        with("\nend", "\nbarrier signal e9\nend"),
        with("init f32[33280", "init b16[33280"),
        with("init f32[33280", "init f32[33284"),
        with("init f32[33280 + t*8192], count 2048", "init f32[33280 + t*8192], count 0"),
        with("init f32[33280 + t*8192]", "init f32[33280 + t*4096]"),
        with("init f32[98816", "init f32[204800"),
        with("f32[98816 + t*8192], f32[98816", "f32[98816 + t*8192], f32[98880"),
        with(
            "b16[164352 + t*2048], f32[33280 + t*8192], count",
            "b16[33280 + t*8192], f32[33280 + t*8192], count",
        ),
        with("inbox[0 + r*65], lines 64", "inbox[0 + r*97], lines 64"),
        with("weights[131072]", "weights[131073]"),
        with("inbox[0 + r*65], lines 64", "inbox[0 + r*1099511627775], lines 64"),
        with("layout localized access write", "layout localized access read"),
        with("outbox[0 + r*128]", "outbox[0 + r*127]"),
        with("layout localized access read", "layout striped access read"),
        with("glu silu", "glu clamped(1.702, -7)"),
        with("glu silu b16", "convert f32"),
        with(" signal e1", ""),
        with("signal e1", "signal e0"),
        with("signal e2", "signal e2\n  barrier\n  load f32[200000 + t*64], inbox[0], lines 1 signal e2"),
        with("wait e1 wait e5", "wait e1"),
        with("  init f32[33280 + t*8192], count 2048 signal e2\n", "").replace(" wait e2", ""),
        with("count 2048 signal e2", "count 2047 signal e2"),
        link("relayout weights[0] -> wide[0], lines 262145, to striped"),
        link("relayout weights[0] -> wide[0], lines 16384, to localized"),
        link("relayout wide[0] -> weights[0], lines 16384, to localized"),
        link("migrate weights[0] -> dimm 5 rows 0..12, lines 16384"),
        link("migrate weights[0] -> dimm 6 rows 12..12, lines 16384"),
        link("migrate weights[0] -> dimm 6 rows 0..11, lines 196608"),
        link("migrate wide[0] -> dimm 6 rows 0..12, lines 16384"),
        link("migrate weights[0] -> dimm 6 rows 0..12, lines 0"),
    ];
    let messages: Vec<_> = texts.iter().map(|text| messages(text)).collect();
    insta::assert_snapshot!(messages.join("\n"));
}

/// Streams at the limits, but not past them.
#[test]
fn streams_at_the_limits_are_well_formed() {
    let wide = with("region outbox", "region wide rows 30..31 layout striped access write\nregion outbox");
    let texts = [
        EXPERT.to_owned(),
        with("dimm 5", "dimm 15"),
        with("rows 15..19", "rows 65532..65536"),
        with("inbox[0 + r*65], lines 64", "inbox[0 + r*96], lines 64"),
        with("init f32[98816", "init f32[196608 + t*8192], count 2048\n  init f32[98816"),
        with("slots 512", "slots 1").replace("r*65", "r*1"),
        format!("{wide}relayout weights[0] -> wide[0], lines 196608, to striped\nbarrier\n"),
        format!("{wide}migrate weights[0] -> dimm 6 rows 0..12, lines 196608 signal e0\nbarrier\n"),
        EXPERT.split_once("loop").expect("a loop").0.to_owned(),
    ];
    for text in texts {
        assert_eq!(messages(&text), "well-formed", "{text}");
    }
}

/// A block of one token has no second vector, so strides do not matter.
#[test]
fn one_token_needs_no_stride() {
    let text = with("tokens 8", "tokens 1")
        .replace(" + t*4096", "")
        .replace("f32[98816 + t*8192], f32", "f32[98816], f32");
    assert_eq!(messages(&text), "well-formed");
}

/// Invalid streams that only a program can create, since they have no text form.
#[test]
fn streams_without_a_text_form_are_refused() {
    let change: [fn(&mut Stream); 8] = [
        |s| s.name = String::new(),
        |s| s.name = "a".repeat(MAX_NAME + 1),
        |s| s.regions[0].name = "two words".into(),
        |s| s.regions[0].name = s.regions[1].name.clone(),
        |s| s.regions.truncate(2),
        |s| s.code[1].signal = Some(EVENTS),
        |s| s.code = vec![Op::Barrier.into(); MAX_CODE + 1],
        |s| {
            if let Op::Glu { kind, .. } = &mut s.code[6].op {
                *kind = Glu::Clamped { alpha: f32::NAN, limit: 7.0 };
            }
        },
    ];
    for (i, change) in change.into_iter().enumerate() {
        let mut stream = expert();
        change(&mut stream);
        let fault = verify(&stream).expect_err("no text form");
        assert!(!fault.message.is_empty());
        assert!(decode(&encode(&stream)).is_err(), "change {i}: {fault}");
    }
}

#[test]
fn messages_of_decoding() {
    let whole = encode(&expert());
    let changed = |at: usize, byte: u8| {
        let mut bytes = whole.clone();
        bytes[at] = byte;
        bytes
    };
    // The name has a length byte and 25 letters; 13 numbers follow, the last two of them counts.
    let counts = 8 + 4 + 1 + "olmoe.layers.0.experts.17".len() + 11 * 4;
    let bytes = [
        whole[..5].to_vec(),
        changed(0, b'M'),
        changed(8, 2),
        whole[..whole.len() - 1].to_vec(),
        [whole.clone(), vec![0, 0]].concat(),
        changed(12, 65),
        changed(13, b' '),
        changed(13, 0xff),
        changed(counts + 1, 2),
        changed(counts + 5, 17),
        changed(counts + 8 + 8 + 8, 2),
        changed(whole.len() - 6, 15),
        changed(whole.len() - 1, 32),
    ];
    let messages: Vec<_> =
        bytes.iter().map(|b| decode(b).map_or_else(|e| e.to_string(), |_| "a stream".into())).collect();
    insta::assert_snapshot!(messages.join("\n"));
}
