//! Capacity limit: choices that static graphs take, and those that are served elsewhere.

use super::*;

attributes! {
    /// Attributes of [`Op::LimitCapacity`].
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct LimitCapacityDesc {
        /// Rows that each expert has room for; 0: it is served elsewhere, whatever its rows.
        pub capacities: Vec<u32>,
        /// Whether what finds no room is served elsewhere; else it is lost.
        pub spill: bool,
    }
}

impl Operator for LimitCapacityDesc {
    const NAMES: &'static [&'static str] = &["limit_capacity"];
    const OPERANDS: &'static [Kind] = &[V, V, V];

    fn infer(&self, o: &Operands<'_>) -> Inferred {
        let [t, k] = o.shape(0, "ids", DType::I32)?;
        let [rows, _] = o.matrix(1, "added")?;
        o.require(rows == t, || format!("{rows} rows were added to, not {t}"))?;
        o.exact(2, "pos", &i32(&[t]))?;
        o.require(!self.capacities.is_empty(), || "no experts".to_owned())?;
        Ok(vec![i32(&[t, k]), i32(&[t, k])])
    }

    fn eval(&self, a: &Args<'_>) -> Evaluated {
        let (ids, k, added, pos) = (a.i32(0)?, a.cols(0)?, a.f32(1)?, a.i32(2)?);
        let norm = |row: usize| {
            let row = added.chunks_exact(a.cols(1).unwrap_or(1)).nth(row).unwrap_or_default();
            row.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt() as f32
        };
        let (mut stay, mut rest) = (vec![-1; ids.len()], vec![-1; ids.len()]);
        let mut members: Vec<Vec<usize>> = vec![Vec::new(); self.capacities.len()];
        for (pair, &id) in ids.iter().enumerate().filter(|(pair, _)| pos[pair / k] >= 0) {
            members[a.index("expert", id, self.capacities.len())?].push(pair);
        }
        for ((e, mut pairs), &capacity) in members.into_iter().enumerate().zip(&self.capacities) {
            // Stable: of equal norms the lowest row stays. NaN counts as the highest.
            pairs.sort_by(|&a, &b| {
                let (a, b) = (norm(a / k), norm(b / k));
                b.partial_cmp(&a).unwrap_or_else(|| b.is_nan().cmp(&a.is_nan()))
            });
            for (place, pair) in pairs.into_iter().enumerate() {
                if place < capacity as usize {
                    stay[pair] = e as i32;
                } else if capacity == 0 || self.spill {
                    rest[pair] = e as i32;
                }
            }
        }
        Ok(vec![Data::I32(stay), Data::I32(rest)])
    }
}
