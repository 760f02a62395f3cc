//! The thread that owns the engine: it takes requests from a channel, steps the scheduler, and sends events.

use super::metrics::Metrics;
use moec_runtime::serving::scheduler::{Event, Id, Job, Scheduler, StepWork};
use moec_runtime::{Error, Result};
use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, Sender};
use std::time::Instant;
use tokio::sync::mpsc::UnboundedSender;

/// Request to the engine's thread.
pub(super) enum Command {
    /// Sequences after a prompt.
    Submit(Submission),
    /// Requests whose clients are gone.
    Cancel(u64),
    /// No more commands follow: it ends as soon as no client waits.
    Finish,
    /// It must end at once, even if clients wait.
    End,
}

/// Sequences that clients wait for.
pub(super) struct Submission {
    /// Number of the submission, for cancelling.
    pub(super) ticket: u64,
    pub(super) job: Job<'static>,
    /// Index of the choice of its first sequence.
    pub(super) first: usize,
    pub(super) replies: UnboundedSender<Reply>,
}

/// Reply to a submission.
pub(super) enum Reply {
    /// It is accepted.
    Accepted,
    /// It is refused.
    Refused(Error),
    /// An event of a choice.
    Event(usize, Event),
}

/// Cancels a request when its client no longer waits.
pub(super) struct Ticket {
    pub(super) number: u64,
    pub(super) worker: Sender<Command>,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        // A worker that is gone has nothing to cancel.
        let _ = self.worker.send(Command::Cancel(self.number));
    }
}

/// A sequence, and the client that waits for it.
struct Waiter {
    ticket: u64,
    choice: usize,
    replies: UnboundedSender<Reply>,
    submitted: Instant,
    /// Time of its last token.
    last: Option<Instant>,
}

/// Works until no more requests can come and all are answered.
///
/// # Errors
/// As [`Scheduler::step`]; [`Error::Interrupted`] if it must end at once.
pub(super) fn work(
    scheduler: &mut Scheduler<'_, '_, 'static>,
    commands: &Receiver<Command>,
    metrics: &Metrics,
) -> Result<()> {
    let mut waiters: BTreeMap<Id, Waiter> = BTreeMap::new();
    let (mut idle, mut finishing) = (true, false);
    loop {
        if idle && finishing {
            return Ok(());
        }
        let first = if idle {
            match commands.recv() {
                Ok(command) => Some(command),
                Err(_) => return Ok(()),
            }
        } else {
            None
        };
        for command in first.into_iter().chain(commands.try_iter()) {
            match command {
                Command::Submit(submission) => submit(scheduler, submission, &mut waiters, metrics),
                Command::Cancel(ticket) => {
                    let closed: Vec<Id> =
                        waiters.iter().filter(|(_, w)| w.ticket == ticket).map(|(id, _)| *id).collect();
                    for id in closed {
                        scheduler.cancel(id);
                        waiters.remove(&id);
                    }
                }
                Command::Finish => finishing = true,
                Command::End => return Err(Error::Interrupted),
            }
        }
        let step = scheduler.step(&mut |id, event| {
            let Some(waiter) = waiters.get_mut(&id) else { return false };
            let now = Instant::now();
            match &event {
                Event::Began { .. } => metrics.waited(now - waiter.submitted),
                Event::Scored { .. } => {}
                Event::Token { .. } => match waiter.last.replace(now) {
                    None => metrics.first_token(now - waiter.submitted),
                    Some(last) => metrics.next_token(now - last),
                },
                Event::Ended(_) => metrics.answered(now - waiter.submitted),
            }
            let over = matches!(event, Event::Ended(_));
            let received = waiter.replies.send(Reply::Event(waiter.choice, event)).is_ok();
            if over || !received {
                waiters.remove(&id);
            }
            received
        })?;
        idle = step.done == StepWork::Idle;
        metrics.publish(scheduler.counters(), scheduler.load(), scheduler.engine());
    }
}

fn submit(
    scheduler: &mut Scheduler<'_, '_, 'static>,
    submission: Submission,
    waiters: &mut BTreeMap<Id, Waiter>,
    metrics: &Metrics,
) {
    let Submission { ticket, job, first, replies } = submission;
    match scheduler.submit(job) {
        Ok(ids) => {
            let submitted = Instant::now();
            for (i, id) in ids.into_iter().enumerate() {
                let waiter =
                    Waiter { ticket, choice: first + i, replies: replies.clone(), submitted, last: None };
                waiters.insert(id, waiter);
            }
            // A client that does not listen cancels.
            let _ = replies.send(Reply::Accepted);
        }
        Err(e) => {
            metrics.refused();
            let _ = replies.send(Reply::Refused(e));
        }
    }
}
