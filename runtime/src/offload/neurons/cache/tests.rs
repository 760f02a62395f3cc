//! Tests against a naive cache with linear searches, and the paper's claims on its regions.

use super::*;
use proptest::prelude::*;

/// A naive cache with the same rules, as plain lists in the order of use.
struct Naive {
    shape: Shape,
    hot_capacity: u64,
    cold_capacity: u64,
    hot: Vec<u32>,
    cold: Vec<(u32, u8)>,
    /// Neurons and clusters used in this step.
    now: Vec<u32>,
    now_clusters: Vec<u32>,
}

impl Naive {
    fn bytes(&self, held: u8) -> u64 {
        u64::from(held & 1) * self.shape.gate + u64::from(held >> 1) * self.shape.up_down
    }

    fn members(&self, cluster: u32) -> Vec<u32> {
        let of = |n: u32| {
            let (matrix, neuron) = self.shape.neuron(n);
            matrix * self.shape.clusters() + neuron / self.shape.cluster
        };
        (0..self.shape.matrices * self.shape.neurons).filter(|&n| of(n) == cluster).collect()
    }

    fn cluster_bytes(&self, cluster: u32) -> u64 {
        self.members(cluster).len() as u64 * self.shape.neuron_bytes()
    }

    fn hot_used(&self) -> u64 {
        self.hot.iter().map(|&c| self.cluster_bytes(c)).sum()
    }

    fn cold_used(&self) -> u64 {
        self.cold.iter().map(|&(_, held)| self.bytes(held)).sum()
    }

    fn trim_hot(&mut self, more: u64, events: &mut Vec<Event>) -> bool {
        let stays = self.hot.iter().filter(|c| self.now_clusters.contains(c));
        if stays.map(|&c| self.cluster_bytes(c)).sum::<u64>() + more > self.hot_capacity {
            return false;
        }
        while self.hot_used() + more > self.hot_capacity {
            events.push(Event::Drop(self.hot.remove(0)));
        }
        true
    }

    fn trim_cold(&mut self, more: u64, events: &mut Vec<Event>) -> bool {
        let stays = self.cold.iter().filter(|c| self.now.contains(&c.0));
        if stays.map(|c| self.bytes(c.1)).sum::<u64>() + more > self.cold_capacity {
            return false;
        }
        while self.cold_used() + more > self.cold_capacity {
            let (id, _) = self.cold.remove(0);
            assert!(!self.now.contains(&id), "{id} is of this step");
            events.push(Event::Evict(id));
        }
        true
    }

    fn neuron(&mut self, id: u32, want: u8, events: &mut Vec<Event>) -> CacheLookup {
        let (matrix, neuron) = self.shape.neuron(id);
        let cluster = matrix * self.shape.clusters() + neuron / self.shape.cluster;
        if let Some(at) = self.hot.iter().position(|&c| c == cluster) {
            self.hot.remove(at);
            self.hot.push(cluster);
            self.now_clusters.push(cluster);
            return CacheLookup::Hot;
        }
        self.now.push(id);
        let mut held = 0;
        if let Some(at) = self.cold.iter().position(|c| c.0 == id) {
            held = self.cold.remove(at).1;
            self.cold.push((id, held));
        }
        let bytes = self.bytes(want & !held);
        if bytes == 0 {
            return CacheLookup::Cold;
        }
        if !self.trim_cold(bytes, events) {
            return CacheLookup::Stream(bytes);
        }
        self.cold.retain(|c| c.0 != id);
        self.cold.push((id, held | want));
        CacheLookup::Load(bytes)
    }

    fn cluster(&mut self, id: u32, events: &mut Vec<Event>) -> CacheLookup {
        if let Some(at) = self.hot.iter().position(|&c| c == id) {
            self.hot.remove(at);
            self.hot.push(id);
            self.now_clusters.push(id);
            return CacheLookup::Hot;
        }
        let members = self.members(id);
        let held: u64 = self.cold.iter().filter(|c| members.contains(&c.0)).map(|c| self.bytes(c.1)).sum();
        let whole = self.cluster_bytes(id);
        if !self.trim_hot(whole, events) {
            for id in members {
                if let Some(at) = self.cold.iter().position(|c| c.0 == id) {
                    let used = self.cold.remove(at);
                    self.cold.push(used);
                }
                self.now.push(id);
            }
            return CacheLookup::Stream(whole - held);
        }
        self.now_clusters.push(id);
        let there = |n: &&u32| self.cold.iter().any(|c| c.0 == **n);
        events.extend(members.iter().filter(there).map(|&n| Event::Promote(n)));
        self.cold.retain(|c| !members.contains(&c.0));
        self.hot.push(id);
        CacheLookup::Load(whole - held)
    }
}

