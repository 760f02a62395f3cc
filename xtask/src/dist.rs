//! `cargo xtask dist`: moec as a tarball and as a Debian package, with manual pages, completions and
//! checksums.
//!
//! Both are the same bytes for the same program: names in order, one time for all files (`SOURCE_DATE_EPOCH`,
//! else that of the last commit), no owner. The packages are unpacked into a temporary folder and must pass
//! `moec self-test` there.

use crate::archives;
use crate::llvm::Llvm;
use crate::notices;
use crate::setup;
use crate::shell::{self, Failed, cargo, program, root, stage, target_dir};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const HELP: &str = "Usage: cargo xtask dist [OPTIONS]

Builds moec for release, with LLVM as a part of it, and packs it into target/dist.

  --binary FILE  pack this moec in place of building one
  --out DIR      where to (default: target/dist)
  --no-test      do not run `moec self-test` of what was packed";

/// Completions: shell, and the path below `share`.
const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "bash-completion/completions/moec"),
    ("zsh", "zsh/site-functions/_moec"),
    ("fish", "fish/vendor_completions.d/moec.fish"),
];
/// Folder of documents.
const DOCUMENTATION: &str = "share/doc/moec";
/// Debian's package of the C library, which every program needs.
const GLIBC: &str = "libc6";
/// Licences of the linked libraries, among the program's documents.
const NOTICES: &str = "THIRD-PARTY.txt";
/// Files that are packed with the program.
const DOCUMENTS: [&str; 4] = ["README.md", "CHANGELOG.md", "LICENSE-MIT", "LICENSE-APACHE"];

/// Parsed options.
struct Options {
    binary: Option<PathBuf>,
    out: PathBuf,
    test: bool,
}

/// Writes the packages and tests them.
pub(crate) fn run(args: &[String]) -> Result<(), Failed> {
    let Some(options) = options(args)? else {
        println!("{HELP}");
        return Ok(());
    };
    let binary = options.binary.clone().map_or_else(built, Ok)?;
    let version_line = shell::output(program(&binary).arg("--version"))
        .ok_or_else(|| Failed::new(format!("`{}` is not a moec that runs here", binary.display())))?;
    let version = version_line.split(' ').nth(1).unwrap_or("0").to_owned();
    let machine = std::env::consts::ARCH;
    let name = format!("moec-{version}-{machine}-linux");
    let epoch = epoch()?;
    fresh(&options.out)?;
    let stage_dir = options.out.join("stage");
    let tree = stage_dir.join(&name);
    let needs = needs(&binary)?;
    tree_of(&binary, &tree)?;
    write(&tree.join(DOCUMENTATION).join(NOTICES), &licences(&needs)?)?;
    let tarball = options.out.join(format!("{name}.tar.gz"));
    pack(&stage_dir, &name, &tarball, &epoch)?;
    let package = options.out.join(format!("moec_{version}_{}.deb", debian(machine)));
    deb(&tree, &stage_dir.join("deb"), &package, &version, &epoch, &needs)?;
    let made = [&tarball, &package].map(|p| p.file_name().unwrap_or_default());
    let sums = shell::output(program("sha256sum").args(made).current_dir(&options.out))
        .ok_or_else(|| Failed::new("`sha256sum` failed"))?;
    write(&options.out.join("SHA256SUMS"), &format!("{sums}\n"))?;
    if options.test {
        try_out(&tarball, &stage_dir.join("tried").join(&name))?;
    }
    fs::remove_dir_all(&stage_dir).map_err(|e| failed("remove", &stage_dir, &e))?;
    stage("Linked", &format!("dynamically: {}", needs.libraries.join(" ")));
    stage("Packed", &format!("{} and {}", tarball.display(), package.display()));
    Ok(())
}

