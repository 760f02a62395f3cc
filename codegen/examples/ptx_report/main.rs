//! Registers and memory of GPU kernels, by NVIDIA's assembler: `cargo run -p moec-codegen --example
//! ptx_report` after `cargo xtask cuda`. With a folder as its argument it writes the PTX there, too.
#![allow(clippy::print_stdout, reason = "it is a command")]

mod catalogue;
mod ptxas;

use moec_codegen::gpu::{Sm, compile};
use std::fmt::Write as _;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let ptxas = moec_testing::ptxas()
        .ok_or("no ptxas here; `cargo xtask cuda` installs it, or name it in MOEC_PTXAS")?;
    let folder = std::env::args().nth(1);
    let names = Sm::ALL.map(Sm::name).map(|name| format!("{name:>22}"));
    println!("{:<34} {}", "registers, spilled, shared bytes", names.concat());
    for (name, kernel) in catalogue::kernels() {
        let mut line = format!("{name:<34} ");
        for sm in Sm::ALL {
            let ptx = compile(sm, std::slice::from_ref(&kernel))?;
            if let Some(folder) = &folder {
                let file = format!("{}_{}.ptx", name.replace([' ', ','], "_"), sm.name());
                std::fs::write(std::path::Path::new(folder).join(file), &ptx)?;
            }
            let r =
                ptxas::assemble(&ptxas, sm, &ptx).map_err(|e| format!("{name} for {}: {e}", sm.name()))?;
            let _ = write!(line, "{:>8} {:>5} {:>7}", r.registers, r.spilled, r.shared);
        }
        println!("{line}");
    }
    Ok(())
}
