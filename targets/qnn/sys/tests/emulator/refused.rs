//! Refused graphs: which part refuses them, and the message.

use crate::support::{installation, linear, newest};
use moec_qnn_sys::{
    Context, DType, Data, Error, GraphSpec, Installation, Node, Options, Quant, Scalar, System,
};

fn relu() -> GraphSpec {
    let mut spec = GraphSpec::new("graph");
    let x = spec.input("x", DType::F16, &[2, 8], Quant::None).unwrap();
    let y = spec.output("y", DType::F16, &[2, 8], Quant::None).unwrap();
    spec.node(Node::new("Relu", &[x], &[y])).unwrap();
    spec
}

#[test]
fn unknown_qnn_operator_is_named() {
    let Some(installation) = installation() else { return };
    let mut spec = GraphSpec::new("graph");
    let x = spec.input("x", DType::F16, &[2, 8], Quant::None).unwrap();
    let y = spec.output("y", DType::F16, &[2, 8], Quant::None).unwrap();
    spec.node(Node::new("Frobnicate", &[x], &[y]).named("first")).unwrap();
    let refused = Context::new(&newest(&installation), false).unwrap().compose(&spec).unwrap_err();
    let Error::Node { graph, node, op, reason, messages } = &refused else { panic!("{refused}") };
    assert_eq!((graph.as_str(), node.as_str(), op.as_str()), ("graph", "first", "Frobnicate"));
    assert!(!reason.is_empty() && !messages.is_empty(), "{refused}");
}

#[test]
fn unsupported_operator_type_is_rejected() {
    let Some(installation) = installation() else { return };
    let mut spec = GraphSpec::new("graph");
    let x = spec.input("x", DType::U32, &[2, 8], Quant::None).unwrap();
    let y = spec.output("y", DType::U32, &[2, 8], Quant::None).unwrap();
    spec.node(Node::new("Sigmoid", &[x], &[y])).unwrap();
    let refused = Context::new(&newest(&installation), false).unwrap().compose(&spec).unwrap_err();
    assert!(matches!(&refused, Error::Node { op, .. } if op == "Sigmoid"), "{refused}");
}

#[test]
fn mismatched_graph_inputs_are_rejected() {
    let Some(installation) = installation() else { return };
    let mut context = Context::new(&newest(&installation), false).unwrap();
    let graph = context.compose(&relu()).unwrap();
    let none = graph.execute(&[]).unwrap_err();
    assert!(none.to_string().contains("0 inputs, and takes 1"), "{none}");
    let short = graph.execute(&[&[0; 31]]).unwrap_err();
    assert!(short.to_string().contains("31 bytes for `x`, which takes 32"), "{short}");
}

/// moec checks the options, since the library would accept any number.
#[test]
fn graph_options_are_bounded() {
    let Some(installation) = installation() else { return };
    let device = newest(&installation);
    for (vtcm, level, good) in [(0, 1, true), (8, 2, true), (9, 3, false), (8, 0, false), (8, 4, false)] {
        let mut spec = relu();
        spec.options = Options { vtcm, level };
        let composed = Context::new(&device, false).unwrap().compose(&spec);
        assert_eq!(composed.is_ok(), good, "{vtcm} MiB, level {level}: {:?}", composed.err());
    }
}

#[test]
fn duplicate_graph_names_are_rejected() {
    let Some(installation) = installation() else { return };
    let mut context = Context::new(&newest(&installation), false).unwrap();
    context.compose(&relu()).unwrap();
    let refused = context.compose(&relu()).unwrap_err();
    assert!(refused.to_string().contains("graph `graph`"), "{refused}");
}

#[test]
fn damaged_binaries_are_errors() {
    let Some(installation) = installation() else { return };
    let system = System::open(&installation).unwrap();
    let mut context = Context::new(&newest(&installation), false).unwrap();
    context.compose(&relu()).unwrap();
    let bytes = context.binary().unwrap();
    for len in [0, 1, 64, bytes.len() / 2] {
        let refused = system.binary_info(&bytes[..len]);
        assert!(matches!(refused, Err(Error::Binary { .. })), "{len} bytes: {refused:?}");
    }
    assert!(system.binary_info(b"not a context binary at all").is_err());
}

#[test]
fn invalid_dlc_is_an_error() {
    let Some(installation) = installation() else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("none.dlc");
    std::fs::write(&path, b"nothing of the kind").unwrap();
    let (device, system) = (newest(&installation), System::open(&installation).unwrap());
    let mut context = Context::new(&device, false).unwrap();
    let refused = context.compose_dlc(&system, &path).unwrap_err();
    assert!(matches!(&refused, Error::Binary { what, .. } if what.contains("none.dlc")), "{refused}");
}

/// Folders without the library, or with parts of it only.
#[test]
fn folder_without_the_library_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let nowhere = Installation::at(folder.path().join("nowhere")).unwrap_err();
    assert!(matches!(nowhere, Error::NotInstalled { .. }), "{nowhere}");
    assert!(nowhere.hint().is_some_and(|h| h.contains("cargo xtask qnn") && h.contains("MOEC_QNN_LIB")));
    let empty = Installation::at(folder.path()).unwrap_err();
    assert!(matches!(&empty, Error::NoLibrary { name, .. } if name == "libQnnHtp.so"), "{empty}");
    assert!(matches!(Installation::installed(folder.path()), Err(Error::NotInstalled { .. })));
    let packages = folder.path().join("lib/python3.99/site-packages");
    std::fs::create_dir_all(packages.join("onnxruntime_qnn")).unwrap();
    let other = Installation::installed(folder.path()).unwrap_err();
    assert!(matches!(other, Error::Version { .. }), "{other}");
    std::fs::create_dir(packages.join("onnxruntime_qnn-2.7.0.dist-info")).unwrap();
    assert!(matches!(Installation::installed(folder.path()), Err(Error::NoLibrary { .. })));
}

