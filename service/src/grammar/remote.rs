//! Constraints of answers by a grammar in a process of its own, which runs `worker`.

use super::worker::{COMPILE, Command, JOB, MEMORY, TOKEN, Vocabulary};
use super::{Grammar, apply};
use crate::error::{Error, Result};
use crate::process::pool::{Pool, Worker};
use moec_runtime::Constraint;
use moec_runtime::error::Error as Failed;
use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

/// Processes for the grammars of one vocabulary. Each compiles one grammar at a time, and computes the masks
/// of its answers.
#[derive(Debug)]
pub struct Workers(Arc<Pool>);

impl Workers {
    /// Creates the pool for the vocabulary of a `tokenizer.json`. `tokens`: number of the model's logits;
    /// `ends`: its end tokens.
    ///
    /// # Errors
    /// End tokens that cannot be written as JSON, which does not occur.
    pub fn new(tokenizer: Arc<[u8]>, tokens: usize, ends: Vec<u32>) -> Result<Self> {
        let vocabulary =
            serde_json::to_vec(&Vocabulary { tokens, ends }).map_err(|e| Error::new(e.to_string()))?;
        Ok(Self(Pool::new(JOB, vec![vocabulary.into(), tokenizer])))
    }

    /// As [`Pool::take`].
    pub(crate) fn take(&self) -> Result<Worker> {
        self.0.take()
    }

    /// Compiles a grammar, and returns a constraint for each of `answers`.
    ///
    /// # Errors
    /// As [`super::Grammars::new`]; a grammar that cannot be used or exceeds its limits; a process that
    /// cannot be started.
    pub fn constraints(&self, grammar: &Grammar, answers: usize) -> Result<Vec<Box<dyn Constraint>>> {
        constraints(self.take()?, grammar, answers, ())
    }
}

/// As [`Workers::constraints`], by a process that was taken before. `held` is dropped after the process has
/// returned to the pool.
pub(crate) fn constraints(
    worker: Worker,
    grammar: &Grammar,
    answers: usize,
    held: impl Send + 'static,
) -> Result<Vec<Box<dyn Constraint>>> {
    let mut session = Session { masks: Vec::new(), pending: VecDeque::new(), worker, _held: Box::new(held) };
    session.worker.open()?;
    let command = serde_json::to_vec(&Command::Compile(grammar.clone(), answers));
    let command = command.map_err(|e| Error::new(e.to_string()))?;
    let compiled = session.worker.send(&command).and_then(|()| session.worker.reply());
    let mask = Arc::<[u8]>::from(compiled.map_err(|_| too_large(grammar))?.map_err(Error::new)?);
    session.masks = (0..answers).map(|_| Some(Ok(Arc::clone(&mask)))).collect();
    let session = Arc::new(Mutex::new(session));
    let one =
        |answer| Box::new(RemoteConstraint { session: Arc::clone(&session), answer, ended: false }) as _;
    Ok((0..answers).map(one).collect())
}

fn too_large(grammar: &Grammar) -> Error {
    let error = format!(
        "the {} cannot be used: it takes more than {COMPILE} s or {} MiB to compile",
        grammar.kind(),
        MEMORY >> 20
    );
    Error::new(error)
        .hint("use fewer or shorter patterns, and combine fewer patterns that must match at the same time")
}

/// The mask of an answer's next token, or the reason that there is none.
type Mask = std::result::Result<Arc<[u8]>, String>;

/// A compiled grammar, and its answers.
struct Session {
    /// By answer; `None` if it has not arrived.
    masks: Vec<Option<Mask>>,
    /// Ids of the answers whose masks the process sends next, in order.
    pending: VecDeque<usize>,
    worker: Worker,
    // Dropped after the process, which returns to the pool first.
    _held: Box<dyn Send>,
}

/// Error for a process that has exceeded its limits.
fn limit_exceeded(_: io::Error) -> Failed {
    Failed::constraint(format!(
        "the grammar's process needed more than {TOKEN} s for a token, or more than {} MiB in all",
        MEMORY >> 20
    ))
}

