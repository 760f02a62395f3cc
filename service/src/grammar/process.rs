//! Processes that hold the answers of others to grammars: `worker` is what they do.

use super::worker::{COMPILE, Command, JOB, MEMORY, TOKEN, Vocabulary};
use super::{Grammar, apply};
use crate::error::{Error, Result};
use crate::process::{self, End, PATIENCE};
use moec_runtime::Constraint;
use moec_runtime::error::Error as Failed;
use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

/// A process that compiles a grammar and computes the masks of its answers. It ends with the value.
#[derive(Debug)]
pub struct Process {
    worker: process::Process,
    /// Whether it has the vocabulary.
    is_open: bool,
    /// Masks that it still sends and nobody reads.
    owed: usize,
}

impl Process {
    /// Starts one.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start() -> Result<Self> {
        Ok(Self { worker: process::Process::start(JOB)?, is_open: false, owed: 0 })
    }

    /// What ends it.
    ///
    /// # Errors
    /// Too many files are open.
    pub(crate) fn end(&self) -> Result<End> {
        self.worker.end()
    }

    /// Whether it still runs.
    pub fn is_alive(&mut self) -> bool {
        self.worker.is_alive()
    }

    /// Gives it the vocabulary of a `tokenizer.json`, if it has none.
    ///
    /// # Errors
    /// As [`super::Grammars::new`]; it has ended.
    pub fn open(&mut self, tokenizer: &[u8], tokens: usize, ends: &[u32]) -> Result<()> {
        if self.is_open {
            return Ok(());
        }
        let ended = |e: io::Error| Error::new(format!("the process for grammars has ended: {e}"));
        let vocabulary = Vocabulary { tokens, ends: ends.to_vec() };
        let vocabulary = serde_json::to_vec(&vocabulary).map_err(|e| Error::new(e.to_string()))?;
        self.worker.link.send(&vocabulary).and_then(|()| self.worker.link.send(tokenizer)).map_err(ended)?;
        self.worker.link.replied(2 * PATIENCE).map_err(ended)?.map_err(Error::new)?;
        self.is_open = true;
        Ok(())
    }

    /// Compiles a grammar, and gives a constraint for each of `answers`. `back` gets the process when it can be used again.
    ///
    /// # Errors
    /// A grammar that cannot be used, or takes more than it may.
    pub fn constraints(
        mut self,
        grammar: &Grammar,
        answers: usize,
        back: Box<dyn FnOnce(Self) + Send>,
    ) -> Result<Vec<Box<dyn Constraint>>> {
        let command = serde_json::to_vec(&Command::Compile(grammar.clone(), answers));
        let command = command.map_err(|e| Error::new(e.to_string()))?;
        let mut compile = || {
            for _ in 0..std::mem::take(&mut self.owed) {
                // An answer that was given up has no use for it, be it a mask or an error.
                let _ = self.worker.link.replied(PATIENCE)?;
            }
            self.worker.link.send(&command)?;
            self.worker.link.replied(PATIENCE)
        };
        let mask = match compile() {
            Ok(Ok(mask)) => Arc::<[u8]>::from(mask),
            Ok(Err(why)) => {
                back(self);
                return Err(Error::new(why));
            }
            Err(_) => return Err(too_large(grammar)),
        };
        let masks = (0..answers).map(|_| Some(Ok(Arc::clone(&mask)))).collect();
        let session = Session { process: Some(self), masks, pending: VecDeque::new(), back: Some(back) };
        let session = Arc::new(Mutex::new(session));
        let one = |answer| Box::new(Remote { session: Arc::clone(&session), answer, ended: false }) as _;
        Ok((0..answers).map(one).collect())
    }
}

fn too_large(grammar: &Grammar) -> Error {
    let error = format!(
        "the {} cannot be used: it takes more than {COMPILE} s or {} MiB to compile",
        grammar.kind(),
        MEMORY >> 20
    );
    Error::new(error)
        .hint("give fewer or shorter patterns, and none that must hold together with many others")
}

/// The mask of an answer's next token, or why there is none.
type Mask = std::result::Result<Arc<[u8]>, String>;

