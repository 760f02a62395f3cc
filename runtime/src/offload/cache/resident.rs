//! Set of resident experts, updated step by step.

use super::error::CacheError;
use super::experts::{CachedLayer, ExpertIndex, Key};
use super::policy::{Id, Pins, Policy};
use super::setting::Setting;
use super::table::Scope;
use super::warm::{self, Expected};
use std::ops::Range;

/// Result of a step for the store that holds the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The expert is resident.
    Hit(Key),
    /// The expert is evicted.
    Evict(Key),
    /// The expert is read and stays; its victims were reported before.
    Load(Key),
    /// The expert is read for this step only: it bypasses the cache.
    Stream(Key),
}

/// Keeps track of the resident experts, within a capacity in bytes.
///
/// Some may be pinned: their bytes are reserved from the start, each becomes resident when it is first read,
/// and it is never evicted. Policies share the other bytes among the other experts, and do not see uses of
/// pinned ones.
pub struct Cache {
    parts: Vec<CachePart>,
    experts: ExpertIndex,
    keys: Vec<Key>,
    resident: Vec<bool>,
    pinned: Vec<bool>,
    /// Bytes reserved for pinned experts, and the bytes of those that are resident.
    aside: u64,
    aside_used: u64,
    /// The step that last used each expert.
    stamps: Vec<u32>,
    now: u32,
    scope: Scope,
}

/// Experts that share bytes: those of all layers, or of one.
struct CachePart {
    policy: Box<dyn Policy>,
    ids: Range<Id>,
    layer: usize,
    capacity: u64,
    used: u64,
}

impl Cache {
    /// An empty cache of `capacity` bytes for these experts, none of them pinned.
    pub fn new(experts: &ExpertIndex, capacity: u64, setting: &Setting) -> Self {
        Self::over(experts, capacity, setting, vec![false; experts.count()], 0)
    }

    /// Like [`Cache::new`], with experts that are never evicted.
    ///
    /// # Errors
    /// [`CacheError::NoExpert`] for an expert that does not exist. [`CacheError::Pinned`] for an expert that
    /// is listed twice, or if the pinned experts exceed the capacity.
    pub fn with_pinned(
        experts: &ExpertIndex,
        capacity: u64,
        setting: &Setting,
        pinned: &[Key],
    ) -> Result<Self, CacheError> {
        let mut is = vec![false; experts.count()];
        let mut aside = 0;
        for key in pinned {
            let id = experts.id(key.layer.into(), key.expert.into())? as usize;
            let wrong = |what: &str| {
                Err(CacheError::Pinned { layer: key.layer, expert: key.expert, what: what.to_owned() })
            };
            if std::mem::replace(&mut is[id], true) {
                return wrong("is pinned twice");
            }
            aside += experts.layers()[usize::from(key.layer)].bytes;
            if aside > capacity {
                return wrong("is pinned, and there is no room for it");
            }
        }
        Ok(Self::over(experts, capacity, setting, is, aside))
    }

    fn over(experts: &ExpertIndex, capacity: u64, setting: &Setting, pinned: Vec<bool>, aside: u64) -> Self {
        let capacity = capacity - aside;
        let part = |layers: Range<usize>, of: &ExpertIndex, capacity: u64| CachePart {
            policy: setting.policy(of, capacity),
            ids: experts.ids(layers.start).start..experts.ids(layers.end - 1).end,
            layer: layers.start,
            capacity,
            used: 0,
        };
        let count = experts.layers().len();
        let parts = match setting.scope() {
            Scope::Shared => vec![part(0..count, experts, capacity)],
            Scope::PerLayer => {
                let free = free(experts, &pinned);
                let own = |l: usize| (l..l + 1, experts.only(l), share(&free, experts.slot(), capacity, l));
                (0..count).map(own).map(|(layers, of, capacity)| part(layers, &of, capacity)).collect()
            }
        };
        let key = |layer: usize, expert: usize| Key { layer: layer as u16, expert: expert as u16 };
        let layers = experts.layers().iter().enumerate();
        Self {
            parts,
            keys: layers.flat_map(|(l, of)| (0..of.experts).map(move |e| key(l, e))).collect(),
            resident: vec![false; experts.count()],
            pinned,
            aside,
            aside_used: 0,
            stamps: vec![0; experts.count()],
            now: 0,
            scope: setting.scope(),
            experts: experts.clone(),
        }
    }

    /// Number of largest scores that the policy reads, per expert of a token; 0: none.
    pub fn depth(&self) -> usize {
        self.parts.iter().map(|p| p.policy.depth()).max().unwrap_or(0)
    }

    /// Bytes that are resident.
    pub fn used(&self) -> u64 {
        self.parts.iter().map(|p| p.used).sum::<u64>() + self.aside_used
    }

