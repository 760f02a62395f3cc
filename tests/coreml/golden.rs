//! Families with Core ML packages: structure of the packages, their weights, and their results.

use super::*;
use moec_runtime::bundle::BundleReader;

/// Checks the structure of a function in a package; returns its weight matrices.
fn function(name: &str, f: &Function, package: &Package, attention: bool) -> BTreeSet<Vec<u8>> {
    let known: BTreeSet<&str> = Rules::ANE.ops.iter().map(|op| op.name()).collect();
    let mut weights = BTreeSet::new();
    for op in &f.ops {
        let kind = if op.kind == "coreml_update_state" { "write_state" } else { &op.kind };
        assert!(known.contains(kind), "{name}: the Neural Engine has no `{}`", op.kind);
        match kind {
            "conv" => {
                let id = op.arg("weight").unwrap();
                let constant = f.constant(id).unwrap_or_else(|| panic!("{name}: a weight that is computed"));
                assert!(matches!(constant.ty.shape[..], [_, _, 1, 1]), "{name}: {:?}", constant.ty.shape);
                // Experts of one convolution are consecutive matrices.
                let groups = op.arg("groups").and_then(|id| f.constant(id)?.integers(&package.weights));
                let groups = groups.map_or(1, |g| g[0] as usize);
                let bytes = constant.bytes(&package.weights);
                weights.extend(bytes.chunks_exact(bytes.len() / groups).map(<[u8]>::to_vec));
            }
            // Only products of two computed values, such as scores; no weight.
            "matmul" => {
                assert!(["x", "y"].iter().all(|p| f.constant(op.arg(p).unwrap()).is_none()), "{name}");
            }
            _ => {}
        }
    }
    for value in f.values.iter().filter(|v| !matches!(v.origin, Made::Constant(_))) {
        assert_eq!(value.ty.dtype, Dtype::F16, "{name}: `{}`", value.name);
    }
    // The last number in a function's name is its number of rows: `cap16`, `chunk32`, `rows16`.
    let rows: usize = name.trim_start_matches(char::is_alphabetic).parse().unwrap();
    assert!(rows.is_multiple_of(16), "{name}");
    assert_eq!(f.states.len(), usize::from(attention), "{name}");
    for &state in &f.states {
        let uses = |kind: &str| {
            f.ops.iter().any(|op| op.kind == kind && op.args.values().flatten().any(|id| *id == state))
        };
        assert!(uses("read_state") && (uses("write_state") || uses("coreml_update_state")), "{name}");
    }
    weights
}

/// Packages of a family other than those of experts, without `layers.L.`.
fn parts(family: &str) -> (&'static [&'static str], &'static [&'static str]) {
    // For the first layer, and for all others.
    match family {
        "deepseek_v2" | "deepseek_v3" | "glm4_moe" => (&["attn", "ffn"], &["attn", "shared"]),
        "qwen2_moe" => (&["attn", "shared"], &["attn", "shared"]),
        _ => (&["attn"], &["attn"]),
    }
}

fn golden(family: &str) {
    let Some(found) = coreml() else { return };
    let case = Case::new(family, ON_NPU);
    ok(case.build("m2-ultra", "out.moec").envs(found));
    let plan = case.plan("out.moec");

    // There is a package for every part on the Neural Engine.
    let files = tree(&case.path("out.moec/artifacts"));
    let packages: BTreeSet<String> =
        files.iter().filter_map(|(name, _)| Some(name.split_once(".mlpackage")?.0.to_owned())).collect();
    let (first, others) = parts(family);
    let mut names = BTreeSet::from(["head".to_owned()]);
    for layer in 0..plan.model.layers {
        let of = if layer == 0 { first } else { others };
        names.extend(of.iter().map(|part| format!("layers.{layer}.{part}")));
    }
    for table in &plan.placement.experts {
        names.extend((0..table.groups.len()).map(|g| table.group_name(g)));
    }
    assert_eq!(packages, names);

    // Every function computes the checkpoint's results.
    let mut verify = moec();
    verify.arg("verify").arg("--quiet").arg("--json").arg("--source").arg(checkpoint(family));
    let report = ok(verify.arg(case.path("out.moec"))).stdout;
    let report: Value = serde_json::from_slice(&report).unwrap();
    let mut functions: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for f in report["packages"].as_array().unwrap() {
        let error = f["error"]["relative"].as_f64().unwrap();
        assert!(error > 0.0 && error < 3e-3, "{f}");
        assert_eq!((&f["refused"], f["findings"].as_array().unwrap().len()), (&false.into(), 0), "{f}");
        let package = f["package"].as_str().unwrap().strip_prefix("artifacts/").unwrap();
        let package = package.strip_suffix(".mlpackage").unwrap().to_owned();
        functions.entry(package).or_default().insert(f["function"].as_str().unwrap().to_owned());
    }
    assert_eq!(functions.keys().cloned().collect::<BTreeSet<_>>(), names);

    // Static checks also find every function that the plan calls.
    let mut verify = moec();
    verify.args(["verify", "--static", "--quiet", "--json"]).arg(case.path("out.moec"));
    let report: Value = serde_json::from_slice(&ok(&mut verify).stdout).unwrap();
    assert_eq!(report["functions"], plan.graphs.len());

    // Structure and weights of the packages.
    let weights = Weights::open(family);
    for (name, functions) in functions {
        let path = case.path(&format!("out.moec/artifacts/{name}.mlpackage"));
        let package = Package::open(&BundleReader::unchecked(&path)).unwrap();
        let limits = check::Limits { last_axis_bytes: 64, row_bytes: 16, ..check::Limits::default() };
        assert_eq!(check::check(&package, &limits), [], "{name}");
        let own: BTreeSet<String> = package.program.functions.keys().cloned().collect();
        assert_eq!(own, functions, "{name}");
        let attention = name.split('.').any(|word| word == "attn");
        if !name.contains("group") {
            let word = if attention { "chunk" } else { "rows" };
            assert_eq!(own, BTreeSet::from([16, 32].map(|n| format!("{word}{n}"))), "{name}");
        }
        let expected: BTreeSet<Vec<u8>> = weights.expected(&name, &plan).iter().map(Matrix::bytes).collect();
        for (at, f) in &package.program.functions {
            assert!(function(at, f, &package, attention) == expected, "{name}: weights of `{at}`");
        }
    }
    emulated(family, &case);
}

