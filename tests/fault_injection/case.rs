//! A case: drawn by its number, set up in a folder of its own, executed and judged.

use super::bases::{self, Bases, RECIPES, Source};
use super::judge::{self, listing};
use super::rng::Rng;
use super::subcommands::{self, BUILT, Subcommand};
use super::support::{coreml, moec};
use super::{bundles, files, tensors, text};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;

/// The base that is damaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Base {
    Checkpoint(Source),
    /// By its index in [`RECIPES`].
    Bundle(usize),
}

/// A kind of damage.
#[derive(Debug)]
pub(crate) struct Kind {
    /// Name for `--only`.
    pub(crate) name: &'static str,
    /// Applies the damage, and describes it.
    damage: fn(&mut Rng, &mut CaseFolders) -> String,
    checkpoints: bool,
    /// Subcommands for bundles with this damage; empty if bundles do not get it.
    bundles: &'static [&'static [Subcommand]],
}

const ANY: &[&[Subcommand]] = &[&subcommands::READING, &subcommands::EXECUTING];

/// Every kind.
pub(crate) const KINDS: [Kind; 12] = [
    Kind { name: "bytes", damage: files::bytes, checkpoints: true, bundles: ANY },
    Kind { name: "size", damage: files::size, checkpoints: true, bundles: ANY },
    Kind { name: "missing", damage: files::missing, checkpoints: true, bundles: ANY },
    Kind { name: "file", damage: files::replaced, checkpoints: true, bundles: ANY },
    Kind { name: "name", damage: files::named, checkpoints: true, bundles: ANY },
    Kind { name: "json", damage: text::json, checkpoints: true, bundles: ANY },
    Kind { name: "toml", damage: text::toml, checkpoints: true, bundles: &[] },
    Kind { name: "header", damage: tensors::header, checkpoints: true, bundles: &[] },
    Kind { name: "shards", damage: tensors::shards, checkpoints: true, bundles: &[] },
    Kind { name: "cut", damage: files::cut, checkpoints: true, bundles: &[&subcommands::EXECUTING] },
    Kind { name: "data", damage: bundles::data, checkpoints: false, bundles: ANY },
    Kind { name: "code", damage: bundles::code, checkpoints: false, bundles: &[&subcommands::READING] },
];

/// Folders of a case.
#[derive(Debug)]
pub(crate) struct CaseFolders {
    folder: TempDir,
    /// The folder in which commands run; it has the subject, `model.toml` and `text.txt`.
    pub(crate) work: PathBuf,
    /// The checkpoint or the bundle.
    pub(crate) subject: PathBuf,
    /// A folder whose files must not be read by way of the subject.
    pub(crate) outside: PathBuf,
    /// For a checkpoint: a `model.toml` with every key.
    pub(crate) template: String,
    /// A file that is truncated while the subcommand runs.
    pub(crate) later: Option<Truncation>,
}

/// A file that is truncated to a length after some time.
#[derive(Debug)]
pub(crate) struct Truncation {
    pub(crate) path: PathBuf,
    pub(crate) whole: Vec<u8>,
    pub(crate) length: u64,
    pub(crate) after: Duration,
}

impl Truncation {
    fn happen(&self) {
        std::thread::sleep(self.after);
        fs::OpenOptions::new().write(true).open(&self.path).unwrap().set_len(self.length).unwrap();
    }

    /// Restores the file in place, without creating another.
    fn undo(&self) {
        fs::write(&self.path, &self.whole).unwrap();
    }
}

/// Text in every file outside of the subject.
pub(crate) const SECRET: &str = "a-secret-that-lies-elsewhere";

/// A case: damage, base and subcommand.
pub(crate) struct Case {
    pub(crate) number: u64,
    pub(crate) kind: &'static Kind,
    base: Base,
    subcommand: &'static Subcommand,
    rng: Rng,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let base = match self.base {
            Base::Checkpoint(source) => source.name(),
            Base::Bundle(i) => RECIPES[i].name,
        };
        write!(f, "case {}: {base}, {}, {}", self.number, self.kind.name, self.subcommand.name)
    }
}

impl Case {
    /// Draws the case with this number.
    pub(crate) fn draw(seed: u64, number: u64) -> Self {
        let mut rng = Rng::new(seed, number);
        let of_checkpoint = rng.below(5) < 3;
        let of = |k: &&Kind| if of_checkpoint { k.checkpoints } else { !k.bundles.is_empty() };
        let kinds: Vec<&'static Kind> = KINDS.iter().filter(of).collect();
        let kind = *rng.pick(&kinds);
        let (base, subcommand) = if of_checkpoint {
            let source = *rng.pick(&Source::all());
            (Base::Checkpoint(source), Subcommand::draw(&mut rng, &[&subcommands::OF_CHECKPOINTS]))
        } else {
            (Base::Bundle(rng.below(RECIPES.len())), Subcommand::draw(&mut rng, kind.bundles))
        };
        Self { number, kind, base, subcommand, rng }
    }

