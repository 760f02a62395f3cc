//! The two phones of Table 3, with the source of every constant.

use super::phone::{Cluster, Cores, Memory, Phone, Power, Ufs};
use moec_sim::neurons::{NeuronError, RatesByBlock};

const KIB: u64 = 1024;
/// Weights of Mistral-7B without its table of embeddings: the "7B INT4 model" of §2.3.1.
const SEVEN_B: f64 = 7.11e9;

/// Rates of §2.3.2: sequential, and random within 128 MB; none above `most`.
///
/// 4 KB random reads: Table 1's of a mid core, the others follow it. §4.4 measured two reads of 4 KB to be
/// better than one of 8: 8 KB are assumed to be read at the same rate. Between the sizes that are printed the
/// rates follow a power.
fn ufs(most: f64) -> Result<Ufs, NeuronError> {
    // A table follows a power between its rows, and the limit may cut it there: so it has rows of its own.
    let table = |rows: &[(u64, f64)]| {
        let free = RatesByBlock::new(rows.iter().map(|&(kib, rate)| (kib * KIB, rate)).collect())?;
        let sizes = (2..=9).map(|log| (1 << log) * KIB);
        RatesByBlock::new(sizes.map(|bytes| (bytes, free.rate(bytes).min(most))).collect())
    };
    Ok(Ufs {
        sequential: table(&[(4, 450e6), (512, 4e9)])?,
        random: table(&[(4, 1007.95e6), (8, 1007.95e6), (512, 3.5e9)])?,
        ranges: [(128e6, 1.0), (512e6, 0.85)],
        cores: [1076.10 / 1007.95, 761.87 / 1007.95],
        contended: 0.6,
    })
}

/// OnePlus 12: Snapdragon 8 Gen 3, UFS 4.0. All of it is printed: memory in §2.3.1, UFS in §2.3.2 and Table
/// 1, the rates of the NPU and the GPU from their prefill of a 7B model (§2.3.1), that of the cores from
/// "32×" of §7.3 (the 8 tokens/s of §2.3.1 are less than what the same cores decode), power in Table 8.
///
/// # Errors
/// Our bug: an invalid table of rates.
pub fn oneplus_12() -> Result<Phone, NeuronError> {
    Ok(Phone {
        name: "OnePlus 12",
        cores: vec![
            Cores { kind: Cluster::Big, count: 1, ghz: 3.3 },
            Cores { kind: Cluster::Mid, count: 5, ghz: 3.0 },
            Cores { kind: Cluster::Little, count: 2, ghz: 2.2 },
        ],
        memory: Memory { cpu: 43.9e9, npu: 56.0e9, both: 59.6e9 },
        ufs: ufs(f64::INFINITY)?,
        cpu_macs: 770.0 / 32.0 * SEVEN_B,
        npu_macs: 770.0 * SEVEN_B,
        gpu_macs: 37.0 * SEVEN_B,
        gpu_busy: 0.5,
        available: 19e9,
        power: Power { cpu: 4.065, npu: 5.133, both: 5.095 },
    })
}

/// OnePlus Ace 2: Snapdragon 8+ Gen 1, UFS 3.1. The paper prints only its memory; the rest is the OnePlus
/// 12's, scaled: memory by the rates of LPDDR5-6400 and LPDDR5X-9600, the cores by count and clock (1 × 3.2
/// and 3 × 2.75 GHz), the NPU, without a better source, by memory. UFS does what that of the OnePlus 12 does
/// up to the 2.1 GB/s that makers state for UFS 3.1: small reads wait for cells and cores, not for the link.
///
/// # Errors
/// As [`oneplus_12`].
pub fn oneplus_ace_2() -> Result<Phone, NeuronError> {
    let first = oneplus_12()?;
    let memory = 6400.0 / 9600.0;
    let cores = (3.2 + 3.0 * 2.75) / (3.3 + 5.0 * 3.0);
    Ok(Phone {
        name: "OnePlus Ace 2",
        cores: vec![
            Cores { kind: Cluster::Big, count: 1, ghz: 3.2 },
            Cores { kind: Cluster::Mid, count: 3, ghz: 2.75 },
            Cores { kind: Cluster::Little, count: 4, ghz: 2.0 },
        ],
        memory: first.memory.scaled(memory),
        ufs: ufs(2.1e9)?,
        cpu_macs: first.cpu_macs * cores,
        npu_macs: first.npu_macs * memory,
        gpu_macs: first.gpu_macs * memory,
        available: 11e9,
        ..first
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phone_model_reproduces_the_paper_tables() {
        let ufs = oneplus_12().expect("a phone").ufs;
        let rate = |range: f64, core| 4096.0 / ufs.random_seconds(4096, range, core) * 1e-6;
        // Table 1, and section 2.3.2.
        for (core, want) in [(Cluster::Big, 1076.1), (Cluster::Mid, 1007.95), (Cluster::Little, 761.87)] {
            assert!((rate(128e6, core) / want - 1.0).abs() < 1e-9, "{core:?}");
        }
        assert!(rate(512e6, Cluster::Mid) < 860.0 && rate(1e6, Cluster::Mid) > 1000.0);
        assert!(rate(256e6, Cluster::Mid) > rate(512e6, Cluster::Mid));
        let sequential = |block| 1e9 / ufs.sequential_seconds(1e9, block);
        assert!((sequential(4096) - 450e6).abs() < 1.0 && (sequential(512 << 10) - 4e9).abs() < 1.0);
    }

    #[test]
    fn the_smaller_phone_is_no_faster() {
        let [first, second] = [oneplus_12(), oneplus_ace_2()].map(|p| p.expect("a phone"));
        for kib in [4, 8, 64, 512] {
            let rate = |p: &Phone| (p.ufs.random.rate(kib * KIB), p.ufs.sequential.rate(kib * KIB));
            let (a, b) = (rate(&first), rate(&second));
            assert!(b.0 <= a.0 && b.1 <= a.1 && b.1 <= 2.1e9, "{kib} KiB");
        }
        assert!(second.memory.both < first.memory.both && second.available < first.available);
        // One big and five mid cores compute. The core that reads does not, and a little core does not slow
        // them down.
        let parts = |p: &Phone, core| p.workers(core).iter().sum::<f64>();
        assert!((parts(&first, None) - 1.0).abs() < 1e-9 && first.workers(None).len() == 6);
        assert!(parts(&first, Some(Cluster::Big)) < parts(&first, Some(Cluster::Mid)));
        assert_eq!(first.workers(Some(Cluster::Little)), first.workers(None));
    }
}
