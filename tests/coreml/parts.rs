//! Parts of a model, found without coremltools.

use super::*;
use moec_ir::Scope;

fn attention(layer: usize) -> Scope {
    Scope::in_layer(layer as u32, moec_ir::Part::ATTN)
}

/// Parts are found without coremltools.
#[test]
fn parts_declare_the_inputs_of_their_functions() {
    for family in support::FAMILIES {
        let folder = tempfile::tempdir().unwrap();
        let config = Config::load(&SETUP.write(&checkpoint(family), folder.path())).unwrap();
        let (checkpoint, spec) = moec_import::open(&config.model.source, &ImportOptions::default()).unwrap();
        let device = Device::find("m2-ultra").unwrap();
        let target = moec_cpu::CpuTarget::new(&device).unwrap();
        let mut c = Compilation::new(Inputs::new(&config, &checkpoint, &spec, &target));
        let stops = Stops { stop_after: Some("rewrite"), ..Stops::default() };
        c.run(stops, &Progress::silent(), &mut |_| {}).unwrap();
        let npu = &device.units[device.unit_of(UnitKind::Npu).unwrap()];
        let limits = subgraphs::limits(npu);
        let mut places = npu.clone();
        let source = String::new();
        places.graph.cache_write = Some(Choice { value: CacheWrite::SliceUpdate, source });
        // A layer with a gate on attention's output is refused, and so are layers with recurrent states.
        if support::FOLDED.contains(&family) {
            let refused = CoreMlSubgraph::find(&c.module, &attention(3)).unwrap_err();
            assert!(refused.contains("expected a projection, found `glu`"), "{refused}");
            continue;
        }
        for layer in 0..spec.layers.len() {
            let part = CoreMlSubgraph::find(&c.module, &attention(layer)).unwrap();
            part.check(&c.module, npu).unwrap();
            // 80 positions are padded to 96, 24 rows to 32; a decode call is one row of one sequence.
            assert_eq!((part.is_attention(), part.context(&limits)), (true, Some(96)));
            let graphs = part.graphs(&c.module, npu).unwrap();
            let shape = |name: &str, at: usize| {
                let port = graphs[at].inputs.iter().find(|p| p.name == name).unwrap();
                port.shape.clone()
            };
            assert_eq!(graphs.len(), 3, "{family}");
            for (at, (name, rows)) in
                [("chunk32", 32), ("chunk16", 16), ("chunk16", 16)].into_iter().enumerate()
            {
                let g = &graphs[at];
                assert_eq!(
                    (&*g.function, g.rows, g.stateful, g.entry),
                    (name, rows, true, part.boundaries[at].entry)
                );
                assert_eq!(g.package, format!("artifacts/layers.{layer}.attn.mlpackage"));
                assert_eq!(shape("x", at), [rows, 64, 1, 1]);
                assert_eq!(
                    (shape("mask", at), shape("write", at)),
                    (vec![1, 1, rows, 96], vec![1, 1, 96, rows])
                );
                // A layer without rotation has no input `angles`.
                let angles = part.boundaries[at].angles.map(|v| c.module.entries[at].ty(v).cols());
                if let Some(channels) = angles {
                    assert_eq!(shape("angles", at), [rows, channels, 1, 1]);
                }
                let inputs = 3 + usize::from(angles.is_some());
                assert_eq!(
                    (g.inputs.len(), g.outputs.len(), &g.outputs[0].shape),
                    (inputs, 1, &shape("x", at))
                );
            }
            // 80 positions in chunks of 24, each padded to 32 rows; the state has 96 positions.
            let fixed = part.graphs(&c.module, &places).unwrap();
            let names: Vec<&str> = fixed.iter().map(|g| &*g.function).collect();
            assert_eq!(
                names,
                ["chunk32", "chunk32_at0", "chunk32_at24", "chunk32_at48", "chunk16", "chunk16"],
                "{family}"
            );
            let mask = fixed[2].inputs.iter().find(|p| p.name == "mask").unwrap();
            assert_eq!((fixed[2].fixed_start(), &*mask.shape), (Some(24), &[1, 1, 32, 56][..]));
            for (boundary, graph) in part.boundaries.iter().zip(&c.module.entries) {
                // The part begins after the norm and ends before the residual.
                let norm = &graph.nodes[graph.def(boundary.x).unwrap().0 as usize].op;
                assert!(matches!(norm, Op::RmsNorm { .. } | Op::LayerNorm { .. }), "{family}");
                let residual = graph.nodes.iter().find(|n| n.inputs.contains(&boundary.y.into())).unwrap();
                assert_eq!(residual.op, Op::Add, "{family}");
                assert_eq!(graph.ty(boundary.x), graph.ty(boundary.y), "{family}");
            }
        }
        let windows = (0..spec.layers.len())
            .map(|layer| CoreMlSubgraph::find(&c.module, &attention(layer)).unwrap().window());
        let windows: Vec<_> = windows.flatten().collect();
        let expected: &[usize] = match family {
            "gpt_oss" => &[16],
            "smallthinker_21b" => &[16, 16],
            "bamboo" => &[20, 20],
            _ => &[],
        };
        assert_eq!(windows, expected, "{family}");
        let e = CoreMlSubgraph::find(&c.module, &moec_ir::Part::EMBED.into()).unwrap_err();
        assert!(e.contains("no graph"), "{e}");
    }
}
