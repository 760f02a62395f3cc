//! Tests with random arrivals, ends and cancellations over a toy model. Its states record what was computed
//! at each position.

use super::slots::KvCapabilities;
use super::*;
use proptest::prelude::*;
use std::cell::RefCell;

const SLOTS: u32 = 3;
const CONTEXT: usize = 40;
const CHUNK: usize = 4;
const VOCAB: usize = 11;

/// Toy model: contents of slots, and the calls.
#[derive(Default)]
struct Toy {
    slots: Vec<Vec<u32>>,
    sharing: Option<Sharing>,
    fork: bool,
    /// Positions that slots can go back to; `None`: any.
    snapshots: Option<Vec<Vec<usize>>>,
    /// Maximum number of snapshots of a slot.
    room: usize,
    /// Slot and start of the last draft tokens.
    kept: Option<(u32, usize)>,
    /// Number of tokens beyond which a prompt has other states: the contents are then larger by `VOCAB`.
    long_rope_threshold: Option<usize>,
    /// A token after which the model fails.
    poison: Option<u32>,
    /// Computed tokens of each prompt call, and rows of each decode call.
    calls: Vec<(usize, usize)>,
}

/// The logits after a sequence.
fn logits(seq: &[u32]) -> Vec<f32> {
    let sum = seq.iter().enumerate().map(|(i, &x)| (i + 2) * (x as usize * x as usize + 3)).sum::<usize>();
    (0..VOCAB).map(|v| ((sum * (v + 5) + v * v) % 97) as f32).collect()
}

/// Contents of a slot for a token of a sequence of this length.
fn held(id: u32, length: usize, long_rope_threshold: Option<usize>) -> u32 {
    id + if long_rope_threshold.is_some_and(|threshold| length > threshold) { VOCAB as u32 } else { 0 }
}

/// Result of the sequence alone.
fn alone(prompt: &[u32], n: usize, end: u32, long_rope_threshold: Option<usize>) -> Vec<u32> {
    let mut seq: Vec<u32> = prompt.iter().map(|&id| held(id, prompt.len(), long_rope_threshold)).collect();
    let mut made = Vec::new();
    for _ in 0..n {
        let id = Greedy.choose(&logits(&seq)).unwrap();
        seq.push(held(id, seq.len() + 1, long_rope_threshold));
        made.push(id);
        if id == end {
            break;
        }
    }
    made
}

struct Greedy;

impl Choose for Greedy {
    fn choose(&mut self, logits: &[f32]) -> Result<u32> {
        let best = (0..logits.len()).fold(0, |b, v| if logits[v] > logits[b] { v } else { b });
        Ok(best as u32)
    }
}

impl Toy {
    /// Appends a token to a sequence that has `length` tokens with it, or with the rest of its prompt.
    fn append(&mut self, slot: u32, pos: usize, id: u32, length: usize) -> Result<()> {
        if self.poison == Some(id) {
            return Err(Error::not_finite());
        }
        let slot_holds = &mut self.slots[slot as usize];
        assert!(pos <= slot_holds.len(), "a hole in slot {slot}");
        if pos < slot_holds.len() {
            let kept = self.kept == Some((slot, pos));
            assert!(self.snapshots.is_none() || kept, "a slot that cannot go back");
            slot_holds.truncate(pos);
        }
        slot_holds.push(held(id, length, self.long_rope_threshold));
        Ok(())
    }

    /// Whether slots go back to any position.
    fn rewinds(&self) -> bool {
        self.snapshots.is_none()
    }
}

/// Snapshots of every slot, none so far.
fn folded() -> Vec<Vec<usize>> {
    vec![Vec::new(); SLOTS as usize]
}

impl Model for Toy {
    fn kv_capabilities(&self) -> KvCapabilities {
        let sharing = self.sharing.unwrap_or(Sharing::All);
        KvCapabilities {
            sharing,
            chunk: CHUNK,
            long_rope_threshold: self.long_rope_threshold,
            fork: self.fork,
            snapshots: !self.rewinds(),
        }
    }

    fn place(&mut self, slot: u32, from: Option<u32>, keep: usize) -> Result<usize> {
        let source = from.unwrap_or(slot);
        assert!(from.is_none() || self.fork);
        assert_eq!(self.resumes(source, keep), keep, "slot {source} cannot go on there");
        self.slots[slot as usize] = self.slots[source as usize][..keep].to_vec();
        if let Some(snapshots) = &mut self.snapshots {
            let kept = snapshots[source as usize].iter().copied().filter(|&at| at <= keep);
            snapshots[slot as usize] = kept.collect();
        }
        Ok(keep)
    }

