//! Operators of ML programs, as Core ML names them.

/// Name of an operator without its opset: `conv` for `ios18.conv`. `None` for constants and for operators
/// that decompress them: they compute nothing when a function runs.
pub(crate) fn computed(name: &str) -> Option<&str> {
    let operator = name.rsplit('.').next().unwrap_or(name);
    (operator != "const" && !operator.starts_with("constexpr_")).then_some(operator)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_are_left_out_and_opsets_are_removed() {
        for (name, operator) in [
            ("ios18.conv", Some("conv")),
            ("conv", Some("conv")),
            ("ios16.softmax", Some("softmax")),
            ("read_state", Some("read_state")),
            ("const", None),
            ("ios18.const", None),
            ("ios18.constexpr_blockwise_shift_scale", None),
            ("constexpr_lut_to_dense", None),
        ] {
            assert_eq!(computed(name), operator, "{name}");
        }
    }
}
