//! Facts about single tests for the runner.

/// Tests that measure time, or use every core by themselves: program, test (empty: all of its tests), why.
/// They run one by one, after the others.
pub(super) const ALONE: &[(&str, &str, &str)] = &[
    ("measure", "", "it measures"),
    ("tune", "", "it measures"),
    (
        "replace",
        "replacement_survives_kills_at_random_moments",
        "the moments are drawn from the time that one replacement takes",
    ),
    (
        "replace",
        "killed_builds_leave_a_whole_bundle",
        "the moments are drawn from the time that one build takes",
    ),
    (
        "fault_injection",
        "damaged_files_are_reported_or_read_correctly",
        "it has as many threads as there are cores",
    ),
    (
        "host_faults",
        "jobs_end_after_faults_at_random_moments",
        "the moments are drawn from the time that one job takes, and hosts must give signs within a second",
    ),
    ("moec-runtime/owned", "", "reads that stall have deadlines of seconds, and free memory is looked at"),
];

/// Slow tests that rarely fail: program, test (empty: all of its tests), and the tests that find most of the
/// same faults. `cargo xtask test --all` runs them.
pub(super) const SLOW: &[(&str, &str, &str)] = &[
    (
        "reproducible",
        "bundles_compiled_by_cargo_are_equal_byte_for_byte",
        "cargo compiles the runtime twice: minutes; linked bundles are compared, and `linking` runs what cargo compiles",
    ),
    (
        "aarch64",
        "neurons_are_read_from_disk_on_aarch64",
        "emulated for minutes; its kernels are emulated by `moec-codegen/kernels`, and `neurons_on_disk` reads from disk here",
    ),
    (
        "golden",
        "all_families_of_2026",
        "nine builds for each of twenty-seven families; six of them are built, and the evaluator computes all",
    ),
    (
        "gguf",
        "all_architectures_of_2026",
        "a build for each of twenty-one; four of them are built, and the evaluator computes half of all",
    ),
    (
        "predictors",
        "predictor_table_of_the_page_is_current",
        "a table of a page; the other tests of predictors hold what each of them finds",
    ),
    (
        "qnn",
        "sizes::size_and_limit_table_of_the_page_is_current",
        "two minutes for a table of a page; `qnn limits` holds the limits themselves",
    ),
];

/// Programs that test some of their combinations unless `MOEC_ALL` is set: program, and the combinations left
/// out.
pub(super) const PARTIAL: &[(&str, &str)] = &[
    ("moec-codegen/kernels", "eleven twelfths of the pairs of a kernel and a machine"),
    ("moec-cpu/amx", "half of the pairs of a kernel and a machine with tiles"),
    ("moec-codegen/object", "every second machine that has a part of the others' instructions"),
    ("moec-codegen/gpu", "two of three generations of each kernel in NVIDIA's assembler"),
    ("moec-import/import", "every second architecture of GGUF files of 2026"),
    ("qnn", "three of four families on the emulator of Hexagon"),
    ("aarch64", "every second family in each format, late families, every second pair of formats"),
    ("golden", "router choices and pairs of sequences of all but six families"),
    ("decode", "late families with big-little decoding and best-of-N"),
    ("mirror", "late families with half of their experts on the unit"),
    ("paging", "late families from disk"),
    ("host_goldens", "two thirds of the models, MPICH, pairs of hosts and threads"),
    ("host_faults", "44 of 50 random moments"),
];

/// Programs other than the end-to-end tests whose tests are started one by one, and why.
pub(super) const ONE_BY_ONE: &[(&str, &str)] = &[
    ("moec-codegen/kernels", "every kernel is compiled for several machines, and emulated"),
    ("moec-cpu/amx", "tiles are emulated instruction by instruction"),
];

/// Programs with the longest tests, the longest first: so a run begins where no earlier one has left times.
pub(super) const LONG: &[&str] = &[
    "reproducible",
    "documents",
    "decode",
    "mix",
    "fuse",
    "golden",
    "evaluator",
    "coreml",
    "placement",
    "aarch64",
    "approximations",
    "calibrate",
    "routing",
    "untrusted",
    "passes",
    "linking",
];

/// Tests of `--fast`: program, parts of tests' names (none: all of its tests), and the subject. Each stage of
/// a build has one.
pub(super) const FAST: &[(&str, &[&str], &str)] = &[
    ("moec-ir", &[], "graph and plan: types, verifier"),
    ("moec-ir/it", &[], "their text forms, the evaluator"),
    ("moec-device", &[], "device files"),
    ("moec-device/devices", &[], "device files"),
    ("moec-codegen", &[], "code and packed weights"),
    ("moec-cpu", &[], "selection of kernels"),
    ("moec-runtime", &[], "what ships"),
    ("moec-runtime/text", &[], "tokenizers"),
    ("moec-runtime/cli", &[], "the subcommands"),
    ("moec-coreml", &[], "programs of static graphs"),
    ("moec-qnn", &[], "quantised networks"),
    ("moec-testing", &[], "needs"),
    ("moec-base", &[], "files and words"),
    ("moec-config", &[], "`model.toml`"),
    ("moec-profile", &[], "what calibration saw"),
    ("moec-passes", &[], "passes"),
    ("moec-bundle", &[], "bundles"),
    ("moec-measure", &[], "calibration and quality"),
    ("moec", &[], "subcommands"),
    ("cli", &[], "the command line"),
    ("moec-import", &[], "checkpoints"),
    ("moec-import/import", &[], "every family's import"),
    ("xtask", &[], "this runner"),
    ("filetests", &[], "every pass on small files"),
    ("passes", &[], "every family through the pipeline"),
    ("golden", &["the_demo_model_in_its_own_format"], "a model built, and run against its reference"),
];
