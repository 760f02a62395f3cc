//! The tiny checkpoints below `golden/hf`, a row each, and the lists of them that tests go through.

/// A list of checkpoints: all whose row has no reason against it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum List {
    /// Compiled and run end to end.
    Families,
    /// The models with experts.
    Mixtures,
    /// All that a neural processing unit runs of it can be a graph.
    Graphs,
    /// Compiled to packages of Core ML and to GPU kernels, and compared with the reference.
    Packaged,
    /// Written as GGUF.
    Gguf,
    /// Their `config.json` is spelled as transformers 5 does, and has an older spelling.
    Version5,
}

/// A checkpoint with reference outputs of transformers.
#[derive(Clone, Copy, Debug)]
pub struct Checkpoint {
    /// Folder below `golden/hf`.
    pub name: &'static str,
    /// `Family::name` of the importer's row that reads it.
    pub family: &'static str,
    /// Lists that it is not on, and why.
    pub without: &'static [(List, &'static str)],
}

const fn row(name: &'static str, without: &'static [(List, &'static str)]) -> Checkpoint {
    Checkpoint { name, family: name, without }
}

const DENSE: (List, &str) = (List::Mixtures, "its layers have no experts");
const KNOWN_GRAPHS: (List, &str) =
    (List::Packaged, "the experts' graphs are those of checkpoints on the list");
const NO_GRAPH: (List, &str) = (List::Graphs, "a graph keeps no recurrent state");
const ONE_SPELLING: (List, &str) =
    (List::Version5, "its configuration is the repository's own, not transformers'");
const NO_GGUF: (List, &str) = (List::Gguf, "llama.cpp has no architecture for it");
const GGUF_LATE: (List, &str) =
    (List::Gguf, "`GGUF_OF_2026` has it, where the gguf package knows an architecture for it");

/// A checkpoint of a family with the parts of other families, whose tests with every unit and format cover it
/// in a plain run. [`families`] and [`mixtures`] have it in a run of every combination.
const fn late(name: &'static str) -> Checkpoint {
    const ALIKE: &str = "its mixers and operators are those of checkpoints on the list, or the CPU's";
    row(
        name,
        &[
            (List::Families, ALIKE),
            (List::Mixtures, ALIKE),
            (List::Graphs, ALIKE),
            KNOWN_GRAPHS,
            GGUF_LATE,
            (List::Version5, "`published.json` beside it is the other spelling"),
        ],
    )
}

/// Every folder of `golden/hf`.
pub const CHECKPOINTS: [Checkpoint; 44] = [
    row("deepseek_v2", &[]),
    row("deepseek_v3", &[]),
    row("glm4_moe", &[]),
    row("gpt_oss", &[]),
    row("mixtral", &[]),
    row("olmoe", &[]),
    row("phimoe", &[]),
    row("qwen2_moe", &[]),
    row("qwen3_moe", &[]),
    Checkpoint { family: "smallthinker", ..row("smallthinker_4b", &[KNOWN_GRAPHS, ONE_SPELLING]) },
    Checkpoint {
        family: "smallthinker",
        ..row(
            "smallthinker_21b",
            &[KNOWN_GRAPHS, ONE_SPELLING, (List::Gguf, "the architecture is that of smallthinker_4b")],
        )
    },
    Checkpoint {
        family: "turbosparsemixtral",
        ..row("turbosparse_mixtral", &[KNOWN_GRAPHS, ONE_SPELLING, NO_GGUF])
    },
    row("qwen3_next", &[NO_GRAPH, KNOWN_GRAPHS, GGUF_LATE]),
    row("qwen3_5_moe", &[NO_GRAPH, KNOWN_GRAPHS, GGUF_LATE]),
    Checkpoint {
        family: "qwen3_5_moe",
        ..row(
            "qwen3_5_moe_published",
            &[
                (List::Families, "another form of qwen3_5_moe's files; the importer's tests read it"),
                (List::Mixtures, "as above"),
                NO_GRAPH,
                KNOWN_GRAPHS,
                GGUF_LATE,
                (List::Version5, "a configuration of the publisher"),
            ],
        )
    },
    late("afmoe"),
    late("bailing_hybrid"),
    late("cohere2_moe"),
    late("dots1"),
    late("ernie4_5_moe"),
    late("exaone_moe"),
    late("flex_olmo"),
    late("gemma4"),
    late("glm4_moe_lite"),
    late("granitemoe"),
    late("granitemoehybrid"),
    late("granitemoeshared"),
    late("hunyuan_v1_moe"),
    late("hy_v3"),
    late("jamba"),
    late("kimi_linear"),
    late("laguna"),
    late("lfm2_moe"),
    late("llama4"),
    late("longcat_flash"),
    late("mellum"),
    late("mimo_v2_flash"),
    late("minimax_m2"),
    late("mistral4"),
    late("nemotron_h"),
    late("solar_open"),
    late("step3p7"),
    row("bamboo", &[DENSE, KNOWN_GRAPHS, ONE_SPELLING, NO_GGUF]),
    Checkpoint {
        family: "sparsellama",
        ..row(
            "prosparse",
            &[DENSE, (List::Graphs, "no operator is FATReLU"), KNOWN_GRAPHS, ONE_SPELLING, NO_GGUF],
        )
    },
];

impl List {
    const fn has(self, checkpoint: &Checkpoint) -> bool {
        let mut i = 0;
        while i < checkpoint.without.len() {
            if checkpoint.without[i].0 as u8 == self as u8 {
                return false;
            }
            i += 1;
        }
        true
    }

    const fn len(self) -> usize {
        let (mut i, mut len) = (0, 0);
        while i < CHECKPOINTS.len() {
            len += self.has(&CHECKPOINTS[i]) as usize;
            i += 1;
        }
        len
    }

    /// Its names. `N` is [`Self::len`].
    const fn names<const N: usize>(self) -> [&'static str; N] {
        let (mut names, mut i, mut len) = ([""; N], 0, 0);
        while i < CHECKPOINTS.len() {
            if self.has(&CHECKPOINTS[i]) {
                names[len] = CHECKPOINTS[i].name;
                len += 1;
            }
            i += 1;
        }
        names
    }
}

/// The families with recurrent states.
pub const FOLDED: [&str; 2] = ["qwen3_next", "qwen3_5_moe"];

/// Checkpoints that few tests of a plain run compile: those of `late`.
pub fn late_checkpoints() -> impl DoubleEndedIterator<Item = &'static str> {
    CHECKPOINTS.iter().filter(|of| !List::Families.has(of) && of.family == of.name).map(|of| of.name)
}

/// [`FAMILIES`], and in a run of every combination the late checkpoints, too.
pub fn families() -> impl DoubleEndedIterator<Item = &'static str> {
    FAMILIES.into_iter().chain(late_checkpoints().filter(|_| crate::all()))
}

