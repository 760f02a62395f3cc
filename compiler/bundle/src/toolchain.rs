//! Linkers of `run`: this machine's own tools, or cross toolchains.
//!
//! For this kind of machine moec carries the compiled runtime, and a C compiler links it. Everything else is
//! built by cargo, with a linker and a rustc that has the target's standard library. For other kinds of
//! machines [`CROSS_TARGETS`] has a row. [`Route`] is the choice between the two.

use super::link;
use moec_base::cache_dir;
use moec_device::is_host;
use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::process::Command;

/// Script that builds `run` on a Mac, relative to the bundle.
pub const MAC_SCRIPT: &str = "runner/build.sh";

/// Oldest Rust that `run` builds with.
pub const RUST: (u32, u32) = (1, 95);

/// Tools that link `run` for a system on a machine of another kind, and execute it there.
#[derive(Debug, PartialEq, Eq)]
pub struct CrossTarget {
    /// Rust's name of the operating system, which is LLVM's, too.
    pub triple: &'static str,
    /// The linker: a C compiler for the operating system.
    pub linker: &'static str,
    /// Flags of rustc. Linked without the operating system's libraries, `run` starts under any kernel of the
    /// kind; what loads libraries itself goes without these flags.
    pub flags: &'static [&'static str],
    /// Command that runs its programs on other machines.
    pub emulator: &'static [&'static str],
    /// Packages of linker and emulator in Debian and Ubuntu; `None`: Android's kit for native code (NDK) has
    /// the linker.
    pub packages: Option<&'static str>,
    /// Debian's word for the architecture, where Debian has Rust's standard library for it.
    pub debian: Option<&'static str>,
}

/// Every system that can be linked for from elsewhere.
pub const CROSS_TARGETS: &[CrossTarget] = &[
    CrossTarget {
        triple: "aarch64-unknown-linux-gnu",
        linker: "aarch64-linux-gnu-gcc",
        flags: &["-Ctarget-feature=+crt-static"],
        emulator: &["qemu-aarch64", "-cpu", "max"],
        packages: Some("gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user"),
        debian: Some("arm64"),
    },
    CrossTarget {
        triple: "aarch64-linux-android",
        linker: "aarch64-linux-android30-clang",
        flags: &[],
        emulator: &[],
        packages: None,
        debian: None,
    },
    CrossTarget {
        triple: "x86_64-unknown-linux-gnu",
        linker: "x86_64-linux-gnu-gcc",
        flags: &["-Ctarget-feature=+crt-static"],
        emulator: &["qemu-x86_64", "-cpu", "max"],
        packages: Some("gcc-x86-64-linux-gnu libc6-dev-amd64-cross qemu-user"),
        debian: Some("amd64"),
    },
];

impl CrossTarget {
    /// Source of linker and emulator: a command of Debian and Ubuntu in backticks, or where they are.
    pub fn install(&self) -> String {
        match self.packages {
            Some(packages) => format!("`apt-get install --no-install-recommends {packages}`"),
            None => {
                "Android's NDK, with its folder `toolchains/llvm/prebuilt/linux-x86_64/bin` in `PATH`".into()
            }
        }
    }

    /// Commands that install the standard library: rustup's, and Debian's own if it has one.
    pub fn install_std(&self) -> String {
        let by_rustup = format!("`rustup target add {}`", self.triple);
        let Some(debian) = self.debian else { return by_rustup };
        format!(
            "{by_rustup}, or without rustup on Debian `dpkg --add-architecture {debian} && \
             apt-get update && apt-get install --no-install-recommends rustc-web libstd-rust-web-dev:{debian}`"
        )
    }

    /// Whether its emulator is installed.
    pub fn emulated(&self) -> bool {
        self.emulator.first().is_some_and(|e| output_of(&(*e).into(), &["--version"]).is_some())
    }
}

/// C compilers that link the precompiled runtime; the first that is installed is used.
const C_COMPILERS: [&str; 3] = ["cc", "gcc", "clang"];
/// Flag that takes LLVM's linker in place of the C compiler's own: on the runtime's object it takes a fifth
/// of the time of GNU's.
const LLD: &str = "-fuse-ld=lld";

/// Linker of the precompiled runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Linker {
    /// The C compiler.
    pub cc: &'static str,
    /// Flag for LLVM's linker, where the C compiler finds that.
    pub flag: Option<&'static str>,
}

impl Linker {
    /// The first installed C compiler, and LLVM's linker if it is installed.
    fn find() -> Option<Self> {
        let exists = |cc: &&str| output_of(&(*cc).into(), &["--version"]).is_some();
        let cc = C_COMPILERS.into_iter().find(exists)?;
        Some(Self { cc, flag: output_of(&cc.into(), &[LLD, "-Wl,--version"]).map(|_| LLD) })
    }
}

