//! Formats under a size limit: each larger format is bought where a byte gains most.

/// An item with a choice of options.
#[derive(Clone, Debug, PartialEq)]
pub struct Item {
    /// Options, the largest first.
    pub options: Vec<Choice>,
}

/// A format of an item.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// Size in bytes.
    pub bytes: u64,
    /// Increase of the loss, in nats per token.
    pub loss: f64,
}

/// Index of an option for every item, within `room` bytes if the smallest options fit. Without `target`, the
/// options are the best that were found. With `target`, the choice is no better than that loss needs.
///
/// Steps are chosen greedily by gain per byte, and may skip options if that gains more. The room that remains
/// is smaller than one step.
pub fn buy(items: &[Item], room: u64, target: Option<f64>) -> Vec<usize> {
    let mut chosen: Vec<usize> = items.iter().map(|i| i.options.len().saturating_sub(1)).collect();
    let at = |chosen: &[usize]| {
        items.iter().zip(chosen).filter_map(|(i, &o)| i.options.get(o)).copied().collect::<Vec<_>>()
    };
    loop {
        let own = at(&chosen);
        let bytes: u64 = own.iter().map(|o| o.bytes).sum();
        let loss: f64 = own.iter().map(|o| o.loss).sum();
        if target.is_some_and(|target| loss <= target) {
            return chosen;
        }
        let mut best: Option<(f64, usize, usize)> = None;
        for (i, (item, now)) in items.iter().zip(&own).enumerate() {
            for (option, to) in item.options.iter().enumerate().take(chosen[i]) {
                let more = to.bytes.saturating_sub(now.bytes);
                let gain = (now.loss - to.loss) / more.max(1) as f64;
                if gain > 0.0
                    && bytes.saturating_add(more) <= room
                    && best.is_none_or(|(most, ..)| gain > most)
                {
                    best = Some((gain, i, option));
                }
            }
        }
        match best {
            Some((_, item, option)) => chosen[item] = option,
            None => return chosen,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn item(options: &[(u64, f64)]) -> Item {
        Item { options: options.iter().map(|&(bytes, loss)| Choice { bytes, loss }).collect() }
    }

    #[test]
    fn bytes_are_spent_where_loss_falls_most() {
        let items = [item(&[(16, 0.0), (8, 0.1), (4, 5.0)]), item(&[(16, 0.0), (8, 0.1), (4, 1.0)])];
        assert_eq!(buy(&items, 8, None), [2, 2]);
        assert_eq!(buy(&items, 12, None), [1, 2]);
        assert_eq!(buy(&items, 16, None), [1, 1]);
        assert_eq!(buy(&items, 24, None), [0, 1]);
        assert_eq!(buy(&items, 99, None), [0, 0]);
        // The choice is no better than the target loss needs.
        assert_eq!(buy(&items, 99, Some(1.2)), [1, 2]);
        assert_eq!(buy(&items, 99, Some(9.0)), [2, 2]);
        // Too small for any choice: the smallest options.
        assert_eq!(buy(&items, 0, None), [2, 2]);
        assert!(buy(&[], 9, None).is_empty());
        assert_eq!(buy(&[item(&[])], 9, None), [0]);
    }

    #[test]
    fn larger_budget_never_raises_the_loss() {
        let items: Vec<Item> = (1..9)
            .map(|i| item(&[(16 * i, 0.0), (9 * i, 0.01 * i as f64), (5 * i, 1.0 / i as f64)]))
            .collect();
        let loss = |chosen: &[usize]| items.iter().zip(chosen).map(|(i, &o)| i.options[o].loss).sum::<f64>();
        let bytes =
            |chosen: &[usize]| items.iter().zip(chosen).map(|(i, &o)| i.options[o].bytes).sum::<u64>();
        let mut last = f64::INFINITY;
        for room in (180..700).step_by(20) {
            let chosen = buy(&items, room, None);
            assert!(bytes(&chosen) <= room && loss(&chosen) <= last + 0.02, "{room}");
            last = loss(&chosen);
        }
    }
}