    /// Bytes that may be resident. Less than requested only if every layer has its own share, which is a
    /// whole number of experts.
    pub fn capacity(&self) -> u64 {
        self.parts.iter().map(|p| p.capacity).sum::<u64>() + self.aside
    }

    /// Whether an expert is resident. `false` for one that does not exist.
    pub fn contains(&self, key: Key) -> bool {
        let id = self.experts.id(key.layer.into(), key.expert.into());
        id.is_ok_and(|id| self.resident[id as usize])
    }

    /// Whether an expert is pinned. `false` for one that does not exist.
    pub fn is_pinned(&self, key: Key) -> bool {
        let id = self.experts.id(key.layer.into(), key.expert.into());
        id.is_ok_and(|id| self.pinned[id as usize])
    }

    /// One layer of one token (or of a batch: `chosen` then lists every distinct expert once). `ranked` holds
    /// the layer's largest scores, see [`super::Ranking`]; it may be empty for a policy without
    /// [`Cache::depth`].
    ///
    /// Hits are reported first, in the order of `chosen`, then misses. None of `chosen` is evicted before the
    /// next step.
    ///
    /// # Errors
    /// [`CacheError::NoExpert`], before any change.
    pub fn step(
        &mut self,
        layer: usize,
        chosen: &[u16],
        ranked: &[(u16, f32)],
        on: impl FnMut(Event),
    ) -> Result<(), CacheError> {
        for &expert in chosen {
            self.experts.id(layer, expert.into())?;
        }
        self.score(layer, ranked)?;
        self.touch(layer, chosen, on)
    }

    /// Passes the scores of a layer's router to the policy, as [`Self::step`] does: for units that use
    /// experts before their scores are known.
    pub fn score(&mut self, layer: usize, ranked: &[(u16, f32)]) -> Result<(), CacheError> {
        self.experts.id(layer, 0)?;
        let at = self.part(layer);
        let part = &mut self.parts[at];
        part.policy.on_scores(layer - part.layer, ranked);
        Ok(())
    }

    /// The part of [`Self::step`] after the scores.
    ///
    /// # Errors
    /// [`CacheError::NoExpert`], before any change.
    pub fn touch(
        &mut self,
        layer: usize,
        chosen: &[u16],
        mut on: impl FnMut(Event),
    ) -> Result<(), CacheError> {
        for &expert in chosen {
            self.experts.id(layer, expert.into())?;
        }
        if chosen.is_empty() {
            self.experts.id(layer, 0)?;
        }
        self.advance();
        let first = self.experts.ids(layer).start;
        let at = self.part(layer);
        let part = &mut self.parts[at];
        for &expert in chosen {
            let id = first + Id::from(expert);
            self.stamps[id as usize] = self.now;
            if self.resident[id as usize] {
                if !self.pinned[id as usize] {
                    part.policy.on_hit(id - part.ids.start);
                }
                on(Event::Hit(self.keys[id as usize]));
            }
        }
        for &expert in chosen {
            let id = first + Id::from(expert);
            if !self.resident[id as usize] {
                let part = &mut self.parts[at];
                if !self.pinned[id as usize] {
                    part.policy.on_miss(id - part.ids.start);
                }
                let event = if self.insert(layer, id, &mut on) { Event::Load } else { Event::Stream };
                on(event(self.keys[id as usize]));
            }
        }
        Ok(())
    }

    /// Fills an empty cache from recorded routing: the most used experts become resident, as many as there is
    /// room for. The policy relies on these uses until it has observed more. `uses` is `[layer][expert]`.
    /// Reports the experts to read, the most used first.
    pub fn warm(&mut self, uses: &[u32], mut on: impl FnMut(Key)) {
        let Expected { probability, tokens } = warm::expected(&self.experts, uses);
        for (id, key) in self.keys.iter().enumerate() {
            let part = self.part(key.layer.into());
            let part = &mut self.parts[part];
            part.policy.expect(id as Id - part.ids.start, probability[id], tokens[usize::from(key.layer)]);
        }
        let mut hottest: Vec<usize> = (0..self.keys.len()).filter(|&id| probability[id] > 0.0).collect();
        hottest.sort_by(|&a, &b| probability[b].total_cmp(&probability[a]));
        hottest.retain(|&id| {
            let key = self.keys[id];
            let at = self.part(key.layer.into());
            let bytes = self.experts.layers()[usize::from(key.layer)].bytes;
            let part = &mut self.parts[at];
            let fits = !self.pinned[id] && !self.resident[id] && part.used + bytes <= part.capacity;
            part.used += if fits { bytes } else { 0 };
            self.resident[id] |= fits;
            fits
        });
        // The hottest last, as if they had been used in this order.
        for &id in hottest.iter().rev() {
            let part = self.part(self.keys[id].layer.into());
            let part = &mut self.parts[part];
            part.policy.on_insert(id as Id - part.ids.start);
        }
        for id in hottest {
            on(self.keys[id]);
        }
    }

