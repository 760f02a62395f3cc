//! Input channels whose weights are stored in INT8 beside a panel of nibbles, which holds zeros for them.
//!
//! Rows of bytes are multiplied by them as such, in f32; other rows are multiplied by the unpacked panel, to
//! which they are added last.

use super::panel::Panel;
use super::quantise::{ROW_GROUP, SCALE};
use crate::dsl::{F, I, Kb, P, Span};
use moec_ir::types::{Format, GROUP};

/// Adds them to an unpacked panel at `to`, f32 or pairs of bf16.
pub(super) fn unpack<'k>(k: &'k Kb<'k>, panel: &Panel<'k>, format: Format, to: P<'k>) {
    let (nr, lanes) = (k.isa.nr, k.lanes());
    panel.each_outlier(k, |channel, weights| {
        for (half, x) in weights.into_iter().enumerate() {
            if format == Format::Bf16 {
                let to = to.words(channel.div(k.i(2)) * nr + half * lanes);
                let lower = channel.rem(k.i(2)).lt(k.i(1));
                let own = lower.pick_int(x.pair_bf16(k.fv(0.0)), k.fv(0.0).pair_bf16(x));
                // Their half of the pair is 0.
                to.store_int(to.load_ints() | own);
            } else {
                let to = to.words(channel * nr + half * lanes);
                to.store(to.load_vec(Span::Full) + x);
            }
        }
    });
}

/// Adds to the sums of rows `first .. end` of bytes what they give, after the scales of columns.
pub(super) fn add<'k>(
    k: &'k Kb<'k>,
    panel: &Panel<'k>,
    [first, end]: [I<'k>; 2],
    row: &dyn Fn(I<'k>) -> P<'k>,
    sums: &dyn Fn(I<'k>) -> P<'k>,
) {
    panel.each_outlier(k, |channel, weights| {
        let group = channel.div(k.i(GROUP as i64)) * ROW_GROUP;
        let place = channel.rem(k.i(GROUP as i64));
        k.each(first, end, 1, |i| {
            let x = number(row(i).bytes(group), place).splat();
            for (half, weights) in weights.into_iter().enumerate() {
                let at = sums(i).words(half * k.lanes());
                at.store(weights.fma(x, at.load_vec(Span::Full)));
            }
        });
    });
}

/// A number of a group of bytes.
fn number<'k>(group: P<'k>, place: I<'k>) -> F<'k> {
    let code = group.bytes(place).load_byte().shl(24).shr(24);
    code.to_float() * group.bytes(SCALE).load()
}
