//! Tests of the rewrite rules, with both sides evaluated on the same numbers; and of extraction on whole
//! parts.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use super::language::{Attr, Facts, Form, Leaf};
use super::{Legal, Term, rules};
use crate::emit::layout::Layout;
use crate::emit::{Norm, Raw, Rope};
use egg::{AstSize, Extractor, Id, Language, RecExpr, Runner};
use moec_ir::{Glu, RopeStyle};
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};

/// Number of rows.
const T: usize = 5;
/// Channels of the input.
const C: usize = 8;

/// A tensor: `[rows, channels]`, or `[channels, rows]` if it is channels-first.
#[derive(Clone, Debug, PartialEq)]
struct Value {
    nchw: bool,
    channels: usize,
    data: Vec<f32>,
}

impl Value {
    fn new(nchw: bool, channels: usize, of: impl Fn(usize, usize) -> f32) -> Self {
        let at = |i: usize| if nchw { of(i % T, i / T) } else { of(i / channels, i % channels) };
        Self { nchw, channels, data: (0..T * channels).map(at).collect() }
    }
    fn at(&self, t: usize, c: usize) -> f32 {
        self.data[if self.nchw { c * T + t } else { t * self.channels + c }]
    }
    /// Applies a function to every element.
    fn map(&self, of: impl Fn(f32) -> f32) -> Self {
        Self { data: self.data.iter().map(|x| of(*x)).collect(), ..self.clone() }
    }
}

/// A number between −1 and 1 that depends only on a name and an index.
fn number(name: &str, place: usize) -> f32 {
    let mut hasher = DefaultHasher::new();
    (name, place).hash(&mut hasher);
    (hasher.finish() >> 40) as f32 / (1_u32 << 23) as f32 - 1.0
}

