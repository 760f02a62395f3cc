//! Reading context binaries: for which chip they are, which graphs they hold.

use super::loaded::{SharedLibrary, text};
use super::log::CallGuard;
use crate::abi::{self, Handle, SYSTEM_PROVIDERS, SystemProvider, SystemTable, Tensor, Version};
use crate::error::{Error, Result};
use crate::find::{Installation, SYSTEM};
use crate::graph::{DType, Quant};
use crate::soc::Soc;
use bincode::{Decode, Encode};
use std::ptr;

/// Maximum number of tensors of a graph, and of graphs of a context, since the counts come from an untrusted
/// file.
const MOST: u32 = 1 << 16;
/// Most dimensions of a tensor.
const RANK_MOST: u32 = 8;
/// Version of the operating system interface that 2.51 has, and whose structures are declared in `abi`.
/// Arrays of them are walked, so that another one, where they may be longer, is refused.
const API: (u32, u32) = (1, 15);

/// The part of the library that reads files.
#[derive(Debug)]
pub struct System {
    lib: SharedLibrary,
    table: SystemTable,
}

impl std::fmt::Debug for SystemTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SystemTable")
    }
}

/// A tensor that the caller writes or reads, as described in a file.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct TensorInfo {
    /// The library's number of it.
    pub(crate) id: u32,
    /// Name.
    pub name: String,
    /// Number of its type in `Qnn_DataType_t`.
    pub code: u32,
    /// Sizes, outermost first.
    pub dims: Vec<u32>,
    /// Values of its stored numbers; [`Quant::None`] where it has a scale for each channel, which none of
    /// moec's ports has.
    pub quant: Quant,
}

impl TensorInfo {
    /// Type of its elements.
    ///
    /// # Errors
    /// [`Error::Binary`] if moec does not know its form.
    pub fn dtype(&self) -> Result<DType> {
        DType::of_code(self.code).ok_or_else(|| Error::Binary {
            what: format!("tensor `{}`", self.name),
            why: format!("its type is {:#x}", self.code),
        })
    }

    /// Bytes of its elements.
    ///
    /// # Errors
    /// [`Error::Binary`] if its type is unknown, or they are too many.
    pub fn bytes(&self) -> Result<usize> {
        let width = self.dtype()?.bytes();
        let bytes = self.dims.iter().try_fold(width, |n, &dim| n.checked_mul(dim as usize));
        bytes.filter(|&n| u32::try_from(n).is_ok()).ok_or_else(|| Error::Binary {
            what: format!("tensor `{}`", self.name),
            why: "it has 4 GiB or more".into(),
        })
    }
}

/// A graph, as described in a file.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct GraphInfo {
    /// Name.
    pub name: String,
    /// Tensors that the caller writes.
    pub inputs: Vec<TensorInfo>,
    /// Tensors that the caller reads.
    pub outputs: Vec<TensorInfo>,
}

/// Description of a context binary by itself.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct BinaryInfo {
    /// Version of this description: 1, 2 or 3.
    pub version: u32,
    /// Version of the library that wrote it.
    pub build: String,
    /// Number of the chip that it is for; none before the description's third version.
    pub soc_model: Option<u32>,
    /// The chip in the library's words; often empty.
    pub soc: String,
    /// Bytes of the backend's own part.
    pub blob: u64,
    /// Its graphs, in an order of the library's.
    pub graphs: Vec<GraphInfo>,
}

impl BinaryInfo {
    /// The graph of that name.
    pub fn graph(&self, name: &str) -> Option<&GraphInfo> {
        self.graphs.iter().find(|graph| graph.name == name)
    }

    /// Checks that the binary is for this chip.
    ///
    /// # Errors
    /// [`Error::Soc`] if it is for another chip, [`Error::Binary`] if it names none.
    pub fn expect(&self, soc: Soc) -> Result<()> {
        match self.soc_model {
            Some(model) if model == soc.model => Ok(()),
            Some(found) => Err(Error::Soc { found, soc: soc.name.into(), expected: soc.model }),
            None => Err(broken("it does not name its chip")),
        }
    }
}

fn broken(why: impl Into<String>) -> Error {
    Error::Binary { what: "context binary".into(), why: why.into() }
}

impl System {
    /// Loads the library.
    ///
    /// # Errors
    /// Fails if it cannot be loaded, or has another version.
    pub fn open(installation: &Installation) -> Result<Self> {
        let lib = SharedLibrary::open(&installation.file(SYSTEM))?;
        // SAFETY: the function of this name gives these structures, by QNN's documentation.
        let offered = unsafe { lib.interfaces::<SystemProvider>(SYSTEM_PROVIDERS)? };
        let found = offered.into_iter().find(|&p| {
            // SAFETY: they begin as declared, with the version before the table.
            let Version { major, minor, .. } = unsafe { (*p).version };
            (major, minor) == API
        });
        match found {
            // SAFETY: a table of this version has the functions that are declared.
            Some(found) => Ok(Self { lib, table: unsafe { (*found).table } }),
            None => Err(lib.unexpected(format!("it has no interface of version {}.{}", API.0, API.1))),
        }
    }

    pub(super) fn table(&self) -> &SystemTable {
        &self.table
    }

    pub(super) fn missing_function(&self, name: &str) -> Error {
        self.lib.unexpected(format!("its interface has no `{name}`"))
    }

