//! Bundles in this process: an engine, and a scheduler on it.

use moec_bundle::read::Bundle;
use moec_ir::plan::Plan;
use moec_runtime::serving::scheduler::{Event, Job, Scheduler, Setting};
use moec_runtime::{Decoder, Engine, Options, Program, Sampler, Sampling};
use std::collections::BTreeMap;

/// Runs `body` on an engine of the bundle with one thread, after `change` to its plan. Results do not depend
/// on the number of threads.
pub fn with_plan<T>(
    bundle: &Bundle,
    change: impl FnOnce(&mut Plan),
    body: impl FnOnce(&mut Engine<'_>) -> T,
) -> T {
    let unit = bundle.unit().expect("the bundle's kernels");
    let mut plan = bundle.plan.clone();
    change(&mut plan);
    let program = Program::new(plan, &|s| unit.resolve(s)).expect("a program");
    let options = Options { threads: Some(1), ..Options::default() };
    body(&mut Engine::open(&program, &bundle.folder, options).expect("an engine"))
}

/// Like [`with_plan`], with the bundle's plan unchanged.
pub fn with_engine<T>(bundle: &Bundle, body: impl FnOnce(&mut Engine<'_>) -> T) -> T {
    with_plan(bundle, |_| {}, body)
}

/// The answer to a prompt of [`served`].
#[derive(Clone, Debug, Default)]
pub struct Answer {
    /// Number of prompt tokens that were reused.
    pub shared: usize,
    /// Number of cached prompt tokens that were computed again, summed over the prompts submitted together.
    pub reread: u64,
    /// Generated tokens.
    pub ids: Vec<u32>,
    /// Log-probability of each token.
    pub likely: Vec<f64>,
}

/// Greedy answers of `n` tokens to prompts. Groups of `together` prompts are submitted to one scheduler at
/// once, and run to their ends.
pub fn served(
    engine: &mut Engine<'_>,
    setting: &Setting,
    prompts: &[Vec<u32>],
    (together, n): (usize, usize),
) -> Vec<Answer> {
    let mut decoder = Decoder::full();
    let mut scheduler = Scheduler::new(engine, &mut decoder, setting).expect("a scheduler");
    let mut answers = Vec::new();
    for prompts in prompts.chunks(together) {
        let before = scheduler.counters();
        let mut made = BTreeMap::<u64, Answer>::new();
        for prompt in prompts {
            let sampling = Sampling { log_probabilities: Some(0), ..Sampling::default() };
            let job = Job {
                prompt: prompt.clone(),
                samplers: vec![Box::new(Sampler::new(sampling))],
                n,
                end: Vec::new(),
                limit: None,
                scores: None,
                draft_tokens: 0,
            };
            let sequences = scheduler.submit(job).expect("there is room");
            made.extend(sequences.into_iter().map(|sequence| (sequence, Answer::default())));
        }
        let mut hear = |sequence: u64, event: Event| {
            let answer = made.get_mut(&sequence).expect("a sequence that was submitted");
            match event {
                Event::Began { shared } => answer.shared = shared,
                Event::Token { id, log_probabilities } => {
                    answer.ids.push(id);
                    answer.likely.push(log_probabilities.expect("they are requested").chosen);
                }
                Event::Scored { .. } | Event::Ended(_) => {}
            }
            true
        };
        scheduler.run(&mut hear, &mut |_| true).expect("an engine that computes");
        let now = scheduler.counters();
        let shared: usize = made.values().map(|answer| answer.shared).sum();
        let read = prompts.iter().map(Vec::len).sum::<usize>() - shared;
        let counted = (now.prompt_tokens - before.prompt_tokens, now.shared_tokens - before.shared_tokens);
        assert_eq!(counted, (read as u64, shared as u64), "what is counted is what is said");
        let reread = now.reread_tokens - before.reread_tokens;
        answers.extend(made.into_values().map(|answer| Answer { reread, ..answer }));
    }
    answers
}