/// Files with the right names that are not libraries.
#[test]
fn a_fake_library_is_not_loaded() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["libQnnHtp.so", "libQnnIr.so", "libQnnSystem.so"] {
        std::fs::write(folder.path().join(name), b"no library").unwrap();
    }
    let fake = Installation::at(folder.path()).unwrap();
    let refused = System::open(&fake).unwrap_err();
    assert!(matches!(refused, Error::Load { .. }), "{refused}");
    assert!(moec_qnn_sys::Backend::htp(&fake).is_err_and(|e| e.hint().is_some()));
}

/// Graphs are checked while they are built, without the library.
#[test]
fn graphs_are_checked_while_built() {
    let quant = Quant::Tensor { scale: 0.1, offset: 0 };
    let mut spec = GraphSpec::new("graph");
    let x = spec.input("x", DType::U16, &[2, 8], quant.clone()).unwrap();
    let y = spec.output("y", DType::U16, &[2, 8], quant.clone()).unwrap();
    let middle = spec.native("middle", DType::U16, &[2, 8], quant.clone()).unwrap();
    let error = |e: moec_qnn_sys::Result<()>| e.unwrap_err().to_string();
    let tensor = |e: moec_qnn_sys::Result<moec_qnn_sys::TensorId>| e.unwrap_err().to_string();

    assert!(error(spec.verify()).contains("no node writes its output `y`"));
    assert!(tensor(spec.input("x", DType::U16, &[1], quant.clone())).contains("two tensors `x`"));
    assert!(tensor(spec.input("z", DType::U16, &[1, 0], quant.clone())).contains("sizes"));
    assert!(tensor(spec.input("z", DType::F16, &[1], quant.clone())).contains("not a quantised type"));
    let zero = Quant::Tensor { scale: 0.0, offset: 0 };
    assert!(tensor(spec.input("z", DType::U16, &[1], zero)).contains("scale is 0"));
    assert!(tensor(spec.input("z", DType::F32, &[1 << 31, 4], Quant::None)).contains("4 GiB"));
    let channels = Quant::Channels { axis: 0, bits: 4, scales: vec![1.0; 3] };
    let data = Data::Bytes(vec![0; 16]);
    assert!(tensor(spec.constant("w", DType::S8, &[2, 8], channels, data)).contains("3 scales for axis 0"));
    let short = Data::Bytes(vec![0; 15]);
    let one = Quant::Channels { axis: 0, bits: 4, scales: vec![1.0; 2] };
    assert!(
        tensor(spec.constant("w", DType::S8, &[2, 8], one, short)).contains("15 bytes of data, expected 16")
    );

    assert!(
        error(spec.node(Node::new("Relu", &[middle], &[y])))
            .contains("reads `middle`, which no earlier node")
    );
    assert!(error(spec.node(Node::new("Relu", &[x], &[x]))).contains("writes `x`, which is not computed"));
    assert!(
        error(spec.node(Node::new("Relu", &[x], &[y]).tensor("axes", x)))
            .contains("parameter `x` is not constant")
    );
    spec.node(Node::new("Relu", &[x], &[y]).scalar("flag", Scalar::Bool(true))).unwrap();
    assert!(error(spec.node(Node::new("Relu", &[x], &[y]))).contains("which another node writes"));
    let again = Node::new("Relu", &[x], &[middle]).named("Relu_0");
    assert!(error(spec.node(again)).contains("two nodes `Relu_0`"));
    spec.verify().unwrap();
}

/// A data file that is too short is an error when the graph is composed.
#[test]
fn a_file_of_weights_may_be_missing() {
    let Some(installation) = installation() else { return };
    let folder = tempfile::tempdir().unwrap();
    let case = linear("linear", 1, 32, 32, 8, 7, 1.0);
    let mut spec = GraphSpec::new("linear");
    let x = spec.input("x", DType::U16, &[1, 32], Quant::covering(-1.0, 1.0, 16)).unwrap();
    let scales = Quant::Channels { axis: 0, bits: 8, scales: vec![0.01; 32] };
    let path = folder.path().join("weights");
    let data = Data::File { path: path.clone(), offset: 16, len: 1024 };
    let w = spec.constant("w", DType::S8, &[32, 32], scales, data).unwrap();
    let y = spec.output("y", DType::U16, &[1, 32], case.quant).unwrap();
    spec.node(Node::new("FullyConnected", &[x, w], &[y])).unwrap();
    let device = newest(&installation);
    for bytes in [None, Some(1039), Some(1040)] {
        if let Some(n) = bytes {
            std::fs::write(&path, vec![1u8; n]).unwrap();
        }
        let composed = Context::new(&device, false).unwrap().compose(&spec);
        match bytes {
            Some(1040) => assert!(composed.is_ok(), "{:?}", composed.err()),
            _ => assert!(matches!(composed, Err(Error::Io { .. })), "{bytes:?}"),
        }
    }
}