/// Evaluates a term; returns the value of every node that has one.
fn evaluate(nodes: &[Form], facts: &Facts) -> Vec<Option<Value>> {
    let mut values: Vec<Option<Value>> = Vec::new();
    for node in nodes {
        let value = |id: &Id| values[usize::from(*id)].clone().unwrap();
        // Linear layers read rows, convolutions read channels-first values; no operator accepts both.
        let form = |id: &Id, nchw: bool| {
            let value = value(id);
            assert_eq!(value.nchw, nchw, "{node}");
            value
        };
        let attr = |id: &Id| match nodes[usize::from(*id)] {
            Form::Leaf(Leaf::Attr(i)) => facts.attrs[i as usize].clone(),
            ref other => panic!("`{other}` is not an attribute"),
        };
        let heads = |id: &Id| match attr(id) {
            Attr::Heads(n) => n,
            other => panic!("{other:?}"),
        };
        let weight = |id: &Id| match nodes[usize::from(*id)] {
            Form::Leaf(Leaf::Weight(i)) => &facts.weights[i as usize],
            ref other => panic!("`{other}` is not a weight"),
        };
        let numbers = |id: &Id| {
            let w = weight(id);
            let count = w.raw.shape.iter().product();
            (0..count).map(|i| number(&w.name, i)).collect::<Vec<f32>>()
        };
        let bias = |id: Option<&Id>| id.map_or_else(Vec::new, numbers);
        let layer = |nchw: bool, groups: usize, x: &Id, w: &Id, b: Option<&Id>| {
            let (x, m, b) = (form(x, nchw), numbers(w), bias(b));
            let (k, out) = (x.channels / groups, m.len() / (x.channels / groups));
            let each = out / groups;
            Value::new(nchw, out, |t, o| {
                let sum: f32 = (0..k).map(|c| x.at(t, o / each * k + c) * m[o * k + c]).sum();
                sum + b.get(o).copied().unwrap_or(0.0)
            })
        };
        let made = match node {
            Form::Leaf(Leaf::Input(i)) => {
                let (name, channels) = (format!("input{i}"), facts.inputs[*i as usize]);
                Value::new(false, channels, |t, c| number(&name, t * channels + c))
            }
            Form::Leaf(_) => {
                values.push(None);
                continue;
            }
            Form::Linear([x, w]) => layer(false, 1, x, w, None),
            Form::LinearBias([x, w, b]) => layer(false, 1, x, w, Some(b)),
            Form::HeadLinear([h, x, w]) => layer(false, heads(h), x, w, None),
            Form::Conv1x1([x, w]) => layer(true, 1, x, w, None),
            Form::Conv1x1Bias([x, w, b]) => layer(true, 1, x, w, Some(b)),
            Form::Conv1x1Groups([h, x, w]) => layer(true, heads(h), x, w, None),
            Form::Attention(of) => {
                // Not real attention: any function that mixes rows is enough.
                let Attr::Channels(channels) = attr(&of[0]) else { panic!("{node}") };
                let operands: Vec<Value> = of[1..].iter().map(|id| form(id, false)).collect();
                Value::new(false, channels, |t, c| {
                    let rows = (0..=t).flat_map(|u| operands.iter().map(move |x| x.at(u, c % x.channels)));
                    rows.sum()
                })
            }
            Form::ToNchw(x) => {
                let x = form(x, false);
                Value::new(true, x.channels, |t, c| x.at(t, c))
            }
            Form::FromNchw(x) => {
                let x = form(x, true);
                Value::new(false, x.channels, |t, c| x.at(t, c))
            }
            Form::ByHead([_, x]) => value(x),
            Form::Norm([a, x]) => {
                let Attr::Norm(_, norm, groups) = attr(a) else { panic!("{node}") };
                let x = value(x);
                let each = x.channels / groups.unwrap_or(1);
                Value::new(x.nchw, x.channels, |t, c| {
                    let first = c / each * each;
                    let squares: f32 = (first..first + each).map(|c| x.at(t, c).powi(2)).sum();
                    x.at(t, c) / (squares / each as f32 + norm.eps).sqrt() * number("norm", c - first)
                })
            }
            Form::Clamp([a, x]) => {
                let Attr::Bound(bound) = attr(a) else { panic!("{node}") };
                value(x).map(|x| x.clamp(-bound, bound))
            }
            Form::Rope([a, x, angles]) => {
                let Attr::Rope(rope, heads) = attr(a) else { panic!("{node}") };
                let x = value(x);
                let angles = form(angles, x.nchw);
                let (dim, half) = (x.channels / heads, rope.channels / 2);
                Value::new(x.nchw, x.channels, |t, c| {
                    let (first, at) = (c / dim * dim + rope.offset, c % dim);
                    let Some(i) = at.checked_sub(rope.offset).filter(|i| *i < rope.channels) else {
                        return x.at(t, c);
                    };
                    let (pair, second) = match rope.style {
                        RopeStyle::Half => (i % half, i >= half),
                        RopeStyle::Interleaved => (i / 2, i % 2 == 1),
                    };
                    let (a, b) = match rope.style {
                        RopeStyle::Half => (first + pair, first + half + pair),
                        RopeStyle::Interleaved => (first + 2 * pair, first + 2 * pair + 1),
                    };
                    let (cos, sin) = (angles.at(t, pair), angles.at(t, half + pair));
                    let (a, b) = (x.at(t, a), x.at(t, b));
                    if second { b * cos + a * sin } else { a * cos - b * sin }
                })
            }
            Form::Slice([a, x]) => {
                let Attr::Slice { heads, start, len } = attr(a) else { panic!("{node}") };
                let x = value(x);
                let dim = x.channels / heads;
                Value::new(x.nchw, heads * len, |t, c| x.at(t, c / len * dim + start + c % len))
            }
            Form::Concat([h, a, b]) => {
                let (heads, a) = (heads(h), value(a));
                let b = form(b, a.nchw);
                let (left, right) = (a.channels / heads, b.channels / heads);
                let dim = left + right;
                Value::new(a.nchw, heads * dim, |t, c| match (c % dim).checked_sub(left) {
                    None => a.at(t, c / dim * left + c % dim),
                    Some(at) => b.at(t, c / dim * right + at),
                })
            }
            Form::Glu([a, g, u]) => {
                let Attr::Glu(glu) = attr(a) else { panic!("{node}") };
                assert_eq!(glu, Glu::DRelu);
                let g = value(g);
                let u = form(u, g.nchw);
                Value::new(g.nchw, g.channels, |t, c| g.at(t, c).max(0.0) * u.at(t, c).max(0.0))
            }
            Form::Sigmoid(x) => value(x).map(|x| 1.0 / (1.0 + (-x).exp())),
            Form::Mul([a, b]) => {
                let a = value(a);
                let b = form(b, a.nchw);
                Value::new(a.nchw, a.channels, |t, c| a.at(t, c) * b.at(t, c % b.channels))
            }
        };
        values.push(Some(made));
    }
    values
}

