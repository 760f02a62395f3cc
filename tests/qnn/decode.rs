//! Experts of decoding in networks.

use super::hot::{decoded_differences, logits};
use super::{Tiny, checkpoint, without_costs};
use crate::support::ok;
use moec_bundle::read::Bundle;
use moec_ir::EntryKind;
use moec_ir::plan::{Builtin, Code, Plan};
use std::fs;

fn plan(built: &Tiny) -> Plan {
    Bundle::open(&built.bundle()).unwrap().plan
}

/// Steps of networks of experts, by entry point that decodes.
fn launched(plan: &Plan) -> Vec<usize> {
    let decoding = plan.entries.iter().filter(|e| matches!(e.kind, EntryKind::Decode(_)));
    let experts = |code: &Code| matches!(code, Code::Builtin(Builtin::Experts { .. }));
    decoding.map(|e| e.steps.iter().filter(|s| experts(&s.code)).count()).collect()
}

#[test]
fn decoded_experts_in_networks_agree_with_those_on_the_cpu() {
    for model in ["mixtral", "olmoe"] {
        let on_cpu = Tiny::new(model, &[1, 2], "[placement]\nexperts = \"npu\"\ndecode = \"cpu\"\n");
        let on_npu = Tiny::new(model, &[1, 2], "[placement]\nexperts = \"npu\"\ndecode = \"npu\"\n");
        let layers = plan(&on_npu).model.layers as usize;
        assert_eq!((launched(&plan(&on_cpu)), launched(&plan(&on_npu))), (vec![0; 2], vec![layers; 2]));
        let report = on_npu.verify();
        assert_eq!(report["verdict"], "right", "{report}");
        let (npu, cpu) = (logits(&on_npu), logits(&on_cpu));
        assert!(npu[..npu.len() / 2] == cpu[..cpu.len() / 2], "{model}: prompts are computed alike");
        let off = decoded_differences(&npu, &cpu);
        println!("{model}: decoded in networks, logits are off by at most {:.1e} of their spread", off[11]);
        assert!(off[0] > 0.0 && off[10] < 5e-3 && off[11] < 0.1, "{model}: {off:?}");
    }
}

#[test]
fn results_do_not_depend_on_the_queues_of_a_phone() {
    let run = |queues: u32| {
        let keys = "[placement]\nexperts = \"npu\"\ndecode = \"npu\"\n[experts]\ngroup = 1\n";
        let built = Tiny::calibrated("olmoe", &[1, 2], keys, Vec::new());
        let device = built.at("phone.toml");
        let key = format!("queues = {{ value = {queues}, source = \"a test\" }}\nmax_graph_bytes =");
        fs::write(&device, without_costs().replacen("max_graph_bytes =", &key, 1)).unwrap();
        ok(&mut built.build(device));
        let plan = plan(&built);
        assert_eq!(plan.units[1].queues, queues);
        assert!(plan.expert_sets.iter().any(|s| s.groups.len() >= 4), "{:?}", plan.expert_sets);
        logits(&built)
    };
    assert!(run(1) == run(4), "queues change results");
}

/// Networks of hot neurons are launched in place of whole experts.
#[test]
fn hot_networks_come_before_whole_experts() {
    let model = "turbosparse_mixtral";
    assert!(checkpoint(model).is_dir());
    let built = Tiny::new(model, &[1], "[placement]\nexperts = \"npu\"\ndecode = \"npu\"\nhot = \"npu\"\n");
    let plan = plan(&built);
    assert!(plan.expert_sets.iter().filter(|s| s.batch.is_some()).all(|s| s.hot.is_some()));
    assert!(launched(&plan)[0] > 0);
    let of_groups = plan.placement.experts.iter().flat_map(|t| &t.groups).flat_map(|g| &g.decode);
    assert!(of_groups.clone().count() > 0 && of_groups.clone().all(|d| d.unit == 0 && d.why.contains("hot")));
}
