//! GPU kernels, executed from the PTX of bundles, give the results of transformers and of the CPU.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr, reason = "a test fails by panicking")]

use crate::support;
use moec_runtime::bundle::BundleReader;

use moec_bundle::read::Bundle;
use moec_cuda::{Emulated, artifact};
use moec_ir::plan::{Builtin, Code, Grid, Plan};
use moec_runtime::exec::accelerators::Executor;
use moec_runtime::exec::unit::{ComputeUnit as _, Launch, PoolThread, StepFault, Units};
use moec_runtime::platform::memory::Addr;
use moec_runtime::{CheckLevel, Engine, LogitRows, Options, Program};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::AtomicUsize;
use support::{
    PACKAGED, Setup, built, checkpoint, distance, expected, fails, list, logits_file, moec, ok, root,
};

/// Largest difference of any logit.
const TOLERANCE: f32 = 2e-3;
/// Largest difference of a logit for most rows, if prompts' rows are rounded to bf16; the logits reach 4.
const ROUNDED: f32 = 5e-2;
/// Tokens that are generated.
const GENERATED: usize = 4;

/// Placements on the GPU: the whole model, half of the experts, everything except half of the experts.
const EVERYTHING: &str = "[placement]\nattention = \"gpu\"\nexperts = \"gpu\"\n";
const HALF: &str = "[placement]\nexperts = \"gpu:50%\"\n";
const ALL_BUT_HALF: &str = "[placement]\nattention = \"gpu\"\nexperts = \"gpu:50%\"\nrest = \"gpu\"\n";

/// The device file of a GPU together with this machine's CPU.
fn device() -> PathBuf {
    root().join("targets/cuda/cuda.toml")
}

/// Builds a tiny checkpoint with these additions to `model.toml`; activations are exact.
fn build(family: &str, folder: &Path, format: &str, more: &str) -> Bundle {
    build_with(family, folder, format, [20, 96], |text| format!("{text}{more}"))
}

/// Like [`build`], with this chunk size, this context, and this change to `model.toml`.
fn build_with(
    family: &str,
    folder: &Path,
    format: &str,
    [chunk, context]: [usize; 2],
    change: impl Fn(&str) -> String,
) -> Bundle {
    let setup = Setup { format, chunk, batch: &[1], context };
    let toml = setup.write(&checkpoint(family), folder);
    let text = fs::read_to_string(&toml).unwrap();
    fs::write(&toml, change(&text)).unwrap();
    let bundle = folder.join("b");
    built(&toml, &["--target", device().to_str().unwrap()], &bundle);
    Bundle::open(&bundle).unwrap()
}

/// Runs a bundle with an emulated GPU, or with `MOEC_CUDA=gpu` (`cargo xtask gpu-check`) on this machine's.
fn run(bundle: &Bundle) -> Command {
    let mut run = moec();
    run.arg("run");
    if std::env::var_os("MOEC_CUDA").is_none_or(|v| v != "gpu") {
        run.arg("--emulate");
    }
    run.arg(&bundle.folder);
    run
}

/// Numbers of the accelerator's steps: kernel launches, and others.
fn accelerator_steps(plan: &Plan) -> [usize; 2] {
    let steps = plan.entries.iter().flat_map(|e| &e.steps).filter(|s| s.unit == 1);
    steps.fold([0; 2], |mut n, s| {
        n[usize::from(!matches!(s.code, Code::Builtin(Builtin::Launch { .. })))] += 1;
        n
    })
}

/// Steps that the CPU computes.
fn kernels_on_cpu(plan: &Plan) -> Vec<String> {
    let steps = plan.entries.iter().flat_map(|e| &e.steps).filter(|s| s.unit == 0);
    steps.map(|s| format!("{:?}", s.code)).collect()
}

/// Logits of a prompt.
fn logits(bundle: &Bundle, ids: &[u32]) -> Vec<f32> {
    let out = bundle.folder.with_extension("safetensors");
    ok(run(bundle).args(["logits", "--ids", &list(ids), "--out"]).arg(&out));
    logits_file(&out).1
}