#[track_caller]
fn close(what: &str, a: &Value, b: &Value) {
    assert_eq!((a.nchw, a.channels), (b.nchw, b.channels), "{what}");
    for (a, b) in a.data.iter().zip(&b.data) {
        assert!((a - b).abs() <= 1e-5 * a.abs().max(1.0), "{what}: {a} became {b}");
    }
}

fn raw(shape: &[usize]) -> Raw {
    Raw::new("weights", shape)
}

const ROPE: Rope = Rope { offset: 1, channels: 2, style: RopeStyle::Interleaved };

impl Term {
    /// Rows that were converted from a channels-first value.
    fn rows(&mut self, name: &str) -> Id {
        let x = self.input(C);
        let first = self.nodes.add(Form::ToNchw(x));
        let w = self.weight(name, &raw(&[C, C]));
        let y = self.nodes.add(Form::Conv1x1([first, w]));
        self.nodes.add(Form::FromNchw(y))
    }
    fn unary(&mut self, attr: Attr, node: fn([Id; 2]) -> Form, x: Id) -> Id {
        let attr = self.attr(attr);
        self.nodes.add(node([attr, x]))
    }
    fn by_head(&mut self, x: Id) -> Id {
        self.unary(Attr::Heads(2), Form::ByHead, x)
    }
    fn norm(&mut self, x: Id) -> Id {
        let norm = Norm { weight: Some(raw(&[C / 2])), bias: None, eps: 1e-5, center: false };
        self.unary(Attr::Norm("norm", norm, Some(2)), Form::Norm, x)
    }
    fn clamp(&mut self, x: Id) -> Id {
        self.unary(Attr::Bound(0.25), Form::Clamp, x)
    }
    fn slice(&mut self, x: Id, start: usize, len: usize) -> Id {
        self.unary(Attr::Slice { heads: 2, start, len }, Form::Slice, x)
    }
    fn rope(&mut self, x: Id) -> Id {
        let angles = self.input(ROPE.channels);
        let attr = self.attr(Attr::Rope(ROPE, 2));
        self.nodes.add(Form::Rope([attr, x, angles]))
    }
    fn concat(&mut self, a: Id, b: Id) -> Id {
        let heads = self.attr(Attr::Heads(2));
        self.nodes.add(Form::Concat([heads, a, b]))
    }
    fn glu(&mut self, g: Id, u: Id) -> Id {
        let attr = self.attr(Attr::Glu(Glu::DRelu));
        self.nodes.add(Form::Glu([attr, g, u]))
    }
    fn values(&self) -> Vec<Option<Value>> {
        evaluate(self.nodes.as_ref(), &self.facts)
    }
}

impl Legal {
    fn values(&self) -> Vec<Value> {
        let all = evaluate(&self.nodes, &self.facts);
        self.roots.iter().map(|root| all[usize::from(*root)].clone().unwrap()).collect()
    }
}

type Build = fn(&mut Term) -> Id;

