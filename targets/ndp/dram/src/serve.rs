//! Runs one controller with a stream of requests for each of its ports.

use crate::{Clock, Command, Controller, Issued, Offer, Request};

/// Requests of one port in their order.
pub type Feed<'a> = Box<dyn Iterator<Item = Request> + 'a>;

/// Result of one port's stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Served {
    /// Lines that were read or written, those that needed no command among them.
    pub lines: u64,
    /// The clock at which the last data had gone over the bus.
    pub finished: Clock,
    /// Whether all of the stream was served.
    pub complete: bool,
}

/// One stream: its next request, and whether its queue was full when the request was offered.
struct Source<'a> {
    feed: Feed<'a>,
    waiting: Option<Request>,
    blocked: bool,
}

/// Serves the streams, `feeds[p]` over port `p`, from clock 1 to their ends or to the end of clock `until`.
///
/// Each port takes one request at a clock. Calls `sent` with every command, and gives the outcome by port.
pub fn serve(
    controller: &mut Controller,
    feeds: Vec<Feed<'_>>,
    until: Clock,
    mut sent: impl FnMut(Issued),
) -> Vec<Served> {
    let mut sources: Vec<Source<'_>> = feeds
        .into_iter()
        .map(|mut feed| Source { waiting: feed.next(), feed, blocked: false })
        .take(controller.ports())
        .collect();
    let mut served = vec![Served::default(); sources.len()];
    let (read, write) = (controller.read_latency(), controller.write_latency());
    let mut now = 1;
    while now <= until {
        for (port, source) in sources.iter_mut().enumerate().filter(|(_, s)| !s.blocked) {
            let Some(request) = source.waiting else { continue };
            match controller.offer(port, request, now) {
                Offer::Full => {
                    source.blocked = true;
                    continue;
                }
                Offer::Accepted => {}
                // The waiting write provides the line, or is merged with the request.
                Offer::Forwarded | Offer::Merged => note(&mut served[port], now),
            }
            source.waiting = source.feed.next();
        }
        controller.step(now, |issued| {
            sent(issued);
            let Some(source) = sources.get_mut(issued.port) else { return };
            source.blocked = false;
            let latency = match issued.command {
                Command::Read => read,
                Command::Write => write,
                _ => return,
            };
            note(&mut served[issued.port], now + latency);
        });
        let offers = sources.iter().any(|s| s.waiting.is_some() && !s.blocked);
        if !offers && controller.is_idle() {
            break;
        }
        now = if offers { now + 1 } else { controller.next(now) };
    }
    let idle = controller.is_idle();
    for (served, source) in served.iter_mut().zip(&sources) {
        served.complete = idle && source.waiting.is_none();
    }
    served
}

fn note(served: &mut Served, clock: Clock) {
    served.lines += 1;
    served.finished = served.finished.max(clock);
}