    fn resumes(&self, slot: u32, most: usize) -> usize {
        let len = self.slots[slot as usize].len();
        let most = most.min(len);
        match &self.snapshots {
            Some(snapshots) if most < len => {
                snapshots[slot as usize].iter().copied().filter(|&at| at <= most).max().unwrap_or(0)
            }
            _ => most,
        }
    }

    fn snapshot(&mut self, slot: u32) {
        let at = self.slots[slot as usize].len();
        if let Some(snapshots) = self.snapshots.as_mut().map(|all| &mut all[slot as usize]) {
            snapshots.push(at);
            if snapshots.len() > self.room {
                snapshots.remove(0);
            }
        }
    }

    fn prompt(
        &mut self,
        slot: u32,
        start: usize,
        ids: &[u32],
        whole: usize,
        logit_rows: LogitRows,
        sink: &mut dyn FnMut(&[f32]),
    ) -> Result<()> {
        assert!(!ids.is_empty() && ids.len() <= CHUNK && (start + ids.len() - 1) / CHUNK == start / CHUNK);
        self.calls.push((ids.len(), 0));
        for (i, &id) in ids.iter().enumerate() {
            self.append(slot, start + i, id, whole)?;
            if logit_rows == LogitRows::All {
                sink(&logits(&self.slots[slot as usize]));
            }
        }
        if logit_rows == LogitRows::Last {
            sink(&logits(&self.slots[slot as usize]));
        }
        Ok(())
    }

    fn decode(&mut self, rows: &[(u32, usize, u32)], sink: &(dyn Fn(usize, &[f32]) + Sync)) -> Result<()> {
        self.calls.push((0, rows.len()));
        if let Some((.., id)) = rows.iter().find(|row| self.poison == Some(row.2)) {
            return self.append(0, 0, *id, 1);
        }
        for (i, &(slot, pos, id)) in rows.iter().enumerate() {
            assert!(rows[..i].iter().all(|row| row.0 != slot), "slot {slot} twice");
            self.append(slot, pos, id, pos + 1)?;
            sink(i, &logits(&self.slots[slot as usize]));
        }
        Ok(())
    }

    fn max_draft_tokens(&self) -> usize {
        3
    }

    fn extend(
        &mut self,
        slot: u32,
        pos: usize,
        ids: &[u32],
        sink: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<()> {
        assert!(ids.len() > 1 && ids.len() <= 4);
        self.calls.push((0, ids.len()));
        self.kept = Some((slot, pos));
        if let Some(&id) = ids.iter().find(|&&id| self.poison == Some(id)) {
            return self.append(slot, pos, id, pos + 1);
        }
        for (i, &id) in ids.iter().enumerate() {
            self.append(slot, pos + i, id, pos + i + 1)?;
            sink(i, &logits(&self.slots[slot as usize]));
        }
        Ok(())
    }

    fn take_back(&mut self, slot: u32, pos: usize, ids: &[u32]) -> Result<()> {
        assert_eq!(self.kept, Some((slot, pos)));
        let slot = &mut self.slots[slot as usize];
        assert_eq!(&slot[pos..pos + ids.len()].iter().map(|id| id % VOCAB as u32).collect::<Vec<_>>(), ids);
        slot.truncate(pos + ids.len());
        Ok(())
    }
}

/// A request of a test: its arrival, its prompt, the number of sequences, their length, and the number of
/// tokens after which the client drops the first.
#[derive(Clone, Debug)]
struct TestRequest {
    at: usize,
    prompt: Vec<u32>,
    many: usize,
    n: usize,
    cancel: Option<usize>,
}

fn request() -> impl Strategy<Value = TestRequest> {
    // Prompts of few different tokens, so that prefixes are often equal.
    let prompt = prop::collection::vec(0..3u32, 1..20);
    (0..60usize, prompt, 1..=SLOTS as usize, 1..12usize, prop::option::of(0..10usize))
        .prop_map(|(at, prompt, many, n, cancel)| TestRequest { at, prompt, many, n, cancel })
}

fn scheduler(toy: Toy, budget: usize, queue: usize) -> Inner<'static, Toy> {
    let toy = Toy { slots: vec![Vec::new(); SLOTS as usize], ..toy };
    let setting = Setting { budget: Some(budget), queue, ..Setting::default() };
    Inner::new(toy, &setting, 0..SLOTS, CONTEXT)
}

fn job(prompt: &[u32], many: usize, n: usize) -> Job<'static> {
    let samplers = (0..many).map(|_| Box::new(Greedy) as Box<dyn Choose>).collect();
    Job { prompt: prompt.to_vec(), samplers, n, end: vec![7], limit: None, scores: None, draft_tokens: 0 }
}

