//! Files to damage: the golden checkpoints, one layer of the demo model, and bundles of them, built once for
//! all cases.

use super::case::coreml_once;
use super::judge::{Listing, listing};
use super::support::{FAMILIES, checkpoint, ferris, moec, ok, root};
use safetensors::SafeTensors;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use tempfile::TempDir;

/// A checkpoint by its index in [`FAMILIES`], or the demo model with one layer, which has a tokenizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    Family(usize),
    Ferris,
}

impl Source {
    /// All checkpoints; the one with a tokenizer counts more than once, since more of its files can be
    /// damaged.
    pub(crate) fn all() -> Vec<Self> {
        (0..FAMILIES.len()).map(Self::Family).chain([Self::Ferris; 3]).collect()
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Family(i) => FAMILIES[i],
            Self::Ferris => "ferris",
        }
    }
}

/// Recipe of a bundle to damage.
#[derive(Debug)]
pub(crate) struct Recipe {
    pub(crate) name: &'static str,
    source: Source,
    target: &'static str,
    /// Keys of `model.toml` other than source and shapes.
    keys: &'static str,
    /// Whether the build requires coremltools (`cargo xtask coreml`).
    packages: bool,
}

/// Every bundle.
pub(crate) const RECIPES: [Recipe; 6] = [
    recipe("bundle of qwen3_moe", Source::Family(8), "[weights]\nexperts = \"bf16\"\n"),
    recipe(
        "bundle of deepseek_v2 in q4",
        Source::Family(0),
        "[weights]\nexperts = \"q4\"\nattention = \"q8\"\n",
    ),
    recipe("bundle of gpt_oss", Source::Family(3), "[decode]\nbig_little = true\nlittle = 1\n"),
    recipe("bundle of ferris", Source::Ferris, ""),
    recipe(
        "bundle of ferris with a budget",
        Source::Ferris,
        "[memory]\nbudget = \"40 MiB\"\n[calibrate]\ntext = [\"text.txt\"]\ntokens = 512\n",
    ),
    Recipe {
        name: "bundle of ferris with packages",
        source: Source::Ferris,
        target: "m2-max",
        keys: "[weights]\nexperts = \"f16\"\nattention = \"f16\"\nembeddings = \"f16\"\n[placement]\nexperts = \"npu\"\n\
               attention = \"npu\"\n[calibrate]\ntext = [\"text.txt\"]\ntokens = 512\n",
        packages: true,
    },
];

const fn recipe(name: &'static str, source: Source, keys: &'static str) -> Recipe {
    Recipe { name, source, target: "native", keys, packages: false }
}

/// `model.toml` of a checkpoint in the folder `hf`, `keys` aside.
pub(crate) fn usual(keys: &str) -> String {
    format!(
        "[model]\nsource = \"hf\"\n[shapes]\nmax_context = 64\nprefill_chunk = 16\ndecode_batch = [1]\n{keys}"
    )
}

/// The bases, built when a case first requests one.
pub(crate) struct Bases {
    folder: TempDir,
    ferris: OnceLock<PathBuf>,
    bundles: [OnceLock<Option<PathBuf>>; RECIPES.len()],
    golden: Listing,
}

impl Bases {
    pub(crate) fn new() -> Self {
        Self {
            folder: tempfile::tempdir().unwrap(),
            ferris: OnceLock::new(),
            bundles: Default::default(),
            golden: listing(&root().join("golden")),
        }
    }

    /// The folder of a checkpoint.
    pub(crate) fn checkpoint(&self, source: Source) -> PathBuf {
        match source {
            Source::Family(i) => checkpoint(FAMILIES[i]),
            Source::Ferris => {
                self.ferris.get_or_init(|| first_layer_alone(&self.folder.path().join("ferris"))).clone()
            }
        }
    }

    /// The folder of a bundle; `None` if this machine cannot build it, which another test reports.
    pub(crate) fn bundle(&self, index: usize) -> Option<PathBuf> {
        self.bundles[index].get_or_init(|| self.build(index)).clone()
    }

    fn build(&self, index: usize) -> Option<PathBuf> {
        let recipe = &RECIPES[index];
        let folder = self.folder.path().join(format!("bundle-{index}"));
        fs::create_dir(&folder).unwrap();
        copy(&self.checkpoint(recipe.source), &folder.join("hf"));
        fs::write(folder.join("text.txt"), text()).unwrap();
        fs::write(folder.join("model.toml"), usual(recipe.keys)).unwrap();
        let mut build = moec();
        build.args([
            "build",
            "model.toml",
            "--no-run",
            "--quiet",
            "-o",
            "out.moec",
            "--target",
            recipe.target,
        ]);
        if recipe.packages {
            build.envs(coreml_once()?.iter().cloned());
        }
        ok(build.current_dir(&folder));
        Some(folder.join("out.moec"))
    }

    /// Checks that the bases are unchanged.
    pub(crate) fn untouched(&self) {
        assert!(self.golden == listing(&root().join("golden")), "a command has changed `golden`");
    }
}

/// Text for calibration, measurements and prompts.
pub(crate) fn text() -> String {
    fs::read_dir(ferris().join("eval"))
        .unwrap()
        .map(|e| e.unwrap().path())
        .find(|p| p.extension().is_some_and(|e| e == "txt"))
        .map(|p| fs::read_to_string(p).unwrap().chars().take(4000).collect())
        .unwrap()
}

/// Copies the files of a folder; subfolders and the tests' references only if `deep`.
fn copied(from: &Path, to: &Path, deep: bool) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap();
        if path.is_dir() {
            if deep {
                copied(&path, &to.join(name), deep);
            }
        } else if !["expected.safetensors", "routes.safetensors"].iter().any(|reference| name == *reference) {
            fs::copy(&path, to.join(name)).unwrap();
        }
    }
}

/// Copies a checkpoint.
pub(crate) fn copy(from: &Path, to: &Path) {
    copied(from, to, false);
}

/// Copies a bundle.
pub(crate) fn copy_bundle(from: &Path, to: &Path) {
    copied(from, to, true);
}

/// Writes the demo model with only its first layer.
fn first_layer_alone(folder: &Path) -> PathBuf {
    copy(&ferris(), folder);
    let config = folder.join("config.json");
    let mut value: Value = serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
    value["num_hidden_layers"] = json!(1);
    value["max_window_layers"] = json!(1);
    fs::write(&config, format!("{value:#}")).unwrap();
    let weights = folder.join("model.safetensors");
    let bytes = fs::read(&weights).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let stays = |name: &str| !name.contains(".layers.") || name.contains(".layers.0.");
    let kept = tensors.tensors().into_iter().filter(|(name, _)| stays(name));
    safetensors::serialize_to_file(kept.collect::<Vec<_>>(), None, &weights).unwrap();
    folder.to_owned()
}
