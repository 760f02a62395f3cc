//! Error messages for texts that are not streams.

use crate::common::{EXPERT, with};
use moec_ndp_isa::parse;

#[test]
fn messages_of_the_parser() {
    let texts = [
        String::new(),
        with("stream olmoe", "strem olmoe"),
        with("stream olmoe.layers", "stream 7layers"),
        with("ranks 4", "rank 4"),
        with("tokens 8", "tokens -8"),
        with("slots 512", "slots 4294967296"),
        with("layout localized", "layout local"),
        with("region inbox", "region weights"),
        with("rows 12..15", "rows 12-15"),
        with("access write", "access write twice"),
        with("\nloop", "\nrepeat"),
        with("load b16", "load i8"),
        with("t*4096]", "r*4096]"),
        with("inbox[0 + r*65]", "inbx[0 + r*65]"),
        with("lines 64 signal e0", "64 signal e0"),
        with("signal e1", "signal e32"),
        with("wait e0 wait e2 signal e3", "signal e3 wait e0"),
        with("glu silu", "glu swish"),
        with("glu silu", "glu clamped(1.702, inf)"),
        with("weights[0], panels", "weights[0 + r*2], panels"),
        with("weights[0], panels", "weights[0] panels"),
        with("weights[131072]", "weights[1099511627776]"),
        with("count 1024", "count 1024 § 2"),
        format!("{EXPERT}relayout weights[0], outbox[0], lines 1, to striped\n"),
        format!("{EXPERT}relayout weights[0] -> outbox[0], lines 1, to tiles\n"),
        format!("{EXPERT}region late rows 19..20 layout localized access read\n"),
    ];
    let messages: Vec<_> =
        texts.iter().map(|text| parse(text).map_or_else(|e| e.to_string(), |_| "a stream".into())).collect();
    insta::assert_snapshot!(messages.join("\n"));
}
