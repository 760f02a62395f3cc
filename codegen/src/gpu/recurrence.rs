//! The gated delta rule, state spaces and selective scans, row by row. A block has some columns of a state,
//! of one head, and goes through the rows of a sequence in order. The state is in registers meanwhile: some
//! lanes of a warp, a team, share a column, each with its own rows of it. Keys and queries, which all columns
//! need, come through shared memory; those of the next row are on their way while one is computed.
//!
//! Every call reads and writes a state once. In decoding that is all: 32 heads of 128 × 128 numbers are 2 MiB
//! in each direction, 1.3 µs at 3.35 TB/s. A row of a prompt takes a lane four operations for each number that
//! it holds, of which there are [`HELD`] at most, then a barrier and two sums over a team that wait for each
//! other. Rows wait for each other, too: a prompt's time is the latency of a row times their number. There is
//! no chunked form, which would multiply matrices.

use super::GpuKernel;
use super::launch::{Extent, Launch};
use super::sequences::{self, Rows};
use crate::dsl::{F, I, Kb, P, WARP};
use crate::spec::{DeltaRule, SelectiveScan};

/// Most numbers of a column that a lane holds.
const HELD: usize = 32;
/// The same of a selective scan, which also holds as many rates.
const HELD_BY_SCAN: usize = 16;
/// Most warps of a block: with 128 × 128 numbers a head gives four blocks.
const WARPS: usize = 4;
/// Sums that take turns, to hide the latency of additions.
const SUMS: usize = 4;

/// Division of the columns of a state.
#[derive(Clone, Copy)]
struct Columns {
    rows: usize,
    count: usize,
    /// Lanes that share a column.
    team: usize,
    /// Consecutive rows of a lane.
    chunk: usize,
    /// Chunks of a lane.
    rounds: usize,
    /// Warps of a block.
    warps: usize,
}

impl Columns {
    /// Columns of `rows` numbers each, of which a lane holds at most `held`; `None` if a warp does not hold a
    /// column.
    fn new([rows, columns]: [usize; 2], held: usize) -> Option<Self> {
        let team = rows.div_ceil(held).next_power_of_two();
        let chunk = if rows.is_multiple_of(4) { 4 } else { 1 };
        (team <= WARP).then(|| Self {
            rows,
            count: columns,
            team,
            chunk,
            rounds: rows.div_ceil(team * chunk),
            warps: columns.div_ceil(WARP / team).min(WARPS),
        })
    }

    /// Blocks that share the columns.
    fn blocks(&self) -> usize {
        self.count.div_ceil(self.warps * (WARP / self.team))
    }

    fn threads(&self) -> usize {
        self.warps * WARP
    }

    /// Rows with those that complete the last chunks.
    fn padded(&self) -> usize {
        self.rounds * self.team * self.chunk
    }

