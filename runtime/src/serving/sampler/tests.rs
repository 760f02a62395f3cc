//! Tests against closed forms, and of properties.

use super::*;

fn samples(sampling: Sampling, logits: &[f32], n: usize) -> Vec<u32> {
    let mut sampler = Sampler::new(sampling);
    (0..n).map(|_| sampler.sample(logits).unwrap()).collect()
}

fn shares(ids: &[u32], vocab: usize) -> Vec<f64> {
    let mut count = vec![0.0; vocab];
    for &id in ids {
        count[id as usize] += 1.0 / ids.len() as f64;
    }
    count
}

fn hot() -> Sampling {
    Sampling { temperature: 1.0, seed: 7, ..Sampling::GREEDY }
}

#[test]
fn greedy_takes_the_lowest_of_the_largest() {
    assert_eq!(samples(Sampling::default(), &[0.0, 3.0, 3.0, f32::NAN], 2), [1, 1]);
    assert_eq!(samples(Sampling::default(), &[f32::NAN, f32::NEG_INFINITY, -2.0], 1), [2]);
}

#[test]
fn logits_without_numbers_yield_no_token() {
    for bad in [vec![f32::NAN; 3], vec![f32::NEG_INFINITY; 2], vec![0.0, f32::INFINITY], vec![]] {
        assert!(matches!(Sampler::new(hot()).sample(&bad), Err(Error::Model { .. })), "{bad:?}");
    }
}

#[test]
fn samples_follow_the_softmax() {
    let p = [0.5f32, 0.3, 0.15, 0.05];
    let logits: Vec<f32> = p.iter().map(|p| p.ln() + 4.0).collect();
    let found = shares(&samples(hot(), &logits, 40_000), 4);
    for (found, expected) in found.iter().zip(p) {
        assert!((found - f64::from(expected)).abs() < 0.01, "{found} {expected}");
    }
    // Half the temperature squares the odds.
    let found = shares(&samples(Sampling { temperature: 0.5, ..hot() }, &logits, 40_000), 4);
    let total: f32 = p.iter().map(|p| p * p).sum();
    for (found, expected) in found.iter().zip(p.map(|p| p * p / total)) {
        assert!((found - f64::from(expected)).abs() < 0.01, "{found} {expected}");
    }
}

#[test]
fn cuts() {
    let logits: Vec<f32> = [0.5f32, 0.3, 0.15, 0.05].iter().map(|p| p.ln()).collect();
    let kept = |sampling| shares(&samples(sampling, &logits, 4000), 4).iter().filter(|&&s| s > 0.0).count();
    assert_eq!(kept(Sampling { top_k: 2, ..hot() }), 2);
    assert_eq!(kept(Sampling { top_p: 0.4, ..hot() }), 1);
    assert_eq!(kept(Sampling { top_p: 0.79, ..hot() }), 2);
    assert_eq!(kept(Sampling { top_p: 0.94, ..hot() }), 3);
    assert_eq!(kept(Sampling { top_p: 1e-9, ..hot() }), 1);
    assert_eq!(kept(Sampling { top_p: 0.0, ..hot() }), 1);
}

#[test]
fn equal_seeds_give_equal_samples() {
    let logits = [0.0; 1000];
    assert_eq!(samples(hot(), &logits, 50), samples(hot(), &logits, 50));
    assert_ne!(samples(hot(), &logits, 50), samples(Sampling { seed: 8, ..hot() }, &logits, 50));
}

/// Logits of these probabilities.
fn logits(p: &[f32]) -> Vec<f32> {
    p.iter().map(|p| p.ln() + 2.0).collect()
}

/// Ids that are ever sampled after this history.
fn kept(sampling: &Sampling, logits: &[f32]) -> Vec<u32> {
    let sampled = samples(sampling.clone(), logits, 4000);
    (0..logits.len() as u32).filter(|id| sampled.contains(id)).collect()
}

