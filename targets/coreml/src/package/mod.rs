//! Reading `.mlpackage` folders.
//!
//! A package is `Manifest.json`, a model in protobuf and weight files. [`Package::open`] reads them back into
//! a typed [`Program`]. Nothing in a package is trusted: paths stay in its folder, names are resolved, shapes
//! are fixed and bounded, every weight's metadata agrees with the model, and sizes are limited. Weights are
//! mapped, not copied.
//!
//! The message types of [`proto`] also serve programs that write models.

mod constant;
mod error;
mod manifest;
mod program;
pub mod proto;
mod resolve;
mod types;
mod weights;

pub use constant::{Constant, Stored};
pub use error::{Flaw, PackageError, Place};
pub use program::{Feature, Function, Op, Origin, Program, Signature, Value, ValueId};
pub use resolve::{MAX_ARGS, MAX_FUNCTIONS, MAX_OPS};
pub use types::{Dtype, MAX_ELEMENTS, MAX_RANK, TensorType, elements};
pub use weights::{ALIGN, Blob, Weights};

use moec_runtime::bundle::BundleReader;
use prost::Message;
use std::sync::Arc;

/// Largest model that is read, in bytes. Decoded messages take some 100 times the space of the smallest
/// encoding, hence the limit; a model with its weights in files has some hundred bytes per operation.
pub const MAX_MODEL_BYTES: u64 = 16 << 20;

/// Description of a package for people; empty if it has none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct About {
    /// Description.
    pub description: String,
    /// Author.
    pub author: String,
    /// Licence.
    pub license: String,
    /// Version.
    pub version: String,
}

/// An opened package.
#[derive(Debug)]
pub struct Package {
    /// The program.
    pub program: Program,
    /// Its weight files.
    pub weights: Weights,
    /// Description for people.
    pub about: About,
    /// Version of the format that the model states; 9 is iOS 18 and macOS 15.
    pub specification_version: i32,
}

impl Package {
    /// Opens a `.mlpackage` folder.
    ///
    /// # Errors
    /// [`PackageError`] if it cannot be read, differs from the build, is damaged, leaves the folder, exceeds
    /// a limit, or is not an ML program of tensors of fixed shapes.
    pub fn open(package: &BundleReader) -> Result<Self, PackageError> {
        let name = manifest::model(package)?;
        let bytes = weights::read(package, &name, MAX_MODEL_BYTES)?;
        let file = package.folder().join(&name);
        let model = proto::Model::decode(bytes.as_slice())
            .map_err(|source| PackageError::Decode { path: file.clone(), source })?;
        drop(bytes);
        let mut weights = Weights::new(package, name.rsplit_once('/').map_or("", |(folder, _)| folder));
        let program = resolve::program(&model, &mut weights).map_err(|(place, flaw)| {
            PackageError::Model { path: file.clone(), place, flaw: Box::new(flaw) }
        })?;
        let metadata = model.description.and_then(|d| d.metadata).unwrap_or_default();
        let about = About {
            description: metadata.short_description,
            author: metadata.author,
            license: metadata.license,
            version: metadata.version,
        };
        Ok(Self { program, weights, about, specification_version: model.specification_version })
    }

    /// The function of that name, or the default one.
    pub fn function(&self, name: Option<&str>) -> Option<&Function> {
        self.program.functions.get(name.unwrap_or(&self.program.default_function)).map(Arc::as_ref)
    }
}
