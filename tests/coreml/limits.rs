//! Parts over a limit, and invalid packages.

use super::*;
use moec_runtime::bundle::BundleReader;

#[test]
fn parts_that_cannot_be_graphs_stay_on_the_cpu_or_are_refused() {
    // A dense layer of deepseek_v2 has 37 KB of weights, an attention 35 KB.
    let with_attention = |attention: &str| {
        let config = format!("[placement]\nexperts = \"cpu\"\nattention = \"{attention}\"\n");
        let case = Case::new("deepseek_v2", &config);
        let mut build = case.build(&small(&case, 36_500), "out.moec");
        build.args(["--stop-after", "assign_residency", "--print-after", "assign_residency"]);
        (case, build)
    };
    let (_case, mut build) = with_attention("npu");
    let (code, stderr) = fails(&mut build);
    assert!(code == 1 && stderr.contains("`layers.0.ffn` cannot be a graph"), "{stderr}");
    assert!(stderr.contains("bytes of weights") && stderr.contains("attention = \"auto\""), "{stderr}");

    let (_case, mut build) = with_attention("auto");
    let text = String::from_utf8(ok(&mut build).stdout).unwrap();
    let p = moec_ir::text::parse_placement(&text).unwrap();
    let of = |scope: &str, op: &str| {
        let mut found = p.ops.iter().filter(|o| {
            matches!(o.entry, moec_ir::EntryKind::Prefill(_)) && o.scope.to_string() == scope && o.op == op
        });
        let row = found.next().unwrap().clone();
        (p.unit(row.unit).to_owned(), row.why)
    };
    let (unit, why) = of("layers.*.ffn", "linear_glu");
    assert!(
        unit == "cpu" && why.starts_with("cannot be a graph: graph `layers.0.ffn` has "),
        "{unit}: {why}"
    );
    // Decoding would cost more on the Neural Engine, and the KV cache is on the unit of attention.
    let (unit, why) = of("layers.*.attn", "attention");
    assert!(unit == "cpu" && why.contains("the KV cache is on one unit"), "{unit}: {why}");
}

#[test]
fn exchanged_packages_of_two_layers_are_detected() {
    let Some(found) = coreml() else { return };
    let case = Case::new("gpt_oss", "[placement]\nexperts = \"cpu\"\nattention = \"npu\"\n");
    ok(case.build("m2-ultra", "out.moec").envs(found));
    // Two packages are exchanged, and their hashes in the manifest with them: hashes match, but weights do
    // not.
    let at = |layer: usize| case.path(&format!("out.moec/artifacts/layers.{layer}.attn.mlpackage"));
    fs::rename(at(0), case.path("kept")).unwrap();
    fs::rename(at(1), at(0)).unwrap();
    fs::rename(case.path("kept"), at(1)).unwrap();
    let path = case.path("out.moec/manifest.json");
    let mut manifest: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let files = manifest["files"].as_object_mut().unwrap();
    let own: Vec<String> = files.keys().filter(|k| k.contains("layers.0.attn")).cloned().collect();
    assert!(own.len() >= 3, "{own:?}");
    for name in own {
        let other = name.replace("layers.0", "layers.1");
        let (a, b) = (files[&name].take(), files[&other].take());
        (files[&name], files[&other]) = (b, a);
    }
    fs::write(&path, manifest.to_string()).unwrap();
    // Weights that are stored only in packages are compared with the checkpoint.
    let verify = || {
        let mut command = moec();
        command.arg("verify").arg("--quiet").arg(case.path("out.moec"));
        command
    };
    let (code, stderr) = fails(&mut verify());
    assert!(code == 1 && stderr.contains("--source"), "{stderr}");
    let (code, stderr) = fails(verify().arg("--source").arg(checkpoint("gpt_oss")));
    assert!(
        code == 1 && stderr.contains("`chunk32` of `artifacts/layers.0.attn.mlpackage` is off"),
        "{stderr}"
    );
    assert!(stderr.contains("`chunk16` of `artifacts/layers.1.attn.mlpackage` is off"), "{stderr}");
    assert!(!stderr.contains("head"), "{stderr}");
}

#[test]
fn a_vocabulary_over_the_limit_becomes_several_packages_with_the_same_logits() {
    let Some(found) = coreml() else { return };
    let case = Case::new("olmoe", "[placement]\nexperts = \"cpu\"\nattention = \"npu\"\n");
    // 320 entries of 64 channels are 41 KB, an attention is 33 KB.
    let device = small(&case, 36_000);
    ok(case.build(&device, "out.moec").envs(found.clone()));
    let files = tree(&case.path("out.moec/artifacts"));
    let heads: BTreeSet<&str> =
        files.iter().filter_map(|(n, _)| n.split_once(".mlpackage")).map(|(n, _)| n).collect();
    assert!(heads.is_superset(&BTreeSet::from(["head.0", "head.1"])) && !heads.contains("head"), "{heads:?}");
    // Executed from their packages, the parts give logits that are bit-identical to the unsplit head's.
    ok(case.build("m2-ultra", "whole.moec").envs(found));
    let want = expected(&checkpoint("olmoe"));
    let logits = |bundle: &str| {
        let out = case.path(&format!("{bundle}.safetensors"));
        let mut run = moec();
        run.env("MOEC_CACHE", cache(case.folder.path()))
            .arg("--quiet")
            .args(["run", "--emulate"])
            .arg(case.path(bundle));
        ok(run.args(["logits", "--ids", &list(&want.ids), "--out"]).arg(&out));
        logits_file(&out)
    };
    let (shape, of_parts) = logits("out.moec");
    let (whole_shape, whole) = logits("whole.moec");
    assert_eq!((shape[0], &shape), (want.ids.len(), &whole_shape));
    assert!(of_parts == whole, "split heads give other logits");
    // The parts of the head hold the rows of the vocabulary in order, as in the checkpoint.
    let rows = Weights::open("olmoe").matrix("lm_head.weight").bytes();
    let stored = heads.iter().filter(|name| name.starts_with("head.")).flat_map(|name| {
        let package = Package::open(&BundleReader::unchecked(
            &case.path(&format!("out.moec/artifacts/{name}.mlpackage")),
        ))
        .unwrap();
        let f = &package.program.functions["rows16"];
        let convs = f.ops.iter().filter(|op| op.kind == "conv");
        let weights =
            convs.map(|op| f.constant(op.arg("weight").unwrap()).unwrap().bytes(&package.weights).to_vec());
        weights.collect::<Vec<_>>().concat()
    });
    assert!(stored.eq(rows), "rows of the vocabulary");
}
