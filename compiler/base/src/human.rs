//! Numbers in a form for people.
#![expect(clippy::cast_possible_truncation, reason = "compared before")]

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

/// The smallest size in whole MiB that holds this many bytes, in the form that `model.toml` reads.
pub fn bytes_up(n: u64) -> String {
    format!("{} MiB", n.div_ceil(1 << 20))
}

/// Parses a size that [`bytes`] or a user wrote: a number with `KiB`, `MiB`, `GiB` or `TiB`, or a number of
/// bytes. `None` for any other text.
pub fn parse_bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let factor: u64 = match unit.trim() {
        "" | "B" | "bytes" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        "TiB" => 1 << 40,
        _ => return None,
    };
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(factor);
    }
    let bytes = number.parse::<f64>().ok()? * factor as f64;
    (factor > 1 && bytes < 2_f64.powi(63)).then_some(bytes as u64)
}

/// A count: `6.1 million`.
pub fn count(n: u64) -> String {
    match n {
        0..1_000_000 => n.to_string(),
        1_000_000..999_950_000 => format!("{:.1} million", n as f64 / 1e6),
        _ => format!("{:.1} billion", n as f64 / 1e9),
    }
}

/// A time in seconds, rounded up: `40 s`, `12 min` or `3.5 h`.
pub fn duration(seconds: f64) -> String {
    match seconds.max(0.0) {
        s if s <= 90.0 => format!("{} s", s.ceil()),
        s if s <= 5400.0 => format!("{} min", (s / 60.0).ceil()),
        s => format!("{:.1} h", (s / 360.0).ceil() / 10.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read() {
        for (text, expected) in [
            ("4.5 GiB", Some(4_831_838_208)),
            ("2400MiB", Some(2400 << 20)),
            (" 123 ", Some(123)),
            ("1 GB", None),
            ("1.5", None),
            ("", None),
            ("-1 MiB", None),
            ("99999999999 TiB", None),
        ] {
            assert_eq!(parse_bytes(text), expected, "{text}");
        }
        assert_eq!(parse_bytes(&bytes_up((5 << 20) + 1)), Some(6 << 20));
    }

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

    #[test]
    fn times_are_rounded_up() {
        let shown = [0.2, 90.0, 91.0, 5400.0, 5401.0, f64::NAN].map(duration);
        assert_eq!(shown, ["1 s", "90 s", "2 min", "90 min", "1.6 h", "0 s"]);
    }
}
