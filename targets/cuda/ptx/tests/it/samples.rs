//! Modules compiled by LLVM are read, checked, and printed back.

use crate::common::{SAMPLES, assembled, folder, sample};
use moec_ptx::{parse, print, verify};

#[test]
fn llvm_samples_are_valid_modules() {
    for name in SAMPLES {
        let module = parse(&sample(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
        verify(&module).unwrap_or_else(|e| panic!("{name}: {e}"));
        let text = print(&module);
        assert_eq!(parse(&text).unwrap(), module, "{name}:\n{text}");
        assert_eq!(print(&parse(&text).unwrap()), text, "{name}");
    }
}

#[test]
fn ptxas_accepts_samples_and_printed_modules() {
    for name in SAMPLES {
        assembled(name, "sm_80", &sample(name));
        let text = print(&parse(&sample(name)).unwrap());
        for architecture in ["sm_80", "sm_89", "sm_90"] {
            assembled(name, architecture, &text);
        }
    }
}

#[test]
fn seeds_of_fuzzing_can_be_executed() {
    let seeds = folder().join("../../../../../fuzz/seeds/ptx");
    let mut count = 0;
    for seed in std::fs::read_dir(seeds).unwrap() {
        let text = std::fs::read_to_string(seed.unwrap().path()).unwrap();
        verify(&parse(&text).unwrap()).unwrap();
        count += 1;
    }
    assert!(count > 0);
}
