//! Queues on a fake unit, which counts the graphs that run at a time.

use super::*;
use crate::bundle::BundleReader;
use moec_ir::plan::GraphDecl;
use std::sync::Condvar;
use std::time::Duration;

/// Multiplies its input by the graph's number. A graph waits until `together` run, or until all are past.
#[derive(Default)]
struct Fake {
    together: usize,
    counts: Arc<(Mutex<Counts>, Condvar)>,
    /// Graphs that fail, and one that panics.
    fails: Vec<usize>,
    panics: Option<usize>,
}

#[derive(Debug, Default)]
struct Counts {
    running: usize,
    most: usize,
    calls: usize,
}

impl Graphs for Fake {
    fn name(&self) -> &'static str {
        "fake"
    }

    fn load(&mut self, _: &BundleReader, _: &[GraphDecl], _: usize) -> Result<()> {
        Ok(())
    }

    fn run(&self, graph: usize, _: usize, inputs: &[&[f16]], outputs: &mut [&mut [f16]]) -> Result<()> {
        assert!(self.panics != Some(graph), "a unit that panics");
        let (counts, changed) = &*self.counts;
        let mut now = lock(counts);
        (now.running, now.calls) = (now.running + 1, now.calls + 1);
        now.most = now.most.max(now.running);
        changed.notify_all();
        // With fewer queues than `together` this ends late, and the counters say so.
        while now.most < self.together {
            let (next, late) = changed.wait_timeout(now, Duration::from_secs(20)).unwrap();
            now = next;
            if late.timed_out() {
                break;
            }
        }
        now.running -= 1;
        drop(now);
        if self.fails.contains(&graph) {
            return Err(Error::graph(format!("package.{graph} cap16"), "it overflows"));
        }
        for (y, x) in outputs[0].iter_mut().zip(inputs[0]) {
            *y = f16::from_f32(x.to_f32() * graph as f32);
        }
        Ok(())
    }
}

/// Launch `i` runs graph `i + 1` on one number, `i`.
struct Numbers {
    results: Vec<f32>,
    /// Launch that cannot be filled.
    unfilled: Option<usize>,
}

impl Launches for Numbers {
    fn count(&self) -> usize {
        self.results.len()
    }

    fn fill(&mut self, launch: usize, buffers: &mut LaunchBuffers) -> Result<u32> {
        if self.unfilled == Some(launch) {
            return Err(Error::graph("experts of set 0", "a row is too large"));
        }
        buffers.x.clear();
        buffers.x.push(f16::from_f32(launch as f32));
        buffers.y.clear();
        buffers.y.resize(1, f16::ZERO);
        Ok(u32::try_from(launch).unwrap() + 1)
    }

    fn take(&mut self, launch: usize, buffers: &LaunchBuffers) {
        self.results[launch] = buffers.y[0].to_f32();
    }
}

fn numbers(count: usize) -> Numbers {
    Numbers { results: vec![f32::NAN; count], unfilled: None }
}

#[test]
fn as_many_graphs_run_at_a_time_as_there_are_queues() {
    for queues in [1, 2, 4] {
        let fake = Fake { together: queues, ..Fake::default() };
        let counts = Arc::clone(&fake.counts);
        let all = GraphQueues::new(Box::new(fake), queues).unwrap();
        for _ in 0..3 {
            let mut launches = numbers(9);
            all.run(&mut launches).unwrap();
            let expected: Vec<f32> = (0..9_u8).map(|i| f32::from(i) * f32::from(i + 1)).collect();
            assert_eq!(launches.results, expected, "{queues} queues");
        }
        let now = lock(&counts.0);
        assert_eq!((now.most, now.running, now.calls), (queues, 0, 27));
        assert!(lock(&all.free).len() <= queues + 1, "buffers are used again");
    }
}

#[test]
fn first_failing_graph_is_named_and_all_others_end() {
    let of = |fails: &[usize], unfilled| {
        let fake = Fake { together: 4, fails: fails.to_vec(), ..Fake::default() };
        let counts = Arc::clone(&fake.counts);
        let all = GraphQueues::new(Box::new(fake), 4).unwrap();
        let error = all.run(&mut Numbers { unfilled, ..numbers(20) }).unwrap_err().to_string();
        assert_eq!(lock(&counts.0).running, 0);
        let calls = lock(&counts.0).calls;
        // The queues still serve.
        let mut launches = numbers(1);
        all.run(&mut launches).unwrap();
        assert_eq!(launches.results, [0.0]);
        (error, calls)
    };
    assert!(of(&[3], None).0.contains("package.3 cap16"));
    assert!(of(&[4, 2], None).0.contains("package.2 cap16"));
    // No launch begins after an error.
    let (error, calls) = of(&[], Some(5));
    assert!(error.contains("experts of set 0") && calls == 5, "{error}, {calls} calls");
}

#[test]
fn panic_in_a_queue_is_an_error_and_no_hang() {
    let fake = Fake { panics: Some(2), ..Fake::default() };
    let all = GraphQueues::new(Box::new(fake), 2).unwrap();
    // Each error ends a thread; the last ones are of requests that no thread is left for.
    for _ in 0..4 {
        let error = all.run(&mut numbers(3)).unwrap_err().to_string();
        assert!(error.contains("the thread of its queue has ended"), "{error}");
    }
}
