//! Tests of the passes `tier`, `group` and `assign_residency` over many kinds of loads: 1 to 160 experts,
//! every number of tiers.

use super::assign_residency::{assign_layer_residency, limit_loaded_graphs};
use super::group::{self, group_layer};
use super::tier::{LADDER, few, smallest_coverage, tier};
use moec_base::error::{Error, Fault};
use moec_config::{Capacity, Config, ExpertsConfig, Overflow};
use moec_costs::units::{ExpertSize, UnitPreference, Units};
use moec_device::Device;
use moec_ir::placement::Placement;
use moec_profile::loads::{LayerLoads, Loads};
use proptest::collection::vec;
use proptest::prelude::*;
use std::path::Path;

/// The size of an expert of Phi-3.5-MoE: 4096 × 6400, three matrices.
const LARGE: ExpertSize = ExpertSize { weights: 78_643_200, bytes: 157_286_400 };

fn device() -> Device {
    Device::find("m2-ultra").unwrap()
}

fn config(tiers: usize, overflow: Overflow) -> ExpertsConfig {
    ExpertsConfig { tiers, overflow: Some(overflow), ..Config::defaults(Path::new("model.toml")).experts }
}

/// Loads of one layer, from those of its chunks.
fn layer(chunk: u32, samples: Vec<Vec<u32>>) -> Loads {
    let chosen: Vec<u64> =
        (0..samples[0].len()).map(|e| samples.iter().map(|s| u64::from(s[e])).sum()).collect();
    let tokens = samples.len() as u64 * u64::from(chunk);
    let layer = LayerLoads { layer: 2, k: 1, tokens, chosen, samples };
    Loads { chunk, origin: String::new(), layers: vec![layer] }
}

/// Runs the three passes on a layer, the verifier after each.
fn place(
    loads: &Loads,
    units: &Units<'_>,
    config: &ExpertsConfig,
    size: ExpertSize,
    preference: UnitPreference,
) -> Placement {
    let mut p = tier(loads, units, config, config.coverage);
    moec_ir::verify::placement(&p).unwrap();
    let options = group::Options { group: config.group, sizes: config.sizes, preference };
    group_layer(&mut p.experts[0], &loads.layers[0], size, units, options).unwrap();
    moec_ir::verify::placement(&p).unwrap();
    assign_layer_residency(&mut p.experts[0], &loads.layers[0], units, preference);
    moec_ir::verify::placement(&p).unwrap();
    p
}

/// NPUMoE, §4.1: with a chunk of 256 tokens, 8 experts and an imbalance of 2, the busiest expert has 64
/// tokens.
#[test]
fn the_papers_example_of_a_capacity() {
    let device = device();
    let units = Units::of(&device).unwrap();
    let loads = layer(256, vec![vec![64, 32, 32, 32, 32, 32, 16, 16]; 4]);
    assert_eq!(loads.layers[0].imbalance(), 2.0);
    let p = tier(&loads, &units, &config(3, Overflow::Prune), 1.0);
    let table = &p.experts[0];
    assert_eq!(table.tiers, [64, 32, 16]);
    let capacities: Vec<u32> = table.experts.iter().map(|r| r.capacity).collect();
    assert_eq!(capacities, [64, 32, 32, 32, 32, 32, 16, 16]);
    let expected = table.expected.unwrap();
    assert_eq!((expected.overflow, expected.padding), (0.0, 0.0));
    // One capacity for all must be the largest, and pads half of the rows.
    let one = tier(&loads, &units, &config(1, Overflow::Prune), 1.0);
    assert_eq!((one.experts[0].tiers.as_slice(), one.experts[0].expected.unwrap().padding), (&[64][..], 0.5));
}