/// Terms for the left side of every rule.
fn cases() -> Vec<(&'static str, Build)> {
    /// Applies an operator to rows of the input, and converts the result to channels-first.
    fn first(t: &mut Term, of: impl FnOnce(&mut Term, Id) -> Id) -> Id {
        let x = t.input(C);
        let y = of(t, x);
        t.add(Form::ToNchw(y))
    }
    vec![
        ("linear-conv", |t| {
            let x = t.input(C);
            t.linear(x, "w", &raw(&[6, C]), None)
        }),
        ("linear-conv-bias", |t| {
            let x = t.input(C);
            t.linear(x, "w", &raw(&[6, C]), Some(&raw(&[6])))
        }),
        ("heads-conv", |t| {
            let x = t.input(C);
            t.head_linear(2, x, "w", &raw(&[2, 3, C / 2]))
        }),
        ("to-from", |t| {
            let x = t.rows("w");
            t.add(Form::ToNchw(x))
        }),
        ("from-to", |t| {
            let x = t.input(C);
            let y = t.add(Form::ToNchw(x));
            t.add(Form::FromNchw(y))
        }),
        ("rows-heads", |t| {
            let x = t.rows("w");
            t.by_head(x)
        }),
        ("rows-norm", |t| {
            let x = t.rows("w");
            t.norm(x)
        }),
        ("rows-clamp", |t| {
            let x = t.rows("w");
            t.clamp(x)
        }),
        ("rows-rope", |t| {
            let x = t.rows("w");
            t.rope(x)
        }),
        ("rows-slice", |t| {
            let x = t.rows("w");
            t.slice(x, 1, 2)
        }),
        ("rows-concat", |t| {
            let (a, b) = (t.rows("a"), t.rows("b"));
            t.concat(a, b)
        }),
        ("rows-glu", |t| {
            let (g, u) = (t.rows("g"), t.rows("u"));
            t.glu(g, u)
        }),
        ("rows-sigmoid", |t| {
            let x = t.rows("w");
            t.add(Form::Sigmoid(x))
        }),
        ("rows-mul", |t| {
            let (a, b) = (t.rows("a"), t.rows("b"));
            t.add(Form::Mul([a, b]))
        }),
        ("nchw-heads", |t| first(t, Term::by_head)),
        ("nchw-norm", |t| first(t, Term::norm)),
        ("nchw-clamp", |t| first(t, Term::clamp)),
        ("nchw-rope", |t| first(t, Term::rope)),
        ("nchw-slice", |t| first(t, |t, x| t.slice(x, 1, 2))),
        ("nchw-concat", |t| {
            first(t, |t, x| {
                let y = t.input(4);
                t.concat(x, y)
            })
        }),
        ("nchw-glu", |t| {
            first(t, |t, x| {
                let y = t.input(C);
                t.glu(x, y)
            })
        }),
        ("nchw-sigmoid", |t| first(t, |t, x| t.add(Form::Sigmoid(x)))),
        ("nchw-mul", |t| {
            first(t, |t, x| {
                let y = t.input(1);
                t.add(Form::Mul([x, y]))
            })
        }),
    ]
}

#[test]
fn coreml_rewrite_rules_preserve_values() {
    let mut seen = BTreeSet::new();
    for (name, build) in cases() {
        let mut term = Term::new();
        let root = build(&mut term);
        let want = term.values()[usize::from(root)].clone().unwrap();
        let (graph, classes) = term.egraph();
        let rule = rules::all().into_iter().map(|(_, rule)| rule).find(|r| r.name.as_str() == name);
        let runner = Runner::<_, _, ()>::new(Facts::default()).with_egraph(graph).run(&[rule.unwrap()]);
        let graph = &runner.egraph;
        let extractor = Extractor::new(graph, AstSize);
        let class = &graph[classes[usize::from(root)]];
        assert!(class.nodes.len() > 1, "`{name}` did not apply");
        for node in &class.nodes {
            let side: RecExpr<Form> = node.join_recexprs(|id| extractor.find_best(id).1);
            let got = evaluate(side.as_ref(), &graph.analysis).pop().flatten().unwrap();
            close(&format!("`{name}`: {side}"), &want, &got);
            let fact = class.data;
            assert_eq!((fact.nchw, fact.channels), (got.nchw, got.channels), "`{name}`: {side}");
        }
        seen.insert(name.to_owned());
    }
    let all: BTreeSet<_> = rules::all().iter().map(|(_, rule)| rule.name.to_string()).collect();
    assert_eq!(all, seen, "every rule needs a case here");
}

