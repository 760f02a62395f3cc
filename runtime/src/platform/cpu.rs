//! Features of this CPU, and the number of threads to run.

use crate::error::{Error, Result};
use moec_ir::plan::TargetInfo;

/// Test of a feature.
#[derive(Clone, Copy)]
enum Test {
    /// Every CPU of the architecture has it.
    Always,
    /// A function that detects it.
    Detect(fn() -> bool),
    /// A bit of CPUID, for features without state that the operating system would have to save.
    #[cfg(target_arch = "x86_64")]
    Bit { leaf: u32, sub: u32, reg: Reg, bit: u32 },
}

/// A result register of CPUID.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
enum Reg {
    A,
    B,
    C,
    D,
}

impl Test {
    fn holds(self) -> bool {
        match self {
            Self::Always => true,
            Self::Detect(f) => f(),
            #[cfg(target_arch = "x86_64")]
            Self::Bit { leaf, sub, reg, bit } => cpuid(leaf, sub, reg) >> bit & 1 != 0,
        }
    }
}

#[cfg(target_arch = "x86_64")]
macro_rules! x86 {
    ($($name:tt)*) => { [$(($name, Test::Detect(|| std::arch::is_x86_feature_detected!($name)))),*] };
}
#[cfg(target_arch = "aarch64")]
macro_rules! arm {
    ($($llvm:tt = $std:tt)*) => { [$(($llvm, Test::Detect(|| std::arch::is_aarch64_feature_detected!($std)))),*] };
}

/// Features whose LLVM name is also the standard library's.
#[cfg(target_arch = "x86_64")]
static DETECTED: &[(&str, Test)] = &x86![
    "sse3" "ssse3" "sse4.1" "sse4.2" "sse4a" "popcnt" "lzcnt" "movbe" "aes" "pclmulqdq" "sha" "rdrand" "rdseed"
    "xsave" "xsaveopt" "xsavec" "xsaves" "f16c" "fma" "bmi2" "avx" "avx2" "adx"
    "avx512f" "avx512cd" "avx512bw" "avx512dq" "avx512vl" "avx512ifma" "avx512vbmi" "avx512vbmi2" "avx512vnni"
    "avx512bitalg" "avx512vpopcntdq" "avx512bf16" "avx512fp16" "avx512vp2intersect"
    "gfni" "vaes" "vpclmulqdq" "avxvnni" "avxifma" "avxneconvert" "avxvnniint8" "avxvnniint16" "tbm" "fxsr"
];