/// NPUMoE, §4.1 and §1: capacities by the mean load, by quarters, and as given.
#[test]
fn capacities_follow_their_policy() {
    let device = device();
    let units = Units::of(&device).unwrap();
    // Means of 64, 32, 16 and five times less; the busiest has `r · B / E` tokens for r = 2.
    let loads = layer(256, vec![vec![128, 32, 32, 32, 32, 0, 0, 0], vec![0, 32, 32, 32, 32, 48, 48, 32]]);
    let capacities = |capacity| {
        let config = ExpertsConfig { capacity, ..config(3, Overflow::Prune) };
        let p = tier(&loads, &units, &config, 1.0);
        moec_ir::verify::placement(&p).unwrap();
        p.experts[0].experts.iter().map(|r| r.capacity).collect::<Vec<u32>>()
    };
    assert_eq!(loads.layers[0].imbalance(), 2.0);
    assert_eq!(capacities(Capacity::Mean), [64, 32, 32, 32, 32, 32, 32, 16]);
    assert_eq!(capacities(Capacity::Quartile), [128, 128, 32, 32, 32, 32, 32, 32]);
    assert_eq!(capacities(Capacity::Rows(40)), [48; 8], "in steps of 16");
    assert_eq!(capacities(Capacity::Rows(4096)), [256; 8], "at most a chunk");
    assert_eq!(capacities(Capacity::Coverage), [128, 32, 32, 32, 32, 48, 48, 32]);
}

#[test]
fn coverage_trades_padding_for_overflow() {
    let device = device();
    let units = Units::of(&device).unwrap();
    // One chunk in ten is a burst.
    let samples = (0..10).map(|i| if i == 0 { vec![160, 96] } else { vec![48, 208] }).collect();
    let loads = layer(256, samples);
    let rates =
        |coverage| tier(&loads, &units, &config(3, Overflow::Prune), coverage).experts[0].expected.unwrap();
    let (most, less) = (rates(1.0), rates(0.9));
    // A burst that occurs once is expected to overflow both sets of capacities.
    assert!(most.overflow > 0.0 && less.overflow >= most.overflow, "{less:?}");
    assert!(less.padding < most.padding, "{less:?} {most:?}");
}

#[test]
fn rarely_used_experts_get_larger_capacities_and_a_warning() {
    let device = device();
    let units = Units::of(&device).unwrap();
    // The second expert got 60 of 400 tokens. In most chunks it got none, so that its median is 0.
    let mut samples = vec![vec![100, 0]; 4];
    samples[0] = vec![40, 60];
    let mut loads = layer(100, samples);
    let table = |loads: &Loads| tier(loads, &units, &config(3, Overflow::Prune), 0.5);
    let p = table(&loads);
    // 60 tokens of 400 may be a rate of (60 + 12.8 + 3) / 400: 18.9 tokens of a chunk.
    assert_eq!((p.experts[0].experts[1].capacity, p.experts[0].experts[1].few), (32, true));
    assert!(few(&p).unwrap().contains("layer 2: 1"), "{:?}", few(&p));
    // With 66 tokens the median counts.
    loads.layers[0].chosen[1] = 66;
    assert_eq!(few(&table(&loads)), None);
    loads.layers[0].chosen[1] = 63;
    loads.layers[0].tokens = 64;
    assert_eq!(table(&loads).experts[0].experts[1].capacity, 112, "no more than a chunk, in steps of 16");
}

#[test]
fn quality_budget_selects_the_smallest_sufficient_coverage() {
    let mut calls = 0;
    let mut loss = |coverage: f64| {
        calls += 1;
        Ok(0.1 * (1.5 - coverage).max(0.0))
    };
    assert_eq!(smallest_coverage(0.1, &mut loss).unwrap(), 0.5);
    assert_eq!(smallest_coverage(0.061, &mut loss).unwrap(), 0.9);
    assert_eq!(smallest_coverage(0.0511, &mut loss).unwrap(), 0.99);
    // Coverages past the largest recorded load follow.
    assert_eq!(smallest_coverage(0.0, &mut loss).unwrap(), 1.5);
    assert!(calls <= 4 * 5, "{calls}");
    let e = smallest_coverage(0.01, &mut |_| Ok(0.02)).unwrap_err();
    assert_eq!(e.fault, Fault::Limit);
    assert!(e.to_string().contains("2.000 %") && e.hint.unwrap().contains("spill"));
    let e = smallest_coverage(0.01, &mut |_| Err(Error::environment("interrupted"))).unwrap_err();
    assert_eq!(e.fault, Fault::Environment);
    assert!(LADDER.is_sorted());
}

