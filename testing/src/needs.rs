//! The table of what tests need of a machine.

use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Something that not every machine has.
#[derive(Debug)]
pub struct Need {
    /// Name in `MOEC_REQUIRE`.
    pub name: &'static str,
    /// Description.
    pub what: &'static str,
    /// Remedy if it is missing.
    pub help: Help,
    /// Whether it is here. Needs that only a test can check have [`by_the_test`].
    pub(crate) find: fn() -> bool,
}

/// Remedy for a missing need.
#[derive(Debug)]
pub enum Help {
    /// Packages of Debian and Ubuntu.
    Packages(&'static [&'static str]),
    /// A command.
    Command(&'static str),
    /// A property of the machine or its user, which cannot be installed.
    Machine(&'static str),
}

impl std::fmt::Display for Help {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Packages(names) => write!(f, "apt-get install {}", names.join(" ")),
            Self::Command(what) | Self::Machine(what) => f.write_str(what),
        }
    }
}

/// coremltools, and the helper that writes packages with it.
pub static COREML: Need = Need {
    name: "coreml",
    what: "coremltools and its helper",
    help: Help::Command("cargo xtask coreml"),
    find: coreml,
};
/// QNN, with its emulator of the Hexagon tensor processor.
pub static QNN: Need =
    Need { name: "qnn", what: "QNN's library", help: Help::Command("cargo xtask qnn"), find: qnn };
