//! Tests of files of this version and of earlier ones.

use super::*;

/// A file of a version without losses is read unchanged.
#[test]
fn a_profile_of_version_seven_is_read() {
    let p = example();
    let start = (&p.origin, &p.reading, &p.layers, &p.trace, &p.saliency, &p.weights, &p.routes);
    let old = (start, &p.correlations, &p.neurons, &p.samples, &p.gates, &p.confidence);
    let stored = bincode::encode_to_vec(old, bincode::config::standard()).unwrap();
    let read = Profile::decode(&wrapped(7, stored.len() as u64, &stored)).unwrap();
    assert_eq!(read.merge(&p).unwrap().losses, p.losses);
    assert_eq!(read, Profile { losses: Vec::new(), ..p });
}

/// A file of a version without confidences is read unchanged.
#[test]
fn a_profile_of_version_six_is_read() {
    let p = example();
    let start = (&p.origin, &p.reading, &p.layers, &p.trace, &p.saliency, &p.weights, &p.routes);
    let old = (start, &p.correlations, &p.neurons, &p.samples, &p.gates);
    let stored = bincode::encode_to_vec(old, bincode::config::standard()).unwrap();
    let read = Profile::decode(&wrapped(6, stored.len() as u64, &stored)).unwrap();
    assert_eq!(read.merge(&p).unwrap().confidence, p.confidence);
    assert_eq!(read, Profile { confidence: None, losses: Vec::new(), ..p });
}

/// A file of a version without gates is read unchanged.
#[test]
fn a_profile_of_version_five_is_read() {
    let p = example();
    let start = (&p.origin, &p.reading, &p.layers, &p.trace, &p.saliency, &p.weights, &p.routes);
    let old = (start, &p.correlations, &p.neurons, &p.samples);
    let stored = bincode::encode_to_vec(old, bincode::config::standard()).unwrap();
    let read = Profile::decode(&wrapped(5, stored.len() as u64, &stored)).unwrap();
    assert_eq!(read.merge(&p).unwrap().gates, p.gates);
    assert_eq!(read, Profile { gates: Vec::new(), confidence: None, losses: Vec::new(), ..p });
}

/// A file of a version without rows is read unchanged; merged with a new one it has no rows either.
#[test]
fn a_profile_of_version_four_is_read() {
    let p = example();
    let start = (&p.origin, &p.reading, &p.layers, &p.trace, &p.saliency, &p.weights, &p.routes);
    let old = (start, &p.correlations, &p.neurons);
    let stored = bincode::encode_to_vec(old, bincode::config::standard()).unwrap();
    let read = Profile::decode(&wrapped(4, stored.len() as u64, &stored)).unwrap();
    assert!(read.merge(&p).unwrap().samples.is_empty());
    assert_eq!(
        read,
        Profile { samples: Vec::new(), gates: Vec::new(), confidence: None, losses: Vec::new(), ..p }
    );
}

/// A file of a version without neurons is read unchanged.
#[test]
fn a_profile_of_version_three_is_read() {
    let p = example();
    let old =
        (&p.origin, &p.reading, &p.layers, &p.trace, &p.saliency, &p.weights, &p.routes, &p.correlations);
    let stored = bincode::encode_to_vec(old, bincode::config::standard()).unwrap();
    let read = Profile::decode(&wrapped(3, stored.len() as u64, &stored)).unwrap();
    assert_eq!(
        read,
        Profile {
            neurons: Vec::new(),
            samples: Vec::new(),
            gates: Vec::new(),
            confidence: None,
            losses: Vec::new(),
            ..p
        }
    );
}

/// A file of a version without correlations is read unchanged.
#[test]
fn a_profile_of_version_two_is_read() {
    let new = example();
    let old = (&new.origin, &new.reading, &new.layers, &new.trace, &new.saliency, &new.weights, &new.routes);
    let stored = bincode::encode_to_vec(old, bincode::config::standard()).unwrap();
    let mut bytes = file::MAGIC.to_vec();
    bytes.extend(2_u32.to_le_bytes());
    bytes.extend((stored.len() as u64).to_le_bytes());
    bytes.extend(moec_base::hashing::sha256(&stored));
    bytes.extend(miniz_oxide::deflate::compress_to_vec(&stored, 6));
    let read = Profile::decode(&bytes).unwrap();
    let none = Profile {
        correlations: Vec::new(),
        neurons: Vec::new(),
        samples: Vec::new(),
        gates: Vec::new(),
        confidence: None,
        losses: Vec::new(),
        ..new.clone()
    };
    assert_eq!(read, none);
    // Merged with a new one, it has no correlations either.
    assert!(read.merge(&new).unwrap().correlations.is_empty());
    bytes[8] = 1;
    assert!(Profile::decode(&bytes).unwrap_err().to_string().contains("version 1"));
}

/// Compares the seeds of fuzzing, a file and its stored form, with this version. `MOEC_RENEW_SEEDS=1` writes
/// both.
#[test]
fn profile_fuzz_seeds_are_current() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/profile");
    let stored = bincode::encode_to_vec(example(), bincode::config::standard()).unwrap();
    for (name, bytes) in [("file", example().encode().unwrap()), ("stored", stored)] {
        let path = folder.join(name);
        if std::env::var_os("MOEC_RENEW_SEEDS").is_some() {
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(&path, &bytes).unwrap();
        }
        let seed = std::fs::read(&path).unwrap();
        assert!(seed == bytes, "`{}` is of another version; MOEC_RENEW_SEEDS=1 renews it", path.display());
    }
}