/// A compiled grammar, and its answers.
struct Session {
    /// None once it has failed.
    process: Option<Process>,
    /// By answer; none where it is still to come.
    masks: Vec<Option<Mask>>,
    /// Whose masks the process sends next, in order.
    pending: VecDeque<usize>,
    back: Option<Box<dyn FnOnce(Process) + Send>>,
}

impl Session {
    /// Does something with the process. Where that fails it has exceeded its limits.
    fn with<T>(&mut self, what: impl FnOnce(&mut Self, &mut Process) -> io::Result<T>) -> Result<T, Failed> {
        let over = || {
            let limits = format!("a token takes more than {TOKEN} s, or all more than {} MiB", MEMORY >> 20);
            Failed::Constraint(limits)
        };
        let mut process = self.process.take().ok_or_else(over)?;
        let done = what(self, &mut process).map_err(|_| over())?;
        self.process = Some(process);
        Ok(done)
    }

    /// Reads the next mask that comes.
    fn read(&mut self, process: &mut Process) -> io::Result<()> {
        if let Some(answer) = self.pending.pop_front() {
            let mask = process.worker.link.replied(PATIENCE)?.map(Arc::from);
            self.masks[answer] = Some(mask);
        }
        Ok(())
    }

    fn mask(&mut self, answer: usize, logits: &mut [f32]) -> Result<(), Failed> {
        while self.masks[answer].is_none() && !self.pending.is_empty() {
            self.with(Self::read)?;
        }
        match &self.masks[answer] {
            Some(Ok(mask)) => {
                apply(mask, logits);
                Ok(())
            }
            Some(Err(why)) => Err(Failed::Constraint(why.clone())),
            None => Err(Failed::Constraint("nothing may follow".to_owned())),
        }
    }

    /// Whether the answer is complete.
    fn accept(&mut self, answer: usize, id: u32) -> Result<bool, Failed> {
        let command = serde_json::to_vec(&Command::Token(answer, id));
        let command = command.map_err(|e| Failed::Constraint(e.to_string()))?;
        self.masks[answer] = None;
        let complete = self.with(|session, process| {
            process.worker.link.send(&command)?;
            while !session.pending.is_empty() {
                session.read(process)?;
            }
            process.worker.link.replied(PATIENCE)
        })?;
        let complete = complete.map_err(Failed::Constraint)? == [1];
        if !complete {
            // It comes while the model computes the next logits.
            self.pending.push_back(answer);
        }
        Ok(complete)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if let (Some(mut process), Some(back)) = (self.process.take(), self.back.take()) {
            process.owed = self.pending.len();
            back(process);
        }
    }
}

/// An answer that another process holds to a grammar.
struct Remote {
    session: Arc<Mutex<Session>>,
    answer: usize,
    ended: bool,
}

impl Constraint for Remote {
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
    use std::sync::mpsc::{Receiver, channel};

    fn process() -> Process {
        let mut process = Process::start().unwrap();
        process.open(tokenizer().as_bytes(), VOCAB, &[END]).unwrap();
        process
    }

    /// Constraints, and where the process comes when they are dropped.
    fn constraints(
        process: Process,
        grammar: &Grammar,
        answers: usize,
    ) -> (Result<Vec<Box<dyn Constraint>>>, Receiver<Process>) {
        let (send, back) = channel();
        let made = process.constraints(grammar, answers, Box::new(move |process| drop(send.send(process))));
        (made, back)
    }

    /// So many patterns that a text must fit all at once: each doubles what one step of the library does.
    fn patterns(n: u8) -> Value {
        let pattern = |i: u8| format!(".*[a-{}].{{{}}}.*", char::from(b'b' + i), 10 + i);
        (0..n).map(|i| json!({"type": "string", "pattern": pattern(i)})).collect()
    }