    /// Makes an expert resident that may be needed soon, if the policy would keep it. Reports victims and the
    /// load. Returns `false`, without a report, if it is resident already or would not stay. It is not
    /// evicted before the next step, and does not count as used.
    ///
    /// # Errors
    /// [`CacheError::NoExpert`].
    pub fn ahead(&mut self, key: Key, mut on: impl FnMut(Event)) -> Result<bool, CacheError> {
        let layer = usize::from(key.layer);
        let id = self.experts.id(layer, key.expert.into())?;
        if self.resident[id as usize] {
            return Ok(false);
        }
        if self.now == 0 {
            self.advance();
        }
        let stamp = self.stamps[id as usize];
        self.stamps[id as usize] = self.now;
        if self.insert(layer, id, &mut on) {
            on(Event::Load(key));
            return Ok(true);
        }
        self.stamps[id as usize] = stamp;
        Ok(false)
    }

    /// Evicts an expert that another level no longer has. Returns whether it was resident; a pinned one
    /// stays.
    ///
    /// # Errors
    /// [`CacheError::NoExpert`].
    pub fn release(&mut self, key: Key) -> Result<bool, CacheError> {
        let layer = usize::from(key.layer);
        let id = self.experts.id(layer, key.expert.into())?;
        if !self.resident[id as usize] || self.pinned[id as usize] {
            return Ok(false);
        }
        let at = self.part(layer);
        let part = &mut self.parts[at];
        part.policy.on_evict(id - part.ids.start);
        part.used -= self.experts.layers()[layer].bytes;
        self.resident[id as usize] = false;
        Ok(true)
    }

    /// Forgets everything but the set of pinned experts.
    pub fn reset(&mut self) {
        for part in &mut self.parts {
            part.policy.reset();
            part.used = 0;
        }
        self.resident.fill(false);
        self.aside_used = 0;
        self.stamps.fill(0);
        self.now = 0;
    }

    fn part(&self, layer: usize) -> usize {
        match self.scope {
            Scope::Shared => 0,
            Scope::PerLayer => layer,
        }
    }

    fn advance(&mut self) {
        self.now = self.now.checked_add(1).unwrap_or_else(|| {
            self.stamps.fill(0);
            1
        });
    }

    /// Makes room and inserts an expert, unless the policy lets it bypass the cache.
    fn insert(&mut self, layer: usize, id: Id, on: &mut impl FnMut(Event)) -> bool {
        let bytes = self.experts.layers()[layer].bytes;
        if self.pinned[id as usize] {
            self.aside_used += bytes;
            self.resident[id as usize] = true;
            return true;
        }
        let part = self.part(layer);
        let part = &mut self.parts[part];
        if bytes > part.capacity {
            return false;
        }
        let own = part.ids.start;
        let mut force = false;
        while part.used + bytes > part.capacity {
            let stamps = &self.stamps[own as usize..part.ids.end as usize];
            let pins = Pins { stamps, now: self.now };
            let Some(victim) = part.policy.victim(id - own, force, pins) else { return false };
            part.policy.on_evict(victim);
            force = true;
            let key = self.keys[(own + victim) as usize];
            part.used -= self.experts.layers()[usize::from(key.layer)].bytes;
            self.resident[(own + victim) as usize] = false;
            on(Event::Evict(key));
        }
        part.policy.on_insert(id - own);
        part.used += bytes;
        self.resident[id as usize] = true;
        true
    }
}

/// Bytes of the experts of every layer that are not pinned.
fn free(experts: &ExpertIndex, pinned: &[bool]) -> Vec<u128> {
    let of = |(l, layer): (usize, &CachedLayer)| {
        let ids = experts.ids(l);
        let free = pinned[ids.start as usize..ids.end as usize].iter().filter(|p| !**p).count();
        u128::from(layer.bytes) * free as u128
    };
    experts.layers().iter().enumerate().map(of).collect()
}

/// Bytes of one layer's own cache: proportional to the layer's size, in whole experts if all have the same
/// size (`slot` bytes).
fn share(sizes: &[u128], slot: Option<u64>, capacity: u64, layer: usize) -> u64 {
    let unit = slot.unwrap_or(1);
    let total: u128 = sizes.iter().sum();
    let units = u128::from(capacity / unit);
    let up_to = |n: usize| units * sizes.iter().take(n).sum::<u128>() / total.max(1);
    u64::try_from((up_to(layer + 1) - up_to(layer)) * u128::from(unit)).unwrap_or(u64::MAX)
}
