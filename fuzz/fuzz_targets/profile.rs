//! A stored profile: whatever decodes is stored as itself, merges with itself, and can be looked at.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moec_base::hashing::sha256;
use moec_profile::importance::too_few;
use moec_profile::loads::loads;
use moec_profile::overlap::overlap;
use moec_profile::{Profile, file};

/// A file whose header fits what is in it, so that mutations reach after the checksum. The input is the
/// stored form as it is before it is deflated; stored blocks need no compressor.
fn wrapped(stored: &[u8]) -> Vec<u8> {
    let mut bytes = file::MAGIC.to_vec();
    bytes.extend(file::VERSION.to_le_bytes());
    bytes.extend((stored.len() as u64).to_le_bytes());
    bytes.extend(sha256(stored));
    let blocks = stored.chunks(0xffff).count().max(1);
    for i in 0..blocks {
        let block = stored.chunks(0xffff).nth(i).unwrap_or_default();
        bytes.push(u8::from(i + 1 == blocks));
        bytes.extend((block.len() as u16).to_le_bytes());
        bytes.extend((!(block.len() as u16)).to_le_bytes());
        bytes.extend(block);
    }
    bytes
}

fuzz_target!(|bytes: &[u8]| {
    for file in [bytes.to_vec(), wrapped(bytes)] {
        let Ok(profile) = Profile::decode(&file) else { continue };
        let again = profile.encode().expect("what was read can be written");
        assert!(Profile::decode(&again).is_ok_and(|p| p == profile), "stored form");
        // Only counts past what a profile may hold keep it from merging with itself.
        let _ = profile.merge(&profile);
        let _ = (too_few(&profile), profile.reading.perplexity());
        let _ = overlap(&profile, &profile, 4);
        for layer in loads(&profile, 64).iter().flat_map(|l| &l.layers) {
            let _ = (layer.quantile(0, 0.9), layer.imbalance(), layer.account(&|_| Some(16), &|e| e));
        }
        for saliency in &profile.saliency {
            let _ = (saliency.mean(), saliency.quantile(0.5));
        }
        assert!(profile.routes.is_empty() || profile.routes.trace(&profile.layers).is_ok());
        for layer in &profile.layers {
            let _ = layer.closest(3);
            let _ = (layer.used(), layer.imbalance(), layer.least_used(), layer.mean_weight(0));
        }
        for counts in &profile.neurons {
            for batch in 1..=counts.batches() {
                let seen = counts.frequencies(0, batch);
                assert!(seen.len() <= counts.experts() * counts.width as usize && seen.iter().all(|f| (0.0..=1.0).contains(f)));
                assert!(counts.zeros(0, batch).is_none_or(|z| (0.0..=1.0).contains(&z)));
                let _ = (counts.active(0, 0, batch), counts.hottest(0, batch));
            }
            assert!(profile.neurons(counts.layer).is_some());
        }
        for moments in profile.weights.values() {
            assert_eq!(moments.mean().len(), moments.cols);
            assert_eq!(moments.of(0).len(), moments.cols);
        }
    }
});