#[test]
fn eight_experts_of_phi_share_a_graph_and_nine_are_refused() {
    let device = device();
    let units = Units::of(&device).unwrap();
    let loads = layer(256, vec![vec![32; 16]; 3]);
    let sizes =
        |p: &Placement| -> Vec<usize> { p.experts[0].groups.iter().map(|g| g.experts.len()).collect() };
    let all = place(&loads, &units, &config(3, Overflow::Spill), LARGE, UnitPreference::Graphs);
    assert_eq!(sizes(&all), [8, 8]);
    assert_eq!(all.experts[0].groups[0].bytes, 1_258_291_200);
    let mut nine = config(3, Overflow::Spill);
    nine.group = Some(9);
    let mut p = tier(&loads, &units, &nine, 1.0);
    let options = group::Options { group: nine.group, sizes: 1, preference: UnitPreference::Auto };
    let e = group_layer(&mut p.experts[0], &loads.layers[0], LARGE, &units, options).unwrap_err();
    assert_eq!(
        e.to_string(),
        "graph `layers.2.group.0` would have 9 experts and 1415577600 bytes; the limit of `m2-ultra` is 1258291200 bytes"
    );
    assert!(e.hint.unwrap().contains("`group = 8`"));
    let huge = ExpertSize { bytes: 1 << 31, ..LARGE };
    let auto = group::Options { group: None, sizes: 1, preference: UnitPreference::Auto };
    let e = group_layer(&mut p.experts[0], &loads.layers[0], huge, &units, auto).unwrap_err();
    assert!(e.hint.unwrap().contains("not even one"));
    // On the CPU there is no graph, and no limit.
    place(&loads, &units, &config(3, Overflow::Spill), huge, UnitPreference::Cpu);
    // If the size does not divide the number of experts, the last group is smaller.
    nine.group = Some(6);
    assert_eq!(sizes(&place(&loads, &units, &nine, LARGE, UnitPreference::Graphs)), [6, 6, 4]);
}

#[test]
fn hot_groups_are_on_the_npu_and_cold_ones_on_the_cpu() {
    let device = device();
    let units = Units::of(&device).unwrap();
    let mut loads = vec![60; 8];
    loads.extend([1; 8]);
    let loads = layer(256, vec![loads; 4]);
    let p = place(&loads, &units, &config(3, Overflow::Spill), LARGE, UnitPreference::Auto);
    let (table, npu) = (&p.experts[0], units.npu_index());
    let units_of: Vec<u32> = table.experts.iter().map(|r| r.unit).collect();
    assert_eq!(units_of, [[npu; 8], [units.cpu_index(); 8]].concat());
    // Cold experts take any number of tokens; hot ones spill.
    assert!(table.experts[8..].iter().all(|r| r.capacity == 0 && r.fallback.is_none()));
    assert!(table.experts[..8].iter().all(|r| r.capacity == 64 && r.fallback == Some(units.cpu_index())));
    assert!(
        table.groups[0].why.starts_with("hot: 480.0 tokens") && table.groups[1].why.starts_with("cold: 8.0")
    );
    // A small expert never pays for a launch, at any load.
    let small = ExpertSize { weights: 1 << 16, bytes: 1 << 17 };
    let p = place(&loads, &units, &config(3, Overflow::Spill), small, UnitPreference::Auto);
    assert!(p.experts[0].groups.iter().all(|g| g.unit == units.cpu_index()));
    assert_eq!(p.experts[0].expected.unwrap().padding, 0.0);
}

/// A start loads a context for each graph, so that the graphs with the least gain stay on the CPU.
#[test]
fn number_of_contexts_is_limited_by_load_time() {
    let phone = Device::find("snapdragon-8-gen-3").unwrap();
    let units = Units::of(&phone).unwrap();
    // 4 seconds by 53.8 ms.
    assert_eq!(units.npu.most_contexts(), 74);
    let loads = layer(256, vec![(0..16).map(|e| 64 - 2 * e).collect(); 4]);
    let mut config = config(3, Overflow::Spill);
    // Gains of experts with 4-bit weights, each in its own graph.
    config.group = Some(1);
    let mut p = place(&loads, &units, &config, LARGE, UnitPreference::Auto);
    let npu = units.npu_index();
    let there = |p: &Placement| {
        let groups = p.experts[0].groups.iter().filter(|g| g.unit == npu);
        groups.flat_map(|g| g.experts.clone()).collect::<Vec<_>>()
    };
    assert_eq!(there(&p).len(), 16);
    limit_loaded_graphs(&mut p, &loads, &units, 5);
    moec_ir::verify::placement(&p).unwrap();
    assert_eq!(there(&p), [0, 1, 2, 3, 4]);
    let moved = &p.experts[0].groups[7];
    assert!(moved.why.starts_with("at most 5 graphs are loaded at the start"), "{}", moved.why);
    assert!(p.experts[0].experts[5..].iter().all(|r| r.capacity == 0 && r.unit == units.cpu_index()));
    limit_loaded_graphs(&mut p, &loads, &units, 5);
    assert_eq!(there(&p).len(), 5);
}