/// Runtime of ONNX models.
pub static ONNXRUNTIME: Need = Need {
    name: "onnxruntime",
    what: "a Python with onnxruntime",
    help: Help::Command("cargo xtask qnn"),
    find: || onnxruntime().is_some_and(|python| starts(python, &["-c", "import numpy, onnxruntime"])),
};
/// Writer of GGUF files.
pub static GGUF: Need = Need {
    name: "gguf",
    what: "a Python with the gguf package",
    help: Help::Command("cargo xtask gguf"),
    find: || gguf().is_some_and(|python| starts(python, &["-c", "import gguf, numpy, safetensors"])),
};
/// OpenAI's client.
pub static OPENAI: Need = Need {
    name: "openai",
    what: "a Python with OpenAI's client",
    help: Help::Command("cargo xtask openai"),
    find: || openai().is_some_and(|python| starts(python, &["-c", "import openai"])),
};
/// Checker of workflows of public CI.
pub static ACTIONLINT: Need = Need {
    name: "actionlint",
    what: "actionlint",
    help: Help::Command("cargo xtask actionlint"),
    find: || actionlint().is_some(),
};
/// Checker of manifests by Kubernetes' schemas.
pub static KUBERNETES: Need = Need {
    name: "kubernetes",
    what: "kubernetes-validate",
    help: Help::Command("cargo xtask kubernetes"),
    find: || kubernetes().is_some(),
};
/// Checker of units of systemd.
pub static SYSTEMD: Need = Need {
    name: "systemd",
    what: "systemd-analyze",
    help: Help::Packages(&["systemd"]),
    find: || starts("systemd-analyze", &["--version"]),
};
/// systemd as the first process of namespaces of its own.
pub static SUPERVISOR: Need = Need {
    name: "supervisor",
    what: "systemd in namespaces of its own",
    help: Help::Machine("needs root and `apt-get install systemd`"),
    find: || {
        starts("/usr/lib/systemd/systemd", &["--version"])
            && starts("unshare", &["--pid", "--mount", "--cgroup", "--fork", "--mount-proc", "true"])
    },
};
/// Network namespaces.
pub static NAMESPACES: Need = Need {
    name: "namespaces",
    what: "network namespaces",
    help: Help::Machine("needs root and `apt-get install iproute2`"),
    find: || {
        let name = format!("moec{}", std::process::id());
        starts("ip", &["netns", "add", &name]) && starts("ip", &["netns", "del", &name])
    },
};
/// A browser without a window.
pub static CHROMIUM: Need = Need {
    name: "chromium",
    what: "Chromium",
    help: Help::Packages(&["chromium"]),
    find: || starts("chromium", &["--version"]),
};
/// NVIDIA's assembler of PTX.
pub static PTXAS: Need = Need {
    name: "ptxas",
    what: "NVIDIA's assembler of PTX",
    help: Help::Command("cargo xtask cuda"),
    find: || ptxas().is_some(),
};
/// A linker for AArch64, and QEMU.
pub static AARCH64: Need = Need {
    name: "aarch64",
    what: "a linker and an emulator for AArch64",
    help: Help::Command("cargo xtask setup"),
    find: || starts("aarch64-linux-gnu-gcc", &["--version"]) && starts("qemu-aarch64", &["--version"]),
};
/// A tracer that ends a process at a system call.
pub static STRACE: Need = Need {
    name: "strace",
    what: "strace, and leave to trace",
    help: Help::Packages(&["strace"]),
    find: || starts("strace", &["-o", "/dev/null", "true"]),
};
/// The tool whose signatures moec writes and reads.
pub static MINISIGN: Need = Need {
    name: "minisign",
    what: "minisign",
    help: Help::Packages(&["minisign"]),
    find: || starts("minisign", &["-v"]),
};
/// A proxy before replicas of the server.
pub static HAPROXY: Need = Need {
    name: "haproxy",
    what: "HAProxy",
    help: Help::Packages(&["haproxy"]),
    find: || starts("haproxy", &["-v"]),
};
/// MPI: Open MPI.
pub static OPEN_MPI: Need = Need {
    name: "open-mpi",
    what: "Open MPI",
    help: Help::Packages(&["openmpi-bin", "libopenmpi-dev"]),
    find: || starts("mpirun.openmpi", &["--version"]) && starts("mpicc.openmpi", &["--version"]),
};
/// MPI: MPICH.
pub static MPICH: Need = Need {
    name: "mpich",
    what: "MPICH",
    help: Help::Packages(&["mpich", "libmpich-dev"]),
    find: || starts("mpirun.mpich", &["--version"]) && starts("mpicc.mpich", &["--version"]),
};
/// The runtime that moec carries.
pub static PREBUILT: Need = Need {
    name: "prebuilt",
    what: "a moec with the feature `prebuilt`",
    help: Help::Machine("test with the default features"),
    find: by_the_test,
};
/// Builds that end at a given step.
pub static ASSERTIONS: Need = Need {
    name: "assertions",
    what: "a moec with debug assertions",
    help: Help::Machine("test without `--release`"),
    find: || cfg!(debug_assertions),
};
/// Control groups of the kernel that count memory.
pub static GROUPS: Need = Need {
    name: "groups",
    what: "control groups that count memory",
    help: Help::Machine("Linux, and leave to make groups: root, outside of most containers"),
    find: by_the_test,
};
/// File systems of the test's own.
pub static MOUNT: Need = Need {
    name: "mount",
    what: "leave to mount a small disk",
    help: Help::Machine("root, outside of most containers"),
    find: by_the_test,
};
/// Reads by rings.
pub static IO_URING: Need = Need {
    name: "io_uring",
    what: "io_uring",
    help: Help::Machine("Linux that lets this process use it (sysctl kernel.io_uring_disabled=0)"),
    find: by_the_test,
};
/// Reads past the page cache.
pub static DIRECT_IO: Need = Need {
    name: "direct_io",
    what: "direct reads of temporary files",
    help: Help::Machine("`TMPDIR` on a disk, such as ext4 or XFS"),
    find: by_the_test,
};
/// Files whose pages the kernel reports.
pub static PAGE_CACHE: Need = Need {
    name: "page_cache",
    what: "free memory, and a kernel that reports the pages in the page cache",
    help: Help::Machine("Linux with some GiB free"),
    find: by_the_test,
};
/// Two names that change places at once.
pub static EXCHANGE: Need = Need {
    name: "exchange",
    what: "a file system that exchanges two names at once",
    help: Help::Machine("`TMPDIR` on a disk, such as ext4 or XFS"),
    find: by_the_test,
};
/// x86-64-v3.
pub static AVX2: Need = Need {
    name: "avx2",
    what: "a CPU with AVX2 (x86-64-v3)",
    help: Help::Machine("another machine"),
    find: by_the_test,
};
/// x86-64-v4.
pub static AVX512: Need = Need {
    name: "avx512",
    what: "a CPU with AVX-512 (x86-64-v4)",
    help: Help::Machine("another machine"),
    find: by_the_test,
};
/// CPU features of Sapphire Rapids other than AMX, which are not emulated.
pub static SAPPHIRE_RAPIDS: Need = Need {
    name: "sapphire_rapids",
    what: "a CPU with the features of Sapphire Rapids other than AMX",
    help: Help::Machine("another machine"),
    find: by_the_test,
};
/// Tile registers, of the CPU's own.
pub static AMX: Need = Need {
    name: "amx",
    what: "a system that permits AMX",
    help: Help::Machine("another machine"),
    find: by_the_test,
};
/// Nodes of one machine: its own, or simulated ones.
pub static TWO_CPUS: Need = Need {
    name: "two-cpus",
    what: "two CPUs",
    help: Help::Machine("another machine"),
    find: || std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() > 1),
};
/// Memory that is bound to a NUMA node.
pub static MEMORY_POLICY: Need = Need {
    name: "memory-policy",
    what: "a kernel and a sandbox that bind memory to NUMA nodes",
    help: Help::Machine("another machine"),
    find: by_the_test,
};
/// Python, for the scripts of `bench/`.
pub static PYTHON: Need = Need {
    name: "python",
    what: "Python 3.10 or later",
    help: Help::Packages(&["python3"]),
    find: || starts("python3", &["-c", "import sys; sys.exit(sys.version_info < (3, 10))"]),
};