/// [`MIXTURES`], and in a run of every combination the late checkpoints, too: all of them have experts.
pub fn mixtures() -> impl DoubleEndedIterator<Item = &'static str> {
    MIXTURES.into_iter().chain(late_checkpoints().filter(|_| crate::all()))
}

/// Checkpoints whose experts all stay on the CPU and in RAM: some compute nothing, which no other unit knows.
pub const IN_RAM: [&str; 1] = ["longcat_flash"];

/// [`List::Families`].
pub const FAMILIES: [&str; List::Families.len()] = List::Families.names();
/// [`List::Mixtures`].
pub const MIXTURES: [&str; List::Mixtures.len()] = List::Mixtures.names();
/// [`List::Graphs`].
pub const GRAPHS: [&str; List::Graphs.len()] = List::Graphs.names();
/// [`List::Packaged`].
pub const PACKAGED: [&str; List::Packaged.len()] = List::Packaged.names();
/// [`List::Gguf`].
pub const GGUF_WRITTEN: [&str; List::Gguf.len()] = List::Gguf.names();
/// The families of 2026 for which the gguf package knows an architecture; `golden/gguf/late.py` writes them.
pub const GGUF_OF_2026: [&str; 22] = [
    "qwen3_next",
    "qwen3_5_moe",
    "lfm2_moe",
    "gemma4",
    "nemotron_h",
    "granitemoehybrid",
    "granitemoe",
    "granitemoeshared",
    "glm4_moe_lite",
    "mistral4",
    "ernie4_5_moe",
    "minimax_m2",
    "kimi_linear",
    "llama4",
    "hunyuan_v1_moe",
    "dots1",
    "jamba",
    "afmoe",
    "step3p7",
    "mimo_v2_flash",
    "exaone_moe",
    "solar_open",
];

/// [`List::Version5`].
pub const VERSION_5: [&str; List::Version5.len()] = List::Version5.names();