fn options(args: &[String]) -> Result<Option<Options>, Failed> {
    let mut options = Options { binary: None, out: target_dir().join("dist"), test: true };
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        let mut value =
            || args.next().ok_or_else(|| Failed::new(format!("`{arg}` takes a value")).hint(HELP));
        match arg.as_str() {
            "--help" => return Ok(None),
            "--binary" => options.binary = Some(absolute(value()?)?),
            "--out" => options.out = absolute(value()?)?,
            "--no-test" => options.test = false,
            _ => return Err(Failed::new(format!("no option `{arg}`")).hint(HELP)),
        }
    }
    Ok(Some(options))
}

fn absolute(path: &str) -> Result<PathBuf, Failed> {
    std::path::absolute(path).map_err(|e| failed("find", Path::new(path), &e))
}

/// Builds moec for release, with LLVM and its dependencies linked in.
fn built() -> Result<PathBuf, Failed> {
    let llvm = setup::run()?;
    let archives = archives::folder(&llvm)?;
    stage("Building", "moec, with LLVM as a part of it");
    let mut build = cargo("build", None);
    build.args(["--release", "--locked", "--package", "moec"]).args(llvm.archived());
    shell::run(build.envs(llvm.environment()).env(archives::VARIABLE, archives))?;
    Ok(target_dir().join("release/moec"))
}

/// Seconds since 1970 that all files get.
fn epoch() -> Result<String, Failed> {
    let set = std::env::var("SOURCE_DATE_EPOCH").ok().filter(|s| s.parse::<u64>().is_ok());
    set.or_else(|| shell::output(program("git").args(["log", "-1", "--format=%ct"]))).ok_or_else(|| {
        Failed::new("the time of the last commit is not known").hint("set `SOURCE_DATE_EPOCH`")
    })
}

/// An empty folder. Only what this command makes is removed from one that is there.
fn fresh(folder: &Path) -> Result<(), Failed> {
    fs::create_dir_all(folder).map_err(|e| failed("create", folder, &e))?;
    let stale = folder.join("stage");
    if stale.exists() {
        fs::remove_dir_all(&stale).map_err(|e| failed("remove", &stale, &e))?;
    }
    Ok(())
}

/// Writes the installed files, as below `/usr`.
fn tree_of(binary: &Path, tree: &Path) -> Result<(), Failed> {
    let (bin, man, doc) = (tree.join("bin"), tree.join("share/man/man1"), tree.join(DOCUMENTATION));
    for folder in [&bin, &man, &doc] {
        fs::create_dir_all(folder).map_err(|e| failed("create", folder, &e))?;
    }
    let moec = bin.join("moec");
    done(program("strip").arg("--strip-all").arg("-o").arg(&moec).arg(binary))?;
    done(program(&moec).args(["docs", "--man"]).arg(&man))?;
    for (shell_name, place) in COMPLETIONS {
        let script = shell::output(program(&moec).args(["completions", shell_name]));
        let path = tree.join("share").join(place);
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(|e| failed("create", folder, &e))?;
        }
        write(
            &path,
            &format!("{}\n", script.ok_or_else(|| Failed::new(format!("no completions for {shell_name}")))?),
        )?;
    }
    for name in DOCUMENTS {
        let (from, to) = (root().join(name), doc.join(name));
        fs::copy(&from, &to).map_err(|e| failed("copy", &from, &e))?;
    }
    Ok(())
}

/// The licence of the grids of GGUF's types.
const GGML: &str = include_str!("../../gguf/LICENSE-ggml");

/// Licences of the crates in the program, of its code from ggml, and, if LLVM is linked in, of LLVM and its
/// dependencies.
fn licences(needs: &Needs) -> Result<String, Failed> {
    let mut crates = notices::text(&notices::linked(&["moec"], &[])?)?;
    crates += &notices::section("ggml, grids of GGUF's types", GGML);
    if needs.libraries.iter().any(|name| name.starts_with("libLLVM")) {
        return Ok(crates);
    }
    let llvm =
        Llvm::find().ok_or_else(|| Failed::new("LLVM is not here, whose licence belongs to the program"))?;
    Ok(crates + &notices::of_system(&archives::files(&llvm)?)?)
}