    fn sampled(constraint: Box<dyn Constraint>, seed: u64, most: usize) -> Result<String, Failed> {
        let how = Sampling { temperature: 1.0, seed, ..Sampling::GREEDY };
        let mut sampler = Sampler::new(how).constrained(constraint);
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
    fn answers_of_one_grammar_go_on_by_themselves() {
        let grammar = Grammar::Regex("[a-c]{3}-[0-9]{2}".to_owned());
        let mut process = process();
        for _ in 0..2 {
            let (made, back) = constraints(process, &grammar, 3);
            let made = made.unwrap();
            let mut samplers: Vec<Sampler> = (made.into_iter().zip(0..))
                .map(|(constraint, seed)| {
                    let how = Sampling { temperature: 1.0, seed, ..Sampling::GREEDY };
                    Sampler::new(how).constrained(constraint)
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
            // One that is given up in the middle leaves a process that others can use.
            drop(samplers);
            process = back.recv().unwrap();
        }
        assert!(process.is_alive());
    }

    #[test]
    fn grammars_that_are_wrong_leave_the_process_to_others() {
        let wrong = Grammar::Schema(json!({"type": "no such"}));
        let (made, back) = constraints(process(), &wrong, 1);
        assert!(made.err().unwrap().what.contains("JSON schema cannot be used"));
        let mut deep = json!({"type": "string"});
        for _ in 0..200 {
            deep = json!({"anyOf": [deep]});
        }
        let (made, back) = constraints(back.recv().unwrap(), &Grammar::Schema(deep), 1);
        assert!(made.err().unwrap().what.contains("recursion limit"));
        let (made, _) = constraints(back.recv().unwrap(), &Grammar::Regex("ab?c".to_owned()), 1);
        let text = sampled(made.unwrap().remove(0), 1, 10).unwrap();
        assert!(["ac", "abc"].contains(&&*text), "{text}");
    }

    /// What takes gigabytes or never ends where nothing ends it.
    #[test]
    fn grammars_that_take_too_much_are_refused() {
        for schema in [
            json!({"allOf": patterns(16)}),
            json!({"allOf": patterns(40)}),
            json!({"type": "string", "pattern": "a?".repeat(400_000)}),
        ] {
            let (made, back) = constraints(process(), &Grammar::Schema(schema), 1);
            let e = made.err().unwrap();
            assert!(e.what.contains("takes more than") && e.hint.is_some(), "{e}");
            assert!(back.recv().is_err(), "the process goes on");
        }
    }

    /// Conjunctions that compile take more and more while tokens are masked: an answer comes, or ends with an error.
    #[test]
    fn masks_of_heavy_grammars_come_or_end_the_answer() {
        let mut compiled = 0;
        for n in [3, 6, 8, 10] {
            let pattern = |i: u8| format!("/.*[a-{}].{{{}}}.*/", char::from(b'b' + i), 10 + i);
            let lark = format!("start: A\nA: {}", (0..n).map(pattern).collect::<Vec<_>>().join(" & "));
            for grammar in [Grammar::Schema(json!({"allOf": patterns(n)})), Grammar::Lark(lark)] {
                match constraints(process(), &grammar, 1).0 {
                    Ok(mut made) => {
                        let ended = sampled(made.remove(0), 3, 100);
                        assert!(matches!(ended, Ok(_) | Err(Failed::Constraint(_))), "{ended:?}");
                        compiled += 1;
                    }
                    Err(e) => assert!(e.what.contains("cannot be used"), "{e}"),
                }
            }
        }
        assert!(compiled > 0);
    }

    /// As where the operating system ends it for what it takes.
    #[test]
    fn a_process_that_ends_ends_its_answers() {
        let process = process();
        let id = process.worker.id().to_string();
        let (made, back) = constraints(process, &Grammar::Regex("[ab]{9}".to_owned()), 2);
        let mut made = made.unwrap();
        assert!(std::process::Command::new("kill").args(["-KILL", &id]).status().unwrap().success());
        for constraint in made.drain(..) {
            let ended = sampled(constraint, 3, 9);
            let why = ended.err().unwrap().to_string();
            assert!(why.contains("takes more than"), "{why}");
        }
        assert!(back.recv().is_err(), "others get a process that has ended");
    }

    #[test]
    fn compiling_ends_where_it_is_given_up() {
        let process = process();
        let end = process.end().unwrap();
        let grammar = Grammar::Schema(json!({"allOf": patterns(16)}));
        let compiling = std::thread::spawn(move || constraints(process, &grammar, 1).0.is_err());
        drop(end);
        assert!(compiling.join().unwrap());
    }
}