/// All of them.
pub static NEEDS: [&Need; 33] = [
    &COREML,
    &QNN,
    &ONNXRUNTIME,
    &GGUF,
    &OPENAI,
    &ACTIONLINT,
    &CHROMIUM,
    &PTXAS,
    &AARCH64,
    &STRACE,
    &MINISIGN,
    &HAPROXY,
    &OPEN_MPI,
    &MPICH,
    &KUBERNETES,
    &NAMESPACES,
    &SUPERVISOR,
    &SYSTEMD,
    &PYTHON,
    &PREBUILT,
    &ASSERTIONS,
    &GROUPS,
    &MOUNT,
    &IO_URING,
    &DIRECT_IO,
    &PAGE_CACHE,
    &EXCHANGE,
    &AVX2,
    &AVX512,
    &SAPPHIRE_RAPIDS,
    &AMX,
    &TWO_CPUS,
    &MEMORY_POLICY,
];

/// Only a test that uses it finds out: [`Need::of`] is told.
fn by_the_test() -> bool {
    true
}

/// Whether a program is here, and succeeds.
fn starts(program: impl AsRef<std::ffi::OsStr>, args: &[&str]) -> bool {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// The folder that a variable names.
fn from(var: &str) -> Option<PathBuf> {
    std::env::var_os(var).filter(|v| !v.is_empty()).map(PathBuf::from)
}

/// The folder where moec keeps what `cargo xtask` installs.
pub fn cache() -> Option<PathBuf> {
    from("MOEC_CACHE")
        .or_else(|| from("XDG_CACHE_HOME").map(|p| p.join("moec")))
        .or_else(|| from("HOME").map(|p| p.join(".cache/moec")))
}

/// The Python whose onnxruntime tests use: `MOEC_ONNXRUNTIME`, or the one that `cargo xtask qnn` installs.
pub fn onnxruntime() -> Option<PathBuf> {
    from("MOEC_ONNXRUNTIME").or_else(|| Some(cache()?.join("qnn/bin/python")))
}

/// The Python that writes GGUF files for tests: `MOEC_GGUF`, or the one that `cargo xtask gguf` installs.
pub fn gguf() -> Option<PathBuf> {
    from("MOEC_GGUF").or_else(|| Some(cache()?.join("gguf/bin/python")))
}

/// The Python with OpenAI's client: `MOEC_OPENAI`, or the one that `cargo xtask openai` installs.
pub fn openai() -> Option<PathBuf> {
    from("MOEC_OPENAI").or_else(|| Some(cache()?.join("openai/bin/python")))
}

/// Checker of manifests, if it is here: `MOEC_KUBERNETES`, or the one that `cargo xtask kubernetes` installs.
pub fn kubernetes() -> Option<PathBuf> {
    let installed = || Some(cache()?.join("kubernetes/bin/kubernetes-validate"));
    from("MOEC_KUBERNETES").or_else(installed).filter(|path| path.is_file())
}

/// Checker of workflows, if it is here: `MOEC_ACTIONLINT`, the one that `cargo xtask actionlint` installs, or
/// that on the path.
pub fn actionlint() -> Option<PathBuf> {
    let installed = from("MOEC_ACTIONLINT").or_else(|| Some(cache()?.join("actionlint/bin/actionlint")));
    let path = installed.filter(|path| path.is_file()).unwrap_or_else(|| PathBuf::from("actionlint"));
    starts(&path, &["-version"]).then_some(path)
}

/// Whether the helper and the environment are where moec looks for them.
fn coreml() -> bool {
    let at = |var: &str, below: &str| {
        from(var).or_else(|| Some(cache()?.join("coreml").join(below))).is_some_and(|p| p.exists())
    };
    at("MOEC_COREML_HELPER", "bin/moec-coreml") && at("MOEC_COREML_PYTHON", "venv")
}

/// NVIDIA's assembler of PTX, if there is one: `MOEC_PTXAS`, the one that `cargo xtask cuda` installs, or
/// that on the path.
pub fn ptxas() -> Option<PathBuf> {
    let installed = from("MOEC_PTXAS").or_else(|| Some(cache()?.join("cuda/ptxas")));
    let path = installed.filter(|path| path.is_file()).unwrap_or_else(|| PathBuf::from("ptxas"));
    starts(&path, &["--version"]).then_some(path)
}

/// Whether the library is where moec looks for it; the user of the library finds out whether it is complete.
fn qnn() -> bool {
    from("MOEC_QNN_LIB").or_else(|| Some(cache()?.join("qnn"))).is_some_and(|p| p.exists())
}