/// Method of building `run`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Route {
    /// The precompiled runtime is linked.
    Prebuilt(Linker),
    /// Cargo builds the generated crate.
    Cargo(Toolchain),
}

impl Route {
    /// Whether this moec links `run` for `triple` without cargo.
    fn is_linked_here(triple: &str, from_source: bool) -> bool {
        !from_source && link::is_prebuilt() && is_host(triple)
    }

    /// Whether a bundle has the runtime's sources unasked: cargo builds its `run` here, or on the machine
    /// that it is for.
    pub fn needs_sources(triple: &str, from_source: bool) -> bool {
        !Self::is_linked_here(triple, from_source) || deployment_target(triple).is_some()
    }

    /// Chooses how to build `run` for programs of `triple`; `from_source`: by cargo in any case.
    ///
    /// # Errors
    /// Fails if something is missing.
    pub fn find(triple: &str, from_source: bool) -> Result<Self, Missing> {
        if !Self::is_linked_here(triple, from_source) {
            return Toolchain::find(triple).map(Self::Cargo);
        }
        Linker::find().map(Self::Prebuilt).ok_or(Missing::C)
    }
}

/// Tools by which cargo builds `run` for one target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Toolchain {
    /// The compiler.
    pub rustc: OsString,
    /// Output of `-vV`.
    pub version: String,
    /// The row of the target, if it is another kind of machine.
    pub cross: Option<&'static CrossTarget>,
}

/// Reason that `run` cannot be linked for a target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Missing {
    /// No C compiler.
    C,
    /// No cargo or no rustc.
    Rust,
    /// Programs for Apple's systems are linked there: Apple's libraries are not elsewhere.
    Mac(String),
    /// No row of [`CROSS_TARGETS`] links for the operating system.
    System(String),
    /// No linker for the operating system.
    Linker(&'static CrossTarget),
    /// No rustc of this machine has the operating system's standard library.
    Std(&'static CrossTarget),
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::C => {
                write!(f, "no C compiler was found (looked for {})", C_COMPILERS.join(", "))
            }
            Self::Rust => f.write_str("cargo or rustc was not found"),
            Self::Mac(triple) => write!(f, "programs for `{triple}` are linked on a Mac"),
            Self::System(triple) => write!(f, "moec cannot link for `{triple}` here"),
            Self::Linker(c) => {
                write!(f, "it is for `{}`, which needs the linker `{}`; it was not found", c.triple, c.linker)
            }
            Self::Std(c) => {
                let (major, minor) = RUST;
                write!(
                    f,
                    "no rustc of version {major}.{minor} or later with the standard library of `{}` was found",
                    c.triple
                )
            }
        }
    }
}

impl Missing {
    /// Remedy.
    pub fn hint(&self) -> String {
        match self {
            Self::C => {
                "install gcc or clang (on Debian and Ubuntu `apt-get install --no-install-recommends gcc libc6-dev`)".into()
            }
            Self::Rust => "install Rust 1.95 or later (https://rustup.rs)".into(),
            Self::Mac(_) => format!(
                "copy the bundle to a Mac and run `sh {MAC_SCRIPT}` in it; that needs Xcode's command line tools \
                 (`xcode-select --install`) and Rust 1.95 or later (https://rustup.rs)"
            ),
            Self::System(_) => {
                "copy the bundle to such a machine and build its folder `runner` there with cargo".into()
            }
            Self::Linker(c) => c.install(),
            Self::Std(c) => c.install_std(),
        }
    }
}

impl Toolchain {
    /// The tools that link for programs of `triple`.
    ///
    /// # Errors
    /// Something is missing.
    pub fn find(triple: &str) -> Result<Self, Missing> {
        if output_of(&cargo(), &["--version"]).is_none() {
            return Err(Missing::Rust);
        }
        if is_host(triple) {
            let rustc = own_rustc();
            let version = output_of(&rustc, &["-vV"]).ok_or(Missing::Rust)?;
            return Ok(Self { rustc, version, cross: None });
        }
        if deployment_target(triple).is_some() {
            return Err(Missing::Mac(triple.to_owned()));
        }
        let cross = CROSS_TARGETS
            .iter()
            .find(|c| c.triple == triple)
            .ok_or_else(|| Missing::System(triple.to_owned()))?;
        if output_of(&cross.linker.into(), &["--version"]).is_none() {
            return Err(Missing::Linker(cross));
        }
        rustcs(triple)
            .into_iter()
            .find_map(|rustc| {
                let version = output_of(&rustc, &["-vV"])?;
                (parsed(&version)? >= RUST && has_std(&rustc, triple)).then_some(())?;
                Some(Self { rustc, version, cross: Some(cross) })
            })
            .ok_or(Missing::Std(cross))
    }
}

