//! A text of PTX: what is read is printed and read back as itself; what verifies can be executed, to its end or to an error.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moec_ptx::{Argument, Launch, Memory, Module, Program, parse, print, verify};

/// Steps of a block, so that loops end.
const STEPS: u64 = 2000;

/// Starts every kernel with a buffer for each parameter of eight bytes, and small numbers for the others.
fn execute(module: &Module) {
    let mut memory = Memory::new(module).expect("a verified module has a memory");
    let buffer = memory.add("buffer", &[0; 4096]);
    for kernel in module.functions().filter(|function| function.entry && function.body.is_some()) {
        let program = Program::new(module, &kernel.name).expect("a verified kernel is a program");
        let argument = |(_, bytes): (&str, u32)| match bytes {
            8 => Argument::Buffer(buffer),
            bytes => Argument::Bytes(vec![1; bytes as usize]),
        };
        let arguments: Vec<_> = program.parameters().map(argument).collect();
        for unwritten in [false, true] {
            let launch =
                Launch { dynamic_shared: 1024, unwritten, steps: STEPS, ..Launch::linear(1, 40) };
            let _ = program.launch(&memory, &arguments, &launch);
        }
    }
}

fuzz_target!(|text: &str| {
    let Ok(module) = parse(text) else { return };
    let printed = print(&module);
    match parse(&printed) {
        Ok(again) => assert!(again == module, "reads back another module:\n{printed}"),
        Err(e) => panic!("does not read back: {e}\n{printed}"),
    }
    if verify(&module).is_ok() {
        execute(&module);
    }
});