/// Result of a sequence.
#[derive(Debug, Default)]
struct SequenceResult {
    tokens: Vec<u32>,
    end: Option<usize>,
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn scheduled_answers_match_single_runs(
        all in prop::collection::vec(request(), 1..14),
        sharing in prop::sample::select(vec![Sharing::None, Sharing::Chunks, Sharing::All]),
        (fork, rewind, room) in (any::<bool>(), any::<bool>(), 0..6_usize),
        budget in 0..20usize,
        poison in prop::option::of(0..VOCAB as u32),
        draft_tokens in 0..5usize,
        long_rope_threshold in prop::option::of(0..25usize),
    ) {
        let snapshots = (!rewind).then(folded);
        let toy = Toy { sharing: Some(sharing), fork, snapshots, room, long_rope_threshold, poison, ..Toy::default() };
        let mut s = scheduler(toy, budget, usize::MAX);
        let seen: RefCell<BTreeMap<Id, SequenceResult>> = RefCell::default();
        let (mut names, mut cancelled) = (Vec::new(), Vec::new());
        let mut steps = 0;
        loop {
            for a in all.iter().filter(|a| a.at == steps) {
                let ids = s.submit(Job { draft_tokens, ..job(&a.prompt, a.many, a.n) }, SLOTS).unwrap();
                names.extend(ids.iter().enumerate().map(|(i, &id)| (id, a.clone(), i == 0)));
            }
            for (id, a, first) in &names {
                let made = seen.borrow().get(id).map_or(0, |s| s.tokens.len());
                if *first && !cancelled.contains(id) && a.cancel.is_some_and(|c| made >= c) {
                    s.end(*id, &End::Cancelled, false);
                    cancelled.push(*id);
                }
            }
            let done = s.step(&mut |id, event| {
                let mut seen = seen.borrow_mut();
                let seen: &mut SequenceResult = seen.entry(id).or_default();
                assert!(seen.end.is_none(), "{id} goes on after its end");
                match event {
                    Event::Token { id, .. } => seen.tokens.push(id),
                    Event::Ended(end) => seen.end = Some(end.index()),
                    Event::Began { .. } | Event::Scored { .. } => {}
                }
                true
            }).unwrap().done;
            steps += 1;
            prop_assert!(steps < 20_000, "a request starves");
            if done == StepWork::Idle && all.iter().all(|a| a.at < steps) {
                break;
            }
        }
        let load = s.load();
        prop_assert_eq!((load.waiting, load.running, s.live.len()), (0, 0, 0));
        prop_assert_eq!(s.core.slots().free(), SLOTS as usize);
        let seen = seen.into_inner();
        for (id, a, _) in &names {
            let expected = alone(&a.prompt, a.n, 7, long_rope_threshold);
            let nothing = SequenceResult::default();
            let found = seen.get(id).unwrap_or(&nothing);
            prop_assert!(expected.starts_with(&found.tokens), "{:?} {:?} {:?}", a, expected, found);
            let bad = poison.is_some_and(|p| {
                a.prompt.contains(&p) || expected[..expected.len() - 1].contains(&p)
            });
            if !cancelled.contains(id) {
                prop_assert_eq!(found.end == Some(4), bad, "{:?} {:?} {:?}", a, expected, found);
                prop_assert!(bad || found.tokens == expected);
                prop_assert!(found.end.is_some());
            }
        }
        // Between two steps of decoding, prompts take no more than the budget or one chunk.
        let most = budget.max(CHUNK);
        let mut spent = 0;
        let first = s.model.calls.iter().position(|c| c.1 > 0).unwrap_or(usize::MAX);
        for (i, &(tokens, rows)) in s.model.calls.iter().enumerate() {
            spent = if rows > 0 { 0 } else { spent + tokens };
            let alive = i > first && s.model.calls[i..].iter().any(|c| c.1 > 0);
            prop_assert!(!alive || spent <= most || names.len() > 1, "{spent} tokens between two steps");
        }
    }
}

#[test]
fn prompts_and_decoding_take_turns() {
    let mut s = scheduler(Toy { fork: true, sharing: Some(Sharing::None), ..Toy::default() }, 4, 9);
    let mut quiet = |_, _| true;
    let endless = |prompt: &[u32], n| Job { end: Vec::new(), ..job(prompt, 1, n) };
    s.submit(endless(&[1], 20), SLOTS).unwrap();
    while s.model.calls.len() < 3 {
        s.step(&mut quiet).unwrap();
    }
    s.submit(endless(&[2; 16], 3), SLOTS).unwrap();
    s.model.calls.clear();
    while s.core.live() > 1 || s.model.calls.is_empty() {
        s.step(&mut quiet).unwrap();
    }
    let calls = [(4, 0), (0, 1), (4, 0), (0, 1), (4, 0), (0, 1), (4, 0), (0, 2), (0, 2)];
    assert_eq!(s.model.calls, calls);
}