impl Session {
    /// Reads the next mask.
    fn read(&mut self) -> io::Result<()> {
        if let Some(answer) = self.pending.pop_front() {
            let mask = self.worker.reply()?.map(Arc::from);
            self.masks[answer] = Some(mask);
        }
        Ok(())
    }

    fn mask(&mut self, answer: usize, logits: &mut [f32]) -> Result<(), Failed> {
        while self.masks[answer].is_none() && !self.pending.is_empty() {
            self.read().map_err(limit_exceeded)?;
        }
        match &self.masks[answer] {
            Some(Ok(mask)) => {
                apply(mask, logits);
                Ok(())
            }
            Some(Err(why)) => Err(Failed::constraint(why)),
            None => Err(Failed::constraint("the grammar allows no further token")),
        }
    }

    /// Sends the next token of an answer; returns whether the answer is complete.
    fn accept(&mut self, answer: usize, id: u32) -> Result<bool, Failed> {
        let command = serde_json::to_vec(&Command::Token(answer, id));
        let command = command.map_err(Failed::constraint)?;
        self.masks[answer] = None;
        let mut next = || {
            self.worker.send(&command)?;
            while !self.pending.is_empty() {
                self.read()?;
            }
            self.worker.reply()
        };
        let complete = next().map_err(limit_exceeded)?.map_err(Failed::constraint)? == [1];
        if !complete {
            // The mask is computed while the model computes the next logits.
            self.pending.push_back(answer);
        }
        Ok(complete)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.worker.skip_replies(self.pending.len());
    }
}

/// Constraint of an answer by a grammar in another process.
struct RemoteConstraint {
    session: Arc<Mutex<Session>>,
    answer: usize,
    ended: bool,
}

