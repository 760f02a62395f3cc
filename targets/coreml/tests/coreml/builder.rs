//! Builds small packages with the protobuf messages that moec reads.

use half::f16;
use moec_coreml::exec::{Data, ExecError, Executor, States, Tensor};
use moec_coreml::package::proto::{self, Bound, Elements, Kind, StoredValue};
use moec_coreml::package::{Dtype, Package, PackageError, TensorType};
use moec_ir::plan::FileRef;
use moec_runtime::CheckLevel;
use moec_runtime::bundle::BundleReader;
use prost::Message;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;

/// Folder of the model in a package.
pub(crate) const MODEL: &str = "Data/com.apple.CoreML/model.mlmodel";
pub(crate) const WEIGHTS: &str = "Data/com.apple.CoreML/weights/weight.bin";
const MANIFEST: &str = r#"{"fileFormatVersion": "1.0.0", "rootModelIdentifier": "A", "itemInfoEntries": {
  "A": {"author": "com.apple.CoreML", "name": "model.mlmodel", "path": "com.apple.CoreML/model.mlmodel"}}}"#;

pub(crate) fn ty(dtype: Dtype, shape: &[usize]) -> TensorType {
    TensorType { dtype, shape: shape.to_vec() }
}

fn tensor_type(ty: &TensorType) -> proto::ValueType {
    proto::ValueType { kind: Some(Kind::Tensor(ty.write())) }
}