#[test]
fn min_p_is_relative_to_the_most_probable_token() {
    let logits = logits(&[0.1, 0.5, 0.26, 0.14]);
    let of = |min_p| kept(&Sampling { min_p, ..hot() }, &logits);
    assert_eq!(of(0.0), [0, 1, 2, 3]);
    assert_eq!(of(0.21), [1, 2, 3]);
    assert_eq!(of(0.5), [1, 2]);
    assert_eq!(of(1.0), [1]);
    // After a temperature: half of it squares the shares.
    assert_eq!(kept(&Sampling { min_p: 0.21, temperature: 0.5, ..hot() }, &logits), [1, 2]);
}

#[test]
fn typical_tokens_are_near_the_entropy() {
    // −ln p: 0.51, 1.39, 1.90; entropy 0.938: distances 0.43, 0.45, 0.96.
    let uneven = logits(&[0.6, 0.25, 0.15]);
    assert_eq!(kept(&Sampling { typical_p: 0.5, ..hot() }, &uneven), [0]);
    assert_eq!(kept(&Sampling { typical_p: 0.7, ..hot() }, &uneven), [0, 1]);
    assert_eq!(kept(&Sampling { typical_p: 0.9, ..hot() }, &uneven), [0, 1, 2]);
    // Entropy 1.22: two tokens (1.61 each) are closer to it than the most probable one (0.69), and equal ones
    // stay together.
    let flat = logits(&[0.5, 0.2, 0.2, 0.1]);
    assert_eq!(kept(&Sampling { typical_p: 0.3, ..hot() }, &flat), [1, 2]);
}

#[test]
fn sampling_filters_apply_in_sequence() {
    let logits = logits(&[0.4, 0.3, 0.2, 0.1]);
    // Of the three that top-k leaves, two have 7/9; of all, they would have 0.7.
    assert_eq!(kept(&Sampling { top_k: 3, top_p: 0.75, ..hot() }, &logits), [0, 1]);
    assert_eq!(kept(&Sampling { top_p: 0.75, ..hot() }, &logits), [0, 1, 2]);
}

#[test]
fn penalties() {
    let greedy = |sampling: Sampling, prompt: &[u32], logits: &[f32], n: usize| {
        let mut sampler = Sampler::new(sampling);
        sampler.begin(prompt);
        (0..n).map(|_| sampler.sample(logits).unwrap()).collect::<Vec<_>>()
    };
    let logits = [4.0, 3.0, 1.0, -1.0];
    // A positive logit is divided: 4 / 2 < 3; then 3 / 2 < 4 / 2.
    let repetition = Sampling { repetition_penalty: 2.0, ..Sampling::GREEDY };
    assert_eq!(greedy(repetition.clone(), &[], &logits, 3), [0, 1, 0]);
    assert_eq!(greedy(repetition.clone(), &[0, 99], &logits, 2), [1, 0]);
    // A negative one is multiplied.
    assert_eq!(greedy(repetition, &[0], &[-1.0, -1.5], 1), [1]);
    // Once, and once for every time; the prompt does not count.
    let presence = Sampling { presence_penalty: 1.5, ..Sampling::GREEDY };
    assert_eq!(greedy(presence, &[0], &logits, 4), [0, 1, 0, 0]);
    let frequency = Sampling { frequency_penalty: 1.5, ..Sampling::GREEDY };
    assert_eq!(greedy(frequency, &[0], &logits, 5), [0, 1, 0, 1, 0]);
    // A new answer forgets the one before.
    let mut sampler = Sampler::new(Sampling { presence_penalty: 9.0, ..Sampling::GREEDY });
    for _ in 0..2 {
        sampler.begin(&[]);
        assert_eq!([sampler.sample(&logits).unwrap(), sampler.sample(&logits).unwrap()], [0, 1]);
    }
}