/// Features whose LLVM name differs, or that need a test of our own.
#[cfg(target_arch = "x86_64")]
static SPECIAL: &[(&str, Test)] = &[
    ("64bit", Test::Always),
    ("cmov", Test::Always),
    ("cx8", Test::Always),
    ("mmx", Test::Always),
    ("x87", Test::Always),
    ("sse", Test::Always),
    ("sse2", Test::Always),
    ("bmi", Test::Detect(|| std::arch::is_x86_feature_detected!("bmi1"))),
    ("cx16", Test::Detect(|| std::arch::is_x86_feature_detected!("cmpxchg16b"))),
    ("crc32", Test::Detect(|| std::arch::is_x86_feature_detected!("sse4.2"))),
    ("evex512", Test::Detect(|| std::arch::is_x86_feature_detected!("avx512f"))),
    ("amx-tile", Test::Detect(|| amx(7, 0, Reg::D, 24))),
    ("amx-int8", Test::Detect(|| amx(7, 0, Reg::D, 25))),
    ("amx-bf16", Test::Detect(|| amx(7, 0, Reg::D, 22))),
    ("amx-fp16", Test::Detect(|| amx(7, 1, Reg::A, 21))),
    ("amx-complex", Test::Detect(|| amx(7, 1, Reg::D, 8))),
    ("sahf", bit(0x8000_0001, 0, Reg::C, 0)),
    ("prfchw", bit(0x8000_0001, 0, Reg::C, 8)),
    ("mwaitx", bit(0x8000_0001, 0, Reg::C, 29)),
    ("clzero", bit(0x8000_0008, 0, Reg::B, 0)),
    ("rdpru", bit(0x8000_0008, 0, Reg::B, 4)),
    ("wbnoinvd", bit(0x8000_0008, 0, Reg::B, 9)),
    ("fsgsbase", bit(7, 0, Reg::B, 0)),
    ("sgx", bit(7, 0, Reg::B, 2)),
    ("invpcid", bit(7, 0, Reg::B, 10)),
    ("clflushopt", bit(7, 0, Reg::B, 23)),
    ("clwb", bit(7, 0, Reg::B, 24)),
    ("pku", bit(7, 0, Reg::C, 4)),
    ("waitpkg", bit(7, 0, Reg::C, 5)),
    ("shstk", bit(7, 0, Reg::C, 7)),
    ("rdpid", bit(7, 0, Reg::C, 22)),
    ("cldemote", bit(7, 0, Reg::C, 25)),
    ("movdiri", bit(7, 0, Reg::C, 27)),
    ("movdir64b", bit(7, 0, Reg::C, 28)),
    ("enqcmd", bit(7, 0, Reg::C, 29)),
    ("uintr", bit(7, 0, Reg::D, 5)),
    ("serialize", bit(7, 0, Reg::D, 14)),
    ("tsxldtrk", bit(7, 0, Reg::D, 16)),
    ("pconfig", bit(7, 0, Reg::D, 18)),
    ("cmpccxadd", bit(7, 1, Reg::A, 7)),
    ("hreset", bit(7, 1, Reg::A, 22)),
    ("prefetchi", bit(7, 1, Reg::D, 14)),
    ("ptwrite", bit(0x14, 0, Reg::B, 4)),
];

#[cfg(target_arch = "x86_64")]
const fn bit(leaf: u32, sub: u32, reg: Reg, bit: u32) -> Test {
    Test::Bit { leaf, sub, reg, bit }
}

#[cfg(target_arch = "aarch64")]
static DETECTED: &[(&str, Test)] = &arm![
    "neon" = "neon" "dotprod" = "dotprod" "i8mm" = "i8mm" "bf16" = "bf16" "fullfp16" = "fp16" "fp16fml" = "fhm"
    "lse" = "lse" "lse2" = "lse2" "rcpc" = "rcpc" "rcpc-immo" = "rcpc2" "rdm" = "rdm" "crc" = "crc" "aes" = "aes"
    "sha2" = "sha2" "sha3" = "sha3" "sve" = "sve" "sve2" = "sve2" "sve2-bitperm" = "sve2-bitperm"
    "fcma" = "fcma" "complxnum" = "fcma" "jsconv" = "jsconv" "frintts" = "frintts" "fptoint" = "frintts"
    "flagm" = "flagm" "ssbs" = "ssbs" "sb" = "sb" "bti" = "bti" "dpb" = "dpb" "ccpp" = "dpb" "dpb2" = "dpb2"
    "ccdp" = "dpb2" "pauth" = "paca"
];
#[cfg(target_arch = "aarch64")]
static SPECIAL: &[(&str, Test)] = &[("fp-armv8", Test::Always), ("outline-atomics", Test::Always)];

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
static DETECTED: &[(&str, Test)] = &[];
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
static SPECIAL: &[(&str, Test)] = &[];

/// A register of a CPUID leaf; 0 if the CPU has no such leaf.
#[cfg(target_arch = "x86_64")]
fn cpuid(leaf: u32, sub: u32, reg: Reg) -> u32 {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    if __cpuid(leaf & 0x8000_0000).eax < leaf || (sub > 0 && __cpuid_count(leaf, 0).eax < sub) {
        return 0;
    }
    let r = __cpuid_count(leaf, sub);
    match reg {
        Reg::A => r.eax,
        Reg::B => r.ebx,
        Reg::C => r.ecx,
        Reg::D => r.edx,
    }
}

