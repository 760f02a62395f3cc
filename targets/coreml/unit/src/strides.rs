//! Layout of tensors of four axes in memory.
//!
//! The runtime's are dense, the last axis inner. Core ML pads rows if a unit requires alignment: the Neural
//! Engine's are multiples of 64 bytes, so a last axis of one f16 takes 32 times its size.

use half::f16;

/// Strides of a dense tensor, in elements; none if its size overflows.
pub(crate) fn dense(shape: [u32; 4]) -> Option<[usize; 4]> {
    let mut strides = [1_usize; 4];
    for axis in (0..3).rev() {
        strides[axis] = strides[axis + 1].checked_mul(shape[axis + 1] as usize)?;
    }
    strides[0].checked_mul(shape[0] as usize)?;
    Some(strides)
}

/// Copies a tensor with any strides, in elements, into a dense one.
///
/// # Errors
/// Strides that are negative, or that lead outside of `from`; a `to` of another size. Nothing is written
/// then.
pub(crate) fn gather(from: &[f16], shape: [u32; 4], strides: &[isize], to: &mut [f16]) -> Result<(), String> {
    let refused = |what: &str| {
        Err(format!("a tensor {shape:?} with strides {strides:?} in {} elements {what}", from.len()))
    };
    let signed = <[isize; 4]>::try_from(strides).ok();
    let Some(strides) = signed.map(|s| s.map(usize::try_from)) else {
        return refused("does not have four strides");
    };
    let [Ok(s0), Ok(s1), Ok(s2), Ok(s3)] = strides else { return refused("has a negative stride") };
    let shape = shape.map(|n| n as usize);
    if dense(shape.map(|n| n as u32)).is_none() || shape.iter().product::<usize>() != to.len() {
        return refused(&format!("does not fill {}", to.len()));
    }
    if to.is_empty() {
        return Ok(());
    }
    let last = [s0, s1, s2, s3]
        .iter()
        .zip(shape)
        .try_fold(0_usize, |at, (s, n)| at.checked_add(s.checked_mul(n - 1)?));
    if last.is_none_or(|last| last >= from.len()) {
        return refused("leaves them");
    }
    let [n0, n1, n2, n3] = shape;
    let mut out = to.chunks_exact_mut(n3);
    for i in 0..n0 {
        for j in 0..n1 {
            for k in 0..n2 {
                let start = i * s0 + j * s1 + k * s2;
                let Some(row) = out.next() else { return Ok(()) };
                if s3 == 1 {
                    row.copy_from_slice(&from[start..start + n3]);
                } else {
                    row.iter_mut().enumerate().for_each(|(l, x)| *x = from[start + l * s3]);
                }
            }
        }
    }
    Ok(())
}

/// The first number that f16 cannot hold: an infinity, or NaN.
pub(crate) fn overflow(numbers: &[f16]) -> Option<usize> {
    numbers.iter().position(|x| !x.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn numbers(n: usize) -> Vec<f16> {
        // Unique bit patterns, so that no two elements can be confused.
        (0..n).map(|i| f16::from_bits(i as u16)).collect()
    }

    #[test]
    fn dense_strides_are_products_of_the_inner_axes() {
        assert_eq!(dense([2, 3, 4, 5]), Some([60, 20, 5, 1]));
        assert_eq!(dense([7, 64, 1, 1]), Some([64, 1, 1, 1]));
        assert_eq!(dense([0, 3, 1, 1]), Some([3, 1, 1, 1]));
        assert_eq!(dense([u32::MAX; 4]), None);
    }

    #[test]
    fn padded_rows_are_gathered_densely() {
        // A last axis of one, padded to 32 elements, as on the Neural Engine.
        let from = numbers(3 * 2 * 32);
        let mut to = vec![f16::ZERO; 6];
        gather(&from, [3, 2, 1, 1], &[64, 32, 32, 1], &mut to).unwrap();
        assert_eq!(to.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), [0, 32, 64, 96, 128, 160]);
    }

    #[test]
    fn out_of_bounds_strides_are_rejected() {
        let from = numbers(32);
        let mut to = vec![f16::ONE; 8];
        let mut refused = |shape, strides: &[isize], words| {
            let error = gather(&from, shape, strides, &mut to).unwrap_err();
            assert!(error.contains(words), "{error}");
            assert!(to.iter().all(|x| *x == f16::ONE));
        };
        refused([2, 4, 1, 1], &[29, 1, 1, 1], "leaves them");
        refused([2, 4, 1, 1], &[isize::MAX, 1, 1, 1], "leaves them");
        refused([2, 4, 1, 1], &[-4, 1, 1, 1], "negative");
        refused([2, 4, 1, 1], &[4, 1], "four strides");
        refused([2, 5, 1, 1], &[5, 1, 1, 1], "does not fill 8");
        refused([u32::MAX; 4], &[1, 1, 1, 1], "does not fill 8");
        assert_eq!(gather(&[], [0, 4, 1, 1], &[4, 1, 1, 1], &mut []), Ok(()));
    }

    proptest! {
        #[test]
        fn every_element_is_gathered_from_its_offset(
            shape in prop::array::uniform4(1_u32..5),
            padding in prop::array::uniform4(0_usize..3),
        ) {
            // Strides from the innermost axis outwards, each with some padding.
            let mut strides = [0_isize; 4];
            let mut step = 1 + padding[3];
            for axis in (0..4).rev() {
                strides[axis] = step as isize;
                step = step * shape[axis] as usize + padding[axis];
            }
            let from = numbers(step);
            let mut to = vec![f16::ZERO; shape.iter().product::<u32>() as usize];
            gather(&from, shape, &strides, &mut to).unwrap();
            let places = dense(shape).unwrap();
            for (at, x) in to.iter().enumerate() {
                let index = std::array::from_fn::<_, 4, _>(|a| at / places[a] % shape[a] as usize);
                let place: usize = index.iter().zip(strides).map(|(i, s)| i * s as usize).sum();
                prop_assert_eq!(x.to_bits() as usize, place);
            }
        }
    }

    #[test]
    fn overflow_reports_the_first_non_finite_value() {
        let mut all = vec![f16::MAX, f16::MIN, f16::MIN_POSITIVE_SUBNORMAL, f16::ZERO];
        assert_eq!(overflow(&all), None);
        all.extend([f16::NEG_INFINITY, f16::NAN]);
        assert_eq!(overflow(&all), Some(4));
        assert_eq!(overflow(&[f16::NAN]), Some(0));
    }
}