/// Packs a folder so that the same files are the same bytes.
fn pack(parent: &Path, name: &str, tarball: &Path, epoch: &str) -> Result<(), Failed> {
    let tar = parent.join("moec.tar");
    done(
        program("tar")
            .args([
                "--sort=name",
                "--owner=0",
                "--group=0",
                "--numeric-owner",
                "--mode=u+rwX,go=rX",
                "--format=gnu",
            ])
            .arg(format!("--mtime=@{epoch}"))
            .arg("-cf")
            .arg(&tar)
            .arg("-C")
            .arg(parent)
            .arg(name),
    )?;
    done(program("gzip").args(["-n", "-9", "-f"]).arg(&tar))?;
    let packed = parent.join("moec.tar.gz");
    fs::rename(&packed, tarball).map_err(|e| failed("move", &packed, &e))
}

/// Libraries that a program is linked to.
struct Needs {
    libraries: Vec<String>,
    /// With the minimum version, if one is known.
    packages: BTreeSet<String>,
}

/// Libraries that the program itself names, and the packages that have them.
fn needs(binary: &Path) -> Result<Needs, Failed> {
    let listed = shell::output(program("objdump").arg("-p").arg(binary))
        .ok_or_else(|| Failed::new("`objdump` cannot read the program").hint("install binutils"))?;
    let libraries: Vec<String> =
        listed.lines().filter_map(|l| l.trim().strip_prefix("NEEDED")).map(|l| l.trim().to_owned()).collect();
    let found = shell::output(program("ldd").arg(binary)).unwrap_or_default();
    let places = found.lines().filter_map(|l| {
        let (name, place) = l.trim().split_once(" => ")?;
        libraries
            .iter()
            .any(|own| own == name)
            .then(|| place.split(' ').next().unwrap_or_default().to_owned())
    });
    // dpkg knows a file by the path that its package gives it: with the folder resolved, its own name as it
    // is.
    let owner = |path: String| {
        let path = Path::new(&path);
        let folder = path.parent()?.canonicalize().ok()?;
        let whole = folder.join(path.file_name()?);
        let without = Path::new("/").join(whole.strip_prefix("/usr").ok()?);
        let dpkg_line =
            [whole, without].iter().find_map(|p| shell::output(program("dpkg").arg("-S").arg(p)))?;
        Some(dpkg_line.split(':').next()?.to_owned())
    };
    let least = glibc(&listed);
    let bounded = |package: String| match least {
        Some((major, minor)) if package == GLIBC => format!("{package} (>= {major}.{minor})"),
        _ => package,
    };
    Ok(Needs { packages: places.filter_map(owner).map(bounded).collect(), libraries })
}

/// The newest version of glibc whose symbols a program requires, from the output of `objdump -p`.
fn glibc(listed: &str) -> Option<(u32, u32)> {
    let versions = listed.lines().filter_map(|line| line.rsplit_once(" GLIBC_")?.1.split_once('.'));
    versions
        .filter_map(|(major, minor)| Some((major.parse().ok()?, minor.split('.').next()?.parse().ok()?)))
        .max()
}