/// Whether the CPU has an AMX feature and the operating system lets this process use tiles. Linux requires a
/// request for permission first; repeating it is harmless.
#[cfg(target_arch = "x86_64")]
fn amx(leaf: u32, sub: u32, reg: Reg, at: u32) -> bool {
    bit(leaf, sub, reg, at).holds() && tiles_permitted()
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn tiles_permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: this `arch_prctl` takes two integers and touches no memory of ours.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn tiles_permitted() -> bool {
    false
}

/// Test of a feature. LLVM's leading `+` is allowed.
fn test(name: &str) -> Option<Test> {
    let name = name.strip_prefix('+').unwrap_or(name);
    DETECTED.iter().chain(SPECIAL).find(|(n, _)| *n == name).map(|&(_, t)| t)
}

/// Returns the given features that this CPU lacks or this runtime does not know.
///
/// Names are LLVM's (`avx512f`, `dotprod`).
pub fn missing<'a>(features: &[&'a str]) -> Vec<&'a str> {
    features.iter().copied().filter(|f| !test(f).is_some_and(Test::holds)).collect()
}

/// Returns the given features that this runtime does not know.
pub fn unknown<'a>(features: &[&'a str]) -> Vec<&'a str> {
    features.iter().copied().filter(|f| test(f).is_none()).collect()
}

/// Words of target triples, and the operating systems that they mean. Other words are ignored.
static SYSTEMS: &[(&str, &[&str])] = &[
    ("linux", &["linux", "android"]),
    ("darwin", &["macos"]),
    ("macos", &["macos"]),
    ("windows", &["windows"]),
];

/// Refuses a target that this machine cannot execute.
///
/// # Errors
/// [`Error::Machine`]: another architecture or operating system, features that this CPU lacks or this runtime
/// does not know.
pub fn check(target: &TargetInfo) -> Result<()> {
    if !is_of_this_machine(&target.triple) {
        let (triple, arch, system) = (&target.triple, std::env::consts::ARCH, std::env::consts::OS);
        let what = format!("the bundle was built for `{triple}`, but this machine is {arch} under {system}");
        return Err(Error::machine(what).with_hint(if triple.contains("-apple-") {
            "copy the bundle to a Mac, where `sh runner/build.sh` in it makes `run`; or build for this machine with \
             `moec build --target native`"
        } else {
            HERE
        }));
    }
    let features: Vec<&str> = target.features.iter().map(String::as_str).collect();
    let list = |names: &[&str]| names.iter().map(|n| format!("`{n}`")).collect::<Vec<_>>().join(", ");
    let (unknown, target) = (unknown(&features), &target.name);
    if !unknown.is_empty() {
        let what = format!("target `{target}` needs {}, which this runtime cannot detect", list(&unknown));
        return Err(
            Error::machine(what).with_hint("build the bundle and its runner with the same version of moec")
        );
    }
    let missing = missing(&features);
    if !missing.is_empty() {
        let what = format!("this CPU lacks {}, which target `{target}` needs", list(&missing));
        return Err(Error::machine(what).with_hint(HERE));
    }
    Ok(())
}

/// Remedy if code is for other machines than this one.
const HERE: &str =
    "build for this machine with `moec build --target native`, or run the bundle on a machine of its target";

/// Whether a triple is of this machine's architecture and operating system.
pub fn is_of_this_machine(triple: &str) -> bool {
    let arch = match triple.split('-').next().unwrap_or_default() {
        "arm64" => "aarch64",
        "amd64" => "x86_64",
        arch => arch,
    };
    let other = |&(word, systems): &(&str, &[&str])| {
        triple.contains(word) && !systems.contains(&std::env::consts::OS)
    };
    arch == std::env::consts::ARCH && !SYSTEMS.iter().any(other)
}

/// Most threads that are accepted.
pub const MAX_THREADS: usize = 1024;