/// The oldest macOS that a triple's programs are for: `15.0` of `arm64-apple-macosx15.0.0`; none for other
/// systems.
///
/// Apple's linker wants it, with two numbers, in `MACOSX_DEPLOYMENT_TARGET`.
pub fn deployment_target(triple: &str) -> Option<String> {
    let version = triple.split_once("-apple-macosx")?.1;
    let mut numbers = version.split('.').map(str::parse::<u32>);
    let (major, minor) = (numbers.next()?.ok()?, numbers.next().map_or(Ok(0), |n| n).ok()?);
    Some(format!("{major}.{minor}"))
}

/// The compiler that cargo would use.
pub fn own_rustc() -> OsString {
    std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into())
}

/// Compilers that may have the standard library of another system: cargo's own, one that was unpacked into
/// moec's cache (`cargo xtask setup` does it), the distribution's.
fn rustcs(triple: &str) -> Vec<OsString> {
    let mut all = vec![own_rustc()];
    if let Ok(cache) = cache_dir::path() {
        all.push(cache.join("toolchains").join(triple).join("bin/rustc").into());
    }
    all.push("/usr/bin/rustc".into());
    all
}

/// Whether a compiler has the standard library of a system.
pub fn has_std(rustc: &OsString, triple: &str) -> bool {
    let Some(folder) = output_of(rustc, &["--print", "target-libdir", "--target", triple]) else {
        return false;
    };
    let Ok(entries) = PathBuf::from(folder.trim()).read_dir() else { return false };
    entries.flatten().any(|e| {
        let name = e.file_name();
        let name = name.to_string_lossy();
        name.starts_with("libstd-") && name.ends_with(".rlib")
    })
}

/// Standard output of a program, if it is there and succeeds.
fn output_of(program: &OsString, args: &[&str]) -> Option<String> {
    let out = Command::new(program).args(args).output().ok().filter(|o| o.status.success())?;
    Some(String::from_utf8_lossy(&out.stdout).into_owned())
}

/// Major and minor version of `rustc 1.95.0 (…)`.
pub fn parsed(line: &str) -> Option<(u32, u32)> {
    let mut parts = line.split_whitespace().nth(1)?.split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// The cargo to build with: `$CARGO`, or `cargo` on the path.
pub fn cargo() -> OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read() {
        assert_eq!(parsed("rustc 1.95.0 (f2d3ce0bd 2026-03-21)"), Some((1, 95)));
        assert_eq!(parsed("cargo 2.0.0-nightly"), Some((2, 0)));
        assert_eq!(parsed("rustc"), None);
    }

    #[test]
    fn every_elf_device_has_a_row() {
        for (name, _) in moec_device::BUILT_IN {
            let device = moec_device::Device::find(name).unwrap();
            assert!(
                device.is_native()
                    || !device.triple.contains("linux")
                    || CROSS_TARGETS.iter().any(|c| c.triple == device.triple),
                "{name}"
            );
        }
    }

    #[test]
    fn macos_version_is_read_from_the_triple() {
        let of = |triple| deployment_target(triple);
        assert_eq!(of("arm64-apple-macosx15.0.0").as_deref(), Some("15.0"));
        assert_eq!(of("arm64-apple-macosx14.2").as_deref(), Some("14.2"));
        assert_eq!(of("x86_64-apple-macosx13").as_deref(), Some("13.0"));
        assert_eq!(
            (of("aarch64-unknown-linux-gnu"), of("arm64-apple-macosx"), of("arm64-apple-ios18.0")),
            (None, None, None)
        );
        if !cfg!(target_os = "macos") {
            let missing = Toolchain::find("arm64-apple-macosx15.0.0").expect_err("it is linked on a Mac");
            assert_eq!(missing, Missing::Mac("arm64-apple-macosx15.0.0".into()));
            assert!(missing.hint().contains("sh runner/build.sh"), "{}", missing.hint());
        }
    }

    #[test]
    fn missing_toolchain_parts_are_named_with_a_hint() {
        let error = Toolchain::find("riscv64gc-unknown-linux-gnu").map_err(|m| (m.to_string(), m.hint()));
        let (what, hint) = error.expect_err("there is no row for it");
        assert!(what.contains("riscv64gc-unknown-linux-gnu") && hint.contains("runner"), "{what}; {hint}");
        for c in CROSS_TARGETS {
            assert!(Missing::Linker(c).to_string().contains(c.linker));
            let from = if c.packages.is_some() { "apt-get install" } else { "NDK" };
            assert!(Missing::Linker(c).hint().contains(from));
            assert!(Missing::Std(c).hint().contains(&format!("rustup target add {}", c.triple)));
            let debian = c.debian.map(|debian| format!("libstd-rust-web-dev:{debian}"));
            assert!(debian.is_none_or(|package| Missing::Std(c).hint().contains(&package)));
        }
    }
}