#[test]
fn a_bias_forbids_and_forces() {
    let logits = [4.0, 3.0, 1.0];
    let of = |bias| samples(Sampling { bias, ..Sampling::GREEDY }, &logits, 1)[0];
    assert_eq!(of(vec![(0, f32::NEG_INFINITY)]), 1);
    assert_eq!(of(vec![(2, 100.0), (77, 5.0)]), 2);
    let all = (0..3).map(|id| (id, f32::NEG_INFINITY)).collect();
    let none = Sampler::new(Sampling { bias: all, ..hot() }).sample(&logits);
    assert!(matches!(none, Err(Error::Request { .. })), "{none:?}");
}

/// Allows the tokens of a list, one after the other.
struct Script(Vec<u32>, usize);

impl Constraint for Script {
    fn mask(&mut self, logits: &mut [f32]) -> Result<()> {
        let next = self.0.get(self.1).copied();
        let others = logits.iter_mut().enumerate().filter(|(id, _)| Some(*id as u32) != next);
        others.for_each(|(_, l)| *l = f32::NEG_INFINITY);
        Ok(())
    }

    fn accept(&mut self, id: u32) -> Result<()> {
        assert_eq!(self.0.get(self.1), Some(&id));
        self.1 += 1;
        Ok(())
    }

    fn ended(&self) -> bool {
        self.1 == self.0.len()
    }
}

#[test]
fn constraint_masks_tokens_and_receives_the_choice() {
    for sampling in [Sampling::GREEDY, hot(), Sampling { repetition_penalty: 3.0, top_p: 0.2, ..hot() }] {
        let mut sampler = Sampler::new(sampling).constrained(Box::new(Script(vec![2, 0, 2], 0)));
        let mut ids = Vec::new();
        while !sampler.ended() {
            ids.push(sampler.sample(&[9.0, 8.0, -3.0]).unwrap());
        }
        assert_eq!(ids, [2, 0, 2]);
        assert!(matches!(sampler.sample(&[0.0]), Err(Error::Request { .. })));
    }
}

#[test]
fn log_probabilities_ignore_sampling_options() {
    let logits = logits(&[0.5, 0.3, 0.2]);
    let sampling = Sampling { bias: vec![(2, 50.0)], log_probabilities: Some(2), ..Sampling::GREEDY };
    let mut sampler = Sampler::new(sampling);
    assert_eq!(sampler.sample(&logits).unwrap(), 2);
    let last = sampler.last().unwrap();
    assert!(last.id == 2 && (last.chosen - 0.2f64.ln()).abs() < 1e-6);
    assert_eq!(last.most_probable.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [0, 1]);
}

#[test]
fn options_out_of_range_are_named() {
    Sampling::GREEDY.check().unwrap();
    hot().check().unwrap();
    let bad = [
        (Sampling { temperature: f32::NAN, ..hot() }, "temperature"),
        (Sampling { temperature: 2.1, ..hot() }, "temperature must be from 0 to 2"),
        (Sampling { top_p: 0.0, ..hot() }, "top_p must be above 0, up to 1"),
        (Sampling { min_p: 1.5, ..hot() }, "min_p"),
        (Sampling { typical_p: -1.0, ..hot() }, "typical_p"),
        (Sampling { repetition_penalty: 0.0, ..hot() }, "repetition_penalty"),
        (Sampling { presence_penalty: f32::INFINITY, ..hot() }, "presence_penalty"),
        (Sampling { frequency_penalty: 2.1, ..hot() }, "frequency_penalty"),
        (Sampling { bias: vec![(3, f32::NAN)], ..hot() }, "logit_bias"),
        (Sampling { log_probabilities: Some(21), ..hot() }, "log_probabilities"),
    ];
    for (sampling, name) in bad {
        assert!(sampling.check().unwrap_err().to_string().contains(name), "{name}");
    }
    let biased = Sampling { bias: vec![(3, 1.0), (9, 1.0)], ..hot() };
    biased.check_ids(10).unwrap();
    assert!(matches!(biased.check_ids(9), Err(Error::Usage { .. })));
}