    /// Column of a thread, which may be past the last one.
    fn of_thread<'k>(&self, k: &'k Kb<'k>, block: I<'k>) -> I<'k> {
        block * (self.threads() / self.team) + k.thread().div(k.i(self.team as i64))
    }

    /// First row of a lane's chunk.
    fn row<'k>(&self, k: &'k Kb<'k>, round: usize) -> I<'k> {
        ((k.lane_index() & (self.team - 1)) + round * self.team) * self.chunk
    }

    /// Every row of a lane, and whether it is there; `None` if all lanes have one.
    fn each<'k>(&self, k: &'k Kb<'k>) -> Vec<(I<'k>, Option<I<'k>>)> {
        let all = (0..self.rounds).flat_map(|round| {
            let whole = (round + 1) * self.team * self.chunk <= self.rows;
            (0..self.chunk).map(move |i| {
                let row = self.row(k, round) + i;
                (row, (!whole).then(|| row.lt(k.i(self.rows as i64))))
            })
        });
        all.collect()
    }

    /// A lane's numbers of the column that begins at an address; zeros past the last row.
    fn load<'k>(&self, k: &'k Kb<'k>, at: P<'k>) -> Vec<F<'k>> {
        let number = |(row, there): (I<'k>, Option<I<'k>>)| match there {
            None => at.words(row * self.count).load(),
            Some(there) => {
                let row = row.min(k.i(self.rows as i64 - 1));
                there.pick(at.words(row * self.count).load(), k.f(0.0))
            }
        };
        self.each(k).into_iter().map(number).collect()
    }

    /// Stores what [`Columns::load`] loads.
    fn store<'k>(&self, k: &'k Kb<'k>, at: P<'k>, numbers: &[F<'k>]) {
        for ((row, there), &x) in self.each(k).into_iter().zip(numbers) {
            let store = || at.words(row * self.count).store(x);
            match there {
                None => store(),
                Some(there) => k.when(there, store),
            }
        }
    }

    /// A lane's numbers of a vector of as many rows in shared memory, with padding.
    fn read<'k>(&self, k: &'k Kb<'k>, vector: P<'k>) -> Vec<F<'k>> {
        let chunk = |round| vector.words(self.row(k, round)).load_floats(self.chunk, self.chunk);
        (0..self.rounds).flat_map(chunk).collect()
    }

    /// Sum of products over a column, in all lanes of its team.
    fn dot<'k>(&self, k: &'k Kb<'k>, a: &[F<'k>], b: &[F<'k>]) -> F<'k> {
        let mut sums = [k.f(0.0); SUMS];
        for (i, (&a, &b)) in a.iter().zip(b).enumerate() {
            sums[i % SUMS] = a.fma(b, sums[i % SUMS]);
        }
        let [a, b, c, d] = sums;
        ((a + b) + (c + d)).warp_sum(self.team)
    }
}

/// A vector of each row that all threads of a block read.
struct Vector<'k> {
    at: P<'k>,
    ld: usize,
    /// Whether they read its exponentials.
    exp: bool,
}

/// Vectors of a row as they come through shared memory.
struct Staged<'k> {
    k: &'k Kb<'k>,
    vectors: Vec<Vector<'k>>,
    of: Columns,
}

impl<'k> Staged<'k> {
    /// Bytes of the vectors of a row. There is room for two rows.
    fn bytes(of: &Columns, vectors: usize) -> usize {
        4 * vectors * of.padded()
    }

    /// Numbers of each vector that a thread brings.
    fn rounds(&self) -> usize {
        self.of.padded().div_ceil(self.of.threads())
    }

