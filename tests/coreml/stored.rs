//! Storage options of a device file: codes with scales, and caches that are written at fixed positions.
//!
//! The device files are named `m2-ultra`, so that commands that open a bundle find a device of that name.

use super::*;
use moec_runtime::bundle::BundleReader;

/// A copy of `m2-ultra` with these replacements under `[unit.graph]`.
fn device(case: &Case, changes: &[(&str, &str)]) -> String {
    let mut text = fs::read_to_string(support::root().join("targets/devices/m2-ultra.toml")).unwrap();
    for (old, new) in changes {
        assert!(text.contains(old), "{old}");
        text = text.replace(old, new);
    }
    let path = case.path("own.toml");
    fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

const CODES: (&str, &str) = ("weights = { value = []", "weights = { value = [\"q8\", \"q4\"]");
const COUNT: (&str, &str) = ("counted = { value = \"dense\"", "counted = { value = \"stored\"");
const PLACES: (&str, &str) =
    ("cache_write = { value = \"product\"", "cache_write = { value = \"slice_update\"");

/// Total bytes of the packages' weight files, and the logits of a prompt.
fn stored(case: &Case, bundle: &str, ids: &[u32]) -> (u64, Vec<f32>) {
    let files = tree(&case.path(&format!("{bundle}/artifacts")));
    let weights = files.iter().filter(|(name, _)| name.ends_with("weight.bin"));
    (weights.map(|(_, bytes)| bytes.len() as u64).sum(), logits(case, bundle, ids))
}

fn logits(case: &Case, bundle: &str, ids: &[u32]) -> Vec<f32> {
    let out = case.path(&format!("{bundle}.safetensors"));
    let mut run = moec();
    run.env("MOEC_CACHE", cache(case.folder.path()))
        .arg("--quiet")
        .args(["run", "--emulate"])
        .arg(case.path(bundle));
    ok(run.args(["logits", "--ids", &list(ids), "--out"]).arg(&out));
    logits_file(&out).1
}

fn relative_error(a: &[f32], b: &[f32]) -> f64 {
    let square = |x: f32| f64::from(x).powi(2);
    let off: f64 = a.iter().zip(b).map(|(a, b)| square(a - b)).sum();
    (off / b.iter().map(|b| square(*b)).sum::<f64>()).sqrt()
}

#[test]
fn packages_of_codes_agree_with_the_cpu_that_has_the_same_codes() {
    let Some(found) = coreml() else { return };
    let ids = expected(&checkpoint("olmoe")).ids;
    for (format, share) in [("q8", 0.70), ("q4", 0.55)] {
        let case = Case::new("olmoe", ON_NPU);
        let text = fs::read_to_string(&case.toml).unwrap();
        assert!(text.contains("f16"), "{text}");
        fs::write(&case.toml, text.replace("\"f16\"", &format!("\"{format}\""))).unwrap();
        ok(case.build("m2-ultra", "halves.moec").envs(found.clone()));
        ok(case.build(&device(&case, &[CODES, COUNT]), "codes.moec").envs(found.clone()));
        let (dense, halves) = stored(&case, "halves.moec", &ids);
        let (small, codes) = stored(&case, "codes.moec", &ids);
        // Reference: the same codes on the CPU, in f32.
        fs::write(
            &case.toml,
            fs::read_to_string(&case.toml)
                .unwrap()
                .replace("experts = \"npu\"", "experts = \"cpu\"")
                .replace("attention = \"npu\"", "attention = \"cpu\""),
        )
        .unwrap();
        ok(case.build("native", "cpu.moec").envs(found.clone()));
        let cpu = logits(&case, "cpu.moec", &ids);
        let (same, other) = (relative_error(&codes, &cpu), relative_error(&halves, &cpu));
        println!(
            "{format}: {dense} bytes in f16, {small} as codes; {same:.1e} from the CPU, f16 {other:.1e}"
        );
        assert!((small as f64) < share * dense as f64, "{format}: {small} of {dense} bytes");
        // Rows that are not whole groups stay in f16, unrounded, so that the results differ.
        assert!(same < 5e-2 && same < other / 2.0, "{format}: {same}, packages of f16 {other}");
    }
}

#[test]
fn cache_slice_updates_equal_product_writes() {
    let Some(found) = coreml() else { return };
    for family in ["olmoe", "gpt_oss", "deepseek_v2"] {
        let case = Case::new(family, "[placement]\nexperts = \"cpu\"\nattention = \"npu\"\n");
        let ids = expected(&checkpoint(family)).ids;
        assert!(ids.len() > SETUP.chunk, "one chunk proves nothing");
        ok(case.build("m2-ultra", "product.moec").envs(found.clone()));
        ok(case.build(&device(&case, &[PLACES]), "places.moec").envs(found.clone()));
        let functions = |bundle: &str| -> Vec<String> {
            let path = case.path(&format!("{bundle}/artifacts/layers.0.attn.mlpackage"));
            Package::open(&BundleReader::unchecked(&path))
                .unwrap()
                .program
                .functions
                .keys()
                .cloned()
                .collect()
        };
        assert_eq!(functions("product.moec"), ["chunk16", "chunk32"]);
        assert_eq!(
            functions("places.moec"),
            ["chunk16", "chunk32", "chunk32_at0", "chunk32_at24", "chunk32_at48"]
        );
        let ((a, product), (b, places)) =
            (stored(&case, "product.moec", &ids), stored(&case, "places.moec", &ids));
        assert_eq!(a, b, "functions share weights");
        for (bundle, way) in [("product.moec", "product"), ("places.moec", "slice_update")] {
            let stdout = ok(moec().arg("explain").arg(case.path(bundle))).stdout;
            let text = String::from_utf8(stdout).unwrap();
            let line = text.lines().find(|l| l.trim().starts_with("cache_write")).unwrap();
            assert!(line.contains(way) && line.contains("slice_update runs on the CPU"), "{line}");
        }
        // Scores cover fewer masked positions, which only changes the order of sums.
        let off = relative_error(&places, &product);
        println!("{family}: {off:.1e}");
        assert!(off < 1e-3, "{family}: {off}");
        // Decoding continues from the prompts' caches.
        let generate = |bundle: &str| {
            let mut run = moec();
            run.env("MOEC_CACHE", cache(case.folder.path()))
                .arg("--quiet")
                .args(["run", "--emulate"])
                .arg(case.path(bundle));
            ok(run.args(["generate", "--ids", &list(&ids[..30]), "-n", "6", "--json"])).stdout
        };
        let ids_of =
            |bundle: &str| serde_json::from_slice::<Value>(&generate(bundle)).unwrap()["ids"].clone();
        assert_eq!(ids_of("product.moec"), ids_of("places.moec"), "{family}");
    }
}