/// A family on the unit gives the reference's logits and tokens. Returns its plan.
fn is_the_reference(family: &str, more: &str) -> Plan {
    let folder = tempfile::tempdir().unwrap();
    let bundle = build(family, folder.path(), "f32", more);
    let [launches, copies] = accelerator_steps(&bundle.plan);
    assert!(launches > 0 && copies > 0, "{family}: {more}");
    if more == EVERYTHING {
        // Tokens, positions, slots and requested rows are copied to the GPU, logits are copied back. Angles
        // from two tables depend on the prompt's length, and stay on the CPU.
        let left = kernels_on_cpu(&bundle.plan);
        assert!(left.iter().all(|code| code.contains("long: Some")), "{family}: {left:?}");
        assert!(copies <= 6 * bundle.plan.entries.len(), "{family}: {copies} copies");
    }
    let want = expected(&checkpoint(family));
    let worst = distance(&logits(&bundle, &want.ids), &want.logits);
    assert!(worst <= TOLERANCE, "{family}, {more}: a logit is off by {worst}");
    let prompt = want.greedy.len() - 24;
    let ids = generated(&bundle, &want.greedy[..prompt]);
    assert_eq!(ids, want.greedy[prompt..prompt + GENERATED], "{family}, {more}");
    bundle.plan
}

/// Greedy tokens after a prompt.
fn generated(bundle: &Bundle, prompt: &[u32]) -> Vec<u32> {
    let (ids, n) = (list(prompt), GENERATED.to_string());
    let output = ok(run(bundle).args(["generate", "--ids", &ids, "-n", &n, "--json"]));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    serde_json::from_value(report["ids"].clone()).unwrap()
}

/// The whole model on the GPU, for the nine families that are also tested with static graphs.
#[test]
fn whole_families_on_gpu_kernels_match_the_reference() {
    for family in PACKAGED {
        is_the_reference(family, EVERYTHING);
    }
}

/// Models with other mixers than attention: the gated delta rule with one decay per head (Qwen3-Next, Qwen3.5)
/// and per channel (Kimi Linear), state spaces of Mamba-2 (Nemotron 3, Granite 4) and of Mamba (Jamba), short
/// convolutions (LFM2).
const RECURRENT: [&str; 7] =
    ["qwen3_next", "qwen3_5_moe", "kimi_linear", "nemotron_h", "granitemoehybrid", "jamba", "lfm2_moe"];

/// All of a model with recurrent layers is on the GPU, states included: nothing of a mixer is copied.
#[test]
fn recurrent_layers_on_gpu_kernels_match_the_reference() {
    for family in RECURRENT {
        let plan = is_the_reference(family, EVERYTHING);
        let folded = plan.states.iter().filter(|s| s.kind.needs_snapshots());
        assert!(folded.count() > 0 && plan.states.iter().all(|s| s.memory == 1), "{family}");
        let kernels: BTreeSet<&str> = plan.launches.iter().map(|k| kind(&k.symbol)).collect();
        assert!(kernels.contains("causal_conv"), "{family}: {kernels:?}");
        let rule = ["delta_rule", "ssd", "selective_scan"].iter().any(|&k| kernels.contains(k));
        assert_eq!(rule, family != "lfm2_moe", "{family}: {kernels:?}");
    }
}

/// Attention in other forms: values that are keys and heads of several shapes (Gemma 4), chunks, layers without
/// rotation and queries that grow with their positions (Llama 4), gates on the output (Step 3.7, Trinity), windows
/// with sinks (MiMo-V2).
#[test]
fn attention_variants_on_gpu_kernels_match_the_reference() {
    for family in ["gemma4", "llama4", "step3p7", "afmoe", "mimo_v2_flash"] {
        let plan = is_the_reference(family, EVERYTHING);
        assert!(plan.states.iter().all(|s| s.memory == 1), "{family}");
    }
}