/// Cores that this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Threads to run: `requested`, else `MOEC_THREADS`, else one per core.
///
/// # Errors
/// [`Error::Usage`] for a number outside of `1 ..= MAX_THREADS`, or a `MOEC_THREADS` that is not a number.
pub fn threads(requested: Option<usize>) -> Result<usize> {
    threads_on(requested, cores())
}

/// As [`threads`], on so many cores.
///
/// # Errors
/// As [`threads`].
pub(crate) fn threads_on(requested: Option<usize>, cores: usize) -> Result<usize> {
    let range = |what, found| Error::range(what, "a number from 1 to 1024", found);
    let (what, n) = match (requested, std::env::var("MOEC_THREADS")) {
        (Some(n), _) => ("the number of threads", n),
        (None, Ok(text)) if !text.is_empty() => match text.trim().parse() {
            Ok(n) => ("`MOEC_THREADS`", n),
            Err(_) => return Err(range("`MOEC_THREADS`", format!("`{text}`"))),
        },
        _ => return Ok(cores.min(MAX_THREADS)),
    };
    if (1..=MAX_THREADS).contains(&n) { Ok(n) } else { Err(range(what, n.to_string())) }
}

/// Refuses to bind more threads to cores than this process may use.
///
/// # Errors
/// [`Error::Usage`].
pub fn check_pin(threads: usize) -> Result<()> {
    let (what, range) = ("with `--pin` the number of threads", "at most that of the cores of this process");
    if threads <= cores() { Ok(()) } else { Err(Error::range(what, range, threads.to_string())) }
}

/// A set of cores, in the operating system's form.
#[derive(Clone, Copy, Debug)]
pub struct CoreSet {
    #[cfg(target_os = "linux")]
    set: libc::cpu_set_t,
}

#[cfg(target_os = "linux")]
impl CoreSet {
    /// The set of these cores. Numbers that no set has are left out.
    pub fn of(cores: &[usize]) -> Self {
        // SAFETY: the struct is plain bits. Every number is below that of its bits.
        unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            for &core in cores.iter().filter(|&&c| c < libc::CPU_SETSIZE as usize) {
                libc::CPU_SET(core, &mut set);
            }
            Self { set }
        }
    }

    /// Cores that the calling thread may use.
    pub fn of_this_thread() -> Option<Self> {
        // SAFETY: the call gets a set that lives on this stack and its exact size; 0 is the calling thread.
        unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            let known = libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) == 0;
            known.then_some(Self { set })
        }
    }

    /// Numbers of the cores, ascending.
    pub fn cores(&self) -> Vec<usize> {
        // SAFETY: every number is below that of the set's bits.
        (0..libc::CPU_SETSIZE as usize).filter(|&c| unsafe { libc::CPU_ISSET(c, &self.set) }).collect()
    }

    /// Binds the calling thread, and threads that it starts later, to these cores. Best effort: without it
    /// the program is only slower. Returns whether the operating system agreed.
    pub fn bind(&self) -> bool {
        // SAFETY: the call gets a set that lives as long as `self` and its exact size; 0 is the calling
        // thread.
        unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const self.set) == 0 }
    }
}

#[cfg(target_os = "linux")]
impl PartialEq for CoreSet {
    fn eq(&self, other: &Self) -> bool {
        // SAFETY: both are whole sets.
        unsafe { libc::CPU_EQUAL(&self.set, &other.set) }
    }
}

/// Nothing is bound on this system.
#[cfg(not(target_os = "linux"))]
impl PartialEq for CoreSet {
    fn eq(&self, _other: &Self) -> bool {
        true
    }
}

/// Nothing is bound on this system.
#[cfg(not(target_os = "linux"))]
impl CoreSet {
    /// A set without effect.
    pub fn of(_cores: &[usize]) -> Self {
        Self {}
    }

    /// Not known on this system.
    pub fn of_this_thread() -> Option<Self> {
        None
    }