    fn number(&self, round: usize) -> I<'k> {
        self.k.thread() + round * self.of.threads()
    }

    /// Numbers of a row that the thread brings.
    fn fetch(&self, row: I<'k>) -> Vec<F<'k>> {
        let (k, rows) = (self.k, self.of.rows);
        let of = |v: &Vector<'k>, round: usize| {
            let i = self.number(round);
            let x = v.at.words(row * v.ld).words(i.min(k.i(rows as i64 - 1))).load();
            if (round + 1) * self.of.threads() <= rows { x } else { i.lt(k.i(rows as i64)).pick(x, k.f(0.0)) }
        };
        self.vectors.iter().flat_map(|v| (0..self.rounds()).map(move |round| of(v, round))).collect()
    }

    /// Puts them to shared memory.
    fn put(&self, to: P<'k>, numbers: &[F<'k>]) {
        let (k, padded) = (self.k, self.of.padded());
        for (i, (v, numbers)) in self.vectors.iter().zip(numbers.chunks(self.rounds())).enumerate() {
            for (round, &x) in numbers.iter().enumerate() {
                let x = if v.exp { x.exp() } else { x };
                let at = self.number(round);
                let store = || to.words(i * padded).words(at).store(x);
                if (round + 1) * self.of.threads() <= padded {
                    store();
                } else {
                    k.when(at.lt(k.i(padded as i64)), store);
                }
            }
        }
    }

    /// Vector `i` of a row in shared memory, as a lane needs it.
    fn read(&self, row: P<'k>, i: usize) -> Vec<F<'k>> {
        self.of.read(self.k, row.words(i * self.of.padded()))
    }

    /// Goes through the rows of a sequence: `step(row, its vectors, its own numbers, state)` gives the state
    /// after a row. `own` loads numbers of a row that the thread alone needs.
    fn along(
        &self,
        rows: &Rows<'k>,
        [first, slot]: [I<'k>; 2],
        state: Vec<F<'k>>,
        own: &dyn Fn(I<'k>) -> Vec<F<'k>>,
        step: impl FnOnce(I<'k>, P<'k>, &[F<'k>], &[F<'k>]) -> Vec<F<'k>>,
    ) -> Vec<F<'k>> {
        let k = self.k;
        let (held, brought) = (state.len(), self.vectors.len() * self.rounds());
        let fetch = |row: I<'k>| {
            let mut all = self.fetch(row);
            all.extend(own(row));
            all
        };
        let other = k.i32(Self::bytes(&self.of, self.vectors.len()) as i32);
        // The state, numbers of the row, and where in shared memory its vectors are to be.
        let mut init = state;
        init.extend(fetch(first));
        init.push(k.i32(0).as_float());
        // A warp may still read vectors of the sequence before.
        k.barrier();
        let (_, mut end) = k.fold_while(
            first,
            &init,
            |row, _| row.lt(rows.n),
            |row, carried| {
                let (state, rest) = carried.split_at(held);
                let (words, rest) = rest.split_at(brought);
                let (own, place) = rest.split_at(rest.len() - 1);
                let place = place[0].bits();
                let vectors = k.shared(place.wide());
                self.put(vectors, words);
                // No warp is more than a row ahead, so the vectors of the row before may still be read.
                k.barrier();
                let next = rows.next(row + 1, slot);
                let ahead = fetch(next.min(rows.n - 1));
                let mut after = step(row, vectors, own, state);
                after.extend(ahead);
                after.push((place ^ other).as_float());
                (next, after)
            },
        );
        end.truncate(held);
        end
    }
}

/// Columns of the state of a head.
fn of_head(rule: &DeltaRule) -> Option<Columns> {
    Columns::new([rule.key, rule.value], HELD)
}

/// Vectors of a row that all columns need.
fn vectors(rule: &DeltaRule) -> usize {
    2 + usize::from(rule.by_channel)
}

impl GpuKernel for DeltaRule {
    fn launch(&self) -> Option<Launch> {
        let of = of_head(self)?;
        let grid = [Extent::fixed(self.heads), Extent::fixed(of.blocks()), sequences::extent(self.rows)];
        let shared = 2 * Staged::bytes(&of, vectors(self));
        Some(Launch { grid, block: of.threads() as u32, shared: shared as u32 })
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        let &Self { key_heads, heads, key, value, corrects, by_channel, ld, out_ld, .. } = self;
        let Some(of) = of_head(self) else { return k.fail("no such state") };
        let [q_ld, k_ld, v_ld, decay_ld, beta_ld] = ld;
        let rows = Rows::new(k, [k.arg(6), k.arg(7)]);
        let head = k.block_index(0);
        let of_key = head.div(k.i((heads / key_heads.max(1)) as i64)) * key;
        let column = of.of_thread(k, k.block_index(1));
        let inside = column.lt(k.i(value as i64));
        let column = column.min(k.i(value as i64 - 1));
        let mut vectors = vec![
            Vector { at: k.arg(1).words(of_key), ld: q_ld, exp: false },
            Vector { at: k.arg(2).words(of_key), ld: k_ld, exp: false },
        ];
        if by_channel {
            vectors.push(Vector { at: k.arg(4).words(head * key), ld: decay_ld, exp: true });
        }
        let staged = Staged { k, vectors, of };
        let (values, betas) = (k.arg(3).words(head * value + column), k.arg(5).words(head));
        let decays = k.arg(4).words(head);
        let own = |row: I<'k>| {
            let mut own = vec![values.words(row * v_ld).load(), betas.words(row * beta_ld).load()];
            own.extend((!by_channel).then(|| decays.words(row * decay_ld).load()));
            own
        };
        let out = k.arg(8).words(head * value + column);
        let gives = inside.and((k.lane_index() & (of.team - 1)).equals(k.i(0)));
        rows.sequences(k.block_index(2), self.rows, |first, slot| {
            let at = k.arg(0).words((slot * heads + head) * (key * value) + column);
            let step = |row: I<'k>, at: P<'k>, own: &[F<'k>], state: &[F<'k>]| {
                let keys = staged.read(at, 1);
                let faded: Vec<F<'k>> = match own.get(2) {
                    Some(decay) => {
                        let factor = decay.exp();
                        state.iter().map(|&x| x * factor).collect()
                    }
                    None => state.iter().zip(staged.read(at, 2)).map(|(&x, factor)| x * factor).collect(),
                };
                // The state's value for the key is subtracted from the new value: `v − kᵀ S`.
                let new = if corrects { own[0] - of.dot(k, &keys, &faded) } else { own[0] };
                let change = new * own[1];
                let after: Vec<F<'k>> =
                    keys.iter().zip(&faded).map(|(&key, &x)| key.fma(change, x)).collect();
                let y = of.dot(k, &staged.read(at, 0), &after);
                k.when(gives, || out.words(row * out_ld).store(y));
                after
            };
            let end = staged.along(&rows, [first, slot], of.load(k, at), &own, step);
            k.when(inside, || of.store(k, at, &end));
        });
    }
}