/// Kind of a kernel, by its symbol.
fn kind(symbol: &str) -> &str {
    const KINDS: [&str; 4] = ["causal_conv", "delta_rule", "ssd", "selective_scan"];
    KINDS.into_iter().find(|kind| symbol.starts_with(&format!("moec_{kind}_"))).unwrap_or("")
}

/// Recurrent states in a GPU's memory begin as zeros, go back to snapshots, and are apart from slot to slot: in
/// calls of any length, and in calls of two sequences.
#[test]
fn recurrent_states_on_a_gpu_go_back_and_share_calls() {
    for family in ["qwen3_next", "kimi_linear", "nemotron_h"] {
        let folder = tempfile::tempdir().unwrap();
        let setup = Setup { format: "f32", chunk: 12, batch: &[1, 2], context: 96 };
        let toml = setup.write(&checkpoint(family), folder.path());
        let text = fs::read_to_string(&toml).unwrap();
        fs::write(&toml, format!("{text}{EVERYTHING}")).unwrap();
        built(&toml, &["--target", device().to_str().unwrap()], &folder.path().join("b"));
        let bundle = Bundle::open(&folder.path().join("b")).unwrap();
        let code = bundle.unit().unwrap();
        let program = Program::new(bundle.plan.clone(), &|s| code.resolve(s)).unwrap();
        let mut unit = |_: &_| Some(Executor::Unit(Box::new(Emulated::default())));
        let (files, options) = (bundle.files(CheckLevel::Small).unwrap(), Options::default());
        let mut engine = Engine::with_units(&program, &bundle.folder, &mut unit, &files, options).unwrap();
        let want = expected(&checkpoint(family));
        let vocab = want.logits.len() / want.ids.len();
        let near = |got: &[f32], at: usize, what: &str| {
            let off = distance(got, &want.logits[at * vocab..][..vocab]);
            assert!(off <= TOLERANCE, "{family}, {what}: a logit is off by {off}");
        };
        let decode = |engine: &mut Engine<'_>, batch: &[(u32, usize, u32)]| {
            let mut rows = vec![Vec::new(); batch.len()];
            let mut keep = |i: usize, row: &[f32]| {
                rows[i] = row.to_vec();
                Ok(())
            };
            engine.decode(batch, &mut keep).unwrap();
            rows
        };
        let (ids, mut last) = (&want.ids, Vec::new());
        // Slot 0 in calls of 12, 12 and 1 row, slot 1 in calls of 7 and 1.
        for (slot, from, to) in [(0, 0, 12), (1, 0, 7), (0, 12, 25), (1, 7, 8)] {
            engine
                .prefill(slot, from, &ids[from..to], LogitRows::Last, &mut |_, row| {
                    last = row.to_vec();
                    Ok(())
                })
                .unwrap();
            near(&last, to - 1, &format!("row {to} of slot {slot}"));
        }
        assert_eq!(engine.snapshot(0).unwrap(), 25);
        let ahead = |engine: &mut Engine<'_>| -> Vec<Vec<f32>> {
            (25..28).flat_map(|pos| decode(engine, &[(0, pos, ids[pos])])).collect()
        };
        let first = ahead(&mut engine);
        near(&first[2], 27, "decoded");
        engine.rewind(0, 25).unwrap();
        assert!(ahead(&mut engine) == first, "{family}: the snapshot holds another state");
        for (row, pos) in decode(&mut engine, &[(0, 28, ids[28]), (1, 8, ids[8])]).iter().zip([28, 8]) {
            near(row, pos, "two sequences in a call");
        }
        // A sequence begins with nothing of the one before.
        engine.reset(1).unwrap();
        near(&decode(&mut engine, &[(1, 0, ids[0])])[0], 0, "from the beginning");
    }
}

/// Half of the experts on the GPU, alone and together with everything else.
#[test]
fn half_of_the_experts_on_gpu_kernels_match_the_reference() {
    for (i, family) in PACKAGED.into_iter().enumerate() {
        is_the_reference(family, [HALF, ALL_BUT_HALF][i % 2]);
    }
}