    /// Description of a context binary by itself.
    ///
    /// # Errors
    /// [`Error::Binary`] if it is invalid.
    pub fn binary_info(&self, bytes: &[u8]) -> Result<BinaryInfo> {
        let (Some(create), Some(info), Some(free)) =
            (self.table.context_create, self.table.context_binary_info, self.table.context_free)
        else {
            return Err(self.missing_function("systemContextGetBinaryInfo"));
        };
        let calling = CallGuard::begin();
        let mut handle: Handle = ptr::null_mut();
        // SAFETY: `handle` is written.
        let status = unsafe { create(&raw mut handle) };
        if status != 0 {
            return Err(broken(format!("there is no reader (code {status})")));
        }
        // The library takes an address that it could write to.
        let mut bytes = bytes.to_vec();
        let (mut found, mut len) = (ptr::null(), 0);
        // SAFETY: the bytes are there until the call returns; `found` and `len` are written.
        let status = unsafe {
            info(handle, bytes.as_mut_ptr().cast(), bytes.len() as u64, &raw mut found, &raw mut len)
        };
        let read = if status != 0 || found.is_null() {
            let context = calling.message_suffix();
            Err(broken(format!("QNN does not recognise it (code {status}){context}")))
        } else {
            // SAFETY: the description lives until the reader is freed, and has the version that it states.
            unsafe { describe(&*found) }
        };
        // SAFETY: the reader was created above; nothing borrowed of it is left.
        unsafe { free(handle) };
        read
    }
}

/// Copies a description.
///
/// # Safety
/// The description is the library's, of the version that it states.
unsafe fn describe(info: &abi::BinaryInfo) -> Result<BinaryInfo> {
    // SAFETY: the version selects the member of the union; the first member is the beginning of the second.
    unsafe {
        let (head, blob, graphs, count, soc_model) = match info.version {
            1 | 2 => {
                let v1 = info.of.v1;
                (v1.head, v1.blob_len, v1.graphs, v1.graph_count, None)
            }
            3 => {
                let v3 = info.of.v3;
                (v3.head, v3.blob_len, v3.graphs, v3.graph_count, Some(v3.soc_model))
            }
            other => return Err(broken(format!("its description is of version {other}"))),
        };
        if count > MOST || (count > 0 && graphs.is_null()) {
            return Err(broken(format!("it has {count} graphs")));
        }
        let graphs = (0..count as usize).map(|i| graph(&*graphs.add(i))).collect::<Result<_>>()?;
        Ok(BinaryInfo {
            version: info.version,
            build: text(head.build).unwrap_or_default(),
            soc_model,
            soc: text(head.soc).unwrap_or_default(),
            blob,
            graphs,
        })
    }
}

/// Copies a graph's description.
///
/// # Safety
/// The description is the library's; all versions have the same beginning.
pub(super) unsafe fn graph(info: &abi::GraphInfo) -> Result<GraphInfo> {
    // SAFETY: the caller's; the texts and arrays are the library's own.
    unsafe {
        Ok(GraphInfo {
            name: text(info.name).ok_or_else(|| broken("a graph has no name"))?,
            inputs: tensors(info.inputs, info.input_count)?,
            outputs: tensors(info.outputs, info.output_count)?,
        })
    }
}

/// Copies tensors' descriptions.
///
/// # Safety
/// They are an array of the library's, of that length.
unsafe fn tensors(list: *const Tensor, count: u32) -> Result<Vec<TensorInfo>> {
    if count > MOST || (count > 0 && list.is_null()) {
        return Err(broken(format!("a graph has {count} tensors")));
    }
    // SAFETY: promised by the caller; both versions of a tensor have the same beginning.
    (0..count as usize).map(|i| unsafe { tensor(&*list.add(i)) }).collect()
}

/// Copies a tensor's description.
///
/// # Safety
/// It is the library's.
unsafe fn tensor(tensor: &Tensor) -> Result<TensorInfo> {
    if !matches!(tensor.version, abi::TENSOR_V1 | abi::TENSOR_V2) {
        return Err(broken(format!("a tensor is of version {}", tensor.version)));
    }
    let v1 = &tensor.v1;
    if v1.rank > RANK_MOST || (v1.rank > 0 && v1.dims.is_null()) {
        return Err(broken(format!("a tensor has {} dimensions", v1.rank)));
    }
    // SAFETY: the sizes are an array of the library's, as long as the rank; the encoding selects the member
    // of the union.
    unsafe {
        let dims = (0..v1.rank as usize).map(|i| *v1.dims.add(i)).collect();
        let quant = match (v1.quantize.definition, v1.quantize.encoding) {
            (abi::DEFINED, abi::SCALE_OFFSET) => {
                let abi::ScaleOffset { scale, offset } = v1.quantize.params.tensor;
                Quant::Tensor { scale, offset }
            }
            (abi::DEFINED, abi::BITS_SCALE_OFFSET) => {
                let abi::BitsScaleOffset { scale, offset, .. } = v1.quantize.params.bits;
                Quant::Tensor { scale, offset }
            }
            _ => Quant::None,
        };
        let name = text(v1.name).unwrap_or_default();
        Ok(TensorInfo { id: v1.id, name, code: v1.dtype, dims, quant })
    }
}