    /// Runs the case. Returns the exit code, or what is wrong; `None` if this machine cannot build the base.
    /// With `keep`, the folder of a failed case is kept.
    pub(crate) fn run(&self, bases: &Bases, keep: bool) -> Result<Option<u8>, String> {
        let Some(mut place) = self.place(bases) else { return Ok(None) };
        let mut rng = self.rng.clone();
        let damage = (self.kind.damage)(&mut rng, &mut place);
        let base = self.subcommand.takes_base().then(|| bases.bundle(0)).flatten();
        let result = self.judged(&place, base).map_err(|why| format!("{damage}: {why}"));
        if keep {
            eprintln!("{self}: {damage}: {result:?}");
            if result.is_err() {
                eprintln!("  see {}", place.folder.keep().display());
            }
        }
        result.map(Some)
    }

    /// A folder with a copy of the base.
    fn place(&self, bases: &Bases) -> Option<CaseFolders> {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in ["work", "outside", "tmp", "cache", "home"] {
            fs::create_dir(at(name)).unwrap();
        }
        let (work, outside) = (at("work"), at("outside"));
        let (subject, mut template) = match self.base {
            Base::Checkpoint(source) => {
                bases::copy(&bases.checkpoint(source), &work.join("hf"));
                ("hf", bases::usual("[weights]\nexperts = \"bf16\"\n"))
            }
            Base::Bundle(i) => {
                bases::copy_bundle(&bases.bundle(i)?, &work.join("in.moec"));
                ("in.moec", String::new())
            }
        };
        fs::write(work.join("model.toml"), &template).unwrap();
        fs::write(work.join("text.txt"), bases::text()).unwrap();
        if self.kind.name == "toml" {
            let made = super::support::ok(moec().args(["init", "hf", "-o", "all.toml"]).current_dir(&work));
            drop(made);
            template = fs::read_to_string(work.join("all.toml")).unwrap();
            fs::remove_file(work.join("all.toml")).unwrap();
        }
        let place = CaseFolders { subject: work.join(subject), work, outside, template, later: None, folder };
        tensors::plant(&place);
        Some(place)
    }

    fn judged(&self, place: &CaseFolders, base: Option<PathBuf>) -> Result<u8, String> {
        let at = |name: &str| place.folder.path().join(name);
        let mut command = moec();
        command.args(self.subcommand.arguments(place, base)).current_dir(&place.work);
        command.env("MOEC_CACHE", at("cache")).env("TMPDIR", at("tmp")).env("HOME", at("home"));
        if let Some(installed) = coreml_once() {
            command.envs(installed.iter().map(|(name, path)| (name, path)));
        }
        let before = listing(place.folder.path());
        let outcome = judge::run(&command, || {
            if let Some(cut) = &place.later {
                cut.happen();
            }
        });
        judge::verdict(&outcome)?;
        let mut well = outcome.code == Some(0);
        if let Some(cut) = place.later.as_ref().filter(|_| !well) {
            // A process that loses a mapped page cannot clean up. Its files are removed when the same command
            // runs again on the restored file.
            cut.undo();
            let again = judge::run(&command, || ());
            judge::verdict(&again).map_err(|why| format!("of the whole file: {why}"))?;
            well = again.code == Some(0);
        }
        let inside = |path: &Path| path.strip_prefix(place.folder.path()).unwrap().to_owned();
        let made = self.subcommand.makes.filter(|_| well).map(|name| inside(&place.work.join(name)));
        let cut = place.later.iter().map(|cut| inside(&cut.path));
        // Records of packed weights remain for the next build with the same weights.
        let kept = ["cache/packed", "cache/objects"].map(PathBuf::from);
        let may: Vec<PathBuf> = made.into_iter().chain(cut).chain(kept).collect();
        let changes = judge::changes(&before, &listing(place.folder.path()), &may);
        if !changes.is_empty() {
            return Err(format!(
                "exit code {:?}, and {}; it said:\n{}",
                outcome.code,
                changes.join(", "),
                outcome.stderr
            ));
        }
        let built = place.work.join(BUILT);
        if built.exists() {
            bundles::sound(&built)?;
        }
        Ok(u8::try_from(outcome.code.unwrap_or(0)).unwrap_or(0))
    }
}

/// Tools that write packages, if they are installed. They are looked up once, since their absence is
/// reported.
pub(crate) fn coreml_once() -> Option<&'static [(&'static str, PathBuf); 2]> {
    static HELPERS: std::sync::OnceLock<Option<[(&'static str, PathBuf); 2]>> = std::sync::OnceLock::new();
    HELPERS.get_or_init(coreml).as_ref()
}