/// The whole model with an emulated Neural Engine. Rows past a capacity spill, so logits differ from
/// transformers' only by f16.
fn emulated(family: &str, case: &Case) {
    let want = expected(&checkpoint(family));
    let out = case.path("logits.safetensors");
    let run = || {
        let mut command = moec();
        command.env("MOEC_CACHE", cache(case.folder.path())).arg("--quiet").args(["run", "--emulate"]);
        command.arg(case.path("out.moec"));
        command
    };
    // Without emulation, a machine without a Neural Engine refuses the bundle, and names both remedies.
    if !cfg!(target_os = "macos") {
        let (code, stderr) = fails(moec().arg("run").arg(case.path("out.moec")).arg("info"));
        assert!(
            code == 1 && stderr.contains("--emulate") && stderr.contains("sh runner/build.sh"),
            "{stderr}"
        );
    }
    ok(run().args(["logits", "--ids", &list(&want.ids), "--out"]).arg(&out));
    let (shape, logits) = logits_file(&out);
    assert_eq!(shape, [want.ids.len(), logits.len() / want.ids.len()]);
    let mean = want.logits.iter().map(|&x| f64::from(x)).sum::<f64>() / want.logits.len() as f64;
    let spread: f64 = want.logits.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum();
    let off: f64 = logits.iter().zip(&want.logits).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    let relative = (off / spread).sqrt();
    assert!(relative > 0.0 && relative < 2e-2, "{family}: {relative}");
    // Prompt and decoding share one state.
    let (prompt, _) = want.greedy.split_at(want.greedy.len() - 24);
    let stdout = ok(run().args(["generate", "--ids", &list(prompt), "-n", "24", "--json"])).stdout;
    let report: Value = serde_json::from_slice(&stdout).unwrap();
    let ids: Vec<u32> = serde_json::from_value(report["ids"].clone()).unwrap();
    // In f16 near ties of these untrained models may be decided differently, which changes all later tokens.
    assert_eq!(ids[..8], want.greedy[prompt.len()..][..8], "{family}");
}

macro_rules! families {
    ($($family:ident)*) => {
        $(#[test]
        fn $family() {
            golden(stringify!($family));
        })*

        #[test]
        fn every_packaged_family_has_a_test() {
            assert_eq!([$(stringify!($family)),*], support::PACKAGED);
        }
    };
}

families! { deepseek_v2 deepseek_v3 glm4_moe gpt_oss mixtral olmoe phimoe qwen2_moe qwen3_moe }

#[test]
fn two_builds_write_the_same_packages() {
    let Some(found) = coreml() else { return };
    let trees = ["a", "b"].map(|_| {
        let case = Case::new("deepseek_v3", ON_NPU);
        ok(case.build("m2-ultra", "out.moec").envs(found.clone()));
        tree(&case.path("out.moec"))
    });
    let packages = trees[0].iter().filter(|(name, _)| name.contains(".mlpackage")).count();
    assert!(packages > 3 * 5, "{packages} files");
    let names = |i: usize| trees[i].iter().map(|(name, _)| name).collect::<Vec<_>>();
    assert_eq!(names(0), names(1));
    for ((name, one), (_, two)) in trees[0].iter().zip(&trees[1]) {
        assert!(one == two, "`{name}` differs between two builds");
    }
}
