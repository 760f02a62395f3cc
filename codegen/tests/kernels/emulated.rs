//! AArch64 kernels, linked with a small driver and run by an emulator.

use crate::harness::{Case, active, bytes, can_multiply, check_case, is_assigned, items, matrices};
use moec_codegen::{ByteDot, ComputeType, Isa, KernelSpec, Machine, compile};
use moec_testing::AARCH64;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

const LINKER: &str = "aarch64-linux-gnu-gcc";
const EMULATOR: &str = "qemu-aarch64";
const DRIVER: &str = include_str!("driver.c");

/// A machine with all instructions that kernels use, one with the base architecture only, and one that
/// multiplies bytes a row at a time.
fn machines() -> [Machine; 3] {
    let machine = |cpu: &str, features: &[&str]| Machine {
        triple: "aarch64-unknown-linux-gnu".to_string(),
        cpu: cpu.to_string(),
        features: features.iter().map(|f| (*f).to_string()).collect(),
    };
    [
        machine("neoverse-v2", &["fullfp16", "dotprod", "i8mm", "bf16", "lse"]),
        machine("generic", &[]),
        machine("cortex-a76", &["fullfp16", "dotprod", "lse"]),
    ]
}

/// Checks the cases on every machine that has the instructions for them.
pub(crate) fn check(cases: &[Case]) {
    if !AARCH64.met_or_skip() {
        return;
    }
    let machines = machines();
    // The machine that multiplies bytes a row at a time differs from the others in byte products only.
    let multiplies = |isa: &Isa, spec: &KernelSpec| {
        can_multiply(isa, spec) && (isa.bytes != ByteDot::Sdot || multiplies_bytes(spec))
    };
    for machine in &machines {
        let dealt = cases
            .iter()
            .enumerate()
            .filter(|(i, c)| is_assigned(&c.spec, *i, machine, &machines, multiplies));
        let cases: Vec<&Case> = dealt.map(|(_, case)| case).collect();
        if !cases.is_empty() {
            check_on(machine, &cases);
        }
    }
}

fn multiplies_bytes(spec: &KernelSpec) -> bool {
    spec.compute() == Some(ComputeType::I8)
}

fn check_on(machine: &Machine, cases: &[&Case]) {
    let isa = machine.isa();
    let specs: Vec<_> = cases.iter().map(|c| c.spec.clone()).collect();
    let object = compile(machine, &specs, &()).unwrap_or_else(|e| panic!("{e}"));
    let mut numbers = BTreeMap::new();
    for spec in &specs {
        let next = numbers.len();
        numbers.entry(spec.symbol(&isa)).or_insert(next);
    }
    const CHUNKS: [i64; 3] = [i64::MAX, 1, 3];
    let (mut jobs, mut sizes) = (Vec::new(), Vec::new());
    for case in cases {
        for chunk in CHUNKS {
            let header = [
                numbers[&case.spec.symbol(&isa)] as i64,
                case.n as i64,
                items(&isa, case, active(case)) as i64,
                if case.spec.grid(&isa).has_clusters() { -chunk } else { chunk },
                case.spec.scratch_bytes(&isa).next_multiple_of(64) as i64,
                case.operands.len() as i64,
            ];
            for x in header {
                jobs.extend(x.to_le_bytes());
            }
            for operand in &case.operands {
                match bytes(operand, case, &isa) {
                    Ok(data) => {
                        if let Some(matrices) = matrices(operand, &case.spec) {
                            for x in [-2, matrices as i64] {
                                jobs.extend(x.to_le_bytes());
                            }
                        }
                        jobs.extend((data.len() as i64).to_le_bytes());
                        sizes.push(data.len());
                        jobs.extend(data);
                    }
                    Err(again) => {
                        for x in [-1, again as i64] {
                            jobs.extend(x.to_le_bytes());
                        }
                        sizes.push(0);
                    }
                }
            }
        }
    }
    let written = emulate(&object, &numbers, &jobs);
    assert_eq!(written.len(), sizes.iter().sum::<usize>(), "the driver writes every operand back");
    let mut words = written.as_slice();
    let mut sizes = sizes.into_iter();
    for case in cases {
        let results: Vec<Vec<Vec<u32>>> = CHUNKS
            .iter()
            .map(|_| {
                let take = |len: usize, words: &mut &[u8]| {
                    let (operand, rest) = words.split_at(len);
                    *words = rest;
                    operand.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
                };
                sizes.by_ref().take(case.operands.len()).map(|len| take(len, &mut words)).collect()
            })
            .collect();
        check_case(case, &isa, &results);
    }
}

/// Links kernels and the driver, runs the program, and returns its output.
fn emulate(object: &[u8], numbers: &BTreeMap<String, usize>, jobs: &[u8]) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
    let write = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap_or_else(|e| panic!("{e}"));
        path
    };
    let mut symbols: Vec<(&String, &usize)> = numbers.iter().collect();
    symbols.sort_by_key(|(_, number)| **number);
    let (mut declared, mut table) = (String::new(), String::new());
    for (symbol, _) in symbols {
        let _ = writeln!(declared, "extern void {symbol}();");
        let _ = writeln!(table, "    (void *){symbol},");
    }
    let files = [
        write("kernels.o", object),
        write("driver.c", DRIVER.as_bytes()),
        write("table.c", format!("{declared}void *const table[] = {{\n{table}}};\n").as_bytes()),
    ];
    let program = folder.path().join("driver");
    let mut link = Command::new(LINKER);
    link.args(["-static", "-O1", "-o"]).arg(&program).args(files);
    let linked = link.output().unwrap_or_else(|e| panic!("{e}"));
    assert!(linked.status.success(), "{}", String::from_utf8_lossy(&linked.stderr));
    run(&program, jobs)
}

fn run(program: &Path, jobs: &[u8]) -> Vec<u8> {
    let mut command = Command::new(EMULATOR);
    command.args(["-cpu", "max"]).arg(program).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap_or_else(|e| panic!("{e}"));
    let mut stdin = child.stdin.take().expect("piped");
    // The driver writes output before it has read all input, so both pipes are served at once.
    let output = std::thread::scope(|scope| {
        scope.spawn(move || stdin.write_all(jobs));
        child.wait_with_output()
    });
    let output = output.unwrap_or_else(|e| panic!("{e}"));
    assert!(output.status.success(), "the driver ends with {}", output.status);
    output.stdout
}
