//! `moec-qnn-exec`: the process that QNN runs in if moec itself is not installed.

fn main() -> std::process::ExitCode {
    moec_qnn_sys::worker::serve()
}
