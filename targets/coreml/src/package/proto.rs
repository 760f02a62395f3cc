//! The part of Core ML's model format that moec reads, as protobuf messages.
//!
//! Names and field numbers are those of `Model.proto`, `FeatureTypes.proto` and `MIL.proto`, which Apple
//! publishes with coremltools. Fields that are left out here are skipped by the decoder.

use std::collections::BTreeMap;

/// `Model`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Model {
    /// Version of the format; 9 is iOS 18 and macOS 15.
    #[prost(int32, tag = "1")]
    pub specification_version: i32,
    /// Interface of the model.
    #[prost(message, optional, tag = "2")]
    pub description: Option<ModelDescription>,
    /// The program, where the model is one.
    #[prost(message, optional, tag = "502")]
    pub ml_program: Option<Program>,
}

/// `ModelDescription`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ModelDescription {
    /// Inputs of a model of one function.
    #[prost(message, repeated, tag = "1")]
    pub input: Vec<FeatureDescription>,
    /// Outputs of a model of one function.
    #[prost(message, repeated, tag = "10")]
    pub output: Vec<FeatureDescription>,
    /// States of a model of one function.
    #[prost(message, repeated, tag = "13")]
    pub state: Vec<FeatureDescription>,
    /// Description for people.
    #[prost(message, optional, tag = "100")]
    pub metadata: Option<Metadata>,
    /// Interfaces of the functions, where there are several.
    #[prost(message, repeated, tag = "20")]
    pub functions: Vec<FunctionDescription>,
    /// The function that runs when none is named.
    #[prost(string, tag = "21")]
    pub default_function_name: String,
}

/// `Metadata`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Metadata {
    /// Description.
    #[prost(string, tag = "1")]
    pub short_description: String,
    /// Version.
    #[prost(string, tag = "2")]
    pub version: String,
    /// Author.
    #[prost(string, tag = "3")]
    pub author: String,
    /// License.
    #[prost(string, tag = "4")]
    pub license: String,
}

/// `FunctionDescription`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct FunctionDescription {
    /// Name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Inputs.
    #[prost(message, repeated, tag = "2")]
    pub input: Vec<FeatureDescription>,
    /// Outputs.
    #[prost(message, repeated, tag = "3")]
    pub output: Vec<FeatureDescription>,
    /// States.
    #[prost(message, repeated, tag = "6")]
    pub state: Vec<FeatureDescription>,
}

/// `FeatureDescription`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct FeatureDescription {
    /// Name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Description.
    #[prost(string, tag = "2")]
    pub short_description: String,
    /// Type.
    #[prost(message, optional, tag = "3")]
    pub r#type: Option<FeatureType>,
}

/// `FeatureType`: arrays and states alone.
#[derive(Clone, PartialEq, prost::Message)]
pub struct FeatureType {
    /// `multiArrayType`.
    #[prost(message, optional, tag = "5")]
    pub multi_array: Option<ArrayFeatureType>,
    /// `stateType`.
    #[prost(message, optional, tag = "8")]
    pub state: Option<StateFeatureType>,
    /// Whether the feature may be absent.
    #[prost(bool, tag = "1000")]
    pub is_optional: bool,
}

/// `StateFeatureType`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct StateFeatureType {
    /// Contents of the state.
    #[prost(message, optional, tag = "1")]
    pub array: Option<ArrayFeatureType>,
}

/// `ArrayFeatureType`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ArrayFeatureType {
    /// Shape.
    #[prost(int64, repeated, tag = "1")]
    pub shape: Vec<i64>,
    /// `ArrayDataType`: 65568 f32, 65600 f64, 131104 i32, 65552 f16, 131080 i8.
    #[prost(int32, tag = "2")]
    pub data_type: i32,
    /// Alternatives to the shape.
    #[prost(message, optional, tag = "21")]
    pub enumerated_shapes: Option<Flexible>,
    /// Ranges of the shape.
    #[prost(message, optional, tag = "31")]
    pub shape_range: Option<Flexible>,
}

/// A message of which only the presence matters.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct Flexible {}

/// `MILSpec.Program`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Program {
    /// Version; 1.
    #[prost(int64, tag = "1")]
    pub version: i64,
    /// Functions by name.
    #[prost(btree_map = "string, message", tag = "2")]
    pub functions: BTreeMap<String, Function>,
}

/// `MILSpec.Function`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Function {
    /// Inputs, states among them.
    #[prost(message, repeated, tag = "1")]
    pub inputs: Vec<NamedValueType>,
    /// Name of the block that is meant.
    #[prost(string, tag = "2")]
    pub opset: String,
    /// Bodies by operator set.
    #[prost(btree_map = "string, message", tag = "3")]
    pub block_specializations: BTreeMap<String, Block>,
}

/// `MILSpec.Block`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Block {
    /// Inputs of a nested block.
    #[prost(message, repeated, tag = "1")]
    pub inputs: Vec<NamedValueType>,
    /// Names of the values that it returns.
    #[prost(string, repeated, tag = "2")]
    pub outputs: Vec<String>,
    /// Operations, in order.
    #[prost(message, repeated, tag = "3")]
    pub operations: Vec<Operation>,
}

/// `MILSpec.Operation`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Operation {
    /// Name of the operator.
    #[prost(string, tag = "1")]
    pub r#type: String,
    /// Arguments by parameter.
    #[prost(btree_map = "string, message", tag = "2")]
    pub inputs: BTreeMap<String, Argument>,
    /// Results.
    #[prost(message, repeated, tag = "3")]
    pub outputs: Vec<NamedValueType>,
    /// Nested blocks, of control flow.
    #[prost(message, repeated, tag = "4")]
    pub blocks: Vec<Block>,
    /// `name`, `val` of a constant, and parameters of iOS 16 `constexpr` operators.
    #[prost(btree_map = "string, message", tag = "5")]
    pub attributes: BTreeMap<String, Value>,
}

