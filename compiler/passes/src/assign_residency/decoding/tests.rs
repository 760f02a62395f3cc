//! Tests of the units of groups in decoding.

use super::*;
use moec_device::{Device, MatmulTime, UnitKind};
use moec_ir::placement::{ExpertRow, Placement};
use moec_profile::decoding::CALLS;

/// An expert of Phi-3.5-MoE.
const LARGE: ExpertSize = ExpertSize { weights: 3 * 4096 * 6400, bytes: 6 * 4096 * 6400 };

/// A device whose launches and padding cost nothing: reading a graph's weights takes its time.
fn free() -> Device {
    let mut device = Device::find("m2-ultra").unwrap();
    let npu = device.unit_of(UnitKind::Npu).unwrap();
    let npu = &mut device.units[npu];
    (npu.dispatch_cost_us, npu.sync_cost_us) = (None, None);
    let row = |rows| MatmulTime { rows, weights: LARGE.weights, ms: 0.2, source: "a test".into() };
    npu.matmul = vec![row(1), row(256)];
    device
}

/// Four experts of one layer, of which each token chooses two: the first always, one of the others in turn.
fn layer() -> LayerLoads {
    LayerLoads { layer: 0, k: 2, tokens: 300, chosen: vec![300, 100, 100, 100], samples: Vec::new() }
}

/// The first expert has a graph of its own, the others share one, both with room for 64 rows of each.
fn table(units: &Units<'_>) -> ExpertTable {
    let group = |experts: &[u32]| ExpertGroup {
        tier: 0,
        unit: units.npu_index(),
        experts: experts.to_vec(),
        sizes: Vec::new(),
        bytes: 1,
        cost_us: Vec::new(),
        why: String::new(),
        decode: Vec::new(),
    };
    let row = |group| ExpertRow {
        capacity: 64,
        group,
        unit: units.npu_index(),
        tier: Some(0),
        ..ExpertRow::default()
    };
    ExpertTable {
        layer: 0,
        k: 2,
        tiers: vec![64],
        expected: None,
        groups: vec![group(&[0]), group(&[1, 2, 3])],
        experts: vec![row(0), row(1), row(1), row(1)],
    }
}

fn assigned(
    device: &Device,
    batches: &[u32],
    preference: UnitPreference,
    hot: bool,
    sizes: usize,
) -> ExpertTable {
    let units = Units::of(device).unwrap();
    let mut table = table(&units);
    let decoding = Decoding { batches, preference, hot, sizes, size: LARGE };
    assign_layer_decoding(&mut table, &layer(), &units, decoding);
    let placement =
        Placement { chunk: 64, units: units.names(), experts: vec![table.clone()], ..Placement::default() };
    moec_ir::verify::placement(&placement).unwrap();
    table
}

fn there(table: &ExpertTable) -> Vec<Vec<bool>> {
    table.groups.iter().map(|g| g.decode.iter().map(|d| d.unit != 0).collect()).collect()
}

#[test]
fn costs_decide_the_unit_of_decoding() {
    // A launch for the few rows of a batch is mostly padding: on devices of today it does not pay for a token.
    for name in ["m2-max", "m2-ultra", "snapdragon-8-gen-3", "snapdragon-8-plus-gen-1"] {
        let device = Device::find(name).unwrap();
        let table = assigned(&device, &[1], UnitPreference::Auto, false, 4);
        assert_eq!(there(&table), [[false], [false]], "{name}: {:?}", table.groups);
        assert!(table.groups.iter().all(|g| g.sizes.is_empty() && g.decode[0].why.starts_with("cold: ")));
    }
    // It pays where launching and padding cost nothing.
    let table = assigned(&free(), &[1, 2, 8], UnitPreference::Auto, false, 4);
    assert_eq!(there(&table), [[true; 3], [true; 3]]);
    assert!(table.groups.iter().all(|g| g.sizes == [16, 64]), "{:?}", table.groups);
    let costs = |d: &DecodeUnit| (d.cost_us[0], d.cost_us[1]);
    // 0.79 ms a row on the CPU, 0.2 ms a graph; three times that for three experts.
    assert_eq!(costs(&table.groups[0].decode[0]), (790.0, 200.0));
    assert_eq!(costs(&table.groups[1].decode[0]), (790.0, 600.0));
    assert!(table.groups[1].decode[2].why.starts_with("hot: 8.00 rows per call; 600.0 µs on the NPU"));
}

#[test]
fn requests_rooms_and_hot_networks_decide_before_costs() {
    let slow = Device::find("m2-ultra").unwrap();
    let table = assigned(&slow, &[1, 64], UnitPreference::Graphs, false, 2);
    assert_eq!(there(&table), [[true; 2]; 2]);
    assert!(table.groups.iter().all(|g| g.sizes == [16, 64]));
    // With one size the graph of prompts is launched as it is.
    let table = assigned(&slow, &[1], UnitPreference::Graphs, false, 1);
    assert!(table.groups.iter().all(|g| g.sizes.is_empty() && g.decode[0].unit == 1));
    let free = free();
    assert_eq!(there(&assigned(&free, &[1], UnitPreference::Cpu, false, 4)), [[false]; 2]);
    for preference in [UnitPreference::Auto, UnitPreference::Graphs] {
        let table = assigned(&free, &[1, 65], preference, false, 4);
        assert_eq!(there(&table), [[true, false]; 2], "no row of a batch may be past a capacity");
        assert!(table.groups[0].decode[1].why.contains("room for 64 rows"));
        let table = assigned(&free, &[1], preference, true, 4);
        assert_eq!(there(&table), [[false]; 2]);
        assert!(table.groups[0].decode[0].why.contains("placement.hot"));
    }
}

#[test]
fn cost_is_the_mean_over_the_drawn_calls() {
    let device = free();
    let units = Units::of(&device).unwrap();
    let table = assigned(&device, &[4], UnitPreference::Auto, false, 4);
    let calls = layer().decoding(4);
    assert_eq!(calls.samples.len(), CALLS as usize);
    let cpu = |n: u32| units.cpu.matmul_us(f64::from(n), LARGE.weights as f64).unwrap();
    let mean: f64 =
        calls.samples.iter().flat_map(|s| &s[1..]).map(|&n| cpu(n)).sum::<f64>() / f64::from(CALLS);
    let [on_cpu, on_npu] = table.groups[1].decode[0].cost_us[..] else { panic!() };
    assert!((f64::from(on_cpu) - mean).abs() < mean * 1e-6);
    assert_eq!(on_npu, 600.0, "every call of four rows chooses one of the three");
}