/// Debian's name of an architecture.
fn debian(machine: &str) -> &str {
    match machine {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// Makes the Debian package of what is installed.
fn deb(
    tree: &Path,
    folder: &Path,
    package: &Path,
    version: &str,
    epoch: &str,
    needs: &Needs,
) -> Result<(), Failed> {
    let (control, usr) = (folder.join("DEBIAN"), folder.join("usr"));
    fs::create_dir_all(&control).map_err(|e| failed("create", &control, &e))?;
    done(program("cp").arg("-a").arg(tree).arg(&usr))?;
    let sizes = shell::output(program("du").args(["-sk", "--apparent-size"]).arg(&usr)).unwrap_or_default();
    let kib = sizes.split_whitespace().next().unwrap_or("0");
    let depends: Vec<&str> = needs.packages.iter().map(String::as_str).collect();
    let text = format!(
        "Package: moec\nVersion: {version}\nArchitecture: {}\nMaintainer: the authors of moec <moec@localhost>\n\
         Installed-Size: {kib}\nDepends: {}\nRecommends: gcc | clang\nSection: science\nPriority: optional\n\
         Description: ahead-of-time compiler for Mixture-of-Experts language models\n \
         Compiles checkpoints and GGUF files into folders that run by themselves.\n",
        debian(std::env::consts::ARCH),
        depends.join(", "),
    );
    write(&control.join("control"), &text)?;
    done(program("chmod").args(["-R", "u+rwX,go=rX"]).arg(folder))?;
    done(
        program("dpkg-deb")
            .args(["--root-owner-group", "-Zgzip", "--build"])
            .arg(folder)
            .arg(package)
            .env("SOURCE_DATE_EPOCH", epoch),
    )
}

/// Unpacks the packages and runs their self-test.
fn try_out(tarball: &Path, folder: &Path) -> Result<(), Failed> {
    let parent = folder.parent().unwrap_or(folder);
    fs::create_dir_all(parent).map_err(|e| failed("create", parent, &e))?;
    done(program("tar").arg("-xzf").arg(tarball).arg("-C").arg(parent))?;
    // Runs in its own folder, without this tree's: it may need only its own files and the operating system's.
    let mut moec = Command::new(folder.join("bin/moec"));
    shell::run(moec.arg("self-test").current_dir(folder))
}

/// Runs a command; its output is shown only if it fails.
fn done(command: &mut Command) -> Result<(), Failed> {
    let out = command
        .output()
        .map_err(|e| Failed::new(format!("`{}` cannot be started: {e}", shell::shown(command))))?;
    if out.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&out.stderr);
    Err(Failed::new(format!("`{}` failed ({})\n{}", shell::shown(command), out.status, stderr.trim_end())))
}

fn write(path: &Path, text: &str) -> Result<(), Failed> {
    fs::write(path, text).map_err(|e| failed("write", path, &e))
}

fn failed(doing: &str, path: &Path, e: &std::io::Error) -> Failed {
    Failed::new(format!("cannot {doing} `{}`: {e}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_files_give_equal_archives() {
        let folder = std::env::temp_dir().join(format!("moec-dist-{}", std::process::id()));
        let mut packed = Vec::new();
        for order in [["a", "b"], ["b", "a"]] {
            let parent = folder.join(order.concat());
            fs::create_dir_all(parent.join("x")).unwrap();
            for name in order {
                fs::write(parent.join("x").join(name), name).unwrap();
            }
            let tarball = parent.join("x.tar.gz");
            pack(&parent, "x", &tarball, "1700000000").unwrap();
            packed.push(fs::read(&tarball).unwrap());
        }
        fs::remove_dir_all(&folder).unwrap();
        assert!(packed[0] == packed[1] && !packed[0].is_empty());
    }

    #[test]
    fn required_glibc_is_that_of_the_newest_symbol() {
        let listed = "Version References:\n  required from libm.so.6:\n    0x06969189 0x00 03 GLIBC_2.29\n  \
                      required from libc.so.6:\n    0x09691a75 0x00 02 GLIBC_2.2.5\n    \
                      0x0d696917 0x00 04 GLIBC_2.7\n    0x00 0x00 05 GLIBC_PRIVATE\n  NEEDED  libc.so.6";
        assert_eq!(glibc(listed), Some((2, 29)));
        assert_eq!(glibc("NEEDED  libc.so.6"), None);
    }

    #[test]
    fn options_are_read() {
        let args = |words: &[&str]| options(&words.iter().map(|w| (*w).to_owned()).collect::<Vec<_>>());
        let some = args(&["--binary", "/x", "--no-test", "--out", "/y"]).unwrap().unwrap();
        assert_eq!((some.binary, some.out, some.test), (Some("/x".into()), "/y".into(), false));
        assert!(args(&["--help"]).unwrap().is_none());
        assert!(args(&["--binary"]).is_err() && args(&["x"]).is_err());
    }
}