/// `MILSpec.Argument`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Argument {
    /// One value, or the elements of a tuple.
    #[prost(message, repeated, tag = "1")]
    pub arguments: Vec<Binding>,
}

/// `MILSpec.Argument.Binding`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Binding {
    /// Binding.
    #[prost(oneof = "Bound", tags = "1, 2")]
    pub binding: Option<Bound>,
}

/// Binding of an argument.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum Bound {
    /// An earlier value.
    #[prost(string, tag = "1")]
    Name(String),
    /// A constant.
    #[prost(message, tag = "2")]
    Value(Value),
}

/// `MILSpec.NamedValueType`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct NamedValueType {
    /// Name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Type.
    #[prost(message, optional, tag = "2")]
    pub r#type: Option<ValueType>,
}

/// `MILSpec.ValueType`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ValueType {
    /// Type.
    #[prost(oneof = "Kind", tags = "1, 2, 3, 4, 5")]
    pub kind: Option<Kind>,
}

/// Types; those that moec does not read are kept without contents.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum Kind {
    /// A tensor, or a scalar of rank 0.
    #[prost(message, tag = "1")]
    Tensor(TensorType),
    /// A list.
    #[prost(message, tag = "2")]
    List(Flexible),
    /// A tuple.
    #[prost(message, tag = "3")]
    Tuple(Flexible),
    /// A dictionary.
    #[prost(message, tag = "4")]
    Dictionary(Flexible),
    /// A state.
    #[prost(message, tag = "5")]
    State(Box<StateType>),
}

/// `MILSpec.StateType`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct StateType {
    /// Contents of the state.
    #[prost(message, optional, tag = "1")]
    pub wrapped: Option<ValueType>,
}

/// `MILSpec.TensorType`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TensorType {
    /// `DataType`.
    #[prost(int32, tag = "1")]
    pub data_type: i32,
    /// Number of dimensions.
    #[prost(int64, tag = "2")]
    pub rank: i64,
    /// Dimensions.
    #[prost(message, repeated, tag = "3")]
    pub dimensions: Vec<Dimension>,
}

/// `MILSpec.Dimension`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Dimension {
    /// Known size.
    #[prost(message, optional, tag = "1")]
    pub constant: Option<ConstantDimension>,
}

/// `MILSpec.Dimension.ConstantDimension`.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct ConstantDimension {
    /// Size.
    #[prost(uint64, tag = "1")]
    pub size: u64,
}

/// `MILSpec.Value`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Value {
    /// Type.
    #[prost(message, optional, tag = "2")]
    pub r#type: Option<ValueType>,
    /// Place of the value.
    #[prost(oneof = "StoredValue", tags = "3, 5")]
    pub held: Option<StoredValue>,
}

/// Place of a value.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum StoredValue {
    /// In the model itself.
    #[prost(message, tag = "3")]
    Immediate(ImmediateValue),
    /// In a weight file.
    #[prost(message, tag = "5")]
    Blob(BlobFileValue),
}

/// `MILSpec.Value.ImmediateValue`: tensors alone.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ImmediateValue {
    /// The tensor.
    #[prost(message, optional, tag = "1")]
    pub tensor: Option<TensorValue>,
}

/// `MILSpec.Value.BlobFileValue`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct BlobFileValue {
    /// File, with `@model_path/` for the folder of the model.
    #[prost(string, tag = "1")]
    pub file_name: String,
    /// Offset of the blob's metadata, in bytes.
    #[prost(uint64, tag = "2")]
    pub offset: u64,
}

/// `MILSpec.TensorValue`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TensorValue {
    /// The elements.
    #[prost(oneof = "Elements", tags = "1, 2, 3, 4, 5, 6, 7")]
    pub elements: Option<Elements>,
}

/// Elements of a tensor.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum Elements {
    /// f32.
    #[prost(message, tag = "1")]
    Floats(Floats),
    /// i32, and the 16-bit integers.
    #[prost(message, tag = "2")]
    Ints(Ints),
    /// Booleans.
    #[prost(message, tag = "3")]
    Bools(Bools),
    /// Strings.
    #[prost(message, tag = "4")]
    Strings(Strings),
    /// i64 and u64.
    #[prost(message, tag = "5")]
    LongInts(LongInts),
    /// f64.
    #[prost(message, tag = "6")]
    Doubles(Doubles),
    /// f16 and the small integers, little-endian.
    #[prost(message, tag = "7")]
    Bytes(Bytes),
}

/// `RepeatedFloats`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Floats {
    /// Elements.
    #[prost(float, repeated, tag = "1")]
    pub values: Vec<f32>,
}

/// `RepeatedInts`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Ints {
    /// Elements.
    #[prost(int32, repeated, tag = "1")]
    pub values: Vec<i32>,
}

/// `RepeatedBools`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Bools {
    /// Elements.
    #[prost(bool, repeated, tag = "1")]
    pub values: Vec<bool>,
}

/// `RepeatedStrings`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Strings {
    /// Elements.
    #[prost(string, repeated, tag = "1")]
    pub values: Vec<String>,
}

/// `RepeatedLongInts`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct LongInts {
    /// Elements.
    #[prost(int64, repeated, tag = "1")]
    pub values: Vec<i64>,
}

/// `RepeatedDoubles`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Doubles {
    /// Elements.
    #[prost(double, repeated, tag = "1")]
    pub values: Vec<f64>,
}

/// `RepeatedBytes`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Bytes {
    /// Elements.
    #[prost(bytes = "vec", tag = "1")]
    pub values: Vec<u8>,
}