/// Every weight format that GPU kernels read, and a bf16 cache, give the results of the CPU with the same
/// weights.
#[test]
fn formats_on_gpu_kernels_match_the_cpu() {
    let family = "olmoe";
    let ids = &expected(&checkpoint(family)).ids[..24];
    let folder = tempfile::tempdir().unwrap();
    let formats =
        [("bf16", "bf16"), ("q8", "f32"), ("q4", "bf16"), ("q6", "f32"), ("q5", "bf16"), ("q3", "f32")];
    for (format, cache) in formats {
        let cached = format!("[memory]\nkv_cache = \"{cache}\"\n");
        let [on_cpu, away] = ["", EVERYTHING].map(|more| {
            let folder = folder.path().join(format!("{format}{}", more.len()));
            fs::create_dir(&folder).unwrap();
            // The table of embeddings is read row by row, which is not for planes of bits.
            let table = if matches!(format, "q6" | "q5" | "q3") { "q8" } else { format };
            let change = |text: &str| {
                let embeddings = |of| format!("embeddings = \"{of}\"");
                format!("{}{cached}{more}", text.replace(&embeddings(format), &embeddings(table)))
            };
            let bundle = build_with(family, &folder, format, [20, 96], change);
            assert_eq!(accelerator_steps(&bundle.plan)[0] > 0, !more.is_empty());
            logits(&bundle, ids)
        });
        let worst = distance(&on_cpu, &away);
        assert!(worst <= TOLERANCE, "{format} with a cache of {cache}: a logit is off by {worst}");
    }
}

/// With rounded rows, prompts are multiplied on tensor cores; decoding is not.
#[test]
fn families_in_bf16_on_gpu_kernels_are_near_the_reference() {
    for (i, family) in PACKAGED.into_iter().enumerate() {
        near_the_reference(family, "bf16", [EVERYTHING, HALF, ALL_BUT_HALF][i % 3]);
    }
}

/// The same for the other formats that tensor cores multiply.
#[test]
fn tensor_core_formats_are_near_the_reference() {
    for format in ["f16", "q8", "q4", "q6", "q3"] {
        near_the_reference("olmoe", format, EVERYTHING);
    }
}

/// Rounding of rows is part of a step's definition, so every step can be compared with the evaluator.
#[test]
fn steps_on_tensor_cores_verify() {
    for format in ["f16", "q4", "q2"] {
        let folder = tempfile::tempdir().unwrap();
        let rough = |text: &str| {
            // The table of embeddings is read row by row, which is not for planes of bits.
            let text = text.replace("embeddings = \"q2\"", "embeddings = \"q4\"");
            format!("{}{EVERYTHING}", text.replace("activations = \"f32\"", "activations = \"auto\""))
        };
        let bundle = build_with("olmoe", folder.path(), format, [48, 96], rough);
        assert!(bundle.plan.launches.iter().any(|k| k.symbol.contains("_as_bf16_")));
        ok(moec().args(["verify", "--quiet"]).arg(&bundle.folder));
    }
}