impl Constraint for RemoteConstraint {
    fn mask(&mut self, logits: &mut [f32]) -> Result<(), Failed> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner).mask(self.answer, logits)
    }

    fn accept(&mut self, id: u32) -> Result<(), Failed> {
        let mut session = self.session.lock().unwrap_or_else(PoisonError::into_inner);
        self.ended = session.accept(self.answer, id)?;
        Ok(())
    }

    fn ended(&self) -> bool {
        self.ended
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{END, VOCAB, tokenizer};
    use super::*;
    use moec_runtime::{Sampler, Sampling};
    use serde_json::{Value, json};

    fn workers() -> Workers {
        Workers::new(Arc::from(tokenizer().into_bytes()), VOCAB, vec![END]).unwrap()
    }

    /// A number of patterns that a text must match all at once: each doubles the work of one step of the
    /// library.
    fn patterns(n: u8) -> Value {
        let pattern = |i: u8| format!(".*[a-{}].{{{}}}.*", char::from(b'b' + i), 10 + i);
        (0..n).map(|i| json!({"type": "string", "pattern": pattern(i)})).collect()
    }

    fn sampled(constraint: Box<dyn Constraint>, seed: u64, most: usize) -> Result<String, Failed> {
        let sampling = Sampling { temperature: 1.0, seed, ..Sampling::GREEDY };
        let mut sampler = Sampler::new(sampling).constrained(constraint);
        let mut text = String::new();
        while !sampler.ended() && text.len() < most {
            match sampler.sample(&[0.0; VOCAB])? {
                END => break,
                id => text.push(char::from_u32(id).unwrap()),
            }
        }
        Ok(text)
    }

    #[test]
    fn answers_of_one_grammar_advance_independently() {
        let grammar = Grammar::Regex("[a-c]{3}-[0-9]{2}".to_owned());
        let workers = workers();
        let id = workers.take().unwrap().id();
        for _ in 0..2 {
            let made = workers.constraints(&grammar, 3).unwrap();
            let mut samplers: Vec<Sampler> = (made.into_iter().zip(0..))
                .map(|(constraint, seed)| {
                    let sampling = Sampling { temperature: 1.0, seed, ..Sampling::GREEDY };
                    Sampler::new(sampling).constrained(constraint)
                })
                .collect();
            let mut texts = [const { String::new() }; 3];
            for _ in 0..6 {
                for (sampler, text) in samplers.iter_mut().zip(&mut texts) {
                    text.push(char::from_u32(sampler.sample(&[0.0; VOCAB]).unwrap()).unwrap());
                }
            }
            for text in &texts {
                assert!(text.as_bytes()[3] == b'-' && text[4..].parse::<u32>().is_ok(), "{texts:?}");
            }
            assert!(texts[0] != texts[1] || texts[1] != texts[2], "{texts:?}");
            // A constraint that is dropped midway leaves a process that others can use.
            drop(samplers);
            assert_eq!((workers.0.idle(), workers.take().unwrap().id()), (1, id));
        }
    }

    #[test]
    fn invalid_grammar_leaves_its_process_reusable() {
        let wrong = Grammar::Schema(json!({"type": "no such"}));
        let workers = workers();
        let id = workers.take().unwrap().id();
        let made = workers.constraints(&wrong, 1);
        assert!(made.err().unwrap().what.contains("JSON schema cannot be used"));
        let mut deep = json!({"type": "string"});
        for _ in 0..200 {
            deep = json!({"anyOf": [deep]});
        }
        let made = workers.constraints(&Grammar::Schema(deep), 1);
        assert!(made.err().unwrap().what.contains("recursion limit"));
        let made = workers.constraints(&Grammar::Regex("ab?c".to_owned()), 1);
        let text = sampled(made.unwrap().remove(0), 1, 10).unwrap();
        assert!(["ac", "abc"].contains(&&*text), "{text}");
        assert_eq!((workers.0.idle(), workers.take().unwrap().id()), (1, id));
    }

    /// Grammars that take gigabytes or do not end are refused.
    #[test]
    fn grammars_over_the_resource_limits_are_rejected() {
        for schema in [
            json!({"allOf": patterns(16)}),
            json!({"allOf": patterns(40)}),
            json!({"type": "string", "pattern": "a?".repeat(400_000)}),
        ] {
            let workers = workers();
            let e = workers.constraints(&Grammar::Schema(schema), 1).err().unwrap();
            assert!(e.what.contains("takes more than") && e.hint.is_some(), "{e}");
            assert_eq!(workers.0.idle(), 0, "the process goes on");
        }
    }

    /// Conjunctions that compile take increasing time while tokens are masked: an answer completes, or ends
    /// with an error.
    #[test]
    fn masks_of_heavy_grammars_arrive_or_end_the_answer() {
        let mut compiled = 0;
        for n in [3, 6, 8, 10] {
            let pattern = |i: u8| format!("/.*[a-{}].{{{}}}.*/", char::from(b'b' + i), 10 + i);
            let lark = format!("start: A\nA: {}", (0..n).map(pattern).collect::<Vec<_>>().join(" & "));
            for grammar in [Grammar::Schema(json!({"allOf": patterns(n)})), Grammar::Lark(lark)] {
                match workers().constraints(&grammar, 1) {
                    Ok(mut made) => {
                        let ended = sampled(made.remove(0), 3, 100);
                        assert!(matches!(ended, Ok(_) | Err(Failed::Request { .. })), "{ended:?}");
                        compiled += 1;
                    }
                    Err(e) => assert!(e.what.contains("cannot be used"), "{e}"),
                }
            }
        }
        assert!(compiled > 0);
    }

    /// As if the operating system ended it for exceeding its limits.
    #[test]
    fn killed_grammar_process_ends_its_answers() {
        let workers = workers();
        let id = workers.take().unwrap().id().unwrap().to_string();
        let mut made = workers.constraints(&Grammar::Regex("[ab]{9}".to_owned()), 2).unwrap();
        assert!(std::process::Command::new("kill").args(["-KILL", &id]).status().unwrap().success());
        for constraint in made.drain(..) {
            let ended = sampled(constraint, 3, 9);
            let why = ended.err().unwrap().to_string();
            assert!(why.contains("needed more than"), "{why}");
        }
        assert_eq!(workers.0.idle(), 0, "others get a process that has ended");
    }

    #[test]
    fn abandoned_grammar_compilation_is_terminated() {
        let worker = workers().take().unwrap();
        let end = worker.end().unwrap();
        let grammar = Grammar::Schema(json!({"allOf": patterns(16)}));
        let compiling = std::thread::spawn(move || constraints(worker, &grammar, 1, ()).is_err());
        drop(end);
        assert!(compiling.join().unwrap());
    }
}
