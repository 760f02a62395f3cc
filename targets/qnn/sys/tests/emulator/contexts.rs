//! Contexts: saving, describing, loading and sharing weights, for both chips; and DLC files.

use crate::support::{installation, linear, newest, worker};
use moec_qnn_sys::{
    Backend, Context, DType, Error, GraphSpec, Options, Quant, SNAPDRAGON_8_GEN_3, SOCS, System, write_dlc,
};

/// Graphs with one to four rows that share weights, as decoding uses them.
fn batches() -> Vec<crate::support::Linear> {
    (1..=4).map(|batch| linear(&format!("batch_{batch}"), batch, 256, 512, 8, 7, 1.0)).collect()
}

#[test]
fn loaded_context_computes_like_the_saved_one() {
    let Some(installation) = installation() else { return };
    let (device, system) = (newest(&installation), System::open(&installation).unwrap());
    let mut context = Context::new(&device, false).unwrap();
    let cases = batches();
    let outputs: Vec<_> =
        cases.iter().map(|case| context.compose(&case.spec).unwrap().execute(&[&case.x]).unwrap()).collect();
    let bytes = context.binary().unwrap();
    let (_loaded, graphs) = Context::from_binary(&device, &system, &bytes).unwrap();
    assert_eq!(graphs.len(), cases.len());
    for (case, output) in cases.iter().zip(&outputs) {
        // The library returns the graphs in its own order.
        let graph = graphs.iter().find(|graph| graph.info().name == case.spec.name).unwrap();
        assert_eq!(&graph.execute(&[&case.x]).unwrap(), output);
    }
}

#[test]
fn binary_describes_its_graphs() {
    let Some(installation) = installation() else { return };
    for soc in SOCS {
        let mut worker = worker(&installation, soc, false);
        let cases = batches();
        for case in &cases {
            worker.compose(&case.spec).unwrap();
        }
        let bytes = worker.binary().unwrap();
        let info = worker.binary_info(bytes).unwrap();
        assert_eq!(info.soc_model, Some(soc.model));
        info.expect(soc).unwrap();
        assert!(info.build.contains(moec_qnn_sys::find::QAIRT), "{}", info.build);
        assert_eq!(info.graphs.len(), cases.len());
        for case in &cases {
            let graph = info.graph(&case.spec.name).unwrap();
            for (found, given) in
                [(&graph.inputs, case.spec.inputs().next()), (&graph.outputs, case.spec.outputs().next())]
            {
                let (found, given) = (&found[0], given.unwrap());
                assert_eq!(
                    (&found.name, &found.dims, &found.quant),
                    (&given.name, &given.dims, &given.quant)
                );
                assert_eq!(found.dtype().unwrap(), DType::U16);
            }
        }
    }
}

/// Four graphs that share their weights. The emulator executes and saves them, but reports that it cannot
/// load them.
#[test]
fn shared_weights_are_stored_once() {
    let Some(installation) = installation() else { return };
    let (device, system) = (newest(&installation), System::open(&installation).unwrap());
    let cases = batches();
    let mut sizes = Vec::new();
    let mut outputs = Vec::new();
    for share in [false, true] {
        let mut context = Context::new(&device, share).unwrap();
        let graphs: Vec<_> = cases.iter().map(|case| context.compose(&case.spec).unwrap()).collect();
        outputs.push(graphs.iter().zip(&cases).map(|(g, c)| g.execute(&[&c.x]).unwrap()).collect::<Vec<_>>());
        let bytes = context.binary().unwrap();
        assert_eq!(system.binary_info(&bytes).unwrap().graphs.len(), 4);
        sizes.push(bytes.len());
        if share {
            let Err(Error::Call { messages, .. }) = Context::from_binary(&device, &system, &bytes) else {
                panic!("the emulator loads shared weights now: the docs say that it does not");
            };
            assert!(messages.iter().any(|m| m.contains("Shared weights")), "{messages:?}");
        }
    }
    println!("four graphs of 128 KiB of weights: {} bytes apart, {} shared", sizes[0], sizes[1]);
    assert!(sizes[1] * 2 < sizes[0], "{sizes:?}");
    assert_eq!(outputs[0], outputs[1]);
}