/// Logits of a family on tensor cores are near those of the same weights with exact activations, and the
/// generated tokens are the same. Parts on the CPU are exact in both.
fn near_the_reference(family: &str, format: &str, more: &str) {
    let folder = tempfile::tempdir().unwrap();
    let want = expected(&checkpoint(family));
    let [exact, rough] = ["exact", "rough"].map(|name| {
        let folder = folder.path().join(name);
        fs::create_dir(&folder).unwrap();
        build_with(family, &folder, format, [48, 96], |text| {
            let text = match format {
                "bf16" => text.to_owned(),
                _ => text.replace(&format!("embeddings = \"{format}\""), "embeddings = \"f32\""),
            };
            match name {
                "exact" => text,
                _ => format!("{}{more}", text.replace("activations = \"f32\"", "activations = \"auto\"")),
            }
        })
    });
    let ptx = fs::read_to_string(rough.folder.join(&rough.plan.launches[0].artifact)).unwrap();
    assert!(ptx.contains("mma.sync"), "{family}: {more}");
    for entry in &rough.plan.entries {
        let forms = entry.steps.iter().filter_map(|s| match s.code {
            Code::Builtin(Builtin::Launch { kernel }) => Some(&rough.plan.launches[kernel as usize].symbol),
            _ => None,
        });
        // Down projections of 48 neurons are not multiples of 32 columns, and stay in f32. Routers are stored
        // in f32.
        let stored = format!("_{format}_");
        let matrices =
            |s: &&String| (s.contains("expert_gate_up") || s.contains("linear_k64")) && s.contains(&stored);
        for symbol in forms.filter(matrices) {
            assert_eq!(symbol.contains("_as_bf16_"), entry.kind.is_prefill(), "{family}: {symbol}");
        }
    }
    let [exact_logits, rough_logits] = [&exact, &rough].map(|b| logits(b, &want.ids));
    // Rounding may send a token of these untrained models to another expert, which changes the rest of its
    // row. With bf16 on the CPU it is no better: for glm4_moe, the worst family, 19 of 48 rows are farther
    // away.
    let vocab = exact_logits.len() / want.ids.len();
    let rows = exact_logits.chunks(vocab).zip(rough_logits.chunks(vocab));
    let far: Vec<f32> = rows.map(|(a, b)| distance(a, b)).filter(|d| *d > ROUNDED).collect();
    let very: Vec<f32> = far.iter().copied().filter(|d| *d > 2.0 * ROUNDED).collect();
    let all = want.ids.len();
    eprintln!("{family} in {format}: {} of {all} rows are off by more than {ROUNDED}: {far:?}", far.len());
    assert!(2 * far.len() <= all && 5 * very.len() <= all, "{family} in {format}, {more}: {far:?}");
    let prompt = want.greedy.len() - 24;
    let [a, b] = [&exact, &rough].map(|b| generated(b, &want.greedy[..prompt]));
    assert_eq!(a, b, "{family} in {format}, {more}");
}

/// Big-little decoding (MoBiLE) with all experts on the GPU gives the CPU's tokens: few experts first, and
/// all experts after an uncertain token.
#[test]
fn big_little_on_gpu_kernels_decodes_like_the_cpu() {
    let family = "qwen3_moe";
    let want = expected(&checkpoint(family));
    let prompt = want.greedy.len() - 24;
    for gamma in ["0.0", "0.5", "1.0"] {
        let folder = tempfile::tempdir().unwrap();
        let tokens = [("cpu", ""), ("away", EVERYTHING)].map(|(name, place)| {
            let folder = folder.path().join(name);
            fs::create_dir(&folder).unwrap();
            let more = format!("[decode]\nbig_little = true\ngamma = {gamma}\n{place}");
            let bundle = build(family, &folder, "f32", &more);
            let little = bundle.plan.entries.iter().filter(|e| e.kind.to_string().starts_with("little"));
            let launches = little.flat_map(|e| &e.steps).filter(|s| s.unit == 1).count();
            assert_eq!(launches > 0, !place.is_empty());
            generated(&bundle, &want.greedy[..prompt])
        });
        assert_eq!(tokens[0], tokens[1], "gamma {gamma}");
        // With γ = 1 no token of the little model is kept, so the tokens are those of the whole model.
        assert!(gamma != "1.0" || tokens[1] == want.greedy[prompt..prompt + GENERATED], "{tokens:?}");
    }
}

