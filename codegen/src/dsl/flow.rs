//! Control flow of the kernel language: loops, branches, work items, columns.

use super::{F, I, Index, Kb, P, Span};
use inkwell::basic_block::BasicBlock;
use inkwell::values::{BasicValue, BasicValueEnum, PhiValue};

/// Value that a loop can carry from one iteration to the next.
pub(crate) trait Carry<'k>: Copy {
    /// The value.
    fn value(self) -> BasicValueEnum<'k>;
    /// The value with its type again.
    fn wrap(k: &'k Kb<'k>, v: BasicValueEnum<'k>) -> Self;
}

impl<'k> Carry<'k> for F<'k> {
    fn value(self) -> BasicValueEnum<'k> {
        self.v
    }
    fn wrap(k: &'k Kb<'k>, v: BasicValueEnum<'k>) -> Self {
        F { k, v }
    }
}

impl<'k> Carry<'k> for I<'k> {
    fn value(self) -> BasicValueEnum<'k> {
        self.v
    }
    fn wrap(k: &'k Kb<'k>, v: BasicValueEnum<'k>) -> Self {
        I { k, v }
    }
}

impl<'k> Kb<'k> {
    fn block(&'k self, name: &str) -> BasicBlock<'k> {
        self.ctx.append_basic_block(self.func, name)
    }

    fn jump(&self, to: BasicBlock<'k>) {
        self.done(self.b.build_unconditional_branch(to));
    }

    fn phi(&self, init: BasicValueEnum<'k>, from: Option<BasicBlock<'k>>) -> Option<PhiValue<'k>> {
        match self.b.build_phi(init.get_type(), "") {
            Ok(phi) => {
                if let Some(from) = from {
                    phi.add_incoming(&[(&init as &dyn BasicValue<'k>, from)]);
                }
                Some(phi)
            }
            Err(e) => {
                self.fail(e);
                None
            }
        }
    }

    /// `for i in (start .. end).step_by(step)` with values carried along; returns their last.
    pub(crate) fn fold<T: Carry<'k>>(
        &'k self,
        start: impl Index<'k>,
        end: impl Index<'k>,
        step: impl Index<'k>,
        init: &[T],
        body: impl FnOnce(I<'k>, &[T]) -> Vec<T>,
    ) -> Vec<T> {
        let (start, end, step) = (start.int(self), end.int(self), step.int(self));
        let next = |i: I<'k>, values: &[T]| {
            let values = body(i, values);
            (i + step, values)
        };
        self.fold_while(start, init, |i, _| i.lt(end), next).1
    }

    /// `while go(i, values) { (i, values) = body(i, values) }`, from `start` and `init` on; returns both.
    pub(crate) fn fold_while<T: Carry<'k>>(
        &'k self,
        start: I<'k>,
        init: &[T],
        go: impl FnOnce(I<'k>, &[T]) -> I<'k>,
        body: impl FnOnce(I<'k>, &[T]) -> (I<'k>, Vec<T>),
    ) -> (I<'k>, Vec<T>) {
        let (head, inside, after) = (self.block("loop"), self.block("body"), self.block("end"));
        let before = self.b.get_insert_block();
        self.jump(head);
        self.b.position_at_end(head);
        let index = self.phi(start.v, before);
        let phis: Vec<_> = init.iter().map(|x| self.phi(x.value(), before)).collect();
        let value = |phi: Option<PhiValue<'k>>, otherwise: BasicValueEnum<'k>| {
            phi.map_or(otherwise, PhiValue::as_basic_value)
        };
        let i = I { k: self, v: value(index, start.v) };
        let carried: Vec<T> =
            phis.iter().zip(init).map(|(&p, x)| T::wrap(self, value(p, x.value()))).collect();
        self.done(self.b.build_conditional_branch(go(i, &carried).scalar(), inside, after));
        self.b.position_at_end(inside);
        let (next_i, next) = body(i, &carried);
        if let Some(last) = self.b.get_insert_block() {
            if let Some(p) = index {
                p.add_incoming(&[(&next_i.v as &dyn BasicValue<'k>, last)]);
            }
            for (phi, x) in phis.iter().zip(&next) {
                if let Some(p) = phi {
                    p.add_incoming(&[(&x.value() as &dyn BasicValue<'k>, last)]);
                }
            }
        }
        if next.len() != init.len() {
            self.fail("a loop gives back another number of values than it takes");
        }
        self.jump(head);
        self.b.position_at_end(after);
        (i, carried)
    }

    /// `for i in (start .. end).step_by(step)`
    pub(crate) fn each(
        &'k self,
        start: impl Index<'k>,
        end: impl Index<'k>,
        step: impl Index<'k>,
        body: impl FnOnce(I<'k>),
    ) {
        self.fold::<I<'k>>(start, end, step, &[], |i, _| {
            body(i);
            Vec::new()
        });
    }

    /// Runs `then` if the condition holds.
    pub(crate) fn when(&'k self, condition: I<'k>, then: impl FnOnce()) {
        self.branch(condition, then, || {});
    }

    /// Runs one of the two.
    pub(crate) fn branch(&'k self, condition: I<'k>, then: impl FnOnce(), otherwise: impl FnOnce()) {
        let (yes, no, after) = (self.block("then"), self.block("else"), self.block("join"));
        self.done(self.b.build_conditional_branch(condition.scalar(), yes, no));
        self.b.position_at_end(yes);
        then();
        self.jump(after);
        self.b.position_at_end(no);
        otherwise();
        self.jump(after);
        self.b.position_at_end(after);
    }

    /// As [`Kb::tiles`], but with blocks of even sizes, at most `rows`; the third argument of `body` is 1 if
    /// the previous item of this call had the same tile.
    pub(crate) fn even_tiles_with_reuse(&'k self, rows: usize, body: impl FnOnce(I<'k>, [I<'k>; 2], I<'k>)) {
        let (n, begin, end) = (self.int_param(1), self.int_param(2), self.int_param(3));
        let blocks = (n + (rows - 1)).div(self.i(rows as i64));
        let start = |block: I<'k>| (block * n).div(blocks);
        self.fold(begin, end, 1, &[self.i(-1)], |item, before| {
            let (block, tile) = (item.rem(blocks), item.div(blocks));
            body(tile, [start(block), start(block + 1)], tile.equals(before[0]));
            vec![tile]
        });
    }

    /// As [`Kb::tiles`], a block of rows at a time: blocks have even sizes, at most `rows`, and begin at
    /// multiples of `row_multiple`. All tiles of the call's items are multiplied by one block before the next
    /// block starts.
    pub(crate) fn tiles_by_block(
        &'k self,
        rows: usize,
        row_multiple: usize,
        body: impl FnOnce(I<'k>, [I<'k>; 2]),
    ) {
        let (n, begin, end) = (self.int_param(1), self.int_param(2), self.int_param(3));
        let blocks = (n + (rows - 1)).div(self.i(rows as i64));
        let start = |block: I<'k>| (block * n).div(blocks).div(self.i(row_multiple as i64)) * row_multiple;
        self.each(0, blocks, 1, |block| {
            // The last block ends where the rows do, at no whole number of them.
            let stop = (block + 1).lt(blocks).pick_int(start(block + 1), n);
            // Items count blocks first: of this one those from `begin` on, and from `end` on.
            let from = |item: I<'k>| (item + blocks - self.i(1) - block).div(blocks);
            // A block of fewer rows than a whole one may have none.
            self.when(start(block).lt(stop), || {
                self.each(from(begin), from(end), 1, |tile| body(tile, [start(block), stop]));
            });
        });
    }

    /// The work items of a `Grid::Experts`, an expert at a time: `body(active expert, its first tile, the one
    /// after its last)`, of the items of this call.
    pub(crate) fn tiles_by_expert(&'k self, tiles: usize, body: impl FnOnce(I<'k>, [I<'k>; 2])) {
        let (begin, end) = (self.int_param(2), self.int_param(3));
        let count = self.i(tiles as i64);
        self.each(begin.div(count), (end + (tiles - 1)).div(count), 1, |active| {
            let tile = |item: I<'k>| (item - active * tiles).max(self.i(0)).min(count);
            body(active, [tile(begin), tile(end)]);
        });
    }

    /// Whether the item is one of this call.
    pub(crate) fn more_items(&'k self, item: I<'k>) -> I<'k> {
        item.lt(self.int_param(3))
    }

    /// `first .. end` cut into even parts of at most `rows`, but for the last in multiples of `row_multiple`:
    /// `body(first, end)`.
    pub(crate) fn even_parts(
        &'k self,
        [first, end]: [I<'k>; 2],
        rows: usize,
        row_multiple: usize,
        body: impl FnOnce([I<'k>; 2]),
    ) {
        let all = end - first;
        let parts = (all + (rows - 1)).div(self.i(rows as i64)).max(self.i(1));
        let each = ((all + parts - self.i(1)).div(parts) + (row_multiple - 1))
            .div(self.i(row_multiple as i64))
            * row_multiple;
        self.each(first, end, each, |from| body([from, (from + each).min(end)]));
    }

    /// The work items of a `Grid::Tiles`: `body(tile, first row, end row)`.
    pub(crate) fn tiles(&'k self, rows: usize, body: impl FnOnce(I<'k>, I<'k>, I<'k>)) {
        let (n, begin, end) = (self.int_param(1), self.int_param(2), self.int_param(3));
        let blocks = (n + (rows - 1)).div(self.i(rows as i64));
        self.each(begin, end, 1, |item| {
            let (block, tile) = (item.rem(blocks), item.div(blocks));
            let first = block * rows;
            body(tile, first, (first + rows).min(n));
        });
    }

    /// As [`Self::tiles`], for blocks whose time grows with their index. Light and heavy blocks alternate, so
    /// that every range of work items takes about its share of the time.
    pub(crate) fn mixed_tiles(&'k self, rows: usize, body: impl FnOnce(I<'k>, I<'k>, I<'k>)) {
        let n = self.int_param(1);
        self.tiles(rows, |tile, first, _| {
            let (block, last) = (first.div(self.i(rows as i64)), (n - 1).div(self.i(rows as i64)));
            let half = block.div(self.i(2));
            let block = block.equals(half * 2).pick_int(half, last - half);
            let first = block * rows;
            body(tile, first, (first + rows).min(n));
        });
    }

    /// The rows of work items with one tile.
    pub(crate) fn rows(&'k self, rows: usize, body: impl FnOnce(I<'k>)) {
        self.tiles(rows, |_, first, end| self.each(first, end, 1, body));
    }

    /// The work items of a `Grid::Experts`: `body(active expert, tile)`.
    pub(crate) fn expert_tiles(&'k self, tiles: usize, body: impl FnOnce(I<'k>, I<'k>)) {
        let (begin, end) = (self.int_param(2), self.int_param(3));
        let tiles = self.i(tiles as i64);
        self.each(begin, end, 1, |item| body(item.div(tiles), item.rem(tiles)));
    }

    /// `count` columns by vectors: `body(first column, lanes that are there)`. Written once for the whole
    /// vectors and once for the rest.
    pub(crate) fn columns(&'k self, count: usize, mut body: impl FnMut(I<'k>, Span<'k>)) {
        let whole = count / self.lanes() * self.lanes();
        match whole / self.lanes() {
            0 => {}
            1 => body(self.i(0), Span::Full),
            _ => self.each(0, whole, self.lanes(), |c| body(c, Span::Full)),
        }
        if count > whole {
            body(self.i(whole as i64), self.span(count - whole));
        }
    }

    /// Folds `count` columns by vectors: `body(values, first column, lanes that are there)`. `unroll`
    /// sets of values take turns, which hides the latency of the operation; they are joined at the end.
    pub(crate) fn fold_columns(
        &'k self,
        count: usize,
        unroll: usize,
        init: F<'k>,
        mut body: impl FnMut(F<'k>, I<'k>, Span<'k>) -> F<'k>,
        join: impl Fn(F<'k>, F<'k>) -> F<'k>,
    ) -> F<'k> {
        let lanes = self.lanes();
        let unroll = unroll.min(count / lanes).max(1);
        let stride = unroll * lanes;
        let whole = count / stride * stride;
        let mut values = vec![init; unroll];
        if whole > 0 {
            values = self.fold(0, whole, stride, &values, |c, values| {
                values.iter().enumerate().map(|(u, &x)| body(x, c + u * lanes, Span::Full)).collect()
            });
        }
        for (u, c) in (whole..count).step_by(lanes).enumerate() {
            values[u % unroll] = body(values[u % unroll], self.i(c as i64), self.span(count - c));
        }
        let mut values = values.into_iter();
        let first = values.next().unwrap_or(init);
        values.fold(first, join)
    }

    /// Copies `count` words.
    pub(crate) fn copy(&'k self, from: P<'k>, to: P<'k>, count: usize) {
        self.columns(count, |c, span| to.words(c).store_vec(from.words(c).load_vec(span), span));
    }

    /// Zeroes `count` words.
    pub(crate) fn zero(&'k self, to: P<'k>, count: usize) {
        self.columns(count, |c, span| to.words(c).store_vec(self.fv(0.0), span));
    }
}