/// Attention reads and writes rows; everything else inside the graph is channels-first.
#[test]
fn layouts_change_only_at_the_border_and_attention() {
    let mut t = Term::new();
    let (x, angles) = (t.input(C), t.input(ROPE.channels));
    let normed = t.norm(x);
    let [q, k] = ["q", "k"].map(|name| {
        let y = t.linear(normed, name, &raw(&[C, C]), None);
        let y = t.by_head(y);
        let y = t.norm(y);
        let attr = t.attr(Attr::Rope(ROPE, 2));
        t.add(Form::Rope([attr, y, angles]))
    });
    let v = t.linear(normed, "v", &raw(&[C, C]), Some(&raw(&[C])));
    let channels = t.attr(Attr::Channels(C));
    let y = t.add(Form::Attention([channels, q, k, v].into()));
    let y = t.linear(y, "o", &raw(&[6, C]), None);
    t.result(y);
    for layout in [Layout::Columns, Layout::Rows] {
        let legal = t.legalise(layout).unwrap();
        let counts = legal.counts();
        assert_eq!(counts.convolutions, 4);
        // Input, angles, queries, keys, values, result of attention, result of the part.
        assert_eq!(counts.layout_changes, 7, "{:?}", legal.nodes);
        close("attention", &t.values()[usize::from(y)].clone().unwrap(), &legal.values()[0]);
    }
}

#[test]
fn term_without_legal_form_yields_no_program() {
    let mut t = Term::new();
    let x = t.input(C);
    let y = t.clamp(x);
    t.result(y);
    assert!(t.legalise(Layout::Columns).is_none());
}

/// One step of a random part: its kind and its operands.
type Step = (u8, usize, usize);

/// A linear layer, operators on rows by these steps, and another linear layer.
fn chain(t: &mut Term, steps: &[Step]) -> Id {
    let x = t.input(C);
    let mut values = vec![t.linear(x, "first", &raw(&[C, C]), None)];
    for (i, &(kind, left, right)) in steps.iter().enumerate() {
        let (x, y) = (values[left % values.len()], values[right % values.len()]);
        let name = format!("w{i}");
        values.push(match kind {
            0 => t.linear(x, &name, &raw(&[C, C]), None),
            1 => t.linear(x, &name, &raw(&[C, C]), Some(&raw(&[C]))),
            2 => t.head_linear(2, x, &name, &raw(&[2, C / 2, C / 2])),
            3 => t.add(Form::Sigmoid(x)),
            4 => t.add(Form::Mul([x, y])),
            5 => t.glu(x, y),
            6 => t.clamp(x),
            7 => t.norm(x),
            _ => {
                let (left, right) = (t.slice(x, 0, C / 4), t.slice(y, C / 4, C / 4));
                t.concat(left, right)
            }
        });
    }
    // All unused values are multiplied together, so that none is dropped.
    let all = values.iter().copied().reduce(|a, v| t.add(Form::Mul([a, v]))).unwrap();
    t.linear(all, "last", &raw(&[C, C]), None)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// A chain of layers is converted to channels-first once and back to rows once, whatever operators are in
    /// it. Every linear layer becomes a convolution, and no number changes.
    #[test]
    fn layouts_change_only_at_the_ends_of_a_chain(
        steps in prop::collection::vec((0..9_u8, any::<usize>(), any::<usize>()), 0..8)
    ) {
        let mut t = Term::new();
        let root = chain(&mut t, &steps);
        t.result(root);
        let layers = t.nodes.as_ref().iter().filter(|n| {
            matches!(n, Form::Linear(_) | Form::LinearBias(_) | Form::HeadLinear(_))
        });
        let layers = layers.count();
        let legal = t.legalise(Layout::Columns).unwrap();
        let counts = legal.counts();
        prop_assert_eq!(counts.convolutions, layers);
        prop_assert_eq!(counts.layout_changes, 2, "{:?}", legal.nodes);
        close("chain", &t.values()[usize::from(root)].clone().unwrap(), &legal.values()[0]);
    }
}