#[test]
fn equal_prefixes_are_computed_once() {
    let mut s = scheduler(Toy { fork: true, ..Toy::default() }, 99, 9);
    let system = [1, 2, 0, 1, 2, 0, 1, 2, 0, 1];
    for last in 0..3 {
        let prompt: Vec<u32> = system.iter().copied().chain([last]).collect();
        s.submit(job(&prompt, 1, 1), SLOTS).unwrap();
        while s.step(&mut |_, _| true).unwrap().done != StepWork::Idle {}
    }
    assert_eq!((s.counters.prompt_tokens, s.counters.shared_tokens), (11 + 1 + 1, 20));
    // Turns of a conversation: the first answer is not computed again, except its last token.
    let mut s = scheduler(Toy { fork: true, ..Toy::default() }, 99, 9);
    let mut chat = system.to_vec();
    for expected in [0, 13] {
        let before = s.counters.shared_tokens;
        s.submit(job(&chat, 1, 4), SLOTS).unwrap();
        while s.step(&mut |_, _| true).unwrap().done != StepWork::Idle {}
        assert_eq!(s.counters.shared_tokens - before, expected);
        chat.extend(alone(&chat, 4, 7, None));
        chat.push(2);
    }
    // Recurrent states go back to a snapshot: of a chunk, of a prompt's end, or of a position where
    // prompts diverge.
    let serve = |s: &mut Inner<'_, Toy>, prompt: &[u32]| {
        let before = s.counters;
        s.submit(job(prompt, 1, 4), SLOTS).unwrap();
        while s.step(&mut |_, _| true).unwrap().done != StepWork::Idle {}
        let now = s.counters;
        let read = now.prompt_tokens - before.prompt_tokens;
        (read, now.shared_tokens - before.shared_tokens, now.reread_tokens - before.reread_tokens)
    };
    for (room, expected) in [
        (9, [(10, 0, 0), (2, 10, 0), (4, 8, 1), (3, 9, 0), (3, 4, 2)]),
        (0, [(10, 0, 0), (12, 0, 10), (12, 0, 9), (12, 0, 9), (7, 0, 6)]),
    ] {
        let mut s = scheduler(Toy { fork: true, snapshots: Some(folded()), room, ..Toy::default() }, 99, 9);
        let edited = |to: usize, id: u32| [&system[..to], &[id, 5, 5][..]].concat();
        let prompts = [
            system.to_vec(),
            [&system[..], &[9, 9]].concat(),
            edited(9, 3),
            edited(9, 4),
            [&system[..6], &[8]].concat(),
        ];
        let found = prompts.map(|prompt| serve(&mut s, &prompt));
        assert_eq!(found, expected);
    }
    // Several sequences after one prompt compute it once, with any sharing.
    let mut s = scheduler(Toy { fork: true, sharing: Some(Sharing::None), ..Toy::default() }, 99, 9);
    s.submit(job(&system, 3, 5), SLOTS).unwrap();
    while s.step(&mut |_, _| true).unwrap().done != StepWork::Idle {}
    assert_eq!(s.counters.prompt_tokens, 10);
}

#[test]
fn requests_over_a_scheduler_limit_are_rejected() {
    let mut s = scheduler(Toy { fork: true, ..Toy::default() }, 4, 2);
    for _ in 0..3 {
        s.submit(job(&[1], 1, 4), SLOTS).unwrap();
        s.step(&mut |_, _| true).unwrap();
    }
    s.submit(job(&[1], 2, 4), SLOTS).unwrap();
    assert!(matches!(s.submit(job(&[1], 1, 4), SLOTS), Err(Error::Limit { limit: Limit::Queue, .. })));
    assert!(matches!(
        s.submit(job(&[1], 4, 4), SLOTS),
        Err(Error::Limit { limit: Limit::Sequences, most: 3, .. })
    ));
    assert!(matches!(s.submit(job(&[1; 39], 1, 3), SLOTS), Err(Error::Limit { limit: Limit::Context, .. })));
    assert!(matches!(s.submit(job(&[], 1, 3), SLOTS), Err(Error::Usage { .. })));
}

