//! A golden checkpoint with a profile and a `model.toml`, built for a Mac.

use super::*;
use moec_runtime::CheckLevel;

/// Tokens per prefill chunk; chunks of 24 rows are padded to 32.
pub(crate) const SETUP: Setup<'_> = Setup { format: "f16", chunk: 24, batch: &[1, 2], context: 80 };
pub(crate) const ON_NPU: &str =
    "[placement]\nexperts = \"npu\"\nattention = \"npu\"\n[experts]\noverflow = \"spill\"\n";

/// A profile in which tokens choose experts in rotation, later experts more often.
pub(crate) fn profile(source: &Path) -> Profile {
    let (checkpoint, spec) = moec_import::open(source, &ImportOptions::default()).unwrap();
    let mut trace = Trace::new(SETUP.chunk as u32);
    let mut layers = Vec::new();
    for (i, layer) in spec.layers.iter().enumerate() {
        if let Some(moe) = layer.moe() {
            layers.push(Routing::new(i as u32, moe.router.k as u32, moe.router.experts));
        }
    }
    trace.begin();
    for turn in 0..8 {
        let mut loads = Vec::new();
        for layer in &mut layers {
            let (n, k) = (layer.chosen.len(), layer.k as usize);
            let mut own = vec![0_u16; n];
            for token in 0..SETUP.chunk {
                let chosen: Vec<usize> = (0..k).map(|i| (turn + token * token + i) % n).collect();
                for (i, &a) in chosen.iter().enumerate() {
                    own[a] += 1;
                    layer.chosen[a] += 1;
                    for &b in &chosen[..i] {
                        let pair = layer.pair(a, b).unwrap();
                        layer.together[pair] += 1;
                    }
                }
            }
            layer.tokens += SETUP.chunk as u64;
            loads.extend(own);
        }
        trace.push(Chunk { tokens: SETUP.chunk as u32, loads });
    }
    Profile {
        origin: Origin::of(&checkpoint, &spec).unwrap(),
        reading: Reading::default(),
        layers,
        trace,
        saliency: Vec::new(),
        weights: BTreeMap::new(),
        routes: Routes::default(),
        correlations: Vec::new(),
        neurons: Vec::new(),
        samples: Vec::new(),
        gates: Vec::new(),
        confidence: None,
        losses: Vec::new(),
    }
}

/// A folder with a profile and a `model.toml` for `m2-ultra`.
pub(crate) struct Case {
    pub(crate) folder: TempDir,
    pub(crate) toml: PathBuf,
}

impl Case {
    pub(crate) fn new(family: &str, more: &str) -> Self {
        Self::with_chunk(family, more, SETUP.chunk)
    }

    pub(crate) fn with_chunk(family: &str, more: &str, chunk: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let source = checkpoint(family);
        let toml = Setup { chunk, ..SETUP }.write(&source, folder.path());
        profile(&source).write(&folder.path().join("p.trace")).unwrap();
        let text = fs::read_to_string(&toml).unwrap();
        fs::write(&toml, format!("{text}[calibrate]\nprofile = \"p.trace\"\n{more}")).unwrap();
        Self { folder, toml }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn build(&self, target: &str, out: &str) -> Command {
        let mut command = moec();
        command
            .env("MOEC_CACHE", cache(self.folder.path()))
            .env("MOEC_THREADS", "1")
            .arg("build")
            .arg(&self.toml);
        command.args(["--quiet", "--no-run", "--target", target, "-o"]).arg(self.path(out));
        command
    }

    pub(crate) fn plan(&self, out: &str) -> Plan {
        Plan::decode(&fs::read(self.path(out).join("plan.bin")).unwrap()).unwrap()
    }
}

/// Runs `body` with the engine of a bundle whose Neural Engine is emulated.
pub(crate) fn engine<T>(case: &Case, body: impl FnOnce(&mut Engine<'_>) -> T) -> T {
    let bundle = Bundle::open(&case.path("out.moec")).unwrap();
    let host_build = HostBuild::of(&bundle, &Progress::silent()).unwrap();
    host_build
        .with_engine(Some(&bundle.files(CheckLevel::Small).unwrap()), |engine| Ok(body(engine)))
        .unwrap()
}

/// `m2-ultra` with another limit on the bytes of a graph.
pub(crate) fn small(case: &Case, bytes: u64) -> String {
    let text = fs::read_to_string(support::root().join("targets/devices/m2-ultra.toml")).unwrap();
    let old = "max_graph_bytes = { value = 1258291200";
    assert!(text.contains(old));
    let path = case.path("small.toml");
    fs::write(&path, text.replace(old, &format!("max_graph_bytes = {{ value = {bytes}"))).unwrap();
    path.to_str().unwrap().to_owned()
}