/// Argument of an operation.
#[derive(Clone)]
pub(crate) enum Arg {
    Name(&'static str),
    Names(Vec<&'static str>),
    Value(proto::Value),
}

pub(crate) fn immediate(ty: &TensorType, elements: Elements) -> proto::Value {
    let tensor = Some(proto::TensorValue { elements: Some(elements) });
    proto::Value {
        r#type: Some(tensor_type(ty)),
        held: Some(StoredValue::Immediate(proto::ImmediateValue { tensor })),
    }
}

pub(crate) fn name(name: &'static str) -> Arg {
    Arg::Name(name)
}

pub(crate) fn int(value: i32) -> Arg {
    Arg::Value(immediate(&ty(Dtype::I32, &[]), Elements::Ints(proto::Ints { values: vec![value] })))
}

pub(crate) fn ints(values: &[i32]) -> Arg {
    let elements = Elements::Ints(proto::Ints { values: values.to_vec() });
    Arg::Value(immediate(&ty(Dtype::I32, &[values.len()]), elements))
}

pub(crate) fn flag(value: bool) -> Arg {
    Arg::Value(immediate(&ty(Dtype::Bool, &[]), Elements::Bools(proto::Bools { values: vec![value] })))
}

pub(crate) fn flags(values: &[bool]) -> Arg {
    let elements = Elements::Bools(proto::Bools { values: values.to_vec() });
    Arg::Value(immediate(&ty(Dtype::Bool, &[values.len()]), elements))
}

pub(crate) fn text(value: &str) -> Arg {
    let elements = Elements::Strings(proto::Strings { values: vec![value.into()] });
    Arg::Value(immediate(&ty(Dtype::String, &[]), elements))
}

/// Numbers as fp16.
pub(crate) fn halves(shape: &[usize], values: &[f32]) -> Arg {
    let bytes = values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect();
    raw(Dtype::F16, shape, bytes)
}

/// A constant of these bytes.
pub(crate) fn raw(dtype: Dtype, shape: &[usize], values: Vec<u8>) -> Arg {
    Arg::Value(immediate(&ty(dtype, shape), Elements::Bytes(proto::Bytes { values })))
}

/// Builder of a function.
#[derive(Clone, Default)]
pub(crate) struct Builder {
    pub(crate) inputs: Vec<proto::NamedValueType>,
    pub(crate) described: proto::FunctionDescription,
    pub(crate) block: proto::Block,
    pub(crate) weights: Vec<u8>,
}

fn feature(name: &str, ty: &TensorType, state: bool) -> proto::FeatureDescription {
    let data_type = [(Dtype::F16, 65_552), (Dtype::F32, 65_568), (Dtype::I32, 131_104)];
    let data_type = data_type.iter().find(|(d, _)| *d == ty.dtype).map_or(0, |(_, n)| *n);
    let shape = ty.shape.iter().map(|&d| d as i64).collect();
    let array =
        Some(proto::ArrayFeatureType { shape, data_type, enumerated_shapes: None, shape_range: None });
    let r#type = if state {
        let state = Some(proto::StateFeatureType { array });
        proto::FeatureType { multi_array: None, state, is_optional: false }
    } else {
        proto::FeatureType { multi_array: array, state: None, is_optional: false }
    };
    proto::FeatureDescription {
        name: name.into(),
        short_description: format!("{name} of {:?}", ty.shape),
        r#type: Some(r#type),
    }
}

impl Builder {
    pub(crate) fn input(mut self, name: &str, ty: &TensorType) -> Self {
        self.inputs.push(proto::NamedValueType { name: name.into(), r#type: Some(tensor_type(ty)) });
        self.described.input.push(feature(name, ty, false));
        self
    }

    pub(crate) fn state(mut self, name: &str, ty: &TensorType) -> Self {
        let state = proto::StateType { wrapped: Some(tensor_type(ty)) };
        let r#type = Some(proto::ValueType { kind: Some(Kind::State(Box::new(state))) });
        self.inputs.push(proto::NamedValueType { name: name.into(), r#type });
        self.described.state.push(feature(name, ty, true));
        self
    }

    pub(crate) fn operation(mut self, operation: proto::Operation) -> Self {
        self.block.operations.push(operation);
        self
    }

    pub(crate) fn op(self, kind: &str, args: &[(&str, Arg)], results: &[(&str, TensorType)]) -> Self {
        let bind = |bound| proto::Binding { binding: Some(bound) };
        let inputs = args.iter().map(|(parameter, arg)| {
            let arguments = match arg {
                Arg::Name(n) => vec![bind(Bound::Name((*n).into()))],
                Arg::Names(all) => all.iter().map(|n| bind(Bound::Name((*n).into()))).collect(),
                Arg::Value(v) => vec![bind(Bound::Value(v.clone()))],
            };
            ((*parameter).to_owned(), proto::Argument { arguments })
        });
        let Arg::Value(label) = text(results.first().map_or("none", |(n, _)| n)) else { unreachable!() };
        self.operation(proto::Operation {
            r#type: kind.into(),
            inputs: inputs.collect(),
            outputs: results
                .iter()
                .map(|(n, t)| proto::NamedValueType { name: (*n).into(), r#type: Some(tensor_type(t)) })
                .collect(),
            blocks: Vec::new(),
            attributes: BTreeMap::from([("name".to_owned(), label)]),
        })
    }

    /// A constant in the weight file, fp16.
    pub(crate) fn weight(mut self, name: &str, shape: &[usize], values: &[f32]) -> Self {
        if self.weights.is_empty() {
            self.weights = vec![0; 64];
            self.weights[4] = 2;
        }
        self.weights[0] += 1;
        let offset = self.weights.len() as u64;
        let data: Vec<u8> = values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect();
        self.weights.extend(0xDEAD_BEEF_u32.to_le_bytes());
        self.weights.extend(1_u32.to_le_bytes());
        self.weights.extend((data.len() as u64).to_le_bytes());
        self.weights.extend((offset + 64).to_le_bytes());
        self.weights.resize(offset as usize + 64, 0);
        self.weights.extend(&data);
        self.weights.resize(self.weights.len().next_multiple_of(64), 0);
        let ty = ty(Dtype::F16, shape);
        self.constant(name, &ty, offset)
    }

    /// A constant whose metadata is at this offset of the weight file.
    pub(crate) fn constant(self, name: &str, ty: &TensorType, offset: u64) -> Self {
        let file_name = "@model_path/weights/weight.bin".into();
        let value = proto::Value {
            r#type: Some(tensor_type(ty)),
            held: Some(StoredValue::Blob(proto::BlobFileValue { file_name, offset })),
        };
        let outputs = vec![proto::NamedValueType { name: name.into(), r#type: Some(tensor_type(ty)) }];
        let attributes = BTreeMap::from([("val".to_owned(), value)]);
        let operation =
            proto::Operation { r#type: "const".into(), outputs, attributes, ..Default::default() };
        self.operation(operation)
    }

    pub(crate) fn output(mut self, name: &str, ty: &TensorType) -> Self {
        self.block.outputs.push(name.into());
        self.described.output.push(feature(name, ty, false));
        self
    }

    fn function(&self) -> proto::Function {
        proto::Function {
            inputs: self.inputs.clone(),
            opset: "CoreML8".into(),
            block_specializations: BTreeMap::from([("CoreML8".to_owned(), self.block.clone())]),
        }
    }

    /// A model with only this function, named `main`.
    pub(crate) fn model(&self) -> proto::Model {
        model(&[("main", self)])
    }

    /// Writes the package.
    pub(crate) fn save(&self) -> Saved {
        Saved::new(&self.model(), &self.weights)
    }

    pub(crate) fn open(&self) -> Arc<Package> {
        Arc::new(self.save().open().expect("opens"))
    }
}

/// A model with several functions; the first is the default.
pub(crate) fn model(functions: &[(&str, &Builder)]) -> proto::Model {
    let described = |(name, b): &(&str, &Builder)| proto::FunctionDescription {
        name: (*name).into(),
        ..b.described.clone()
    };
    proto::Model {
        specification_version: 9,
        description: Some(proto::ModelDescription {
            functions: functions.iter().map(described).collect(),
            default_function_name: functions[0].0.into(),
            metadata: Some(proto::Metadata {
                short_description: "a test".into(),
                version: "1".into(),
                author: "a test".into(),
                license: "none".into(),
            }),
            ..Default::default()
        }),
        ml_program: Some(proto::Program {
            version: 1,
            functions: functions.iter().map(|(n, b)| ((*n).to_owned(), b.function())).collect(),
        }),
    }
}

/// A package in a temporary folder.
pub(crate) struct Saved(TempDir);

impl Saved {
    pub(crate) fn new(model: &proto::Model, weights: &[u8]) -> Self {
        let saved = Self(tempfile::tempdir().expect("a folder"));
        fs::create_dir_all(saved.path().join(WEIGHTS).parent().expect("a folder")).expect("made");
        saved.write("Manifest.json", MANIFEST.as_bytes());
        saved.write(MODEL, &model.encode_to_vec());
        saved.write(WEIGHTS, weights);
        saved
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.0.path().to_path_buf()
    }

    pub(crate) fn write(&self, file: &str, bytes: &[u8]) {
        fs::write(self.0.path().join(file), bytes).expect("written");
    }

    /// Opens the package as part of a bundle whose manifest has another hash for this file.
    pub(crate) fn open_changed(&self, file: &str) -> Result<Package, PackageError> {
        let bytes = fs::metadata(self.0.path().join(file)).expect("there").len();
        let listed = [FileRef { path: file.to_owned(), bytes, sha256: [0; 32] }];
        Package::open(&BundleReader::of_manifest(self.0.path(), &listed, CheckLevel::Small))
    }

    pub(crate) fn open(&self) -> Result<Package, PackageError> {
        Package::open(&BundleReader::unchecked(self.0.path()))
    }
}

/// Folder of the golden packages.
pub(crate) fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../golden/coreml")
}

/// A tensor of a type, from numbers.
pub(crate) fn tensor(ty: &TensorType, values: &[f32]) -> Tensor {
    let data = match ty.dtype {
        Dtype::F16 => Data::F16(values.iter().map(|&x| f16::from_f32(x)).collect()),
        Dtype::F32 => Data::F32(values.to_vec()),
        _ => Data::I32(values.iter().map(|&x| x as i32).collect()),
    };
    Tensor::new(&ty.shape, data).expect("as many numbers as places")
}

/// Runs the default function once.
pub(crate) fn run(
    package: &Arc<Package>,
    inputs: &[(&str, Tensor)],
) -> Result<BTreeMap<String, Tensor>, ExecError> {
    let inputs = inputs.iter().map(|(n, t)| ((*n).to_owned(), t.clone())).collect();
    Executor::new(package, None)?.run(&inputs, &mut States::default())
}

/// Runs one operator on an fp16 input `x`; returns its only result, of shape `shape`.
pub(crate) fn eval(
    kind: &str,
    (x_shape, x): (&[usize], &[f32]),
    args: &[(&str, Arg)],
    shape: &[usize],
) -> Result<Vec<f32>, ExecError> {
    let (from, to) = (ty(Dtype::F16, x_shape), ty(Dtype::F16, shape));
    let args = [&[("x", name("x"))], args].concat();
    let package =
        Builder::default().input("x", &from).op(kind, &args, &[("y", to.clone())]).output("y", &to).open();
    Ok(run(&package, &[("x", tensor(&from, x))])?["y"].to_f32())
}