/// Channels of a selective scan.
fn of_channels(scan: &SelectiveScan) -> Option<Columns> {
    Columns::new([scan.state, scan.channels], HELD_BY_SCAN)
}

impl GpuKernel for SelectiveScan {
    fn launch(&self) -> Option<Launch> {
        let of = of_channels(self)?;
        let grid = [Extent::fixed(of.blocks()), Extent::fixed(1), sequences::extent(self.rows)];
        Some(Launch { grid, block: of.threads() as u32, shared: 2 * Staged::bytes(&of, 2) as u32 })
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        let &Self { channels, state: kept, ld: [c_ld, b_ld, x_ld, dt_ld], out_ld, .. } = self;
        let Some(of) = of_channels(self) else { return k.fail("no such state") };
        let rows = Rows::new(k, [k.arg(6), k.arg(7)]);
        let channel = of.of_thread(k, k.block_index(0));
        let inside = channel.lt(k.i(channels as i64));
        let channel = channel.min(k.i(channels as i64 - 1));
        let vector = |arg: usize, ld: usize| Vector { at: k.arg(arg), ld, exp: false };
        let staged = Staged { k, vectors: vec![vector(1, c_ld), vector(2, b_ld)], of };
        let (x, dt) = (k.arg(3).words(channel), k.arg(4).words(channel));
        let own = |row: I<'k>| vec![x.words(row * x_ld).load(), dt.words(row * dt_ld).load()];
        let rates = of.load(k, k.arg(5).words(channel));
        let out = k.arg(8).words(channel);
        let gives = inside.and((k.lane_index() & (of.team - 1)).equals(k.i(0)));
        rows.sequences(k.block_index(2), self.rows, |first, slot| {
            let at = k.arg(0).words(slot * (kept * channels) + channel);
            let step = |row: I<'k>, at: P<'k>, own: &[F<'k>], state: &[F<'k>]| {
                let (dt, added) = (own[1], own[0] * own[1]);
                let faded = state.iter().zip(&rates).map(|(&x, &rate)| x * (rate * dt).exp());
                let after: Vec<F<'k>> = faded.zip(staged.read(at, 1)).map(|(x, b)| b.fma(added, x)).collect();
                let y = of.dot(k, &staged.read(at, 0), &after);
                k.when(gives, || out.words(row * out_ld).store(y));
                after
            };
            let end = staged.along(&rows, [first, slot], of.load(k, at), &own, step);
            k.when(inside, || of.store(k, at, &end));
        });
    }
}
