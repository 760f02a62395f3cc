//! Numbers as people read them.

/// A size: `12.3 MiB`.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if n < 1024 {
        return format!("{n} bytes");
    }
    let mut value = n as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// A count: `6.1 million`.
pub fn count(n: u64) -> String {
    match n {
        0..1_000_000 => n.to_string(),
        1_000_000..999_950_000 => format!("{:.1} million", n as f64 / 1e6),
        _ => format!("{:.1} billion", n as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_counts() {
        for (n, expected) in [
            (0, "0 bytes"),
            (1023, "1023 bytes"),
            (1024, "1.0 KiB"),
            (1_048_575, "1.0 MiB"),
            (12_267_792, "11.7 MiB"),
            (61 << 30, "61.0 GiB"),
            (u64::MAX, "16384.0 PiB"),
        ] {
            assert_eq!(bytes(n), expected);
        }
        for (n, expected) in [(7, "7"), (6_133_000, "6.1 million"), (999_999_999, "1.0 billion")] {
            assert_eq!(count(n), expected);
        }
    }
}