    /// None are known.
    pub fn cores(&self) -> Vec<usize> {
        Vec::new()
    }

    /// Does nothing on this system.
    pub fn bind(&self) -> bool {
        false
    }
}

/// Binds the calling thread, and threads that it starts later, to the `index`-th core that it may use. Best
/// effort: without it the program is only slower.
pub fn pin(index: usize) {
    let allowed = CoreSet::of_this_thread().map(|set| set.cores()).unwrap_or_default();
    if let Some(&core) = allowed.get(index) {
        CoreSet::of(&[core]).bind();
    }
}

/// Lets the calling thread run only on idle cores, until it ends.
#[cfg(target_os = "linux")]
pub(crate) fn only_when_idle() {
    // SAFETY: the parameters are plain numbers: 0 is the only priority of this policy, and 0 means the
    // calling thread.
    unsafe {
        let none: libc::sched_param = std::mem::zeroed();
        libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const none);
    }
}

/// Does nothing on this system.
#[cfg(not(target_os = "linux"))]
pub(crate) fn only_when_idle() {}

/// Peak resident memory of this process, in bytes, including mapped weights that were read.
pub fn peak_memory() -> Option<u64> {
    bytes_of_status("VmHWM:")
}

/// Locked memory of this process, in bytes.
pub(crate) fn locked_memory() -> Option<u64> {
    bytes_of_status("VmLck:")
}

/// Size in a line of proc(5)'s `status`.
fn bytes_of_status(name: &str) -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// Largest peak of resident memory among ended child processes, in bytes.
#[cfg(target_os = "linux")]
pub fn peak_memory_of_children() -> Option<u64> {
    // SAFETY: the struct is plain numbers, which the call fills.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        (libc::getrusage(libc::RUSAGE_CHILDREN, &raw mut usage) == 0).then_some(usage)?
    };
    u64::try_from(usage.ru_maxrss).ok().map(|kib| kib * 1024)
}

/// Not known on this system.
#[cfg(not(target_os = "linux"))]
pub fn peak_memory_of_children() -> Option<u64> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features() {
        assert_eq!(missing(&[]), Vec::<&str>::new());
        assert_eq!(missing(&["no-such-feature"]), ["no-such-feature"]);
        assert_eq!(unknown(&["no-such-feature"]), ["no-such-feature"]);
        #[cfg(target_arch = "x86_64")]
        {
            assert_eq!(unknown(&["avx512f", "+avx2", "bmi", "amx-int8", "sahf"]), Vec::<&str>::new());
            assert_eq!(missing(&["sse2", "cx16", "+sse4.2"]), Vec::<&str>::new());
        }
    }

    #[test]
    fn refusals_name_the_feature() {
        let triple = format!("{}-unknown-{}", std::env::consts::ARCH, std::env::consts::OS);
        let target = |triple: &str, features: &[&str]| TargetInfo {
            name: "t".to_owned(),
            triple: triple.to_owned(),
            cpu: "generic".to_owned(),
            features: features.iter().map(|&f| f.to_owned()).collect(),
        };
        assert!(check(&target(&triple, &[])).is_ok());
        let e = check(&target(&triple, &["warp-drive"])).unwrap_err().to_string();
        assert!(e.contains("`warp-drive`"), "{e}");
        let elsewhere = if cfg!(target_os = "macos") { "linux-gnu" } else { "apple-macosx14.0.0" };
        let elsewhere = format!("{}-{elsewhere}", std::env::consts::ARCH);
        for triple in ["riscv64-linux", &elsewhere] {
            let e = check(&target(triple, &[])).unwrap_err().to_string();
            assert!(e.contains(triple) && e.contains(std::env::consts::OS), "{e}");
        }
    }

    #[test]
    fn thread_counts() {
        assert_eq!(threads(Some(3)).unwrap(), 3);
        assert!(threads(Some(0)).is_err());
        assert!(threads(Some(MAX_THREADS + 1)).is_err());
    }
}
