//! A `tokenizer.json` and, after a zero, a text: what is read encodes and decodes within its bounds, or says why not.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moec_runtime::Text;

fuzz_target!(|data: &[u8]| {
    let at = data.iter().position(|&byte| byte == 0).unwrap_or(data.len());
    let (json, text) = (&data[..at], data.get(at + 1..).unwrap_or_default());
    let Ok(tokenizer) = Text::parse(json, Some(1)) else { return };
    let _ = tokenizer.largest();
    let text = String::from_utf8_lossy(text);
    for ids in [tokenizer.encode(&text), tokenizer.encode_plain(&text)].into_iter().flatten() {
        let _ = tokenizer.decode(&ids);
        let mut stream = tokenizer.stream_with_special();
        for id in ids {
            let _ = stream.push(id);
        }
        let _ = stream.finish();
    }
});
