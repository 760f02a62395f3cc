//! Values of a warp: one of each of its 32 threads, and functions over them.

/// Threads of a warp.
pub(crate) const WARP: usize = 32;

/// A register of a warp. A value narrower than 64 bits has zeros above; a predicate is 0 or 1.
pub(crate) type Lanes = [u64; WARP];

/// Results from operands, all lanes at once.
pub(crate) type Map = Box<dyn Fn(&[&Lanes], &mut [Lanes]) + Send + Sync>;

/// A function of one operand, in every lane.
pub(crate) fn lift1(f: impl Fn(u64) -> u64 + Send + Sync + 'static) -> Map {
    Box::new(move |ins, outs| {
        let (a, out) = (ins[0], &mut outs[0]);
        for i in 0..WARP {
            out[i] = f(a[i]);
        }
    })
}

/// A function of two operands, in every lane.
pub(crate) fn lift2(f: impl Fn(u64, u64) -> u64 + Send + Sync + 'static) -> Map {
    Box::new(move |ins, outs| {
        let (a, b, out) = (ins[0], ins[1], &mut outs[0]);
        for i in 0..WARP {
            out[i] = f(a[i], b[i]);
        }
    })
}

/// A function of three operands, in every lane.
pub(crate) fn lift3(f: impl Fn(u64, u64, u64) -> u64 + Send + Sync + 'static) -> Map {
    Box::new(move |ins, outs| {
        let (a, b, c, out) = (ins[0], ins[1], ins[2], &mut outs[0]);
        for i in 0..WARP {
            out[i] = f(a[i], b[i], c[i]);
        }
    })
}

/// A function of any operands, lane by lane.
pub(crate) fn lift(f: impl Fn(&[u64], &mut [u64]) + Send + Sync + 'static) -> Map {
    Box::new(move |ins, outs| {
        let (mut from, mut to) = ([0; 8], [0; 8]);
        for i in 0..WARP {
            for (place, lanes) in from.iter_mut().zip(ins) {
                *place = lanes[i];
            }
            f(&from[..ins.len().min(8)], &mut to[..outs.len().min(8)]);
            for (lanes, value) in outs.iter_mut().zip(to) {
                lanes[i] = value;
            }
        }
    })
}

/// The bits of a value with this many.
pub(crate) fn mask(bits: u32) -> u64 {
    if bits >= 64 { u64::MAX } else { (1 << bits) - 1 }
}

/// A value with this many bits, its sign extended.
pub(crate) fn signed(value: u64, bits: u32) -> i64 {
    let unused = 64 - bits.clamp(1, 64);
    ((value << unused) as i64) >> unused
}
