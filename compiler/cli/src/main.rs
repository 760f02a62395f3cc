//! The `moec` command.

fn main() -> std::process::ExitCode {
    moec::main()
}