#[derive(Clone, Debug)]
enum Request {
    Step,
    Neuron(u32, u32, Part),
    Cluster(u32, u32),
    Hot(u64),
}

fn request() -> impl Strategy<Value = Request> {
    prop_oneof![
        2 => Just(Request::Step),
        8 => (0..3_u32, 0..10_u32, 0..3_usize)
            .prop_map(|(m, n, p)| Request::Neuron(m, n, [Part::Gate, Part::UpDown, Part::Whole][p])),
        4 => (0..3_u32, 0..4_u32).prop_map(|(m, c)| Request::Cluster(m, c)),
        1 => (0..260_u64).prop_map(Request::Hot),
    ]
}

proptest! {
    #[test]
    fn neuron_cache_matches_the_naive_search(
        up_down in prop_oneof![Just(0_u64), Just(7)], hot in 0..150_u64, cold in 0..100_u64,
        asks in proptest::collection::vec(request(), 1..120)
    ) {
        let shape = Shape { matrices: 3, neurons: 10, cluster: 3, gate: 5, up_down };
        let mut cache = Segmented::new(shape, Regions { fixed: 9, hot, cold }).unwrap();
        let mut naive = Naive {
            shape, hot_capacity: hot, cold_capacity: cold, hot: vec![], cold: vec![], now: vec![], now_clusters: vec![],
        };
        for ask in asks {
            let (mut events, mut want) = (Vec::new(), Vec::new());
            match ask {
                Request::Step => {
                    cache.begin();
                    naive.now.clear();
                    naive.now_clusters.clear();
                }
                Request::Neuron(m, n, part) => {
                    let found = cache.neuron(m, n, part, |e| events.push(e)).unwrap();
                    prop_assert_eq!(found, naive.neuron(m * 10 + n, part.mask(), &mut want));
                }
                Request::Cluster(m, c) => {
                    let found = cache.cluster(m, c, |e| events.push(e)).unwrap();
                    prop_assert_eq!(found, naive.cluster(m * 4 + c, &mut want));
                }
                Request::Hot(bytes) => {
                    let fits = bytes <= hot + cold;
                    prop_assert_eq!(cache.resize(bytes, |e| events.push(e)).is_ok(), fits);
                    if fits {
                        (naive.hot_capacity, naive.cold_capacity) = (bytes, hot + cold - bytes);
                        naive.now.clear();
                        naive.now_clusters.clear();
                        naive.trim_hot(0, &mut want);
                        naive.trim_cold(0, &mut want);
                    }
                }
            }
            prop_assert_eq!(events, want);
            prop_assert_eq!(cache.used(), (naive.hot_used(), naive.cold_used()));
            let Regions { hot, cold, .. } = cache.regions();
            prop_assert!(cache.used().0 <= hot && cache.used().1 <= cold);
        }
    }
}

const SHAPE: Shape = Shape { matrices: 2, neurons: 8, cluster: 4, gate: 4096, up_down: 4096 };

#[test]
fn gate_and_up_down_of_a_neuron_are_read_separately() {
    let mut cache = Segmented::new(SHAPE, Regions::of(3 * 8192, 8192, 0).unwrap()).unwrap();
    let mut ask = |n, part| cache.neuron(1, n, part, |_| ()).unwrap();
    assert_eq!(ask(2, Part::Gate), CacheLookup::Load(4096));
    assert_eq!(ask(2, Part::Gate), CacheLookup::Cold);
    assert_eq!(ask(2, Part::Whole), CacheLookup::Load(4096));
    assert_eq!(ask(3, Part::Whole), CacheLookup::Load(8192));
    // Everything in memory was used in this step.
    assert_eq!(ask(4, Part::Gate), CacheLookup::Stream(4096));
    cache.begin();
    let mut events = Vec::new();
    assert_eq!(cache.neuron(1, 4, Part::Gate, |e| events.push(e)).unwrap(), CacheLookup::Load(4096));
    assert_eq!(events, [Event::Evict(10)]);
    assert_eq!((cache.neurons().requests, cache.neurons().read), (6, 5 * 4096 + 4096));
}

