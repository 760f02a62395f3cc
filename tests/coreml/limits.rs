//! Parts over a limit, and invalid packages.

use super::*;
use moec_runtime::bundle::BundleReader;

#[test]
fn what_cannot_be_a_graph_stays_and_says_why_or_is_refused_by_name() {
    // A dense layer of deepseek_v2 has 37 KB of weights, an attention 35 KB.
    let wanted = |attention: &str| {
        let config = format!("[placement]\nexperts = \"cpu\"\nattention = \"{attention}\"\n");
        let case = Case::new("deepseek_v2", &config);
        let mut build = case.build(&small(&case, 36_500), "out.moec");
        build.args(["--stop-after", "assign_residency", "--print-after", "assign_residency"]);
        (case, build)
    };
    let (_case, mut build) = wanted("npu");
    let (code, said) = fails(&mut build);
    assert!(code == 1 && said.contains("`layers.0.ffn` cannot be a graph"), "{said}");
    assert!(said.contains("bytes of weights") && said.contains("attention = \"auto\""), "{said}");

    let (_case, mut build) = wanted("auto");
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
    // Decoding costs more there, and the cache is where attention is.
    let (unit, why) = of("layers.*.attn", "attention");
    assert!(unit == "cpu" && why.contains("the KV cache is on one unit"), "{unit}: {why}");
}

#[test]
fn the_package_of_another_layer_is_found_out() {
    let Some(found) = coreml() else { return };
    let case = Case::new("gpt_oss", "[placement]\nexperts = \"cpu\"\nattention = \"npu\"\n");
    ok(case.build("m2-ultra", "out.moec").envs(found));
    // Two packages change places, and the manifest with them: the hashes are right, the numbers are not.
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
    // What lives in packages alone is held against the checkpoint.
    let verify = || {
        let mut command = moec();
        command.arg("verify").arg("--quiet").arg(case.path("out.moec"));
        command
    };
    let (code, said) = fails(&mut verify());
    assert!(code == 1 && said.contains("--source"), "{said}");
    let (code, said) = fails(verify().arg("--source").arg(checkpoint("gpt_oss")));
    assert!(code == 1 && said.contains("`chunk32` of `artifacts/layers.0.attn.mlpackage` is off"), "{said}");
    assert!(said.contains("`chunk16` of `artifacts/layers.1.attn.mlpackage` is off"), "{said}");
    assert!(!said.contains("head"), "{said}");
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
    // Run from their packages, the parts give the logits of the whole, to the bit.
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
    // What is in them, held against the checkpoint: `head.0` and the rest are the rows of the vocabulary, in
    // order.
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