/// Every step on the GPU is compared with the evaluator, and every kernel must be in the artifact.
#[test]
fn a_bundle_verifies_and_a_changed_one_does_not() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = build("mixtral", folder.path(), "f32", HALF);
    let verified = ok(moec().args(["verify", "--json"]).arg(&bundle.folder));
    let report: serde_json::Value = serde_json::from_slice(&verified.stdout).unwrap();
    let launch = &bundle.plan.launches[0];
    assert!(report.to_string().contains(&launch.symbol), "{report}");
    ok(moec().args(["verify", "--static"]).arg(&bundle.folder));

    let path = bundle.folder.join(&launch.artifact);
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.contains(".target sm_90"));
    // A changed file of a bundle is detected before it is used.
    fs::write(&path, text.replace("sm_90", "sm_80")).unwrap();
    let (_, stderr) = fails(run(&bundle).args(["generate", "--ids", "1,2,3", "-n", "1"]));
    assert!(stderr.contains("was changed after the build"), "{stderr}");
    // The artifact must have the launched kernels, and they must accept the plan's arguments.
    let refused = |change: &dyn Fn(&str) -> String, why: &str| {
        fs::write(&path, change(&text)).unwrap();
        let error = artifact::read(&BundleReader::unchecked(&bundle.folder), &bundle.plan, 1)
            .err()
            .unwrap()
            .to_string();
        assert!(error.contains(why), "{error}");
    };
    refused(&|t| t.replace(&launch.symbol, "another"), "there is no kernel");
    refused(&|t| t.replace("st.global", "sd.global"), "sd");
    let parameter = format!(".param .u64 .ptr .global .align 1 {}_param_0", launch.symbol);
    let narrow = format!(".param .u32 {}_param_0", launch.symbol);
    assert!(text.contains(&parameter));
    refused(&|t| t.replace(&parameter, &narrow), "on `gpu`");
    fs::remove_file(&path).unwrap();
    let error =
        artifact::read(&BundleReader::unchecked(&bundle.folder), &bundle.plan, 1).err().unwrap().to_string();
    assert!(error.contains("is missing from the bundle"), "{error}");
}

/// A kernel that accesses memory outside of the unit's is stopped, with the line of its text. A kernel with
/// an operand outside is not started.
#[test]
fn kernel_that_leaves_its_memory_is_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = build("mixtral", folder.path(), "f32", HALF);
    let code = bundle.unit().unwrap();
    let program = Program::new(bundle.plan.clone(), &|s| code.resolve(s)).unwrap();
    let mut unit = Emulated::default();
    unit.load(&program, 1, &BundleReader::unchecked(&bundle.folder)).unwrap();
    let base = unit.take(4096).unwrap().unwrap();
    let fault_text = |skip: usize| {
        let args = vec![base.plus(skip); bundle.plan.launches[0].operands as usize];
        let (taken, fault) = (AtomicUsize::new(0), OnceLock::new());
        let launch = Launch {
            code: moec_runtime::bundle::program::Code::Builtin(Builtin::Launch { kernel: 0 }),
            args: &args,
            grid: Grid::One,
            n: 1,
            seq_len: 1,
            taken: &taken,
            step: 3,
            layer_part: None,
            fault: &fault,
            units: Units::default(),
        };
        // SAFETY: an emulated unit checks every address before it accesses it.
        unsafe { unit.submit(&launch, PoolThread { index: 0, of: 1, scratch: base }) };
        match fault.into_inner() {
            Some(StepFault::Unit(e)) => e.to_string(),
            other => panic!("{other:?}"),
        }
    };
    let why = fault_text(4096);
    assert!(why.contains("operand 0 of step 3 is outside of its memory"), "{why}");
    // The first word of the experts' table is valid, but the matrix of its expert has no address.
    // SAFETY: both ends have four bytes.
    unsafe { unit.copy(Addr::read_only([1_u8, 0, 0, 0].as_ptr()), base.plus(4092), 4) };
    let why = fault_text(4092);
    assert!(why.contains(", line ") && why.contains("thread"), "{why}");
}