/// A graph that was refused half-way remains in the context: other graphs still run, but the context can no
/// longer be saved.
#[test]
fn a_context_with_a_refused_graph_computes_and_is_not_saved() {
    let Some(installation) = installation() else { return };
    let mut worker = worker(&installation, SNAPDRAGON_8_GEN_3, false);
    let case = linear("linear", 1, 64, 64, 8, 7, 1.0);
    let mut spec = GraphSpec::new("refused");
    let x = spec.input("x", DType::F16, &[2, 8], Quant::None).unwrap();
    let y = spec.output("y", DType::F16, &[2, 8], Quant::None).unwrap();
    spec.node(moec_qnn_sys::Node::new("Frobnicate", &[x], &[y])).unwrap();
    let refused = worker.compose(&spec).unwrap_err();
    assert!(matches!(refused, Error::Node { .. }), "{refused}");
    let graph = worker.compose(&case.spec).unwrap();
    assert_eq!(worker.execute(graph, vec![case.x]).unwrap().len(), 1);
    let unsaved = worker.binary().unwrap_err();
    assert!(matches!(&unsaved, Error::Call { messages, .. } if messages[0].contains("refused")), "{unsaved}");
}

/// A DLC is written by one backend and read by another, with the same results.
#[test]
fn dlc_computes_like_its_graph() {
    let Some(installation) = installation() else { return };
    let folder = tempfile::tempdir().unwrap();
    let (device, system) = (newest(&installation), System::open(&installation).unwrap());
    for bits in [8, 4] {
        let case = linear("linear", 3, 256, 512, bits, 7, 1.0);
        let want =
            Context::new(&device, false).unwrap().compose(&case.spec).unwrap().execute(&[&case.x]).unwrap();
        let path = folder.path().join("linear.dlc");
        write_dlc(&Backend::ir(&installation).unwrap(), &case.spec, &path).unwrap();
        println!("DLC, {bits} bits: {} bytes", std::fs::metadata(&path).unwrap().len());
        let mut context = Context::new(&device, false).unwrap();
        let graphs = context.compose_dlc(&system, &path).unwrap();
        assert_eq!(graphs.len(), 1);
        let info = graphs[0].info();
        assert_eq!((info.name.as_str(), info.inputs[0].name.as_str()), ("linear", "x"));
        assert_eq!(graphs[0].execute(&[&case.x]).unwrap(), want);
        // The DLC can be compiled into a context binary for the chip.
        let found = system.binary_info(&context.binary().unwrap()).unwrap();
        found.expect(SNAPDRAGON_8_GEN_3).unwrap();
    }
}

/// Graph options change the compiled graph, but not its results.
#[test]
fn graph_options_reach_the_compiler() {
    let Some(installation) = installation() else { return };
    let build = |vtcm, level| {
        let mut worker = worker(&installation, SNAPDRAGON_8_GEN_3, false);
        let mut case = linear("linear", 4, 1024, 1024, 8, 7, 1.0);
        case.spec.options = Options { vtcm, level };
        let graph = worker.compose(&case.spec).unwrap();
        (worker.execute(graph, vec![case.x]).unwrap(), worker.binary().unwrap())
    };
    let (all, little, fast) = (build(8, 3), build(1, 3), build(8, 1));
    assert!(all.1 != little.1 && all.1 != fast.1);
    assert!(all.0 == little.0 && all.0 == fast.0);
}

/// Descriptions of graphs contain tensors of every kind.
#[test]
fn descriptions_have_types_and_scales() {
    let Some(installation) = installation() else { return };
    let mut spec = GraphSpec::new("types");
    let x = spec.input("x", DType::F16, &[2, 8], Quant::None).unwrap();
    let y = spec.output("y", DType::F16, &[2, 8], Quant::None).unwrap();
    spec.node(moec_qnn_sys::Node::new("Relu", &[x], &[y])).unwrap();
    let mut context = Context::new(&newest(&installation), false).unwrap();
    context.compose(&spec).unwrap();
    let system = System::open(&installation).unwrap();
    let info = system.binary_info(&context.binary().unwrap()).unwrap();
    let input = &info.graphs[0].inputs[0];
    assert_eq!(
        (input.dtype().unwrap(), &input.quant, input.bytes().unwrap()),
        (DType::F16, &Quant::None, 32)
    );
}
