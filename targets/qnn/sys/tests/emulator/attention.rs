//! Attention over an 8-bit cache, which both chips support, and lookups in tables.

use crate::support::{covering, installation, load, numbers, product, relative, rounded, store, worker};
use moec_qnn_sys::{DType, Data, GraphSpec, Node, Quant, SOCS, Scalar};

const HEADS: usize = 4;
const ROWS: usize = 8;
const CACHED: usize = 64;
const WIDTH: usize = 32;

/// Number that the mask adds: far below every score, but finite.
const MASKED: f64 = -40.0;

/// Scores plus mask: row `r` sees the first `CACHED - ROWS + r + 1` positions of the cache.
fn scores(q: &[f64], k: &[f64], mask: &[f64]) -> Vec<f64> {
    let heads = q.chunks_exact(ROWS * WIDTH).zip(k.chunks_exact(CACHED * WIDTH));
    let all: Vec<f64> = heads.flat_map(|(q, k)| product(q, k, WIDTH)).collect();
    all.iter().zip(mask.iter().cycle()).map(|(s, m)| s + m).collect()
}

fn softmax(scores: &[f64]) -> Vec<f64> {
    let rows = scores.chunks_exact(CACHED).flat_map(|row| {
        let most = row.iter().copied().fold(f64::MIN, f64::max);
        let sum: f64 = row.iter().map(|s| (s - most).exp()).sum();
        row.iter().map(move |s| (s - most).exp() / sum)
    });
    rows.collect()
}

fn mixed(p: &[f64], v: &[f64]) -> Vec<f64> {
    let heads = p.chunks_exact(ROWS * CACHED).zip(v.chunks_exact(CACHED * WIDTH));
    let of_head = |(p, v): (&[f64], &[f64])| -> Vec<f64> {
        let transposed: Vec<f64> =
            (0..WIDTH).flat_map(|c| (0..CACHED).map(move |r| r * WIDTH + c)).map(|at| v[at]).collect();
        product(p, &transposed, CACHED)
    };
    heads.flat_map(of_head).collect()
}

#[test]
fn attention_heads_use_an_8_bit_cache() {
    let Some(installation) = installation() else { return };
    let [q, k, v] = [(1, HEADS * ROWS * WIDTH), (2, HEADS * CACHED * WIDTH), (3, HEADS * CACHED * WIDTH)]
        .map(|(seed, n)| numbers(seed, n));
    let seen = |row: usize, at: usize| if at <= CACHED - ROWS + row { 0.0 } else { MASKED };
    let mask: Vec<f64> = (0..ROWS).flat_map(|row| (0..CACHED).map(move |at| seen(row, at))).collect();
    let (qq, kq) = (Quant::symmetric(1.0, 16), Quant::symmetric(1.0, 8));
    let mq = Quant::covering(MASKED as f32, 0.0, 16);
    let real = |of: &[f64], dtype, quant: &Quant| rounded(of, dtype, quant);
    let none = vec![0.0; ROWS * CACHED];
    let raw = scores(&real(&q, DType::U16, &qq), &real(&k, DType::U8, &kq), &none);
    let added = scores(&real(&q, DType::U16, &qq), &real(&k, DType::U8, &kq), &real(&mask, DType::U16, &mq));
    let want = mixed(&softmax(&added), &real(&v, DType::U8, &kq));

    let dims = |rows: usize, columns: usize| [1, HEADS as u32, rows as u32, columns as u32];
    let mut spec = GraphSpec::new("attention");
    let q_id = spec.input("q", DType::U16, &dims(ROWS, WIDTH), qq.clone()).unwrap();
    let k_id = spec.input("k", DType::U8, &dims(CACHED, WIDTH), kq.clone()).unwrap();
    let v_id = spec.input("v", DType::U8, &dims(CACHED, WIDTH), kq.clone()).unwrap();
    let mask_dims = [1, 1, ROWS as u32, CACHED as u32];
    let mask_id = spec.input("mask", DType::U16, &mask_dims, mq.clone()).unwrap();
    let mut inner = |name: &str, quant| spec.native(name, DType::U16, &dims(ROWS, CACHED), quant).unwrap();
    let raw_id = inner("raw", covering(DType::U16, &raw));
    let added_id = inner("added", covering(DType::U16, &added));
    let p_id = inner("p", Quant::covering(0.0, 1.0, 16));
    let quant = covering(DType::U16, &want);
    let y = spec.output("y", DType::U16, &dims(ROWS, WIDTH), quant.clone()).unwrap();
    spec.node(Node::new("MatMul", &[q_id, k_id], &[raw_id]).scalar("transpose_in1", Scalar::Bool(true)))
        .unwrap();
    spec.node(Node::new("ElementWiseAdd", &[raw_id, mask_id], &[added_id])).unwrap();
    spec.node(Node::new("Softmax", &[added_id], &[p_id]).scalar("axis", Scalar::U32(3))).unwrap();
    spec.node(Node::new("MatMul", &[p_id, v_id], &[y])).unwrap();

    for (soc, bound) in SOCS.into_iter().zip([2e-3, 1e-2]) {
        let mut worker = worker(&installation, soc, false);
        let graph = worker.compose(&spec).unwrap();
        let inputs = vec![
            store(&q, DType::U16, &qq),
            store(&k, DType::U8, &kq),
            store(&v, DType::U8, &kq),
            store(&mask, DType::U16, &mq),
        ];
        let out = worker.execute(graph, inputs).unwrap();
        let error = relative(&load(&out[0], DType::U16, &quant), &want);
        println!("{}: {error:.1e}", soc.name);
        assert!(error < bound, "{}: {error:.1e}", soc.name);
    }
}

/// Rows of a table, selected by indices that the caller passes.
#[test]
fn embeddings_are_looked_up() {
    let Some(installation) = installation() else { return };
    let (table, quant) = (numbers(1, 256 * 64), Quant::covering(-1.0, 1.0, 16));
    let mut spec = GraphSpec::new("embeddings");
    let ids = spec.input("ids", DType::I32, &[1, 4], Quant::None).unwrap();
    let bytes = Data::Bytes(store(&table, DType::U16, &quant));
    let rows = spec.constant("table", DType::U16, &[256, 64], quant.clone(), bytes).unwrap();
    let y = spec.output("y", DType::U16, &[1, 4, 64], quant.clone()).unwrap();
    spec.node(Node::new("Gather", &[rows, ids], &[y]).scalar("axis", Scalar::I32(0))).unwrap();
    for soc in SOCS {
        let mut worker = worker(&installation, soc, false);
        let graph = worker.compose(&spec).unwrap();
        let chosen = [255i32, 0, 17, 17];
        let out =
            worker.execute(graph, vec![chosen.iter().flat_map(|id| id.to_le_bytes()).collect()]).unwrap();
        let want: Vec<u8> = chosen
            .iter()
            .flat_map(|&id| store(&table[id as usize * 64..][..64], DType::U16, &quant))
            .collect();
        assert!(out[0] == want, "{}", soc.name);
    }
}