#[test]
fn a_larger_batch_takes_memory_of_cold_neurons_and_a_smaller_one_of_hot_clusters() {
    // Room for six neurons, first all of it cold.
    let mut cache = Segmented::new(SHAPE, Regions::of(6 * 8192, 0, 0).unwrap()).unwrap();
    for n in [0, 1, 5, 6, 7] {
        cache.begin();
        cache.neuron(0, n, Part::Whole, |_| ()).unwrap();
    }
    let mut events = Vec::new();
    cache.resize(4 * 8192, |e| events.push(e)).unwrap();
    assert_eq!(events, [Event::Evict(0), Event::Evict(1), Event::Evict(5)]);
    events.clear();
    // Two of the cluster's four neurons are in memory already.
    assert_eq!(cache.cluster(0, 1, |e| events.push(e)).unwrap(), CacheLookup::Load(2 * 8192));
    assert_eq!(events, [Event::Promote(6), Event::Promote(7)]);
    assert_eq!(cache.used(), (4 * 8192, 0));
    assert_eq!(cache.neuron(0, 5, Part::UpDown, |_| ()).unwrap(), CacheLookup::Hot);
    events.clear();
    cache.resize(0, |e| events.push(e)).unwrap();
    assert_eq!((events, cache.used()), (vec![Event::Drop(1)], (0, 0)));
    assert!(cache.resize(7 * 8192, |_| ()).is_err());
}

#[test]
fn neuron_reused_by_a_streamed_cluster_stays_for_the_step() {
    // A cache without room for a cluster, but with room for two neurons, one of which belongs to the cluster.
    let mut cache = Segmented::new(SHAPE, Regions::of(2 * 8192, 0, 0).unwrap()).unwrap();
    for n in [1, 7] {
        cache.begin();
        cache.neuron(0, n, Part::Whole, |_| ()).unwrap();
    }
    cache.begin();
    assert_eq!(cache.cluster(0, 0, |_| ()).unwrap(), CacheLookup::Stream(3 * 8192));
    let mut events = Vec::new();
    assert_eq!(cache.neuron(0, 6, Part::Whole, |e| events.push(e)).unwrap(), CacheLookup::Load(8192));
    assert_eq!(events, [Event::Evict(7)]);
    assert_eq!(cache.neuron(0, 7, Part::Whole, |e| events.push(e)).unwrap(), CacheLookup::Stream(8192));
    assert_eq!(events.len(), 1);
}

#[test]
fn oversized_request_evicts_nothing() {
    // Room for three parts: one used in the last step, one used in this step, one free.
    let mut cache = Segmented::new(SHAPE, Regions::of(3 * 4096, 0, 0).unwrap()).unwrap();
    for n in [0, 1] {
        cache.begin();
        cache.neuron(0, n, Part::Gate, |_| ()).unwrap();
    }
    cache.neuron(0, 2, Part::Gate, |_| ()).unwrap();
    let mut events = Vec::new();
    assert_eq!(cache.neuron(0, 3, Part::Whole, |e| events.push(e)).unwrap(), CacheLookup::Stream(8192));
    assert!(events.is_empty() && cache.holds(0, 0, Part::Gate), "{events:?}");
    assert_eq!(cache.neuron(0, 3, Part::Gate, |e| events.push(e)).unwrap(), CacheLookup::Load(4096));
    assert_eq!(events, [Event::Evict(0)]);
}

#[test]
fn nonexistent_shapes_and_neurons_are_rejected() {
    let regions = Regions { fixed: 0, hot: 0, cold: 0 };
    for bad in [
        Shape { matrices: 0, ..SHAPE },
        Shape { cluster: 0, ..SHAPE },
        Shape { matrices: u32::MAX, ..SHAPE },
        Shape { gate: u64::MAX, ..SHAPE },
    ] {
        assert!(Segmented::new(bad, regions).is_err(), "{bad:?}");
    }
    let endless = Regions { fixed: u64::MAX, hot: 1, cold: 0 };
    assert!(Segmented::new(SHAPE, endless).is_err() && endless.capacity() == u64::MAX);
    let mut cache = Segmented::new(SHAPE, regions).unwrap();
    assert!(cache.neuron(2, 0, Part::Gate, |_| ()).is_err());
    assert!(cache.neuron(0, 8, Part::Gate, |_| ()).is_err());
    assert!(cache.cluster(0, 2, |_| ()).is_err());
    assert!(!cache.holds(9, 0, Part::Gate) && !cache.holds(0, 0, Part::Gate));
    assert_eq!(cache.neuron(0, 0, Part::Gate, |_| ()).unwrap(), CacheLookup::Stream(4096));
}

#[test]
fn million_neuron_requests_are_fast() {
    let shape = Shape { matrices: 100, neurons: 10_000, cluster: 500, gate: 1, up_down: 1 };
    let mut cache = Segmented::new(shape, Regions::of(1_000_000, 0, 200_000).unwrap()).unwrap();
    for round in 0..2 {
        for n in 0..1_000_000_u32 {
            cache.begin();
            cache.neuron(n % 100, n / 100, Part::Whole, |_| ()).unwrap();
        }
        assert_eq!(cache.neurons().loads, (round + 1) * 1_000_000);
    }
    assert_eq!(cache.used(), (0, 800_000));
}
