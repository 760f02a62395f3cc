//! Contents of a valid file.

use super::builder::*;
use moec_gguf::{Header, Kind, Value};

#[test]
fn every_type_of_value() {
    let file = Builder::default()
        .key("u8", U8, &[200])
        .key("i8", I8, &[200])
        .key("u16", 2, &[1, 2])
        .key("i16", 3, &[0xff, 0xff])
        .key("u32", U32, &7_u32.to_le_bytes())
        .key("i32", 5, &(-7_i32).to_le_bytes())
        .key("f32", F32, &1.5_f32.to_le_bytes())
        .key("yes", BOOL, &[1])
        .key("no", BOOL, &[0])
        .key("text", TEXT, &text("grüße"))
        .key("u64", U64, &u64::MAX.to_le_bytes())
        .key("i64", 11, &i64::MIN.to_le_bytes())
        .key("f64", 12, &(-0.25_f64).to_le_bytes())
        .build();
    let header = Header::read(&file).unwrap();
    assert_eq!((header.version(), header.alignment()), (3, 32));
    let want = [
        ("u8", Value::Unsigned(200)),
        ("i8", Value::Signed(-56)),
        ("u16", Value::Unsigned(513)),
        ("i16", Value::Signed(-1)),
        ("u32", Value::Unsigned(7)),
        ("i32", Value::Signed(-7)),
        ("f32", Value::Float(1.5)),
        ("yes", Value::Bool(true)),
        ("no", Value::Bool(false)),
        ("text", Value::Text("grüße")),
        ("u64", Value::Unsigned(u64::MAX)),
        ("i64", Value::Signed(i64::MIN)),
        ("f64", Value::Float(-0.25)),
    ];
    for (key, value) in &want {
        assert_eq!(header.get(key), Some(value), "{key}");
    }
    assert!(header.keys().map(|(k, _)| k).eq(want.iter().map(|(k, _)| *k)));
    assert_eq!(header.get("other"), None);
    assert_eq!(header.get("i8").unwrap().as_u64(), None);
    assert_eq!(header.get("u8").unwrap().as_f64(), Some(200.0));
    assert_eq!(header.get("no").unwrap().as_bool(), Some(false));
}

#[test]
fn arrays_and_arrays_of_arrays() {
    let texts = [array(TEXT, 2), text("a"), text("")].concat();
    let numbers = [array(F32, 2), 1_f32.to_le_bytes().to_vec(), 2_f32.to_le_bytes().to_vec()].concat();
    let nested = [array(ARRAY, 2), texts.clone(), numbers.clone()].concat();
    let file = Builder::default()
        .key("texts", ARRAY, &texts)
        .key("nested", ARRAY, &nested)
        .key("empty", ARRAY, &array(U64, 0))
        .key("behind", U8, &[9])
        .build();
    let header = Header::read(&file).unwrap();
    let get = |key| header.get(key).unwrap().as_array().unwrap();
    assert_eq!(get("texts").texts().unwrap().collect::<Vec<_>>(), ["a", ""]);
    let parts: Vec<_> = get("nested").iter().collect();
    assert_eq!(parts[0].as_array(), Some(get("texts")));
    let numbers: Vec<_> = parts[1].as_array().unwrap().iter().collect();
    assert_eq!(numbers, [Value::Float(1.0), Value::Float(2.0)]);
    assert!(get("empty").is_empty() && get("empty").kind() == Kind::Unsigned(8));
    assert_eq!((get("nested").len(), get("nested").texts().is_none()), (2, true));
    assert_eq!(header.get("behind"), Some(&Value::Unsigned(9)));
}

#[test]
fn tensors_in_the_order_of_their_data() {
    let mut builder = Builder::default()
        .key("general.alignment", U32, &64_u32.to_le_bytes())
        .entry("second", &[64, 3], 8, 64)
        .entry("first", &[5], 0, 0);
    builder.alignment = 64;
    builder.data = vec![1; 64 + 2 * 3 * 34];
    let file = builder.build();
    let header = Header::read(&file).unwrap();
    let [first, second] = header.tensors() else { panic!("two tensors") };
    assert_eq!((first.name, first.kind.name, &first.shape[..]), ("first", "F32", &[5][..]));
    assert_eq!((second.name, second.kind.name, &second.shape[..]), ("second", "Q8_0", &[3, 64][..]));
    assert_eq!(second.bytes.len(), 2 * 3 * 34);
    assert_eq!(second.bytes.end, file.len());
    assert_eq!(first.bytes.start % 64, 0);
    assert!(file[first.bytes.clone()].iter().all(|b| *b == 1));
}

#[test]
fn version_2_is_read_and_trailing_bytes_are_ignored() {
    let mut builder = Builder::default().tensor("a", &[4], 0, &[7; 16]);
    builder.version = 2;
    builder.data.extend([0; 100]);
    let file = builder.build();
    let header = Header::read(&file).unwrap();
    assert_eq!((header.version(), header.tensors().len()), (2, 1));
}