#[test]
fn time_limit_ends_a_sequence() {
    let mut s = scheduler(Toy { fork: true, ..Toy::default() }, 4, 2);
    s.submit(Job { limit: Some(Duration::ZERO), ..job(&[1], 1, 30) }, SLOTS).unwrap();
    let mut end = None;
    while s
        .step(&mut |_, event| {
            end = Some(format!("{event:?}"));
            true
        })
        .unwrap()
        .done
        != StepWork::Idle
    {}
    assert_eq!((end.as_deref(), s.core.slots().free()), (Some("Ended(Expired)"), 3));
}

/// All slots are taken. A sequence without time left waits for one, and ends only when it has got it.
#[test]
fn queue_time_does_not_count_toward_the_time_limit() {
    let mut s = scheduler(Toy { fork: true, ..Toy::default() }, 4, 9);
    let running = s.submit(Job { end: Vec::new(), ..job(&[1], 3, 20) }, SLOTS).unwrap();
    while s.core.live() < 3 {
        s.step(&mut |_, _| true).unwrap();
    }
    let waits = s.submit(Job { limit: Some(Duration::ZERO), ..job(&[2], 1, 20) }, SLOTS).unwrap();
    let mut events: Vec<(Id, String)> = Vec::new();
    loop {
        let step = s.step(&mut |id, event| {
            events.push((id, format!("{event:?}")));
            true
        });
        if step.unwrap().done == StepWork::Idle {
            break;
        }
    }
    let at = |id, event: &str| events.iter().position(|(of, what)| *of == id && what == event);
    let left = running.iter().filter_map(|&id| at(id, "Ended(Length)")).min().unwrap();
    assert!(at(waits[0], "Ended(Expired)").unwrap() > left, "{events:?}");
    assert!(events.iter().any(|(id, what)| *id == waits[0] && what.starts_with("Began")), "{events:?}");
}

/// One request needs all slots while a long sequence has one. It gets those that are free; a later request
/// gets its own in turn; and the large one completes in the end.
#[test]
fn large_request_does_not_block_others() {
    let mut s = scheduler(Toy { fork: true, ..Toy::default() }, 4, 9);
    let endless = |prompt: &[u32], many, n| Job { end: Vec::new(), ..job(prompt, many, n) };
    let long = s.submit(endless(&[1], 1, 39), SLOTS).unwrap()[0];
    s.step(&mut |_, _| true).unwrap();
    let large = s.submit(endless(&[2, 2], SLOTS as usize, 3), SLOTS).unwrap();
    let small = s.submit(endless(&[3], 1, 3), SLOTS).unwrap()[0];
    let mut ended = Vec::new();
    loop {
        let step = s.step(&mut |id, event| {
            if matches!(event, Event::Ended(_)) {
                ended.push(id);
            }
            true
        });
        if step.unwrap().done == StepWork::Idle {
            break;
        }
    }
    assert_eq!((ended.last(), ended.len()), (Some(&long), 5), "{ended:?}");
    let place = |id: &Id| ended.iter().position(|of| of == id).unwrap();
    assert!(place(&small) < place(large.last().unwrap()), "{ended:?}");
}

/// Tokens of a prompt are scored in order, each by the logits before it, whatever a slot holds of the prompt.
#[test]
fn prompts_are_scored_whole() {
    let mut s = scheduler(Toy { fork: true, ..Toy::default() }, CHUNK, usize::MAX);
    let prompt: Vec<u32> = (0..11).map(|i| i % 3).collect();
    for many in [1, 2] {
        let ids = s.submit(Job { scores: Some(2), ..job(&prompt, many, 3) }, SLOTS).unwrap();
        let (mut scored, mut tokens) = (vec![Vec::new(); many], vec![0; many]);
        let mut sink = |id, event| {
            let i = ids.iter().position(|&own| own == id).unwrap();
            match event {
                Event::Scored { at, log_probabilities } => {
                    assert_eq!(at, scored[i].len() + 1);
                    scored[i].extend(log_probabilities);
                }
                Event::Token { .. } => {
                    assert_eq!(scored[i].len(), prompt.len() - 1);
                    tokens[i] += 1;
                }
                Event::Began { .. } | Event::Ended(_) => {}
            }
            true
        };
        while s.step(&mut sink).unwrap().done != StepWork::Idle {}
        let of = |at: usize| LogProbabilities::of(&logits(&prompt[..at]), prompt[at], 2);
        let wanted: Vec<_> = (1..prompt.len()).map(of).collect();
        assert!(scored.iter().all(|found| *found == wanted), "{scored:?}");
        assert!(tokens.iter().all(|&n| n > 0), "{tokens:?}");
    }
    assert_eq!(s.counters.prompt_tokens, 2 * prompt.len() as u64);
}