/// Experts share graphs where launches have high costs.
#[test]
fn costly_launches_make_groups_large() {
    let phone = Device::find("snapdragon-8-gen-3").unwrap();
    let units = Units::of(&phone).unwrap();
    assert_eq!(units.npu.launch_us(), 159.0);
    // Experts of ferris-relu: 24 of three matrices of 192 by 64.
    let small = ExpertSize { weights: 3 * 192 * 64, bytes: 3 * 192 * 32 };
    let loads = layer(256, vec![(0..24).map(|e| 40 - e).collect(); 4]);
    let p = place(&loads, &units, &config(6, Overflow::Spill), small, UnitPreference::Graphs);
    assert!(p.experts[0].groups.len() <= 6, "{}", p.experts[0].groups.len());
}

/// Loads of one layer at a chunk size, from balanced to extreme, with some experts unused.
fn any_loads() -> impl Strategy<Value = Loads> {
    (1_usize..=160, 1_u32..=600, 1_usize..12).prop_flat_map(|(experts, chunk, chunks)| {
        let load = prop_oneof![2 => Just(0), 4 => 0..=chunk.div_ceil(8), 1 => 0..=chunk];
        vec(vec(load, experts), chunks).prop_map(move |samples| layer(chunk, samples))
    })
}

/// The least sum of capacities with at most `most` of the values as capacities, by trying all.
fn least_rows(needs: &[u32], most: usize) -> u64 {
    let mut values = needs.to_vec();
    values.sort_unstable();
    values.dedup();
    let sets = (1_u32..1 << values.len()).filter(|s| s.count_ones() as usize <= most);
    let rows = |set: u32| -> Option<u64> {
        let tiers: Vec<u32> =
            values.iter().enumerate().filter(|(i, _)| set >> i & 1 == 1).map(|(_, v)| *v).collect();
        needs.iter().map(|n| tiers.iter().find(|t| *t >= n).map(|t| u64::from(*t))).sum()
    };
    sets.filter_map(rows).min().unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn every_expert_gets_the_smallest_tier_that_covers_its_load(
        loads in any_loads(),
        tiers in 1_usize..=6,
        coverage in 0.5_f64..=2.0,
    ) {
        let device = device();
        let units = Units::of(&device).unwrap();
        let p = tier(&loads, &units, &config(tiers, Overflow::Prune), coverage);
        moec_ir::verify::placement(&p).unwrap();
        let (table, layer) = (&p.experts[0], &loads.layers[0]);
        prop_assert!(table.tiers.len() <= tiers);
        prop_assert_eq!(table.experts.len(), layer.experts());
        for (e, row) in table.experts.iter().enumerate() {
            let load = f64::from(layer.quantile(e, coverage.min(1.0)));
            let need = ((load * coverage.max(1.0)).ceil() as u32).min(loads.chunk);
            prop_assert!(row.capacity >= need);
            let smaller = table.tiers.iter().copied().filter(|c| *c < row.capacity).max().unwrap_or(0);
            prop_assert!(row.few || smaller < need.max(1), "{} would do for {}", smaller, need);
            prop_assert!(row.capacity <= loads.chunk.next_multiple_of(16));
        }
        if coverage >= 1.0 {
            let own = layer.account(&|e| Some(table.experts[e].capacity), &|e| e);
            prop_assert_eq!(own.overflow, 0);
        }
    }

    #[test]
    fn chosen_tiers_compute_the_fewest_rows(needs in vec(0_u32..9, 1..12), tiers in 1_usize..=6) {
        let device = device();
        let units = Units::of(&device).unwrap();
        // Needs are in units of 16 tokens, and 64 chunks give every expert enough tokens to be judged.
        let loads = layer(160, vec![needs.iter().map(|n| n * 16).collect(); 64]);
        let p = tier(&loads, &units, &config(tiers, Overflow::Prune), 1.0);
        let table = &p.experts[0];
        let rows: u64 = table.experts.iter().map(|r| u64::from(r.capacity)).sum();
        // An expert without tokens gets its capacity by the rule of three: 3 tokens in 64 chunks, so one
        // alignment.
        let needs: Vec<u32> = needs.iter().map(|n| (n * 16).max(16)).collect();
        prop_assert_eq!(rows, least_rows(&needs, tiers));
    }

    #[test]
    fn groups_fit_the_device_and_are_sorted_by_popularity(
        loads in any_loads(),
        tiers in 1_usize..=6,
        spill in any::<bool>(),
        group in prop::option::of(1_usize..=12),
        mib in 1_u64..400,
        preference in prop::sample::select(UnitPreference::ALL.to_vec()),
    ) {
        let device = device();
        let units = Units::of(&device).unwrap();
        let limit = units.npu.graph_limit().unwrap();
        let size = ExpertSize { weights: mib << 19, bytes: mib << 20 };
        let overflow = if spill { Overflow::Spill } else { Overflow::Prune };
        let mut config = config(tiers, overflow);
        config.group = group.map(|g| g.min((limit / size.bytes) as usize));
        let p = place(&loads, &units, &config, size, preference);
        let (table, layer) = (&p.experts[0], &loads.layers[0]);
        for g in &table.groups {
            prop_assert_eq!(g.bytes, size.bytes * g.experts.len() as u64);
            prop_assert!(g.bytes <= limit || preference == UnitPreference::Cpu);
            prop_assert!(config.group.is_none_or(|most| g.experts.len() <= most));
            let popular: Vec<u64> = g.experts.iter().map(|&e| layer.chosen[e as usize]).collect();
            prop_assert!(popular.is_sorted_by(|a, b| a >= b));
            let [cpu, npu] = [units.cpu_index(), units.npu_index()].map(|u| g.cost_us[u as usize]);
            let hot = match preference {
                UnitPreference::Auto => npu < cpu,
                UnitPreference::Graphs => true,
                UnitPreference::Cpu => false,
            };
            prop_assert_eq!(g.unit == units.npu_index(), hot);
        }
        // The popular experts of a tier are in its first groups.
        for pair in table.groups.windows(2).filter(|w| w[0].tier == w[1].tier) {
            let of = |g: usize, at: usize| layer.chosen[pair[g].experts[at] as usize];
            prop_assert!(of(0, pair[0].experts.len() - 1) >= of(1, 0));
        }
        for row in &table.experts {
            prop_assert_eq!(row.capacity == 0, row.unit == units.cpu_index());
            prop_assert_eq!(row.fallback.is_some(), spill && row.capacity > 0);
        }
        let counted = layer.account_sized(
            &|e| Some(table.experts[e].capacity).filter(|c| *c > 0),
            &|e| table.experts[e].group as usize,
            &|g, most| Some(table.groups[g].rows(most, table.tiers[table.groups[g].tier as usize])),
        );
        let held_out = layer.held_out_overflow(&|e| Some(table.experts[e].capacity).filter(|c| *c > 0));
        prop_assert_eq!(table.expected.unwrap().overflow, held_out as f32);
        prop_assert_eq!(table.expected.unwrap().padding, counted.padding_rate() as f32);
    }

    #[test]
    fn chosen_group_size_is_the_cheapest(loads in any_loads(), mib in 1_u64..400) {
        let device = device();
        let units = Units::of(&device).unwrap();
        let size = ExpertSize { weights: mib << 19, bytes: mib << 20 };
        let fits = (units.npu.graph_limit().unwrap() / size.bytes) as usize;
        let cost = |group: Option<usize>| -> f64 {
            let mut config = config(1, Overflow::Spill);
            config.group = group;
            let p = place(&loads, &units, &config, size, UnitPreference::Auto);
            let of = |g: &moec_ir::placement::ExpertGroup| g.cost_us.iter().copied().fold(f32::INFINITY, f32::min);
            p.experts[0].groups.iter().map(|g| f64::from(of(g))).sum()
        };
        let chosen = cost(None);
        for group in [1, 2, 3, 5, 8, 16, 64, 160] {
            let other = cost(Some(group.min(fits)));
            prop_assert!(chosen <= other * (1.0 + 1e-4), "{chosen} µs, but {other} in groups of {group}");
        }
    }
}