/// Without a GPU, a bundle is refused with the unit's name, and `info` reports it in advance.
#[test]
fn missing_gpu_is_reported_by_name() {
    if Path::new("/dev/nvidiactl").exists() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let bundle = build("mixtral", folder.path(), "f32", HALF);
    let (_, stderr) =
        fails(moec().arg("run").arg(&bundle.folder).args(["generate", "--ids", "1,2", "-n", "1"]));
    assert!(stderr.contains("the unit `gpu` cannot be used") && stderr.contains("--emulate"), "{stderr}");
    let info = ok(moec().arg("run").arg(&bundle.folder).args(["info", "--json"]));
    let info: serde_json::Value = serde_json::from_slice(&info.stdout).unwrap();
    assert_eq!(info["target"]["missing_units"], serde_json::json!(["gpu"]));
}

/// Operators without a GPU kernel are named when the bundle is built.
#[test]
fn operators_without_gpu_kernels_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |format: &str, more: &str, target: &Path| {
        let setup = Setup { format, chunk: 20, batch: &[1], context: 96 };
        let toml = setup.write(&checkpoint("olmoe"), folder.path());
        fs::write(&toml, format!("{}{more}", fs::read_to_string(&toml).unwrap())).unwrap();
        let mut build = moec();
        build.arg("build").arg(&toml).arg("--target").arg(target).args(["--quiet", "--no-run", "-o"]);
        fails(build.arg(folder.path().join("b"))).1
    };
    let error = refused("f32", &format!("[memory]\nkv_cache = \"q8\"\n{EVERYTHING}"), &device());
    assert!(
        error.contains("`gpu` cannot run `cache_write`") && error.contains("keep it on the CPU"),
        "{error}"
    );
    let error = refused("q4o", HALF, &device());
    assert!(error.contains("`gpu` cannot run") && error.contains("q4o"), "{error}");
    let error = refused("f32", &format!("{HALF}[memory]\nbudget = \"1 GiB\"\n"), &device());
    assert!(error.contains("experts that stay on disk cannot be shared with `gpu`"), "{error}");
    let text = fs::read_to_string(device()).unwrap();
    let other = folder.path().join("other.toml");
    for (sm, why) in [("", "needs `sm`, one of"), ("sm = \"sm_70\"\n", "there are no kernels for `sm_70`")] {
        fs::write(&other, text.replace("sm = \"sm_90\"\n", sm)).unwrap();
        let error = refused("f32", "", &other);
        assert!(error.contains("`unit.sm`") && error.contains(why), "{error}");
    }
    // A run opens one GPU. The second unit has a memory and links to it, and is otherwise valid.
    let parts: Vec<&str> = text.split("\n[[").collect();
    let again = |part: &&str| {
        let part = part.replace("\"gpu\"\nkind", "\"gpu1\"\nkind").replace("\"vram\"", "\"vram1\"");
        format!("\n[[{part}")
    };
    let second: String = parts.iter().skip(1).filter(|part| part.contains("\"vram\"")).map(again).collect();
    fs::write(&other, format!("{text}{second}")).unwrap();
    let error = refused("f32", "", &other);
    assert!(error.contains("`unit.backend`") && error.contains("the machine's first GPU"), "{error}");
    // Names of units are checked on every device.
    for key in ["attention", "experts", "rest"] {
        let more = format!("[placement]\n{key} = \"tpu\"\n");
        let error = refused("f32", &more, Path::new("m2-ultra"));
        assert!(error.contains(&format!("`{key}` under `[placement]` is `tpu`")), "{error}");
        let toml = folder.path().join("cpu.toml");
        fs::write(&toml, format!("[model]\nsource = {:?}\n{more}", checkpoint("olmoe"))).unwrap();
        let mut build = moec();
        build.args(["build", "--no-run", "--target", "x86-64-v3"]).arg(&toml).arg("-o");
        let stderr = String::from_utf8(ok(build.arg(folder.path().join("c"))).stderr).unwrap();
        assert!(
            stderr.contains(&format!("`{key}` under `[placement]` is `tpu`, which `x86-64-v3` has not")),
            "{stderr}"
        );
    }
}
