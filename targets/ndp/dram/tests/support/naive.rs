//! A naive controller, which keeps no derived state between clocks.

use moec_dram::{Address, Clock, Command, Geometry, HOST, Issued, Kind, Options, Request, Timing};

use super::monitor::Monitor;

#[derive(Default)]
struct Port {
    opened: Vec<(Clock, Request)>,
    reads: Vec<(Clock, Request)>,
    writes: Vec<(Clock, Request)>,
    draining: bool,
}

/// Serves `feeds[p]` over port `p`; returns all commands.
pub(crate) fn run(t: Timing, g: Geometry, o: Options, feeds: &[Vec<Request>]) -> Vec<Issued> {
    let mut monitor = Monitor::new(t, g);
    let mut ports: Vec<Port> = feeds.iter().map(|_| Port::default()).collect();
    let mut next = vec![0; feeds.len()];
    let mut refreshes: Vec<u32> = Vec::new();
    let mut log = Vec::new();
    for now in 1.. {
        for (p, port) in ports.iter_mut().enumerate() {
            if let Some(&request) = feeds[p].get(next[p])
                && port.take(request, now, o.queue)
            {
                next[p] += 1;
            }
        }
        if o.refresh && now % u64::from(t.refi) == 0 {
            refreshes.extend(0..g.ranks);
        }
        for p in 0..ports.len() {
            let claimed: Vec<Address> =
                ports.iter().flat_map(|p| p.opened.iter().map(|(_, r)| r.at)).collect();
            let Some(issued) = pick(&mut ports[p], p, &monitor, &refreshes, &claimed, now, o.queue) else {
                continue;
            };
            monitor.note(&issued).expect("the naive controller keeps the rules");
            if issued.command == Command::Refresh {
                refreshes.remove(0);
            }
            log.push(issued);
        }
        let idle = |p: &Port| p.opened.is_empty() && p.reads.is_empty() && p.writes.is_empty();
        if next.iter().zip(feeds).all(|(&n, f)| n == f.len()) && ports.iter().all(idle) {
            return log;
        }
    }
    log
}

impl Port {
    /// Whether the request was queued, or a queued write already covers it.
    fn take(&mut self, request: Request, now: Clock, depth: usize) -> bool {
        if self.writes.iter().any(|(_, w)| w.at == request.at) {
            return true;
        }
        let queue = if request.kind == Kind::Read { &mut self.reads } else { &mut self.writes };
        if queue.len() == depth {
            return false;
        }
        queue.push((now, request));
        true
    }
}

fn needs(monitor: &Monitor, request: &Request) -> Command {
    match (monitor.row(&request.at), request.kind) {
        (None, _) => Command::Activate,
        (Some(row), _) if row != request.at.row => Command::Precharge,
        (_, Kind::Read) => Command::Read,
        (_, Kind::Write) => Command::Write,
    }
}

fn same_bank(a: &Address, b: &Address) -> bool {
    (a.rank, a.group, a.bank) == (b.rank, b.group, b.bank)
}

/// Command that a port sends at this clock, removed from its queue.
fn pick(
    port: &mut Port,
    number: usize,
    monitor: &Monitor,
    refreshes: &[u32],
    claimed: &[Address],
    now: Clock,
    depth: usize,
) -> Option<Issued> {
    let can = |command, at: &Address| monitor.earliest(number, command, at) <= now;
    let issue = |command, at| Some(Issued { clock: now, port: number, command, at });
    let opened = port.opened.iter().enumerate().filter(|(_, (_, r))| can(needs(monitor, r), &r.at));
    if let Some((i, _)) = opened.min_by_key(|(_, (since, _))| *since) {
        let (_, request) = port.opened.remove(i);
        return issue(needs(monitor, &request), request.at);
    }
    if let Some(&rank) = refreshes.first() {
        if number == HOST {
            let at = Address { rank, group: 0, bank: 0, row: 0, column: 0 };
            let open = monitor.any_open(rank);
            let command = if open { Command::PrechargeAll } else { Command::Refresh };
            let spoils = open && claimed.iter().any(|c| c.rank == rank);
            return if !spoils && can(command, &at) { issue(command, at) } else { None };
        }
        if number == 1 + rank as usize {
            return None;
        }
    }
    let waiting = port.writes.len() as f64 / depth as f64;
    if port.draining {
        port.draining = port.reads.is_empty() || waiting >= 0.2;
    } else {
        port.draining = port.reads.is_empty() || waiting > 0.8;
    }
    let queue = if port.draining { &mut port.writes } else { &mut port.reads };
    let ready = |(_, r): &(Clock, Request)| {
        let command = needs(monitor, r);
        let spoils = command == Command::Precharge && claimed.iter().any(|c| same_bank(c, &r.at));
        !spoils && can(command, &r.at)
    };
    let i = queue.iter().position(ready)?;
    let command = needs(monitor, &queue[i].1);
    let (since, request) = queue[i];
    if command != Command::Precharge {
        queue.remove(i);
    }
    if command == Command::Activate {
        port.opened.push((since, request));
    }
    issue(command, request.at)
}
