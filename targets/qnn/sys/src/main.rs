//! `moec-qnn-exec`: the process that QNN runs in, where moec itself is not at hand.

fn main() -> std::process::ExitCode {
    moec_qnn_sys::worker::serve()
}
