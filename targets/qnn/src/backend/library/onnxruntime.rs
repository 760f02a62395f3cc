//! Plain onnxruntime, in a Python of its own: results of the common runtime for a written network.

use moec_qnn_sys::LIMIT;
use moec_qnn_sys::worker::within;
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

/// The variable that names a Python with onnxruntime and numpy.
pub(super) const PYTHON: &str = "MOEC_ONNXRUNTIME";

/// Script that answers requests. A request has the path of a model in one line and the sizes of its inputs in
/// another. The inputs follow as f32 numbers. Results have the same form.
const SCRIPT: &str = "
import sys
import numpy, onnxruntime
source, sink = sys.stdin.buffer, sys.stdout.buffer
options = onnxruntime.SessionOptions()
options.log_severity_level = 3
options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
sink.write(('%s\\n' % onnxruntime.__version__).encode())
sink.flush()
for line in iter(source.readline, b''):
    count = int(source.readline())
    numbers = numpy.frombuffer(source.read(4 * count), '<f4')
    model = onnxruntime.InferenceSession(line.decode().rstrip('\\n'), options, providers=['CPUExecutionProvider'])
    given, first = {}, 0
    for port in model.get_inputs():
        size = int(numpy.prod(port.shape))
        given[port.name] = numbers[first:first + size].reshape(port.shape)
        first += size
    results = [result.astype('<f4') for result in model.run(None, given)]
    sink.write(('%d\\n' % sum(result.size for result in results)).encode())
    for result in results:
        sink.write(result.tobytes())
    sink.flush()
";

/// A process with it.
#[derive(Debug)]
pub(super) struct Onnxruntime {
    child: Child,
    to: Option<ChildStdin>,
    from: BufReader<ChildStdout>,
    limit: Duration,
}

impl Onnxruntime {
    /// Starts it, in the Python that [`PYTHON`] names, or else in the one next to QNN's library in moec's
    /// cache folder. The time limit of an answer is the library's.
    ///
    /// # Errors
    /// The reason that it cannot start.
    pub(super) fn start(cache: &Path) -> Result<Self, String> {
        let named = std::env::var_os(PYTHON).filter(|v| !v.is_empty()).map(PathBuf::from);
        let python = named.unwrap_or_else(|| cache.join("qnn/bin/python"));
        Self::of(&python, super::limit().map_err(|missing| format!("{}: {}", missing.why, missing.hint))?)
    }

    /// Starts it in a Python.
    fn of(python: &Path, limit: Duration) -> Result<Self, String> {
        let mut command = Command::new(python);
        command.args(["-c", SCRIPT]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let failed = |e: io::Error| format!("`{}` cannot be started: {e}", python.display());
        let mut child = command.spawn().map_err(failed)?;
        let (Some(to), Some(from)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(format!("`{}` has no pipes", python.display()));
        };
        let mut started = Self { child, to: Some(to), from: BufReader::new(from), limit };
        let mut version = String::new();
        let Self { child, from, .. } = &mut started;
        match within(child, limit, || from.read_line(&mut version)) {
            (_, true) => Err(format!("`{}` {}", python.display(), late("load onnxruntime", limit))),
            (Ok(n), false) if n > 0 => Ok(started),
            _ => Err(format!("`{}` has no onnxruntime: {}", python.display(), started.last_words())),
        }
    }

    /// The results of a model on its inputs, both one after the other.
    ///
    /// # Errors
    /// The last line from Python, or the expired time limit.
    pub(super) fn run(&mut self, model: &Path, x: &[f32]) -> Result<Vec<f32>, String> {
        let Self { child, to, from, limit } = self;
        let limit = *limit;
        match within(child, limit, || exchange(to.as_mut(), from, model, x)) {
            (_, true) => {
                let doing = format!("execute `{}`", model.display());
                Err(format!("onnxruntime {}", late(&doing, limit)))
            }
            (result, false) => result.map_err(|e| format!("onnxruntime: {e}: {}", self.last_words())),
        }
    }

    /// The last line of its stderr, once it has ended.
    fn last_words(&mut self) -> String {
        self.to = None;
        let _ = self.child.kill();
        let mut text = String::new();
        if let Some(mut stderr) = self.child.stderr.take() {
            let _ = stderr.read_to_string(&mut text);
        }
        text.lines().last().unwrap_or("it printed nothing").to_owned()
    }
}

/// Message about an expired time limit, and the remedy.
fn late(doing: &str, limit: Duration) -> String {
    format!("did not {doing} within {} s and was ended: raise `{LIMIT}`", limit.as_secs_f64())
}

fn exchange(
    to: Option<&mut ChildStdin>,
    from: &mut BufReader<ChildStdout>,
    model: &Path,
    x: &[f32],
) -> io::Result<Vec<f32>> {
    let to = to.ok_or(io::ErrorKind::BrokenPipe)?;
    let mut wire = format!("{}\n{}\n", model.display(), x.len()).into_bytes();
    wire.extend(x.iter().flat_map(|x| x.to_le_bytes()));
    to.write_all(&wire)?;
    to.flush()?;
    let mut line = String::new();
    from.read_line(&mut line)?;
    let count: u64 = line.trim().parse().map_err(io::Error::other)?;
    let mut bytes = Vec::new();
    from.by_ref().take(4 * count).read_to_end(&mut bytes)?;
    Ok(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
}

impl Drop for Onnxruntime {
    fn drop(&mut self) {
        self.to = None;
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    /// A program in place of Python, which prints this and ends.
    fn python(folder: &Path, script: &str) -> PathBuf {
        let path = folder.join("python");
        std::fs::write(&path, format!("#!/bin/sh\n{script}exec sleep 100\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    #[test]
    fn unresponsive_onnxruntime_is_ended_and_named() {
        let folder = tempfile::tempdir().unwrap();
        let limit = Duration::from_millis(500);
        let silent = Onnxruntime::of(&python(folder.path(), ""), limit).unwrap_err();
        assert!(silent.contains("python` did not load onnxruntime within 0.5 s and was ended"), "{silent}");
        let patient = Duration::from_secs(100);
        let mut loaded = Onnxruntime::of(&python(folder.path(), "echo 1.0\n"), patient).unwrap();
        loaded.limit = limit;
        let late = loaded.run(Path::new("cap8.onnx"), &[1.0; 4]).unwrap_err();
        assert!(late.contains("did not execute `cap8.onnx` within 0.5 s") && late.contains(LIMIT), "{late}");
        // The program has ended, so a request fails at once.
        let ended = loaded.run(Path::new("cap8.onnx"), &[1.0; 4]).unwrap_err();
        assert!(ended.starts_with("onnxruntime: "), "{ended}");
    }
}
